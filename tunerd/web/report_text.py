"""How figures read: units, digits, and None where there is no figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

MISSING = "missing"
NO_BREAK = "\u00a0"
NOT_ASKED = "n/a"
"""Where a figure cannot be: nothing is missing."""
_MS_PER_S = 1000


def figure(value: float | None, digits: int = 1) -> str | None:
    """`1,234.5`; None where there is none."""
    return None if value is None else f"{value:,.{digits}f}"


def percent(ratio: float | None, digits: int = 1) -> str | None:
    """`87.5 %`, in one line; None where there is none."""
    return None if ratio is None else f"{ratio * 100:.{digits}f}{NO_BREAK}%"


def seconds(ms: float | None, digits: int = 1) -> str | None:
    """Milliseconds as seconds, without the unit."""
    return None if ms is None else figure(ms / _MS_PER_S, digits)


def tokens(n: float | None) -> str | None:
    """`43,000`; None where there is none."""
    return None if n is None else f"{n:,.0f}"


def span(low: float | None, high: float | None, digits: int = 1) -> str | None:
    """`39.1 to 48.9`; None where an end is missing."""
    if low is None or high is None:
        return None
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def when(at_s: float) -> str:
    """A time for people, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%-d %B %Y, %H:%M UTC")


def counted(n: int, one: str, many: str | None = None) -> str:
    """`1 sample`, `5 samples`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def joined(words: Iterable[str], last: str = "and") -> str:
    """`a, b and c`."""
    known = list(words)
    if len(known) < 2:  # noqa: PLR2004
        return "".join(known)
    return f"{', '.join(known[:-1])} {last} {known[-1]}"


def or_missing(text: str | None) -> str:
    """The text, or the word for none."""
    return MISSING if text is None else text


def sentence(parts: Sequence[str]) -> str:
    """Parts as one sentence with its full stop; names such as `ik-b4400` keep their small letter."""
    text = " ".join(part for part in parts if part)
    is_word = text.split(" ", 1)[0].rstrip(":,").isalpha()
    begin = text[:1].upper() if is_word else text[:1]
    return begin + text[1:] + ("" if text.endswith((".", "?")) else ".")
