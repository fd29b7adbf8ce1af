"""`tunerd decline`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import finish, json_option


@click.command(name="decline", short_help="Turn down what a sweep proposes.")
@click.argument("number", metavar="[ID]", type=int, required=False)
@click.option("--why", help="Kept with the sweep.")
@json_option
@click.pass_obj
def command(mode: str | None, number: int | None, why: str | None, as_json: bool) -> None:
    """Turn down the winner of a sweep (the newest without ID); its samples stay.

    \b
    Example:
      tunerd decline 12 --why "KV types stay as they are"
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.promote import decline
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "decline", {"sweep": number, "why": why}, as_json=as_json)
    finish(done or decline(build_context(mode=mode), number, why=why), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"sweep {payload['sweep']}: {payload['text']}"
