"""The one path by which a unit is replaced: apply, rollback, promote and guards all come through here.

    backup, intent record, rename, reload, restart, real generation, ending, drop the record

On any failure after the record the same steps lead back. Whatever ends this process in between,
`recover` finds the record and finishes or undoes. Source of the sequence: docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from tunerd.actions.backups import prune_backups
from tunerd.actions.context import Context
from tunerd.actions.drain import drain
from tunerd.actions.live import check_manager, drop_ins_in_force, refuse_masked, standing_text
from tunerd.actions.serve_check import NotServing, Serving, restart_unit, wait_until_serving
from tunerd.actions.start_again import start_again
from tunerd.actions.swap_back import (
    Back,
    ForeignEditError,
    check_as_it_stands,
    demand_text,
    go_back,
)
from tunerd.actions.swap_begin import (
    STEPS,
    SwapRequest,
    abandon,
    begin,
    reason_of,
    set_reserve_aside,
)
from tunerd.actions.swap_record import record_path
from tunerd.core.failure import Failure, FailureKind
from tunerd.core.generation import Ending, Outcome
from tunerd.core.health import Expectation
from tunerd.core.progress import Progress
from tunerd.core.quantity import format_duration
from tunerd.core.swap import SwapRecord, sha256
from tunerd.errors import DeployError, JobCanceled, RolledBack, Stranded, TunerdError
from tunerd.system.interrupts import Interrupts


@dataclass(frozen=True, slots=True)
class SwapDone:
    """A committed swap."""

    generation: int
    backup: str | None
    serving: Serving | None
    without_service_s: float | None
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Course:
    """How far a swap has come: whether units were touched, and when the old server was stopped.

    `stopped_s` is on the monotonic clock, None while it was not.
    """

    has_touched: bool = False
    stopped_s: float | None = None

    def without_service_s(self, answered_at_s: float | None) -> float | None:
        """From the stop to the first answer; None if nothing was stopped or nothing answered."""
        if self.stopped_s is None or answered_at_s is None:
            return None
        return answered_at_s - self.stopped_s


def swap(ctx: Context, request: SwapRequest) -> SwapDone:
    """Make the requested unit live; the caller holds the lock.

    Ctrl-C, SIGTERM and SIGHUP lead back; while the way back or the commit is under way they do
    nothing.

    Raises:
        DeployError: it failed before anything changed.
        RolledBack: it failed, and what served before serves again.
        Stranded: it failed, and so did the way back; the record stays for `recover`.
    """
    with Interrupts() as interrupts:
        return _swap(ctx, request, interrupts)


def _swap(ctx: Context, request: SwapRequest, interrupts: Interrupts) -> SwapDone:
    check_manager(ctx)
    refuse_masked(ctx)
    old_text = standing_text(ctx)
    if sha256(old_text) != request.old_sha256:
        raise DeployError(
            f"{ctx.unit} was changed while this was planned",
            cause="its text is not the one that the plan was made for",
            state="nothing was changed",
            hint="plan again and look at the difference",
        )
    before = ctx.services.state(ctx.unit)
    notes = drain(ctx, before) if request.drain else ()
    record = begin(ctx, request, old_text, before, interrupts)
    course = _Course()
    try:
        serving = _go_forward(ctx, request, record, course)
        ctx.say("commit", step=STEPS, steps=STEPS)
        without_s = None  # nothing was interrupted, or nothing serves now
        if record.was_active and serving is not None:
            without_s = course.without_service_s(serving.answered_at_s)
        with interrupts.held():
            notes = (*notes, *_commit(ctx, record, serving, without_s))
    # Every way to fail leads back, a bug and Ctrl-C included: a swap may not end half-way.
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
        with interrupts.held():
            _end_badly(ctx, record, error, course)
    return SwapDone(record.generation, record.backup, serving, without_s, notes)


def without_service(done: SwapDone) -> str:
    """The end of a summary: how long nothing served, or that nothing serves now."""
    if done.serving is None:
        return "; nothing serves now"
    if done.without_service_s is None:
        return ""
    return f"; {format_duration(done.without_service_s)} without service"


def _go_forward(
    ctx: Context, request: SwapRequest, record: SwapRecord, course: _Course
) -> Serving | None:
    ctx.say("replacing the unit file", step=3, steps=STEPS)
    if request.text is None:
        demand_text(ctx, record.old_sha256)
        return _remove_unit(ctx, request, course)
    ctx.files.write(
        ctx.unit_path,
        request.text,
        like=ctx.files.look(ctx.unit_path),
        check=partial(demand_text, ctx, record.old_sha256),
    )
    ctx.say("reloading the service manager", step=4, steps=STEPS)
    course.has_touched = True
    ctx.services.reload()
    _check_parsed(ctx)
    if request.enable:
        ctx.services.enable(ctx.unit)
    ctx.say("restarting", step=5, steps=STEPS)
    course.stopped_s = ctx.clock.monotonic_s()
    found = start_again(ctx, partial(_watch_new, ctx, request), lambda: request.address)
    if isinstance(found, NotServing):
        raise _UnhealthyError(found)
    return found


def _watch_new(
    ctx: Context, request: SwapRequest, old_invocation: str | None
) -> Serving | NotServing:
    waits = Progress("waiting for the model", step=6, steps=STEPS)
    ctx.report(waits)
    return wait_until_serving(
        ctx,
        ctx.unit,
        address=request.address,
        expected=Expectation(
            old_invocation=old_invocation,
            alias=request.alias,
            expects_draft=request.expects_draft,
            must_draft=request.must_draft,
        ),
        model_bytes=request.model_bytes,
        begun=waits,
    )


def _remove_unit(ctx: Context, request: SwapRequest, course: _Course) -> Serving | None:
    """Back to where no unit file stood: the packaged unit serves again, if there is one."""
    course.has_touched = True
    course.stopped_s = ctx.clock.monotonic_s()
    ctx.services.stop(ctx.unit)
    if request.enable is False:
        ctx.services.disable(ctx.unit)
    ctx.files.remove(ctx.unit_path, check=partial(demand_text, ctx, request.old_sha256))
    ctx.services.reload()
    ctx.services.reset_failed(ctx.unit)
    if not ctx.services.state(ctx.unit).exists or not request.starts_packaged:
        return None
    found = restart_unit(ctx, ctx.unit) or check_as_it_stands(ctx, old_invocation=None)
    if isinstance(found, NotServing):
        raise _UnhealthyError(found)
    return found


def _check_parsed(ctx: Context) -> None:
    """What the manager parsed is what was written, before anything is restarted."""
    state = ctx.services.state(ctx.unit)
    if state.load_state != "loaded":
        raise DeployError(f"the service manager does not load the new unit: {state.load_state}")
    if state.fragment_path is not None and state.fragment_path != ctx.unit_path:
        raise DeployError(f"another file is in force: `{state.fragment_path}`")


def _commit(
    ctx: Context, record: SwapRecord, serving: Serving | None, without_s: float | None
) -> tuple[str, ...]:
    """Say durably that the swap ended well, then drop the record; either is enough.

    Returns:
        What a person should know.

    Raises:
        ForeignEditError: somebody edited the new unit meanwhile.
        HostError: neither could be done; nothing is committed.
    """
    demand_text(ctx, record.new_sha256)
    outcome = Outcome.REMOVED if serving is None else Outcome.SERVING
    drop_ins = drop_ins_in_force(ctx)
    ending = Ending(outcome, ctx.clock.now_s(), without_s, None, None, drop_ins)
    notes: list[str] = []
    is_said = True
    try:
        ctx.generations.end(record.generation, ending)
    except TunerdError as error:
        is_said = False
        notes.append(f"how the swap ended could not be written: {reason_of(error)}")
    try:
        ctx.files.remove(record_path(ctx))
    except TunerdError as error:
        if not is_said and record_path(ctx).exists():
            raise
        notes.append(f"the intent record stays, which `tunerd recover` mends: {reason_of(error)}")
    try:
        prune_backups(ctx)
    except TunerdError as error:
        notes.append(f"old backups could not be removed: {reason_of(error)}")
    set_reserve_aside(ctx)
    return tuple(notes)


class _UnhealthyError(DeployError):
    """The new unit started but does not serve."""

    def __init__(self, found: NotServing) -> None:
        super().__init__(found.text)
        self.found = found


def _end_badly(ctx: Context, record: SwapRecord, error: BaseException, course: _Course) -> NoReturn:
    failure = _failure_of(error)
    if not course.has_touched and not _is_replaced(ctx, record):
        _nothing_happened(ctx, record, error)
    if failure.kind is not FailureKind.EDITED:
        ctx.say(f"failed ({failure.kind}); putting the previous unit back")
    try:
        # Somebody who has just stopped the unit does not want to see it start.
        back = go_back(ctx, record, starts=failure.kind is not FailureKind.STOPPED)
    except ForeignEditError as edit:
        _leave_to_the_editor(ctx, record, failure, edit)
    except TunerdError as way_back:
        _strand(ctx, record, failure, reason_of(way_back), error)
    if isinstance(back.serving, NotServing) and record.was_healthy:
        words = f"{back.serving.failure.kind}: {back.serving.failure.words}"
        _strand(ctx, record, failure, words, error)
    answered_s = back.serving.answered_at_s if isinstance(back.serving, Serving) else None
    without_s = course.without_service_s(answered_s)
    left = _end(ctx, record, Outcome.ROLLED_BACK, failure, without_s)
    state = f"rolled back: {_how(back)} since {ctx.now_text()}{left}"
    if isinstance(error, KeyboardInterrupt | SystemExit):
        ctx.say(state)
        error.add_note(state)
        raise error
    raise RolledBack(
        f"{ctx.unit} was not swapped: {failure.kind}",
        cause=failure.words,
        state=state,
        hint=failure.hint,
    ) from error


def _is_replaced(ctx: Context, record: SwapRecord) -> bool:
    """Whether the new unit stands on disk; assumed where that cannot be read."""
    try:
        return sha256(standing_text(ctx)) == record.new_sha256
    except TunerdError:
        return True


def _nothing_happened(ctx: Context, record: SwapRecord, error: BaseException) -> NoReturn:
    """The unit file was not replaced, and no unit was touched."""
    abandon(ctx, record.generation, record.backup, error)
    if not isinstance(error, TunerdError):
        raise error
    raise DeployError(
        f"{ctx.unit} was not swapped", cause=reason_of(error), state="nothing was changed",
        hint=error.hint,
    ) from error  # fmt: skip


def _leave_to_the_editor(
    ctx: Context, record: SwapRecord, failure: Failure, edit: ForeignEditError
) -> NoReturn:
    """Somebody edited the unit in the middle of the swap: neither finished nor undone."""
    words = edit.message if failure.kind is FailureKind.EDITED else failure.words
    edited = Failure(FailureKind.EDITED, words, None)
    left = _end(ctx, record, Outcome.ABANDONED, edited, None)
    runs = "nothing serves"
    if ctx.services.state(ctx.unit).is_active:
        runs = "what runs was started before the edit"
    copy = (
        f"what stood before is kept as `{record.backup}`" if record.backup else "none stood before"
    )
    raise Stranded(
        edit.message,
        cause=None if failure.kind is FailureKind.EDITED else failure.words,
        state=f"the edited unit was left alone, and was not started; {runs}; {copy}{left}",
        hint=f"start it (`systemctl daemon-reload`, `systemctl restart {ctx.unit}`), "
        "or `tunerd rollback`",
    ) from edit


def _how(back: Back) -> str:
    if back.was_left_stopped:
        return "the previous unit is back on disk, and stopped, as somebody asked meanwhile,"
    if isinstance(back.serving, Serving):
        return "the previous unit serves again"
    if isinstance(back.serving, NotServing):
        return "the previous unit is back, and does not serve, as before,"
    return "the machine is as before"


def _strand(
    ctx: Context, record: SwapRecord, failure: Failure, why_not_back: str, error: BaseException
) -> NoReturn:
    """The record stays, so that `recover` can try again when the cause is gone."""
    _say_ending(ctx, record, Outcome.STRANDED, failure, None)
    kept = "no unit file stood before"
    if record.backup:
        kept = f"what stood before is kept as `{record.backup}` in `{ctx.paths.unit_dir}`"
    raise Stranded(
        f"{ctx.unit} was not swapped ({failure.kind}), and the way back failed",
        cause=f"{failure.words}\nway back: {why_not_back}",
        state=f"{_what_stands(ctx, record)}; {kept}",
        hint="mend the cause of the second failure, then `tunerd recover`",
    ) from error


def _what_stands(ctx: Context, record: SwapRecord) -> str:
    try:
        standing = sha256(standing_text(ctx))
    except TunerdError:
        return "the unit file cannot be read"
    if standing is None:
        return "no unit file stands on disk, and nothing was seen to serve"
    which = "the previous unit" if standing == record.old_sha256 else "the new unit"
    return f"{which} stands on disk and was not seen to serve"


def _end(
    ctx: Context, record: SwapRecord, outcome: Outcome, failure: Failure, without_s: float | None
) -> str:
    """Write the ending and drop the record; what to add for a person if the record stays."""
    _say_ending(ctx, record, outcome, failure, without_s)
    try:
        ctx.files.remove(record_path(ctx))
    except TunerdError as error:
        return f"; the intent record stays, which `tunerd recover` mends: {reason_of(error)}"
    return ""


def _say_ending(
    ctx: Context, record: SwapRecord, outcome: Outcome, failure: Failure, without_s: float | None
) -> None:
    ending = Ending(outcome, ctx.clock.now_s(), without_s, str(failure.kind), failure.words)
    try:
        ctx.generations.end(record.generation, ending)
    except TunerdError:  # going back matters more than its record
        return


def _failure_of(error: BaseException) -> Failure:
    match error:
        case _UnhealthyError():
            return error.found.failure
        case ForeignEditError():
            return Failure(FailureKind.EDITED, error.message, None)
        case JobCanceled():
            return Failure(FailureKind.STOPPED, reason_of(error), error.hint)
        case TunerdError():
            return Failure(FailureKind.UNKNOWN, reason_of(error), error.hint)
        case KeyboardInterrupt() | SystemExit():
            return Failure(FailureKind.INTERRUPTED, "a signal asked this process to end", None)
        case _:
            return Failure(FailureKind.UNKNOWN, f"{type(error).__name__}: {error}", None)
