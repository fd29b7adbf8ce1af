"""Backups of the unit, beside it: which there are, and which may go."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.core.backup import Backup, backup_name, newest_first, to_prune


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
    """Remove what is beyond the number to keep, never the newest.

    Raises:
        HostError: one could not be removed.
    """
    found = backups(ctx)
    protected = {backup.name for backup in found[:1]}
    for name in to_prune(found, keep=ctx.settings.backups.keep, protected=protected):
        ctx.files.remove(ctx.paths.unit_dir / name)


def _pattern(ctx: Context) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in ctx.unit) + ".pre-*"
