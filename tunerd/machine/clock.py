"""Time (the only user of `time`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

_LOCALTIME = Path("/etc/localtime")
_TIMEZONE = Path("/etc/timezone")


class SystemClock:
    """The machine's clocks.

    `monotonic_s` is CLOCK_MONOTONIC, which systemd's `...TimestampMonotonic` properties count too.
    """

    def now_s(self) -> float:
        """Wall-clock seconds since the epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since the machine started, without those it was suspended."""
        return time.clock_gettime(time.CLOCK_MONOTONIC)

    def suspended_s(self) -> float:
        """Seconds for which the machine was suspended since it started."""
        # What one of them counts and the other does not; nobody can set either.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.monotonic_s()

    def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed; at once for zero or less."""
        if seconds > 0:
            time.sleep(seconds)


def process_began_s(start_ticks: int) -> float:
    """Wall-clock time at which a process began, which the kernel counts on while the machine sleeps."""
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since_boot_s


def local_zone(environment: Mapping[str, str], *, root: Path = Path("/")) -> str:
    """The name of the machine's time zone; UTC where it has none."""
    named = environment.get("TZ", "").lstrip(":")
    if named and not named.startswith("/"):
        return named
    # TZ=:/etc/localtime spares programs a look at each time that they show.
    for path in filter(None, (named, str(_LOCALTIME))):
        target = os.path.realpath(root / path.lstrip("/"))
        _, found, name = target.partition("zoneinfo/")
        if found:
            return name
    try:
        return (root / _TIMEZONE.relative_to("/")).read_text().strip() or "UTC"
    except (OSError, ValueError):
        return "UTC"


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def now_s(self) -> float:
        """Wall-clock seconds since the epoch."""

    def monotonic_s(self) -> float:
        """Seconds that never go back, from an arbitrary start."""

    def suspended_s(self) -> float:
        """Seconds for which the machine was suspended, from an arbitrary start."""

    def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed."""


# What is less may be a correction.
_STEP_S = 2.0


class Steps:
    """Where the wall clock parts from the monotonic one: somebody set it, or the machine slept.

    `has_slept` is whether it did before the last call.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = clock.now_s() - clock.monotonic_s()
        self._suspended_s = clock.suspended_s()
        self.has_slept = False

    def step_s(self) -> float:
        """How far since the last call, less than 0 where it was set back [s]; 0 where it goes as it did."""
        awake_s, self._suspended_s = self._suspended_s, self._clock.suspended_s()
        self.has_slept = self._suspended_s - awake_s > _STEP_S
        before_s, self._ahead_s = self._ahead_s, self._clock.now_s() - self._clock.monotonic_s()
        step_s = self._ahead_s - before_s
        return step_s if abs(step_s) > _STEP_S else 0.0


def polls(clock: Clock, limit_s: float, *, every_s: float) -> Iterator[float]:
    """Seconds left, again and again with sleep in between; 0 the last time."""
    end_s = clock.monotonic_s() + limit_s
    while True:
        left_s = max(0.0, end_s - clock.monotonic_s())
        yield left_s
        if not left_s:
            return
        clock.sleep(min(every_s, left_s))
