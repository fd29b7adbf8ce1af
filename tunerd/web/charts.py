"""Charts as SVG: lines, bars and bands, in the colours of page and report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from itertools import groupby
from math import ceil, floor, log10

from markupsafe import Markup

from tunerd.web.view import NO_BREAK, Bar, Bars, Line, Lines, Plot, Point, joined, percent
from tunerd.words import UNKNOWN, harmless, local_time

# Engines that have a colour of their own; static/report.css has all colours.
FAMILIES = frozenset({"mainline", "ik", "bee"})


def colour_of(family: str | None) -> str:
    """The name of an engine's colour."""
    return family if family in FAMILIES and family is not None else "other"


_TOP, _BOTTOM, _NO_TITLE = 26, 44, 18
_LETTER_PX = 7.0
# Room for a plot on a phone, and in a window where everything is shown.
_NARROW_PX, _WIDE_PX = 250.0, 560.0
_MOST_TICKS = 6
_MOST_DOTS = 120
_LONGEST = 46
_BAR_PX, _ROW_PX = 15, 21
_DAY_S = 86400
_TIMES_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, _DAY_S, 2 * _DAY_S,
            7 * _DAY_S, 14 * _DAY_S, 28 * _DAY_S)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a label, and the colour and shade by which it is drawn."""

    label: str
    colour: str
    shade: int = 0
    is_line: bool = False


def legend(plot: Plot, title: str) -> tuple[Key, ...]:
    """Which colour is what, but for what the title names."""
    if isinstance(plot, Lines):
        keys = [Key(one.label, one.colour, one.shade, is_line=True) for one in plot.lines]
    else:
        parts = (part for _, bars in plot.groups for bar in bars for part in bar.parts)
        keys = [Key(part.label, part.colour, part.shade) for part in parts]
    return tuple(key for key in dict.fromkeys(keys) if key.label != title)


def in_words(plot: Plot, title: str) -> str:
    """What a chart shows, for who does not see it."""
    found: dict[str, list[float | None]] = {}
    if isinstance(plot, Lines):
        found = {line.label: [point.y for point in line.points] for line in plot.lines}
    else:
        for _, bars in plot.groups:
            for bar in bars:
                found.setdefault(bar.label, []).append(bar.total)
    said = [f"{label} {_span(plot, values)}" for label, values in found.items()]
    return f"{title}: {', '.join(said)}; the table has every figure."


def _span(plot: Plot, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return UNKNOWN
    is_ratio = isinstance(plot, Lines) and plot.is_ratio
    per, unit = (100, f"{NO_BREAK}%") if is_ratio else (1, f" {plot.unit}")
    ends = dict.fromkeys(f"{per * end:,.1f}" for end in (min(known), max(known)))
    return " to ".join(ends) + unit


def draw(plot: Plot, title: str) -> Markup:
    """The chart."""
    height, pieces = _lines(plot) if isinstance(plot, Lines) else _bars(plot)
    # All that comes from outside went through `_said`, or is a number.
    return Markup(  # noqa: S704
        f'<svg height="{height:.0f}" role="img" aria-label="{_said(in_words(plot, title))}">'
        f"{''.join(pieces)}</svg>"
    )


# Axes


@dataclass(frozen=True, slots=True)
class _Axis:
    """A scale from `low` to `high`."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Where a value stands on it: 0 is its beginning, 1 its end."""
        return (value - self.low) / (self.high - self.low)

    def x(self, value: float) -> str:
        """The same as a coordinate."""
        return f"{100 * self.share(value):.2f}%"


@dataclass(frozen=True, slots=True)
class _Tick:
    value: float
    text: str


def _ticks(axis: _Axis, *, is_ratio: bool = False) -> list[_Tick]:
    """Round numbers on an axis."""
    rough = (axis.high - axis.low) / _MOST_TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(power * many for many in (1, 2, 5, 10) if power * many >= rough * 0.999)
    digits = max(0, -floor(log10(step) + 1e-9))
    found = []
    for at in range(ceil(axis.low / step - 1e-9), floor(axis.high / step + 1e-9) + 1):
        value = at * step
        text = percent(value, 0) if is_ratio else f"{value:,.{digits}f}"
        found.append(_Tick(value, text or ""))
    return found


