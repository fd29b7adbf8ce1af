"""The table of the community's mtp-bench, and how this box stands beside published ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunerd.core.bench.prompts import MTP_KINDS
from tunerd.core.metrics import summarise
from tunerd.core.profile import Published
from tunerd.core.sample import Sample


@dataclass(frozen=True, slots=True)
class MtpRow:
    """One kind; counts are those of one request, as the mean over its repetitions.

    A figure that no request has is None. `acceptance_ratio` is accepted over drafted of all of them,
    `tok_s` all tokens over all time.
    """

    kind: str
    n: int
    n_left_out: int
    predicted: float | None
    drafted: float | None
    accepted: float | None
    acceptance_ratio: float | None
    tok_s: float | None


@dataclass(frozen=True, slots=True)
class MtpTable:
    """All kinds, and what people quote of them.

    `tok_s` is all tokens over all time, `mean_tok_s` the mean over the kinds, which published tables
    often have instead. `wall_s` is that of one round through all kinds. `missing` are the kinds of
    which no request counts, so that nothing here is over all of them.
    """

    rows: tuple[MtpRow, ...]
    n_requests: int
    predicted: int | None
    drafted: int | None
    accepted: int | None
    acceptance_ratio: float | None
    tok_s: float | None
    mean_tok_s: float | None
    wall_s: float | None
    missing: tuple[str, ...] = ()


def mtp_table(samples: Sequence[Sample]) -> MtpTable:
    """The table of one arm's samples; the warm-up is none of them."""
    by_kind = {kind: [s for s in samples if s.case == kind] for kind in MTP_KINDS}
    rows = tuple(_row(kind, found) for kind, found in by_kind.items() if found)
    whole = summarise([s for found in by_kind.values() for s in found])
    rates = [row.tok_s for row in rows]
    return MtpTable(
        rows=rows,
        n_requests=whole.n,
        predicted=_predicted([s for found in by_kind.values() for s in found]),
        drafted=whole.n_drafted,
        accepted=whole.n_accepted,
        acceptance_ratio=whole.acceptance_ratio,
        tok_s=whole.decode.tok_s,
        mean_tok_s=_mean(rates),
        wall_s=_wall_s(by_kind),
        missing=missing_kinds([s for found in by_kind.values() for s in found]),
    )


def missing_kinds(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The kinds of which no request counts."""
    known = {one.case for one in samples if one.is_usable}
    return tuple(kind for kind in MTP_KINDS if kind not in known)


def _predicted(samples: Sequence[Sample]) -> int | None:
    """Generated tokens, by the server's timings or by its `usage`; None where it says neither."""
    counts = [
        one.details.get("usage_completion_n") if one.n_predicted is None else one.n_predicted
        for one in samples
        if one.is_usable
    ]
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known else None


def _row(kind: str, samples: Sequence[Sample]) -> MtpRow:
    summary = summarise(samples)

    def each(total: int | None) -> float | None:
        return total / summary.n if total is not None and summary.n else None

    return MtpRow(
        kind=kind,
        n=summary.n,
        n_left_out=summary.n_unusable,
        predicted=each(_predicted(samples)),
        drafted=each(summary.n_drafted),
        accepted=each(summary.n_accepted),
        acceptance_ratio=summary.acceptance_ratio,
        tok_s=summary.decode.tok_s,
    )


def _wall_s(by_kind: Mapping[str, Sequence[Sample]]) -> float | None:
    """One round through all kinds; None where one of them has no usable request."""
    walls = []
    for samples in by_kind.values():
        found = [s.client.wall_ms for s in samples if s.is_usable and s.client is not None]
        if not found:
            return None
        walls.append(statistics.mean(found))
    return sum(walls) / 1000


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure of this box beside the published one; `ratio` is this box over published."""

    what: str
    here: float | None
    published: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """How many times the published figure this is; None where a figure is missing."""
        return None if self.here is None or not self.published else self.here / self.published


def beside_published(
    table: MtpTable, published: Published, family: str | None
) -> tuple[Beside, ...]:
    """The figures of the mtp suite that the published table has for this family of engines."""
    engine = (published.by_engine or {}).get(family or "", {})
    whole = (
        ("tok/s", table.tok_s, engine.get("tok_s", published.tok_s), "tok/s"),
        ("acceptance", table.acceptance_ratio,
         engine.get("acceptance_ratio", published.acceptance_ratio), ""),
        ("wall of one round", table.wall_s, engine.get("wall_s", published.wall_s), "s"),
    )  # fmt: skip
    found = [Beside(what, here, there, unit) for what, here, there, unit in whole
             if there is not None]  # fmt: skip
    kinds = (published.by_kind or {}).get(family or "", {})
    for row in table.rows:
        there = kinds.get(row.kind, {})
        found += [
            Beside(f"{row.kind}, {what}", here, there[key], unit)
            for what, key, here, unit in (("tok/s", "tok_s", row.tok_s, "tok/s"),
                                          ("rate", "rate", row.acceptance_ratio, ""))
            if key in there
        ]  # fmt: skip
    return tuple(found)


def lengths_beside_published(
    walls_ms: Mapping[int, float | None],
    rates: Mapping[int, float | None],
    published: Published,
) -> tuple[Beside, ...]:
    """The figures of the lengths suite that the published table has."""
    found = []
    for name, there in (published.by_length or {}).items():
        n_tokens = int(name)
        if n_tokens not in walls_ms:
            continue
        if "tok_s" in there:
            found.append(Beside(f"{n_tokens} tokens, tok/s", rates.get(n_tokens),
                                there["tok_s"], "tok/s"))  # fmt: skip
        if "wall_ms" in there:
            found.append(Beside(f"{n_tokens} tokens, wall", walls_ms[n_tokens],
                                there["wall_ms"], "ms"))  # fmt: skip
    return tuple(found)
