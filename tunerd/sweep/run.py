"""`tunerd sweep run` and `resume`: a night on the live box, stored piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.app import Context
from tunerd.engine.builds import find_engines
from tunerd.engine.capabilities import SHORT
from tunerd.engine.choice import request_again
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.log import LoggedRequest
from tunerd.engine.probe import kept_folder
from tunerd.engine.serving import read_live_unit, server_now, stands
from tunerd.errors import Busy, HostError, LeaseEnded, Stranded, TunerdError, UsageError
from tunerd.jobs import begin_measuring, job_unit, stop_job, sweeping_job
from tunerd.machine.files import holder_of, is_locked, lock
from tunerd.machine.process import words_of
from tunerd.measure import compare
from tunerd.measure.answer import Sample as MeasuredSample
from tunerd.measure.evidence import ArmRecord, RunOutcome, StoredRun, VerdictRecord
from tunerd.measure.learn import served_requests, workload_for
from tunerd.measure.life import Texts, prompt_book
from tunerd.measure.pairs import Limits
from tunerd.measure.store import EvidenceStore, demand_storable, reading
from tunerd.measure.trust import FLATTERED, mostly_repeated
from tunerd.production.lease import Held, demand_alone, hold
from tunerd.production.measurement import read_measurement
from tunerd.production.plan import Plan
from tunerd.production.power import power_limit
from tunerd.profile.arm import Arm, Best, Builds, Sample, as_samples
from tunerd.profile.files import load_profile
from tunerd.records import plain, read
from tunerd.result import ActionResult, Message, Muted, Progress, note, warning
from tunerd.sweep.box import House, LeaseBox, Quiet, kinds_of_one_token
from tunerd.sweep.known import Study, best_now, compare_drafts, known_by
from tunerd.sweep.plan import PreparedSweep, SweepRequest, demand_room, plan_arm, plan_json, prepare
from tunerd.sweep.power import measure_limits, power_notes, time_for
from tunerd.sweep.promote import follow_policy, is_start_of
from tunerd.sweep.record import (
    History,
    StoredSweep,
    SweepKeeper,
    arm_text,
    drop_old_requests,
    find_sweep,
    history_of,
    running_sweep,
    sweeps,
    unfinished,
)
from tunerd.sweep.schedule import deadline_of, demand_open, demand_time, least_time_s
from tunerd.sweep.space import changed
from tunerd.sweep.tuner import PROMOTE, Outcome, tune
from tunerd.units.generations import Generation
from tunerd.words import counted, format_duration

_LOOK_BACK = 100
# What the lease lasts longer than the comparison that ends by itself.
_SLACK_S = 120.0
_LEAST_S = 30.0


def builds_of(ctx: Context, generation: Generation, identity_now: str) -> Builds | None:
    """Both builds; None where the deployed one is unknown, or the same.

    Args:
        ctx: Where.
        generation: What serves.
        identity_now: Of its program as it is now.
    """
    before = generation.engine_sha256
    if before is None or before == identity_now:
        return None
    found = [one for one in find_engines(ctx) if one.problem is None]
    folder = kept_folder(ctx.paths.engines_dir, before)
    program = Path(generation.argv[0]) if generation.argv else None
    run, said = (None, None) if folder is None else _comparison(ctx, folder, identity_now)
    return Builds(
        identity_before=before[:SHORT],
        identity_now=identity_now[:SHORT],
        kept=next(
            (one.name for one in found if folder and one.program.is_relative_to(folder)), None
        ),
        engine=next((one.name for one in found if one.program == program), None),
        compared=said,
        run=run,
    )


def _comparison(
    ctx: Context, folder: Path, identity_now: str
) -> tuple[int, str] | tuple[None, None]:
    """The newest comparison of a copy with a build that came to its end: its number, and what it says."""
    with contextlib.suppress(TunerdError), reading(ctx) as store:
        for run in () if store is None else store.runs(kind="compare", limit=_LOOK_BACK):
            if store is None or not _is_of(run, folder, identity_now):
                continue
            verdicts = store.verdicts(run.number)
            if run.outcome is RunOutcome.DONE and verdicts:
                return run.number, verdicts[-1].sentence
            if run.outcome is RunOutcome.FAILED:
                return run.number, f"it could not be measured ({run.reason})"
    return None, None


def _is_of(run: StoredRun, folder: Path, identity_now: str) -> bool:
    arms = run.record.arms
    copies = [arm for arm in arms if arm.program and Path(arm.program).is_relative_to(folder)]
    others = [arm for arm in arms if arm.fingerprint.engine_sha256 == identity_now]
    return bool(copies) and any(arm not in copies for arm in others)


def due_comparison(ctx: Context) -> Builds | None:
    """The builds that the next night compares; None where there is nothing to compare.

    Raises:
        ServiceError: the unit cannot be read.
    """
    if ctx.settings.guards.upgrade != "act":
        return None
    entry = ctx.generations.serving(ctx.unit)
    live = read_live_unit(ctx)
    if entry is None or live.argv is None:
        return None
    now = FingerprintReader(ctx).of(live.argv, live.environment).fingerprint.engine_sha256
    found = None if now is None else builds_of(ctx, entry.generation, now)
    return found if found is not None and found.is_due else None


def predicted_best(ctx: Context, generation: Generation) -> Best | None:
    """What the newest sweep's laws predict to be fastest for what was asked since; None where they cannot tell.

    Raises:
        TunerdError: the store, the profile or its workload cannot be read.
    """
    with reading(ctx) as store:
        found = () if store is None else sweeps(ctx, store, limit=1, in_full=True)
    sweep = next(iter(found), None)
    verdict = None if sweep is None else sweep.verdict
    arm = None if sweep is None else _serves_now(sweep, generation)
    if sweep is None or verdict is None or arm is None or sweep.evidence is None:
        return None
    request = request_again(generation)
    resolved = load_profile(ctx, request.profile, options=request.options)
    shape, _ = workload_for(ctx, sweep.request.workload, resolved)
    requests = served_requests(ctx, sweep.run.ended_s or generation.created_s)
    then = (verdict.details.get("served") or {}).get("gain") if verdict.outcome != PROMOTE else None
    models, families = sweep.evidence["models"], sweep.plan["families"]
    return best_now(requests, models, arm, families, shape.plain(), then)


def _serves_now(sweep: StoredSweep, generation: Generation) -> Arm | None:
    """The arm that serves, where it is the one that a sweep left or that was promoted from it."""
    decision, verdict = sweep.decision or {}, sweep.verdict
    if decision.get("generation") == generation.number and verdict is not None:
        return read(Arm, verdict.details["arm"])
    if sweep.plan.get("generation") == generation.number:
        return read(Arm, sweep.plan["incumbent"])
    return None


def _prepare_builds(ctx: Context, builds: Builds, *, budget_s: float) -> compare.Prepared | None:
    """The comparison as it would be; None where it cannot be, which is said."""
    request = compare.CompareRequest(
        words=(str(builds.kept), str(builds.engine)),
        workload=ctx.settings.sweep.workload,
        limits=Limits(budget_s=budget_s),
    )
    try:
        return compare.prepare(ctx, request)
    except TunerdError as problem:
        cause = f": {problem.cause}" if problem.cause else ""
        ctx.say(f"old and new build cannot be compared: {problem.message}{cause}")
        return None


def _compare_builds(ctx: Context, builds: Builds, night: SweepRequest) -> ActionResult | None:
    """Compare them in production's place; None where they cannot be, which is said.

    Args:
        ctx: Where.
        builds: Which.
        night: In the place of which: its budget and its window are those of the comparison.

    Raises:
        UsageError: the window is closed.
        Busy, HostError: as a sweep.
        LeaseEnded: the measurement was ended from outside.
        Stranded: production does not serve afterwards.
    """
    budget_s = night.budget_s
    demand_open(ctx, night.window)
    house = House(ctx)
    house.settle()
    prepared = _prepare_builds(ctx, builds, budget_s=budget_s)
    if prepared is None:
        return None
    if stopped := house.stopped():
        text = "the comparison was ended before it began"
        raise LeaseEnded(text, cause=stopped, state="nothing was touched")
    load_s = prepared.outlook.load_s or 0.0
    least_s = least_time_s(budget_s, load_s)
    demand_open(ctx, night.window)  # it may have closed meanwhile
    deadline = deadline_of(ctx, night.window, load_s=load_s, changes_program=True)
    if deadline is not None:
        budget_s = min(budget_s, deadline.measuring_s(ctx.clock.now_s()) - _SLACK_S)
    if budget_s < least_s:
        ctx.say("too little time is left to compare the old build with the new one")
        return None
    ctx.say(f"the engine was replaced since it was deployed: {builds.kept} is compared with it")
    limits = replace(prepared.request.limits, budget_s=budget_s)
    request = replace(prepared.request, limits=limits)
    return compare.run_compare(ctx, request, confirm=lambda _prepared: None)


# Time for the last request to end in, so that the loop and not the lease ends the night.
_QUIET_POLL_S = 2.0

Confirm = Callable[[PreparedSweep], None]
Meet = Callable[[Context, PreparedSweep], contextlib.AbstractContextManager[Study]]
"""Opens the study of a box's class for one night."""


