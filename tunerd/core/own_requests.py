"""Tells requests of tunerd's own measurements from those of the people whom the server serves.

A log names nobody who asked. What was measured is stored with the counts and times that the server
gave with its answer, and the same stand in its log, with two decimals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunerd.core.request_log import LoggedRequest
from tunerd.core.sample import Timings

_DECIMALS_MS = 0.011  # of two decimals, rounded or cut


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """What is stored of tunerd's own requests.

    `n_unknown` were asked and have no counts that a log could be searched for.
    """

    timings: tuple[Timings, ...] = ()
    n_unknown: int = 0


def of_others(
    requests: Sequence[LoggedRequest], own: Iterable[Timings]
) -> tuple[LoggedRequest, ...]:
    """The requests that are not among those measured; each of these stands for one at most."""
    by_counts: dict[tuple[int | None, int | None], list[Timings]] = defaultdict(list)
    for one in own:
        by_counts[one.prompt_n, one.predicted_n].append(one)
    kept = []
    for request in requests:
        alike = by_counts.get((request.prompt_n, request.predicted_n), [])
        found = next((one for one in alike if _is_same(request, one)), None)
        if found is None:
            kept.append(request)
        else:
            alike.remove(found)
    return tuple(kept)


def _is_same(request: LoggedRequest, own: Timings) -> bool:
    pairs = ((request.prompt_ms, own.prompt_ms), (request.predicted_ms, own.predicted_ms))
    return all(ms is not None and abs(logged - ms) <= _DECIMALS_MS for logged, ms in pairs)
