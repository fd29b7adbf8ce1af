"""What a load showed of a memory estimate, and the next estimate with what it showed.

An engine reports one buffer per purpose and device, where an estimate has finer parts; they are
compared by groups of the same purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tunerd.core.memory_parts import COMPUTE, WEIGHTS, Device, Part, PartKind
from tunerd.core.memory_report import BufferKind, MemoryReport
from tunerd.core.quantity import BYTES_PER_MIB


class PartGroup(StrEnum):
    """Memory of one purpose, as engines report it."""

    WEIGHTS = "weights"
    KV = "kv cache"
    STATE = "recurrent state"
    COMPUTE = "compute"


_KINDS: dict[PartGroup, frozenset[PartKind]] = {
    PartGroup.WEIGHTS: WEIGHTS,
    PartGroup.KV: frozenset({PartKind.KV, PartKind.MTP_KV, PartKind.DRAFT_KV}),
    PartGroup.STATE: frozenset({PartKind.STATE, PartKind.DRAFT_STATE}),
    PartGroup.COMPUTE: COMPUTE | {PartKind.OUTPUT},
}
_BUFFERS: dict[PartGroup, tuple[BufferKind, ...]] = {
    PartGroup.WEIGHTS: (BufferKind.MODEL,),
    PartGroup.KV: (BufferKind.KV,),
    PartGroup.STATE: (BufferKind.STATE,),
    PartGroup.COMPUTE: (BufferKind.COMPUTE, BufferKind.OUTPUT),
}
# What a group's memory is called where the estimate had none of it.
_MAIN_KIND = {
    PartGroup.WEIGHTS: PartKind.WEIGHTS,
    PartGroup.KV: PartKind.KV,
    PartGroup.STATE: PartKind.STATE,
    PartGroup.COMPUTE: PartKind.COMPUTE,
}


@dataclass(frozen=True, slots=True)
class Observation:
    """Memory of one purpose on one device: what was estimated, and what the engine reported [MiB].

    `estimated_mib` is None where a size that it needs was not known.
    """

    device: Device
    group: PartGroup
    estimated_mib: float | None
    reported_mib: float

    @property
    def difference_mib(self) -> float | None:
        """How much more the engine took than was estimated."""
        return None if self.estimated_mib is None else self.reported_mib - self.estimated_mib


@dataclass(frozen=True, slots=True)
class MemoryCorrection:
    """What loads with one fingerprint showed; `n_loads` of them, the newest counts."""

    observations: tuple[Observation, ...]
    n_loads: int
    observed_s: float

    def of(self, device: Device, group: PartGroup) -> Observation | None:
        """What was seen there."""
        return next((o for o in self.observations if (o.device, o.group) == (device, group)), None)


def observe(parts: Sequence[Part], report: MemoryReport) -> tuple[Observation, ...]:
    """The parts of an estimate and a report side by side; empty where the report has no buffers.

    A log without buffer lines is no report of zero bytes: mainline prints them from log verbosity 4 on.
    """
    observations = []
    for device in Device:
        for group in PartGroup:
            reported = report.allocated_mib(device, *_BUFFERS[group])
            estimated = _estimated_mib(parts, device, group)
            if reported is None or (reported == 0 and estimated == 0):
                continue
            observations.append(Observation(device, group, estimated, reported))
    return tuple(observations)


def corrected(estimated: Sequence[Part], correction: MemoryCorrection | None) -> tuple[Part, ...]:
    """The parts of an estimate with what the engine reported in place of what was calculated.

    The correction must be of this very plan (equal `Fingerprint.memory_key`): then what was reported
    is what will be needed again, whatever formulas say today. Parts that grow with time, and devices
    and purposes that no load showed, stay as they were calculated.
    """
    if correction is None:
        return tuple(estimated)
    parts: list[Part] = []
    rest = list(estimated)
    for seen in correction.observations:
        mine = [part for part in rest if _is_of(part, seen.device, seen.group)]
        rest = [part for part in rest if not _is_of(part, seen.device, seen.group)]
        parts += _as_reported(mine, seen)
    order = {kind: index for index, kind in enumerate(PartKind)}
    kept = sorted((*parts, *rest), key=lambda part: (part.device, order[part.kind]))
    return tuple(part for part in kept if part.n_bytes != 0)


def _as_reported(parts: Sequence[Part], seen: Observation) -> list[Part]:
    """The parts of a group, changed so that together they are what was reported."""
    target = round(seen.reported_mib * BYTES_PER_MIB)
    if not parts:
        reason = f"reported by the engine after a load: {seen.reported_mib:.0f} MiB"
        return [Part(_MAIN_KIND[seen.group], seen.device, target, reason)]
    unknown = [part for part in parts if part.n_bytes is None]
    known = sorted(
        (part for part in parts if part.n_bytes is not None),
        key=lambda part: part.n_bytes or 0,
        reverse=True,
    )
    left = target - sum(part.n_bytes or 0 for part in known)
    if unknown:
        # What is unknown is what the known ones leave; it cannot be told apart any further.
        changed = [_moved(unknown[0], max(0, left)), *(_moved(part, 0) for part in unknown[1:])]
        left = min(0, left)
    else:
        changed = []
    for part in known:
        step = left if left > 0 else max(left, -(part.n_bytes or 0))
        changed.append(_moved(part, (part.n_bytes or 0) + step) if step else part)
        left -= step
    return changed


def _moved(part: Part, n_bytes: int) -> Part:
    if part.n_bytes is None:
        return replace(part, n_bytes=n_bytes, formula=f"{part.formula}; as the last load showed")
    step = (n_bytes - part.n_bytes) / BYTES_PER_MIB
    return replace(
        part, n_bytes=n_bytes, formula=f"{part.formula}; {step:+.0f} MiB as the last load showed"
    )


def _estimated_mib(parts: Iterable[Part], device: Device, group: PartGroup) -> float | None:
    mine = [part.n_bytes for part in parts if _is_of(part, device, group)]
    known = [n_bytes for n_bytes in mine if n_bytes is not None]
    return sum(known) / BYTES_PER_MIB if len(known) == len(mine) else None


def _is_of(part: Part, device: Device, group: PartGroup) -> bool:
    return part.device is device and part.kind in _KINDS[group]
