"""`tunerd history`, `history show` and `history diff`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from tunerd.cli.complete import names_of
from tunerd.cli.output import columns, finish, json_option
from tunerd.core.quantity import format_duration

_MOST_SHOWN = 1000  # through the daemon's socket


@click.group(name="history", invoke_without_command=True, short_help="Every swap.")
@click.option("--all", "show_all", is_flag=True, help="Every generation, not only the newest 20.")
@json_option
@click.pass_context
def command(ctx: click.Context, show_all: bool, as_json: bool) -> None:
    """Every swap: when, what, why, and how it ended.

    \b
    Example:
      tunerd history
      tunerd history show 14
      tunerd history diff 13 14
    """  # noqa: D301
    if ctx.invoked_subcommand is not None:
        return
    from tunerd.actions.context import build_context
    from tunerd.actions.history import DEFAULT_LIMIT, history
    from tunerd.cli.remote import remote_for

    limit = None if show_all else DEFAULT_LIMIT
    remote = remote_for(ctx.obj, as_json=as_json)
    if remote is not None:
        finish(remote.read("history", limit=limit or _MOST_SHOWN), render, as_json=as_json)
        return
    finish(history(build_context(mode=ctx.obj), limit=limit), render, as_json=as_json)


@command.command(name="show", short_help="Everything kept of one generation.")
@click.argument("number", type=int, shell_complete=names_of("generations"))
@json_option
@click.pass_context
def show_command(ctx: click.Context, number: int, as_json: bool) -> None:
    """Everything that is kept of one generation.

    \b
    Example:
      tunerd history show 14
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.history import show
    from tunerd.cli.remote import remote_for

    remote = remote_for(ctx.obj, as_json=as_json)
    if remote is not None:
        finish(remote.read("history", str(number)), render_show, as_json=as_json)
        return
    finish(show(build_context(mode=ctx.obj), number), render_show, as_json=as_json)


@command.command(name="diff", short_help="How two generations differ.")
@click.argument("one", type=int, shell_complete=names_of("generations"))
@click.argument("other", type=int, shell_complete=names_of("generations"))
@json_option
@click.pass_context
def diff_command(ctx: click.Context, one: int, other: int, as_json: bool) -> None:
    """How the units of two generations differ.

    \b
    Example:
      tunerd history diff 13 14
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.history import diff
    from tunerd.cli.remote import from_daemon

    found = from_daemon(ctx.obj, "history", str(one), "diff", str(other), as_json=as_json)
    finish(found or diff(build_context(mode=ctx.obj), one, other), render_diff, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["generations"]:
        yield "nothing was deployed yet"
        return
    rows = [
        (
            str(row["number"]),
            when(row["created_s"]),
            row["reason"],
            row["profile"] or "-",
            row["engine"] or "-",
            row["outcome"] + (f": {row['cause']}" if row["cause"] else ""),
            format_duration(row["without_service_s"])
            if row["without_service_s"] is not None
            else "-",
        )
        for row in payload["generations"]
    ]
    heads = ("no", "when (UTC)", "reason", "profile", "engine", "outcome", "without service")
    yield from columns(rows, heads)
    hidden = payload["total"] - len(payload["generations"])
    if hidden > 0:
        yield f"{hidden} older ones: --all"


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    generation, ending = payload["generation"], payload["ending"]
    rows = [
        ("generation", str(generation["number"])),
        ("when (UTC)", when(generation["created_s"])),
        ("reason", generation["reason"]),
        ("by", generation["requested_by"] or "unknown"),
        ("profile", generation["profile"] or "-"),
        ("engine", f"{generation['engine'] or '-'} {(generation['engine_sha256'] or '')[:16]}"),
        ("model", generation["model_path"] or "-"),
        ("outcome", ending["outcome"]),
        ("cause", ending["cause"] or "-"),
        ("detail", ending["detail"] or "-"),
        ("replaced", generation["replaced_backup"] or "no unit file"),
        ("pins", json.dumps(generation["pins"]) if generation["pins"] else "-"),
    ]
    yield from columns(rows)
    yield ""
    flags = [(f"  {flag}", key, origin) for flag, key, origin in generation["origins"]]
    yield from columns(flags, ("  flag", "key", "set by")) if flags else []
    yield ""
    yield from (payload["unit"] or "the unit file was removed").splitlines()


def render_diff(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield from payload["diff"].splitlines() or ["no difference"]


def when(seconds: float) -> str:
    """Time for people, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
