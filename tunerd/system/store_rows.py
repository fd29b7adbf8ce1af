"""Records as rows of the evidence store, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunerd.core.evidence import (
    ArmRecord,
    RunOutcome,
    RunRecord,
    StoredRun,
    SummaryRecord,
    VerdictRecord,
    without_text,
)
from tunerd.core.fingerprint import fingerprint_from_json
from tunerd.core.fingerprint_arguments import compared_environment, without_secrets
from tunerd.core.sample import ClientTimes, Mark, Sample, Timings

Row = Mapping[Any, Any]

_TIMINGS = (
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "predicted_n",
    "predicted_ms",
    "draft_n",
    "draft_n_accepted",
)


def run_to_row(record: RunRecord) -> dict[str, Any]:
    """The row of a run that begins."""
    return {
        "kind": record.kind,
        "suites": list(record.suites),
        "started_s": record.started_s,
        "target": record.target,
        "seed": record.seed,
        "unit": record.unit,
        "profile": record.profile,
        "model_name": record.model_name,
        "workload": record.workload,
        "tunerd_version": record.tunerd_version,
        "host": without_text(record.host),
    }


def arm_to_row(arm: ArmRecord) -> dict[str, Any]:
    """The row of an arm, without the numbers of its run and fingerprint, and without secrets."""
    return {
        "name": arm.name,
        "engine": arm.engine,
        "family": arm.family,
        "engine_version": arm.engine_version,
        "program": arm.program,
        "model_path": arm.model_path,
        "argv": None if arm.argv is None else list(without_secrets(arm.argv)),
        "environment": compared_environment(arm.environment),
        "origins": [
            [" ".join(without_secrets(words.split(" "))), key, who]
            for words, key, who in arm.origins
        ],
        "generation": arm.generation,
    }


def run_from_row(
    row: Row, arms: Sequence[ArmRecord], *, n_samples: int, n_unusable: int
) -> StoredRun:
    """A run from its row, its arms and its counts.

    Raises:
        ValueError: it ended in a way that this tunerd does not know.
    """
    record = RunRecord(
        kind=row["kind"],
        suites=tuple(row["suites"]),
        started_s=row["started_s"],
        target=row["target"],
        seed=row["seed"],
        unit=row["unit"],
        profile=row["profile"],
        model_name=row["model_name"],
        workload=row["workload"],
        tunerd_version=row["tunerd_version"],
        host=row["host"],
        arms=tuple(arms),
    )
    outcome = None if row["outcome"] is None else RunOutcome(row["outcome"])
    return StoredRun(
        number=row["id"],
        record=record,
        outcome=outcome,
        ended_s=row["ended_s"],
        reason=row["reason"],
        n_samples=n_samples,
        n_unusable=n_unusable,
    )


def arm_from_row(row: Row) -> ArmRecord:
    """An arm from its row with `parts`, its fingerprint's.

    Raises:
        ValueError: the fingerprint is of a form that this tunerd does not know.
    """
    return ArmRecord(
        name=row["name"],
        fingerprint=fingerprint_from_json(row["parts"]),
        engine=row["engine"],
        family=row["family"],
        engine_version=row["engine_version"],
        program=row["program"],
        model_path=row["model_path"],
        argv=None if row["argv"] is None else tuple(row["argv"]),
        environment=row["environment"],
        origins=tuple((flag, key, who) for flag, key, who in row["origins"]),
        generation=row["generation"],
    )


def sample_to_row(sample: Sample) -> dict[str, Any]:
    """The row of a sample, without the numbers of its run and arm; what is missing is NULL."""
    timings, client = sample.timings, sample.client
    positions = timings.accepted_by_position if timings is not None else None
    return {
        "suite": sample.suite,
        "case_name": sample.case,
        "kind": sample.kind,
        "prompt_id": sample.prompt_id,
        "process": sample.process,
        "position": sample.position,
        "at_s": sample.at_s,
        "n_predict": sample.n_predict,
        "concurrency": sample.concurrency,
        "has_timings": timings is not None,
        **{name: _finite(getattr(timings, name, None)) for name in _TIMINGS},
        "accepted_by_position": None if positions is None else list(positions),
        "wall_ms": None if client is None else _finite(client.wall_ms),
        "ttft_ms": None if client is None else _finite(client.ttft_ms),
        "vram_free_min_mib": sample.vram_free_min_mib,
        "marks": [str(mark) for mark in sample.marks],
        "problem": sample.problem,
        "is_usable": sample.is_usable,
        "details": without_text(sample.details),
    }


def sample_from_row(row: Row) -> Sample:
    """A sample as it was measured.

    Raises:
        ValueError: it has a mark that this tunerd does not know.
    """
    positions = row["accepted_by_position"]
    timings = Timings(
        **{name: row[name] for name in _TIMINGS},
        accepted_by_position=None if positions is None else tuple(positions),
    )
    return Sample(
        suite=row["suite"],
        case=row["case_name"],
        kind=row["kind"],
        prompt_id=row["prompt_id"],
        process=row["process"],
        position=row["position"],
        at_s=row["at_s"],
        n_predict=row["n_predict"],
        concurrency=row["concurrency"],
        timings=timings if row["has_timings"] else None,
        client=None if row["wall_ms"] is None else ClientTimes(row["wall_ms"], row["ttft_ms"]),
        vram_free_min_mib=row["vram_free_min_mib"],
        marks=tuple(Mark(mark) for mark in row["marks"]),
        problem=row["problem"],
        details=row["details"],
    )


def summary_to_row(summary: SummaryRecord) -> dict[str, Any]:
    """The row of figures, without the numbers of their run and arm."""
    return {
        "suite": summary.suite,
        "name": summary.name,
        "figures": without_text(summary.figures),
    }


def summary_from_row(row: Row) -> SummaryRecord:
    """Figures as they were stored; `arm` is the name of their arm."""
    return SummaryRecord(row["suite"], row["name"], row["arm"], row["figures"])


def verdict_to_row(verdict: VerdictRecord) -> dict[str, Any]:
    """The row of a verdict, without the number of its run."""
    return {
        "outcome": verdict.outcome,
        "sentence": verdict.sentence,
        "arm_a": verdict.arm_a,
        "arm_b": verdict.arm_b,
        "what": verdict.what,
        "ratio": _finite(verdict.ratio),
        "ratio_low": _finite(verdict.ratio_low),
        "ratio_high": _finite(verdict.ratio_high),
        "level": verdict.level,
        "n_pairs": verdict.n_pairs,
        "reasons": list(verdict.reasons),
        "details": without_text(verdict.details),
    }


def verdict_from_row(row: Row) -> VerdictRecord:
    """A verdict as it was reached."""
    return VerdictRecord(
        outcome=row["outcome"],
        sentence=row["sentence"],
        arm_a=row["arm_a"],
        arm_b=row["arm_b"],
        what=row["what"],
        ratio=row["ratio"],
        ratio_low=row["ratio_low"],
        ratio_high=row["ratio_high"],
        level=row["level"],
        n_pairs=row["n_pairs"],
        reasons=tuple(row["reasons"]),
        details=row["details"],
    )


def _finite(value: float | None) -> float | None:
    """A number that is none is missing: databases differ in what they make of it."""
    return None if value is None or not math.isfinite(value) else value
