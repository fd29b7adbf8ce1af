"""What measurement and prediction say together: a Gaussian process around the physical model.

Of configuration x in process p with block of prompts b,

    log turn = prediction(x) + parts(x) . errors + smooth(x) + quirk(x) + process_p + block_b + noise.

`parts` are the shares of the turn that the prediction is made of, so that a draft that costs a
quarter more than thought moves every arm by what it drafts. `smooth` carries what the model does not
know to neighbours, `quirk` belongs to one configuration alone. The posterior shrinks lucky means
towards the prediction, and lets requests of one process share its luck.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.grid import variant_of
from tunerd.core.sweep.noise import Noise, fit_noise
from tunerd.core.sweep.turn import PARTS

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

# Relative errors of the parts of a prediction (turn.PARTS), in the same order.
_PART_SD = np.array([0.30, 0.08, 0.05, 0.25, 0.50, 0.30, 0.50, 0.08, 0.25, 0.05])
_LEVEL_SD = 0.04  # of a family
_SMOOTH_SD = 0.02
# Of one shape of batches, which other kernels serve, and of one configuration.
_SHAPE_SD = 0.012
_QUIRK_SD = 0.008
_THREADS_SD = 0.06
_KV_SD = 0.03
_BATCH_SD = 0.01
_EXTRA_SD = 0.03
_VARIANT_SD = 0.015  # of a family's own answer to threads, KV type and the like


@dataclass(frozen=True, slots=True)
class Observed:
    """One block of prompts answered by one configuration in one process.

    `log_turn` has the luck of its prompts taken out, `log_measured` is as it was.
    """

    arm: Arm
    process: str
    block: str
    log_turn: float
    log_measured: float


class Points:
    """Arms as arrays for the kernel, with their predictions."""

    def __init__(self, arms: Sequence[Arm], predicted: Array, parts: Array, names: Names) -> None:
        if parts.shape != (len(arms), len(PARTS)):
            raise ValueError(f"parts must have the shape {(len(arms), len(PARTS))}")
        self.predicted = predicted
        self.parts = parts
        self.family = names.indices(arm.family for arm in arms)
        self.kv = names.indices(("kv", arm.kv) for arm in arms)
        self.extra = names.indices(("extra", arm.extra) for arm in arms)
        self.variant = names.indices(("variant", variant_of(arm)) for arm in arms)
        self.plane = names.indices(("plane", arm.canonical().with_margin(0)) for arm in arms)
        self.exact = names.indices(("exact", arm.canonical()) for arm in arms)
        self.threads = np.array([_log2(arm.threads) for arm in arms])
        self.batch = np.array([_log2(arm.batch) for arm in arms])
        self.n_max = np.array([_log2(arm.n_max) if arm.drafts else -2.0 for arm in arms])
        self.p_min = np.array([arm.p_min if arm.drafts else 0.0 for arm in arms])
        self.ubatch = np.array([_log2(arm.ubatch) for arm in arms])
        self.margin = np.array([arm.fit_mib / 1024 for arm in arms])


class Names:
    """Numbers for hashable names, the same for all points of one learner."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def indices(self, names: Iterable[Hashable]) -> Indices:
        """One number for each name."""
        return np.array(
            [self._known.setdefault(name, len(self._known)) for name in names],
            dtype=np.int64,
        )


class Posterior:
    """Beliefs about configurations after some observations."""

    def __init__(
        self, points: Points, observed: Sequence[Observed], noise: Noise | None = None
    ) -> None:
        """Fits the noise where none is given."""
        self._points = points
        kernel = _kernel(points, points)
        process = _same([one.process for one in observed])
        block = _same([one.block for one in observed])
        residual = np.array([one.log_turn for one in observed]) - points.predicted
        self.noise = noise or fit_noise(kernel, residual, process, block)
        self._factor = cho_factor(kernel + self.noise.covariance(process, block), lower=True)
        self._weights = cho_solve(self._factor, residual)

    def beliefs(self, points: Points) -> tuple[Array, Array]:
        """Mean and standard deviation of the log turn time of each point."""
        cross = _kernel(points, self._points)
        mean = points.predicted + cross @ self._weights
        explained = np.einsum("ij,ji->i", cross, cho_solve(self._factor, cross.T))
        variance = _prior_variance(points) - explained
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def differences_sd(self, points: Points, reference: Points) -> Array:
        """Standard deviation of the difference of each point from one other point."""
        cross, other = _kernel(points, self._points), _kernel(reference, self._points)
        explained = np.einsum("ij,ji->i", cross, cho_solve(self._factor, cross.T))
        solved = cho_solve(self._factor, other.T)[:, 0]
        own = _prior_variance(points) - explained
        shared = _kernel(points, reference)[:, 0] - cross @ solved
        variance = own + float(_prior_variance(reference)[0] - other[0] @ solved) - 2 * shared
        return np.asarray(np.sqrt(np.maximum(variance, 1e-10)), float)


def _log2(value: float) -> float:
    return math.log2(max(value, 1))


def _same(names: Sequence[Hashable]) -> Array:
    numbers = Names().indices(names)
    return np.equal(numbers[:, None], numbers).astype(np.float64)


def _kernel(left: Points, right: Points) -> Array:
    def differ(name: str) -> Array:
        return np.asarray(getattr(left, name)[:, None] - getattr(right, name), float)

    def same(name: str) -> Array:
        return np.asarray(getattr(left, name)[:, None] == getattr(right, name), float)

    same_variant = same("variant")
    distance = (
        differ("n_max") ** 2
        + (differ("p_min") / 0.25) ** 2
        + (differ("ubatch") / 1.5) ** 2
        + differ("margin") ** 2
        + (1.0 - same_variant)
    )
    within = (
        _LEVEL_SD**2
        + (left.parts * _PART_SD**2) @ right.parts.T
        + _SMOOTH_SD**2 * np.exp(-distance / 2)
        + _VARIANT_SD**2 * same_variant
    )
    quirk = (
        _SHAPE_SD**2 * same_variant * same("n_max") * same("ubatch")
        + _QUIRK_SD**2 * (same("plane") + same("exact")) / 2
    )
    across = (
        _THREADS_SD**2 * np.exp(-(differ("threads") ** 2) / 2)
        + _KV_SD**2 * same("kv")
        + _BATCH_SD**2 * np.exp(-(differ("batch") ** 2) / 2)
        + _EXTRA_SD**2 * same("extra")
    )
    return np.asarray(same("family") * (within + quirk) + across, float)


def _prior_variance(points: Points) -> Array:
    within = _LEVEL_SD**2 + _SMOOTH_SD**2 + _VARIANT_SD**2 + _SHAPE_SD**2 + _QUIRK_SD**2
    across = _THREADS_SD**2 + _KV_SD**2 + _BATCH_SD**2 + _EXTRA_SD**2
    return np.asarray(within + across + (points.parts**2) @ _PART_SD**2, float)
