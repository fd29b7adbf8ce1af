"""Whole nights on simulated boxes: a sample; `benchmarks/` has the many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.box import SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, best, task
from tunerd.core.sweep import Arm, Boot, Preempted, Request, Sample, Space, tune

HOUR_S = 3600.0


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def narrow(one: Task) -> Space:
    """The space of a box without cache types and threads, which is searched in a second or two."""
    return replace(one.space, pinned={"kv": "q8_0", "threads": 8})


class Wanted(SimulatedBox):
    """A box that its user wants back after so many starts."""

    def check(self) -> None:
        if self.n_restarts >= 6:
            raise Preempted


class Recording(SimulatedBox):
    """Remembers what it was started with."""

    started: list[Arm]

    def restart(self, arm: Arm) -> Boot:
        self.__dict__.setdefault("started", []).append(arm)
        return super().restart(arm)


class Wordy(SimulatedBox):
    """Its shortest text is longer than what is asked for."""

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        return super().measure(replace(request, new_tokens=request.new_tokens + 900), arm)


def test_a_night_finds_most_of_what_there_is_and_serves_nothing_that_would_not_run() -> None:
    one = task("12G", "agent", 1)
    box = one.box()
    outcome = tune(box, narrow(one), one.workload, one.incumbent, 2 * HOUR_S, rng())
    truth = Truth(one.card)
    _, best_ms = best(one)
    arm = outcome.arm
    assert isinstance(arm, Arm)
    assert outcome.verdict == "promote"
    assert truth.turn_ms(one.incumbent, one.workload) > 1.2 * best_ms
    assert truth.turn_ms(arm, one.workload) < 1.05 * best_ms
    assert truth.headroom_mib(arm) > 0
    assert box.now() <= 2 * HOUR_S


def test_with_the_best_already_serving_nothing_is_promoted() -> None:
    one = task("12G", "agent", 2)
    incumbent, _ = best(one)
    incumbent = replace(incumbent, fit_mib=incumbent.fit_mib + 256)
    outcome = tune(one.box(), narrow(one), one.workload, incumbent, HOUR_S, rng())
    assert outcome.verdict in {"keep", "inconclusive"}
    assert outcome.arm == incumbent


def test_a_user_who_wants_the_machine_ends_the_night_with_its_evidence() -> None:
    one = task("12G", "agent", 1)
    seen: list[Sample] = []
    outcome = tune(
        Wanted(one.card), one.space, one.workload, one.incumbent, HOUR_S, rng(),
        on_sample=seen.append,
    )  # fmt: skip
    assert outcome.verdict == "inconclusive"
    assert outcome.evidence.samples == tuple(seen)
    assert len([sample for sample in seen if sample.event == "boot"]) == 6


def test_a_pin_of_the_user_is_never_overridden() -> None:
    one = task("12G", "agent", 1)
    space = replace(one.space, pinned={"speculation.n_max": 3, "engine": "mainline"})
    box = Recording(one.card)
    tune(box, space, one.workload, one.incumbent, 0.5 * HOUR_S, rng())
    started = box.started
    assert {arm.engine for arm in started} == {"mainline"}
    assert {arm.n_max for arm in started if arm.drafts} == {3}


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    one = task("12G", "agent", 1)
    with pytest.raises(ValueError, match="strategy"):
        tune(one.box(), one.space, one.workload, one.incumbent, 60.0, rng(), strategy="luck")


def test_prompts_that_are_longer_than_asked_for_are_predicted_as_long_as_they_are() -> None:
    one = task("12G", "agent", 1)
    box = Wordy(one.card)
    outcome = tune(box, narrow(one), one.workload, one.incumbent, HOUR_S / 3, rng())
    pairs = [
        (arm.predicted_s, arm.measured_s)
        for arm in outcome.evidence.arms
        if arm.predicted_s and arm.measured_s and arm.n_processes > 1
    ]
    assert pairs
    assert all(abs(predicted / measured - 1) < 0.12 for predicted, measured in pairs), pairs


def test_a_night_that_cannot_prove_anything_any_more_says_so() -> None:
    """Time is left, but a winner found in it could not be proved."""
    one = task("12G", "agent", 2)
    incumbent, _ = best(one)
    incumbent = replace(incumbent, fit_mib=incumbent.fit_mib + 256)
    outcome = tune(one.box(), narrow(one), one.workload, incumbent, 0.2 * HOUR_S, rng())
    assert outcome.verdict == "inconclusive"
    assert outcome.evidence.elapsed_s < 0.7 * 0.2 * HOUR_S
    assert "would be needed to prove a winner" in outcome.evidence.reasons[0]
