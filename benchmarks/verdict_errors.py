"""How often the sweep's rule promotes: pairs of simulated servers by true gain and kind of noise.

python -m benchmarks.verdict_errors [NIGHTS] [PROCESSES]
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.simulator.stand import CHAT, QUIET, SCENES, Scene, SimulatedStand
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
    nights = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    print(f"{nights} challenges each, margin {MARGIN:.0%}, alpha {ALPHA} / 2, {MAX_PAIRS} pairs")
    print("| scene | true gain | promoted | pairs |")
    print("|---|---|---|---|")
    scenes = [replace(SCENES[0], gain=gain) for gain in GAINS]
    scenes += [replace(one, gain=gain) for one in SCENES[1:] for gain in (0.0, MARGIN)]
    quiet = replace(SCENES[0], name="a quiet box", noise=QUIET)
    scenes += [replace(quiet, gain=gain) for gain in GAINS[2:]]
    with multiprocessing.Pool(processes) as pool:
        for scene in scenes:
            found = pool.map(night, [(scene, seed) for seed in range(nights)], chunksize=20)
            promoted = sum(is_promoted for is_promoted, _ in found)
            mean = sum(count for _, count in found) / nights
            print(f"| {scene.name} | {scene.gain:+.0%} | {promoted} | {mean:.1f} |", flush=True)


if __name__ == "__main__":
    main()
