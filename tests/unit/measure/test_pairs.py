"""The comparing loop on simulated servers: pairs, order, texts, failures, and what it concludes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct
from scipy.stats import t as student

from benchmarks.simulator.box import QUIET
from benchmarks.simulator.stand import SCENES, USUAL, Scene, SimulatedLife, SimulatedStand
from benchmarks.simulator.tasks import CHAT
from tunerd.measure.pairs import (
    EFFECTS,
    NOT_RECOMMENDED,
    Asked,
    Comparison,
    End,
    Gain,
    Limits,
    Side,
    Standing,
    Step,
    Turn,
    Unusable,
    advise,
    betting_e_value,
    challenge_alpha,
    e_value,
    gain_of,
    judge_challenge,
    pairs_needed,
    part_sentence,
    reasons,
    sentence,
)

LIMITS = Limits(budget_s=1e9, max_pairs=40)


def run(
    scene: Scene, seed: int = 1, *, limits: Limits = LIMITS, stand: SimulatedStand | None = None
) -> Comparison:
    return Comparison(stand or SimulatedStand(scene, seed), CHAT, limits, random.Random(seed)).run()


def bounds(gain: Gain | None) -> tuple[float, float]:
    assert gain is not None
    assert gain.lower is not None
    assert gain.upper is not None
    return gain.lower, gain.upper


@dataclass
class Recording(SimulatedStand):
    """Remembers every start and every request."""

    boots: list[Side] = field(default_factory=list)
    asked: dict[Side, list[Asked]] = field(default_factory=lambda: {"A": [], "B": []})
    open_lives: int = 0
    spoiled: set[tuple[str, Side]] = field(default_factory=set)
    n_spoiled: int = 1

    def boot(self, side: Side) -> SimulatedLife:
        self.boots.append(side)
        life = super().boot(side)
        self.open_lives += 1
        assert self.open_lives == 1
        return Recorded(self, side, life.factor)


@dataclass
class Recorded(SimulatedLife):
    def request(self, asked: Asked) -> Turn:
        stand = self.stand
        assert isinstance(stand, Recording)
        stand.asked[self.side].append(asked)
        if asked.attempt < stand.n_spoiled and (asked.block, self.side) in stand.spoiled:
            raise Unusable("throttled")
        return super().request(asked)

    def close(self) -> None:
        assert isinstance(self.stand, Recording)
        self.stand.open_lives -= 1
        super().close()


def test_sides_alternate_so_that_drift_cancels_and_every_process_is_fresh() -> None:
    stand = Recording(SCENES[0], 1)
    run(SCENES[0], limits=replace(LIMITS, max_pairs=4), stand=stand)
    assert "".join(stand.boots) == "AB" + "BA" + "BA" + "AB"
    assert stand.open_lives == 0


def test_both_sides_are_asked_the_same_and_no_text_comes_twice() -> None:
    stand = Recording(SCENES[0], 1)
    run(SCENES[0], limits=replace(LIMITS, max_pairs=6), stand=stand)
    texts = {
        side: [(one.block, one.class_index, one.attempt) for one in asked]
        for side, asked in stand.asked.items()
    }
    assert sorted(texts["A"]) == sorted(texts["B"])
    assert len(set(texts["A"])) == len(texts["A"])
    assert len({one.class_index for one in stand.asked["A"]}) == len(CHAT.classes)


def test_a_long_start_is_used_for_several_rounds_and_all_processes_answer_equally_many() -> None:
    stand = Recording(SCENES[0], 1, load_s=(200.0, 210.0))
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=3), stand=stand)
    sizes = {len(block) for pair in found.pairs for block in (pair.a, pair.b)}
    assert len(sizes) == 1
    assert sizes.pop() > 3


def test_an_answer_that_must_not_count_is_asked_anew_with_another_text_on_both_sides() -> None:
    stand = Recording(SCENES[0], 1, spoiled={("1-0", "A")})
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=1), stand=stand)
    kept = [one for one in stand.asked["B"] if one.block == "1-0"]
    assert {one.attempt for one in kept} == {1}
    told = f"{len(CHAT.classes)} answers of A did not count (throttled), and A was asked again"
    assert told in reasons(found)


def test_each_answer_that_did_not_count_is_counted_once_where_the_pair_is_begun_anew() -> None:
    stand = Recording(SCENES[0], 1, spoiled={("1-0", "A")}, n_spoiled=99)
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=1), stand=stand)
    asked = [one for one in stand.asked["A"] if one.block == "1-0"]
    assert (len(found.pairs), len(asked), len(found.unusable)) == (1, 4, 4)


def test_a_pair_whose_second_side_has_no_answer_to_the_same_text_does_not_count() -> None:
    stand = Recording(SCENES[0], 1, spoiled={("1-0", "B")})
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=1), stand=stand)
    assert "".join(stand.boots) == "AB" + "AB"
    last = {
        side: {(one.block, one.class_index, one.attempt) for one in asked if one.block == "1.1-0"}
        for side, asked in stand.asked.items()
    }
    assert last["A"] == last["B"] != set()
    assert [one.attempt for one in stand.asked["B"] if one.block == "1-0"] == [0]
    assert (len(found.pairs), found.unusable) == (1, [("B", "throttled")])


def test_a_comparison_whose_answers_never_count_says_of_which_side_and_why() -> None:
    names = {"1-0", *(f"1.{attempt}-0" for attempt in range(1, 6))}
    stand = Recording(SCENES[0], 1, spoiled={(name, "B") for name in names}, n_spoiled=99)
    found = run(SCENES[0], stand=stand)
    assert found.end is End.FAILED
    told = "no complete pair could be measured, the last time because an answer did not count: B's (throttled)"
    assert found.problem == told
    assert "6 answers of B did not count (throttled), and B was asked again" in reasons(found)


def test_the_faster_side_is_named_with_an_interval_that_holds() -> None:
    for gain, standing, words in ((0.08, Standing.B_FASTER, "n_max 3 is"), (-0.08, Standing.A_FASTER, "n_max 2 is")):  # fmt: skip
        found = run(Scene("x", USUAL, gain=gain))
        assert (found.standing, found.end) == (standing, End.DECIDED)
        lower, upper = bounds(found.gain)
        assert lower < gain < upper
        text = sentence(found, "n_max 2", "n_max 3", "chat")
        assert text.startswith(words)
        assert "95 % interval" in text
        assert "on chat" in text


def test_servers_without_noise_are_found_equal_and_it_ends() -> None:
    found = run(Scene("quiet", QUIET))
    assert found.standing is Standing.NO_DIFFERENCE
    assert len(found.pairs) < 20
    assert "equally fast" in sentence(found, "A", "B", "chat")


@pytest.mark.parametrize("scene", SCENES[:1] + SCENES[3:6], ids=lambda scene: scene.name)
def test_equal_servers_are_hardly_ever_told_apart(scene: Scene) -> None:
    nights = 20
    named = sum(
        run(scene, seed, limits=replace(LIMITS, max_pairs=20)).standing
        in {Standing.A_FASTER, Standing.B_FASTER}
        for seed in range(nights)
    )
    assert named <= 2  # 5 % of 20 is 1; 3 would come in 1 of 13 such tests at the very limit


def test_a_true_five_percent_is_found_in_most_nights() -> None:
    scene = Scene("x", USUAL, gain=0.05)
    found = [run(scene, seed).standing for seed in range(12)]
    assert found.count(Standing.B_FASTER) >= 10


def test_three_pairs_are_too_few_for_any_verdict_however_far_apart() -> None:
    found = run(Scene("x", USUAL, gain=3.0), limits=replace(LIMITS, max_pairs=3))
    assert found.standing is Standing.OPEN
    assert "nothing can be said" in sentence(found, "A", "B", "chat")
    assert run(Scene("x", USUAL, gain=3.0)).standing is Standing.B_FASTER


def test_it_ends_in_time() -> None:
    stand = SimulatedStand(SCENES[0], 1)
    found = run(SCENES[0], limits=replace(LIMITS, budget_s=900.0), stand=stand)
    assert found.end is End.TIME
    assert 0 < stand.clock_s <= 900.0
    assert found.pairs


@pytest.mark.parametrize(
    ("disturbed", "spoiled", "budget_s"), [(99, set(), 90.0), (0, {("1-0", "A")}, 30.0)],
    ids=["processes", "answers"],
)  # fmt: skip
def test_nothing_more_is_begun_once_the_time_is_up_though_no_pair_is_whole(
    disturbed: int, spoiled: set[tuple[str, Side]], budget_s: float
) -> None:
    stand = Recording(SCENES[0], 1, disturbed=disturbed, spoiled=spoiled)
    found = run(SCENES[0], limits=replace(LIMITS, budget_s=budget_s), stand=stand)
    assert (found.end, found.pairs, stand.open_lives) == (End.TIME, [], 0)
    # What had begun is all that came after the end.
    assert stand.clock_s < budget_s + stand.load_s[1] + 3.0
    assert found.problem is not None
    assert "time ran out during pair 1, which does not count" in found.problem
    assert found.problem in reasons(found)


@dataclass
class Fragile(SimulatedStand):
    """B is far faster, and dies amid so many of its requests."""

    n_deaths: int = 0

    def boot(self, side: Side) -> SimulatedLife:
        life = super().boot(side)
        if side == "B" and self.n_deaths:
            self.n_deaths -= 1
            life.close()
        return life


@pytest.mark.parametrize(
    ("n_starts", "n_deaths", "is_told", "is_recommended"),
    [(0, 0, False, True), (1, 0, True, True), (2, 0, True, False), (0, 1, True, False)],
)
def test_a_side_that_fails_meanwhile_is_told_and_not_recommended_where_the_other_does_not(
    n_starts: int, n_deaths: int, *, is_told: bool, is_recommended: bool
) -> None:
    """Two crashes of it, and it was recommended without a word."""
    scene = Scene("x", USUAL, gain=1.0)
    stand = Fragile(scene, 1, fails={"B": n_starts}, n_deaths=n_deaths)
    found = run(scene, stand=stand)

    advice = advise(found.standing, (), None, found.unreliable)

    assert found.standing is Standing.B_FASTER
    assert any("B failed" in one for one in reasons(found)) is is_told
    assert (advice.recommended == "B") is is_recommended
    assert (advice.outcome == NOT_RECOMMENDED) is not is_recommended
    assert (advice.remark is None) is is_recommended


def test_a_pair_in_which_somebody_else_was_served_is_measured_again() -> None:
    stand = Recording(SCENES[0], 1, disturbed=1)
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=2), stand=stand)
    assert "".join(stand.boots) == "A" + "AB" + "BA"
    assert len(found.pairs) == 2
    assert {one.block.partition("-")[0] for one in stand.asked["B"]} == {"1.1", "2"}
    assert [side for side, _ in found.unusable] == ["A"]


def test_a_side_that_does_not_start_is_named_with_its_reason() -> None:
    found = run(SCENES[0], stand=SimulatedStand(SCENES[0], 1, fails={"B": 99}))
    assert (found.end, found.pairs, found.gain) == (End.FAILED, [], None)
    assert found.problem == "B: out of memory"
    assert "out of memory" in sentence(found, "A", "B", "chat")
    assert list(reasons(found)) == ["B: out of memory"]


def test_a_pair_with_a_failed_start_is_measured_again_and_that_is_told_as_once() -> None:
    stand = SimulatedStand(SCENES[0], 1, fails={"B": 1})
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=3), stand=stand)
    assert (len(found.pairs), found.problem) == (3, None)
    told = next(one for one in reasons(found) if one.startswith("B failed"))
    assert told == "B failed once, and its pairs were measured again: out of memory"


def test_each_part_and_each_class_has_its_own_effect() -> None:
    found = run(Scene("x", USUAL, gain=0.10), limits=replace(LIMITS, max_pairs=6))
    parts = found.parts()
    assert [(part.name, part.class_index) for part in parts] == [
        ("turn", None), ("prefill", None), ("decode", None), ("turn", 0), ("turn", 1), ("turn", 2),
    ]  # fmt: skip
    whole = parts[0]
    assert whole.a_s == pytest.approx(parts[1].a_s + parts[2].a_s)
    assert 1 + whole.gain.estimate == pytest.approx(1.1, rel=0.06)
    assert "B +" in part_sentence(parts[2], "")


# What pairs of fresh processes say: the evidence, when it is enough, and its interval.

PAIR_SD = 0.045


def pairs(mean: float, count: int, *, seed: int = 1, sd: float = PAIR_SD) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).normal(mean, sd, count)]


def decided(values: list[float], *, margin: float = 0.01, alpha: float = 0.05) -> tuple[int, Step]:
    """After how many pairs a challenge ends, and how."""
    for count in range(3, len(values) + 1):
        found = judge_challenge(values[:count], margin=margin, alpha=alpha, max_pairs=len(values))
        if found.standing is not Step.GO_ON:
            return count, found.standing
    raise AssertionError("the last pair ends it")


@pytest.mark.parametrize("mean", [-0.08, 0.0, 0.03, 0.12])
@pytest.mark.parametrize("count", [3, 9, 40])
def test_the_evidence_is_the_likelihood_ratio_of_the_t_statistic(mean: float, count: int) -> None:
    values = pairs(mean, count)
    t = math.sqrt(count) * float(np.mean(values)) / float(np.std(values, ddof=1))
    ratios = [
        nct.pdf(t, count - 1, effect * math.sqrt(count)) / student.pdf(t, count - 1)
        for effect in EFFECTS
    ]
    assert e_value(values, 0.0) == pytest.approx(float(np.mean(ratios)), rel=1e-3, abs=1e-9)


def test_two_pairs_say_nothing_and_equal_ones_do_not_divide_by_zero() -> None:
    assert e_value([0.5, 0.5], 0.0) == 1.0
    assert e_value([0.0] * 5, 0.0) < 1.0
    assert e_value([0.1] * 5, 0.0) > 20.0


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=40), st.floats(0.0, 0.05))
def test_the_evidence_is_a_number_for_any_pairs(values: list[float], least_gain: float) -> None:
    assert 0.0 <= e_value(values, least_gain) < math.inf
    assert betting_e_value(values, least_gain) > 0.0


def test_a_wanted_gain_takes_from_the_evidence_and_too_few_pairs_have_no_interval() -> None:
    values = pairs(0.05, 12)
    assert e_value(values, 0.03) < e_value(values, 0.01) < e_value(values, 0.0)
    gain = gain_of([0.1, 0.1])
    assert gain is not None
    assert (gain.lower, gain.upper, gain_of([])) == (None, None, None)


def test_equal_arms_are_promoted_in_fewer_nights_than_the_error_allows() -> None:
    nights = 300
    rng = np.random.default_rng(7)
    ends = [decided(rng.normal(0.0, PAIR_SD, 40).tolist(), margin=0.0)[1] for _ in range(nights)]
    assert ends.count(Step.PROMOTE) / nights <= 0.05


def test_pairs_end_without_a_decision_and_what_they_cannot_prove_is_given_up_before() -> None:
    def standing(values: list[float], margin: float, max_pairs: int) -> Step:
        return judge_challenge(values, margin=margin, alpha=0.05, max_pairs=max_pairs).standing

    unsure, small = [0.08, -0.04, 0.07, -0.03], pairs(math.log(1.018), 10, sd=0.002)
    assert [standing(unsure, 0.0, count) for count in (12, 4)] == [Step.GO_ON, Step.FUTILE]
    assert [standing(small, 0.01, count) for count in (80, 16)] == [Step.GO_ON, Step.FUTILE]
    assert standing(pairs(-0.05, 6), 0.01, 40) is Step.FUTILE, "it is slower"
    sure = pairs(math.log(1.02), 40, sd=0.004)
    found = [standing(sure, margin, 40) for margin in (0.0, 0.01, 0.03)]
    assert found == [Step.PROMOTE, Step.PROMOTE, Step.FUTILE], "however sure, below the least gain"


def test_all_challenges_of_a_generation_together_spend_its_alpha() -> None:
    shares = [challenge_alpha(0.05, k) for k in range(1, 1000)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(0.05 * (1 - 0.3 / 999))


def slow_starts(share: float, *, seed: int) -> list[float]:
    """Of a quiet box where B gains just 1 % in the mean, with some of its starts 15 % slower than the others."""
    rng = np.random.default_rng(seed)
    slow = math.log(1.15)
    luck = slow * (share - (rng.random(40) < share))
    return [float(one) for one in math.log(1.01) + luck + rng.normal(0.0, 0.01, 40)]


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_starts_that_are_slow_now_and_then_do_not_pass_for_a_gain(share: float) -> None:
    ends = [decided(slow_starts(share, seed=seed), alpha=0.025)[1] for seed in range(100)]
    assert ends.count(Step.PROMOTE) <= 8


def test_the_interval_is_where_neither_side_is_refuted() -> None:
    values = pairs(0.05, 20)
    gain = gain_of(values)
    lower, upper = bounds(gain)
    assert gain is not None
    assert lower < gain.estimate < upper
    assert gain.estimate == pytest.approx(math.expm1(float(np.mean(values))))
    assert e_value(values, math.log1p(lower)) == pytest.approx(40.0, rel=0.02)
    assert e_value([-x for x in values], -math.log1p(upper)) == pytest.approx(40.0, rel=0.02)


def test_the_interval_holds_at_whatever_pair_one_stops() -> None:
    truth = 0.03
    missed = 0
    for seed in range(60):
        values = pairs(truth, 24, seed=seed)
        ends = [bounds(gain_of(values[:count])) for count in (3, 6, 12, 24)]
        missed += any(not math.log1p(lower) <= truth <= math.log1p(upper) for lower, upper in ends)
    assert missed / 60 <= 0.05


def test_a_gain_below_the_margin_never_needs_a_finite_plan() -> None:
    assert pairs_needed(0.005, PAIR_SD, margin=0.01, alpha=0.05) >= 1000
    few = pairs_needed(0.10, PAIR_SD, margin=0.01, alpha=0.05)
    assert 3 < few < pairs_needed(0.03, PAIR_SD, margin=0.01, alpha=0.05)


@pytest.mark.parametrize(("gain", "sd"), [(0.06, 0.02), (0.1, 0.045), (0.15, 0.035), (0.8, 0.045)])
def test_as_many_pairs_are_planned_as_drawn_challenges_take(gain: float, sd: float) -> None:
    rng = np.random.default_rng(3)
    drawn = [rng.normal(math.log1p(gain), sd, 40).tolist() for _ in range(40)]
    taken = [decided(ratios, margin=0.02, alpha=0.025)[0] for ratios in drawn]
    assert abs(pairs_needed(gain, sd, margin=0.02, alpha=0.025) - np.median(taken)) <= 2
