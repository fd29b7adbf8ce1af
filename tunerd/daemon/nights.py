"""Begins nights: the sweep's own unit, when the window opens; tells how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tunerd.actions.context import Context
from tunerd.actions.own_unit import SWEEP_UNIT
from tunerd.actions.schedule import begin_night, next_openings
from tunerd.core.schedule import Opening
from tunerd.core.telemetry.history import Event
from tunerd.errors import TunerdError

# Time zones and settings are looked at again at least so often.
LONGEST_WAIT_S = 900.0
# After what may pass by itself; sooner than an opening counts as missed.
RETRY_S = 120.0
_LEAST_WAIT_S = 1.0
# While a sweep runs: how late its end is told at most.
_RUNS_S = 60.0
_LOG_LINES = 60
_UP = {"active", "activating", "deactivating"}
# The line that `tunerd sweep night` prints after the sentence of its verdict.
_COUNTED = re.compile(r"sweep \d+: \d+ configurations")
_COMPARED = re.compile(r"run \d+: \d+ pairs in ")


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
        self._runs = False

    def look(self) -> float:
        """Begin a night that is due; how long to wait until the next look [s]."""
        wait_s = self._look_at_window()
        self._look_at_sweep()
        return min(wait_s, _RUNS_S) if self._runs else wait_s

    def _look_at_window(self) -> float:
        try:
            found = next_openings(self._ctx, most=2)
            now_s = self._ctx.clock.now_s()
            due = next((one for one in found if one.is_due(now_s)), None)
            if due is not None:
                self._begin(due)
                return LONGEST_WAIT_S
        except TunerdError as problem:
            self._say_once(problem)
            return RETRY_S
        self._said = ""
        following = next((one.span.begin_s for one in found if one.span.begin_s > now_s), None)
        if following is None:
            return LONGEST_WAIT_S
        return min(max(following - now_s, _LEAST_WAIT_S), LONGEST_WAIT_S)

    def _begin(self, due: Opening) -> None:
        if begin_night(self._ctx, due):
            self._said = ""
            self._event("night", "note", f"the window is open: {SWEEP_UNIT} began", None)
        else:
            text = f"the window is open, and {SWEEP_UNIT} runs already: no other night begins"
            self._event("night", "note", text, None)

    def _look_at_sweep(self) -> None:
        """A sweep that ran at the last look and does not now has ended."""
        try:
            state = self._ctx.services.state(SWEEP_UNIT)
            has_run, self._runs = self._runs, state.active_state in _UP
            if has_run and not self._runs:
                lines = self._ctx.services.log(
                    SWEEP_UNIT, invocation_id=state.invocation_id, max_lines=_LOG_LINES
                )
                self._say_end(state.result, lines)
        except TunerdError as problem:
            self._say_once(problem)

    def _say_end(self, result: str, lines: Sequence[str]) -> None:
        if result == "success" and any(_COMPARED.match(line) for line in lines):
            text = "the night compared the build before with the one after an upgrade"
            self._event("sweep-over", "note", text, "`tunerd results list`")
            return
        if result == "success":
            counted = [at for at, line in enumerate(lines) if at and _COUNTED.match(line)]
            said = f": {lines[counted[-1] - 1]}" if counted else ""
            self._event("sweep-over", "note", f"the sweep is over{said}", "`tunerd sweep report`")
            return
        why = next((line for line in reversed(lines) if line.startswith("error:")), result)
        text = f"the sweep failed ({why})"
        self._event(
            "sweep-failed", "error", text, f"journalctl -u {SWEEP_UNIT}; `tunerd sweep status`"
        )

    def _say_once(self, problem: TunerdError) -> None:
        if problem.message != self._said:
            self._said = problem.message
            cause = f": {problem.cause}" if problem.cause else ""
            self._event("night-failed", "error", f"{problem.message}{cause}", problem.hint)

    def _event(self, kind: str, level: str, text: str, hint: str | None) -> None:
        self._tell(Event(self._ctx.clock.now_s(), kind, level, text, hint))
