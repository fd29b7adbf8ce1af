"""The one path by which a unit is replaced: apply, rollback, promote and guards all come through here.

    backup, intent record, rename, reload, restart, real generation, ending, drop the record

On any failure after the record the same steps lead back. Whatever ends this process in between,
`recover` finds the record and finishes or undoes. Source of the sequence: docs/architecture.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from tunerd.app import Context
from tunerd.engine.health import Expectation, Failure, FailureKind, HttpState
from tunerd.engine.server import Address, UnknownListenerError
from tunerd.engine.serving import (
    address_now,
    check_manager,
    demand_replaceable,
    drop_ins_in_force,
    read_live_unit,
    server_now,
    standing_text,
)
from tunerd.errors import (
    DeployError,
    HostError,
    JobCanceled,
    NoSupervisor,
    RolledBack,
    ServiceError,
    Stranded,
    TunerdError,
)
from tunerd.machine.files import is_full
from tunerd.machine.host import process_facts
from tunerd.machine.http import NoAnswerError
from tunerd.machine.net import listening_ports
from tunerd.machine.process import Interrupts, boot_id
from tunerd.production import gate
from tunerd.production.journal import (
    SCHEMA,
    SwapRecord,
    new_backup_name,
    prune_backups,
    read_record,
    record_path,
)
from tunerd.production.probation import begin_probation, forget_probation
from tunerd.production.tuned import settle_tuned
from tunerd.records import plain
from tunerd.result import Message, Progress, note
from tunerd.units.generations import Ending, Generation, Outcome
from tunerd.units.live import LiveUnit, is_same_command
from tunerd.units.manager import UnitState
from tunerd.words import format_duration, sha256

STEPS = 8
# What a swap writes, several times over.
_RESERVE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SwapRequest:
    """What shall be live, and what a good start looks like.

    `text` is None to remove the unit file (going back to where none stood). `old_sha256` is what
    the plan was made for: another text there now means that somebody changed it meanwhile.
    `generation` still lacks its number, backup, old state and who asked: the swap fills them in.
    `ran` is whether the server ran when this was agreed to: one that was stopped since is left alone.
    `starts_packaged` is whether what is left after removing the file shall run, `wants_probation` whether
    what serves then is to be watched. `tuned` is as of `SwapRecord`.
    """

    text: bytes | None
    old_sha256: str | None
    generation: Generation
    address: Address | None
    expected: Expectation
    drain: bool
    ran: bool = False
    model_bytes: int | None = None
    starts_packaged: bool = False
    wants_probation: bool = False
    tuned: Mapping[str, Any] | None = None


def begin(
    ctx: Context,
    request: SwapRequest,
    old_text: bytes | None,
    before: UnitState,
    interrupts: Interrupts,
) -> SwapRecord:
    """Write everything that going back needs, the intent record last.

    On a full disk going back may use the space that was set aside for it.

    Raises:
        DeployError: something could not be written or asked; nothing was changed.
    """
    try:
        return _begin(ctx, request, old_text, before, interrupts)
    except DeployError as error:
        goes_back = request.generation.reason in {"rollback", "guard"}
        if not (goes_back and is_full(error) and _release_reserve(ctx)):
            raise
        return _begin(ctx, request, old_text, before, interrupts)


def _release_reserve(ctx: Context) -> bool:
    """Give back the space that was set aside; whether there was any."""
    if ctx.paths.reserve.exists():
        with contextlib.suppress(HostError):
            ctx.files.remove(ctx.paths.reserve)
            return True
    return False


def _begin(
    ctx: Context,
    request: SwapRequest,
    old_text: bytes | None,
    before: UnitState,
    interrupts: Interrupts,
) -> SwapRecord:
    number, backup = None, None
    try:
        ctx.say("backing up the current unit", step=1, steps=STEPS)
        was_healthy = _answers(ctx, before)
        with contextlib.suppress(TunerdError):  # it remembers what may be put back
            gate.edited_under(ctx, before)
        ctx.files.make_folder(ctx.paths.unit_dir)
        name = new_backup_name(ctx, request.generation.reason) if old_text is not None else None
        number = ctx.generations.next_number()
        generation = replace(
            request.generation,
            number=number,
            created_s=ctx.clock.now_s(),
            unit_sha256=sha256(request.text),
            replaced_backup=name,
            replaced_absent=old_text is None,
            was_active=before.is_active,
            was_enabled=before.is_enabled,
            requested_by=ctx.environment.get("SUDO_USER") or ctx.environment.get("USER"),
        )
        ctx.generations.create(generation, request.text, old_text)
        if name is not None:
            backup = name
            ctx.files.copy(ctx.unit_path, ctx.paths.unit_dir / name)
        record = _record(ctx, request, generation, before, was_healthy=was_healthy)
        earlier = read_record(ctx)
        if earlier is not None and earlier.old_sha256 == record.old_sha256:
            # Its server did not come back, and is to, should this one not serve either.
            record = replace(record, was_active=earlier.was_active, was_healthy=earlier.was_healthy,
                             was_enabled=earlier.was_enabled, was_stranded=True)  # fmt: skip
        ctx.say("writing the intent record", step=2, steps=STEPS)
        ctx.files.make_folder(ctx.paths.journal_dir)
        ctx.files.write_json(record_path(ctx), plain(record, schema=SCHEMA), mode=0o600)
    # Whatever it is, nothing may be left behind.
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
        with interrupts.held():
            _nothing_happened(ctx, number, backup, error, "the swap could not be started")
    return record


def _record(
    ctx: Context,
    request: SwapRequest,
    generation: Generation,
    before: UnitState,
    *,
    was_healthy: bool,
) -> SwapRecord:
    return SwapRecord(
        unit=ctx.unit,
        unit_path=str(ctx.unit_path),
        generation=generation.number,
        reason=generation.reason,
        old_sha256=request.old_sha256,
        new_sha256=generation.unit_sha256,
        backup=generation.replaced_backup,
        boot_id=boot_id() or "unknown",
        started_s=ctx.clock.now_s(),
        was_active=before.runs,
        was_healthy=was_healthy,
        was_enabled=before.is_enabled,
        was_given_up=gate.is_given_up(ctx, before),
        old_invocation=before.invocation_id,
        link_to=str(ctx.unit_path.readlink()) if ctx.unit_path.is_symlink() else None,
        wants_probation=request.wants_probation,
        sweep=None if request.tuned is None else request.tuned["sweep"],
        tuned=request.tuned,
    )


def _answers(ctx: Context, before: UnitState) -> bool:
    """Whether the old server is up, so that going back to it must bring it up again.

    One that still loads, or whose address its unit does not say, gets the benefit of the doubt.
    """
    if not before.is_active:
        return False
    server = server_now(ctx, before)
    return server is None or server.health() is not HttpState.REFUSED


def _abandon(ctx: Context, number: int | None, backup: str | None, error: BaseException) -> None:
    """Take back what was written for a swap that changes nothing after all.

    The disk may be full or gone, so nothing here may fail; what is left is harmless, and recovery
    clears it.
    """
    if number is None:
        return
    cause = error.words if isinstance(error, TunerdError) else type(error).__name__
    ending = Ending(Outcome.ABANDONED, ctx.clock.now_s(), None, cause, None)
    with contextlib.suppress(TunerdError):
        record = read_record(ctx)
        if record is not None and record.generation == number:
            if record.was_stranded:  # recovery goes on with what was to come back
                return
            ctx.files.remove(record_path(ctx))
    with contextlib.suppress(TunerdError):
        if backup is not None:
            ctx.files.remove(ctx.paths.unit_dir / backup)
    with contextlib.suppress(TunerdError):
        ctx.generations.end_or_forget(number, ending)


class ForeignEditError(DeployError):
    """The unit is neither the old nor the new one: somebody edited it, and theirs it is."""


@dataclass(frozen=True, slots=True)
class Back:
    """The old unit is back.

    `serving` says how its server does; None where none is to run, or nobody can say.
    `was_left_stopped` says that somebody stopped it meanwhile, which was respected, `is_unknown`
    that it runs and cannot be asked.
    """

    serving: gate.Serving | gate.NotServing | None
    was_left_stopped: bool = False
    is_unknown: bool = False


def go_back(ctx: Context, record: SwapRecord, *, starts: bool = True) -> Back:
    """Put the old unit back and make it serve as before; the record is left to the caller.

    Every step may have been done before, by a run that was cut short.

    Args:
        ctx: Where.
        record: What the swap was about to do.
        starts: Whether a server that does not run is started; not where somebody has just
            stopped it.

    Raises:
        ForeignEditError: somebody edited the unit meanwhile; it was left alone.
        HostError: a file could not be written.
        ServiceError: the service manager refused.
    """
    _put_back(ctx, record)
    # What runs may have been started again by another text, after this one was put back.
    is_known = not ctx.services.state(ctx.unit).needs_reload
    has_supervisor = _reload(ctx, record)
    state = ctx.services.state(ctx.unit)
    if record.was_enabled and state.is_enabled is False:  # a removal had disabled it
        ctx.services.enable(ctx.unit)
    if not record.was_active:
        if state.runs and not (is_known and _started_as_it_stands(ctx, state)):
            ctx.services.stop(ctx.unit)
        if has_supervisor:
            ctx.services.reset_failed(ctx.unit)
        if has_supervisor and starts and record.was_given_up:
            with contextlib.suppress(ServiceError):  # which it may be once more
                ctx.services.start(ctx.unit)
        return Back(None)
    if not starts:
        return Back(None, was_left_stopped=not state.is_active)
    found = None
    if _is_the_old(ctx, record, state):
        found = gate.check_as_it_stands(ctx, old_invocation=None)
    if found is None or (
        isinstance(found, gate.NotServing) and not _cannot_be_asked(ctx) and not _loads(ctx)
    ):
        found = gate.start_as_it_stands(ctx, has_served=record.was_healthy)
    if isinstance(found, gate.NotServing) and found.was_stopped:
        return Back(None, was_left_stopped=True)
    is_seen = isinstance(found, gate.Serving) and found.first_text is not None
    if not is_seen and _cannot_be_asked(ctx):
        return Back(None, is_unknown=True)
    return Back(found)


def _loads(ctx: Context) -> bool:
    """Whether it says that it still loads, which it would begin again if it was restarted."""
    server = server_now(ctx, ctx.services.state(ctx.unit))
    return server is not None and server.health() is HttpState.LOADING


def _cannot_be_asked(ctx: Context) -> bool:
    """Whether it runs, and nobody can say where it is asked: no reason to restart it."""
    state = ctx.services.state(ctx.unit)
    if not state.is_active or state.main_pid is None:
        return False
    live = read_live_unit(ctx)
    address = address_now(ctx, live, state)
    if address is None:
        is_elsewhere = live.serving.asked_otherwise is not None
        return is_elsewhere or listening_ports(state.main_pid) is None
    with contextlib.suppress(NoAnswerError):
        try:
            address.now()
        except UnknownListenerError:
            return True
    return False


def _reload(ctx: Context, record: SwapRecord) -> bool:
    """Let the manager read the files; whether there is one.

    Where tunerd's own does not even start, nothing can have been started either, and the next one
    reads the files anew: what did not run before needs none.
    """
    try:
        ctx.services.reload()
    except NoSupervisor:
        if record.was_active:
            raise
        return False
    return True


def _demand_text(ctx: Context, *wanted: str | None) -> None:
    """The unit file is one with these hashes at this moment.

    Raises:
        ForeignEditError: it is another one.
    """
    if sha256(standing_text(ctx)) not in wanted:
        raise ForeignEditError(f"{ctx.unit} was edited just now by somebody else")


def _disable_what_stands(ctx: Context) -> None:
    """While a file of it stands: without one the manager does not know what to take away."""
    if ctx.services.state(ctx.unit).is_enabled:
        ctx.services.disable(ctx.unit)


def _put_back(ctx: Context, record: SwapRecord) -> None:
    """The old text, or no file where none stood."""
    is_whole = partial(_demand_text, ctx, record.old_sha256, record.new_sha256)
    is_whole()
    if not record.was_enabled:
        _disable_what_stands(ctx)
    if sha256(standing_text(ctx)) == record.old_sha256:
        return
    if record.old_sha256 is None:
        ctx.files.remove(ctx.unit_path, check=is_whole)
        return
    if record.link_to is not None and _leads_to_the_old(ctx, record):
        ctx.files.link(ctx.unit_path, record.link_to, check=is_whole)
        return
    try:
        _write_old(ctx, record, is_whole)
    except HostError as error:
        if not is_full(error):
            raise
        if _release_reserve(ctx):
            _write_old(ctx, record, is_whole)
        else:  # there is no room for a copy, but a name can still be changed
            _old_text_of_backup(ctx, record)
            ctx.files.rename(ctx.paths.unit_dir / (record.backup or ""), ctx.unit_path)


def _leads_to_the_old(ctx: Context, record: SwapRecord) -> bool:
    """Whether the file to which the unit file led has still the old text."""
    try:
        text = ctx.files.read(ctx.unit_path.parent / (record.link_to or ""))
    except HostError:
        return False
    return sha256(text) == record.old_sha256


def _write_old(ctx: Context, record: SwapRecord, check: Callable[[], None]) -> None:
    try:
        text = _old_text_of_backup(ctx, record)
        look = ctx.files.look(ctx.paths.unit_dir / (record.backup or ""))
    except HostError:
        kept = ctx.generations.kept_text(record.old_sha256, replaced_by=record.generation)
        if kept is None:
            raise
        text, look = kept, ctx.files.look(ctx.unit_path)
    ctx.files.write(ctx.unit_path, text, like=look, check=check)


def _old_text_of_backup(ctx: Context, record: SwapRecord) -> bytes:
    content = ctx.files.read(ctx.paths.unit_dir / (record.backup or ""))
    if content is None or sha256(content) != record.old_sha256:
        raise HostError(
            f"backup `{record.backup}` is gone or was changed",
            hint="`tunerd rollback --list` shows what else there is",
        )
    return content


def _is_the_old(ctx: Context, record: SwapRecord, state: UnitState) -> bool:
    """Whether what runs is the old server: it was never stopped, or was started anew already."""
    if not state.is_active:
        return False
    if record.old_invocation is not None and state.invocation_id == record.old_invocation:
        return True
    return _runs_what_stands(ctx, state, read_live_unit(ctx))


def _runs_what_stands(ctx: Context, state: UnitState, live: LiveUnit) -> bool:
    """Whether the process was started from the file as it is: after its last change, by its words.

    A wrapper script hides the words; the answer is no then, which costs a restart.
    """
    facts = None if state.main_pid is None else process_facts(state.main_pid)
    if live.argv is None or facts is None:
        return False
    # The program's own name counts here too, wherever it stands.
    is_same = is_same_command(("", *live.argv), facts.cmdline)
    return is_same is True and _started_as_it_stands(ctx, state)


def _started_as_it_stands(ctx: Context, state: UnitState) -> bool:
    """Whether it was started after the file's last change, and that of the link to it."""
    if state.needs_reload or state.active_since_s is None:
        return False
    try:
        changed_s = max(ctx.unit_path.stat().st_ctime, ctx.unit_path.lstat().st_ctime)
    except OSError:
        return False
    return state.active_since_s > changed_s


