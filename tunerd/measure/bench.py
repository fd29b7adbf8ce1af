"""`tunerd bench`: takes the steps of a plan on one server life, and keeps to the rules that make a number honest."""

from __future__ import annotations

import random
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest

from tunerd.app import Context
from tunerd.engine.choice import PlanRequest
from tunerd.engine.flags import OutputChange, change_words, changes_sampling, output_changes
from tunerd.errors import BenchError, TunerdError, UsageError
from tunerd.measure import trust
from tunerd.measure.answer import Mark, Sample, count_marks, count_problems
from tunerd.measure.compare import SideRequest, answering, context_tokens, plan_side, side_of
from tunerd.measure.evidence import ArmRecord, RunRecord
from tunerd.measure.findings import SERVING, ArmData, beside_published, figures, findings, mtp_table
from tunerd.measure.learn import workload_for
from tunerd.measure.life import PROOF_KINDS, Answered, Life, prompt_book
from tunerd.measure.request import (
    FEW_TOKENS,
    USUAL_LETTERS_PER_TOKEN,
    BenchRequest,
    Composer,
    Plan,
    Prompt,
    PromptStock,
    Request,
    Room,
    Step,
    Suite,
    suite_plan,
    warm_up,
)
from tunerd.measure.results import arm_json, ending, rates_seen, sample_json
from tunerd.measure.store import EvidenceStore, demand_storable
from tunerd.measure.target import (
    LIVE,
    Target,
    letters_per_token,
    open_candidate,
    open_live,
    open_url,
)
from tunerd.measure.trust import OFF_FOR_ONE_REQUEST, Speculation
from tunerd.model.memory import Device
from tunerd.production.lease import Candidate, demand_alone, hold, outlook
from tunerd.production.plan import Plan as DeployPlan
from tunerd.production.unattended import demand_root_for_plan
from tunerd.profile.files import load_profile
from tunerd.profile.schema import Published
from tunerd.profile.workload import USUAL_RATES, Rates, WorkloadShape
from tunerd.result import ActionResult, Message, Progress, error, note, warning
from tunerd.words import check_name, format_duration

_REPEATS_OF_MARKED = 2
_MOST_FAILURES = 3
_MOST_MUTE = 2
_MOST_WAITS = 2
# How problems begin that a second try cannot heal.
_REFUSED = "status 4"
_REPEATED = 3  # what happened so often in the same way has one cause
Texts = Sequence[tuple[Prompt, ...]]


@dataclass(frozen=True, slots=True)
class _Item:
    """A step that is still to be taken on one arm; `prompts` are its texts."""

    target: Target
    number: int
    step: Step
    prompts: tuple[Prompt, ...]
    n_tries: int = 0


