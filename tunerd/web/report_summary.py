"""The parts of a report around its charts: what to read first, conditions, what was left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from shlex import join

from tunerd.core.bench.mtp import missing_kinds
from tunerd.core.evidence import Crossover, RunEvidence, TurnTime, Validity, VerdictRecord
from tunerd.core.fingerprint_arguments import without_secrets
from tunerd.core.metrics import summarise
from tunerd.core.sample import Sample
from tunerd.web.report_lengths import crossing_sentence
from tunerd.web.report_samples import as_words
from tunerd.web.report_sections import shares_of
from tunerd.web.report_series import Series, differences
from tunerd.web.report_text import counted, figure, joined, sentence, tokens, when
from tunerd.web.report_view import Cell, Column, Conditions, KeyFigure, Section, Table, Verdict

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
            (Column("configuration", is_number=False), Column("made"), Column("used"),
             Column("left out")),
            tuple(
                (one.label, f"{len(one.samples):,}", f"{sum(s.is_usable for s in one.samples):,}",
                 f"{sum(not s.is_usable for s in one.samples):,}")
                for one in series
            ),
        )
    ]  # fmt: skip
    reason = (Column("reason", is_number=False), Column("configuration", is_number=False),
              Column("requests"))  # fmt: skip
    if marked:
        tables.append(Table("Left out, by reason (one request may have several)", reason, marked))
    if missing:
        what = (Column("figure", is_number=False), Column("configuration", is_number=False),
                Column("missing in"), Column("of"))  # fmt: skip
        tables.append(Table("Figures that used requests lack", what, missing))
    text = (
        "What is marked is repeated or left out, never averaged in silence; "
        "what is missing is missing, never zero."
    )
    return Section("left-out", "Left out and missing", text, tables=tuple(tables))


def runs_table(evidence: Sequence[RunEvidence]) -> Table:
    """The runs that the report is made of."""
    columns = (Column("run", is_number=False), Column("when", is_number=False),
               Column("kind", is_number=False), Column("of", is_number=False),
               Column("suites", is_number=False), Column("seed"), Column("requests"),
               Column("ended", is_number=False))  # fmt: skip
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
    columns = (Column("flag", is_number=False), Column("key", is_number=False),
               Column("set by", is_number=False))  # fmt: skip
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
