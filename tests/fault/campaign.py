"""How many faults the tests inject: a sample; where TUNERD_TEST_FAULTS=N asks for a campaign, N of every kind.

`TUNERD_TEST_FAULTS=8 TUNERD_TEST_PLACES=host,sid tests/run e2e -s -k befalls` shows what each met.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

_N_EACH = int(os.environ.get("TUNERD_TEST_FAULTS", "0"))
IS_CAMPAIGN = _N_EACH > 0
TIMEOUT_S = 36_000 if IS_CAMPAIGN else 1800
T = TypeVar("T")


def faults(sample: Sequence[T], every: Iterable[T] = ()) -> list[T]:
    """The sample, or as many as are asked for of every kind that there is."""
    if not IS_CAMPAIGN:
        return list(sample)
    return [one for one in every or dict.fromkeys(sample) for _ in range(_N_EACH)]


def chance(seed: int) -> random.Random:
    """Moments to strike at: always the same, but for a campaign's."""
    return random.Random() if IS_CAMPAIGN else random.Random(seed)
