"""Single verification steps: read from a stream, kept small, and what a law makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator.tasks import task
from tests.support.made_sweep import a_sample
from tests.unit.sweep.test_challenge import WORKLOAD
from tunerd.measure.answer import read_answer
from tunerd.profile.arm import Arm, Request, Sample, as_kept, read
from tunerd.profile.workload import RequestClass
from tunerd.sweep.laws import StepRow, StepTable, fit_steps, spread_drafted
from tunerd.sweep.learner import Learner
from tunerd.sweep.night import Night
from tunerd.sweep.observations import Answer, Observations, decode_ms, pool

STEPS = [(20.0, 0, 0), (31.0, 2, 2), (29.0, 2, 0), (25.0, 1, 1)]
WHOLE = {"predicted_n": 8, "predicted_ms": 105.0, "draft_n": 5, "draft_n_accepted": 3}
MTP = Arm("it", "mtp", 2, 0.5, 1024, "q8_0", 512, 2048, 8)


def stream(*sums: tuple[float, int, int], n_predicted: int, **last: Any) -> list[Any]:
    """Events with the sums so far, as servers send them with every token."""
    keys = ("predicted_ms", "draft_n", "draft_n_accepted")
    events: list[dict[str, Any]] = [
        {"choices": [{"text": "x"}], "timings": dict(zip(keys, one, strict=True))} for one in sums
    ]
    events[-1]["timings"]["predicted_n"] = n_predicted
    events[-1]["choices"][0]["finish_reason"] = "length"
    return [(float(at), event | last) for at, event in enumerate(events)]


def test_steps_are_what_the_sums_gain_from_one_event_to_the_next() -> None:
    told = stream((5.0, 0, 0), (25.0, 3, 3), (25.0, 3, 3), (35.0, 5, 3), n_predicted=6)
    assert read_answer(told, is_whole=True).steps == ((20.0, 3, 3), (10.0, 2, 0))


def test_an_answer_that_ends_within_a_draft_has_its_steps() -> None:
    """A server counts a draft whole, though the answer stopped in the middle of it."""
    told = stream((5.0, 0, 0), (25.0, 8, 1), (45.0, 16, 8), n_predicted=4)
    assert read_answer(told, is_whole=True).steps == ((20.0, 8, 1), (20.0, 8, 7))
    missing = stream((5.0, 0, 0), (25.0, 8, 7), (45.0, 16, 8), n_predicted=4)
    assert read_answer(missing, is_whole=True).steps is None


@pytest.mark.parametrize(
    "told",
    [
        stream((5.0, 0, 0), n_predicted=1),
        stream((5.0, 0, 0), (25.0, 3, 4), n_predicted=6),
        stream((5.0, 4, 0), (25.0, 3, 0), n_predicted=2),
        stream((5.0, 0, 0), (float("inf"), 1, 0), n_predicted=2),
        stream(*((float(at), 0, 0) for at in range(1, 60)), n_predicted=90),
        stream((5.0, 0, 0), (25.0, 10**400, 0), n_predicted=2),
        stream((5.0, 0, 0), (25.0, 2, 1), (25.001, 2, 1), (45.0, 4, 1), (65.0, 6, 1), n_predicted=5),
    ],
    ids=["no step", "more accepted than drafted", "less than before", "endless", "steps that came together",
         "more drafted than a float can hold", "a step of no time"],
)  # fmt: skip
def test_steps_that_cannot_be_are_no_steps(told: list[Any]) -> None:
    assert read_answer(told, is_whole=True).steps is None


def test_an_answer_is_kept_with_its_steps_added_up_and_read_again_the_same() -> None:
    answer = {**WHOLE, "steps": STEPS}
    kept = as_kept(answer)
    assert "steps" not in kept
    assert read(kept) == read(answer)
    seen = read(answer).steps
    assert seen is not None
    assert [(one.n_drafted, one.n_steps, one.ms) for one in seen] == [
        (0, 1, 20.0), (1, 1, 25.0), (2, 2, 60.0),
    ]  # fmt: skip
    assert read(answer).n_steps == 4


@pytest.mark.parametrize(
    "steps",
    [None, "x", 3, [], [(1.0, 1)], [(1.0, 1, 2)], [(-1.0, 1, 0)], [(1.0, 10**9, 0)],
     [("1 ms", 1, 0)], [(None, 1, 0)], [(1.0, 10**400, 0)], [(10**400, 1, 0)], [(1.0, float("nan"), 0)]],
)  # fmt: skip
def test_steps_that_no_box_can_mean_are_passed_over(steps: Any) -> None:
    answer = {**WHOLE, "steps": steps}
    assert read(answer).steps is None
    assert read(answer).n_steps == 4
    assert "by_drafted" not in as_kept(answer)


def test_what_was_drafted_and_accepted_is_added_up_over_answers_that_drafted_alike() -> None:
    found = Observations(WORKLOAD)
    one = WORKLOAD.classes[0]
    request = Request(one.kind, "b-0", 0, one.new_tokens, one.n_predict)
    answer = {
        "predicted_n": 108,
        "predicted_ms": 2100.0,
        "draft_n": 100,
        "draft_n_accepted": 60,
        "steps": STEPS * 20,
    }
    found.add(Sample(event="request", process="a/1", arm=MTP, purpose="block", at_s=0.0, seconds=1.0,
                     request=request, n_max=2, p_min=0.5, block="b", answer=as_kept(answer)))  # fmt: skip
    (counts,) = pool(found.processes["a/1"].answers)
    assert (counts.n_prompts, counts.n_steps, counts.drafted, counts.accepted) == (1, 80, 100, 60)


@pytest.mark.parametrize("shape", ["straight", "a dearer kernel from the sixth on", "ever cheaper"])
def test_the_time_of_every_length_is_read_from_one_answer_whatever_its_shape(shape: str) -> None:
    drafted = np.arange(9)
    extra = {"straight": 3.0 * drafted, "ever cheaper": 12.0 * np.sqrt(drafted)}.get(
        shape, 2.0 * drafted + 9.0 * (drafted >= 6)
    )
    times = 20.0 + extra
    table = tuple((int(d), 30, float(30 * ms)) for d, ms in zip(drafted, times, strict=True))
    row = StepRow(
        "", float(times.mean()), 270.0, spread_drafted(4.0), 0.0, 0.0, n_max=8, table=table
    )
    law = fit_steps(StepTable([row]))
    assert law is not None
    for n_drafted, ms in zip(drafted, times, strict=True):
        at = replace(row, drafted=spread_drafted(int(n_drafted)), refused=float(n_drafted < 8))
        assert float(at.terms @ law.mean) == pytest.approx(ms, rel=0.05)


def test_the_luck_of_a_start_is_not_taken_for_what_longer_drafts_cost() -> None:
    """Three lives with short drafts, and a slower one that alone has long ones."""
    times = 20.0 + 3.0 * np.arange(9)
    rows = []
    for life, n_max, luck in (("a", 3, 0.98), ("b", 3, 1.0), ("c", 3, 0.97), ("d", 8, 1.06)):
        own = luck * times[: n_max + 1]
        table = tuple((at, 40, 40.0 * float(ms)) for at, ms in enumerate(own))
        usual = spread_drafted(n_max / 2)
        rows.append(
            StepRow(life, float(own.mean()), 40.0 * len(own), usual, 0.0, 0.0, n_max, table)
        )
    law = fit_steps(StepTable(rows))
    assert law is not None
    of_all = [replace(rows[3], drafted=spread_drafted(n), refused=float(n < 8)) for n in range(9)]
    told = [float(row.terms @ law.mean) for row in of_all]
    ratios = (np.array(told) / times)[1:]
    assert ratios.max() / ratios.min() < 1.02


def test_what_an_engine_tells_of_its_steps_is_not_forgotten_with_a_tool_call() -> None:
    """A tool call, a request beside others, another engine: answers without steps say nothing of this one."""
    box = task("12G", "agent", 1)
    learner = Learner(box.workload, 8192)
    night = Night(box.box(), box.workload, learner, 3600.0, np.random.default_rng(1), None)
    assert not night.tells_steps("it")
    request = Request("code", "a", 0, 500, 100)
    told = a_sample(MTP, "block", request, n_max=2, p_min=0.5, answer=WHOLE)
    night.answered(replace(told, answer=as_kept({**WHOLE, "steps": STEPS})))
    night.answered(replace(told, purpose="tool"))
    assert night.tells_steps("it")
    assert night.tells_steps("never seen")
    other = replace(MTP, engine="ik")
    night.answered(replace(told, process="a/2", arm=other))
    assert not night.tells_steps("ik")
    assert night.tells_steps("it")


@pytest.mark.parametrize(("asked", "predicted_ms", "left_ms", "whole_ms"), [
    (101, 1000.0, 0.0, 2000.0), (101, 400.0, 600.0, 2000.0), (201, 2000.0, 0.0, 2000.0), (1, 30.0, 0.0, 6000.0),
])  # fmt: skip
def test_a_shorter_answer_counts_at_the_length_of_its_class(
    asked: int, predicted_ms: float, left_ms: float, whole_ms: float
) -> None:
    reading = read({"predicted_n": 9, "predicted_ms": predicted_ms, "decode_left_ms": left_ms})
    answer = Answer(MTP, "a/1", "block", "b", 0, Request("code", "", 0, 9, asked), reading)
    assert decode_ms(answer, RequestClass(1, "code", 0, 9, 201)) == whole_ms


def test_an_answer_of_one_token_takes_what_it_took() -> None:
    reading = read({"predicted_n": 1, "predicted_ms": 40.0})
    answer = Answer(MTP, "a/1", "block", "b", 0, Request("code", "", 0, 9, 1), reading)
    assert decode_ms(answer, RequestClass(1, "code", 0, 9, 1)) == 40.0
