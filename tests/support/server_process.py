"""Runs an engine program for a test: real or stand-in, on a free port, ended at the end."""

from __future__ import annotations

import re
import signal
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.folders import ROOT
from tests.support.ports import free_port
from tests.support.waiting import until

# `httpx.get` reads all certificates of this machine first: 16 ms of processor time for each request.
CLIENT = httpx.Client(
    transport=httpx.HTTPTransport(
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        limits=httpx.Limits(max_keepalive_connections=0),
        socket_options=[(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))],
    ),
    trust_env=False,
)
"""For plain HTTP, a connection for each request, which ends with a reset.

A server that loads closes first, and the kernel would keep its port from other programs for a minute.
"""
_TRIES = 10


class ServerEndedError(AssertionError):
    """The server ended before it served; `log` is what it wrote."""

    def __init__(self, status: int, log: str) -> None:
        shown = log if len(log) < 4000 else f"{log[:2000]}\n...\n{log[-2000:]}"
        super().__init__(f"ended with {status}:\n{shown}")
        self.status = status
        self.log = log


@dataclass
class Server:
    """A running engine; `log` holds standard output and error together."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_logged(self, pattern: str) -> re.Match[str]:
        """A thread of the server writes its log, on a busy machine after what it says was done."""
        found = until(lambda: re.search(pattern, self.log_text()), self.log_text)
        assert found is not None
        return found

    def wait_ready(self) -> Self:
        """Return when `/health` is 200; ServerEndedError if the process ends first."""

        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise ServerEndedError(self.process.returncode, self.log_text())
            with suppress(httpx.HTTPError):
                return self.reply("/health", timeout_s=1.0).status_code == httpx.codes.OK
            return False

        until(is_ready, self.log_text)
        return self

    def reply(self, route: str, *, timeout_s: float = 120.0) -> httpx.Response:
        """Whatever a route answers."""
        return CLIENT.get(f"{self.url}{route}", timeout=timeout_s)

    def get(self, route: str) -> Any:
        """The JSON answer of a route that must answer."""
        return _told(self.reply(route))

    def post(self, route: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a request that must succeed."""
        url = f"{self.url}{route}"
        return _told(CLIENT.post(url, json=dict(body), timeout=300.0))

    def wait_ended(self) -> int:
        """The exit status; minus the signal's number if one killed it."""
        return self.process.wait(120.0)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


def _told(reply: httpx.Response) -> Any:
    assert reply.status_code == httpx.codes.OK, reply.text
    return reply.json()


def start(
    argv: Sequence[str],
    log: Path,
    *,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start a program with `--host` and `--port` added; the environment is empty but for PATH."""
    port = free_port() if port is None else port
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", **(environment or {})},
            cwd=log.parent,  # ik leaves a llama.log where it is started
        )
    return Server(process, port, log)


def ended(
    argv: Sequence[str],
    log: Path,
    words: str,
    *,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit status and log of a program that ends by itself and says these words (a pattern) before.

    A thread of it writes the log, and its exit does not wait for that: on a busy machine the reason was
    missing from 8 of 40 logs of mainline. So it is started again where it is.
    """
    for _ in range(_TRIES):
        with start(argv, log, port=port, environment=environment) as server:
            status, text = server.wait_ended(), server.log_text()
        if re.search(words, text):
            return status, text
    raise AssertionError(f"ended with {status}, without {words} in:\n{text[-4000:]}")


@contextmanager
def serving(
    argv: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server that is ready, for as long as the block lasts; `tunerd.tryout.embedded` is one too."""
    own = {"PYTHONPATH": str(ROOT), **(environment or {})}
    with start(argv, log, environment=own) as server:
        yield server.wait_ready()
