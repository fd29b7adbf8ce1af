"""Sections about length: of the answer, where speculation pays, and of the context, as it fills."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.core.bench.depth import Depth
from tunerd.core.evidence import Crossover, RunEvidence, number
from tunerd.core.metrics import Summary, summarise
from tunerd.core.sample import Sample
from tunerd.web import report_charts as charts
from tunerd.web.report_charts import Crossing, Point
from tunerd.web.report_samples import WHISKERS, in_words, legend_of, usable
from tunerd.web.report_series import Series
from tunerd.web.report_text import (
    figure,
    joined,
    percent,
    seconds,
    sentence,
    span,
    tokens,
)
from tunerd.web.report_view import Chart, Column, Section, Table


def crossover(series: Sequence[Series], evidence: Sequence[RunEvidence]) -> Section | None:
    """Wall time by length of the answer, and from where on speculation pays."""
    mine = [one for one in series if usable(one.of_suite("lengths"))]
    if not mine:
        return None
    lengths = sorted({s.n_predict for one in mine for s in usable(one.of_suite("lengths"))})
    by_length = [(one, [_of_length(one, length) for length in lengths]) for one in mine]
    points = [
        (one, [point for length, s in zip(lengths, found, strict=True)
               if (point := _wall_point(length, s)) is not None])
        for one, found in by_length
    ]  # fmt: skip
    crossings = _crossings(evidence, mine)
    mark = next((c for _, _, c in crossings if c.n_tokens), None)
    chart = Chart(
        name="crossover",
        title="Seconds until the answer is complete, by its length",
        figure=charts.lines(
            points,
            x_title="tokens of the answer",
            y_title="seconds",
            x_ticks=lengths,
            crossing=None if mark is None or mark.n_tokens is None
            else Crossing(mark.n_tokens, mark.low, mark.high),
        ),
        alternative=in_words(
            f"Lines of seconds by length of the answer, at {lengths[-1]:,} tokens",
            [(one.label, found[-1].y if found else None, "s") for one, found in points],
        ),
        legend=legend_of(mine),
        note="Points: medians."
        + (WHISKERS if any(point.low is not None for _, found in points for point in found) else "")
        + (" Dotted line and band: the crossing and its interval." if mark is not None else ""),
    )  # fmt: skip
    said = [crossing_sentence(one.label, than.label, c) for one, than, c in crossings]
    compared = "Speculation costs time while the prompt is read, and gains on each token."
    alone = "The whole wait: reading the prompt, and the answer to its last token."
    text = " ".join(said) or (compared if len(mine) > 1 else alone)
    return Section(
        name="crossover",
        title="From which length speculation pays"
        if len(mine) > 1
        else "Time by length of the answer",
        text=text,
        charts=(chart,),
        tables=tuple(_length_table(one, lengths, found) for one, found in by_length),
    )


def crossing_sentence(label: str, than: str, found: Crossover) -> str:
    """A crossing in words."""
    if found.n_tokens is None:
        return sentence([label, "was faster than", than, "at no length that was measured"])
    if found.n_tokens == 0:
        return sentence([label, "was faster than", than, "at every length that was measured"])
    interval = span(found.low, found.high, 0)
    shown = (
        f"({percent(found.level, 0)} interval {interval})" if interval else "(without an interval)"
    )
    return sentence([label, "is faster than", than, "from", tokens(found.n_tokens) or "",
                     "tokens on", shown])  # fmt: skip


def as_context_fills(series: Sequence[Series], evidence: Sequence[RunEvidence]) -> Section | None:
    """Free VRAM and speed by depth of the context."""
    mine = [
        (one, found)
        for one in series
        if (found := [(depth, s) for s in usable(one.of_suite("deep"))
                      if (depth := _depth(s)) is not None])
    ]  # fmt: skip
    if not mine:
        return None
    free = [(one, [Point(depth, s.vram_free_min_mib) for depth, s in found
                   if s.vram_free_min_mib is not None]) for one, found in mine]  # fmt: skip
    speed = [(one, [Point(depth, rate) for depth, s in found
                    if s.timings and (rate := s.timings.decode_tok_s) is not None])
             for one, found in mine]  # fmt: skip
    legend = legend_of([one for one, _ in mine])
    drawn = []
    for name, title, values, unit in (
        ("vram-by-depth", "Least free VRAM", free, "MiB"),
        ("speed-by-depth", "Decode speed", speed, "tok/s"),
    ):
        if not any(points for _, points in values):
            continue
        drawn.append(
            Chart(
                name=name,
                title=f"{title} by depth of the context",
                figure=charts.lines(values, x_title="tokens of context", y_title=unit, height=300),
                alternative=in_words(
                    f"Line of {title.lower()} by depth, at the deepest point",
                    [(one.label, points[-1].y if points else None, unit) for one, points in values],
                ),
                legend=legend,
            )
        )
    return Section(
        name="depth",
        title="As the context fills",
        text=" ".join(
            ("Memory and speed at each depth of the context.", *_depth_sentences(series, evidence))
        ),
        charts=tuple(drawn),
        tables=tuple(_depth_table(one, found) for one, found in mine),
    )


def _depth_sentences(series: Sequence[Series], evidence: Sequence[RunEvidence]) -> list[str]:
    """How far the context could be filled, and where that went wrong."""
    found = []
    for run in evidence:
        for record in run.summaries:
            one = next((s for s in series if s.has_name(run.run.number, record.arm or "")), None)
            if record.name != Depth.NAME or one is None:
                continue
            filled, spill, failed = (
                tokens(number(record.figures, key))
                for key in ("filled_tokens", "spill_tokens", "failed_tokens")
            )
            parts = [f"filled up to {filled} tokens" if filled else "not filled at all"]
            parts += [f"spills from {spill} tokens on"] if spill else []
            parts += [f"no answer at {failed} tokens"] if failed else []
            why = record.figures.get("why")
            found.append(sentence([f"{one.label}: {joined(parts)}", f"({why})" if why else ""]))
    return found


def _of_length(one: Series, length: int) -> Summary:
    return summarise([s for s in usable(one.of_suite("lengths")) if s.n_predict == length])


def _wall_point(length: int, summary: Summary) -> Point | None:
    wall = summary.wall_ms
    if wall.median is None:
        return None
    several = wall.n > 1 and wall.least is not None and wall.most is not None
    low = (wall.least or 0) / 1000 if several else None
    high = (wall.most or 0) / 1000 if several else None
    return Point(length, wall.median / 1000, low, high)


def _length_table(one: Series, lengths: Sequence[int], found: Sequence[Summary]) -> Table:
    columns = (Column("tokens", is_number=False), Column("requests"), Column("wall [s]"),
               Column("fastest to slowest [s]"), Column("TTFT [s]"), Column("tok/s"),
               Column("prompt tok/s"))  # fmt: skip
    rows = []
    for length, s in zip(lengths, found, strict=True):
        wall = s.wall_ms
        least, most = (None if ms is None else ms / 1000 for ms in (wall.least, wall.most))
        rows.append((f"{length:,}", str(s.n), seconds(wall.median, 2), span(least, most),
                     seconds(s.ttft_ms.median, 2), figure(s.decode.tok_s),
                     figure(s.prompt.tok_s, 0)))  # fmt: skip
    return Table(f"{one.label}: by length of the answer", columns, tuple(rows))


def _depth_table(one: Series, found: Sequence[tuple[float, Sample]]) -> Table:
    columns = (Column("tokens of context", is_number=False), Column("free VRAM [MiB]"),
               Column("tok/s"), Column("prompt tok/s"))  # fmt: skip
    rows = tuple(
        (f"{depth:,.0f}", figure(s.vram_free_min_mib, 0),
         figure(s.timings.decode_tok_s if s.timings else None),
         figure(s.timings.prompt_tok_s if s.timings else None, 0))
        for depth, s in found
    )  # fmt: skip
    return Table(f"{one.label}: by depth of the context", columns, rows)


def _crossings(
    evidence: Sequence[RunEvidence], series: Sequence[Series]
) -> list[tuple[Series, Series, Crossover]]:
    """The crossings that were found between two configurations of the report."""
    found = []
    for run in evidence:
        for summary in run.summaries:
            crossing = Crossover.from_record(summary)
            if crossing is None:
                continue
            sides = [
                next((one for one in series if one.has_name(run.run.number, name)), None)
                for name in (crossing.arm, crossing.than)
            ]
            if sides[0] is not None and sides[1] is not None:
                found.append((sides[0], sides[1], crossing))
    return found


def _depth(sample: Sample) -> float | None:
    """Tokens in the context when the answer began: as said, else prompt and cached tokens."""
    said = number(sample.details, "depth")
    if said is not None:
        return said
    timings = sample.timings
    if timings is None or timings.prompt_n is None or timings.cache_n is None:
        return None
    return timings.prompt_n + timings.cache_n
