"""TCP ports for servers that tunerd starts for itself."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_N_BELOW = 12_000
_N_TRIES = 50


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now; somebody else may take it before it is used.

    If possible it is one that the kernel gives to no outgoing connection: such a connection of any
    program would keep a server from binding.
    """
    lowest = _lowest_outgoing()
    below = range(max(1024, lowest - _N_BELOW), lowest)
    for port in random.sample(below, min(_N_TRIES, len(below))):
        if can_bind("127.0.0.1", port):
            return port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given: int = listener.getsockname()[1]
        return given


def _lowest_outgoing() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_OUTGOING.read_text().split()[0])
    return 0


def can_bind(host: str, port: int) -> bool:
    """Whether any program could listen there now, whatever options it sets on its socket.

    False also while the kernel remembers connections that a server there closed (TIME_WAIT, a minute
    on Linux, which ik leaves after every stream): a server with the same socket options as the one
    before it may bind then, another one may not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_in_use(host: str, port: int) -> bool:
    """Whether a living socket holds the address, listening or only bound.

    Connections that the kernel remembers do not count, and neither does an address that is not one
    of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
