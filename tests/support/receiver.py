"""A server on loopback that answers as a test says, and one that keeps what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECE = 1 << 20


@dataclass
class Receiver:
    """It answers with these statuses, the last again and again."""

    statuses: list[int]
    port: int = 0
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    says_bytes: int = 0
    was_cut: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"


@contextmanager
def answered_by(answer: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[int]:
    """A port at which each request, with its body, is answered so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_POST = do_GET  # noqa: N815 -- as http.server calls it

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def receiving(*statuses: int) -> Iterator[Receiver]:
    made = Receiver(list(statuses))

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> None:
        made.got.append((dict(request.headers), body))
        request.send_response(made.statuses[min(len(made.got), len(made.statuses)) - 1])
        request.end_headers()
        try:
            for _ in range(made.says_bytes // PIECE):
                request.wfile.write(bytes(PIECE))
        except OSError:
            made.was_cut.set()

    with answered_by(answer) as made.port:
        yield made
