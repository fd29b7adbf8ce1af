"""A bench from its first question to its last: arms, prompts, and the run in the store."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd import __version__
from tunerd.actions.bench_ask import Asker
from tunerd.actions.bench_plan import (
    BenchRequest,
    expected_s,
    fitting_plan,
    prompt_book,
    rates_seen,
    seen_prompts,
)
from tunerd.actions.bench_run import BenchRun, Measured
from tunerd.actions.bench_target import Opened, Target, letters_per_token, open_candidate, open_live
from tunerd.actions.candidate import Candidate
from tunerd.actions.context import Context
from tunerd.actions.lease import hold
from tunerd.actions.lease_outlook import outlook
from tunerd.actions.plan import Plan as DeployPlan
from tunerd.actions.workloads import workload_for
from tunerd.core.bench.composing import USUAL_LETTERS_PER_TOKEN, Composer
from tunerd.core.bench.expected import OFF_FOR_ONE_REQUEST
from tunerd.core.bench.prompts import PromptStock
from tunerd.core.bench.request import Plan, Suite, warm_up
from tunerd.core.bench.trust import Quiet, Speculation
from tunerd.core.evidence import ArmRecord, RunOutcome, RunRecord
from tunerd.core.memory_parts import Device
from tunerd.core.result import Message, note, warning
from tunerd.core.sample import Sample
from tunerd.core.workload_shape import WorkloadShape
from tunerd.errors import BenchError, Preempted, TunerdError
from tunerd.system.host import read_host
from tunerd.system.store import EvidenceStore

ON, OFF = "speculation on", "speculation off"
# Suites that ask what speculation does, so that both arms are wanted.
BOTH_ARMS = frozenset({Suite.LENGTHS, Suite.QUALITY})
# So much filler tells how many letters a token has.
_SAMPLE_LETTERS = 8000
_LOAD_S = 90.0
_BUDGET_FACTOR = 4.0
_LEAST_BUDGET_S = 900.0
Confirm = Callable[[str], None]


@dataclass
class Session:
    """One call of the command; the run is stored from its first sample on."""

    ctx: Context
    asked: BenchRequest
    store: EvidenceStore
    run: int | None = None
    plan: Plan | None = None
    shape: WorkloadShape | None = None
    opened: list[Opened] = field(default_factory=list)
    arms: list[ArmRecord] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    planned_free_mib: dict[str, int | None] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Choose the seed of order and texts, and read the prompts."""
        self.seed = self.asked.seed if self.asked.seed is not None else secrets.randbelow(1 << 31)
        self.book = prompt_book(self.ctx)

    def on_server(self, opened: Opened, target: str) -> None:
        """A server that runs already, with both arms where it can play them."""
        self._workload(None)
        with self._ending():
            targets = [opened.target]
            self._begin(opened, target)
            composer = self._composer(opened.target)
            if self.asked.suite in BOTH_ARMS:
                targets = self._both(opened.target, composer)
            self._measure(targets, composer)

    def on_candidates(
        self, plans: Mapping[str, DeployPlan], confirm: Confirm, *, start_after: bool
    ) -> None:
        """Candidates in the live unit's place, one after the other."""
        first = next(iter(plans.values()))
        profile = first.resolved.name
        self._workload(first)
        with _with_state(f"nothing was stopped: {self.ctx.unit} is as before"):
            measuring_s = self._expected_s(first, len(plans))
        ahead = outlook(
            self.ctx,
            measuring_s=measuring_s,
            start_after=start_after,
            programs=[plan.engine.program for plan in plans.values()],
        )
        confirm(f"`{profile}` is measured in the place of {self.ctx.unit}: {ahead.text}. Go on?")
        if ahead.risk is not None:
            self.messages.append(warning("may-stay-down", ahead.risk))
        budget_s = max(_LEAST_BUDGET_S, _BUDGET_FACTOR * (measuring_s + _LOAD_S))
        with (
            _with_state(f"it was measured in its place; {self.ctx.unit} is as before again"),
            self._ending(),
            hold(
                self.ctx,
                purpose=f"bench {profile}",
                budget_s=budget_s,
                start_after=start_after,
            ) as held,
        ):
            self.messages += [note("lease", text) for text in held.notes]
            for name, made in plans.items():
                with held.serve(made) as candidate:
                    opened = open_candidate(self.ctx, candidate, name)
                    if name == OFF:
                        opened = _meant(opened, Speculation(drafts=False))
                    self.planned_free_mib[name] = _planned_free(candidate)
                    try:
                        self.on_arm(opened, f"profile {profile}")
                    except BenchError:
                        held.check()  # a lease that is gone explains a server that is
                        raise
                    held.check()
        if held.without_service_s is not None:
            text = f"{self.ctx.unit} did not serve for {held.without_service_s:.0f} s"
            self.messages.append(note("without-service", text))

    def on_arm(self, opened: Opened, target: str) -> None:
        """One arm on a server life of its own; the texts are those of the arms before."""
        self._begin(opened, target)
        self._measure([opened.target], self._composer(opened.target))

    # Steps

    def _workload(self, made: DeployPlan | None) -> None:
        if self.asked.suite is not Suite.WORKLOAD:
            return
        resolved = made.resolved if made is not None else None
        self.shape, message = workload_for(self.ctx, self.asked.workload, resolved)
        self.messages.append(message)

    def _expected_s(self, made: DeployPlan, n_arms: int) -> float:
        """How long measuring takes, loads and requests; the live unit's own start is not in it."""
        serving = made.resolved.profile.serving
        n_ctx = serving.ctx_size or None
        if n_ctx is not None and not serving.kv_unified:
            n_ctx //= serving.n_parallel or 1
        plan, _ = fitting_plan(
            self.asked, self.seed, self.shape, self.book, n_ctx=n_ctx,
            letters_per_token=self._letters_now(made),
        )  # fmt: skip
        rates = rates_seen(self.store, made.resolved.name)
        return n_arms * (_LOAD_S + expected_s(plan, rates))

    def _letters_now(self, made: DeployPlan) -> float | None:
        """How the model cuts text, where the same one serves now; None where nobody can say."""
        models = {word for word in made.command.argv if word.endswith(".gguf")}
        if not models & set(made.live.argv or ()):
            return None
        stock = PromptStock(self.book, random.Random(0))  # noqa: S311 -- only counted
        try:
            server = open_live(self.ctx).target.server
        except TunerdError:
            return None
        return letters_per_token(server, stock.filler(_SAMPLE_LETTERS))

    def _begin(self, opened: Opened, target: str) -> None:
        """Begin the run in the store, or add an arm to it."""
        self.opened.append(opened)
        self.messages += [one for one in opened.messages if one not in self.messages]
        self._add(opened.target.arm, opened, target)

    def _add(self, arm: ArmRecord, opened: Opened, target: str) -> None:
        if self.shape is not None:
            print_ = replace(arm.fingerprint, workload_sha256=self.shape.sha256)
            arm = replace(arm, fingerprint=print_)
        self.arms.append(arm)
        if self.run is not None:
            self.store.add_arm(self.run, arm)
            return
        record = RunRecord(
            kind="bench",
            suites=(str(self.asked.suite),),
            started_s=self.ctx.clock.now_s(),
            target=target,
            seed=self.seed,
            unit=opened.unit,
            profile=opened.profile,
            model_name=opened.target.model,
            workload=self.shape.name if self.shape is not None else None,
            tunerd_version=__version__,
            host=_host(self.ctx),
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
        if not self._honours((target, off), composer):
            text = "this server takes no settings of speculation with a request, so one arm alone is measured"
            self.messages.append(note("one-arm", text, "`tunerd bench PROFILE` measures both"))
            return [target]
        self._add(off.arm, self.opened[0], "")
        return [target, off]

    def _honours(self, both: Sequence[Target], composer: Composer) -> bool:
        """Whether the setting had an effect: drafts without it, and none with it."""
        request = warm_up(self.asked.suite).requests[0]
        life = both[0].life() or ""
        drafted = []
        for target in both:
            asker = Asker(self.ctx, target, life, Quiet())
            found = asker.ask(request, composer.compose(request), 0).sample
            drafted.append(bool(found.timings is not None and found.timings.draft_n))
        return drafted == [True, False]

    def _composer(self, target: Target) -> Composer:
        """Texts for one life: the same for every life of a run, and none that this one has seen."""
        used = seen_prompts(self.store, target.life())
        rng = random.Random(f"texts {self.seed}")  # noqa: S311 -- texts that can be had again
        stock = PromptStock(self.book, rng, used)
        letters = USUAL_LETTERS_PER_TOKEN
        if target.is_llama:
            letters = letters_per_token(target.server, stock.filler(_SAMPLE_LETTERS))
        return Composer(stock, letters)

    def _measure(self, targets: Sequence[Target], composer: Composer) -> None:
        target = targets[0]
        plan, told = fitting_plan(
            self.asked,
            self.seed,
            self.shape,
            self.book,
            n_ctx=target.n_ctx,
            n_slots=target.n_slots,
            most_tokens=target.most_tokens,
            letters_per_token=composer.letters_per_token if target.is_llama else None,
        )
        self.messages += [one for one in told if one not in self.messages]
        self.plan = self.plan or plan
        first = [composer.compose_step(step.requests) for step in self.plan.steps]
        texts = {target.name: first}
        for other in targets[1:]:
            # Questions whose answers are compared are the same; where speed counts, no text comes twice.
            texts[other.name] = first if plan.suite is Suite.QUALITY else [
                composer.compose_step(step.requests) for step in self.plan.steps
            ]  # fmt: skip
        running = BenchRun(self.ctx, targets, composer, self._keep)
        try:
            running.run(self.plan, texts)
        finally:
            self.measured |= running.measured
        if composer.stock.repeated_kinds:
            kinds = ", ".join(sorted(composer.stock.repeated_kinds))
            text = f"this server has seen all texts of {kinds}: they came again with another number"
            self.messages.append(warning("texts-used-up", text, "restart it for fresh ones"))

    def _keep(self, arm: str, samples: Sequence[Sample]) -> None:
        if self.run is not None:
            self.store.add_samples(self.run, samples, arm=arm)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Write how the run ended, whatever happens."""
        outcome, reason = RunOutcome.FAILED, None
        try:
            yield
            outcome = RunOutcome.DONE
        except (KeyboardInterrupt, SystemExit) as end:
            outcome, reason = RunOutcome.STOPPED, "interrupted"
            if self.run is not None:
                end.add_note(
                    f"what was measured until then is kept: `tunerd results show {self.run}`"
                )
            raise
        except Preempted as end:
            outcome, reason = RunOutcome.STOPPED, end.cause
            raise
        except TunerdError as problem:
            reason = ": ".join(part for part in (problem.message, problem.cause) if part)
            raise
        finally:
            if self.run is not None:
                ended_s = self.ctx.clock.now_s()
                self.store.end_run(self.run, outcome, ended_s=ended_s, reason=reason)


@contextmanager
def _with_state(text: str) -> Iterator[None]:
    """What an error within says of the machine, unless it knows better."""
    try:
        yield
    except BenchError as problem:
        problem.state = problem.state or text
        raise


def _meant(opened: Opened, speculation: Speculation) -> Opened:
    return replace(opened, target=replace(opened.target, speculation=speculation))


def _planned_free(candidate: Candidate) -> int | None:
    """VRAM that is left with a full context, if the estimate is right about what comes after the load."""
    gpu = next((one for one in candidate.plan.memory.devices if one.name == Device.GPU), None)
    if candidate.vram_free_mib is None or gpu is None:
        return None
    return candidate.vram_free_mib - (gpu.worst_mib - gpu.start_mib)


def _host(ctx: Context) -> dict[str, Any]:
    host = read_host(ctx.gpu)
    return {
        "kernel": host.kernel,
        "cpu": host.cpu.model,
        "gpus": [gpu.name for gpu in host.gpus or ()],
        "driver": host.driver_version,
        "memory": {"total_mib": host.memory.total_mib},
    }
