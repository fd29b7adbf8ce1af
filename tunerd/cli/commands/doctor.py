"""`tunerd doctor`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.output import confirm, finish, json_option, progress_sink

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared

_HEADS = {"error": "errors", "warning": "warnings", "note": "notes"}
_WIDTH = 100


@click.command(name="doctor", short_help="What may be wrong on this box, and what to do.")
@click.option(
    "--deep",
    is_flag=True,
    help="Compare with a control run without CUDA graphs; the unit is away meanwhile.",
)
@click.option(
    "--budget", default="30m", show_default=True, help="The longest that the control run may take."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask before the control run.")
@json_option
@click.pass_obj
def command(mode: str | None, deep: bool, budget: str, yes: bool, as_json: bool) -> None:
    """What may be wrong on this box, and what to do about it.

    Looks at the machine, the driver, the unit that serves, its build, model and log, and at what was
    measured. Changes nothing, and works without a GPU and without a server: what could not be told is
    listed with what was missing. `docs/reference/doctor.md` has every rule. With --deep fresh servers
    are measured in the unit's place; afterwards it serves again, whatever happened.

    Exit code 0 for nothing or notes, 6 for warnings, 7 for errors.

    \b
    Example:
      tunerd doctor
      tunerd doctor --deep --budget 20m
      tunerd doctor --json | jq -r '.findings[] | [.severity, .code, .do] | @tsv'
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.doctor import DeepRequest, doctor
    from tunerd.cli.remote import by_daemon, from_daemon

    if not deep:
        found = from_daemon(mode, "doctor", as_json=as_json)
        finish(found or doctor(build_context(mode=mode)), render, as_json=as_json)
        return
    from tunerd.core.time_span import parse_time_span

    budget_s = parse_time_span(budget)
    if budget_s is None or not 0 < budget_s < float("inf"):
        raise click.UsageError("--budget is no duration, such as 30m")

    done = by_daemon(mode, "doctor/deep", {"budget_s": budget_s}, as_json=as_json, yes=yes)
    if done is not None:
        finish(done, render, as_json=as_json)
        return

    def ask(prepared: Prepared) -> None:
        confirm(prepared.question, yes=yes)

    progress = progress_sink(as_json=as_json)
    context = build_context(mode=mode, progress=progress, start_supervisor=True)
    finish(doctor(context, DeepRequest(budget_s, ask)), render, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: the worst first."""
    for severity, head in _HEADS.items():
        found = [one for one in payload["findings"] if one["severity"] == severity]
        if found:
            yield f"{head} ({len(found)})"
        for finding in found:
            yield from _finding(finding)
    if not payload["findings"]:
        yield "nothing was found"
    yield from _not_checked(payload["not_checked"])
    yield from _wrapped("passed: ", ", ".join(payload["passed"]) or "none", "  ")


def _finding(finding: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrapped(f"  {finding['code']}: ", finding["seen"], "    ")
    for name in ("why", "do", "source"):
        yield from _wrapped(f"    {name:<7} ", finding[name], " " * 12)
    yield ""


def _not_checked(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rules that could not tell, by what they lack."""
    by_missing: dict[str, list[str]] = {}
    for row in rows:
        for missing in row["missing"]:
            by_missing.setdefault(missing, []).append(row["code"])
    if rows:
        yield f"not checked ({len(rows)}), for want of"
    for missing, codes in by_missing.items():
        yield from _wrapped(f"  {missing}: ", ", ".join(codes), "    ")
    if rows:
        yield ""


def _wrapped(first: str, text: str, indent: str) -> list[str]:
    """Lines of at most 100 characters; a command or a path is never cut."""
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
