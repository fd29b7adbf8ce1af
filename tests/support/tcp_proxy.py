"""A way to a server that loses an answer: the request arrives, and then the line is dead."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Passes on what both sides say, until it drops the answer to a request.

    Args:
        port: Of the server, on the loopback.
        drop_answer_to: What the request has in it.
        at: Which of these loses its answer, counted from 1.
    """

    def __init__(self, port: int, *, drop_answer_to: bytes, at: int) -> None:
        self._port = port
        self._sign = drop_answer_to
        self._at = at
        self._n_seen = 0
        self.n_dropped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._port))
        with client, server, contextlib.suppress(OSError):
            while True:
                readable, _, _ = select.select([client, server], [], [])
                source = readable[0]
                data = source.recv(65536)
                if not data:
                    return
                if source is client and self._sign in data:
                    self._n_seen += 1
                    if self._n_seen == self._at:
                        server.sendall(data)
                        server.recv(65536)  # it is done there
                        self.n_dropped += 1
                        return
                (server if source is client else client).sendall(data)
