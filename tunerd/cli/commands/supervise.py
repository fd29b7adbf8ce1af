"""`tunerd supervise`."""

from __future__ import annotations

import click


@click.command(name="supervise", short_help="Run units without a service manager.")
def command() -> None:
    """Run units on a machine without a service manager. The first apply starts it by itself.

    \b
    Example:
      tunerd --local supervise
    """  # noqa: D301
    from tunerd.actions.supervise import run_supervisor

    raise click.exceptions.Exit(run_supervisor())
