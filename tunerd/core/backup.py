"""Names of backups: `UNIT.pre-YYYYmmddTHHMMSSZ-REASON`, plain files that systemd ignores."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

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
