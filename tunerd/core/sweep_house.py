"""Whether a machine is fit for a sweep at this moment: room on its disk, a GPU that is cool and free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tunerd.core.host import POWER_CAP, Gpu, GpuProcess

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
