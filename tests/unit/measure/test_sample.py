"""Figures of one request: one rule for every build, and None for what is not there."""

from __future__ import annotations

import pytest

from tests.support.bench_samples import sample, timings
from tunerd.measure.answer import Mark, Timings


def test_decode_speed_leaves_out_the_first_token_which_the_time_does_not_cover() -> None:
    assert timings(predicted_n=193, predicted_ms=2000.0).decode_tok_s == pytest.approx(96.0)


def test_prompt_speed_counts_processed_tokens_alone() -> None:
    assert timings(cache_n=900, prompt_n=100, prompt_ms=50.0).prompt_tok_s == pytest.approx(2000.0)


def test_each_step_yields_its_accepted_drafts_and_one_token_more() -> None:
    # A captured request of mainline 0.7.0: 40 tokens, 61 drafted, 17 accepted, 22 steps.
    found = timings(predicted_n=40, draft_n=61, draft_n_accepted=17, predicted_ms=440.0)

    assert found.steps == 22
    assert found.step_ms == pytest.approx(20.0)


@pytest.mark.parametrize("figure", ["decode_tok_s", "prompt_tok_s", "steps", "step_ms"])
def test_a_figure_that_a_server_did_not_report_is_none(figure: str) -> None:
    assert getattr(Timings(), figure) is None


def test_one_token_has_no_speed() -> None:
    one = timings(predicted_n=1, predicted_ms=0.001)

    assert (one.decode_tok_s, one.steps, one.step_ms) == (None, 0, None)


def test_zero_milliseconds_give_no_speed() -> None:
    assert timings(predicted_ms=0.0).decode_tok_s is None
    assert timings(prompt_ms=0.0).prompt_tok_s is None


def test_a_sample_with_a_mark_or_a_problem_enters_no_average() -> None:
    assert sample().is_usable
    assert not sample(marks=(Mark.THROTTLED,)).is_usable
    assert not sample(problem="no answer within 60 s").is_usable


def test_tokens_of_a_server_without_timings_are_unknown() -> None:
    assert sample(timings=None).n_predicted is None
    assert sample().n_predicted == 101
