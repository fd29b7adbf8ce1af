"""Where a sweep may place the model beside where it lies now: frozen as fit chose, back to fit, or why not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tunerd.actions.choose_engine import draft_facts
from tunerd.actions.context import Context
from tunerd.actions.memory_evidence import LOAD_LINES
from tunerd.actions.plan import Plan
from tunerd.actions.plan_memory import settings_of
from tunerd.core.cmdline_memory import by_hand as keys_by_hand
from tunerd.core.engine import FitStyle
from tunerd.core.frozen_placement import (
    Frozen,
    frozen_from_estimate,
    frozen_from_log,
    read_fit,
)
from tunerd.core.memory_laws import laws_of
from tunerd.core.resolve import Layer
from tunerd.core.result import Message, note
from tunerd.core.sweep.arm import LEFT_TO_FIT, PLACEMENT_KEYS, Extra
from tunerd.core.sweep.grid import Left
from tunerd.core.sweep.keys import FIT
from tunerd.errors import TunerdError

WHAT = "frozen placement"
_USUAL_MARGIN_MIB = 1024


@dataclass(frozen=True, slots=True)
class Placements:
    """Alternatives for the build that serves; `searched` are the keys that they change."""

    alternatives: tuple[Extra, ...] = ()
    searched: frozenset[str] = frozenset()
    left: tuple[Left, ...] = ()
    messages: tuple[Message, ...] = ()

    def left_with(self, others: Collection[str]) -> tuple[Left, ...]:
        """What is left out, told for other builds as well."""
        if not self.alternatives or self.searched:
            return self.left
        reason = "it is what another build's fit chose; layers are counted otherwise here"
        return (*self.left, *(Left(f"{name}, {WHAT}", reason) for name in sorted(others)))


def placements_of(ctx: Context, base: Plan, kept: Collection[str]) -> Placements:
    """What to try beside the present placement.

    Args:
        ctx: Where.
        base: What serves.
        kept: Keys that stay as they are.
    """
    by_hand = keys_by_hand(base.resolved)
    reason = _why_not(base, by_hand, kept)
    if reason is not None:
        return Placements(left=(Left(WHAT, reason),))
    if by_hand:
        return _back_to_fit(by_hand)
    found = _frozen(ctx, base)
    if not isinstance(found, Frozen):
        return Placements(left=(Left(WHAT, found),))
    text = (
        f"speculation on and off are also compared with one placement, {found.text}: what fit chose, "
        f"as {found.found_by} says"
    )
    if found.remark:
        text = f"{text}; {found.remark}"
    pairs = frozenset(found.values.items())
    return Placements((pairs,), messages=(note("frozen-placement", text),))


def is_found_by_tunerd(base: Plan, keys: Collection[str]) -> bool:
    """Whether keys were set by nobody but an earlier promotion."""
    settings = [base.resolved.settings[key] for key in keys]
    return all(one.origin.layer is Layer.TUNED and not one.replaced for one in settings)


def _why_not(base: Plan, by_hand: Collection[str], kept: Collection[str]) -> str | None:
    if not base.has_gpu:
        return "there is no GPU: everything lies in RAM, with speculation and without"
    pinned = sorted((PLACEMENT_KEYS | {FIT, "memory.fit"}) & set(kept))
    if pinned:
        return f"{pinned[0]} is pinned"
    capabilities, memory = base.engine.capabilities, base.resolved.profile.memory
    if by_hand and not is_found_by_tunerd(base, by_hand):
        return f"it is placed by hand already: {', '.join(by_hand)}"
    if capabilities is None or capabilities.fit is FitStyle.NONE:
        return f"{base.engine.name} has no placement of its own that could be frozen"
    if by_hand:
        return None
    asks_for_fit = memory.fit is True or memory.fit_mib is not None
    if memory.fit is False or not (asks_for_fit or capabilities.fit_default_on):
        return "it is served without fit"
    if capabilities.first_of("--n-gpu-layers", "--gpu-layers") is None:
        return f"{base.engine.name} has no flag for layers on the GPU"
    return None


def _back_to_fit(by_hand: Collection[str]) -> Placements:
    """An earlier promotion froze it: fit is the alternative."""
    pairs = frozenset((key, LEFT_TO_FIT) for key in by_hand)
    text = f"fit is tried again beside the placement that an earlier sweep found ({', '.join(by_hand)})"
    return Placements((pairs,), frozenset(by_hand), messages=(note("fit-again", text),))


def _frozen(ctx: Context, base: Plan) -> Frozen | str:
    """What fit chose, from the log of the running server, else as the memory estimate says."""
    capabilities, profile = base.engine.capabilities, base.resolved.profile
    if capabilities is not None:
        laws = laws_of(capabilities.family, capabilities.dialect)
        uses_mtp = profile.speculation.type == "mtp"
        said = read_fit(_lines(ctx))
        told = frozen_from_log(said, base.facts, laws, uses_mtp=uses_mtp)
        if told is not None:
            return told
    draft = draft_facts(ctx, base.resolved, base.command)
    settings = settings_of(base.resolved, base.engine, draft, base.host, has_gpu=True)
    free = next((one.free_mib for one in base.memory.devices if one.name == "gpu0"), None)
    margin = profile.memory.fit_mib if profile.memory.fit_mib is not None else _USUAL_MARGIN_MIB
    return frozen_from_estimate(base.facts, settings, free, margin)


def _lines(ctx: Context) -> tuple[str, ...]:
    try:
        state = ctx.services.state(ctx.unit)
        if not state.is_active or state.invocation_id is None:
            return ()
        return tuple(
            ctx.services.log(ctx.unit, invocation_id=state.invocation_id, max_lines=LOAD_LINES)
        )
    except TunerdError:
        return ()
