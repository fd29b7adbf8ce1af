"""What the end of a process means for its unit, in systemd's words and by its rules."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tunerd.core.local_service import Restart

SUCCESS = "success"
EXIT_CODE = "exit-code"
SIGNAL = "signal"
CORE_DUMP = "core-dump"
TIMEOUT = "timeout"
START_LIMIT_HIT = "start-limit-hit"

# Source: systemd.exec(5), "Process exit codes".
EXIT_CHDIR = 200
EXIT_EXEC = 203
EXIT_LIMITS = 205
EXIT_USER = 217
EXIT_CREDENTIALS = 243

# Source: systemd.service(5), `Restart=`: ends by these count as clean.
_CLEAN_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE})


@dataclass(frozen=True, slots=True)
class Ending:
    """How a main process ended: `code`, or `signal`; neither where nobody could see it."""

    code: int | None = None
    signal: int | None = None
    dumped: bool = False

    @property
    def kind(self) -> str | None:
        """`exited`, `killed`, `dumped`; None where it is not known."""
        if self.code is not None:
            return "exited"
        if self.signal is None:
            return None
        return "dumped" if self.dumped else "killed"

    @property
    def status(self) -> int | None:
        """Exit status or number of the signal."""
        return self.code if self.code is not None else self.signal


def result_of(ending: Ending, *, timed_out: bool) -> str:
    """The unit's result; an end that nobody saw counts as a failure.

    Args:
        ending: How the main process ended.
        timed_out: Whether it was killed because it did not stop in time.
    """
    if timed_out:
        return TIMEOUT
    if ending.signal is not None:
        if ending.signal in _CLEAN_SIGNALS:
            return SUCCESS
        return CORE_DUMP if ending.dumped else SIGNAL
    return SUCCESS if ending.code == 0 else EXIT_CODE


def should_restart(restart: Restart, result: str) -> bool:
    """Whether a unit that ended by itself with `result` is started again."""
    match restart:
        case Restart.NO | Restart.ON_WATCHDOG:
            return False
        case Restart.ALWAYS:
            return True
        case Restart.ON_SUCCESS:
            return result == SUCCESS
        case Restart.ON_FAILURE:
            return result != SUCCESS
        case Restart.ON_ABNORMAL:
            return result not in {SUCCESS, EXIT_CODE}
        case Restart.ON_ABORT:
            return result in {SIGNAL, CORE_DUMP}


@dataclass(frozen=True, slots=True)
class StartLimit:
    """How often a unit was started since `begun_s` (monotonic)."""

    begun_s: float | None = None
    n_starts: int = 0

    def after_start(
        self, now_s: float, *, interval_s: float, burst: int
    ) -> tuple[StartLimit, bool]:
        """The count after one more attempt, and whether that attempt is allowed.

        The window begins with a start and the next one after its end begins a new one; refused
        attempts count too. An interval or burst of zero switches the limit off.
        """
        if interval_s <= 0 or burst <= 0:
            return self, True
        if self.begun_s is None or now_s - self.begun_s > interval_s:
            return StartLimit(now_s, 1), True
        return StartLimit(self.begun_s, self.n_starts + 1), self.n_starts + 1 <= burst
