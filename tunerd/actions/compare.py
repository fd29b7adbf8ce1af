"""`tunerd compare A B`: which of two servers is faster on a workload, in production's place."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tunerd import __version__
from tunerd.actions.bench_plan import prompt_book
from tunerd.actions.compare_sides import SideRequest, plan_side, sides_of
from tunerd.actions.compare_stand import CandidateStand
from tunerd.actions.context import Context
from tunerd.actions.lease import Held, hold
from tunerd.actions.lease_outlook import Outlook, outlook
from tunerd.actions.plan import Plan
from tunerd.actions.workloads import workload_for
from tunerd.core.compare import SIDES, Comparison, Decision, Effect, Limits, Pair, Side, compare
from tunerd.core.compare.outcome import End, Part
from tunerd.core.compare.words import part_sentence, reasons, sentence
from tunerd.core.evidence import (
    ArmRecord,
    RunOutcome,
    RunRecord,
    SummaryRecord,
    TurnTime,
    VerdictRecord,
)
from tunerd.core.progress import Progress, ProgressSink
from tunerd.core.quantity import format_duration
from tunerd.core.result import ActionResult, Level, Message, note, warning
from tunerd.core.sample import Sample
from tunerd.core.workload import Workload
from tunerd.core.workload_shape import WorkloadShape, fitted
from tunerd.errors import UsageError
from tunerd.system.store import EvidenceStore

SUITE = "workload"
DEFAULT_BUDGET_S = 1800.0
# What a prompt has beside the tokens that were asked for: its reference number, its question.
_FRAME_TOKENS = 192
# Time to end the last pair in, so that the loop and not the lease ends it.
_SLACK_S = 120.0
_SEED_BITS = 32
_ANY_CONTEXT = 2**31


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """What is asked for.

    `words` are A and B as typed, `options` `KEY=VALUE` for B, `workload` a name or None for the
    profile's own, `seed` None for a fresh one.
    """

    words: tuple[str, ...]
    base: str | None = None
    options: tuple[str, ...] = ()
    workload: str | None = None
    limits: Limits = field(default_factory=lambda: Limits(budget_s=DEFAULT_BUDGET_S))
    seed: int | None = None
    start_after: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before production is stopped."""

    request: CompareRequest
    sides: Mapping[Side, SideRequest]
    plans: Mapping[Side, Plan]
    shape: WorkloadShape
    workload: Workload
    seed: int
    outlook: Outlook
    messages: tuple[Message, ...]

    @property
    def question(self) -> str:
        """What a person is asked before it begins."""
        return (
            f"A is {self.sides['A'].name}, B is {self.sides['B'].name}, measured on "
            f"{self.shape.name} for {format_duration(self.request.limits.budget_s)} at most, less "
            f"where they are told apart sooner: {self.outlook.text}. Go on?"
        )


Confirm = Callable[[Prepared], None]


def prepare(ctx: Context, request: CompareRequest) -> Prepared:
    """Plans both sides and chooses the workload; nothing is touched.

    Raises:
        UsageError: these are not two sides.
        DeployError: one of them would be refused, or production would not come back by itself.
    """
    first, second = sides_of(ctx, request.words, base=request.base, options=request.options)
    plans: dict[Side, Plan] = {"A": plan_side(ctx, first), "B": plan_side(ctx, second)}
    ahead = outlook(
        ctx,
        measuring_s=request.limits.budget_s,
        start_after=request.start_after,
        programs=[plan.engine.program for plan in plans.values()],
    )
    shape, told = workload_for(ctx, request.workload, plans["A"].resolved)
    contexts = [_context_tokens(plan) for plan in plans.values()]
    known = [tokens for tokens in contexts if tokens is not None]
    most = min(known) if known else _ANY_CONTEXT
    workload, cut = fitted(shape.plain(), most, margin_tokens=_FRAME_TOKENS)
    messages = [told, *_same(plans), *_cut_messages(shape, workload, cut, known)]
    for side, plan in plans.items():
        messages += [
            Message(one.level, one.code, f"{side}: {one.text}", one.hint)
            for one in plan.messages
            if one.level is Level.WARNING
        ]
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    sides: dict[Side, SideRequest] = {"A": first, "B": second}
    return Prepared(request, sides, plans, shape, workload, seed, ahead, tuple(messages))


def run_compare(ctx: Context, request: CompareRequest, *, confirm: Confirm) -> ActionResult:
    """Measure until it is decided or time is up, and store everything.

    Args:
        ctx: Where.
        request: What is compared.
        confirm: Shows what will happen and asks; raises to stop.

    Returns:
        Exit code 0 whatever the verdict, 1 if it could not be measured.

    Raises:
        UsageError: these are not two sides.
        DeployError: one of them would be refused, or production would not come back by itself.
        Preempted: the measurement was ended from outside; what was measured is stored.
    """
    prepared = prepare(ctx, request)
    confirm(prepared)
    ctx.files.make_folder(ctx.paths.evidence.parent)
    with EvidenceStore(ctx.paths.evidence) as store:
        keeper = _Keeper(ctx, store, prepared)
        try:
            found, held, told = _measure(ctx, prepared, keeper)
        except BaseException as error:
            keeper.end(RunOutcome.STOPPED, str(error) or type(error).__name__)
            raise
        verdict = keeper.verdict(found)
        failed = found.end is End.FAILED
        keeper.end(RunOutcome.FAILED if failed else RunOutcome.DONE, found.problem)
    payload = {
        **payload_of(prepared, found, verdict),
        "run": keeper.number,
        "without_service_s": held.without_service_s,
    }
    messages = (*prepared.messages, *told)
    return ActionResult("compare", payload, messages, 1 if failed else 0)