@dataclass(frozen=True, slots=True)
class SwapDone:
    """A committed swap; `told` is what a person should know of it, its probation and its tuned layer."""

    generation: int
    backup: str | None
    serving: gate.Serving | None
    without_service_s: float | None
    told: tuple[Message, ...]

    def to_json(self, what: str) -> dict[str, Any]:
        """As scripts read it; `what` is what it came to, for people."""
        lasted = ""
        if self.serving is None:
            lasted = "; nothing serves now"
        elif self.without_service_s is not None:
            lasted = f"; {format_duration(self.without_service_s)} without service"
        return {
            "generation": self.generation,
            "backup": self.backup,
            "without_service_s": self.without_service_s,
            "first_text": None if self.serving is None else self.serving.first_text,
            "summary": f"{what}{lasted}",
        }


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
    demand_replaceable(ctx)
    old_text = standing_text(ctx)
    if sha256(old_text) != request.old_sha256:
        raise DeployError(
            f"{ctx.unit} was changed while this was planned",
            cause="its text is not the one that the plan was made for",
            state="nothing was changed",
            hint="plan again and look at the difference",
        )
    before = ctx.services.state(ctx.unit)
    notes = gate.drain(ctx, before) if request.drain else ()
    by_guard = request.generation.reason == "guard"  # which nobody asked for
    ran = request.ran or before.runs or by_guard
    if ran and gate.was_stopped_since(ctx, before, by_anybody=by_guard):
        again = f"`{ctx.systemctl} start {ctx.unit}`" if by_guard else "the same command again"
        raise DeployError(
            f"{ctx.unit} was stopped meanwhile",
            state="nothing was changed, and it stays stopped",
            hint=f"{again} starts it",
        )
    # It may have been started again while requests were waited for.
    before = replace(before, invocation_id=ctx.services.state(ctx.unit).invocation_id)
    record = begin(ctx, request, old_text, before, interrupts)
    course = _Course()
    try:
        serving = _go_forward(ctx, request, record, course)
        ctx.say("commit", step=STEPS, steps=STEPS)
        without_s = None  # nothing was interrupted, or nothing serves now
        if record.was_active and serving is not None and serving.first_text is not None:
            without_s = course.without_service_s(serving.answered_at_s)
        with interrupts.held():
            told = _commit(ctx, record, serving, without_s)
    # Every way to fail leads back, a bug and Ctrl-C included: a swap may not end half-way.
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
        with interrupts.held():
            _end_badly(ctx, record, error, course)
    told = (*(note("swap", text) for text in notes), *told)
    return SwapDone(record.generation, record.backup, serving, without_s, told)


