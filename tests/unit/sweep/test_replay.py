"""The sweep on boxes that replay published tables, with the noise that real starts have.

`python -m benchmarks.replay` runs such nights with many seeds.
"""

from __future__ import annotations

import pytest

from benchmarks.replay import night
from benchmarks.simulator.replay import surfaces

NIGHT_S = 4 * 3600.0
# Two starts of one arm differ by as much (`benchmarks.simulator.box.Noise.process`): an arm this near the
# best cannot be told from it in a night.
NOISE = 0.027
# One night in twelve ends further behind (docs/benchmarks.md): such a seed says nothing of a change.
SEED = 2


@pytest.mark.parametrize("name", list(surfaces()))
def test_from_the_slowest_arm_of_a_published_table_its_best_is_found(name: str) -> None:
    surface = surfaces()[name]
    outcome, box = night(surface, surface.ranked[-1], seed=SEED)
    assert outcome.verdict == "promote", outcome.evidence.reasons
    assert surface.behind(outcome.arm) <= NOISE
    assert {arm.canonical() for arm in box.started} <= {one.arm for one in surface.cells}
    assert box.now() <= NIGHT_S


@pytest.mark.parametrize("seed", [4, 5])
def test_where_no_steps_are_told_a_night_goes_on_until_the_luck_of_starts_is_found_out(
    seed: int,
) -> None:
    surface = surfaces()["RTX 5090, 600 W"]
    outcome, _ = night(surface, surface.ranked[-1], seed=seed)
    assert surface.behind(outcome.arm) <= NOISE


@pytest.mark.parametrize("name", list(surfaces()))
def test_where_the_published_best_serves_already_it_is_kept(name: str) -> None:
    surface = surfaces()[name]
    outcome, _ = night(surface, surface.best)
    assert outcome.verdict != "promote"
    assert outcome.arm == surface.best


@pytest.mark.parametrize("watts", [400, 600])
def test_from_the_default_depth_of_three_nothing_slower_is_served(watts: int) -> None:
    """Three is within 4 % of the best at every cap: what is promoted over it must be no worse."""
    surface = surfaces()[f"RTX 5090, {watts} W"]
    outcome, _ = night(surface, surface.arm("mtp", 3))
    assert surface.behind(outcome.arm) <= surface.behind(surface.arm("mtp", 3))


@pytest.mark.parametrize(("tokens", "best"), [(100, "off"), (500, "off"), (2000, "mtp")])
def test_speculation_is_off_where_the_published_turns_are_shorter_without(
    tokens: int, best: str
) -> None:
    """43,241 tokens of prompt cost more with drafts; from 1000 tokens of answer on they earn it back."""
    surface = surfaces()[f"RTX 3090 Ti, answers of {tokens} tokens"]
    served = surface.arm("mtp", 6, 0.75) if best == "off" else surface.arm("off")
    outcome, _ = night(surface, served)
    assert outcome.verdict == "promote"
    assert outcome.arm.spec == best


def test_what_ran_out_of_memory_is_tried_once_and_a_kind_that_hangs_is_given_up() -> None:
    surface = surfaces()["RTX 5060 Ti"]
    outcome, box = night(surface, surface.arm("mtp", 2))
    assert outcome.arm == surface.arm("mtp", 4)
    assert sum(arm.n_max == 6 for arm in box.started) <= 2, "of two p-mins"
    surface = surfaces()["RTX 3090 Ti, DFlash, smaller n-max"]
    outcome, box = night(surface, surface.arm("dflash", 4))
    assert outcome.arm.spec == "dflash"
    assert 1 <= sum(arm.spec == "ngram" for arm in box.started) <= 3