def _time_ticks(axis: _Axis) -> list[_Tick]:
    """Round times of the machine's own clock, in summer and in winter; midnight is told by its day."""
    ahead = _ahead_s(axis.low)
    rough = (axis.high - axis.low) / _MOST_TICKS
    step = next((one for one in _TIMES_S if one >= rough), _TIMES_S[-1])
    found = []
    for value in range(
        ceil((axis.low + ahead) / step) * step, floor(axis.high + _ahead_s(axis.high)) + 1, step
    ):
        at_s = value - _ahead_s(value - ahead)
        found.append(_Tick(at_s, local_time(at_s, "%H:%M" if value % _DAY_S else "%-d %b")))
    return found


def _ahead_s(at_s: float) -> int:
    """How far the machine's own clock is then ahead of UTC."""
    offset = datetime.fromtimestamp(at_s).astimezone().utcoffset() or timedelta()
    return round(offset.total_seconds())


def _not_beside(axis: _Axis, ticks: Iterable[_Tick], width_px: float) -> set[_Tick]:
    """The ticks whose labels do not touch each other where a plot is that wide."""
    kept, end_px = set(), float("-inf")
    for tick in ticks:
        middle, half = axis.share(tick.value) * width_px, len(tick.text) * _LETTER_PX / 2
        if middle - half >= end_px:
            kept.add(tick)
            end_px = middle + half + _LETTER_PX
    return kept


def _x_axis(axis: _Axis, ticks: Sequence[_Tick], bottom: float, title: str) -> Iterator[str]:
    narrow, wide = (_not_beside(axis, ticks, width) for width in (_NARROW_PX, _WIDE_PX))
    for tick in ticks:
        yield _rule("tick", (axis.x(tick.value), bottom), (axis.x(tick.value), bottom + 4))
        if tick in wide:
            css = "" if tick in narrow else "wide"
            yield _text(axis.x(tick.value), bottom + 18, tick.text, css)
    if title:
        yield _text("50%", bottom + 38, title, "title")


def _y_axis(axis: _Axis, ticks: Sequence[_Tick], y: _Upwards, title: str) -> Iterator[str]:
    for tick in ticks:
        css = "rule" if tick.value == axis.low else "grid"
        yield _rule(css, ("0", y.at(tick.value)), ("100%", y.at(tick.value)))
        yield _text("-8", y.at(tick.value) + 4, tick.text, "end")
    if title:
        yield _text("-8", 11, title, "title end")


@dataclass(frozen=True, slots=True)
class _Upwards:
    """An axis that stands between two heights."""

    axis: _Axis
    top: float
    bottom: float

    def at(self, value: float) -> float:
        """The height of a value."""
        return self.bottom - self.axis.share(value) * (self.bottom - self.top)


# Lines


def _lines(plot: Lines) -> tuple[float, Iterator[str]]:
    known = [p for line in plot.lines for p in line.points if p.y is not None]
    if not known:
        return 30, iter([_text("0", 20, "no figures", "start")])
    return plot.height, _drawn_lines(plot, known)


def _drawn_lines(plot: Lines, known: Sequence[Point]) -> Iterator[str]:
    x = _across(plot, known)
    most = max(value for p in known for value in (p.y, p.high) if value is not None)
    y_axis = _Axis(0.0, 1.0 if plot.is_ratio else most * 1.06 if most > 0 else 1.0)
    bottom = plot.height - (_BOTTOM if plot.x_title else _NO_TITLE) - 4
    y = _Upwards(y_axis, _TOP, bottom)
    yield from _y_axis(y_axis, _ticks(y_axis, is_ratio=plot.is_ratio), y, plot.unit)
    yield from _x_axis(x, _across_ticks(plot, x), bottom, plot.x_title)
    if plot.crossing is not None:
        yield from _mark(plot.crossing, x, y)
    for line in plot.lines:
        yield f'<g class="c-{line.colour} shade-{line.shade % 3}">'
        yield from _joined(line.points, x, y)
        yield from _marks(plot, line, x, y)
        yield "</g>"


