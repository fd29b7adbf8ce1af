"""A server on loopback that answers each POST with a status, and keeps what it was sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
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
def receiving(*statuses: int) -> Iterator[Receiver]:
    made = Receiver(list(statuses))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append((dict(self.headers), body))
            self.send_response(made.statuses[min(len(made.got), len(made.statuses)) - 1])
            self.end_headers()
            try:
                for _ in range(made.says_bytes // PIECE):
                    self.wfile.write(bytes(PIECE))
            except OSError:
                made.was_cut.set()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield made
        server.shutdown()
        thread.join()
