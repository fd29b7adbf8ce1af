"""What is known of every installed build before a sweep starts anything, and what it cannot do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunerd.actions.choose_engine import PlanRequest
from tunerd.actions.context import Context
from tunerd.actions.find_engines import find_engines
from tunerd.actions.plan import Plan, make_plan
from tunerd.actions.sweep_draft import NO_DRAFTER, Drafter
from tunerd.actions.sweep_placement import is_found_by_tunerd
from tunerd.core.cmdline_memory import by_hand
from tunerd.core.cmdline_speculation import KINDS_WITH_DRAFT_FILE
from tunerd.core.engine import Effect, Engine, FitStyle
from tunerd.core.result import Level
from tunerd.core.sweep.arm import DRAFT, DRAFT_MODEL, EXPERTS, OFF, PLACEMENT_KEYS, Extra
from tunerd.core.sweep.keys import ENGINE, FIT, KV_KEYS, TYPE
from tunerd.core.sweep.space import USUAL_RANGES, EngineFacts
from tunerd.errors import TunerdError

# More of these needs less VRAM and more RAM, where more of anything else needs more.
_TO_RAM = frozenset({EXPERTS, "memory.n_cpu_ffn"})
_USELESS = (Effect.NO_EFFECT, Effect.FAILED)


@dataclass(frozen=True, slots=True)
class Seen:
    """The builds with their facts; those among them that take settings of drafts with a request.

    `programs` are the files that they run.
    """

    engines: tuple[EngineFacts, ...]
    identities: Mapping[str, str | None]
    per_request: frozenset[str]
    programs: Mapping[str, Path]


def plan_with(ctx: Context, request: PlanRequest, changes: Mapping[str, Any]) -> Plan:
    """The plan of a profile with some keys changed.

    Raises:
        TunerdError: there is none.
    """
    options = {**request.options, **changes}
    return make_plan(ctx, PlanRequest(request.profile, options, request.with_tuned))


def engine_facts(
    ctx: Context,
    request: PlanRequest,
    base: Plan,
    ranges: Mapping[str, tuple[Any, ...]],
    *,
    proves: bool,
    frozen: Collection[str] = (),
    drafter: Drafter = NO_DRAFTER,
    placements: tuple[Extra, ...] = (),
) -> Seen:
    """Facts of every installed build, the base's own first.

    Args:
        ctx: Where.
        request: What serves now, as it would be planned.
        base: Its plan.
        ranges: Values to try, by key.
        proves: Whether builds that were not tried yet are tried now, on a tiny model.
        frozen: Keys that are not searched, so that none of their values is looked at.
        drafter: The draft model, if there is one.
        placements: Whole placements to try with the base's own build.
    """
    ranges = {key: values for key, values in ranges.items() if key not in frozen}
    installed = find_engines(ctx)
    own = [engine for engine in installed if engine.name == base.engine.name] or [base.engine]
    others = [engine for engine in installed if engine.name != base.engine.name]
    listed = ranges.get(ENGINE)
    facts, identities, per_request, programs = [], {}, set(), {}
    for engine in (*own, *others):
        is_base = engine.name == base.engine.name
        if not is_base and listed is not None and engine.name not in listed:
            facts.append(EngineFacts(engine.name))
            continue
        known = _proved(ctx, engine, base, proves=proves)
        found = _facts(ctx, request, base, known, ranges, drafter, is_base=is_base)
        facts.append(replace(found, placements=placements) if is_base else found)
        programs[engine.name] = engine.program
        identities[engine.name] = known.identity.sha256 if known.identity is not None else None
        if all(
            known.proof(one).effect is Effect.PROVED for one in ("per-request", "per-request p-min")
        ):
            per_request.add(engine.name)
    return Seen(tuple(facts), identities, frozenset(per_request), programs)


def _proved(ctx: Context, engine: Engine, base: Plan, *, proves: bool) -> Engine:
    """The build with its proofs, tried now where speculation could matter and nobody tried it."""
    capabilities = engine.capabilities
    matters = base.facts.has_mtp and capabilities is not None and capabilities.spec_word("mtp")
    if not (proves and matters) or engine.proof("mtp").effect is not Effect.UNTRIED:
        return engine
    from tunerd.actions.prove import prove_engine

    return prove_engine(ctx, engine)


def _facts(
    ctx: Context,
    request: PlanRequest,
    base: Plan,
    engine: Engine,
    ranges: Mapping[str, tuple[Any, ...]],
    drafter: Drafter,
    *,
    is_base: bool,
) -> EngineFacts:
    own = {} if is_base else {ENGINE: [engine.name]}
    if engine.is_embedded and base.has_gpu:
        return EngineFacts(engine.name, problem="it uses no GPU")
    reason = None if is_base else _refusal(ctx, request, own, engine.name)
    if reason is not None:
        return EngineFacts(engine.name, problem=reason)
    n_max, p_min = engine.proof("n-max"), engine.proof("p-min")
    return EngineFacts(
        name=engine.name,
        kinds=_kinds_of(ctx, request, base, engine, own, ranges, drafter),
        ignores_n_max=f"n-max has no effect on this build: {n_max.detail}"
        if n_max.effect in _USELESS
        else None,
        ignores_p_min=f"p-min has no effect on this build: {p_min.detail}"
        if p_min.effect in _USELESS
        else None,
        refused=dict(_refused_values(ctx, request, own, engine.name, ranges)),
    )


def _kinds_of(
    ctx: Context,
    request: PlanRequest,
    base: Plan,
    engine: Engine,
    own: Mapping[str, Any],
    ranges: Mapping[str, tuple[Any, ...]],
    drafter: Drafter,
) -> dict[str, str | None]:
    """Kinds of speculation, with the reason why a build cannot have them."""
    current = base.resolved.profile.speculation.type or OFF
    listed = tuple(str(one) for one in ranges.get(TYPE, ()))
    drafts = (DRAFT,) if drafter.is_wanted else ()
    kinds = dict.fromkeys((current, OFF, "mtp", *drafts, *listed))
    found = {kind: _kind_out(engine, base, kind, drafter) for kind in kinds}
    if DRAFT in found and found[DRAFT] is None and current != DRAFT:
        keys = {**own, TYPE: DRAFT, DRAFT_MODEL: drafter.name}
        found[DRAFT] = _refusal(ctx, request, keys, engine.name)
    return found


def _kind_out(engine: Engine, base: Plan, kind: str, drafter: Drafter) -> str | None:
    """Why a build cannot have a kind of speculation with this model; None where it can."""
    if kind == OFF:
        return None
    if engine.capabilities is None or engine.capabilities.spec_word(kind) is None:
        return "this build has no such speculation"
    if kind == "mtp":
        if not base.facts.has_mtp:
            return "the model has no MTP block"
        proof = engine.proof("mtp")
        return proof.detail if proof.effect in _USELESS else None
    if kind == DRAFT:
        return drafter.reason
    named = base.resolved.profile.speculation.draft_model
    if kind in KINDS_WITH_DRAFT_FILE and named is None:
        return "it needs a draft model, and speculation.draft_model names none"
    return None


def _refused_values(
    ctx: Context,
    request: PlanRequest,
    own: Mapping[str, Any],
    engine: str,
    ranges: Mapping[str, tuple[Any, ...]],
) -> Iterator[tuple[tuple[str, Any], str]]:
    """Values that would not be deployed: too much memory, or more than the build takes.

    What is too much stays too much for larger values, so the largest is tried first; where a larger
    one needs less VRAM and more RAM, both ends are.
    """
    for key, values in {**USUAL_RANGES, **ranges}.items():
        if key in {TYPE, ENGINE, FIT, DRAFT_MODEL} or not values:
            continue
        is_number = all(isinstance(value, int | float) for value in values)
        orders = [sorted(values, reverse=True)] if is_number else [list(values)]
        if key in _TO_RAM:
            orders.append(sorted(values))
        keys = KV_KEYS if key in KV_KEYS else (key,)
        for ordered in orders:
            for value in ordered:
                changed = {**own, **dict.fromkeys(keys, value)}
                reason = _refusal(ctx, request, changed, engine)
                if reason is not None:
                    yield (key, value), reason
                elif is_number:
                    break


def _refusal(
    ctx: Context, request: PlanRequest, changes: Mapping[str, Any], engine: str
) -> str | None:
    """Why this would not be deployed; None where it would."""
    try:
        plan = plan_with(ctx, request, changes)
    except TunerdError as error:
        return (error.cause or error.message).splitlines()[0]
    if plan.engine.name != engine:
        return f"{engine} cannot serve it, {plan.engine.name} would"
    errors = [one.text for one in plan.messages if one.level is Level.ERROR]
    return errors[0] if errors else None


def frozen_keys(base: Plan, ranges: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Keys that cannot be searched on this machine, with the reason."""
    reasons = {key: _pointless(key, base) for key in sorted(PLACEMENT_KEYS & set(ranges))}
    return {key: why for key, why in {FIT: _no_fit(base), **reasons}.items() if why is not None}


def _no_fit(base: Plan) -> str | None:
    """Why no margin can be searched."""
    if not base.has_gpu:
        return "there is no GPU whose memory could be left free"
    keys = by_hand(base.resolved)
    is_given = bool(keys) and not is_found_by_tunerd(base, keys)
    if base.resolved.profile.memory.fit is False or is_given:
        given = ", ".join(keys) or "memory.fit = false"
        return f"placement is given by hand: {given}"
    capabilities = base.engine.capabilities
    if capabilities is None or capabilities.fit is FitStyle.NONE:
        return f"{base.engine.name} has no placement of its own"
    return None


def _pointless(key: str, base: Plan) -> str | None:
    """Why a listed key of placement changes nothing here."""
    if not base.has_gpu:
        return "there is no GPU: everything lies in RAM"
    if key in {EXPERTS, "memory.cpu_moe"} and not base.facts.is_moe:
        return "the model has no experts"
    return None
