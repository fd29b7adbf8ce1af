"""The pieces that beliefs are made of: what knowing more is worth, levels of variants, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit

from benchmarks.simulator.box import Truth
from benchmarks.simulator.cards import CARDS
from tunerd.profile.arm import Arm
from tunerd.sweep.laws import Counts, Free, PromptRow, fit_acceptance, fit_memory, fit_prompts
from tunerd.sweep.search import expected_improvement

ARM = Arm("ik", "mtp", 4, 0.75, 1024, "q8_0", 512, 2048, 8)
HERE, THERE = ("ik", "mtp"), ("mainline", "mtp")


@pytest.mark.parametrize(("gain", "sd"), [(0.05, 0.01), (0.0, 0.02), (-0.02, 0.02), (-0.1, 0.001)])
def test_the_expected_improvement_is_the_mean_of_what_is_gained(gain: float, sd: float) -> None:
    draws = np.maximum(np.random.default_rng(1).normal(gain, sd, 200_000), 0.0)
    assert expected_improvement(gain, sd) == pytest.approx(float(draws.mean()), abs=2e-4)


def drafter(n_max: int, p_min: float, *, drafts_first: bool = False) -> Counts:
    """4,000 steps of a head that is as sure as it is right, over text that is easier in one step than in the next."""
    rng = np.random.default_rng(n_max)
    ease = rng.normal(0.0, 1.5, 4000)
    right = expit(0.9 + ease[:, None] - 0.15 * np.arange(n_max))
    is_drafted = right >= p_min
    is_drafted[:, 0] |= drafts_first
    is_drafted = np.logical_and.accumulate(is_drafted, axis=1)
    is_accepted = np.logical_and.accumulate(is_drafted & (rng.random(right.shape) < right), axis=1)
    return Counts(0, n_max, p_min, 40, 4000.0, float(is_drafted.sum()), float(is_accepted.sum()))


@pytest.mark.parametrize(("n_max", "p_min"), [(4, 0.6), (5, 0.5), (6, 0.4), (8, 0.5), (8, 0.6)])
def test_a_draft_whose_beginning_is_right_is_known_to_go_on_to_be_right(
    n_max: int, p_min: float
) -> None:
    law = fit_acceptance([drafter(*one) for one in [(2, 0.5), (3, 0.0), (3, 0.6), (8, 0.4)]], 1)
    truth = drafter(n_max, p_min)
    (accepted,) = law.drafts(n_max, p_min).accepted.sum(axis=1)
    assert 1 + accepted == pytest.approx(1 + truth.accepted / truth.n_steps, rel=0.03)


@pytest.mark.parametrize("drafts_first", [False, True])
def test_engines_that_draft_the_first_token_whatever_its_confidence_are_told_from_others(
    *, drafts_first: bool
) -> None:
    seen = [(1, 0.8), (2, 0.7), (4, 0.6), (8, 0.4)]
    law = fit_acceptance([drafter(*one, drafts_first=drafts_first) for one in seen], 1)
    (drafted,) = law.drafts(1, 0.9).drafted.sum(axis=1)
    assert drafted > 0.95 if drafts_first else drafted < 0.5


def test_what_a_batch_costs_is_known_where_only_large_ones_were_seen() -> None:
    """Experts in RAM are read over the bus once a batch, however large: half of the time of one of 2048."""

    def prompt(n_tokens: int, depth_k: float, ubatch: int) -> PromptRow:
        ms = 1000.0 * math.ceil(n_tokens / ubatch) + n_tokens * (0.4 + 0.003 * depth_k)
        return PromptRow("a", ms, n_tokens, ubatch, depth_k)

    seen = [prompt(42_000, 21.0, 2048), *(prompt(1200, 42.6, 2048) for _ in range(4))]
    law, half = fit_prompts(seen), prompt(42_000, 21.0, 1024)
    assert law is not None
    assert float(half.terms @ law.mean) == pytest.approx(half.ms, rel=0.15)


def test_the_margin_law_learns_what_drafts_and_depth_cost() -> None:
    rng = np.random.default_rng(3)
    seen = []
    for number, (n_max, ubatch) in enumerate([(1, 512), (8, 512), (4, 2048), (8, 1024), (2, 256)]):
        arm = replace(ARM, n_max=n_max, ubatch=ubatch, fit_mib=1500)
        for share in (0.0, 1.0):
            used = 200 + 60 * n_max + 150 * (math.sqrt(ubatch / 512) - 1) + 300 * share
            seen.append(Free(str(number), arm, share, 1500 - used + float(rng.normal(0, 5))))
    law = fit_memory(seen)
    asked = replace(ARM, n_max=6, ubatch=512, fit_mib=1024)
    free, error = law.free_mib(asked)
    assert free == pytest.approx(1024 - 200 - 360 - 300, abs=60)
    assert error < 60
    assert law.needed_margin_mib(asked, 100.0, 0.0) == pytest.approx(960, abs=60)


def test_a_start_that_ran_out_of_memory_raises_the_margin() -> None:
    before = fit_memory([])
    after = fit_memory([Free("1", ARM, 0.0, -150.0, is_failure=True)])
    assert after.needed_margin_mib(ARM, 100.0, 0.0) > before.needed_margin_mib(ARM, 100.0, 0.0)


def seen_of(truth: Truth, arms: Sequence[Arm]) -> list[Free]:
    """What processes of these arms show after a load and with their context full."""
    return [
        Free(str(number), arm, share, truth.free_mib(arm, share))
        for number, arm in enumerate(arms)
        for share in (0.0, 1.0)
    ]


def test_what_another_cache_type_takes_is_known_where_everything_fits_on_the_card() -> None:
    """And one that does not fit, so that weights leave the card, says nothing of those that do."""
    truth = Truth(CARDS["24G"]())
    home = Arm("mainline", "mtp", 2, 0.75, 512, "q4_0", 256, 2048, 8)
    known = [home, replace(home, n_max=6), replace(home, ubatch=512)]
    unseen = fit_memory(seen_of(truth, known))
    assert not unseen.is_binding
    asked = replace(home, kv="q8_0", n_max=4)
    free, error = unseen.free_mib(asked)
    assert error > 300, "how large the cache is, nobody has said"
    assert abs(free - truth.headroom_mib(asked)) < 2 * error

    law = fit_memory(seen_of(truth, [*known, replace(home, kv="q8_0"), replace(home, kv="f16")]))
    for arm in (asked, replace(home, n_max=4), replace(asked, ubatch=512)):
        free, error = law.free_mib(arm)
        assert free == pytest.approx(truth.headroom_mib(arm), abs=150)
        assert error < 150
    free, error = law.free_mib(replace(home, kv="f16"))
    assert free + 2 * error < 0, "it does not fit beside all weights"


def test_the_cache_type_makes_no_difference_where_the_fit_makes_room_for_it() -> None:
    truth = Truth(CARDS["12G"]())
    home = Arm("mainline", "mtp", 2, 0.75, 1024, "q8_0", 512, 2048, 8)
    law = fit_memory(seen_of(truth, [home, replace(home, n_max=6), replace(home, kv="f16")]))
    assert law.is_binding
    for kv in ("f16", "q8_0", "q4_0"):
        arm = replace(home, kv=kv, n_max=4)
        assert law.free_mib(arm)[0] == pytest.approx(truth.headroom_mib(arm), abs=150)


@pytest.mark.parametrize("follows", [True, False])
def test_margins_that_change_nothing_are_told_from_those_that_the_fit_keeps(
    *, follows: bool
) -> None:
    """Of a build that leaves all layers on the card; a larger margin was tried after each start that ran out."""
    rng = np.random.default_rng(5)
    seen = []
    for number, margin in enumerate((64, 384, 640, 1024)):
        arm = replace(ARM, fit_mib=margin)
        # The fit moves whole layers, so that up to one more is free than it was told.
        free = margin - 300 + rng.uniform(0, 250) if follows else 250 + rng.normal(0, 20)
        seen.append(Free(str(number), arm, 0.0, float(free)))
    law = fit_memory(seen)
    needed = law.needed_margin_mib(replace(ARM, fit_mib=1024), 1500.0, 0.0)
    assert law.is_binding is follows
    assert math.isfinite(needed) is follows
