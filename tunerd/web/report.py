"""`tunerd report`, `results show` and `bench`: what was measured, under which conditions, and what was left out.

One view of some runs for all three: sections, which are lines in a terminal and one file of HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from shlex import join
from typing import Any, TypeVar

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.flags import argument_changes, without_secrets
from tunerd.errors import UsageError
from tunerd.machine.files import Files, destination
from tunerd.measure.answer import Sample, Spread, Summary, spread, summarise
from tunerd.measure.evidence import (
    AcceptanceByPosition,
    ArmFigures,
    ArmRecord,
    Crossover,
    RunEvidence,
    RunRecord,
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
from tunerd.measure.store import EvidenceStore, reading
from tunerd.records import read
from tunerd.result import ActionResult, Message, warning
from tunerd.sweep.record import DECISION, EVIDENCE, PAGE, PLAN, POWER
from tunerd.web.charts import colour_of
from tunerd.web.html import environment, static_text
from tunerd.web.view import (
    JOULES,
    NOT_ASKED,
    Bar,
    Bars,
    Cell,
    Chart,
    Column,
    Columns,
    Line,
    Lines,
    Part,
    Point,
    Section,
    Table,
    figure,
    flags_table,
    heads,
    joined,
    percent,
    seconds,
    sentence,
    span,
    sweep_section,
    table_of,
)
from tunerd.words import UNKNOWN, counted, when

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
    with reading(ctx) as store:
        runs = [] if store is None else _chosen(store, numbers)
        if store is None or not runs:
            raise UsageError("nothing was measured yet", hint="tunerd bench")
        found = [store.evidence(run) for run in runs]
        damage = damage_messages(store)
    return tuple(sorted(found, key=lambda one: one.run.record.started_s)), damage


def report(ctx: Context, numbers: Sequence[int]) -> ActionResult:
    """The page about some runs, as for `gather_evidence`, not yet written anywhere."""
    from tunerd.measure.results import StalenessCheck

    evidence, messages = gather_evidence(ctx, numbers)
    check = StalenessCheck(ctx)
    validities = {
        (one.run.number, arm.name): check.of(arm, one.run.record)
        for one in evidence
        for arm in one.run.record.arms
    }
    empty = [str(one.run.number) for one in evidence if not any(one.samples.values())]
    if empty:
        messages += (warning("no-samples", f"without samples: run {', '.join(empty)}"),)
    html = render_report(evidence, validities, ctx.clock.now_s())
    payload = {"runs": [one.run.number for one in evidence], "html": html}
    return ActionResult("report", payload, messages)


def write_report(path: Path, made: ActionResult) -> ActionResult:
    """Write the page that `report` gave, here or in the daemon.

    Raises:
        HostError: it cannot be written.
    """
    path, content = destination(path), str(made.payload["html"]).encode()
    Files().write(path, content)
    payload = {"path": str(path), "bytes": len(content), "runs": made.payload["runs"]}
    return ActionResult("report", payload, made.messages)


def evidence_of(run: Mapping[str, Any]) -> RunEvidence:
    """A run as scripts read it (`tunerd results export`), with its samples and what it came to."""
    origins = [[tuple(one.values()) for one in arm["origins"]] for arm in run["arms"]]
    arms = [{**arm, "origins": found} for arm, found in zip(run["arms"], origins, strict=True)]
    record = read(RunRecord, {**run, "model_name": run["model"], "arms": arms})
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in record.arms}
    for one in run["samples"]:
        samples[one["arm"]].append(read(Sample, one))
    return RunEvidence(
        run=read(StoredRun, {**run, "number": run["run"], "record": record,
                             "n_samples": len(run["samples"]),
                             "n_unusable": sum(not one["usable"] for one in run["samples"])}),
        samples={name: tuple(found) for name, found in samples.items()},
        summaries=tuple(read(SummaryRecord, one) for one in run["summaries"]),
        verdicts=tuple(read(VerdictRecord, one) for one in run["verdicts"]),
    )  # fmt: skip


def _chosen(store: EvidenceStore, numbers: Sequence[int]) -> list[StoredRun]:
    """These runs; without any the newest, each of which has a suite that no newer one has."""
    if numbers:
        return [run_of(store, one) for one in dict.fromkeys(numbers)]
    covered: set[str] = set()
    chosen = []
    for run in store.runs(limit=_LOOK_BACK):
        suites = {f"{run.record.kind} {suite}" for suite in run.record.suites}
        if run.n_samples and not suites <= covered:
            covered |= suites
            chosen.append(run)
    return chosen


# Configurations


_LETTERS = 2
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Series:
    """One configuration, as it is drawn.

    `colour` names an engine's colour, `shade` counts configurations of that engine (0 is the strongest).
    """

    label: str
    arm: ArmRecord
    names: tuple[str, ...]
    runs: tuple[int, ...]
    samples: tuple[Sample, ...]
    colour: str
    shade: int

    @property
    def speculates(self) -> bool | None:
        """Whether it ever drafted; None where no sample has an answer to tell."""
        told = [one.timings for one in self.samples if one.timings is not None]
        return any(timings.draft_n for timings in told) if told else None

    def of(self, suite: str) -> tuple[Sample, ...]:
        """What may enter a figure of a suite."""
        return tuple(one for one in self.samples if one.suite == suite and one.is_usable)

    def part(self, name: str, samples: Sequence[Sample]) -> Measured:
        """Some of its samples, which may enter a figure, under a name."""
        return Measured(name, self, tuple(samples), summarise(samples))

    def by(self, suite: str, key: str, values: Mapping[Any, str]) -> list[Measured]:
        """The samples of a suite by one of their fields: for each value, under its name."""
        mine = self.of(suite)
        return [self.part(name, [one for one in mine if getattr(one, key) == value])
                for value, name in values.items()]  # fmt: skip

    def by_depth(self) -> list[tuple[float, Measured]]:
        """Each sample of the deep suite, with the depth of the context in which it was made."""
        found = ((number(one.details, "depth"), one) for one in self.of("deep"))
        return [(at, self.part(f"{at:,.0f}", [one])) for at, one in found if at is not None]

    def has_name(self, run: int, name: str | None) -> bool:
        """Whether this is what a run called by this name."""
        return run in self.runs and name in self.names

    def line(self, points: Iterable[Point]) -> Line:
        """Its line on a chart."""
        return Line(self.label, self.colour, tuple(points), self.shade)


def series_of(evidence: Sequence[RunEvidence]) -> tuple[Series, ...]:
    """The configurations of some runs, in the order of first appearance, drafting ones first.

    Two arms are one configuration where their fingerprints agree but for workload and tunerd; arms
    without known arguments are never taken together.
    """
    groups: dict[object, Series] = {}
    for one in evidence:
        run = one.run.number
        for arm in one.run.record.arms:
            key = _key(run, arm)
            made = groups.get(key) or Series("", arm, (), (), (), colour_of(arm.family), 0)
            groups[key] = replace(
                made,
                names=tuple(dict.fromkeys((*made.names, arm.name))),
                runs=(*made.runs, run),
                samples=(*made.samples, *one.samples.get(arm.name, ())),
            )
    ordered = sorted(groups.values(), key=lambda made: made.speculates is False)
    seen = Counter[str]()
    found = []
    for made, label in zip(ordered, _labels(ordered), strict=True):
        found.append(replace(made, label=label, shade=seen[made.colour]))
        seen[made.colour] += 1
    return tuple(found)


def _key(run: int, arm: ArmRecord) -> object:
    same = arm.fingerprint.of_server
    if arm.argv is None or same == Fingerprint():
        return (run, arm.name)
    return same.sha256


def _labels(groups: Sequence[Series]) -> list[str]:
    """A name for each that no other has: the one that says most, and what tells it from others of that name."""
    labels = []
    for group in groups:
        telling = [name for name in group.names if len(name) > _LETTERS and name != "live"]
        labels.append((*telling, group.arm.engine or group.arm.fingerprint.short)[0])
    for more in (
        [group.names[0] for group in groups],
        [group.arm.engine for group in groups],
        [f"run {group.runs[0]}" for group in groups],
    ):
        labels = [
            f"{label}, {extra}" if extra not in {None, label} and labels.count(label) > 1 else label
            for label, extra in zip(labels, more, strict=True)
        ]
    return labels


def _named(series: Sequence[Series], run: int, name: str | None) -> str | None:
    """The label of what a run called by this name."""
    return next((one.label for one in series if one.has_name(run, name)), None)


def _distinct(values: Iterable[str | None]) -> list[str]:
    """Each known text once, in the order of first appearance."""
    return list(dict.fromkeys(value for value in values if value))


def _as_words(kind: str) -> str:
    return kind.replace("_", " ")


# Figures, a section for each question

Runs = Sequence[RunEvidence]
_Kept = TypeVar("_Kept", bound=ArmFigures)
_WHISKERS = " Whiskers: slowest and fastest request."
# Of a small model a turn may take less than a second.
_TURN_DIGITS = 2
PARTS = (
    ("prefill_s", "Reading the prompt"),
    ("reasoning_s", "Reasoning"),
    ("decode_s", "Answering"),
    ("waiting_s", "Waiting"),
)


def _kept(evidence: Runs, kind: type[_Kept]) -> Iterator[tuple[int, _Kept]]:
    """The records of a kind, each with the number of its run; what the nine kinds of text came to stands first."""
    rows = ((run.run.number, record) for run in evidence for record in run.summaries)
    for run, record in sorted(rows, key=lambda row: row[1].suite != "mtp"):
        found = kind.from_record(record)
        if found is not None:
            yield run, found


def turn_times(series: Sequence[Series], evidence: Runs) -> Section | None:
    """Expected time of a turn by part."""
    found = [
        (one, turn)
        for run, turn in _kept(evidence, TurnTime)
        for one in series
        if one.has_name(run, turn.arm)
    ]
    if not found:
        return None
    names = _distinct(_class_name(turn) for _, turn in found)
    names.sort(key=lambda name: name != _WHOLE)
    found.sort(key=lambda pair: names.index(_class_name(pair[1])))
    groups = tuple(
        (name, tuple(_turn_bar(one, turn) for one, turn in turns))
        for name, turns in groupby(found, lambda pair: _class_name(pair[1]))
    )
    plot = Bars(groups, "seconds", is_stacked=True, digits=_TURN_DIGITS)
    columns = heads("~class", "~configuration", "weight", *(f"{name} [s]" for _, name in PARTS),
                    "turn [s]")  # fmt: skip
    rows = tuple(
        (_class_name(turn), one.label,
         "all" if turn.request_class is None else percent(turn.weight, 0),
         *(figure(getattr(turn, attribute), _TURN_DIGITS) for attribute, _ in PARTS),
         figure(turn.total_s, _TURN_DIGITS))
        for one, turn in found
    )  # fmt: skip
    return Section(
        name="turn",
        title="Time of a turn",
        text="What a person waits for, by the client's clock: reading the prompt, reasoning, the "
        "answer itself, and waiting for the server.",
        charts=(Chart("turn-time", "Expected seconds of one turn, by part", plot),),
        tables=(Table("Expected time of a turn", columns, rows),),
    )


_WHOLE = "whole workload"


def _class_name(turn: TurnTime) -> str:
    return turn.request_class or _WHOLE


def _turn_bar(one: Series, turn: TurnTime) -> Bar:
    parts = tuple(
        Part(name, attribute.removesuffix("_s"), getattr(turn, attribute))
        for attribute, name in PARTS
    )
    return Bar(one.label, parts, turn.total_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples of one configuration that were measured alike, and what they came to."""

    name: str
    one: Series
    samples: tuple[Sample, ...]
    found: Summary

    def of_drafts(self, shown: Cell) -> Cell:
        """A figure of drafts, which cannot be where there never were any."""
        return shown or (NOT_ASKED if self.one.speculates is False else None)

    @property
    def by_client(self) -> Spread:
        """Decode rates by the client's clock, which are known of every engine [tok/s]."""
        return spread(one.client_tok_s for one in self.samples)

    @property
    def free_mib(self) -> float | None:
        """The least VRAM that was free during any of them [MiB]."""
        return spread(one.vram_free_min_mib for one in self.samples).least

    def middle(self, name: str) -> float | None:
        """The median of a figure of the server's own."""
        return spread(getattr(sample.timings, name, None) for sample in self.samples).median


