"""A challenge that is cut short goes on with its pairs, as the same challenge; no pair decides twice."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.box import QUIET, SimulatedBox
from benchmarks.simulator.tasks import Task, task
from tests.support.made_sweep import a_sample, begun_search
from tunerd.measure.pairs import challenge_alpha, class_ms
from tunerd.profile.arm import Arm, Boot, Family, Policy, Preempted, Request, Sample, Space
from tunerd.profile.workload import RequestClass, Workload
from tunerd.records import plain
from tunerd.sweep.challenge import Carried, Challenge, carried
from tunerd.sweep.limits import Limits
from tunerd.sweep.tuner import Outcome

INCUMBENT = Arm("mainline", "mtp", 3, 0.75, 512, "q8_0", 512, 2048, 8)
CANDIDATE = replace(INCUMBENT, n_max=6)
WORKLOAD = Workload((RequestClass(1, "code", 0, 300, 200), RequestClass(3, "chat", 0, 500, 100)))


# Put together again from samples


def answer(
    arm: Arm, number: int, text: int, ms: float, *, night: str = "a", challenge: int = 1, life: int = 0,
    failure: str = "", is_earlier: bool = False,
) -> Sample:  # fmt: skip
    one = WORKLOAD.classes[text]
    told = {"wall_ms": ms, "prompt_ms": ms / 4, "predicted_ms": ms / 2}
    return Sample(
        event="request", process=f"{night}/{arm.n_max}.{number}.{life}", arm=arm, purpose="block",
        at_s=0.0, seconds=1.0, failure=failure, block=f"{night}-v{challenge}.{number}",
        request=Request(one.kind, f"{number}-{text}", 0, one.new_tokens, one.n_predict),
        answer=None if failure else told, pair=(challenge, number), is_earlier=is_earlier,
    )  # fmt: skip


def side(arm: Arm, number: int, ms: float, **more: Any) -> list[Sample]:
    return [answer(arm, number, text, ms * (text + 1), **more) for text in (0, 1)]


def pairs(
    numbers: Sequence[int], ratio: float = 1.1, incumbent: Arm = INCUMBENT, **more: Any
) -> list[Sample]:
    found = []
    for number in numbers:
        found += side(incumbent, number, 1000 * ratio, **more)
        found += side(CANDIDATE, number, 1000, **more)
    return found


def only(history: list[Sample]) -> Carried | None:
    found = carried(history, INCUMBENT, WORKLOAD)
    assert len(found) <= 1
    return found[0] if found else None


def test_pairs_are_what_they_were_when_they_were_measured() -> None:
    found = only(pairs([1, 2], 1.1))
    assert found is not None
    assert (found.candidate, found.number, found.is_earlier) == (CANDIDATE, 1, False)
    assert [(pair.number, pair.first) for pair in found.pairs] == [(1, "A"), (2, "B")]
    for pair in found.pairs:
        assert class_ms(pair.a) == pytest.approx((1100, 2200))
        assert class_ms(pair.b) == (1000, 2000)
        assert class_ms(pair.a, "prefill") == pytest.approx((275, 550))
        assert class_ms(pair.b, "prefill") == (250, 500)
        assert pair.log_ratio == pytest.approx(np.log(1.1))


def test_a_prompt_that_was_read_in_two_parts_counts_with_both_when_its_pair_goes_on() -> None:
    one = task("12G", "agent", None)
    long, behind = RequestClass(1, "chat", 0, 21_200, 64), RequestClass(1, "chat", 20_000, 600, 64)
    one = replace(one, workload=Workload((long, behind)))
    search = begun_search(one, SimulatedBox(one.card, QUIET))
    candidate = replace(one.incumbent, threads=4)
    challenge = Challenge(search.night, search.limits, Policy(), one.incumbent, candidate, 1)
    measured = challenge.run().pairs
    (found,) = carried(search.night.samples, one.incumbent, one.workload)
    assert found.pairs == measured
    asked = [sample.request for sample in search.night.samples if sample.pair is not None]
    assert {each.new_tokens for each in asked if each is not None} == {1_200, 600}


DIED = answer(CANDIDATE, 3, 0, 0.0, failure="crash")
HALF = [*pairs([1, 2]), *side(INCUMBENT, 3, 1100)[:1], *side(CANDIDATE, 3, 1000)]
AGAIN = [*side(INCUMBENT, 1, 1200, life=1), *side(CANDIDATE, 1, 1000)]
# Samples, by how much which of their pairs are gone on with, and whether an earlier sweep began them.
KEPT: dict[str, tuple[list[Sample], dict[int, float], bool]] = {
    "half a pair does not count": (HALF, {1: 1.1, 2: 1.1}, False),
    "and is measured again under its number": (
        [*HALF, *pairs([3, 4], 1.3, night="b")], {1: 1.1, 2: 1.1, 3: 1.3, 4: 1.3}, False),
    "the last whole process of a side counts": ([*side(INCUMBENT, 1, 1100)[:1], *AGAIN], {1: 1.2}, False),
    "its candidate died": ([*pairs([1, 2]), DIED], {}, False),
    "and was challenged with again": ([*pairs([1, 2]), DIED, *pairs([1], night="b")], {1: 1.1}, False),
    "of several challenges of one arm the last counts": (
        [*pairs([1, 2, 3], 0.9, is_earlier=True), *pairs([1, 2], 1.2, night="b")], {1: 1.2, 2: 1.2}, False),
    "one that an earlier sweep began stays one of that sweep": (
        [*pairs([1, 2], is_earlier=True), *pairs([3], night="b")], {1: 1.1, 2: 1.1, 3: 1.1}, True),
    "pairs of another incumbent": (pairs([1, 2, 3], incumbent=replace(INCUMBENT, fit_mib=1024)), {}, False),
    # Pairs that are known elsewhere must not be measured anew until they look better.
    "it went on elsewhere before": ([*pairs([3, 4], night="b", is_earlier=True), *pairs([1, 2])], {}, False),
    "it went on elsewhere after": ([*pairs([1, 2]), *pairs([4], night="b")], {}, False),
}  # fmt: skip


@pytest.mark.parametrize(("history", "ratios", "is_earlier"), KEPT.values(), ids=KEPT)
def test_whole_pairs_are_gone_on_with_where_their_challenge_is_not_over(
    history: list[Sample], ratios: dict[int, float], *, is_earlier: bool
) -> None:
    found = only(history)
    kept = {} if found is None else {one.number: np.exp(one.log_ratio) for one in found.pairs}
    assert kept == pytest.approx(ratios)
    assert found is None or found.is_earlier is is_earlier


# Whole nights


def small() -> Task:
    """A box with a space that is searched in less than a second."""
    one = task("12G", "agent", 1)
    family = replace(
        next(iter(one.space.families.values())),
        n_max=(1, 3, 6), p_min=(0.0, 0.75), kv=("q8_0",), threads=(8,), ubatch=(512, 1024),
    )  # fmt: skip
    return replace(one, space=replace(one.space, families={("mainline", "mtp"): family}))


class Wanted(SimulatedBox):
    """A box that its user wants back in the middle of the verdict."""

    answers = 0
    limit = 10**9

    def check(self) -> None:
        if self.answers >= self.limit:
            raise Preempted

    def filed(self, sample: Sample) -> None:
        self.answers += sample.pair is not None


def night(
    box: Wanted, one: Task, history: Sequence[Any] = (), hours: float = 1.0, **more: Any
) -> Outcome:
    return one.night(hours, seed=4, box=box, history=history, on_sample=box.filed, **more)


def verdicts(outcome: Outcome) -> list[Sample]:
    return [sample for sample in outcome.evidence.samples if sample.pair is not None]


@pytest.fixture(scope="module")
def cut() -> Outcome:
    """A night that ended in the middle of its third pair."""
    one = small()
    box = Wanted(one.card)
    box.limit = 2 * 2 * len(one.workload.classes) + 1
    outcome = night(box, one)
    assert outcome.verdict == "inconclusive"
    assert verdicts(outcome)[-1].pair == (1, 3)
    return outcome


@pytest.mark.parametrize("is_earlier", [False, True], ids=["resumed", "in the next sweep"])
def test_a_night_that_was_cut_in_its_verdict_goes_on_with_its_pairs(
    cut: Outcome, is_earlier: bool
) -> None:
    one = small()
    known = [
        {**json.loads(json.dumps(plain(sample))), "is_earlier": is_earlier}
        for sample in cut.evidence.samples
    ]
    outcome = night(Wanted(one.card, seed=5), one, known)
    assert outcome.verdict == "promote"
    result = outcome.evidence.challenges[0]
    assert (result.number, result.n_carried) == (1, 2)
    assert [pair.number for pair in result.pairs] == list(range(1, len(result.pairs) + 1))
    assert result.decision is not None
    assert result.decision.needed == 1 / challenge_alpha(0.05, 1)
    assert verdicts(outcome)[0].pair == (1, 3)
    assert outcome.evidence.samples[0].purpose == "verdict", "nothing is searched before"
    assert "2 from before it was cut short" in outcome.evidence.reasons[0]
    prompts = [sample.request.prompt_id for sample in verdicts(outcome) if sample.request]
    old = [sample.request.prompt_id for sample in verdicts(cut) if sample.request]
    assert not set(prompts) & set(old)


def test_what_was_decided_is_spent(cut: Outcome) -> None:
    """A proposal that was declined is proved anew by a later sweep, with the next share of alpha."""
    one = small()
    first = night(Wanted(one.card, seed=5), one, cut.evidence.samples)
    history = [
        replace(sample, is_earlier=True)
        for sample in (*cut.evidence.samples, *first.evidence.samples)
    ]
    later = night(Wanted(one.card, seed=6), one, history, hours=0.5)
    assert [result.n_carried for result in later.evidence.challenges] == [0]
    assert later.evidence.challenges[0].number == first.evidence.challenges[-1].number + 1
    begun = night(Wanted(one.card, seed=6), one, n_challenges=4)
    assert begun.evidence.challenges[0].number == 5, "of other conditions they are remembered too"
    again = night(Wanted(one.card, seed=7), one, [*cut.evidence.samples, *first.evidence.samples])
    assert again.evidence.challenges[0].n_carried == len(first.evidence.challenges[0].pairs)


# Winners of one sweep


@functools.cache
def narrow_and_wide() -> tuple[Task, Outcome]:
    """A box with two steps to its best: a night that may try the first alone has won it, and more may be tried now."""
    one = small()
    one = replace(one, incumbent=replace(one.incumbent, n_max=1, p_min=0.0, ubatch=256))
    family = next(iter(one.space.families.values()))

    def within(**values: Any) -> Space:
        return Space(dict.fromkeys(one.space.families, replace(family, **values)))

    few = within(n_max=(1,), p_min=(0.0,), ubatch=(256, 512))
    begun = replace(one, space=few).night(1.0, box=SimulatedBox(one.card, QUIET))
    more = within(n_max=(1, 2, 3), p_min=(0.0, 0.75), ubatch=(256, 512, 1024))
    return replace(one, space=more), begun


def test_the_search_goes_on_from_a_winner_and_proves_the_next_against_it() -> None:
    one, begun = narrow_and_wide()
    (first,) = begun.evidence.won

    outcome = one.night(1.0, seed=2, history=begun.evidence.samples)

    again, then = outcome.evidence.won
    assert again.candidate == first.candidate
    assert (outcome.verdict, outcome.arm) == ("promote", then.candidate)
    asked = [row for row in outcome.evidence.samples if row.pair and row.pair[0] == then.number]
    assert {row.arm.canonical() for row in asked} == {again.candidate, then.candidate}
    gain, gains = outcome.evidence.gain, [one.gain for one in outcome.evidence.won]
    assert gain is not None
    expected = math.prod(1 + each.estimate for each in gains if each is not None)
    assert 1 + gain.estimate == pytest.approx(expected)
    assert outcome.evidence.reasons[1].startswith("then ")


def test_a_winner_stays_one_though_the_search_for_more_is_cut_short() -> None:
    one, begun = narrow_and_wide()
    (first,) = begun.evidence.won
    samples = begun.evidence.samples
    last = max(at for at, row in enumerate(samples) if row.pair and row.pair[0] == first.number)

    again = one.night(60 / 3600, seed=2, history=samples[: last + 1])

    assert (again.verdict, again.arm) == ("promote", first.candidate)
    assert not again.evidence.restarts


# Winners that do not stay winners


class Breaks(SimulatedBox):
    """One arm of it fails to start from now on."""

    target: Arm | None = None
    failure = ""

    def restart(self, arm: Arm) -> Boot:
        if self.failure and arm.canonical() == self.target:
            return Boot(False, 30.0, self.failure)
        return super().restart(arm)


@pytest.mark.parametrize("failure", ["oom", "crash"])
def test_a_winner_that_fails_after_it_won_is_not_deployed(failure: str) -> None:
    one, begun = narrow_and_wide()
    box = Breaks(one.card, seed=1)
    box.target, box.failure = begun.arm.canonical(), failure

    outcome = one.night(1.0, box=box, history=begun.evidence.samples)

    assert outcome.arm.canonical() != box.target
    assert (outcome.verdict, outcome.arm) == ("inconclusive", one.incumbent)
    assert "won, but is not deployed" in outcome.evidence.reasons[0]
    assert not outcome.evidence.won
    assert outcome.evidence.path[-1].arm == one.incumbent


SPACE = Space(
    {("mainline", "mtp"): Family((3, 6, 9), (0.75,), (512,), ("q8_0",), (512,), (2048,), (8,))}
)


def chain(*ratios: tuple[float, float]) -> list[Sample]:
    """Pairs of arms with 3, 6 and 9 drafts, each against the one before it, by what they take of its time in each class."""
    found, ms = [], [1000.0, 4000.0]
    for challenge, by_class in enumerate(ratios, 1):
        arms = [
            replace(INCUMBENT, n_max=3 * challenge),
            replace(INCUMBENT, n_max=3 * challenge + 3),
        ]
        then = [one * ratio for one, ratio in zip(ms, by_class, strict=True)]
        for number in range(1, 9):
            found += [
                answer(arm, number, text, times[text] * (1 + 0.002 * (number % 3)), challenge=challenge)
                for arm, times in zip(arms, (ms, then), strict=True)
                for text in (0, 1)
            ]  # fmt: skip
        ms = then
    return found


def recalled(history: list[Sample]) -> Outcome:
    """What a sweep makes of it that has no time for more."""
    one = replace(small(), space=SPACE, workload=WORKLOAD, incumbent=INCUMBENT)
    return one.night(1 / 3600, history=history)


def test_a_class_may_not_get_slower_winner_by_winner_than_is_allowed_at_all() -> None:
    outcome = recalled(chain((1.2, 0.7), (1.2, 0.7)))
    assert [one.outcome for one in outcome.evidence.challenges] == ["promote", "failed"]
    assert "one class gets 44% slower" in outcome.evidence.challenges[1].reasons[0]
    assert (outcome.verdict, outcome.arm.n_max) == ("promote", 6)
    fine = recalled(chain((1.1, 0.7), (1.1, 0.7)))
    assert fine.arm.n_max == 9


def test_what_broke_a_limit_before_the_sweep_was_cut_is_not_proved_again() -> None:
    outcome = recalled(chain((1.5, 0.6)))
    assert [one.outcome for one in outcome.evidence.challenges] == ["failed"]
    (left,) = (
        one for one in outcome.evidence.left_out if one.what == str(replace(INCUMBENT, n_max=6))
    )
    assert "one class gets 50% slower" in left.reason


def test_tool_calls_are_held_against_what_serves_though_another_has_won() -> None:
    one = small()
    search = begun_search(one, one.box(), 8192)
    night, limits = search.night, search.limits
    winner = replace(one.incumbent, n_max=6)
    request = Request("tool", "a", 0, 200, 32, ignore_eos=False)
    broken = {"n_max": 6, "p_min": 0.75, "answer": {"tool_ok": False}}
    night.answered(a_sample(winner, "tool", request, **broken))
    search.incumbent = winner
    search.learn_usual_tools()
    assert {row.arm for row in night.samples[1:]} == {one.incumbent}
    assert limits.own_tool_calls(one.incumbent)[0] == Policy().tool_calls


def test_answers_are_held_against_those_of_what_serves_to_as_long_and_as_free_requests_alone() -> (
    None
):
    """Without drafts a night asks for 128 tokens, and longer answers end in a loop more often."""
    kind = RequestClass(1, "code", 0, 300, 512)
    one = replace(small(), workload=Workload((kind,)))
    search = begun_search(one, one.box(), 8192)
    night, limits, long = search.night, search.limits, kind.n_predict
    arm, off = replace(one.incumbent, n_max=6), replace(one.incumbent, spec="off", n_max=0)

    def ask(by: Arm, n_predict: int, ratio: float | None, *, held: bool = False) -> None:
        told = {"predicted_n": n_predict, "repeated_ratio": ratio, "is_held": held}
        request = Request(
            kind.kind, night.new_prompt(), kind.cached_tokens, kind.new_tokens, n_predict
        )
        night.answered(
            a_sample(by, "block", request, block="b", n_max=by.n_max, p_min=by.p_min, answer=told)
        )

    for _ in range(4):
        ask(arm, long, 0.5)
        ask(arm, long, None)
        ask(one.incumbent, long, 0.0, held=True)
    assert limits.repeats(arm, has_won=True) is None, "nothing of what serves was asked alike"
    for _ in range(4):
        ask(one.incumbent, long, 0.0)
    told = "4 of 4 of its answers only repeat themselves, from 50% of their text on at the earliest, and 0 of 4 of those of what serves"
    assert limits.repeats(arm) == limits.fails(arm) == limits.spoils(arm) == told
    assert limits.repeats(one.incumbent) is None
    limits = Limits(night.learner, search.grid, Policy(), off)
    for _ in range(4):
        ask(off, 128, 0.0)
    assert limits.repeats(arm) is None, (
        "half of it is sane, as is all that was asked of what serves"
    )
    for _ in range(8):
        ask(arm, long, 1 - 58 / long)
    assert limits.repeats(arm) is None, "letters are no tokens: it may be a little less"
    for _ in range(16):
        ask(arm, long, 1 - 32 / long)
    assert "16 of 28 of its answers only repeat themselves, from 25% of" in (
        limits.repeats(arm) or ""
    )


def test_the_same_texts_that_arms_of_a_kind_answer_alike_are_evidence_once() -> None:
    """At temperature 0 three neighbours gave the same answers, and all of their kind was given up for two prompts."""
    kind = RequestClass(1, "code", 0, 300, 512)
    one = replace(small(), workload=Workload((kind,)))
    search = begun_search(one, one.box(), 8192)

    def ask(by: Arm, prompt: str, ratio: float) -> None:
        told = {"predicted_n": kind.n_predict, "repeated_ratio": ratio}
        request = Request(kind.kind, prompt, 0, kind.new_tokens, kind.n_predict)
        search.night.answered(
            a_sample(by, "block", request, block="b", n_max=by.n_max, p_min=by.p_min, answer=told)
        )

    others = [replace(one.incumbent, kv="f16", n_max=n) for n in (1, 2, 3)]
    for number in range(3):
        ask(one.incumbent, f"u{number}", 0.0)
        for arm in others:
            ask(arm, f"c{number}", 0.7 if number else 0.0)
    untried = replace(others[0], n_max=6)
    assert search.limits.repeats(untried) is None
    for number in range(3):
        ask(others[0], f"c{number}", 0.7)
    assert search.limits.repeats(others[0]) is not None
    assert search.limits.repeats(untried) is None, "a kind is looked at more often than an arm"
    for number in range(9):
        ask(others[0], f"d{number}", 0.7)
    assert search.limits.repeats(untried) is not None
