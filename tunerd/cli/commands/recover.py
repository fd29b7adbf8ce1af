"""`tunerd recover`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.output import finish, json_option, progress_sink


@click.command(name="recover", short_help="Finish or undo an interrupted swap.")
@json_option
@click.pass_obj
def command(mode: str | None, as_json: bool) -> None:
    """Finish or undo what an interrupted swap left. The daemon does this by itself.

    \b
    Example:
      tunerd recover
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.recover import recover
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "recover", {}, as_json=as_json)
    if done is not None:
        finish(done, render, as_json=as_json)
        return
    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=True
    )
    finish(recover(context), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if payload["found"] is None:
        yield payload["text"]
