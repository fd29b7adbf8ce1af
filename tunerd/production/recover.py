"""Finishes or undoes what an interrupted swap left; run at the daemon's start and before every change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tunerd.app import Context
from tunerd.engine.health import FailureKind
from tunerd.engine.serving import (
    check_manager,
    demand_replaceable,
    drop_ins_in_force,
    standing_text,
)
from tunerd.errors import HostError, ServiceError, Stranded, TunerdError
from tunerd.machine.files import lock
from tunerd.machine.process import boot_id
from tunerd.production import gate
from tunerd.production.journal import (
    Recovery,
    SwapRecord,
    cut_short,
    decide_recovery,
    others_on_record,
    read_record,
    record_path,
)
from tunerd.production.measurement import clear_dead_measurements, end_measurement
from tunerd.production.probation import begin_probation, forget_probation, read_probation
from tunerd.production.swap import ForeignEditError, go_back
from tunerd.production.tuned import settle_tuned
from tunerd.records import plain
from tunerd.result import ActionResult, Message, note, warning
from tunerd.units.generations import Ending, Outcome
from tunerd.units.text import demand_as_shown
from tunerd.words import sha256

UNDONE = "undone"
"""The code of what says that recovery has just undone a deployment."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery found and did; `found` is None where there was nothing to recover.

    `remarks` are what a person should know of the probation and the tuned layer of what it finished. `is_undone`: what
    was to be deployed is not, and what served before is as it was.
    """

    found: Recovery | None
    generation: int | None
    text: str
    serving: bool | None
    remarks: tuple[Message, ...] = ()
    is_undone: bool = False


class Unfinished:
    """Looks, cheaply and often, for a swap that was cut short."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._well: object = None

    def look(self) -> object:
        """Something that is the same as long as nothing changes; None if nothing is unfinished.

        While a swap runs it looks the same as one that was cut short: only the lock tells.
        """
        try:
            status = record_path(self._ctx).stat()
        except OSError:
            return self._newest()
        return (status.st_ino, status.st_mtime_ns)

    def _newest(self) -> object:
        """The newest generation, if it has no ending."""
        try:
            signature = self._ctx.paths.generations_dir.stat().st_mtime_ns
        except OSError:
            return None
        if signature == self._well:
            return None
        newest = next(iter(self._ctx.generations.numbers()), None)
        if newest is not None and not self._ctx.generations.has_ended(newest):
            return (newest, signature)
        self._well = signature
        return None


def recover(ctx: Context) -> ActionResult:
    """`tunerd recover`: take the lock, then recover.

    Raises:
        Busy: a swap is under way right now.
        ServiceError: what a measurement left cannot be mended; an unfinished swap was, all the same.
        Stranded: the old unit could not be brought back.
    """
    with lock(ctx.paths.lock, purpose="recover", since=ctx.now_text()):
        try:
            cleared = clear_dead_measurements(ctx)
        except TunerdError:  # which keeps no swap half-way
            _recover_all(ctx)
            raise
        ends = _recover_all(ctx)
        loaded = [message for one, end in ends for message in _remember(one, end)]
    messages = [message for one, end in ends for message in _told(one, end)]
    if cleared:
        messages.append(
            note("cleared", f"removed what a measurement left behind: {', '.join(cleared)}")
        )
    messages += [remark for _, end in ends for remark in end.remarks] + loaded
    done = next((end for _, end in ends if end.found is not None), ends[0][1])
    payload = {**plain(done), "cleared": list(cleared)}
    del payload["remarks"]
    has_acted = done.found is not None or bool(cleared)
    return ActionResult("recover", payload, tuple(messages), has_acted=has_acted)


def _recover_all(ctx: Context) -> list[tuple[Context, Recovered]]:
    """Recover the unit, and others that a record names while the settings cannot be read."""
    service = ctx.settings.service
    ends = [(ctx, recover_locked(ctx))]
    for unit in others_on_record(ctx):
        settings = {"service": service.model_copy(update={"unit": unit})}
        one = replace(ctx, settings=ctx.settings.model_copy(update=settings))
        ends.append((one, recover_locked(one)))
    return ends


def _told(ctx: Context, end: Recovered) -> Iterator[Message]:
    if end.found is Recovery.FOREIGN:
        yield warning("foreign-edit", end.text, "`tunerd verify` shows the difference")
    elif end.found is not None:
        of_unit = "" if ctx.settings_problem is None else f"{ctx.unit}: "
        yield note("recovered", f"{of_unit}{end.text}")