# Every figure that samples have, by the head of its column: a rate is of all tokens over all time, others are medians.
_FIGURES: Columns[Measured] = {
    "requests": lambda m: str(m.found.n),
    "predicted": lambda m: figure(m.found.n_predicted, 0),
    "drafted": lambda m: m.of_drafts(figure(m.found.n_drafted, 0)),
    "accepted": lambda m: m.of_drafts(figure(m.found.n_accepted, 0)),
    "rate": lambda m: m.of_drafts(percent(m.found.acceptance_ratio)),
    "tok/s": lambda m: figure(m.found.decode.tok_s),
    "tok/s, client's clock": lambda m: figure(m.by_client.median),
    "slowest to fastest": lambda m: span(m.found.decode_tok_s.least, m.found.decode_tok_s.most),
    "prompt tok/s": lambda m: figure(m.found.prompt.tok_s, 0),
    "prompt [ms]": lambda m: figure(m.middle("prompt_ms"), 0),
    "tokens reused": lambda m: figure(spread(one.n_cached for one in m.samples).median, 0),
    "TTFT [ms]": lambda m: figure(m.found.ttft_ms.median, 0),
    "TTFT [s]": lambda m: seconds(m.found.ttft_ms.median, 2),
    "wall [ms]": lambda m: figure(m.found.wall_ms.median, 0),
    "wall [s]": lambda m: seconds(m.found.wall_ms.median, 2),
    "fastest to slowest [s]": lambda m: span(m.found.wall_ms.least, m.found.wall_ms.most, per=1000),
    "free VRAM [MiB]": lambda m: figure(m.free_mib, 0),
    JOULES: lambda m: figure(m.found.joules_per_token, 2),
}


