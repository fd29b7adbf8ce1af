"""Which margin an arm needs so that its context can be filled: a linear law, learned by family.

VRAM left free at depth d of a context of C tokens, for margin m:

    free = s m - h0 - h1 n_max - h2 (sqrt(ubatch / 512) - 1) - (G + G2 (sqrt(ubatch / 512) - 1)) d / C
           - K (b - b8) + e n

b is what a cached value of this type takes against f16, b8 that of q8_0; K is the cache as f16, and about
0 where the fit sees the cache and makes room for it. n are layers whose experts are in RAM by hand; a placement by hand has a law of its own, without a
margin. G is what the engine allocates while the context fills, which its own fit does not see. s is 1 where
the fit had to move weights off the card to keep the margin, and 0 where everything fitted anyway.
A Gaussian prior makes the law usable before anything was seen, and gives it an error. A recurrent
model keeps a copy of its state for each position of a draft, 63 to 150 MiB; that is in h1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunerd.core.sweep.arm import Arm

Array = NDArray[np.float64]

# Spread between loads of the same arm, until the night has its own figure [MiB].
JITTER_MIB = 30.0
_ROW_SD = 15.0  # of readings within one process
_PLACEMENT_SD = 25.0  # weights move in whole tensors
# The experts of one layer take 100 to 500 MiB in models of 30 to 35 billion weights at 4 bits.
_PRIOR = np.array([0.0, 40.0, 100.0, 250.0, 60.0, 0.0, -250.0])
_SPREAD = np.array([900.0, 40.0, 150.0, 250.0, 120.0, 60.0, 200.0])
_RELATIVE_SPREAD = np.array([250.0, 25.0, 60.0, 120.0, 60.0, 300.0, 40.0])
# Where the fit makes no room, all that is allocated counts: the whole compute buffer, and the cache, which
# is 2.5 and 8 GiB as f16 for 131,072 tokens of the published models.
_FREE_PRIOR = np.array([0.0, 100.0, 600.0, 250.0, 60.0, 4000.0, -250.0])
_FREE_SPREAD = np.array([900.0, 60.0, 400.0, 250.0, 120.0, 3000.0, 200.0])
_CACHE = 5
# Bytes of a cached value against f16, the scales of its block included.
_KV_SIZE = {
    "f32": 2.0, "f16": 1.0, "bf16": 1.0, "q8_0": 34 / 64, "q5_1": 24 / 64, "q5_0": 22 / 64,
    "q4_1": 20 / 64, "q4_0": 18 / 64, "iq4_nl": 18 / 64,
}  # fmt: skip
# More free than the margin by so much after a load: the fit had nothing to do.
_NOT_BINDING_MIB = 400.0
# What a start that ran out of memory says: it lacked this much, give or take.
OOM_FREE_MIB = -150.0
OOM_SD_MIB = 150.0


@dataclass(frozen=True, slots=True)
class Free:
    """VRAM seen free in one process, at a share of the full context (0 to 1) [MiB].

    `is_failure`: nothing was seen, since it ran out of memory there.
    """

    process: str
    arm: Arm
    share: float
    free_mib: float
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """The law of one family: coefficients (h0, h1, h2, G, G2, K, -e) and their covariance.

    `is_binding`: whether the fit moves weights to keep its margin.
    """

    mean: Array
    covariance: Array
    is_binding: bool
    n_processes: int
    jitter_mib: float

    def free_mib(self, arm: Arm, share: float = 1.0) -> tuple[float, float]:
        """VRAM left free at a share of the context, and its standard error [MiB]."""
        terms = _terms(arm, share)
        level = arm.fit_mib if self.is_binding else 0.0
        error = math.sqrt(max(float(terms @ self.covariance @ terms), 0.0))
        return level - float(terms @ self.mean), error

    def needed_margin_mib(self, arm: Arm, headroom_mib: float, sds: float) -> float:
        """Margin at which `headroom_mib` stays free with the context full, `sds` errors in hand.

        Where the fit is not binding any margin does if it leaves enough, and none if it does not.
        """
        free, error = self.free_mib(arm)
        short = headroom_mib + sds * error - free
        if self.is_binding:
            return arm.fit_mib + short
        return 0.0 if short <= 0 else math.inf

    def to_json(self) -> dict[str, object]:
        """Numbers for the evidence."""
        names = ("h0_mib", "h1_mib_per_draft", "h2_mib", "growth_mib", "growth_ubatch_mib",
                 "cache_mib", "experts_mib")  # fmt: skip
        errors = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return {
            **{name: round(float(value), 1) for name, value in zip(names, self.mean, strict=True)},
            "errors_mib": [round(float(value), 1) for value in errors],
            "is_binding": self.is_binding,
            "n_processes": self.n_processes,
            "jitter_mib": round(self.jitter_mib, 1),
        }


def fit_memory(
    seen: Sequence[Free], *, relative: MemoryLaw | None = None, jitter_mib: float = JITTER_MIB
) -> MemoryLaw:
    """The law of one family from everything seen of it.

    Args:
        seen: Readings; several of one process share its luck.
        relative: The law of the same engine with another kind of speculation, or of another variant.
        jitter_mib: Spread between loads.
    """
    is_binding = _is_binding(seen, relative)
    mean, spread = _prior(relative, is_binding=is_binding)
    if not is_binding:
        seen = _where_all_fitted(seen)
    if not seen:
        return MemoryLaw(mean, np.diag(spread**2), is_binding, 0, jitter_mib)
    terms = np.array([_terms(row.arm, row.share) for row in seen])
    used = np.array([(row.arm.fit_mib if is_binding else 0.0) - row.free_mib for row in seen])
    processes = np.array([row.process for row in seen])
    noise = np.where(processes[:, None] == processes, jitter_mib**2 + _PLACEMENT_SD**2, 0.0)
    own = np.array([OOM_SD_MIB if row.is_failure else _ROW_SD for row in seen])
    noise += np.diag(own**2)
    precision = np.diag(1.0 / spread**2)
    weighted = np.linalg.solve(noise, np.column_stack([terms, used]))
    normal = precision + terms.T @ weighted[:, :-1]
    covariance = np.linalg.inv(normal)
    posterior = covariance @ (precision @ mean + terms.T @ weighted[:, -1])
    return MemoryLaw(posterior, covariance, is_binding, len(set(processes)), jitter_mib)


def jitter_of(booted: Sequence[tuple[Arm, float]]) -> float:
    """Spread of free VRAM after loads of equal arms [MiB], shrunk towards the usual one."""
    by_arm: dict[Arm, list[float]] = {}
    for arm, free in booted:
        by_arm.setdefault(arm.canonical(), []).append(free)
    squares, freedom = 8 * JITTER_MIB**2, 8
    for values in by_arm.values():
        centre = sum(values) / len(values)
        squares += sum((value - centre) ** 2 for value in values)
        freedom += len(values) - 1
    return math.sqrt(squares / freedom)


def _is_binding(seen: Sequence[Free], relative: MemoryLaw | None) -> bool:
    if any(row.arm.is_placed for row in seen):
        return False
    loaded = [row for row in seen if row.share == 0.0 and not row.is_failure]
    if not loaded:
        return True if relative is None else relative.is_binding
    free = sum(1 for row in loaded if row.free_mib > row.arm.fit_mib + _NOT_BINDING_MIB)
    return 2 * free < len(loaded)


def _prior(relative: MemoryLaw | None, *, is_binding: bool) -> tuple[Array, Array]:
    """Mean and spread of the coefficients before anything was seen."""
    mean, spread = (_PRIOR, _SPREAD) if is_binding else (_FREE_PRIOR, _FREE_SPREAD)
    if relative is None:
        return mean, spread
    known, near = relative.mean.copy(), np.minimum(_RELATIVE_SPREAD, spread)
    if relative.is_binding != is_binding:  # it says nothing of the cache
        known[_CACHE], near[_CACHE] = mean[_CACHE], spread[_CACHE]
    return known, near


def _where_all_fitted(seen: Sequence[Free]) -> Sequence[Free]:
    """Readings of processes for which no weights had to leave the card; all, if there are none."""
    moved = {
        row.process
        for row in seen
        if row.share == 0.0
        and not row.is_failure
        and not row.arm.is_placed
        and row.free_mib <= row.arm.fit_mib + _NOT_BINDING_MIB
    }
    return [row for row in seen if row.process not in moved] or seen


def _terms(arm: Arm, share: float) -> Array:
    width = math.sqrt(max(arm.ubatch, 1) / 512) - 1.0
    drafted, experts = float(arm.n_max if arm.drafts else 0), float(arm.n_cpu_moe or 0)
    cache = _KV_SIZE.get(arm.kv, 1.0) - _KV_SIZE["q8_0"]
    return np.array([1.0, drafted, width, share, share * width, cache, experts])
