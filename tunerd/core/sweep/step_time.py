"""What a verification step and a prompt cost: two linear laws with coefficients that are never < 0.

For a step that drafts D tokens on average, of which D4 and D8 lie beyond the 4th and 8th, at a depth
of d thousand tokens, with m GiB of VRAM left to the fit's margin:

    step   = a + b D + b4 D4 + b8 D8 + c d + g m                                         [ms]
    prompt = u ceil(n / ubatch) + s m ceil(n / ubatch) + v n + w n d                     [ms]

`g` and `s` are experts that left the card. Non-negative least squares with a weak prior, so that two
runs are enough; a relative (another engine, other threads) is a better prior than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from tunerd.core.sweep.arm import Arm

Array = NDArray[np.float64]

KINKS = (4, 8)
STEP_TERMS = 6
PROMPT_TERMS = 4

# Prior of a step's terms, as shares of the mean step: mean, spread.
_STEP_PRIOR = np.array([0.75, 0.06, 0.0, 0.0, 0.003, 0.04])
_STEP_SPREAD = np.array([0.50, 0.06, 0.03, 0.04, 0.004, 0.04])
# Prior of a prompt's terms, as shares of the mean time per token; the first two times the batch.
_PROMPT_PRIOR = np.array([0.25, 0.02, 0.70, 0.004])
_PROMPT_SPREAD = np.array([0.35, 0.04, 0.40, 0.008])
_TYPICAL_UBATCH = 512
_RELATIVE_SPREAD = 0.25
_NOISE = 0.035
_PROMPT_NOISE_MS = 15.0
# VRAM that a drafted token takes from the experts where the fit sees it.
_MIB_PER_DRAFT = 30.0
_MIB_PER_GIB = 1024.0


def room_gib(arm: Arm, n_max: int | None = None) -> float:
    """VRAM that an arm leaves unused by weights [GiB]; `n_max` of another draft, if given.

    Nothing moves for a draft where the model is placed by hand: that is a level of its own.
    """
    if arm.is_placed:
        return 0.0
    drafts = (arm.n_max if n_max is None else n_max) if arm.drafts else 0
    return (arm.fit_mib + _MIB_PER_DRAFT * drafts) / _MIB_PER_GIB


@dataclass(frozen=True, slots=True)
class StepRow:
    """One answer's decoding: mean step time, what it drafted, where, with which margin."""

    step_ms: float
    n_steps: float
    drafted: float
    beyond: tuple[float, float]
    depth_k: float
    room_gib: float


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One answer's prompt."""

    prompt_ms: float
    n_tokens: int
    ubatch: int
    depth_k: float
    room_gib: float


def step_terms(drafted: Array, beyond: Sequence[Array], depth_k: Array, room: Array) -> Array:
    """The terms of a step's time, shape (6, ...)."""
    parts = np.broadcast_arrays(1.0, drafted, *beyond, depth_k, room)
    return np.stack([np.asarray(part, float) for part in parts])


def prompt_terms(n_tokens: Array, ubatch: Array, depth_k: Array, room: Array) -> Array:
    """The terms of a prompt's time, shape (4, ...)."""
    batches = np.ceil(n_tokens / ubatch)
    parts = np.broadcast_arrays(batches, batches * room, n_tokens, n_tokens * depth_k)
    return np.stack([np.asarray(part, float) for part in parts])


def fit_steps(rows: Sequence[StepRow], relative: Array | None = None) -> Array | None:
    """Coefficients of a step [ms]; the relative's own without rows, None without either."""
    if not rows:
        return relative
    times = np.array([row.step_ms for row in rows])
    terms = step_terms(
        np.array([row.drafted for row in rows]),
        [np.array([row.beyond[at] for row in rows]) for at in range(len(KINKS))],
        np.array([row.depth_k for row in rows]),
        np.array([row.room_gib for row in rows]),
    ).T
    mean = float(np.average(times))
    prior, spread = mean * _STEP_PRIOR, mean * _STEP_SPREAD
    if relative is not None:
        prior, spread = _scaled(relative, terms, times, spread)
    steps = np.array([row.n_steps for row in rows])
    noise = times * np.hypot(_NOISE, 0.2 / np.sqrt(steps))
    return _solve(terms, times, noise, prior, spread)


def fit_prompts(rows: Sequence[PromptRow], relative: Array | None = None) -> Array | None:
    """Coefficients of a prompt [ms]; the relative's own without rows, None without either."""
    if not rows:
        return relative
    times = np.array([row.prompt_ms for row in rows])
    tokens = np.array([float(row.n_tokens) for row in rows])
    ubatch = np.array([float(row.ubatch) for row in rows])
    terms = prompt_terms(
        tokens,
        ubatch,
        np.array([row.depth_k for row in rows]),
        np.array([row.room_gib for row in rows]),
    ).T
    per_token = float(times.sum() / tokens.sum())
    typical = np.array([_TYPICAL_UBATCH, _TYPICAL_UBATCH, 1.0, 1.0]) * per_token
    prior, spread = typical * _PROMPT_PRIOR, typical * _PROMPT_SPREAD
    if relative is not None:
        prior, spread = _scaled(relative, terms, times, spread)
    return _solve(terms, times, times * _NOISE + _PROMPT_NOISE_MS, prior, spread)


def _scaled(relative: Array, terms: Array, times: Array, spread: Array) -> tuple[Array, Array]:
    """The relative's coefficients at this one's level, and how far they may be off."""
    predicted = terms @ relative
    ratio = float(np.median(times / np.maximum(predicted, 1e-9)))
    prior = relative * ratio
    return prior, np.minimum(_RELATIVE_SPREAD * prior + 0.15 * spread, spread)


def _solve(terms: Array, times: Array, noise: Array, prior: Array, spread: Array) -> Array:
    rows = np.vstack([terms / noise[:, None], np.diag(1.0 / spread)])
    target = np.concatenate([times / noise, prior / spread])
    try:
        solution, _ = nnls(rows, target)
    except RuntimeError:  # it gives up after so many rounds
        solution = np.maximum(np.linalg.lstsq(rows, target, rcond=None)[0], 0.0)
    return np.asarray(solution, float)
