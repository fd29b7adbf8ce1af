"""The web part as a process: it speaks HTTP, and can do nothing but ask the daemon."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

from tunerd.errors import ConfigError, TunerdError
from tunerd.machine.peers import (
    DAEMON_SOCKET,
    group_number,
    inherited_sockets,
    say_not_served,
    tcp_socket,
    unix_socket,
)
from tunerd.paths import FROM_ELSEWHERE, parse_listen, paths_for
from tunerd.web.app import ApiServer, Front, read_facts
from tunerd.web.gate import GROUP, Gate
from tunerd.web.page import build_site
from tunerd.words import Mode

SOCKET = "tunerd.sock"

log = structlog.get_logger()


def serve(mode: Mode, environment: Mapping[str, str]) -> None:
    """Answer until a signal, on the socket that systemd holds or on one of its own.

    Raises:
        HostError: the daemon does not answer, or the socket cannot be had.
    """
    folder = paths_for(mode, environment).runtime_dir
    is_system = mode is Mode.SYSTEM
    facts = read_facts(folder / DAEMON_SOCKET)
    gate = Gate(
        own_uid=0 if is_system else os.geteuid(),
        group=lambda: group_number(GROUP) if is_system else None,
        hosts=facts.hosts,
    )
    sockets = list(inherited_sockets(environment)) or [
        unix_socket(folder / SOCKET, group=gate.group())
    ]
    if facts.listen is not None:
        sockets += _page_socket(facts.listen)
    log.info("api.ready", at=[_name(one) for one in sockets])
    site = build_site(Front(folder / DAEMON_SOCKET, gate, facts))
    ApiServer(site, sockets, gate.knows).run()


def _page_socket(text: str) -> list[socket.socket]:
    """Where browsers of this machine come in; what is wrong with it is said in the log."""
    address = parse_listen(text)
    try:
        if not address.is_loopback:
            raise ConfigError(
                f"the page does not listen on {address.host}: others can reach it there",
                hint=f"let it listen on 127.0.0.1; {FROM_ELSEWHERE}",
            )
        return [tcp_socket(address.host, address.port)]
    except TunerdError as problem:
        say_not_served(problem)
        return []


def _name(one: socket.socket) -> str:
    name = one.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"
