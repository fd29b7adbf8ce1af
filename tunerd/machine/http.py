"""One request over plain HTTP with the standard library alone: everything that tunerd asks a server.

What limits a request is one point in time, from connecting to the last byte: a limit of each read is
none, for whoever sends a byte a second. Importing httpx would also take a quarter of the 200 ms of CPU
that `tunerd status` has for everything.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tunerd.machine.clock import Clock


_CONNECT_LIMIT_S = 2.0
_LOOK_S = 2.0
_PIECE_BYTES = 64 * 1024
_MOST_HEAD_BYTES = 16 * 1024
# Python 3.14's own buffers take 128 KiB at once: a body that came with its head would count as head.
_BUFFER_BYTES = 8 * 1024
# Closed with a reset. Who closes first is remembered for a minute (TIME_WAIT), in which no other build can
# bind the port, and servers do close first: ik after a stream, mainline while it loads. A reset ends it
# there and then.
_FORGOTTEN = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class NoAnswerInTimeError(Exception):
    """The time was up before the answer was whole."""


class NoAnswerError(Exception):
    """There was no answer, or none that is HTTP; the text says why."""


class HttpRequest:
    """One request and its answer, on a connection of its own that is not used again.

    Redirects are not followed, proxies not used. All that talks to the server raises
    `NoAnswerInTimeError` or `NoAnswerError`.

    Args:
        where: Host and port, or the path of a Unix socket.
        timeout_s: Until the last byte.
        clock: What time is read from.
        gives_up: Asked every few seconds as long as nothing of the answer's body has come, whether that
            is waited for any longer.
    """

    def __init__(
        self,
        where: tuple[str, int] | Path,
        *,
        timeout_s: float,
        clock: Clock,
        gives_up: Callable[[], bool] | None = None,
    ) -> None:
        self._where = where
        self._gives_up = gives_up
        self._clock = clock
        self._deadline_s = clock.monotonic_s() + timeout_s
        self._socket: socket.socket | None = None
        self._answer: http.client.HTTPResponse | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._answer is not None:
            self._answer.close()
        if self._socket is not None:
            self._socket.close()

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> int:
        """Ask, and wait for the head of the answer: its status."""
        with _told():
            self._socket = self._connected()
            wire = _Wire(self._socket, self._left_s, self._is_given_up)
            host, port = ("localhost", None) if isinstance(self._where, Path) else self._where
            connection = http.client.HTTPConnection(host, port)  # composes it, and does not connect
            connection.sock = wire
            connection.request(method, path, body, dict(headers))
            self._answer = http.client.HTTPResponse(wire, method=method)  # type: ignore[arg-type]
            self._answer.begin()
            wire.head_left = None
        return self._answer.status

    def header(self, name: str) -> str | None:
        """A header of the answer."""
        return None if self._answer is None else self._answer.getheader(name)

    def pieces(self) -> Iterator[bytes]:
        """The body, as it arrives."""
        while piece := self._piece():
            self._gives_up = None
            yield piece
        # `read1` takes a connection that broke for the end of the body.
        if self._answer is not None and self._answer.length:
            raise NoAnswerError(f"the answer broke off, {self._answer.length} bytes are missing")

    def hang_up(self) -> None:
        """End it, from another thread too."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _piece(self) -> bytes:
        if self._answer is None:
            return b""
        with _told():
            return self._answer.read1(_PIECE_BYTES)

    def _connected(self) -> socket.socket:
        limit_s = min(self._left_s(), _CONNECT_LIMIT_S)
        if not isinstance(self._where, Path):
            found = socket.create_connection(self._where, limit_s)
            found.setsockopt(*_FORGOTTEN)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.settimeout(limit_s)
            found.connect(str(self._where))
        except BaseException:
            found.close()
            raise
        return found

    def _is_given_up(self) -> bool:
        return self._gives_up is not None and self._gives_up()

    def _left_s(self) -> float:
        left_s = self._deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class _Wire(io.RawIOBase):
    """What `http.client` takes for a socket: each read and write has only what is left of the time."""

    def __init__(
        self, connected: socket.socket, left_s: Callable[[], float], gives_up: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._socket = connected
        self._left_s = left_s
        self._gives_up = gives_up
        self.head_left: int | None = _MOST_HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n_bytes = self._received(buffer)
        if self.head_left is not None:
            self.head_left -= n_bytes
            if self.head_left < 0:
                raise http.client.HTTPException("the head of the answer has no end")
        return n_bytes

    def _received(self, buffer: Any) -> int:
        while True:
            self._socket.settimeout(min(self._left_s(), _LOOK_S))
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                if self._gives_up():
                    raise

    def sendall(self, content: bytes) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.sendall(content)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, _BUFFER_BYTES)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """The errors of sockets and of `http.client` as ours."""
    try:
        yield
    except TimeoutError as error:
        raise NoAnswerInTimeError from error
    except (http.client.HTTPException, OSError, OverflowError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise NoAnswerError(words) from error
