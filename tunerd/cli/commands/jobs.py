"""`tunerd jobs`: what was asked for through the daemon, how far it is, and what came of it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.commands.history import when
from tunerd.cli.output import columns, finish, json_option, progress_sink

if TYPE_CHECKING:
    from tunerd.actions.remote import Remote
    from tunerd.core.result import ActionResult

# Where the lines of each kind's result are made; others say no more than how they ended.
_RENDERS: Mapping[str, tuple[str, str]] = {
    "apply": ("apply", "render"),
    "rollback": ("rollback", "render"),
    "promote": ("promote", "render"),
    "recover": ("recover", "render"),
    "bench": ("bench_view", "render"),
    "compare": ("compare", "render"),
    "sweep run": ("sweep", "render_end"),
    "sweep resume": ("sweep", "render_end"),
    "doctor --deep": ("doctor", "render"),
    "workload learn": ("workload", "render_show"),
}


@click.group(
    name="jobs", invoke_without_command=True, short_help="What the daemon does for people."
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """What members of group tunerd asked for through the daemon since the machine was started.

    \b
    Example:
      tunerd jobs
      tunerd jobs watch 7
    """  # noqa: D301
    if ctx.invoked_subcommand is not None:
        return
    from tunerd.actions.context import build_context
    from tunerd.actions.jobs import jobs
    from tunerd.cli.remote import from_daemon

    found = from_daemon(ctx.obj, "jobs", as_json=as_json)
    finish(found or jobs(build_context(mode=ctx.obj)), render, as_json=as_json)


@command.command(name="watch", short_help="Follow a job to its end.")
@click.argument("number", type=click.IntRange(1))
@json_option
@click.pass_obj
def watch(mode: str | None, number: int, as_json: bool) -> None:
    """Show what a job does until it is over, then what came of it, with its exit code.

    Ctrl-C leaves it running.

    \b
    Example:
      tunerd jobs watch 7
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.jobs import read_job, watch_job
    from tunerd.cli.remote import remote_for

    remote = remote_for(mode, as_json=as_json)
    if remote is not None:
        kind = str(remote.read("jobs", str(number)).payload["job"]["kind"])
        done = _followed(remote, number)
    else:
        context = build_context(mode=mode, progress=progress_sink(as_json=as_json))
        kind = str(read_job(context, number).request.kind)
        done = watch_job(context, number)
    finish(done, lambda payload: _lines(kind, number, payload), as_json=as_json)


@command.command(name="stop", short_help="End a job that measures.")
@click.argument("number", type=click.IntRange(1))
@json_option
@click.pass_obj
def stop(mode: str | None, number: int, as_json: bool) -> None:
    """End a job that measures or looks; the server comes back, and what was measured is kept.

    A swap is not ended half-way: `tunerd rollback` undoes it when it is done.

    \b
    Example:
      tunerd jobs stop 7
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.jobs import stop_job
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "jobs/stop", {"job": number}, as_json=as_json)
    if done is None:
        context = build_context(mode=mode, progress=progress_sink(as_json=as_json))
        done = stop_job(context, number)
    finish(
        done,
        lambda payload: (f"job {payload['job']}, {payload['kind']}, is ended",),
        as_json=as_json,
    )


def _followed(remote: Remote, number: int) -> ActionResult:
    try:
        return remote.follow(number)
    except KeyboardInterrupt as end:
        end.add_note(f"job {number} goes on")
        raise


def _lines(kind: str, number: int, payload: Mapping[str, Any]) -> Iterable[str]:
    """What the command of that kind would have said."""
    if kind not in _RENDERS or "question" in payload:
        return (f"job {number}, {kind}, is done",)
    module, name = _RENDERS[kind]
    lines: Iterable[str] = getattr(importlib.import_module(f"tunerd.cli.commands.{module}"), name)(
        payload
    )
    return lines


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line each, newest first."""
    if not payload["jobs"]:
        yield "nobody asked for anything since the machine was started"
        return
    rows = [
        (
            str(row["job"]),
            when(row["asked_s"]),
            row["asked_by"],
            row["kind"],
            row["state"],
            _doing(row),
        )
        for row in payload["jobs"]
    ]
    yield from columns(rows, ("job", "when (UTC)", "by", "what", "state", ""))


def _doing(row: Mapping[str, Any]) -> str:
    if row["state"] == "running" and row["progress"] is not None:
        return str(row["progress"]["text"])
    failed = (row["result"] or {}).get("error")
    return str(failed["message"]) if failed else ""
