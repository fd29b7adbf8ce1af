"""The API's connections: clients that speak slowly, come in crowds, or speak no HTTP."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_box import running
from tunerd.machine.peers import unix_socket
from tunerd.web.app import ApiServer, Limits

LIMIT_S = 180.0
ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def well(scope: dict[str, Any], _receive: Any, send: Any) -> None:
    """An application that answers at once."""
    assert scope["tunerd.peer"] is not None
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def serving(folder: Path, limits: Limits) -> Iterator[Path]:
    path = folder / "sock"
    sockets = [unix_socket(path, group=None)]
    server = ApiServer(well, sockets, lambda _peer: True, limits)  # type: ignore[arg-type]
    with running(server):
        yield path


def connected(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(LIMIT_S)
    channel.connect(str(path))
    return channel


def answer(channel: socket.socket) -> bytes:
    channel.sendall(ASK)
    return channel.recv(4096).split(b"\r\n")[0]


def is_closed_while_dripping(channel: socket.socket, text: bytes) -> bool:
    """Send a byte now and then, and see whether the other end loses patience."""
    channel.setblocking(False)
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(BlockingIOError):
            if channel.recv(4096) == b"":
                return True
        try:
            channel.send(text)
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("head", [b"", ASK, ASK.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n")],
                         ids=["the first", "the second", "a body that nobody reads"])  # fmt: skip
def test_a_head_that_comes_byte_by_byte_or_not_at_all_is_not_waited_for(
    tmp_path: Path, head: bytes
) -> None:
    with (
        serving(tmp_path, Limits(head_s=3.0)) as path,
        connected(path) as slow,
        connected(path) as silent,
    ):
        if head:
            slow.sendall(head)
            assert b" 200 " in slow.recv(4096)
        assert is_closed_while_dripping(slow, b"G")
        assert silent.recv(1) == b""


def test_a_crowd_is_told_so_and_whoever_is_in_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(of_one=4)) as path, contextlib.ExitStack() as open_ones:
        first = [open_ones.enter_context(connected(path)) for _ in range(4)]
        assert all(b" 200 " in answer(one) for one in first)
        with connected(path) as one_more:
            assert b" 503 " in one_more.recv(4096)
        assert b" 200 " in answer(first[0])
        first[3].close()
        end_s = time.monotonic() + LIMIT_S
        while True:
            with connected(path) as next_one, contextlib.suppress(OSError):
                if b" 200 " in answer(next_one):
                    break
            assert time.monotonic() < end_s, "a place became free"
            time.sleep(0.1)


def test_what_is_no_http_writes_no_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, Limits()) as path:
        for _ in range(3):
            with connected(path) as channel:
                channel.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
                assert b" 400 " in channel.recv(4096)
    assert "".join(capfd.readouterr()) == ""