def _figures(
    caption: str, first: Columns[Measured], titles: Iterable[str], rows: Iterable[Measured],
    foot: Iterable[Measured] = (),
) -> Table:  # fmt: skip
    """A table of such figures; energy comes last."""
    columns = {**first, **{title: _FIGURES[title] for title in titles}, JOULES: _FIGURES[JOULES]}
    return table_of(caption, rows, columns, foot=foot)


def _ends(of: Spread, per: float = 1.0) -> tuple[float | None, float | None]:
    """The bounds of a spread, which is of several."""
    if of.n < 2 or of.least is None or of.most is None:  # noqa: PLR2004
        return None, None
    return of.least / per, of.most / per


def _speed_by_kind(series: Sequence[Series]) -> Section | None:
    """Decode rate by kind of text."""
    mine = [one for one in series if one.of("mtp")]
    if not mine:
        return None
    # They are measured in random order; the community's table has its own, with unknown ones last.
    kinds = sorted(
        _distinct(sample.kind for one in mine for sample in one.of("mtp")),
        key=lambda kind: MTP_KINDS.index(kind) if kind in MTP_KINDS else len(MTP_KINDS),
    )
    found = [one.by("mtp", "kind", {kind: _as_words(kind) for kind in kinds}) for one in mine]
    whole = [one.part("all", one.of("mtp")) for one in mine]
    groups = tuple((of[0].name, tuple(map(_rate_bar, of))) for of in zip(*found, strict=True))
    has_spread = any(bar.low is not None for _, bars in groups for bar in bars)
    chart = Chart(
        name="speed-by-kind",
        title="Decode speed by kind of text",
        plot=Bars(groups, "tok/s"),
        note="Bars: all tokens of a kind over all their time." + (_WHISKERS if has_spread else ""),
    )
    tables = []
    for of, total in zip(found, whole, strict=True):
        caption, titles = f"{total.one.label}: by kind of text", _BY_KIND
        if not total.found.decode.tok_s:
            caption, titles = f"{caption}; the server reports no speed", _BY_CLIENT
        tables.append(_figures(caption, _KIND, titles, of, [total]))
    if len(mine) > 1:
        title = "Side by side, a request of any kind"
        tables.insert(0, _figures(title, _BESIDE, ("wall [s]",), whole))
    return Section(
        name="speed",
        title="Speed by kind of text",
        text="Predictable text drafts well, free prose does not, so one number says little.",
        charts=(chart,),
        tables=tuple(tables),
    )


