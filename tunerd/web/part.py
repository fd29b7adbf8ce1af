"""The API and the page as a part of the daemon; whatever is wrong with them, the daemon goes on."""

from __future__ import annotations

import os
import socket

import structlog

from tunerd.actions.context import Context
from tunerd.actions.telemetry import Telemetry
from tunerd.core.access import GROUP
from tunerd.core.host import Mode
from tunerd.core.listen_address import ListenAddress, parse_listen
from tunerd.errors import ConfigError, TunerdError
from tunerd.system.listen import inherited_sockets, tcp_socket, unix_socket
from tunerd.system.peers import group_number
from tunerd.system.token_file import read_token
from tunerd.web.app import Desk, Seams
from tunerd.web.gate import Gate
from tunerd.web.metrics import CONTENT_TYPE, exposition
from tunerd.web.page import build_site
from tunerd.web.server import ApiServer

SOCKET = "tunerd.sock"

log = structlog.get_logger()


class ApiPart:
    """Listens from `start` until `stop`, on the socket that systemd holds or on one of its own."""

    def __init__(self, ctx: Context, telemetry: Telemetry) -> None:
        self._ctx = ctx
        self._seams = Seams(telemetry, lambda: (exposition(telemetry.latest()), CONTENT_TYPE))
        self._server: ApiServer | None = None
        self._desk: Desk | None = None

    def start(self) -> None:
        """Begin to answer, as far as that is possible; what is not is said in the log."""
        gate = Gate(own_uid=os.getuid(), group=self._group, now_s=self._ctx.clock.monotonic_s)
        sockets = self._own_sockets()
        page = self._page_socket(gate)
        sockets += [] if page is None else [page]
        if not sockets:
            return
        self._desk = Desk(self._ctx, gate, self._seams)
        self._server = ApiServer(build_site(self._desk), sockets)
        self._server.start()
        log.info("api.ready", at=[_name(one) for one in sockets])

    def take_over(self, ctx: Context) -> None:
        """Answer by other settings from now on; where it listens, and to whom, stays."""
        if self._desk is not None:
            self._desk.take_over(ctx)

    def stop(self) -> None:
        """Answer what was asked, then no more; jobs go on."""
        if self._server is not None:
            self._server.stop()

    def _group(self) -> int | None:
        return group_number(GROUP) if self._ctx.mode is Mode.SYSTEM else None

    def _own_sockets(self) -> list[socket.socket]:
        inherited = inherited_sockets(self._ctx.environment)
        if inherited:
            return list(inherited)
        try:
            return [unix_socket(self._ctx.paths.runtime_dir / SOCKET, group=self._group())]
        except TunerdError as problem:
            _say(problem)
            return []

    def _page_socket(self, gate: Gate) -> socket.socket | None:
        settings = self._ctx.settings.page
        if settings.listen is None:
            return None
        try:
            address = parse_listen(settings.listen)
            if settings.token_file is not None:
                gate.token = read_token(settings.token_file)
            _demand_token(address, gate)
            gate.hosts = (address.name, *settings.hosts)
            return tcp_socket(address.host, address.port)
        except TunerdError as problem:
            _say(problem)
            return None


def _demand_token(address: ListenAddress, gate: Gate) -> None:
    if address.is_loopback or gate.token is not None:
        return
    raise ConfigError(
        f"the page does not listen on {address.host} without a token: others can reach it there",
        hint="page.token_file names the file with the token; or listen on 127.0.0.1, and use ssh -L",
    )


def _say(problem: TunerdError) -> None:
    log.error("api.not_served", message=problem.message, cause=problem.cause, hint=problem.hint)


def _name(one: socket.socket) -> str:
    name = one.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"
