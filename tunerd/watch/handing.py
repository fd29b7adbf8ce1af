"""Sees to it that evidence is handed in to the shared store, by a unit of its own: the daemon knows no database."""

from __future__ import annotations

from collections.abc import Callable

from tunerd.app import Context
from tunerd.errors import TunerdError
from tunerd.machine.files import is_locked
from tunerd.production.own import OwnUnit, start_own_unit
from tunerd.production.status import HandedIn
from tunerd.units.manager import UP
from tunerd.watch.figures import Event

HAND_IN_UNIT = "tunerd-hand-in.service"
EVERY_S = 600.0
"""How often the shared store hears of this box; also how soon it has what it lacks."""
_LOOK_S = 15.0
_NO_WORD = "the command that does it ended without a word"


class HandIns:
    """Has evidence handed in after each measurement, and every so often.

    Args:
        ctx: Where.
        tell: Takes what a person should hear once.
    """

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        self._ctx = ctx
        self._tell = tell
        self._measures = False
        self._runs = False
        self._is_due = True
        self._begun_s = 0.0
        self._before: HandedIn | None = None
        self._said: str | None = None

    def take_over(self, ctx: Context) -> None:
        """Go by other settings from now on."""
        self._ctx = ctx

    def look(self) -> float:
        """Begin what is due, and see how the last one ended; how long to wait until the next look [s]."""
        if self._ctx.settings.store.url is None:
            return EVERY_S
        has_measured, self._measures = self._measures, is_locked(self._ctx.paths.measure_lock)
        now_s = self._ctx.clock.monotonic_s()
        self._is_due |= has_measured and not self._measures
        self._is_due |= now_s - self._begun_s >= EVERY_S
        try:
            self._look_at_unit()
            if self._is_due and not self._runs:
                self._is_due, self._begun_s = False, now_s
                self._before = self._ctx.files.recall(HandedIn, self._ctx.paths.handed_in)
                what = "hands evidence in to the shared store"
                words = ["fleet", "hand-in"]
                start_own_unit(self._ctx, OwnUnit(HAND_IN_UNIT, what, words, is_told=True))
                self._runs = True
        except TunerdError as problem:
            self._say(problem.words)
        return _LOOK_S

    def _look_at_unit(self) -> None:
        state = self._ctx.services.state(HAND_IN_UNIT)
        has_run, self._runs = self._runs, state.active_state in UP
        if not has_run or self._runs:
            return
        now = self._ctx.files.recall(HandedIn, self._ctx.paths.handed_in)
        is_told = now is not None and (now.problem is not None or now != self._before)
        self._say(now.problem if now is not None and is_told else _NO_WORD)

    def _say(self, problem: str | None) -> None:
        """Tell of a problem once, until it is another one, or over."""
        if problem is not None and problem != self._said:
            text = f"evidence is not handed in to the shared store, and is kept here: {problem}"
            now_s = self._ctx.clock.now_s()
            self._tell(Event(now_s, "hand-in-failed", "warning", text, "tunerd fleet hand-in"))
        self._said = problem
