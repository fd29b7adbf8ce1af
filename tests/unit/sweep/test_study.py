"""What boxes of one class tell each other, and what a box makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from benchmarks.simulator.tasks import Task, task
from tunerd.profile.arm import Arm, Policy, Space
from tunerd.sweep.learner import Learner
from tunerd.sweep.night import Night, Server
from tunerd.sweep.space import build_grid
from tunerd.sweep.study import Known, Told
from tunerd.sweep.tuner import tune

HOUR_S = 3600.0
MTP = ("mainline", "mtp")


@dataclass
class Meeting:
    """A study in memory: what others told is given, what this box does is kept."""

    known: Mapping[tuple[str, str], Known] = field(default_factory=dict)
    theirs: list[Told] = field(default_factory=list)
    taken: frozenset[Arm] = frozenset()
    claimed: list[Arm] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)

    def news(self) -> Sequence[Told]:
        news, self.theirs = self.theirs, []
        return news

    def claim(self, arm: Arm) -> bool:
        self.claimed.append(arm)
        return arm not in self.taken

    def tell(self, told: Told) -> None:
        self.told.append(told)


def narrow(one: Task) -> Space:
    return replace(one.space, pinned={"kv": "q8_0", "threads": 8})


def learned(one: Task, *, known: Mapping[tuple[str, str], Known] | None = None) -> Learner:
    """What a box knows that has measured what serves, and nothing else."""
    grid = build_grid(narrow(one), one.incumbent, Policy())
    learner = Learner(grid, one.workload, 131_072, known)
    it = Night(one.box(), one.workload, learner, HOUR_S, np.random.default_rng(1), None)
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


def test_what_was_told_counts_as_no_process_of_this_box() -> None:
    one = task("12G", "agent", 1)
    learner = learned(one)
    arm = replace(one.incumbent, n_max=8)
    learner.hear([Told(arm, one.incumbent, -0.2, "two")])
    assert learner.n_processes(arm) == 0
    assert arm.canonical() not in learner.measured()


def test_a_family_begins_with_the_laws_that_other_boxes_fitted() -> None:
    one, other = task("12G", "agent", 1), task("12G", "agent", 2)
    theirs = learned(other).models[MTP]
    assert theirs.acceptance is not None
    assert theirs.costs is not None
    known = {
        MTP: Known(replace(theirs.acceptance, spread=0.01), theirs.costs.shared, theirs.memory)
    }
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