def _go_forward(
    ctx: Context, request: SwapRequest, record: SwapRecord, course: _Course
) -> gate.Serving | None:
    ctx.say("replacing the unit file", step=3, steps=STEPS)
    if request.text is None:
        _demand_text(ctx, record.old_sha256)
        return _remove_unit(ctx, request, course)
    ctx.files.write(
        ctx.unit_path,
        request.text,
        like=ctx.files.look(ctx.unit_path),
        check=partial(_demand_text, ctx, record.old_sha256),
    )
    ctx.say("reloading the service manager", step=4, steps=STEPS)
    course.has_touched = True
    ctx.services.reload()
    _check_parsed(ctx)
    if request.generation.enable:
        ctx.services.enable(ctx.unit)
    ctx.say("restarting", step=5, steps=STEPS)
    course.stopped_s = ctx.clock.monotonic_s()
    found = gate.start_again(ctx, partial(_watch_new, ctx, request), lambda: request.address)
    if isinstance(found, gate.NotServing):
        raise _UnhealthyError(found)
    if not request.generation.enable:  # last: until then a power cut must bring a server back
        _disable_what_stands(ctx)
    return found


def _watch_new(
    ctx: Context, request: SwapRequest, old_invocation: str | None
) -> gate.Serving | gate.NotServing:
    waits = Progress("waiting for the model", step=6, steps=STEPS)
    ctx.report(waits)
    return gate.wait_until_serving(
        ctx,
        ctx.unit,
        address=request.address,
        expected=replace(request.expected, old_invocation=old_invocation),
        model_bytes=request.model_bytes,
        begun=waits,
    )