def alone(ctx: Context, prepared: PreparedSweep) -> contextlib.AbstractContextManager[Study]:
    """For a box that shares no store with others."""
    del ctx
    return contextlib.nullcontext(Study(prepared.known))


def sweep_plan(ctx: Context, request: SweepRequest) -> ActionResult:
    """`tunerd sweep run --dry-run`: what would be tried, what it would cost, what stays and why."""
    prepared = prepare(ctx, request, proves=False)
    return ActionResult("sweep run", {"plan": plan_json(prepared)}, prepared.messages)


def run_sweep(
    ctx: Context, request: SweepRequest, *, confirm: Confirm, meet: Meet = alone
) -> ActionResult:
    """Search, prove, and store everything; within the request's window, if it has one.

    Args:
        ctx: Where.
        request: What is asked for.
        confirm: Shows what will happen and asks; raises to stop.
        meet: Opens the study that boxes of the class share.

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
    _demand_time(ctx, prepared)
    demand_room(prepared)
    demand_storable(ctx)
    demand_alone(ctx)
    confirm(prepared)
    with _only_sweep(ctx), EvidenceStore(ctx.paths.evidence, check=False) as store:
        _demand_still(ctx, prepared)
        drop_old_requests(ctx, store)
        history = history_of(store, prepared.basis, prepared.generation.number)
        keeper = SweepKeeper.begin(ctx, store, prepared)
        return _Run(ctx, prepared, keeper, history, "sweep run", house, meet).go()


def _configured(ctx: Context, *, at_once: bool = False) -> SweepRequest:
    """The night that the settings describe; `at_once` whatever their window says."""
    settings = ctx.settings.sweep
    return SweepRequest(
        budget_s=min(settings.budget_s, settings.downtime_s),
        workload=settings.workload,
        window=None if at_once else settings.window,
    )


def run_night(
    ctx: Context, *, confirm: Confirm, at_once: bool = False, meet: Meet = alone
) -> ActionResult:
    """The night that the settings describe; `at_once` whatever their window says.

    One that asked for the same and did not come to its end goes on, with a whole budget more. Builds are
    compared instead where the engine was upgraded in place.

    Raises:
        UsageError, ConfigError, DeployError, Busy, HostError, Stranded: as `run_sweep`.
    """
    request = _configured(ctx, at_once=at_once)
    builds = due_comparison(ctx)
    if builds is not None:
        compared = _compare_builds(ctx, builds, request)
        if compared is not None:
            return compared
    last = unfinished(ctx, request)
    if last is not None:
        try:
            return resume_sweep(ctx, last.number, confirm=confirm, has_whole_budget=True, meet=meet)
        except Outdated as problem:
            ctx.say(problem.message)
    return replace(run_sweep(ctx, request, confirm=confirm, meet=meet), command="sweep night")


_MEASURED = "what serves, an engine, a file of the model, the driver, a power limit, the workload or the profile"


class Outdated(UsageError):
    """What a sweep measured is no longer what is here, or cannot be read."""


def _outdated(sweep: StoredSweep, why: str) -> Outdated:
    text, hint = (
        f"sweep {sweep.number} cannot continue: {why}",
        "`tunerd sweep run` starts a new one",
    )
    return Outdated(text, state="its samples are kept", hint=hint)


def resume_sweep(
    ctx: Context,
    number: int | None,
    *,
    confirm: Confirm,
    has_whole_budget: bool = False,
    meet: Meet = alone,
) -> ActionResult:
    """Go on with a sweep that was stopped, killed or cut, from its samples.

    Args:
        ctx: Where.
        number: Which; None for the newest.
        confirm: As in `run_sweep`.
        has_whole_budget: Its budget counts from now on, not from its begin.
        meet: As in `run_sweep`.

    Raises:
        UsageError: there is none, it came to its end, or as `run_sweep`.
        Outdated: what it measured is no longer what is here, or cannot be read.
        HostError: nor can what was asked for.
    """
    house = House(ctx)
    with EvidenceStore(ctx.paths.evidence) as store:
        sweep = find_sweep(ctx, store, number)
        if sweep.verdict is not None and sweep.run.outcome is RunOutcome.DONE:
            raise UsageError(
                f"sweep {sweep.number} is finished: {sweep.verdict.sentence}",
                hint="`tunerd sweep run` starts another, which knows what this one found",
            )
        own, n_damaged = store.readable_events(sweep.number)
        if n_damaged:  # without them it would go on from another place
            raise _outdated(sweep, f"{counted(n_damaged, 'event')} of it cannot be read")
        asked = sweep.request
        spent_s = sum(float(event.get("seconds") or 0.0) for event in own)
        left_s = asked.budget_s - (0.0 if has_whole_budget else spent_s)
        if left_s < _LEAST_S and left_s < asked.budget_s / 10:
            raise UsageError(
                f"sweep {sweep.number} has used its time",
                hint="`tunerd sweep run` starts another, which knows what this one found",
            )
        request = replace(asked, budget_s=left_s)
        demand_open(ctx, request.window)
        house.settle()
        prepared = prepare(ctx, request, proves=True, for_resume=True)
        is_same = is_start_of(ctx, sweep, prepared.generation)
        if not is_same or prepared.basis != sweep.plan.get("basis"):
            raise _outdated(sweep, f"{_MEASURED} has changed since")
        _demand_time(ctx, prepared)
        demand_alone(ctx)
        confirm(prepared)
        with _only_sweep(ctx):
            _demand_still(ctx, prepared)
            if store.sweep_events(sweep.number) != own:  # by the night, say
                raise Busy(f"sweep {sweep.number} was continued meanwhile", state="nothing was touched",
                           hint="`tunerd sweep show` says how far it is")  # fmt: skip
            store.reopen_run(sweep.number)
            keeper = SweepKeeper(ctx, store, sweep.number)
            serving = prepared.generation.number
            if serving != sweep.plan["generation"]:  # which a rollback came back to
                keeper.plan({**sweep.plan, "generation": serving})
            history = history_of(store, prepared.basis, serving, but=sweep.number)
            history = replace(history, samples=[*history.samples, *own])
            return _Run(ctx, prepared, keeper, history, "sweep resume", house, meet).go()


def _demand_time(ctx: Context, prepared: PreparedSweep) -> None:
    """As `demand_time`: the window may close while the machine or an answer is waited for, or the machine sleeps."""
    least_s = least_time_s(prepared.request.budget_s, prepared.load_s)
    demand_time(ctx, prepared.request.window, prepared.deadline, least_s)


def _demand_still(ctx: Context, prepared: PreparedSweep) -> None:
    """What serves is what it was before the question, and there is still time."""
    compare.demand_still(ctx, prepared.generation)
    _demand_time(ctx, prepared)


def _only_sweep(ctx: Context) -> contextlib.AbstractContextManager[None]:
    """One at a time, also while it has yielded; Busy where another is under way."""
    return lock(ctx.paths.sweep_lock, purpose="sweep", since=ctx.now_text())


@dataclass
class _Run:
    """One sweep under way; it may give the place back and take it again."""

    ctx: Context
    prepared: PreparedSweep
    keeper: SweepKeeper
    history: History
    command: str
    house: House
    meet: Meet
    _study: Study = field(default_factory=Study)
    _leases: list[tuple[Outcome, Held]] = field(default_factory=list)
    _has_place: bool = False
    _found: Outcome | None = None
    _served: tuple[LoggedRequest, ...] = ()
    _power: dict[str, Any] | None = None

    def go(self) -> ActionResult:
        """All of it."""
        keeper = self.keeper
        self._begin_with_what_was_served()
        try:
            with self.meet(self.ctx, self.prepared) as self._study:
                outcome, verdict, ended = self._night()
        except BaseException as error:
            with contextlib.suppress(HostError):  # its disk is full: the run stays without an end
                keeper.end(RunOutcome.STOPPED, words_of(error))
            if isinstance(error, KeyboardInterrupt | SystemExit):
                again = f"`tunerd sweep resume {keeper.number}` continues it"
                error.add_note(f"its samples are kept: {again}")
            raise
        is_over = ended is not None and outcome.verdict == "inconclusive"
        keeper.end(RunOutcome.STOPPED if is_over else RunOutcome.DONE, "; ".join(verdict.reasons))
        found, leases = (
            [one.evidence for one, _ in self._leases],
            [held for _, held in self._leases],
        )
        away_s = [one.without_service_s for one in leases if one.without_service_s is not None]
        answers = (sample.answer for one in found for sample in one.samples)
        measured = outcome.verdict != "inconclusive" or any(one is not None for one in answers)
        payload = {
            "sweep": keeper.number,
            "verdict": verdict.outcome,
            "sentence": verdict.sentence,
            "reasons": list(verdict.reasons),
            "incumbent": str(self.prepared.base.arm),
            "arm": str(outcome.arm),
            "changes": changed(outcome.arm, self.prepared.base.arm),
            "arms_measured": len(outcome.evidence.arms),
            "restarts": sum(one.restarts for one in found),
            "elapsed_s": sum(one.elapsed_s for one in found),
            "known_before": len(self.history.samples),
            "without_service_s": sum(away_s) if away_s else None,
            "power": self._power,
        }
        told = dict.fromkeys(text for held in leases for text in held.notes)
        noticed = [note("lease", text) for text in told]
        usual = [one.reading.repeated_ratio for run in found for one in run.samples
                 if one.reading and one.arm.canonical() == self.prepared.base.arm.canonical()]  # fmt: skip
        if n := mostly_repeated(usual):
            noticed.append(note("repeats", f"{n} answers of what serves {FLATTERED}"))
        noticed += [] if self._power is None else power_notes(self._power)
        messages = (*self.prepared.messages, *noticed, *self._next_steps(verdict, ended))
        return ActionResult(self.command, payload, messages, 0 if measured else 1, has_acted=True)

    def _begin_with_what_was_served(self) -> None:
        """What production's log tells of its own laws, as a prior."""
        prepared = self.prepared
        arm, known = prepared.base.arm, prepared.known
        self._served = served_requests(self.ctx, prepared.generation.created_s)
        law = known_by(self._served, arm, prepared.workload, known.get(arm.family))
        if law is not None and self._served:
            text = f"the search starts from what {counted(len(self._served), 'request')} took in service"
            told = note("served", text)
            self.prepared = replace(
                prepared, known={**known, arm.family: law}, messages=(*prepared.messages, told)
            )

    def _next_steps(self, verdict: VerdictRecord, ended: str | None) -> list[Message]:
        number = self.keeper.number
        _, held = self._leases[-1]
        why = words_of(held.late) if held.late is not None else ended
        if verdict.outcome == "promote" and why is not None:  # somebody wants the machine now
            return [note("proposal", f"a winner was proved but not deployed, because the sweep was ended: {why}",
                         f"`tunerd promote {number}`, or `tunerd decline {number}`")]  # fmt: skip
        if verdict.outcome == "promote":
            return list(follow_policy(self.ctx, number, deadline=self.prepared.deadline,
                                      load_s=self.prepared.load_s))  # fmt: skip
        if ended is not None and verdict.outcome == "inconclusive":
            return [warning("stopped", f"the sweep ended early: {ended}; its samples are kept",
                            f"`tunerd sweep resume {number}`")]  # fmt: skip
        return []

    # Nights, one or several

    def _night(self) -> tuple[Outcome, VerdictRecord, str | None]:
        ctx, budget_s = self.ctx, self.prepared.request.budget_s
        end_s = ctx.clock.monotonic_s() + budget_s
        samples: list[dict[str, Any]] = list(self.history.samples)
        outcome, box, held = self._leased(end_s, samples)
        while True:
            self._leases.append((outcome, held))
            samples += map(plain, outcome.evidence.samples)
            if box.yielded is None or held.late is not None:
                break
            more = self._go_on(end_s, samples, box)
            if more is None:
                break
            outcome, box, held = more
        if box.ended is not None and outcome.verdict == "inconclusive":  # the real reason
            outcome = replace(outcome, evidence=replace(outcome.evidence, reasons=(box.ended,)))
        base, workload = self.prepared.base.arm, self.prepared.workload
        told = compare_drafts(as_samples(samples), self._served, base, workload)
        if told is not None:
            reasons = (*outcome.evidence.reasons, str(told["text"]))
            outcome = replace(outcome, evidence=replace(outcome.evidence, reasons=reasons))
            families, models = plan_json(self.prepared)["families"], outcome.evidence.models
            best = best_now(self._served, models, base, families, workload)
            told = {**told, "gain": None if best is None else best.gain}
        verdict = self.keeper.result(outcome, base, self.prepared.shape.name, told)
        return outcome, verdict, box.ended

    def _leased(
        self, end_s: float, samples: list[dict[str, Any]]
    ) -> tuple[Outcome, LeaseBox, Held]:
        """One lease, of which a proof is kept whatever ends it."""
        try:
            return self._once(self._left_s(end_s), samples)
        except (Stranded, KeyboardInterrupt, SystemExit):
            if self._found is not None:  # what came after it failed, or was ended
                self.keeper.result(self._found, self.prepared.base.arm, self.prepared.shape.name)
            raise

    def _go_on(
        self, end_s: float, samples: list[dict[str, Any]], box: LeaseBox
    ) -> tuple[Outcome, LeaseBox, Held] | None:
        """Another lease, once nobody uses the machine; None where it is over before that."""
        while self._wait_until_quiet(end_s, box):
            try:
                return self._leased(end_s, samples)
            except Busy:
                if self._has_place:
                    raise
                box.ended = box.yielded  # somebody was faster since it was seen to be free
                self.ctx.clock.sleep(
                    _QUIET_POLL_S
                )  # in another STATE, say, whose lock is not looked at
        return None

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

        sink = Muted(ctx.progress)
        quiet = replace(ctx, progress=sink)
        self._has_place = False
        with hold(
            quiet,
            purpose=f"sweep {self.keeper.number} of {prepared.plan_request.profile}",
            budget_s=self._limit_s(left_s),
            start_after=prepared.request.start_after and not self.house.serves,
        ) as held:
            self._has_place = True
            self.house.serves |= held.restores
            began_s = ctx.clock.monotonic_s()
            box = self._box(quiet, held, began_s + left_s)
            box.may_repeat |= kinds_of_one_token(known)
            ctx.report(Progress("starting the first configuration", left_s=left_s))

            def on_sample(sample: Sample) -> None:
                self.keeper.event(sample)
                left = left_s - (ctx.clock.monotonic_s() - began_s)
                words = filter(None, (sample.purpose, str(sample.arm), sample.failure))
                ctx.report(Progress(": ".join(words), left_s=max(0.0, left)))

            self._found, limits_w, load_s = None, prepared.power_limits_w, prepared.load_s
            block_s = max(0.0, prepared.forecast.process_s - load_s)
            power_s = time_for(limits_w, left_s=left_s, load_s=load_s, block_s=block_s)
            try:
                with sink.muted():
                    outcome = self._found = tune(
                        box, prepared.space.space, prepared.workload, prepared.base.arm, left_s - power_s,
                        np.random.default_rng([prepared.seed, len(known)]), history=known,
                        policy=prepared.policy, on_sample=on_sample, study=self._study,
                        n_challenges=self.history.n_challenges,
                    )  # fmt: skip
                    box.close()
                    if limits_w and box.yielded is box.ended is None:
                        self._measure_power(quiet, held, box, outcome.arm)
            finally:
                box.close()
        return outcome, box, held

    def _measure_power(self, ctx: Context, held: Held, box: LeaseBox, best: Arm) -> None:
        """The winner, and what serves, at each limit; kept as it is, whatever ends it."""
        gpus = ctx.gpu.read().gpus or ()
        own_w = gpus[0].power_limit_w if len(gpus) == 1 else None
        if own_w is None:
            return
        sha256, records = self.prepared.shape.sha256, dict[Arm, ArmRecord]()
        kept: list[tuple[Arm, Sequence[MeasuredSample]]] = []

        def keep(watts: float) -> None:
            """As of a configuration of its own, of which the search knows nothing."""
            for arm, samples in kept:
                name = f"{arm} at {watts:g} W"
                self.keeper.arm(name, records[arm], sha256, power_limits_w=(watts,))
                self.keeper.samples(name, samples)
            kept.clear()

        @contextlib.contextmanager
        def limited(watts: float) -> Iterator[None]:
            """What was asked in the body is kept once the limit has held, and a start before it as of the card's own."""
            keep(own_w)
            self.ctx.report(Progress(f"measuring at {watts:g} W", left_s=box.until_s - box.now()))
            with power_limit(ctx, held.id, ctx.unit, watts):
                yield
            keep(watts)

        house = copy(box.house)
        house.limits_w = dict.fromkeys(house.limits_w)
        beside = replace(
            box, house=house, on_arm=records.__setitem__,
            on_samples=lambda arm, samples: kept.append((arm, samples)),
        )  # fmt: skip
        try:
            table = measure_limits(
                beside, self.prepared.workload, list(dict.fromkeys([best, self.prepared.base.arm])),
                self.prepared.power_limits_w, limited, own_w=own_w, end_s=box.until_s,
                seed=self.prepared.seed,
            )  # fmt: skip
        finally:
            beside.close()
        if table.rounds or table.reasons:
            self.keeper.power(table.to_json())
            self._power = table.to_json()

    def _box(self, ctx: Context, held: Held, until_s: float) -> LeaseBox:
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
            texts=Texts(prompt_book(ctx), prepared.seed),
            per_request=prepared.seen.per_request,
            on_arm=lambda arm, record: self.keeper.arm(arm, record, prepared.shape.sha256),
            on_samples=self.keeper.samples,
            tell=self.ctx.say,
            patience_s=ctx.settings.sweep.patience_s,
            house=self.house,
            incumbent=prepared.base.arm,
            deadline=prepared.deadline,
            expected_load_s=prepared.load_s,
            until_s=until_s,
        )

    def _why_over(self) -> str | None:
        """Why it cannot go on after it had yielded, by what one that is resumed must be: as it began."""
        ctx, begun = self.ctx, self.prepared
        if stopped := self.house.stopped():
            return stopped
        try:
            demand_open(ctx, begun.request.window)
            now = prepare(ctx, begun.request, proves=True, for_resume=True)
        except TunerdError as problem:
            return problem.words
        is_same = now.generation.number == begun.generation.number and now.basis == begun.basis
        return None if is_same else f"{_MEASURED} has changed since it began"

    def _wait_until_quiet(self, end_s: float, box: LeaseBox) -> bool:
        """Production serves meanwhile; whether there is time left, nobody uses it, and it is still what it was."""
        ctx, begun, quiet_s = self.ctx, self.prepared.generation, self.ctx.settings.sweep.quiet_s
        may_go_on = self._left_s(end_s) > _LEAST_S + quiet_s
        then = f"it continues once nobody was served for {format_duration(quiet_s)}"
        ctx.say(f"the sweep yielded: {box.yielded}; "
                f"{then if may_go_on else 'too little time is left to continue'}")  # fmt: skip
        quiet = Quiet(ctx.clock.monotonic_s(), self.house.processors())
        # Looked at each time: the machine may be asleep for what is left of a window.
        while self._left_s(end_s) > _LEAST_S + quiet_s:
            # Somebody measures, or changes the unit: the place is not to be had.
            is_taken = any(map(is_locked, (ctx.paths.measure_lock, ctx.paths.lock)))
            if not is_taken:
                now = ctx.deployed()
                if now is None or now.number != begun.number or not stands(ctx, begun):
                    box.ended = "what serves has changed since it began"
                    return False
            server = None if is_taken else server_now(ctx, ctx.services.state(ctx.unit))
            is_busy = is_taken or (server is not None and bool(server.n_busy()))
            is_used = is_busy or self.house.trouble() is not None
            now_s = ctx.clock.monotonic_s()
            if quiet.for_s(now_s, self.house.processors(), is_used=is_used) >= quiet_s:
                box.ended = self._why_over()
                return box.ended is None
            ctx.clock.sleep(min(_QUIET_POLL_S, max(0.1, quiet_s / 4)))
        return False


