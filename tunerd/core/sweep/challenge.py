"""A challenge: pairs of fresh processes, the same new prompts on both, until the pairs have decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.limits import Limits, worse
from tunerd.core.sweep.night import Block, Night, TimeUp
from tunerd.core.sweep.protocol import Policy, ServerDied
from tunerd.core.sweep.reading import Reading
from tunerd.core.sweep.server import CannotStart, Server
from tunerd.core.sweep.verdict import Decision, Gain, Standing, challenge_alpha, decide, gain_of
from tunerd.core.workload import Workload

_RETRIES = 2
_STARTS_FORGIVEN = 1


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair: what each class took on both arms [ms], and the log ratio of the turn times."""

    number: int
    incumbent_first: bool
    incumbent_ms: tuple[float, ...]
    candidate_ms: tuple[float, ...]
    incumbent_prefill_ms: tuple[float, ...]
    candidate_prefill_ms: tuple[float, ...]
    log_ratio: float


@dataclass(frozen=True, slots=True)
class KindGain:
    """Gain on one class of the workload."""

    kind: str
    gain: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a challenge ended.

    `outcome` is promote, keep, failed (a gate) or open (no time or no incumbent to compare with).
    `n_carried` of its pairs were measured before it was cut short and went on.
    """

    candidate: Arm
    number: int
    outcome: str
    reasons: tuple[str, ...]
    decision: Decision | None
    gain: Gain | None
    by_kind: tuple[KindGain, ...]
    pairs: tuple[Pair, ...] = field(default=())
    is_short_of_memory: bool = False
    n_carried: int = 0


class _Ended(Exception):
    """One of the arms cannot be measured any more."""

    def __init__(self, outcome: str, reason: str, *, memory: bool = False) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.memory = memory


class Challenge:
    """One candidate against the incumbent."""

    def __init__(
        self,
        night: Night,
        limits: Limits,
        policy: Policy,
        incumbent: Arm,
        candidate: Arm,
        number: int,
        pairs: Sequence[Pair] = (),
    ) -> None:
        """Goes on from `pairs`, which must be all that this challenge has (`carried`)."""
        self._night = night
        self._limits = limits
        self._policy = policy
        self._incumbent = incumbent
        self._candidate = candidate
        self._number = number
        self._pairs = list(pairs)
        self._n_carried = len(self._pairs)
        self._starts_failed: dict[Arm, list[str]] = {incumbent: [], candidate: []}
        self._deaths: dict[Arm, list[str]] = {incumbent: [], candidate: []}
        self._alpha = challenge_alpha(policy.alpha, number)

    def pair_s(self) -> float:
        """Time of one pair."""
        return sum(
            self._night.process_s(arm, exact=True) for arm in (self._incumbent, self._candidate)
        )

    def run(self) -> Result:
        """Pairs until there is a decision, the candidate fails, or time is up.

        Raises:
            Preempted: The user wants the machine.
        """
        decision = self._decide()
        while decision.standing is Standing.GO_ON:
            if self.pair_s() > self._night.remaining_s:
                return self._result("open", [self._what_it_takes(decision)], decision)
            try:
                self._pairs.append(self._pair())
                self._check_memory()
            except TimeUp:  # starts or answers took longer than any before
                return self._result("open", [self._what_it_takes(decision)], decision)
            except _Ended as ended:
                return self._result(
                    ended.outcome, [ended.reason], decision, is_short_of_memory=ended.memory
                )
            decision = self._decide()
        if decision.standing is Standing.FUTILE:
            return self._result("keep", [_too_small(self._policy)], decision)
        broken = self._gates()
        if broken is not None:
            return self._result("failed", [broken], decision)
        return self._result("promote", [], decision)

    # Pairs

    def _pair(self) -> Pair:
        number = len(self._pairs) + 1
        block = self._night.block(f"v{self._number}.{number}")
        order = [self._incumbent, self._candidate]
        found = {
            arm: self._measure(arm, block, number)
            for arm in (order if _is_incumbent_first(number) else reversed(order))
        }
        return pair_of(number, found[self._incumbent], found[self._candidate], self._night.workload)

    def _measure(self, arm: Arm, block: Block, number: int) -> list[Reading]:
        """Readings of every class in a fresh process, in the workload's order."""
        failure = ""
        for _ in range(_RETRIES):
            try:
                server = Server(self._night, arm, "verdict")
                server.warm_up(exact=True)
                found = server.block(block, exact=True, pair=(self._number, number))
            except CannotStart as failed:
                failure = failed.failure
                self._starts_failed[arm].append(failure)
            except ServerDied as died:
                failure = died.kind or "crash"
                self._deaths[arm].append(failure)
            else:
                readings = [found.get(text) for text in range(len(self._night.workload.classes))]
                whole = [one for one in readings if one is not None and one.turn_ms is not None]
                if len(whole) == len(readings):
                    return whole
                failure = "no answer to a class"
            if arm == self._candidate and (failure == "oom" or self._is_unreliable):
                break
        if arm == self._incumbent:
            raise _Ended("open", f"the incumbent could not be measured: {failure}")
        raise _Ended(
            "failed", f"the candidate failed during the verdict: {failure}",
            memory=failure == "oom",
        )  # fmt: skip

    @property
    def _is_unreliable(self) -> bool:
        """Whether the candidate fails where what serves does not.

        One start may fail for reasons of the machine; a death in the middle of a request is an outage.
        """
        starts, deaths = (
            len(by_arm[self._candidate]) - len(by_arm[self._incumbent])
            for by_arm in (self._starts_failed, self._deaths)
        )
        return deaths > 0 or starts > _STARTS_FORGIVEN

    def _check_memory(self) -> None:
        """A candidate whose starts leave less than its filled context did is too tight."""
        self._night.learner.refresh()
        headroom = self._limits.headroom(self._candidate)
        if headroom is None:
            return
        if not self._limits.is_safe(self._candidate) or (
            headroom.free_mib < self._limits.headroom_mib - headroom.sd_mib
        ):
            raise _Ended(
                "failed",
                f"{headroom.free_mib:.0f} MiB stay free with the context full, wanted are "
                f"{self._limits.headroom_mib:.0f}",
                memory=True,
            )

    # Decisions

    def _decide(self) -> Decision:
        return decide(
            [pair.log_ratio for pair in self._pairs],
            margin=self._policy.min_gain, alpha=self._alpha, max_pairs=self._policy.max_pairs,
        )  # fmt: skip

    def _gates(self) -> str | None:
        """Which limit the measured pairs break, if any."""
        count = len(self._pairs)

        def means(name: str) -> list[float]:
            columns = zip(*(getattr(pair, name) for pair in self._pairs), strict=True)
            return [sum(column) / count for column in columns]

        broken = worse(
            means("incumbent_ms"), means("candidate_ms"), means("incumbent_prefill_ms"),
            means("candidate_prefill_ms"), self._night.workload.deepest, self._policy,
        )  # fmt: skip
        if broken is not None:
            return broken
        return self._limits.breaks_tools(self._candidate)

    def _what_it_takes(self, decision: Decision) -> str:
        return (
            f"the budget ended after {len(self._pairs)} pairs; the evidence is "
            f"{decision.e_value:.3g} of {decision.needed:.0f}, and one more pair takes about "
            f"{self.pair_s():.0f} s"
        )

    def _result(
        self,
        outcome: str,
        reasons: Sequence[str],
        decision: Decision,
        *,
        is_short_of_memory: bool = False,
    ) -> Result:
        by_kind = []
        for text, one in enumerate(self._night.workload.classes):
            gain = gain_of(
                [
                    math.log(pair.incumbent_ms[text] / pair.candidate_ms[text])
                    for pair in self._pairs
                ]
            )
            if gain is not None:
                by_kind.append(KindGain(one.kind, gain))
        return Result(
            candidate=self._candidate,
            number=self._number,
            outcome=outcome,
            reasons=tuple(reasons),
            decision=decision,
            gain=gain_of([pair.log_ratio for pair in self._pairs]),
            by_kind=tuple(by_kind),
            pairs=tuple(self._pairs),
            is_short_of_memory=is_short_of_memory,
            n_carried=self._n_carried,
        )


def pair_of(
    number: int, before: Sequence[Reading], after: Sequence[Reading], workload: Workload
) -> Pair:
    """A pair from what both sides answered, class by class."""
    times = [tuple(reading.turn_ms or 0.0 for reading in one) for one in (before, after)]
    prefills = [tuple(reading.prompt_ms or 0.0 for reading in one) for one in (before, after)]
    ratio = workload.turn_time_s(times[0]) / workload.turn_time_s(times[1])
    return Pair(
        number, _is_incumbent_first(number), times[0], times[1], prefills[0], prefills[1],
        math.log(ratio),
    )  # fmt: skip


def _is_incumbent_first(number: int) -> bool:
    return number % 4 in (1, 0)  # ABBA


def _too_small(policy: Policy) -> str:
    return f"the pairs do not support a gain of more than {policy.min_gain:.1%}"
