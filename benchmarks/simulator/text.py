"""Drafting as a process over text: burst-like difficulty, confidence that is nearly right about it.

A token at position j of a draft has a difficulty z, normal around the level of its text minus a decay
with j, with a part that all positions of one step share and that lingers from step to step. It is
right with probability sigmoid(z); the drafter's confidence is sigmoid(sharpness z + bias). Nothing
here is Beta-distributed: the search's model of acceptance has to cope with that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Array = NDArray[np.float64]

KINDS = ("code", "chat", "tool", "summary", "math", "creative")
N_POSITIONS = 16
_BURST_SD = 0.7
_BURST_MEMORY = 0.8
TEXT_SD = 0.3


@dataclass(frozen=True)
class Drafter:
    """A drafter on every kind of text.

    `levels`: mean difficulty by kind. `lookup`: chance that a draft is found at all, by kind; None
    for a drafter that always has one. `fatigue`: what 1000 generated tokens take from the level.
    `token_sd`: how far the tokens of one text lie apart, so how much confidence can tell of them.
    """

    levels: dict[str, float]
    decay: float
    sharpness: float
    bias: float
    lookup: dict[str, float] | None = None
    has_filter: bool = True
    first_is_free: bool = False
    fatigue: float = 0.0
    token_sd: float = 1.2

    def tired(self, n_predict: int) -> float:
        """What an answer of so many tokens takes from the level in its course."""
        return self.fatigue * min(n_predict, 2000) / 2000

    def lengths(
        self, kind: str, shift: float, n_steps: int, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """Difficulty-driven draws of one text: whether right, and how confident (steps, positions)."""
        burst = rng.normal(size=n_steps) * np.sqrt(1 - _BURST_MEMORY**2)
        burst[0] /= np.sqrt(1 - _BURST_MEMORY**2)
        lingering = accumulate(burst.tolist(), lambda before, own: own + _BURST_MEMORY * before)
        bursts = _BURST_SD * np.array(list(lingering))
        z = self.levels[kind] + shift + bursts[:, None] - self.decay * np.arange(N_POSITIONS)
        z = z + self.token_sd * rng.normal(size=z.shape)
        right = rng.random(z.shape) < expit(z)
        confidence = expit(self.sharpness * z + self.bias)
        if self.lookup is not None:
            found = rng.random(n_steps) < expit(
                np.log(self.lookup[kind] / (1 - self.lookup[kind])) + shift
            )
            confidence = np.where(found[:, None], 1.0, -1.0) * np.ones_like(confidence)
        return right, confidence

    def drafted_and_accepted(
        self, right: Array, confidence: Array, p_min: float
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Drafted and accepted tokens by step, without a limit on the draft."""
        threshold = 0.0 if self.lookup is not None else (p_min if self.has_filter else 0.0)
        passes = confidence >= threshold
        if self.first_is_free and self.lookup is None:
            passes[:, 0] = True
        drafted = np.cumprod(passes, axis=1)
        accepted = np.cumprod(passes & right.astype(bool), axis=1)
        return drafted.sum(axis=1), accepted.sum(axis=1)
