"""Boxes that behave as the protocol allows and few do: slow, unreliable, forgetful, with odd names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.box import QUIET, SimulatedBox
from benchmarks.simulator.tasks import Task, task
from tests.support.bench_samples import the_book
from tunerd.profile.arm import (
    Arm,
    Boot,
    Family,
    Policy,
    Preempted,
    Request,
    Sample,
    ServerDied,
    Space,
    arm_from_json,
    plain,
)
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.box import SweepTexts
from tunerd.sweep.learner import Learner
from tunerd.sweep.limits import Limits
from tunerd.sweep.night import Night, Server
from tunerd.sweep.observations import prompt_name, text_of
from tunerd.sweep.search import Search
from tunerd.sweep.space import build_grid
from tunerd.sweep.tuner import Outcome, tune

HOUR_S = 3600.0
OFF = Arm("mainline", "off", 0, 0.0, 1024, "q8_0", 512, 2048, 4)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def two_arms() -> Task:
    """A box on which twice the threads are much faster, and nothing else may change."""
    one = task("12G", "agent", None)
    family = Family((0,), (0.0,), (2048,), ("q8_0",), (512,), (2048,), (4, 8))
    space = Space({("mainline", "off"): family})
    return replace(one, space=space, incumbent=replace(OFF, fit_mib=2048))


def night(one: Task, box: SimulatedBox, hours: float = 1.0, **options: Any) -> Outcome:
    return tune(box, one.space, one.workload, one.incumbent, hours * HOUR_S, rng(), **options)


def faster(one: Task) -> Arm:
    return replace(one.incumbent, threads=8)


def test_two_arms_of_which_one_is_much_faster_end_in_a_promotion() -> None:
    one = two_arms()
    assert night(one, one.box()).arm == faster(one)


def test_one_that_leads_alone_is_challenged_with_and_races_with_nobody() -> None:
    one = two_arms()
    outcome = night(one, one.box())
    starts = [row.purpose for row in outcome.evidence.samples if row.event == "boot"]
    assert "race" not in starts
    assert starts.count("verdict") == 2 * len(outcome.evidence.challenges[-1].pairs)


# Time


class Slower(SimulatedBox):
    """Loads as quickly as any until its pairs begin, then takes ten times as long."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        if "-v1." in request.prompt_id:
            self.card = replace(self.card, load_s=(400.0, 500.0))
        return super().measure(request, arm)


@pytest.mark.parametrize("seconds", [1900, 2300, 2700])
def test_starts_that_become_slow_in_the_middle_of_the_proof_end_it_without_a_verdict(
    seconds: float,
) -> None:
    one = two_arms()
    box = Slower(one.card, noise=QUIET)
    outcome = night(one, box, seconds / HOUR_S)
    assert outcome.verdict == "inconclusive"
    assert outcome.arm is one.incumbent
    assert outcome.evidence.challenges[-1].outcome == "open"


# Names


class Cut(SimulatedBox):
    """Its user wants it back after so many starts."""

    limit = 3

    def check(self) -> None:
        if self.n_restarts >= self.limit:
            raise Preempted


def test_a_night_that_goes_on_with_the_same_generator_gives_processes_and_texts_new_names() -> None:
    one = two_arms()
    cut = night(one, Cut(one.card))
    history: list[Sample] = list(cut.evidence.samples)
    resumed = night(one, one.box(2), history=history)
    assert history
    assert not {row.process for row in history} & {row.process for row in resumed.evidence.samples}
    asked = {row.request.prompt_id for row in history if row.request is not None}
    again = {row.request.prompt_id for row in resumed.evidence.samples if row.request is not None}
    assert not asked & again


def test_classes_that_look_alike_are_told_apart_by_the_names_of_their_prompts() -> None:
    alike = RequestClass(0.5, "code", 0, 1000, 300)
    workload = Workload((alike, replace(alike, weight=0.3), RequestClass(0.2, "chat", 0, 400, 200)))
    for at, one in enumerate(workload.classes):
        request = Request(
            one.kind, prompt_name("a-s0", at), one.cached_tokens, one.new_tokens, one.n_predict
        )
        assert text_of(workload, request, "a-s0") == at
        assert text_of(workload, replace(request, prompt_id=f"{request.prompt_id}r"), "a-s0") == at


