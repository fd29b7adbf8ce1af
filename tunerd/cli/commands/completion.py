"""`tunerd completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(name="completion", short_help="Completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Example:
      tunerd completion bash > /etc/bash_completion.d/tunerd
    """  # noqa: D301
    root = ctx.find_root()
    found = get_completion_class(shell)
    if found is None:
        message = f"no completion for {shell}"
        raise click.UsageError(message)
    print(found(root.command, {}, "tunerd", "_TUNERD_COMPLETE").source())
