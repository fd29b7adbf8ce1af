"""Whether a server that was just started is on its way, ready, or lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunerd.engine.health import (
    Completion,
    Expectation,
    FailureKind,
    HttpState,
    Lost,
    Observation,
    Patience,
    Ready,
    Starting,
    judge_generation,
    judge_settled,
    judge_speculation,
    judge_start,
    load_progress,
)
from tunerd.units.manager import UnitState

RUNNING = UnitState(
    unit="llama-server.service",
    load_state="loaded",
    active_state="active",
    sub_state="running",
    result="success",
    main_pid=100,
    exit_kind=None,
    exit_status=None,
    n_restarts=0,
    invocation_id="new",
    fragment_path=None,
    drop_ins=(),
    needs_reload=False,
    unit_file_state="enabled",
    active_since_s=None,
)
EXPECTED = Expectation(old_invocation="old", alias="qwen", expects_draft=True)
PATIENCE = Patience(stall_s=120, limit_s=1800)
NOW = Observation(
    at_s=10.0, unit=RUNNING, http=HttpState.READY, listener_pid=100, alias="qwen", progress=None
)


def judged(
    now: Observation,
    *,
    expected: Expectation = EXPECTED,
    first_s: float = 0.0,
    moved_s: float = 0.0,
) -> Starting | Ready | Lost:
    return judge_start(now, first_s=first_s, moved_s=moved_s, expected=expected, patience=PATIENCE)


def unit(**changes: Any) -> Observation:
    return replace(NOW, unit=replace(RUNNING, **changes))


def lost(result: Starting | Ready | Lost) -> Lost:
    assert isinstance(result, Lost), result
    return result


def test_its_own_process_with_the_right_name_is_ready() -> None:
    assert judged(NOW) == Ready()


def test_the_old_invocation_still_answers_and_is_not_taken_for_the_new_one() -> None:
    assert isinstance(judged(unit(invocation_id="old")), Starting)


def test_any_invocation_is_new_where_none_served_before() -> None:
    fresh = replace(EXPECTED, old_invocation=None)
    assert judged(unit(invocation_id=None), expected=fresh) == Ready()


def test_another_process_on_the_port_is_another_server() -> None:
    result = lost(judged(replace(NOW, listener_pid=99)))
    assert result.kind is FailureKind.PORT_TAKEN
    assert "99" in result.text


def test_a_listener_that_could_not_be_told_is_no_reason_to_doubt() -> None:
    assert judged(replace(NOW, listener_pid=None)) == Ready()


@pytest.mark.parametrize("alias", ["qwen", None])
def test_the_name_it_serves_under_must_be_the_one_that_was_asked_for(alias: str | None) -> None:
    assert judged(replace(NOW, alias=alias)) == Ready()
    wrong = lost(judged(replace(NOW, alias="gemma" * 50)))
    assert wrong.kind is FailureKind.WRONG_MODEL
    assert len(wrong.text) < 200


@pytest.mark.parametrize("alias", ["one", "two", "one,two"])
def test_one_of_several_names_is_enough(alias: str) -> None:
    """Of `--alias one,two` mainline tells `one`, ik `one,two`."""
    several = replace(EXPECTED, alias="one,two")
    assert judged(replace(NOW, alias=alias), expected=several) == Ready()
    assert lost(judged(replace(NOW, alias="three"), expected=several))


@pytest.mark.parametrize(
    ("http", "text"),
    [
        (HttpState.REFUSED, "starting"),
        (HttpState.SILENT, "starting"),
        (HttpState.LOADING, "loading the model"),
    ],
)
def test_a_server_that_does_not_answer_yet_is_waited_for(http: HttpState, text: str) -> None:
    assert judged(replace(NOW, http=http)) == Starting(text)


def test_something_else_on_the_port_is_no_server() -> None:
    assert lost(judged(replace(NOW, http=HttpState.WRONG))).kind is FailureKind.WRONG_MODEL


@pytest.mark.parametrize(
    "changes",
    [
        {"active_state": "failed", "result": "exit-code"},
        {"active_state": "activating", "sub_state": "auto-restart", "result": "signal"},
        {"active_state": "inactive", "sub_state": "dead", "result": "exit-code"},
        {"active_state": "inactive", "sub_state": "dead", "result": "success"},
        {"n_restarts": 1},
    ],
)
def test_a_unit_that_ended_is_lost_and_its_log_has_to_tell(changes: dict[str, Any]) -> None:
    assert lost(judged(unit(**changes))).kind is None


def test_a_unit_on_its_way_is_waited_for() -> None:
    starting = unit(active_state="activating", sub_state="start", main_pid=None)
    assert isinstance(judged(starting), Starting)
    assert isinstance(judged(unit(main_pid=None)), Starting)
    assert judged(unit(n_restarts=None)) == Ready()


def test_waiting_ends_where_nothing_moves() -> None:
    loading = replace(NOW, http=HttpState.LOADING)
    assert isinstance(judged(replace(loading, at_s=120.0)), Starting)
    stalled = lost(judged(replace(loading, at_s=120.1)))
    assert stalled.kind is FailureKind.HANG
    assert "120 s" in stalled.text
    assert isinstance(judged(replace(loading, at_s=1800.0), moved_s=1790.0), Starting)
    assert lost(judged(replace(loading, at_s=1800.1), moved_s=1800.0)).kind is FailureKind.HANG


def test_a_failure_is_told_as_such_even_after_a_long_wait() -> None:
    late = replace(unit(active_state="failed", result="oom-kill"), at_s=9999.0)
    assert lost(judged(late)).kind is None


GOOD = Completion("one two three", 24, 12, None)


@pytest.mark.parametrize(
    "change",
    [
        {"problem": "status 500: x"},
        {"n_predicted": 0},
        {"n_predicted": None},
        {"text": "\ufffd\ufffd\ufffda"},
        {"text": "@" * 24},
        {"text": " \n" + "?" * 20 + "\n"},
    ],
)
def test_garbage_is_not_a_generation(change: dict[str, Any]) -> None:
    result = judge_generation(replace(GOOD, **change), wanted=24)
    assert result is not None
    assert result.kind is FailureKind.GARBAGE


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"text": "", "n_predicted": 1},  # a model may say nothing but its end
        {"text": "aaaa", "n_predicted": 4},
        {"text": "=" * 24 + "x"},
        {"text": "a\ufffdbc"},
        {"text": "ababababababababab"},
        {"n_drafted": None},
    ],
)
def test_odd_text_is_still_a_generation(change: dict[str, Any]) -> None:
    assert judge_generation(replace(GOOD, **change), wanted=24) is None


@pytest.mark.parametrize(
    ("speculative", "drafted", "must", "is_lost"),
    [
        (True, None, True, False),
        (False, 12, False, True),
        (None, 12, True, False),
        (None, 0, True, True),
        (None, None, True, True),
        (None, 0, False, False),
    ],
)
def test_speculation_that_was_asked_for_must_run(
    speculative: bool | None, drafted: int | None, must: bool, is_lost: bool
) -> None:
    expected = replace(EXPECTED, must_draft=must)
    result = judge_speculation(
        replace(GOOD, n_drafted=drafted), speculative=speculative, expected=expected
    )
    assert (result is not None) is is_lost
    off = replace(expected, expects_draft=False)
    assert judge_speculation(GOOD, speculative=False, expected=off) is None


def test_a_server_that_dies_after_its_first_answer_is_lost() -> None:
    assert judge_settled(RUNNING, main_pid=100, invocation="new") is None
    assert judge_settled(RUNNING, main_pid=101, invocation="new") is not None
    assert judge_settled(RUNNING, main_pid=100, invocation="other") is not None
    ended = replace(RUNNING, active_state="failed", result="core-dump")
    result = judge_settled(ended, main_pid=100, invocation="new")
    assert result is not None
    assert "core-dump" in result.text


def test_unknown_progress_is_not_zero() -> None:
    assert load_progress({"read": None, "rss": None}) is None
    assert load_progress({"read": 5, "rss": None}) == 5
    assert load_progress({"read": 5, "rss": 7}) == 12


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.integers(-5, 200), st.integers(1, 64))
def test_any_text_is_judged(text: str, n_predicted: int, wanted: int) -> None:
    result = judge_generation(Completion(text, n_predicted, None, None), wanted=wanted)
    if result is None:
        assert n_predicted != 0
