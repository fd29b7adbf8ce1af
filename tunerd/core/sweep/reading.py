"""What one answer of a server says, with everything optional that a build may leave out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer; None is what the box did not say.

    `n_drafted` and `n_accepted` are 0 where nothing was drafted: llama-server then leaves the keys
    out. `accepted_by_position` are counts.
    """

    prompt_n: int | None
    prompt_ms: float | None
    cache_n: int | None
    predicted_n: int | None
    predicted_ms: float | None
    n_drafted: int
    n_accepted: int
    n_steps: int | None
    accepted_by_position: tuple[float, ...] | None
    wall_ms: float | None
    vram_free_min_mib: float | None
    spill_mib: float | None
    tool_ok: bool | None
    n_ctx: int | None

    @property
    def turn_ms(self) -> float | None:
        """Wall time of the request: the client's clock, else the server's two phases."""
        if self.wall_ms is not None:
            return self.wall_ms
        if self.prompt_ms is None or self.predicted_ms is None:
            return None
        return self.prompt_ms + self.predicted_ms

    @property
    def step_ms(self) -> float | None:
        """Mean time of one verification pass."""
        if not self.n_steps or self.predicted_ms is None:
            return None
        return self.predicted_ms / self.n_steps

    @property
    def has_spilled(self) -> bool:
        """Whether the box says that memory lies outside the card."""
        return self.spill_mib is not None and self.spill_mib > 0


def read(answer: Mapping[str, Any]) -> Reading:
    """The reading of a box's answer; nonsense (NaN, negative) counts as not said."""
    predicted_n = _count(answer, "predicted_n")
    n_drafted = _count(answer, "draft_n") or 0
    n_accepted = min(_count(answer, "draft_n_accepted") or 0, n_drafted)
    steps = _count(answer, "verify_steps")
    if not steps and predicted_n is not None:
        steps = max(1, predicted_n - n_accepted)
    tool_ok = answer.get("tool_ok")
    return Reading(
        prompt_n=_count(answer, "prompt_n"),
        prompt_ms=_number(answer, "prompt_ms"),
        cache_n=_count(answer, "cache_n"),
        predicted_n=predicted_n,
        predicted_ms=_positive(answer, "predicted_ms"),
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        n_steps=steps,
        accepted_by_position=_positions(answer.get("accepted_per_pos"), n_accepted, steps),
        wall_ms=_positive(answer, "wall_ms"),
        vram_free_min_mib=_number(answer, "vram_free_min_mib", least=-math.inf),
        spill_mib=_number(answer, "spill_mib"),
        tool_ok=None if tool_ok is None else bool(tool_ok),
        n_ctx=_count(answer, "n_ctx"),
    )


def _number(answer: Mapping[str, Any], key: str, least: float = 0.0) -> float | None:
    value = answer.get(key)
    if value is None or isinstance(value, str):
        return None
    number = float(value)
    return number if math.isfinite(number) and number >= least else None


def _positive(answer: Mapping[str, Any], key: str) -> float | None:
    return _number(answer, key) or None


def _count(answer: Mapping[str, Any], key: str) -> int | None:
    number = _number(answer, key)
    return None if number is None else round(number)


def _positions(given: Any, n_accepted: int, steps: int | None) -> tuple[float, ...] | None:
    """Accepted counts by position; builds report counts or shares of the drafts."""
    if given is None or isinstance(given, str) or not steps or n_accepted <= 0:
        return None
    values: Sequence[Any] = list(given.values()) if isinstance(given, Mapping) else list(given)
    numbers = [float(value) for value in values if value is not None]
    if not numbers or not all(math.isfinite(value) and value >= 0 for value in numbers):
        return None
    total = sum(numbers)
    falls = all(later <= earlier for earlier, later in pairwise(numbers))
    if total <= 0 or not falls:  # accepted up to a position cannot grow with it
        return None
    # Counts add up to the accepted tokens; anything else is a share, scaled to the same total.
    return tuple(value * n_accepted / total for value in numbers)
