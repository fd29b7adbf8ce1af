"""Each process of a side must do what the side is meant to do."""

from __future__ import annotations

import pytest

from tunerd.measure.trust import not_as_meant


@pytest.mark.parametrize(
    ("drafts", "drafted", "is_as_meant"),
    [
        (True, [0, None, 7], True),
        (True, [0, 0, None], False),
        (True, [], False),
        (False, [0, None], True),
        (False, [0, 3], False),
        (None, [0], True),
        (None, [3], True),
    ],
)
def test_a_process_that_drafts_otherwise_than_its_side_does_not_count(
    drafts: bool | None, drafted: list[int | None], *, is_as_meant: bool
) -> None:
    assert (not_as_meant(drafts, drafted) is None) is is_as_meant
