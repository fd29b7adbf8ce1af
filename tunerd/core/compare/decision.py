"""When pairs have decided which side is faster, or that none is by enough to matter.

The evidence is the e-value of `core.sweep.verdict`, once for each side: the likelihood ratio of the
pairs' t statistic, whose expectation is at most 1 at any stopping time where that side is not faster.
So one may look after every pair: P(naming either side | equal) <= alpha with 2/alpha for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tunerd.core.sweep.verdict import e_value, gain_of

LEAST_PAIRS = 4
# Once a side is named the interval should say something of the size too: it may be so wide.
_WIDTH_SHARE = 0.5


class Standing(StrEnum):
    """What the pairs say so far."""

    B_FASTER = "B is faster"
    A_FASTER = "A is faster"
    NO_DIFFERENCE = "no difference"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the pairs say, and whether more would add nothing that was asked for.

    `e_b` and `e_a` are the evidence that B, or A, is faster; `needed` names a side.
    """

    standing: Standing
    is_final: bool
    e_b: float
    e_a: float
    needed: float


@dataclass(frozen=True, slots=True)
class Effect:
    """A ratio of times, B over A, with its 95 % interval, which holds at whatever pair one stops.

    Below 1, B takes less time. The limits are None where there are too few pairs for one.
    """

    ratio: float
    low: float | None
    high: float | None
    n_pairs: int

    @property
    def gain(self) -> float:
        """By how much B is faster: 0.04 is 4 % less time of A's for the same work, as a speed-up."""
        return 1.0 / self.ratio - 1.0

    @property
    def gain_low(self) -> float | None:
        """Least gain of the interval."""
        return None if self.high is None else 1.0 / self.high - 1.0

    @property
    def gain_high(self) -> float | None:
        """Largest gain of the interval."""
        return None if self.low is None else 1.0 / self.low - 1.0


def decide(log_ratios: Sequence[float], *, alpha: float, tolerance: float) -> Decision:
    """What the pairs so far say.

    Args:
        log_ratios: log(time of A / time of B) of each pair, in order.
        alpha: Chance of naming a side where both are equal.
        tolerance: A difference that does not matter (ratio).
    """
    needed = 2.0 / alpha
    negated = [-value for value in log_ratios]
    e_b, e_a = e_value(log_ratios, 0.0), e_value(negated, 0.0)
    if len(log_ratios) < LEAST_PAIRS:
        return Decision(Standing.OPEN, False, e_b, e_a, needed)
    limit = math.log1p(tolerance)
    standing = Standing.OPEN
    if e_b >= needed:
        standing = Standing.B_FASTER
    elif e_a >= needed:
        standing = Standing.A_FASTER
    elif e_value(log_ratios, -limit) >= needed and e_value(negated, -limit) >= needed:
        return Decision(Standing.NO_DIFFERENCE, True, e_b, e_a, needed)
    is_final = standing is not Standing.OPEN and _is_narrow(log_ratios, needed, limit)
    return Decision(standing, is_final, e_b, e_a, needed)


def _is_narrow(log_ratios: Sequence[float], needed: float, limit: float) -> bool:
    """Whether the interval ends within half of the effect, or within what does not matter."""
    mean = float(np.mean(log_ratios))
    reach = max(_WIDTH_SHARE * abs(mean), limit)
    negated = [-value for value in log_ratios]
    return e_value(log_ratios, mean - reach) >= needed and (
        e_value(negated, -mean - reach) >= needed
    )


def effect_of(log_ratios: Sequence[float]) -> Effect | None:
    """The ratio of times with its interval; None without pairs."""
    gain = gain_of(log_ratios)
    if gain is None:
        return None
    return Effect(
        ratio=1.0 / (1.0 + gain.estimate),
        low=None if gain.upper is None else 1.0 / (1.0 + gain.upper),
        high=None if gain.lower is None else 1.0 / (1.0 + gain.lower),
        n_pairs=gain.n_pairs,
    )
