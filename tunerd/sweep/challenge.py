"""A challenge: what serves against one candidate, in pairs, until they have decided or a limit is broken.

Its e-value may be looked at after every pair and holds at whatever pair one stops, so a challenge that was
cut short may go on later with the pairs it has, put together again from their samples: as the same
challenge, of the same two arms, at the share of alpha that it was given when it began, and with all of its
pairs. What was decided is spent: another challenge of the same arms begins with new pairs and a share of
its own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd.measure.pairs import (
    SIDES,
    A,
    Gain,
    Pair,
    PairBlock,
    Side,
    Step,
    Turn,
    Verdict,
    challenge_alpha,
    class_ms,
    fails_more,
    gain_of,
    judge_challenge,
    pair_of,
    run_pairs,
)
from tunerd.profile.arm import REQUEST, Arm, Policy, Reading, Sample, ServerDied
from tunerd.profile.workload import Workload
from tunerd.records import plain
from tunerd.sweep.limits import Limits, worse
from tunerd.sweep.night import Block, CannotStart, Night, Server, TimeUp
from tunerd.sweep.observations import Answer, Observations, as_asked
from tunerd.words import counted

_RETRIES = 2


def _pair_json(pair: Pair) -> dict[str, Any]:
    """A pair as it is kept: what each class took on both arms [ms], and the log ratio of the turn times."""
    return {
        "number": pair.number,
        "incumbent_first": pair.first == A,
        "incumbent_ms": list(class_ms(pair.a)),
        "candidate_ms": list(class_ms(pair.b)),
        "incumbent_prefill_ms": list(class_ms(pair.a, "prefill")),
        "candidate_prefill_ms": list(class_ms(pair.b, "prefill")),
        "log_ratio": pair.log_ratio,
    }


def mean_ms(pairs: Sequence[Pair], side: Side, part: str) -> list[float]:
    """What each class took a side in the mean of its pairs [ms]: its turn, or its prefill."""
    blocks = (pair.a if side == A else pair.b for pair in pairs)
    columns = zip(*(class_ms(block, part) for block in blocks), strict=True)
    return [sum(column) / len(column) for column in columns]


def judged(pairs: Sequence[Pair], number: int, policy: Policy) -> Verdict:
    """What its pairs say of the challenge of this number of a generation."""
    return judge_challenge(
        [pair.log_ratio for pair in pairs],
        margin=policy.min_gain,
        alpha=challenge_alpha(policy.alpha, number),
        max_pairs=policy.max_pairs,
    )


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
    decision: Verdict | None
    gain: Gain | None
    by_kind: tuple[KindGain, ...]
    pairs: tuple[Pair, ...] = field(default=())
    n_carried: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        return {**plain(self), "pairs": [_pair_json(one) for one in self.pairs]}


class Ended(Exception):
    """One of the arms cannot be measured any more."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