def _remember(ctx: Context, done: Recovered) -> tuple[Message, ...]:
    """Keep what a load showed of memory, where recovery saw a server serve."""
    if done.found in {None, Recovery.COMMITTED, Recovery.FOREIGN} or not done.serving:
        return ()
    from tunerd.production.plan import remember_live_load

    return remember_live_load(ctx)


def recover_locked(ctx: Context) -> Recovered:
    """Recover; the caller holds the lock.

    Raises:
        HostError: the record cannot be read, or a file cannot be written.
        Stranded: the old unit could not be brought back; the record stays.
    """
    _clear_leftovers(ctx)
    try:
        record = read_record(ctx)
    except HostError:
        if not _is_known_to_serve(ctx):
            raise
        return _set_aside(ctx)
    if record is None:
        _settle_endings(ctx)
        return Recovered(None, None, "nothing to recover", None)
    entry = ctx.generations.find(record.generation)
    found = decide_recovery(
        record,
        unit_sha256=sha256(standing_text(ctx)),
        boot_id=boot_id() or "unknown",
        is_committed=entry is not None and entry.ending.outcome.is_done,
    )
    try:
        match found:
            case Recovery.COMMITTED:
                done = _committed(ctx, record)
            case Recovery.UNTOUCHED:
                done = _undo(ctx, record, Recovery.UNTOUCHED, "it was cut short")
            case Recovery.JUDGE:
                done = _judge(ctx, record)
            case Recovery.UNDO:
                done = _undo(ctx, record, Recovery.UNDO, "the machine went down during its trial")
            case Recovery.FOREIGN:
                done = _foreign(ctx, record)
    except ForeignEditError:  # in the middle of the recovery
        done = _foreign(ctx, record)
    except (KeyboardInterrupt, SystemExit) as end:
        with contextlib.suppress(HostError):
            stands = cut_short(ctx, record)
            end.add_note(f"{stands}; `tunerd recover` will finish or undo it")
        raise
    _settle_endings(ctx)
    return done


class Shown(Protocol):
    """What would be done, by the difference that a person is shown of it."""

    @property
    def diff(self) -> str:
        """The difference between the units."""


T = TypeVar("T", bound=Shown)


@contextlib.contextmanager
def changing(
    ctx: Context,
    purpose: str,
    prepare: Callable[[], T],
    *,
    ask: Callable[[T], None] | None,
    confirm: Callable[[T], None],
    by: str,
    messages: list[Message],
) -> Iterator[T]:
    """Hold the lock of changes, for a swap to what was prepared under it.

    What an interrupted swap left is mended before, as far as that can be, and a measurement under way is ended. A
    person is asked without the lock: they may take an hour, in which rollback, guards and recovery work.

    Args:
        ctx: Where.
        purpose: What for, told to who meets the lock.
        prepare: Finds what is to be done, and raises where it cannot be.
        ask: Shows it and asks a person; raises to stop.
        confirm: Checks it under the lock; raises to stop.
        by: What ends a measurement.
        messages: Takes what a person should know.

    Raises:
        Busy: another change is under way.
        DeployError: the unit is masked or an alias, or what would change is no longer what was shown.
    """
    left_behind: SwapRecord | None = None

    def prepared() -> T:
        nonlocal left_behind
        check_manager(ctx)
        demand_replaceable(ctx)
        gate.demand_card(ctx, ctx.services.state(ctx.unit))
        if left_behind is not None and read_record(ctx) == left_behind:
            return prepare()  # it was tried before the question, and takes minutes where it hangs
        try:
            recovered = recover_locked(ctx)
        except Stranded as stranded:
            messages.append(_left_behind(ctx, stranded))
            left_behind = read_record(ctx)
        else:
            if recovered.found is not None:
                messages.append(
                    note(UNDONE if recovered.is_undone else "recovered", recovered.text)
                )
        return prepare()

    agreed: T | None = None
    if ask is not None:
        with lock(ctx.paths.lock, purpose=purpose, since=ctx.now_text()):
            agreed = prepared()
        ask(agreed)
    with lock(ctx.paths.lock, purpose=purpose, since=ctx.now_text()):
        found = prepared()
        if agreed is not None:
            demand_as_shown(found.diff, agreed.diff)
        confirm(found)
        ended = end_measurement(ctx, by=by)
        if ended is not None:
            messages.insert(0, note("measurement-ended", ended))
        yield found


def _left_behind(ctx: Context, stranded: Stranded) -> Message:
    """That what served does not come back: what is asked for now may serve, and begins from its text.

    Raises:
        Stranded: another text stands.
    """
    record = read_record(ctx)
    if record is None or sha256(standing_text(ctx)) != record.old_sha256:
        raise stranded
    if not ctx.generations.has_ended(record.generation):
        ending = Ending(Outcome.STRANDED, ctx.clock.now_s(), None, None, stranded.words)
        with contextlib.suppress(HostError):
            ctx.generations.end(record.generation, ending)
    return warning("stranded", f"what was to be brought back was left behind: {stranded.words}")


