"""What a person waits for in a turn is the client's wall, whatever the server says it worked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.bench_samples import sample, timings
from tunerd.measure.answer import ClientTimes, Sample
from tunerd.measure.evidence import TurnTime
from tunerd.measure.findings import turn_times
from tunerd.profile.workload import ClassShape, Tokens, WorkloadShape


def a_class(name: str = "chat", *, reasoning: int | None = None, weight: float = 1.0) -> ClassShape:
    return ClassShape(
        name=name, weight=weight, kind="chat", prompt=Tokens.fixed(100), cached_share=0.0,
        reasoning=None if reasoning is None else Tokens.fixed(reasoning), answer=Tokens.fixed(75),
    )  # fmt: skip


def a_turn(wall_ms: float, *, number: int = 0, **values: Any) -> Sample:
    usual: dict[str, Any] = {"timings": timings(prompt_ms=100.0, predicted_ms=300.0)}
    return sample(suite="workload", client=ClientTimes(wall_ms, 150.0),
                  details={"class": number}, **usual | values)  # fmt: skip


def turns(*samples: Sample, classes: tuple[ClassShape, ...] = (a_class(),)) -> list[TurnTime]:
    return turn_times("live", samples, WorkloadShape(name="x", classes=classes))


def test_four_clients_of_one_slot_wait_and_the_turn_says_so() -> None:
    one = turns(*(a_turn(400.0 * n) for n in (1, 2, 3, 4)))[0]

    assert one.total_s == pytest.approx(1.0)
    assert [one.prefill_s, one.decode_s] == pytest.approx([0.1, 0.3])
    assert one.waiting_s == pytest.approx(0.6)


def test_the_parts_never_come_to_more_than_the_whole() -> None:
    one = turns(a_turn(390.0))[0]

    assert one.total_s == pytest.approx(0.39)
    assert [one.decode_s, one.waiting_s] == pytest.approx([0.29, 0.0])


def test_without_times_of_the_server_the_wall_is_split_at_the_first_token() -> None:
    one = turns(a_turn(400.0, timings=None), a_turn(400.0))[0]

    assert [one.prefill_s, one.decode_s] == pytest.approx([0.15, 0.25])
    assert one.waiting_s is None
    assert one.total_s == pytest.approx(0.4)


def test_thoughts_that_cannot_be_told_apart_stay_unknown_and_the_turn_is_known() -> None:
    hidden, shown = a_class(), a_class("agent", reasoning=25, weight=3.0)
    one, other, mix = turns(a_turn(400.0), a_turn(800.0, number=1), classes=(hidden, shown))

    assert one.reasoning_s is None
    assert one.decode_s == pytest.approx(0.3)
    assert [other.reasoning_s, other.decode_s] == pytest.approx([0.075, 0.225])
    assert mix.reasoning_s is None
    assert mix.decode_s == pytest.approx(0.3)
    assert mix.total_s == pytest.approx(0.7)


def test_a_class_without_a_usable_turn_leaves_the_mix_unknown() -> None:
    classes = (a_class(), a_class("agent"))
    one, other, mix = turns(a_turn(400.0), classes=classes)

    assert one.total_s == pytest.approx(0.4)
    assert (other.total_s, mix.total_s, mix.prefill_s) == (None, None, None)


def test_a_turn_is_kept_with_its_whole_and_what_was_waited() -> None:
    one = turns(a_turn(800.0))[0]

    assert TurnTime.from_record(one.to_record("workload")) == one
    assert replace(one, whole_s=None).total_s is None, "a part of it is not known"
