"""`tunerd compare A B`: which of two servers is faster on a workload, in production's place."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunerd.actions.bench_plan import prompt_book
from tunerd.actions.bench_serving import answering
from tunerd.actions.compare_gate import judge_answers
from tunerd.actions.compare_record import Keeper, payload_of
from tunerd.actions.compare_sides import SideRequest, plan_side, sides_of
from tunerd.actions.compare_stand import CandidateStand
from tunerd.actions.context import Context
from tunerd.actions.lease import Held, hold
from tunerd.actions.lease_outlook import Outlook, outlook
from tunerd.actions.plan import Plan
from tunerd.actions.workloads import workload_for
from tunerd.core.bench.quality import Quality
from tunerd.core.compare import Comparison, Decision, Limits, Pair, Side, compare
from tunerd.core.compare.outcome import End
from tunerd.core.evidence import RunOutcome
from tunerd.core.output_changes import OutputChange, change_words, output_changes
from tunerd.core.progress import Progress, ProgressSink
from tunerd.core.quantity import format_duration
from tunerd.core.result import ActionResult, Level, Message, note, warning
from tunerd.core.workload import Workload
from tunerd.core.workload_shape import WorkloadShape, fitted
from tunerd.errors import UsageError
from tunerd.system.interrupts import words_of
from tunerd.system.store import EvidenceStore

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
    changes: tuple[OutputChange, ...] = ()

    @property
    def question(self) -> str:
        """What a person is asked before it begins."""
        return (
            f"A is {self.sides['A'].name}, B is {self.sides['B'].name}, measured on "
            f"{self.shape.name} for {format_duration(self.request.limits.budget_s)} at most, less "
            f"where they are told apart sooner: {self.outlook.text}.{self._questions} Go on?"
        )

    @property
    def _questions(self) -> str:
        if not self.changes:
            return ""
        return " Some of that time goes into questions that show whether B answers as A does."


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
    changes = output_changes(answering(plans["A"]), answering(plans["B"]))
    messages = [
        told,
        *_same(plans),
        *_changing(changes),
        *_cut_messages(shape, workload, cut, known),
    ]
    for side, plan in plans.items():
        messages += [
            Message(one.level, one.code, f"{side}: {one.text}", one.hint)
            for one in plan.messages
            if one.level is Level.WARNING
        ]
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    sides: dict[Side, SideRequest] = {"A": first, "B": second}
    return Prepared(request, sides, plans, shape, workload, seed, ahead, tuple(messages), changes)


def run_compare(
    ctx: Context, request: CompareRequest, *, confirm: Confirm, bound_to: str | None = None
) -> ActionResult:
    """Measure until it is decided or time is up, and store everything.

    Args:
        ctx: Where.
        request: What is compared.
        confirm: Shows what will happen and asks; raises to stop.
        bound_to: The unit that this process is, where it is one.

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
        keeper = Keeper(ctx, store, prepared)
        try:
            found, quality, held, told = _measure(ctx, prepared, keeper, bound_to)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                kept = (
                    f"what was measured until then is kept: `tunerd results show {keeper.number}`"
                )
                error.add_note(kept)
            keeper.end(RunOutcome.STOPPED, words_of(error))
            raise
        verdict = keeper.verdict(found, quality)
        failed = found.end is End.FAILED
        keeper.end(RunOutcome.FAILED if failed else RunOutcome.DONE, found.problem)
    payload = {
        **payload_of(prepared, found, verdict, quality),
        "run": keeper.number,
        "without_service_s": held.without_service_s,
    }
    messages = (*prepared.messages, *told)
    return ActionResult("compare", payload, messages, 1 if failed else 0, has_acted=True)


def _measure(
    ctx: Context, prepared: Prepared, keeper: Keeper, bound_to: str | None
) -> tuple[Comparison, Quality | None, Held, tuple[Message, ...]]:
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
        bound_to=bound_to,
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
        began_s = stand.now_s()
        quality = _answers(ctx, stand, prepared, keeper)
        limits = replace(limits, budget_s=max(limits.budget_s - (stand.now_s() - began_s), 0.0))
        with sink.muted():
            found = compare(stand, prepared.workload, limits, rng, on_pair=on_pair)
        # Kept before production comes back: should that fail, the result is not lost.
        keeper.result(found)
    notes = tuple(note("lease", text) for text in held.notes)
    return found, quality, held, (*notes, *stand.told())


def _answers(
    ctx: Context, stand: CandidateStand, prepared: Prepared, keeper: Keeper
) -> Quality | None:
    """B's answers held against A's; None where nothing may change them."""
    if not prepared.changes:
        return None
    found = judge_answers(
        ctx,
        stand,
        prepared.changes,
        seed=prepared.seed,
        budget_s=prepared.request.limits.budget_s,
    )
    keeper.answers(found)
    return found


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


def _same(plans: Mapping[Side, Plan]) -> list[Message]:
    a, b = plans["A"], plans["B"]
    if a.command.argv != b.command.argv or a.unit_text != b.unit_text:
        return []
    text = "A and B are the same command line: whatever is found between them is chance"
    return [warning("same", text)]


def _changing(changes: Sequence[OutputChange]) -> list[Message]:
    if not changes:
        return []
    text = (
        f"B may answer otherwise than A, so their answers are compared too: {change_words(changes)}"
    )
    return [warning("changes-answers", text)]


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