class BenchRun:
    """Measures the arms that one server life can play, usually one, for a session; `life` is that one."""

    def __init__(self, session: Session, targets: Sequence[Target], composer: Composer) -> None:
        self._ctx = ctx = session.ctx
        self._targets = list(targets)
        self._composer = composer
        self._keep = session.keep
        self._n_failed = 0
        self._n_mute = 0
        # What was asked since the last look at the counters: a step, None for a warm-up, of an arm, in so many requests.
        self._taken: list[tuple[_Item | None, Target, int]] = []
        self._was_busy = False
        self._n_busy = 0
        self.measured = session.measured
        self.life = Life(ctx, targets[0])
        self._watch = self.life.traffic

    def run(self, plan: Plan, texts: Mapping[str, Texts]) -> None:
        """Every step of a plan on every arm, in the plan's order.

        Args:
            plan: The steps.
            texts: By arm, the texts of each step.

        Raises:
            BenchError: the server ended, does not answer, or does not do what its arm is for.
        """
        self._was_busy = self._is_busy()
        self.life.open()
        try:
            self._ctx.say("warming up")
            for target in self._targets:
                self.measured[target.name] = ArmData(target.name, traffic_seen=self._watch.counts)
            self._targets = [self._proved(plan, target) for target in self._targets]
            queue = deque(
                _Item(target, number, step, texts[target.name][number])
                for number, step in enumerate(plan.steps)
                for target in self._targets
            )
            self._take_all(queue)
        finally:
            self._put_aside(self.life.asked)

    def _is_busy(self) -> bool:
        """Whether somebody else is served, however long it was waited for.

        Raises:
            BenchError: that was so for several times in a row: all of it would be measured in vain.
        """
        self._n_busy = 0 if self._watch.wait_until_idle() else self._n_busy + 1
        if self._n_busy < _MOST_WAITS:
            return self._n_busy > 0
        waited = format_duration(_MOST_WAITS * self._watch.limit_s)
        raise BenchError(
            "the server is always busy with other requests, so nothing can be measured",
            cause=f"it reported work during all {waited} of waiting",
            hint="bench when nobody else uses it; its `/slots` and `/metrics` show what it works on",
        )

    def _take_all(self, queue: deque[_Item]) -> None:
        began_s = self._ctx.clock.monotonic_s()
        done, todo = 0.0, sum(item.step.weight for item in queue)
        n_done = 0
        while queue:
            item = queue.popleft()
            request, took_s = item.step.requests[0], self._ctx.clock.monotonic_s() - began_s
            name = f", {item.target.name}" if len(self._targets) > 1 else ""
            text, steps = f"{request.suite}: {request.case}{name}", n_done + len(queue) + 1
            left_s = took_s / done * (todo - done) if done else None
            self._ctx.report(Progress(text, step=n_done + 1, steps=steps, left_s=left_s))
            goes_on = self._take(item)
            done, n_done = done + item.step.weight, n_done + 1
            if not goes_on:
                queue.clear()
            if not queue or not self._watch.counts or self._watch.is_due:
                again = self._settle()
                queue.extend(again if goes_on else ())
                todo += sum(one.step.weight for one in again)

    # The first requests of a life

    def _proved(self, plan: Plan, target: Target) -> Target:
        """The target with what its first requests showed; they are discarded."""
        life, drafts = self.life, target.speculation.drafts
        n_before = len(life.asked)

        def first(kind: str) -> tuple[Request, Prompt]:
            request = warm_up(plan.suite, kind)
            return request, self._composer.compose(request)

        try:
            has_drafted = life.warm_up(first, drafts=drafts, target=target)
        except BenchError as error:
            self._demand_life(target)
            told = f"{target.name}: {error.message}"
            raise BenchError(told, cause=error.cause, hint=error.hint) from error
        finally:
            self._taken.append((None, target, len(life.asked) - n_before))
        if drafts is None and target.is_llama:
            # Nobody said what it is meant to do: what it does now is what it must go on doing.
            return replace(target, speculation=Speculation(has_drafted))
        return target

    # Steps

    def _take(self, item: _Item) -> bool:
        """Measure one step; False where nothing can follow it."""
        target, requests = item.target, item.step.requests
        if not self._watch.counts or self._was_busy:
            self._was_busy = self._is_busy()
        if requests[0].streams > 1:  # they run at once
            asked = self.life.ask_all(requests, item.prompts, target=target)
        else:
            asked = []
            for request, prompt in zip(requests, item.prompts, strict=True):
                asked += self.life.ask_with_room(request, prompt, target=target)
                if asked[-1].sample.problem is not None:
                    break
        self._taken.append((item, target, len(asked)))
        if self._was_busy:
            self.life.mark(len(asked), Mark.FOREIGN_TRAFFIC)
        failed = next((one for one in asked if one.sample.problem is not None), None)
        for one in asked:
            self._n_mute = self._n_mute + 1 if one.is_mute else 0
        return self._goes_on(target, failed)

    def _goes_on(self, target: Target, failed: Answered | None) -> bool:
        if failed is None:
            self._n_failed = 0
            return True
        why = target.why_ended()
        if failed.request.suite is Suite.DEEP:
            if why is not None:
                dead = replace(failed, sample=replace(failed.sample, problem=why))
                self.life.asked[-1] = dead
            return False
        self._demand_life(target)
        if _is_refused(failed):
            return True
        self._n_failed += 1
        if self._n_mute >= _MOST_MUTE or self._n_failed > _MOST_FAILURES:
            text = f"{self._n_failed} requests in a row had no answer"
            raise BenchError(text, cause=failed.sample.problem)
        return True

    def _demand_life(self, target: Target) -> None:
        if target.life() == self.life.name:
            return
        raise BenchError(
            "the server ended while it was measured",
            cause=target.why_ended(),
            hint="what was measured until then is kept: `tunerd results list`",
        )

    # What is known only over several requests

    def _settle(self) -> list[_Item]:
        """Judge what is pending, keep it, and say which steps are to be taken again."""
        if not self._taken:
            return []
        asked, traffic = self.life.settle()
        if traffic.is_foreign is False and self.life.accepted is not None:
            self._count(asked, self.life.accepted)
        by_step = self._put_aside(asked)
        if traffic.is_foreign:
            self._ctx.say(f"somebody else was served: {traffic.text}")
            self._was_busy = True
        return [self._again(item) for item, found in by_step
                if item is not None and _is_to_be_repeated(item, found)]  # fmt: skip

    def _count(self, asked: Sequence[Answered], accepted: tuple[int, ...]) -> None:
        """Drafts by position, where one arm alone was asked since the last look."""
        names = {target.name for _, target, _ in self._taken}
        steps = [one.sample.steps for one in asked if one.sample.timings is not None]
        if len(names) != 1 or None in steps:
            return
        measured = self.measured[names.pop()]
        if all(item is None for item, _, _ in self._taken):
            return
        both = zip_longest(measured.accepted, accepted, fillvalue=0)
        measured.accepted = [one + other for one, other in both]
        measured.n_steps += sum(step for step in steps if step is not None)

    def _again(self, item: _Item) -> _Item:
        prompts = tuple(self._composer.compose_again(request, f"{item.number} {item.n_tries}")
                        for request in item.step.requests)  # fmt: skip
        step = replace(item.step, requests=tuple(one.held for one in item.step.requests))
        return replace(item, step=step, prompts=prompts, n_tries=item.n_tries + 1)

    def _put_aside(self, asked: Sequence[Answered]) -> list[tuple[_Item | None, list[Answered]]]:
        """Keep what was asked; by step."""
        left, taken, self._taken = iter(asked), self._taken, []
        by_step = [(item, target.name, list(islice(left, n))) for item, target, n in taken]
        for item, name, found in by_step:
            measured = self.measured[name]
            samples = [one.sample for one in found if one.request.is_measured
                       and (item is not None or one.sample.problem is None)]  # fmt: skip
            measured.samples += samples
            self._keep(name, samples)
            if item is not None:
                answers = measured.answers.setdefault(item.number, {})
                answers |= {one.prompt.prompt_id: one.answer for one in found}
        return [(item, found) for item, _, found in by_step]


