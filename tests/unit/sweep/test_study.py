"""What boxes of one class tell each other, and what a box makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.tasks import Task, task
from tunerd.profile.arm import Arm, Policy, Space
from tunerd.sweep.laws import N_PROMPT_TERMS, N_STEP_TERMS, n_parameters
from tunerd.sweep.learner import Learner
from tunerd.sweep.night import Night, Server
from tunerd.sweep.space import build_grid
from tunerd.sweep.study import Known, Law, Study, Told, known_of
from tunerd.sweep.tuner import tune

HOUR_S = 3600.0
MTP = ("mainline", "mtp")


@dataclass
class Meeting(Study):
    """A study in memory: what others told is given, what this box does is kept."""

    known: Mapping[tuple[str, str], Known] = field(default_factory=dict)
    theirs: list[Told] = field(default_factory=list)
    taken: frozenset[Arm] = frozenset()
    claimed: list[Arm] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    seeds: tuple[Arm, ...] = ()
    laws: Mapping[tuple[str, str], Law] = field(default_factory=dict)
    winner: Arm | None = None

    def news(self) -> Sequence[Told]:
        news, self.theirs = self.theirs, []
        return news

    def claim(self, arm: Arm) -> bool:
        self.claimed.append(arm)
        return arm not in self.taken

    def tell(self, told: Told) -> None:
        self.told.append(told)

    def end(self, laws: Mapping[tuple[str, str], Law], winner: Arm | None) -> None:
        self.laws, self.winner = laws, winner


def narrow(one: Task) -> Space:
    return replace(one.space, pinned={"kv": "q8_0", "threads": 8})


def learned(
    one: Task, *, known: Mapping[tuple[str, str], Known] | None = None, tells_steps: bool = True
) -> Learner:
    """What a box knows that has measured what serves, and nothing else."""
    grid = build_grid(narrow(one), one.incumbent, Policy())
    learner = Learner(grid, one.workload, 131_072, known)
    it = Night(
        one.box(tells_steps=tells_steps),
        one.workload,
        learner,
        HOUR_S,
        np.random.default_rng(1),
        None,
    )
    Server(it, one.incumbent, "incumbent").block()
    learner.refresh()
    return learner


def believed(learner: Learner, *arms: Arm) -> list[float]:
    return [one.mean for one in learner.beliefs(arms) if one is not None]


def test_what_another_box_gained_with_an_arm_is_believed_the_more_for_its_neighbours_than_for_others() -> (
    None
):
    one = task("12G", "agent", 1)
    learner = learned(one)
    here = one.incumbent
    deep, near = replace(here, n_max=8), replace(here, n_max=7)
    before = believed(learner, here, deep, near)
    told = [
        Told(replace(here, n_max=2), here, 0.0, "two"),
        Told(deep, here, -0.2, "two"),
    ]
    learner.hear(told)
    after = believed(learner, here, deep, near)
    moved = np.subtract(before, after)
    assert moved[1] > moved[2] > 0.005
    assert moved[1] > abs(moved[0])


def test_what_another_box_gains_with_every_arm_tells_none_from_another() -> None:
    one = task("12G", "agent", 1)
    learner = learned(one)
    here = one.incumbent
    arms = [replace(here, n_max=n) for n in (2, 5, 8)]
    before = believed(learner, *arms)
    learner.hear([Told(arm, here, -0.15, "two") for arm in arms for _ in range(3)])
    moved = np.subtract(before, believed(learner, *arms))
    assert np.ptp(moved) < 0.03
    assert moved.max() < 0.06, "most of it is the other box's"


def test_what_was_told_counts_as_no_process_of_this_box() -> None:
    one = task("12G", "agent", 1)
    learner = learned(one)
    arm = replace(one.incumbent, n_max=8)
    learner.hear([Told(arm, one.incumbent, -0.2, "two")])
    assert learner.n_processes(arm) == 0
    assert arm.canonical() not in learner.measured()


def test_of_all_that_was_told_the_newest_count() -> None:
    one = task("12G", "agent", 1)
    here, arm = one.incumbent, replace(one.incumbent, n_max=8)
    told = [Told(arm, here, -0.2 if at < 1000 else 0.2, "two") for at in range(2000)]
    learner, newest = learned(one), learned(one)
    learner.hear(told)
    newest.hear(told[1000:])
    assert believed(learner, arm) == believed(newest, arm) > believed(learned(one), arm)


def test_a_family_begins_with_the_laws_that_other_boxes_fitted() -> None:
    one, other = task("12G", "agent", 1), task("12G", "agent", 2)
    theirs = learned(other).models[MTP]
    assert theirs.acceptance is not None
    assert theirs.costs is not None
    laws = theirs.costs.shared
    known = {MTP: Known(replace(theirs.acceptance, spread=0.01), laws.step, laws.prompt)}
    alone, told = learned(one), learned(one, known=known)
    own, taught = alone.models[MTP].acceptance, told.models[MTP].acceptance
    assert own is not None
    assert taught is not None
    texts = len(one.workload.classes)
    off_own = np.abs(own.parameters - theirs.acceptance.parameters)[:texts]
    off_taught = np.abs(taught.parameters - theirs.acceptance.parameters)[:texts]
    assert off_taught.max() < 0.05 < off_own.max()


@pytest.mark.parametrize("n_taken", [0, 1])
def test_an_arm_that_another_box_tries_is_left_to_it_and_the_next_is_tried(n_taken: int) -> None:
    one = task("12G", "agent", 1)

    def night(study: Meeting) -> list[Arm]:
        outcome = tune(
            one.box(), narrow(one), one.workload, one.incumbent, HOUR_S, np.random.default_rng(1),
            study=study,
        )  # fmt: skip
        rows = outcome.evidence.samples
        return [row.arm for row in rows if row.event == "boot" and row.purpose == "explore"]

    first = night(Meeting())[0]
    study = Meeting(taken=frozenset({first.canonical(), first}) if n_taken else frozenset())
    tried = night(study)
    assert (first in tried) is not bool(n_taken)
    assert len(tried) > 1
    assert study.told
    assert all(one.control == study.told[0].control for one in study.told)
    arms = {each.arm for each in study.told}
    assert {arm.canonical() for arm in tried} <= arms


def test_a_night_tells_its_laws_and_its_winner_and_another_begins_with_them() -> None:
    one, other = task("12G", "agent", 1), task("12G", "agent", 2)
    first = Meeting()
    won = tune(
        one.box(), narrow(one), one.workload, one.incumbent, HOUR_S, np.random.default_rng(1), study=first,
    )  # fmt: skip
    assert won.verdict == "promote"
    assert first.winner == won.arm
    texts = len(one.workload.classes)
    assert all(law.is_sound(texts) for law in first.laws.values())
    assert set(first.laws) == {row.arm.family for row in won.evidence.arms}
    second = Meeting(known_of(first.laws.items(), texts), seeds=(first.winner,))
    outcome = tune(
        other.box(), narrow(other), other.workload, other.incumbent, HOUR_S, np.random.default_rng(1), study=second,
    )  # fmt: skip
    boots = [row for row in outcome.evidence.samples if row.event == "boot"]
    assert [row.purpose for row in boots[:2]] == ["incumbent", "seed"]
    assert boots[1].arm == first.winner


@pytest.mark.parametrize(
    "changed",
    [
        {"step": ()},
        {"prompt": (1.0,)},
        {"acceptance": (1.0,)},
        {"step": (float("nan"),) * N_STEP_TERMS},
        {"step": (-1.0,) * N_STEP_TERMS},
        {"prompt": (1e300,) * N_PROMPT_TERMS},
    ],
)
def test_laws_that_cannot_be_any_are_left_out(changed: Mapping[str, Any]) -> None:
    sound = Law((1.0,) * N_STEP_TERMS, (1.0,) * N_PROMPT_TERMS, (0.5,) * n_parameters(2))
    assert sound.is_sound(2)
    broken = replace(sound, **changed)
    step = known_of([(MTP, sound), (MTP, broken)], 2)[MTP].step
    assert step is not None
    assert step.tolist() == [1.0] * N_STEP_TERMS
    assert known_of([(MTP, broken)], 2) == {}


def test_what_boxes_know_together_is_as_sure_as_they_agree() -> None:
    def of(acceptance: float) -> Law:
        return Law((1.0,) * N_STEP_TERMS, (1.0,) * N_PROMPT_TERMS, (acceptance,) * n_parameters(2))

    def spread(*values: float) -> float:
        drafter = known_of([(MTP, of(value)) for value in values], 2)[MTP].acceptance
        assert drafter is not None
        return float(drafter.spread)

    assert spread(1.0, 1.0) < spread(0.8, 1.2) < spread(0.0, 3.0) == 0.3
