"""What serves, what served, and what would: the same facts and tables in a terminal and on the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from tunerd.units.generations import Outcome
from tunerd.web.view import Facts, Table, heads
from tunerd.words import UNKNOWN, Mode, format_duration, format_mib, when

_NONE = "-"


def status_facts(status: Mapping[str, Any]) -> Facts:
    """What serves now, since when, from which generation."""
    is_absent = not status["exists"] and status["active"] == "inactive"
    since = f", since {when(status['since_s'])}" if status["since_s"] else ""
    unit = "there is none" if is_absent else f"{status['active']} ({status['sub_state']}){since}"
    serves = f"{status['alias'] or UNKNOWN} at {status['address'] or UNKNOWN}"
    health = status["health"] or (UNKNOWN if status["active"] == "active" else "not running")
    at = "with tunerd's supervisor" if status["mode"] == Mode.LOCAL else "at boot"
    boot = {True: f"starts {at}", False: f"does not start {at}", None: UNKNOWN}[status["enabled"]]
    measurement, last = status["measurement"], status["last_swap"]
    facts = [
        ("unit", f"{status['unit']}: {unit}"),
        ("health", health),
        ("serves", "nothing" if is_absent else serves),
        ("boot", "nothing to start" if is_absent and status["enabled"] is None else boot),
        ("generation", _generation(status)),
    ]
    if measurement is not None:
        until = when(measurement["until_s"])
        facts.append(("measures", f"{measurement['purpose']}, until {until} at the latest"))
    if last is not None:
        said = f"generation {last['number']} by {last['reason']}: {_outcome(last)}"
        facts.append(("last swap", said))
    return tuple(facts)


def _generation(status: Mapping[str, Any]) -> str:
    if status["generation"] is None:
        return "none by tunerd"
    profile, engine = status["profile"], status["engine"]
    what = f"profile {profile}, engine {engine}" if profile else "not by a profile"
    if status["outcome"] == Outcome.REMOVED:
        what = "went back to where there was none"
    return f"{status['generation']} ({what})"


def _outcome(one: Mapping[str, Any]) -> str:
    return f"{one['outcome']}: {one['cause']}" if one["cause"] else str(one["outcome"])


def generations_table(generations: Sequence[Mapping[str, Any]]) -> Table:
    """Every swap, newest first."""
    rows = tuple(
        (
            str(one["number"]),
            when(one["created_s"]),
            one["reason"],
            one["profile"] or _NONE,
            one["engine"] or _NONE,
            _outcome(one),
            _NONE
            if one["without_service_s"] is None
            else format_duration(one["without_service_s"]),
        )
        for one in generations
    )
    columns = heads("~no", "~when", "~reason", "~profile", "~engine", "~outcome", "without service")
    links = tuple(f"/generations/{one['number']}" for one in generations)
    return Table("Every swap, newest first", columns, rows, links=links)


def generation_facts(kept: Mapping[str, Any]) -> Facts:
    """Everything that is kept of one generation but its flags and its unit."""
    one, ending = kept["generation"], kept["ending"]
    return (
        ("generation", str(one["number"])),
        ("when", when(one["created_s"])),
        ("reason", one["reason"]),
        ("by", one["requested_by"]),
        ("profile", one["profile"] or _NONE),
        ("engine", f"{one['engine'] or _NONE} {(one['engine_sha256'] or '')[:16]}"),
        ("model", one["model_path"] or _NONE),
        ("outcome", ending["outcome"]),
        ("cause", ending["cause"] or _NONE),
        ("detail", ending["detail"] or _NONE),
        ("replaced", one["replaced_backup"] or "no unit file"),
        ("pins", json.dumps(one["pins"]) if one["pins"] else _NONE),
    )


def backups_table(backups: Sequence[Mapping[str, Any]]) -> Table:
    """What one can go back to; where each leads."""
    rows = tuple(
        (
            one["name"],
            when(one["changed_s"]),
            "by hand" if one["generation"] is None else str(one["generation"]),
            one["profile"] or _NONE,
            "is live" if one["is_live"] else "",
        )
        for one in backups
    )
    columns = heads("~backup", "~kept", "~before generation", "~profile", "~")
    links = tuple(
        None if one["is_live"] else f"/rollback?to={quote(one['name'])}" for one in backups
    )
    return Table("What was replaced, as files beside the unit", columns, rows, links=links)


def flags_table(origins: Sequence[Sequence[str]]) -> Table:
    """Every flag, and who set it."""
    rows = tuple((flag, key or "", origin) for flag, key, origin in origins)
    return Table("Flags, and who set them", heads("~flag", "~key", "~set by"), rows)


def plan_facts(plan: Mapping[str, Any]) -> Facts:
    """What a profile becomes on this machine."""
    engine, model = plan["engine"], plan["model"]
    size = format_mib(model["file_bytes"] // 1024**2)
    return (
        ("profile", f"{plan['profile']} ({', '.join(plan['layers'])})"),
        ("engine", f"{engine['name']} ({engine['dialect']}), {engine['path']}"),
        ("model", f"{model['path']} ({model['architecture']}, {model['quant']}, {size})"),
        *(("passed over", f"{one['engine']}: {one['reason']}") for one in plan["passed_over"]),
    )
