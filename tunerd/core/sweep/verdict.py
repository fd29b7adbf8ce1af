"""Promote, go on or give up: what pairs of fresh processes say about two arms.

x_i is the log of (incumbent's turn time / candidate's) of pair i. Under "no gain beyond the margin"
the e-value's expectation is at most 1 at any stopping time, so that one may look after every pair:
P(ever >= 1/alpha) <= alpha (Ville's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

# Effect sizes, in standard deviations of a pair, over which the likelihood ratio is mixed. The last
# one finds gains of 20 % and more in three to four pairs instead of four to five.
EFFECTS = (0.4, 0.8, 1.2, 2.0, 3.0, 6.0)
_LEAST_PAIRS = 3
_PAIRS_BEFORE_FUTILITY = 4
_FUTILITY_SD = 1.3
_FUTILITY_SLACK = 0.005
# Turn times of real servers differ by more; a box without any noise must not divide by zero.
_LEAST_SD = 0.002
_INTERVAL = 0.05
_REACH = 3.0  # of the interval's search, as a log ratio

# Betting: ratios are clipped here, and at most this share of the capital is staked.
_CLIP = 0.15
_STAKE = 0.75


class Standing(StrEnum):
    """What to do after the pairs so far."""

    PROMOTE = "promote"
    GO_ON = "go on"
    FUTILE = "futile"


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much the candidate is faster: ratios of turn times minus 1, with a 95 % interval.

    The interval holds at whatever pair one stops; None where there are too few pairs for one.
    """

    estimate: float
    lower: float | None
    upper: float | None
    n_pairs: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The state of a challenge after some pairs: evidence, what is needed, and a cross-check."""

    standing: Standing
    e_value: float
    needed: float
    betting_e_value: float


def decide(log_ratios: Sequence[float], *, margin: float, alpha: float, max_pairs: int) -> Decision:
    """What the pairs of one challenge say.

    Args:
        log_ratios: log(incumbent / candidate) of each pair, in order.
        margin: Least gain worth a swap (ratio).
        alpha: What this challenge may spend of the night's chance of a false promotion.
        max_pairs: After so many pairs without a decision the challenge ends.

    Source:
        docs/benchmarks.md, Verdicts: the error rates that these values give.
    """
    least_gain = math.log1p(margin)
    e = e_value(log_ratios, least_gain)
    needed = 1.0 / alpha
    n = len(log_ratios)
    if e >= needed:
        standing = Standing.PROMOTE
    elif n >= max_pairs or _is_futile(log_ratios, least_gain):
        standing = Standing.FUTILE
    else:
        standing = Standing.GO_ON
    return Decision(standing, e, needed, betting_e_value(log_ratios, least_gain))


def challenge_alpha(alpha: float, challenge: int) -> float:
    """Share of the night's alpha for its k-th challenge, from 1: alpha / 2^k."""
    return float(alpha / 2**challenge)


def e_value(log_ratios: Sequence[float], least_gain: float) -> float:
    """Likelihood ratio of the t statistic, mixed over effect sizes, against "gain = least_gain".

    Expects pairs that are about normal. 1 below three pairs.
    """
    n = len(log_ratios)
    if n < _LEAST_PAIRS:
        return 1.0
    values = np.asarray(log_ratios, float) - least_gain
    t = math.sqrt(n) * float(values.mean()) / max(float(values.std(ddof=1)), _LEAST_SD)
    ratios = [_t_likelihood_ratio(t, n - 1, effect * math.sqrt(n)) for effect in EFFECTS]
    return float(np.mean(ratios))


def _t_likelihood_ratio(t: float, df: int, shift: float) -> float:
    """nct.pdf(t, df, shift) / t.pdf(t, df), also where both underflow.

    The density of the noncentral t is, up to what the central one has too,
    exp(-df shift^2 / (2 (t^2 + df))) * integral of y^df exp(-(y - z)^2 / 2) over y > 0,
    z = shift t / sqrt(t^2 + df).
    """
    z = shift * t / math.sqrt(t * t + df)
    y = np.linspace(0.0, abs(z) + math.sqrt(df) + 12.0, 241)[1:]
    log_power = df * np.log(y)
    log_ratio = _log_sum(log_power - (y - z) ** 2 / 2) - _log_sum(log_power - y**2 / 2)
    log_ratio -= df * shift * shift / (2 * (t * t + df))
    return math.exp(min(log_ratio, 700.0))


def _log_sum(values: NDArray[np.float64]) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


def betting_e_value(log_ratios: Sequence[float], least_gain: float) -> float:
    """Capital of a bettor against "mean gain <= least_gain"; needs no normality, and is slower.

    Ratios are clipped, so it speaks of the clipped mean. The stake of each pair follows from the
    pairs before it.
    """
    capital, total, squares = 1.0, 0.0, 0.25
    for count, log_ratio in enumerate(log_ratios, start=1):
        value = min(max(log_ratio - least_gain, -_CLIP), _CLIP) / _CLIP
        mean = total / count
        variance = squares / count
        stake = min(max(mean / (variance + mean * mean), 0.0), _STAKE)
        capital *= 1.0 + stake * value
        total += value
        squares += (value - mean) ** 2
    return capital


def _is_futile(log_ratios: Sequence[float], least_gain: float) -> bool:
    n = len(log_ratios)
    if n < _PAIRS_BEFORE_FUTILITY:
        return False
    values = np.asarray(log_ratios, float)
    reach = float(values.mean()) + _FUTILITY_SD * float(values.std(ddof=1)) / math.sqrt(n)
    return reach < least_gain + _FUTILITY_SLACK


def gain_of(log_ratios: Sequence[float]) -> Gain | None:
    """Mean gain with its anytime-valid interval; None without pairs."""
    n = len(log_ratios)
    if n == 0:
        return None
    mean = float(np.mean(log_ratios))
    negated = [-value for value in log_ratios]
    lower = _limit(log_ratios, mean)
    upper = _limit(negated, -mean)
    return Gain(
        estimate=math.expm1(mean),
        lower=None if lower is None else math.expm1(lower),
        upper=None if upper is None else math.expm1(-upper),
        n_pairs=n,
    )


def _limit(log_ratios: Sequence[float], mean: float) -> float | None:
    """Largest least gain that is refuted at half of the interval's error, on one side."""
    needed = 2.0 / _INTERVAL

    def is_refuted(least_gain: float) -> bool:
        return e_value(log_ratios, least_gain) >= needed

    return _bisect(is_refuted, low=mean - _REACH, high=mean)


def _bisect(holds: Callable[[float], bool], *, low: float, high: float) -> float | None:
    if not holds(low):
        return None
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def pairs_needed(gain: float, pair_sd: float, *, margin: float, alpha: float) -> int:
    """Pairs after which a true gain of this size is usually found; for planning only."""
    distance = (math.log1p(gain) - math.log1p(margin)) / max(pair_sd, _LEAST_SD)
    if distance <= 0:
        return 1000
    # Half the squared distance is what one pair adds to the log e-value; the rest pays for not
    # knowing the standard deviation and for mixing.
    evidence = math.log(1.0 / alpha) + math.log(len(EFFECTS))
    return math.ceil(_LEAST_PAIRS + evidence * (1.0 + 2.0 / distance**2) / 5.0)
