"""Listening sockets of the local API: those that systemd holds, or our own."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from tunerd.errors import HostError

_FIRST_FD = 3
_BACKLOG = 128
_CONNECT_S = 1.0


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


def unix_socket(path: Path, *, group: int | None) -> socket.socket:
    """A listening socket of our own, open to its owner, and to a group if one is given.

    What a dead process left at the path is taken away; anything else is left alone.

    Raises:
        HostError: something else is there, somebody listens there, or it cannot be made.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, group)
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


def _clear(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise HostError(f"`{path}` is there, and is no socket", hint="move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise HostError(f"cannot listen on `{path}`", cause=error.strerror) from error
    raise HostError(f"another tunerd listens on `{path}`", hint="end that one first")
