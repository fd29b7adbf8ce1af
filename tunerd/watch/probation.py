"""The time after a swap in which a worse server is taken back: a state of whoever looks at the server.

That is the daemon, with the same looks as its guards. The record of each probation is a file, so that it
outlives a daemon.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import structlog

from tunerd import errors
from tunerd.app import Context
from tunerd.engine.serving import drop_ins_in_force, other_drop_ins, stands
from tunerd.machine.clock import Steps
from tunerd.machine.files import is_locked
from tunerd.machine.process import boot_id
from tunerd.production.journal import read_record
from tunerd.production.own import probation_unit, start_own_unit
from tunerd.production.probation import (
    PAUSED,
    RUNNING,
    ProbationRecord,
    daemon_lock,
    keep_probation,
    read_probation,
    record_path,
)
from tunerd.profile.files import TunedRecord, read_tuned
from tunerd.records import plain, read, read_or_none
from tunerd.result import ActionResult, note, warning
from tunerd.units.generations import Generation, HistoryEntry
from tunerd.units.manager import UP
from tunerd.watch.drift import (
    DRIFT,
    WENT_DOWN,
    Basis,
    Course,
    Drift,
    is_long_enough,
    judge,
    look_of,
)
from tunerd.watch.figures import UNKNOWN, Reading
from tunerd.watch.watcher import server_log

_MOST_TRIES = 3
# Ends by `kill` that are held against nobody: a server that ends well by itself again and again is no good either.
_MOST_ENDED = 2
_ENDED, _TAKEN_BACK = "ended", "taken back"
_EDITED = "somebody edited the unit"
_OVERTAKEN = "something else was deployed"
_NO_REASON = "it was taken back"

MARGIN_KEY = "memory.fit_mib"
BY_GUARD = "guard"

log = structlog.get_logger()


def is_raise(generation: Generation) -> bool:
    """Whether the guard against out-of-memory raised the margin in it.

    What takes a server back has the same reason, from a generation or from a unit of before there were any.
    """
    return (
        generation.reason == BY_GUARD
        and generation.from_generation is None
        and MARGIN_KEY in generation.pins
    )


_BasisOf = Callable[[Generation], Basis | None]


@dataclass(slots=True)
class _Watch:
    """The probation of one generation, as it stands.

    `slept` is the life under which the machine did, `n_ended` how often somebody ended it by a signal.
    """

    entry: HistoryEntry
    record: ProbationRecord
    drift: Drift
    left_s: float
    restarts: int
    basis: Basis
    life: str | None
    looked_s: float
    course: Course = field(default_factory=Course)
    decided: str | None = None
    slept: str | None = None
    unseen_s: float = 0.0
    stopped_s: float = 0.0
    tries: int = 0
    n_ended: int = 0
    is_being_taken: bool = False

    @property
    def generation(self) -> Generation:
        return self.entry.generation

    def stepped(self, by_s: float) -> None:
        """The machine slept, or its clock was set: looks of before are as far from those to come as they were."""
        self.course = self.course.later(by_s)

    def begin_again(self, life: str | None) -> None:
        self.course = Course()
        self.life = life
        if self.decided != WENT_DOWN:
            self.decided = None


class Probation:
    """Watches what was deployed last, where its record says so, look by look.

    Each look stands for the time since the one before it; while the server is changed or measured there
    are none, and no time passes.

    Args:
        ctx: Where.
        basis_of: What was measured of a generation, as far as that is known now.
    """

    def __init__(self, ctx: Context, basis_of: _BasisOf) -> None:
        self._ctx = ctx
        self._basis_of = basis_of
        self._watch: _Watch | None = None
        self._steps = Steps(ctx.clock)

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on; what was seen is still known."""
        self._ctx = ctx

    def is_watching(self) -> bool:
        """Whether something is watched, so that no guard deals with its deaths."""
        return self._watch is not None

    def after(self, reading: Reading) -> str | None:
        """Take a look into account; why the server is to be taken back, where it is."""
        try:
            return self._after(reading)
        except errors.TunerdError as problem:  # a disk, or a service manager that does not answer
            log.warning("probation.not_seen", problem=problem.message)
            if self._watch is not None:
                self._not_seen(self._watch)
            return None

    def _after(self, reading: Reading) -> str | None:
        ctx, now_s = self._ctx, self._ctx.clock.monotonic_s()
        is_changing, step_s = is_locked(ctx.paths.lock) or _is_swapping(ctx), self._steps.step_s()
        watch = self._watch if is_changing else self._watched(reading)
        if step_s and watch is not None:
            watch.stepped(step_s)
        if self._steps.has_slept and watch is not None:
            watch.slept = watch.life or reading.engine.life
        if is_changing:
            if watch is not None:  # which may fail, and leave this one serving
                watch.looked_s = now_s
            return None
        if watch is None or (watch.is_being_taken and not self._has_failed(watch)):
            return None
        over = self._why_over(watch)
        if over is not None:
            self._end(*over)
            return None
        if reading.measuring is not None or reading.awaits_reboot:
            # Production is away on purpose, or cannot start whatever it is, and returns as another life.
            watch.begin_again(None)
            watch.restarts = min(watch.restarts, reading.engine.n_restarts or 0)
            watch.looked_s = now_s
            return None
        if watch.decided is None:
            watch.decided = self._slow(watch, reading) or self._judged(watch, reading)
        return watch.decided

    def pause(self) -> None:
        """Somebody ends who looks, as a reboot does: that is no failure of what is watched."""
        if self._watch is not None and not self._watch.is_being_taken:
            self._write(self._watch, PAUSED, self._watch.record.reason)

    def begin_taking_back(self, reason: str) -> None:
        """Have it taken back by a unit of its own."""
        ctx, watch = self._ctx, self._watch
        if watch is None:
            return
        number = watch.generation.number
        # A power cut now must not end the watch.
        self._write(watch, RUNNING, reason)
        words = ["probation", "take-back", str(number), "--reason", reason]
        words += [] if watch.record.sweep is None else ["--sweep", str(watch.record.sweep)]
        unit, what = probation_unit(number), f"takes generation {number} back"
        log.warning("probation.takes_back", generation=number, reason=reason)
        try:
            start_own_unit(ctx, unit, what, words, is_told=True)
            watch.is_being_taken = True
        except errors.TunerdError as problem:
            log.warning("probation.not_started", unit=unit, problem=problem.message)

    def _has_failed(self, watch: _Watch) -> bool:
        """Whether what was to take it back has ended, and left it as it was."""
        ctx, number = self._ctx, watch.generation.number
        if ctx.services.state(probation_unit(number)).active_state in UP:
            return False
        record = read_probation(ctx, number)
        if record is not None and not record.is_open:
            self._watch = None
            return False
        watch.is_being_taken, watch.tries = False, watch.tries + 1
        if watch.tries < _MOST_TRIES or self._why_over(watch) is not None:
            return True
        self._end("worse", f"{watch.record.reason}; it could not be taken back")
        return False

    def _watched(self, reading: Reading) -> _Watch | None:
        """What is to be watched now, begun or gone on with where its record says so."""
        ctx = self._ctx
        entry = ctx.generations.serving(ctx.unit)
        if self._watch is not None or entry is None:
            return self._watch
        number = entry.generation.number
        record = read_probation(ctx, number)
        if record is None or not record.is_open:
            return None
        if ctx.services.state(probation_unit(number)).active_state in UP:
            return None  # what another daemon began takes it back
        watch = self._begun(entry, record, reading)
        self._watch = watch
        if watch.decided is None:  # which holds until it is dealt with
            self._write(watch, RUNNING, "")
        log.info("probation.watches", generation=number, left_s=round(watch.left_s))
        return watch

    def _begun(self, entry: HistoryEntry, earlier: ProbationRecord, reading: Reading) -> _Watch:
        ctx, now_s, boot = self._ctx, self._ctx.clock.now_s(), boot_id()
        basis = self._basis_of(entry.generation) or read_or_none(Basis, earlier.basis) or Basis()
        is_other_boot = boot is not None and earlier.boot_id not in {None, boot}
        went_down = is_other_boot and earlier.state == RUNNING  # without an order to
        record = replace(earlier, reason="", began_s=now_s, looked_s=now_s, boot_id=boot)
        if is_other_boot:  # what a boot needs to have card and disks is no fault of the server
            record = replace(record, restarts=reading.engine.n_restarts or 0)
        return _Watch(
            entry, record, Drift(server_log(ctx)), record.left_s, record.restarts, basis,
            reading.engine.life, ctx.clock.monotonic_s(),
            decided=WENT_DOWN if went_down else earlier.reason or None,
        )  # fmt: skip

    def _why_over(self, watch: _Watch) -> tuple[str, str] | None:
        if not self._ctx.settings.probation.enabled:
            return _ENDED, "probation.enabled is false"
        return _why_over(self._ctx, watch.entry)

    def _slow(self, watch: _Watch, reading: Reading) -> str | None:
        """Why its speed alone is a reason: by its counters, and borne out by its own log."""
        basis = watch.basis
        found = watch.drift.after(reading, basis.floor, "advise", demands_log=True)
        if found is None or found.kind != DRIFT:
            return None
        before = basis.previous_tok_s
        return (
            f"it decodes slower in service than measured: {found.evidence}; its slowest kind of text was "
            f"measured at {basis.slowest_tok_s:.1f}"
            + ("" if before is None else f", that of what served before at {before:.1f}")
        )

    def _passed_s(self, watch: _Watch) -> float | None:
        """How long it was watched since the last look that counted; None where the next is not due."""
        now_s = self._ctx.clock.monotonic_s()
        settings = self._ctx.settings.probation
        every_s = min(settings.every_s, settings.duration_s)
        passed_s = now_s - watch.looked_s
        if passed_s < every_s:
            return None
        watch.looked_s = now_s
        return min(passed_s, 2 * every_s)

    def _not_seen(self, watch: _Watch) -> None:
        watch.unseen_s += self._passed_s(watch) or 0.0
        self._end_in_time(watch)

    def _judged(self, watch: _Watch, reading: Reading) -> str | None:
        if reading.engine.active_state == UNKNOWN:  # a service manager that does not answer
            self._not_seen(watch)
            return None
        passed_s = self._passed_s(watch)
        if passed_s is None:
            return None
        # Somebody may have measured it.
        watch.basis = self._basis_of(watch.generation) or watch.basis
        look = look_of(reading)
        watch.restarts = min(watch.restarts, look.n_restarts or 0)
        watch.life = watch.life or look.life
        if look.life != watch.life and look.is_active and not look.n_restarts:
            watch.begin_again(look.life)  # a person restarted it
        restarts = look.n_restarts or 0
        has_slept = watch.slept is not None and watch.slept == watch.life
        # What a card loses while the machine sleeps is no fault of what was deployed, nor is an end by `kill`.
        if restarts > watch.restarts and (has_slept or self._was_ended(watch, restarts)):
            watch.begin_again(look.life)
            watch.restarts, watch.slept = restarts, None
        watch.course = watch.course.then(look)
        if look.is_stopped:
            watch.stopped_s += passed_s
        else:
            watch.left_s -= passed_s
        if watch.left_s <= 0 and not look.is_ready:
            watch.unseen_s += passed_s
        reason = judge(watch.course, watch.basis, restarts=watch.restarts)
        if reason is None and not self._end_in_time(watch):
            self._write(watch, RUNNING, "")
        return reason

    def _was_ended(self, watch: _Watch, restarts: int) -> bool:
        """Whether somebody ended it by a signal that it obeyed: it had served, and has ended well in that one life since."""
        ready = watch.course.ready
        if ready is None or ready.life is None or restarts != watch.restarts + 1:
            return False
        with contextlib.suppress(errors.TunerdError):
            if ready.life == watch.life and self._ctx.services.ended_well(
                self._ctx.unit, ready.life
            ):
                watch.n_ended += 1
                return watch.n_ended <= _MOST_ENDED
        return False

    def _end_in_time(self, watch: _Watch) -> bool:
        is_enough = is_long_enough(watch.course, watch.left_s)
        limit_s = self._ctx.settings.probation.duration_s
        if not is_enough and max(watch.stopped_s, watch.unseen_s) < limit_s:
            return False
        if watch.course.last and watch.course.last[-1].is_stopped:
            self._end(_ENDED, "somebody stopped it")
        elif not is_enough:
            self._end(_ENDED, "it was not seen to serve")
        elif watch.basis.slowest_tok_s is None:
            self._end("passed", "it served; its speed was not judged, as it was never measured")
        elif watch.drift.not_judged is not None:
            self._end("passed", f"it served; {watch.drift.not_judged}")
        else:
            self._end("passed", "nothing was worse than measured")
        return True

    def _end(self, state: str, reason: str) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        record = read_probation(self._ctx, watch.generation.number)
        if record is None or record.is_open:  # else whoever took it back has said so
            watch.left_s = 0.0
            self._write(watch, state, reason)

    def _write(self, watch: _Watch, state: str, reason: str) -> None:
        ctx = self._ctx
        watch.record = replace(
            watch.record,
            state=state,
            reason=reason,
            looked_s=ctx.clock.now_s(),
            left_s=max(0.0, watch.left_s),
            restarts=watch.restarts,
            basis=plain(watch.basis),
            looks=watch.course.n,
            tok_s=watch.drift.tok_s,
        )
        keep_probation(ctx, watch.record)


