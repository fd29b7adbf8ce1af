"""Tells how swaps ended: those who did not make them look at no terminal then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.guard_margin import REASON, is_raise
from tunerd.core.generation import Generation, HistoryEntry, Outcome
from tunerd.core.telemetry.history import Event
from tunerd.errors import HostError, TunerdError


class Swaps:
    """Tells of each swap that ends while this looks, once.

    Args:
        ctx: Where.
        tell: Takes what a person should hear once.
    """

    def __init__(self, ctx: Context, tell: Callable[[Event], None]) -> None:
        self._ctx = ctx
        self._tell = tell
        self._newest: int | None = None
        self._open: set[int] = set()
        with contextlib.suppress(HostError):
            self._begin()

    def look(self) -> None:
        """Tell of those that have ended since the last call.

        Raises:
            HostError: the generations cannot be read.
        """
        if self._newest is None:
            self._begin()
            return
        generations = self._ctx.generations
        numbers = generations.numbers()
        self._open |= {one for one in numbers if one > self._newest}
        self._newest = max(numbers, default=0)
        for number in sorted(self._open):
            entry = generations.find(number)
            # The newest may be about to be written, or under way.
            is_over = number != self._newest if entry is None else not _runs(entry)
            if is_over:
                self._open.discard(number)
            if is_over and entry is not None and entry.generation.unit == self._ctx.unit:
                self._say(entry)

    def _begin(self) -> None:
        """What stands there is known; the newest may be under way."""
        numbers = self._ctx.generations.numbers()
        newest = self._ctx.generations.find(numbers[0]) if numbers else None
        self._open = {numbers[0]} if newest is not None and _runs(newest) else set()
        self._newest = max(numbers, default=0)

    def _say(self, entry: HistoryEntry) -> None:
        made, ending = entry.generation, entry.ending
        what = f"generation {made.number} ({made.reason})"
        why = f": {ending.cause}" if ending.cause else ""
        hint = f"`tunerd history show {made.number}`"
        if is_raise(made):
            return  # the guard that did it tells of it
        if ending.outcome is Outcome.STRANDED:
            self._event("swap-stranded", "error", f"{what} does not serve, and what was there before "
                        f"could not be brought back{why}", "`tunerd recover`; `tunerd status`")  # fmt: skip
        elif ending.outcome is Outcome.ROLLED_BACK:
            text = f"{what} did not serve, and what was there before serves again{why}"
            self._event("swap-undone", "warning", text, hint)
        elif ending.outcome is Outcome.ABANDONED:
            text = f"{what} was cut short, and its unit was edited since: it is left as it stands"
            self._event("swap-abandoned", "warning", text, hint)
        elif made.reason == REASON:
            text = f"the server did worse in service and was taken back, {what} serves"
            self._event("taken-back", "warning", f"{text}{self._why_taken_back(made)}", hint)
        elif ending.outcome is Outcome.REMOVED:
            self._event("swap", "note", f"{what} took the unit away; nothing serves", hint)
        else:
            by = f", asked for by {made.requested_by}" if made.requested_by else ""
            self._event("swap", "note", f"{what} serves{by}", hint)

    def _why_taken_back(self, made: Generation) -> str:
        """What the probation of the one before found; empty where that cannot be read."""
        path = self._ctx.paths.state_dir / "probation" / f"{made.number - 1}.json"
        try:
            record: Any = self._ctx.files.read_json(path)
        except TunerdError:
            return ""
        reason = record.get("reason") if isinstance(record, dict) else None
        return f": {reason}" if isinstance(reason, str) else ""

    def _event(self, kind: str, level: str, text: str, hint: str | None) -> None:
        self._tell(Event(self._ctx.clock.now_s(), kind, level, text, hint))


def _runs(entry: HistoryEntry) -> bool:
    return entry.ending.outcome is Outcome.RUNNING
