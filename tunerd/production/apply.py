"""`tunerd apply PROFILE`: plan, show, ask, swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.capabilities import Effect
from tunerd.engine.choice import PlanRequest
from tunerd.errors import DeployError, TunerdError
from tunerd.production import plan
from tunerd.production.checks import explain
from tunerd.production.measurement import read_measurement
from tunerd.production.recover import changing
from tunerd.production.swap import SwapRequest, swap
from tunerd.production.unattended import demand_root_for_plan
from tunerd.profile.files import TunedRecord
from tunerd.records import plain
from tunerd.result import ActionResult, Level, Message, warning
from tunerd.units.generations import Generation
from tunerd.words import sha256

Confirm = Callable[[plan.Plan], None]


def apply(
    ctx: Context,
    request: PlanRequest,
    *,
    drain: bool,
    confirm: Confirm = lambda _plan: None,
    ask: Confirm | None = None,
    reason: str = "apply",
    probation: bool = True,
    tuned: TunedRecord | None = None,
) -> ActionResult:
    """Deploy a profile.

    Args:
        ctx: Where.
        request: What.
        drain: Whether to wait for running requests first.
        confirm: Checks the plan under the lock; raises to stop.
        ask: Shows the plan and asks a person, who may take an hour: without the lock, so that rollback,
            guards and recovery work meanwhile; raises to stop.
        reason: Why, for the backup's name and the history.
        probation: Whether it is watched afterwards, where there is something to go back to.
        tuned: Of what a sweep proved, to be in force then; None for none.

    Raises:
        Busy: another change is under way.
        DeployError: the unit is masked or an alias, the plan is refused, or the swap failed before anything changed.
        RolledBack: the swap failed, and the previous unit serves again.
        Stranded: the swap failed, and so did the way back.
    """
    messages: list[Message] = []
    with changing(
        ctx,
        f"{reason} {request.profile}",
        partial(_prepare, ctx, request),
        ask=None if ask is None else lambda made: ask(_with_warning(ctx, made)),
        confirm=confirm,
        by=f"`tunerd {reason}`",
        messages=messages,
    ) as made:
        for told in made.messages:
            if told.code in {plan.NO_WAY_BACK, plan.OTHER_WAY_BACK}:
                ctx.say(told.text)
        ran = ctx.services.state(ctx.unit).runs
        messages += _keep_engines(ctx, made)
        text = made.unit_text.encode("utf-8", "surrogateescape")
        asked = SwapRequest(
            text=text,
            old_sha256=made.live_sha256,
            generation=_generation(ctx, request, made, reason=reason, text=text),
            address=plan.address_of_plan(ctx, made),
            expected=plan.expectation_of_plan(made),
            drain=drain,
            ran=ran,
            model_bytes=made.facts.file_bytes,
            wants_probation=probation,
            tuned=plain(tuned),
        )
        done = swap(ctx, asked)
        remarks = plan.remember_live_load(ctx)
    messages += [message for message in made.messages if message.level is Level.WARNING]
    messages += [*done.told, *remarks]
    what = f"generation {done.generation} serves `{made.resolved.name}` on {made.engine.name}"
    payload = {**plan.plan_json(made, with_explain=False), **done.to_json(what)}
    return ActionResult("apply", payload, tuple(messages), has_acted=True)


def _prepare(ctx: Context, request: PlanRequest) -> plan.Plan:
    """What would be deployed; what it relies on is tried once per build, before anything stops."""
    made = plan.make_plan(ctx, request)
    wants_mtp = "mtp" in made.resolved.profile.speculation.kinds
    if wants_mtp and not made.errors and made.engine.proof("mtp").effect is Effect.UNTRIED:
        from tunerd.engine.prove import prove_engine

        prove_engine(ctx, made.engine)
        made = plan.make_plan(ctx, request)
    if made.errors:
        raise _refused(made)
    demand_root_for_plan(ctx, made)
    return made


def _with_warning(ctx: Context, made: plan.Plan) -> plan.Plan:
    """The plan, with what the person who is asked should know of a measurement under way."""
    record = read_measurement(ctx)
    if record is None:
        return made
    ends = warning("measuring", f"`{record.purpose}` is under way; deploying ends it")
    return replace(made, messages=(*made.messages, ends))


def _keep_engines(ctx: Context, made: plan.Plan) -> Iterator[Message]:
    """What serves, and what will: an upgrade in place leaves no file of the build that runs.

    What hinders a copy hinders no swap, which touches no engine: a server that dies may need its larger margin.
    """
    if not ctx.settings.swap.keep_engine:
        return
    from tunerd.engine.builds import found_in_unit, keep_program

    live = made.live
    found = [] if live.program is None else [found_in_unit(live, Path(live.program))]
    found += [] if made.engine.is_embedded else [made.engine]
    for one in {one.program: one for one in found}.values():
        ctx.say(f"keeping a copy of `{one.program}`")
        try:
            keep_program(ctx, one)
        except TunerdError as problem:
            text = f"no copy of `{one.program}` was kept: {problem.words}"
            yield warning("not-kept", text, problem.hint)


def _refused(made: plan.Plan) -> DeployError:
    return DeployError(
        f"profile `{made.resolved.name}` cannot be deployed here",
        cause="\n".join(one.text for one in made.errors),
        state="nothing was touched",
        hint="; ".join(dict.fromkeys(one.hint for one in made.errors if one.hint)) or None,
    )


def _generation(
    ctx: Context, request: PlanRequest, made: plan.Plan, *, reason: str, text: bytes
) -> Generation:
    """What is deployed; what `--set` said is the user's pin, respected by later sweeps."""
    identity = made.engine.identity
    components = identity.components if identity is not None else ()
    model = made.facts.identity
    gpus = made.host.gpus or ()
    named = [  # a link may lead to another one later
        {"path": str(path), "size_bytes": stamp[0], "mtime_ns": stamp[1]}
        for path, stamp in made.stamps.items()
        if stamp is not None
    ]
    return Generation(
        unit=ctx.unit,
        reason=reason,
        profile=made.resolved.name,
        engine=made.engine.name,
        engine_sha256=identity.sha256 if identity is not None else None,
        engine_components=tuple((str(one.path), one.sha256) for one in components),
        model_path=str(model.files[0].path),
        model_identity={
            "sha256": model.sha256,
            **plain(model),
            "files": [*plain(model)["files"], *named],
        },
        argv=made.command.argv,
        origins=explain(made.command, made.resolved),
        pins=dict(request.options),
        unit_sha256=sha256(text),
        host={
            "gpus": [{"name": g.name, "total_mib": g.total_mib} for g in gpus],
            "driver_version": made.host.driver_version,
            "kernel": made.host.kernel,
            "drop_ins": [str(path) for path in made.live.drop_ins],
        },
        with_tuned=request.with_tuned,
    )
