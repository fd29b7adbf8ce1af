"""How much equal things differ on this box: processes, blocks of prompts, and one answer to the next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

Array = NDArray[np.float64]

_STEPS = (0.7, 1.0, 1.5)
_PRIOR_SD = 0.25  # of the log of each spread, around the usual one


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of log turn times: of processes, of blocks of prompts, of one answer."""

    process: float
    block: float
    answer: float

    def covariance(self, same_process: Array, same_block: Array) -> Array:
        """Of observations, from what they have in common (1) or not (0)."""
        alike = same_process * self.process**2 + same_block * self.block**2
        return np.asarray(alike + np.eye(len(alike)) * self.answer**2, float)


USUAL = Noise(process=0.03, block=0.025, answer=0.018)


def fit_noise(kernel: Array, residual: Array, same_process: Array, same_block: Array) -> Noise:
    """The spreads under which the residuals are likeliest, of a few around the usual ones.

    Args:
        kernel: Prior covariance of the observed configurations.
        residual: Observed minus predicted log turn times.
        same_process: 1 where two observations are of one process.
        same_block: 1 where two observations answered the same block.
    """

    def log_likelihood(noise: Noise) -> float:
        try:
            factor = cho_factor(kernel + noise.covariance(same_process, same_block), lower=True)
        except LinAlgError:
            return -np.inf
        spread = 2.0 * float(np.log(np.diag(factor[0])).sum())
        ratios = np.log([noise.process, noise.block, noise.answer]) - np.log(
            [USUAL.process, USUAL.block, USUAL.answer]
        )
        prior = float((ratios**2).sum()) / _PRIOR_SD**2
        return -0.5 * (float(residual @ cho_solve(factor, residual)) + spread + prior)

    tried = [
        Noise(USUAL.process * process, USUAL.block * block, USUAL.answer * answer)
        for process, block, answer in product(_STEPS, repeat=3)
    ]
    return max(tried, key=log_likelihood)
