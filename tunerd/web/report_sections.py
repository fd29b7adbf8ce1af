"""The questions that a report answers, each from the samples of one suite; without them, none."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.core.bench.prompts import MTP_KINDS
from tunerd.core.evidence import AcceptanceByPosition, RunEvidence, TurnTime
from tunerd.core.metrics import Summary, spread, summarise
from tunerd.core.sample import Sample
from tunerd.web import report_charts as charts
from tunerd.web.report_charts import PARTS, Point, Stack
from tunerd.web.report_records import TITLES, record_tables
from tunerd.web.report_samples import (
    WHISKERS,
    as_words,
    distinct,
    in_words,
    legend_of,
    usable,
)
from tunerd.web.report_series import Series
from tunerd.web.report_text import (
    NOT_ASKED,
    figure,
    percent,
    seconds,
    span,
    tokens,
)
from tunerd.web.report_view import Cell, Chart, Column, Key, Section, Table

_DRAWN = frozenset({"mtp", "lengths", "deep", "quality"})


def speed_by_kind(series: Sequence[Series]) -> Section | None:
    """Decode rate by kind of text."""
    mine = [one for one in series if usable(one.of_suite("mtp"))]
    if not mine:
        return None
    kinds = distinct(sample.kind for one in mine for sample in usable(one.of_suite("mtp")))
    kinds.sort(key=_place)  # they are measured in random order
    by_kind = [(one, [_of_kind(one, kind) for kind in kinds]) for one in mine]
    points = [(one, [_rate_point(summary) for summary in found]) for one, found in by_kind]
    chart = Chart(
        name="speed-by-kind",
        title="Decode speed by kind of text",
        figure=charts.bars([as_words(kind) for kind in kinds], points, unit="tok/s"),
        alternative=in_words(
            "Bars of tokens a second by kind of text",
            [(one.label, summarise(one.of_suite("mtp")).decode.tok_s, "tok/s") for one in mine],
        ),
        legend=legend_of(mine, lines=False),
        note="Bars: all tokens of a kind over all their time."
        + (WHISKERS if any(p and p.low is not None for _, found in points for p in found) else ""),
    )
    return Section(
        name="speed",
        title="Speed by kind of text",
        text="Predictable text drafts well, free prose does not, so one number says little.",
        charts=(chart,),
        tables=tuple(_kind_table(one, kinds, found) for one, found in by_kind),
    )


def acceptance_by_position(
    series: Sequence[Series], evidence: Sequence[RunEvidence]
) -> Section | None:
    """How often each position of a draft was accepted, and whose drafts nothing is known of."""
    found = [(one, shares) for one in series if (shares := shares_of(one, evidence))]
    silent = [one for one in series if one.speculates and not shares_of(one, evidence)]
    if not found:
        return _no_positions(silent) if silent else None
    depth = max(len(shares) for _, shares in found)
    points = [
        (one, [Point(place, share) for place, share in enumerate(shares, 1)])
        for one, shares in found
    ]
    chart = Chart(
        name="acceptance",
        title="Share of verification steps in which a draft position was accepted",
        figure=charts.lines(
            points,
            x_title="position in the draft",
            y_title="",
            height=300,
            percent=True,
            x_ticks=range(1, depth + 1),
            x_range=(0.6, depth + 0.4),
        ),
        alternative=in_words(
            "Lines of acceptance by position in the draft, first position",
            [(one.label, shares[0] * 100, "%") for one, shares in found],
        ),
        legend=legend_of([one for one, _ in found]),
    )
    rows = [
        (str(place + 1), *(percent(s[place]) if place < len(s) else NOT_ASKED for _, s in found))
        for place in range(depth)
    ]
    columns = (Column("position", is_number=False), *(Column(one.label) for one, _ in found))
    return Section(
        name="acceptance",
        title="Drafts accepted, by position",
        text=" ".join(
            [
                "A draft is used up to its first wrong token, so late positions are reached less often.",
                *(_silence(one) for one in silent),
            ]
        ),
        charts=(chart,),
        tables=(Table("Accepted in all verification steps", columns, tuple(rows)),),
    )


def _no_positions(silent: Sequence[Series]) -> Section:
    """Words in place of an empty chart."""
    return Section(
        name="acceptance",
        title="Drafts accepted, by position",
        text=" ".join(_silence(one) for one in silent),
    )


def _silence(one: Series) -> str:
    return (
        f"{one.label} drafted, and its server told nothing of positions: that takes counters of "
        "positions in /metrics (mainline since August 2026, serving.metrics = true) or counts by depth "
        "in each answer (ik_llama.cpp since August 2026)."
    )


def shares_of(one: Series, evidence: Sequence[RunEvidence]) -> tuple[float, ...] | None:
    """The share of each position: from single requests, else as a run found it by the counters."""
    asked = usable(one.of_suite("mtp")) or usable(one.samples)
    by_request = summarise(asked).acceptance_by_position
    if by_request:
        return by_request
    kept = [
        (record.suite, acceptance.ratios)
        for run in evidence
        for record in run.summaries
        if (acceptance := AcceptanceByPosition.from_record(record)) is not None
        and one.has_name(run.run.number, acceptance.arm)
    ]
    kept.sort(key=lambda found: found[0] != "mtp")
    return kept[0][1] if kept else None


def turn_times(series: Sequence[Series], evidence: Sequence[RunEvidence]) -> Section | None:
    """Expected time of a turn by part."""
    found = [
        (one, turn)
        for run in evidence
        for summary in run.summaries
        if (turn := TurnTime.from_record(summary)) is not None
        for one in series
        if one.has_name(run.run.number, turn.arm)
    ]
    if not found:
        return None
    classes = distinct(turn.request_class or "" for _, turn in found)
    ordered = [(one, turn) for name in sorted(classes, key=bool) for one, turn in found
               if (turn.request_class or "") == name]  # fmt: skip
    rows = [
        Stack(
            _class_name(turn),
            one.label,
            turn.prefill_s,
            turn.reasoning_s,
            turn.decode_s,
            turn.waiting_s,
            turn.total_s,
        )
        for one, turn in ordered
    ]
    chart = Chart(
        name="turn-time",
        title="Expected seconds of one turn, by part",
        figure=charts.stacks(rows),
        alternative=in_words(
            "Stacked bars of seconds a turn",
            [(f"{row.group}, {row.label}", row.total, "s") for row in rows],
        ),
        legend=tuple(Key(name, attribute) for attribute, name in PARTS),
    )
    columns = (Column("class", is_number=False), Column("configuration", is_number=False),
               Column("weight"), *(Column(f"{name} [s]") for _, name in PARTS),
               Column("turn [s]"))  # fmt: skip
    table = Table(
        "Expected time of a turn",
        columns,
        tuple(
            (row.group, row.label, "all" if turn.request_class is None else percent(turn.weight, 0),
             figure(row.prefill), figure(row.reasoning), figure(row.decode), figure(row.waiting),
             figure(row.total))
            for row, (_, turn) in zip(rows, ordered, strict=True)
        ),
    )  # fmt: skip
    return Section(
        name="turn",
        title="Time of a turn",
        text="What a person waits for, by the client's clock: reading the prompt, reasoning, the "
        "answer itself, and waiting for the server.",
        charts=(chart,),
        tables=(table,),
    )


def other_suites(series: Sequence[Series], evidence: Sequence[RunEvidence]) -> Section | None:
    """Tables of every suite that has no chart, and of figures that nothing else shows."""
    suites = distinct(s.suite for one in series for s in one.samples if s.suite not in _DRAWN)
    tables = [_suite_table(suite, series) for suite in suites]
    tables += record_tables(evidence, series)
    if not tables:
        return None
    return Section(
        name="more",
        title="Other suites",
        text="Each by case. Rates are totals over totals, other figures medians of single requests.",
        tables=tuple(tables),
    )


def _place(kind: str) -> int:
    """Where the community's table has a kind; unknown ones come last."""
    return MTP_KINDS.index(kind) if kind in MTP_KINDS else len(MTP_KINDS)


