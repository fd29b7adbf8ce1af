"""What the page shows: now, the last hour, days; values in, values out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunerd.web.charts import Line, Lines, Point
from tunerd.web.production_view import status_facts
from tunerd.web.view import NO_BREAK, Cell, Chart, Facts, KeyFigure, Table, figure, heads, percent
from tunerd.words import UNKNOWN, when

_RECENT_S = 900.0
_MOST_ROWS = 48
_MIB_PER_GIB = 1024
_COLOURS = ("mainline", "bee", "other", "waiting")


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
        rows.append(KeyFigure(_gib(used) or UNKNOWN, of, f"VRAM in use, {gpu['name']}"))
    if not status["vram"]:
        rows.append(KeyFigure("no GPU" if status["vram"] == [] else UNKNOWN, "", "VRAM in use"))
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
    columns = heads(
        "~Card",
        "VRAM in use [GiB]",
        "The server's",
        "Others'",
        "Free",
        "Busy",
        "Power [W]",
        "Core [°C]",
        "~Held down by",
    )
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
    speed = tuple(Point(row.at_s, row.decode_tok_s) for row in seen.rows)
    taken = tuple(Point(row.at_s, row.acceptance_ratio) for row in seen.rows)
    if any(point.y is not None for point in speed):
        yield _chart("speed", "Generation", speed, "decode", "tok/s")
    if any(point.y is not None for point in taken):
        yield _chart("acceptance", "Drafts accepted", taken, "ik", "")
    if seen.cards:
        yield _vram_chart(seen)


def _chart(name: str, title: str, points: tuple[Point, ...], colour: str, unit: str) -> Chart:
    plot = _over_time((Line(title, colour, points),), unit, is_ratio=not unit)
    has_gaps = any(point.y is None for point in points)
    return Chart(name, title, plot, "Gaps: the server was idle or away." if has_gaps else None)


def _vram_chart(seen: Watched) -> Chart:
    """What is in use of each card, and what others than the server hold of it."""
    lines: list[Line] = []
    for at, index in enumerate(seen.cards):
        colour = _COLOURS[at % len(_COLOURS)]
        lines.append(Line(f"GPU {index}", colour, _gib_points(seen, index, "used_mib")))
        others = _gib_points(seen, index, "others_mib")
        if any(point.y for point in others):
            lines.append(Line(f"GPU {index}, held by others", colour, others, shade=2))
    has_gaps = any(point.y is None for line in lines for point in line.points)
    note = "Gaps: the card could not be read, or was not looked at." if has_gaps else None
    return Chart("vram", "VRAM in use", _over_time(tuple(lines), "GiB"), note)


def _over_time(lines: tuple[Line, ...], unit: str, *, is_ratio: bool = False) -> Lines:
    return Lines(lines, unit, x_title="UTC", height=240, is_ratio=is_ratio, is_time=True)


def _gib_points(seen: Watched, index: int, key: str) -> tuple[Point, ...]:
    values = ((row.at_s, row.cards.get(index, {}).get(key)) for row in seen.rows)
    return tuple(Point(at_s, None if mib is None else mib / _MIB_PER_GIB) for at_s, mib in values)


def tables_of(seen: Watched) -> tuple[Table, ...]:
    """The same in figures, newest first."""
    if not seen.rows:
        return ()
    columns = heads("~From", "Generation [tok/s]", "Drafts accepted", "Serving",
                    *(f"VRAM of GPU {index} [GiB]" for index in seen.cards))  # fmt: skip
    step = -(-len(seen.rows) // _MOST_ROWS)
    rows = tuple(
        (
            when(row.at_s),
            figure(row.decode_tok_s),
            percent(row.acceptance_ratio),
            percent(row.ready_ratio, 0),
            *(_gib(row.cards.get(index, {}).get("used_mib")) for index in seen.cards),
        )
        for row in seen.rows[::-1][::step]
    )
    left_out = "" if step == 1 else f"; one of every {step} stretches"
    return (Table(f"What was watched, newest first{left_out}", columns, rows),)


def _gib(mib: int | None) -> str | None:
    return None if mib is None else f"{mib / _MIB_PER_GIB:.1f}"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


# Up to there the looks themselves are shown, of which the daemon keeps an hour.
_LIVE_HOURS = 1.0


@dataclass(frozen=True, slots=True)
class Health:
    """How the server is, in a sentence; `level` is good, warn or bad."""

    level: str
    sentence: str
    detail: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The first page."""

    health: Health
    figures: tuple[KeyFigure, ...]
    cards: Table | None
    facts: Facts
    remarks: tuple[Mapping[str, Any], ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]


def overview(
    status: Mapping[str, Any],
    readings: Mapping[str, Any],
    telemetry: Mapping[str, Any],
    hours: float = 24.0,
) -> Overview:
    """The first page, from `/api/status`, `/api/readings` and `/api/telemetry` of so many hours."""
    remarks = [
        *status["messages"],
        *({"level": "warning", **drift} for drift in status["drift"]),
        *(_event(one) for one in telemetry.get("events", [])[:5]),
    ]
    seen = watched(telemetry, readings, live=hours <= _LIVE_HOURS)
    return Overview(
        health=health_of(status),
        figures=key_figures(status, readings),
        cards=cards_table(readings),
        facts=status_facts(status),
        remarks=tuple(remarks),
        charts=charts_of(seen),
        tables=tables_of(seen),
    )


def health_of(status: Mapping[str, Any]) -> Health:
    """Whether the server is well."""
    serves = f"{status['alias'] or 'It'} at {status['address'] or 'an unknown address'}"
    if status["change_under_way"]:
        return Health("warn", "A change is under way right now.", "Its end is shown under Jobs.")
    if status["measurement"] is not None:
        what = status["measurement"]["purpose"]
        return Health(
            "warn", f"The server is away while `{what}` measures.", "It comes back by itself."
        )
    if not status["exists"] and status["active"] == "inactive":
        return Health("warn", "Nothing is deployed yet.", "Deploy a profile to begin.")
    if status["active"] != "active":
        text = f"{status['unit']}: {status['active']} ({status['sub_state']})"
        return Health("bad", "Your server does not run.", text)
    if status["healthy"] is None:
        return Health("warn", "Your server runs; whether it answers is not known.", serves)
    if not status["healthy"]:
        return Health(
            "bad", "Your server runs, but does not answer.", f"{serves}: {status['health']}"
        )
    if status["drift"]:
        return Health("warn", "Your server serves, but is not what was deployed.", serves)
    return Health("good", "Your server is well.", serves)


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {"level": event["level"], "text": f"{when(event['at_s'])}: {event['text']}",
            "hint": event["hint"]}  # fmt: skip


def diff_lines(diff: str) -> list[tuple[str, str]]:
    """The lines of a difference with what each is: add, del, head or same."""
    kinds = {"+": "add", "-": "del", "@": "head"}
    return [
        ("head" if line.startswith(("+++", "---")) else kinds.get(line[:1], "same"), line)
        for line in diff.splitlines()
    ]