def _is_to_be_repeated(item: _Item, asked: Sequence[Answered]) -> bool:
    """Whether a step has an answer that does not count, and may have one that does."""
    if item.n_tries >= _REPEATS_OF_MARKED or any(map(_is_refused, asked)):
        return False
    return not all(one.sample.is_usable for one in asked)


def _is_refused(asked: Answered) -> bool:
    """Whether the server says that it will not, such as for a prompt that its context cannot hold."""
    return (asked.sample.problem or "").startswith(_REFUSED)


_LOOK_BACK = 50
# Warm-up, tokens of prompts without a stated length, and what is measured again.
_ALLOWANCE = 1.25
_PROMPT_TOKENS = 100


def _measuring_s(plan: Plan, rates: Rates) -> float:
    """About how long a plan takes at these rates [s]."""
    prompts = sum(request.depth_tokens or _PROMPT_TOKENS for request in plan.requests)
    tokens = sum(request.n_predict for request in plan.requests)
    prompt_s = prompts / (rates.prompt_tok_s or USUAL_RATES.prompt_tok_s or 1.0)
    decode_s = tokens / (rates.decode_tok_s or USUAL_RATES.decode_tok_s or 1.0)
    return (prompt_s + decode_s) * _ALLOWANCE


def _seen_prompts(store: EvidenceStore, life: str | None) -> frozenset[str]:
    """Ids of the prompts that a server life was asked in earlier runs."""
    if life is None:
        return frozenset()
    return frozenset(
        sample.prompt_id
        for run in store.runs(limit=_LOOK_BACK, kind="bench")
        for sample in store.samples(run.number)
        if sample.process == life
    )