def _is_known_to_serve(ctx: Context) -> bool:
    """Whether the unit that stands had been deployed well, or is what the newest swap was to replace."""
    standing = sha256(standing_text(ctx))
    entries = list(ctx.generations.entries(ctx.unit))
    if standing is None or not entries:
        return False
    replaced = ctx.generations.replaced_text(entries[0].generation.number)
    done = {one.generation.unit_sha256 for one in entries if one.ending.outcome.is_done}
    return standing in {*done, sha256(replaced)}


def _set_aside(ctx: Context) -> Recovered:
    """A record that cannot be read says nothing; what stands served before, so it is to serve now."""
    state = ctx.services.state(ctx.unit)
    if state.is_enabled and not state.runs:
        ctx.services.reload()
        ctx.services.reset_failed(ctx.unit)
        ctx.services.start(ctx.unit)
    path = record_path(ctx)
    ctx.files.rename(path, path.with_name(f"{path.name}.damaged"))
    _settle_endings(ctx)
    text = f"the intent record could not be read and was set aside as `{path.name}.damaged`"
    return Recovered(Recovery.UNTOUCHED, None, text, ctx.services.state(ctx.unit).is_active)


def _committed(ctx: Context, record: SwapRecord) -> Recovered:
    """The swap had ended well, and said so; only its record was left."""
    _see_that_it_starts_at_boot(ctx, record)
    watched = _watch(ctx, record)
    ctx.files.remove(record_path(ctx))
    text = f"the swap of generation {record.generation} had already completed"
    is_active = ctx.services.state(ctx.unit).is_active
    return Recovered(Recovery.COMMITTED, record.generation, text, is_active, watched)


def _judge(ctx: Context, record: SwapRecord) -> Recovered:
    """The new unit stands: keep it if its own process serves, else undo.

    Where the swap was to remove the unit file, the packaged unit is what may serve now.
    """
    state = ctx.services.state(ctx.unit)
    was_started = state.invocation_id != record.old_invocation and not state.needs_reload
    if was_started and state.runs:
        found = gate.check_as_it_stands(ctx, old_invocation=record.old_invocation)
        if isinstance(found, gate.Serving):
            _see_that_it_starts_at_boot(ctx, record)
            watched = _watch(ctx, record)
            _finish(ctx, record, Outcome.SERVING, None, None)
            text = f"generation {record.generation} serves; its interrupted swap is finished"
            return Recovered(Recovery.JUDGE, record.generation, text, serving=True, remarks=watched)
    return _undo(ctx, record, Recovery.JUDGE, "it does not serve")


def _watch(ctx: Context, record: SwapRecord) -> tuple[Message, ...]:
    """Begin the probation that the record asks for, unless it is begun, and settle the tuned layer; while the record stands."""
    told = settle_tuned(ctx, record)
    if not record.wants_probation or read_probation(ctx, record.generation) is not None:
        return told
    return (*told, *begin_probation(ctx, record.generation, record.sweep))


def _see_that_it_starts_at_boot(ctx: Context, record: SwapRecord) -> None:
    """Or does not, as what stays was meant to; a way back that was cut short may have disabled it."""
    if record.new_sha256 is None:
        return
    entry = ctx.generations.find(record.generation)
    is_wanted = entry is None or entry.generation.enable
    is_enabled = ctx.services.state(ctx.unit).is_enabled
    if is_wanted and is_enabled is False:
        ctx.services.enable(ctx.unit)
    elif is_enabled and not is_wanted:
        ctx.services.disable(ctx.unit)


def _undo(ctx: Context, record: SwapRecord, found: Recovery, why: str) -> Recovered:
    """The old unit serves as it did; it may stand already, and have been put back before its server was."""
    serving = _see_to_the_old(ctx, record, found, why)
    detail, text = why, f"was undone, because {why}"
    if found is Recovery.UNTOUCHED:
        detail, text = (
            "the unit had not been changed",
            "was cut short; the previous unit is in place",
        )
    _finish(ctx, record, Outcome.ROLLED_BACK, "interrupted", detail)
    text = f"generation {record.generation} {text}{_unseen(ctx, record, serving)}"
    is_undone = record.reason in {"apply", "promote"}
    return Recovered(found, record.generation, text, serving, is_undone=is_undone)


