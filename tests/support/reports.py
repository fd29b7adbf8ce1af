"""Reports made of runs that nobody measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.support.synthetic_runs import START_S, MadeRun
from tunerd.measure.answer import Sample
from tunerd.measure.evidence import ArmRecord, RunEvidence, SummaryRecord, Validity, VerdictRecord
from tunerd.measure.store import EvidenceStore
from tunerd.web.report import render_report


def evidence_of(folder: Path, runs: Iterable[MadeRun]) -> tuple[RunEvidence, ...]:
    """The runs as they come back from a real store."""
    with EvidenceStore(folder / "evidence.db") as store:
        numbers = [run.put(store) for run in runs]
        return tuple(_read(store, number) for number in numbers)


def page_of(folder: Path, runs: Iterable[MadeRun]) -> Path:
    """A report about the runs, as a file."""
    evidence = evidence_of(folder, runs)
    path = folder / "report.html"
    stale = Validity(holds=False, texts=("driver 570.86.16 -> 580.10",))
    validities = {(one.run.number, arm): stale for one in evidence for arm in one.samples}
    path.write_text(render_report(evidence, validities, START_S), encoding="utf-8")
    return path


def _read(store: EvidenceStore, number: int) -> RunEvidence:
    run = store.run(number)
    assert run is not None
    return RunEvidence(
        run=run,
        samples={arm.name: store.samples(number, arm=arm.name) for arm in run.record.arms},
        summaries=store.summaries(number),
        verdicts=store.verdicts(number),
    )


def with_text(run: MadeRun, text: str) -> MadeRun:
    """The run with this text in every place where names or words stand."""
    names = {name: f"{name} {text}" for name in run.samples}
    arms = tuple(_arm(arm, names[arm.name], text) for arm in run.record.arms)
    record = replace(
        run.record,
        arms=arms,
        target=text,
        unit=text,
        profile=text,
        model_name=text,
        workload=text,
        suites=tuple(run.record.suites),
    )
    return MadeRun(
        record,
        {names[name]: [_sample(one, text) for one in made] for name, made in run.samples.items()},
        [_summary(one, names, text) for one in run.summaries],
        [_verdict(one, names, text) for one in run.verdicts],
        run.outcome,
        text,
    )


def _arm(arm: ArmRecord, name: str, text: str) -> ArmRecord:
    fingerprint = replace(arm.fingerprint, driver_version=text, gpu_names=(text,), cpu_model=text)
    return replace(
        arm,
        name=name,
        fingerprint=fingerprint,
        engine=text,
        engine_version=text,
        program=text,
        model_path=f"/models/{text}",
        argv=(*(arm.argv or ()), text),
        origins=(*arm.origins, (text, text, text)),
    )


def _sample(sample: Sample, text: str) -> Sample:
    return replace(
        sample,
        case=f"{sample.case} {text}",
        kind=f"{sample.kind} {text}",
        problem=None if sample.problem is None else text,
    )


def _summary(summary: SummaryRecord, names: dict[str, str], text: str) -> SummaryRecord:
    figures = {
        key: names.get(value, text) if isinstance(value, str) else value
        for key, value in summary.figures.items()
    }
    arm = None if summary.arm is None else names[summary.arm]
    return replace(summary, arm=arm, figures=figures)


def _verdict(verdict: VerdictRecord, names: dict[str, str], text: str) -> VerdictRecord:
    return replace(
        verdict,
        sentence=text,
        what=text,
        arm_a=names.get(verdict.arm_a or ""),
        arm_b=names.get(verdict.arm_b or ""),
        reasons=(text,),
    )