def _rate_bar(of: Measured) -> Bar:
    rate, one = of.found.decode.tok_s, of.one
    part = Part(one.label, one.colour, rate, one.shade)
    return Bar(one.label, (part,), rate, *_ends(of.found.decode_tok_s))


_KIND: Columns[Measured] = {"~kind of text": lambda m: m.name}
_BY_KIND: Sequence[str] = ("requests", "predicted", "drafted", "accepted", "rate", "tok/s",
                           "slowest to fastest", "wall [s]")  # fmt: skip
_BY_CLIENT = ("requests", "predicted", "tok/s, client's clock", "TTFT [ms]", "wall [s]")
# By the one clock that all have: an engine may report no speed.
_BESIDE: Columns[Measured] = {
    "~configuration": lambda m: m.one.label,
    "tok/s, client's clock": _FIGURES["tok/s, client's clock"],
    "slowest to fastest": lambda m: span(m.by_client.least, m.by_client.most),
    "tok/s, server's own": _FIGURES["tok/s"],
    "accepted": _FIGURES["rate"],
    "TTFT [ms]": lambda m: figure(m.found.ttft_ms.median),
}


def acceptance_by_position(series: Sequence[Series], evidence: Runs) -> Section | None:
    """How often each position of a draft was accepted, and whose drafts nothing is known of."""
    found = [(one, shares) for one in series if (shares := _shares_of(one, evidence))]
    drafted = [one for one in series if one.speculates]
    silent = _of_all([one for one in drafted if not _shares_of(one, evidence)], drafted)
    told = (
        f"The servers of {silent} reported nothing by position: that takes counters of "
        "positions in /metrics (mainline since August 2026, serving.metrics = true) and answers of a fixed length, "
        "or counts by depth in each answer (ik_llama.cpp since August 2026)."
        if silent
        else ""
    )
    made = Section("acceptance", "Drafts accepted, by position", told)
    if not found:
        return made if told else None
    depth = max(len(shares) for _, shares in found)
    plot = Lines(
        tuple(one.line(Point(at, share) for at, share in enumerate(shares, 1))
              for one, shares in found),
        unit="", x_title="position in the draft", is_ratio=True, x_ticks=tuple(range(1, depth + 1)),
        x_range=(0.6, depth + 0.4),
    )  # fmt: skip
    rows = tuple(
        (str(at + 1), *(percent(s[at]) if at < len(s) else NOT_ASKED for _, s in found))
        for at in range(depth)
    )
    columns = heads("~position", *(one.label for one, _ in found))
    title = "Share of verification steps in which a draft position was accepted"
    text = "A draft is used up to its first wrong token, so late positions are reached less often."
    return replace(
        made,
        text=f"{text} {told}".rstrip(),
        charts=(Chart("acceptance", title, plot),),
        tables=(Table("Accepted in all verification steps", columns, rows),),
    )


def _of_all(some: Sequence[Series], among: Sequence[Series]) -> str:
    """Which configurations: by their names, or how many where there are many."""
    if len(some) > _MOST_NAMED:
        n = "all" if len(some) == len(among) else f"{len(some)} of"
        return f"{n} {len(among)} configurations"
    return "; ".join(one.label for one in some)


def _shares_of(one: Series, evidence: Runs) -> tuple[float, ...] | None:
    """The share of each position: from single requests, else as a run found it by the counters."""
    asked = one.of("mtp") or tuple(sample for sample in one.samples if sample.is_usable)
    by_request = summarise(asked).acceptance_by_position
    if by_request:
        return by_request
    kept = _kept(evidence, AcceptanceByPosition)
    return next((found.ratios for run, found in kept if one.has_name(run, found.arm)), None)


