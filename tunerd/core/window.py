"""When a sweep may run: a window of the local clock on some days, with summer time taken as it comes.

A window ends hard: production must serve again by then, so what may be measured ends earlier by the
time that production's own load takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIMES = re.compile(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*")
_LOOK_AHEAD_DAYS = 15
_DAY = timedelta(days=1)
# A load is slower when the model has left the page cache meanwhile.
_LOAD_SLACK = 1.5
_LEAST_RESERVE_S = 5.0
# Linux keeps the port of ended connections for a minute (TIME_WAIT).
_PORT_S = 65.0


@dataclass(frozen=True, slots=True)
class Window:
    """`begin` and `end` are times of the local clock; an end before the begin is on the next day.

    `days` are the weekdays (0 is Monday) on which it begins.
    """

    begin: time
    end: time
    days: frozenset[int]
    zone: ZoneInfo


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
    begin, end = time(hours[0] % 24, hours[1]), time(hours[2] % 24, hours[3])
    if hours[0] > 24 or hours[2] > 24 or begin == end:  # noqa: PLR2004 -- hours of a day
        raise ValueError("two different times of day, such as 01:00-06:30")
    try:
        where = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"no time zone is called `{zone}`; for example Europe/Berlin") from error
    return Window(begin, end, _days(days), where)


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        first, dash, last = part.strip().partition("-")
        if first == "daily" and not dash:
            found |= set(range(7))
            continue
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"days such as daily, mon-fri or sat,sun; found `{part.strip()}`")
        start, stop = DAYS.index(first), DAYS.index(last or first)
        found |= {(start + at) % 7 for at in range((stop - start) % 7 + 1)}
    return frozenset(found)


def spans(window: Window, after_s: float) -> Iterator[Span]:
    """Openings that end after a moment, the earliest first; one under way is the first."""
    day = datetime.fromtimestamp(after_s, window.zone).date() - _DAY
    for _ in range(_LOOK_AHEAD_DAYS + 1):
        if day.weekday() in window.days:
            last = day + _DAY if window.end <= window.begin else day
            begin_s = _instant(datetime.combine(day, window.begin), window.zone)
            end_s = _instant(datetime.combine(last, window.end), window.zone)
            if end_s > max(after_s, begin_s):
                yield Span(begin_s, end_s)
        day += _DAY


def _instant(local: datetime, zone: ZoneInfo) -> float:
    """A time of the local clock in seconds since the epoch.

    One that occurs twice is the first; one that is left out is the moment at which clocks jump.
    """
    first = local.replace(tzinfo=zone, fold=0)
    moment = first.astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == local:
        return moment.timestamp()
    # In a gap fold=0 uses the offset of before and lands behind it by what was left out.
    before, after = first.utcoffset(), local.replace(tzinfo=zone, fold=1).utcoffset()
    gap = (after - before) if after is not None and before is not None else timedelta()
    low, high = moment - abs(gap), moment
    offset = low.astimezone(zone).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if middle.astimezone(zone).utcoffset() == offset:
            low = middle
        else:
            high = middle
    return round(high.timestamp())


def open_span(window: Window, now_s: float) -> Span | None:
    """The opening under way; None while the window is closed."""
    first = next(spans(window, now_s), None)
    return first if first is not None and first.begin_s <= now_s else None


@dataclass(frozen=True, slots=True)
class Deadline:
    """When production must serve again [s since the epoch], and what its return may take until then [s].

    `text` is the window that it ends, for people.
    """

    end_s: float
    reserve_s: float
    text: str

    def measuring_s(self, now_s: float) -> float:
        """How long something may still be measured; never below 0."""
        return max(0.0, self.end_s - self.reserve_s - now_s)

    def is_over(self, now_s: float) -> bool:
        """Whether production has to be on its way back."""
        return self.measuring_s(now_s) <= 0


def reserve_s(load_s: float, *, drain_s: float, deploys: bool, changes_program: bool) -> float:
    """What the end of a window is kept free for [s].

    Args:
        load_s: The time that production takes to load, as far as it is known [s].
        drain_s: The longest wait for requests under way before production is stopped [s].
        deploys: Whether a winner is deployed at the end, which is one more load.
        changes_program: Whether candidates run another build, which leaves the port taken for a while.
    """
    n_loads = 2 if deploys else 1
    port_s = _PORT_S if changes_program else 0.0
    return drain_s + n_loads * (_LOAD_SLACK * load_s + _LEAST_RESERVE_S + port_s)


@dataclass(frozen=True, slots=True)
class Night:
    """What a schedule should do: when to begin, and the budget that ends in time [s]."""

    begin_s: float
    budget_s: float
    end_s: float


def next_night(
    window: Window, now_s: float, *, reload_s: float, least_s: float, most_s: float
) -> Night | None:
    """The next sweep that a window allows; None where no opening of it is long enough.

    Args:
        window: When.
        now_s: Seconds since the epoch.
        reload_s: How long production takes to serve again, which belongs to the window [s].
        least_s: A sweep shorter than this is not worth the interruption [s].
        most_s: The longest that production may be away, its reload included [s].
    """
    for span in spans(window, now_s):
        begin_s = max(span.begin_s, now_s)
        budget_s = min(span.end_s - begin_s, most_s) - reload_s
        if budget_s >= least_s:
            return Night(begin_s, budget_s, span.end_s)
    return None
