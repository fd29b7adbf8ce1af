"""`tunerd daemon`: recovers, reports ready, then looks, guards and keeps times until it is told to end.

It never stands in production's way: the server's unit neither waits for it nor ends with it.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Protocol

import structlog
from apscheduler.events import EVENT_JOB_ERROR, JobExecutionEvent
from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.triggers.base import BaseTrigger

from tunerd.app import Context
from tunerd.calendar import Opening
from tunerd.errors import Busy, HostError, Interrupted, TunerdError
from tunerd.jobs import Job, folder_of, job_unit, read_job, sweeping_job
from tunerd.machine.clock import Clock, Steps
from tunerd.machine.files import holder_of, is_locked, lock, stamp_of, stopped_hint
from tunerd.machine.process import is_stopped
from tunerd.operations import JobState
from tunerd.production.journal import record_path
from tunerd.production.measurement import has_leftovers
from tunerd.production.own import start_own_unit
from tunerd.production.probation import daemon_lock, read_probation
from tunerd.production.recover import Unfinished, recover
from tunerd.production.status import HAND_IN_EVERY_S, HandedIn
from tunerd.settings import settings_or_last_good
from tunerd.sweep.schedule import begin_night, forget_what_is_ahead, is_wanted_later, next_openings
from tunerd.units.generations import Generation, HistoryEntry, Outcome
from tunerd.units.manager import UP
from tunerd.units.systemd import Notifier
from tunerd.watch.figures import Event, next_look_s
from tunerd.watch.guarding import CutShortError, Guarding
from tunerd.watch.history import HistoryKeeper, Telemetry, history, newest_told
from tunerd.watch.notices import Teller, forget_old_notices, leave_notice, send_left_notices
from tunerd.watch.probation import BY_GUARD, is_raise
from tunerd.watch.watcher import Watcher

log = structlog.get_logger()
Task = Callable[[], float | None]


class _Again(BaseTrigger):  # type: ignore[misc]  # the package has no types
    """When a job runs again: as long after its run as it said then, or as usual."""

    def __init__(self, clock: Clock, job: Task, usual_s: Callable[[], float]) -> None:
        self._clock = clock
        self._job = job
        self._usual_s = usual_s
        self._wait_s = usual_s()

    def run(self) -> None:
        """What the scheduler calls at that time."""
        wait_s: float | None = None
        try:
            wait_s = self._job()
        finally:
            self._wait_s = self._usual_s() if wait_s is None else wait_s

    def get_next_fire_time(self, _previous: datetime | None, now: datetime) -> datetime:
        """What the scheduler asks for, again and again until it lies behind its `now`: the clock may have been set back since."""
        return max(self.in_s(self._wait_s), now + timedelta.resolution)

    def in_s(self, seconds: float) -> datetime:
        """The time in so many seconds."""
        return datetime.fromtimestamp(self._clock.now_s() + seconds, UTC)


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
        self._steps = Steps(clock)
        # A signal's handler would wait for ever for the lock of an Event in which it broke in; this one has none.
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._ends = False

    def run(self) -> None:
        """Until `end` is called."""
        self.add_listener(_say_failure, EVENT_JOB_ERROR)
        self.start()
        while not self._ends:
            self.look_at_clock()
            wait_s = self._process_jobs()
            self._each()
            rest_s = self._each_s if wait_s is None else min(wait_s, self._each_s)
            with contextlib.suppress(Empty):
                self._woken.get(timeout=rest_s)
        self.shutdown(wait=False)

    def look_at_clock(self) -> None:
        """See whether the wall clock was stepped."""
        step_s = self._steps.step_s()
        if step_s:  # which would leave jobs waiting for a time that comes late or never
            log.info("clock.stepped", seconds=round(step_s, 1))
            self._on_step()

    def end(self) -> None:
        """Let `run` return when the job under way is done; may be called by a signal's handler."""
        self._ends = True
        self._woken.put(None)

    def shutdown(self, wait: bool = True) -> None:
        """What `run` ends with."""
        super().shutdown(wait)

    def wakeup(self) -> None:
        """Look soon; what APScheduler calls when jobs have changed, and a signal's handler may."""
        self._woken.put(None)

    def every(
        self, name: str, job: Task, usual_s: float | Callable[[], float], *, first_s: float = 0.0
    ) -> None:
        """Run a job in `first_s`, and again and again; it takes the place of one of the same name.

        Args:
            name: Which.
            job: May say how long to wait until it runs again [s].
            usual_s: How long where it does not say, or fails [s]; a function is asked each time.
            first_s: How long until it runs first [s].
        """
        again = _Again(self._clock, job, usual_s if callable(usual_s) else lambda: usual_s)
        self.add_job(again.run, again, id=name, name=name, replace_existing=True,
                     next_run_time=again.in_s(first_s))  # fmt: skip