def _published(ctx: Context, asked: BenchRequest, profile: str | None) -> Published | None:
    """The published numbers of a profile where they are wanted, before anything is measured.

    Raises:
        UsageError: it is not known which profile serves, or nothing was published for it.
    """
    if not asked.is_against_published:
        return None
    if asked.suite not in {Suite.MTP, Suite.LENGTHS, Suite.DEEP}:
        raise UsageError(
            f"there are no published figures for suite `{asked.suite}`",
            hint="--suite mtp, --suite lengths, or --suite deep",
        )
    if profile is None:
        raise UsageError(
            "nothing to compare with: what serves here is not a profile of tunerd",
            hint="`tunerd bench PROFILE --against published`",
        )
    published = load_profile(ctx, profile, options={}).profile.published
    if published == Published():
        raise UsageError(f"profile `{profile}` has no published numbers")
    return published


# What serves now beside a profile that is measured: where their answers may differ, and its own plan.


def _beside_serving(
    ctx: Context, made: DeployPlan, suite: Suite
) -> tuple[DeployPlan | None, tuple[OutputChange, ...], list[Message]]:
    """What serves now, planned anew, what of it may answer otherwise than what would be deployed, and how that is said.

    Nothing where nothing serves, or it cannot be planned again.
    """
    if not made.live.argv:
        return None, (), []
    try:
        serving = plan_side(ctx, side_of(ctx, LIVE, base=None))
    except TunerdError as error:
        text = f"answers are not compared with those of what serves: {error.words}"
        told = warning("no-reference", text, error.hint)
        return None, (), [told] if suite is Suite.QUALITY else []
    changes = output_changes(answering(serving), answering(made))
    if not changes:
        return serving, (), []
    text = f"the profile may give other answers than what serves: {change_words(changes)}"
    if suite is Suite.QUALITY:
        return serving, changes, [note("changes-answers", text)]
    hint = f"`tunerd bench {made.resolved.name} --suite quality` compares their answers"
    return serving, changes, [warning("changes-answers", text, hint)]


# A bench from its first question to its last: arms, prompts, and the run in the store.

ON, OFF = "speculation on", "speculation off"
# Suites that ask what speculation does, so that both arms are wanted.
BOTH_ARMS = frozenset({Suite.LENGTHS, Suite.QUALITY})
_LOAD_S = 90.0
_BUDGET_FACTOR = 4.0
_LEAST_BUDGET_S = 900.0
Confirm = Callable[[str], None]


