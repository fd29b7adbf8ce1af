"""`tunerd rollback`: back to the unit that served before; a swap like any other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.app import Context
from tunerd.engine.health import Expectation, FailureKind
from tunerd.engine.probe import changed_files, kept_folder
from tunerd.engine.serving import address_of, read_live_unit, standing_text, work_dir_of
from tunerd.errors import DeployError, HostError, UsageError
from tunerd.machine.files import is_gone
from tunerd.production.gate import expected_of
from tunerd.production.journal import backups
from tunerd.production.recover import UNDONE, changing
from tunerd.production.swap import SwapRequest, swap
from tunerd.production.unattended import demand_root_for
from tunerd.records import plain
from tunerd.result import ActionResult, Message, note, warning
from tunerd.units.generations import Generation, HistoryEntry, Outcome, changed_model_files
from tunerd.units.live import LiveUnit
from tunerd.units.text import is_ours, parse_unit, unified_diff
from tunerd.words import generation_number, sha256

if TYPE_CHECKING:
    from tunerd.profile.files import TunedRecord

Confirm = Callable[["Target"], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a rollback would lead.

    `text` is None for going back to where no unit file stood. `made_by` is the generation that
    deployed this text, where that is known, and `was` the newest that replaced it: it says how things
    stood then. `enable` is whether it then starts at boot.
    """

    name: str
    text: bytes | None
    made_by: Generation | None
    was: Generation | None
    enable: bool
    diff: str
    messages: tuple[Message, ...]


class _AlreadyBack(Exception):
    """The change that was to be taken back was cut short, and recovery has just undone it."""


def rollback(
    ctx: Context,
    *,
    to: str | None,
    drain: bool,
    confirm: Confirm = lambda _target: None,
    ask: Confirm | None = None,
    reason: str = "rollback",
    tuned: TunedRecord | None = None,
) -> ActionResult:
    """Make an earlier unit live again.

    Args:
        ctx: Where.
        to: A backup's name or a generation's number; None for what served before. Where recovery has just undone a
            deployment that was cut short, that is back already.
        drain: Whether to wait for running requests first.
        confirm: Checks the target under the lock; raises to stop.
        ask: Shows the target and asks a person, without the lock; raises to stop.
        reason: Why, for the backup's name and the history.
        tuned: Of what is taken back, to be out of force then; None for none.

    Raises:
        Busy: another change is under way.
        UsageError: there is no such backup or generation.
        DeployError: the unit is masked or an alias, there is nothing to go back to, or what it needs is gone.
        RolledBack: the older unit does not serve; the present one does again.
        Stranded: neither does.
    """
    from tunerd.production.plan import remember_live_load  # what knows engines takes long to import

    messages: list[Message] = []

    def target_now() -> Target:
        if to is None and any(one.code == UNDONE for one in messages):
            raise _AlreadyBack
        return find_target(ctx, to)

    try:
        with changing(
            ctx,
            reason,
            target_now,
            ask=ask,
            confirm=confirm,
            by=f"`tunerd {reason}`",
            messages=messages,
        ) as target:
            request = _request(ctx, target, drain=drain, reason=reason)
            done = swap(ctx, replace(request, tuned=plain(tuned)))
            loaded = remember_live_load(ctx)
    except _AlreadyBack:
        further = note(
            "further", "what served before that is one more step back", "tunerd rollback"
        )
        serving = ctx.deployed()
        payload = {
            **dict.fromkeys(("backup", "without_service_s", "first_text", "to")),
            "generation": None if serving is None else serving.number,
            "summary": "back to what served before",
            "diff": "",
            "serving": None,
        }
        return ActionResult("rollback", payload, (*messages, further), has_acted=True)
    messages += [*target.messages, *done.told, *loaded]
    is_unseen = done.serving is not None and done.serving.first_text is None
    payload = {
        **done.to_json(f"back to {target.name} as generation {done.generation}"),
        "to": target.name,
        "diff": target.diff,
        "serving": None if is_unseen else done.serving is not None,
    }
    return ActionResult("rollback", payload, tuple(messages), has_acted=True)


def list_targets(ctx: Context) -> ActionResult:
    """`tunerd rollback --list`: everything that one can go back to, newest first."""
    live = sha256(standing_text(ctx))
    makers = _makers(ctx)
    rows = []
    for backup in backups(ctx):
        text = _backup_text(ctx, backup.name)
        made_by = makers.get(sha256(text) or "")
        rows.append(
            {
                "name": backup.name,
                "generation": backup.generation,
                "changed_s": backup.changed_s,
                "made_by_generation": made_by.number if made_by is not None else None,
                "profile": made_by.profile if made_by is not None else None,
                "is_ours": is_ours((text or b"").decode("utf-8", "replace")),
                "is_live": text is not None and sha256(text) == live,
            }
        )
    return ActionResult("rollback", {"backups": rows})


