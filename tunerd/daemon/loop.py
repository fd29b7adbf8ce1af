"""APScheduler without threads: its jobs run in the loop that feeds the watchdog.

A job that hangs is then a daemon that hangs, which systemd ends and starts again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from apscheduler.events import EVENT_JOB_ERROR, JobExecutionEvent
from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.triggers.date import DateTrigger

from tunerd.system.seams import Clock

log = structlog.get_logger()
# A wall clock that is stepped by more would leave jobs waiting for a time that comes late or never.
_STEP_S = 2.0


class Loop(BaseScheduler):  # type: ignore[misc]  # the package has no types
    """Jobs at their times, one after the other, in the thread that calls `run`.

    Args:
        clock: What time it is.
        each: Called between jobs and at least every `each_s`.
        each_s: Longest wait without a call [s].
        on_step: Called when somebody has set the wall clock, or the machine slept: its jobs have to be
            given their times anew.
    """

    def __init__(
        self, clock: Clock, each: Callable[[], None], each_s: float, on_step: Callable[[], None]
    ) -> None:
        super().__init__(
            timezone=UTC,
            executors={"default": DebugExecutor()},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
        )
        self._clock = clock
        self._each = each
        self._each_s = each_s
        self._on_step = on_step
        self._ahead_s = clock.now_s() - clock.monotonic_s()
        self._names: dict[str, str] = {}
        self._n_planned = 0
        self._woken = threading.Event()
        self._ends = threading.Event()

    def run(self) -> None:
        """Until `end` is called."""
        self.add_listener(_say_failure, EVENT_JOB_ERROR)
        self.start()
        while not self._ends.is_set():
            self.look_at_clock()
            wait_s = self._process_jobs()
            self._each()
            self._woken.wait(self._each_s if wait_s is None else min(wait_s, self._each_s))
            self._woken.clear()
        self.shutdown(wait=False)

    def look_at_clock(self) -> None:
        """See whether the wall clock was stepped."""
        ahead_s = self._clock.now_s() - self._clock.monotonic_s()
        if abs(ahead_s - self._ahead_s) > _STEP_S:
            log.info("clock.stepped", seconds=round(ahead_s - self._ahead_s, 1))
            self._on_step()
        self._ahead_s = ahead_s

    def end(self) -> None:
        """Let `run` return when the job under way is done; may be called by a signal's handler."""
        self._ends.set()
        self._woken.set()

    def shutdown(self, wait: bool = True) -> None:
        """What `run` ends with."""
        super().shutdown(wait)

    def wakeup(self) -> None:
        """What APScheduler calls when the jobs have changed."""
        self._woken.set()

    def wake(self) -> None:
        """Call `each` soon; may be called by a signal's handler."""
        self._woken.set()

    def in_s(self, name: str, seconds: float, job: Callable[[], Any]) -> None:
        """Run a job once, so many seconds from now; it takes the place of one of the same name."""
        before = self._names.pop(name, None)
        if before is not None:
            self.remove_job(before)
        # A job that plans itself anew needs another id: APScheduler removes the one that just ran.
        self._n_planned += 1
        number = f"{name}-{self._n_planned}"
        at = datetime.fromtimestamp(self._clock.now_s(), UTC) + timedelta(seconds=seconds)
        self._names[name] = number
        self.add_job(lambda: self._run(name, number, job), DateTrigger(at), id=number, name=name)

    def _run(self, name: str, number: str, job: Callable[[], Any]) -> None:
        if self._names.get(name) == number:
            del self._names[name]
        job()


def _say_failure(event: JobExecutionEvent) -> None:
    """A job that failed in a way that it does not know is a defect, and no reason to end."""
    log.error("daemon.job_failed", job=event.job_id, problem=repr(event.exception),
              trace=str(event.traceback)[-2000:])  # fmt: skip
