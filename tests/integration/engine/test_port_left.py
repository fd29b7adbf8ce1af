"""Requests of tunerd leave no connection behind that would keep a server's port from the next one."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.support.ports import free_port
from tunerd.engine.health import HttpState
from tunerd.engine.server import Address, LlamaServer
from tunerd.machine.clock import SystemClock
from tunerd.machine.net import can_bind

_LIMIT_S = 5.0  # a port that is kept is kept for a minute
_EVENT = b'data: {"content": "x", "stop": true}\n\n'
_CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(_EVENT), _EVENT)
)
# Its end is that of the connection, so that the server is sure to be the first who closes.
_LOADING = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n{}"


def answers_and_closes(listener: socket.socket, *answers: bytes) -> None:
    """What ik does after a stream, and Debian's 0.7.0 while it loads: it closes first."""
    for answer in answers:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)
            with contextlib.suppress(OSError):  # whoever has read all of it may be gone already
                connection.shutdown(socket.SHUT_WR)


def becomes_free(port: int) -> bool:
    clock = SystemClock()
    end_s = clock.monotonic_s() + _LIMIT_S
    while not can_bind("127.0.0.1", port):
        if clock.monotonic_s() > end_s:
            return False
        clock.sleep(0.05)
    return True


def test_a_server_that_closes_first_leaves_its_port_to_any_other() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listener:
        answers = (listener, _CHUNKED, _CHUNKED, _LOADING)
        server = threading.Thread(target=answers_and_closes, args=answers, daemon=True)
        server.start()
        asked = LlamaServer(Address("127.0.0.1", port), SystemClock())
        streamed = asked.stream("/completion", {"stream": True}, timeout_s=_LIMIT_S)
        assert streamed.is_whole
        assert asked.post("/completion", {}, timeout_s=_LIMIT_S).status == 200
        assert asked.health(timeout_s=_LIMIT_S) is HttpState.LOADING
        server.join(_LIMIT_S)
    assert becomes_free(port)
