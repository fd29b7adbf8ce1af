"""`tunerd report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.output import finish, json_option, print_message

if TYPE_CHECKING:
    from tunerd.core.result import ActionResult

_BYTES_PER_MB = 1_000_000


@click.command(name="report", short_help="One HTML file with conditions, tables and charts.")
@click.argument("run", type=int, nargs=-1)
@click.option("--output", "-o", metavar="FILE", help="Where to write it; `-` for standard output. "
              "By default tunerd-report.html here.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Do not say whether the figures still hold here.")
@json_option
@click.pass_obj
def command(
    mode: str | None, run: tuple[int, ...], output: str | None, no_check: bool, as_json: bool
) -> None:
    """One HTML file about some runs: conditions, verdicts, tables and charts.

    The file needs nothing else: it can be mailed, kept, and read without a network. Without RUN it
    shows the newest runs that together measured every suite.

    \b
    Example:
      tunerd report
      tunerd report 12 13 --output monday.html
    """  # noqa: D301
    from tunerd.actions.report import write_report
    from tunerd.cli.remote import from_daemon

    runs = ",".join(map(str, run)) or None
    made = from_daemon(mode, "report", as_json=as_json, runs=runs, check=not no_check)
    made = made or _made(mode, run, no_check=no_check)
    if output != "-":
        path = Path(output or "tunerd-report.html")
        finish(write_report(path, made), render, as_json=as_json)
    elif as_json:
        finish(made, render, as_json=True)
    else:
        for message in made.messages:
            print_message(message)
        click.echo(made.payload["html"])


def _made(mode: str | None, runs: tuple[int, ...], *, no_check: bool) -> ActionResult:
    from tunerd.actions.context import build_context
    from tunerd.actions.report import check_validity, gather_evidence, made_report
    from tunerd.web.report import ReportData, render_report

    context = build_context(mode=mode)
    evidence, messages = gather_evidence(context, runs)
    validities = {} if no_check else check_validity(context, evidence)
    html = render_report(ReportData(evidence, validities, context.clock.now_s()))
    return made_report(html, evidence, messages)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    runs = ", ".join(str(number) for number in payload["runs"])
    size = payload["bytes"] / _BYTES_PER_MB
    yield f"wrote {payload['path']} ({size:.1f} MB) about run {runs}"
