"""`tunerd verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import finish, json_option


@click.command(name="verify", short_help="Is the machine what was deployed?")
@json_option
@click.pass_obj
def command(mode: str | None, as_json: bool) -> None:
    """Is the machine what was deployed? Each difference is named.

    Exit code 0 as deployed, 6 drift, 1 could not tell.

    \b
    Example:
      tunerd verify || echo "somebody changed something"
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.verify import verify
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "verify", as_json=as_json)
    finish(found or verify(build_context(mode=mode)), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if payload["as_deployed"]:
        profile = f"profile {payload['profile']}" if payload["profile"] else "not by a profile"
        yield f"as deployed by generation {payload['generation']} ({profile})"
    elif payload["drift"]:
        count = len(payload["drift"])
        yield f"{count} difference{'s' if count > 1 else ''} from generation {payload['generation']}"
