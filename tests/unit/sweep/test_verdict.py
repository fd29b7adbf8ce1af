"""What pairs of fresh processes say: the evidence, when it is enough, and its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct
from scipy.stats import t as student

from tunerd.measure.pairs import (
    EFFECTS,
    LEAST_NAMED,
    Step,
    betting_e_value,
    challenge_alpha,
    e_value,
    gain_of,
    judge_challenge,
    pairs_needed,
)
from tunerd.sweep.tuner import most_of, planned_pairs

PAIR_SD = 0.045


def pairs(mean: float, count: int, *, seed: int = 1, sd: float = PAIR_SD) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).normal(mean, sd, count)]


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


def test_two_pairs_say_nothing_however_far_apart() -> None:
    assert e_value([0.5, 0.5], 0.0) == 1.0


def test_equal_pairs_do_not_divide_by_zero() -> None:
    assert e_value([0.0] * 5, 0.0) < 1.0
    assert e_value([0.1] * 5, 0.0) > 20.0


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=40), st.floats(0.0, 0.05))
def test_the_evidence_is_a_number_for_any_pairs(values: list[float], least_gain: float) -> None:
    assert 0.0 <= e_value(values, least_gain) < math.inf
    assert betting_e_value(values, least_gain) > 0.0


def test_a_wanted_gain_takes_from_the_evidence() -> None:
    values = pairs(0.05, 12)
    assert e_value(values, 0.03) < e_value(values, 0.01) < e_value(values, 0.0)


def test_equal_arms_are_promoted_in_fewer_nights_than_the_error_allows() -> None:
    nights = 300
    promoted = 0
    rng = np.random.default_rng(7)
    for _ in range(nights):
        values = rng.normal(0.0, PAIR_SD, 40).tolist()
        for count in range(3, 41):
            decision = judge_challenge(values[:count], margin=0.0, alpha=0.05, max_pairs=40)
            if decision.standing is not Step.GO_ON:
                promoted += decision.standing is Step.PROMOTE
                break
    assert promoted / nights <= 0.05


def test_a_gain_of_ten_percent_is_found_in_a_few_pairs() -> None:
    found = []
    for seed in range(40):
        values = pairs(math.log(1.10), 40, seed=seed)
        counts = (
            count
            for count in range(3, 41)
            if judge_challenge(values[:count], margin=0.01, alpha=0.05, max_pairs=40).standing
            is Step.PROMOTE
        )
        found.append(next(counts, 99))
    assert float(np.median(found)) <= 8


def test_a_gain_below_the_least_one_is_never_promoted_however_sure_it_is() -> None:
    values = pairs(math.log(1.02), 40, sd=0.004)
    standings = {
        margin: judge_challenge(values, margin=margin, alpha=0.05, max_pairs=40).standing
        for margin in (0.0, 0.01, 0.03)
    }
    assert standings[0.0] is standings[0.01] is Step.PROMOTE
    assert standings[0.03] is Step.FUTILE


def test_an_arm_that_is_slower_is_given_up_before_the_pairs_run_out() -> None:
    decision = judge_challenge(pairs(-0.05, 6), margin=0.01, alpha=0.05, max_pairs=40)
    assert decision.standing is Step.FUTILE


def test_pairs_end_without_a_decision() -> None:
    values = [0.08, -0.04, 0.07, -0.03]
    go_on = judge_challenge(values, margin=0.0, alpha=0.05, max_pairs=12)
    assert go_on.standing is Step.GO_ON
    assert judge_challenge(values, margin=0.0, alpha=0.05, max_pairs=4).standing is Step.FUTILE


def test_all_challenges_of_a_generation_together_spend_its_alpha() -> None:
    shares = [challenge_alpha(0.05, k) for k in range(1, 1000)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(0.05 * (1 - 1 / 1000))


def slow_starts(share: float, *, seed: int) -> list[float]:
    """Of a quiet box where B gains just 1 % in the mean, with some of its starts 15 % slower than the others."""
    rng = np.random.default_rng(seed)
    slow = math.log(1.15)
    luck = slow * (share - (rng.random(40) < share))
    return [float(one) for one in math.log(1.01) + luck + rng.normal(0.0, 0.01, 40)]


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_starts_that_are_slow_now_and_then_do_not_pass_for_a_gain(share: float) -> None:
    promoted = 0
    for seed in range(100):
        values = slow_starts(share, seed=seed)
        for count in range(3, 41):
            found = judge_challenge(values[:count], margin=0.01, alpha=0.025, max_pairs=40)
            if found.standing is not Step.GO_ON:
                promoted += found.standing is Step.PROMOTE
                break
    assert promoted <= 8


def test_what_the_pairs_that_are_left_cannot_prove_is_given_up() -> None:
    values = pairs(math.log(1.018), 10, sd=0.002)
    early, late = (
        judge_challenge(values, margin=0.01, alpha=0.05, max_pairs=count).standing
        for count in (80, 16)
    )
    assert (early, late) == (Step.GO_ON, Step.FUTILE)


def test_the_interval_is_where_neither_side_is_refuted() -> None:
    values = pairs(0.05, 20)
    gain = gain_of(values)
    assert gain is not None
    assert gain.lower is not None
    assert gain.upper is not None
    assert gain.lower < gain.estimate < gain.upper
    assert gain.estimate == pytest.approx(math.expm1(float(np.mean(values))))
    assert e_value(values, math.log1p(gain.lower)) == pytest.approx(40.0, rel=0.02)
    assert e_value([-x for x in values], -math.log1p(gain.upper)) == pytest.approx(40.0, rel=0.02)


def test_the_interval_holds_at_whatever_pair_one_stops() -> None:
    truth = 0.03
    missed = 0
    for seed in range(60):
        values = pairs(truth, 24, seed=seed)
        gains = (gain_of(values[:count]) for count in range(3, 25, 3))
        missed += any(
            gain is not None
            and gain.lower is not None
            and gain.upper is not None
            and not math.log1p(gain.lower) <= truth <= math.log1p(gain.upper)
            for gain in gains
        )
    assert missed / 60 <= 0.05


def test_too_few_pairs_have_no_interval_and_none_has_no_gain() -> None:
    gain = gain_of([0.1, 0.1])
    assert gain is not None
    assert (gain.lower, gain.upper) == (None, None)
    assert gain_of([]) is None


def test_a_gain_below_the_margin_never_needs_a_finite_plan() -> None:
    assert pairs_needed(0.005, PAIR_SD, margin=0.01, alpha=0.05) >= 1000
    few = pairs_needed(0.10, PAIR_SD, margin=0.01, alpha=0.05)
    assert 3 < few < pairs_needed(0.03, PAIR_SD, margin=0.01, alpha=0.05)


@pytest.mark.parametrize(("gain", "sd"), [(0.06, 0.02), (0.1, 0.045), (0.15, 0.035), (0.8, 0.045)])
def test_as_many_pairs_are_planned_as_drawn_challenges_take(gain: float, sd: float) -> None:
    rng, taken = np.random.default_rng(3), []
    for _ in range(40):
        ratios = rng.normal(math.log1p(gain), sd, 40).tolist()
        decided = (
            n for n in range(3, 41)
            if judge_challenge(ratios[:n], margin=0.02, alpha=0.025, max_pairs=40).standing
            is not Step.GO_ON
        )  # fmt: skip
        taken.append(next(decided))
    assert abs(pairs_needed(gain, sd, margin=0.02, alpha=0.025) - np.median(taken)) <= 2


def test_a_proof_may_take_some_pairs_more_where_they_are_little_of_the_night() -> None:
    assert planned_pairs(LEAST_NAMED, 300.0, 1 * 3600.0) == LEAST_NAMED
    assert planned_pairs(LEAST_NAMED, 300.0, 2 * 3600.0) == LEAST_NAMED + 1
    assert planned_pairs(LEAST_NAMED, 300.0, 24 * 3600.0) == LEAST_NAMED + 3
    assert planned_pairs(8, 300.0, 1 * 3600.0) == 10


@pytest.mark.parametrize("n_arms", [1, 40])
def test_what_may_be_missed_bounds_the_best_of_all_arms_and_not_each_of_them(n_arms: int) -> None:
    rng = np.random.default_rng(1)
    means, sds = rng.normal(-0.01, 0.01, n_arms), rng.uniform(0.005, 0.02, n_arms)
    best = rng.normal(means, sds, (20_000, n_arms)).max(axis=1)
    assert np.mean(best < most_of(means, sds)) == pytest.approx(0.95, abs=0.006)
