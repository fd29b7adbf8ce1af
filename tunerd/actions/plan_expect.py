"""Where the server of a plan will answer, and by what a good start of it is known."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.actions.live import read_key
from tunerd.actions.plan import Plan
from tunerd.core.engine import Effect
from tunerd.core.health import Expectation
from tunerd.core.plan import serving_after
from tunerd.system.llama import Address


def address_of_plan(ctx: Context, made: Plan) -> Address:
    """Where its server will listen, with the key that it will want."""
    after = serving_after(made.command, made.engine.capabilities)
    key = read_key(ctx, made.resolved.profile.serving.api_key_file)
    return Address(after.host or "", after.port or 0, key)


def expectation_of_plan(made: Plan) -> Expectation:
    """Who should answer; what this build cannot do is told in the plan, and is not expected here."""
    speculation = made.resolved.profile.speculation
    wants_draft = speculation.type == "mtp"
    proved = made.engine.proof("mtp").effect is Effect.PROVED
    counts = made.engine.proof("counts").effect is not Effect.NO_EFFECT
    return Expectation(
        old_invocation=None,
        alias=serving_after(made.command, made.engine.capabilities).alias,
        expects_draft=wants_draft and proved,
        must_draft=wants_draft and proved and counts and not speculation.p_min,
    )