class _Overtaken(Exception):
    """Something else serves than what is watched."""


def take_back(ctx: Context, number: int, reason: str, *, sweep: int | None) -> ActionResult:
    """`tunerd probation take-back`: back to what served before a generation that does worse.

    The arm is remembered where a sweep proved it, once it was taken back.

    Raises:
        UsageError: there is no such generation.
        Busy: somebody changes the server.
        Stranded: neither server came back.
    """
    from tunerd.production.rollback import rollback

    ctx = replace(ctx, is_unattended=True)
    if number not in ctx.generations.numbers():
        raise errors.UsageError(
            f"there is no generation {number}",
            state="nothing was touched",
            hint="`tunerd history` lists what there is",
        )
    now_s = ctx.clock.now_s()
    record = read_probation(ctx, number) or ProbationRecord(
        number, sweep, RUNNING, "", now_s, now_s, left_s=0.0, restarts=0, boot_id=boot_id()
    )
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.number != number:
        return _closed(ctx, record, *_overtaken(ctx, number), 0)

    def demand_still(_target: object) -> None:
        """Asked under the lock: nobody has deployed or edited anything since the last look."""
        if _why_over(ctx, entry) is not None:
            raise _Overtaken

    keep_probation(ctx, replace(record, state=RUNNING, reason=reason))
    sweep = record.sweep if sweep is None else sweep
    tuned = _tuned_by(ctx, entry.generation.profile, sweep)
    state, told, exit_code = _TAKEN_BACK, reason, 3
    try:
        rollback(ctx, to=_back(ctx, entry), drain=True, confirm=demand_still, reason="guard",
                 tuned=tuned)  # fmt: skip
    except _Overtaken:
        return _closed(ctx, record, *(_why_over(ctx, entry) or _overtaken(ctx, number)), 0)
    except (errors.Busy, errors.Stranded):
        raise
    except errors.RolledBack:
        state, told = "worse", f"{reason}; what served before does not serve either"
    except (errors.DeployError, errors.UsageError) as error:
        state, exit_code = "worse", 1
        told = f"{reason}; it could not be taken back: {error.message}"
    ended = _closed(ctx, record, state, told, exit_code)
    if (
        sweep is not None and state == _TAKEN_BACK
    ):  # last: a full disk, or a locked store, may end it here
        _remember(ctx, entry.generation, sweep, reason)
    return ended


