"""What is held against no server: speeds that requests shared, and those of deep conversations."""

from __future__ import annotations

from dataclasses import replace

from tests.support.readings import served
from tunerd.engine.log import LoggedRequest
from tunerd.watch.guards import (
    Act,
    Confirmed,
    Decision,
    DriftLook,
    DriftState,
    Policy,
    Stretch,
    alike,
    is_of_speed,
    look_closer,
    look_for_drift,
)

CONFIRMED = Confirmed(40.0, None)


def looks(*seen: tuple[float | None, int]) -> DriftState:
    """What is kept of looks that saw this speed counted, and so many requests under way."""
    state = DriftState()
    for speed, n_busy in seen:
        work = None if speed is None else served(600, speed)
        look = DriftLook(0.0, "life-1", work, is_alone=n_busy <= 1, is_idle=n_busy == 0)
        state, decision = look_for_drift(state, look, CONFIRMED, Policy.ADVISE)
        assert decision is None
    return state


def test_what_several_requests_did_is_counted_when_they_end_and_is_left_out() -> None:
    state = looks((50, 0), (None, 3), (20, 0), (50, 0))
    assert [one.tok_s for one in state.stretches] == [50, 50]


def test_while_one_of_several_goes_on_nothing_of_it_counts() -> None:
    state = looks((None, 2), (20, 1), (20, 1), (20, 0), (50, 0), (50, 1))
    assert [one.tok_s for one in state.stretches] == [50, 50]


def test_one_request_after_the_other_is_all_kept() -> None:
    state = looks((50, 1), (50, 0), (50, 1), (50, 1))
    assert len(state.stretches) == 4


def test_a_new_life_has_shared_nothing() -> None:
    state = looks((None, 3))
    look = DriftLook(0.0, "life-2", served(600, 50.0), is_alone=True)
    state, _ = look_for_drift(state, look, CONFIRMED, Policy.ADVISE)
    assert len(state.stretches) == 1


# Depth

DEEP = replace(CONFIRMED, deepest_tokens=4000)
DECAY = Decision("drift", Act.RESTART, "warning", "it decays", "30 tok/s")


def request(depth: int, tok_s: float, *, n: int = 400, concurrency: int = 1) -> LoggedRequest:
    ms = (n - 1) / tok_s * 1000
    return LoggedRequest(depth, 100.0, n, ms, 0, None, None, concurrency)


def closer(*requests: LoggedRequest) -> Decision | None:
    state = DriftState(life="life-1", has_drifted=True)
    state, decision = look_closer(state, DECAY, alike(requests, DEEP), DEEP)
    assert state.has_drifted is (decision is not None)
    return decision


def test_a_conversation_that_grew_deep_is_slower_for_reasons_of_its_own() -> None:
    grown = [request(depth, 60 - depth / 1000) for depth in range(6000, 40_000, 2000)]
    assert closer(*grown) is None
    assert closer(request(3000, 50), request(3000, 50), *grown) is None, "the like ones are fast"
    assert closer(request(3000, 20), request(3000, 20), *grown) is not None


def test_the_newest_requests_that_are_alike_count() -> None:
    slow = [request(3000, 20)] * 4
    fast = [request(3000, 60)] * 20
    decision = closer(*fast, *slow)
    assert decision is not None
    assert decision.act is Act.RESTART
    assert decision.evidence.endswith("no deeper than those: 20.0 tok/s")
    assert closer(*slow, *fast) is None


def test_requests_that_ran_together_or_were_short_are_not_alike() -> None:
    assert closer(*[request(3000, 20, concurrency=2)] * 10) is None
    assert closer(request(3000, 20)) is None


def test_where_no_depth_is_known_it_is_only_told() -> None:
    unknown = replace(request(3000, 20), cached_n=None)
    decision = closer(unknown, unknown)
    assert decision is not None
    assert decision.act is Act.NOTHING
    assert "is not known" in decision.evidence


def test_what_is_short_anyway_is_like_whatever_was_measured() -> None:
    shallow = replace(DEEP, deepest_tokens=250)
    found = alike([request(600, 20)] * 4, shallow)
    assert found.tok_s is not None
    assert alike([request(6000, 20)] * 4, shallow).tok_s is None


def test_only_a_drift_of_speed_needs_a_closer_look() -> None:
    slow = Stretch(600, 20.0, 300, 250)
    fast = Stretch(600, 10.0, 300, 250)
    assert is_of_speed(DriftState(stretches=(fast, slow, slow, slow)), CONFIRMED)
    assert not is_of_speed(DriftState(stretches=(slow, fast, fast, fast)), CONFIRMED)


def test_a_stretch_whose_counters_were_told_late_began_when_they_were_told_last() -> None:
    held = replace(served(1, 1.0), n_predicted=None, predicted_s=None, seconds=10.0)
    state = DriftState()
    for at_s, work in (
        (110.0, held),
        (120.0, held),
        (130.0, replace(served(900, 30.0), seconds=10.0)),
    ):
        look = DriftLook(at_s, "life-1", work, is_alone=True)
        state, _ = look_for_drift(state, look, CONFIRMED, Policy.ADVISE)
    assert [one.since_s for one in state.stretches] == [100.0]
    assert state.held_since_s is None