def _say_failure(event: JobExecutionEvent) -> None:
    """A job that failed in a way that it does not know is a defect, and no reason to end."""
    log.error("daemon.job_failed", job=event.job_id, problem=repr(event.exception),
              trace=str(event.traceback)[-2000:])  # fmt: skip


# After a recovery that failed: what it needs may come by itself, such as a disk or a driver.
_FIRST_RETRY_S = 15.0
_LAST_RETRY_S = 900.0
_RELOAD_AND_RESTART_S = 600.0


class Recovery(Teller):
    """Looks for unfinished swaps and dead measurements, and mends them when nobody is at work."""

    def __init__(self, ctx: Context, notifier: Notifier, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        self._notifier = notifier
        self._unfinished = Unfinished(ctx)
        self._tried: object = None
        self._retry_s = _FIRST_RETRY_S
        self._not_before_s = 0.0

    def look(self) -> None:
        """Recover if there is something to be recovered, and it is time to try."""
        found = self._found()
        if found is None:
            return
        if is_locked(self._ctx.paths.lock):
            self._look_at_the_holder()
            return
        if found == self._tried and self._ctx.clock.monotonic_s() < self._not_before_s:
            return
        self.recover()

    def _look_at_the_holder(self) -> None:
        """Tell once of a swap that somebody stopped in the middle: it holds the lock, and nobody serves."""
        service, holder = self._ctx.settings.service, holder_of(self._ctx.paths.lock)
        if holder is None or not is_stopped(holder):
            return
        try:
            age_s = self._ctx.clock.now_s() - record_path(self._ctx).stat().st_mtime
        except OSError:
            return
        text = f"a swap is stuck halfway: somebody suspended its process {holder}"
        if age_s > service.start_limit_s + service.generation_limit_s:
            self._once(text, "swap-stopped", "error", text, stopped_hint(holder))

    def _found(self) -> object:
        """What is to be mended; None for nothing."""
        # First: nothing about a measurement may keep a swap half-way.
        unfinished = self._unfinished.look()
        if unfinished is None and has_leftovers(self._ctx):
            return None if is_locked(self._ctx.paths.measure_lock) else "a measurement"
        return unfinished

    def recover(self) -> None:
        """Recover; what cannot be mended is said once, and tried again after longer and longer."""
        service = self._ctx.settings.service.on_the_way_back
        starts_s = 2 * (service.start_limit_s + service.generation_limit_s)
        self._notifier.patience(starts_s + _RELOAD_AND_RESTART_S)
        try:
            self._recover()
        except Busy:
            return  # a swap is under way, and its own process looks after it
        except TunerdError as problem:
            self._put_off()
            parts = (problem.message, problem.cause, problem.state)
            text = f"recovery failed: {'; '.join(part for part in parts if part)}"
            self._once(problem.message, "recovery-failed", "error", text, problem.hint)
        finally:
            self._notifier.patience(None)

    def _recover(self) -> None:
        result = recover(self._ctx)
        self._said.clear()
        self._retry_s = _FIRST_RETRY_S
        self._put_off()  # what is left after that, such as an ending on a full disk, can wait
        if result.payload["found"] is not None:
            told = {name: result.payload[name] for name in ("found", "generation", "text")}
            log.warning("swap.recovered", **told)
        if result.payload["cleared"]:
            log.warning("measurement.cleared", units=result.payload["cleared"])

    def _put_off(self) -> None:
        self._tried = self._found()
        self._not_before_s = self._ctx.clock.monotonic_s() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)


