"""What is stored and told of a comparison: its arms, samples, turn times, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tunerd import __version__
from tunerd.actions.context import Context
from tunerd.core.bench.quality import Quality
from tunerd.core.bench.request import Suite
from tunerd.core.compare import SIDES, Comparison, Effect, Side
from tunerd.core.compare.advice import advise
from tunerd.core.compare.outcome import Part
from tunerd.core.compare.words import part_sentence, reasons, sentence
from tunerd.core.evidence import (
    ArmRecord,
    RunOutcome,
    RunRecord,
    SummaryRecord,
    TurnTime,
    VerdictRecord,
)
from tunerd.core.sample import Sample
from tunerd.core.workload_shape import WorkloadShape
from tunerd.system.store import EvidenceStore

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared

SUITE = "workload"


class Keeper:
    """Stores a comparison as it comes."""

    def __init__(self, ctx: Context, store: EvidenceStore, prepared: Prepared) -> None:
        self._ctx = ctx
        self._store = store
        self._prepared = prepared
        self._workload_sha256 = prepared.shape.sha256
        plan = prepared.plans["A"]
        self.number = store.add_run(
            RunRecord(
                kind="compare",
                suites=(SUITE, str(Suite.QUALITY)) if prepared.changes else (SUITE,),
                started_s=ctx.clock.now_s(),
                target=f"A: {prepared.sides['A'].name}; B: {prepared.sides['B'].name}",
                seed=prepared.seed,
                unit=ctx.unit,
                profile=plan.resolved.name,
                model_name=plan.facts.name,
                workload=prepared.shape.name,
                tunerd_version=__version__,
            )
        )

    def arm(self, side: Side, arm: ArmRecord) -> None:
        """A side has served for the first time."""
        fingerprint = replace(arm.fingerprint, workload_sha256=self._workload_sha256)
        self._store.add_arm(self.number, replace(arm, name=side, fingerprint=fingerprint))

    def samples(self, side: Side, samples: Sequence[Sample]) -> None:
        """What one process was asked."""
        self._store.add_samples(self.number, samples, arm=side)

    def result(self, found: Comparison) -> None:
        """Turn times of both sides, whole and by class."""
        for part in found.parts():
            self._store.add_summary(self.number, _effect_record(part))
        for one in turn_times(self._prepared.shape, found):
            self._store.add_summary(self.number, one.to_record(SUITE))

    def answers(self, quality: Quality) -> None:
        """B's answers held against A's."""
        self._store.add_summary(self.number, quality.to_record("B", "A"))

    def verdict(self, found: Comparison, quality: Quality | None) -> VerdictRecord:
        """The verdict, stored."""
        record = _verdict(self._prepared, found, quality)
        self._store.add_verdict(self.number, record)
        return record

    def end(self, outcome: RunOutcome, reason: str | None) -> None:
        """How the run ended."""
        self._store.end_run(self.number, outcome, ended_s=self._ctx.clock.now_s(), reason=reason)


def _verdict(prepared: Prepared, found: Comparison, quality: Quality | None) -> VerdictRecord:
    effect, decision = found.effect, found.decision
    names = {side: one.name for side, one in prepared.sides.items()}
    advice = advise(found.standing, prepared.changes, quality)
    said = sentence(found, f"A ({names['A']})", f"B ({names['B']})", prepared.shape.name)
    return VerdictRecord(
        outcome=advice.outcome,
        sentence=said if advice.remark is None else f"{said}; {advice.remark}",
        arm_a="A",
        arm_b="B",
        what=f"turn time on {prepared.shape.name}",
        ratio=None if effect is None else effect.ratio,
        ratio_low=None if effect is None else effect.low,
        ratio_high=None if effect is None else effect.high,
        n_pairs=len(found.pairs),
        reasons=(*reasons(found), *advice.reasons),
        details={
            "speed": str(found.standing),
            "recommended": advice.recommended,
            "changes": [change.text for change in prepared.changes],
            "end": str(found.end),
            "evidence_b": None if decision is None else decision.e_b,
            "evidence_a": None if decision is None else decision.e_a,
            "evidence_needed": None if decision is None else decision.needed,
        },
    )


def _effect_record(part: Part) -> SummaryRecord:
    what = part.name if part.class_index is None else f"class {part.class_index + 1}"
    figures = {"what": what, **_effect_json(part.effect), "a_s": part.a_s, "b_s": part.b_s}
    return SummaryRecord(SUITE, "effect", None, figures)


def turn_times(shape: WorkloadShape, found: Comparison) -> list[TurnTime]:
    """The turn of each class and the expected one, on both sides, by part.

    Thoughts are timed with the answer, and told apart by their share of it where that is known.
    """
    rows = []
    for side in SIDES:
        parts = []
        for at, (one, share) in enumerate(zip(shape.classes, shape.shares, strict=True)):
            prefill_s, decode_s, whole_s = (
                found.seconds(side, name, at) for name in ("prefill", "decode", "turn")
            )
            if prefill_s is None or decode_s is None:
                return []
            thoughts = one.reasoning_share
            reasoning_s = None if thoughts is None else thoughts * decode_s
            parts.append((share, prefill_s, reasoning_s, decode_s - (reasoning_s or 0.0)))
            rows.append(TurnTime(side, one.name, prefill_s, reasoning_s, parts[-1][3], share,
                                 whole_s=whole_s))  # fmt: skip
        reasoning = [share * part for share, _, part, _ in parts if part is not None]
        rows.append(
            TurnTime(
                arm=side,
                request_class=None,
                prefill_s=sum(share * part for share, part, _, _ in parts),
                reasoning_s=sum(reasoning) if len(reasoning) == len(parts) else None,
                decode_s=sum(share * part for share, _, _, part in parts),
                whole_s=found.seconds(side, "turn"),
            )
        )
    return rows


def _effect_json(effect: Effect) -> dict[str, Any]:
    return {
        **asdict(effect),
        "gain": effect.gain,
        "gain_low": effect.gain_low,
        "gain_high": effect.gain_high,
    }


def payload_of(
    prepared: Prepared, found: Comparison, verdict: VerdictRecord, quality: Quality | None
) -> dict[str, Any]:
    """As scripts read it."""
    names = [one.name for one in prepared.shape.classes]
    effect = found.effect
    parts = [
        {
            "part": part.name,
            "class": None if part.class_index is None else names[part.class_index],
            "a_s": part.a_s,
            "b_s": part.b_s,
            **_effect_json(part.effect),
            "sentence": part_sentence(
                part, "" if part.class_index is None else names[part.class_index]
            ),
        }
        for part in found.parts()
    ]
    return {
        "a": prepared.sides["A"].name,
        "b": prepared.sides["B"].name,
        "workload": prepared.shape.name,
        "seed": prepared.seed,
        "verdict": verdict.outcome,
        "speed": verdict.details["speed"],
        "recommended": verdict.details["recommended"],
        "changes": [{**asdict(one), "text": one.text} for one in prepared.changes],
        "quality": None if quality is None else asdict(quality),
        "sentence": verdict.sentence,
        "reasons": list(verdict.reasons),
        "effect": None if effect is None else _effect_json(effect),
        "parts": parts,
        "turns": [
            {**asdict(one), "total_s": one.total_s} for one in turn_times(prepared.shape, found)
        ],
        "pairs": len(found.pairs),
        "end": str(found.end),
        "elapsed_s": found.elapsed_s,
        "unusable": found.n_unusable,
        "problem": found.problem,
    }
