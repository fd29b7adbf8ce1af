"""Commands that show what was measured: results and report."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tunerd.cli.output import columns, finish, print_message, sections_lines
from tunerd.operations import NUMBER, Call, operation
from tunerd.result import ActionResult
from tunerd.words import when

_KEPT_APART = ("timings", "client", "details")


@click.group(name="results", short_help="What was measured, and whether it still holds.")
def results_command() -> None:
    """What was measured: runs, their figures, and whether they still hold.

    \b
    Example:
      tunerd results list
      tunerd results show 12
      tunerd results export 12 --format csv > run-12.csv
      tunerd results stale
    """  # noqa: D301


@results_command.command(name="list", short_help="Every run.")
@click.option("--all", "show_all", is_flag=True, help="Every run, not only the newest 20.")
@operation("render_list")
def list_command(call: Call, show_all: bool) -> ActionResult:
    """Every run: when, what was measured, how many samples, how it ended.

    \b
    Example:
      tunerd results list --json | jq '.results[0].run'
    """  # noqa: D301
    from tunerd.measure.results import DEFAULT_LIMIT, results

    return results(call.context(), limit=None if show_all else DEFAULT_LIMIT)


@results_command.command(name="show", short_help="One run in full.")
@click.argument("run", type=NUMBER)
@operation("render_show")
def show_command(call: Call, run: int) -> ActionResult:
    """One run: conditions, figures by arm and case, verdicts.

    \b
    Example:
      tunerd results show 12
    """  # noqa: D301
    from tunerd.measure.results import show

    return show(call.context(), run)


@results_command.command(name="export", short_help="Runs with every sample, as JSON or CSV.")
@click.argument("run", type=NUMBER, nargs=-1, required=True)
@click.option("--format", "form", type=click.Choice(["json", "csv"]), default="json",
              show_default=True, help="CSV has one line per sample.")  # fmt: skip
@operation("render_csv", show="show_export")
def export_command(call: Call, run: tuple[int, ...], form: str) -> ActionResult:
    """Runs with every sample, on standard output. What is missing is null, or empty in CSV.

    \b
    Example:
      tunerd results export 12 13 > runs.json
    """  # noqa: D301
    from tunerd.measure.results import export

    del form  # of who is shown it
    return export(call.context(), run)


def show_export(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """As lines for programs, or as JSON."""
    finish(perform(), render_csv, as_json=as_json or params["form"] == "json", is_data=True)


@results_command.command(name="stale", short_help="What changed since it was measured.")
@click.option("--all", "show_all", is_flag=True, help="Every run, not only the newest 20.")
@operation("render_stale")
def stale_command(call: Call, show_all: bool) -> ActionResult:
    """For each measured configuration, whether it still holds here, and which part changed.

    \b
    Example:
      tunerd results stale
    """  # noqa: D301
    from tunerd.measure.results import DEFAULT_LIMIT, stale

    return stale(call.context(), limit=None if show_all else DEFAULT_LIMIT)


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (
            str(row["run"]),
            when(row["started_s"]),
            row["kind"],
            ", ".join(row["suites"]) or "-",
            row["profile"] or row["target"],
            ", ".join(row["arm_names"]) or "-",
            str(row["samples"]),
            str(row["left_out"]),
            _ending(row),
        )
        for row in payload["results"]
    ]
    heads = ("run", "when", "kind", "suites", "of", "arms", "samples", "left out", "ended")
    yield from columns(rows, heads) if rows else []
    hidden = payload["total"] - len(payload["results"])
    if hidden > 0:
        yield f"{hidden} older ones: --all"


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: what a report says of the run, but for every flag."""
    from tunerd.web.report import FLAGS, evidence_of, sections_of

    run = evidence_of({**payload, **payload["run"], "samples": payload["samples"]})
    shown = (section for section in sections_of([run], {}) if section.name != FLAGS)
    yield f"run {run.run.number}"
    yield from sections_lines(shown)


def render_stale(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    for row in payload["results"]:
        yield f"run {row['run']}, {row['arm']} ({row['kind']}, {when(row['started_s'])}): {row['state']}"
        yield from (f"  {text}" for text in (*row["changes"], *row["remarks"]))
        if row["differs_from_live"]:
            yield f"  what serves now differs: {'; '.join(row['differs_from_live'])}"
        elif row["differs_from_live"] is not None:
            yield "  it is what serves now"
    hidden = payload["total"] - len({row["run"] for row in payload["results"]})
    if hidden > 0:
        yield f"{hidden} older runs: --all"


def render_csv(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line per sample, with the names of columns in the first."""
    rows = [
        {"run": run["run"], **_flat(sample)} for run in payload["runs"] for sample in run["samples"]
    ]
    heads = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, heads, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    yield text.getvalue().removesuffix("\n")


def _flat(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as one line: parts side by side, lists joined, what is missing empty."""
    row = {key: value for key, value in sample.items() if key not in _KEPT_APART}
    row |= sample["timings"] or {}
    row |= sample["client"] or {}
    row |= {f"detail {key}": value for key, value in sample["details"].items()}
    return {key: _cell(value) for key, value in row.items()}


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return " | ".join(str(one) for one in value)
    return "" if value is None else value


def _ending(run: Mapping[str, Any]) -> str:
    if run["outcome"] is None:
        return "not yet, or it was cut short"
    return f"{run['outcome']}: {run['reason']}" if run["reason"] else str(run["outcome"])


_BYTES_PER_MB = 1_000_000


@click.command(name="report", short_help="One HTML file with conditions, tables and charts.")
@click.argument("run", type=NUMBER, nargs=-1)
@click.option("--output", "-o", metavar="FILE", help="Where to write it; `-` for standard output. "
              "By default tunerd-report.html here.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Do not say whether the figures still hold here.")
@operation("render_report", show="show_written")
def report_command(
    call: Call, run: tuple[int, ...], output: str | None, no_check: bool
) -> ActionResult:
    """One HTML file about some runs: conditions, verdicts, tables and charts.

    The file needs nothing else: it can be mailed, kept, and read without a network. Without RUN it
    shows the newest runs that together measured every suite.

    \b
    Example:
      tunerd report
      tunerd report 12 13 --output monday.html
    """  # noqa: D301
    from tunerd.web.report import (
        ReportData,
        check_validity,
        gather_evidence,
        made_report,
        render_report,
    )

    del output  # where it is typed
    context = call.context()
    evidence, messages = gather_evidence(context, run)
    validities = {} if no_check else check_validity(context, evidence)
    html = render_report(ReportData(evidence, validities, context.clock.now_s()))
    return made_report(html, evidence, messages)


def show_written(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """Write it where that was asked for."""
    from tunerd.web.report import write_report

    made, output = perform(), params["output"]
    if output != "-":
        path = Path(output or "tunerd-report.html")
        finish(write_report(path, made), render_report, as_json=as_json)
    elif as_json:
        finish(made, render_report, as_json=True)
    else:
        for message in made.messages:
            print_message(message)
        click.echo(made.payload["html"])


def render_report(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    runs = ", ".join(str(number) for number in payload["runs"])
    size = payload["bytes"] / _BYTES_PER_MB
    yield f"wrote {payload['path']} ({size:.1f} MB) about run {runs}"
