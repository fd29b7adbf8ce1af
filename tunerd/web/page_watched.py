"""What was watched, as the page shows it: now, over the last hour, over days. Values in, values out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tunerd.web import report_charts as charts
from tunerd.web.report_text import NO_BREAK, counted, figure, percent, when
from tunerd.web.report_view import Cell, Chart, Column, Key, KeyFigure, Table

_RECENT_S = 900.0
_MOST_ROWS = 48
_MIB_PER_GIB = 1024
_MINUTE_S = 60
_COLOURS = ("mainline", "bee", "other", "waiting")
_Line = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class _Row:
    """One stretch, or one look: a minute of the history, or ten seconds of the last hour."""

    at_s: float
    decode_tok_s: float | None
    acceptance_ratio: float | None
    ready_ratio: float | None
    cards: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Watched:
    """What was watched in a span of time, oldest first."""

    rows: tuple[_Row, ...]

    @property
    def cards(self) -> tuple[int, ...]:
        """The indexes of all cards that were seen."""
        return tuple(sorted({index for row in self.rows for index in row.cards}))


def watched(
    telemetry: Mapping[str, Any], readings: Mapping[str, Any], *, live: bool = False
) -> Watched:
    """The rows of `/api/telemetry`; with `live` the looks of `/api/readings` from where they begin."""
    cards: dict[float, dict[int, Mapping[str, Any]]] = {}
    for one in telemetry.get("gpus", ()):
        cards.setdefault(one["begin_s"], {})[one["index"]] = one
    looks = [_of_look(one) for one in readings["readings"]] if live else []
    begin_s = looks[0].at_s if looks else None
    kept = [
        _of_point(one, cards.get(one["begin_s"], {}))
        for one in telemetry.get("points", ())
        if begin_s is None or one["begin_s"] + one["seconds"] <= begin_s
    ]
    return Watched((*kept, *looks))


def _of_point(one: Mapping[str, Any], cards: Mapping[int, Mapping[str, Any]]) -> _Row:
    return _Row(
        at_s=one["begin_s"],
        decode_tok_s=_ratio(one["n_predicted"], one["predicted_s"]),
        acceptance_ratio=_ratio(one["n_accepted"], one["n_drafted"]),
        ready_ratio=_ratio(one["n_ready"], one["n"]),
        cards=cards,
    )


def _of_look(one: Mapping[str, Any]) -> _Row:
    served = one["engine"]["served"] or {}
    is_ready = one["engine"]["is_ready"]
    return _Row(
        at_s=one["at_s"],
        decode_tok_s=served.get("decode_tok_s"),
        acceptance_ratio=served.get("acceptance_ratio"),
        ready_ratio=None if is_ready is None else float(is_ready),
        cards={gpu["index"]: gpu for gpu in one["gpus"] or ()},
    )


# Now


def key_figures(status: Mapping[str, Any], readings: Mapping[str, Any]) -> tuple[KeyFigure, ...]:
    """Speed, acceptance and VRAM at this moment."""
    served = _last_served(readings)
    rows = [
        KeyFigure(figure(served.get("decode_tok_s")) or "not seen", "tok/s", "Generation, lately"),
        KeyFigure(
            percent(served.get("acceptance_ratio")) or "not seen", "", "Drafts accepted, lately"
        ),
    ]
    for gpu in status["vram"] or ():
        used, total = gpu["used_mib"], gpu["total_mib"]
        of = "GiB" if total is None else f"of {_gib(total)} GiB"
        rows.append(KeyFigure(_gib(used) or "unknown", of, f"VRAM in use, {gpu['name']}"))
    if not status["vram"]:
        rows.append(KeyFigure("no GPU" if status["vram"] == [] else "unknown", "", "VRAM in use"))
    return tuple(rows)


def _last_served(readings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the server did when it last did something, within the last while."""
    rows = readings["readings"]
    if not rows:
        return {}
    newest_s = rows[-1]["at_s"]
    for row in reversed(rows):
        served = row["engine"]["served"]
        is_recent = newest_s - row["at_s"] <= _RECENT_S
        if is_recent and served is not None and served["decode_tok_s"] is not None:
            return dict(served)
    return {}


def cards_table(readings: Mapping[str, Any]) -> Table | None:
    """The cards at the newest look; None without one, or where there is no card that can be read."""
    latest = readings.get("latest")
    if latest is None or not latest["gpus"]:
        return None
    columns = (Column("Card", is_number=False), Column("VRAM in use [GiB]"), Column("The server's"),
               Column("Others'"), Column("Free"), Column("Busy"), Column("Power [W]"),
               Column("Core [°C]"), Column("Held down by", is_number=False))  # fmt: skip
    return Table("Cards now", columns, tuple(_card(gpu) for gpu in latest["gpus"]))


