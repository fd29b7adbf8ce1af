"""The mix of requests, and the turn time that it adds up to."""

from __future__ import annotations

import pytest

from tunerd.profile.workload import RequestClass, Workload

SHORT = RequestClass(3.0, "chat", cached_tokens=500, new_tokens=100, n_predict=200)
LONG = RequestClass(1.0, "code", cached_tokens=0, new_tokens=9000, n_predict=400)


def test_the_turn_time_is_the_mean_of_the_classes_by_weight() -> None:
    assert Workload((SHORT, LONG)).turn_time_s([2.0, 10.0]) == pytest.approx(4.0)


def test_weights_need_not_add_up_to_one() -> None:
    assert Workload((SHORT, LONG)).shares == (0.75, 0.25)


def test_a_time_that_is_missing_is_no_turn_time() -> None:
    with pytest.raises(ValueError, match="zip"):
        Workload((SHORT, LONG)).turn_time_s([2.0])


def test_the_deepest_class_is_the_one_that_uses_most_context() -> None:
    assert Workload((SHORT, LONG)).deepest == 1
    assert Workload((LONG, SHORT)).deepest == 0
    assert SHORT.depth_tokens == 800