def _across(plot: Lines, known: Sequence[Point]) -> _Axis:
    xs = [p.x for p in known]
    low, high = plot.x_range or (min(xs) if plot.is_time else min(0.0, *xs), max(xs))
    if low == high:
        room = 60.0 if plot.is_time else 1.0
        low, high = low - room, high + room
    return _Axis(low, high)


def _across_ticks(plot: Lines, axis: _Axis) -> list[_Tick]:
    if plot.is_time:
        return _time_ticks(axis)
    if plot.x_ticks is not None:
        return [_Tick(value, f"{value:,g}") for value in plot.x_ticks]
    return _ticks(axis)


def _joined(points: Sequence[Point], x: _Axis, y: _Upwards) -> Iterator[str]:
    """What is known without a gap, joined: in a box of its own, which is stretched to the width."""
    height = y.bottom - y.top
    yield (
        f'<svg y="{y.top}" height="{height}" viewBox="0 0 1000 {height}" preserveAspectRatio="none">'
    )
    for is_known, run in groupby(points, lambda point: point.y is not None):
        shown = [f"{1000 * x.share(p.x):.1f},{y.at(p.y or 0.0) - y.top:.1f}" for p in run]
        if is_known and len(shown) > 1:
            yield f'<polyline points="{" ".join(shown)}"/>'
    yield "</svg>"


