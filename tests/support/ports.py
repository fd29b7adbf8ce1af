"""Ports that no other process of the tests takes, now or while a server is down for a moment."""

from __future__ import annotations

import itertools
import socket
from functools import cache

from tunerd.machine.net import can_bind

_FIRST, _N_EACH, _N_SHARES = 10_000, 500, 20


def free_port() -> int:
    """A port of this process's share, outside of what `tunerd.machine.net.free_port` chooses from.

    Choosing any free one made a run of all tests likely to choose one twice: a server that is not
    there yet, or that a test has stopped, holds none.
    """
    return next(port for port in _own() if can_bind("127.0.0.1", port))


@cache
def _own() -> itertools.cycle[int]:
    """A share is taken by a name that the kernel lets go with the process, to which it is left open."""
    for number in range(_N_SHARES):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0tunerd-tests-ports-{number}")
        except OSError:
            name.close()
            continue
        name.detach()
        first = _FIRST + number * _N_EACH
        return itertools.cycle(range(first, first + _N_EACH))
    raise AssertionError(f"more than {_N_SHARES} processes of tests at once")