_UNIT_POLL_S = 1.0


def start_sweep(
    ctx: Context, request: SweepRequest, argv: Sequence[str], *, confirm: Confirm
) -> ActionResult:
    """Begin a sweep as a job, which outlives this terminal, once everything that can be checked was.

    Args:
        ctx: Where.
        request: What is asked for.
        argv: The same as words of `tunerd sweep run`.
        confirm: Shows what will happen and asks; raises to stop.

    Raises:
        Busy: one is under way.
        UsageError, ConfigError, DeployError: as `prepare`.
        ServiceError: the unit does not start.
    """
    _demand_none(ctx)
    demand_open(ctx, request.window)
    prepared = prepare(ctx, request, proves=False)
    demand_room(prepared)
    confirm(prepared)
    return _begun(ctx, "sweep run", argv, request, prepared.messages)


def start_night(
    ctx: Context, *, confirm: Callable[[compare.Prepared | PreparedSweep], None]
) -> ActionResult:
    """Begin what a night would do as a job, at once and whatever the window says: a sweep, or two builds that are compared.

    Raises:
        Busy, UsageError, ConfigError, DeployError, ServiceError: as `start_sweep`.
    """
    _demand_none(ctx)
    request = _configured(ctx, at_once=True)
    builds = due_comparison(ctx)
    compared = None if builds is None else _prepare_builds(ctx, builds, budget_s=request.budget_s)
    prepared = compared or prepare(ctx, request, proves=False)
    if isinstance(prepared, PreparedSweep):
        demand_room(prepared)
    confirm(prepared)
    argv = ["sweep", "night", "--yes", "--at-once"]
    return _begun(ctx, "sweep night", argv, request, prepared.messages)


