"""What a swap writes beside the unit: its intent record, and the `.pre-*` files.

A swap is: backup, record, rename, reload, restart, real generation, drop the record. The record is
durable before the unit changes, so whatever is found later is one of four things.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine.serving import standing_text
from tunerd.errors import HostError
from tunerd.records import Unreadable, read
from tunerd.words import sha256

SCHEMA = 1
_STAMPED = re.compile(r"[0-9]{8}T[0-9]{6}Z")


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """What a swap was about to do, written before it does it.

    `old_sha256` is None where no unit file stood before, `new_sha256` None where the swap removes
    the file; `backup` is None only in the first case. `old_invocation` is the invocation that
    served before, so that it can be told whether a restart has happened. `was_healthy` says whether
    the old server answered, so that going back must make it answer again. `link_to` is where the unit
    file led, if it was a link. `wants_probation` says that what serves then is to be watched, `sweep` which one
    proved it. `tuned` is the record of the tuned layer that is in force then, or out of it where the swap goes back.
    `was_given_up` says that the old server's manager had started it again and again, `was_stranded` that it had
    not come back after the swap before.
    """

    unit: str
    unit_path: str
    generation: int
    reason: str
    old_sha256: str | None
    new_sha256: str | None
    backup: str | None
    boot_id: str
    started_s: float
    was_active: bool
    was_healthy: bool
    was_enabled: bool | None
    old_invocation: str | None
    link_to: str | None = None
    wants_probation: bool = False
    sweep: int | None = None
    tuned: Mapping[str, Any] | None = None
    was_given_up: bool = False
    was_stranded: bool = False


def record_from_json(data: object) -> SwapRecord:
    """The record as read from disk.

    Raises:
        Unreadable: it is of another schema, or a field is missing or of the wrong kind.
    """
    record = read(SwapRecord, data, schema=SCHEMA)
    if record.backup is None and record.old_sha256 is not None:
        raise Unreadable("a unit stood before, but no backup is named")
    return record


class Recovery(StrEnum):
    """What an interrupted swap left, and so what is to be done.

    COMMITTED: the swap had ended well; only drop the record. UNTOUCHED: the unit still is the old
    one; drop the record, see that it serves. JUDGE: the new unit stands and this is the same boot;
    if it serves, finish, else undo. UNDO: the new unit stands but the machine went down during its
    trial, so it is a suspect; put the old one back. FOREIGN: somebody edited the unit since; leave
    it alone and say so.
    """

    COMMITTED = "committed"
    UNTOUCHED = "untouched"
    JUDGE = "judge"
    UNDO = "undo"
    FOREIGN = "foreign"


def decide_recovery(
    record: SwapRecord, *, unit_sha256: str | None, boot_id: str, is_committed: bool
) -> Recovery:
    """What to do about a record.

    Args:
        record: What the swap was about to do.
        unit_sha256: What stands in the unit directory now.
        boot_id: The boot that this is.
        is_committed: Whether its generation says that it ended well.
    """
    # A commit that failed half-way may have said so and gone back all the same.
    went_back = unit_sha256 == record.old_sha256 != record.new_sha256
    if is_committed and not went_back:
        return Recovery.COMMITTED
    if unit_sha256 == record.old_sha256:
        return Recovery.UNTOUCHED
    if unit_sha256 != record.new_sha256:
        return Recovery.FOREIGN
    return Recovery.JUDGE if boot_id == record.boot_id else Recovery.UNDO


def cut_short(ctx: Context, record: SwapRecord) -> str:
    """That its swap was, and which unit file stands."""
    stands = {
        record.old_sha256: "the previous unit is in place",
        record.new_sha256: "its new unit is in place",
    }
    found = stands.get(sha256(standing_text(ctx)), "the unit was edited since")
    return f"the swap of generation {record.generation} was cut short, and {found}"


def record_path(ctx: Context) -> Path:
    """Where the intent record of the unit stands while a swap runs."""
    return ctx.paths.journal_dir / f"{ctx.unit}.json"


def others_on_record(ctx: Context) -> tuple[str, ...]:
    """Further units with an intent record, where nobody can read the settings, which name the unit."""
    if ctx.settings_problem is None:
        return ()
    records = sorted(ctx.paths.journal_dir.glob("*.service.json"))
    return tuple(path.stem for path in records if path != record_path(ctx))


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


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup on disk.

    `generation` is the one whose swap made it, so it holds what served before that generation;
    None for files that people made by hand.
    """

    name: str
    changed_s: float
    generation: int | None


def backups(ctx: Context) -> tuple[Backup, ...]:
    """Backups of the unit: ours by generation, newest first; then those made by hand, latest first."""
    by_name: dict[str, int] = {}
    for entry in ctx.generations.entries():
        name = entry.generation.replaced_backup
        if name is not None:
            by_name.setdefault(name, entry.generation.number)
    found = []
    for path in _made(ctx):
        with contextlib.suppress(FileNotFoundError):  # a swap may be removing it
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append(Backup(path.name, status.st_ctime, by_name.get(path.name)))
    order = sorted(found, key=lambda one: (one.generation or 0, one.changed_s), reverse=True)
    return tuple(order)


def unrecorded_since(ctx: Context, moment_s: float) -> str | None:
    """The newest backup of a swap since then that no record knows: STATE is older than the unit then."""
    begin = f"{ctx.unit}.pre-"
    names = (one.name for one in backups(ctx) if one.generation is None)
    swaps = (name for name in names if _STAMPED.match(name.removeprefix(begin)))
    return max((name for name in swaps if name > begin + _stamp(moment_s)), default=None)


def _stamp(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y%m%dT%H%M%SZ")


def new_backup_name(ctx: Context, reason: str) -> str:
    """The name of a backup made now, counted within a second; none that systemd would load."""
    taken = {path.name for path in _made(ctx)}
    stamp = _stamp(ctx.clock.now_s())
    counted = itertools.chain([""], (f".{nth}" for nth in itertools.count(1)))
    names = (f"{ctx.unit}.pre-{stamp}{nth}-{reason}" for nth in counted)
    return next(name for name in names if name not in taken)


def prune_backups(ctx: Context) -> None:
    """Remove those of ours beyond the number to keep, oldest first, but never the only copy of a text.

    Raises:
        HostError: one could not be removed.
    """
    keep = ctx.settings.backups.keep
    ours = [backup for backup in backups(ctx) if backup.generation is not None]
    for backup in ours[keep:] if keep else ():
        path = ctx.paths.unit_dir / backup.name
        wanted = sha256(ctx.files.read(path))
        if ctx.generations.kept_text(wanted, replaced_by=backup.generation) is not None:
            ctx.files.remove(path)


def _made(ctx: Context) -> list[Path]:
    return list(ctx.paths.unit_dir.glob(f"{glob.escape(ctx.unit)}.pre-*"))
