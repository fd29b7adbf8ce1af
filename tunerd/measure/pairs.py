"""Which of two servers is faster on a workload: pairs of fresh processes until the answer is sure.

Both sides of a pair are asked the same new texts, in the order ABBA. x_i is the log of (A's turn time / B's)
of pair i. Under "B is not faster by more than the margin" the e-value's expectation is at most 1 at any
stopping time, so that one may look after every pair: P(ever >= 1/alpha) <= alpha (Ville's inequality).
A comparison asks for either side; a sweep's challenge (`sweep.challenge`) asks for B alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tunerd.measure.trust import FLATTERED, FOR_A_WINNER, mostly_repeated, repeats_more
from tunerd.profile.workload import RequestClass, Workload
from tunerd.words import counted

if TYPE_CHECKING:
    from tunerd.engine.flags import OutputChange
    from tunerd.measure.findings import Quality


Side = Literal["A", "B"]
A: Side = "A"
B: Side = "B"
SIDES: tuple[Side, Side] = (A, B)


# What a pair is


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request took [ms]; `prefill_ms` until the first token, `decode_ms` is the rest.

    `repeated` are the shares of its answers that only repeat what they said, as far as they are known.
    """

    wall_ms: float
    prefill_ms: float
    repeated: tuple[float, ...] = ()

    @property
    def decode_ms(self) -> float:
        """Everything after the first token."""
        return max(self.wall_ms - self.prefill_ms, 0.0)