def crossover(series: Sequence[Series], evidence: Runs) -> Section | None:
    """Wall time by length of the answer, and from where on speculation pays."""
    mine = [one for one in series if one.of("lengths")]
    if not mine:
        return None
    lengths = sorted({s.n_predict for one in mine for s in one.of("lengths")})
    found = [one.by("lengths", "n_predict", {n: f"{n:,}" for n in lengths}) for one in mine]
    lines = tuple(
        of[0].one.line(
            Point(n, middle / 1000, *_ends(m.found.wall_ms, per=1000))
            for n, m in zip(lengths, of, strict=True)
            if (middle := m.found.wall_ms.median) is not None
        )
        for of in found
    )
    crossings = list(_crossings(evidence, series))
    mark = next((c for _, c in crossings if c.n_tokens), None)
    plot = Lines(
        lines, unit="seconds", x_title="tokens of the answer", height=340, x_ticks=tuple(lengths),
        crossing=Point(mark.n_tokens, None, mark.low, mark.high) if mark and mark.n_tokens else None,
    )  # fmt: skip
    has_spread = any(point.low is not None for line in lines for point in line.points)
    note = "Points: medians." + (_WHISKERS if has_spread else "")
    note += " Dotted line and band: the crossing and its interval." if mark else ""
    question = "From which length speculation pays off"
    text = "Speculation costs time while the prompt is read, and gains on each token."
    if len(mine) == 1:
        question = "Time by length of the answer"
        text = "The whole wait: reading the prompt, and the answer to its last token."
    title = "Seconds until the answer is complete, by its length"
    return Section(
        name="crossover",
        title=question,
        text=" ".join(said for said, _ in crossings) or text,
        charts=(Chart("crossover", title, plot, note),),
        tables=tuple(
            _figures(f"{of[0].one.label}: by length of the answer", _LENGTH, _WAITS, of)
            for of in found
        ),
    )


def _crossings(evidence: Runs, series: Sequence[Series]) -> Iterator[tuple[str, Crossover]]:
    """The crossings that were found between two configurations, in words too."""
    for run, found in _kept(evidence, Crossover):
        label, than = (_named(series, run, name) for name in (found.arm, found.than))
        if label is None or than is None:
            continue
        if not found.n_tokens:
            at = "at no length" if found.n_tokens is None else "at every length"
            yield sentence([label, "was faster than", than, at, "that was measured"]), found
            continue
        interval = span(found.low, found.high, 0)
        level = percent(found.level, 0)
        shown = f"{level} interval {interval}" if interval else "without an interval"
        yield sentence([label, "is faster than", than, "from", figure(found.n_tokens, 0) or "",
                        f"tokens on ({shown})"]), found  # fmt: skip


_LENGTH: Columns[Measured] = {"~tokens": lambda m: m.name}
_WAITS = ("requests", "wall [s]", "fastest to slowest [s]", "TTFT [s]", "tok/s", "prompt tok/s")


def _as_context_fills(series: Sequence[Series], evidence: Runs) -> Section | None:
    """Free VRAM and speed by depth of the context."""
    shown = [(one, rows) for one in series if (rows := one.by_depth())]
    if not shown:
        return None
    charts = []
    drawn: Sequence[tuple[str, str, str, Callable[[Measured], float | None]]] = (
        ("vram-by-depth", "Least free VRAM", "MiB", lambda m: m.free_mib),
        ("speed-by-depth", "Decode speed", "tok/s", lambda m: m.found.decode.tok_s),
    )
    for name, title, unit, take in drawn:
        lines = tuple(
            one.line(Point(depth, y) for depth, m in rows if (y := take(m)) is not None)
            for one, rows in shown
        )
        if any(line.points for line in lines):
            plot = Lines(lines, unit=unit, x_title="tokens of context")
            charts.append(Chart(name, f"{title} by depth of the context", plot))
    titles = ("free VRAM [MiB]", "tok/s", "prompt tok/s")
    text = "Memory and speed at each depth of the context."
    return Section(
        name="depth",
        title="As the context fills",
        text=" ".join((text, *_depth_sentences(series, evidence))),
        charts=tuple(charts),
        tables=tuple(
            _figures(f"{one.label}: by depth of the context", _DEPTH, titles, [m for _, m in rows])
            for one, rows in shown
        ),
    )


_DEPTH: Columns[Measured] = {"~tokens of context": lambda m: m.name}


def _depth_sentences(series: Sequence[Series], evidence: Runs) -> Iterator[str]:
    """How far the context could be filled, and where that went wrong."""
    for run in evidence:
        for record in run.summaries:
            label = _named(series, run.run.number, record.arm)
            if record.name != Depth.NAME or label is None:
                continue
            keys = ("filled_tokens", "spill_tokens", "failed_tokens")
            filled, spill, failed = (figure(number(record.figures, key), 0) for key in keys)
            parts = [f"filled up to {filled} tokens" if filled else "not filled at all"]
            parts += [f"spills from {spill} tokens on"] if spill else []
            parts += [f"no answer at {failed} tokens"] if failed else []
            why = record.figures.get("why")
            yield sentence([f"{label}: {joined(parts)}", f"({why})" if why else ""])


# Everything else that was measured

