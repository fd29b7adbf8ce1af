"""`tunerd promote`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.commands.apply import no_probation_option, now_option, show_plan, yes_option
from tunerd.cli.output import confirm, finish, json_option, progress_sink

if TYPE_CHECKING:
    from tunerd.actions.plan import Plan


@click.command(name="promote", short_help="Deploy what a sweep proved, and watch it.")
@click.argument("number", metavar="[ID]", type=int, required=False)
@yes_option
@now_option
@no_probation_option
@json_option
@click.pass_obj
def command(
    mode: str | None,
    number: int | None,
    yes: bool,
    now: bool,
    no_probation: bool,
    as_json: bool,
) -> None:
    """Deploy the winner of a sweep (the newest without ID) by the ordinary swap.

    It is measured once more through the unit that serves, and taken back if it is not faster there
    than what it replaced (exit code 3). Later applies keep it: it becomes the tuned layer.

    \b
    Example:
      tunerd promote
      tunerd promote 12 --yes
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.promote import promote
    from tunerd.cli.remote import remote_for, remote_promote

    remote = remote_for(mode, as_json=as_json)
    if remote is not None:
        done = remote_promote(remote, number, now=now, probation=not no_probation, yes=yes)
        finish(done, render, as_json=as_json)
        return
    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=True
    )

    def ask(made: Plan) -> None:
        if not yes:
            show_plan(made)
            confirm(f"Swap {context.unit} now?", yes=yes)

    result = promote(context, number, drain=not now, confirm=ask, with_probation=not no_probation)
    finish(result, render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["summary"]
    yield f"what changed: {payload['changes']}"
    yield payload["measured_again"]["text"]
    if payload["backup"]:
        yield f"what served before is kept as {payload['backup']}; `tunerd rollback` goes back"
