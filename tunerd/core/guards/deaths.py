"""The server dies again and again, or is not started any more: for whatever reason, somebody should hear it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tunerd.core.guards.decision import Act, Decision
from tunerd.core.guards.oom import Death
from tunerd.core.telemetry.history import Event

DIES, FAILED, BACK = "server-dies", "server-failed", "server-back"
_LEAST_DEATHS = 2
# Deaths that are further apart are not one loop; as long without one, and it is over.
_WINDOW_S = 1800.0


@dataclass(frozen=True, slots=True)
class DeathsState:
    """When it died lately, and what was told last; empty where all is well."""

    deaths_s: tuple[float, ...] = ()
    said: str = ""


def recalled(told: Iterable[Event]) -> DeathsState:
    """The state of a daemon that takes over.

    Args:
        told: What daemons before it told, newest first.
    """
    newest = next((event for event in told if event.kind in {DIES, FAILED, BACK}), None)
    if newest is None or newest.kind == BACK:
        return DeathsState()
    return DeathsState((newest.at_s,), newest.kind)


def look_at_death(state: DeathsState, death: Death) -> tuple[DeathsState, Decision | None]:
    """Take a death into account."""
    recent = tuple(at_s for at_s in state.deaths_s if 0 <= death.at_s - at_s <= _WINDOW_S)
    state = replace(state, deaths_s=(*recent, death.at_s))
    evidence = f"{death.kind}: {death.words}" if death.words else str(death.kind)
    hint = "`tunerd doctor`; `tunerd rollback` goes back to what served before"
    if death.has_given_up:
        if state.said == FAILED:
            return state, None
        text = "the server died, and nothing starts it any more"
        return replace(state, said=FAILED), Decision(
            FAILED, Act.NOTHING, "error", text, evidence, hint
        )
    if len(state.deaths_s) < _LEAST_DEATHS or state.said:
        return state, None
    text = f"the server died {len(state.deaths_s)} times within half an hour, and is started again"
    return replace(state, said=DIES), Decision(DIES, Act.NOTHING, "warning", text, evidence, hint)


def look(state: DeathsState, at_s: float, *, is_ready: bool) -> tuple[DeathsState, Decision | None]:
    """Take a look into account: that it serves again is told once."""
    if not state.said or not is_ready:
        return state, None
    last_s = max(state.deaths_s, default=at_s)
    if state.said == DIES and 0 <= at_s - last_s <= _WINDOW_S:
        return state, None
    text = "the server serves again" if state.said == FAILED else "the server stays up again"
    return DeathsState(), Decision(BACK, Act.NOTHING, "note", text, "it says that it is ready")
