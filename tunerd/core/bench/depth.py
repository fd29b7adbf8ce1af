"""How far the context can be filled: where it spills out of VRAM, and where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tunerd.core.evidence import SummaryRecord, number
from tunerd.core.sample import Sample

# A token takes longer the deeper the context is, in a straight line. This much more than that line is
# another cause.
_SLOW_RATIO = 1.4
# VRAM is pinned to its end where less than this is left.
_PINNED_MIB = 256
_ABOVE_PLAN_MIB = 64
_LEAST_POINTS = 2


@dataclass(frozen=True, slots=True)
class Depth:
    """What the deep suite came to.

    `filled_tokens` is the deepest context that was answered, `spill_tokens` the depth from which VRAM
    spills, `failed_tokens` the depth that was not answered; each None where there is none. `why` says
    what showed it.
    """

    filled_tokens: float | None
    spill_tokens: float | None
    failed_tokens: float | None
    least_free_mib: int | None
    why: str

    NAME = "depth"

    @property
    def is_whole(self) -> bool:
        """Whether all of it could be filled without a spill."""
        return self.spill_tokens is None and self.failed_tokens is None

    def to_record(self, arm: str) -> SummaryRecord:
        """As it is kept."""
        return SummaryRecord("deep", self.NAME, arm, asdict(self))


def judge_depth(samples: Sequence[Sample], *, planned_free_mib: int | None = None) -> Depth:
    """Where filling the context goes wrong, from the samples of one arm in their order.

    Args:
        samples: The samples of the suite, shallow first.
        planned_free_mib: VRAM that the estimate leaves free with a full context; None if unknown.
    """
    rows = [(depth, s) for s in samples if (depth := number(s.details, "depth")) is not None]
    good = [(depth, s) for depth, s in rows if s.is_usable]
    failed = next((s for s in samples if s.problem is not None), None)
    free = [s.vram_free_min_mib for _, s in good if s.vram_free_min_mib is not None]
    spill, why = _spill(good, planned_free_mib)
    failed_at = number(failed.details, "wanted_depth") if failed is not None else None
    if failed is not None:
        why = failed.problem or why
    return Depth(
        filled_tokens=max((depth for depth, _ in good), default=None),
        spill_tokens=spill,
        failed_tokens=failed_at,
        least_free_mib=min(free, default=None),
        why=why,
    )


def _spill(
    good: Sequence[tuple[float, Sample]], planned_free_mib: int | None
) -> tuple[float | None, str]:
    points: list[tuple[float, float]] = []
    for depth, sample in good:
        free, token_ms = sample.vram_free_min_mib, _token_ms(sample)
        if (
            free is not None
            and planned_free_mib is not None
            and planned_free_mib - free > _ABOVE_PLAN_MIB
        ):
            return depth, f"{planned_free_mib - free} MiB more VRAM in use than planned"
        if token_ms is None:
            continue
        expected = _line_at(points, depth)
        is_pinned = free is not None and free < _PINNED_MIB
        if expected is not None and is_pinned and token_ms > _SLOW_RATIO * expected:
            drop = 1 - expected / token_ms
            return depth, f"{drop:.0%} slower than the depths before, with {free} MiB of VRAM free"
        points.append((depth, token_ms))
    return None, "no sign of a spill" if good else "nothing was answered"


def _token_ms(sample: Sample) -> float | None:
    """Time of a verification pass: it does not move with the luck of the drafts."""
    return sample.timings.step_ms if sample.timings is not None else None


def _line_at(points: Sequence[tuple[float, float]], depth: float) -> float | None:
    """What the depths before let expect: their straight line, never falling."""
    if len(points) < _LEAST_POINTS:
        return None
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y + max(slope, 0.0) * (depth - mean_x)