def _card(gpu: Mapping[str, Any]) -> tuple[Cell, ...]:
    total, power, limit = gpu["total_mib"], gpu["power_w"], gpu["power_limit_w"]
    used = _gib(gpu["used_mib"])
    busy, heat = gpu["utilisation_percent"], gpu["temperature_c"]
    reasons = gpu["throttle_reasons"]
    split = ", split by MIG" if gpu["is_mig"] else ""
    return (
        f"GPU {gpu['index']}: {gpu['name']}{split}",
        used if used is None or total is None else f"{used} of {_gib(total)}",
        _gib(gpu["server_mib"]),
        _gib(gpu["others_mib"]),
        _gib(gpu["free_mib"]),
        None if busy is None else f"{busy:.0f}{NO_BREAK}%",
        None if power is None else f"{power:.0f}" + ("" if limit is None else f" of {limit:.0f}"),
        None if heat is None else f"{heat}",
        None if reasons is None else ", ".join(reasons) or "nothing",
    )


# Over time


def charts_of(seen: Watched) -> tuple[Chart, ...]:
    """Speed, acceptance and VRAM over time; what nobody saw a figure of has no chart."""
    if len(seen.rows) < 2:  # noqa: PLR2004 -- a line needs two
        return ()
    return tuple(_charts(seen))


def _charts(seen: Watched) -> Iterator[Chart]:
    speed = [(row.at_s, row.decode_tok_s) for row in seen.rows]
    taken = [(row.at_s, row.acceptance_ratio) for row in seen.rows]
    if any(value is not None for _, value in speed):
        yield _chart("speed", "Generation", speed, "decode", "tok/s")
    if any(value is not None for _, value in taken):
        yield _chart("acceptance", "Drafts accepted", taken, "ik", "", percent_axis=True)
    if seen.cards:
        yield _vram_chart(seen)


def _chart(
    name: str,
    title: str,
    points: _Line,
    colour: str,
    unit: str,
    *,
    percent_axis: bool = False,
) -> Chart:
    known = [value for _, value in points if value is not None]
    low, high = min(known), max(known)
    spread = (
        f"{percent(low)} to {percent(high)}"
        if percent_axis
        else f"{low:,.1f} to {high:,.1f} {unit}"
    )
    return Chart(
        name=name,
        title=title,
        figure=charts.over_time([(title, colour, points)], y_title=unit, percent=percent_axis),
        alternative=f"{title} over time, {spread} in {counted(len(known), 'stretch', 'stretches')}.",
        legend=(),
        note=None if len(known) == len(points) else "Gaps: the server was idle or away.",
    )


def _vram_chart(seen: Watched) -> Chart:
    """What is in use of each card, and what others than the server hold of it."""
    lines: list[tuple[str, str, _Line]] = []
    shades: list[int] = []
    for at, index in enumerate(seen.cards):
        colour = _COLOURS[at % len(_COLOURS)]
        lines.append((f"GPU {index}", colour, _gib_line(seen, index, "used_mib")))
        shades.append(0)
        others = _gib_line(seen, index, "others_mib")
        if any(value for _, value in others):
            lines.append((f"GPU {index}, held by others", colour, others))
            shades.append(2)
    values = [value for _, _, points in lines for _, value in points]
    known = [value for value in values if value is not None]
    text = f"at most {max(known):.1f} GiB" if known else "nothing is known"
    return Chart(
        name="vram",
        title="VRAM in use",
        figure=charts.over_time(lines, y_title="GiB", shades=shades),
        alternative=f"VRAM in use over time, {text}.",
        legend=tuple(
            Key(label, colour, shade, is_line=True)
            for (label, colour, _), shade in zip(lines, shades, strict=True)
        ),
        note="Gaps: the card could not be read, or was not looked at." if None in values else None,
    )


def _gib_line(seen: Watched, index: int, key: str) -> _Line:
    values = ((row.at_s, row.cards.get(index, {}).get(key)) for row in seen.rows)
    return [(at_s, None if mib is None else mib / _MIB_PER_GIB) for at_s, mib in values]


def tables_of(seen: Watched) -> tuple[Table, ...]:
    """The same in figures, newest first."""
    if not seen.rows:
        return ()
    columns = (
        Column("From", is_number=False),
        Column("Generation [tok/s]"),
        Column("Drafts accepted"),
        Column("Serving"),
        *(Column(f"VRAM of GPU {index} [GiB]") for index in seen.cards),
    )
    step = -(-len(seen.rows) // _MOST_ROWS)
    rows = tuple(
        (
            _moment(row.at_s),
            figure(row.decode_tok_s),
            percent(row.acceptance_ratio),
            percent(row.ready_ratio, 0),
            *(_gib(row.cards.get(index, {}).get("used_mib")) for index in seen.cards),
        )
        for row in seen.rows[::-1][::step]
    )
    left_out = "" if step == 1 else f"; one of every {step} stretches"
    return (Table(f"What was watched, newest first{left_out}", columns, rows),)


def _moment(at_s: float) -> str:
    """A time for people; looks are seconds apart, stretches whole minutes."""
    if at_s % _MINUTE_S == 0:
        return when(at_s)
    return datetime.fromtimestamp(at_s, UTC).strftime("%-d %B %Y, %H:%M:%S UTC")


def _gib(mib: int | None) -> str | None:
    return None if mib is None else f"{mib / _MIB_PER_GIB:.1f}"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
