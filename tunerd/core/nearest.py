"""The name that somebody most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The most similar of `names`, if any is similar enough to be a misspelling."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)
