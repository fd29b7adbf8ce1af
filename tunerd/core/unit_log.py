"""The log file of a supervised unit: its own lines, and marks that say whose they are.

A mark is a line that begins with the record separator (U+001E), which no server prints:

    <RS>2026-11-21T05:24:00Z 0f3c...(32 hex) Started, pid 4711
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

MARK = "\x1e"
_MARK_LINE = re.compile(rf"{MARK}(\S+) ([0-9a-f]{{32}}) (.*)")


@dataclass(frozen=True, slots=True)
class LogSpan:
    """What a unit wrote since a moment, oldest first.

    `begins_s` is when the first of these lines was written, or at the latest [seconds since the
    epoch]; None where that is not known, or there is none. `is_cut` says that there are older ones
    since that moment, too many to be read.
    """

    lines: tuple[str, ...]
    begins_s: float | None
    is_cut: bool = False


def mark(time: str, invocation_id: str, text: str) -> str:
    """A mark as it stands in the file, with its line end."""
    return f"{MARK}{time} {invocation_id} {' '.join(text.split())}\n"


def log_lines(text: str, *, unit: str, invocation_id: str | None = None) -> tuple[str, ...]:
    """The lines of a log, oldest first; only those of one start if that is named.

    Marks become lines that begin with the unit's name, as in systemd's journal. Lines before the
    first mark belong to a start whose mark was cut off.
    """
    lines: list[str] = []
    current: str | None = None
    for line in text.removesuffix("\n").split("\n") if text else ():
        found = _MARK_LINE.fullmatch(line)
        if found is not None:
            current = found.group(2)
        if invocation_id is None or current == invocation_id:
            lines.append(line if found is None else f"{unit}: {found.group(3)}")
    return tuple(lines)


def log_span(text: str, *, unit: str, since_s: float, max_lines: int) -> LogSpan:
    """The lines of a log since a moment; only its marks have times.

    So what was written after the last mark before that moment counts as a whole: a server's life is
    not cut in two.
    """
    lines = text.removesuffix("\n").split("\n") if text else []
    times = [
        (at, time_s) for at, line in enumerate(lines) if (time_s := _time_of(line)) is not None
    ]
    before = [(at, time_s) for at, time_s in times if time_s <= since_s]
    first, begins_s = before[-1] if before else (0, times[0][1] if times else None)
    kept = log_lines("\n".join(lines[first:]), unit=unit)
    return LogSpan(kept[max(0, len(kept) - max_lines) :], begins_s, len(kept) > max_lines)


def _time_of(line: str) -> float | None:
    found = _MARK_LINE.fullmatch(line)
    try:
        return None if found is None else datetime.fromisoformat(found.group(1)).timestamp()
    except ValueError:
        return None
