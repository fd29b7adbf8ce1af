"""Reports made of runs that nobody measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.support.synthetic_runs import START_S, MadeRun
from tunerd.measure.answer import Sample
from tunerd.measure.evidence import RunEvidence, RunRecord, SummaryRecord, Validity
from tunerd.measure.store import EvidenceStore
from tunerd.web.report import render_report


def evidence_of(folder: Path, runs: Iterable[MadeRun]) -> tuple[RunEvidence, ...]:
    """The runs as they come back from a real store."""
    with EvidenceStore(folder / "evidence.db") as store:
        found = [store.run(run.put(store)) for run in runs]
        return tuple(store.evidence(one) for one in found if one is not None)


def page_of(folder: Path, runs: Iterable[MadeRun]) -> Path:
    """A report about the runs, as a file."""
    evidence = evidence_of(folder, runs)
    path = folder / "report.html"
    stale = Validity(holds=False, texts=("driver 570.86.16 -> 580.10",))
    validities = {(one.run.number, arm): stale for one in evidence for arm in one.samples}
    path.write_text(render_report(evidence, validities, START_S), encoding="utf-8")
    return path


# By what they are found again, and so without that text.
_KEYS = {RunRecord: {"kind", "suites"}, Sample: {"suite"}, SummaryRecord: {"suite", "name"}}


def with_text(run: MadeRun, text: str) -> MadeRun:
    """The run with this text in every place where names or words stand."""
    made: MadeRun = _with(run, text)
    return replace(made, samples={f"{name} {text}": of for name, of in made.samples.items()})


def _with(value: Any, text: str) -> Any:
    if isinstance(value, str) and not isinstance(value, StrEnum):
        return f"{value} {text}"
    if isinstance(value, list | tuple):
        return type(value)(_with(one, text) for one in value)
    if isinstance(value, Mapping):
        return {key: _with(one, text) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = {one.name for one in fields(value)} - _KEYS.get(type(value), set())
        return replace(value, **{name: _with(getattr(value, name), text) for name in names})
    return value
