"""`tunerd apply`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.commands.plan import render as render_plan
from tunerd.cli.commands.plan import set_option, untuned_option
from tunerd.cli.complete import names_of
from tunerd.cli.output import confirm, finish, json_option, print_message, progress_sink, show

if TYPE_CHECKING:
    from tunerd.actions.plan import Plan

now_option = click.option("--now", is_flag=True, help="Do not wait for running requests.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
no_probation_option = click.option(
    "--no-probation", is_flag=True, help="Do not watch it afterwards, nor go back by itself."
)


@click.command(name="apply", short_help="Deploy a profile.")
@click.argument("profile", shell_complete=names_of("profiles"))
@set_option
@untuned_option
@click.option("--dry-run", is_flag=True, help="The same as `tunerd plan`.")
@yes_option
@now_option
@no_probation_option
@json_option
@click.pass_obj
def command(
    mode: str | None,
    profile: str,
    options: tuple[str, ...],
    untuned: bool,
    dry_run: bool,
    yes: bool,
    now: bool,
    no_probation: bool,
    as_json: bool,
) -> None:
    """Deploy a profile: keep what serves, swap the unit, wait for a real generation.

    If the new server does not answer, the old one is put back (exit code 3).

    Members of group tunerd need no root: it is done through the daemon's socket, for numbers and
    switches with --set, and goes on when this command is left.

    \b
    Example:
      tunerd apply rtx-3090-ti-24gb
      tunerd apply rtx-5060-ti-16gb --set speculation.n_max=3 --yes
    """  # noqa: D301
    from tunerd.actions.apply import apply
    from tunerd.actions.choose_engine import PlanRequest
    from tunerd.actions.context import build_context
    from tunerd.actions.plan import plan
    from tunerd.actions.profile_layers import parse_options
    from tunerd.cli.remote import remote_apply, remote_for, remote_plan

    remote = remote_for(mode, as_json=as_json)
    if remote is not None and dry_run:
        finish(remote_plan(remote, profile, options, untuned=untuned), render_plan, as_json=as_json)
        return
    if remote is not None:
        done = remote_apply(
            remote, profile, options, untuned=untuned, now=now, probation=not no_probation, yes=yes
        )
        finish(done, render, as_json=as_json)
        return
    request = PlanRequest(profile, parse_options(options), with_tuned=not untuned)
    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=not dry_run
    )
    if dry_run:
        finish(plan(context, request), render_plan, as_json=as_json)
        return

    def ask(made: Plan) -> None:
        if yes:
            return
        show_plan(made)
        confirm(f"Swap {context.unit} now?", yes=yes)

    result = apply(context, request, drain=not now, confirm=ask, probation=not no_probation)
    finish(result, render, as_json=as_json)


def show_plan(made: Plan) -> None:
    """What a person sees before a swap."""
    from tunerd.actions.plan import plan_json

    show(plan_json(made, with_explain=False), render_plan, sys.stderr)
    for message in made.messages:
        print_message(message)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["summary"]
    if payload["backup"]:
        yield f"what served before is kept as {payload['backup']}; `tunerd rollback` goes back"
    elif payload["backup"] is None:
        yield "no unit file stood before; `tunerd rollback` removes this one"
