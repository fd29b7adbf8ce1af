"""`tunerd compare`: candidates in a lease, asked the same texts on both sides, until the pairs have decided."""

from __future__ import annotations

import contextlib
import math
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from tunerd.app import Context
from tunerd.engine import flags
from tunerd.engine.builds import find_engines
from tunerd.engine.choice import PlanRequest, request_again
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.serving import demand_unedited, environment_with, stands
from tunerd.errors import BenchError, Busy, DeployError, UsageError
from tunerd.machine.files import is_locked
from tunerd.measure import pairs
from tunerd.measure.answer import Answer, Sample
from tunerd.measure.evidence import ArmRecord, RunRecord, SummaryRecord, TurnTime, VerdictRecord
from tunerd.measure.findings import Parts, Quality, Replies, judge_quality, pair, turns_of
from tunerd.measure.learn import workload_for
from tunerd.measure.life import Life, Texts, prompt_book
from tunerd.measure.request import (
    BenchRequest,
    Prompt,
    Request,
    Room,
    Suite,
    is_warm_class,
    suite_plan,
)
from tunerd.measure.results import ending, rates_seen
from tunerd.measure.store import EvidenceStore, demand_storable
from tunerd.measure.target import LIVE, Target, open_candidate
from tunerd.measure.trust import not_as_meant
from tunerd.production.lease import Held, Outlook, demand_alone, hold, outlook
from tunerd.production.plan import Plan, make_plan
from tunerd.production.unattended import demand_root_for_plan
from tunerd.profile.files import load_sources, parse_options
from tunerd.profile.workload import RequestClass, Workload, WorkloadShape, fitted
from tunerd.result import ActionResult, Level, Message, Muted, Progress, note, warning
from tunerd.units.generations import Generation
from tunerd.words import all_known, format_duration, generation_number, nearest_name

# What A and B may be: a profile, a generation, an engine, or a single setting.


@dataclass(frozen=True, slots=True)
class SideRequest:
    """One side as asked for: its name for people, what to plan, and what must come of it.

    `generation` is set where the side is what a generation deployed.
    """

    name: str
    request: PlanRequest
    generation: Generation | None = None


def sides_of(
    ctx: Context, words: Sequence[str], *, base: str | None, options: Sequence[str]
) -> tuple[SideRequest, SideRequest]:
    """Both sides.

    Args:
        ctx: Where.
        words: A and B, or A alone, or neither; what is left out is what serves now for A, and A with
            the options for B.
        base: The profile that engines and single settings change; what serves now by default.
        options: `KEY=VALUE`, for B alone.

    Raises:
        UsageError: they are not two sides.
    """
    given = parse_options(options)
    whole = {LIVE, *load_sources(ctx).names}
    is_whole = [word in whole or generation_number(word) is not None for word in words]
    if base is not None and all(is_whole):
        raise UsageError(
            f"`--profile {base}` has no effect: neither side is an engine or a setting",
            state="nothing was touched",
            hint=f"`tunerd compare {base} --set KEY=VALUE`",
        )
    first = side_of(ctx, words[0] if words else LIVE, base=base)
    if len(words) > 1:
        second = side_of(ctx, words[1], base=base)
    elif given:
        second = first
    else:
        raise UsageError(
            "there is nothing to compare it with",
            hint="`tunerd compare A B`, or `tunerd compare --set speculation.n_max=2`",
        )
    return first, _with(second, given) if given else second


def side_of(ctx: Context, word: str, *, base: str | None) -> SideRequest:
    """One side, from the word that was typed.

    Raises:
        UsageError: it names nothing that is here.
    """
    sources = load_sources(ctx)
    if word == LIVE:
        return _generation_side(LIVE, _serving(ctx))
    if "=" in word:
        return _with(_base(ctx, base), parse_options([word]), name=word)
    if word in sources.names:
        return SideRequest(word, PlanRequest(word, {}))
    number = generation_number(word)
    if number is not None:
        entry = ctx.generations.demand(number)
        return _generation_side(f"generation {word}", entry.generation)
    engines = [engine.name for engine in find_engines(ctx)]
    if word in engines:
        return _with(_base(ctx, base), {"engine.prefer": [word]}, name=word)
    nearest = nearest_name(word, (*sources.names, *engines, LIVE))
    raise UsageError(
        f"`{word}` is not a profile, generation, engine or setting",
        cause=f"engines: {', '.join(engines)}",
        hint=f"did you mean `{nearest}`?"
        if nearest
        else "`tunerd profiles list`, `tunerd engines`",
    )


