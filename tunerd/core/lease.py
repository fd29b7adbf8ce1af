"""The lease under which something is measured on the live box, and the servers tried within it.

A lease is a unit that takes production's place. When it goes, for whatever reason, the service
manager ends the candidates that are bound to it and starts production again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tunerd.core.failure import Failure, FailureKind

# Linux keeps the port of ended connections for 60 s (TCP_TIMEWAIT_LEN); a candidate may need some
# seconds to end its streams first.
PORT_LIMIT_S = 75.0
_PREFIX = "tunerd-"
_NAMES = re.compile(r"tunerd-(?:lease|candidate)-([0-9a-f]{8,32})(?:-\d+)?\.service")
_CANDIDATE = re.compile(r"tunerd-candidate-[0-9a-f]{8,32}-\d+\.service")


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What a service manager needs to know of a lease.

    `id` is never used twice. `restores` is whether production starts when the lease ends;
    `limit_s` is when it ends at the latest. `bound_to` is the unit of the process that measures;
    None where the manager is to make one for the calling process.
    """

    id: str
    production: str
    restores: bool
    limit_s: float
    why: str
    bound_to: str | None = None

    @property
    def unit(self) -> str:
        """The lease's own unit."""
        return lease_unit(self.id)


def lease_unit(lease_id: str) -> str:
    """The name of a lease's unit."""
    return f"{_PREFIX}lease-{lease_id}.service"


def candidate_unit(lease_id: str, number: int) -> str:
    """The name of a candidate's unit, the `number`-th of its lease."""
    return f"{_PREFIX}candidate-{lease_id}-{number}.service"


def run_scope(lease_id: str) -> str:
    """The name of the unit around a command typed by hand."""
    return f"{_PREFIX}run-{lease_id}.scope"


def lease_of(unit: str) -> str | None:
    """The lease's id in the name of a lease's or candidate's unit; None for any other unit."""
    found = _NAMES.fullmatch(unit)
    return found.group(1) if found else None


def candidate_behind(file_name: str) -> str | None:
    """The candidate that a file or folder belongs to: its unit, drop-ins, or a cut-short write."""
    found = _CANDIDATE.search(file_name)
    return found.group() if found else None


def is_candidate(unit: str) -> bool:
    """Whether this is the name of a candidate's unit."""
    return lease_of(unit) is not None and unit.startswith(f"{_PREFIX}candidate-")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What other processes may know of a measurement under way; gone after a reboot.

    Times are wall-clock seconds. `ended_by` is who asked for its end before its time.
    """

    id: str
    production: str
    purpose: str
    pid: int
    since_s: float
    until_s: float
    restores: bool
    inhibits: str | None = None
    ended_by: str | None = None

    @property
    def unit(self) -> str:
        """The lease's own unit."""
        return lease_unit(self.id)

    def to_json(self) -> dict[str, Any]:
        """As it stands in its file."""
        return asdict(self)


def record_from_json(data: Mapping[str, Any]) -> LeaseRecord | None:
    """The record in this JSON; None where it is none (it may be of another version)."""
    try:
        record = LeaseRecord(**data)
    except TypeError:
        return None
    return record if lease_of(lease_unit(str(record.id))) is not None else None


class Reason(StrEnum):
    """Why a candidate did not come up, as the search tells such starts apart."""

    OOM = "oom"
    HANG = "hang"
    CRASH = "crash"
    REFUSED = "refused"


_REASONS = {
    FailureKind.OUT_OF_VRAM: Reason.OOM,
    FailureKind.OUT_OF_MEMORY: Reason.OOM,
    FailureKind.HANG: Reason.HANG,
    **dict.fromkeys(
        (
            FailureKind.BAD_ARGUMENT,
            FailureKind.MODEL_MISSING,
            FailureKind.MODEL_UNREADABLE,
            FailureKind.MODEL_DAMAGED,
            FailureKind.MODEL_UNSUPPORTED,
            FailureKind.NO_MTP_BLOCK,
            FailureKind.PORT_TAKEN,
            FailureKind.CANNOT_START,
            FailureKind.GARBAGE,
            FailureKind.WRONG_MODEL,
            FailureKind.NO_SPECULATION,
        ),
        Reason.REFUSED,
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A candidate's failure: the reason, and the engine's own words for it."""

    reason: Reason
    kind: FailureKind
    words: str
    hint: str | None = None


def fault_of(failure: Failure) -> Fault:
    """What a failure means for whoever tries candidates; what is not known counts as a crash."""
    reason = _REASONS.get(failure.kind, Reason.CRASH)
    return Fault(reason, failure.kind, failure.words, failure.hint)
