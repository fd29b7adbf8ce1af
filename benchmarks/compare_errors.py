"""How often `compare` errs: equal servers under many kinds of noise, and true gains, in simulation.

python -m benchmarks.compare_errors [NIGHTS] [PROCESSES]
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from dataclasses import dataclass, replace

from benchmarks.simulator.stand import CHAT, SCENES, USUAL, Scene, SimulatedStand
from tunerd.measure.pairs import Comparing, Limits, Standing

LIMITS = Limits(budget_s=8 * 3600.0, max_pairs=40)
GAINS = (0.02, 0.05, 0.10, -0.05)


@dataclass(frozen=True)
class Night:
    standing: Standing
    n_pairs: int
    hours: float
    covers: bool


def night(task: tuple[Scene, int]) -> Night:
    scene, seed = task
    stand = SimulatedStand(scene, seed)
    found = Comparing(stand, CHAT, LIMITS, random.Random(seed)).run()  # noqa: S311
    gain = found.gain
    covers = (
        gain is not None
        and gain.lower is not None
        and gain.upper is not None
        and gain.lower <= scene.gain <= gain.upper
    )
    return Night(found.standing, len(found.pairs), stand.clock_s / 3600, covers)


def main() -> None:
    nights = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    print(f"{nights} comparisons each, at most {LIMITS.max_pairs} pairs")
    print(
        "| scene | true gain | B named | A named | equal | open | interval holds | pairs | hours |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    scenes = [*SCENES, *(replace(SCENES[0], gain=gain, noise=USUAL) for gain in GAINS)]
    with multiprocessing.Pool(processes) as pool:
        for scene in scenes:
            found = pool.map(night, [(scene, seed) for seed in range(nights)], chunksize=10)
            count = {one: sum(n.standing is one for n in found) for one in Standing}
            print(
                f"| {scene.name} | {scene.gain:+.0%} | {count[Standing.B_FASTER]} | "
                f"{count[Standing.A_FASTER]} | {count[Standing.NO_DIFFERENCE]} | "
                f"{count[Standing.OPEN]} | {sum(n.covers for n in found)} | "
                f"{sum(n.n_pairs for n in found) / nights:.1f} | "
                f"{sum(n.hours for n in found) / nights:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