def preview(ctx: Context, to: str | None) -> ActionResult:
    """Where a rollback would lead, and what would change; nothing is touched.

    Raises:
        UsageError, DeployError: as `rollback`.
    """
    target = find_target(replace(ctx, is_unattended=True), to)
    made_by = target.made_by
    payload = {
        "to": target.name,
        "diff": target.diff,
        "profile": made_by.profile if made_by is not None else None,
        "removes": target.text is None,
    }
    return ActionResult("rollback", payload, target.messages)


def find_target(ctx: Context, to: str | None) -> Target:
    """Where a rollback would lead, checked: what is known to be gone refuses it, doubts are told."""
    from tunerd.production.plan import check_boot  # see _check

    name, text = _chosen(ctx, to)
    if sha256(text) == sha256(standing_text(ctx)):
        raise DeployError(
            f"`{name}` is already live",
            state="nothing was changed",
            hint="`tunerd rollback --list` shows what else there is",
        )
    live = read_live_unit(ctx)
    made_by = _makers(ctx).get(sha256(text) or "")
    undone = (entry for _, kept, entry in _kept(ctx) if kept == text and entry is not None)
    was = next((entry.generation for entry in undone), None)
    enable = _enable(text, was)
    state = ctx.services.state(ctx.unit)
    messages = (
        *_check(ctx, name, text, live, made_by),
        *(() if text is None else check_boot(ctx, state, enable=enable)),
        *(_passed_over(ctx) if to is None else ()),
    )
    new = text.decode("utf-8", "replace") if text is not None else None
    diff = unified_diff(live.text, new, ctx.unit)
    return Target(name, text, made_by, was, enable, diff, messages)


def _chosen(ctx: Context, to: str | None) -> tuple[str, bytes | None]:
    if to is None:
        return _newest(ctx)
    number = generation_number(to)
    if number is not None:
        entry = ctx.generations.read(number)
        if entry is None or entry.generation.unit != ctx.unit:
            raise UsageError(f"there is no generation {to} of {ctx.unit}", hint="`tunerd history`")
        return f"generation {to}", ctx.generations.unit_text(number)
    for name, text, _ in _kept(ctx):
        if name == to and text is not None:
            return name, text
    if to in {backup.name for backup in backups(ctx)}:
        ctx.files.read(ctx.paths.unit_dir / to)  # says why it cannot be
    raise UsageError(
        f"no such backup of {ctx.unit}: `{to}`", hint="`tunerd rollback --list` shows what there is"
    )


def _newest(ctx: Context) -> tuple[str, bytes | None]:
    """What was deployed where somebody edited it since, else what the newest swap replaced.

    What is live already (a failed swap's backup) is passed over.
    """
    live = sha256(standing_text(ctx))
    deployed = ctx.deployed()
    if deployed is not None and deployed.unit_sha256 not in {None, live}:
        text = ctx.generations.unit_text(deployed.number)
        if text is not None:
            return f"generation {deployed.number}", text
    for name, text, entry in _kept(ctx):
        is_undone = entry is None or _changed_the_unit(entry)
        if is_undone and sha256(text) != live:
            return name, text
    raise DeployError(
        f"there is nothing to go back to: no backup of {ctx.unit} in `{ctx.paths.unit_dir}`",
        state="nothing was changed",
    )


def _changed_the_unit(entry: HistoryEntry) -> bool:
    """Whether what the swap replaced is not what stands now: it ended well, or was edited over."""
    ending = entry.ending
    is_edited = ending.outcome is Outcome.ABANDONED and ending.cause == FailureKind.EDITED
    return ending.outcome.is_done or is_edited


def _kept(ctx: Context) -> Iterator[tuple[str, bytes | None, HistoryEntry | None]]:
    """What swaps replaced and can be read, newest first, by name and with its swap; then all backups.

    A text is None for going back to where no unit file stood.
    """
    for entry in ctx.generations.entries(ctx.unit):
        name = entry.generation.replaced_backup
        text = None if name is None else _backup_text(ctx, name)
        with contextlib.suppress(HostError):  # a backup that was pruned, or that somebody removed
            text = text or ctx.generations.replaced_text(entry.generation.number)
        if name is not None and text is not None:
            yield name, text, entry
        elif entry.generation.replaced_absent:
            yield "no unit file", None, entry
    for backup in backups(ctx):
        if (text := _backup_text(ctx, backup.name)) is not None:
            yield backup.name, text, None


def _backup_text(ctx: Context, name: str) -> bytes | None:
    """None also where it cannot be read: one bad file does not stand in the way of all others."""
    try:
        return ctx.files.read(ctx.paths.unit_dir / name)
    except HostError:
        return None


def _passed_over(ctx: Context) -> Iterator[Message]:
    """That the newest generation left the unit's text as it was, so that going back leads behind it."""
    newest = ctx.deployed()
    if newest is None or newest.unit_sha256 != sha256(standing_text(ctx)):
        return
    if sha256(ctx.generations.replaced_text(newest.number)) == newest.unit_sha256:
        yield warning(
            "goes-further-back",
            f"generation {newest.number} did not change the unit: this undoes the last change before it",
            f"`tunerd apply {newest.profile or 'PROFILE'}` drops what was pinned with it alone; "
            "`tunerd rollback --list` shows what else there is",
        )