def plan_side(ctx: Context, side: SideRequest) -> Plan:
    """What would be deployed for this side.

    Raises:
        DeployError: it would be refused, or is no longer what its generation deployed.
        ConfigError: its profile is wrong.
        EngineError: no engine can serve it.
    """
    made = make_plan(ctx, side.request)
    errors = [message for message in made.messages if message.level is Level.ERROR]
    if errors:
        raise DeployError(
            f"`{side.name}` would be refused",
            cause="\n".join(message.text for message in errors),
            state="nothing was touched",
            hint=next((one.hint for one in errors if one.hint), "`tunerd plan PROFILE` shows it"),
        )
    if side.generation is not None:
        _demand_as_deployed(ctx, side, side.generation, made)
    return made


def _demand_as_deployed(ctx: Context, side: SideRequest, then: Generation, made: Plan) -> None:
    """Arguments and variables are those of then too, and what serves now is what was deployed."""
    now, text = made.command.argv, ctx.generations.unit_text(then.number)
    changed = [f"program {then.argv[0]} -> {now[0]}"] if then.argv[:1] != now[:1] else []
    changed += flags.argument_changes(
        flags.without_secrets(then.argv), flags.without_secrets(now), with_uncounted=True
    )
    if text is not None:
        old = environment_with(ctx, text.decode(errors="replace"))
        names = flags.changed_variables(old, environment_with(ctx, made.unit_text))
        changed += [f"variable {name}" for name in names]
    if changed or then.argv != now:
        profile = then.profile
        deploys = f"`tunerd plan {profile}` shows it; `tunerd apply {profile}` deploys it"
        raise DeployError(
            f"`{side.name}` cannot be measured: its profile now gives another command line or environment",
            cause="; ".join(changed) or "only the order of arguments differs, or a secret",
            state="nothing was touched",
            hint=deploys if side.name == LIVE else f"compare profile `{profile}` instead",
        )
    if side.name == LIVE and not stands(ctx, then):
        # What stands is being replaced, or was while it was looked at.
        if is_locked(ctx.paths.lock) or stands(ctx, then) or ctx.deployed() != then:
            raise Busy(
                f"{ctx.unit} is being changed right now", state="nothing was touched",
                hint="try again when `tunerd status` says that it serves",
            )  # fmt: skip
        demand_unedited(ctx, then, "what tunerd would measure")


def demand_still(ctx: Context, then: Generation) -> None:
    """What serves is what it was before a question, which may have stood open for hours.

    Raises:
        DeployError: something else was deployed, or its unit was edited.
    """
    now = ctx.deployed()
    if now is None or now.number != then.number or not stands(ctx, then):
        raise DeployError(
            f"something else was deployed as {ctx.unit} since this was planned, or it was edited",
            state="nothing was touched",
            hint="run the same command again",
        )


def answering(plan: Plan) -> flags.Answering:
    """What of a plan decides how it answers."""
    return flags.Answering(plan.engine.name, plan.command.argv, plan.resolved.profile.environment)


def context_tokens(plan: Plan) -> int | None:
    """Context of one slot [tok]; None where the engine decides."""
    ctx_size = plan.resolved.profile.serving.ctx_size
    return ctx_size // slots(plan) if ctx_size else None


def slots(plan: Plan) -> int:
    """Requests among which the context is shared out."""
    serving = plan.resolved.profile.serving
    return 1 if serving.kv_unified else serving.n_parallel or 1


