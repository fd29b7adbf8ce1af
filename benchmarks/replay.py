"""The sweep on boxes that replay published tables: what it serves after a night, over many seeds.

python -m benchmarks.replay [--seeds 20] [--hours 8]
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np

from benchmarks.measure import options, row, say, table
from benchmarks.simulator.replay import ReplayBox, Surface, surfaces
from tunerd.profile.arm import Arm
from tunerd.sweep.tuner import Outcome, tune


def night(
    surface: Surface, incumbent: Arm, seed: int = 1, hours: float = 4.0
) -> tuple[Outcome, ReplayBox]:
    box = ReplayBox(surface, seed=seed)
    outcome = tune(
        box, surface.space, surface.workload, incumbent, hours * 3600, np.random.default_rng(seed)
    )
    return outcome, box


def cells(surface: Surface, seeds: int, hours: float) -> Iterator[str]:
    """A table's row: from its slowest arm, and with its best serving already."""
    served, arms, starts, spent = [], [], [], []
    for seed in range(1, seeds + 1):
        outcome, box = night(surface, surface.ranked[-1], seed, hours)
        served.append(surface.behind(outcome.arm))
        arms.append(len(outcome.evidence.arms))
        starts.append(len(box.started))
        spent.append(box.now() / 3600)
    wrong = sum(
        night(surface, surface.best, seed, hours)[0].verdict == "promote"
        for seed in range(1, seeds + 1)
    )
    yield surface.name
    yield f"{sum(not one.failure for one in surface.cells)}"
    yield f"{surface.behind(surface.ranked[-1]):.1%}"
    yield f"{sum(one == 0 for one in served)} of {seeds}"
    yield f"{median(served):.1%} / {max(served):.1%}"
    yield f"{median(arms):.0f}"
    yield f"{median(starts):.0f}"
    yield f"{median(spent):.1f}"
    yield f"{wrong} of {seeds}"


def main() -> None:
    given = options(__doc__, seeds=20, hours=8.0)
    heads = ("table", "arms that ran", "slowest behind the best", "published best served",
             "served behind it, median / worst", "arms measured", "starts", "hours",
             "promoted over the best")  # fmt: skip
    say(table(heads, ()))
    for surface in surfaces().values():
        say(row(cells(surface, given.seeds, given.hours)))


if __name__ == "__main__":
    main()
