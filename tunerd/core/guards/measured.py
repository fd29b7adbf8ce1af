"""From what was measured of a server to the interval that it has to stay in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import fmean, stdev

from tunerd.core.fingerprint import Fingerprint
from tunerd.core.guards.drift import Confirmed
from tunerd.core.sample import Sample

_LEAST_SAMPLES = 3
_LEAST_ANSWER = 16
# Between restarts the same server differs by some 3 %; a figure may differ by three times that.
_BETWEEN_LIVES = 0.10
# Of single answers: half the width of a 99 % interval for their mean, few as they are.
_WIDTH = 3.0


def confirmed_by(samples: Iterable[Sample], then: Fingerprint) -> Confirmed | None:
    """The floors of speed and acceptance; None where too little was measured.

    The floor is of the slowest kind of text: nobody knows what kinds live requests are of.

    Args:
        samples: Of one command line on one build and driver.
        then: Their fingerprint.
    """
    usable = [
        one
        for one in samples
        if one.is_usable and one.concurrency == 1 and (one.n_predicted or 0) >= _LEAST_ANSWER
    ]
    floor = _floor(usable, _speed, relative=True)
    if floor is None:
        return None
    return Confirmed(
        floor_tok_s=floor,
        floor_acceptance=_floor(usable, _acceptance, relative=False),
        driver_version=then.driver_version,
        engine_sha256=then.engine_sha256,
        deepest_tokens=max(depth_of(one) for one in usable),
    )


def depth_of(sample: Sample) -> int:
    """Context in use at the end of an answer [tok]; that which is known."""
    timings = sample.timings
    if timings is None:
        return 0
    cached = timings.cache_n or sample.details.get("cached") or 0
    return (timings.prompt_n or 0) + int(cached) + (timings.predicted_n or 0)


def _floor(
    samples: Sequence[Sample], take: Callable[[Sample], float | None], *, relative: bool
) -> float | None:
    """The lowest lower end over the kinds of text that were asked often enough."""
    kinds: dict[str, list[float]] = {}
    for one in samples:
        value = take(one)
        if value is not None:
            kinds.setdefault(one.kind, []).append(value)
    ends = [
        _lower_end(values, relative=relative)
        for values in kinds.values()
        if len(values) >= _LEAST_SAMPLES
    ]
    return min(ends, default=None)


def _lower_end(values: Sequence[float], *, relative: bool) -> float:
    mean = fmean(values)
    width = _WIDTH * stdev(values) / sqrt(len(values))
    slack = mean * _BETWEEN_LIVES if relative else _BETWEEN_LIVES
    return max(0.0, mean - width - slack)


def _speed(sample: Sample) -> float | None:
    return None if sample.timings is None else sample.timings.decode_tok_s


def _acceptance(sample: Sample) -> float | None:
    timings = sample.timings
    if timings is None or not timings.draft_n or timings.draft_n_accepted is None:
        return None
    return timings.draft_n_accepted / timings.draft_n