def _remove_unit(ctx: Context, request: SwapRequest, course: _Course) -> gate.Serving | None:
    """Back to where no unit file stood: the packaged unit serves again, if there is one."""
    course.has_touched = True
    course.stopped_s = ctx.clock.monotonic_s()
    ctx.services.stop(ctx.unit)
    if not request.generation.enable:
        _disable_what_stands(ctx)
    ctx.files.remove(ctx.unit_path, check=partial(_demand_text, ctx, request.old_sha256))
    ctx.services.reload()
    ctx.services.reset_failed(ctx.unit)
    if not ctx.services.state(ctx.unit).exists or not request.starts_packaged:
        return None
    failed = gate.started(ctx, ctx.unit, ctx.services.restart)
    found = failed or gate.check_as_it_stands(ctx, old_invocation=None)
    if isinstance(found, gate.NotServing):
        raise _UnhealthyError(found)
    return found


def _check_parsed(ctx: Context) -> None:
    """What the manager parsed is what was written, before anything is restarted."""
    state = ctx.services.state(ctx.unit)
    if state.load_state != "loaded":
        raise DeployError(f"the service manager does not load the new unit: {state.load_state}")
    if state.fragment_path is not None and state.fragment_path != ctx.unit_path:
        raise DeployError(f"the service manager uses another unit file: `{state.fragment_path}`")