def _unseen(ctx: Context, record: SwapRecord, serving: bool | None) -> str:
    if not record.was_active or serving is not None:
        return ""
    if not ctx.services.state(ctx.unit).runs:
        return "; it is stopped, since somebody stopped it meanwhile"
    return "; it runs, but tunerd cannot tell from here whether it serves"


def _see_to_the_old(ctx: Context, record: SwapRecord, found: Recovery, why: str) -> bool | None:
    try:
        # What somebody has stopped since stays so; of the start that served before, the swap itself may have done it.
        state = ctx.services.state(ctx.unit)
        was_stopped = False
        with contextlib.suppress(
            ServiceError
        ):  # a log that nobody can read keeps nothing from coming back
            if state.invocation_id != record.old_invocation:
                was_stopped = gate.was_stopped_since(ctx, state)
        if record.boot_id != (boot_id() or "unknown") and record.was_enabled:  # which a boot starts
            record = replace(record, was_active=record.was_active or not was_stopped)
        back = go_back(ctx, record, starts=not was_stopped)
    except ForeignEditError:
        raise
    except TunerdError as problem:
        raise Stranded(
            f"{ctx.unit} could not be brought back ({found}: {why})",
            cause=problem.words,
            state=f"the record stays in `{record_path(ctx)}`",
            hint="fix the cause, then `tunerd recover`",
        ) from problem
    if isinstance(back.serving, gate.NotServing) and record.was_healthy:
        failure = back.serving.failure
        raise Stranded(
            f"the previous unit of {ctx.unit} is back but does not serve: {failure.kind}",
            cause=failure.words,
            state=f"the record stays in `{record_path(ctx)}`",
            hint=failure.hint or "fix the cause, then `tunerd recover`",
        )
    return None if back.serving is None else isinstance(back.serving, gate.Serving)


def _foreign(ctx: Context, record: SwapRecord) -> Recovered:
    """Somebody edited the unit since: theirs it is; the record goes, the backup stays."""
    state = ctx.services.state(ctx.unit)
    _finish(ctx, record, Outcome.ABANDONED, str(FailureKind.EDITED), None)
    text = (
        f"{ctx.unit} was edited by hand after the interrupted swap of generation "
        f"{record.generation}; it was left alone"
    )
    return Recovered(Recovery.FOREIGN, record.generation, text, state.is_active)


def _finish(
    ctx: Context, record: SwapRecord, outcome: Outcome, cause: str | None, detail: str | None
) -> None:
    """The record goes last: everything before it is durable by then."""
    if ctx.generations.find(record.generation) is not None:
        drop_ins = drop_ins_in_force(ctx) if outcome.is_done else None
        ending = Ending(outcome, ctx.clock.now_s(), None, cause, detail, drop_ins)
        ctx.generations.end(record.generation, ending)
    if not outcome.is_done:
        forget_probation(ctx, record.generation)  # its commit may have begun it
    ctx.files.remove(record_path(ctx))


def _clear_leftovers(ctx: Context) -> None:
    """Temporary files of writes that were cut short; where they cannot be removed they do no harm.

    Most are of files that are written without the lock: one that somebody is writing now stays.
    """
    paths = ctx.paths
    places = [(paths.unit_dir, ctx.unit), (paths.config_dir, paths.settings_file.name)]
    state = paths.state_dir
    folders = [state, state / "fleet/rollouts", paths.runtime_dir, paths.site_profiles]
    with contextlib.suppress(OSError):  # of a failing disk, which keeps no server from coming back
        folders += state.glob("*/")
    places += [(folder, "") for folder in folders]
    for folder, name in places:
        with contextlib.suppress(HostError):
            ctx.files.remove_temporaries(folder, name)
    with contextlib.suppress(HostError):
        ctx.generations.remove_temporaries()


def _settle_endings(ctx: Context) -> None:
    """Give an ending to generations whose swap was cut short around its beginning or its commit.

    Bookkeeping: a full disk may not stand in the way of what comes after it.
    """
    standing = sha256(standing_text(ctx))
    newest = True
    for entry in ctx.generations.entries(ctx.unit):
        if entry.ending.outcome.is_done:
            return
        if entry.ending.outcome is Outcome.RUNNING:
            outcome = Outcome.ABANDONED
            if newest and entry.generation.unit_sha256 == standing:
                is_removed = standing is None and not ctx.services.state(ctx.unit).is_active
                outcome = Outcome.REMOVED if is_removed else Outcome.SERVING
            ending = Ending(outcome, ctx.clock.now_s(), None, None, "settled by recovery")
            with contextlib.suppress(HostError):
                ctx.generations.end(entry.generation.number, ending)
        newest = False
