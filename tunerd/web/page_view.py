"""What the page shows, made of what the API's routes say: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.core.quantity import format_duration, format_mib
from tunerd.web import report_charts as charts
from tunerd.web.report_text import counted, figure, percent, when
from tunerd.web.report_view import Cell, Chart, Column, Key, KeyFigure, Table

_RECENT_S = 900.0


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
    facts: tuple[tuple[str, Cell], ...]
    remarks: tuple[Mapping[str, Any], ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]


def overview(
    status: Mapping[str, Any], readings: Mapping[str, Any], telemetry: Mapping[str, Any]
) -> Overview:
    """The first page, from `/api/status`, `/api/readings` and `/api/telemetry`."""
    remarks = [
        *status["messages"],
        *({"level": "warning", **drift} for drift in status["drift"]),
        *(_event(one) for one in telemetry.get("events", [])[:5]),
    ]
    drawn = tuple(_charts(telemetry))
    return Overview(
        health=health_of(status),
        figures=_figures(status, readings),
        facts=_facts(status),
        remarks=tuple(remarks),
        charts=drawn,
        tables=tuple(_tables(telemetry)) if drawn else (),
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


def _figures(status: Mapping[str, Any], readings: Mapping[str, Any]) -> tuple[KeyFigure, ...]:
    served = _last_served(readings)
    rows = [
        KeyFigure(figure(served.get("decode_tok_s")) or "not seen", "tok/s", "Generation, lately"),
        KeyFigure(
            percent(served.get("acceptance_ratio")) or "not seen", "", "Drafts accepted, lately"
        ),
    ]
    for gpu in status["vram"] or ():
        used, total = gpu["used_mib"], gpu["total_mib"]
        shown = "unknown" if used is None else f"{used / 1024:.1f}"
        of = "GiB" if total is None else f"of {total / 1024:.1f} GiB"
        rows.append(KeyFigure(shown, of, f"VRAM in use, {gpu['name']}"))
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


def _facts(status: Mapping[str, Any]) -> tuple[tuple[str, Cell], ...]:
    generation = status["generation"]
    boots = {True: "yes", False: "no", None: None}[status["enabled"]]
    since = None if status["since_s"] is None else when(status["since_s"])
    last = status["last_swap"]
    return (
        ("Unit", f"{status['unit']}: {status['active']} ({status['sub_state']})"),
        ("Since", since),
        ("Profile", status["profile"] or ("not by a profile" if generation else None)),
        ("Engine", status["engine"]),
        ("Generation", None if generation is None else str(generation)),
        ("Starts at boot", boots),
        ("Restarts", None if status["restarts"] is None else str(status["restarts"])),
        ("Last swap", None if last is None else f"{last['reason']}: {last['outcome']}"),
    )


# Over days


def _charts(telemetry: Mapping[str, Any]) -> list[Chart]:
    points = telemetry.get("points", [])
    if len(points) < 2:  # noqa: PLR2004 -- a line needs two
        return []
    speed = [(one["begin_s"], _ratio(one["n_predicted"], one["predicted_s"])) for one in points]
    taken = [(one["begin_s"], _ratio(one["n_accepted"], one["n_drafted"])) for one in points]
    found = []
    if any(value is not None for _, value in speed):
        found.append(_chart("speed", "Generation", speed, "decode", "tok/s"))
    if any(value is not None for _, value in taken):
        found.append(_chart("acceptance", "Drafts accepted", taken, "ik", "", percent_axis=True))
    by_card = _by_card(telemetry.get("gpus", []))
    if by_card:
        found.append(_vram_chart(by_card))
    return found


def _by_card(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[float, float | None]]]:
    found: dict[int, list[tuple[float, float | None]]] = {}
    for row in rows:
        used = row["used_mib"]
        found.setdefault(row["index"], []).append(
            (row["begin_s"], None if used is None else used / 1024)
        )
    return found


def _chart(
    name: str,
    title: str,
    points: Sequence[tuple[float, float | None]],
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


def _vram_chart(by_card: Mapping[int, Sequence[tuple[float, float | None]]]) -> Chart:
    colours = ("mainline", "bee", "other", "waiting")
    lines = [
        (f"GPU {index}", colours[at % len(colours)], points)
        for at, (index, points) in enumerate(sorted(by_card.items()))
    ]
    most = [value for _, _, points in lines for _, value in points if value is not None]
    text = f"at most {max(most):.1f} GiB" if most else "nothing is known"
    return Chart(
        name="vram",
        title="VRAM in use",
        figure=charts.over_time(lines, y_title="GiB"),
        alternative=f"VRAM in use over time, {text}.",
        legend=tuple(Key(label, colour, is_line=True) for label, colour, _ in lines),
    )


def _tables(telemetry: Mapping[str, Any]) -> list[Table]:
    rows = tuple(
        (
            when(one["begin_s"]),
            figure(_ratio(one["n_predicted"], one["predicted_s"])),
            percent(_ratio(one["n_accepted"], one["n_drafted"])),
            percent(_ratio(one["n_ready"], one["n"])),
        )
        for one in reversed(telemetry["points"][-48:])
    )
    columns = (Column("From", is_number=False), Column("Generation [tok/s]"),
               Column("Drafts accepted"), Column("Serving"))  # fmt: skip
    return [Table("What was watched, newest first", columns, rows)]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


# What serves, and history


def flags_table(origins: Sequence[Sequence[str]]) -> Table:
    """Every flag of a generation, and who set it."""
    columns = (Column("Flag", is_number=False), Column("Key", is_number=False),
               Column("Set by", is_number=False))  # fmt: skip
    return Table(
        "Flags, and who set them", columns, tuple((f, k or None, w) for f, k, w in origins)
    )


def generations_rows(generations: Sequence[Mapping[str, Any]]) -> list[dict[str, Cell]]:
    """One row for each generation."""
    return [
        {
            "number": str(one["number"]),
            "when": when(one["created_s"]),
            "reason": one["reason"],
            "profile": one["profile"],
            "engine": one["engine"],
            "outcome": one["outcome"] + (f": {one['cause']}" if one["cause"] else ""),
            "away": None
            if one["without_service_s"] is None
            else format_duration(one["without_service_s"]),
        }
        for one in generations
    ]


def targets_rows(backups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each backup that one can go back to."""
    return [
        {
            "name": one["name"],
            "when": when(one["changed_s"]),
            "profile": one["profile"],
            "is_live": one["is_live"],
        }
        for one in backups
    ]


def diff_lines(diff: str) -> list[tuple[str, str]]:
    """The lines of a difference with what each is: add, del, head or same."""
    kinds = {"+": "add", "-": "del", "@": "head"}
    return [
        ("head" if line.startswith(("+++", "---")) else kinds.get(line[:1], "same"), line)
        for line in diff.splitlines()
    ]


def mib(size: int | None) -> str:
    """A size for people."""
    return format_mib(size)


# Workloads


def classes_table(workload: Mapping[str, Any]) -> Table:
    """The classes of a workload."""
    columns = (Column("Class", is_number=False), Column("Share"), Column("Kind", is_number=False),
               Column("Cached [tok]"), Column("New [tok]"), Column("Reasoning [tok]"),
               Column("Answer [tok]"))  # fmt: skip
    rows = tuple(
        (
            one["name"],
            percent(one["share"], 0),
            one["kind"],
            _count(one["mean"]["cached_tokens"]),
            _count(one["mean"]["new_tokens"]),
            _count(one["mean"]["reasoning_tokens"]),
            _count(one["mean"]["answer_tokens"]),
        )
        for one in workload["classes"]
    )
    return Table("Mean request of each class", columns, rows)


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"
