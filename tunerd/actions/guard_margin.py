"""The fit margin of what is deployed, and what was done to it; light enough for the daemon."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.actions.live import standing_text
from tunerd.actions.profile_layers import load_profile
from tunerd.core.cmdline_memory import by_hand
from tunerd.core.generation import Generation, HistoryEntry
from tunerd.core.guards.oom import Margin
from tunerd.core.resolve import Layer
from tunerd.core.swap import sha256
from tunerd.errors import UsageError

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
    pins = dict(generation.pins)
    resolved = load_profile(
        ctx, str(generation.profile), options=pins,
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
