"""A fuse for every effect of a swap: it ends the process, or lets the effect fail.

Every effect of a swap is announced: those on the disk by `Files(before=...)`, those on units by
`FusedServices`. The fuse counts them.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from tunerd.errors import ServiceError
from tunerd.units.manager import Lease, LeaseSpec, LogSpan, ServiceManager, UnitState
from tunerd.words import Mode

_PATIENCE_S = 60.0


class Kind(Enum):
    """Who has the effect."""

    DISK = auto()
    UNITS = auto()


@dataclass(frozen=True)
class Step:
    """One effect, about to happen."""

    kind: Kind
    text: str


Burn = Callable[[Step], None]
"""What happens at the fuse's effect: it raises, or never returns."""


def full_disk(step: Step) -> None:
    """The effect fails as on a full disk, or as with a service manager that refuses."""
    if step.kind is Kind.DISK:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise ServiceError(f"refused: {step.text}", cause="the fuse")


def ctrl_c(_step: Step) -> None:
    """Somebody presses Ctrl-C; the swap must run in the main thread."""
    signal.raise_signal(signal.SIGINT)


class Fuse:
    """Counts effects and burns at number `at`, and at those up to `until` (both from 0).

    `of` limits it to effects of one kind, counted by themselves. `steps` are all that were
    announced.
    """

    def __init__(
        self,
        at: int | None = None,
        burn: Burn | None = None,
        *,
        until: int | None = None,
        of: Kind | None = None,
    ) -> None:
        self.steps: list[Step] = []
        self.burnt: list[Step] = []
        self._at = at
        self._until = at if until is None else until
        self._burn = burn
        self._of = of
        self._count = 0

    def disk(self, text: str) -> None:
        """For `Files(before=...)`."""
        self._announce(Step(Kind.DISK, text))

    def units(self, text: str) -> None:
        """For `FusedServices`."""
        self._announce(Step(Kind.UNITS, text))

    def _announce(self, step: Step) -> None:
        self.steps.append(step)
        if self._of is not None and step.kind is not self._of:
            return
        number = self._count
        self._count += 1
        if self._at is None or self._until is None or self._burn is None:
            return
        if self._at <= number <= self._until:
            self.burnt.append(step)
            self._burn(step)


class FusedServices:
    """A service manager whose every change is announced before it happens.

    With `asks` set, questions are announced too.
    """

    def __init__(self, real: ServiceManager, fuse: Fuse, *, asks: bool = False) -> None:
        self._real = real
        self._fuse = fuse
        self._asks = asks
        self.mode: Mode = real.mode
        self.unit_dir: Path = real.unit_dir
        self.runtime_unit_dir: Path = real.runtime_unit_dir

    def _ask(self, text: str) -> None:
        if self._asks:
            self._fuse.units(text)

    def state(self, unit: str) -> UnitState:
        self._ask("state")
        return self._real.state(unit)

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        self._ask("properties")
        return self._real.properties(unit, *names)

    def check_ready(self) -> None:
        self._ask("check_ready")
        self._real.check_ready()

    def reload(self) -> None:
        self._fuse.units("reload")
        self._real.reload()

    def start(self, unit: str, *, timeout_s: float = 90.0) -> None:
        self._fuse.units("start")
        self._real.start(unit, timeout_s=timeout_s)

    def run_transient(
        self,
        unit: str,
        argv: Sequence[str],
        properties: Sequence[tuple[str, str]] = (),
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> None:
        self._fuse.units("run_transient")
        self._real.run_transient(
            unit, argv, properties, environment=environment, timeout_s=timeout_s
        )

    def stop(self, unit: str, *, timeout_s: float = 120.0) -> None:
        self._fuse.units("stop")
        self._real.stop(unit, timeout_s=timeout_s)

    def restart(self, unit: str, *, timeout_s: float = 180.0) -> None:
        self._fuse.units("restart")
        self._real.restart(unit, timeout_s=timeout_s)

    def reset_failed(self, unit: str) -> None:
        self._fuse.units("reset_failed")
        self._real.reset_failed(unit)

    def enable(self, unit: str) -> None:
        self._fuse.units("enable")
        self._real.enable(unit)

    def disable(self, unit: str) -> None:
        self._fuse.units("disable")
        self._real.disable(unit)

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        return self._real.verify(unit, text)

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        self._ask("log")
        return self._real.log(unit, invocation_id=invocation_id, max_lines=max_lines)

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        self._ask("log_since")
        return self._real.log_since(unit, since_s, max_lines=max_lines)

    def was_stopped(self, unit: str, invocation_id: str) -> bool:
        self._ask("was_stopped")
        return self._real.was_stopped(unit, invocation_id)

    def service_units(self) -> tuple[str, ...]:
        return self._real.service_units()

    def start_bound(self, unit: str, *, timeout_s: float = 90.0) -> None:
        self._fuse.units("start_bound")
        self._real.start_bound(unit, timeout_s=timeout_s)

    def lease(self, spec: LeaseSpec, *, timeout_s: float = 120.0) -> Lease:
        self._fuse.units("lease")
        return self._real.lease(spec, timeout_s=timeout_s)


class Life:
    """One run of an action in a thread that can be killed in the middle.

    The thread is stopped where it stands and never goes on: no `except` and no `finally` of the
    code under test runs, as after SIGKILL. What the kernel does at the death of a process is done
    here: its locks are released.
    """

    def __init__(self, lock: Path) -> None:
        self.died_before: Step | None = None
        self.error: BaseException | None = None
        self._lock = lock
        self._over = threading.Event()

    def die(self, step: Step) -> None:
        """For a fuse: the process is dead from here on."""
        self.died_before = step
        self._over.set()
        threading.Event().wait()

    def live(self, action: Callable[[], object]) -> None:
        """Run until the action ends, or its process dies."""

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 -- told to the test
                self.error = error
            self._over.set()

        threading.Thread(target=run, daemon=True).start()
        assert self._over.wait(_PATIENCE_S), "it hangs"
        if self.died_before is not None:
            _release(self._lock)


def _release(lock: Path) -> None:
    """Close every descriptor of the lock file that this process holds."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if link.readlink() == lock:
                os.close(int(link.name))
        except FileNotFoundError:
            continue
