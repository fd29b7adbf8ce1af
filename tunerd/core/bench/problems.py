"""Why requests had no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunerd.core.sample import Sample

# A server's message may quote the whole request.
_MOST_LETTERS = 160


def reason_of(sample: Sample) -> str:
    """Why there is no answer, in one line; "" where there is one."""
    text = " ".join((sample.problem or "").split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def count_problems(samples: Sequence[Sample]) -> Mapping[str, int]:
    """How many requests had no answer, by the reason."""
    counts: dict[str, int] = {}
    for sample in samples:
        if sample.problem is not None:
            counts[reason_of(sample)] = counts.get(reason_of(sample), 0) + 1
    return counts
