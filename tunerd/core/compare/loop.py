"""Pairs of fresh processes, in the order ABBA, asked the same new texts, until they have decided."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tunerd.core.compare.decision import Decision, decide
from tunerd.core.compare.outcome import Comparison, End, Pair, PairBlock, log_ratios
from tunerd.core.compare.protocol import (
    A,
    Asked,
    B,
    BootFailed,
    Life,
    LifeEnded,
    Limits,
    Side,
    Stand,
    Turn,
    Unusable,
)
from tunerd.core.workload import Workload

# A pair of which a process failed is measured again; a side that fails so often cannot be measured.
_TRIES = 3
_ATTEMPTS = 4
# Requests should take about as long as the start that they need.
_ROUND_SHARE = 1.0

# Which attempt a text of a pair stands at, by block and class.
_Texts = dict[tuple[str, int], int]
OnPair = Callable[[Pair, Decision, float], object]


class _Failed(Exception):
    """A side cannot be measured."""


def compare(
    stand: Stand,
    workload: Workload,
    limits: Limits,
    rng: random.Random,
    *,
    on_pair: OnPair | None = None,
) -> Comparison:
    """Measure until the pairs have decided, or time or pairs run out.

    Args:
        stand: Where both sides are started.
        workload: What they are asked.
        limits: When it ends.
        rng: Order of classes within a round; the order of sides is fixed.
        on_pair: Called after each pair with what it decides and the seconds it may still take.
    """
    return _Comparing(stand, workload, limits, rng, on_pair).run()


@dataclass
class _Comparing:
    stand: Stand
    workload: Workload
    limits: Limits
    rng: random.Random
    on_pair: OnPair | None
    pairs: list[Pair] = field(default_factory=list)
    n_rounds: int | None = None
    n_unusable: int = 0
    last_unusable: str = ""
    n_failures: dict[Side, int] = field(default_factory=lambda: {A: 0, B: 0})

    def run(self) -> Comparison:
        begin_s = self.stand.now_s()
        decision, end, problem = None, End.PAIRS, None
        longest_s = 0.0
        while len(self.pairs) < self.limits.max_pairs:
            pair_begin_s = self.stand.now_s()
            if pair_begin_s - begin_s + longest_s > self.limits.budget_s:
                end = End.TIME
                break
            try:
                self.pairs.append(self._pair())
            except _Failed as failed:
                end, problem = End.FAILED, str(failed)
                break
            now_s = self.stand.now_s()
            longest_s = max(longest_s, now_s - pair_begin_s)
            decision = self._decide()
            if self.on_pair is not None:
                self.on_pair(self.pairs[-1], decision, self._left_s(now_s - begin_s))
            if decision.is_final:
                end = End.DECIDED
                break
        return Comparison(
            workload=self.workload,
            pairs=tuple(self.pairs),
            decision=decision,
            end=end,
            elapsed_s=self.stand.now_s() - begin_s,
            n_unusable=self.n_unusable,
            problem=problem,
        )

    def _decide(self) -> Decision:
        ratios = log_ratios(self.workload, self.pairs)
        return decide(ratios, alpha=self.limits.alpha, tolerance=self.limits.tolerance)

    def _left_s(self, elapsed_s: float) -> float:
        """At most: what is left of time, or of pairs at the pace so far."""
        pair_s = elapsed_s / len(self.pairs)
        by_pairs = (self.limits.max_pairs - len(self.pairs)) * pair_s
        return max(min(self.limits.budget_s - elapsed_s, by_pairs), 0.0)

    def _pair(self) -> Pair:
        """One pair; one of which a process fails is begun anew with other texts."""
        number = len(self.pairs) + 1
        first: Side = A if number % 4 in {1, 0} else B  # ABBA
        order: tuple[Side, Side] = (A, B) if first == A else (B, A)
        orders = self._orders()
        for attempt in range(2 * _TRIES):
            name = f"{number}" if attempt == 0 else f"{number}.{attempt}"
            found = self._both(order, name, orders)
            if found is not None:
                return Pair(number, first, found[A], found[B])
        why = f", the last time because of: {self.last_unusable}" if self.last_unusable else ""
        raise _Failed(f"no pair could be measured whole{why}")

    def _orders(self) -> list[list[int]]:
        """The order of classes in each round: the same for both sides."""
        classes = list(range(len(self.workload.classes)))
        return [self.rng.sample(classes, len(classes)) for _ in range(self.limits.max_rounds)]

    def _both(
        self, order: tuple[Side, Side], name: str, orders: list[list[int]]
    ) -> dict[Side, PairBlock] | None:
        found: dict[Side, PairBlock] = {}
        texts: _Texts = {}
        for side in order:
            try:
                found[side] = self._process(side, name, orders, texts)
            except (BootFailed, LifeEnded) as error:
                self.n_failures[side] += 1
                if self.n_failures[side] >= _TRIES:
                    raise _Failed(f"{side}: {error}") from error
                return None
            except Unusable as unusable:
                self.n_unusable += 1
                self.last_unusable = str(unusable)
                return None
        return found

    def _process(self, side: Side, name: str, orders: list[list[int]], texts: _Texts) -> PairBlock:
        begin_s = self.stand.now_s()
        life = self.stand.boot(side)
        try:
            up_s = self.stand.now_s()
            blocks = [self._round(life, f"{name}-0", orders[0], texts)]
            if self.n_rounds is None:
                self.n_rounds = self._rounds(up_s - begin_s, self.stand.now_s() - up_s)
            blocks += [
                self._round(life, f"{name}-{number}", orders[number], texts)
                for number in range(1, self.n_rounds)
            ]
            life.check()
        finally:
            life.close()
        return tuple(blocks)

    def _rounds(self, boot_s: float, block_s: float) -> int:
        """Decided once, by the first process: pairs of unequal work would not be alike."""
        wanted = round(_ROUND_SHARE * boot_s / block_s) if block_s > 0 else self.limits.max_rounds
        return min(max(wanted, 1), self.limits.max_rounds)

    def _round(self, life: Life, block: str, order: list[int], texts: _Texts) -> tuple[Turn, ...]:
        found = {at: self._ask(life, block, at, texts) for at in order}
        return tuple(found[at] for at in range(len(found)))

    def _ask(self, life: Life, block: str, at: int, texts: _Texts) -> Turn:
        """The turn, asked anew with another text where an answer must not count.

        The second side gets the text that the first one answered, and no other: with another one the
        pair would not be alike, so it is begun anew.
        """
        if (block, at) in texts:
            return life.request(Asked(block, at, self.workload.classes[at], texts[block, at]))
        why = ""
        for attempt in range(_ATTEMPTS):
            texts[block, at] = attempt
            try:
                return life.request(Asked(block, at, self.workload.classes[at], attempt))
            except Unusable as unusable:
                self.n_unusable += 1
                why = str(unusable)
        raise Unusable(why)  # too often: the whole pair is begun anew
