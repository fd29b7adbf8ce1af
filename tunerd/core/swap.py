"""The intent record of a swap, and what recovery makes of one that was cut short.

A swap is: backup, record, rename, reload, restart, real generation, drop the record. The record is
durable before the unit changes, so whatever is found later is one of four things.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA = 1


class RecordError(ValueError):
    """A record on disk that cannot be read as one."""


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """What a swap was about to do, written before it does it.

    `old_sha256` is None where no unit file stood before, `new_sha256` None where the swap removes
    the file; `backup` is None only in the first case. `old_invocation` is the invocation that
    served before, so that it can be told whether a restart has happened. `was_healthy` says whether
    the old server answered, so that going back must make it answer again.
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

    def to_json(self) -> dict[str, Any]:
        """As written to disk."""
        return {"schema": SCHEMA, **asdict(self)}


def record_from_json(data: object) -> SwapRecord:
    """The record as read from disk.

    Raises:
        RecordError: it is of another schema, or a field is missing or of the wrong kind.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        message = "not an intent record of this version"
        raise RecordError(message)
    fields: dict[str, tuple[type, ...]] = {
        "unit": (str,),
        "unit_path": (str,),
        "generation": (int,),
        "reason": (str,),
        "old_sha256": (str, type(None)),
        "new_sha256": (str, type(None)),
        "backup": (str, type(None)),
        "boot_id": (str,),
        "started_s": (int, float),
        "was_active": (bool,),
        "was_healthy": (bool,),
        "was_enabled": (bool, type(None)),
        "old_invocation": (str, type(None)),
    }
    for name, kinds in fields.items():
        if name not in data or not isinstance(data[name], kinds):
            message = f"field {name} is missing or of the wrong kind"
            raise RecordError(message)
    if data["backup"] is None and data["old_sha256"] is not None:
        message = "a unit stood before, but no backup is named"
        raise RecordError(message)
    return SwapRecord(**{name: data[name] for name in fields})


def sha256(text: bytes | None) -> str | None:
    """The hash by which a unit's text is recognised; None for a file that is not there."""
    return None if text is None else hashlib.sha256(text).hexdigest()


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
