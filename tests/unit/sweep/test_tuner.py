"""Whole nights on simulated boxes: a sample; `benchmarks/` has the many."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.box import QUIET, SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, best, task
from tests.support.made_sweep import narrow
from tunerd.measure.pairs import LEAST_NAMED, pairs_needed
from tunerd.profile.arm import Arm, Policy, Preempted, Request, Sample, Space
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.learner import Learner
from tunerd.sweep.limits import Limits, worse
from tunerd.sweep.night import Night, Server
from tunerd.sweep.space import build_grid
from tunerd.sweep.tuner import Outcome, least_proved, most_of, planned_pairs, reserved_s

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def night() -> tuple[Task, SimulatedBox, Outcome]:
    """An hour on a box whose texts are 1.3 % longer than they are asked to be."""
    one = task("12G", "agent", 1)
    box = one.box(3)
    return one, box, narrow(one).night(1.0, box=box)


def test_a_night_finds_most_of_what_there_is_and_serves_nothing_that_would_not_run(
    night: tuple[Task, SimulatedBox, Outcome],
) -> None:
    one, box, outcome = night
    truth = Truth(one.card)
    _, best_ms = best(one)
    assert outcome.verdict == "promote"
    assert truth.turn_ms(one.incumbent, one.workload) > 1.2 * best_ms
    assert truth.turn_ms(outcome.arm, one.workload) < 1.05 * best_ms
    assert truth.headroom_mib(outcome.arm) > 0
    assert box.now() <= HOUR_S


def test_a_first_look_has_the_drafters_and_what_leads_without_one_alone(
    night: tuple[Task, SimulatedBox, Outcome],
) -> None:
    """What serves drafts as the other build does, and lookups come where its engine without drafts is near what leads."""
    _, _, outcome = night
    starts = [one for one in outcome.evidence.samples if one.event == "boot"]
    first = list(takewhile(lambda one: one.purpose != "explore", starts))
    looks = {one.arm.family for one in first if one.purpose == "probe"}
    assert looks == {("ik", "mtp"), (outcome.arm.engine, "off")}


def test_a_winner_was_seen_with_its_context_full_however_the_length_of_texts_is_misjudged(
    night: tuple[Task, SimulatedBox, Outcome],
) -> None:
    """With its margin, or a smaller one."""
    one, _, outcome = night
    wanted = outcome.arm.with_draft(0, 0)
    full = [
        row.answer["prompt_n"]
        for row in outcome.evidence.samples
        if row.purpose == "fill"
        and row.answer
        and row.arm.fit_mib <= wanted.fit_mib
        and row.arm.with_draft(0, 0).with_margin(wanted.fit_mib) == wanted
    ]
    assert max(full) > 0.98 * one.card.context


def test_no_class_is_measured_with_more_of_its_prompt_to_read_than_in_service() -> None:
    """Prefixes of several lengths, and models that go back to a checkpoint or begin anew."""
    outcome = narrow(task("16G", "chat", 1)).night(0.6)
    classes = [row for row in outcome.evidence.samples if row.purpose == "block" and row.answer]
    assert {row.arm.engine for row in classes} == {"mainline", "ik"}
    for row in classes:
        assert row.request is not None
        assert row.answer is not None
        assert row.answer["prompt_n"] <= row.request.new_tokens + 64, row


def test_a_long_prompt_that_was_cached_to_measure_its_decoding_counts_with_what_reading_it_takes() -> (
    None
):
    """From the prefixes that its process read; without, an hour of an agent's long prompts knew no start of them whole."""
    one = task("12G", "agent", 1)
    long = tuple(RequestClass(1, "code", 2000, new, 200) for new in (9000, 14000))
    workload, box = Workload(long), one.box(noise=QUIET)
    learner = Learner(workload, one.card.context)
    a_night = Night(box, workload, learner, HOUR_S, np.random.default_rng(1), None)
    server = Server(a_night, one.incumbent, "probe")
    server.warm_up()
    server.block()

    asked = [row.request.new_tokens for row in a_night.samples if row.request and row.block]
    assert max(asked) < 1000
    learner.refresh()
    (seen,) = learner.observed
    assert math.exp(seen.log_turn) == pytest.approx(
        box.truth.turn_ms(one.incumbent, workload), rel=0.03
    )


