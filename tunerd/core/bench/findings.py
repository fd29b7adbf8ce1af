"""What a bench came to: the figures of every case, and what each suite is asked for besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunerd.core.bench.crossover import find_crossover, winners
from tunerd.core.bench.depth import judge_depth
from tunerd.core.bench.mtp import mtp_table
from tunerd.core.bench.quality import Quality, Texts, judge_quality, pair
from tunerd.core.bench.request import Plan, Suite
from tunerd.core.bench.reuse import judge_reuse
from tunerd.core.bench.turns import turn_times
from tunerd.core.evidence import SummaryRecord
from tunerd.core.metrics import spread, summarise
from tunerd.core.sample import Sample
from tunerd.core.workload_shape import WorkloadShape

BY_POSITION = "acceptance by position"
# The arm of what serves now, against which a profile that may answer otherwise is held.
SERVING = "what serves"
_PAIR = 2


@dataclass(frozen=True, slots=True)
class ArmData:
    """What was measured of one arm.

    `answers` are by number of the step and id of the text; `groups` are parallel steps: case, wall [ms], samples.
    `by_position` is the share of verification passes in which each position of a draft was accepted,
    by the server's own counters; None where it has none.
    """

    name: str
    samples: Sequence[Sample]
    answers: Mapping[int, Texts]
    groups: Sequence[tuple[str, float, Sequence[Sample]]] = ()
    by_position: tuple[float, ...] | None = None
    planned_free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """`payload` holds JSON values under the name of what they are; `records` are what is stored."""

    payload: Mapping[str, Any]
    records: tuple[SummaryRecord, ...]


def figures(arms: Sequence[ArmData]) -> list[dict[str, Any]]:
    """The figures of each arm and case, in the order of first appearance; the warm-up is no case."""
    rows = []
    for arm in arms:
        cases: dict[str, list[Sample]] = {}
        for sample in arm.samples:
            cases.setdefault(sample.case, []).append(sample)
        for case, samples in cases.items():
            if any(sample.is_usable or sample.problem is not None for sample in samples) or any(
                not _is_warm_up(sample) for sample in samples
            ):
                summary = asdict(summarise(samples))
                rates = spread(_client_rate(s) for s in samples if s.is_usable)
                rows.append({"arm": arm.name, "suite": samples[0].suite, "case": case, **summary,
                             "client_tok_s": asdict(rates) if rates.n else None})  # fmt: skip
    return rows


def findings(plan: Plan, arms: Sequence[ArmData], shape: WorkloadShape | None = None) -> Findings:
    """What a suite is asked for besides."""
    suites = {
        Suite.MTP: _mtp,
        Suite.CACHE: _cache,
        Suite.DEEP: _deep,
        Suite.CONCURRENCY: _concurrency,
    }
    if plan.suite is Suite.LENGTHS:
        found = _lengths(arms, plan.seed)
    elif plan.suite is Suite.QUALITY:
        found = _quality(plan, arms)
    elif plan.suite is Suite.WORKLOAD:
        found = _workload(arms, shape)
    else:
        found = suites[plan.suite](arms)
    positions = [
        SummaryRecord(str(plan.suite), BY_POSITION, arm.name, {"ratios": list(arm.by_position)})
        for arm in arms
        if arm.by_position is not None
    ]
    payload = dict(found.payload)
    payload["by_position"] = {
        arm.name: None if arm.by_position is None else list(arm.by_position) for arm in arms
    }
    return Findings(payload, (*found.records, *positions))


def _mtp(arms: Sequence[ArmData]) -> Findings:
    return Findings({"tables": {arm.name: asdict(mtp_table(arm.samples)) for arm in arms}}, ())


def _lengths(arms: Sequence[ArmData], seed: int) -> Findings:
    found = winners({arm.name: arm.samples for arm in arms})
    payload: dict[str, Any] = {"lengths": [asdict(one) for one in found], "crossover": None}
    if len(arms) != _PAIR:
        return Findings(payload, ())
    first, second = arms
    crossing = find_crossover(first.name, first.samples, second.name, second.samples, seed=seed)
    if crossing is None:
        return Findings(payload, ())
    payload["crossover"] = asdict(crossing)
    return Findings(payload, (crossing.to_record(str(Suite.LENGTHS)),))


def _cache(arms: Sequence[ArmData]) -> Findings:
    judged = {arm.name: judge_reuse(arm.samples) for arm in arms}
    payload = {"reuse": {name: [asdict(one) for one in found] for name, found in judged.items()}}
    records = [one.to_record(name) for name, found in judged.items() for one in found]
    return Findings(payload, tuple(records))


def _deep(arms: Sequence[ArmData]) -> Findings:
    judged = {
        arm.name: judge_depth(arm.samples, planned_free_mib=arm.planned_free_mib) for arm in arms
    }
    payload = {
        "depth": {name: {**asdict(one), "is_whole": one.is_whole} for name, one in judged.items()}
    }
    return Findings(payload, tuple(one.to_record(name) for name, one in judged.items()))


def _quality(plan: Plan, arms: Sequence[ArmData]) -> Findings:
    """The first arm against each of the others.

    Speculation must not change what is exact, so it is judged at temperature 0 alone.
    """
    payload: dict[str, Any] = {"quality": None, "against_serving": None}
    records = []
    for reference in arms[1:]:
        is_serving = reference.name == SERVING
        judged = _judged(plan, arms[0], reference, is_exact=not is_serving)
        payload["against_serving" if is_serving else "quality"] = {
            **asdict(judged), "candidate": arms[0].name, "reference": reference.name,
        }  # fmt: skip
        records.append(judged.to_record(arms[0].name, reference.name))
    return Findings(payload, tuple(records))


def _judged(plan: Plan, candidate: ArmData, reference: ArmData, *, is_exact: bool) -> Quality:
    asked = []
    for number, step in enumerate(plan.steps):
        request = step.requests[0]
        if is_exact and request.has_own_sampling:
            continue
        one, other = (arm.answers.get(number, {}) for arm in (reference, candidate))
        asked.append(pair(request.case, number, one, other))
    return judge_quality(asked)


def _concurrency(arms: Sequence[ArmData]) -> Findings:
    rows = [row for arm in arms for row in _streams(arm)]
    records = tuple(SummaryRecord("concurrency", "streams", row["arm"], row) for row in rows)
    return Findings({"streams": rows}, records)


def _streams(arm: ArmData) -> list[dict[str, Any]]:
    """By number of streams: what all of them got together, and what each of them got."""
    cases: dict[str, list[tuple[float, Sequence[Sample]]]] = {}
    for case, wall_ms, samples in arm.groups:
        groups = cases.setdefault(case, [])
        if all(sample.is_usable for sample in samples):
            groups.append((wall_ms, samples))
    rows = []
    for case, groups in sorted(cases.items()):
        samples = [sample for _, found in groups for sample in found]
        counts = [_n_generated(sample) for sample in samples]
        total_ms = sum(wall_ms for wall_ms, _ in groups)
        known = [count for count in counts if count is not None]
        is_known = bool(known) and len(known) == len(counts)
        summary = summarise(samples)
        rows.append(
            {
                "arm": arm.name,
                "case": case,
                "n_groups": len(groups),
                "together_tok_s": sum(known) / total_ms * 1000 if is_known and total_ms else None,
                "each_tok_s": summary.decode_tok_s.median or _client_median(samples),
                "ttft_ms": summary.ttft_ms.median,
            }
        )
    return rows


def _workload(arms: Sequence[ArmData], shape: WorkloadShape | None) -> Findings:
    if shape is None:
        return Findings({"turns": []}, ())
    turns = [turn for arm in arms for turn in turn_times(arm.name, arm.samples, shape)]
    rows = [{**asdict(turn), "total_s": turn.total_s} for turn in turns]
    return Findings({"turns": rows}, tuple(turn.to_record("workload") for turn in turns))


def _n_generated(sample: Sample) -> int | None:
    if sample.n_predicted is not None:
        return sample.n_predicted
    count = sample.details.get("usage_completion_n")
    return count if isinstance(count, int) else None


def _client_median(samples: Sequence[Sample]) -> float | None:
    """Of a server without timings, the speed by the client's clock."""
    return spread(_client_rate(one) for one in samples).median


def _client_rate(sample: Sample) -> float | None:
    value = sample.details.get("client_tok_s")
    return float(value) if isinstance(value, int | float) else None


def _is_warm_up(sample: Sample) -> bool:
    return sample.case == "warm-up"