def test_a_workload_with_two_classes_alike_is_measured() -> None:
    one = two_arms()
    first = one.workload.classes[0]
    twice = Workload((first, replace(first, weight=0.2), *one.workload.classes[1:]))
    assert night(replace(one, workload=twice), one.box()).arm == faster(one)


def test_an_arm_with_lists_among_its_values_survives_json() -> None:
    arm = replace(OFF, kv=("q8_0", "f16"), extra=frozenset({("x.y", ("a", "b"))}))  # type: ignore[arg-type]
    assert arm_from_json(json.loads(json.dumps(plain(arm)))) == arm


# Failures


class Dying(SimulatedBox):
    """The faster arm dies in one of so many requests of the pairs."""

    every = 7
    n_asked = 0

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        assert self._life is not None
        if "-v1." in request.prompt_id and self._life.arm.threads == 8:
            self.n_asked += 1
            if self.n_asked % self.every == 0:
                self._life = None
                raise ServerDied("crash")
        return super().measure(request, arm)


def test_an_arm_that_dies_in_the_middle_of_a_request_is_not_promoted_however_fast() -> None:
    one = two_arms()
    outcome = night(one, Dying(one.card))
    assert outcome.verdict != "promote"
    challenge = outcome.evidence.challenges[0]
    assert challenge.outcome == "failed"
    assert "crash" in challenge.reasons[0]


class BadStarts(SimulatedBox):
    """So many starts of the faster arm fail in the pairs."""

    n_failing = 1
    is_proving = False

    def restart(self, arm: Arm) -> Boot:
        if self.is_proving and arm.threads == 8 and self.n_failing > 0:
            self.n_failing -= 1
            self._now += 5.0
            return Boot(False, 5.0, "crash")
        return super().restart(arm)

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        self.is_proving |= "-v1." in request.prompt_id
        return super().measure(request, arm)


@pytest.mark.parametrize(("n_failing", "outcome"), [(1, "promote"), (2, "failed")])
def test_one_start_may_fail_for_reasons_of_the_machine_and_not_two(
    n_failing: int, outcome: str
) -> None:
    one = two_arms()
    box = BadStarts(one.card, noise=QUIET)
    box.n_failing = n_failing
    assert night(one, box).evidence.challenges[0].outcome == outcome


class Broken(SimulatedBox):
    """What serves does not come up."""

    def restart(self, arm: Arm) -> Boot:
        if arm.threads == 4:
            self._now += 30.0
            return Boot(False, 30.0, "hang")
        return super().restart(arm)


def test_where_what_serves_does_not_start_the_reason_says_so() -> None:
    one = two_arms()
    outcome = night(one, Broken(one.card))
    assert outcome.verdict == "inconclusive"
    assert outcome.evidence.reasons == ("what serves could not be measured: hang, hang, hang",)


def test_what_serves_without_room_leaves_its_own_kind_of_speculation_to_be_tried() -> None:
    one = task("12G", "agent", None)
    drafts = Family((2, 4), (0.0,), tuple(range(0, 4097, 512)), ("q8_0",), (512,), (2048,), (8,))
    one = replace(
        one, space=Space({("mainline", "mtp"): drafts}),
        incumbent=replace(OFF, spec="mtp", n_max=2, fit_mib=0, threads=8),
    )  # fmt: skip
    outcome = night(one, one.box(), 0.5)
    assert [row.failure for row in outcome.evidence.samples[:3]] == ["oom", "oom", "oom"]
    assert outcome.evidence.arms
    assert outcome.verdict == "inconclusive"


class OddThreads(SimulatedBox):
    """Hangs with one number of threads, of any build and kind."""

    def restart(self, arm: Arm) -> Boot:
        if arm.threads == 6:
            self._now += 30.0
            return Boot(False, 30.0, "hang")
        return super().restart(arm)


