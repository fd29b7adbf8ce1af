"""Looks again and again: less often while the server works, and so that nobody pays for a look twice."""

from __future__ import annotations

from collections.abc import Callable

from tunerd.actions.context import Context
from tunerd.actions.telemetry import HistoryKeeper, Telemetry
from tunerd.actions.watch import Watcher
from tunerd.core.telemetry.history import Event
from tunerd.core.telemetry.pace import Pace
from tunerd.core.telemetry.reading import Reading
from tunerd.system.llama import LlamaServer

TIDY_S = 6 * 3600.0


class Watching:
    """Readings into the ring and the history.

    Args:
        ctx: Where.
        telemetry: Who keeps the readings of the last hour.
        tell: Takes what a person should hear once.
    """

    def __init__(self, ctx: Context, telemetry: Telemetry, tell: Callable[[Event], None]) -> None:
        settings = ctx.settings.daemon
        self._ctx = ctx
        self._telemetry = telemetry
        self._tell = tell
        self._watcher = Watcher(ctx)
        self._pace = Pace(settings.every_s, settings.busy_every_s)
        self.keeper = HistoryKeeper(ctx)
        self.wait_s = settings.every_s

    def begin(self) -> None:
        """Open the history."""
        self.keeper.begin()
        self._hand_on()

    def server(self) -> LlamaServer | None:
        """The server as the last look reached it; None where it did not."""
        return self._watcher.server()

    def look(self) -> Reading:
        """One look; `wait_s` is then how long to wait until the next."""
        reading = self._watcher.look()
        self._telemetry.add(reading)
        self.keeper.add(reading)
        self._hand_on()
        self.wait_s = self._pace.next_s(self.wait_s, is_busy=reading.engine.is_busy)
        return reading

    def tidy(self) -> None:
        """Housekeeping of the history."""
        self.keeper.tidy()
        self._hand_on()

    def close(self) -> None:
        """Write what was gathered."""
        self.keeper.close()
        self._hand_on()

    def _hand_on(self) -> None:
        for event in self.keeper.told():
            self._tell(event)
