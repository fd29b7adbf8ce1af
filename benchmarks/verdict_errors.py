"""How often the sweep's rule promotes: pairs of simulated servers by true gain and kind of noise.

python -m benchmarks.verdict_errors [NIGHTS] [PROCESSES]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from benchmarks.measure import tell_nights
from benchmarks.simulator.stand import QUIET, SCENES, Scene, SimulatedStand
from benchmarks.simulator.tasks import CHAT
from tunerd.measure.pairs import SIDES, Asked, Side, Step, challenge_alpha, judge_challenge

MARGIN = 0.01
ALPHA = 0.05
MAX_PAIRS = 40
GAINS = (-0.02, 0.0, 0.01, 0.02, 0.05, 0.10, 0.20)


def pairs(stand: SimulatedStand) -> Iterator[float]:
    number = 0
    while True:
        number += 1
        order: list[Side] = list(SIDES) if number % 4 in {1, 0} else list(reversed(SIDES))
        times = {}
        for side in order:
            life = stand.boot(side)
            turns = [
                life.request(Asked(f"{number}", at, one)) for at, one in enumerate(CHAT.classes)
            ]
            times[side] = CHAT.turn_time_s([turn.wall_ms for turn in turns])
        yield math.log(times["A"] / times["B"])


def night(task: tuple[Scene, int]) -> tuple[bool, int]:
    scene, seed = task
    seen: list[float] = []
    for log_ratio in pairs(SimulatedStand(scene, seed)):
        seen.append(log_ratio)
        decision = judge_challenge(
            seen, margin=MARGIN, alpha=challenge_alpha(ALPHA, 1), max_pairs=MAX_PAIRS
        )
        if decision.standing is not Step.GO_ON:
            return decision.standing is Step.PROMOTE, len(seen)
    raise AssertionError


def main() -> None:
    scenes = [replace(SCENES[0], gain=gain) for gain in GAINS]
    scenes += [replace(one, gain=gain) for one in SCENES[1:] for gain in (0.0, MARGIN)]
    quiet = replace(SCENES[0], name="a quiet box", noise=QUIET)
    scenes += [replace(quiet, gain=gain) for gain in GAINS[2:]]
    about = f"challenges each, margin {MARGIN:.0%}, alpha {challenge_alpha(ALPHA, 1):.3g}, {MAX_PAIRS} pairs"
    tell_nights(about, ("scene", "true gain", "promoted", "pairs"), scenes, night, counted)


def counted(scene: Scene, found: list[tuple[bool, int]]) -> Iterator[str]:
    yield scene.name
    yield f"{scene.gain:+.0%}"
    yield f"{sum(is_promoted for is_promoted, _ in found)}"
    yield f"{fmean(count for _, count in found):.1f}"


if __name__ == "__main__":
    main()
