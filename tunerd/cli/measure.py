"""Commands that measure, and that show what was measured: bench, compare, workload, results, report."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tunerd.cli.deploy import request_of, set_option, start_after_option, yes_option
from tunerd.cli.output import (
    away_text,
    columns,
    finish,
    line,
    names_of,
    section_lines,
    sections_lines,
    table_lines,
)
from tunerd.errors import UsageError
from tunerd.operations import (
    NUMBER,
    PROFILE,
    SEED,
    SETTING,
    SIDE,
    SPAN,
    WORKLOAD,
    Call,
    Decimal,
    operation,
)
from tunerd.result import ActionResult
from tunerd.web.view import figure, workload_section
from tunerd.words import check_name, counted, format_duration, when

SUITES = ("mtp", "lengths", "cache", "deep", "quality", "workload")


# The last line of the community's mtp-bench, for whoever puts his own beside it, and where its figures stand in a table.
_AGGREGATE = {
    "n_requests": "n_requests", "total_predicted": "predicted", "total_draft": "drafted",
    "total_draft_accepted": "accepted", "aggregate_accept_rate": "acceptance_ratio",
    "wall_s_total": "wall_s",
}  # fmt: skip


def render_bench(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: what a report says of the run, and the published numbers."""
    from tunerd.web.report import evidence_of, figures_of, left_out, series_of

    begun_s = min((one["at_s"] for one in payload["samples"]), default=0.0)
    run = {"kind": "bench", "suites": [payload["suite"]], "started_s": begun_s, "model": None,
           "outcome": None, "ended_s": None, "reason": None, "verdicts": [], **payload}  # fmt: skip
    evidence = [evidence_of(run)]
    series = series_of(evidence)
    yield f"run {payload['run']}: {payload['suite']} of {payload['target']}, seed {payload['seed']}"
    yield from sections_lines((*figures_of(evidence, series), left_out(series)))
    for table in payload["tables"].values():
        yield "Aggregate: " + json.dumps({name: table[key] for name, key in _AGGREGATE.items()})
    if payload["against"]:
        yield ""
        yield "beside the published numbers:"
        rows = (
            (row["what"], figure(row["here"], 3), figure(row["published"], 3),
             None if row["ratio"] is None else f"{row['ratio']:.2f}x", row["unit"])
            for row in payload["against"]
        )  # fmt: skip
        yield from columns(rows, ("", "here", "published", "ratio", ""))


@click.command(name="bench")
@click.argument("profile", required=False, type=PROFILE, shell_complete=names_of("profiles"))
@click.option("--url", "urls", multiple=True, metavar="[NAME=]URL[#MODEL]",
              help="Measure the server at this address, http://HOST:PORT; repeat it to measure several.")  # fmt: skip
