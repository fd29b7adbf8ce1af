"""The log file of a supervised unit: its own lines, and marks that say whose they are.

A mark is a line that begins with the record separator (U+001E), which no server prints:

    <RS>2026-11-21T05:24:00Z 0f3c...(32 hex) Started, pid 4711
"""

from __future__ import annotations

import re

MARK = "\x1e"
_MARK_LINE = re.compile(rf"{MARK}\S+ ([0-9a-f]{{32}}) (.*)")


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
            current = found.group(1)
        if invocation_id is None or current == invocation_id:
            lines.append(line if found is None else f"{unit}: {found.group(2)}")
    return tuple(lines)
