"""Starts a real llama-server, waits until it serves, and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_LOAD_S = 60.0
_STOP_S = 20.0
_PAUSE_S = 0.02
_OK = 200


class ServerEndedError(Exception):
    """The server ended before it served; `log` is what it wrote."""

    def __init__(self, status: int, log: str) -> None:
        super().__init__(f"exit status {status}: {log[-1500:]}")
        self.status = status
        self.log = log


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RealServer:
    """A running server; `program` is the argument list that starts it, without options.

    It runs in `folder`, since ik_llama.cpp leaves a log file in its working directory.
    """

    def __init__(
        self,
        program: Sequence[str],
        *options: str,
        folder: Path,
        headers: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._log_path = folder / f"server-{self.port}.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, *options, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd())),
                    **(environment or {}),
                },
            )
        # llama-server promises to keep the connection of a stream and closes it: no reuse.
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=30.0,
            headers=dict(headers or {}),
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log_path.read_text("utf-8", errors="replace")

    def wait_until_ready(self) -> None:
        """Return when /health says so; ServerEndedError if it ends before."""
        give_up = time.monotonic() + _LOAD_S
        while time.monotonic() < give_up:
            status = self.process.poll()
            if status is not None:
                raise ServerEndedError(status, self.log)
            try:
                if self.client.get("/health", timeout=1.0).status_code == _OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(_PAUSE_S)
        raise TimeoutError(self.log[-1500:])

    def post(self, route: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a request that must succeed."""
        reply = self.client.post(route, json=dict(body))
        assert reply.status_code == _OK, reply.text
        return reply.json()

    def get(self, route: str) -> Any:
        """The JSON answer of a route that must answer."""
        reply = self.client.get(route)
        assert reply.status_code == _OK, reply.text
        return reply.json()

    def stop(self) -> int:
        """Ask it to end; its exit status."""
        self.client.close()
        self.process.terminate()
        return self.process.wait(_STOP_S)

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self._kill()

    def _kill(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_STOP_S)
