"""Raises the fit margin of what is deployed by one step: an ordinary swap, with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunerd.actions.apply import apply
from tunerd.actions.choose_engine import PlanRequest
from tunerd.actions.context import Context
from tunerd.actions.guard_margin import KEY, REASON, margin_now, serving_by_profile
from tunerd.core.guards.oom import next_margin_mib
from tunerd.core.result import ActionResult, note
from tunerd.errors import TunerdError, UsageError


def raise_margin(ctx: Context) -> ActionResult:
    """`tunerd guard raise-margin`: deploy what serves with the next larger margin.

    The server that was there is started again where that does not serve either.

    Raises:
        UsageError: there is no margin to be raised.
        DeployError, RolledBack, Stranded: as `apply`.
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
            confirm=lambda _plan: None, reason=REASON,
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


def _start_anyway(ctx: Context) -> None:
    """A server that dies again and again still serves in between; stopped it never would."""
    try:
        if not ctx.services.state(ctx.unit).is_active:
            ctx.services.reset_failed(ctx.unit)
            ctx.services.start(ctx.unit)
    except TunerdError:
        return
