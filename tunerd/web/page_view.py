"""What the page shows, made of what the API's routes say: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.core.quantity import format_duration, format_mib
from tunerd.web import page_watched
from tunerd.web.report_text import percent, when
from tunerd.web.report_view import Cell, Chart, Column, KeyFigure, Table

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
    facts: tuple[tuple[str, Cell], ...]
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
    seen = page_watched.watched(telemetry, readings, live=hours <= _LIVE_HOURS)
    return Overview(
        health=health_of(status),
        figures=page_watched.key_figures(status, readings),
        cards=page_watched.cards_table(readings),
        facts=_facts(status),
        remarks=tuple(remarks),
        charts=page_watched.charts_of(seen),
        tables=page_watched.tables_of(seen),
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
