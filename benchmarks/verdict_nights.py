"""How often a challenge promotes wrongly, and finds a true 5 %, where its pairs are measured in several nights.

python -m benchmarks.verdict_nights [COUNT]

Pairs are drawn: their spread within a night is 4.5 %, nights differ in their spread and in how much they favour
one side.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from benchmarks.measure import row, say, table
from tunerd.measure.pairs import Step, challenge_alpha, judge_challenge

_PAIR_SD = 0.045
_MIN_GAIN, _ALPHA, _MAX_PAIRS = 0.01, 0.05, 40
# Pairs of a night, spread (log) of the nights' noise, and of what a night gives to one side.
_SCENES = (
    (40, 0.0, 0.0),
    (6, 0.0, 0.0),
    (6, 0.5, 0.0),
    (6, 0.5, 0.01),
    (2, 0.5, 0.01),
    (6, 0.0, 0.02),
)


def challenge(
    rng: np.random.Generator, gain: float, per_night: int, spread: float, shift: float
) -> tuple[bool, int]:
    """Whether it promotes, and after how many pairs it ends."""
    pairs: list[float] = []
    while True:
        mean = math.log1p(gain) + shift * float(rng.normal())
        sd = _PAIR_SD * math.exp(spread * float(rng.normal()))
        for _ in range(per_night):
            pairs.append(mean + sd * float(rng.normal()))
            standing = judge_challenge(
                pairs, margin=_MIN_GAIN, alpha=challenge_alpha(_ALPHA, 1), max_pairs=_MAX_PAIRS
            ).standing
            if standing is not Step.GO_ON:
                return standing is Step.PROMOTE, len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    count = parser.parse_args().count
    heads = ("pairs a night", "nights' noise differs by", "a night favours one side by",
             "true gain 1 %: promoted", "pairs", "true gain 5 %: promoted", "pairs")  # fmt: skip
    say(table(heads, ()))
    for per_night, spread, shift in _SCENES:
        cells = [str(per_night), f"{spread:.0%}", f"{shift:.0%}"]
        for gain in (_MIN_GAIN, 0.05):
            rng = np.random.default_rng([per_night, count])
            ends = [challenge(rng, gain, per_night, spread, shift) for _ in range(count)]
            cells += [f"{sum(one[0] for one in ends)}", f"{np.mean([one[1] for one in ends]):.1f}"]
        say(row(cells))


if __name__ == "__main__":
    main()
