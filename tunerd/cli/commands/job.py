"""`tunerd job`, which the local API starts for an operator; nobody types it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tunerd.actions.context import Context
    from tunerd.core.progress import ProgressSink


@click.command(name="job", hidden=True)
@click.argument("number", type=int)
@click.pass_obj
def command(mode: str | None, number: int) -> None:
    """Do what was asked for through the local API, and keep what happens in the job's folder."""
    from tunerd.actions.context import build_context
    from tunerd.actions.jobs import run_job

    def make_context(progress: ProgressSink) -> Context:
        return build_context(mode=mode, progress=progress, start_supervisor=True)

    raise click.exceptions.Exit(run_job(make_context, number))
