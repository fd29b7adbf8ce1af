"""Whether several models fit: what is unknown fits nowhere, and a margin is kept."""

from __future__ import annotations

import pytest

from tunerd.production.emit import Together
from tunerd.words import MiB


def needs(*mib: int | None, budget: int | None, margin: int = 0) -> Together:
    named = tuple((f"p{n}", None if one is None else MiB(one)) for n, one in enumerate(mib))
    return Together("GPU", named, MiB(margin), None if budget is None else MiB(budget), None)


@pytest.mark.parametrize(
    ("found", "left", "fits"),
    [
        (needs(4000, 6000, budget=11000, margin=1000), 0, True),
        (needs(4000, 6000, budget=11000, margin=1001), -1, False),
        (needs(4000, None, budget=11000), None, None),
        (needs(4000, 6000, budget=None), None, None),
    ],
)
def test_needs_and_margin_are_held_against_the_budget(
    found: Together, left: int | None, fits: bool | None
) -> None:
    assert (found.left_mib, found.fits) == (left, fits)
