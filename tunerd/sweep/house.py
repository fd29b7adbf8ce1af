"""A sweep's look at the machine around it: what it waits for, what it gives way to, what it stops at."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tunerd.app import Context
from tunerd.errors import Busy, HostError
from tunerd.machine.facts import POWER_CAP, Gpu, GpuProcess
from tunerd.machine.host import free_disk_mib
from tunerd.production.measurement import measuring_pids

# Memory in use jitters by some 30 MiB from load to load.
OTHERS_SLACK_MIB = 64
# A sweep of a night writes some 20 MiB of evidence; what is kept for its end is the verdict's.
BEGIN_DISK_MIB = 128
END_DISK_MIB = 32


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process that computes on a GPU beside the server."""

    gpu: int
    process: GpuProcess

    def __str__(self) -> str:
        """For people."""
        used = self.process.used_mib
        held = "" if used is None else f", {used} MiB"
        return f"{self.process.name or 'a process'} ({self.process.pid}{held}) on GPU {self.gpu}"


def neighbours(gpus: Sequence[Gpu] | None, own: Collection[int]) -> Iterator[Neighbour]:
    """Processes that compute on a GPU and are not the server's; a desktop's graphics do not count.

    One that cannot be seen from here may be the server itself, as in a container, so it is left out.
    """
    for gpu in gpus or ():
        for process in gpu.processes or ():
            computes = "compute" in process.kind and not process.is_display_server
            if computes and process.name is not None and process.pid not in own:
                yield Neighbour(gpu.index, process)


def heat(gpus: Sequence[Gpu] | None) -> str | None:
    """Why a GPU runs slower than it could, its owner's power limit apart; None where none does."""
    for gpu in gpus or ():
        reasons = [one for one in gpu.throttle_reasons or () if one != POWER_CAP]
        if reasons:
            at = "" if gpu.temperature_c is None else f" at {gpu.temperature_c} C"
            return f"GPU {gpu.index} is held back{at}: {', '.join(reasons)}"
    return None


def crowd(gpus: Sequence[Gpu] | None, own: Collection[int], known: Collection[int]) -> str | None:
    """Who has come to compute on a GPU beside the server and those that are known; None for nobody."""
    found = [
        one
        for one in neighbours(gpus, [*own, *known])
        if one.process.used_mib is None or one.process.used_mib > OTHERS_SLACK_MIB
    ]
    return f"{found[0]} computes there too" if found else None


def disk(free_mib: int | None, least_mib: int, folder: str) -> str | None:
    """Why there is no room for evidence; None where there is, or where nobody knows."""
    if free_mib is None or free_mib >= least_mib:
        return None
    return f"{free_mib} MiB are free where {folder} is, and {least_mib} are needed"


_HOUSE_POLL_S = 5.0


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

    def wait(self, until_s: float = math.inf) -> str | None:
        """Wait as long as the settings say for the GPU, at most until `until_s` (monotonic).

        What still holds then, None if nothing.
        """
        ctx = self.ctx
        end_s = min(ctx.clock.monotonic_s() + ctx.settings.sweep.patience_s, until_s)
        said = False
        while (trouble := self.trouble()) is not None:
            if ctx.clock.monotonic_s() >= end_s:
                return trouble
            if not said:
                ctx.say(f"waiting: {trouble}")
                said = True
            ctx.clock.sleep(min(_HOUSE_POLL_S, max(0.1, end_s - ctx.clock.monotonic_s())))
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
