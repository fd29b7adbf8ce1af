"""When a sweep may run: a window of the local clock on some days, with summer time taken as it comes.

A window ends hard: production must serve again by then, so what may be measured ends earlier by the
time that production's own load takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta, tzinfo
from enum import StrEnum
from itertools import chain
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = r"\s*([01]?\d|2[0-4]):([0-5]\d)\s*"
_TIMES = re.compile(f"{_TIME}-{_TIME}")
_LOOK_AHEAD_DAYS = 15
_DAY = timedelta(days=1)
# A load is slower when the model has left the page cache meanwhile.
_LOAD_SLACK = 1.5
_LEAST_RESERVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Window:
    """`begin` and `end` are times of the local clock; an end before the begin is on the next day.

    `days` are the weekdays (0 is Monday) on which it begins.
    """

    begin: time
    end: time
    days: frozenset[int]
    zone: tzinfo


@dataclass(frozen=True, slots=True)
class Span:
    """One opening of a window, in seconds since the epoch."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it really is: a night in which clocks change is an hour longer or shorter."""
        return self.end_s - self.begin_s


def parse_window(text: str, days: str, zone: str) -> Window:
    """The window of `01:00-06:30`, `mon-fri,sun` and `Europe/Berlin`.

    Raises:
        ValueError: one of them is none.
    """
    found = _TIMES.fullmatch(text)
    if found is None:
        raise ValueError("two times of day, such as 01:00-06:30")
    hours = [int(part) for part in found.groups()]
    # Half past 24 is half past midnight: files that say so must stay good over an upgrade.
    begin, end = time(hours[0] % 24, hours[1]), time(hours[2] % 24, hours[3])
    if begin == end:
        raise ValueError("two different times of day, such as 01:00-06:30")
    return Window(begin, end, _days(days), zone_named(zone))


def zone_named(name: str) -> tzinfo:
    """The time zone of this name; UTC is known on machines without the package tzdata too.

    Raises:
        ValueError: there is none.
    """
    if name in {"UTC", "Etc/UTC"}:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"the name of a time zone, such as Europe/Berlin, not `{name}` (without the package tzdata only UTC is known)"
        ) from error


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        first, dash, last = part.strip().partition("-")
        if first == "daily" and not dash:
            found |= set(range(7))
            continue
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError("days such as daily, mon-fri or sat,sun")
        start, stop = DAYS.index(first), DAYS.index(last or first)
        found |= {(start + at) % 7 for at in range((stop - start) % 7 + 1)}
    return frozenset(found)


def spans(window: Window, after_s: float) -> Iterator[Span]:
    """Openings that end after a moment, the earliest first; one under way is the first."""
    day = datetime.fromtimestamp(after_s, window.zone).date() - _DAY
    for _ in range(_LOOK_AHEAD_DAYS + 1):
        if day.weekday() in window.days:
            last = day + _DAY if window.end <= window.begin else day
            begin_s = datetime.combine(day, window.begin, window.zone).timestamp()
            end = datetime.combine(last, window.end, window.zone)
            # Of a time that occurs twice, or not at all, the earlier one: production must serve by then.
            end_s = min(end.timestamp(), end.replace(fold=1).timestamp())
            if end_s > max(after_s, begin_s):
                yield Span(begin_s, end_s)
        day += _DAY


def open_span(window: Window, now_s: float) -> Span | None:
    """The opening under way; None while the window is closed."""
    first = next(spans(window, now_s), None)
    return first if first is not None and first.begin_s <= now_s else None


@dataclass(frozen=True, slots=True)
class Deadline:
    """When production must serve again [s since the epoch], and what its return may take until then [s].

    `text` is the window that it ends, for people; `begin_s` when that opened.
    """

    end_s: float
    reserve_s: float
    text: str
    begin_s: float = 0.0

    def measuring_s(self, now_s: float) -> float:
        """How long something may still be measured; never below 0."""
        left_s = 0.0 if is_ahead(self.begin_s, now_s) else self.end_s - self.reserve_s - now_s
        return max(0.0, left_s)

    def is_over(self, now_s: float) -> bool:
        """Whether production has to be on its way back."""
        return self.measuring_s(now_s) <= 0


def reserve_s(load_s: float, *, drain_s: float, deploys: bool, port_wait_s: float) -> float:
    """What the end of a window is kept free for [s].

    Args:
        load_s: The time that production takes to load, as far as it is known [s].
        drain_s: The longest wait for requests under way before production is stopped [s].
        deploys: Whether a winner is deployed at the end, which is one more load.
        port_wait_s: How long the port may stay taken before each load [s], where candidates run another build.
    """
    n_loads = 2 if deploys else 1
    return drain_s + n_loads * (_LOAD_SLACK * load_s + _LEAST_RESERVE_S + port_wait_s)


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


# An opening that is older when it is first seen was missed: the machine slept, or was off.
_ON_TIME_S = 600.0


class Missed(StrEnum):
    """What becomes of a night whose beginning was missed."""

    LATE = "late"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered: when the opening of the last night began, and of the one to be skipped.

    At `asked_s` the next one was asked for, on whatever day it is.
    """

    last_begin_s: float | None = None
    skip_begin_s: float | None = None
    asked_s: float | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """An opening of the window, and what is to become of it."""

    span: Span
    is_skipped: bool = False

    def is_due(self, now_s: float) -> bool:
        """Whether a night may begin now."""
        return not self.is_skipped and self.span.begin_s <= now_s < self.span.end_s


def openings(
    window: Window, memory: Memory, now_s: float, *, missed: Missed, least_s: float, most: int = 1
) -> tuple[Opening, ...]:
    """The next openings in which there is or would be a night, skipped ones among them.

    Args:
        window: When.
        memory: Of nights before.
        now_s: Seconds since the epoch.
        missed: What becomes of one whose beginning was missed.
        least_s: One must be at least so long, and what is left of one whose beginning was missed [s].
        most: How many.
    """
    found: list[Opening] = []
    every_day = replace(window, days=frozenset(range(len(DAYS))))
    tonight = next(spans(every_day, now_s)) if memory.asked_s is not None else None
    first = () if tonight is None else (tonight,)
    for span in chain(first, (one for one in spans(window, now_s) if one != tonight)):
        if len(found) >= most:
            break
        if _is_same(span.begin_s, memory.last_begin_s):
            continue
        is_late = now_s - span.begin_s > _ON_TIME_S
        if span.end_s - (now_s if is_late else span.begin_s) < least_s:
            continue
        if missed is Missed.SKIP and is_late:
            continue
        found.append(Opening(span, is_skipped=_is_same(span.begin_s, memory.skip_begin_s)))
    return tuple(found)


def is_ahead(begun_s: float, now_s: float) -> bool:
    """Whether what has begun lies in the future: the clock was set back by more than it may be corrected."""
    return begun_s - now_s > _ON_TIME_S


def _is_same(one_s: float, other_s: float | None) -> bool:
    """The same opening, though the clock's zone was told otherwise by some minutes meanwhile."""
    return other_s is not None and abs(one_s - other_s) < _ON_TIME_S
