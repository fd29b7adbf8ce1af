"""What a context cannot hold is left out before anything is stopped."""

from __future__ import annotations

import pytest

from tests.support.bench_samples import the_book
from tunerd.errors import BenchError
from tunerd.measure.bench import BenchRequest, fitting_plan
from tunerd.measure.request import Suite, fitting, mtp_plan


def test_a_question_that_the_context_cannot_hold_is_left_out_and_named() -> None:
    plan, lost = fitting(mtp_plan(1, repeats=2), the_book(), 512)

    assert lost == ("long_code_review",)
    assert len(plan.steps) == 2 * 8


def test_a_vocabulary_with_short_tokens_makes_questions_longer() -> None:
    assert fitting(mtp_plan(1, repeats=1), the_book(), 2048)[1] == ()
    assert fitting(mtp_plan(1, repeats=1), the_book(), 2048, 1.2)[1] == ("long_code_review",)


def test_where_nothing_fits_it_is_refused() -> None:
    with pytest.raises(BenchError, match="no room"):
        fitting(mtp_plan(1, repeats=1), the_book(), 128)


def test_a_small_context_is_asked_a_short_question_about_the_same_depth() -> None:
    """A vocabulary of short tokens: the long review alone has more of them than the context."""
    asked = BenchRequest(suite=Suite.LENGTHS)
    book = the_book()
    plan, told = fitting_plan(asked, 1, None, book, n_ctx=2048, letters_per_token=1.2)
    usual, _ = fitting_plan(asked, 1, None, book, n_ctx=2048)

    assert {one.kind for one in plan.requests} == {"code_python"}
    assert {one.kind for one in usual.requests} == {"long_code_review"}
    assert {one.n_predict for one in plan.requests} == {100, 500, 1000}
    assert {one.depth_tokens for one in plan.requests} == {776}
    assert "short-question" in {one.code for one in told}


def test_a_depth_below_the_question_tells_the_real_one() -> None:
    asked = BenchRequest(suite=Suite.LENGTHS, depth=16)
    _, told = fitting_plan(asked, 1, None, the_book(), n_ctx=8192)

    assert any("has 640 tokens" in one.text and "not 16" in one.text for one in told)