@dataclass
class Session:
    """One call of the command; the run is stored from its first sample on, in a store that is given to it by then."""

    ctx: Context
    asked: BenchRequest
    store: EvidenceStore = field(init=False)
    run: int | None = None
    plan: Plan | None = None
    shape: WorkloadShape | None = None
    opened: list[Target] = field(default_factory=list)
    arms: list[ArmRecord] = field(default_factory=list)
    measured: dict[str, ArmData] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Choose the seed of order and texts, and read the prompts."""
        self.seed = self.asked.seed if self.asked.seed is not None else secrets.randbelow(1 << 31)
        self.book = prompt_book(self.ctx)

    def on_server(self, target: Target, what: str) -> None:
        """A server that runs already, with both arms where it can play them."""
        self._workload(None)
        with self._ending():
            self._begin(target, what)
            composer, has_both = self._composer(target), self.asked.suite in BOTH_ARMS
            self._measure(self._both(target, composer) if has_both else [target], composer)

    def on_servers(self, targets: Mapping[str, Target]) -> None:
        """Servers that run already, by their addresses, one after the other: what fits into the least context."""
        self._workload(None)
        sizes = [one.n_ctx for one in targets.values() if one.n_ctx is not None]
        unknown = [url for url, one in targets.items() if one.n_ctx is None]
        if unknown:
            known = f"cut to the smallest of the others, {min(sizes)}" if sizes else "not cut"
            self.messages.append(note("context-unknown", f"{', '.join(unknown)} does not report its context: "
                                      f"requests are {known}, and may be too long for it"))  # fmt: skip
        with self._ending():
            for url, target in targets.items():
                self.on_arm(replace(target, n_ctx=min(sizes, default=None)), url)

    def ask(
        self, plans: Mapping[str, DeployPlan], confirm: Confirm, *, start_after: bool
    ) -> tuple[float, bool]:
        """Ask whether candidates may be measured; for how long at most [s], and whether the server ran then."""
        for plan in plans.values():
            demand_root_for_plan(self.ctx, plan)
        first = next(iter(plans.values()))
        self._workload(first)
        with _with_state(f"nothing was stopped: {self.ctx.unit} is as before"):
            measuring_s = self._expected_s(first, len(plans))
        ahead = outlook(
            self.ctx,
            measuring_s=measuring_s,
            start_after=start_after,
            engines=[plan.engine for plan in plans.values()],
        )
        demand_storable(self.ctx)
        demand_alone(self.ctx)
        profile = first.resolved.name
        confirm(f"`{profile}` is measured in place of {self.ctx.unit}: {ahead.text}. Go on?")
        return max(_LEAST_BUDGET_S, _BUDGET_FACTOR * (measuring_s + _LOAD_S)), ahead.runs

    def on_candidates(
        self, plans: Mapping[str, DeployPlan], budget_s: float, *, start_after: bool, ran: bool
    ) -> None:
        """Candidates in the live unit's place, one after the other."""
        profile = next(iter(plans.values())).resolved.name
        with (
            _with_state(f"it is no longer measured; {self.ctx.unit} is as before again"),
            self._ending(),
            hold(
                self.ctx,
                purpose=f"bench {profile}",
                budget_s=budget_s,
                start_after=start_after,
                ran=ran,
            ) as held,
        ):
            self.messages += [note("lease", text) for text in held.notes]
            for name, made in plans.items():
                with held.serve(made) as candidate:
                    target = open_candidate(self.ctx, candidate, name)
                    if name == OFF:
                        target = replace(target, speculation=Speculation(drafts=False))
                    planned_free_mib = _planned_free(candidate)
                    try:
                        self.on_arm(target, f"profile {profile}")
                    except BenchError:
                        held.check()  # a lease that is gone explains a server that is
                        raise
                    self.measured[name].planned_free_mib = planned_free_mib
                    held.check()
        if held.without_service_s is not None:
            text = f"{self.ctx.unit} did not serve for {held.without_service_s:.0f} s"
            self.messages.append(note("without-service", text))

    def on_arm(self, target: Target, what: str) -> None:
        """One arm on a server life of its own; the texts are those of the arms before."""
        self._begin(target, what)
        self._measure([target], self._composer(target))

    # Steps

    def _workload(self, made: DeployPlan | None) -> None:
        if self.asked.suite is not Suite.WORKLOAD:
            return
        resolved = made.resolved if made is not None else None
        self.shape, message = workload_for(self.ctx, self.asked.workload, resolved)
        self.messages.append(message)

    def _expected_s(self, made: DeployPlan, n_arms: int) -> float:
        """How long measuring takes, loads and requests; the live unit's own start is not in it."""
        letters = self._letters_now(made)
        room = Room(self.book, context_tokens(made), letters_per_token=letters)
        plan, _ = suite_plan(self.asked, self.seed, self.shape, room)
        rates = rates_seen(self.ctx, made.resolved.name)
        return n_arms * (_LOAD_S + _measuring_s(plan, rates))

    def _letters_now(self, made: DeployPlan) -> float | None:
        """How the model cuts text, where the same one serves now; None where nobody can say."""
        models = {word for word in made.command.argv if word.endswith(".gguf")}
        if not models & set(made.live.argv or ()):
            return None
        try:
            return letters_per_token(open_live(self.ctx).server, self.book)
        except TunerdError:
            return None

    def _begin(self, target: Target, what: str) -> None:
        """Begin the run in the store, or add an arm to it."""
        self.opened.append(target)
        self.messages += [one for one in target.messages if one not in self.messages]
        self._add(target, what)

    def _add(self, target: Target, what: str = "") -> None:
        arm = target.arm
        if self.shape is not None:
            arm = arm.under(workload_sha256=self.shape.sha256)
        self.arms.append(arm)
        if self.run is not None:
            self.store.add_arm(self.run, arm)
            return
        record = RunRecord(
            kind="bench",
            suites=(str(self.asked.suite),),
            started_s=self.ctx.clock.now_s(),
            target=what,
            seed=self.seed,
            unit=target.unit,
            profile=target.profile,
            model_name=target.model,
            workload=self.shape.name if self.shape is not None else None,
            arms=(arm,),
        )
        self.run = self.store.add_run(record)

    def _both(self, target: Target, composer: Composer) -> list[Target]:
        """The same server with speculation off by request, where the build honours that."""
        if target.speculation.drafts is False or not target.is_llama:
            return [target]
        off = replace(
            target,
            arm=replace(target.arm, name=OFF),
            speculation=Speculation(drafts=False),
            overrides=OFF_FOR_ONE_REQUEST,
        )
        request, life = warm_up(self.asked.suite, PROOF_KINDS[0]), Life(self.ctx, target)
        drafted = [life.ask(request, composer.compose(request), target=one).has_drafted
                   for one in (target, off)]  # fmt: skip
        if drafted != [True, False]:  # the setting had no effect
            text = "this server cannot switch speculation by request, so only one arm is measured"
            self.messages.append(note("one-arm", text, "`tunerd bench PROFILE` measures both"))
            return [target]
        self._add(off)
        return [target, off]

    def _composer(self, target: Target) -> Composer:
        """Texts for one life: the same for every life of a run, and none that this one has seen."""
        used = _seen_prompts(self.store, target.life())
        rng = random.Random(f"texts {self.seed}")  # noqa: S311 -- texts that can be had again
        stock = PromptStock(self.book, rng, used)
        if not target.is_llama:
            return Composer(stock)
        letters = letters_per_token(target.server, self.book)
        return Composer(stock, letters or USUAL_LETTERS_PER_TOKEN)

    def _measure(self, targets: Sequence[Target], composer: Composer) -> None:
        target = targets[0]
        letters = composer.letters_per_token if target.is_llama else None
        room = Room(self.book, target.n_ctx, target.most_tokens, letters)
        plan, told = suite_plan(self.asked, self.seed, self.shape, room)
        self.messages += [one for one in told if one not in self.messages]
        self.plan = self.plan or plan
        texts: dict[str, Texts] = {}
        for one in targets:
            # Questions whose answers are compared are the same; where speed counts, no text comes twice.
            texts[one.name] = texts[target.name] if texts and plan.suite is Suite.QUALITY else [
                tuple(map(composer.compose, step.requests)) for step in self.plan.steps
            ]  # fmt: skip
        running = BenchRun(self, targets, composer)
        running.run(self.plan, texts)
        self.messages += [one for one in running.life.crowded() if one not in self.messages]
        if composer.stock.repeated_kinds:
            kinds = ", ".join(sorted(composer.stock.repeated_kinds))
            text = f"this server has seen all texts of {kinds}: they were used again with another number"
            self.messages.append(warning("texts-used-up", text, "restart it for fresh ones"))

    def keep(self, arm: str, samples: Sequence[Sample]) -> None:
        """What an arm was asked."""
        if self.run is not None:
            self.store.add_samples(self.run, samples, arm=arm)

    def _ending(self) -> AbstractContextManager[object]:
        """Writes how the run ended, whatever happens."""
        return ending(self.ctx, self.store, lambda: self.run)


