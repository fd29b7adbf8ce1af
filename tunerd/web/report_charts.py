"""Charts as plotly figures in plain JSON; colours are names (`@ink`) that the page fills in by theme.

`@name/0.4` is a colour at 40 %. Nothing here imports plotly: the page's script draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.web.report_series import Series

Figure = dict[str, Any]

_FILLS = (1.0, 0.42, 0.18)
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle", "circle-open", "diamond-open")
_BAR_PX = 15
_GAP_PX = 15
_EDGE_PX = 62
_STACK_PX = 46
_LONGEST_TICK = 24
_TIME_PX = 240
PARTS = (
    ("prefill", "Reading the prompt"),
    ("reasoning", "Reasoning"),
    ("decode", "Answering"),
    ("waiting", "Waiting"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A figure with the bounds of its spread, where there are some."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where two lines cross, with its interval."""

    x: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar of parts [s]; a part that is None is missing; `total` may be known all the same."""

    group: str
    label: str
    prefill: float | None
    reasoning: float | None
    decode: float | None
    waiting: float | None
    total: float | None


def bars(
    categories: Sequence[str], values: Sequence[tuple[Series, Sequence[Point | None]]], *, unit: str
) -> Figure:
    """Horizontal bars by category, one per series, with the spread of single requests as whiskers.

    `values` holds for each series one point per category (its x is not used), None where missing.
    """
    data: list[Figure] = []
    for series, points in reversed(values):
        known = [
            (name, point)
            for name, point in zip(categories, points, strict=True)
            if point is not None
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": series.label,
                "offsetgroup": series.label,
                "y": [_plain(name) for name, _ in known],
                "x": [point.y for _, point in known],
                "error_x": _whiskers([point for _, point in known]),
                "marker": {
                    "color": _fill(series),
                    "line": {"color": f"@{series.colour}", "width": 1.2},
                },
                "hovertemplate": f"%{{y}}: %{{x:.1f}} {unit}<extra>{_plain(series.label)}</extra>",
            }
        )
    height = _EDGE_PX + len(categories) * (len(values) * _BAR_PX + _GAP_PX)
    layout = _layout(height, x_title=unit)
    layout["yaxis"] |= {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [_plain(name) for name in reversed(categories)],
        "tickmode": "array",
        "tickvals": [_plain(name) for name in categories],
        "ticktext": [_plain(_shortened(name)) for name in categories],
        "tickfont": {"size": 13, "color": "@ink"},
        "showgrid": False,
        "zeroline": False,
    }
    layout |= {"barmode": "group", "bargap": _GAP_PX / (len(values) * _BAR_PX + _GAP_PX)}
    return {"data": data, "layout": layout}


def lines(
    values: Sequence[tuple[Series, Sequence[Point]]],
    *,
    x_title: str,
    y_title: str,
    height: int = 340,
    crossing: Crossing | None = None,
    percent: bool = False,
    x_ticks: Sequence[float] | None = None,
    x_range: tuple[float, float] | None = None,
) -> Figure:
    """A line per series through its points, with whiskers; the crossing marked with its interval."""
    y_shown = "%{y:.1%}" if percent else "%{y:,.1f}"
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": series.label,
            "x": [point.x for point in points],
            "y": [point.y for point in points],
            "error_y": _whiskers(points),
            "line": {"color": f"@{series.colour}", "width": 2.2, "dash": _of(_DASHES, series)},
            "marker": {
                "color": f"@{series.colour}",
                "size": 8,
                "symbol": _of(_SYMBOLS, series),
                "line": {"width": 1.8, "color": f"@{series.colour}"},
            },
            "hovertemplate": f"%{{x:,}}: {y_shown}<extra>{_plain(series.label)}</extra>",
        }
        for series, points in values
        if points
    ]
    layout = _layout(height, x_title=x_title, y_title=y_title)
    layout["yaxis"] |= {"tickformat": ".0%"} if percent else {"separatethousands": True}
    layout["xaxis"] |= {"separatethousands": True}
    if percent:
        layout["yaxis"] |= {"range": [0, 1.02]}
    if x_ticks is not None:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": list(x_ticks)}
    if x_range is not None:
        layout["xaxis"] |= {"range": list(x_range), "zeroline": False}
    if crossing is not None:
        _mark(layout, crossing)
    return {"data": data, "layout": layout}


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    x_title: str,
    y_title: str,
    unit: str,
) -> Figure:
    """A cell for each row and column, the darker the larger; cells that were not measured stay empty."""
    layout = _layout(_EDGE_PX + max(1, len(rows)) * _STACK_PX, x_title=x_title, y_title=y_title)
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "category"}
    text = [["" if one is None else f"{one:.3f}" for one in row] for row in values]
    trace: Figure = {
        "type": "heatmap", "x": list(columns), "y": list(rows), "z": [list(row) for row in values],
        "text": text, "texttemplate": "%{text}", "showscale": False, "xgap": 2, "ygap": 2,
        "colorscale": [[0.0, "@accent/0.12"], [1.0, "@accent/0.75"]],
        "hovertemplate": f"%{{y}}, %{{x}}: %{{z:.3f}} {unit}<extra></extra>",
        "textfont": {"color": "@ink", "size": 13},
    }  # fmt: skip
    return {"data": [trace], "layout": layout}


def over_time(
    values: Sequence[tuple[str, str, Sequence[tuple[float, float | None]]]],
    *,
    y_title: str,
    percent: bool = False,
    shades: Sequence[int] = (),
) -> Figure:
    """Lines over time, with gaps where nothing is known.

    `values` holds for each line its label, its colour, and pairs of seconds since the epoch and value;
    `shades` for each its shade, which is how it is broken up.
    """
    shown = "%{y:.1%}" if percent else "%{y:,.1f}"
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": _plain(label),
            "x": [at_s * 1000 for at_s, _ in points],
            "y": [value for _, value in points],
            "connectgaps": False,
            "line": {"color": f"@{colour}", "width": 1.8, "dash": _DASHES[shade % len(_DASHES)]},
            "marker": {"color": f"@{colour}", "size": 4},
            "hovertemplate": f"%{{x|%d %b %H:%M}}: {shown}<extra>{_plain(label)}</extra>",
        }
        for (label, colour, points), shade in zip(values, shades or [0] * len(values), strict=True)
    ]
    layout = _layout(_TIME_PX, y_title=y_title)
    layout["xaxis"] |= {"type": "date", "rangemode": "normal"}
    layout["yaxis"] |= {"tickformat": ".0%"} if percent else {}
    return {"data": data, "layout": layout}


def cliff(points: Sequence[tuple[float, float | None]], *, x_title: str, y_title: str) -> Figure:
    """What is left at each margin, by configurations that differ in more than it; None is where it ran out."""
    left = sorted((x, y) for x, y in points if y is not None)
    out = sorted(x for x, y in points if y is None)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "left",
            "x": [x for x, _ in left],
            "y": [y for _, y in left],
            "marker": {"color": "@mainline", "size": 8},
            "hovertemplate": "%{x:,.0f}: %{y:,.0f} left<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "out of memory",
            "x": out,
            "y": [0] * len(out),
            "marker": {"color": "@bad", "size": 12, "symbol": "x"},
            "cliponaxis": False,
            "hovertemplate": "%{x:,.0f}: out of memory<extra></extra>",
        },
    ]
    layout = _layout(_TIME_PX, x_title=x_title, y_title=y_title)
    layout["xaxis"] |= {"rangemode": "normal"}
    return {"data": data, "layout": layout}


def stacks(rows: Sequence[Stack]) -> Figure:
    """Horizontal bars of parts [s] under the name of their group; what is missing is said so."""
    places, heads = _places(rows)
    data: list[Figure] = []
    for attribute, name in PARTS:
        known = [
            (place, value)
            for place, row in zip(places, rows, strict=True)
            if (value := getattr(row, attribute)) is not None
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [place for place, _ in known],
                "x": [value for _, value in known],
                "width": 0.42,
                "marker": {"color": f"@{attribute}", "line": {"color": "@surface", "width": 1}},
                "text": [f"{value:.1f}" for _, value in known],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "insidetextfont": {"color": "@surface"},
                "textangle": 0,
                "hovertemplate": f"%{{x:.1f}} s<extra>{name}</extra>",
            }
        )
    depth = max(places, default=0) + 1.2
    layout = _layout(_EDGE_PX + round(depth * _STACK_PX), x_title="seconds")
    layout["yaxis"] |= {
        "visible": False,
        "range": [max(places, default=0) + 0.4, -0.85],
        "automargin": False,
    }
    layout |= {"barmode": "stack", "uniformtext": {"minsize": 11, "mode": "hide"}}
    layout["annotations"] = [
        _note(place - 0.74, f"<b>{_plain(group)}</b>", "@ink", size=13) for place, group in heads
    ] + [
        _note(place - 0.37, _row_text(row), "@ink") for place, row in zip(places, rows, strict=True)
    ]
    return {"data": data, "layout": layout}


def _places(rows: Sequence[Stack]) -> tuple[list[float], list[tuple[float, str]]]:
    """Where each bar stands, and where each group begins; a group has room for its name above."""
    places: list[float] = []
    heads: list[tuple[float, str]] = []
    at, group = -1.0, None
    for row in rows:
        at += 1.0
        if row.group != group:
            group = row.group
            at += 0.55 if places else 0.0
            heads.append((at, group))
        places.append(at)
    return places, heads


def _row_text(row: Stack) -> str:
    """What stands above a bar: whose it is and the whole, or which part of it is missing."""
    if row.total is not None:
        return f"{_plain(row.label)}  <b>{row.total:.1f} s</b>"
    missing = [name.lower() for attribute, name in PARTS if getattr(row, attribute) is None]
    return f"{_plain(row.label)}  <i>{' and '.join(missing)} missing</i>"


def _note(y: float, text: str, colour: str, *, size: int = 12) -> Figure:
    """A text at the left edge of the plot."""
    return {
        "x": 0,
        "xref": "paper",
        "y": y,
        "text": text,
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "middle",
        "xshift": -3,
        "font": {"size": size, "color": colour},
    }


def _mark(layout: Figure, crossing: Crossing) -> None:
    """A line where two lines cross, and a band for its interval behind the data."""
    whole = {"yref": "paper", "y0": 0, "y1": 1}
    shapes: list[Figure] = []
    if crossing.low is not None and crossing.high is not None:
        shapes.append(
            {"type": "rect", "x0": crossing.low, "x1": crossing.high, **whole, "layer": "below",
             "fillcolor": "@band", "line": {"width": 0}}
        )  # fmt: skip
    shapes.append(
        {"type": "line", "x0": crossing.x, "x1": crossing.x, **whole,
         "line": {"color": "@muted", "width": 1.4, "dash": "dot"}}
    )  # fmt: skip
    layout["shapes"] = shapes
    layout["annotations"] = [
        {
            "x": crossing.x,
            "y": 1,
            "yref": "paper",
            "text": f"<b>{crossing.x:,.0f}</b>",
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "top",
            "xshift": 6,
            "font": {"size": 13, "color": "@ink"},
        }
    ]


def _layout(height: int, *, x_title: str = "", y_title: str = "") -> Figure:
    return {
        "height": height,
        "margin": {"l": 10, "r": 12, "t": 10, "b": 46},
        "font": {"size": 13, "color": "@ink"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "hoverlabel": {
            "bgcolor": "@surface",
            "bordercolor": "@rule",
            "font": {"color": "@ink", "size": 13},
        },
        "xaxis": _axis(x_title),
        "yaxis": _axis(y_title),
    }


def _axis(title: str) -> Figure:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "@muted"}},
        "automargin": True,
        "ticklabelstandoff": 4,
        "fixedrange": True,
        "rangemode": "tozero",
        "gridcolor": "@grid",
        "zerolinecolor": "@rule",
        "tickfont": {"size": 12, "color": "@muted"},
    }


def _whiskers(points: Sequence[Point]) -> Figure:
    if not any(point.low is not None and point.high is not None for point in points):
        return {"visible": False}
    return {
        "type": "data",
        "symmetric": False,
        "array": [
            None if point.high is None else max(0.0, point.high - point.y) for point in points
        ],
        "arrayminus": [
            None if point.low is None else max(0.0, point.y - point.low) for point in points
        ],
        "color": "@ink/0.65",
        "thickness": 1.2,
        "width": 3,
    }


def _fill(series: Series) -> str:
    return f"@{series.colour}/{_of(_FILLS, series)}"


def _of(choices: Sequence[Any], series: Series) -> Any:
    return choices[series.shade % len(choices)]


def _plain(text: str) -> str:
    """Text that plotly does not take for its own markup, nor the page for a colour."""
    marks = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "&#64;"))
    for mark, entity in marks:
        text = text.replace(mark, entity)
    return text


def _shortened(text: str) -> str:
    """A name beside a bar must leave room for the bar."""
    return text if len(text) <= _LONGEST_TICK else text[: _LONGEST_TICK - 1] + "…"