def test_one_arm_that_hangs_again_and_again_condemns_no_whole_family() -> None:
    one = two_arms()
    outcome = night(replace(one, incumbent=replace(one.incumbent, threads=6)), OddThreads(one.card))
    assert {row.arm.threads for row in outcome.evidence.arms} == {4, 8}


class Shrinking(SimulatedBox):
    """Its engine fits the context to the card: the faster arm gets less of it."""

    def restart(self, arm: Arm) -> Boot:
        boot = super().restart(arm)
        is_less = boot.n_ctx and arm.threads == 8
        return replace(boot, n_ctx=self.card.context - 4096) if is_less else boot


def test_an_arm_whose_context_is_smaller_is_not_promoted_however_fast() -> None:
    one = two_arms()
    outcome = night(one, Shrinking(one.card, noise=QUIET))
    assert outcome.verdict != "promote"
    assert not outcome.evidence.challenges
    context = one.card.context
    why = f"its context would be {context - 4096} instead of {context}"
    assert {row.arm.threads: row.reason for row in outcome.evidence.arms} == {4: "", 8: why}


def test_the_context_that_counts_is_what_serves_gets() -> None:
    one = two_arms()
    grid = build_grid(one.space, one.incumbent, Policy())
    learner = Learner(grid, one.workload, 4096)
    it = Night(Shrinking(one.card, noise=QUIET), one.workload, learner, HOUR_S, rng(), None)
    limits = Limits(learner, grid, Policy(), one.incumbent)
    search = Search(it, grid, limits, Policy(), one.incumbent)
    search.start(one.incumbent, "incumbent")
    server = search.start(faster(one), "explore")
    assert learner.context == one.card.context
    assert search.fill(server) is not None, "filled as far as its own context goes"
    rows = learner.observations.memory_of(faster(one).family, learner.context)
    assert max(row.share for row in rows if row.arm == faster(one)) > 0.95


class Cacheless(SimulatedBox):
    """Reads every prefix anew, and was disturbed at it so often."""

    n_void = 0

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        assert self._life is not None
        self._life.checkpoints = ()
        return {**super().measure(request, arm), "n_void": self.n_void}


@pytest.mark.parametrize("n_void", [0, 1])
def test_a_cache_is_called_broken_for_what_was_read_in_peace_alone(n_void: int) -> None:
    one = two_arms()
    box = Cacheless(one.card, noise=QUIET)
    box.n_void = n_void
    learner = Learner(build_grid(one.space, one.incumbent, Policy()), one.workload, 131_072)
    it = Night(box, one.workload, learner, HOUR_S, rng(), None)
    Server(it, one.incumbent, "explore").block(exact=True)
    assert any(each.cached_tokens for each in one.workload.classes)
    assert it.broken_caches == (set() if n_void else {("mainline", False)})


# Tools


class Tools(SimulatedBox):
    """Calls break at a rate for all, and at another for the faster arm."""

    usual = 0.0
    faster = 0.0

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        answer = dict(super().measure(request, arm))
        if "tool_ok" in answer:
            assert self._life is not None
            rate = self.faster if self._life.arm.threads == 8 else self.usual
            answer["tool_ok"] = bool(self._rng.random() >= rate)
        return answer


def with_tools(usual: float, faster: float) -> Outcome:
    one = two_arms()
    chat = Workload((RequestClass(1.0, "chat", 0, 500, 200),))
    box = Tools(one.card)
    box.usual, box.faster = usual, faster
    return night(replace(one, workload=chat), box)


def test_an_arm_that_breaks_tool_calls_is_not_promoted_though_others_like_it_do_not() -> None:
    outcome = with_tools(0.0, 0.2)
    assert outcome.verdict != "promote"
    assert any("tool calls broke" in one.reason for one in outcome.evidence.left_out)


def test_a_model_that_breaks_some_calls_anyway_keeps_no_faster_arm_out() -> None:
    assert with_tools(0.1, 0.1).verdict == "promote"


def test_tool_calls_are_asked_in_a_way_that_a_real_server_offers_tools() -> None:
    outcome = with_tools(0.0, 0.0)
    calls = [row.request for row in outcome.evidence.samples if row.purpose == "tool"]
    assert len(calls) >= Policy().tool_calls
    texts = SweepTexts(the_book(), seed=1)
    assert calls[0] is not None
    composed, _ = texts.compose(calls[0], 0)
    assert composed[0].has_tools


