"""Raises the fit margin of what is deployed by one step: an ordinary swap, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunerd.actions.apply import apply
from tunerd.actions.choose_engine import PlanRequest
from tunerd.actions.context import Context
from tunerd.actions.guard_margin import KEY, REASON, margin_now, serving_by_profile
from tunerd.actions.plan import Plan, make_plan
from tunerd.core.generation import Generation
from tunerd.core.guards.oom import next_margin_mib
from tunerd.core.result import ActionResult, note
from tunerd.errors import DeployError, TunerdError, UsageError


def raise_margin(ctx: Context) -> ActionResult:
    """`tunerd guard raise-margin`: deploy what serves with the next larger margin.

    The server that was there is started again where that does not serve either.

    Raises:
        UsageError: there is no margin to be raised.
        DeployError: more than the margin would change; else as `apply`.
        RolledBack, Stranded: as `apply`.
    """
    generation = serving_by_profile(ctx).generation
    margin = margin_now(ctx)
    if margin.fit_mib is None:
        raise UsageError(
            f"profile `{generation.profile}` sets no {KEY}", hint="lower serving.ctx_size"
        )
    target_mib = next_margin_mib(margin.fit_mib)
    options: dict[str, Any] = {**generation.pins, KEY: target_mib}
    try:
        done = apply(
            ctx, PlanRequest(str(generation.profile), options), drain=False,
            confirm=_only_the_margin(ctx, generation), reason=REASON,
            probation=False,  # which would go back to the margin that ran out
        )  # fmt: skip
    except TunerdError:
        _start_anyway(ctx)
        raise
    text = f"the fit margin is {target_mib} MiB now, {margin.fit_mib} MiB ran out of VRAM"
    payload = {**done.payload, "fit_mib": target_mib, "fit_before_mib": margin.fit_mib}
    return replace(
        done, command="guard raise-margin", payload=payload,
        messages=(note("margin", text, f"{KEY} = {target_mib} in the profile keeps it"), *done.messages),
    )  # fmt: skip


def _only_the_margin(ctx: Context, generation: Generation) -> Callable[[Plan], None]:
    """Refuses where a person edited the unit, or the profile says something else than what serves."""

    def confirm(made: Plan) -> None:
        if made.live_sha256 != generation.unit_sha256:
            raise DeployError(
                "the unit was edited by hand, so no guard replaces it",
                state="nothing was changed",
                hint="`tunerd verify` shows the difference",
            )
        as_it_is = make_plan(ctx, PlanRequest(str(generation.profile), dict(generation.pins)))
        if as_it_is.command.argv != generation.argv:
            differ = set(as_it_is.command.argv) ^ set(generation.argv)
            raise DeployError(
                f"profile `{generation.profile}` says something else by now than what serves",
                cause=f"these would change beside the margin: {' '.join(sorted(differ))}"[:500],
                state="nothing was changed",
                hint=f"`tunerd plan {generation.profile}` shows it; `tunerd apply` deploys it",
            )

    return confirm


def _start_anyway(ctx: Context) -> None:
    """A server that dies again and again still serves in between; stopped it never would."""
    try:
        if not ctx.services.state(ctx.unit).is_active:
            ctx.services.reset_failed(ctx.unit)
            ctx.services.start(ctx.unit)
    except TunerdError:
        return