def _measure(
    ctx: Context, prepared: Prepared, keeper: _Keeper
) -> tuple[Comparison, Held, tuple[Message, ...]]:
    limits = prepared.request.limits

    def on_pair(pair: Pair, decision: Decision, left_s: float) -> None:
        text = f"pair {pair.number}: {decision.standing}"
        ctx.report(Progress(text, pair.number, limits.max_pairs, left_s=left_s))

    sink = _Muted(ctx.progress)
    ctx.say("pair 1: the first start says how long it will take")
    with hold(
        replace(ctx, progress=sink),
        purpose=f"compare {prepared.sides['A'].name} with {prepared.sides['B'].name}",
        budget_s=limits.budget_s + _SLACK_S,
        start_after=prepared.request.start_after,
    ) as held:
        stand = CandidateStand(
            ctx=ctx,
            held=held,
            plans=prepared.plans,
            book=prompt_book(ctx),
            seed=prepared.seed,
            on_arm=keeper.arm,
            on_samples=keeper.samples,
        )
        rng = random.Random(prepared.seed)  # noqa: S311 -- no secret
        with sink.muted():
            found = compare(stand, prepared.workload, limits, rng, on_pair=on_pair)
        # Kept before production comes back: should that fail, the result is not lost.
        keeper.result(found)
    return found, held, stand.told()


class _Muted:
    """Progress that can be held back: the steps of a hundred starts would hide that of the pairs."""

    def __init__(self, sink: ProgressSink) -> None:
        self._sink = sink
        self._is_muted = False

    def __call__(self, progress: Progress) -> None:
        if not self._is_muted:
            self._sink(progress)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False


class _Keeper:
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
                suites=(SUITE,),
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

    def verdict(self, found: Comparison) -> VerdictRecord:
        """The verdict, stored."""
        record = _verdict(self._prepared, found)
        self._store.add_verdict(self.number, record)
        return record

    def end(self, outcome: RunOutcome, reason: str | None) -> None:
        """How the run ended."""
        self._store.end_run(self.number, outcome, ended_s=self._ctx.clock.now_s(), reason=reason)


def _verdict(prepared: Prepared, found: Comparison) -> VerdictRecord:
    effect, decision = found.effect, found.decision
    names = {side: one.name for side, one in prepared.sides.items()}
    return VerdictRecord(
        outcome=str(found.standing),
        sentence=sentence(found, f"A ({names['A']})", f"B ({names['B']})", prepared.shape.name),
        arm_a="A",
        arm_b="B",
        what=f"turn time on {prepared.shape.name}",
        ratio=None if effect is None else effect.ratio,
        ratio_low=None if effect is None else effect.low,
        ratio_high=None if effect is None else effect.high,
        n_pairs=len(found.pairs),
        reasons=reasons(found),
        details={
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


def payload_of(prepared: Prepared, found: Comparison, verdict: VerdictRecord) -> dict[str, Any]:
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


def _same(plans: Mapping[Side, Plan]) -> list[Message]:
    a, b = plans["A"], plans["B"]
    if a.command.argv != b.command.argv or a.unit_text != b.unit_text:
        return []
    text = "A and B are the same command line: whatever is found between them is chance"
    return [warning("same", text)]


def _context_tokens(plan: Plan) -> int | None:
    """Context of one slot [tok]; None where the engine decides."""
    serving = plan.resolved.profile.serving
    if not serving.ctx_size:
        return None
    return serving.ctx_size // (1 if serving.kv_unified else serving.n_parallel or 1)


def _cut_messages(
    shape: WorkloadShape, workload: Workload, cut: Sequence[int], contexts: Sequence[int]
) -> list[Message]:
    if not contexts:
        return [note("context-unknown", "the engine chooses the context; it may be too small")]
    found = []
    for index in cut:
        wanted, kept = shape.plain().classes[index], workload.classes[index]
        text = (
            f"`{shape.classes[index].name}` of {shape.name} needs {wanted.depth_tokens} tokens of "
            f"context and here are {min(contexts)}: measured with {kept.depth_tokens}"
        )
        found.append(warning("workload-cut", text, "--workload for a smaller one"))
    return found


def check_limits(budget_s: float | None, max_pairs: int, tolerance: float) -> Limits:
    """Limits as typed.

    Raises:
        UsageError: nothing can be measured within them.
    """
    if budget_s is None or not 0 < budget_s < float("inf"):
        raise UsageError("--budget is no duration", hint="for example --budget 30m")
    return Limits(budget_s=budget_s, max_pairs=max_pairs, tolerance=tolerance)