def _marks(plot: Lines, line: Line, x: _Axis, y: _Upwards) -> Iterator[str]:
    """A dot for each figure with its words; of many only some, and those that nothing joins."""
    step = -(-len(line.points) // _MOST_DOTS)
    for at, point in enumerate(line.points):
        around = (line.points[at - 1] if at else None, *line.points[at + 1 : at + 2])
        is_alone = all(one is None or one.y is None for one in around)
        if point.y is None or (at % step and not is_alone):
            continue
        place, height = x.x(point.x), y.at(point.y)
        yield f"<g><title>{_said(_point_words(plot, line, point))}</title>"
        if point.low is not None and point.high is not None:
            yield _rule("whisker", (place, y.at(point.low)), (place, y.at(point.high)))
        size = 1.8 if step > 1 or plot.is_time else 4
        yield f'<circle cx="{place}" cy="{height:.1f}" r="{size}"/>'
        yield f'<circle class="near" cx="{place}" cy="{height:.1f}" r="9"/></g>'


def _point_words(plot: Lines, line: Line, point: Point) -> str:
    where = local_time(point.x, "%-d %b %H:%M") if plot.is_time else f"{point.x:,g}"
    value = point.y or 0.0
    shown = percent(value) if plot.is_ratio else f"{value:,.1f} {plot.unit}"
    spread = "" if point.low is None else f" ({point.low:,.1f} to {point.high:,.1f})"
    return f"{line.label}, {where}: {shown}{spread}"


def _mark(crossing: Point, x: _Axis, y: _Upwards) -> Iterator[str]:
    """A line where two lines cross, and a band for its interval."""
    if crossing.low is not None and crossing.high is not None:
        low, high = (min(x.high, max(x.low, one)) for one in (crossing.low, crossing.high))
        width = 100 * (x.share(high) - x.share(low))
        yield (
            f'<rect class="band" x="{x.x(low)}" width="{width:.2f}%" y="{y.top}" '
            f'height="{y.bottom - y.top}"/>'
        )
    place = x.x(crossing.x)
    yield _rule("crossing", (place, y.top), (place, y.bottom))
    yield _text(place, y.top - 6, f"{crossing.x:,.0f}", "name")


# Bars


def _bars(plot: Bars) -> tuple[float, Iterator[str]]:
    known = [bar for _, bars in plot.groups for bar in bars]
    sizes = (sum(part.value or 0.0 for part in bar.parts) for bar in known)
    most = max([*sizes, *(bar.high or 0.0 for bar in known), 0.0]) or 1.0
    # A figure stands behind the end of its bar.
    axis = _Axis(0.0, most if plot.is_stacked else most * 1.12)
    row_px = _BAR_PX + 4 + (_ROW_PX if plot.is_stacked else 0)
    heights = [_ROW_PX + len(bars) * row_px + 10 for _, bars in plot.groups]
    return sum(heights) + _BOTTOM, _drawn_bars(plot, axis, heights, row_px)


def _drawn_bars(plot: Bars, axis: _Axis, heights: Sequence[int], row_px: int) -> Iterator[str]:
    bottom = sum(heights)
    ticks = _ticks(axis)
    for tick in ticks:
        css = "rule" if tick.value == 0 else "grid"
        yield _rule(css, (axis.x(tick.value), 0), (axis.x(tick.value), bottom))
    top = 0
    for (name, bars), height in zip(plot.groups, heights, strict=True):
        yield _text("0", top + 15, name, "name start")
        for at, bar in enumerate(bars):
            place = top + _ROW_PX + at * row_px
            if plot.is_stacked:
                label = "" if bar.label == name else f"{_shortened(bar.label)}: "
                yield _text("0", place + 13, label + _total_words(plot, bar), "start")
                place += _ROW_PX
            yield from _bar(plot, bar, axis, place)
        top += height
    yield from _x_axis(axis, ticks, bottom, plot.unit)


def _bar(plot: Bars, bar: Bar, axis: _Axis, top: float) -> Iterator[str]:
    begin = 0.0
    for part in bar.parts:
        size = part.value or 0.0
        words = UNKNOWN if part.value is None else f"{size:,.{plot.digits}f} {plot.unit}"
        spread = "" if bar.low is None else f" ({bar.low:,.1f} to {bar.high:,.1f})"
        yield (
            f'<g class="c-{part.colour} shade-{part.shade % 3}">'
            f"<title>{_said(f'{part.label}: {words}{spread}')}</title>"
            f'<rect class="bar" x="{axis.x(begin)}" y="{top:.0f}" width="{axis.x(size)}" '
            f'height="{_BAR_PX}"/></g>'
        )
        begin += size
    if bar.low is not None and bar.high is not None:
        middle = top + _BAR_PX / 2
        yield _rule("whisker", (axis.x(bar.low), middle), (axis.x(bar.high), middle))
    if not plot.is_stacked:
        end = axis.x(max(begin, bar.high or 0.0))
        yield _text(end, top + 12, _total_words(plot, bar), "after start", dx=6)


def _total_words(plot: Bars, bar: Bar) -> str:
    """The whole, or what of it is missing."""
    if bar.total is not None:
        total = f"{bar.total:,.{plot.digits}f}"
        return f"{total} {plot.unit}" if plot.is_stacked else total
    lacking = [part.label.lower() for part in bar.parts if part.value is None]
    return f"{joined(lacking)} {UNKNOWN}" if plot.is_stacked else UNKNOWN


# Pieces


def _rule(css: str, begin: tuple[str, float], end: tuple[str, float]) -> str:
    return (
        f'<line class="{css}" x1="{begin[0]}" y1="{begin[1]:.1f}" x2="{end[0]}" y2="{end[1]:.1f}"/>'
    )


def _text(x: str, y: float, text: str, css: str = "", *, dx: int = 0) -> str:
    moved = f' dx="{dx}"' if dx else ""
    named = f' class="{css}"' if css else ""
    return f'<text{named} x="{x}" y="{y:.1f}"{moved}>{_said(_shortened(text))}</text>'


def _shortened(text: str) -> str:
    """A name on a chart must leave room for the rest; tables have it whole."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _said(text: str) -> str:
    return escape(harmless(text), quote=True)