def _begun(
    ctx: Context, kind: str, argv: Sequence[str], request: SweepRequest, messages: Sequence[Message]
) -> ActionResult:
    number = begin_measuring(ctx, kind, argv)
    unit, hint = job_unit(number), "`tunerd sweep watch`; `tunerd sweep stop` ends it"
    payload = {"unit": unit, "job": number, "budget_s": request.budget_s}
    started = note("started", f"{unit} runs", hint)
    return ActionResult("sweep start", payload, (*messages, started), has_acted=True)


def stop_sweep(ctx: Context) -> ActionResult:
    """End the sweep under way; its samples are kept, and production serves again.

    Raises:
        UsageError: none is under way as a job.
        ServiceError: it does not stop.
    """
    number, job = running_sweep(ctx), sweeping_job(ctx)
    if job is not None:
        stop_job(ctx, job)
    elif is_locked(ctx.paths.sweep_lock):
        pid = holder_of(ctx.paths.sweep_lock)
        raise UsageError(
            "the sweep under way runs in a terminal",
            hint=f"end it there with Ctrl-C, or `kill -INT {pid}`",
        )
    else:
        raise UsageError("no sweep is under way", hint="`tunerd sweep list`")
    payload = {"unit": job_unit(job), "sweep": number}
    kept = note("kept", "its samples are kept", "`tunerd sweep resume` continues it")
    return ActionResult("sweep stop", payload, (kept,), has_acted=True)