def _write_ending(ctx: Context, record: SwapRecord, ending: Ending) -> None:
    """Say how the swap ended; without it nobody knows what serves, so a full disk is no reason.

    Raises:
        HostError: it cannot be written.
    """
    try:
        ctx.generations.end(record.generation, ending)
    except HostError as error:
        if not (is_full(error) and _release_reserve(ctx)):
            raise
        ctx.generations.end(record.generation, ending)


def _commit(
    ctx: Context, record: SwapRecord, serving: gate.Serving | None, without_s: float | None
) -> tuple[Message, ...]:
    """Say durably that the swap ended well, then drop the record; either is enough.

    The probation begins in between: until then the record says that it is wanted.

    Returns:
        What a person should know.

    Raises:
        ForeignEditError: somebody edited the new unit meanwhile.
        HostError: neither could be done; nothing is committed.
    """
    _demand_text(ctx, record.new_sha256)
    outcome = Outcome.REMOVED if serving is None else Outcome.SERVING
    drop_ins = drop_ins_in_force(ctx)
    ending = Ending(outcome, ctx.clock.now_s(), without_s, None, None, drop_ins)
    notes: list[str] = []
    is_said = True
    try:
        _write_ending(ctx, record, ending)
    except TunerdError as error:
        is_said = False
        notes.append(f"how the swap ended could not be recorded: {error.words}")
    watched = (
        begin_probation(ctx, record.generation, record.sweep) if record.wants_probation else ()
    )
    watched += settle_tuned(ctx, record)
    try:
        ctx.files.remove(record_path(ctx))
    except TunerdError as error:
        if not is_said and record_path(ctx).exists():
            raise
        notes.append(f"the intent record is left, `tunerd recover` removes it: {error.words}")
    try:
        prune_backups(ctx)
    except TunerdError as error:
        notes.append(f"old backups could not be removed: {error.words}")
    with contextlib.suppress(HostError):  # a disk that is too full for that is no error
        ctx.files.set_aside(ctx.paths.reserve, _RESERVE_BYTES)
    return (*(note("swap", text) for text in notes), *watched)