def _base(ctx: Context, base: str | None) -> SideRequest:
    if base is not None:
        return SideRequest(base, PlanRequest(base, {}))
    return replace(_generation_side(LIVE, _serving(ctx)), generation=None)


def _serving(ctx: Context) -> Generation:
    generation = ctx.deployed()
    if generation is None or generation.unit_sha256 is None:  # it went back to no unit
        raise UsageError(
            "tunerd has deployed nothing here to compare with",
            state="nothing was touched",
            hint="name two profiles, or the one to start from with --profile",
        )
    return generation


def _generation_side(name: str, generation: Generation) -> SideRequest:
    if generation.profile is None:
        raise UsageError(
            f"`{name}` was not deployed from a profile, so it cannot be planned again",
            hint="`tunerd profiles new NAME --from-unit UNIT` makes a profile of it",
        )
    return SideRequest(name, request_again(generation), generation)


def _with(side: SideRequest, options: Mapping[str, Any], name: str | None = None) -> SideRequest:
    request = replace(side.request, options={**side.request.options, **options})
    told = ", ".join(f"{key}={_plain(value)}" for key, value in options.items())
    return SideRequest(name or f"{side.name} with {told}", request)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# `tunerd compare A B`: which of two servers is faster on a workload, in production's place.

DEFAULT_BUDGET_S = 1800.0
# What a prompt has beside the tokens that were asked for: its reference number, its question.
FRAME_TOKENS = 192
# Time to end the last pair in, so that the loop and not the lease ends it.
_SLACK_S = 120.0
_SEED_BITS = 32


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
    limits: pairs.Limits = field(default_factory=lambda: pairs.Limits(budget_s=DEFAULT_BUDGET_S))
    seed: int | None = None
    start_after: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before production is stopped."""

    request: CompareRequest
    sides: Mapping[pairs.Side, SideRequest]
    plans: Mapping[pairs.Side, Plan]
    shape: WorkloadShape
    workload: Workload
    seed: int
    outlook: Outlook
    messages: tuple[Message, ...]
    changes: tuple[flags.OutputChange, ...] = ()

    @property
    def question(self) -> str:
        """What a person is asked before it begins."""
        told = " Some of that time goes into checking that B answers as A does."
        questions = told if self.changes else ""
        return (
            f"A is {self.sides['A'].name}, B is {self.sides['B'].name}, measured on "
            f"{self.shape.name} for {format_duration(self.request.limits.budget_s)}, or less if they "
            f"can be told apart sooner: {self.outlook.text}. A start or an answer under way at the end of that "
            f"time may finish; after {format_duration(self.limit_s)} the measurement ends in any case.{questions} Go on?"
        )

    @property
    def limit_s(self) -> float:
        """The longest that it may take before production is started again [s]: the lease's limit."""
        return self.request.limits.budget_s + _SLACK_S


Confirm = Callable[[Prepared], None]