class Unmeasured(SimulatedBox):
    """Shows no free memory while it answers a prompt that fills the context."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        answer = dict(super().measure(request, arm))
        if request.new_tokens > self.card.context / 2:
            del answer["vram_free_min_mib"]
        return answer


def test_an_arm_is_no_winner_where_nobody_saw_what_was_free_with_its_context_full() -> None:
    one = task("12G", "agent", 1)
    outcome = narrow(one).night(0.5, box=Unmeasured(one.card))
    assert outcome.verdict != "promote"
    reasons = {left.reason for left in outcome.evidence.left_out}
    assert "its context could not be filled with enough room to spare" in reasons


def test_nothing_outside_the_space_is_ever_started() -> None:
    one = task("12G", "agent", 1)
    families = {
        (engine, spec): replace(family, n_max=(3,))
        for (engine, spec), family in one.space.families.items()
        if engine == "mainline"
    }
    outcome = replace(one, space=Space(families)).night(0.5)
    started = [row.arm for row in outcome.evidence.samples if row.event == "boot"]
    assert {arm.engine for arm in started} == {"mainline"}
    assert {arm.n_max for arm in started if arm.drafts} == {3}


@pytest.mark.parametrize(
    ("card", "mix", "budget_s"), [("16G", "chat", 1750.0), ("24G", "deep", HOUR_S)]
)
def test_a_budget_that_a_proof_would_just_fill_is_searched_all_the_same(
    card: str, mix: str, budget_s: float
) -> None:
    outcome = task(card, mix, 1).night(budget_s / HOUR_S)
    assert outcome.evidence.restarts > 3


def test_no_time_is_kept_for_a_proof_before_there_is_anything_to_prove() -> None:
    one = task("12G", "agent", 2)
    incumbent, _ = best(one)
    incumbent = replace(incumbent, fit_mib=incumbent.fit_mib + 256)
    outcome = replace(narrow(one), incumbent=incumbent).night(0.2)
    assert outcome.verdict == "inconclusive"
    assert outcome.evidence.elapsed_s > 0.8 * 0.2 * HOUR_S
    assert "to prove that" in outcome.evidence.reasons[0]


def test_a_slower_prompt_is_no_veto_where_it_is_little_of_the_turn() -> None:
    turns = [20_000.0, 8_000.0], [15_000.0, 6_000.0]
    little, much = ([500.0, 300.0], [1_100.0, 300.0]), ([4_000.0, 300.0], [8_800.0, 300.0])
    assert worse(turns, little, deepest=0, policy=Policy()) is None
    told = worse(turns, much, deepest=0, policy=Policy())
    assert told == "the prompt of the deepest class gets 120% slower, and only 50% is allowed"


def test_a_prompt_that_was_seen_to_be_slow_rules_its_neighbours_out_as_the_gate_would(
    night: tuple[Task, SimulatedBox, Outcome],
) -> None:
    one, _, outcome = night
    deepest = one.workload.classes[one.workload.deepest]
    row = next(
        row
        for row in outcome.evidence.samples
        if row.purpose == "block" and row.answer and row.arm.family == ("ik", "mtp")
        and row.request and row.request.new_tokens == deepest.new_tokens
    )  # fmt: skip
    assert row.answer is not None
    grid = build_grid(narrow(one).space, one.incumbent, Policy())
    learner = Learner(one.workload, 131_072)
    learner.add(outcome.evidence.samples)
    learner.refresh()
    neighbour = row.arm.with_draft(row.arm.n_max - 1, row.arm.p_min)

    def told() -> str:
        return Limits(learner, grid, Policy(), one.incumbent).worsens(neighbour) or ""

    assert "prompt" not in told()
    slow = {**row.answer, "prompt_ms": 90_000.0}
    learner.add([replace(row, process=f"slow/{n}", answer=slow) for n in range(3)])
    assert "the prompt of the deepest class gets" in told()


# What holds of every night, however it goes: on simulated boxes with fixed generators.


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
    outcome = one.night(0.6)
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
    outcome = one.night(1.0, box=box, on_sample=seen.append)
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
    cut = one.night(1.0, box=box)
    history = [json.loads(json.dumps(sample.to_json())) for sample in cut.evidence.samples]
    resumed = one.night(0.6, box=one.box(3), history=history)
    before = truth.turn_ms(cut.evidence.path[-1].arm, one.workload)
    after = truth.turn_ms(resumed.arm, one.workload)
    assert after <= 1.01 * before  # a percent is less than two starts of one arm differ by
    probed = {sample.arm for sample in cut.evidence.samples if sample.purpose == "probe"}
    again = [sample.arm for sample in resumed.evidence.samples if sample.purpose == "probe"]
    assert probed
    assert not probed & set(again)


def test_what_was_not_tried_yet_takes_no_longer_in_a_night_that_goes_on() -> None:
    """Speeds were forgotten: three minutes after three that were cut ended at once, with "time ran out"."""
    one = small()
    engine, spec = next(key for key in one.space.families if key[1] != one.incumbent.spec)
    untried = replace(one.incumbent, engine=engine, spec=spec, n_max=3)

    def a_night() -> Night:
        learner = Learner(one.workload, one.card.context)
        return Night(one.box(3), one.workload, learner, HOUR_S, np.random.default_rng(1), None)

    cut, again = a_night(), a_night()
    server = Server(cut, one.incumbent, "incumbent")
    server.warm_up()
    server.block()
    again.recall(cut.samples)
    cut.learner.refresh()
    again.learner.refresh()

    assert again.process_s(untried) == pytest.approx(cut.process_s(untried))


def test_a_kind_whose_first_process_spilled_is_tried_with_more_margin() -> None:
    one = small("16G", "chat", 1)
    ik = one.card.engines["ik"]
    hungry = replace(ik, specs=ik.specs | {"mtp": replace(ik.specs["mtp"], unseen_mib=2000)})
    card = replace(one.card, engines={"ik": hungry})
    space = replace(one.space, families={("ik", "mtp"): one.space.families["ik", "mtp"]})
    incumbent = replace(one.incumbent, engine="ik", spec="off", fit_mib=1536)
    outcome = replace(one, space=space, incumbent=incumbent).night(0.6, box=SimulatedBox(card))
    starts = [one for one in outcome.evidence.samples if one.event == "boot"]
    margins = [one.arm.fit_mib for one in starts if one.purpose == "probe"]
    walls = overflowed(outcome.evidence.samples)
    assert starts[1].arm.with_draft(starts[1].arm.n_max, 0.0) in walls
    assert margins == sorted(margins)
    assert margins[-1] > margins[0]
    assert any(report.arm.spec == "mtp" for report in outcome.evidence.arms)


def test_a_proof_may_take_some_pairs_more_where_they_are_little_of_the_night() -> None:
    assert planned_pairs(LEAST_NAMED, 300.0, 1 * 3600.0) == LEAST_NAMED + 1
    assert planned_pairs(LEAST_NAMED, 300.0, 2 * 3600.0) == LEAST_NAMED + 1
    assert planned_pairs(LEAST_NAMED, 300.0, 24 * 3600.0) == LEAST_NAMED + 3
    assert planned_pairs(8, 300.0, 1 * 3600.0) == 11


def test_the_least_time_of_a_proof_is_kept_unless_it_is_nearly_all_there_is() -> None:
    assert reserved_s(2900.0, 2160.0, 3600.0) == 2900.0
    assert reserved_s(1000.0, 2160.0, 3600.0) == 2160.0
    assert reserved_s(3400.0, 2160.0, 3600.0) == 2160.0


def night_of_slow_fills(card: str, workload: str, hours: float, depth_ms: float) -> Outcome:
    """One in which each token of a prompt takes so much longer for each thousand before it."""
    one = task(card, workload, 1)
    engines = {
        name: replace(engine, prompt_depth_ms=depth_ms) for name, engine in one.card.engines.items()
    }
    return narrow(one).night(hours, box=SimulatedBox(replace(one.card, engines=engines)))


def finalists(outcome: Outcome) -> list[Sample]:
    rows = outcome.evidence.samples
    return [one for one in rows if (one.event, one.purpose) == ("boot", "finalist")]


def test_a_search_ends_where_no_start_promises_what_it_takes() -> None:
    """Two hours had 89 starts, 42 of them of leaders that were measured before.

    Nor does it go on from a winner to what no number of pairs would prove.
    """
    evidence = narrow(task("16G", "chat", 1)).night(2.0).evidence
    assert evidence.restarts < 50
    assert "nothing else is more than" in evidence.reasons[-1]
    assert evidence.samples[-1].pair is not None


def test_starts_that_take_long_have_to_promise_more() -> None:
    """Of deep prompts, 165 s each: there were 53, and the night ended as near the best."""
    assert narrow(task("24G", "deep", 2)).night(4.0).evidence.restarts < 40


def test_a_gain_that_pairs_do_not_prove_in_their_most_is_no_challenge_after_a_winner() -> None:
    least = least_proved(0.01, 40, 0.05 / 8)
    assert pairs_needed(least, 0.045, margin=0.01, alpha=0.05 / 8) <= 40
    assert pairs_needed(least - 0.001, 0.045, margin=0.01, alpha=0.05 / 8) > 40
    assert least_proved(0.01, 1, 0.05) == math.inf


def test_a_context_that_takes_ten_minutes_to_fill_leaves_two_fifths_of_the_night_for_the_search() -> (
    None
):
    outcome = night_of_slow_fills("16G", "chat", 0.8, 0.06)
    samples = outcome.evidence.samples
    (finalist,) = finalists(outcome)
    (fill,) = (one for one in samples if (one.event, one.purpose) == ("request", "fill"))
    assert fill.seconds > 600.0
    assert finalist.at_s > 0.4 * 0.8 * HOUR_S
    assert outcome.verdict == "promote"


@pytest.mark.parametrize("n_arms", [1, 40])
def test_what_may_be_missed_bounds_the_best_of_all_arms_and_not_each_of_them(n_arms: int) -> None:
    rng = np.random.default_rng(1)
    means, sds = rng.normal(-0.01, 0.01, n_arms), rng.uniform(0.005, 0.02, n_arms)
    best = rng.normal(means, sds, (20_000, n_arms)).max(axis=1)
    assert np.mean(best < most_of(means, sds)) == pytest.approx(0.95, abs=0.006)
