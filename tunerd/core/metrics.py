"""From samples to figures: totals over totals, medians with spread, and how many were missing.

A figure that is missing stays missing, with its count; it never becomes zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tunerd.core.sample import Sample, Timings

_QUARTILES = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """How figures of single requests lie: median, quartiles, extremes, and how many are missing.

    All but the counts are None where no request has the figure; quartiles need two.
    """

    n: int
    n_missing: int
    median: float | None
    lower_quartile: float | None
    upper_quartile: float | None
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second over several requests: all their tokens over all their time.

    The mean of rates would weigh a short request like a long one. `n_missing` requests had no such
    figure and are in neither sum.
    """

    tok_s: float | None
    n_tokens: int
    total_ms: float
    n: int
    n_missing: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of samples shows; `n_unusable` were marked or failed and are in no figure."""

    n: int
    n_unusable: int
    decode: Rate
    prompt: Rate
    decode_tok_s: Spread
    ttft_ms: Spread
    wall_ms: Spread
    n_predicted: int | None
    n_drafted: int | None
    n_accepted: int | None
    acceptance_ratio: float | None
    tokens_per_step: float | None
    acceptance_by_position: tuple[float, ...] | None


def spread(values: Iterable[float | None]) -> Spread:
    """Median and spread of figures, the missing ones counted."""
    given = list(values)
    known = sorted(value for value in given if value is not None)
    quartiles = statistics.quantiles(known, n=_QUARTILES) if len(known) > 1 else None
    return Spread(
        n=len(known),
        n_missing=len(given) - len(known),
        median=statistics.median(known) if known else None,
        lower_quartile=quartiles[0] if quartiles else None,
        upper_quartile=quartiles[-1] if quartiles else None,
        least=known[0] if known else None,
        most=known[-1] if known else None,
    )


def decode_rate(samples: Sequence[Sample]) -> Rate:
    """Generated tokens over generation time; the first token of each request is in neither."""
    return _rate(samples, lambda t: (None if t.predicted_n is None else t.predicted_n - 1,
                                     t.predicted_ms))  # fmt: skip


def prompt_rate(samples: Sequence[Sample]) -> Rate:
    """Processed prompt tokens over prompt time; cached tokens are in neither."""
    return _rate(samples, lambda timings: (timings.prompt_n, timings.prompt_ms))


def summarise(samples: Sequence[Sample]) -> Summary:
    """The figures of a set of samples that were measured alike."""
    usable = [sample for sample in samples if sample.is_usable]
    timings = [sample.timings for sample in usable if sample.timings is not None]
    drafted, accepted = _total(timings, "draft_n"), _total(timings, "draft_n_accepted")
    return Summary(
        n=len(usable),
        n_unusable=len(samples) - len(usable),
        decode=decode_rate(usable),
        prompt=prompt_rate(usable),
        decode_tok_s=spread(s.timings.decode_tok_s if s.timings else None for s in usable),
        ttft_ms=spread(s.client.ttft_ms if s.client else None for s in usable),
        wall_ms=spread(s.client.wall_ms if s.client else None for s in usable),
        n_predicted=_total(timings, "predicted_n"),
        n_drafted=drafted,
        n_accepted=accepted,
        acceptance_ratio=accepted / drafted if drafted and accepted is not None else None,
        tokens_per_step=_tokens_per_step(timings),
        acceptance_by_position=_by_position(timings),
    )


def _rate(
    samples: Sequence[Sample], take: Callable[[Timings], tuple[int | None, float | None]]
) -> Rate:
    n_tokens, total_ms, n = 0, 0.0, 0
    for sample in samples:
        tokens, ms = take(sample.timings) if sample.timings is not None else (None, None)
        if tokens is None or ms is None or tokens <= 0 or ms <= 0:
            continue
        n_tokens, total_ms, n = n_tokens + tokens, total_ms + ms, n + 1
    tok_s = n_tokens / total_ms * 1000 if total_ms else None
    return Rate(tok_s, n_tokens, total_ms, n, len(samples) - n)


def _total(timings: Sequence[Timings], name: str) -> int | None:
    """The sum of a count over all requests that have it; None if none has."""
    known = [value for one in timings if (value := getattr(one, name)) is not None]
    return sum(known) if known else None


def _tokens_per_step(timings: Sequence[Timings]) -> float | None:
    known = [(one.predicted_n - 1, one.steps) for one in timings if one.predicted_n and one.steps]
    steps = sum(n_steps for _, n_steps in known)
    return sum(tokens for tokens, _ in known) / steps if steps else None


def _by_position(timings: Sequence[Timings]) -> tuple[float, ...] | None:
    """For each position of a draft, the share of verification passes in which it was accepted."""
    known = [t for t in timings if t.accepted_by_position is not None and t.steps]
    steps = sum(t.steps or 0 for t in known)
    if not steps:
        return None
    depth = max(len(t.accepted_by_position or ()) for t in known)
    totals = [0] * depth
    for one in known:
        for position, count in enumerate(one.accepted_by_position or ()):
            totals[position] += count
    return tuple(total / steps for total in totals)
