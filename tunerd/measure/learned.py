"""Learns a workload from what a server logged: only how many and how long, never what."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.engine.log import LoggedRequest
from tunerd.profile.workload import MIXED, ClassShape, Rates, Tokens, WorkloadShape

# Shorter than any work: the generation with which a start is checked, and a client's own probes.
_LEAST_TOKENS = 48
LEAST_REQUESTS = 30
# Where classes part: prompts by what is read in one go, in some, and in minutes; answers by whether
# the prompt or the answer decides about the turn.
_PROMPT_EDGES = (2048, 16384)
_ANSWER_EDGES = (256,)
_PROMPT_NAMES = ("short prompt", "middle prompt", "long prompt")
_ANSWER_NAMES = ("short answer", "long answer")
# A class of fewer requests than this joins the nearest: its percentiles would say nothing.
_LEAST_SHARE = 0.03
_LEAST_OF_CLASS = 5
_PERCENTILES = (10, 25, 50, 75, 90)
_MOST_PARALLEL = 64

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Learned:
    """A workload with what it was learned from.

    `n_short` requests were too short to be work, `n_unsure` had no known prompt length.
    """

    shape: WorkloadShape
    rates: Rates
    n_requests: int
    n_short: int
    n_unsure: int
    acceptance_ratio: float | None
    histograms: Mapping[str, Mapping[str, int]]

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file under `learned`, and as scripts read it."""
        return {
            "requests": self.n_requests,
            "too_short": self.n_short,
            "unsure": self.n_unsure,
            "prompt_tok_s": _rounded(self.rates.prompt_tok_s, 1),
            "decode_tok_s": _rounded(self.rates.decode_tok_s, 1),
            "acceptance_ratio": _rounded(self.acceptance_ratio, 4),
            **{name: dict(counts) for name, counts in self.histograms.items()},
        }


def learn(
    requests: Sequence[LoggedRequest], *, name: str, description: str, source: str
) -> Learned | None:
    """The workload of these requests; None where there are fewer than `LEAST_REQUESTS` that count.

    The log does not tell thoughts from answers, nor kinds of text: thoughts count as part of the
    answer, and the kind is `mixed`.
    """
    known = [one for one in requests if one.prompt_total_n is not None]
    work = [one for one in known if _prompt(one) + one.predicted_n >= _LEAST_TOKENS]
    if len(work) < LEAST_REQUESTS:
        return None
    cells = _cells(work)
    classes = tuple(
        _class(cell, [one for one in work if cells[_cell(one)] == cell], len(work))
        for cell in sorted(set(cells.values()))
    )
    return Learned(
        shape=WorkloadShape(name=name, classes=classes, description=description, source=source),
        rates=rates_of(work),
        n_requests=len(work),
        n_short=len(known) - len(work),
        n_unsure=len(requests) - len(known),
        acceptance_ratio=_acceptance(work),
        histograms={
            "prompt_tokens": _histogram([_prompt(one) for one in work]),
            "new_prompt_tokens": _histogram([one.prompt_n for one in work]),
            "answer_tokens": _histogram([one.predicted_n for one in work]),
            "concurrency": _counts([one.concurrency for one in work]),
        },
    )


def rates_of(requests: Sequence[LoggedRequest]) -> Rates:
    """All tokens over all their time; the first token of an answer belongs to its prompt."""
    prompt_ms = sum(one.prompt_ms for one in requests)
    decode_ms = sum(one.predicted_ms for one in requests)
    return Rates(
        sum(one.prompt_n for one in requests) / prompt_ms * 1000 if prompt_ms else None,
        sum(max(one.predicted_n - 1, 0) for one in requests) / decode_ms * 1000
        if decode_ms
        else None,
    )


def _prompt(request: LoggedRequest) -> int:
    return request.prompt_total_n or 0


def _cell(request: LoggedRequest) -> Cell:
    return (
        bisect_right(_PROMPT_EDGES, _prompt(request)),
        bisect_right(_ANSWER_EDGES, request.predicted_n),
    )


def _cells(work: Sequence[LoggedRequest]) -> dict[Cell, Cell]:
    """For each cell of the grid the one that its requests count for: small ones join the nearest."""
    counts = Counter(_cell(one) for one in work)
    least = max(_LEAST_SHARE * len(work), _LEAST_OF_CLASS)
    large = [cell for cell, count in counts.items() if count >= least]
    large = large or [max(counts, key=lambda cell: counts[cell])]
    return {
        cell: cell
        if cell in large
        else min(large, key=lambda other: (_distance(cell, other), other))
        for cell in counts
    }


def _distance(first: Cell, second: Cell) -> int:
    """An answer's length matters less than a prompt's, which decides what is measured."""
    return 2 * abs(first[0] - second[0]) + abs(first[1] - second[1])


def _class(cell: Cell, members: Sequence[LoggedRequest], n_all: int) -> ClassShape:
    prompts = [_prompt(one) for one in members]
    cached = sum(one.cached_n or 0 for one in members)
    parallel = _median([one.concurrency for one in members])
    return ClassShape(
        name=f"{_PROMPT_NAMES[cell[0]]}, {_ANSWER_NAMES[cell[1]]}",
        weight=round(len(members) / n_all, 4),
        kind=MIXED,
        prompt=_percentiles(prompts),
        cached_share=round(cached / sum(prompts), 4),
        reasoning=None,
        answer=_percentiles([one.predicted_n for one in members]),
        concurrency=min(max(parallel, 1), _MOST_PARALLEL),
    )


def _percentiles(values: Sequence[int]) -> Tokens:
    ordered = sorted(values)
    if ordered[0] == ordered[-1]:
        return Tokens.fixed(ordered[0])
    last = len(ordered) - 1
    points = tuple((p / 100, ordered[round(p / 100 * last)]) for p in _PERCENTILES)
    return Tokens(points, round(sum(ordered) / len(ordered), 1))


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]


def _acceptance(work: Sequence[LoggedRequest]) -> float | None:
    drafted = sum(one.drafted_n or 0 for one in work)
    return sum(one.accepted_n or 0 for one in work) / drafted if drafted else None


def _histogram(values: Sequence[int]) -> dict[str, int]:
    """Counts by powers of two, under the lower end of each bin."""
    counts = Counter(1 << max(value.bit_length() - 1, 0) if value else 0 for value in values)
    return {str(edge): counts[edge] for edge in sorted(counts)}


def _counts(values: Sequence[int]) -> dict[str, int]:
    counts = Counter(values)
    return {str(value): counts[value] for value in sorted(counts)}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
