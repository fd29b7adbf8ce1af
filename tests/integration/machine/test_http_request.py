"""What requests make of servers that answer well, badly, slowly or not at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support.ports import free_port
from tests.support.waiting import until
from tunerd.engine.health import HttpState
from tunerd.engine.server import MAX_REPLY_BYTES, Address, LlamaServer
from tunerd.machine.clock import SystemClock
from tunerd.machine.net import can_bind

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'
PATIENT_S = 20.0
HASTY_S = 0.3

Behaviour = Callable[[socket.socket], None]


@contextmanager
def listening(
    behave: Behaviour, host: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[LlamaServer, list[bytes]]]:
    """A server that hands each connection to `behave` after its request; and the requests."""
    requests: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    requests.append(client.recv(65536))
                    behave(client)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, port))
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()
        address = Address(host, listener.getsockname()[1], api_key="secret")
        yield LlamaServer(address, SystemClock()), requests
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def says(answer: bytes) -> Behaviour:
    return lambda client: client.sendall(answer)


def is_silent(client: socket.socket) -> None:
    client.recv(1)  # until the other side gives up


def test_a_whole_answer_is_read_and_the_key_was_sent() -> None:
    with listening(says(OK)) as (server, requests):
        reply = server.get("/slots", timeout_s=PATIENT_S)

    assert (reply.status, reply.body, reply.problem) == (200, {"status": "ok"}, None)
    assert requests[0].startswith(b"GET /slots HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in requests[0]


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_on_ipv6_is_reached(host: str) -> None:
    try:
        with listening(says(OK), "::1") as (server, requests):
            address = Address(host, server.address.port)
            found = LlamaServer(address, SystemClock()).health(timeout_s=PATIENT_S)
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")

    assert found is HttpState.READY
    assert f"Host: [::1]:{address.port}\r\n".encode() in requests[0]


def test_a_server_that_says_nothing_is_silent_after_the_limit() -> None:
    with listening(is_silent) as (server, _):
        assert server.health(timeout_s=HASTY_S) is HttpState.SILENT


def drips_without_end(start: bytes, piece: bytes) -> Behaviour:
    def behave(client: socket.socket) -> None:
        client.sendall(start)
        while True:
            client.sendall(piece)
            time.sleep(0.05)

    return behave


DRIPS = {
    "status": drips_without_end(b"H", b"T"),
    "body": drips_without_end(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
    "header": drips_without_end(b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "headers": drips_without_end(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "interim": drips_without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunk-size": drips_without_end(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
    "trailer": drips_without_end(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a"
    ),
}  # fmt: skip


@pytest.mark.parametrize("behave", DRIPS.values(), ids=DRIPS)
def test_one_limit_holds_for_every_part_of_an_answer(behave: Behaviour) -> None:
    """Each part comes quickly enough for any limit of a single read."""
    with listening(behave) as (server, _):
        assert server.get("/health", timeout_s=HASTY_S).timed_out
        assert server.complete("x", n_predict=2, timeout_s=HASTY_S).timed_out
        assert server.stream("/completion", {}, timeout_s=HASTY_S).timed_out
        assert server.metrics_text(timeout_s=HASTY_S) is None


def test_a_head_without_end_is_cut_off() -> None:
    def floods(client: socket.socket) -> None:
        while True:
            client.sendall(b"HTTP/1.1 100 Continue\r\nX: " + b"a" * 1000 + b"\r\n\r\n")

    with listening(floods) as (server, _):
        reply = server.get("/health", timeout_s=PATIENT_S)

    assert (reply.status, reply.timed_out) == (None, False)
    assert "no end" in (reply.problem or "")


def test_a_body_without_end_is_cut_off() -> None:
    sent = []

    def floods(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            client.sendall(bytes(1 << 20))
            sent.append(1 << 20)

    with listening(floods) as (server, _):
        reply = server.get("/slots", timeout_s=PATIENT_S)

    assert (reply.status, reply.body) == (200, None)
    assert "too large" in (reply.problem or "")
    assert sum(sent) < 4 * MAX_REPLY_BYTES, "what is beyond stands in the buffers of the sockets"


def test_a_body_that_comes_at_once_with_its_head_is_read() -> None:
    """Python 3.14 reads 128 KiB at once, and what a head may have counted for all of it."""
    body = json.dumps({"tokens": [107] * 20_000}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def answers(client: socket.socket) -> None:
        client.sendall(head + body)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):  # what is unread at the close would reset the connection
            pass

    with listening(answers) as (server, _):
        reply = server.post("/tokenize", {"content": "x"}, timeout_s=PATIENT_S)

    assert (reply.status, reply.problem) == (200, None)
    assert isinstance(reply.body, dict)
    assert len(reply.body["tokens"]) == 20_000


EVENT = b'data: {"content": "x", "stop": true}\n\n'
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(EVENT), EVENT)
)
# Its end is that of the connection, so that the server is sure to be the first who closes.
LOADING = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n{}"


def test_a_server_that_closes_first_leaves_its_port_to_any_other() -> None:
    """As ik does after a stream, and Debian's 0.7.0 while it loads; a port that is kept is kept for a minute."""
    answers = iter((CHUNKED, CHUNKED, LOADING))

    def closes_first(client: socket.socket) -> None:
        client.sendall(next(answers))
        client.shutdown(socket.SHUT_WR)

    with listening(closes_first, port=free_port()) as (asked, _):
        assert asked.stream("/completion", {"stream": True}, timeout_s=PATIENT_S).is_whole
        assert asked.post("/completion", {}, timeout_s=PATIENT_S).status == 200
        assert asked.health(timeout_s=PATIENT_S) is HttpState.LOADING
    until(lambda: can_bind("127.0.0.1", asked.address.port), "its port is free", 5.0)


@pytest.mark.parametrize(
    "answer",
    [b"", b"\r\n", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 many\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70000,
     b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1"],
)  # fmt: skip
def test_what_is_no_http_or_breaks_off_is_no_answer_even_if_it_is_json(answer: bytes) -> None:
    with listening(says(answer)) as (server, _):
        reply = server.get("/slots", timeout_s=PATIENT_S)

    assert (reply.status, reply.body, reply.timed_out) == (None, None, False)
    assert reply.problem


@pytest.mark.parametrize(
    "address",
    [
        Address("127.0.0.1", free_port()),
        Address("127.0.0.1", 99999),
        Address("no such host", 80),
        Address("127.0.0.1", 1, api_key="two\nlines"),
        Address("\u20ac" * 80, 80),
    ],
    ids=["nobody-listens", "no-port", "no-host", "no-header", "no-name"],
)
def test_a_server_that_cannot_be_asked_is_a_value_and_no_exception(address: Address) -> None:
    reply = LlamaServer(address, SystemClock()).get("/health", timeout_s=PATIENT_S)

    assert (reply.status, reply.body) == (None, None)
    assert reply.problem
