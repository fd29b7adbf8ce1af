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
    print(_without_space(found(root.command, {}, "tunerd", "_TUNERD_COMPLETE").source()))


def _without_space(script: str) -> str:
    """The script with no space put behind `KEY=`, where a value follows; bash alone needs to be told."""
    stay = "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2> /dev/null\n"
    return script.replace("    return 0\n", f"{stay}    return 0\n")
