"""How often verdicts err, and find true gains: simulated servers under many kinds of noise.

    python -m benchmarks.verdicts compare|challenge|nights [--count 1000] [--processes 2]

`compare`: what `tunerd compare` says of two servers.
`challenge`: by the rule by which a sweep promotes.
`nights`: by the same rule, where the pairs of a challenge are measured in several nights. Pairs are drawn: their
spread within a night is 4.5 %, nights differ in their spread and in how much they favour one side.
"""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.measure import options, row, say, table
from benchmarks.simulator.stand import QUIET, SCENES, Scene, SimulatedStand
from benchmarks.simulator.tasks import CHAT
from tunerd.measure.pairs import (
    SIDES,
    Asked,
    Comparison,
    Limits,
    Standing,
    Step,
    challenge_alpha,
    judge_challenge,
)

MARGIN, ALPHA, MAX_PAIRS = 0.01, challenge_alpha(0.05, 1), 40
LIMITS = Limits(budget_s=8 * 3600.0, max_pairs=MAX_PAIRS)
_PAIR_SD = 0.045
# Pairs of a night, spread (log) of the nights' noise, and of what a night gives to one side.
_NIGHTS = (
    (40, 0.0, 0.0), (6, 0.0, 0.0), (6, 0.5, 0.0), (6, 0.5, 0.01), (2, 0.5, 0.01), (6, 0.0, 0.02),
)  # fmt: skip


def compared(task: tuple[Scene, int]) -> tuple[Standing, bool, int, float]:
    """What a comparison comes to, whether its interval has the true gain in it, pairs and hours."""
    scene, seed = task
    stand = SimulatedStand(scene, seed)
    found = Comparison(stand, CHAT, LIMITS, random.Random(seed)).run()  # noqa: S311
    low, high = (found.gain.lower, found.gain.upper) if found.gain else (None, None)
    holds = low is not None and high is not None and low <= scene.gain <= high
    return found.standing, holds, len(found.pairs), stand.clock_s / 3600


def compared_cells(found: list[tuple[Standing, bool, int, float]]) -> Iterator[str]:
    standings, holds, pairs, hours = zip(*found, strict=True)
    for one in (Standing.B_FASTER, Standing.A_FASTER, Standing.NO_DIFFERENCE, Standing.OPEN):
        yield f"{standings.count(one)}"
    yield f"{sum(holds)}"
    yield f"{fmean(pairs):.1f}"
    yield f"{fmean(hours):.1f}"


def log_ratios(stand: SimulatedStand) -> Iterator[float]:
    """Of pairs in the order ABBA."""
    for number in count(1):
        times = {}
        for side in SIDES if number % 4 in {1, 0} else reversed(SIDES):
            life = stand.boot(side)
            turns = [
                life.request(Asked(f"{number}", at, one)) for at, one in enumerate(CHAT.classes)
            ]
            times[side] = CHAT.turn_time_s([turn.wall_ms for turn in turns])
        yield math.log(times["A"] / times["B"])


def judged(pairs: Iterator[float]) -> tuple[bool, int]:
    """Whether a challenge promotes, and after how many pairs it ends."""
    seen: list[float] = []
    for log_ratio in pairs:
        seen.append(log_ratio)
        decision = judge_challenge(seen, margin=MARGIN, alpha=ALPHA, max_pairs=MAX_PAIRS)
        if decision.standing is not Step.GO_ON:
            return decision.standing is Step.PROMOTE, len(seen)
    raise AssertionError


def challenged(task: tuple[Scene, int]) -> tuple[bool, int]:
    return judged(log_ratios(SimulatedStand(*task)))


def judged_cells(found: list[tuple[bool, int]]) -> Iterator[str]:
    yield f"{sum(is_promoted for is_promoted, _ in found)}"
    yield f"{fmean(n_pairs for _, n_pairs in found):.1f}"


def drawn(
    rng: np.random.Generator, gain: float, per_night: int, spread: float, shift: float
) -> Iterator[float]:
    while True:
        mean = math.log1p(gain) + shift * float(rng.normal())
        sd = _PAIR_SD * math.exp(spread * float(rng.normal()))
        for _ in range(per_night):
            yield mean + sd * float(rng.normal())


def nights(n: int) -> None:
    heads = ("pairs a night", "nights' noise differs by", "a night favours one side by",
             "true gain 1 %: promoted", "pairs", "true gain 5 %: promoted", "pairs")  # fmt: skip
    say(table(heads, ()))
    for per_night, spread, shift in _NIGHTS:
        cells = [str(per_night), f"{spread:.0%}", f"{shift:.0%}"]
        for gain in (MARGIN, 0.05):
            rng = np.random.default_rng([per_night, n])
            cells += judged_cells(
                [judged(drawn(rng, gain, per_night, spread, shift)) for _ in range(n)]
            )
        say(row(cells))


def with_gains(scene: Scene, *gains: float) -> list[Scene]:
    return [replace(scene, gain=gain) for gain in gains]


_PLAIN, *_ODD = SCENES
_COMPARE = (
    f"comparisons each, at most {MAX_PAIRS} pairs",
    ("B named", "A named", "equal", "open", "interval holds", "pairs", "hours"),
    [*SCENES, *with_gains(_PLAIN, 0.02, 0.05, 0.10, -0.05)],
    compared,
    compared_cells,
)
_CHALLENGE = (
    f"challenges each, margin {MARGIN:.0%}, alpha {ALPHA:.3g}, {MAX_PAIRS} pairs",
    ("promoted", "pairs"),
    [
        *with_gains(_PLAIN, -0.02, 0.0, 0.01, 0.02, 0.05, 0.10, 0.20),
        *(scene for one in _ODD for scene in with_gains(one, 0.0, MARGIN)),
        *with_gains(replace(_PLAIN, name="a quiet box", noise=QUIET), 0.01, 0.02, 0.05, 0.10, 0.20),
    ],
    challenged,
    judged_cells,
)


def main() -> None:
    given = options(__doc__, what=("compare", "challenge", "nights"), count=1000, processes=2)
    if given.what == "nights":
        nights(given.count)
        return
    told: Any = _COMPARE if given.what == "compare" else _CHALLENGE
    about, heads, scenes, night, cells = told
    say(f"{given.count} {about}\n{table(('scene', 'true gain', *heads), ())}")
    with multiprocessing.Pool(given.processes) as pool:
        for scene in scenes:
            found = pool.map(night, [(scene, seed) for seed in range(given.count)], chunksize=10)
            say(row((scene.name, f"{scene.gain:+.0%}", *cells(found))))


if __name__ == "__main__":
    main()
