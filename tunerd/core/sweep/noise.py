"""How much equal things differ on this box: between processes, and between blocks of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tunerd.core.sweep import posterior
from tunerd.core.sweep.posterior import Observed

_USUAL_WEIGHT = 10.0


def process_sd(observed: Sequence[Observed]) -> float:
    """Standard deviation of log turn times between processes of one configuration.

    From pairs of processes that answered the same block with the same configuration, and from
    all processes of a configuration where there are several; shrunk towards the usual value.
    """
    by_configuration: dict[tuple[object, str], list[float]] = defaultdict(list)
    for one in observed:
        by_configuration[one.arm.canonical(), one.block].append(one.log_turn)
    squares, freedom = _USUAL_WEIGHT * posterior.PROCESS_SD**2, _USUAL_WEIGHT
    for values in by_configuration.values():
        if len(values) > 1:
            squares += float(np.var(values)) * len(values)
            freedom += len(values) - 1
    return float(np.sqrt(squares / freedom))
