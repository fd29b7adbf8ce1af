"""TCP ports for servers that tunerd starts for itself."""

from __future__ import annotations

import errno
import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now; somebody else may take it before it is used."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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