def _closed(
    ctx: Context, record: ProbationRecord, state: str, reason: str, exit_code: int
) -> ActionResult:
    ended = replace(record, state=state, reason=reason, left_s=0.0)
    keep_probation(ctx, ended)
    return ActionResult("probation take-back", plain(ended), (), exit_code, has_acted=True)


def _tuned_by(ctx: Context, profile: str | None, sweep: int | None) -> TunedRecord | None:
    """The tuned layer in force that a sweep has found; None also where its record is damaged."""
    found = None
    if profile is not None:
        with contextlib.suppress(errors.HostError):  # which keeps nobody from going back
            found = read_tuned(ctx, profile)
    return found if found is not None and found.sweep == sweep else None


def _back(ctx: Context, entry: HistoryEntry) -> str | None:
    """The backup of what served before, or the generation that it was where that is gone."""
    backup = entry.generation.replaced_backup
    if backup is None or ctx.files.read(ctx.paths.unit_dir / backup) is not None:
        return backup
    replaced = ctx.generations.serving(ctx.unit, before=entry.generation.number)
    return backup if replaced is None else str(replaced.generation.number)


def _remember(ctx: Context, generation: Generation, sweep: int, reason: str) -> None:
    from tunerd.measure.store import reading
    from tunerd.profile.arm import Arm
    from tunerd.sweep.record import after_failure, find_sweep

    with reading(ctx) as store:
        found = find_sweep(ctx, store, sweep)
    if found.verdict is None or generation.profile is None:
        return
    arm = read(Arm, found.verdict.details["arm"])
    after_failure(ctx, generation.profile, found.number, arm, generation.engine_sha256, reason)