class Swaps(Teller):
    """Tells of each swap that ends while this looks, once."""

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        # Those that need not be told any more.
        self._known: set[int] | None = None
        self._worse: tuple[int, str] | None = None
        self._began_s = ctx.clock.now_s()
        with contextlib.suppress(HostError):
            self._begin()

    def look(self) -> None:
        """Tell of those that have ended since the last call.

        Raises:
            HostError: the generations cannot be read.
        """
        generations = self._ctx.generations
        numbers = generations.numbers()
        if self._known and max(numbers, default=0) < max(self._known):
            self._known = None  # STATE is an older copy, or away: what comes back was told
        if self._known is None or (len(numbers) > 1 > len(self._known) and self._is_old(numbers)):
            if numbers:
                self._begin()
            return
        for number in sorted(set(numbers) - self._known):
            entry = generations.find(number)
            # The newest may be about to be written, or under way.
            is_over = number != numbers[0] if entry is None else not _runs(entry)
            if is_over:
                self._known.add(number)
            if is_over and entry is not None and entry.generation.unit == self._ctx.unit:
                self._say(entry)
        known, self._worse = self._worse, self._stays_worse()
        if self._worse is not None and self._worse != known:
            number, reason = self._worse
            text = f"generation {number} does worse, but was not taken back: {reason}"
            self._event("not-taken-back", "error", text, "`tunerd rollback`")

    def tell_missed(self, seen_s: float | None) -> None:
        """Tell of the newest where it ended after the last look of a daemon that told nobody of it.

        Raises:
            HostError: the generations cannot be read.
        """
        newest = next(iter(self._ctx.generations.entries(self._ctx.unit)), None)
        if newest is None or seen_s is None or (newest.ending.ended_s or 0.0) < seen_s:
            return
        number = newest.generation.number
        name = f"generation {number} ("
        if number in (self._known or ()) and not any(
            name in event.text for event in history(self._ctx, 0.0, 0.0).events
        ):
            self._say(newest)

    def _is_old(self, numbers: Sequence[int]) -> bool:
        """Whether what stands there now, where nothing did, is of a STATE that was mounted since."""
        oldest = self._ctx.generations.find(numbers[-1])
        ended_s = oldest.ending.ended_s if oldest is not None else None
        return ended_s is not None and ended_s < self._began_s

    def _begin(self) -> None:
        """What stands there is known; the newest may be under way."""
        numbers = self._ctx.generations.numbers()
        newest = self._ctx.generations.find(numbers[0]) if numbers else None
        is_under_way = newest is not None and _runs(newest)
        self._known = set(numbers[1:] if is_under_way else numbers)
        self._worse = self._stays_worse()

    def _say(self, entry: HistoryEntry) -> None:
        made, ending = entry.generation, entry.ending
        what = f"generation {made.number} ({made.reason})"
        why = f": {ending.cause}" if ending.cause else ""
        hint = f"`tunerd history show {made.number}`"
        if is_raise(made):
            return  # the guard that did it tells of it
        if ending.outcome is Outcome.STRANDED:
            self._event("swap-stranded", "error", f"{what} does not serve, and what was there before "
                        f"could not be brought back{why}", "`tunerd recover`; `tunerd status`")  # fmt: skip
        elif ending.outcome is Outcome.ROLLED_BACK:
            text = f"{what} did not serve, and what was there before serves again{why}"
            self._event("swap-undone", "warning", text, hint)
        elif ending.outcome is Outcome.ABANDONED:
            text = f"{what} was cut short, and its unit was edited since: it is left as it is"
            self._event("swap-abandoned", "warning", text, hint)
        elif made.reason == BY_GUARD:
            text = f"the server did worse in service and was taken back, {what} serves"
            self._event("taken-back", "warning", f"{text}{self._why_taken_back(made)}", hint)
        elif ending.outcome is Outcome.REMOVED:
            self._event("swap", "note", f"{what} removed the unit; nothing serves", hint)
        else:
            by = f", asked for by {made.requested_by}" if made.requested_by else ""
            self._event("swap", "note", f"{what} serves{by}", hint)

    def _why_taken_back(self, made: Generation) -> str:
        """What the probation of what it replaced found; empty where that cannot be read."""
        taken = self._ctx.generations.serving(made.unit, before=made.number)
        record = None if taken is None else read_probation(self._ctx, taken.generation.number)
        return f": {record.reason}" if record is not None and record.reason else ""

    def _stays_worse(self) -> tuple[int, str] | None:
        """What serves although its probation found it worse, and why it was not taken back."""
        serving = self._ctx.deployed()
        record = None if serving is None else read_probation(self._ctx, serving.number)
        if serving is None or record is None or record.state != "worse":
            return None
        return serving.number, record.reason


