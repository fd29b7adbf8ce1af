"""Sees to it that evidence is handed in to the shared store, by a unit of its own: the daemon knows no database."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tunerd.app import Context
from tunerd.errors import TunerdError
from tunerd.machine.files import is_locked
from tunerd.production.own import OwnUnit, start_own_unit
from tunerd.production.status import HandedIn
from tunerd.units.manager import UP
from tunerd.watch.figures import Event
from tunerd.watch.notices import Teller

HAND_IN_UNIT = "tunerd-hand-in.service"
EVERY_S = 600.0
"""How often the shared store hears of this box; also how soon it has what it lacks."""
_LOOK_S = 15.0
_NO_WORD = "the command that does it ended without a word"


class HandIns(Teller):
    """Has evidence handed in after each measurement, and every so often."""

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        super().__init__(ctx, tell)
        self._runs = False
        self._begun_s: float | None = None
        self._seen = self._handed = self._stamp()
        self._before: HandedIn | None = None

    def look(self) -> float:
        """Begin what is due, and see how the last one ended; how long to wait until the next look [s]."""
        if self._ctx.settings.store.url is None:
            return EVERY_S
        now_s = self._ctx.clock.monotonic_s()
        seen, self._seen = self._seen, self._stamp()
        # What is being written goes on, and a measurement is not disturbed.
        is_over = seen == self._seen and not is_locked(self._ctx.paths.measure_lock)
        is_late = self._begun_s is None or now_s - self._begun_s >= EVERY_S
        try:
            self._look_at_unit()
            if not self._runs and (is_late or (is_over and self._seen != self._handed)):
                self._begun_s, self._handed = now_s, self._seen
                self._before = self._ctx.files.recall(HandedIn, self._ctx.paths.handed_in)
                what = "hands evidence in to the shared store"
                words = ["fleet", "hand-in"]
                start_own_unit(self._ctx, OwnUnit(HAND_IN_UNIT, what, words, is_told=True))
                self._runs = True
        except TunerdError as problem:
            self._say(problem.words)
        return _LOOK_S

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        """How the evidence's files look: another stamp after anything was stored."""
        path = self._ctx.paths.evidence
        found = []
        for one in (path, path.with_name(f"{path.name}-wal")):
            with contextlib.suppress(OSError):
                found.append((one.stat().st_mtime_ns, one.stat().st_size))
        return tuple(found)

    def _look_at_unit(self) -> None:
        state = self._ctx.services.state(HAND_IN_UNIT)
        has_run, self._runs = self._runs, state.active_state in UP
        if not has_run or self._runs:
            return
        now = self._ctx.files.recall(HandedIn, self._ctx.paths.handed_in)
        is_told = now is not None and (now.problem is not None or now != self._before)
        self._say(now.problem if now is not None and is_told else _NO_WORD)

    def _say(self, problem: str | None) -> None:
        if problem is None:
            self._said.clear()
            return
        text = f"evidence is not handed in to the shared store, and is kept here: {problem}"
        self._once(problem, "hand-in-failed", "warning", text, "tunerd fleet hand-in")
