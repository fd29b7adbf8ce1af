"""`tunerd model new`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tunerd.cli.complete import shapes
from tunerd.cli.output import finish, json_option, progress_sink
from tunerd.core.quantity import format_mib, need_mib


@click.group(name="model", short_help="Designed models.")
def command() -> None:
    """Small designed models, whose answers are known to the token.

    \b
    Example:
      tunerd model new ./designed-tiny.gguf
    """  # noqa: D301


@command.command(name="new", short_help="Write one.")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--shape", default="tiny", show_default=True, shell_complete=shapes,
              help="tiny, tiny-moe, medium, ...")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Another seed is another text.")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@json_option
@click.pass_obj
def new_command(
    mode: str | None, path: Path, shape: str, seed: int, force: bool, as_json: bool
) -> None:
    """Write a designed model and, beside it, the truth about what it will answer.

    \b
    Example:
      tunerd model new ./designed-tiny.gguf
      tunerd model new ./medium.gguf --shape medium
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.model_new import model_new

    context = build_context(mode=mode, progress=progress_sink(as_json=as_json))
    result = model_new(context, path, shape=shape, seed=seed, force=force)
    finish(result, render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"wrote {payload['path']} ({format_mib(need_mib(payload['bytes']))})"
    yield f"its truth: {payload['truth']}"