def _runs(entry: HistoryEntry) -> bool:
    return entry.ending.outcome is Outcome.RUNNING


TIDY_S = 6 * 3600.0


# Time zones and settings are looked at again at least so often.
LONGEST_WAIT_S = 900.0
# A board without a battery, or one that keeps local time, boots with a wrong clock until the network sets it. Less
# than after which an opening counts as missed.
_CLOCK_IS_SET_S = 300.0
# After what may pass by itself; sooner than an opening counts as missed.
RETRY_S = 120.0
_LEAST_WAIT_S = 1.0
# While a sweep runs: how late its end is told at most. And how late it is seen that the server sleeps.
_RUNS_S = 60.0
# A night as told of when it began, by an earlier version too.
_NIGHT_UNIT = re.compile(r"tunerd-(?:job-(\d+)|sweep)\.service")
_OF_A_NIGHT = ("night", "sweep-over", "sweep-failed")


class Nights(Teller):
    """Begins each night once, and tells how sweeps that run as jobs ended."""

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        self._is_new = True
        self._waits = False
        self._job: int | None = None

    def look(self) -> float:
        """Begin a night that is due; how long to wait until the next look [s]."""
        wait_s = self._look_at_window()
        self._look_at_sweep()
        return wait_s if self._job is None else min(wait_s, _RUNS_S)

    def _look_at_window(self) -> float:
        early_s = _CLOCK_IS_SET_S - self._ctx.clock.monotonic_s()
        if early_s > 0:
            return early_s
        try:
            forget_what_is_ahead(self._ctx)
            found = next_openings(self._ctx, most=2, waits=self._waits)
            now_s = self._ctx.clock.now_s()
            due = next((one for one in found if one.is_due(now_s)), None)
            self._waits = due is not None and is_wanted_later(self._ctx)
            if self._waits:
                return _RUNS_S
            if due is not None:
                self._begin(due)
                return LONGEST_WAIT_S
        except TunerdError as problem:
            self._say_once(problem)
            return RETRY_S
        self._said.clear()
        following = next((one.span.begin_s for one in found if one.span.begin_s > now_s), None)
        if following is None:
            return LONGEST_WAIT_S
        return min(max(following - now_s, _LEAST_WAIT_S), LONGEST_WAIT_S)

    def _begin(self, due: Opening) -> None:
        self._job = begin_night(self._ctx, due)
        if self._job is not None:
            self._said.clear()
            self._event("night", "note", f"the window is open: {job_unit(self._job)} began")
        else:
            job = sweeping_job(self._ctx)
            runs = "somebody already sweeps" if job is None else f"{job_unit(job)} already runs"
            self._event("night", "note", f"the window is open, and {runs}: no other night begins")

    def _look_at_sweep(self) -> None:
        """A job that swept at the last look and does not now has ended."""
        try:
            before, is_new = self._job, self._is_new
            self._job, self._is_new = None, False  # what cannot be read is told of once
            number = before or (self._begun_before() if is_new else None) or sweeping_job(self._ctx)
            if number is None:
                return
            is_alive = folder_of(self._ctx).is_alive(number)  # what it told is much, and read once
            job = None if is_alive else read_job(self._ctx, number)
            if job is None or not job.state.is_over:
                self._job = number
            else:
                self._say_end(job)
        except TunerdError as problem:
            self._say_once(problem)

    def _begun_before(self) -> int | None:
        """The job of a night that a daemon before this one told of, where it told of none of its end."""
        clock, newest = self._ctx.clock, newest_told(self._ctx, *_OF_A_NIGHT)
        if newest is None or newest.kind != _OF_A_NIGHT[0]:
            return None
        if (named := _NIGHT_UNIT.search(newest.text)) is None:
            return None
        is_of_boot = newest.at_s >= clock.now_s() - clock.monotonic_s()
        number = int(named[1] or 0)
        if is_of_boot and folder_of(self._ctx).request(number) is not None:
            return number
        text = "how the sweep ended is not known: the machine was restarted, or tunerd upgraded, since it began"
        self._event("sweep-failed", "warning", text, "`tunerd sweep status`")
        return None

    def _say_end(self, job: Job) -> None:
        result = {} if job.end is None else job.end["result"]
        failed = result.get("error")
        if job.state is JobState.DONE and result.get("command") == "compare":
            text = "the night compared the build before with the one after an upgrade"
            self._event("sweep-over", "note", text, "`tunerd results list`")
        elif job.state is JobState.DONE or (failed and failed["code"] == Interrupted.code):
            said = result.get("sentence", "it was stopped")
            self._event("sweep-over", "note", f"the sweep is over: {said}", "`tunerd sweep show`")
        else:
            why = failed["message"] if failed else result.get("sentence", "its process was killed")
            hint = f"`tunerd jobs watch {job.number}`; `tunerd sweep status`"
            self._event("sweep-failed", "error", f"the sweep failed ({why})", hint)

    def _say_once(self, problem: TunerdError) -> None:
        self._once(problem.message, "night-failed", "error", problem.words, problem.hint)


