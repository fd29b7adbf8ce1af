"""`tunerd sweep run` and `resume`: a night on the live box, stored piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd.actions.bench_plan import prompt_book
from tunerd.actions.context import Context
from tunerd.actions.lease import Held, hold
from tunerd.actions.live import address_now, read_live_unit
from tunerd.actions.plan import Plan
from tunerd.actions.promote import follow_policy
from tunerd.actions.sweep_box import LeaseBox
from tunerd.actions.sweep_hours import demand_open, demand_time
from tunerd.actions.sweep_house import House
from tunerd.actions.sweep_night import take_request, unfinished
from tunerd.actions.sweep_plan import (
    PreparedSweep,
    SweepRequest,
    demand_room,
    plan_arm,
    plan_json,
    prepare,
    request_from_json,
)
from tunerd.actions.sweep_record import SweepKeeper, find_sweep, history_of
from tunerd.actions.sweep_texts import SweepTexts
from tunerd.actions.upgrade_compare import compare_builds, due_comparison
from tunerd.core.evidence import RunOutcome, VerdictRecord
from tunerd.core.progress import Progress, ProgressSink
from tunerd.core.quantity import format_duration
from tunerd.core.result import ActionResult, Message, note, warning
from tunerd.core.sweep import Arm, Outcome, Sample, tune
from tunerd.core.sweep.arm import as_arm
from tunerd.core.sweep.words import changed
from tunerd.errors import HostError, Stranded, TunerdError, UsageError
from tunerd.system.interrupts import words_of
from tunerd.system.store import EvidenceStore

# Time for the last request to end in, so that the loop and not the lease ends the night.
_SLACK_S = 120.0
_LEAST_S = 30.0
_QUIET_POLL_S = 2.0

Confirm = Callable[[PreparedSweep], None]


def sweep_plan(ctx: Context, request: SweepRequest) -> ActionResult:
    """`tunerd sweep run --dry-run`: what would be tried, what it would cost, what stays and why."""
    prepared = prepare(ctx, request, proves=False)
    return ActionResult("sweep run", {"plan": plan_json(prepared)}, prepared.messages)


def run_sweep(
    ctx: Context, request: SweepRequest, *, confirm: Confirm, bound_to: str | None = None
) -> ActionResult:
    """Search, prove, and store everything; within the request's window, if it has one.

    Args:
        ctx: Where.
        request: What is asked for.
        confirm: Shows what will happen and asks; raises to stop.
        bound_to: The unit that this process is, where it is one.

    Returns:
        Exit code 0 whatever the verdict, 1 if nothing could be measured.

    Raises:
        UsageError: as `prepare`; the window is closed, or too little is left of it.
        ConfigError, DeployError: as `prepare`.
        Busy: the GPU is taken by somebody else, or too hot.
        HostError: there is no room for what is measured.
        Stranded: production does not serve afterwards; what was measured is stored.
    """
    house = House(ctx)
    demand_open(ctx, request.window)
    house.settle()
    prepared = prepare(ctx, request, proves=True)
    demand_time(ctx, prepared.deadline, budget_s=request.budget_s, load_s=prepared.load_s)
    demand_room(prepared)
    confirm(prepared)
    ctx.files.make_folder(ctx.paths.evidence.parent)
    with EvidenceStore(ctx.paths.evidence) as store:
        known = history_of(store, prepared.basis, but=None)
        keeper = SweepKeeper.begin(ctx, store, prepared)
        return _Run(ctx, prepared, keeper, known, bound_to, "sweep run", house).go()


def run_night(
    ctx: Context, *, confirm: Confirm, bound_to: str | None = None, command: str = "sweep night"
) -> ActionResult:
    """The night that was asked for by `sweep start`, or else that of the settings.

    One that asked for the same and did not come to its end goes on, with a whole budget more. A night of
    the settings compares builds instead where the engine was upgraded in place.

    Raises:
        UsageError, ConfigError, DeployError, Busy, HostError, Stranded: as `run_sweep`.
    """
    request, is_night = take_request(ctx)
    builds = due_comparison(ctx) if is_night else None
    if builds is not None:
        compared = compare_builds(
            ctx, builds, budget_s=request.budget_s, window=request.window, bound_to=bound_to
        )
        if compared is not None:
            return compared
    last = unfinished(ctx, request)
    if last is not None:
        demand_open(ctx, request.window)
        try:
            return resume_sweep(
                ctx, last.number, confirm=confirm, bound_to=bound_to, has_whole_budget=True
            )
        except Outdated:
            ctx.say(f"sweep {last.number} cannot go on: what it measured has changed since")
    return replace(run_sweep(ctx, request, confirm=confirm, bound_to=bound_to), command=command)


class Outdated(UsageError):
    """What a sweep measured is no longer what is here."""


def resume_sweep(
    ctx: Context,
    number: int | None,
    *,
    confirm: Confirm,
    bound_to: str | None = None,
    has_whole_budget: bool = False,
) -> ActionResult:
    """Go on with a sweep that was stopped, killed or cut, from its samples.

    Args:
        ctx: Where.
        number: Which; None for the newest.
        confirm: As in `run_sweep`.
        bound_to: As in `run_sweep`.
        has_whole_budget: Its budget counts from now on, not from its begin.

    Raises:
        UsageError: there is none, it came to its end, or as `run_sweep`.
        Outdated: what it measured is no longer what is here.
    """
    house = House(ctx)
    house.settle()
    ctx.files.make_folder(ctx.paths.evidence.parent)
    with EvidenceStore(ctx.paths.evidence) as store:
        sweep = find_sweep(store, number)
        if sweep.verdict is not None and sweep.run.outcome is RunOutcome.DONE:
            raise UsageError(
                f"sweep {sweep.number} came to its end: {sweep.verdict.sentence}",
                hint="`tunerd sweep run` begins another, which knows what this one found",
            )
        own = store.sweep_events(sweep.number)
        asked = replace(request_from_json(sweep.plan["request"]), seed=sweep.run.record.seed)
        left_s = asked.budget_s - (0.0 if has_whole_budget else _spent_s(own))
        if left_s < _LEAST_S and left_s < asked.budget_s / 10:
            raise UsageError(
                f"sweep {sweep.number} has used its time",
                hint="`tunerd sweep run` begins another, which knows what this one found",
            )
        request = replace(asked, budget_s=left_s)
        prepared = prepare(ctx, request, proves=True, for_resume=True)
        if prepared.basis != sweep.plan.get("basis"):
            raise Outdated(
                f"sweep {sweep.number} cannot go on: an engine, the model, the driver, the workload or "
                "the profile is no longer what it was",
                state="its samples are kept",
                hint="`tunerd sweep run` begins anew",
            )
        demand_open(ctx, request.window)
        demand_time(ctx, prepared.deadline, budget_s=left_s, load_s=prepared.load_s)
        confirm(prepared)
        store.reopen_run(sweep.number)
        keeper = SweepKeeper(ctx, store, sweep.number)
        known = [*history_of(store, prepared.basis, but=sweep.number), *own]
        return _Run(ctx, prepared, keeper, known, bound_to, "sweep resume", house).go()


def _spent_s(events: Iterable[dict[str, Any]]) -> float:
    """Time that starts and requests took."""
    return sum(float(event.get("seconds") or 0.0) for event in events)


@dataclass
class _Run:
    """One sweep under way; it may give the place back and take it again."""

    ctx: Context
    prepared: PreparedSweep
    keeper: SweepKeeper
    known: list[dict[str, Any]]
    bound_to: str | None
    command: str
    house: House
    _told: list[str] = field(default_factory=list)
    _restarts: int = 0
    _elapsed_s: float = 0.0
    _has_answers: bool = False
    _found: Outcome | None = None

    def go(self) -> ActionResult:
        """All of it."""
        keeper = self.keeper
        try:
            outcome, verdict, away_s, ended = self._night()
        except BaseException as error:
            with contextlib.suppress(HostError):  # its disk is full: the run stays without an end
                keeper.end(RunOutcome.STOPPED, _why(error))
            raise
        is_over = ended is not None and outcome.verdict == "inconclusive"
        keeper.end(RunOutcome.STOPPED if is_over else RunOutcome.DONE, "; ".join(verdict.reasons))
        measured = outcome.verdict != "inconclusive" or self._has_answers
        payload = {
            "sweep": keeper.number,
            "verdict": verdict.outcome,
            "sentence": verdict.sentence,
            "reasons": list(verdict.reasons),
            "incumbent": str(self.prepared.base.arm),
            "arm": str(as_arm(outcome.arm)),
            "changes": changed(as_arm(outcome.arm), self.prepared.base.arm),
            "arms_measured": len(outcome.evidence.arms),
            "restarts": self._restarts,
            "elapsed_s": self._elapsed_s,
            "known_before": len(self.known),
            "without_service_s": away_s,
        }
        why = ended if is_over else None
        messages = [*self.prepared.messages, *self.notes, *self._next_steps(verdict, why)]
        return ActionResult(self.command, payload, tuple(messages), 0 if measured else 1)

    def _next_steps(self, verdict: VerdictRecord, ended: str | None) -> list[Message]:
        number = self.keeper.number
        if verdict.outcome == "promote":
            return list(follow_policy(self.ctx, number, deadline=self.prepared.deadline,
                                      load_s=self.prepared.load_s))  # fmt: skip
        if ended is not None:
            return [warning("stopped", f"the sweep ended before its time: {ended}; its samples are kept",
                            f"`tunerd sweep resume {number}`")]  # fmt: skip
        return []

    @property
    def notes(self) -> list[Message]:
        """What was noticed while it ran."""
        return [note("lease", text) for text in dict.fromkeys(self._told)]

    # Nights, one or several

    def _night(self) -> tuple[Outcome, VerdictRecord, float | None, str | None]:
        ctx, budget_s = self.ctx, self.prepared.request.budget_s
        end_s = ctx.clock.monotonic_s() + budget_s
        samples: list[dict[str, Any]] = list(self.known)
        away_s: float | None = None
        while True:
            try:
                outcome, box, held = self._once(self._left_s(end_s), samples)
            except Stranded:
                if self._found is not None:  # the way back failed, not what was measured
                    self.keeper.result(
                        self._found, self.prepared.base.arm, self.prepared.shape.name
                    )
                raise
            self._told += held.notes
            away_s = _added(away_s, held.without_service_s)
            found = outcome.evidence
            samples += [sample.to_json() for sample in found.samples]
            self._restarts += found.restarts
            self._elapsed_s += found.elapsed_s
            self._has_answers |= any(sample.answer is not None for sample in found.samples)
            yielded = box.yielded
            if yielded is None or not self._wait_until_quiet(end_s, str(yielded)):
                break
        if box.ended is not None:
            outcome = _with_reason(outcome, box.ended)
        verdict = self.keeper.result(outcome, self.prepared.base.arm, self.prepared.shape.name)
        return outcome, verdict, away_s, box.ended

    def _left_s(self, end_s: float) -> float:
        """Time to measure in: of the budget, and of the window."""
        ctx, deadline = self.ctx, self.prepared.deadline
        left_s = end_s - ctx.clock.monotonic_s()
        return left_s if deadline is None else min(left_s, deadline.measuring_s(ctx.clock.now_s()))

    def _limit_s(self, left_s: float) -> float:
        """When the service manager ends it; at the end of a window that is to the second."""
        deadline, limit_s = self.prepared.deadline, left_s + _SLACK_S
        if deadline is None:
            return limit_s
        return min(limit_s, deadline.measuring_s(self.ctx.clock.now_s()))

    def _once(self, left_s: float, known: list[dict[str, Any]]) -> tuple[Outcome, LeaseBox, Held]:
        """One lease: from production's stop to its return."""
        ctx, prepared = self.ctx, self.prepared
        import numpy as np

        sink = _Quietly(ctx.progress)
        quiet = replace(ctx, progress=sink)
        with hold(
            quiet,
            purpose=f"sweep {self.keeper.number} of {prepared.plan_request.profile}",
            budget_s=self._limit_s(left_s),
            start_after=prepared.request.start_after,
            bound_to=self.bound_to,
        ) as held:
            box = self._box(quiet, held)
            began_s = ctx.clock.monotonic_s()
            ctx.report(Progress("starting the first configuration", left_s=left_s))

            def on_sample(sample: Sample) -> None:
                self.keeper.event(sample)
                left = left_s - (ctx.clock.monotonic_s() - began_s)
                ctx.report(Progress(_told(sample), left_s=max(0.0, left)))

            self._found = None
            try:
                with sink.muted():
                    outcome = self._found = tune(
                        box, prepared.space.space, prepared.workload, prepared.base.arm, left_s,
                        np.random.default_rng([prepared.seed, len(known)]), history=known,
                        policy=prepared.policy, on_sample=on_sample,
                        strategy=prepared.request.strategy,
                    )  # fmt: skip
            finally:
                box.close()
        return outcome, box, held

    def _box(self, ctx: Context, held: Held) -> LeaseBox:
        prepared = self.prepared
        plans: dict[Arm, Plan] = {}

        def planned(arm: Arm) -> Plan:
            key = arm.canonical()
            if key not in plans:
                plans[key] = plan_arm(ctx, prepared, key)
            return plans[key]

        return LeaseBox(
            ctx=ctx,
            held=held,
            plan_arm=planned,
            texts=SweepTexts(prompt_book(ctx), prepared.seed),
            per_request=prepared.seen.per_request,
            on_arm=lambda arm, record: self.keeper.arm(arm, record, prepared.shape.sha256),
            on_samples=self.keeper.samples,
            patience_s=ctx.settings.sweep.patience_s,
            house=self.house,
            deadline=prepared.deadline,
            context_tokens=prepared.context_tokens,
            expected_load_s=prepared.load_s,
        )

    def _wait_until_quiet(self, end_s: float, why: str) -> bool:
        """Production serves meanwhile; whether there is time left and nobody uses it."""
        ctx = self.ctx
        quiet_s = ctx.settings.sweep.quiet_s
        ctx.say(f"the sweep yielded: {why}; it goes on when nobody was served for "
                f"{format_duration(quiet_s)}")  # fmt: skip
        give_up_s = ctx.clock.monotonic_s() + self._left_s(end_s) - _LEAST_S - quiet_s
        idle_since_s = ctx.clock.monotonic_s()
        while ctx.clock.monotonic_s() < give_up_s:
            if _is_busy(ctx) or self.house.trouble() is not None:
                idle_since_s = ctx.clock.monotonic_s()
            elif ctx.clock.monotonic_s() - idle_since_s >= quiet_s:
                return True
            ctx.clock.sleep(min(_QUIET_POLL_S, max(0.1, quiet_s / 4)))
        return False


def _with_reason(outcome: Outcome, why: str) -> Outcome:
    """The outcome with the real reason of its end in the place of a general one."""
    if outcome.verdict != "inconclusive":
        return outcome
    return replace(outcome, evidence=replace(outcome.evidence, reasons=(why,)))


class _Quietly:
    """Progress of the sweep alone: the steps of hundreds of starts would hide it."""

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


def _is_busy(ctx: Context) -> bool:
    live = read_live_unit(ctx)
    address = address_now(ctx, live, ctx.services.state(ctx.unit))
    if address is None:
        return False
    slots = ctx.connect(address).slots()
    return slots is not None and slots.busy > 0


def _told(sample: Sample) -> str:
    """A sample for whoever watches."""
    if sample.failure:
        return f"{sample.purpose}: {sample.arm}: {sample.failure}"
    return f"{sample.purpose}: {sample.arm}"


def _added(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more


def _why(error: BaseException) -> str:
    if isinstance(error, TunerdError):
        return f"{error.message}: {error.cause}" if error.cause else error.message
    return words_of(error)
