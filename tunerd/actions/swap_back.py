"""The way back of a swap: the old unit's text, its links, its server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tunerd.actions.context import Context
from tunerd.actions.live import address_of, read_live_unit, standing_text
from tunerd.actions.serve_check import NotServing, Serving, wait_until_serving
from tunerd.actions.start_again import start_again
from tunerd.actions.swap_begin import release_reserve
from tunerd.core.health import Expectation
from tunerd.core.live import LiveUnit
from tunerd.core.service import UnitState
from tunerd.core.swap import SwapRecord, sha256
from tunerd.errors import DeployError, HostError, NoSupervisor
from tunerd.system.files import is_full
from tunerd.system.host import process_facts


class ForeignEditError(DeployError):
    """The unit is neither the old nor the new one: somebody edited it, and theirs it is."""


@dataclass(frozen=True, slots=True)
class Back:
    """The old unit is back.

    `serving` says how its server does; None where none is to run. `was_left_stopped` says that
    somebody stopped it meanwhile, which was respected.
    """

    serving: Serving | NotServing | None
    was_left_stopped: bool = False


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
    has_supervisor = _reload(ctx, record)
    state = ctx.services.state(ctx.unit)
    if record.was_enabled and state.is_enabled is False:  # a removal had disabled it
        ctx.services.enable(ctx.unit)
    if not record.was_active:
        if state.is_active or state.active_state == "activating":
            ctx.services.stop(ctx.unit)
        if has_supervisor:
            ctx.services.reset_failed(ctx.unit)
        return Back(None)
    if not starts:
        return Back(None, was_left_stopped=not state.is_active)
    if _is_the_old(ctx, record, state):
        found = check_as_it_stands(ctx, old_invocation=None)
        if isinstance(found, Serving):
            return Back(found)
    watch = partial(_watch_as_it_stands, ctx)
    return Back(start_again(ctx, watch, lambda: address_of(ctx, read_live_unit(ctx))))


def _watch_as_it_stands(ctx: Context, old_invocation: str | None) -> Serving | NotServing:
    return check_as_it_stands(ctx, old_invocation=old_invocation)


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


def check_as_it_stands(
    ctx: Context, *, old_invocation: str | None, n_restarts: int = 0
) -> Serving | NotServing:
    """Whether the unit that stands on disk serves, judged by what its own text says.

    `n_restarts` is how many restarts by its manager are known of, and do not speak against it.
    """
    live = read_live_unit(ctx)
    expected = Expectation(
        old_invocation=old_invocation,
        alias=live.serving.alias,
        expects_draft=False,
        n_restarts=n_restarts,
    )
    return wait_until_serving(ctx, ctx.unit, address=address_of(ctx, live), expected=expected)


def demand_text(ctx: Context, *wanted: str | None) -> None:
    """The unit file is one with these hashes at this moment.

    Raises:
        ForeignEditError: it is another one.
    """
    if sha256(standing_text(ctx)) not in wanted:
        raise ForeignEditError(f"{ctx.unit} was edited just now by somebody else")


def _put_back(ctx: Context, record: SwapRecord) -> None:
    """The old text, or no file where none stood."""
    is_whole = partial(demand_text, ctx, record.old_sha256, record.new_sha256)
    is_whole()
    # While the new file stands: without it the manager does not know what to take away.
    if not record.was_enabled and ctx.services.state(ctx.unit).is_enabled:
        ctx.services.disable(ctx.unit)
    if sha256(standing_text(ctx)) == record.old_sha256:
        return
    if record.old_sha256 is None:
        ctx.files.remove(ctx.unit_path, check=is_whole)
        return
    try:
        _write_old(ctx, record, is_whole)
    except HostError as error:
        if not is_full(error):
            raise
        if release_reserve(ctx):
            _write_old(ctx, record, is_whole)
        else:  # there is no room for a copy, but a name can still be changed
            _old_text_of_backup(ctx, record)
            ctx.files.rename(ctx.paths.unit_dir / (record.backup or ""), ctx.unit_path)


def _write_old(ctx: Context, record: SwapRecord, check: Callable[[], None]) -> None:
    try:
        text = _old_text_of_backup(ctx, record)
        look = ctx.files.look(ctx.paths.unit_dir / (record.backup or ""))
    except HostError:
        kept = _old_text_of_generations(ctx, record)
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


def _old_text_of_generations(ctx: Context, record: SwapRecord) -> bytes | None:
    """The same text as a generation holds it, where tunerd had deployed it."""
    for entry in ctx.generations.entries():
        if entry.generation.unit_sha256 == record.old_sha256:
            text = ctx.generations.unit_text(entry.generation.number)
            if sha256(text) == record.old_sha256:
                return text
    return None


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
    if state.needs_reload or state.main_pid is None or state.active_since_s is None:
        return False
    facts = process_facts(state.main_pid)
    if live.argv is None or facts is None or facts.cmdline is None:
        return False
    try:
        changed_s = ctx.unit_path.stat().st_ctime
    except OSError:
        return False
    words = facts.cmdline[-len(live.argv) :]
    return words == live.argv and state.active_since_s > changed_s
