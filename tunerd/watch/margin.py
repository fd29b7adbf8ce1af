"""The fit margin that serves: what it is, what was done to it, and deploying the next larger one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from tunerd.app import Context
from tunerd.engine.builds import request_again
from tunerd.engine.flags import by_hand
from tunerd.engine.serving import standing_text
from tunerd.errors import DeployError, TunerdError, UsageError
from tunerd.production.apply import apply
from tunerd.production.plan import Plan
from tunerd.profile.files import load_profile
from tunerd.profile.layers import Layer
from tunerd.result import ActionResult, note
from tunerd.units.generations import Generation, HistoryEntry
from tunerd.watch.guards import Margin
from tunerd.words import sha256

KEY = "memory.fit_mib"
REASON = "guard"


def margin_now(ctx: Context) -> Margin:
    """The margin that is deployed, and what was done to it.

    Raises:
        UsageError: no profile is deployed.
        ConfigError: its files are wrong.
    """
    serving = serving_by_profile(ctx)
    generation = serving.generation
    raised = _raised(ctx, generation)
    resolved = load_profile(
        ctx, str(generation.profile), options=dict(generation.pins), with_tuned=generation.with_tuned,
        engine_names=() if generation.engine is None else (generation.engine,),
    )  # fmt: skip
    setting = resolved.settings.get(KEY)
    is_in_force = setting is not None and not by_hand(resolved)
    fit_mib = int(setting.value) if setting is not None and is_in_force else None
    tried = [int(one.pins[KEY]) for one in raised]
    by_person = setting is not None and setting.origin.layer in {Layer.PIN, Layer.SET}
    return Margin(
        fit_mib=None if fit_mib is None else max([fit_mib, *tried]),
        steps_taken=len(raised),
        is_pinned=by_person and not is_raise(generation),
        left_alone=None if _stands(ctx, generation) else "its unit was edited by hand",
        counts_less="--fit-margin" in generation.argv,
    )


def _stands(ctx: Context, generation: Generation) -> bool:
    """Whether the unit is what was deployed; a guard replaces nothing that a person wrote."""
    return sha256(standing_text(ctx)) == generation.unit_sha256


def serving_by_profile(ctx: Context) -> HistoryEntry:
    """The generation that serves.

    Raises:
        UsageError: it was not made from a profile, or there is none.
    """
    entry = ctx.generations.serving(ctx.unit)
    if entry is None or entry.generation.profile is None:
        raise UsageError(
            "nothing that serves was deployed from a profile", hint="`tunerd apply PROFILE`"
        )
    return entry


def _raised(ctx: Context, serving: Generation) -> list[Generation]:
    """Raises since a person deployed something, whether they led to a server or not, newest first."""
    found = []
    for entry in ctx.generations.entries():
        one = entry.generation
        if one.unit != serving.unit or one.profile != serving.profile:
            break
        if is_raise(one):
            found.append(one)
        elif entry.ending.outcome.is_done:
            break
    return found


def is_raise(generation: Generation) -> bool:
    """Whether this guard raised the margin in it.

    A probation that goes back has the same reason, from a generation.
    """
    return (
        generation.reason == REASON
        and generation.from_generation is None
        and KEY in generation.pins
    )


def raise_margin(ctx: Context) -> ActionResult:
    """`tunerd guard raise-margin`: deploy what serves with the next larger margin.

    The server that was there is started again where that does not serve either.

    Raises:
        UsageError: there is no margin to be raised.
        DeployError: more than the margin would change; else as `apply`.
        RolledBack, Stranded: as `apply`.
    """
    ctx = replace(ctx, is_unattended=True)
    generation = serving_by_profile(ctx).generation
    margin = margin_now(ctx)
    target_mib = margin.next_mib
    if target_mib is None:
        raise UsageError(
            f"profile `{generation.profile}` sets no {KEY}", hint="lower serving.ctx_size"
        )
    again = request_again(generation)
    request = replace(again, options={**again.options, KEY: target_mib})
    try:
        done = apply(
            ctx, request, drain=False,
            confirm=_only_the_margin(generation), reason=REASON,
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


def _only_the_margin(generation: Generation) -> Callable[[Plan], None]:
    """Refuses where a person edited the unit, or the profile says something else than what serves."""

    def confirm(made: Plan) -> None:
        if made.live_sha256 != generation.unit_sha256:
            raise DeployError(
                "the unit was edited by hand, so no guard replaces it",
                state="nothing was changed",
                hint="`tunerd verify` shows the difference",
            )
        now, then = (_without_margin(argv) for argv in (made.command.argv, generation.argv))
        if now != then:
            differ = set(now) ^ set(then)
            raise DeployError(
                f"profile `{generation.profile}` says something else by now than what serves",
                cause=f"these would change beside the margin: {' '.join(sorted(differ))}"[:500],
                state="nothing was changed",
                hint=f"`tunerd plan {generation.profile}` shows it; `tunerd apply` deploys it",
            )

    return confirm


def _without_margin(argv: Sequence[str]) -> list[str]:
    flags = ("--fit-target", "--fit-margin")
    return [word for before, word in pairwise(("", *argv)) if before not in flags]


def _start_anyway(ctx: Context) -> None:
    """A server that dies again and again still serves in between; stopped it never would."""
    try:
        if not ctx.services.state(ctx.unit).is_active:
            ctx.services.reset_failed(ctx.unit)
            ctx.services.start(ctx.unit)
    except TunerdError:
        return
