"""The narrow interfaces behind which a fake may stand: clock, GPU, service manager.

The fourth fake, the stand-in engine, is a program and needs no interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunerd.core.host import Gpu, Mode
from tunerd.core.lease import LeaseSpec
from tunerd.core.service import UnitState
from tunerd.core.unit_log import LogSpan


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def now_s(self) -> float:
        """Wall-clock seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back, from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed."""
        ...


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All GPUs at one moment; `gpus` is None when it could not be told (`problem` says why)."""

    gpus: tuple[Gpu, ...] | None
    problem: str | None
    driver_version: str | None
    cuda_version: str | None


class GpuReader(Protocol):
    """Reads GPUs."""

    def read(self) -> GpuReading:
        """One reading; never raises."""
        ...


class Lease(Protocol):
    """Production's place, held by this process.

    `inhibits` is what the machine is kept from while it lasts (`sleep`, `idle`), None for nothing.
    """

    @property
    def spec(self) -> LeaseSpec:
        """What was asked for."""
        ...

    @property
    def inhibits(self) -> str | None:
        """What the machine is kept from."""
        ...

    def is_held(self) -> bool:
        """Whether it still stands; once it does not, it never will again."""
        ...

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Production is not to start before its host and port are free; None: it starts at once.

        However the lease ends, and whether this process lives or not. A port that stays taken is
        waited for no longer than `core.lease.PORT_LIMIT_S`.
        """
        ...

    def end(self, *, timeout_s: float = 120.0) -> None:
        """End it: what is bound to it stops, then production starts if it restores.

        One that has ended is no error. Returns when what was bound is down.
        """
        ...


class ServiceManager(Protocol):
    """Starts and stops units, and says how they are.

    Every call ends within a stated time or raises ServiceError. A job that the manager reports as
    failed, cancelled or timed out raises ServiceError; a job that is `done` says nothing about the
    health of the program it started.
    """

    mode: Mode
    unit_dir: Path
    """Where a unit file must stand to be the live definition."""
    runtime_unit_dir: Path
    """Where a unit file stands that a reboot forgets."""

    def state(self, unit: str) -> UnitState:
        """How the unit is now; an unknown unit has load_state `not-found`."""
        ...

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        """Raw properties as `systemctl show` prints them; unknown ones are absent."""
        ...

    def check_ready(self) -> None:
        """Whether what a change needs of the manager is there; raises ServiceError if it is not.

        It changes no unit and starts nothing.
        """
        ...

    def reload(self) -> None:
        """Make the manager read the unit files again."""
        ...

    def start(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start and wait for the job."""
        ...

    def stop(self, unit: str, *, timeout_s: float = 120.0) -> None:
        """Stop and wait for the job; a stopped unit is no error."""
        ...

    def restart(self, unit: str, *, timeout_s: float = 180.0) -> None:
        """Stop if needed, start, and wait for the job."""
        ...

    def reset_failed(self, unit: str) -> None:
        """Forget failures and start counters; a unit without any is no error."""
        ...

    def enable(self, unit: str) -> None:
        """Make the unit start at boot (without starting it) and make that durable."""
        ...

    def disable(self, unit: str) -> None:
        """Make the unit not start at boot; a unit without a link is no error."""
        ...

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """What the manager would complain about if `text` were this unit; empty if nothing."""
        ...

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """The newest lines that the unit wrote, oldest first, of one invocation if given."""
        ...

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """What the unit wrote since then [seconds since the epoch], the newest if it is too much.

        Where lines have no times of their own, a server's life that had begun before counts whole.
        """
        ...

    def service_units(self) -> tuple[str, ...]:
        """Names of all service units that the manager has loaded."""
        ...

    def lease(self, spec: LeaseSpec, *, timeout_s: float = 120.0) -> Lease:
        """Stop production and hold its place, until the lease ends in one of these ways.

        `end` is called, this process dies, somebody starts production or stops the lease's unit,
        or `limit_s` is over. In each the units with `BindsTo=` the lease's unit stop, and then
        production starts if the lease `restores`, whether this process lives or not.
        """
        ...

    def start_bound(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start a unit that is bound to a lease, and wait for the job.

        Where the lease is gone this fails; it never takes the lease anew.
        """
        ...
