"""Requests of tunerd leave no connection behind that would keep a server's port from the next one."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.server_process import serving
from tunerd.core.designed import SHAPES, design
from tunerd.system.clock import SystemClock
from tunerd.system.designed_file import write
from tunerd.system.llama import Address, LlamaServer
from tunerd.system.ports import can_bind, free_port

IK = "ik-2026-08"
_LIMIT_S = 5.0  # a port that is kept is kept for a minute
_EVENT = b'data: {"content": "x", "stop": true}\n\n'
_CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(_EVENT), _EVENT)
)


def answers_and_closes(listener: socket.socket, count: int) -> None:
    """What ik does after a stream: it closes first."""
    for _ in range(count):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(_CHUNKED)
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
        server = threading.Thread(target=answers_and_closes, args=(listener, 2), daemon=True)
        server.start()
        asked = LlamaServer(Address("127.0.0.1", port), SystemClock())
        streamed = asked.stream("/completion", {"stream": True}, timeout_s=_LIMIT_S)
        assert streamed.is_whole
        assert asked.post("/completion", {}, timeout_s=_LIMIT_S).status == 200
        server.join(_LIMIT_S)
    assert becomes_free(port)


@pytest.mark.engine
def test_ik_leaves_its_port_to_another_build_after_streams(tmp_path: Path) -> None:
    program = needs.engine(IK)
    model = tmp_path / "tiny.gguf"
    write(design(SHAPES["tiny"]), model)
    argv = (str(program), "-m", str(model), "-c", "512", "-t", "1")
    with serving(argv, tmp_path / "log") as server:
        asked = LlamaServer(Address("127.0.0.1", server.port), SystemClock())
        for _ in range(3):
            body = {"prompt": "go on", "n_predict": 8, "stream": True}
            assert asked.stream("/completion", body, timeout_s=60.0).is_whole
    assert becomes_free(server.port)
