"""The sweep on boxes that replay published tables: what it serves after a night, over many seeds.

python -m benchmarks.replay [SEEDS] [--hours 8]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import row, say, table
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
    yield f"{statistics.median(served):.1%} / {max(served):.1%}"
    yield f"{statistics.median(arms):.0f}"
    yield f"{statistics.median(starts):.0f}"
    yield f"{statistics.median(spent):.1f}"
    yield f"{wrong} of {seeds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=20)
    parser.add_argument("--hours", type=float, default=8.0)
    given = parser.parse_args()
    heads = ("table", "arms that ran", "slowest behind the best", "published best served",
             "served behind it, median / worst", "arms measured", "starts", "hours",
             "promoted over the best")  # fmt: skip
    say(table(heads, ()))
    for surface in surfaces().values():
        say(row(cells(surface, given.seeds, given.hours)))


if __name__ == "__main__":
    main()
