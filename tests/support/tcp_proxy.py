"""A way to a server over TCP, as `ssh -L` makes one; it may lose an answer, after which the line is dead."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path
from typing import Self


class Proxy:
    """Passes on what both sides say, until it drops the answer to a request.

    Args:
        target: The server's port on the loopback, or its socket.
        drop_answer_to: What the request has in it.
        at: Which of these loses its answer, counted from 1; 0 for none.
    """

    def __init__(self, target: int | Path, *, drop_answer_to: bytes = b"", at: int = 0) -> None:
        self._target = target
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

    def __exit__(self, *_: object) -> None:
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

    def _connected(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        found = socket.socket(socket.AF_UNIX)
        found.connect(str(self._target))
        return found

    def _pass_on(self, client: socket.socket) -> None:
        server = self._connected()
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