TITLES = {
    "cache": "Prompt cache",
    "mtp": "Speed by kind of text",
    "quality": "Quality",
    "workload": "Workload",
}
_NAMES = {"effect": "how much faster B is"}
_DRAWN_SUITES = frozenset({"mtp", "lengths", "deep", "quality"})
_DRAWN_RECORDS = frozenset({AcceptanceByPosition.NAME, Crossover.NAME, Depth.NAME, TurnTime.NAME})
_OF_SWEEPS = frozenset({PLAN, PAGE, EVIDENCE, POWER})
_UNITS = {"_mib": "MiB", "_w": "W", "_tok_s": "tok/s", "_tokens": "tokens", "_ms": "ms", "_s": "s",
          "_letters": "letters", "_ratio": "share"}  # fmt: skip
_CASE = "case"
_EXACT_FROM = 1000


def _other_suites(series: Sequence[Series], evidence: Runs) -> Section | None:
    """Tables of every suite that has no chart, and of figures that nothing else shows."""
    suites = _distinct(s.suite for one in series for s in one.samples)
    tables = [_suite_table(suite, series) for suite in suites if suite not in _DRAWN_SUITES]
    tables += record_tables(
        (_named(series, run.run.number, record.arm) or record.arm, record)
        for run in evidence
        for record in _in_force(run.summaries)
    )
    tables = [one for one in tables if one.rows]
    if not tables:
        return None
    return Section(
        name="more",
        title="Other suites",
        text="Each by case. Rates are totals over totals, other figures medians of single requests.",
        tables=tuple(tables),
    )


def _in_force(records: Sequence[SummaryRecord]) -> Iterator[SummaryRecord]:
    """Of what became of a winner the last that was written."""
    yield from (one for one in records if one.name != DECISION)
    yield from [one for one in records if one.name == DECISION][-1:]


_CASE_FIGURES = ("requests", "prompt [ms]", "tokens reused", "TTFT [ms]", "tok/s", "wall [ms]")


def _suite_table(suite: str, series: Sequence[Series]) -> Table:
    cases = _distinct(sample.case for one in series for sample in one.of(suite))
    rows = [
        one.part(case, of_case)
        for case in cases
        for one in series
        if (of_case := [sample for sample in one.of(suite) if sample.case == case])
    ]
    first: Columns[Measured] = {"~case": lambda m: m.name, "~configuration": lambda m: m.one.label}
    return _figures(TITLES.get(suite, suite), first, _CASE_FIGURES, rows)


def record_tables(records: Iterable[tuple[str | None, SummaryRecord]]) -> list[Table]:
    """Kept figures with the label of their arm: a table for each name, a row for each record.

    What a record holds as a list of rows becomes a table of its own.
    """
    groups: dict[str, list[tuple[str | None, Mapping[str, Any]]]] = {}
    for label, record in records:
        if record.name in {*_DRAWN_RECORDS, *_OF_SWEEPS}:
            continue
        title = TITLES.get(record.suite, record.suite)
        name = _NAMES.get(record.name, record.name)
        caption = title if record.name == record.suite else f"{title}: {name}"
        inner = {key: value for key, value in record.figures.items() if _are_rows(value)}
        others = record.figures.keys() - inner.keys() - {"arm", "works"}
        plain = {key: value for key, value in record.figures.items() if key in others}
        if plain:
            groups.setdefault(caption, []).append((label, plain))
        for key, rows in inner.items():
            found = groups.setdefault(f"{caption}, {_head(key)}", [])
            found += ((label, row) for row in rows)
    return [_table(caption, rows) for caption, rows in groups.items()]


def _are_rows(value: object) -> bool:
    is_list = isinstance(value, list | tuple)
    return is_list and bool(value) and all(isinstance(one, Mapping) for one in value)  # type: ignore[attr-defined]


def _table(caption: str, rows: Sequence[tuple[str | None, Mapping[str, Any]]]) -> Table:
    """Rows by case where they have one, else by configuration."""
    keys = _distinct(key for _, figures in rows for key in figures)
    has_case = _CASE in keys
    keys = [key for key in keys if key != _CASE]
    labels = any(label is not None for label, _ in rows) or not has_case
    numbers = {key: all(_is_number(figures.get(key)) for _, figures in rows) for key in keys}
    columns = (
        *(heads("~case") if has_case else ()),
        *(heads("~configuration") if labels else ()),
        *(Column(_head(key), is_number=numbers[key]) for key in keys),
    )
    cells = tuple(
        (
            *([_value(figures.get(_CASE))] if has_case else []),
            *([label or "all"] if labels else []),
            *(_value(figures.get(key), is_number=numbers[key]) for key in keys),
        )
        for label, figures in rows
    )
    return Table(caption, columns, cells)


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
        return None if is_number else "cannot tell"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < _EXACT_FROM else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return joined([_value(one) or UNKNOWN for one in value]) or counted(0, "entry", "entries")
    return str(value)


def _sweep_sections(evidence: Runs) -> Iterator[Section]:
    """A section for each sweep that came to its end."""
    for one in evidence:
        kept = {summary.name: summary.figures for summary in one.summaries}
        if PAGE in kept and EVIDENCE in kept:
            plan, came_to = kept.get(PLAN, {}), kept[EVIDENCE]
            left_out = [row for of in (plan, came_to) for row in of.get("left_out", ())]
            found = {**came_to, "left_out": left_out, "power": kept.get(POWER)}
            yield sweep_section(one.run.number, kept[PAGE], found)


