"""Begins nights: the sweep's own unit, when the window opens."""

from __future__ import annotations

from collections.abc import Callable

from tunerd.actions.context import Context
from tunerd.actions.own_unit import SWEEP_UNIT
from tunerd.actions.schedule import begin_night, next_openings
from tunerd.core.telemetry.history import Event
from tunerd.errors import TunerdError

# Time zones and settings are looked at again at least so often.
LONGEST_WAIT_S = 900.0
_LEAST_WAIT_S = 1.0


class Nights:
    """Begins each night once.

    Args:
        ctx: Where.
        tell: Takes what a person should hear once.
    """

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        self._ctx = ctx
        self._tell = tell
        self._said = ""

    def look(self) -> float:
        """Begin a night that is due; how long to wait until the next look [s]."""
        try:
            found = next_openings(self._ctx, most=2)
            now_s = self._ctx.clock.now_s()
            due = next((one for one in found if one.is_due(now_s)), None)
            if due is not None:
                self._event("night", "note", f"the window is open: {SWEEP_UNIT} begins", None)
                begin_night(self._ctx, due)
                return LONGEST_WAIT_S
        except TunerdError as problem:
            self._say_once(problem)
            return LONGEST_WAIT_S
        following = next((one.span.begin_s for one in found if one.span.begin_s > now_s), None)
        if following is None:
            return LONGEST_WAIT_S
        return min(max(following - now_s, _LEAST_WAIT_S), LONGEST_WAIT_S)

    def _say_once(self, problem: TunerdError) -> None:
        if problem.message != self._said:
            self._said = problem.message
            cause = f": {problem.cause}" if problem.cause else ""
            self._event("night-failed", "error", f"{problem.message}{cause}", problem.hint)

    def _event(self, kind: str, level: str, text: str, hint: str | None) -> None:
        self._tell(Event(self._ctx.clock.now_s(), kind, level, text, hint))
