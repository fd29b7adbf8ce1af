"""What a swap writes beside the unit: its intent record, and the `.pre-*` files."""

from __future__ import annotations

from pathlib import Path

from tunerd.app import Context
from tunerd.errors import HostError
from tunerd.production.records import (
    Backup,
    SwapRecord,
    backup_name,
    newest_first,
    record_from_json,
    to_prune,
)
from tunerd.records import Unreadable
from tunerd.words import sha256


def record_path(ctx: Context) -> Path:
    """Where the intent record of the unit stands while a swap runs."""
    return ctx.paths.journal_dir / f"{ctx.unit}.json"


def read_record(ctx: Context) -> SwapRecord | None:
    """The intent record of the unit; None while no swap is under way or was cut short.

    Raises:
        HostError: it is damaged.
    """
    data = ctx.files.read_json(record_path(ctx))
    if data is None:
        return None
    try:
        return record_from_json(data)
    except Unreadable as problem:
        raise HostError(
            f"the intent record is damaged: `{record_path(ctx)}`",
            cause=str(problem),
            state=f"`{ctx.unit_path}` was not touched",
            hint="compare the unit with its newest `.pre-*`, then remove the record",
        ) from problem


def backups(ctx: Context) -> tuple[Backup, ...]:
    """Backups of the unit, newest first: ours by generation, then those made by hand."""
    folder = ctx.paths.unit_dir
    if not folder.is_dir():
        return ()
    by_name: dict[str, int] = {}
    for entry in ctx.generations.entries():
        name = entry.generation.replaced_backup
        if name is not None:
            by_name.setdefault(name, entry.generation.number)
    found = []
    for path in folder.glob(_pattern(ctx)):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            number = by_name.get(path.name)
            found.append(Backup(path.name, status.st_ctime, status.st_size, number))
    return newest_first(found)


def new_backup_name(ctx: Context, reason: str) -> str:
    """The name of a backup made now."""
    taken = {path.name for path in ctx.paths.unit_dir.glob(_pattern(ctx))}
    return backup_name(ctx.unit, ctx.clock.now_s(), reason, taken)


def prune_backups(ctx: Context) -> None:
    """Remove what is beyond the number to keep, never the newest, nor the only copy of a text.

    Raises:
        HostError: one could not be removed.
    """
    found = backups(ctx)
    protected = {backup.name for backup in found[:1]}
    made_by = {backup.name: backup.generation for backup in found}
    for name in to_prune(found, keep=ctx.settings.backups.keep, protected=protected):
        if _is_held(ctx, ctx.files.read(ctx.paths.unit_dir / name), made_by[name]):
            ctx.files.remove(ctx.paths.unit_dir / name)


def _is_held(ctx: Context, text: bytes | None, generation: int | None) -> bool:
    """Whether a generation has the text too: the one that replaced it, or one that had deployed it."""
    if generation is not None and ctx.generations.replaced_text(generation) == text:
        return True
    wanted = sha256(text)
    numbers = (
        entry.generation.number
        for entry in ctx.generations.entries()
        if entry.generation.unit_sha256 == wanted
    )
    return any(ctx.generations.unit_text(number) == text for number in numbers)


def _pattern(ctx: Context) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in ctx.unit) + ".pre-*"