@contextmanager
def _with_state(text: str) -> Iterator[None]:
    """What an error within says of the machine, unless it knows better."""
    try:
        yield
    except BenchError as problem:
        problem.state = problem.state or text
        raise


def _planned_free(candidate: Candidate) -> int | None:
    """VRAM that is left with a full context, if the estimate is right about what comes after the load."""
    memory = candidate.plan.memory
    if candidate.vram_free_mib is None or Device.GPU not in memory.free_mib:
        return None
    grows_mib = memory.estimate.worst_mib(Device.GPU) - memory.estimate.start_mib(Device.GPU)
    return candidate.vram_free_mib - grows_mib


# `tunerd bench`: measures a server by a suite, keeps every sample, and says what it came to.


def bench_live(ctx: Context, asked: BenchRequest) -> ActionResult:
    """Measure the unit that serves now; nothing of it is changed.

    Raises:
        BenchError: it cannot be measured, or not trusted.
    """
    session, state = Session(ctx, asked), f"nothing was stopped: {ctx.unit} is as before"
    with EvidenceStore(ctx.paths.evidence) as session.store, _with_state(state):
        demand_alone(ctx)
        target = open_live(ctx)
        published = _published(ctx, asked, target.profile)
        session.on_server(target, LIVE)
        return result_of(session, LIVE, published)


