"""A sweep's look at the machine around it: what it waits for, what it gives way to, what it stops at."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tunerd.actions.context import Context
from tunerd.actions.lease_record import measuring_pids
from tunerd.core.sweep_house import (
    BEGIN_DISK_MIB,
    END_DISK_MIB,
    crowd,
    disk,
    heat,
    neighbours,
)
from tunerd.errors import Busy, HostError
from tunerd.system.host import free_disk_mib

_POLL_S = 5.0


@dataclass
class House:
    """The machine during one sweep.

    `known` are processes that compute beside the server and may: those of its begin, where the settings
    allow to share.
    """

    ctx: Context
    known: frozenset[int] = field(default_factory=frozenset)

    def settle(self) -> None:
        """Wait until a sweep may begin; production serves meanwhile.

        Raises:
            HostError: the disk has no room.
            Busy: somebody else computes on the GPU, or it is held back, for longer than the settings wait.
        """
        ctx = self.ctx
        if full := self._disk(BEGIN_DISK_MIB):
            raise HostError(
                "there is no room for what a sweep measures", cause=full,
                state="nothing was touched", hint="free some space, or `tunerd settings` for the folder",
            )  # fmt: skip
        if ctx.settings.sweep.shares_gpu:
            gpus = ctx.gpu.read().gpus
            self.known = frozenset(one.process.pid for one in neighbours(gpus, self._own()))
        trouble = self.wait()
        if trouble is not None:
            raise Busy(
                "the machine is not free for a sweep", cause=trouble, state="nothing was touched",
                hint="it is tried again with the next start; sweep.shares_gpu lets it measure beside "
                "what always runs",
            )  # fmt: skip

    def wait(self) -> str | None:
        """Wait as long as the settings say for the GPU; what still holds then, None if nothing."""
        ctx = self.ctx
        end_s = ctx.clock.monotonic_s() + ctx.settings.sweep.patience_s
        said = False
        while (trouble := self.trouble()) is not None:
            if ctx.clock.monotonic_s() >= end_s:
                return trouble
            if not said:
                ctx.say(f"waiting: {trouble}")
                said = True
            ctx.clock.sleep(min(_POLL_S, max(0.1, end_s - ctx.clock.monotonic_s())))
        return None

    def trouble(self) -> str | None:
        """What disturbs at this moment, and may pass by itself."""
        gpus = self.ctx.gpu.read().gpus
        if not gpus:
            return None
        return heat(gpus) or crowd(gpus, self._own(), self.known)

    def full(self) -> str | None:
        """Why nothing more may be written but the end; None while there is room."""
        return self._disk(END_DISK_MIB)

    def _own(self) -> set[int]:
        """The processes of production and of candidates."""
        ctx = self.ctx
        serving = ctx.services.state(ctx.unit).main_pid
        return measuring_pids(ctx) | {os.getpid()} | ({serving} if serving is not None else set())

    def _disk(self, least_mib: int) -> str | None:
        folder = self.ctx.paths.state_dir
        return disk(free_disk_mib(folder), least_mib, str(folder))
