"""Time (the only user of `time`)."""

from __future__ import annotations

import time


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

    def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed; at once for zero or less."""
        if seconds > 0:
            time.sleep(seconds)
