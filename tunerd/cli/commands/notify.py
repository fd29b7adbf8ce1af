"""`tunerd notify`."""

from __future__ import annotations

import click

from tunerd.cli.output import finish, json_option, progress_sink


@click.group(name="notify", short_help="Notices to a webhook.")
def command() -> None:
    """What the guards say goes to the journal, and to notify.webhook where one is set."""


@command.command(name="test", short_help="Send a notice that says it is a test.")
@json_option
@click.pass_obj
def test(mode: str | None, as_json: bool) -> None:
    """Send a notice to notify.webhook, from here and now.

    \b
    Example:
      tunerd notify test
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.notices import try_notice
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "notify/test", {}, as_json=as_json)
    finish(
        done or try_notice(build_context(mode=mode)),
        lambda _payload: ["it arrived"],
        as_json=as_json,
    )


@command.command(name="send", short_help="Send a notice that was left, as its unit does.")
@click.argument("name")
@json_option
@click.pass_obj
def send(mode: str | None, name: str, as_json: bool) -> None:
    """Send a notice that the daemon left; what tunerd-notify@NAME.service runs.

    \b
    Example:
      tunerd notify send 1790000000000
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.notices import send_notice
    from tunerd.cli.remote import demand_root
    from tunerd.errors import ConfigError

    demand_root(
        mode, "notify send", "it is what a unit runs; `tunerd notify test` tries the webhook"
    )
    sink, as_left = progress_sink(as_json=as_json), False
    try:
        context = build_context(mode=mode, progress=sink)
    except ConfigError:
        context, as_left = build_context(mode=mode, progress=sink, needs_settings=False), True
    done = send_notice(context, name, as_left=as_left)
    finish(done, lambda _payload: ["it arrived"], as_json=as_json)
