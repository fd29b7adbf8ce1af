"""Runs the application on sockets, in a thread of its own: uvicorn, told who is at the other end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunerd.system.peers import peer_of
from tunerd.web.middleware import PEER

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_HEAD_BYTES = 32 * 1024
_STOP_S = 5.0
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: 5\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients are held to.

    `connections` may be open at once, `of_one` of them by one account or from one address, so that
    nobody can shut the others out. A head must be whole `head_s` after its first byte [s].
    """

    connections: int = 512
    of_one: int = 256
    head_s: float = 20.0


class _Protocol(H11Protocol):
    """Asks the kernel for the peer of a connection, and gives up on one that does not speak."""

    limits = Limits()
    origin: object = None
    _unheard: Any = None  # the timer that gives up

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._turn_away()
            return
        app, peer = self.app, peer_of(transport.get_extra_info("socket"))
        self.origin = peer.address if peer.uid is None else peer.uid
        n_of_one = sum(getattr(one, "origin", None) == self.origin for one in self.connections)
        if n_of_one > self.limits.of_one:
            self._turn_away()
            return

        async def with_peer(scope: Scope, receive: Receive, send: Send) -> None:
            scope[PEER] = peer
            await app(scope, receive, send)

        self.app = with_peer
        self._unheard = self.loop.call_later(self.limits.head_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_at_work():
            self._stop_waiting()
        elif self._unheard is None:  # not anew with each byte: a head may come one at a time
            self._unheard = self.loop.call_later(self.limits.head_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._unheard is not None:
            self._unheard.cancel()
            self._unheard = None

    def _give_up(self) -> None:
        self._unheard = None
        if not self._is_at_work():
            self.transport.close()

    def _turn_away(self) -> None:
        self.transport.write(_FULL)
        self.transport.close()


class ApiServer:
    """The application on some listening sockets, from `start` until `stop`."""

    def __init__(
        self, app: ASGIApp, sockets: Sequence[socket.socket], limits: Limits = Limits()
    ) -> None:
        config = uvicorn.Config(
            app,
            http=type("_LimitedProtocol", (_Protocol,), {"limits": limits}),
            ws="none",
            lifespan="off",
            log_config=None,
            # Of each request that is no HTTP it would write a line, whoever sends it.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
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