def sweep_status(ctx: Context) -> ActionResult:
    """What runs now, how far it is, and what it would recommend."""
    number, job = running_sweep(ctx), sweeping_job(ctx)
    record = None if number is None else read_measurement(ctx)
    with reading(ctx) as store:
        newest = sweeps(ctx, store, limit=1) if store is not None else ()
        events = store.readable_events(newest[0].number)[0] if store and newest else ()
    # Between two leases of one sweep nothing is measured; one that was cut has no end either, and no lock.
    is_open = is_locked(ctx.paths.sweep_lock) and any(one.run.outcome is None for one in newest)
    payload = {
        "unit": None if job is None else job_unit(job),
        "sweep": number,
        "since_s": None if record is None else record.since_s,
        "until_s": None if record is None else record.until_s,
        "left_s": None if record is None else record.left_s(ctx.clock.now_s()),
        "last": _last(newest[0], events) if newest else None,
        "waits": newest[0].number if number is None and is_open and events else None,
    }
    return ActionResult("sweep status", payload)


def watch_sweep(ctx: Context) -> Iterator[str]:
    """Lines as the sweep goes, until it ends.

    Raises:
        UsageError: none is under way.
    """
    seen, number = 0, running_sweep(ctx)
    # Builds that nobody tried yet are tried first.
    while number is None and sweeping_job(ctx) is not None:
        ctx.clock.sleep(_UNIT_POLL_S)
        number = running_sweep(ctx)
    if number is None:
        raise UsageError("no sweep is under way", hint="`tunerd sweep start`")
    while True:
        is_running = running_sweep(ctx) == number or sweeping_job(ctx) is not None
        with reading(ctx) as store:
            events = () if store is None else store.readable_events(number)[0]
        for event in events[seen:]:
            yield _event_text(event)
        seen = len(events)
        if not is_running:
            return
        ctx.clock.sleep(_UNIT_POLL_S)


