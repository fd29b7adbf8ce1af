"""What holds of every night, however it goes: on simulated boxes with fixed generators."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.box import SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, task
from tunerd.profile.arm import Arm, Preempted, Sample
from tunerd.sweep.tuner import Outcome, tune

HOUR_S = 3600.0


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def small(card: str = "12G", workload: str = "agent", seed: int = 1) -> Task:
    """A box with a space that is searched in less than a second."""
    one = task(card, workload, seed)
    family = replace(
        next(iter(one.space.families.values())),
        n_max=(1, 2, 3, 4, 6, 8), p_min=(0.0, 0.5, 0.75), kv=("q8_0",), threads=(8,),
        ubatch=(512, 1024, 2048),
    )  # fmt: skip
    families = {key: replace(family) for key in one.space.families if key[1] in {"off", "mtp"}}
    return replace(one, space=replace(one.space, families=families))


class Counting(SimulatedBox):
    """A box whose user wants it back before a certain call."""

    calls = 0
    limit = 10**9

    def check(self) -> None:
        if self.calls == self.limit:
            raise Preempted
        self.calls += 1


def night(
    one: Task, box: SimulatedBox | None = None, hours: float = 1.0, **options: Any
) -> Outcome:
    return tune(
        box or one.box(), one.space, one.workload, one.incumbent, hours * HOUR_S, rng(), **options
    )


def overflowed(samples: tuple[Sample, ...]) -> dict[Arm, float]:
    """When each arm was first seen to run out of memory or to spill, with n_max as it was started."""
    found: dict[Arm, float] = {}
    for sample in samples:
        reading = sample.reading
        if sample.failure == "oom" or (reading is not None and reading.has_spilled):
            found.setdefault(sample.arm.with_draft(sample.arm.n_max, 0.0), sample.at_s)
    return found


@pytest.mark.parametrize(
    ("card", "workload", "seed"), [("12G", "agent", 2), ("16G", "chat", 3), ("24G", "deep", 2)]
)
def test_what_was_seen_to_run_out_of_memory_is_never_recommended(
    card: str, workload: str, seed: int
) -> None:
    one = small(card, workload, seed)
    outcome = night(one, hours=0.6)
    walls = overflowed(outcome.evidence.samples)
    for point in outcome.evidence.path:
        at = walls.get(point.arm.with_draft(point.arm.n_max, 0.0))
        assert at is None or at > point.seconds
    assert Truth(one.card).headroom_mib(outcome.arm) > 0


@pytest.mark.parametrize("call", [0, 1, 2, 5, 13, 34, 89])
def test_a_user_may_take_the_machine_at_any_call_and_the_evidence_stays(call: int) -> None:
    one = small()
    box = Counting(one.card)
    box.limit = call
    seen: list[Sample] = []
    outcome = night(one, box, on_sample=seen.append)
    assert outcome.verdict == "inconclusive"
    assert outcome.arm is one.incumbent
    assert outcome.evidence.samples == tuple(seen)
    assert len(seen) <= call
    assert outcome.evidence.path[0].arm == one.incumbent
    json.dumps(outcome.evidence.to_json())


def test_a_night_that_was_cut_goes_on_from_its_samples() -> None:
    one = small()
    truth = Truth(one.card)
    box = Counting(one.card)
    box.limit = 90
    cut = night(one, box)
    history = [json.loads(json.dumps(sample.to_json())) for sample in cut.evidence.samples]
    resumed = night(one, one.box(3), hours=0.6, history=history)
    before = truth.turn_ms(cut.evidence.path[-1].arm, one.workload)
    after = truth.turn_ms(resumed.arm, one.workload)
    assert after <= 1.01 * before  # a percent is less than two starts of one arm differ by
    assert resumed.evidence.n_history == len(history)
    probed = {sample.arm for sample in cut.evidence.samples if sample.purpose == "probe"}
    again = [sample.arm for sample in resumed.evidence.samples if sample.purpose == "probe"]
    assert probed
    assert not probed & set(again)


def test_the_path_tells_what_would_have_been_recommended_when() -> None:
    one = small()
    outcome = night(one)
    path = outcome.evidence.path
    assert path[0].arm == one.incumbent
    assert [point.seconds for point in path] == sorted(point.seconds for point in path)
    assert [point.restarts for point in path] == sorted(point.restarts for point in path)
    assert all(first.arm != second.arm for first, second in pairwise(path))
    assert path[-1].restarts <= outcome.evidence.restarts
    assert path[-1].arm == outcome.arm


def test_a_kind_whose_first_process_spilled_is_tried_with_more_margin() -> None:
    one = small("16G", "chat", 1)
    ik = one.card.engines["ik"]
    hungry = replace(ik, specs=ik.specs | {"mtp": replace(ik.specs["mtp"], unseen_mib=2000)})
    card = replace(one.card, engines={"ik": hungry})
    space = replace(one.space, families={("ik", "mtp"): one.space.families["ik", "mtp"]})
    incumbent = replace(one.incumbent, engine="ik", spec="off", fit_mib=1536)
    box = SimulatedBox(card)
    outcome = tune(box, space, one.workload, incumbent, 0.6 * HOUR_S, rng())
    starts = [one for one in outcome.evidence.samples if one.event == "boot"]
    margins = [one.arm.fit_mib for one in starts if one.purpose == "probe"]
    walls = overflowed(outcome.evidence.samples)
    assert starts[1].arm.with_draft(starts[1].arm.n_max, 0.0) in walls
    assert margins == sorted(margins)
    assert margins[-1] > margins[0]
    assert any(report.arm.spec == "mtp" for report in outcome.evidence.arms)


def test_a_night_that_is_too_short_for_anything_keeps_what_serves() -> None:
    one = small()
    outcome = night(one, hours=0.01)
    assert outcome.verdict == "inconclusive"
    assert outcome.arm is one.incumbent
