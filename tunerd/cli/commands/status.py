"""`tunerd status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from tunerd.cli.output import columns, finish, json_option
from tunerd.core.generation import Outcome
from tunerd.core.host import Mode
from tunerd.core.quantity import format_mib


@click.command(name="status", short_help="What serves now.")
@json_option
@click.pass_obj
def command(mode: str | None, as_json: bool) -> None:
    """What serves now, since when, from which generation, healthy or not.

    Members of group tunerd are shown the system's server, through the daemon's socket.

    \b
    Example:
      tunerd status
      tunerd status --json | jq .healthy
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.status import status
    from tunerd.cli.remote import remote_for

    remote = remote_for(mode, as_json=as_json)
    if remote is not None:
        finish(remote.read("status"), render, as_json=as_json)
        return
    finish(status(build_context(mode=mode)), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    since = payload["since_s"]
    text = (
        datetime.fromtimestamp(since, UTC).strftime(", since %Y-%m-%d %H:%M:%S UTC")
        if since
        else ""
    )
    health = payload["health"] or ("unknown" if payload["active"] == "active" else "not running")
    generation = "none by tunerd"
    if payload["generation"] is not None:
        profile, engine = payload["profile"], payload["engine"]
        what = f"profile {profile}, engine {engine}" if profile else "not by a profile"
        if payload["outcome"] == Outcome.REMOVED:
            what = "went back to where there was none"
        generation = f"{payload['generation']} ({what})"
    when = "with tunerd's supervisor" if payload["mode"] == Mode.LOCAL else "at boot"
    enabled = {True: f"starts {when}", False: f"does not start {when}", None: "unknown"}
    unit = f"{payload['active']} ({payload['sub_state']}){text}"
    if not payload["exists"] and payload["active"] == "inactive":
        unit, enabled[None] = "there is none", "nothing to start"
    rows = [
        ("unit", f"{payload['unit']}: {unit}"),
        ("health", health),
        ("serves", _serves(payload)),
        ("boot", enabled[payload["enabled"]]),
        ("generation", generation),
    ]
    measurement = payload["measurement"]
    if measurement is not None:
        until = datetime.fromtimestamp(measurement["until_s"], UTC).strftime("%H:%M:%S UTC")
        rows.append(("measures", f"{measurement['purpose']}, until {until} at the latest"))
    last = payload["last_swap"]
    if last is not None:
        cause = f": {last['cause']}" if last["cause"] else ""
        rows.append(("last swap", (f"generation {last['number']} by {last['reason']}: "
                                  f"{last['outcome']}{cause}")))  # fmt: skip
    for gpu in payload["vram"] or ():
        used = f"{format_mib(gpu['used_mib'])} used of {format_mib(gpu['total_mib'])}"
        rows.append((f"GPU {gpu['index']}", f"{gpu['name']}: {used}"))
    drift = payload["drift"]
    rows.append(("drift", "none" if not drift else "; ".join(row["text"] for row in drift)))
    yield from columns(rows)


def _serves(payload: Mapping[str, Any]) -> str:
    if not payload["exists"] and payload["active"] == "inactive":
        return "nothing"
    return f"{payload['alias'] or 'unknown'} at {payload['address'] or 'unknown'}"
