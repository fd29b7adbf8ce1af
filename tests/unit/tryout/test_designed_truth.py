"""How the tests count drafts: the same as engines do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.designed import Truth

_ONES = np.ones(5, np.float32)

# Five tokens in a ring. After 3 the draft is wrong (and goes on from 0), after 1 it is unsure.
RING = Truth(
    successor=np.array([1, 2, 3, 4, 0]),
    margin=_ONES,
    guess=np.array([1, 2, 3, 0, 0]),
    confidence=np.array([0.9, 0.5, 0.9, 0.6, 0.9], np.float32),
    confidence_of_all=np.array([0.9, 0.4, 0.9, 0.6, 0.9], np.float32),
)


def test_generation_follows_the_successors() -> None:
    assert RING.generate(3, 4) == (4, 0, 1, 2)


def test_a_draft_counts_up_to_its_first_mistake() -> None:
    # The first token is 0. Drafted 1 2 3, all right, 4 comes from the target; 0 1 2, all right, 3
    # from the target; 0 1, both wrong, 4 from the target; 0, right, and 1 from the target.
    counts = RING.speculate(4, 12, n_max=3)

    assert (counts.drafted, counts.accepted, counts.steps) == (9, 7, 4)
    assert counts.drafted_by_position == (4, 3, 2)
    assert counts.accepted_by_position == (3, 2, 2)


def test_the_last_draft_is_cut_to_what_is_left() -> None:
    # After the first token and a whole step five of six are there: no draft for the last one.
    counts = RING.speculate(4, 6, n_max=3)

    assert (counts.drafted, counts.accepted, counts.steps, counts.drafts) == (3, 3, 2, 1)


def test_a_draft_ends_before_the_token_that_is_too_unlikely() -> None:
    # From 0: 1 is sure, what follows 1 is not. Then 2 3 from 2: 3 is sure, what follows it is not.
    counts = RING.speculate(4, 5, n_max=3, p_min=0.75)

    assert (counts.drafted, counts.accepted, counts.steps) == (2, 2, 2)


def test_ik_proposes_the_first_token_of_a_draft_whatever_its_confidence() -> None:
    # The first token is 1. Drafted 2, unsure and right, and no more; 3 comes from the target; 0,
    # unsure and wrong, 4 from the target; 0, sure and right, and 1 from the target.
    counts = RING.speculate(0, 6, n_max=3, p_min=0.75, first_draft_free=True)

    assert (counts.drafted, counts.accepted, counts.steps) == (3, 2, 3)
    assert counts.drafted_by_position == (3, 0, 0)
    assert RING.speculate(0, 6, n_max=3, p_min=0.75).drafted == 2


def test_ik_gates_the_tokens_after_the_first() -> None:
    # Drafted 1, sure, but not 2, unsure; 2 from the target; then 3, and 4 from the target.
    counts = RING.speculate(4, 5, n_max=3, p_min=0.75, first_draft_free=True)

    assert counts.drafted_by_position == (2, 0, 0)
    assert counts.steps == 2


def test_an_engine_that_ignores_p_min_drafts_as_without_one() -> None:
    assert RING.speculate(4, 10, 3, 0.95, ignores_p_min=True) == RING.speculate(4, 10, 3)


def test_confidence_can_be_taken_over_all_tokens() -> None:
    assert RING.speculate(0, 3, n_max=1, p_min=0.45).drafted == 1
    assert RING.speculate(0, 3, n_max=1, p_min=0.45, candidates=None).drafted == 0


def test_nothing_is_drafted_without_an_mtp_block() -> None:
    bare = replace(RING, guess=None, confidence=None, confidence_of_all=None)
    counts = bare.speculate(0, 9, n_max=3)

    assert (counts.drafted, counts.steps) == (0, 8)


@given(
    last=st.integers(0, 4),
    n_predict=st.integers(1, 60),
    n_max=st.integers(0, 7),
    p_min=st.sampled_from([0.0, 0.5, 0.75, 1.5]),
    first_draft_free=st.booleans(),
)
def test_every_token_comes_from_a_step_or_from_a_draft(
    last: int, n_predict: int, n_max: int, p_min: float, first_draft_free: bool
) -> None:
    counts = RING.speculate(last, n_predict, n_max, p_min, first_draft_free=first_draft_free)

    assert counts.steps + counts.accepted == n_predict - 1
    assert counts.accepted <= counts.drafted <= n_max * counts.steps
    assert list(counts.drafted_by_position) == sorted(counts.drafted_by_position, reverse=True)
    if p_min > 1 and not first_draft_free:
        assert counts.drafted == 0
