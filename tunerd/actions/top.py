"""`tunerd top`: the essentials now, from looks of its own; it needs no daemon, and uses its history."""

from __future__ import annotations

from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.telemetry import history
from tunerd.actions.watch import Watcher
from tunerd.core.result import ActionResult, Message, warning
from tunerd.core.telemetry.reading import Reading, Served

_RECENT_S = 900


class Top:
    """Looks, one after the other; speeds of the last quarter of an hour come from the history."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._watcher = Watcher(ctx)
        self._last: Served | None = None

    def look(self) -> ActionResult:
        """One look.

        The payload has the reading, and `speeds`: of the work between the last two looks that saw any,
        else of the last quarter of an hour that the daemon kept, else null.
        """
        reading = self._watcher.look()
        served = reading.engine.served
        if served is not None and served.n_predicted:
            self._last = served
        since = "between two looks"
        known = self._last
        if known is None:
            since, known = "in the last 15 min", self._recent(reading.at_s)
        payload = {**reading.to_json(), "speeds": None if known is None else _speeds(known, since)}
        return ActionResult("top", payload, _messages(reading))

    def _recent(self, now_s: float) -> Served | None:
        kept = history(self._ctx, now_s - _RECENT_S, now_s, step_s=_RECENT_S, events=0)
        worked = [point.served for point in kept.points if point.n_predicted]
        return worked[-1] if worked else None


def _speeds(served: Served, since: str) -> dict[str, Any]:
    return {
        "since": since,
        "decode_tok_s": served.decode_tok_s,
        "prompt_tok_s": served.prompt_tok_s,
        "acceptance_ratio": served.acceptance_ratio,
        "reused_ratio": served.reused_ratio,
        "n_predicted": served.n_predicted,
    }


def _messages(reading: Reading) -> tuple[Message, ...]:
    found = []
    if reading.gpu_problem is not None:
        found.append(warning("gpu", reading.gpu_problem, "`tunerd doctor`"))
    if reading.engine.active_state == "failed":
        found.append(
            warning("failed", f"the unit has failed ({reading.engine.result})", "`tunerd doctor`")
        )
    return tuple(found)