def _why_over(ctx: Context, entry: HistoryEntry) -> tuple[str, str] | None:
    """How it ended, and why, by what serves and stands now; None while that is what is watched."""
    serving = ctx.deployed()
    if serving is None or serving.number != entry.generation.number:
        return _overtaken(ctx, entry.generation.number)
    return (_ENDED, _EDITED) if _is_edited(ctx, entry) else None


def _overtaken(ctx: Context, number: int) -> tuple[str, str]:
    """How the probation of a generation ended in whose place another serves, and why.

    By what came after it: who takes it back says so a moment later, or is killed before.
    """
    later = takewhile(lambda one: one.generation.number > number, ctx.generations.entries(ctx.unit))
    done = [one.generation for one in later if one.ending.outcome.is_done]
    if done and done[-1].reason == BY_GUARD and not is_raise(done[-1]):
        record = read_probation(ctx, number)
        return _TAKEN_BACK, (record and record.reason) or _NO_REASON
    return _ENDED, _OVERTAKEN


def _is_edited(ctx: Context, entry: HistoryEntry) -> bool:
    """Whether the unit's file, or what is laid over it, is another than was deployed."""
    if not stands(ctx, entry.generation):
        return True
    now = () if entry.ending.drop_ins is None else drop_ins_in_force(ctx) or ()
    return any(other_drop_ins(ctx, now, entry.ending))