def bench_urls(ctx: Context, asked: BenchRequest, urls: Sequence[str]) -> ActionResult:
    """Measure servers by their addresses, each of which may have a name before it: `NAME=URL`.

    Raises:
        UsageError: one is no address, or two have one name.
        BenchError: one cannot be measured.
    """
    session = Session(ctx, asked)
    with EvidenceStore(ctx.paths.evidence) as session.store:
        published = _published(ctx, asked, None)
        targets = _open_urls(ctx, urls)
        if len(urls) > 1:
            session.on_servers(targets)
        else:
            ((url, target),) = targets.items()
            session.on_server(target, url)
        return result_of(session, " and ".join(targets), published)


def _open_urls(ctx: Context, urls: Sequence[str]) -> dict[str, Target]:
    """What answers at each address."""
    found = {}
    for text in urls:
        label, _, url = text.rpartition("=")
        if label:
            check_name(label, of="a server")
        found[url] = open_url(ctx, url, label or None)
    names = [one.name for one in found.values()]
    if len(set(names)) < len(urls):
        raise UsageError(
            f"each server needs an address and a name of its own: {', '.join(names)}",
            state="nothing was measured",
            hint="--url NAME=URL gives it one",
        )
    return found


def bench_profile(
    ctx: Context,
    asked: BenchRequest,
    request: PlanRequest,
    confirm: Confirm,
    *,
    start_after: bool = False,
) -> ActionResult:
    """Measure a profile as a candidate in the live unit's place, which serves again afterwards.

    Args:
        ctx: Where.
        asked: The suite.
        request: The profile.
        confirm: Called with how long there will be no service; raises where that is not wanted.
        start_after: Start the live unit afterwards even if it does not run now.

    Raises:
        BenchError: it cannot be measured.
        DeployError: it would be refused.
        LeaseEnded: somebody started the live unit, or the time ran out.
        Stranded: the live unit does not serve afterwards.
    """
    made = plan_side(ctx, SideRequest(request.profile, request))
    plans = {request.profile: made}
    if asked.suite in BOTH_ARMS and made.resolved.profile.speculation.type not in {None, "off"}:
        without = replace(request, options={**request.options, "speculation.type": "off"})
        side = SideRequest(f"{request.profile} with speculation off", without)
        plans = {ON: made, OFF: plan_side(ctx, side)}
    published = _published(ctx, asked, made.resolved.name)
    serving, output, messages = _beside_serving(ctx, made, asked.suite)
    if asked.suite is Suite.QUALITY and output and serving is not None:
        plans[SERVING] = serving
        asked = replace(asked, with_own_sampling=changes_sampling(output))
    if asked.suite is Suite.QUALITY and len(plans) == 1:
        raise BenchError(
            f"there is nothing to compare the answers of `{made.resolved.name}` with",
            cause="; ".join(one.text for one in messages)
            or "it does not speculate, and answers as what serves does",
            state=f"nothing was stopped: {ctx.unit} is as before",
        )
    session = Session(ctx, asked, messages=messages)
    budget_s, ran = session.ask(plans, confirm, start_after=start_after)
    with EvidenceStore(ctx.paths.evidence, check=False) as session.store:
        session.on_candidates(plans, budget_s, start_after=start_after, ran=ran)
        return result_of(session, f"profile {request.profile}", published)


