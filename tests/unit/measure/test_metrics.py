"""From samples to figures: totals over totals, the missing counted and never zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_samples import sample, timings
from tunerd.measure.answer import ClientTimes, Mark, decode_rate, prompt_rate, spread, summarise


def test_speed_over_several_requests_is_all_tokens_over_all_time() -> None:
    short = sample(timings=timings(predicted_n=11, predicted_ms=1000.0))
    long = sample(timings=timings(predicted_n=1001, predicted_ms=10_000.0))

    rate = decode_rate([short, long])

    assert rate.tok_s == pytest.approx(1010 / 11)
    assert (rate.n_tokens, rate.total_ms, rate.n, rate.n_missing) == (1010, 11_000.0, 2, 0)


def test_a_request_without_figures_is_counted_and_in_neither_sum() -> None:
    rate = decode_rate([sample(), sample(timings=None), sample(timings=timings(predicted_ms=None))])

    assert rate.tok_s == pytest.approx(50.0)
    assert (rate.n, rate.n_missing) == (1, 2)


def test_no_request_with_a_figure_gives_none_and_not_zero() -> None:
    rate = prompt_rate([sample(timings=timings(prompt_n=0, prompt_ms=0.0))])

    assert (rate.tok_s, rate.n, rate.n_missing) == (None, 0, 1)


def test_the_spread_counts_what_is_missing() -> None:
    found = spread([4.0, None, 1.0, 2.0, 3.0, None])

    assert (found.n, found.n_missing) == (4, 2)
    assert (found.median, found.least, found.most) == (2.5, 1.0, 4.0)


def test_one_figure_has_no_quartiles() -> None:
    found = spread([3.0])

    assert (found.median, found.lower_quartile, found.upper_quartile) == (3.0, None, None)


def test_nothing_has_no_spread() -> None:
    assert spread([None]).median is None
    assert spread([]).n == 0


@given(st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=2))
def test_quartiles_enclose_the_median_within_what_was_seen(values: list[float]) -> None:
    found = spread(values)

    assert found.lower_quartile is not None
    assert found.upper_quartile is not None
    assert found.median is not None
    assert found.lower_quartile <= found.median + 1e-6
    assert found.median <= found.upper_quartile + 1e-6


def test_marked_and_failed_samples_are_counted_and_in_no_figure() -> None:
    slow = timings(predicted_ms=99_000.0)
    found = summarise(
        [sample(), sample(timings=slow, marks=(Mark.THROTTLED,)), sample(timings=slow, problem="x")]
    )

    assert (found.n, found.n_unusable) == (1, 2)
    assert found.decode.tok_s == pytest.approx(50.0)


def test_acceptance_is_accepted_over_drafted_of_all_requests() -> None:
    found = summarise(
        [
            sample(timings=timings(draft_n=100, draft_n_accepted=90)),
            sample(timings=timings(draft_n=300, draft_n_accepted=30)),
        ]
    )

    assert found.acceptance_ratio == pytest.approx(0.3)
    assert (found.n_drafted, found.n_accepted) == (400, 120)


def test_without_drafts_there_is_no_acceptance() -> None:
    found = summarise([sample()])

    assert (found.n_drafted, found.n_accepted, found.acceptance_ratio) == (None, None, None)


def test_tokens_per_step_are_totals_over_totals() -> None:
    found = summarise(
        [
            sample(timings=timings(predicted_n=41, draft_n=61, draft_n_accepted=18)),
            sample(timings=timings(predicted_n=11, draft_n=3, draft_n_accepted=0)),
        ]
    )

    assert found.tokens_per_step == pytest.approx(50 / 32)


def test_acceptance_by_position_is_over_all_steps_and_as_deep_as_the_deepest_draft() -> None:
    one = timings(predicted_n=21, draft_n=30, draft_n_accepted=10, accepted_by_position=(7, 3))
    two = timings(predicted_n=16, draft_n=9, draft_n_accepted=5, accepted_by_position=(5,))

    found = summarise([sample(timings=one), sample(timings=two)])

    assert found.acceptance_by_position == pytest.approx((12 / 20, 3 / 20))


def test_a_request_without_counts_by_position_weighs_nothing_in_them() -> None:
    one = timings(predicted_n=11, draft_n=10, draft_n_accepted=0, accepted_by_position=(0,))

    found = summarise([sample(timings=one), sample()])

    assert found.acceptance_by_position == (0.0,)


def test_first_token_times_come_from_the_client_and_may_be_missing() -> None:
    found = summarise([sample(), sample(client=ClientTimes(100.0)), sample(client=None)])

    assert found.ttft_ms.median == 55.0
    assert (found.ttft_ms.n, found.ttft_ms.n_missing) == (1, 2)
    assert (found.wall_ms.n, found.wall_ms.n_missing) == (2, 1)
