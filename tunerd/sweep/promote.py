"""`tunerd promote` and `decline`: what becomes of a winner that a sweep proved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunerd.app import Context
from tunerd.calendar import Deadline
from tunerd.engine.choice import PlanRequest
from tunerd.engine.flags import argument_changes, changed_variables, without_secrets
from tunerd.engine.health import FailureKind
from tunerd.engine.serving import demand_unedited, environment_with, stands
from tunerd.errors import (
    BenchError,
    DeployError,
    HostError,
    Interrupted,
    RolledBack,
    Stranded,
    TunerdError,
    UsageError,
)
from tunerd.measure.evidence import ArmRecord
from tunerd.measure.results import StalenessCheck
from tunerd.measure.store import demand_storable, reading
from tunerd.measure.target import NoAnswer
from tunerd.measure.trust import stages_of
from tunerd.production.apply import apply
from tunerd.production.plan import Plan, make_plan, plan
from tunerd.production.rollback import rollback
from tunerd.profile.arm import LEFT_TO_FIT, PLACEMENT_KEYS, Arm
from tunerd.profile.files import (
    TunedRecord,
    forget_failure,
    read_tuned,
    remember_failure,
    write_tuned,
)
from tunerd.profile.schema import nest
from tunerd.records import plain, read_or_none
from tunerd.result import ActionResult, Message, note, warning
from tunerd.sweep.box import LiveTurn, expected_turns, kinds_of_one_token, measure_live
from tunerd.sweep.context import LUCK
from tunerd.sweep.plan import Standing, base_of, standing
from tunerd.sweep.record import (
    PROMOTED,
    TAKEN_BACK,
    StoredSweep,
    after_failure,
    find_sweep,
    keep_decision,
)
from tunerd.sweep.space import changed, changes, spec_of
from tunerd.units.generations import Generation
from tunerd.units.manager import UnitState

Confirm = Callable[[Plan], None]
DECLINED = "declined"
_NOT_ITS_FAULT = {
    FailureKind.STOPPED,
    FailureKind.EDITED,
    FailureKind.INTERRUPTED,
    FailureKind.PORT_TAKEN,
}


@dataclass(frozen=True, slots=True)
class _Proposal:
    sweep: StoredSweep
    standing: Standing
    incumbent: Arm
    arm: Arm
    values: Mapping[str, Any]
    request: PlanRequest
    engine_sha256: str | None


def promote(
    ctx: Context,
    number: int | None,
    *,
    drain: bool,
    confirm: Confirm = lambda _plan: None,
    ask: Confirm | None = None,
    with_probation: bool = True,
) -> ActionResult:
    """Deploy what a sweep proved: the ordinary swap, then one more measurement through the unit.

    Args:
        ctx: Where.
        number: Of the sweep; None for the newest.
        drain: Whether to wait for running requests first.
        confirm: Checks the plan under the lock; raises to stop.
        ask: Shows the plan and asks a person, without the lock; raises to stop.
        with_probation: Whether it is watched afterwards.

    Returns:
        Exit code 3 where the winner was taken back, 1 where somebody deployed something else meanwhile, or
        what follows the deployment failed.

    Raises:
        UsageError: that sweep proved no winner, or it was decided already.
        DeployError: what was proved is no longer valid here.
        RolledBack, Stranded: as `apply`.
        HostError, Busy: as `demand_storable`.
    """
    # One whose decision could not be kept would serve without its last measurement.
    demand_storable(ctx)
    with reading(ctx) as store:
        sweep = find_sweep(ctx, store, number)
    proposal = _proposal(ctx, sweep)

    def confirm_still(made: Plan) -> None:
        # What a person was shown may be replaced while it is read.
        _demand_start(ctx, sweep, ctx.deployed())
        _demand_valid(ctx, proposal, made)
        confirm(made)

    tuned = _record(ctx, proposal, _UNTRIED)
    try:
        done = apply(
            ctx, proposal.request, drain=drain, confirm=confirm_still, ask=ask, reason="promote",
            probation=with_probation, tuned=tuned,
        )  # fmt: skip
    except (RolledBack, Stranded):
        with contextlib.suppress(TunerdError):  # how it ended matters more
            _leave_out(ctx, proposal)
        raise
    return _deployed(ctx, proposal, done)


def _deployed(ctx: Context, proposal: _Proposal, done: ActionResult) -> ActionResult:
    """Measures once more what serves now, keeps it or takes it back."""
    generation = int(done.payload["generation"])
    messages = list(done.messages)
    payload: dict[str, Any] = {
        **done.payload,
        "sweep": proposal.sweep.number,
        "changes": changed(proposal.arm, proposal.incumbent),
        "tuned": dict(proposal.values),
        "measured_again": _UNTRIED.to_json(),
    }
    try:
        _keep(ctx, proposal, _UNTRIED, generation)
        verdict = _measured_again(ctx, proposal)
        payload["measured_again"] = verdict.to_json()
        _demand_still(ctx, generation)
        if verdict.is_worse:
            return _take_back(ctx, proposal, verdict, payload, messages)
        _keep(ctx, proposal, verdict, generation)
    except _Overtaken:
        told = warning(
            "overtaken",
            f"somebody deployed something else, or edited the unit, while generation {generation} was measured again: that stays; "
            f"{verdict.text}",
            "`tunerd history`; `tunerd verify`; `tunerd apply --untuned` leaves out what was promoted",
        )
    except (Stranded, Interrupted):
        raise
    except TunerdError as problem:  # of which nobody may believe that nothing was deployed
        told = warning(
            "unfinished",
            f"generation {generation} was deployed, but what comes after that failed: {problem.words}",
            problem.hint or "`tunerd status`",
        )
    else:
        messages.append(note("measured-again", verdict.text))
        return ActionResult("promote", payload, tuple(messages), has_acted=True)
    return ActionResult("promote", payload, (*messages, told), 1, has_acted=True)


def preview(ctx: Context, number: int | None) -> ActionResult:
    """What `promote` would deploy; exit code 1, and `nothing` in the payload, where nothing is to be promoted."""
    try:
        with reading(ctx) as store:
            proposal = _proposal(ctx, find_sweep(ctx, store, number))
    except UsageError as none:
        told = note("nothing", none.words, none.hint)
        return ActionResult("promote", {"nothing": none.words, "diff": ""}, (told,), 1)
    return plan(ctx, proposal.request)


def decline(ctx: Context, number: int | None, *, why: str | None) -> ActionResult:
    """Turn a proposal down; its samples stay.

    Raises:
        UsageError: there is nothing to decline.
    """
    with reading(ctx) as store:
        sweep = find_sweep(ctx, store, number)
    _demand_open(sweep)
    text = why or "declined by hand"
    keep_decision(ctx, sweep.number, {"what": DECLINED, "text": text})
    payload = {"sweep": sweep.number, "text": text}
    return ActionResult("decline", payload, has_acted=True)


def follow_policy(
    ctx: Context, number: int, *, deadline: Deadline | None = None, load_s: float = 0.0
) -> tuple[Message, ...]:
    """What the settings say becomes of a winner; called when a sweep has proved one.

    It is not deployed where a window ends (`deadline`) before the load (`load_s`) could, nor where nothing serves.

    Raises:
        Stranded: nothing serves.
        Interrupted: somebody ended the command.
    """
    policy = ctx.settings.sweep.promote
    if policy == "never":
        return (note("reported", 'a winner was proved; sweep.promote is "never", so it is only reported',
                     f"`tunerd promote {number}` deploys it all the same"),)  # fmt: skip
    if policy == "ask":
        return (note("proposal", "the winner is proposed, nothing was deployed",
                     f"`tunerd promote {number}`, or `tunerd decline {number}`"),)  # fmt: skip
    if deadline is not None and deadline.end_s - ctx.clock.now_s() < load_s:
        text = f"the winner was not deployed: the window {deadline.text} ends before it could load"
        return (warning("not-promoted", text, f"`tunerd promote {number}`"),)

    def demand_service(_made: Plan) -> None:  # what somebody stopped is started by nobody else
        if not ctx.services.state(ctx.unit).runs:
            raise DeployError(f"{ctx.unit} does not run", hint=f"`tunerd promote {number}`")

    try:
        done = promote(replace(ctx, is_unattended=True), number, drain=True, confirm=demand_service)
    except (Stranded, Interrupted):  # nothing serves, or somebody wants an end: no line in a list
        raise
    except TunerdError as error:
        text = "; ".join(f"the winner was not deployed: {error.words}".splitlines())
        state = f" ({error.state})" if error.state else ""
        return (warning("not-promoted", f"{text}{state}", error.hint),)
    if done.exit_code:
        return done.messages
    return (note("promoted", str(done.payload["summary"])), *done.messages)


def _leave_out(ctx: Context, proposal: _Proposal) -> None:
    """It did not come up: the next night would prove it again, and take the server away for it again."""
    newest = next(iter(ctx.generations.entries(ctx.unit)), None)
    if newest is None or newest.generation.reason != "promote":
        return
    cause = newest.ending.cause
    if cause is not None and cause not in _NOT_ITS_FAULT:
        why, identity = f"{cause}: {newest.ending.detail}", proposal.engine_sha256
        remember_failure(ctx, proposal.standing.plan_request.profile, proposal.arm, identity, why)


def _keep(ctx: Context, proposal: _Proposal, verdict: _Again, generation: int) -> None:
    """Make it the tuned layer and the decision."""
    write_tuned(ctx, replace(_record(ctx, proposal, verdict), generation=generation))
    forget_failure(ctx, proposal.standing.plan_request.profile, proposal.arm)
    keep_decision(ctx, proposal.sweep.number,
           {"what": PROMOTED, "generation": generation, "text": verdict.text})  # fmt: skip


def _demand_open(sweep: StoredSweep) -> None:
    if sweep.verdict is None or sweep.verdict.outcome != "promote":
        if sweep.run.outcome is None:
            raise UsageError(
                f"sweep {sweep.number} is not finished, and has proved no winner so far",
                hint=f"`tunerd sweep status`; `tunerd sweep resume {sweep.number}` continues one that was cut short",
            )
        said = sweep.verdict.sentence if sweep.verdict is not None else sweep.run.reason
        text = f"sweep {sweep.number} proved no winner"
        raise UsageError(text, cause=said, hint="`tunerd sweep list`")
    what = (sweep.decision or {}).get("what")
    if what in {PROMOTED, TAKEN_BACK}:
        raise UsageError(f"sweep {sweep.number} was already {what}", hint="`tunerd history`")


def _proposal(ctx: Context, sweep: StoredSweep) -> _Proposal:
    """The winner with what must be set for it; everything it rests on is checked.

    Raises:
        UsageError: there is no winner.
        DeployError: something changed since.
        HostError: what was asked for, or proved, cannot be read.
    """
    _demand_open(sweep)
    assert sweep.verdict is not None  # noqa: S101 -- just demanded
    asked, arm = sweep.request, _arm_of(sweep, sweep.verdict.details.get("arm"))
    incumbent = _arm_of(sweep, sweep.plan.get("incumbent"))
    found = standing(ctx, asked.workload)
    _demand_start(ctx, sweep, found.generation)
    before = read_tuned(ctx, found.plan_request.profile) if found.plan_request.with_tuned else None
    known = dict(before.values) if before is not None else {}
    base = base_of(incumbent, found.base_plan.resolved)
    # An arm says `ngram`, whichever of these it was measured with.
    kind = ",".join(kind for kind, _ in stages_of(_conditions(sweep, arm).argv or ()))
    values = known | changes(
        arm, replace(base, spec_types={**base.spec_types, spec_of(kind): kind})
    )
    # What only an earlier promotion placed goes back to fit by being named no more.
    values = {
        key: value
        for key, value in values.items()
        if value != LEFT_TO_FIT or key not in PLACEMENT_KEYS
    }
    served = found.plan_request
    request = PlanRequest(served.profile, served.options, tuned=nest(values))
    made = make_plan(ctx, request)
    identity = None if made.engine.identity is None else made.engine.identity.sha256
    proposal = _Proposal(sweep, found, incumbent, arm, values, request, identity)
    _demand_valid(ctx, proposal, made)
    return proposal


def _arm_of(sweep: StoredSweep, kept: Any) -> Arm:
    arm = read_or_none(Arm, kept)
    if arm is None:
        text = f"what sweep {sweep.number} proved cannot be read"
        raise HostError(text, state="nothing was touched", hint="`tunerd sweep run`")
    return arm


def _conditions(sweep: StoredSweep, arm: Arm) -> ArmRecord:
    record = sweep.run.record.arm(str(arm))
    if record is None:
        raise DeployError(f"sweep {sweep.number} did not record the conditions of {arm}")
    return record


def _demand_start(ctx: Context, sweep: StoredSweep, now: Generation | None) -> None:
    if now is None or not is_start_of(ctx, sweep, now):
        raise DeployError(
            f"sweep {sweep.number} began from generation {sweep.plan.get('generation')}, and "
            f"{'another unit' if now is None else now.number} serves now",
            state="nothing was touched",
            hint="`tunerd rollback` to what served then, or find out by `tunerd sweep run` whether it still holds",
        )
    demand_unedited(ctx, now, f"what sweep {sweep.number} began from")


def is_start_of(ctx: Context, sweep: StoredSweep, now: Generation) -> bool:
    """Whether what serves is what the sweep began from, be it by way of a rollback."""
    number = sweep.plan.get("generation")
    if number is None or now.number == number:
        return now.number == number
    entry = ctx.generations.read(int(number))
    return entry is not None and entry.generation.unit_sha256 == now.unit_sha256


def _demand_valid(ctx: Context, proposal: _Proposal, made: Plan) -> None:
    """What would be deployed is what was measured, and under the conditions of then."""
    sweep, arm = proposal.sweep, proposal.arm
    record = _conditions(sweep, arm)
    argv, variables = made.command.argv, environment_with(ctx, made.unit_text)
    now = replace(record, argv=argv, environment=variables)
    found = StalenessCheck(ctx).of(now, sweep.run.record)
    if found.holds is not True or argv[0] != record.program:
        told = argument_changes(record.argv or (), without_secrets(argv))
        changed_names = changed_variables(record.environment, variables)
        told += tuple(f"variable {name}" for name in changed_names)
        raise DeployError(
            f"what sweep {sweep.number} proved no longer holds here",
            cause="\n".join((*found.texts, *told)) or "its conditions cannot be found out",
            state="nothing was touched",
            hint="`tunerd sweep run`",
        )


# Once more


@dataclass(frozen=True, slots=True)
class _Again:
    """What the serving unit showed of the winner; `live` is None where it could not be measured.

    `is_silent`: it gave no answer.
    """

    live: LiveTurn | None
    before_s: float | None
    after_s: float | None
    problem: str | None = None
    is_silent: bool = False
    before: str = "before"
    slack: float = 0.0

    @property
    def is_worse(self) -> bool:
        """It does not answer, or not even as fast as what it replaced did in the pairs."""
        return self.is_silent or (
            self.live is not None
            and self.before_s is not None
            and self.live.turn_s >= self.before_s * (1 + self.slack)
        )

    @property
    def text(self) -> str:
        if self.is_silent:
            return f"in service it gave no answer: {self.problem}"
        if self.live is None:
            return f"in service it could not be measured again: {self.problem}"
        seen = f"in service a turn takes {self.live.turn_s:.3f} s"
        if self.before_s is None or self.after_s is None:
            return seen
        return f"{seen}; in the pairs it took {self.after_s:.3f} s, {self.before} {self.before_s:.3f} s"

    def to_json(self) -> dict[str, Any]:
        live = None if self.live is None else self.live.to_json()
        return {"live": live, "before_s": self.before_s, "after_s": self.after_s, "text": self.text}


# Kept and watched with the swap: whoever ends this while it measures leaves nothing half done.
_UNTRIED = _Again(None, None, None, "the promotion was cut short, or its unit edited")


class _Overtaken(Exception):
    """Something else was deployed than the winner, or its unit was edited by hand."""


def _demand_still(ctx: Context, generation: int) -> None:
    serving = ctx.deployed()
    if serving is None or serving.number != generation or not stands(ctx, serving):
        raise _Overtaken


def _measured_again(ctx: Context, proposal: _Proposal) -> _Again:
    ctx.say("measuring once more in service")
    workload, seed = proposal.standing.workload, proposal.sweep.run.record.seed or 0
    since = ctx.services.state(ctx.unit)
    evidence = proposal.sweep.evidence or {}
    before, after = expected_turns(evidence, workload) or (None, None)
    wanted = evidence.get("wanted_tok_s")
    may_repeat = set[str]()
    with contextlib.suppress(TunerdError), reading(ctx) as store:
        if store is not None:
            may_repeat = kinds_of_one_token(store.readable_events(proposal.sweep.number)[0])
    versus = "before" if wanted is None else f"and at {wanted:g} tok/s it would take"
    try:
        live = measure_live(ctx, workload, seed + 1, may_repeat=may_repeat)
    except BenchError as error:
        problem = error.cause or error.message
        return _Again(None, before, after, problem, is_silent=_is_silent(ctx, error, since))
    # A size is chosen to be near the wanted speed, and one start is some percent slower than the next.
    return _Again(live, before, after, before=versus, slack=0.0 if wanted is None else LUCK)


def _is_silent(ctx: Context, error: BenchError, since: UnitState) -> bool:
    """Whether the unit fails that was just deployed; one that a person stopped or restarted does not.

    `since` is from before it was measured: a restart of then may be one start with the one that was asked for.
    """
    state = ctx.services.state(ctx.unit)
    if state.has_failed or (state.n_restarts or 0) > (since.n_restarts or 0):
        return True
    is_same = state.invocation_id == since.invocation_id
    return isinstance(error, NoAnswer) and state.is_active and is_same


def _take_back(
    ctx: Context,
    proposal: _Proposal,
    verdict: _Again,
    payload: Mapping[str, Any],
    messages: list[Message],
) -> ActionResult:
    """What serves is slower than what it replaced was: go back, and remember that.

    Raises:
        _Overtaken: somebody has deployed something else meanwhile.
    """
    number, profile = proposal.sweep.number, proposal.standing.plan_request.profile
    backup = payload["backup"]
    generation = int(payload["generation"])
    back = rollback(ctx, to=backup, drain=False, tuned=_record(ctx, proposal, verdict),
                    confirm=lambda _target: _demand_still(ctx, generation), reason="guard")  # fmt: skip
    messages.append(
        warning("taken-back", f"the winner was not as good in service and was taken back: {verdict.text}",
                f"`tunerd sweep show {number}`")
    )  # fmt: skip
    try:
        after_failure(ctx, profile, number, proposal.arm, proposal.engine_sha256, verdict.text)
    except TunerdError as problem:  # it is taken back all the same
        text = f"the tuned layer may still be in force: {problem.words}"
        messages.append(warning("unfinished", text, "`tunerd apply --untuned` leaves it out"))
    told = {**payload, "summary": back.payload["summary"], "generation": back.payload["generation"]}
    return ActionResult("promote", told, tuple(messages), 3, has_acted=True)


def _record(ctx: Context, proposal: _Proposal, verdict: _Again) -> TunedRecord:
    found, sweep, plan = proposal.standing, proposal.sweep, proposal.standing.base_plan
    return TunedRecord(
        profile=found.plan_request.profile,
        values=dict(proposal.values),
        sweep=sweep.number,
        promoted_s=ctx.clock.now_s(),
        sentence=sweep.verdict.sentence if sweep.verdict is not None else "",
        engine=proposal.arm.engine,
        engine_sha256=proposal.engine_sha256,
        model_sha256=plan.facts.identity.sha256,
        driver_version=plan.host.driver_version,
        gpu_names=tuple(gpu.name for gpu in plan.host.gpus or ()),
        workload=found.shape.name,
        measured_again=verdict.to_json(),
        arm=plain(proposal.arm),
    )
