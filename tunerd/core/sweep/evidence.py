"""What a sweep leaves: every sample, why each arm was or was not taken, and the verdict's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from tunerd.core.sweep.arm import Arm, ArmLike
from tunerd.core.sweep.challenge import Result
from tunerd.core.sweep.finalist import MarginStep
from tunerd.core.sweep.grid import Left
from tunerd.core.sweep.night import PathPoint
from tunerd.core.sweep.sample import Sample, plain

PROMOTE = "promote"
KEEP = "keep"
INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One measured arm.

    Times are of one request of the workload [s]: measured (mean over blocks), predicted, and what is
    believed of it with its relative standard deviation. None is unknown. `reason` says why it could
    not be recommended; empty if it could.
    """

    arm: Arm
    n_processes: int
    measured_s: float | None
    predicted_s: float | None
    believed_s: float | None
    believed_sd: float | None
    headroom_mib: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was known at a time, so that a night cut short is not lost."""

    seconds: float
    restarts: int
    arm: Arm
    gain: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything behind an outcome.

    Attributes:
        path: What would have been recommended from when on.
        samples: Every start and request of this sweep, in order.
        arms: Measured arms, the fastest first.
        left_out: What was not tried or was given up, with the reason.
        challenges: Verdicts, in order.
        margins: The bisections of finalists, step by step.
        models: Parameters of the fitted laws by "engine, spec".
        checkpoint: State after half an hour; None if the sweep was shorter.
        best_untried: The most a point that was not measured is believed to gain (ratio).
        time_s: Where the time went.
        n_history: Samples that were known before.
    """

    path: tuple[PathPoint, ...]
    samples: tuple[Sample, ...]
    arms: tuple[ArmReport, ...]
    left_out: tuple[Left, ...]
    challenges: tuple[Result, ...]
    margins: tuple[tuple[MarginStep, ...], ...]
    models: Mapping[str, Mapping[str, Any]]
    checkpoint: Checkpoint | None
    best_untried: float | None
    time_s: Mapping[str, float]
    elapsed_s: float
    restarts: int
    n_history: int
    reasons: tuple[str, ...]

    def to_json(self, *, with_samples: bool = True) -> dict[str, Any]:
        """JSON values only."""
        found = {one.name: _plain(getattr(self, one.name)) for one in fields(self)}
        if not with_samples:
            del found["samples"]
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a sweep: promote, keep or inconclusive, and the arm that should serve.

    `arm` is the incumbent as it was given unless the verdict is promote.
    """

    verdict: str
    arm: ArmLike
    evidence: Evidence


def _plain(value: Any) -> Any:
    if isinstance(value, Sample):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathPoint):
        return {"seconds": value.seconds, "restarts": value.restarts, "arm": plain(value.arm)}
    if isinstance(value, Arm) or not is_dataclass(value):
        if isinstance(value, Mapping):
            return {str(key): _plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item) for item in value]
        return plain(value)
    return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
