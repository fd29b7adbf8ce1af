"""Durations as systemd writes them."""

from __future__ import annotations

import re

_MINUTE_S = 60.0
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S
_UNITS_S = {
    "": 1.0,
    **dict.fromkeys(("us", "usec", "µs", "μs"), 1e-6),
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), _MINUTE_S),
    **dict.fromkeys(("h", "hr", "hour", "hours"), _HOUR_S),
    **dict.fromkeys(("d", "day", "days"), _DAY_S),
    **dict.fromkeys(("w", "week", "weeks"), 7 * _DAY_S),
    **dict.fromkeys(("M", "month", "months"), 30.44 * _DAY_S),
    **dict.fromkeys(("y", "year", "years"), 365.25 * _DAY_S),
}
_PART = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµμ]*)\s*")


def parse_time_span(text: str) -> float | None:
    """Seconds of `90`, `1min 30s`, `250ms`; `infinity` is an infinite number.

    Returns:
        None where it is no duration.
    """
    if text.strip() == "infinity":
        return float("inf")
    total_s, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part.group(2) not in _UNITS_S:
            return None
        total_s += float(part.group(1)) * _UNITS_S[part.group(2)]
        at = part.end()
    return total_s if at else None
