"""The HTTP of an engine: a listener, and one client after the other on it, each in a thread of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, NoReturn

from tests.support.fake_llama.answers import Answer, ClientGoneError, HttpError, json_answer
from tests.support.fake_llama.api import Api

MAX_BODY_BYTES = 16 * 1024 * 1024


def listen(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """A listener; OSError where another program has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128, reuse_port=shares_port)


def accept(listener: socket.socket, api: Api) -> None:
    """Serve whoever connects, until `stop`; returns at once."""

    def go_on() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=Connection, args=(client, api), daemon=True).start()

    threading.Thread(target=go_on, daemon=True).start()


def stop(listener: socket.socket) -> None:
    """Accept nobody any more; whoever is served goes on."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept(), as close() would not
    listener.close()


class Connection(BaseHTTPRequestHandler):
    """One client: requests one after the other until it goes away."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, client: socket.socket, api: Api) -> None:
        self.api = api
        with client, contextlib.suppress(ClientGoneError, OSError):
            super().__init__(client, None, None)  # type: ignore[arg-type]  # neither is looked at

    def answer(self) -> None:
        """Any request."""
        if self.api.behaviour.drips:
            self._drip()
        length = min(int(self.headers.get("Content-Length", "0")), MAX_BODY_BYTES)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ClientGoneError
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.api.at_work():
            try:
                reply = self.api.answer(self.command, self.path, key, body, self._is_gone)
            except HttpError as error:
                reply = json_answer(error.body, error.status)
            if isinstance(reply, Answer):
                self._send(reply)
            else:
                self._send_stream(reply)
            self.api.after_reply()

    do_GET = do_POST = answer  # noqa: N815  named by the standard library

    def _is_gone(self) -> bool:
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK) == b"")
        except OSError:
            return True

    def _drip(self) -> NoReturn:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while True:
            self.wfile.write(b"a")
            time.sleep(0.5)

    def _send(self, answer: Answer) -> None:
        if answer.status >= 400:
            self.close_connection = True  # as the real ones do
        self._head(answer.status, answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _send_stream(self, events: Iterator[bytes]) -> None:
        event: bytes | None = next(events, None)  # begun, so that closing it frees the slot
        try:
            self._head(200, "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while event is not None:
                self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                event = next(events, None)
            self.wfile.write(b"0\r\n\r\n")
        finally:
            getattr(events, "close", lambda: None)()

    def _head(self, status: int, content_type: str) -> None:
        self.send_response_only(status)
        self.send_header("Server", "ik_llama.cpp" if self.api.behaviour.is_ik else "llama.cpp")
        self.send_header("Content-Type", content_type)
        if self.close_connection:
            self.send_header("Connection", "close")

    def log_message(self, *_: Any) -> None:
        """Nothing: standard error is the engine's log."""
