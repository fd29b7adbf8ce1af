"""Waits until a server of another build than the last one can have its port."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.live import address_now, address_of, read_live_unit
from tunerd.core.progress import Progress
from tunerd.core.service import UnitState
from tunerd.errors import TunerdError
from tunerd.system.llama import Address
from tunerd.system.ports import can_bind
from tunerd.system.sockets import is_listened_on

# Connections that have ended keep their port for a minute (TCP_TIMEWAIT_LEN of Linux).
PORT_WAIT_S = 75.0
_POLL_S = 1.0


@dataclass
class PortTurns:
    """Whose turn the port was last, `last` being the program; None where it is not known.

    ik closes streams from its side, so that the kernel remembers them for a minute, and then neither
    it nor mainline binds a port after the other. The same program again binds it at once.
    """

    ctx: Context
    is_held: Callable[[], bool]
    last: Path | None

    def is_productions(self, program: Path | None) -> bool:
        """Whether this program is the one that production runs, as far as that can be told."""
        own = program_of_production(self.ctx)
        return program is not None and own is not None and is_one_program(program, own)

    def wait_for(self, program: Path | None, address: Address | None) -> None:
        """Wait until this program can bind; not where it was the last one, or somebody listens.

        Ends early where the lease is gone: its place is taken then, and nothing is to be waited for.
        """
        is_same = (
            program is not None and self.last is not None and is_one_program(program, self.last)
        )
        self.last = program
        if is_same or address is None:
            return
        clock = self.ctx.clock
        end_s = clock.monotonic_s() + PORT_WAIT_S
        while not can_bind(address.reachable_host, address.port):
            left_s = end_s - clock.monotonic_s()
            if left_s <= 0 or not self.is_held() or is_listened_on(address.port, address.host):
                return
            self.ctx.report(Progress("waiting until the port is free again", left_s=left_s))
            clock.sleep(_POLL_S)

    def wait_for_production(self) -> None:
        """Wait until production can bind its port; where its file cannot be read, do not wait."""
        with contextlib.suppress(TunerdError):
            live = read_live_unit(self.ctx)
            program = Path(live.argv[0]) if live.argv else None
            self.wait_for(program, address_of(self.ctx, live))


def program_of_production(ctx: Context) -> Path | None:
    """The program that production's file names; None where that cannot be told."""
    with contextlib.suppress(TunerdError):
        live = read_live_unit(ctx)
        return Path(live.argv[0]) if live.argv else None
    return None


def address_of_production(ctx: Context, state: UnitState) -> Address | None:
    """Where production listens, or will once it starts; None where that cannot be told."""
    with contextlib.suppress(TunerdError):
        return address_now(ctx, read_live_unit(ctx), state)
    return None


def is_one_program(program: Path, other: Path) -> bool:
    """Whether both are the same file."""
    return program == other or program.resolve() == other.resolve()
