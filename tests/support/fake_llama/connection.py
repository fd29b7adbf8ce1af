"""One HTTP client."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

from tests.support.fake_llama.answers import (
    Answer,
    ClientGoneError,
    HttpError,
    Reply,
    json_answer,
)

MAX_BODY_BYTES = 16 * 1024 * 1024
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"} | {
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class Service(Protocol):
    """What a connection needs of the program."""

    is_ik: bool
    drips: bool

    def at_work(self) -> AbstractContextManager[None]:
        """While it lasts, the program does not end orderly."""
        ...

    def answer(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
        gone: Callable[[], bool],
    ) -> Reply:
        """The reply to one request."""
        ...

    def after_reply(self) -> None:
        """Called when a reply has been sent."""
        ...


class Connection(threading.Thread):
    """One client: requests one after the other until it goes away."""

    def __init__(self, client: socket.socket, service: Service) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._service = service
        self._buffer = b""

    def run(self) -> None:
        with self._client:
            try:
                while self._serve_one():
                    continue
            except (ClientGoneError, OSError):
                return

    def _is_gone(self) -> bool:
        if not select.select([self._client], [], [], 0)[0]:
            return False
        try:
            return self._client.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _serve_one(self) -> bool:
        """Whether the connection stays open for another request."""
        head = self._read_until(b"\r\n\r\n")
        if head is None:
            return False
        first, *rows = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        pairs = (row.split(":", 1) for row in rows if ":" in row)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        length = headers.get("content-length", "0")
        if len(words) != 3 or not length.isdecimal():
            return False
        method, target, _ = words
        if self._service.drips:
            self._drip()
        if headers.get("expect", "").lower() == "100-continue":
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._read_exactly(min(int(length), MAX_BODY_BYTES))
        with self._service.at_work():
            try:
                reply = self._service.answer(method, target, headers, body, self._is_gone)
            except HttpError as error:
                reply = json_answer(error.body, error.status)
            keeps = headers.get("connection", "").lower() != "close"
            if isinstance(reply, Answer):
                return self._send(reply, keeps=keeps)
            return self._send_stream(reply, keeps=keeps)

    def _drip(self) -> NoReturn:
        self._client.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while True:
            self._client.sendall(b"a")
            time.sleep(0.5)

    def _send(self, answer: Answer, *, keeps: bool) -> bool:
        keeps = keeps and answer.status < 400  # as the real ones do
        self._client.sendall(
            self._head(answer.status, answer.content_type, keeps=keeps)
            + f"Content-Length: {len(answer.body)}\r\n\r\n".encode()
        )
        self._client.sendall(answer.body)
        self._service.after_reply()
        return keeps

    def _send_stream(self, events: Iterator[bytes], *, keeps: bool) -> bool:
        head = self._head(200, "text/event-stream", keeps=keeps)
        event: bytes | None = next(events, None)  # begun, so that closing it frees the slot
        try:
            self._client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            while event is not None:
                self._client.sendall(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                event = next(events, None)
            self._client.sendall(b"0\r\n\r\n")
        finally:
            getattr(events, "close", lambda: None)()
        self._service.after_reply()
        return keeps

    def _head(self, status: int, content_type: str, *, keeps: bool) -> bytes:
        name = "ik_llama.cpp" if self._service.is_ik else "llama.cpp"
        lines = [
            f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}",
            f"Server: {name}",
            f"Content-Type: {content_type}",
            "Keep-Alive: timeout=5, max=100" if keeps else "Connection: close",
        ]
        return ("\r\n".join(lines) + "\r\n").encode()

    def _read_until(self, mark: bytes) -> bytes | None:
        while mark not in self._buffer:
            data = self._client.recv(65536)
            if not data or len(self._buffer) > MAX_BODY_BYTES:
                return None
            self._buffer += data
        found, self._buffer = self._buffer.split(mark, 1)
        return found

    def _read_exactly(self, n_bytes: int) -> bytes:
        while len(self._buffer) < n_bytes:
            data = self._client.recv(65536)
            if not data:
                raise ClientGoneError
            self._buffer += data
        found, self._buffer = self._buffer[:n_bytes], self._buffer[n_bytes:]
        return found