@click.option("--suite", type=click.Choice(SUITES), default="mtp", show_default=True,
              help="What to measure.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1, 1000), help="How often each case is measured.")
@click.option("--depth", type=click.IntRange(16, 10_000_000),
              help="Tokens of the long prompt (lengths, cache).")  # fmt: skip
@click.option("--workload", type=WORKLOAD, shell_complete=names_of("workloads"),
              help="The mix of requests for --suite workload [default: the profile's own].")  # fmt: skip
@click.option("--against", type=click.Choice(["published"]),
              help="Show the profile's published numbers beside yours (mtp, lengths, deep).")  # fmt: skip
@click.option("--seed", type=SEED, help="Seed of texts and order, to repeat a bench.")
@set_option
@start_after_option
@yes_option
@operation("render_bench", asks=lambda given: given["profile"] is not None)
def bench_command(
    call: Call, profile: str | None, urls: tuple[str, ...], options: tuple[str, ...], **given: Any
) -> ActionResult:
    """Measure the unit that serves, a PROFILE in its place, or a server by its address.

    With PROFILE the unit does not serve meanwhile; it comes back whatever happens.

    \b
    Suites:
      mtp       the nine kinds of text of the community's mtp-bench
      lengths   from which answer length speculation pays
      cache     whether a prompt is found again in the cache
      deep      fills the context, and finds where memory ends
      quality   whether speculation changes answers
      workload  seconds per turn of your own mix of requests

    \b
    Example:
      tunerd bench
      tunerd bench rtx-3090-ti-24gb --suite lengths --yes
      tunerd bench --url http://127.0.0.1:11434 --suite lengths
      tunerd bench --url ollama=http://127.0.0.1:11434#qwen3:30b --url mtp=http://127.0.0.1:8080
    """  # noqa: D301
    from tunerd.measure.bench import bench_live, bench_profile, bench_urls
    from tunerd.measure.request import BenchRequest, Suite

    start_after, against = given.pop("start_after"), given.pop("against")
    if profile is not None and urls:
        raise click.UsageError("Give a PROFILE or --url, not both.")
    if profile is None and (options or start_after):
        raise click.UsageError("--set and --start-after need a PROFILE.")
    if given["depth"] is not None and given["suite"] not in {"lengths", "cache"}:
        raise click.UsageError("--depth is for --suite lengths and cache.")
    if given["repeats"] is not None and given["suite"] == "deep":
        raise click.UsageError("--repeats is not for --suite deep, which fills the context once.")
    if given["workload"] is not None and given["suite"] != "workload":
        raise click.UsageError("--workload is for --suite workload.")
    given["suite"] = Suite(given["suite"])
    asked = BenchRequest(**given, is_against_published=against is not None)
    ctx = call.context(acts=profile is not None, tells=True)
    if urls:
        return bench_urls(ctx, asked, urls)
    if profile is None:
        return bench_live(ctx, asked)
    request = request_of(profile, options)
    return bench_profile(ctx, asked, request, call.ask, start_after=start_after)


@click.command(name="compare")
@click.argument("sides", nargs=-1, type=SIDE, metavar="[A [B]]", shell_complete=names_of("sides"))
@click.option("--set", "options", multiple=True, type=SETTING, metavar="KEY=VALUE",
              shell_complete=names_of("keys"), help="Set a key for B only.")  # fmt: skip
@click.option(
    "--profile",
    "base",
    type=PROFILE,
    shell_complete=names_of("profiles"),
    help="Profile to which engines and single settings are applied [default: what serves].",
)
@click.option("--workload", type=WORKLOAD, shell_complete=names_of("workloads"),
              help="The mix of requests [default: the profile's own].")  # fmt: skip
@click.option("--budget", type=SPAN, default="30m", show_default=True,
              help="Time limit.")  # fmt: skip
@click.option("--pairs", "max_pairs", type=click.IntRange(3, 1000), default=60, show_default=True,
              help="Most pairs of fresh servers.")  # fmt: skip
@click.option("--tolerance", type=Decimal(0.1, 50.0), default=1.5, show_default=True,
              help="Difference in percent that does not matter.")  # fmt: skip
@click.option("--seed", type=SEED, help="Seed of texts and order, to repeat a comparison.")
@start_after_option
@yes_option
@operation("render_compare")
def compare_command(
    call: Call,
    sides: tuple[str, ...],
    budget: float,
    max_pairs: int,
    tolerance: float,
    **given: Any,
) -> ActionResult:
    """Measure which of two is faster, by pairs of fresh servers that get the same requests.

    It ends when the result is sure or time is up. A and B are profiles, generation numbers, engines,
    single settings (KEY=VALUE), or `live`: what serves now. A is `live` by default, B is A with --set.

    The unit is stopped meanwhile, and candidates answer in its place; afterwards it serves again,
    whatever happens. If B may change answers (another engine, model, template, KV type, reasoning,
    sampling), both are first asked the same questions; a B that answers differently is not recommended.

    Exit code 0 whatever the verdict, 1 if nothing could be measured.

    \b
    Example:
      tunerd compare --set speculation.n_max=2
      tunerd compare rtx-3090-ti-24gb rtx-3090-ti-24gb-dflash --workload coding-agent
      tunerd compare speculation.type=off speculation.n_max=3 --budget 2h
      tunerd compare 13 14
    """  # noqa: D301
    from tunerd.measure.compare import CompareRequest, run_compare
    from tunerd.measure.pairs import Limits

    if len(sides) > 2:  # noqa: PLR2004 -- A and B
        raise click.UsageError("compare takes two sides at most")
    limits = Limits(budget_s=budget, max_pairs=max_pairs, tolerance=tolerance / 100)
    request = CompareRequest(words=sides, limits=limits, **given)
    return run_compare(call.context(acts=True), request, confirm=call.agree)


def render_compare(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["sentence"]
    yield from (f"  {reason}" for reason in payload["reasons"])
    if payload["changes"]:
        yield ""
        yield "what may change answers:"
        yield from (f"  {change['text']}" for change in payload["changes"])
        yield from _answers(payload["quality"])
    if payload["parts"]:
        yield ""
        rows = (
            (row["class"] or row["part"], f"{row['a_s']:.3f}", f"{row['b_s']:.3f}",
             f"{100 * row['gain']:+.1f} %", _interval(row))
            for row in payload["parts"]
        )  # fmt: skip
        yield from columns(rows, ("", "A [s]", "B [s]", "B faster by", "95 % interval"))
    a, b = payload["joules_per_token"]["A"], payload["joules_per_token"]["B"]
    if a is not None and b is not None:
        yield f"joules a token: A {figure(a, 2)}, B {figure(b, 2)}"
    yield ""
    took = format_duration(payload["elapsed_s"])
    away = away_text(payload["without_service_s"])
    yield f"run {payload['run']}: {counted(payload['pairs'], 'pair')} in {took}{away}"


def _interval(row: Mapping[str, Any]) -> str:
    if row["gain_low"] is None or row["gain_high"] is None:
        return "too few pairs"
    return f"{100 * row['gain_low']:+.1f} to {100 * row['gain_high']:+.1f}"


def _answers(quality: Mapping[str, Any]) -> Iterator[str]:
    """What B answered, held against A."""
    from tunerd.measure.evidence import SummaryRecord
    from tunerd.web.report import record_tables

    for table in record_tables([("B", SummaryRecord("quality", "quality", "B", quality))]):
        yield ""
        yield table.caption
        yield from table_lines(table)


@click.group(name="workload")
def workload_command() -> None:
    """The mix of requests that the server is tuned for: classes with their lengths and weights.

    \b
    Example:
      tunerd workload list
      tunerd workload show coding-agent
      tunerd workload learn
    """  # noqa: D301


@workload_command.command(name="list", short_help="List every workload.")
@operation("render_workloads")
def list_workloads_command(call: Call) -> ActionResult:
    """List every workload: shipped, learned, and of this site.

    \b
    Example:
      tunerd workload list
    """  # noqa: D301
    from tunerd.measure.learn import list_workloads

    return list_workloads(call.context())


@workload_command.command(name="show", short_help="Show the classes of one.")
@click.argument("workload", type=WORKLOAD, shell_complete=names_of("workloads"))
@operation("render_workload")
def show_workload_command(call: Call, workload: str) -> ActionResult:
    """Show the classes of a workload, and how long a turn takes at the live server's measured speed.

    \b
    Example:
      tunerd workload show coding-agent
    """  # noqa: D301
    from tunerd.measure.learn import show_workload

    return show_workload(call.context(), workload)


@workload_command.command(name="learn", short_help="Derive one from the server's own log.")
@click.option("--name", default="learned", type=WORKLOAD, show_default=True,
              help="Name of the new workload.")  # fmt: skip
@click.option(
    "--unit",
    shell_complete=names_of("units"),
    help="Unit whose log to read [default: the deployed unit].",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    help="Days of log to read [default: the newest lines, whatever their age].",
)
@click.option("--dry-run", is_flag=True, help="Show it, and write nothing.")
@operation("render_workload")
def learn_command(
    call: Call, name: str, unit: str | None, days: int | None, dry_run: bool
) -> ActionResult:
    """Derive a workload from the server's log. Only lengths and counts are kept, no text.

    \b
    Example:
      tunerd workload learn --days 7
      tunerd workload learn --unit my-llama.service --name office --dry-run
    """  # noqa: D301
    from tunerd.measure.learn import learn_workload

    check_name(name, of="a workload")
    ctx = call.context(tells=True)
    return learn_workload(ctx, name=name, unit=unit, days=days, write=not dry_run)


def render_workloads(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    names = ("name", "layer", "classes", "description")
    rows = ([row[name] for name in names] for row in payload["workloads"])
    yield from columns(rows, ("workload", "from", "classes", "what"))


def render_workload(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{payload['name']}: {payload['description']}"
    yield f"source: {payload['source'] or 'not said'}"
    yield from section_lines(workload_section(payload))
    if payload.get("written"):
        yield f"written: {payload['path']}"


_MOST_NAMED = 3
_HOLDS = {True: "yes", False: "no", None: "unknown"}
_KEPT_APART = ("timings", "client", "details")


@click.group(name="results")
def results_command() -> None:
    """Show what was measured: runs, their figures, and whether they still hold.

    \b
    Example:
      tunerd results list
      tunerd results show 12
      tunerd results export 12 --format csv > run-12.csv
    """  # noqa: D301


@results_command.command(name="list", short_help="List every run.")
@click.option("--all", "show_all", is_flag=True, help="Every run, not only the newest 20.")
@operation("render_list")
def list_command(call: Call, show_all: bool) -> ActionResult:
    """List every run: when, what was measured, how many samples, whether it still holds, how it ended.

    \b
    Example:
      tunerd results list --json | jq '.results[0].run'
    """  # noqa: D301
    from tunerd.measure.results import DEFAULT_LIMIT, results

    return results(call.context(), limit=None if show_all else DEFAULT_LIMIT)


@results_command.command(name="show", short_help="Show one run in full.")
@click.argument("run", type=NUMBER)
@operation("render_show")
def show_command(call: Call, run: int) -> ActionResult:
    """Show one run: conditions, figures by arm and case, verdicts.

    \b
    Example:
      tunerd results show 12
    """  # noqa: D301
    from tunerd.measure.results import show

    return show(call.context(), run)


@results_command.command(name="export", short_help="Write runs as JSON, CSV or a bundle.")
@click.argument("run", type=NUMBER, nargs=-1, required=True)
@click.option("--format", "form", type=click.Choice(["json", "csv", "bundle"]), default="json",
              show_default=True, help="csv has one line per sample; a bundle is made to be shared.")  # fmt: skip
@operation("render_csv", show="show_export")
def export_command(call: Call, run: tuple[int, ...], form: str) -> ActionResult:
    """Write runs with every sample to standard output. What is missing is null, or empty in CSV.

    A bundle has only settings and figures: no samples, texts, paths, or names of hosts and accounts.

    \b
    Example:
      tunerd results export 12 13 > runs.json
      tunerd results export 12 --format bundle > to-hand-out.json
    """  # noqa: D301
    from tunerd.measure.results import export, export_bundle

    return (export_bundle if form == "bundle" else export)(call.context(), run)


def show_export(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """As lines for programs, or as JSON."""
    is_bundle = params["form"] == "bundle"
    render = render_bundle if is_bundle else render_csv
    as_json = not is_bundle and (as_json or params["form"] == "json")
    finish(perform(), render, as_json=as_json, is_data=True)


@results_command.command(name="import", short_help="Let sweeps try first what others found.")
@click.argument("file", nargs=-1, type=click.Path(path_type=Path))
@click.option("--shipped", is_flag=True, help="Import what the write-ups found; tunerd brings it.")
@operation("render_import")
def import_command(call: Call, file: tuple[Path, ...], shipped: bool) -> ActionResult:
    """Let sweeps try first what others found fastest, if card, model and engine are those of this box.

    Nothing in a bundle counts as measured here. What does not match is named. `results forget` removes a bundle.

    \b
    Example:
      tunerd results import --shipped
      tunerd results import from-a-friend.json
    """  # noqa: D301
    from tunerd.measure.results import here_now, import_bundles

    if not file and not shipped:
        raise UsageError("name a FILE, or --shipped", state="nothing was imported")
    ctx = call.context(acts=True)
    published = sorted((ctx.data_dir / "profiles/evidence").glob("*.json")) if shipped else []
    return import_bundles(ctx, [*file, *published], here_now(ctx))


def render_import(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: each candidate, and how many of a bundle are none for one reason."""
    others: Counter[tuple[str, str]] = Counter()
    for row in payload["entries"]:
        if row["fits"]:
            values = ", ".join(f"{key} = {value}" for key, value in row["settings"].items())
            yield f"{row['bundle']}: {values}: a candidate"
        else:
            others[row["bundle"], row["why_not"] or "kept"] += 1
    for (bundle, why), n in others.items():
        yield f"{bundle}: {counted(n, 'configuration')}: {why}"


@results_command.command(name="forget", short_help="Remove what was imported.")
@click.argument("bundle")
@operation(line("removed {bundle}"))
def forget_command(call: Call, bundle: str) -> ActionResult:
    """Remove an imported bundle, by its name in `results list`.

    \b
    Example:
      tunerd results forget 0a1b2c3d4e5f
    """  # noqa: D301
    from tunerd.measure.results import forget

    return forget(call.context(acts=True), bundle)


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (row["run"], when(row["started_s"]), row["kind"], ", ".join(row["suites"]) or "-",
         row["profile"] or row["target"], _arms(row["arm_names"]), row["samples"],
         row["left_out"], ", ".join(dict.fromkeys(_HOLDS[one["holds"]] for one in row["arms"])) or "-",
         ": ".join(filter(None, (row["outcome"], row["reason"]))) or "not yet, or interrupted")
        for row in payload["results"]
    ]  # fmt: skip
    heads = ("run", "when", "kind", "suites", "of", "arms", "samples", "left out", "holds", "ended")
    yield from columns(rows, heads) if rows else []
    hidden = payload["total"] - len(payload["results"])
    if hidden > 0:
        yield f"{hidden} older ones: --all"
    for one in payload["imported"]:
        first, *others = one["sources"]
        more = f", and {len(others)} more" if others else ""
        yield f"imported {one['bundle']}: {counted(one['entries'], 'configuration')} from {first}{more}"


def _arms(names: Sequence[str]) -> str:
    """Their names; of a night's, which has some thirty long ones, how many."""
    return f"{len(names)} configurations" if len(names) > _MOST_NAMED else ", ".join(names) or "-"


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: what a report says of the run, but for every flag."""
    from tunerd.measure.evidence import Validity
    from tunerd.records import read
    from tunerd.web.report import FLAGS, evidence_of, sections_of

    run = evidence_of({**payload, **payload["run"], "samples": payload["samples"]})
    validities = {(run.run.number, one["arm"]): read(Validity, one) for one in payload["validity"]}
    shown = (section for section in sections_of([run], validities) if section.name != FLAGS)
    yield f"run {run.run.number}"
    yield from sections_lines(shown)


def render_bundle(payload: Mapping[str, Any]) -> list[str]:
    """As it is read again."""
    return json.dumps(payload, indent=2, allow_nan=False).split("\n")


def render_csv(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line per sample, with the names of columns in the first."""
    runs = payload["runs"]
    rows = [{"run": run["run"], **_flat(sample)} for run in runs for sample in run["samples"]]
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
    lists = {key: value for key, value in row.items() if isinstance(value, list | tuple)}
    return row | {key: " | ".join(map(str, value)) for key, value in lists.items()}


@click.command(name="report")
@click.argument("run", type=NUMBER, nargs=-1)
@click.option("--output", "-o", metavar="FILE", help="Where to write it; `-` for standard output "
              "[default: tunerd-report.html].")  # fmt: skip
@operation("render_report", show="show_written")
def report_command(call: Call, run: tuple[int, ...], output: str | None) -> ActionResult:
    """Write one HTML file about some runs: conditions, verdicts, tables and charts.

    The file needs nothing else: you can mail it, keep it, and read it without a network. Without RUN
    it shows the newest runs that together measured every suite.

    \b
    Example:
      tunerd report
      tunerd report 12 13 --output monday.html
    """  # noqa: D301
    from tunerd.web.report import report

    del output  # where it is typed
    return report(call.context(), run)


def show_written(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """Write it where that was asked for."""
    from tunerd.web.report import write_report

    made, output = perform(), params["output"]
    if output != "-":
        path = Path(output or "tunerd-report.html")
        finish(write_report(path, made), render_report, as_json=as_json)
    else:
        finish(made, lambda payload: payload["html"].split("\n"), as_json=as_json, is_data=True)


def render_report(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    runs = ", ".join(str(number) for number in payload["runs"])
    yield f"wrote {payload['path']} ({payload['bytes'] / 1000:,.0f} kB) about run {runs}"
