"""Sockets of our own: handed over or opened, and who is at the other end."""

from __future__ import annotations

import contextlib
import errno
import grp
import ipaddress
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from tunerd.errors import Busy, HostError, TunerdError
from tunerd.machine.net import IpAddress, plain_address, tcp_sockets
from tunerd.machine.process import account

# Linux's number; Python has no name for it before 3.13, and reads at most 1024 bytes.
_SO_PEERGROUPS = 59
_MOST_BYTES = 1024
_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> Peer:
    """The peer of an accepted connection."""
    if connection.family == socket.AF_UNIX:
        return _unix_peer(connection)
    return _tcp_peer(connection)


@contextlib.contextmanager
def only_one(name: str) -> Iterator[None]:
    """Hold a name of this machine for the body; whatever account others run as, they find it taken.

    It is an abstract socket: no file, no rights on one, and it ends with the process. Whoever may run programs
    here can take it, and so delay a measurement, as they could by using the card.

    Raises:
        Busy: another process holds it.
        HostError: it cannot be had.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        address = f"\0tunerd-{name}"
        try:
            holder.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise HostError(f"cannot hold {name}", cause=error.strerror) from error
            raise Busy(f"{name} is taken", cause=_holder_of(address)) from error
        holder.listen(1)
        yield


def _holder_of(address: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        asking.connect(address)
        peer = peer_of(asking)
        if peer.uid is not None:
            return f"process {peer.pid} of {account_text(peer.uid)} holds it"
    return "an unknown process holds it"


def group_number(name: str) -> int | None:
    """The number of a group; None if there is none."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def account_number(name: str) -> int | None:
    """The number of an account; None if there is none."""
    found = account(name)
    return None if found is None else found.uid


def account_text(uid: int) -> str:
    """An account for logs and records."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _unix_peer(connection: socket.socket) -> Peer:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    groups = {gid}
    with contextlib.suppress(OSError):  # more groups than fit: the first one counts
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
        groups |= set(struct.unpack(f"{len(found) // 4}I", found))
    return Peer(Via.UNIX, uid, frozenset(groups), pid or None)


def _tcp_peer(connection: socket.socket) -> Peer:
    """Loopback connections end in a socket of this machine, which has an owner in `/proc`."""
    try:
        theirs, ours = connection.getpeername(), connection.getsockname()
    except OSError:
        return Peer(Via.TCP, None)
    address = _peer_address(theirs[0])
    if not address.is_loopback:
        return Peer(Via.TCP, None)
    ends = (address, theirs[1]), (_peer_address(ours[0]), ours[1])
    # A socket whose owner has closed it belongs to uid 0 in the table.
    owners = (
        one.uid for one in tcp_sockets() if one.inode != "0" and (one.local, one.remote) == ends
    )
    uid = next(owners, None)
    who = None if uid is None else account(str(uid))
    return Peer(Via.TCP, uid, frozenset(() if who is None else who.groups))


def _peer_address(text: str) -> IpAddress:
    return plain_address(ipaddress.ip_address(text.partition("%")[0]))


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

    @property
    def text(self) -> str:
        """For logs and records."""
        return "nobody" if self.uid is None else account_text(self.uid)


# Where the web part asks the daemon.
DAEMON_SOCKET = "daemon.sock"
_FIRST_FD = 3
_BACKLOG = 128
_CONNECT_S = 1.0

log = structlog.get_logger()


def inherited_sockets(environment: Mapping[str, str]) -> tuple[socket.socket, ...]:
    """The sockets that the service manager passed to this very process.

    Source: sd_listen_fds(3).
    """
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return ()
    found = []
    for number in range(_FIRST_FD, _FIRST_FD + int(count)):
        os.set_inheritable(number, False)
        found.append(socket.socket(fileno=number))
    return tuple(found)


def unix_socket(path: Path, *, group: int | None, short_name: str | None = None) -> socket.socket:
    """A listening socket of our own, open to its owner, and to a group if one is given.

    What a dead process left at the path is taken away; anything else is left alone. `short_name` leads
    there too, where the path may be longer than the kernel takes.

    Raises:
        HostError: something else is there, somebody listens there, or it cannot be made.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path, short_name or str(path))
        before = os.umask(0o177)
        try:
            made.bind(short_name or str(path))
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, group, follow_symlinks=False)
            path.chmod(0o660)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise HostError(f"cannot listen on `{path}`", cause=error.strerror or str(error)) from error
    except BaseException:
        made.close()
        raise
    return made


def tcp_socket(host: str, port: int) -> socket.socket:
    """A listening socket for the page.

    Raises:
        HostError: the address is none of this machine, or is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise HostError(
            f"cannot listen on {host}:{port}",
            cause=error.strerror or str(error),
            hint="page.listen in tunerd.toml chooses another address",
        ) from error
    return made


def say_not_served(problem: TunerdError) -> None:
    """What keeps the API or the page from listening; everything else goes on."""
    log.error("api.not_served", message=problem.message, cause=problem.cause, hint=problem.hint)


def _clear(path: Path, name: str) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise HostError(f"`{path}` exists, but is not a socket", hint="move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise HostError(f"cannot listen on `{path}`", cause=error.strerror) from error
    raise HostError(f"another tunerd listens on `{path}`", hint="stop that one first")