# What it came to, and what it is valid for

Validities = Mapping[tuple[int, str], Validity]

_STATES = {True: "still holds on this machine", False: "no longer holds on this machine",
           None: "may or may not still hold on this machine"}  # fmt: skip


def _state(validity: Validity) -> str:
    at = validity.holds_at
    return _STATES[validity.holds] if at is None else f"holds on this machine at {at}"


def verdicts(series: Sequence[Series], evidence: Runs) -> Iterator[Section]:
    """What comparisons ended with, what their letters mean, and what else spoke for it."""
    n_verdicts = sum(len(run.verdicts) for run in evidence)
    for run in evidence:
        for found in run.verdicts:
            names = [
                (name, _named(series, run.run.number, name))
                for name in (found.arm_a, found.arm_b)
                if name
            ]
            pairs = counted(found.n_pairs, "pair") if found.n_pairs is not None else None
            basis = (f"run {run.run.number}", found.what, pairs)
            yield Section(
                name=f"verdict-{run.run.number}",
                title="Verdict" if n_verdicts == 1 else f"Verdict of run {run.run.number}",
                text=sentence([found.sentence]),
                facts=(
                    *(
                        (name, label)
                        for name, label in names
                        if label and label != name and not label.endswith(f", {name}")
                    ),
                    ("basis", ", ".join(part for part in basis if part)),
                ),
                remarks=tuple(why for why in found.reasons if why not in found.sentence),
            )


def _in_short(series: Sequence[Series], evidence: Runs, validities: Validities) -> Section:
    """What the samples show, in a few sentences, and whether it still holds."""
    said = []
    rates = [(one, summarise(one.of("mtp")).decode.tok_s) for one in series]
    known = [f"{one.label} {figure(rate)} tok/s{_without(one)}" for one, rate in rates if rate]
    if known:
        said.append(sentence(["over all kinds of text:", joined(known)]))
    said += [text for text, _ in _crossings(evidence, series)]
    total = sum(len(one.samples) for one in series)
    if total:
        made = f"{counted(total, 'request')} {'was' if total == 1 else 'were'} made,"
        n_out = sum(not s.is_usable for one in series for s in one.samples)
        said.append(sentence([made, f"{n_out:,} left out of every figure"]))
    doubted: dict[str, list[Series]] = {}
    for one in series:
        validity = _validity(one, validities)
        if validity is not None and not validity.holds:
            why = f"{_state(validity)} ({'; '.join(validity.texts)})"
            doubted.setdefault(why, []).append(one)
    said += [sentence([f"{_of_all(of, series)}:", why]) for why, of in doubted.items()]
    return Section("summary", "In short", "", remarks=tuple(said))


def _without(one: Series) -> str:
    """Which kinds a figure over all kinds does not have."""
    missing = missing_kinds([sample for sample in one.samples if sample.suite == "mtp"])
    return f" (without {joined([_as_words(kind) for kind in missing])})" if missing else ""


def left_out(series: Sequence[Series]) -> Section:
    """Requests that no figure holds."""
    counts = Counter[tuple[str, str]]()
    made = []
    for one in series:
        used = sum(sample.is_usable for sample in one.samples)
        n = len(one.samples)
        made.append((one.label, f"{n:,}", f"{used:,}", f"{n - used:,}"))
        for sample in one.samples:
            why = [str(mark) for mark in sample.marks]
            why += [f"no answer: {sample.problem}"] if sample.problem is not None else []
            counts.update((text, one.label) for text in why)
    marked = tuple((text, label, f"{n:,}") for (text, label), n in sorted(counts.items()))
    tables = (
        Table("Requests by configuration", heads("~configuration", "made", "used", "left out"),
              tuple(made)),
        Table("Left out, by reason (one request may have several)",
              heads("~reason", "~configuration", "requests"), marked),
    )  # fmt: skip
    return Section(
        "left-out",
        "Left out",
        "Marked requests are repeated or left out, never averaged silently.",
        tables=tuple(table for table in tables if table.rows),
    )


def conditions(
    series: Sequence[Series], evidence: Runs, validities: Validities
) -> Iterator[Section]:
    """What the figures are valid for: what all have in common, in what they differ, and every flag."""
    found = [dict(_facts(one, evidence, series[0].arm, validities)) for one in series]
    names = _distinct(name for facts in found for name in facts)
    common = [name for name in names if len({facts.get(name) for facts in found}) == 1]
    differing = [name for name in names if name not in common]
    rows = tuple(
        (one.label, *(facts.get(name, NOT_ASKED) for name in differing))
        for one, facts in zip(series, found, strict=True)
    )
    columns = heads("~configuration", *(f"~{name}" for name in differing))
    yield Section(
        "conditions",
        "Conditions",
        "What these figures are valid for. A change of any part makes them stale.",
        facts=tuple((name, found[0].get(name)) for name in common),
        tables=(Table("How configurations differ", columns, rows),) if differing else (),
    )
    flags = tuple(
        replace(flags_table(one.arm.origins), caption=f"{one.label}: flags and who set them")
        for one in series
        if one.arm.origins
    )
    commands = tuple(
        (one.label, join(without_secrets(one.arm.argv)))
        for one in series
        if one.arm.argv is not None
    )
    if flags or commands:
        yield Section(FLAGS, "Flags, and who set them", "", facts=commands, tables=flags)


