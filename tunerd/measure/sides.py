"""What A and B of `tunerd compare` may be: a profile, a generation, an engine, or a single setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunerd.app import Context
from tunerd.engine.builds import PlanRequest, find_engines, request_again
from tunerd.engine.flags import Answering, argument_changes
from tunerd.errors import DeployError, UsageError
from tunerd.production.plan import Plan, make_plan
from tunerd.profile.files import load_sources, parse_options
from tunerd.result import Level
from tunerd.units.generations import Generation
from tunerd.words import generation_number, nearest_name

LIVE = "live"


@dataclass(frozen=True, slots=True)
class SideRequest:
    """One side as asked for: its name for people, what to plan, and what must come of it.

    `generation` is set where the side is what a generation deployed.
    """

    name: str
    request: PlanRequest
    generation: Generation | None = None


def sides_of(
    ctx: Context, words: Sequence[str], *, base: str | None, options: Sequence[str]
) -> tuple[SideRequest, SideRequest]:
    """Both sides.

    Args:
        ctx: Where.
        words: A and B, or A alone, or neither; what is left out is what serves now for A, and A with
            the options for B.
        base: The profile that engines and single settings change; what serves now by default.
        options: `KEY=VALUE`, for B alone.

    Raises:
        UsageError: they are not two sides.
    """
    given = parse_options(options)
    first = side_of(ctx, words[0] if words else LIVE, base=base)
    if len(words) > 1:
        second = side_of(ctx, words[1], base=base)
    elif given:
        second = first
    else:
        raise UsageError(
            "there is nothing to compare it with",
            hint="`tunerd compare A B`, or `tunerd compare --set speculation.n_max=2`",
        )
    return first, _with(second, given) if given else second


def side_of(ctx: Context, word: str, *, base: str | None) -> SideRequest:
    """One side, from the word that was typed.

    Raises:
        UsageError: it names nothing that is here.
    """
    sources, _ = load_sources(ctx)
    if word == LIVE:
        return _generation_side(LIVE, _serving(ctx))
    if "=" in word:
        return _with(_base(ctx, base), parse_options([word]), name=word)
    if word in sources.names:
        return SideRequest(word, PlanRequest(word, {}))
    number = generation_number(word)
    if number is not None:
        entry = ctx.generations.read(number)
        if entry is None:
            raise UsageError(f"there is no generation {word}", hint="`tunerd history`")
        return _generation_side(f"generation {word}", entry.generation)
    engines = [engine.name for engine in find_engines(ctx)]
    if word in engines:
        return _with(_base(ctx, base), {"engine.prefer": [word]}, name=word)
    nearest = nearest_name(word, (*sources.names, *engines, LIVE))
    raise UsageError(
        f"`{word}` is no profile, generation, engine or setting",
        cause=f"engines: {', '.join(engines)}",
        hint=f"did you mean `{nearest}`?"
        if nearest
        else "`tunerd profiles list`, `tunerd engines`",
    )


def plan_side(ctx: Context, side: SideRequest) -> Plan:
    """What would be deployed for this side.

    Raises:
        DeployError: it would be refused, or is no longer what its generation deployed.
        ConfigError: its profile is wrong.
        EngineError: no engine can serve it.
    """
    made = make_plan(ctx, side.request)
    errors = [message for message in made.messages if message.level is Level.ERROR]
    if errors:
        raise DeployError(
            f"`{side.name}` would be refused",
            cause="\n".join(message.text for message in errors),
            state="nothing was touched",
            hint=next((message.hint for message in errors if message.hint), None),
        )
    if side.generation is not None and side.generation.argv != made.command.argv:
        changed = argument_changes(side.generation.argv, made.command.argv)
        raise DeployError(
            f"`{side.name}` cannot be measured: its profile gives another command line today",
            cause="; ".join(changed) or "only the order of arguments differs",
            state="nothing was touched",
            hint=f"compare profile `{side.generation.profile}` instead",
        )
    return made


def answering(plan: Plan) -> Answering:
    """What of a plan decides how it answers."""
    return Answering(plan.engine.name, plan.command.argv, plan.resolved.profile.environment)


def context_tokens(plan: Plan) -> int | None:
    """Context of one slot [tok]; None where the engine decides."""
    serving = plan.resolved.profile.serving
    if not serving.ctx_size:
        return None
    return serving.ctx_size // (1 if serving.kv_unified else serving.n_parallel or 1)


def _base(ctx: Context, base: str | None) -> SideRequest:
    if base is not None:
        return SideRequest(base, PlanRequest(base, {}))
    return replace(_generation_side(LIVE, _serving(ctx)), generation=None)


def _serving(ctx: Context) -> Generation:
    entry = ctx.generations.serving(ctx.unit)
    if entry is None:
        raise UsageError(
            "tunerd has deployed nothing here that could be compared with",
            hint="name two profiles, or the one to start from with --profile",
        )
    return entry.generation


def _generation_side(name: str, generation: Generation) -> SideRequest:
    if generation.profile is None:
        raise UsageError(
            f"`{name}` was not deployed from a profile, so it cannot be planned again",
            hint="`tunerd profiles new NAME --from-unit UNIT` makes one of it",
        )
    return SideRequest(name, request_again(generation), generation)


def _with(side: SideRequest, options: Mapping[str, Any], name: str | None = None) -> SideRequest:
    request = replace(side.request, options={**side.request.options, **options})
    told = ", ".join(f"{key}={_plain(value)}" for key, value in options.items())
    return SideRequest(name or f"{side.name} with {told}", request)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
