"""What a comparison found: its pairs, the effects on the whole and on each part, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.compare.decision import Decision, Effect, Standing, effect_of
from tunerd.core.compare.protocol import Side, Turn
from tunerd.core.workload import Workload


class End(StrEnum):
    """Why no more pairs were measured."""

    DECIDED = "decided"
    PAIRS = "all pairs measured"
    TIME = "time is up"
    FAILED = "could not be measured"


# The turns of one process: for each round, one of every class.
PairBlock = tuple[tuple[Turn, ...], ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two fresh processes, asked the same; `first` is the side that came first."""

    number: int
    first: Side
    a: PairBlock
    b: PairBlock


@dataclass(frozen=True, slots=True)
class Part:
    """The effect on one part of the turn, or on one class of requests.

    `class_index` is None for the whole mix; `a_s` and `b_s` are mean seconds.
    """

    name: str
    class_index: int | None
    effect: Effect
    a_s: float
    b_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything behind a verdict; `problem` says what failed, of which side."""

    workload: Workload
    pairs: tuple[Pair, ...]
    decision: Decision | None
    end: End
    elapsed_s: float
    n_unusable: int
    problem: str | None = None

    @property
    def standing(self) -> Standing:
        """What the pairs say."""
        return Standing.OPEN if self.decision is None else self.decision.standing

    @property
    def effect(self) -> Effect | None:
        """On the turn time; None without pairs."""
        return effect_of(log_ratios(self.workload, self.pairs))

    def parts(self) -> tuple[Part, ...]:
        """The effect on prefill and decode of the whole mix, then on each class."""
        found = [self._part(name, None) for name in ("turn", "prefill", "decode")] + [
            self._part("turn", at) for at in range(len(self.workload.classes))
        ]
        return tuple(part for part in found if part is not None)

    def seconds(self, side: Side, name: str, class_index: int | None = None) -> float | None:
        """Mean seconds of a side: of one class or expected of the mix; None without pairs."""
        if not self.pairs:
            return None
        blocks = [pair.a if side == "A" else pair.b for pair in self.pairs]
        times = [_seconds(self.workload, block, name, class_index) for block in blocks]
        return sum(times) / len(times)

    def _part(self, name: str, class_index: int | None) -> Part | None:
        times = [
            (_seconds(self.workload, pair.a, name, class_index),
             _seconds(self.workload, pair.b, name, class_index))
            for pair in self.pairs
        ]  # fmt: skip
        # A part that some pair did not have (a prompt that was all cached) has no ratio.
        if not times or any(a <= 0 or b <= 0 for a, b in times):
            return None
        effect = effect_of([math.log(a / b) for a, b in times])
        if effect is None:
            return None
        n = len(times)
        return Part(
            name, class_index, effect, sum(a for a, _ in times) / n, sum(b for _, b in times) / n
        )


def log_ratios(workload: Workload, pairs: Sequence[Pair]) -> list[float]:
    """log(turn time of A / turn time of B) of each pair."""
    return [
        math.log(
            _seconds(workload, pair.a, "turn", None) / _seconds(workload, pair.b, "turn", None)
        )
        for pair in pairs
    ]


def _seconds(workload: Workload, block: PairBlock, name: str, class_index: int | None) -> float:
    """Mean seconds over the rounds of a process: of one class, or expected of the mix."""
    n_classes = len(workload.classes)
    means = [
        sum(_part_ms(turns[at], name) for turns in block) / len(block) / 1000
        for at in range(n_classes)
    ]
    return workload.turn_time_s(means) if class_index is None else means[class_index]


def _part_ms(turn: Turn, name: str) -> float:
    if name == "prefill":
        return turn.prefill_ms
    return turn.decode_ms if name == "decode" else turn.wall_ms
