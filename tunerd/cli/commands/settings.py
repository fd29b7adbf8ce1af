"""`tunerd settings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import columns, finish, json_option


@click.command(name="settings", short_help="Every setting, and where it comes from.")
@json_option
@click.pass_obj
def command(mode: str | None, as_json: bool) -> None:
    """Every setting, its value, and where it comes from.

    \b
    Example:
      tunerd settings
      TUNERD_SERVICE__DRAIN_S=5 tunerd settings
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.show_settings import show_settings
    from tunerd.cli.remote import demand_root

    demand_root(mode, "settings", "settings may hold secrets, such as the address of a webhook")
    finish(show_settings(build_context(mode=mode)), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [(row["name"], str(row["value"]), row["source"]) for row in payload["settings"]]
    yield from columns(rows, ("setting", "value", "from"))
    yield ""
    yield from columns([(name, path) for name, path in payload["paths"].items()])