def prepare(ctx: Context, request: CompareRequest) -> Prepared:
    """Plans both sides and chooses the workload; nothing is touched.

    Raises:
        UsageError: these are not two sides.
        DeployError: one of them would be refused, or production would not come back by itself.
    """
    first, second = sides_of(ctx, request.words, base=request.base, options=request.options)
    plans: dict[pairs.Side, Plan] = {"A": plan_side(ctx, first), "B": plan_side(ctx, second)}
    for plan in plans.values():
        demand_root_for_plan(ctx, plan)
    ahead = outlook(
        ctx,
        measuring_s=request.limits.budget_s,
        start_after=request.start_after,
        engines=[plan.engine for plan in plans.values()],
    )
    shape, told = workload_for(ctx, request.workload, plans["A"].resolved)
    workload, cut = fitting(shape, map(context_tokens, plans.values()))
    changes = flags.output_changes(answering(plans["A"]), answering(plans["B"]))
    messages = [
        told,
        *_short(ctx, request.limits, workload, ahead, plans["A"]),
        *_between(plans, changes),
        *cut,
        *(
            replace(one, text=f"{side}: {one.text}")
            for side, plan in plans.items()
            for one in plan.messages
            if one.level is Level.WARNING
        ),
    ]
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    sides: dict[pairs.Side, SideRequest] = {"A": first, "B": second}
    return Prepared(request, sides, plans, shape, workload, seed, ahead, tuple(messages), changes)


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
        LeaseEnded: the measurement was ended from outside; what was measured is stored.
    """
    prepared = prepare(ctx, request)
    demand_storable(ctx)
    demand_alone(ctx)
    confirm(prepared)
    for side in prepared.sides.values():
        if side.name == LIVE and side.generation is not None:
            demand_still(ctx, side.generation)
    with EvidenceStore(ctx.paths.evidence, check=False) as store:
        number = store.add_run(_record(ctx, prepared))
        with ending(ctx, store, lambda: number) as problems:
            found, quality, held, told = _measure(ctx, prepared, store, number)
            verdict = _verdict(prepared, found, quality)
            store.add_verdict(number, verdict)
            joules = store.joules_per_token(number)
            if found.end is pairs.End.FAILED or not found.pairs:
                problems.append(found.problem or str(found.end))
    payload = {
        **payload_of(prepared, found, verdict, quality),
        "run": number,
        "joules_per_token": {side: joules.get(side) for side in pairs.SIDES},
        "without_service_s": held.without_service_s,
    }
    messages = (*prepared.messages, *told)
    return ActionResult("compare", payload, messages, 1 if problems else 0, has_acted=True)


def _measure(
    ctx: Context, prepared: Prepared, store: EvidenceStore, number: int
) -> tuple[pairs.Comparison, Quality | None, Held, tuple[Message, ...]]:
    limits, sha256 = prepared.request.limits, prepared.shape.sha256

    def on_arm(arm: ArmRecord) -> None:
        store.add_arm(number, arm.under(workload_sha256=sha256))

    def on_samples(side: pairs.Side, samples: Sequence[Sample]) -> None:
        store.add_samples(number, samples, arm=side)

    def on_pair(pair: pairs.Pair, decision: pairs.Decision, left_s: float) -> None:
        text = f"pair {pair.number}: {decision.standing}"
        ctx.report(Progress(text, pair.number, limits.max_pairs, left_s=left_s))

    sink = Muted(ctx.progress)
    ctx.say("pair 1: its first start shows how long this will take")
    with hold(
        replace(ctx, progress=sink),
        purpose=f"compare {prepared.sides['A'].name} with {prepared.sides['B'].name}",
        budget_s=prepared.limit_s,
        start_after=prepared.request.start_after,
        ran=prepared.outlook.runs,
    ) as held:
        stand = CandidateStand(
            ctx=ctx,
            held=held,
            plans=prepared.plans,
            texts=Texts(prompt_book(ctx), prepared.seed),
            on_arm=on_arm,
            on_samples=on_samples,
        )
        rng = random.Random(prepared.seed)  # noqa: S311 -- no secret
        began_s = stand.now_s()
        quality = None  # where nothing may change them, answers are not asked for
        if prepared.changes:
            quality = _judge_answers(stand, prepared.changes, budget_s=limits.budget_s)
            # Why there are none of a side that has not served is the verdict's to say.
            if all(facts.has_served for facts in stand.facts.values()):
                store.add_summary(number, quality.to_record("B", "A"))
        limits = replace(limits, budget_s=max(limits.budget_s - (stand.now_s() - began_s), 0.0))
        with sink.muted():
            found = pairs.Comparison(stand, prepared.workload, limits, rng, on_pair).run()
        # Kept before production comes back: should that fail, the result is not lost.
        for record in _effects(prepared.shape, found):
            store.add_summary(number, record)
    notes = tuple(note("lease", text) for text in held.notes)
    return found, quality, held, (*notes, *stand.told())


def _short(
    ctx: Context, limits: pairs.Limits, workload: Workload, ahead: Outlook, plan: Plan
) -> Iterator[Message]:
    """That the time has no room for the pairs that a verdict needs at least, by what is known.

    Raises:
        UsageError: not even both sides of one pair can be loaded in it.
    """
    load_s = ahead.load_s or 0.0
    pair_s = 2 * workload.process_s(load_s, rates_seen(ctx, plan.resolved.name))
    text = (
        f"a pair of fresh servers takes about {format_duration(pair_s)} or more, and a verdict needs at "
        f"least {pairs.LEAST_NAMED} of them"
    )
    hint = f"--budget {math.ceil(pairs.LEAST_NAMED * pair_s / 60) + 1}min"
    if limits.budget_s <= 2 * load_s:
        raise UsageError(
            f"nothing can be compared in {format_duration(limits.budget_s)}",
            cause=f"a server took {format_duration(load_s)} to load at the last swap; {text}",
            state="nothing was touched",
            hint=hint,
        )
    if limits.budget_s < pairs.LEAST_NAMED * pair_s:
        yield warning("short", text, hint)


def _between(
    plans: Mapping[pairs.Side, Plan], changes: Sequence[flags.OutputChange]
) -> Iterator[Message]:
    """What should be known of the two before anything is measured."""
    a, b = plans["A"], plans["B"]
    if a.command.argv == b.command.argv and a.unit_text == b.unit_text:
        text = "A and B have the same command line: any difference found between them is chance"
        yield warning("same", text)
    if changes:
        words = flags.change_words(changes)
        text = f"B may give other answers than A, so their answers are compared too: {words}"
        yield warning("changes-answers", text)


def fitting(
    shape: WorkloadShape, contexts: Iterable[int | None]
) -> tuple[Workload, tuple[Message, ...]]:
    """What of a workload fits into the least of these contexts, and what of it was cut; None is unknown."""
    whole, context = shape.plain(), min((one for one in contexts if one is not None), default=None)
    if context is None:
        text = "the engine chooses the context; it may be too small"
        return whole, (note("context-unknown", text),)
    workload, cut = fitted(whole, context, margin_tokens=FRAME_TOKENS)
    told = []
    for index in cut:
        wanted, kept = whole.classes[index], workload.classes[index]
        text = (
            f"`{shape.classes[index].name}` of {shape.name} needs {wanted.depth_tokens} tokens of "
            f"context, of which there are {context}: it is measured with {kept.depth_tokens}"
        )
        told.append(warning("workload-cut", text, "--workload names a smaller one"))
    return workload, tuple(told)


# The real stand of a comparison: candidates in a lease, asked the same texts on both sides.

_PREFIX_ANSWER_TOKENS = 2
_WARM_SHARE = 0.5


@dataclass
class SideFacts:
    """What was seen of a side over all of its processes."""

    has_served: bool = False
    wanted_cached: int = 0
    found_cached: int = 0
    is_proved: bool = False
    messages: dict[str, Message] = field(default_factory=dict)


@dataclass
class CandidateStand:
    """Boots either plan as a candidate of the lease that is held.

    `on_arm` is called once for each side, by whose name it goes, when it first serves, `on_samples` with what each of its
    processes was asked.
    """

    ctx: Context
    held: Held
    plans: Mapping[pairs.Side, Plan]
    texts: Texts
    on_arm: Callable[[ArmRecord], None]
    on_samples: Callable[[pairs.Side, Sequence[Sample]], None]
    facts: dict[pairs.Side, SideFacts] = field(
        default_factory=lambda: {"A": SideFacts(), "B": SideFacts()}
    )
    may_repeat: set[str] = field(default_factory=set)
    _reader: FingerprintReader | None = None

    def now_s(self) -> float:
        """Seconds."""
        return self.ctx.clock.monotonic_s()

    def boot(self, side: pairs.Side) -> CandidateLife:
        """A fresh process of this side, its first request answered and discarded.

        Raises:
            BootFailed: it does not serve.
            LeaseEnded: the lease is gone.
        """
        facts = self.facts[side]
        try:
            with contextlib.ExitStack() as stack:
                candidate = stack.enter_context(self.held.serve(self.plans[side]))
                self._reader = self._reader or FingerprintReader(self.ctx)
                target = open_candidate(self.ctx, candidate, side, reader=self._reader)
                facts.messages |= {one.text: one for one in target.messages}
                if not facts.has_served:
                    facts.has_served = True
                    self.on_arm(target.arm)
                self.texts.learn(target.server)
                life = CandidateLife(self, side, target)
                life.process = stack.pop_all()  # once nothing can fail any more
                return life
        except BenchError as error:
            self.held.check()
            raise pairs.BootFailed(error.words) from error

    def told(self) -> tuple[Message, ...]:
        """What should be said of the sides, beside the verdict."""
        found: list[Message] = []
        for side, facts in self.facts.items():
            found += [replace(one, text=f"{side}: {one.text}") for one in facts.messages.values()]
            if facts.wanted_cached and facts.found_cached < _WARM_SHARE * facts.wanted_cached:
                text = (
                    f"{side} found {facts.found_cached} of {facts.wanted_cached} tokens cached that "
                    "it had just read: prefix reuse does not work there"
                )
                found.append(warning("no-reuse", text))
        return tuple(found)


class CandidateLife:
    """One process of a side; `process` ends it once it is closed."""

    def __init__(self, stand: CandidateStand, side: pairs.Side, target: Target) -> None:
        """Warmed up: the first process of a side proves what it is meant to do.

        `check` judges all that later ones answered.
        """
        self._stand = stand
        self._facts = stand.facts[side]
        self._side = side
        self.process = contextlib.ExitStack()
        self._life = life = Life(stand.ctx, target)
        life.may_repeat, life.is_reference = stand.may_repeat, side == pairs.A
        drafts, is_proved = target.speculation.drafts, self._facts.is_proved
        life.warm_up(stand.texts.first(life), drafts=drafts, is_proved=is_proved)
        self._facts.is_proved = True
        self._asked = life.open()

    def request(self, asked: pairs.Asked) -> pairs.Turn:
        """One request of a class, behind the prefix that it expects to be cached.

        Raises:
            LifeEnded: the server is gone, or does not answer.
            Unusable: something speaks against the sample, or the prefix.
            LeaseEnded: the lease is gone.
        """
        one, pair_name = asked.request_class, asked.block.rpartition("-")[0]
        self._stand.texts.shared = f"pair {pair_name} prefix"  # of all requests of the process
        if is_warm_class(one):
            # Before every class: a recurrent model may forget where it ended as soon as a longer prompt is read.
            bare = replace(one, kind="code", new_tokens=0, n_predict=_PREFIX_ANSWER_TOKENS)
            self._ask(bare, f"pair {pair_name} bare", case="prefix", is_measured=False)
        samples = self._ask(
            one,
            f"{asked.block} {asked.class_index} {asked.attempt}",
            is_held=asked.attempt > 0,
            case=f"class {asked.class_index + 1}",
            details={"block": asked.block, "attempt": asked.attempt},
        )
        turns = all_known(sample.turn_ms for sample in samples)
        firsts = all_known(sample.client.ttft_ms if sample.client else None for sample in samples)
        if not turns or not firsts:
            raise pairs.Unusable("the first token was not seen")
        repeated = tuple(all_known(sample.repeated_ratio for sample in samples))
        return pairs.Turn(wall_ms=fmean(turns), prefill_ms=fmean(firsts), repeated=repeated)

    def answer(self, request: Request, prompt: Prompt) -> Answer | None:
        """The answer to a question; None where there was none.

        Raises:
            LifeEnded: the server is gone.
            LeaseEnded: the lease is gone.
        """
        found = self._life.ask_with_room(request, prompt)[-1]
        if found.sample.problem is not None:
            self._stand.held.check()
            if (why := self._life.target.why_ended()) is not None:
                raise pairs.LifeEnded(why)
        return found.answer

    def check(self) -> None:
        """Whether this process did what its side is meant to do.

        Raises:
            LifeEnded: it drafted although it is meant not to, or never drafted.
        """
        timings = [one.sample.timings for one in self._asked]
        drafted = [one.draft_n if one else None for one in timings]
        problem = not_as_meant(self._life.target.speculation.must_draft, drafted)
        if problem is not None:
            raise pairs.LifeEnded(problem)
        self._facts.messages |= {one.text: one for one in self._life.crowded()}

    def close(self) -> None:
        """End the process, and hand over what was measured of it; what only prepared it is not kept."""
        try:
            self.process.close()
        finally:
            asked = (*self._asked, *self._life.asked)
            measured = [one.sample for one in asked if one.request.is_measured]
            self._stand.on_samples(self._side, measured)

    def _ask(self, one: RequestClass, name: str, **told: Any) -> list[Sample]:
        found = self._life.ask_watched(*self._stand.texts.of_class(one, name, **told))
        self._asked += found
        samples = [answered.sample for answered in found]
        problem = next((sample.problem for sample in samples if sample.problem), None)
        if problem is not None:
            self._stand.held.check()
            raise pairs.LifeEnded(self._life.target.why_ended() or problem)
        for sample in samples:
            cached = sample.n_cached
            if is_warm_class(one) and one.new_tokens and cached is not None:
                self._facts.wanted_cached += one.cached_tokens
                self._facts.found_cached += min(cached, one.cached_tokens)
        marks = {str(mark) for sample in samples for mark in sample.marks}
        if marks:
            raise pairs.Unusable(", ".join(sorted(marks)))
        return samples


# The quality gate of a comparison: both sides answer the same questions before they are timed.

_REPEATS = 3
# Of the time that a comparison has, so much may go into questions; the rest is for speed.
_SHARE = 0.5


def _judge_answers(
    stand: CandidateStand, changes: Sequence[flags.OutputChange], *, budget_s: float
) -> Quality:
    """Whether B answers as A does; questions that one side was never asked say nothing.

    Args:
        stand: Where both sides are started, and the seed of texts and order.
        changes: What may change answers; sampling is tried by each server's own settings too.
        budget_s: What the whole comparison may take; half of it is for questions at most.

    Raises:
        LeaseEnded: the lease is gone.
    """
    asked = BenchRequest(Suite.QUALITY, _REPEATS, with_own_sampling=flags.changes_sampling(changes))
    plan, _ = suite_plan(asked, stand.texts.seed, None, Room(stand.texts.book))
    stock = stand.texts.stock("questions")
    questions = [(request, stock.take(request.kind)) for request in plan.requests]
    answers: list[list[Replies]] = []
    end_s = stand.now_s() + budget_s
    for side in pairs.SIDES:
        if stand.now_s() >= end_s:  # the start of the other took it all
            return Quality(None, (f"there was no time for the questions to {side}",), ())
        try:
            answers.append(_ask(stand, side, questions, budget_s * _SHARE / len(pairs.SIDES)))
        except pairs.BootFailed as error:
            return Quality(None, (f"{side} did not start: {error}",), ())
    found = judge_quality(
        [pair(request.case, one, other)
         for (request, _), one, other in zip(questions, *answers, strict=False)]
    )  # fmt: skip
    n_left = len(questions) - min(len(one) for one in answers)
    if not n_left or found.passes is False:
        return found
    text = f"there was no time for {n_left} of {len(questions)} questions"
    return Quality(None, (*found.reasons, text), found.cases)


def _ask(
    stand: CandidateStand,
    side: pairs.Side,
    questions: Sequence[tuple[Request, Prompt]],
    limit_s: float,
) -> list[Replies]:
    """What one process of a side answers within a time that its start counts for."""
    answers: list[Replies] = []
    end_s = stand.now_s() + limit_s
    life = stand.boot(side)
    began_s = stand.now_s()
    has_ended = False
    try:
        for number, (request, prompt) in enumerate(questions):
            now_s = stand.now_s()
            if now_s >= end_s:
                break
            left_s = (now_s - began_s) / number * (len(questions) - number) if number else None
            text = f"questions to {side}: {request.case}"
            stand.ctx.report(Progress(text, number + 1, len(questions), left_s=left_s))
            answer = None
            if not has_ended:
                try:
                    answer = life.answer(request, prompt)
                except pairs.LifeEnded:
                    has_ended = True  # what is left has no answer, and that counts
            answers.append({prompt.prompt_id: answer})
    finally:
        life.close()
    return answers


# What is stored and told of a comparison: its arms, samples, turn times, and the verdict.

SUITE = "workload"


def _record(ctx: Context, prepared: Prepared) -> RunRecord:
    plan = prepared.plans["A"]
    return RunRecord(
        kind="compare",
        suites=(SUITE, str(Suite.QUALITY)) if prepared.changes else (SUITE,),
        started_s=ctx.clock.now_s(),
        target=f"A: {prepared.sides['A'].name}; B: {prepared.sides['B'].name}",
        seed=prepared.seed,
        unit=ctx.unit,
        profile=plan.resolved.name,
        model_name=plan.facts.name,
        workload=prepared.shape.name,
    )


def _effects(shape: WorkloadShape, found: pairs.Comparison) -> Iterator[SummaryRecord]:
    """Turn times of both sides, whole and by class."""
    for part in found.parts():
        what = part.name if part.class_index is None else f"class {part.class_index + 1}"
        effect = {"what": what, **_gain_json(part.gain), "a_s": part.a_s, "b_s": part.b_s}
        yield SummaryRecord(SUITE, "effect", None, effect)
    yield from (one.to_record(SUITE) for one in turn_times(shape, found))


def _verdict(prepared: Prepared, found: pairs.Comparison, quality: Quality | None) -> VerdictRecord:
    gain, decision = found.gain, found.decision
    ratio, low, high = (None, None, None) if gain is None else gain.ratios
    names = {side: one.name for side, one in prepared.sides.items()}
    advice = pairs.advise(found.standing, prepared.changes, quality, found.unreliable)
    said = pairs.sentence(found, f"A ({names['A']})", f"B ({names['B']})", prepared.shape.name)
    return VerdictRecord(
        outcome=advice.outcome,
        sentence=said if advice.remark is None else f"{said}; {advice.remark}",
        arm_a="A",
        arm_b="B",
        what=f"turn time on {prepared.shape.name}",
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        n_pairs=len(found.pairs),
        reasons=(*pairs.reasons(found), *advice.reasons),
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


def turn_times(shape: WorkloadShape, found: pairs.Comparison) -> list[TurnTime]:
    """The turn of each class and the expected one, on both sides, by part."""
    rows: list[TurnTime] = []
    for side in pairs.SIDES if found.pairs else ():
        parts = [Parts(*(found.seconds(side, part, at) for part in ("turn", "prefill", "decode")))
                 for at in range(len(shape.classes))]  # fmt: skip
        rows += turns_of(side, shape, parts)
    return rows


def _gain_json(gain: pairs.Gain) -> dict[str, Any]:
    """The ratio of times, B over A, and how much faster that makes B, each with its interval."""
    ratio, low, high = gain.ratios
    return {
        "ratio": ratio,
        "low": low,
        "high": high,
        "n_pairs": gain.n_pairs,
        "gain": gain.estimate,
        "gain_low": gain.lower,
        "gain_high": gain.upper,
    }


def payload_of(
    prepared: Prepared, found: pairs.Comparison, verdict: VerdictRecord, quality: Quality | None
) -> dict[str, Any]:
    """As scripts read it."""
    gain, parts = found.gain, []
    for part in found.parts():
        at = part.class_index
        name = None if at is None else prepared.shape.classes[at].name
        parts.append({"part": part.name, "class": name, "a_s": part.a_s, "b_s": part.b_s,
                      **_gain_json(part.gain), "sentence": pairs.part_sentence(part, name or "")})  # fmt: skip
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
        "effect": None if gain is None else _gain_json(gain),
        "parts": parts,
        "turns": [
            {**asdict(one), "total_s": one.total_s} for one in turn_times(prepared.shape, found)
        ],
        "pairs": len(found.pairs),
        "end": str(found.end),
        "elapsed_s": found.elapsed_s,
        "unusable": len(found.unusable),
        "problem": found.problem,
    }