# The turns of one process: for each round, one of every class.
PairBlock = tuple[tuple[Turn, ...], ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two fresh processes, asked the same; `first` is the side that came first.

    `log_ratio` is that of the turn times, A over B.
    """

    number: int
    first: Side
    a: PairBlock
    b: PairBlock
    log_ratio: float


def class_ms(block: PairBlock, part: str = "turn") -> tuple[float, ...]:
    """Of a process, the mean of its rounds by class [ms]: of the turn, its prefill or its decode."""
    name = {"turn": "wall_ms", "prefill": "prefill_ms", "decode": "decode_ms"}[part]
    return tuple(
        sum(getattr(turn, name) for turn in turns) / len(turns)
        for turns in zip(*block, strict=True)
    )


def pair_of(workload: Workload, number: int, a: PairBlock, b: PairBlock) -> Pair:
    """A pair from what both sides took."""
    ratio = workload.turn_time_s(class_ms(a)) / workload.turn_time_s(class_ms(b))
    return Pair(number, _order(number)[0], a, b, math.log(ratio))


def _order(number: int) -> tuple[Side, Side]:
    return (A, B) if number % 4 in {1, 0} else (B, A)  # ABBA


def run_pairs(
    workload: Workload,
    pairs: list[Pair],
    *,
    goes_on: Callable[[], bool],
    has_time: Callable[[], bool],
    measure: Callable[[int, tuple[Side, Side]], Mapping[Side, PairBlock]],
) -> bool:
    """Add pairs for as long as they have not decided; False where there is no time for another.

    Args:
        workload: What both sides are asked.
        pairs: Those so far; new ones are added.
        goes_on: Whether another is wanted.
        has_time: Whether one would end in time.
        measure: Both sides of the pair of this number, in this order; raises where it cannot be had.
    """
    while goes_on():
        if not has_time():
            return False
        number = len(pairs) + 1
        found = measure(number, _order(number))
        pairs.append(pair_of(workload, number, found[A], found[B]))
    return True


# Evidence

# Effect sizes, in standard deviations of a pair, over which the likelihood ratio is mixed. The last
# one finds gains of 20 % and more in three to four pairs instead of four to five.
EFFECTS = (0.4, 0.8, 1.2, 2.0, 3.0, 6.0)
LEAST_PAIRS = 3
_PAIRS_BEFORE_FUTILITY = 4
_FUTILITY_SD = 1.3
_FUTILITY_SLACK = 0.005
# Turn times of real servers differ by more; a box without any noise must not divide by zero.
_LEAST_SD = 0.002
_INTERVAL = 0.05
_REACH = 3.0  # of the interval's search, as a log ratio

# Betting: ratios are clipped here, the first stake is this share of the most that is staked, and the
# capital must have grown so often. Source: docs/benchmarks.md, Verdicts: with one start of ten
# 15 % slow, which three tight pairs do not show, the e-value alone promotes 41 of 100 arms that gain just
# the margin, both together 4 of 100.
_CLIP = 0.15
_STAKE = 0.9
_FIRST = 0.3
_BETTING_NEEDED = 8.0


def e_value(log_ratios: Sequence[float], least_gain: float) -> float:
    """Likelihood ratio of the t statistic, mixed over effect sizes, against "gain = least_gain".

    Expects pairs that are about normal. 1 below three pairs.
    """
    n = len(log_ratios)
    if n < LEAST_PAIRS:
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
    capital, total, squares = 1.0, _FIRST, 0.25
    for count, log_ratio in enumerate(log_ratios, start=1):
        value = min(max(log_ratio - least_gain, -_CLIP), _CLIP) / _CLIP
        mean = total / count
        variance = squares / count
        stake = min(max(mean / (variance + mean * mean), 0.0), _STAKE)
        capital *= 1.0 + stake * value
        total += value
        squares += (value - mean) ** 2
    return capital


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much B is faster: A's time over B's minus 1, with a 95 % interval.

    The interval holds at whatever pair one stops; None where there are too few pairs for one.
    """

    estimate: float
    lower: float | None
    upper: float | None
    n_pairs: int

    @property
    def turned(self) -> Gain:
        """By how much A is faster."""
        lower, upper = (None if one is None else _less(one) for one in (self.upper, self.lower))
        return Gain(_less(self.estimate), lower, upper, self.n_pairs)

    @property
    def ratios(self) -> tuple[float, float | None, float | None]:
        """Time of B over time of A, and the ends of its interval."""
        turned = self.turned
        low, high = (None if one is None else 1.0 + one for one in (turned.lower, turned.upper))
        return 1.0 + turned.estimate, low, high

    @property
    def largest(self) -> float | None:
        """The largest difference, either way, that the interval leaves (ratio)."""
        if self.lower is None or self.upper is None:
            return None
        return max(self.upper, _less(self.lower), 0.0)


def _less(gain: float) -> float:
    return 1.0 / (1.0 + gain) - 1.0


def gain_of(log_ratios: Sequence[float]) -> Gain | None:
    """Mean gain with its anytime-valid interval; None without pairs."""
    n = len(log_ratios)
    if n == 0:
        return None
    mean = float(np.mean(log_ratios))
    lower, upper = _limit(log_ratios, mean), _limit([-one for one in log_ratios], -mean)
    return Gain(
        estimate=math.expm1(mean),
        lower=None if lower is None else math.expm1(lower),
        upper=None if upper is None else math.expm1(-upper),
        n_pairs=n,
    )


def _limit(log_ratios: Sequence[float], mean: float) -> float | None:
    """Largest least gain that is refuted at half of the interval's error, on one side."""
    needed = 2.0 / _INTERVAL
    low, high = mean - _REACH, mean
    if e_value(log_ratios, low) < needed:
        return None
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (middle, high) if e_value(log_ratios, middle) >= needed else (low, middle)
    return low


# Whether B is faster by a margin


class Step(StrEnum):
    """What to do with a challenger after the pairs so far."""

    PROMOTE = "promote"
    GO_ON = "go on"
    FUTILE = "futile"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a challenge after some pairs: both bounds, and what is needed of each."""

    standing: Step
    e_value: float
    needed: float
    betting_e_value: float
    betting_needed: float = _BETTING_NEEDED


def judge_challenge(
    log_ratios: Sequence[float], *, margin: float, alpha: float, max_pairs: int
) -> Verdict:
    """What the pairs of one challenge say.

    Args:
        log_ratios: log(incumbent / candidate) of each pair, in order.
        margin: Least gain worth a swap (ratio).
        alpha: What this challenge may spend of the generation's chance of a false promotion.
        max_pairs: After so many pairs without a decision the challenge ends.

    Source:
        docs/benchmarks.md, Verdicts: the error rates that these values give.
    """
    least_gain = math.log1p(margin)
    e, betting = e_value(log_ratios, least_gain), betting_e_value(log_ratios, least_gain)
    needed = 1.0 / alpha
    if e >= needed and betting >= _BETTING_NEEDED:
        standing = Step.PROMOTE
    elif len(log_ratios) >= max_pairs or _is_futile(log_ratios, least_gain, betting, max_pairs):
        standing = Step.FUTILE
    else:
        standing = Step.GO_ON
    return Verdict(standing, e, needed, betting)


# Most nights have one challenge, and one of an hour has time for no pair to spare: with half of alpha it would need an
# evidence of 40 instead of 29, and gains of 5 and 20 % 16.1 and 4.4 instead of 15.4 and 4.2 pairs (benchmarks/verdicts.py).
_FIRST_SHARE = 0.7


def challenge_alpha(alpha: float, challenge: int) -> float:
    """Share of a generation's alpha for its k-th challenge, from 1: 0.7 of it, then 0.3 / k (k - 1).

    The shares of any number of challenges sum up to less than alpha, and the hundredth needs a log e-value
    of 13 where the first needs one of 3.
    """
    if challenge == 1:
        return _FIRST_SHARE * alpha
    return (1.0 - _FIRST_SHARE) * alpha / (challenge * (challenge - 1))


def _is_futile(
    log_ratios: Sequence[float], least_gain: float, betting: float, max_pairs: int
) -> bool:
    """Whether what the gain may still be is too little, or too little to be proved by the pairs that are left."""
    n = len(log_ratios)
    if n < _PAIRS_BEFORE_FUTILITY:
        return False
    values = np.asarray(log_ratios, float)
    reach = float(values.mean()) + _FUTILITY_SD * float(values.std(ddof=1)) / math.sqrt(n)
    above = reach - least_gain
    if above < _FUTILITY_SLACK:
        return True
    return betting * math.exp(_most_by_a_pair(above) * (max_pairs - n)) < _BETTING_NEEDED


def _most_by_a_pair(above: float) -> float:
    """What a pair that gains so much more than it must adds to the log of the bettor's capital."""
    return math.log1p(_STAKE * min(above / _CLIP, 1.0))


def pairs_needed(gain: float, pair_sd: float, *, margin: float, alpha: float) -> int:
    """Pairs after which a true gain of this size is usually found; for planning only.

    Source:
        What noise takes from a bettor is fitted to the medians of 60 drawn challenges, gains of 6 to 80 % and spreads of 2 to 9 %.
    """
    above = math.log1p(gain) - math.log1p(margin)
    if above <= 0:
        return 1000
    distance = above / max(pair_sd, _LEAST_SD)
    # Half the squared distance is what one pair adds to the log e-value; the rest pays for not
    # knowing the standard deviation and for mixing.
    evidence = math.log(1.0 / alpha) + math.log(len(EFFECTS))
    by_likelihood = evidence * (1.0 + 2.0 / distance**2) / 5.0
    by_betting = math.log(_BETTING_NEEDED) / _most_by_a_pair(above) * (1 + 0.6 / distance**2)
    return max(round(LEAST_PAIRS + by_likelihood), math.ceil(by_betting))


# Which side is faster

LEAST_NAMED = 4
# Once a side is named the interval should say something of the size too: it may be so wide.
_WIDTH_SHARE = 0.5


class Standing(StrEnum):
    """What the pairs of a comparison say so far."""

    B_FASTER = "B is faster"
    A_FASTER = "A is faster"
    NO_DIFFERENCE = "no difference"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the pairs say, and whether more would add nothing that was asked for.

    `e_b` and `e_a` are the evidence that B, or A, is faster; `needed` of it, and betting on it, names a
    side.
    """

    standing: Standing
    is_final: bool
    e_b: float
    e_a: float
    needed: float


def _judge_comparison(log_ratios: Sequence[float], *, alpha: float, tolerance: float) -> Decision:
    """What the pairs of a comparison say: both bounds for each side, with half of alpha each.

    Args:
        log_ratios: log(time of A / time of B) of each pair, in order.
        alpha: Chance of naming a side where both are equal.
        tolerance: A difference that does not matter (ratio).
    """
    needed, limit = 2.0 / alpha, math.log1p(tolerance)
    negated = [-value for value in log_ratios]
    e_b, e_a = e_value(log_ratios, 0.0), e_value(negated, 0.0)
    standing = Standing.OPEN
    if len(log_ratios) < LEAST_NAMED:
        pass
    elif e_b >= needed and betting_e_value(log_ratios, 0.0) >= _BETTING_NEEDED:
        standing = Standing.B_FASTER
    elif e_a >= needed and betting_e_value(negated, 0.0) >= _BETTING_NEEDED:
        standing = Standing.A_FASTER
    elif e_value(log_ratios, -limit) >= needed and e_value(negated, -limit) >= needed:
        standing = Standing.NO_DIFFERENCE
    is_named = standing in {Standing.B_FASTER, Standing.A_FASTER}
    is_final = _is_narrow(log_ratios, needed, limit) if is_named else standing is not Standing.OPEN
    return Decision(standing, is_final, e_b, e_a, needed)


def _is_narrow(log_ratios: Sequence[float], needed: float, limit: float) -> bool:
    """Whether the interval ends within half of the effect, or within what does not matter."""
    mean, negated = float(np.mean(log_ratios)), [-one for one in log_ratios]
    reach = max(_WIDTH_SHARE * abs(mean), limit)
    return min(e_value(log_ratios, mean - reach), e_value(negated, -mean - reach)) >= needed


# How a comparison speaks with servers: a simulation, a stand-in engine or the real thing


class BootFailed(Exception):
    """A side does not start; the text says why."""


class LifeEnded(Exception):
    """A server ended while it was measured; the text says why."""


class Unusable(Exception):
    """An answer that must not count, though the server lives: throttling, foreign traffic, a wrong clock."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: both sides of a pair are asked the same text, which no server of theirs has seen.

    Attributes:
        block: Names the texts of a pair's round; the same block and class is the same text.
        class_index: Of the class in the workload.
        request_class: The class.
        attempt: 0, or how often its answer was unusable before; another attempt is another text.
    """

    block: str
    class_index: int
    request_class: RequestClass
    attempt: int = 0


class Life(Protocol):
    """One process of one side, warm: its first request is behind it."""

    def request(self, asked: Asked, /) -> Turn:
        """Ask once, by the client's clock.

        Raises:
            LifeEnded: The server is gone.
            Unusable: The answer must not count.
        """

    def check(self) -> None:
        """Called when all is asked: whether the process was left alone while it was measured.

        Raises:
            Unusable: It answered somebody else too, or is not what it should be.
        """

    def close(self) -> None:
        """End the process; one that has ended is no error."""


class Stand(Protocol):
    """Where both sides can be started, one at a time."""

    def boot(self, side: Side, /) -> Life:
        """A fresh process of this side.

        Raises:
            BootFailed: It does not start.
        """

    def now_s(self) -> float:
        """Seconds, from an arbitrary start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a comparison ends.

    Attributes:
        budget_s: Time for everything but production's own reload [s].
        max_pairs: Pairs at most.
        alpha: Chance of naming a faster side where both are equal.
        tolerance: A difference that does not matter (ratio): once larger ones are excluded, it ends.
        max_rounds: Blocks of prompts that one process answers at most. Where a start takes long
            against a block, it answers several; all processes answer equally many.
    """

    budget_s: float
    max_pairs: int = 60
    alpha: float = 0.05
    tolerance: float = 0.015
    max_rounds: int = 6


# The comparison

# A pair of which a process failed is measured again; a side that fails so often cannot be measured.
_TRIES = 3
STARTS_FORGIVEN = 1
_ATTEMPTS = 4
# Requests should take about as long as the start that they need.
_ROUND_SHARE = 1.0

# Which attempt a text of a pair stands at, by block and class.
_Texts = dict[tuple[str, int], int]


class End(StrEnum):
    """Why no more pairs were measured."""

    DECIDED = "decided"
    PAIRS = "all pairs measured"
    TIME = "time is up"
    FAILED = "could not be measured"


@dataclass(frozen=True, slots=True)
class Part:
    """The gain on one part of the turn, or on one class of requests.

    `class_index` is None for the whole mix; `a_s` and `b_s` are mean seconds.
    """

    name: str
    class_index: int | None
    gain: Gain
    a_s: float
    b_s: float


def _times(failures: Sequence[Exception]) -> str:
    return "once" if len(failures) == 1 else f"{len(failures)} times"


def fails_more(n_starts: int, n_deaths: int) -> bool:
    """Whether one side fails where the other does not, by how much more often it did.

    One start may fail for reasons of the machine; a death in the middle of a request is an outage.
    """
    return n_deaths > 0 or n_starts > STARTS_FORGIVEN


class _Failed(Exception):
    """A side cannot be measured."""


class _TimeUp(Exception):
    """The time ended within a pair."""


@dataclass
class Comparison:
    """Measures until the pairs have decided, or time or pairs run out, and holds everything behind a verdict.

    `problem` says what failed, of which side, `failures` what did on the way, `unusable` which answers did not count.

    Attributes:
        stand: Where both sides are started.
        workload: What they are asked.
        limits: When it ends.
        rng: Order of classes within a round; the order of sides is fixed.
        on_pair: Called after each pair with what it decides and the seconds it may still take.
    """

    stand: Stand
    workload: Workload
    limits: Limits
    rng: random.Random
    on_pair: Callable[[Pair, Decision, float], object] | None = None
    pairs: list[Pair] = field(default_factory=list)
    decision: Decision | None = None
    n_rounds: int | None = None
    unusable: list[tuple[Side, str]] = field(default_factory=list)
    failures: dict[Side, list[BootFailed | LifeEnded]] = field(
        default_factory=lambda: {A: [], B: []}
    )
    end: End = End.TIME
    problem: str | None = None
    elapsed_s: float = 0.0
    begin_s: float = 0.0
    pair_begin_s: float = 0.0
    longest_s: float = 0.0

    def run(self) -> Comparison:
        """Measure; this, with everything behind a verdict."""
        self.begin_s = self.stand.now_s()
        try:
            is_timely = run_pairs(
                self.workload, self.pairs,
                goes_on=self._goes_on, has_time=self._has_time, measure=self._pair,
            )  # fmt: skip
            if is_timely:
                self.end = End.DECIDED if self._is_decided else End.PAIRS
        except _TimeUp as up:
            self.problem = str(up)
        except _Failed as failed:
            self.end, self.problem = End.FAILED, str(failed)
        self.elapsed_s = self.stand.now_s() - self.begin_s
        return self

    # What it came to

    @property
    def unreliable(self) -> str | None:
        """Why the faster side fails, or repeats itself, where the other does not; None where nothing says so."""
        faster = _FASTER.get(self.standing)
        if faster is None:
            return None
        slower = A if faster == B else B
        mine, usual = self.repeated(faster), self.repeated(slower)
        if why := repeats_more(mine, usual, chance=FOR_A_WINNER, whose=f"{slower}'s"):
            return why
        here, there = (self.failures[side] for side in (faster, slower))
        deaths, other_deaths = (sum(isinstance(f, LifeEnded) for f in of) for of in (here, there))
        n_starts = len(here) - deaths - (len(there) - other_deaths)
        if not fails_more(n_starts, deaths - other_deaths):
            return None
        return f"it failed {_times(here)}, and {slower} {_times(there)}: {here[-1]}"

    def repeated(self, side: Side) -> list[float]:
        """Of each answer of a side the share that only repeats what it said, where that is known."""
        blocks = [pair.a if side == A else pair.b for pair in self.pairs]
        turns = [turn for block in blocks for turns in block for turn in turns]
        return [ratio for turn in turns for ratio in turn.repeated]

    @property
    def standing(self) -> Standing:
        """What the pairs say."""
        return Standing.OPEN if self.decision is None else self.decision.standing

    @property
    def gain(self) -> Gain | None:
        """On the turn time; None without pairs."""
        return gain_of([pair.log_ratio for pair in self.pairs])

    def parts(self) -> tuple[Part, ...]:
        """The gain on the turn, prefill and decode of the whole mix, then on each class."""
        found = [self._part(name, None) for name in ("turn", "prefill", "decode")] + [
            self._part("turn", at) for at in range(len(self.workload.classes))
        ]
        return tuple(part for part in found if part is not None)

    def seconds(self, side: Side, name: str, class_index: int) -> float:
        """Mean seconds of a side in a class; of a comparison that has pairs."""
        times = self._times(side, name, class_index)
        return sum(times) / len(times)

    def _times(self, side: Side, name: str, class_index: int | None) -> list[float]:
        by_pair = [class_ms(pair.a if side == A else pair.b, name) for pair in self.pairs]
        return [
            (self.workload.turn_time_s(ms) if class_index is None else ms[class_index]) / 1000
            for ms in by_pair
        ]

    def _part(self, name: str, class_index: int | None) -> Part | None:
        both = [self._times(side, name, class_index) for side in SIDES]
        # A part that some pair did not have (a prompt that was all cached) has no ratio.
        if any(time <= 0 for times in both for time in times):
            return None
        gain = gain_of([math.log(a / b) for a, b in zip(*both, strict=True)])
        if gain is None:
            return None
        a_s, b_s = (sum(times) / len(times) for times in both)
        return Part(name, class_index, gain, a_s, b_s)

    # Pair by pair

    def _goes_on(self) -> bool:
        """Whether the pairs have neither decided nor run out; tells of the newest."""
        if self.pairs:
            now_s, limits = self.stand.now_s(), self.limits
            self.longest_s = max(self.longest_s, now_s - self.pair_begin_s)
            ratios = [pair.log_ratio for pair in self.pairs]
            self.decision = _judge_comparison(
                ratios, alpha=limits.alpha, tolerance=limits.tolerance
            )
            if self.on_pair is not None:
                self.on_pair(self.pairs[-1], self.decision, self._left_s(now_s - self.begin_s))
        return not self._is_decided and len(self.pairs) < self.limits.max_pairs

    @property
    def _is_decided(self) -> bool:
        return self.decision is not None and self.decision.is_final

    def _has_time(self) -> bool:
        self.pair_begin_s = self.stand.now_s()
        return self.pair_begin_s - self.begin_s + self.longest_s <= self.limits.budget_s

    def _check_time(self) -> None:
        """Nothing more is begun after the end: what has begun may take as long as it takes."""
        if self.stand.now_s() - self.begin_s >= self.limits.budget_s:
            text = f"time ran out during pair {len(self.pairs) + 1}, which does not count"
            raise _TimeUp(text + self._last_unusable("; the last answer that did not count:"))

    def _left_s(self, elapsed_s: float) -> float:
        """At most: what is left of time, or of pairs at the pace so far."""
        pair_s = elapsed_s / len(self.pairs)
        by_pairs = (self.limits.max_pairs - len(self.pairs)) * pair_s
        return max(min(self.limits.budget_s - elapsed_s, by_pairs), 0.0)

    def _pair(self, number: int, order: tuple[Side, Side]) -> dict[Side, PairBlock]:
        """Both sides; a pair of which a process fails is begun anew with other texts."""
        classes = range(len(self.workload.classes))
        # The order of classes in each round: the same for both sides.
        orders = [self.rng.sample(classes, len(classes)) for _ in range(self.limits.max_rounds)]
        for attempt in range(2 * _TRIES):
            name = f"{number}" if attempt == 0 else f"{number}.{attempt}"
            found = self._both(order, name, orders)
            if found is not None:
                return found
        why = self._last_unusable(", the last time because an answer did not count:")
        raise _Failed(f"no complete pair could be measured{why}")

    def _both(
        self, order: tuple[Side, Side], name: str, orders: list[list[int]]
    ) -> dict[Side, PairBlock] | None:
        found: dict[Side, PairBlock] = {}
        texts: _Texts = {}
        for side in order:
            try:
                found[side] = self._process(side, name, orders, texts)
            except (BootFailed, LifeEnded) as error:
                self.failures[side].append(error)
                if len(self.failures[side]) >= _TRIES:
                    raise _Failed(f"{side}: {error}") from error
                return None
            except Unusable as unusable:
                self.unusable.append((side, str(unusable)))
                return None
        return found

    def _process(self, side: Side, name: str, orders: list[list[int]], texts: _Texts) -> PairBlock:
        self._check_time()
        begin_s = self.stand.now_s()
        life = self.stand.boot(side)
        try:
            up_s = self.stand.now_s()
            blocks = [self._round(side, life, f"{name}-0", orders[0], texts)]
            if self.n_rounds is None:  # decided once: pairs of unequal work would not be alike
                boot_s, block_s = up_s - begin_s, self.stand.now_s() - up_s
                most = self.limits.max_rounds
                wanted = round(_ROUND_SHARE * boot_s / block_s) if block_s > 0 else most
                self.n_rounds = min(max(wanted, 1), most)
            blocks += [
                self._round(side, life, f"{name}-{number}", orders[number], texts)
                for number in range(1, self.n_rounds)
            ]
            life.check()
        finally:
            life.close()
        return tuple(blocks)

    def _round(
        self, side: Side, life: Life, block: str, order: list[int], texts: _Texts
    ) -> tuple[Turn, ...]:
        found = {at: self._ask(side, life, block, at, texts) for at in order}
        return tuple(found[at] for at in range(len(found)))

    def _ask(self, side: Side, life: Life, block: str, at: int, texts: _Texts) -> Turn:
        """The turn, asked anew with another text where an answer must not count.

        The second side gets the text that the first one answered, and no other: with another one the
        pair would not be alike, so it is begun anew.
        """
        is_second, attempt = (block, at) in texts, texts.get((block, at), 0)
        while True:
            self._check_time()
            texts[block, at] = attempt
            try:
                return life.request(Asked(block, at, self.workload.classes[at], attempt))
            except Unusable as unusable:
                attempt += 1
                if is_second or attempt == _ATTEMPTS:
                    raise  # the whole pair is begun anew
                self.unusable.append((side, str(unusable)))

    def _last_unusable(self, words: str) -> str:
        return "".join(f"{words} {side}'s ({why})" for side, why in self.unusable[-1:])


# The verdict in words

_PART_NAMES = {"prefill": "prefill", "decode": "decode", "turn": "turn time"}


def sentence(found: Comparison, a: str, b: str, workload: str) -> str:
    """What a person is told: which is faster by how much, or what could not be excluded."""
    gain = found.gain
    if gain is None:
        return f"{a} and {b} could not be compared on {workload}: {found.problem or found.end}"
    pairs = f"{gain.n_pairs} pairs"
    if (faster := _FASTER.get(found.standing)) is not None:
        ahead, behind, by = (b, a, gain) if faster == B else (a, b, gain.turned)
        interval = "too few pairs for an interval"
        if by.lower is not None and by.upper is not None:
            interval = f"95 % interval {100 * by.lower:.1f} to {100 * by.upper:.1f}"
        much = _percent(by.estimate)
        return f"{ahead} is {much} faster than {behind}, {interval}, on {workload} ({pairs})"
    largest = gain.largest
    if found.standing is Standing.NO_DIFFERENCE and largest is not None:
        return (
            f"{a} and {b} are equally fast on {workload}: a difference of more than "
            f"{_percent(largest)} is excluded ({pairs})"
        )
    if largest is None or gain.n_pairs < LEAST_NAMED:
        return f"nothing can be said about {a} and {b} on {workload} yet ({pairs}, {found.end})"
    return (
        f"no difference between {a} and {b} was shown on {workload}; one of up to "
        f"{_percent(largest)} cannot be excluded ({pairs}, {found.end})"
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def part_sentence(part: Part, name: str) -> str:
    """One part in words: `decode: 1.31 s against 1.22 s, B 7.4 % faster (3.1 to 11.9)`."""
    gain = part.gain
    what = name if part.class_index is not None else _PART_NAMES[part.name]
    limits = ""
    if gain.lower is not None and gain.upper is not None:
        limits = f" ({100 * gain.lower:+.1f} to {100 * gain.upper:+.1f})"
    much = f"B {100 * gain.estimate:+.1f} %{limits}"
    return f"{what}: {part.a_s:.3g} s against {part.b_s:.3g} s, {much}"


def reasons(found: Comparison) -> Iterator[str]:
    """What else a reader should know of how it ended."""
    if found.end is End.TIME:
        yield "time ran out before the pairs were decisive"
    if found.end is End.PAIRS:
        yield "all pairs were measured, and they were not decisive"
    if found.problem is not None:
        yield found.problem
    for side, failures in found.failures.items():
        if failures and len(failures) < _TRIES:  # the last one of so many is the problem
            yield f"{side} failed {_times(failures)}, and its pairs were measured again: {failures[-1]}"
    for side in SIDES:
        if share := mostly_repeated(found.repeated(side)):
            yield f"{share} of {side}'s answers {FLATTERED}"
    for (side, why), n in sorted(Counter(found.unusable).items()):
        yield f"{counted(n, 'answer')} of {side} did not count ({why}), and {side} was asked again"


# Which side is recommended: the faster one, unless its answers are not as good as those of the other

NOT_RECOMMENDED = "B is not recommended"
_FASTER: Mapping[Standing, Side] = {Standing.B_FASTER: B, Standing.A_FASTER: A}


@dataclass(frozen=True, slots=True)
class Advice:
    """What comes of speed and answers together.

    `outcome` is the standing in speed, or that B is not recommended. `recommended` is None where nobody
    is. `remark` belongs to the sentence of the verdict, `reasons` beside it.
    """

    outcome: str
    recommended: Side | None
    remark: str | None = None
    reasons: tuple[str, ...] = ()


def advise(
    standing: Standing,
    changes: Sequence[OutputChange],
    quality: Quality | None,
    unreliable: str | None = None,
) -> Advice:
    """The advice.

    Args:
        standing: Who is faster.
        changes: How B differs from A in what may change answers.
        quality: B's answers held against A's; None where they were not asked.
        unreliable: Why the faster one fails where the other does not.
    """
    faster = _FASTER.get(standing)
    if unreliable is not None:
        outcome = NOT_RECOMMENDED if faster == B else str(standing)
        return Advice(outcome, None, f"{faster} is not recommended, because {unreliable}")
    if not changes:
        return Advice(str(standing), faster)
    if quality is not None and quality.passes:
        return Advice(str(standing), faster, reasons=("B's answers match A's in what counts",))
    told = ("not asked",) if quality is None else quality.reasons
    has_failed = quality is not None and quality.passes is False
    outcome = str(standing) if faster == A else NOT_RECOMMENDED
    if has_failed:
        remark = f"B is not recommended, because its answers differ from A's: {'; '.join(told)}"
        return Advice(outcome, A if faster == A else None, remark)
    unknown = f"tunerd could not judge whether B answers as well as A: {'; '.join(told)}"
    if faster == B:
        return Advice(outcome, None, f"B is not recommended, because {unknown}")
    return Advice(str(standing), faster, reasons=(unknown,))