def _leading_number(case: str) -> int:
    """`4 streams` after `2 streams`; names without a number keep their order."""
    word = case.split(" ", 1)[0]
    return int(word) if word.isascii() and word.isdigit() else 0


def _of_kind(one: Series, kind: str) -> Summary:
    return summarise([s for s in usable(one.of_suite("mtp")) if s.kind == kind])


def _rate_point(summary: Summary) -> Point | None:
    rate, single = summary.decode.tok_s, summary.decode_tok_s
    if rate is None:
        return None
    several = single.n > 1
    return Point(0, rate, single.least if several else None, single.most if several else None)


def _kind_table(one: Series, kinds: Sequence[str], found: Sequence[Summary]) -> Table:
    columns = (Column("kind of text", is_number=False), Column("requests"), Column("predicted"),
               Column("drafted"), Column("accepted"), Column("rate"), Column("tok/s"),
               Column("slowest to fastest"), Column("wall [s]"))  # fmt: skip
    rows = tuple(
        _kind_row(as_words(kind), summary, one) for kind, summary in zip(kinds, found, strict=True)
    )
    whole = summarise(usable(one.of_suite("mtp")))
    return Table(f"{one.label}: by kind of text", columns, rows, (_kind_row("all", whole, one),))


def _kind_row(name: str, summary: Summary, one: Series) -> tuple[Cell, ...]:
    none_drafted = NOT_ASKED if one.speculates is False else None
    return (
        name,
        str(summary.n),
        tokens(summary.n_predicted),
        tokens(summary.n_drafted) or none_drafted,
        tokens(summary.n_accepted) or none_drafted,
        percent(summary.acceptance_ratio) or none_drafted,
        figure(summary.decode.tok_s),
        span(summary.decode_tok_s.least, summary.decode_tok_s.most),
        seconds(summary.wall_ms.median, 2),
    )


def _suite_table(suite: str, series: Sequence[Series]) -> Table:
    columns = (Column("case", is_number=False), Column("configuration", is_number=False),
               Column("requests"), Column("prompt [ms]"), Column("tokens reused"),
               Column("TTFT [ms]"), Column("tok/s"), Column("wall [ms]"))  # fmt: skip
    measured = [(one, usable(one.of_suite(suite))) for one in series]
    cases = distinct(sample.case for _, samples in measured for sample in samples)
    cases.sort(key=_leading_number)
    rows = [
        _case_row(case, one, of_case)
        for case in cases
        for one, samples in measured
        if (of_case := [sample for sample in samples if sample.case == case])
    ]
    return Table(TITLES.get(suite, suite), columns, tuple(rows))


def _case_row(case: str, one: Series, samples: Sequence[Sample]) -> tuple[Cell, ...]:
    summary = summarise(samples)
    timings = [sample.timings for sample in samples if sample.timings is not None]
    prompt = spread(timing.prompt_ms for timing in timings)
    reused = spread(timing.cache_n for timing in timings)
    return (
        case,
        one.label,
        str(summary.n),
        figure(prompt.median, 0),
        tokens(reused.median),
        figure(summary.ttft_ms.median, 0),
        figure(summary.decode.tok_s),
        figure(summary.wall_ms.median, 0),
    )


def _class_name(turn: TurnTime) -> str:
    return turn.request_class or "whole workload"