def _event_text(event: Mapping[str, Any]) -> str:
    """One start or request in a line."""
    arm = arm_text({**event["arm"], "n_max": event["n_max"] or event["arm"]["n_max"],
                    "p_min": event["p_min"] or event["arm"]["p_min"]})  # fmt: skip
    what = "start" if event["event"] == "boot" else event["purpose"]
    end = event["failure"] or format_duration(event["seconds"])
    return f"{what:<8} {end:>8}  {arm}"


def _last(sweep: StoredSweep, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    verdict = sweep.verdict
    return {
        "sweep": sweep.number,
        "verdict": None if verdict is None else verdict.outcome,
        "sentence": None if verdict is None else verdict.sentence,
        "starts": sum(event["event"] == "boot" for event in events),
        "requests": sum(event["event"] == "request" for event in events),
        "arms": len({arm_text(event["arm"]) for event in events}),
        "failures": sum(bool(event["failure"]) for event in events),
        "doing": _event_text(events[-1]) if events else None,
    }


def _demand_none(ctx: Context) -> None:
    is_held = is_locked(ctx.paths.sweep_lock) or is_locked(ctx.paths.measure_lock)
    if is_held or sweeping_job(ctx) is not None:
        record = read_measurement(ctx)
        raise Busy(
            "another measurement is under way",
            cause="a sweep" if record is None else record.purpose,
            state="nothing was changed",
            hint="`tunerd sweep status`; `tunerd sweep stop` ends a sweep",
        )