# Caches


class Forgetful(SimulatedBox):
    """One engine reads a shared prefix anew with each request."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        assert self._life is not None
        if self._life.arm.engine == "ik":
            self._life.checkpoints = ()
        return super().measure(request, arm)


def test_an_engine_without_a_cache_of_prompts_leaves_the_others_their_warm_ones() -> None:
    one = two_arms()
    families = {("ik", "off"): one.space.families["mainline", "off"], **one.space.families}
    outcome = night(replace(one, space=Space(families)), Forgetful(one.card), 2.0)
    cold: dict[str, list[bool]] = {"ik": [], "mainline": []}
    for row in outcome.evidence.samples:
        if row.purpose == "block" and row.answer is not None and row.request is not None:
            cold[row.arm.engine].append(row.answer["prompt_n"] > row.request.new_tokens + 64)
    assert all(cold["ik"])
    assert cold["mainline"]
    assert not any(cold["mainline"])
    assert outcome.arm == faster(one)


class OwnSlots(SimulatedBox):
    """Requests at once are answered by slots that share nothing."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        if request.concurrency == 1:
            return super().measure(request, arm)
        assert self._life is not None
        held, self._life.checkpoints = self._life.checkpoints, ()
        try:
            return super().measure(request, arm)
        finally:
            self._life.checkpoints = held


def test_slots_that_share_nothing_do_not_cost_single_requests_their_warm_prefix() -> None:
    one = two_arms()
    crowd = RequestClass(0.5, "chat", 2000, 500, 200, concurrency=4)
    workload = Workload((*one.workload.classes, crowd))
    outcome = night(replace(one, workload=workload), OwnSlots(one.card))
    alone = [
        row.answer["prompt_n"] <= row.request.new_tokens + 64
        for row in outcome.evidence.samples
        if row.purpose == "block" and row.answer and row.request and row.request.concurrency == 1
    ]
    assert alone
    assert all(alone)
    crowded = [
        row.request.prompt_id.endswith("r")
        for row in outcome.evidence.samples
        if row.request is not None and row.request.concurrency > 1
    ]
    assert sum(crowded) == 1


class FreePrefix(SimulatedBox):
    """Reads what is shared in no time, so that no law fits both long prompts and short ones."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        answer = dict(super().measure(request, arm))
        if answer["cache_n"] < request.cached_tokens / 2:
            answer |= {"prompt_ms": 5.0, "wall_ms": 5.0 + answer["predicted_ms"]}
        return answer


def test_where_a_law_fits_badly_another_variant_is_not_taken_for_worse() -> None:
    one = two_arms()
    outcome = night(one, FreePrefix(one.card, noise=QUIET), 0.5)
    predicted = {row.arm.threads: row.predicted_s for row in outcome.evidence.arms}
    assert predicted[8]
    assert predicted[4]
    assert predicted[8] < 0.95 * predicted[4]
    assert outcome.arm == faster(one)


# Pins


def grid(pinned: Mapping[str, Any], **changed: Any) -> Any:
    family = Family((1, 2), (0.0,), (0,), ("f16",), (512,), (2048,), (4,), **changed)
    space = Space({("a", "off"): family, ("a", "mtp"): family}, pinned)
    return build_grid(space, replace(OFF, engine="a"), Policy())


def test_a_pin_of_no_drafts_leaves_kinds_that_draft_out() -> None:
    found = grid({"speculation.n_max": 0})
    assert list(found.families) == [("a", "off")]
    assert any("n_max is pinned to 0" in one.reason for one in found.left_out)


def test_alternatives_of_other_keys_that_break_a_pin_are_left_out() -> None:
    extra = (frozenset({("x.y", 1)}), frozenset({("x.y", 2)}))
    found = grid({"x.y": 2}, extra=extra).families["a", "off"]
    assert found.extra == (extra[1],)
    assert found.home.extra == extra[1]
