"""How often `compare` errs: equal servers under many kinds of noise, and true gains, in simulation.

python -m benchmarks.compare_errors [NIGHTS] [PROCESSES]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.measure import tell_nights
from benchmarks.simulator.stand import SCENES, USUAL, Scene, SimulatedStand
from benchmarks.simulator.tasks import CHAT
from tunerd.measure.pairs import Comparing, Limits, Standing

LIMITS = Limits(budget_s=8 * 3600.0, max_pairs=40)
HEADS = ("scene", "true gain", "B named", "A named", "equal", "open", "interval holds", "pairs", "hours")  # fmt: skip
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
    scenes = [*SCENES, *(replace(SCENES[0], gain=gain, noise=USUAL) for gain in GAINS)]
    tell_nights(
        f"comparisons each, at most {LIMITS.max_pairs} pairs", HEADS, scenes, night, counted
    )


def counted(scene: Scene, found: list[Night]) -> Iterator[str]:
    yield scene.name
    yield f"{scene.gain:+.0%}"
    for one in (Standing.B_FASTER, Standing.A_FASTER, Standing.NO_DIFFERENCE, Standing.OPEN):
        yield f"{sum(night.standing is one for night in found)}"
    yield f"{sum(night.covers for night in found)}"
    yield f"{fmean(night.n_pairs for night in found):.1f}"
    yield f"{fmean(night.hours for night in found):.1f}"


if __name__ == "__main__":
    main()