def _makers(ctx: Context) -> dict[str, Generation]:
    """The newest generation that deployed each text, by the text's hash."""
    found: dict[str, Generation] = {}
    for entry in ctx.generations.entries():
        if entry.generation.unit_sha256 is not None:
            found.setdefault(entry.generation.unit_sha256, entry.generation)
    return found


def _check(
    ctx: Context, name: str, text: bytes | None, live: LiveUnit, made_by: Generation | None
) -> list[Message]:
    """Before anything stops: what the old unit needs is there, and what was replaced since."""
    if text is None:
        return []
    old = _as_unit(ctx, text)
    if old.problem is not None or old.argv is None or old.program is None:
        raise DeployError(
            f"`{name}` cannot be read as a unit: {old.problem}",
            state="nothing was changed",
            hint="`tunerd rollback --list` shows what else there is",
        )
    from tunerd.engine.builds import why_no_start  # what knows engines takes long to import
    from tunerd.production.plan import NO_WAY_BACK, check_unit, check_way_back

    demand_root_for(ctx, text, f"`{name}`")
    why = why_no_start(ctx, old)
    messages = check_way_back(ctx, live, old)
    is_gone_for_good = not old.has_own_files and any(
        path and is_gone(Path(work_dir_of(ctx, old), path))
        for path in (old.program, old.serving.model)
    )
    # Doubts may be wrong, and going back is for trouble: they count where nothing would serve afterwards.
    if is_gone_for_good or (why is not None and any(one.code == NO_WAY_BACK for one in messages)):
        raise DeployError(
            f"`{name}` can no longer serve",
            cause=why,
            state="nothing was changed",
            hint=_way_round(ctx, made_by, old),
        )
    if why is not None:
        hint = "if it does not, tunerd starts what serves now again"
        messages.append(warning("may-not-start", f"`{name}` may no longer start: {why}", hint))
    # What checks may be missing, or hang: it is no reason to stay.
    complaints = check_unit(ctx, text.decode("utf-8", "surrogateescape"))
    messages += [warning("unit-complaint", one.text) for one in complaints]
    if made_by is not None:
        since = f"since generation {made_by.number}"
        messages += [
            warning(
                "replaced",
                f"{since} this was replaced: {change}; the unit will start what is there now",
                _way_round(ctx, made_by, old),
            )
            for change in changed_files(made_by.engine_components, made_by.argv)
        ]
        messages += [
            warning("replaced", f"{since} a file of the model was replaced: `{path}`")
            for path, is_gone in changed_model_files(made_by)
            if not is_gone
        ]
    return messages


def _way_round(ctx: Context, made_by: Generation | None, old: LiveUnit) -> str:
    """What to do where the old unit's program or model is gone, or the program another one."""
    model = old.serving.model
    # Without it a kept engine is no help.
    if model is not None and is_gone(Path(work_dir_of(ctx, old), model)):
        return f"put the model back to `{model}`; `tunerd rollback --list` shows what else there is"
    if made_by is not None:
        kept = kept_folder(ctx.paths.engines_dir, made_by.engine_sha256)
        if kept is not None:
            engine = f'engine.prefer=["kept-{kept.name}"]'
            return f"a copy of its engine was kept: tunerd apply {made_by.profile} --set '{engine}'"
    return "`tunerd rollback --list` shows what else there is; `tunerd engines keep` keeps programs"


def _enable(text: bytes | None, was: Generation | None) -> bool:
    """As it was, where that is known; else a unit file that can be enabled is."""
    if was is not None and was.was_enabled is not None:
        return was.was_enabled
    unit = parse_unit((text or b"").decode("utf-8", "surrogateescape"))
    return bool(unit.values("Install", "WantedBy") or unit.values("Install", "RequiredBy"))


def _as_unit(ctx: Context, text: bytes) -> LiveUnit:
    return read_live_unit(ctx, instead=text.decode("utf-8", "surrogateescape"))


def _request(ctx: Context, target: Target, *, drain: bool, reason: str) -> SwapRequest:
    old = None if target.text is None else _as_unit(ctx, target.text)
    made_by = target.made_by or Generation(unit=ctx.unit, reason=reason, unit_sha256=None)
    generation = replace(
        made_by,
        unit=ctx.unit,
        reason=reason,
        unit_sha256=sha256(target.text),
        from_generation=made_by.number or None,
        enable=target.enable,
        host={},
    )
    return SwapRequest(
        text=target.text,
        old_sha256=sha256(standing_text(ctx)),
        generation=generation,
        address=None if old is None else address_of(ctx, old),
        expected=Expectation(None, None, expects_draft=False) if old is None else expected_of(old),
        drain=drain,
        starts_packaged=target.was is not None and target.was.was_active,
    )