RECOVERY_S = 5.0
# Its unit starts it again, with another unit or mode to look after.
RESTART = 75
_FIRST_TIDY_S = 120.0


class Part(Protocol):
    """Something that runs beside the loop, in threads of its own, such as the API."""

    def start(self) -> None:
        """Begin; returns at once."""

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on."""

    def stop(self) -> None:
        """End within some seconds."""


MakePart = Callable[[Context, Telemetry], Part]


def run_daemon(ctx: Context, parts: Sequence[MakePart] = ()) -> int:
    """Run until SIGTERM or SIGINT; the exit status. SIGHUP reads the settings again.

    Raises:
        Busy: another daemon looks after the same state: both would act.
    """
    with contextlib.ExitStack() as alone:
        try:
            alone.enter_context(lock(daemon_lock(ctx), purpose="daemon", since=ctx.now_text()))
        except Busy as problem:
            raise Busy(
                "another tunerd daemon already runs here",
                cause=problem.cause,
                state="this one did nothing",
                hint=f"`{ctx.systemctl} status tunerd`; end that one first",
            ) from problem
        except HostError as problem:  # a disk that takes nothing is no reason not to watch
            log.warning("daemon.not_locked", message=problem.message, cause=problem.cause)
        return Daemon(ctx, parts).run()


class Daemon(Teller):
    """All that the daemon does, in one loop."""

    def __init__(self, ctx: Context, parts: Sequence[MakePart] = ()) -> None:
        super().__init__(ctx, self.tell)
        self._notifier = Notifier(ctx.environment)
        self.telemetry = Telemetry()
        self._parts = [make(ctx, self.telemetry) for make in parts]
        each_s = min(RECOVERY_S, self._notifier.watchdog_s or RECOVERY_S)
        self.loop = Loop(ctx.clock, self.alive, each_s, self._plan)
        self._recovery = Recovery(ctx, self._notifier, self.tell)
        self._swaps = Swaps(ctx, self.tell)
        self._watcher = Watcher(ctx)
        self._keeper = HistoryKeeper(ctx, self.tell)
        self._wait_s = ctx.settings.daemon.every_s
        self._nights = Nights(ctx, self.tell)
        self._hand_ins = HandIns(ctx, self.tell)
        self._guarding = Guarding(ctx, self._notifier, self.tell, self._watcher.server)
        self._status = 0
        self._look_problem = ""
        self._notices_seen_s: dict[str, float] = {}
        self._settings_stamp = stamp_of(ctx.paths.settings_file)
        # They may have been changed since they were read; those that are wrong still are told of once.
        _, problem = settings_or_last_good(ctx.paths, ctx.environment, ctx.settings)
        self._wants_reload = ctx.settings_problem is None or problem is None

    def run(self) -> int:
        """Until it is told to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGHUP, self._on_reload)
        self._recovery.recover()
        for part in self._parts:
            part.start()
        self._notifier.ready(f"watching {self._ctx.unit}")
        log.info("daemon.ready", unit=self._ctx.unit, mode=str(self._ctx.mode))
        self._keeper.begin()
        with contextlib.suppress(HostError):
            self._swaps.tell_missed(self._keeper.newest_s)
        if self._ctx.settings_problem is None:
            self._keep_settings()
        else:
            self._refuse(self._ctx.settings_problem)
        self._plan()
        self.loop.run()
        self._notifier.stopping()
        for part in self._parts:
            part.stop()
        self._guarding.pause()
        self._keeper.close()
        log.info("daemon.stopped")
        return self._status

    def tell(self, event: Event) -> None:
        """Say something once: to the journal, to the history, and to whoever wants to be told."""
        say = {"warning": log.warning, "error": log.error}.get(event.level, log.info)
        say(f"event.{event.kind}", text=event.text, hint=event.hint)
        self._keeper.add_event(event)
        try:
            leave_notice(self._ctx, event)
        except TunerdError as problem:
            log.warning("notice.not_sent", message=problem.message, cause=problem.cause)

    def _plan(self) -> None:
        self.loop.every("look", self.look, self._next_look_s)
        self.loop.every("recovery", self._recovery.look, RECOVERY_S, first_s=RECOVERY_S)
        self.loop.every("tidy", self._tidy, TIDY_S, first_s=_FIRST_TIDY_S)
        self.loop.every("notices", self._send_left_notices, TIDY_S)
        self._plan_by_settings()

    def _plan_by_settings(self) -> None:
        self.loop.every("night", self._nights.look, LONGEST_WAIT_S)
        self.loop.every("hand-in", self._hand_ins.look, HAND_IN_EVERY_S)

    def look(self) -> float:
        """One look, and what follows from it; how long to wait until the next [s]."""
        try:
            reading = self._watcher.look()
            self.telemetry.add(reading)
            self._keeper.add(reading)
            set_by, is_busy = self._ctx.settings.daemon, reading.engine.is_busy
            self._wait_s = next_look_s(self._wait_s, idle_s=set_by.every_s,
                                       busy_s=set_by.busy_every_s, is_busy=is_busy)  # fmt: skip
            self._guarding.after(reading)
            self._swaps.look()
            self._look_problem = ""
        except TunerdError as problem:  # of a disk or a service manager; said once, not every time
            if problem.message != self._look_problem:
                log.warning("look.cut_short", message=problem.message, cause=problem.cause)
            self._look_problem = problem.message
        except CutShortError:
            log.info("look.cut_short")
        return self._next_look_s()

    def _next_look_s(self) -> float:
        return min(self._wait_s, self._guarding.longest_wait_s)

    def _tidy(self) -> None:
        self._keeper.tidy()
        forget_old_notices(self._ctx, self._notices_seen_s)

    def _send_left_notices(self) -> None:
        try:
            names = send_left_notices(self._ctx)
        except TunerdError as problem:
            log.warning("notice.not_sent", message=problem.message, cause=problem.cause)
            return
        if names:
            log.info("notices.sent_anew", names=", ".join(names))

    def alive(self) -> None:
        """Feed the watchdog, and see whether the settings have changed."""
        self._notifier.alive()
        before, self._settings_stamp = self._settings_stamp, stamp_of(self._ctx.paths.settings_file)
        if self._wants_reload or before != self._settings_stamp:
            self._wants_reload = False
            self._reload()

    def _reload(self) -> None:
        """Take over settings that changed; wrong ones change nothing.

        Another unit or mode is another daemon's business: that needs a restart.
        """
        ctx = self._ctx
        settings, problem = settings_or_last_good(ctx.paths, ctx.environment, ctx.settings)
        if problem is not None:
            self.take_over(replace(ctx, settings_problem=problem))
            self._refuse(problem)
            return
        is_other = settings.service.unit != ctx.unit or settings.mode != ctx.settings.mode
        if ctx.settings_problem is not None:
            if is_other:  # those that it began with were none of these
                self._status = RESTART
                self.loop.end()
                return
            self.take_over(replace(ctx, settings_problem=None))
            text = "the settings can be read again, and are in force"
            self._event("settings-mended", "note", text)
        if settings == ctx.settings:
            return
        if is_other:
            text = "the settings name another unit or mode: no change takes effect before the daemon restarts"
            self._event("settings-need-restart", "warning", text, self._ctx.restarts_daemon)
            return
        self.take_over(replace(self._ctx, settings=settings))
        self._keep_settings()
        self._plan_by_settings()
        log.info("settings.reloaded")

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on, and have all that it does go by them."""
        super().take_over(ctx)
        self._wait_s = ctx.settings.daemon.every_s
        for one in (self._recovery, self._nights, self._hand_ins, self._guarding):
            one.take_over(ctx)
        for part in self._parts:
            part.take_over(ctx)

    def _refuse(self, problem: str) -> None:
        hint = f"correct `{self._ctx.paths.settings_file}` or the environment"
        self._event("settings-refused", "error", problem, hint)

    def _keep_settings(self) -> None:
        """For a start with wrong ones, which must not end the daemon."""
        ctx = self._ctx
        data = ctx.settings.model_dump(mode="json")
        try:
            ctx.files.make_folder(ctx.paths.state_dir)
            ctx.files.write_json(ctx.paths.last_settings, data, mode=0o600)  # they name a webhook
        except HostError as problem:
            log.warning("settings.not_kept", message=problem.message, cause=problem.cause)

    def _on_end(self, _number: int, _frame: FrameType | None) -> None:
        self.loop.end()
        self._guarding.cut_short()

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._wants_reload = True
        self.loop.wakeup()


HAND_IN_UNIT = "tunerd-hand-in.service"
_LOOK_AT_EVIDENCE_S = 15.0
_NO_WORD = "the command that does it ended without a message"


class HandIns(Teller):
    """Has evidence handed in after each measurement, and every so often."""

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        self._runs = False
        self._begun_s: float | None = None
        self._seen = self._handed = self._stamp()
        self._before: HandedIn | None = None

    def look(self) -> float:
        """Begin what is due, and see how the last one ended; how long to wait until the next look [s]."""
        if self._ctx.settings.store.url is None:
            return HAND_IN_EVERY_S
        now_s = self._ctx.clock.monotonic_s()
        seen, self._seen = self._seen, self._stamp()
        # What is being written goes on, and a measurement is not disturbed.
        is_over = seen == self._seen and not is_locked(self._ctx.paths.measure_lock)
        is_late = self._begun_s is None or now_s - self._begun_s >= HAND_IN_EVERY_S
        try:
            self._look_at_unit()
            if not self._runs and (is_late or (is_over and self._seen != self._handed)):
                self._begun_s, self._handed = now_s, self._seen
                self._before = self._ctx.files.recall(HandedIn, self._ctx.paths.handed_in)
                what = "hands evidence in to the shared store"
                words = ["fleet", "hand-in"]
                start_own_unit(self._ctx, HAND_IN_UNIT, what, words, is_told=True)
                self._runs = True
        except TunerdError as problem:
            self._say(problem.words)
        return _LOOK_AT_EVIDENCE_S

    def _stamp(self) -> object:
        """How the evidence's files look: another stamp after anything was stored."""
        path = self._ctx.paths.evidence
        return stamp_of(path), stamp_of(path.with_name(f"{path.name}-wal"))

    def _look_at_unit(self) -> None:
        state = self._ctx.services.state(HAND_IN_UNIT)
        # Somebody may do it by hand.
        is_at_work = is_locked(self._ctx.paths.handed_in.with_suffix(".lock"))
        has_run, self._runs = self._runs, state.active_state in UP or is_at_work
        if not has_run or self._runs:
            return
        now = self._ctx.files.recall(HandedIn, self._ctx.paths.handed_in)
        is_told = now is not None and (now.problem is not None or now != self._before)
        self._say(now.problem if now is not None and is_told else _NO_WORD)

    def _say(self, problem: str | None) -> None:
        if problem is None:
            self._said.clear()
            return
        text = f"evidence is not handed in to the shared store, and is kept here: {problem}"
        self._once(problem, "hand-in-failed", "warning", text, "tunerd fleet hand-in")
