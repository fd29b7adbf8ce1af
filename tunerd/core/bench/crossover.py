"""From which output length on one arm is faster than another.

A request takes `prefill + (n - 1) x time of a token`, so an arm that pays a tax while it reads the
prompt and gains on each token is faster from `1 + tax / gain` tokens on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.core.evidence import USUAL_LEVEL, Crossover
from tunerd.core.sample import Mark, Sample

_DRAWS = 20_000
_LEAST = 2
# Walls closer than this are a tie: between restarts of the same arm walls differ by more.
TIE_RATIO = 0.01

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """What an arm's requests took: reading the prompt, and each further token [ms]."""

    prefill_ms: tuple[float, ...]
    token_ms: tuple[float, ...]
    n_tokens: tuple[int, ...]

    @property
    def mean_token_ms(self) -> float:
        """All decode time over all tokens."""
        total = sum(ms * n for ms, n in zip(self.token_ms, self.n_tokens, strict=True))
        return total / sum(self.n_tokens)


def costs_of(samples: Sequence[Sample]) -> Costs | None:
    """The costs of the usable samples that have both figures; None below two of them."""
    rows = [row for sample in samples if (row := _row(sample)) is not None]
    if len(rows) < _LEAST:
        return None
    prefill, token, n = zip(*rows, strict=True)
    return Costs(tuple(prefill), tuple(token), tuple(n))


def _row(sample: Sample) -> tuple[float, float, int] | None:
    timings = sample.timings
    if not sample.is_usable or timings is None or not timings.prompt_ms:
        return None
    if timings.predicted_ms is None or timings.predicted_n is None or timings.predicted_n < _LEAST:
        return None
    n = timings.predicted_n - 1
    return timings.prompt_ms, timings.predicted_ms / n, n


def find_crossover(
    arm: str, samples: Sequence[Sample], than: str, others: Sequence[Sample], *, seed: int
) -> Crossover | None:
    """From which length on `arm` is faster, with its interval; None where a figure is missing.

    The interval is of these two server lives: what another start of the same arms would differ by is
    not in it. It comes from the t distributions of tax and gain (the generalised confidence
    interval of a ratio), so that "never" and "always" have their share of it.

    Args:
        arm: Name of the arm that pays a tax to gain on each token.
        samples: Its samples.
        than: Name of the other.
        others: Its samples.
        seed: Of the draws.
    """
    mine, theirs = costs_of(samples), costs_of(others)
    if mine is None or theirs is None:
        return None
    rng = np.random.default_rng(seed)
    tax = _draws(rng, mine.prefill_ms) - _draws(rng, theirs.prefill_ms)
    gain = _token_draws(rng, theirs) - _token_draws(rng, mine)
    lengths = _lengths(tax, gain)
    best = _length(
        float(np.mean(mine.prefill_ms) - np.mean(theirs.prefill_ms)),
        theirs.mean_token_ms - mine.mean_token_ms,
    )
    edge = (1 - USUAL_LEVEL) / 2
    low, high = (float(np.quantile(lengths, at, method="nearest")) for at in (edge, 1 - edge))
    return Crossover(
        arm=arm,
        than=than,
        n_tokens=best if np.isfinite(best) else None,
        low=low if np.isfinite(low) else None,
        high=high if np.isfinite(high) else None,
    )


def _draws(rng: np.random.Generator, values: Sequence[float]) -> Floats:
    """Where the mean of these may lie."""
    found = np.asarray(values, dtype=np.float64)
    error = float(np.std(found, ddof=1)) / np.sqrt(len(found))
    drawn: Floats = float(np.mean(found)) + error * rng.standard_t(len(found) - 1, _DRAWS)
    return drawn


def _token_draws(rng: np.random.Generator, costs: Costs) -> Floats:
    """The same for the time of a token, where a request weighs as many tokens as it has."""
    weights = np.asarray(costs.n_tokens, dtype=np.float64)
    weights /= weights.sum()
    values = np.asarray(costs.token_ms)
    mean = float(np.sum(weights * values))
    # Variance of a weighted mean from its residuals, with the usual correction for small counts.
    n = len(values)
    spread = float(np.sum(weights**2 * (values - mean) ** 2)) * n / (n - 1)
    drawn: Floats = mean + np.sqrt(spread) * rng.standard_t(n - 1, _DRAWS)
    return drawn


def _lengths(tax: Floats, gain: Floats) -> Floats:
    found: Floats = np.where(gain > 0, 1 + np.maximum(tax, 0) / np.where(gain > 0, gain, 1), np.inf)
    found = np.where((tax <= 0) & (gain > 0), 0.0, found)
    return np.where((tax < 0) & (gain <= 0), 0.0, found)


def _length(tax: float, gain: float) -> float:
    return float(_lengths(np.array([tax]), np.array([gain]))[0])


@dataclass(frozen=True, slots=True)
class Winner:
    """Which arm answered first at one length: None where they tie, or a figure is missing.

    `lead_ms` is by how much; `walls_ms` are the medians by arm.
    """

    n_tokens: int
    arm: str | None
    lead_ms: float | None
    walls_ms: dict[str, float | None]


def winners(arms: Mapping[str, Sequence[Sample]]) -> tuple[Winner, ...]:
    """For each length, who was first, by the medians of the server's own times.

    The client's wall takes their place where a server reports none.
    """
    measured = {
        name: [one for one in samples if Mark.WARM_UP not in one.marks]
        for name, samples in arms.items()
    }
    lengths = sorted({sample.n_predict for samples in measured.values() for sample in samples})
    return tuple(_winner(n, measured) for n in lengths)


def _winner(n_tokens: int, arms: Mapping[str, Sequence[Sample]]) -> Winner:
    walls = {name: _wall(n_tokens, samples) for name, samples in arms.items()}
    known = sorted((wall, name) for name, wall in walls.items() if wall is not None)
    if len(known) < _LEAST or len(known) < len(arms):
        return Winner(n_tokens, None, None, walls)
    lead = known[1][0] - known[0][0]
    is_tie = lead <= TIE_RATIO * known[0][0]
    return Winner(n_tokens, None if is_tie else known[0][1], lead, walls)


def _wall(n_tokens: int, samples: Sequence[Sample]) -> float | None:
    found = [
        wall
        for sample in samples
        if sample.is_usable and sample.n_predict == n_tokens
        if (wall := wall_of(sample)) is not None
    ]
    return float(np.median(found)) if found else None


def wall_of(sample: Sample) -> float | None:
    """Time of a whole request [ms]: the server's, else the client's."""
    timings = sample.timings
    if timings is not None and timings.prompt_ms is not None and timings.predicted_ms is not None:
        return timings.prompt_ms + timings.predicted_ms
    return sample.client.wall_ms if sample.client is not None else None
