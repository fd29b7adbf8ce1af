"""`tunerd probation`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import columns, finish, json_option, progress_sink
from tunerd.core.quantity import format_duration


@click.group(name="probation", short_help="How a new server is watched after a swap.")
def command() -> None:
    """After a swap a new server is watched, and taken back if it does worse."""


@command.command(name="show", short_help="Every probation, newest first.")
@json_option
@click.pass_obj
def show(mode: str | None, as_json: bool) -> None:
    """Every probation: which generation, how it stands, and why it ended.

    \b
    Example:
      tunerd probation show
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.probation import show_probation
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "probations", as_json=as_json)
    finish(found or show_probation(build_context(mode=mode)), render_list, as_json=as_json)


@command.command(name="run", short_help="Watch a generation in this terminal.")
@click.argument("generation", type=int)
@click.option("--sweep", type=int, help="The sweep that proved it.")
@click.option("--for", "duration", help="How long [default: probation.duration_s].")
@click.option("--restarts", type=int, default=0, hidden=True)  # when the swap was done
@json_option
@click.pass_obj
def run(
    mode: str | None,
    generation: int,
    sweep: int | None,
    duration: str | None,
    restarts: int,
    as_json: bool,
) -> None:
    """Watch a generation; what its unit `tunerd-probation-ID` runs. Exit code 3 if it was taken back.

    \b
    Example:
      tunerd probation run 14 --for 10min
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.probation import run_probation
    from tunerd.cli.remote import demand_root
    from tunerd.core.time_span import parse_time_span

    demand_root(
        mode, "probation run", "it is what a unit runs after a swap; `show` says how it stands"
    )
    seconds = None if duration is None else parse_time_span(duration)
    if duration is not None and (seconds is None or not 0 < seconds < float("inf")):
        raise click.UsageError("--for is no duration; for example --for 10min")
    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=True
    )
    result = run_probation(context, generation, sweep=sweep, duration_s=seconds, restarts=restarts)
    finish(result, render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"generation {payload['generation']}: {payload['state']}: {payload['reason']}"


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (str(row["generation"]), row["state"],
         format_duration(row["left_s"]) if row["state"] == "running" else "",
         "" if row["tok_s"] is None else f"{row['tok_s']:.1f}",
         "" if row["basis"]["slowest_tok_s"] is None else f"{row['basis']['slowest_tok_s']:.1f}",
         row["reason"])
        for row in payload["probations"]
    ]  # fmt: skip
    heads = ("generation", "state", "left", "tok/s", "slowest measured", "")
    if rows:
        yield from columns(rows, heads)