@dataclass
class Challenge:
    """One candidate against the incumbent; it goes on from `pairs`, which must be all that it has (`carried`)."""

    night: Night
    limits: Limits
    policy: Policy
    incumbent: Arm
    candidate: Arm
    number: int
    pairs: list[Pair] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Count what was carried, and what fails from here on."""
        self._n_carried = len(self.pairs)
        self._starts_failed, self._deaths = Counter[Arm](), Counter[Arm]()

    def run(self) -> Result:
        """Pairs until there is a decision, the candidate fails, or time is up.

        Raises:
            Preempted: The user wants the machine.
        """
        try:
            is_decided = run_pairs(
                self.night.workload, self.pairs,
                goes_on=self._goes_on, has_time=self._has_time, measure=self._both,
            )  # fmt: skip
        except TimeUp:  # starts or answers took longer than any before
            is_decided = False
        except Ended as ended:
            return self._result(ended.outcome, ended.reason)
        if not is_decided:
            return self._result("open", self._what_it_takes())
        if self._verdict.standing is Step.FUTILE:
            return self._result("keep", self._too_little)
        broken = self._gates()
        return self._result("promote") if broken is None else self._result("failed", broken)

    # Pairs

    def _goes_on(self) -> bool:
        if len(self.pairs) > self._n_carried:
            self._check_memory()
            if (broken := self.limits.repeats(self.candidate)) is not None:
                raise Ended("failed", broken)
        self._verdict = judged(self.pairs, self.number, self.policy)
        return self._verdict.standing is Step.GO_ON

    @property
    def _pair_s(self) -> float:
        """By what starts usually take: what takes longer is cut off by the requests' own limits."""
        return sum(map(self.night.usual_process_s, (self.incumbent, self.candidate)))

    def _has_time(self) -> bool:
        return self._pair_s <= self.night.remaining_s

    def _both(self, number: int, order: tuple[Side, Side]) -> dict[Side, PairBlock]:
        block = self.night.block(f"v{self.number}.{number}")
        while True:
            found = {
                side: self._measure(self.incumbent if side == A else self.candidate, block, number)
                for side in order
            }
            # A pair may show that an engine finds no prefix; then its sides were not asked alike, which happens once.
            if len({in_parts for _, in_parts in found.values()}) == 1:
                return {side: block_of(readings) for side, (readings, _) in found.items()}

    def _measure(self, arm: Arm, block: Block, number: int) -> tuple[list[Reading], frozenset[int]]:
        """Readings of every class in a fresh process, in the workload's order, and whose prompts were read in two parts."""
        failure = ""
        for _ in range(_RETRIES):
            try:
                server = Server(self.night, arm, "verdict")
                server.warm_up()
                found = server.block(block, exact=True, pair=(self.number, number))
            except CannotStart as failed:
                failure = failed.failure
                self._starts_failed[arm] += 1
            except ServerDied as died:
                failure = died.kind or "crash"
                self._deaths[arm] += 1
            else:
                readings = [found.get(text) for text in range(len(self.night.workload.classes))]
                whole = [one for one in readings if one is not None and one.turn_ms is not None]
                if len(whole) == len(readings):
                    return whole, frozenset(server.in_parts)
                failure = "a class got no answer"
            if arm == self.candidate and (failure == "oom" or self._is_unreliable):
                break
        if arm == self.incumbent:
            raise Ended("open", f"the incumbent could not be measured: {failure}")
        raise Ended("failed", f"the candidate failed while it was compared: {failure}")

    @property
    def _is_unreliable(self) -> bool:
        """Whether the candidate fails where what serves does not."""
        starts, deaths = (
            by_arm[self.candidate] - by_arm[self.incumbent]
            for by_arm in (self._starts_failed, self._deaths)
        )
        return fails_more(starts, deaths)

    def _check_memory(self) -> None:
        """A candidate whose starts leave less than its filled context did is too tight."""
        self.night.learner.refresh()
        headroom = self.limits.headroom(self.candidate)
        if headroom is None:
            return
        wanted_mib = self.limits.headroom_mib
        if not self.limits.is_safe(self.candidate) or headroom.free_mib < wanted_mib:
            text = f"only {headroom.free_mib:.0f} MiB stay free with the context full"
            raise Ended("failed", f"{text}, of the required {wanted_mib:.0f}")

    # Decisions

    def _gates(self) -> str | None:
        """Which limit the measured pairs break, if any."""
        turns, prefills = (
            [mean_ms(self.pairs, side, part) for side in SIDES] for part in ("turn", "prefill")
        )
        deepest = self.night.workload.deepest
        broken = worse(turns, prefills, deepest=deepest, policy=self.policy)
        limits, arm = self.limits, self.candidate
        return broken or limits.spoils(arm)

    @property
    def _too_little(self) -> str:
        return f"the pairs do not support a gain of more than {self.policy.min_gain:.1%}"

    def _what_it_takes(self) -> str:
        verdict = self._verdict
        return (
            f"the budget ended after {counted(len(self.pairs), 'pair')}, with evidence of "
            f"{verdict.e_value:.3g} where {verdict.needed:.0f} is needed (by betting {verdict.betting_e_value:.3g} of "
            f"{verdict.betting_needed:.0f}); one more pair takes about {self._pair_s:.0f} s"
        )

    def _result(self, outcome: str, *reasons: str) -> Result:
        times = [(class_ms(pair.a), class_ms(pair.b)) for pair in self.pairs]
        by_kind = [
            KindGain(one.kind, gain)
            for at, one in enumerate(self.night.workload.classes)
            if (gain := gain_of([math.log(a[at] / b[at]) for a, b in times])) is not None
        ]
        return Result(
            candidate=self.candidate,
            number=self.number,
            outcome=outcome,
            reasons=reasons,
            decision=self._verdict,
            gain=gain_of([pair.log_ratio for pair in self.pairs]),
            by_kind=tuple(by_kind),
            pairs=tuple(self.pairs),
            n_carried=self._n_carried,
        )


def block_of(readings: Sequence[Reading]) -> PairBlock:
    """What the classes of one process took, a single round."""
    return (tuple(Turn(one.turn_ms or 0.0, one.prompt_ms or 0.0) for one in readings),)


