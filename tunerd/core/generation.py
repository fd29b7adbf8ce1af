"""Generations: numbered, immutable records of swaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Outcome(StrEnum):
    """How a swap ended; RUNNING while it does, or when it was cut short and not recovered yet.

    REMOVED is the good end of a swap back to where no unit file stood, and after which nothing serves.
    """

    RUNNING = "running"
    SERVING = "serving"
    REMOVED = "removed"
    ROLLED_BACK = "rolled back"
    STRANDED = "stranded"
    ABANDONED = "abandoned"

    @property
    def is_done(self) -> bool:
        """Whether the swap was committed: what it was to make live is live."""
        return self in {Outcome.SERVING, Outcome.REMOVED}


@dataclass(frozen=True, slots=True)
class Generation:
    """What a swap deployed, why, and on what machine.

    `replaced_backup` names the backup of what stood before; None with `replaced_absent` where
    nothing did. `unit_text` is None for a swap that removed the unit file.
    """

    number: int
    unit: str
    reason: str
    created_s: float
    profile: str | None
    engine: str | None
    engine_sha256: str | None
    engine_components: tuple[tuple[str, str], ...]
    model_path: str | None
    model_identity: Mapping[str, Any] | None
    argv: tuple[str, ...]
    origins: tuple[tuple[str, str, str], ...]
    pins: Mapping[str, Any]
    unit_sha256: str | None
    replaced_backup: str | None
    replaced_absent: bool
    was_active: bool
    was_enabled: bool | None
    from_generation: int | None
    host: Mapping[str, Any] = field(default_factory=dict)
    requested_by: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How the swap of a generation ended.

    `drop_ins` were in force for the unit by then; None where that is not known.
    """

    outcome: Outcome
    ended_s: float | None
    without_service_s: float | None
    cause: str | None
    detail: str | None
    drop_ins: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One line of history."""

    generation: Generation
    ending: Ending


def serving_number(entries: tuple[HistoryEntry, ...]) -> int | None:
    """The newest generation whose swap ended well; None if there is none."""
    numbers = [entry.generation.number for entry in entries if entry.ending.outcome.is_done]
    return max(numbers, default=None)