class _UnhealthyError(DeployError):
    """The new unit started but does not serve."""

    def __init__(self, found: gate.NotServing) -> None:
        super().__init__(found.text)
        self.found = found


def _end_badly(ctx: Context, record: SwapRecord, error: BaseException, course: _Course) -> NoReturn:
    if not course.has_touched and not _is_replaced(ctx, record):
        text = f"{ctx.unit} was not swapped"
        _nothing_happened(ctx, record.generation, record.backup, error, text)
    if not isinstance(error, ForeignEditError):
        ctx.say("failed; putting the previous unit back")
    try:
        # Somebody who has just stopped the unit does not want to see it start.
        back = go_back(ctx, record, starts=not _was_stopped(error))
    except ForeignEditError as edit:
        _leave_to_the_editor(ctx, record, _failure_of(error), edit)
    except TunerdError as way_back:
        _strand(ctx, record, _failure_of(error), way_back.words, error)
    failure = _failure_of(error)
    if isinstance(back.serving, gate.NotServing) and record.was_healthy:
        words = f"{back.serving.failure.kind}: {back.serving.failure.words}"
        _strand(ctx, record, failure, words, error)
    answered_s = back.serving.answered_at_s if isinstance(back.serving, gate.Serving) else None
    without_s = course.without_service_s(answered_s)
    left = _end(ctx, record, Outcome.ROLLED_BACK, failure, without_s)
    state = f"rolled back: {_how(back)} as of {ctx.now_text()}{left}"
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