# Challenges that were cut short


@dataclass(frozen=True, slots=True)
class Carried:
    """A challenge with its pairs so far.

    Attributes:
        candidate: What challenged.
        number: Which challenge of the generation it is: what share of alpha it has.
        pairs: All whole pairs, in order.
        is_earlier: Whether it began in a sweep before this one.
    """

    candidate: Arm
    number: int
    pairs: tuple[Pair, ...]
    is_earlier: bool


@dataclass
class _Attempt:
    """One attempt at a pair: what counts by arm, process and class, in the order in which it came."""

    number: int
    is_earlier: bool
    counted: dict[tuple[Arm, str], dict[int | None, Answer]] = field(default_factory=dict)
    has_died: set[Arm] = field(default_factory=set)


def carried(history: Iterable[Sample], incumbent: Arm, workload: Workload) -> tuple[Carried, ...]:
    """Challenges of this incumbent, in the order in which they began; their standing is not judged here.

    A pair of which one side is missing is left out, and measured again. Left out altogether are challenges
    in which the candidate died, and those whose pairs do not follow one another from the first on.
    """
    found = []
    for (candidate, number), blocks in _attempts(history, incumbent, workload).items():
        last: Carried | None = None
        if blocks[0].number != 1:  # its first pairs are in a sweep that went on elsewhere
            continue
        for block in blocks:
            if block.number == 1:
                last = Carried(candidate, number, (), block.is_earlier)
            pair = _pair(block, incumbent, candidate, workload)
            if last is None or candidate in block.has_died:
                last = None
            elif pair is not None:
                follows = pair.number == len(last.pairs) + 1
                last = replace(last, pairs=(*last.pairs, pair)) if follows else None
        if last is not None and last.pairs:
            found.append(last)
    return tuple(found)


def _attempts(
    history: Iterable[Sample], incumbent: Arm, workload: Workload
) -> dict[tuple[Arm, int], list[_Attempt]]:
    """Attempts at pairs by candidate and number of the challenge."""
    kept, known = incumbent.canonical(), list(history)
    proving = {sample.process for sample in known if sample.pair is not None}
    observed = Observations(workload)
    of_block: dict[tuple[str, int], list[tuple[Sample, Answer | None]]] = defaultdict(list)
    for sample in known:
        if sample.process in proving:
            observed.add(sample)
        if sample.event == REQUEST and sample.pair is not None:
            told = sample, _counted(observed, sample)
            of_block[sample.block, sample.pair[0]].append(told)
    found: dict[tuple[Arm, int], list[_Attempt]] = defaultdict(list)
    for (_, number), block in of_block.items():
        challenging = {sample.arm.canonical() for sample, _ in block} - {kept}
        if len(challenging) == 1:
            found[challenging.pop(), number].append(_attempt(block))
    return found


def _counted(observed: Observations, sample: Sample) -> Answer | None:
    """The newest sample of a process as it counted then; None if it did not."""
    if sample.request is None or sample.reading is None or sample.failure:
        return None
    process = observed.processes[sample.process]
    answer = process.answers[-1]
    reading = as_asked(process, answer, observed.workload)
    if answer.text is None or reading is None or reading.turn_ms is None:
        return None
    return replace(answer, reading=reading)


def _attempt(samples: Sequence[tuple[Sample, Answer | None]]) -> _Attempt:
    first, _ = samples[0]
    block = _Attempt(first.pair[1] if first.pair else 0, first.is_earlier)
    for sample, told in samples:
        arm = sample.arm.canonical()
        if sample.failure and sample.failure != "refused":
            block.has_died.add(arm)
        if told is not None:
            block.counted.setdefault((arm, sample.process), {})[told.text] = told
    return block


def _pair(block: _Attempt, incumbent: Arm, candidate: Arm, workload: Workload) -> Pair | None:
    """The pair, if both sides answered every class, asked alike; of several processes the last counts."""
    sides: dict[Arm, list[Answer]] = {}
    for (arm, _), by_text in block.counted.items():
        if len(by_text) == len(workload.classes):
            sides[arm] = [by_text[text] for text in range(len(workload.classes))]
    before, after = sides.get(incumbent.canonical()), sides.get(candidate)
    if before is None or after is None:
        return None
    if [one.is_stand_in for one in before] != [one.is_stand_in for one in after]:
        return None
    a, b = (block_of([one.reading for one in side]) for side in (before, after))
    return pair_of(workload, block.number, a, b)
