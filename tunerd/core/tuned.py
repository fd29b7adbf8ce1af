"""The tuned layer: what a promotion found for a profile, as a file that people can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRecord:
    """Where a tuned layer comes from, and what it is valid for.

    `values` are the keys it sets, `sweep` the number of the run that proved them, `arm` the winner as
    JSON, `generation` what was deployed with it. Hashes are None where they could not be told.
    """

    profile: str
    values: Mapping[str, Any]
    sweep: int
    promoted_s: float
    sentence: str
    engine: str
    engine_sha256: str | None
    model_sha256: str | None
    driver_version: str | None
    gpu_names: tuple[str, ...] = ()
    workload: str | None = None
    measured_again: Mapping[str, Any] = field(default_factory=dict)
    generation: int | None = None
    arm: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands beside the layer."""
        return {"schema": SCHEMA, **asdict(self), "gpu_names": list(self.gpu_names)}


def tuned_from_json(data: Mapping[str, Any]) -> TunedRecord | None:
    """The record that `to_json` wrote; None where it is none, or of another version."""
    values = {key: value for key, value in data.items() if key != "schema"}
    if data.get("schema") != SCHEMA:
        return None
    try:
        return TunedRecord(**{**values, "gpu_names": tuple(values.get("gpu_names", ()))})
    except TypeError:
        return None


def why_stale(
    record: TunedRecord,
    *,
    engine: str,
    engine_sha256: str | None,
    model_sha256: str | None,
    driver_version: str | None,
    gpu_names: tuple[str, ...],
) -> tuple[str, ...]:
    """What changed since a tuned layer was found; empty where it still holds, as far as is known."""
    pairs = (
        ("engine", record.engine, engine),
        ("engine's files", record.engine_sha256, engine_sha256),
        ("model", record.model_sha256, model_sha256),
        ("driver", record.driver_version, driver_version),
        ("GPU", record.gpu_names or None, gpu_names or None),
    )
    changed = [what for what, then, now in pairs if then != now and None not in {then, now}]
    return tuple(changed)


@dataclass(frozen=True, slots=True)
class FailedArm:
    """An arm that was promoted and did worse in service than its evidence said.

    `arm` is its JSON, `engine_sha256` the build it ran on: another build gets another chance. `sweep`
    is the one that proved it, where a person took it back.
    """

    arm: Mapping[str, Any]
    engine_sha256: str | None
    reason: str
    failed_s: float
    sweep: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self)
