"""Waiting for what becomes true in a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 240.0
T = TypeVar("T")


def until(holds: Callable[[], T], what: str | Callable[[], str], limit_s: float = LIMIT_S) -> T:
    """Wait until something holds, and return it; `what` is told where it never does.

    It rests for twice as long as a look took, as one that calls a command costs.
    """
    end_s = time.monotonic() + limit_s
    began_s = time.monotonic()
    while not (found := holds()):
        looked_s = time.monotonic()
        if looked_s > end_s:
            raise AssertionError(f"never came true: {what if isinstance(what, str) else what()}")
        time.sleep(min(max(2 * (looked_s - began_s), 0.02), 3.0))
        began_s = time.monotonic()
    return found
