"""`tunerd plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.complete import keys, names_of
from tunerd.cli.output import columns, finish, json_option
from tunerd.core.quantity import format_mib

set_option = click.option(
    "--set",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=keys,
    help="Pin a key for this and later sweeps, such as speculation.n_max=2.",
)
untuned_option = click.option(
    "--untuned", is_flag=True, help="Leave out what the last promotion found."
)


@click.command(name="plan", short_help="What apply would do.")
@click.argument("profile", shell_complete=names_of("profiles"))
@set_option
@untuned_option
@click.option("--explain", is_flag=True, help="Show who set each flag, and why.")
@json_option
@click.pass_obj
def command(
    mode: str | None,
    profile: str,
    options: tuple[str, ...],
    untuned: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """What apply would do: command line, unit, difference, memory, warnings. Nothing is touched.

    Exit code 1 if it would be refused.

    \b
    Example:
      tunerd plan rtx-3090-ti-24gb --explain
      tunerd plan rtx-5060-ti-16gb --set speculation.n_max=3
    """  # noqa: D301
    from tunerd.actions.choose_engine import PlanRequest
    from tunerd.actions.context import build_context
    from tunerd.actions.plan import plan
    from tunerd.actions.profile_layers import parse_options
    from tunerd.cli.remote import remote_for, remote_plan

    remote = remote_for(mode, as_json=as_json)
    if remote is not None:
        found = remote_plan(remote, profile, options, untuned=untuned, explain=explain)
        finish(found, render, as_json=as_json)
        return
    request = PlanRequest(profile, parse_options(options), with_tuned=not untuned)
    result = plan(build_context(mode=mode), request, with_explain=explain)
    finish(result, render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    engine, model = payload["engine"], payload["model"]
    rows = [
        ("profile", f"{payload['profile']} ({', '.join(payload['layers'])})"),
        ("engine", f"{engine['name']} ({engine['dialect']}), {engine['path']}"),
        ("model", (f"{model['path']} ({model['architecture']}, {model['quant']}, "
                  f"{format_mib(model['file_bytes'] // 1024**2)})")),
    ]  # fmt: skip
    rows += [("passed over", f"{row['engine']}: {row['reason']}") for row in payload["passed_over"]]
    yield from columns(rows)
    yield ""
    yield "command line"
    yield from _command_line(payload)
    yield ""
    yield "memory"
    yield from memory_lines(payload["memory"])
    yield ""
    yield "unit"
    yield from payload["diff"].splitlines() or ["no difference from what is live"]


def _command_line(payload: Mapping[str, Any]) -> Iterator[str]:
    if payload["explain"] is None:
        argv = payload["argv"]
        line = f"  {argv[0]}"
        for word in argv[1:]:
            if word.startswith("-") and not word[1:2].isdigit():
                yield line + " \\"
                line = f"    {word}"
            else:
                line += f" {word}"
        yield line
        return
    rows = [(f"  {row['flag']}", row["key"], row["origin"]) for row in payload["explain"]]
    yield from columns(rows, ("  flag", "key", "set by"))


def memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    """The memory estimate as a table by device."""
    for device in memory["devices"]:
        free = format_mib(device["free_mib"])
        yield f"  {device['name']}: needs {format_mib(device['total_mib'])}, {free} free"
        if device["calculated_mib"] is not None:
            loads = f"{memory['loads']} load{'s' if memory['loads'] > 1 else ''}"
            calculated = format_mib(device["calculated_mib"])
            yield f"    calculated {calculated}; corrected by what {loads} of it showed"
        rows = [
            (f"    {part['name']}", format_mib(part["mib"]), part["why"])
            for part in device["parts"]
        ]
        yield from columns(rows)
    if memory["verdict"]:
        yield f"  {memory['verdict']}"