def _nothing_happened(
    ctx: Context, number: int | None, backup: str | None, error: BaseException, text: str
) -> NoReturn:
    """The unit file was not replaced, and no unit was touched."""
    _abandon(ctx, number, backup, error)
    if not isinstance(error, TunerdError):
        raise error
    state = "nothing was changed"
    raise DeployError(text, cause=error.words, state=state, hint=error.hint) from error


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
    copy = f"the previous unit is kept as `{record.backup}`" if record.backup else "there was none"
    raise Stranded(
        edit.message,
        cause=None if failure.kind is FailureKind.EDITED else failure.words,
        state=f"the edited unit was left alone, and was not started; {runs}; {copy}{left}",
        hint=f"start it (`{ctx.systemctl} daemon-reload`, `{ctx.systemctl} restart {ctx.unit}`), "
        "or `tunerd rollback`",
    ) from edit


def _how(back: Back) -> str:
    if back.was_left_stopped:
        return "the previous unit is back on disk and stopped, since somebody stopped it meanwhile,"
    if isinstance(back.serving, gate.Serving):
        return "the previous unit serves again"
    if isinstance(back.serving, gate.NotServing):
        return "the previous unit is back and, as before, does not serve,"
    if back.is_unknown:
        return "the previous unit runs, though tunerd cannot tell from here whether it serves,"
    return "the machine is as before"


def _strand(
    ctx: Context, record: SwapRecord, failure: Failure, why_not_back: str, error: BaseException
) -> NoReturn:
    """The record stays, so that `recover` can try again when the cause is gone."""
    _say_ending(ctx, record, Outcome.STRANDED, failure, None)
    kept = "there was no unit file before"
    if record.backup:
        kept = f"the previous unit is kept as `{record.backup}` in `{ctx.paths.unit_dir}`"
    raise Stranded(
        f"{ctx.unit} was not swapped ({failure.kind}), and the way back failed",
        cause=f"{failure.words}\nway back: {why_not_back}",
        state=f"{_what_stands(ctx, record)}; {kept}",
        hint="fix the cause of the second failure, then `tunerd recover`; "
        "or deploy something else that serves (`tunerd apply`, `tunerd rollback --to`)",
    ) from error


def _what_stands(ctx: Context, record: SwapRecord) -> str:
    try:
        standing = sha256(standing_text(ctx))
    except TunerdError:
        return "the unit file cannot be read"
    if standing is None:
        return "there is no unit file on disk, and nothing was seen to serve"
    which = "the previous unit" if standing == record.old_sha256 else "the new unit"
    return f"{which} is on disk and was not seen to serve"


def _end(
    ctx: Context, record: SwapRecord, outcome: Outcome, failure: Failure, without_s: float | None
) -> str:
    """Write the ending and drop the records; what to add for a person if the intent record stays."""
    _say_ending(ctx, record, outcome, failure, without_s)
    try:
        forget_probation(ctx, record.generation)  # a commit that failed may have begun it
        ctx.files.remove(record_path(ctx))
    except TunerdError as error:
        return f"; the intent record is left, `tunerd recover` removes it: {error.words}"
    return ""


def _say_ending(
    ctx: Context, record: SwapRecord, outcome: Outcome, failure: Failure, without_s: float | None
) -> None:
    ending = Ending(outcome, ctx.clock.now_s(), without_s, str(failure.kind), failure.words)
    with contextlib.suppress(TunerdError):  # going back matters more than its record
        _write_ending(ctx, record, ending)


def _was_stopped(error: BaseException) -> bool:
    is_seen = isinstance(error, _UnhealthyError) and error.found.was_stopped
    return is_seen or isinstance(error, JobCanceled)


def _failure_of(error: BaseException) -> Failure:
    match error:
        case _UnhealthyError():
            return error.found.failure
        case ForeignEditError():
            return Failure(FailureKind.EDITED, error.message, None)
        case JobCanceled():
            return Failure(FailureKind.STOPPED, error.words, error.hint)
        case TunerdError():
            return Failure(FailureKind.UNKNOWN, error.words, error.hint)
        case KeyboardInterrupt() | SystemExit():
            return Failure(FailureKind.INTERRUPTED, "a signal asked this process to end", None)
        case _:
            return Failure(FailureKind.UNKNOWN, f"{type(error).__name__}: {error}", None)
