"""The intent record of a swap, and what recovery makes of one that was cut short.

A swap is: backup, record, rename, reload, restart, real generation, drop the record. The record is
durable before the unit changes, so whatever is found later is one of four things.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from tunerd.records import Unreadable, read

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """What a swap was about to do, written before it does it.

    `old_sha256` is None where no unit file stood before, `new_sha256` None where the swap removes
    the file; `backup` is None only in the first case. `old_invocation` is the invocation that
    served before, so that it can be told whether a restart has happened. `was_healthy` says whether
    the old server answered, so that going back must make it answer again. `link_to` is where the unit
    file led, if it was a link.
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


REASONS = ("apply", "promote", "rollback", "guard", "adopt", "recover")
_NAME = re.compile(
    r"(?P<unit>.+)\.pre-(?P<stamp>[0-9]{8}T[0-9]{6}Z)(?:\.(?P<nth>[0-9]{1,9}))?-(?P<reason>[a-z]+)"
)


@dataclass(frozen=True, slots=True)
class BackupName:
    """A backup's name taken apart; `nth` counts backups made within one second."""

    unit: str
    stamp: str
    nth: int
    reason: str


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup on disk.

    `generation` is the one whose swap made it, so it holds what served before that generation;
    None for files that people made by hand.
    """

    name: str
    changed_s: float
    size: int
    generation: int | None


def backup_name(unit: str, at_s: float, reason: str, taken: Collection[str]) -> str:
    """A name that is not taken yet, for a backup made at this moment (seconds since the epoch)."""
    stamp = datetime.fromtimestamp(at_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{unit}.pre-{stamp}-{reason}"
    nth = 0
    while name in taken:
        nth += 1
        name = f"{unit}.pre-{stamp}.{nth}-{reason}"
    return name


def parse_backup_name(name: str) -> BackupName | None:
    """The parts of a name that tunerd gave; None for any other, such as one made by hand."""
    found = _NAME.fullmatch(name)
    if found is None or found["reason"] not in REASONS:
        return None
    return BackupName(found["unit"], found["stamp"], int(found["nth"] or 0), found["reason"])


def newest_first(backups: Sequence[Backup]) -> tuple[Backup, ...]:
    """Ours by generation, highest first; then those made by hand, latest change first."""
    ours = [backup for backup in backups if backup.generation is not None]
    others = [backup for backup in backups if backup.generation is None]
    return (
        *sorted(ours, key=lambda backup: backup.generation or 0, reverse=True),
        *sorted(others, key=lambda backup: backup.changed_s, reverse=True),
    )


def to_prune(
    backups: Sequence[Backup], *, keep: int, protected: Collection[str]
) -> tuple[str, ...]:
    """Names that retention may remove: only tunerd's own, never protected ones, oldest go first.

    Args:
        backups: All backups of a unit.
        keep: How many of tunerd's own to keep; 0 keeps all.
        protected: Names that must stay: what a journal names, and the last that served well.
    """
    if keep <= 0:
        return ()
    ours = [
        backup
        for backup in newest_first(backups)
        if backup.generation is not None and parse_backup_name(backup.name) is not None
    ]
    return tuple(backup.name for backup in ours[keep:] if backup.name not in protected)
