"""`tunerd daemon`."""

from __future__ import annotations

import click


@click.command(name="daemon", short_help="The long-running half.")
@click.pass_obj
def command(mode: str | None) -> None:
    """Recover what a swap left, report ready, keep watch. Started by tunerd.service.

    \b
    Example:
      systemctl start tunerd
    """  # noqa: D301
    import os

    from tunerd import log
    from tunerd.actions.context import build_context
    from tunerd.daemon import run_daemon
    from tunerd.web.part import ApiPart

    context = build_context(mode=mode)  # which also says if the level of the log is none
    is_unit = bool(os.environ.get("JOURNAL_STREAM"))
    log.configure(
        level=os.environ.get("TUNERD_LOG_LEVEL", "info"),
        journal=True if is_unit else None,
        is_native=is_unit,
    )
    raise click.exceptions.Exit(run_daemon(context, [ApiPart]))