def _is_swapping(ctx: Context) -> bool:
    try:
        return read_record(ctx) is not None
    except errors.HostError:
        return True


def show_probation(ctx: Context) -> ActionResult:
    """Every probation that is known, newest first."""
    rows: list[Mapping[str, Any]] = []
    messages = []
    for number in ctx.generations.numbers():
        path = record_path(ctx, number)
        if not path.exists():
            continue
        record = read_probation(ctx, number)
        if record is None:
            text = f"the record of the probation of generation {number} is damaged, or of another version: `{path}`"
            messages.append(warning("damaged", text, "the others are shown"))
            continue
        rows.append(plain(_as_it_stands(ctx, record)))
    if not rows and not messages:
        messages.append(note("no-probation", "nothing was watched yet"))
    return ActionResult("probation show", {"probations": rows}, tuple(messages))


def _as_it_stands(ctx: Context, record: ProbationRecord) -> ProbationRecord:
    """One that nobody closed is over where something else serves, and cut where no daemon looks, or did just now."""
    if not record.is_open:
        return record
    serving = ctx.deployed()
    if serving is None or serving.number != record.generation:
        state, reason = _overtaken(ctx, record.generation)
        return replace(record, state=state, reason=reason)
    age_s = ctx.clock.now_s() - record.looked_s
    is_watched = is_locked(daemon_lock(ctx)) or age_s < 3 * ctx.settings.probation.every_s
    if is_watched or record.state == PAUSED:
        return record
    return replace(record, state="cut", reason="no tunerd daemon runs; start one to go on")
