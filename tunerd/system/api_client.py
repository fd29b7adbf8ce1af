"""Talks to the daemon through its socket: HTTP with the standard library alone."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.errors import HostError

_LIMIT_S = 240.0
_CONNECT_S = 10.0
_MAX_BYTES = 64 * 1024 * 1024
_HEADERS = {"Content-Type": "application/json", "X-Tunerd": "1"}


@dataclass(frozen=True, slots=True)
class ApiReply:
    """An envelope, with the exit code that the command would have had."""

    status: int
    exit_code: int
    envelope: Mapping[str, Any]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(_CONNECT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(_LIMIT_S)


class ApiClient:
    """The daemon behind a socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, url: str) -> ApiReply:
        """What a route says.

        Raises:
            HostError: nobody answers, or not in this language.
        """
        return self._ask("GET", url, None)

    def post(self, url: str, body: Mapping[str, Any]) -> ApiReply:
        """Ask for a change.

        Raises:
            HostError: as `get`.
        """
        return self._ask("POST", url, json.dumps(body))

    def events(self, url: str, *, after: int = 0) -> Iterator[Mapping[str, Any]]:
        """Server-sent events until the stream ends.

        Args:
            url: Of the stream.
            after: So many were seen before.

        Raises:
            HostError: as `get`; or the daemon went away, which the job outlives.
        """
        try:
            with closing(_Connection(self._path)) as connection:
                connection.request("GET", url, headers={"Last-Event-ID": str(after)})
                reply = connection.getresponse()
                while line := reply.readline():
                    if line.startswith(b"data: "):
                        yield json.loads(line.removeprefix(b"data: "))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def _ask(self, method: str, url: str, body: str | None) -> ApiReply:
        try:
            with closing(_Connection(self._path)) as connection:
                connection.request(method, url, body, _HEADERS if body is not None else {})
                reply = connection.getresponse()
                envelope = json.loads(reply.read(_MAX_BYTES))
                code = int(reply.getheader("x-tunerd-exit-code") or 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error
        return ApiReply(reply.status, code, envelope)

    def _silent(self, error: Exception) -> HostError:
        return HostError(
            "tunerd's daemon does not answer",
            cause=f"`{self._path}`: {getattr(error, 'strerror', None) or error}",
            hint="only root and members of group tunerd get in; `systemctl status tunerd` says more",
        )
