"""`tunerd rollback`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.commands.apply import now_option, yes_option
from tunerd.cli.complete import names_of
from tunerd.cli.output import (
    columns,
    confirm,
    finish,
    harmless,
    json_option,
    print_message,
    progress_sink,
)

if TYPE_CHECKING:
    from tunerd.actions.rollback import Target


@click.command(name="rollback", short_help="Go back.")
@click.option("--to", metavar="NAME|GENERATION", shell_complete=names_of("targets"),
              help="A backup's name or a generation's number.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Show what one can go back to.")
@yes_option
@now_option
@json_option
@click.pass_obj
def command(
    mode: str | None, to: str | None, only_list: bool, yes: bool, now: bool, as_json: bool
) -> None:
    """Go back to the unit that served before; it is a swap like any other, and can be undone.

    Without a terminal to ask on, it goes ahead: in trouble one command must be enough.

    Members of group tunerd need no root: it is done through the daemon's socket.

    \b
    Example:
      tunerd rollback
      tunerd rollback --list
      tunerd rollback --to 12
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.rollback import list_targets, rollback
    from tunerd.cli.remote import remote_for, remote_rollback

    remote = remote_for(mode, as_json=as_json)
    if remote is not None and only_list:
        finish(remote.read("rollback"), render_list, as_json=as_json)
        return
    if remote is not None:
        finish(remote_rollback(remote, to=to, now=now, yes=yes), render, as_json=as_json)
        return
    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=not only_list
    )
    if only_list:
        finish(list_targets(context), render_list, as_json=as_json)
        return

    def ask(target: Target) -> None:
        if yes or not sys.stdin.isatty():
            return
        print(harmless(target.diff, keep="\n"), file=sys.stderr)
        for message in target.messages:
            print_message(message)
        confirm(f"Go back to {target.name} now?", yes=yes)

    result = rollback(context, to=to, drain=not now, confirm=ask)
    finish(result, render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["summary"]
    if payload["backup"]:
        yield f"what served before is kept as {payload['backup']}"


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["backups"]:
        yield "no backups"
        return
    rows = []
    for backup in payload["backups"]:
        when = datetime.fromtimestamp(backup["changed_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        generation = "by hand" if backup["generation"] is None else str(backup["generation"])
        profile = backup["profile"] or "-"
        live = "is live" if backup["is_live"] else ""
        rows.append((backup["name"], when, generation, profile, live))
    yield from columns(rows, ("backup", "kept (UTC)", "before generation", "profile", ""))
