"""The beginning of a swap: generation, backup and intent record, durable before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tunerd.actions.backups import new_backup_name
from tunerd.actions.context import Context
from tunerd.actions.live import address_now, read_live_unit
from tunerd.actions.swap_record import record_path
from tunerd.core.generation import Ending, Generation, Outcome
from tunerd.core.health import HttpState
from tunerd.core.service import UnitState
from tunerd.core.swap import SwapRecord, sha256
from tunerd.errors import DeployError, HostError, TunerdError
from tunerd.system.files import is_full
from tunerd.system.interrupts import Interrupts
from tunerd.system.llama import Address
from tunerd.system.proc import boot_id

STEPS = 8
# What a swap writes, several times over.
_RESERVE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SwapRequest:
    """What shall be live, and what a good start looks like.

    `text` is None to remove the unit file (going back to where none stood). `old_sha256` is what
    the plan was made for: another text there now means that somebody changed it meanwhile.
    `generation` still lacks its number, backup and old state: the swap fills them in.
    `starts_packaged` is whether what is left after removing the file shall run.
    """

    text: bytes | None
    old_sha256: str | None
    generation: Generation
    address: Address | None
    alias: str | None
    expects_draft: bool
    must_draft: bool
    model_bytes: int | None
    drain: bool
    enable: bool | None
    starts_packaged: bool = False

    @property
    def goes_back(self) -> bool:
        """Whether this leads to something that served before."""
        return self.generation.reason in {"rollback", "guard"}


@dataclass(slots=True)
class _Draft:
    """What there is so far of a swap that has not begun."""

    number: int | None = None
    backup: str | None = None


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
        if not (request.goes_back and is_full(error) and release_reserve(ctx)):
            raise
        return _begin(ctx, request, old_text, before, interrupts)


def release_reserve(ctx: Context) -> bool:
    """Give back the space that was set aside; whether there was any."""
    if not ctx.paths.reserve.exists():
        return False
    try:
        ctx.files.remove(ctx.paths.reserve)
    except HostError:
        return False
    return True


def set_reserve_aside(ctx: Context) -> None:
    """Set space aside for going back; a disk that is too full for it is no error."""
    try:
        ctx.files.set_aside(ctx.paths.reserve, _RESERVE_BYTES)
    except HostError:
        return


def _begin(
    ctx: Context,
    request: SwapRequest,
    old_text: bytes | None,
    before: UnitState,
    interrupts: Interrupts,
) -> SwapRecord:
    draft = _Draft()
    try:
        ctx.say("keeping what stands there now", step=1, steps=STEPS)
        was_healthy = _answers(ctx, before)
        generation = _keep(ctx, request, old_text, before, draft)
        record = _record(ctx, generation, old_text, before, was_healthy=was_healthy)
        ctx.say("writing the intent record", step=2, steps=STEPS)
        ctx.files.make_folder(ctx.paths.journal_dir)
        ctx.files.write_json(record_path(ctx), record.to_json(), mode=0o600)
    # Whatever it is, nothing may be left behind.
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        with interrupts.held():
            abandon(ctx, draft.number, draft.backup, error)
        if not isinstance(error, TunerdError):
            raise
        raise DeployError(
            "the swap could not be started",
            cause=reason_of(error),
            state="nothing was changed",
            hint=error.hint,
        ) from error
    return record


def _keep(
    ctx: Context, request: SwapRequest, old_text: bytes | None, before: UnitState, draft: _Draft
) -> Generation:
    ctx.files.make_folder(ctx.paths.unit_dir)
    ctx.files.make_folder(ctx.paths.generations_dir)
    number = ctx.generations.next_number()
    name = new_backup_name(ctx, request.generation.reason) if old_text is not None else None
    generation = replace(
        request.generation,
        number=number,
        created_s=ctx.clock.now_s(),
        unit_sha256=sha256(request.text),
        replaced_backup=name,
        replaced_absent=old_text is None,
        was_active=before.is_active,
        was_enabled=before.is_enabled,
    )
    draft.number = number
    ctx.generations.create(generation, request.text)
    if name is not None:
        draft.backup = name
        ctx.files.copy(ctx.unit_path, ctx.paths.unit_dir / name)
    return generation


def _record(
    ctx: Context,
    generation: Generation,
    old_text: bytes | None,
    before: UnitState,
    *,
    was_healthy: bool,
) -> SwapRecord:
    return SwapRecord(
        unit=ctx.unit,
        unit_path=str(ctx.unit_path),
        generation=generation.number,
        reason=generation.reason,
        old_sha256=sha256(old_text),
        new_sha256=generation.unit_sha256,
        backup=generation.replaced_backup,
        boot_id=boot_id() or "unknown",
        started_s=ctx.clock.now_s(),
        was_active=before.is_active or before.active_state == "activating",
        was_healthy=was_healthy,
        was_enabled=before.is_enabled,
        old_invocation=before.invocation_id,
    )


def _answers(ctx: Context, before: UnitState) -> bool:
    """Whether the old server is up, so that going back to it must bring it up again.

    One that still loads, or whose address its unit does not say, gets the benefit of the doubt.
    """
    if not before.is_active:
        return False
    address = address_now(ctx, read_live_unit(ctx), before)
    if address is None:
        return True
    return ctx.connect(address).health() is not HttpState.REFUSED


def abandon(ctx: Context, number: int | None, backup: str | None, error: BaseException) -> None:
    """Take back what was written for a swap that changes nothing after all.

    The disk may be full or gone, so nothing here may fail; what is left is harmless, and recovery
    clears it.
    """
    if number is None:
        return
    cause = reason_of(error) if isinstance(error, TunerdError) else type(error).__name__
    ending = Ending(Outcome.ABANDONED, ctx.clock.now_s(), None, cause, None)
    steps: list[Callable[[], None]] = [
        lambda: ctx.files.remove(record_path(ctx)),
        lambda: ctx.generations.end(number, ending),
    ]
    if backup is not None:
        steps.append(lambda: ctx.files.remove(ctx.paths.unit_dir / backup))
    for step in steps:
        try:
            step()
        except TunerdError:
            continue


def reason_of(error: TunerdError) -> str:
    """An error's message with its cause, in one line."""
    return f"{error.message}: {error.cause}" if error.cause else error.message
