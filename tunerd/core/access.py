"""Who may look and change through the local API: root, the owner of this tunerd, and its group.

There is one right, not two: what is shown holds command lines and paths that are nobody else's
business, and whoever may choose what serves may see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

GROUP = "tunerd"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HIGHEST_PORT = 65535


class Via(StrEnum):
    """How a client came in."""

    UNIX = "unix"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, as the kernel tells it.

    `uid` None: it cannot be told, because the client is on another machine or its socket is gone.
    `groups` holds every group of the process (Unix) or of the account (TCP on this machine).
    """

    via: Via
    uid: int | None
    groups: frozenset[int] = frozenset()
    pid: int | None = None
    name: str | None = None
    address: str | None = None
    is_local: bool = True

    @property
    def text(self) -> str:
        """For logs and records."""
        if self.uid is None:
            return "a client by token"
        return self.name or f"uid {self.uid}"


def may_act(peer: Peer, *, own_uid: int, group: int | None) -> bool:
    """Whether this peer may use the API without a token.

    Args:
        peer: Who asks.
        own_uid: Of this process; 0 in system mode.
        group: Number of the group `tunerd`; None where there is none, or in user mode.
    """
    if peer.uid is None or not peer.is_local:
        return False
    return peer.uid in {0, own_uid} or (group is not None and group in peer.groups)


def host_is_ours(host: str | None, names: Iterable[str]) -> bool:
    """Whether a Host header names this machine; any port, for tunnels have their own.

    A page of a foreign name that resolves to this machine (DNS rebinding) sends that name.

    Args:
        host: As sent; None where there was none.
        names: Addresses and names that are ours beside the loopback ones; IPv6 in brackets.
    """
    if host is None:
        return False
    name, port = _split(host.strip().lower())
    if port is not None and not (port.isdecimal() and int(port) <= _HIGHEST_PORT):
        return False
    return name in {*_LOOPBACK_NAMES, *(one.lower() for one in names)}


def origin_is_ours(origin: str | None, host: str | None) -> bool:
    """Whether an Origin header is that of the page which this very address serves.

    Programs send none; a browser sends one with everything that changes something.
    """
    if origin is None:
        return True
    scheme, separator, rest = origin.strip().lower().partition("://")
    if not separator or scheme not in {"http", "https"} or host is None:
        return False
    return rest == host.strip().lower()


def _split(host: str) -> tuple[str, str | None]:
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return name + bracket, rest[1:] if rest.startswith(":") else (rest or None)
    name, colon, port = host.partition(":")
    return name, port if colon else None
