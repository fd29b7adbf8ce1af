"""Runs an engine program for a test: real or stand-in, on a free port, ended at the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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

    def wait_ready(self, timeout_s: float = 60.0) -> Server:
        """Return when `/health` is 200; fail if the process ends first."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self._last_words()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=1.0).status_code == httpx.codes.OK:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        text = self.log_text()
        return text if len(text) < 4000 else f"{text[:2000]}\n...\n{text[-2000:]}"

    def wait_ended(self, timeout_s: float = 30.0) -> int:
        """The exit status; minus the signal's number if one killed it."""
        return self.process.wait(timeout_s)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


def start(argv: Sequence[str], log: Path, *, port: int | None = None) -> Server:
    """Start a program with `--host` and `--port` added; the environment is empty but for PATH."""
    port = free_port() if port is None else port
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin"},
            cwd=log.parent,  # ik leaves a llama.log where it is started
        )
    return Server(process, port, log)


@contextmanager
def serving(argv: Sequence[str], log: Path) -> Iterator[Server]:
    """A server that is ready, for as long as the block lasts."""
    with start(argv, log) as server:
        yield server.wait_ready()