FLAGS = "flags"


def _facts(
    one: Series, evidence: Runs, first: ArmRecord, validities: Validities
) -> Iterator[tuple[str, Cell]]:
    """Under which conditions one configuration was measured; what it cannot have is left out."""
    arm, found, validity = one.arm, one.arm.fingerprint, _validity(one, validities)
    profiles = _distinct(run.run.record.profile for run in evidence if run.run.number in one.runs)
    limits = found.power_limits_w
    is_known = limits and all(limit is not None for limit in limits)
    yield "Card", None if found.gpu_names is None else joined(found.gpu_names) or "none"
    if is_known:
        yield "Power limit", joined([f"{limit:g} W" for limit in limits or ()])
    yield "Driver", found.driver_version or ("none" if found.gpu_names == () else None)
    yield "Processor", found.cpu_model
    if found.unit_limits:
        yield "Limits of the unit", joined(found.unit_limits)
    yield "Engine", ", ".join(_distinct((arm.engine, arm.engine_version))) or None
    yield "Engine identity", found.engine_sha256 and found.engine_sha256[:12]
    yield "Model file", None if arm.model_path is None else arm.model_path.rpartition("/")[2]
    yield "Model identity", found.model_sha256 and found.model_sha256[:12]
    if found.template_sha256:
        yield "Chat template", found.template_sha256[:12]
    if profiles:
        yield "Profile", joined(profiles)
    if arm.generation is not None:
        yield "Generation", str(arm.generation)
    yield "Fingerprint", found.short
    differs: list[str] = []
    if None not in {first.engine, arm.engine} and first.engine != arm.engine:
        differs.append(f"engine {first.engine} -> {arm.engine}")
    if first.argv is not None and arm.argv is not None:
        differs += argument_changes(first.argv, arm.argv)
    if differs:
        yield "Differs from the first in", "; ".join(differs)
    if validity is not None:
        said = (_state(validity), *validity.texts, *validity.remarks)
        yield "Checked when this report was made", "; ".join(said)
        if validity.differs_from_live is not None:
            beside = "; ".join(validity.differs_from_live)
            yield "What serves now differs in", beside or "nothing: it is the same server"


def _validity(one: Series, validities: Validities) -> Validity | None:
    """What was found of it when it was checked; the same for every run that it is in."""
    keys = ((run, name) for run in reversed(one.runs) for name in one.names)
    return next((validities[key] for key in keys if key in validities), None)


def _runs_section(evidence: Runs) -> Section:
    """The runs that the report is made of."""
    table = table_of("Runs in this report", (one.run for one in evidence), {
        "~run": lambda run: str(run.number),
        "~when": lambda run: when(run.record.started_s),
        "~kind": lambda run: run.record.kind,
        "~of": lambda run: run.record.target,
        "~suites": lambda run: ", ".join(run.record.suites),
        "seed": lambda run: None if run.record.seed is None else str(run.record.seed),
        "requests": lambda run: f"{run.n_samples:,}",
        "~ended": lambda run: ": ".join(_distinct((run.outcome, run.reason))) or "not yet, or cut short",
    })  # fmt: skip
    return Section("runs", "Runs", "", tables=(table,))


# The whole


def figures_of(evidence: Runs, series: Sequence[Series]) -> tuple[Section, ...]:
    """What was measured, a section for each question that it answers."""
    found: Sequence[Section | None] = (
        turn_times(series, evidence),
        _speed_by_kind(series),
        acceptance_by_position(series, evidence),
        crossover(series, evidence),
        _as_context_fills(series, evidence),
        _other_suites(series, evidence),
        *_sweep_sections(evidence),
    )
    return tuple(section for section in found if section is not None)


def sections_of(evidence: Runs, validities: Validities) -> tuple[Section, ...]:
    """Everything that a report says."""
    series = series_of(evidence)
    return (
        *verdicts(series, evidence),
        _in_short(series, evidence, validities),
        *figures_of(evidence, series),
        left_out(series),
        *conditions(series, evidence, validities),
        _runs_section(evidence),
    )


def render_report(evidence: Runs, validities: Validities, made_s: float) -> str:
    """The whole page; `made_s` is when it is made."""
    series = series_of(evidence)
    models = _distinct(one.run.record.model_name for one in evidence)
    cards = _distinct(name for one in series for name in one.arm.fingerprint.gpu_names or ())
    cards = cards or _distinct(one.arm.fingerprint.cpu_model for one in series)
    return (
        environment()
        .get_template("report.html")
        .render(
            title=joined(models) or "Measurements",
            subtitle=" · ".join([*cards, *_distinct(one.arm.engine for one in series)]),
            made=when(made_s),
            sections=sections_of(evidence, validities),
            version=__version__,
            style=static_text("report.css"),
            script=static_text("report.js"),
        )
    )
