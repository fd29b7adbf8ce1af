"""`tunerd schedule`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from tunerd.cli.output import (
    columns,
    confirm,
    finish,
    json_option,
    print_message,
    progress_sink,
)
from tunerd.core.quantity import format_duration
from tunerd.core.schedule import Missed

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared
    from tunerd.actions.sweep_plan import PreparedSweep


@click.group(name="schedule", short_help="When sweeps begin by themselves.")
def command() -> None:
    """Nights: the daemon starts tunerd-sweep.service when the window opens, once for each opening."""


@command.command(name="show", short_help="The window and the next nights.")
@json_option
@click.pass_obj
def show(mode: str | None, as_json: bool) -> None:
    """The window, whether nights begin by themselves, and when the next ones are.

    \b
    Example:
      tunerd schedule show
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.schedule import show_schedule
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "schedule", as_json=as_json)
    finish(found or show_schedule(build_context(mode=mode)), render, as_json=as_json)


@command.command(name="set", short_help="Change the window, or turn nights on or off.")
@click.option(
    "--window", help="Times of day, such as 01:00-06:30; the server serves again by the end."
)
@click.option("--days", help="Days on which it opens, such as mon-fri or sat,sun.")
@click.option("--timezone", help="Whose clock it goes by, such as Europe/Berlin.")
@click.option("--missed", type=click.Choice([str(one) for one in Missed]),
              help="A night whose beginning was missed: begin late, or skip it.")  # fmt: skip
@click.option("--on/--off", "enabled", default=None, help="Whether nights begin by themselves.")
@json_option
@click.pass_obj
def set_(
    mode: str | None,
    window: str | None,
    days: str | None,
    timezone: str | None,
    missed: str | None,
    enabled: bool | None,
    as_json: bool,
) -> None:
    """Write the schedule into tunerd.toml; everything else in it stays as it is.

    \b
    Example:
      tunerd schedule set --window 01:00-06:30 --days mon-fri --on
      tunerd schedule set --off
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.schedule import KEYS, set_schedule
    from tunerd.cli.remote import by_daemon

    given = {
        "window": window, "days": days, "timezone": timezone, "missed": missed, "enabled": enabled,
    }  # fmt: skip
    changed = {KEYS[name]: value for name, value in given.items() if value is not None}
    if not changed:
        raise click.UsageError("nothing to set; for example --window 01:00-06:30 --on")
    done = by_daemon(mode, "schedule/set", given, as_json=as_json)
    finish(
        done or set_schedule(build_context(mode=mode), changed),
        lambda payload: [f"{key} = {value}" for key, value in payload["changed"].items()],
        as_json=as_json,
    )


@command.command(name="skip-tonight", short_help="Leave the next night out.")
@click.option("--undo", is_flag=True, help="Have it after all.")
@json_option
@click.pass_obj
def skip(mode: str | None, undo: bool, as_json: bool) -> None:
    """Leave the next night out; the one after it is had again.

    \b
    Example:
      tunerd schedule skip-tonight
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.schedule import skip_tonight
    from tunerd.cli.remote import by_daemon

    def told(payload: Mapping[str, Any]) -> list[str]:
        span = payload["skipped"]
        if span is None:
            return ["the next night is had"]
        return [f"skipped: {_times(span, payload['timezone'])}"]

    done = by_daemon(mode, "schedule/skip", {"undo": undo}, as_json=as_json)
    finish(done or skip_tonight(build_context(mode=mode), undo=undo), told, as_json=as_json)


@command.command(name="run-now", short_help="Begin a night at once.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def run_now(mode: str | None, yes: bool, as_json: bool) -> None:
    """Begin what a night would do, at once and whatever the window says, as tunerd-sweep.service.

    \b
    Example:
      tunerd schedule run-now --yes
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.schedule import begin_now
    from tunerd.cli.remote import by_daemon

    def ask(prepared: Prepared | PreparedSweep) -> None:
        if not yes:
            for message in prepared.messages:
                print_message(message)
        confirm(prepared.question, yes=yes)

    done = by_daemon(mode, "schedule/run-now", {}, as_json=as_json, yes=yes)
    if done is None:
        context = build_context(
            mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=True
        )
        done = begin_now(context, confirm=ask)
    finish(done, lambda payload: [f"{payload['unit']} runs"], as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        ("nights", "begin by themselves" if payload["enabled"] else "are begun by hand"),
        ("window", f"{payload['window'] or 'none'}, {payload['days']} ({payload['timezone']})"),
        ("budget", format_duration(payload["budget_s"])),
        ("missed", {"late": "begins late", "skip": "is skipped"}[payload["missed"]]),
    ]
    if payload["running"]:
        rows.append(("now", f"{payload['unit']} runs"))
    for number, night in enumerate(payload["nights"]):
        skipped = ", skipped" if night["skipped"] else ""
        rows.append(
            ("next" if not number else "", f"{_times(night, payload['timezone'])}{skipped}")
        )
    yield from columns(rows)


def _times(night: Mapping[str, Any], timezone: str) -> str:
    zone = ZoneInfo(timezone)
    begin = datetime.fromtimestamp(night["begin_s"], zone).strftime("%a %d %b %H:%M")
    end = datetime.fromtimestamp(night["end_s"], zone).strftime("%H:%M %Z")
    return f"{begin} to {end}"