def result_of(session: Session, target: str, published: Published | None) -> ActionResult:
    """What the samples came to; figures beside them are stored too."""
    if session.plan is None or session.run is None:
        raise BenchError("nothing was measured")
    arms = list(session.measured.values())
    found = findings(session.plan, arms, session.shape)
    for record in found:
        session.store.add_summary(session.run, record)
    messages = [
        *session.messages, *_unusable(arms), *_unwatched(session), *_without_times(session),
        *_repeating(arms),
    ]  # fmt: skip
    has_any = any(sample.is_usable for arm in arms for sample in arm.samples)
    if not has_any:
        text = "no request could be measured undisturbed"
        messages.append(error("nothing-usable", text, "the reasons are listed with it"))
    beside = None
    if published is not None:
        family = session.opened[0].arm.family
        beside = beside_published(session.plan.suite, arms[0].samples, published, family)
        if not beside:
            text = "there are no published figures for this engine, or for prompts as long as these"
            messages.append(note("nothing-published", text))
    payload = {
        "run": session.run,
        "target": target,
        "suite": str(session.plan.suite),
        "seed": session.seed,
        "arms": [arm_json(arm) for arm in session.arms],
        "summary": figures({arm.name: arm.samples for arm in arms}),
        "tables": {one.name: mtp_table(one.samples) for one in arms}
        if session.plan.suite is Suite.MTP else {},
        "left_out": {arm.name: _reasons(arm) for arm in arms},
        "against": beside,
        "samples": [{"arm": arm.name, **sample_json(sample)}
                    for arm in arms for sample in arm.samples],
        "summaries": [asdict(one) for one in found],
    }  # fmt: skip
    return ActionResult("bench", payload, tuple(messages), 0 if has_any else 1, has_acted=True)


def _unwatched(session: Session) -> Iterator[Message]:
    if not all(one.traffic_seen for one in session.measured.values()):
        yield note("no-counters", "the server has no counters (`--metrics` is off): others' requests "
                   "show only while they run")  # fmt: skip


def _repeating(arms: Sequence[ArmData]) -> Iterator[Message]:
    told = {arm.name: [one.repeated_ratio for one in arm.samples
                       if one.is_usable and one.repeated_ratio is not None] for arm in arms}  # fmt: skip
    for name, ratios in told.items():
        if n := trust.mostly_repeated(ratios):
            yield note("repeats", f"{name}: {n} answers {trust.FLATTERED}")
    for name, why in trust.those_that_repeat_more(told).items():
        yield warning("repeats-more", f"{name}: {why}", "its speed is none of sane answers")


def _without_times(session: Session) -> Iterator[Message]:
    """Without times of the server's own, or tokens that were seen to come, there is no speed to show."""
    for target in session.opened:
        name = target.name
        usable = [one for one in session.measured[name].samples if one.is_usable]
        n = sum(one.timings is None or one.timings.predicted_ms is None for one in usable)
        if target.is_llama and n:
            text = f"{name}: {n} of {len(usable)} answers came without the server's own times"
            hint = "no speed is shown for them; the client's clock is kept with the samples"
            yield warning("no-times", text, hint)
        n = sum(one.n_predict >= FEW_TOKENS and one.client_tok_s is None for one in usable)
        if n:
            text = f"{name}: {n} of {len(usable)} answers have no speed by the client's clock"
            hint = "they lack `usage`, hide their reasoning, came whole within 50 ms, or a proxy held them back: ask the server directly"
            yield warning("no-pace", text, hint)


def _reasons(arm: ArmData) -> dict[str, int]:
    """How many requests each reason speaks against, the warm-up left out."""
    return {why: n for why, n in count_marks(arm.samples).items() if why != Mark.WARM_UP}


def _own_limit(arm: ArmData) -> str | None:
    """What mends a server with a limit of its own: for prompts, or for answers as ik has with `-n`; None where they differ."""
    if any(Mark.CUT_PROMPT in one.marks for one in arm.samples):
        return "it read only a part of long prompts, as Ollama does beyond its context (4096 by default): give it a larger one, or use a smaller --depth"
    short = [one.timings for one in arm.samples if Mark.SHORT in one.marks]
    ends = {None if one is None else one.predicted_n for one in short}
    if len(short) < _REPEATED or len(ends) > 1 or None in ends:
        return None
    return (
        f"all that ended early did so after {ends.pop()} tokens: if that is the server's own limit (`-n`, "
        "serving.n_predict), raise it and measure again; ik_llama.cpp ends all answers there"
    )


def _unusable(arms: Sequence[ArmData]) -> Iterator[Message]:
    for arm in arms:
        counts = _reasons(arm)
        if counts:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in counts.items())
            text = f"{arm.name}: left out of every figure: {reasons}"
            yield warning("left-out", text, _own_limit(arm))
        for reason, n in count_problems(arm.samples).items():
            yield warning("no-answer", f"{arm.name}: no answer to {n}: {reason}")
