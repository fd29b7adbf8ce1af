"""Recovers what a command left that was killed in the middle of a swap: nobody else will."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tunerd.actions.context import Context
from tunerd.actions.lease_record import has_leftovers
from tunerd.actions.recover import Unfinished, recover
from tunerd.core.telemetry.history import Event
from tunerd.errors import Busy, TunerdError
from tunerd.system.files import is_locked
from tunerd.system.notify import Notifier

# After a recovery that failed: what it needs may come by itself, such as a disk or a driver.
_FIRST_RETRY_S = 15.0
_LAST_RETRY_S = 900.0
_RELOAD_AND_RESTART_S = 600.0

log = structlog.get_logger()


class Recovery:
    """Looks for unfinished swaps and dead measurements, and mends them when nobody is at work."""

    def __init__(self, ctx: Context, notifier: Notifier, tell: Callable[[Event], None]) -> None:
        self._ctx = ctx
        self._notifier = notifier
        self._tell = tell
        self._unfinished = Unfinished(ctx)
        self._said: set[str] = set()
        self._tried: object = None
        self._retry_s = _FIRST_RETRY_S
        self._not_before_s = 0.0

    def look(self) -> None:
        """Recover if there is something to be recovered, and it is time to try."""
        found = self._unfinished.look() or self._left_by_a_measurement()
        if found is None or is_locked(self._ctx.paths.lock):
            return
        if found == self._tried and self._ctx.clock.monotonic_s() < self._not_before_s:
            return
        self.recover()

    def _left_by_a_measurement(self) -> str | None:
        paths = self._ctx.paths
        if has_leftovers(self._ctx) and not is_locked(paths.measure_lock):
            return "a measurement"
        return None

    def recover(self) -> None:
        """Recover; what cannot be mended is said once, and tried again after longer and longer."""
        service = self._ctx.settings.service
        starts_s = 2 * (service.start_limit_s + service.generation_limit_s)
        self._notifier.patience(starts_s + _RELOAD_AND_RESTART_S)
        try:
            self._recover()
        except Busy:
            return  # a swap is under way, and its own process looks after it
        except TunerdError as problem:
            self._put_off()
            self._say(problem)
        finally:
            self._notifier.patience(None)

    def _recover(self) -> None:
        result = recover(self._ctx)
        self._said.clear()
        self._retry_s = _FIRST_RETRY_S
        self._put_off()  # what is left after that, such as an ending on a full disk, can wait
        if result.payload["found"] is not None:
            log.warning(
                "swap.recovered",
                found=result.payload["found"],
                generation=result.payload["generation"],
                text=result.payload["text"],
            )
        if result.payload["cleared"]:
            log.warning("measurement.cleared", units=result.payload["cleared"])

    def _put_off(self) -> None:
        self._tried = self._unfinished.look() or self._left_by_a_measurement()
        self._not_before_s = self._ctx.clock.monotonic_s() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _say(self, problem: TunerdError) -> None:
        if problem.message in self._said:
            return
        self._said.add(problem.message)
        parts = (problem.message, problem.cause, problem.state)
        text = f"recovery failed: {'; '.join(part for part in parts if part)}"
        self._tell(Event(self._ctx.clock.now_s(), "recovery-failed", "error", text, problem.hint))
