"""`tunerd report`: one file that says what was measured, under which conditions, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from shlex import join
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.flags import without_secrets
from tunerd.errors import HostError, UsageError
from tunerd.machine.files import Files
from tunerd.measure.answer import Sample, Summary, spread, summarise
from tunerd.measure.evidence import (
    AcceptanceByPosition,
    Crossover,
    RunEvidence,
    StoredRun,
    SummaryRecord,
    TurnTime,
    Validity,
    VerdictRecord,
    number,
)
from tunerd.measure.findings import Depth, missing_kinds
from tunerd.measure.request import MTP_KINDS
from tunerd.measure.results import damage_messages, run_of
from tunerd.measure.store import EvidenceStore, open_to_read
from tunerd.result import ActionResult, Message, warning
from tunerd.web.charts import (
    WHISKERS,
    Bar,
    Bars,
    Crossing,
    Heat,
    Line,
    Lines,
    Part,
    Point,
    Series,
    as_words,
    css_variables,
    differences,
    distinct,
    draw,
    legend,
    line_of,
    series_of,
    usable,
)
from tunerd.web.view import (
    NOT_ASKED,
    Cell,
    Chart,
    Column,
    Conditions,
    Facts,
    KeyFigure,
    Report,
    Section,
    Table,
    Verdict,
    counted,
    figure,
    heads,
    joined,
    percent,
    seconds,
    sentence,
    span,
    tokens,
)
from tunerd.words import UNKNOWN, when

_LOOK_BACK = 200


def gather_evidence(
    ctx: Context, numbers: Sequence[int]
) -> tuple[tuple[RunEvidence, ...], tuple[Message, ...]]:
    """Everything that is kept of some runs, oldest first, and what of it cannot be read.

    Args:
        ctx: Where.
        numbers: The runs; none for the newest ones that together have measured every suite once.

    Raises:
        UsageError: there is no such run, or nothing was measured yet.
    """
    store = open_to_read(ctx.paths.evidence)
    if store is None:
        raise UsageError("nothing was measured yet", hint="tunerd bench")
    with store:
        runs = _named_arms(store, numbers) if numbers else _newest(store)
        if not runs:
            raise UsageError("nothing was measured yet", hint="tunerd bench")
        found = [_evidence(store, run) for run in runs]
        damage = damage_messages(store)
    return tuple(sorted(found, key=lambda one: one.run.record.started_s)), damage


def check_validity(
    ctx: Context, evidence: Sequence[RunEvidence]
) -> dict[tuple[int, str], Validity]:
    """For each run and arm, whether it still holds on this machine."""
    from tunerd.measure.results import StalenessCheck

    check = StalenessCheck(ctx)
    return {
        (one.run.number, arm.name): check.of(arm, one.run.record)
        for one in evidence
        for arm in one.run.record.arms
    }


def made_report(
    html: str, evidence: Sequence[RunEvidence], messages: Sequence[Message] = ()
) -> ActionResult:
    """The page about some runs, not yet written anywhere."""
    payload = {"runs": [one.run.number for one in evidence], "html": html}
    return ActionResult("report", payload, (*messages, *_messages(evidence)))


def write_report(path: Path, made: ActionResult) -> ActionResult:
    """Write the page that `made_report` gave, here or in the daemon.

    Raises:
        HostError: it cannot be written.
    """
    if not path.parent.is_dir():
        raise HostError(f"no such folder: `{path.parent}`", hint="make it first, or choose another")
    Files().write(path, str(made.payload["html"]).encode())
    payload = {
        "path": str(path.resolve()),
        "bytes": path.stat().st_size,
        "runs": made.payload["runs"],
    }
    return ActionResult("report", payload, made.messages)


def _messages(evidence: Sequence[RunEvidence]) -> list[Message]:
    empty = [str(one.run.number) for one in evidence if one.run.n_samples == 0]
    if not empty:
        return []
    return [warning("no-samples", f"without samples: run {', '.join(empty)}")]


def _named_arms(store: EvidenceStore, numbers: Sequence[int]) -> list[StoredRun]:
    return [run_of(store, number) for number in dict.fromkeys(numbers)]


def _newest(store: EvidenceStore) -> list[StoredRun]:
    """The newest runs, each of which has a suite that no newer one has."""
    covered: set[str] = set()
    chosen = []
    for run in store.runs(limit=_LOOK_BACK):
        suites = {f"{run.record.kind} {suite}" for suite in run.record.suites}
        if run.n_samples and not suites <= covered:
            covered |= suites
            chosen.append(run)
    return chosen


def _evidence(store: EvidenceStore, run: StoredRun) -> RunEvidence:
    by_arm: dict[str, list[Sample]] = {arm.name: [] for arm in run.record.arms}
    for arm, sample in store.arm_samples(run.number):
        by_arm[arm].append(sample)
    return RunEvidence(
        run=run,
        samples={arm: tuple(samples) for arm, samples in by_arm.items()},
        summaries=store.summaries(run.number),
        verdicts=store.verdicts(run.number),
    )


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
        plot=Lines(
            tuple(line_of(one, found) for one, found in points),
            unit="seconds",
            x_title="tokens of the answer",
            height=340,
            x_ticks=tuple(lengths),
            crossing=None if mark is None or mark.n_tokens is None
            else Crossing(mark.n_tokens, mark.low, mark.high),
        ),
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
                plot=Lines(
                    tuple(line_of(one, points) for one, points in values),
                    unit=unit,
                    x_title="tokens of context",
                ),
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
    columns = heads(
        "~tokens",
        "requests",
        "wall [s]",
        "fastest to slowest [s]",
        "TTFT [s]",
        "tok/s",
        "prompt tok/s",
    )
    rows = []
    for length, s in zip(lengths, found, strict=True):
        wall = s.wall_ms
        least, most = (None if ms is None else ms / 1000 for ms in (wall.least, wall.most))
        rows.append((f"{length:,}", str(s.n), seconds(wall.median, 2), span(least, most),
                     seconds(s.ttft_ms.median, 2), figure(s.decode.tok_s),
                     figure(s.prompt.tok_s, 0)))  # fmt: skip
    return Table(f"{one.label}: by length of the answer", columns, tuple(rows))


def _depth_table(one: Series, found: Sequence[tuple[float, Sample]]) -> Table:
    columns = heads("~tokens of context", "free VRAM [MiB]", "tok/s", "prompt tok/s")
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


TITLES = {
    "cache": "Prompt cache",
    "concurrency": "Several requests at once",
    "mtp": "Speed by kind of text",
    "quality": "Quality",
    "workload": "Workload",
}
_DRAWN_RECORDS = frozenset({AcceptanceByPosition.NAME, Crossover.NAME, Depth.NAME, TurnTime.NAME})
_UNITS = {"_mib": "MiB", "_tok_s": "tok/s", "_tokens": "tokens", "_ms": "ms", "_s": "s",
          "_letters": "letters", "_ratio": "share"}  # fmt: skip
_CASE = "case"
_NOT_TOLD = "cannot tell"
_EXACT_FROM = 1000


def record_tables(evidence: Sequence[RunEvidence], series: Sequence[Series]) -> list[Table]:
    """One table for each name under which figures are kept, a row for each record.

    What a record holds as a list of rows becomes a table of its own.
    """
    groups: dict[tuple[str, str], list[tuple[str | None, SummaryRecord]]] = {}
    for run in evidence:
        for record in run.summaries:
            if record.name not in _DRAWN_RECORDS:
                label = label_of(series, run, record.arm)
                groups.setdefault((record.suite, record.name), []).append((label, record))
    return [
        table
        for (suite, name), records in groups.items()
        for table in _tables(_caption(suite, name), records)
    ]


def label_of(series: Sequence[Series], run: RunEvidence, arm: str | None) -> str | None:
    """The label of what a run called by this name; None for none."""
    if arm is None:
        return None
    return next((one.label for one in series if one.has_name(run.run.number, arm)), arm)


def _tables(caption: str, records: Sequence[tuple[str | None, SummaryRecord]]) -> list[Table]:
    rows = [(label, _scalars(record.figures)) for label, record in records]
    found = [_table(caption, rows)] if any(figures for _, figures in rows) else []
    inner = distinct(key for _, record in records for key in _row_keys(record.figures))
    for key in inner:
        parts = [(label, row) for label, record in records for row in record.figures.get(key, ())]
        found.append(_table(f"{caption}, {_head(key)}", parts))
    return found


def _table(caption: str, rows: Sequence[tuple[str | None, Mapping[str, Any]]]) -> Table:
    """Rows by case where they have one, else by configuration."""
    keys = distinct(key for _, figures in rows for key in figures)
    has_case = _CASE in keys
    keys = [key for key in keys if key != _CASE]
    labels = any(label is not None for label, _ in rows)
    columns = [*heads("~case")] if has_case else []
    columns += heads("~configuration") if labels or not has_case else ()
    numbers = {key: all(_is_number(figures.get(key)) for _, figures in rows) for key in keys}
    columns += [Column(_head(key), is_number=numbers[key]) for key in keys]
    cells = []
    for label, figures in rows:
        row: list[Cell] = [_value(figures.get(_CASE))] if has_case else []
        row += [label or "all"] if labels or not has_case else []
        row += [_value(figures.get(key), is_number=numbers[key]) for key in keys]
        cells.append(tuple(row))
    return Table(caption, tuple(columns), tuple(cells))


def _caption(suite: str, name: str) -> str:
    title = TITLES.get(suite, suite)
    return title if name == suite else f"{title}: {name}"


def _scalars(figures: Mapping[str, Any]) -> dict[str, Any]:
    rows = _row_keys(figures)
    return {key: value for key, value in figures.items() if key not in rows and key != "arm"}


def _row_keys(figures: Mapping[str, Any]) -> list[str]:
    """The keys whose values are lists of rows."""
    return [
        key
        for key, value in figures.items()
        if isinstance(value, list | tuple)
        and value
        and all(isinstance(one, Mapping) for one in value)
    ]


def _head(key: str) -> str:
    """`least_free_mib` as `least free [MiB]`, `n_same` as `same`."""
    unit = next((ending for ending in _UNITS if key.endswith(ending)), None)
    name = key.removesuffix(unit) if unit is not None else key
    words = name.removeprefix("n_").replace("_", " ").replace("ttft", "TTFT")
    return f"{words} [{_UNITS[unit]}]" if unit is not None else words


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _value(value: object, *, is_number: bool = True) -> Cell:
    if value is None:
        return None if is_number else _NOT_TOLD
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < _EXACT_FROM else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return joined([_value(one) or UNKNOWN for one in value]) or counted(0, "entry", "entries")
    return str(value)


_DRAWN_SECTIONS = frozenset({"mtp", "lengths", "deep", "quality"})
PARTS = (
    ("prefill_s", "Reading the prompt"),
    ("reasoning_s", "Reasoning"),
    ("decode_s", "Answering"),
    ("waiting_s", "Waiting"),
)


def speed_by_kind(series: Sequence[Series]) -> Section | None:
    """Decode rate by kind of text."""
    mine = [one for one in series if usable(one.of_suite("mtp"))]
    if not mine:
        return None
    kinds = distinct(sample.kind for one in mine for sample in usable(one.of_suite("mtp")))
    kinds.sort(key=_place)  # they are measured in random order
    by_kind = [(one, [_of_kind(one, kind) for kind in kinds]) for one in mine]
    groups = tuple(
        (as_words(kind), tuple(_rate_bar(one, found[at]) for one, found in by_kind))
        for at, kind in enumerate(kinds)
    )
    chart = Chart(
        name="speed-by-kind",
        title="Decode speed by kind of text",
        plot=Bars(groups, "tok/s"),
        note="Bars: all tokens of a kind over all their time."
        + (WHISKERS if any(bar.low is not None for _, bars in groups for bar in bars) else ""),
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
    chart = Chart(
        name="acceptance",
        title="Share of verification steps in which a draft position was accepted",
        plot=Lines(
            tuple(
                line_of(one, [Point(place, share) for place, share in enumerate(shares, 1)])
                for one, shares in found
            ),
            unit="",
            x_title="position in the draft",
            is_ratio=True,
            x_ticks=tuple(range(1, depth + 1)),
            x_range=(0.6, depth + 0.4),
        ),
    )
    rows = [
        (str(place + 1), *(percent(s[place]) if place < len(s) else NOT_ASKED for _, s in found))
        for place in range(depth)
    ]
    columns = heads("~position", *(one.label for one, _ in found))
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
    groups = tuple(
        (name, tuple(_turn_bar(one, turn) for one, turn in turns))
        for name, turns in groupby(ordered, lambda found: _class_name(found[1]))
    )
    chart = Chart(
        name="turn-time",
        title="Expected seconds of one turn, by part",
        plot=Bars(groups, "seconds", is_stacked=True),
    )
    columns = heads(
        "~class", "~configuration", "weight", *(f"{name} [s]" for _, name in PARTS), "turn [s]"
    )
    table = Table(
        "Expected time of a turn",
        columns,
        tuple(
            (_class_name(turn), one.label,
             "all" if turn.request_class is None else percent(turn.weight, 0),
             *(figure(getattr(turn, attribute)) for attribute, _ in PARTS), figure(turn.total_s))
            for one, turn in ordered
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
    suites = distinct(
        s.suite for one in series for s in one.samples if s.suite not in _DRAWN_SECTIONS
    )
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


def _rate_bar(one: Series, summary: Summary) -> Bar:
    rate, single = summary.decode.tok_s, summary.decode_tok_s
    part = Part(one.label, one.colour, rate, one.shade)
    if rate is None or single.n < 2:  # noqa: PLR2004 -- a spread is of several
        return Bar(one.label, (part,), rate)
    return Bar(one.label, (part,), rate, single.least, single.most)


def _turn_bar(one: Series, turn: TurnTime) -> Bar:
    parts = tuple(
        Part(name, attribute.removesuffix("_s"), getattr(turn, attribute))
        for attribute, name in PARTS
    )
    return Bar(one.label, parts, turn.total_s)


def _kind_table(one: Series, kinds: Sequence[str], found: Sequence[Summary]) -> Table:
    columns = heads(
        "~kind of text",
        "requests",
        "predicted",
        "drafted",
        "accepted",
        "rate",
        "tok/s",
        "slowest to fastest",
        "wall [s]",
    )
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
    columns = heads(
        "~case",
        "~configuration",
        "requests",
        "prompt [ms]",
        "tokens reused",
        "TTFT [ms]",
        "tok/s",
        "wall [ms]",
    )
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


Validities = Mapping[tuple[int, str], Validity]

_STATES = {True: "still holds on this machine", False: "no longer holds on this machine",
           None: "cannot be told whether it still holds"}  # fmt: skip


def title_of(evidence: Sequence[RunEvidence], series: Sequence[Series]) -> tuple[str, str]:
    """Title and subtitle: what was measured, and on what."""
    models = _distinct(one.run.record.model_name for one in evidence)
    cards = _distinct(
        name for one in series for name in one.arm.fingerprint.gpu_names or ()
    ) or _distinct(one.arm.fingerprint.cpu_model for one in series)
    engines = _distinct(one.arm.engine for one in series)
    return joined(models) or "Measurements", " · ".join([*cards, *engines])


def verdicts_of(evidence: Sequence[RunEvidence], series: Sequence[Series]) -> tuple[Verdict, ...]:
    """What comparisons ended with."""
    return tuple(_verdict(run, verdict, series) for run in evidence for verdict in run.verdicts)


def sentences_of(
    evidence: Sequence[RunEvidence], series: Sequence[Series], validities: Validities
) -> tuple[str, ...]:
    """What the samples show, in a few sentences, and whether it still holds."""
    said = []
    rates = [(one, summarise(one.of_suite("mtp")).decode.tok_s) for one in series]
    known = [
        f"{one.label} {figure(rate)} tok/s{_without(one)}"
        for one, rate in rates
        if rate is not None
    ]
    if known:
        said.append(sentence(["over all kinds of text:", joined(known)]))
    for run in evidence:
        for summary in run.summaries:
            found = Crossover.from_record(summary)
            names = [_named(series, run, name) for name in (found.arm, found.than)] if found else []
            if found is not None and all(name is not None for name in names):
                said.append(crossing_sentence(names[0] or "", names[1] or "", found))
    left_out = sum(not s.is_usable for one in series for s in one.samples)
    total = sum(len(one.samples) for one in series)
    if total:
        made = f"{counted(total, 'request')} {'was' if total == 1 else 'were'} made,"
        said.append(sentence([made, f"{left_out:,} left out of every figure"]))
    for one in series:
        validity = _validity(one, validities)
        if validity is not None and not validity.holds:
            why = "; ".join(validity.texts)
            said.append(sentence([f"{one.label}:", _STATES[validity.holds], f"({why})"]))
    return tuple(said)


def figures_of(evidence: Sequence[RunEvidence], series: Sequence[Series]) -> tuple[KeyFigure, ...]:
    """Numbers worth reading first; those that were not measured are not among them."""
    found: list[KeyFigure] = []
    best = [(one, rate) for one in series
            if (rate := summarise(one.of_suite("mtp")).decode.tok_s) is not None]  # fmt: skip
    if best:
        one, rate = max(best, key=lambda pair: pair[1])
        found.append(
            KeyFigure(f"{rate:,.1f}", "tok/s", f"decode over all kinds{_without(one)}, {one.label}")
        )
    turns = [
        (name, turn.total_s)
        for run in evidence
        for summary in run.summaries
        if (turn := TurnTime.from_record(summary)) is not None
        and turn.request_class is None
        and turn.total_s is not None
        and (name := _named(series, run, turn.arm)) is not None
    ]
    if turns:
        name, total_s = min(turns, key=lambda pair: pair[1])
        found.append(KeyFigure(f"{total_s:.1f}", "s", f"expected turn, {name}"))
    crossings = [
        c.n_tokens for run in evidence for s in run.summaries
        if (c := Crossover.from_record(s)) is not None and c.n_tokens
    ]  # fmt: skip
    if crossings:
        found.append(KeyFigure(tokens(crossings[0]) or "", "tokens",
                               "from this length of an answer on speculation pays"))  # fmt: skip
    free = [s.vram_free_min_mib for one in series for s in one.of_suite("deep")
            if s.is_usable and s.vram_free_min_mib is not None]  # fmt: skip
    if free:
        found.append(KeyFigure(f"{min(free):,}", "MiB", "least free VRAM at any depth"))
    return tuple(found)


def _without(one: Series) -> str:
    """Which kinds a figure over all kinds does not have."""
    missing = missing_kinds(one.of_suite("mtp"))
    return f" (without {joined([as_words(kind) for kind in missing])})" if missing else ""


def conditions_of(
    evidence: Sequence[RunEvidence], series: Sequence[Series], validities: Validities
) -> tuple[Conditions, ...]:
    """Under which conditions each configuration was measured."""
    differing = differences(series)
    return tuple(_conditions(one, evidence, differing[one.label], validities) for one in series)


def left_out(series: Sequence[Series], evidence: Sequence[RunEvidence]) -> Section:
    """Requests that no figure holds, and figures that requests do not have."""
    marked = _reasons(series)
    missing = _missing(series, evidence)
    tables = [
        Table(
            "Requests by configuration",
            heads("~configuration", "made", "used", "left out"),
            tuple(
                (one.label, f"{len(one.samples):,}", f"{sum(s.is_usable for s in one.samples):,}",
                 f"{sum(not s.is_usable for s in one.samples):,}")
                for one in series
            ),
        )
    ]  # fmt: skip
    reason = heads("~reason", "~configuration", "requests")
    if marked:
        tables.append(Table("Left out, by reason (one request may have several)", reason, marked))
    if missing:
        what = heads("~figure", "~configuration", "missing in", "of")
        tables.append(Table("Figures that used requests lack", what, missing))
    text = (
        "What is marked is repeated or left out, never averaged in silence; "
        "what is missing is missing, never zero."
    )
    return Section("left-out", "Left out and missing", text, tables=tuple(tables))


def runs_table(evidence: Sequence[RunEvidence]) -> Table:
    """The runs that the report is made of."""
    columns = heads("~run", "~when", "~kind", "~of", "~suites", "seed", "requests", "~ended")
    rows = tuple(
        (
            str(one.run.number),
            when(one.run.record.started_s),
            one.run.record.kind,
            one.run.record.target,
            ", ".join(one.run.record.suites),
            None if one.run.record.seed is None else str(one.run.record.seed),
            f"{one.run.n_samples:,}",
            _ending(one),
        )
        for one in evidence
    )
    return Table("Runs in this report", columns, rows)


def _verdict(run: RunEvidence, verdict: VerdictRecord, series: Sequence[Series]) -> Verdict:
    names = [
        (name, label)
        for name in (verdict.arm_a, verdict.arm_b)
        if name is not None and (label := _named(series, run, name)) not in {None, name}
    ]
    basis = [f"run {run.run.number}"]
    if verdict.what is not None:
        basis.append(verdict.what)
    if verdict.n_pairs is not None:
        basis.append(counted(verdict.n_pairs, "pair"))
    return Verdict(
        sentence=sentence([verdict.sentence]),
        names=tuple((name, label or "") for name, label in names),
        reasons=verdict.reasons,
        basis=", ".join(basis),
    )


def _conditions(
    one: Series,
    evidence: Sequence[RunEvidence],
    differing: Sequence[str],
    validities: Validities,
) -> Conditions:
    arm, found = one.arm, one.arm.fingerprint
    validity = _validity(one, validities)
    profiles = _distinct(run.run.record.profile for run in evidence if run.run.number in one.runs)
    facts: list[tuple[str, Cell]] = [
        ("Card", None if found.gpu_names is None else joined(found.gpu_names) or "none"),
        ("Power limit", _watts(found.power_limits_w)),
        ("Driver", found.driver_version or ("none" if found.gpu_names == () else None)),
        ("Processor", found.cpu_model),
        ("Engine", _words(arm.engine, arm.engine_version)),
        ("Engine identity", _short(found.engine_sha256)),
        ("Model file", None if arm.model_path is None else arm.model_path.rpartition("/")[2]),
        ("Model identity", _short(found.model_sha256)),
        ("Chat template", _short(found.template_sha256)),
        ("Profile", joined(profiles) or None),
        ("Generation", None if arm.generation is None else str(arm.generation)),
        ("Fingerprint", found.short),
    ]
    optional = {"Profile", "Generation", "Chat template", "Power limit"}
    return Conditions(
        label=one.label,
        colour=one.colour,
        shade=one.shade,
        state=None if validity is None else _STATES[validity.holds],
        state_texts=() if validity is None else (*validity.texts, *validity.remarks),
        facts=tuple((name, value) for name, value in facts
                    if value is not None or name not in optional),
        differences=tuple(differing),
        flags=_flags(one),
        command=None if arm.argv is None else join(without_secrets(arm.argv)),
    )  # fmt: skip


def _validity(one: Series, validities: Validities) -> Validity | None:
    """What was found of it when it was checked; the same for every run that it is in."""
    keys = ((run, name) for run in reversed(one.runs) for name in one.names)
    return next((validities[key] for key in keys if key in validities), None)


def _flags(one: Series) -> Table | None:
    if not one.arm.origins:
        return None
    columns = heads("~flag", "~key", "~set by")
    return Table(f"{one.label}: flags and who set them", columns, tuple(one.arm.origins))


def _reasons(series: Sequence[Series]) -> tuple[tuple[Cell, ...], ...]:
    counts: dict[tuple[str, str], int] = {}
    for one in series:
        for sample in one.samples:
            reasons = [str(mark) for mark in sample.marks]
            reasons += ["no answer"] if sample.problem is not None else []
            for reason in reasons:
                counts[reason, one.label] = counts.get((reason, one.label), 0) + 1
    return tuple((reason, label, f"{n:,}") for (reason, label), n in sorted(counts.items()))


def _missing(
    series: Sequence[Series], evidence: Sequence[RunEvidence]
) -> tuple[tuple[Cell, ...], ...]:
    """Figures that usable requests lack, where they could have them."""
    rows = []
    for one in series:
        used = [sample for sample in one.samples if sample.is_usable]
        for name, has in _FIGURES:
            n = sum(not has(sample) for sample in used)
            has_other = name == _BY_POSITION and shares_of(one, evidence)
            if n and not has_other and not (name in _OF_DRAFTS and one.speculates is False):
                rows.append((name, one.label, f"{n:,}", f"{len(used):,}"))
    return tuple(sorted(rows))


_BY_POSITION = "acceptance by position"
_FIGURES: tuple[tuple[str, Callable[[Sample], bool]], ...] = (
    ("decode rate", lambda s: s.timings is not None and s.timings.decode_tok_s is not None),
    ("prompt rate", lambda s: s.timings is not None and s.timings.prompt_tok_s is not None),
    ("tokens reused", lambda s: s.timings is not None and s.timings.cache_n is not None),
    ("drafted tokens", lambda s: s.timings is not None and s.timings.draft_n is not None),
    (
        _BY_POSITION,
        lambda s: s.timings is not None and s.timings.accepted_by_position is not None,
    ),
    ("time to first token", lambda s: s.client is not None and s.client.ttft_ms is not None),
    ("wall time", lambda s: s.client is not None),
    ("free VRAM", lambda s: s.vram_free_min_mib is not None),
)
_OF_DRAFTS = frozenset({"drafted tokens", _BY_POSITION})


def _named(series: Sequence[Series], run: RunEvidence, name: str) -> str | None:
    """The label of what a run called by this name."""
    return next((one.label for one in series if one.has_name(run.run.number, name)), None)


def _ending(one: RunEvidence) -> str:
    if one.run.outcome is None:
        return "not yet, or cut short"
    return f"{one.run.outcome}: {one.run.reason}" if one.run.reason else str(one.run.outcome)


def _distinct(values: object) -> list[str]:
    """Each known text once, in the order of first appearance."""
    return list(dict.fromkeys(value for value in values if value))  # type: ignore[attr-defined]


def _watts(limits: Sequence[float | None] | None) -> Cell:
    if not limits or any(limit is None for limit in limits):
        return None
    return joined([f"{limit:g} W" for limit in limits])


def _words(*parts: str | None) -> Cell:
    known = [part for part in parts if part]
    return ", ".join(known) or None


def _short(digest: str | None) -> Cell:
    return None if digest is None else digest[:12]


PAGE, EVIDENCE = "sweep page", "sweep evidence"
_MOST_ARMS = 30
_MOST_OF_A_KIND = 5


def sweep_sections(evidence: Sequence[RunEvidence]) -> Iterator[Section]:
    """A section for each sweep that came to its end."""
    for one in evidence:
        kept = {summary.name: summary.figures for summary in one.summaries}
        if PAGE in kept and EVIDENCE in kept:
            yield sweep_section(one.run.number, kept[PAGE], kept[EVIDENCE])


def sweep_facts(sweep: Mapping[str, Any]) -> Facts:
    """When, of what, and what became of it."""
    return (
        ("begun", when(sweep["started_s"])),
        ("state", sweep["state"]),
        ("profile", sweep["profile"]),
        ("workload", sweep["workload"]),
        ("verdict", sweep["verdict"] or "none"),
        ("then", _then(sweep)),
    )


def _then(sweep: Mapping[str, Any]) -> str:
    text = (sweep["decided"] or {}).get("text")
    return ": ".join(one for one in (sweep["decision"], text) if one) or "nothing yet"


def sweep_section(number: int, page: Mapping[str, Any], evidence: Mapping[str, Any]) -> Section:
    """One sweep, by what `sweep/tuner` gathered and what it came to."""
    tables = (
        _arms(page),
        _pairs(page),
        _margins(page),
        _classes(page),
        _failures(page),
        _time(evidence),
        _left_out(evidence),
    )
    untried = evidence.get("best_untried")
    text = f"{page['n_starts']} starts and {page['n_requests']} requests."
    if untried is not None:
        text += f" What was not tried is believed to gain {untried:.1%} at most."
    return Section(
        name=f"sweep-{number}",
        title=f"Sweep {number}: what was tried, and why it came out so",
        text=text,
        charts=(*_heat(number, page), *_cliff(number, page)),
        tables=tuple(table for table in tables if table.rows),
    )


def _heat(number: int, page: Mapping[str, Any]) -> Iterator[Chart]:
    cells = [one for one in page["heat"] if one["spec"] != "off"]
    for at, (engine, spec) in enumerate(
        dict.fromkeys((one["engine"], one["spec"]) for one in cells)
    ):
        own = {(one["n_max"], one["p_min"]): one["believed_s"] for one in cells
               if (one["engine"], one["spec"]) == (engine, spec)}  # fmt: skip
        depths = sorted({n_max for n_max, _ in own})
        gates = sorted({p_min for _, p_min in own})
        yield Chart(
            name=f"sweep-{number}-heat-{at}",
            title=f"Turn time by n-max and p-min: {engine}, {spec}",
            plot=Heat(
                tuple(f"{n_max}" for n_max in depths),
                tuple(f"{p_min:g}" for p_min in gates),
                tuple(tuple(own.get((n_max, p_min)) for p_min in gates) for n_max in depths),
                x_title="p-min", y_title="n-max", unit="s",
            ),
        )  # fmt: skip


def _cliff(number: int, page: Mapping[str, Any]) -> Iterator[Chart]:
    steps = sorted(page["margins"], key=lambda one: one["fit_mib"])
    if len({one["fit_mib"] for one in steps}) < 2:  # noqa: PLR2004 -- a curve needs two
        return
    left = sorted((one["fit_mib"], one["free_mib"]) for one in steps if not one["oom"])
    out = sorted(one["fit_mib"] for one in steps if one["oom"])
    room = (steps[-1]["fit_mib"] - steps[0]["fit_mib"]) * 0.04
    yield Chart(
        name=f"sweep-{number}-margins",
        title="VRAM left with the context full, by margin",
        plot=Lines(
            (
                Line("left", "mainline", tuple(Point(x, y) for x, y in left), mark="dots"),
                Line("out of memory", "bad", tuple(Point(x, 0) for x in out), mark="crosses"),
            ),
            unit="MiB left",
            x_title="margin (fit_mib)",
            x_range=(steps[0]["fit_mib"] - room, steps[-1]["fit_mib"] + room),
        ),
    )


def _arms(page: Mapping[str, Any]) -> Table:
    left = len(page["arms"]) - _MOST_ARMS
    return Table(
        "Turn time by configuration [s]" + (f", without {left} slower ones" if left > 0 else ""),
        heads("~Configuration", "Starts", "Measured", "Predicted", "Believed", "~Not recommended because"),
        tuple(
            (one["text"], str(one["n_processes"]), _s(one["measured_s"]), _s(one["predicted_s"]),
             _s(one["believed_s"]), one["reason"])
            for one in page["arms"][:_MOST_ARMS]
        ),
    )  # fmt: skip


def _pairs(page: Mapping[str, Any]) -> Table:
    rows = [
        (one["candidate"], name, f"{gain['estimate']:+.1%}", _bound(gain["lower"]),
         _bound(gain["upper"]), ", ".join(f"{math.expm1(ratio):+.1%}" for ratio in ratios))
        for one in page["pairs"]
        for name, gain, ratios in [
            *([("all", one["gain"], one["log_ratios"])] if one["gain"] else []),
            *((kind["kind"], kind["gain"], []) for kind in one["by_kind"]),
        ]
    ]  # fmt: skip
    columns = heads("~Challenger", "~Text", "Faster by", "From", "To", "Pair by pair")
    return Table("Paired differences from what serves, 95 % interval", columns, tuple(rows))


def _margins(page: Mapping[str, Any]) -> Table:
    steps = sorted(page["margins"], key=lambda one: one["fit_mib"])
    return Table(
        "VRAM left with the context full [MiB]",
        heads("~Margin", "Left"),
        tuple(
            (str(one["fit_mib"]), "out of memory" if one["oom"] else f"{one['free_mib']:.0f}")
            for one in steps
        ),
    )


def _classes(page: Mapping[str, Any]) -> Table:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for one in sorted(page["classes"], key=lambda one: one["wall_s"]):
        by_kind.setdefault(one["kind"], []).append(one)
    rows = tuple(
        (one["arm"], kind, _s(one["wall_s"]), str(one["n"]))
        for kind in sorted(by_kind)
        for one in by_kind[kind][:_MOST_OF_A_KIND]
    )
    columns = heads("~Configuration", "~Text", "Wall time", "Requests")
    return Table("Wall time by kind of request, the fastest of each [s]", columns, rows)


def _failures(page: Mapping[str, Any]) -> Table:
    columns = heads("~Configuration", "~Failure", "Times")
    rows = tuple((one["arm"], one["failure"], str(one["n"])) for one in page["failures"])
    return Table("Failures", columns, rows)


def _time(evidence: Mapping[str, Any]) -> Table:
    spent = sorted(evidence.get("time_s", {}).items(), key=lambda one: -one[1])
    columns = heads("~For", "Seconds")
    return Table("Where the time went", columns, tuple((name, f"{s:.0f}") for name, s in spent))


def _left_out(evidence: Mapping[str, Any]) -> Table:
    rows = tuple((one["what"], one["reason"]) for one in evidence.get("left_out", []))
    columns = heads("~What", "~Why")
    return Table("Not tried, or given up", columns, rows)


def _s(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _bound(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"


_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class ReportData:
    """What a report is made of; `made_s` is when."""

    evidence: tuple[RunEvidence, ...]
    validities: Validities
    made_s: float


def report_of(data: ReportData) -> Report:
    """What the report shows."""
    series = series_of(data.evidence)
    title, subtitle = title_of(data.evidence, series)
    found: Sequence[Section | None] = (
        turn_times(series, data.evidence),
        speed_by_kind(series),
        acceptance_by_position(series, data.evidence),
        crossover(series, data.evidence),
        as_context_fills(series, data.evidence),
        other_suites(series, data.evidence),
        *sweep_sections(data.evidence),
    )
    return Report(
        title=title,
        subtitle=subtitle,
        made=when(data.made_s),
        verdicts=verdicts_of(data.evidence, series),
        sentences=sentences_of(data.evidence, series, data.validities),
        figures=figures_of(data.evidence, series),
        sections=tuple(section for section in found if section is not None),
        conditions=conditions_of(data.evidence, series, data.validities),
        left_out=left_out(series, data.evidence),
        runs=runs_table(data.evidence),
    )


def render_report(data: ReportData) -> str:
    """The whole page."""
    return (
        environment()
        .get_template("report.html")
        .render(
            report=report_of(data),
            version=__version__,
            style=css_variables() + _read("report.css"),
            script=_read("report.js"),
        )
    )


@cache
def environment() -> Environment:
    """Templates of reports and of the page; everything in them is escaped."""
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"drawn": draw, "legend": legend}
    found.globals |= {"unknown": UNKNOWN, "not_asked": NOT_ASKED}
    return found


def _read(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8")
