"""Runs the application on sockets, in a thread of its own: uvicorn, told who is at the other end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunerd.system.peers import peer_of
from tunerd.web.middleware import PEER

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_HEAD_BYTES = 32 * 1024
_MOST_CONNECTIONS = 512
_HEAD_S = 20.0
_STOP_S = 5.0


class _Protocol(H11Protocol):
    """Asks the kernel for the peer of a connection, and gives up on one that does not speak."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app, peer = self.app, peer_of(transport.get_extra_info("socket"))

        async def with_peer(scope: Scope, receive: Receive, send: Send) -> None:
            scope[PEER] = peer
            await app(scope, receive, send)

        self.app = with_peer
        self._unheard = self.loop.call_later(_HEAD_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._unheard.cancel()
        if self.cycle is None or self.cycle.response_complete:  # a head that is not whole
            self._unheard = self.loop.call_later(_HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unheard.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class ApiServer:
    """The application on some listening sockets, from `start` until `stop`."""

    def __init__(self, app: ASGIApp, sockets: Sequence[socket.socket]) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_graceful_shutdown=int(_STOP_S),
        )
        self._server = uvicorn.Server(config)
        self._sockets = list(sockets)
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def start(self) -> None:
        """Answer from now on; connections wait in the sockets until it does."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what was asked, then no more; jobs go on."""
        self._server.should_exit = True
        self._thread.join(timeout=2 * _STOP_S)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        self._server.run(sockets=self._sockets)
