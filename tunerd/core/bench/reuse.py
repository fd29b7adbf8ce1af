"""Whether a server finds again what it has read before."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunerd.core.bench.suites import CHANGED_TAIL, COLD, IDENTICAL
from tunerd.core.evidence import SummaryRecord
from tunerd.core.sample import Sample

# Builds read the last few tokens again, and recurrent models go back to a checkpoint before them.
_REUSED_RATIO = 0.9
_SOME_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Reuse:
    """What one case of the cache suite came to.

    `reused_ratio` is the share of the prompt that was not read again, `prompt_ratio` the time for the
    prompt over that of a cold one. `works` is True, False (nothing was found), or None where the server
    does not say or only a part was found; `text` is for people.
    """

    case: str
    works: bool | None
    reused_ratio: float | None
    prompt_ratio: float | None
    text: str

    NAME = "reuse"

    def to_record(self, arm: str) -> SummaryRecord:
        """As it is kept."""
        return SummaryRecord("cache", self.NAME, arm, asdict(self))


def judge_reuse(samples: Sequence[Sample]) -> tuple[Reuse, ...]:
    """For each warm case whether the prefix was found, from the samples of one arm."""
    cold_ms = _median([_prompt_ms(s) for s in _of(samples, COLD)])
    return tuple(_judge(case, _of(samples, case), cold_ms) for case in (IDENTICAL, CHANGED_TAIL))


def _judge(case: str, samples: Sequence[Sample], cold_ms: float | None) -> Reuse:
    ratio = _median([_reused(sample) for sample in samples])
    warm_ms = _median([_prompt_ms(sample) for sample in samples])
    time_ratio = warm_ms / cold_ms if warm_ms is not None and cold_ms else None
    if ratio is None:
        return Reuse(case, None, None, time_ratio, "the server does not say what it reused")
    # A changed tail can be found but for that tail.
    wanted = _REUSED_RATIO * (1.0 if case == IDENTICAL else _shared_ratio(samples))
    if ratio >= wanted:
        return Reuse(case, True, ratio, time_ratio, f"works: {ratio:.0%} of the prompt is reused")
    if ratio <= _SOME_RATIO:
        return Reuse(
            case, False, ratio, time_ratio, "does not work: the whole prompt is read again"
        )
    return Reuse(case, None, ratio, time_ratio, f"works in part: {ratio:.0%} is reused")


def _shared_ratio(samples: Sequence[Sample]) -> float:
    found = [sample.details.get("shared_ratio") for sample in samples]
    known = [float(value) for value in found if isinstance(value, int | float)]
    return min(known, default=1.0)


def _reused(sample: Sample) -> float | None:
    cached, timings = sample.details.get("cached"), sample.timings
    if not isinstance(cached, int):
        return None
    if timings is not None and timings.prompt_n is not None:
        whole: object = cached + timings.prompt_n
    else:
        # The `usage` of other servers counts the cached part with the prompt.
        whole = sample.details.get("usage_prompt_n")
    return cached / whole if isinstance(whole, int) and whole >= max(cached, 1) else None


def _prompt_ms(sample: Sample) -> float | None:
    """Time for the prompt; up to the first token where the server says nothing of it."""
    if sample.timings is not None:
        return sample.timings.prompt_ms
    return sample.client.ttft_ms if sample.client is not None else None


def _of(samples: Sequence[Sample], case: str) -> list[Sample]:
    return [sample for sample in samples if sample.case == case and sample.is_usable]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def details_of(reuse: Sequence[Reuse]) -> list[Mapping[str, Any]]:
    """As scripts read them."""
    return [asdict(one) for one in reuse]
