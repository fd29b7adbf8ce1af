"""`tunerd sweep`: find better settings on the live box, or see that there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.complete import keys, names_of
from tunerd.cli.output import (
    ask_or_tell,
    columns,
    finish,
    json_option,
    print_message,
    progress_sink,
)
from tunerd.core.quantity import format_duration

if TYPE_CHECKING:
    from tunerd.actions.context import Context
    from tunerd.actions.sweep_plan import PreparedSweep, SweepRequest
    from tunerd.core.result import ActionResult

_MOST_VALUES = 12

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.group(
    name="sweep", short_help="Find better settings on this box, or see that there are none."
)
def command() -> None:
    """Search for better settings in production's place, and prove them before anything is changed.

    The unit is stopped while a sweep runs and serves again afterwards, whatever happens. Nothing is
    deployed but by `tunerd promote` (or by itself where sweep.promote is "auto").
    """


def _request_options(function: Any) -> Any:
    options = (
        click.option("--budget", default="2h", show_default=True,
                     help="The longest it may take, the proof included."),
        click.option("--arms", "max_arms", type=click.IntRange(min=2), help="Measure so many configurations at most."),
        click.option("--workload", shell_complete=names_of("workloads"),
                     help="The mix of requests [default: the profile's own]."),
        click.option("--space", multiple=True, metavar="KEY=VALUE,...", shell_complete=keys,
                     help="Values to try for a key, over those of the profile's [sweep] table."),
        click.option("--seed", type=int, help="Of texts and order."),
        click.option("--start-after", is_flag=True, help="Start the unit afterwards, even if it is down now."),
        click.option("--strategy", type=click.Choice(["physics", "tpe"]), default="physics",
                     show_default=True,
                     help="Who proposes: fitted laws of speculation and memory, or Optuna's TPE."),
        click.option("--window", metavar="HH:MM-HH:MM",
                     help="Only between these times of day; the unit serves again by the end."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def _request(
    budget: str,
    max_arms: int | None,
    workload: str | None,
    space: tuple[str, ...],
    seed: int | None,
    start_after: bool,
    strategy: str,
    window: str | None,
) -> SweepRequest:
    from tunerd.actions.sweep_plan import SweepRequest
    from tunerd.core.time_span import parse_time_span

    budget_s = parse_time_span(budget)
    if budget_s is None or not 0 < budget_s < float("inf"):
        raise click.UsageError("--budget is no duration; for example --budget 2h")
    return SweepRequest(
        budget_s=budget_s, max_arms=max_arms, workload=workload, space=space, seed=seed,
        start_after=start_after, strategy=strategy, window=window,
    )  # fmt: skip


def _body(request: SweepRequest, *, mode: str | None) -> dict[str, Any]:
    """A request as the daemon takes it; what may not be asked for without root is refused here."""
    from tunerd.cli.remote import acts_through_daemon
    from tunerd.core.job import check_space

    body = {**request.to_json(), "space": ["".join(one.split()) for one in request.space]}
    if acts_through_daemon(mode):
        check_space(body["space"])
    return body


def _acted(result: ActionResult) -> ActionResult:
    """What was done stays done where its result cannot be shown."""
    return replace(result, has_acted=True)


def _context(mode: str | None, *, as_json: bool, acts: bool) -> Context:
    from tunerd.actions.context import build_context

    return build_context(mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=acts)


def _found(mode: str | None, number: int | None, *, as_json: bool) -> ActionResult | None:
    """One sweep as the daemon shows it; None for who acts by themselves."""
    from tunerd.cli.remote import from_daemon

    if number is None:
        return from_daemon(mode, "sweep", "newest", as_json=as_json)
    return from_daemon(mode, "sweeps", str(number), as_json=as_json)


def _ask(prepared: PreparedSweep, *, yes: bool) -> None:
    if not yes:
        for message in prepared.messages:
            print_message(message)
    ask_or_tell(prepared.question, yes=yes)


@command.command(name="run")
@_request_options
@click.option(
    "--dry-run", is_flag=True, help="Show what would be tried, what it costs, what stays."
)
@click.option("--bound-to", hidden=True, help="The unit that this process is.")
@yes_option
@json_option
@click.pass_obj
def run(
    mode: str | None,
    budget: str,
    max_arms: int | None,
    workload: str | None,
    space: tuple[str, ...],
    seed: int | None,
    start_after: bool,
    strategy: str,
    window: str | None,
    dry_run: bool,
    bound_to: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Sweep now, in this terminal.

    Exit code 0 whatever the verdict, 1 if nothing could be measured.

    \b
    Example:
      tunerd sweep run --dry-run
      tunerd sweep run --budget 6h --workload coding-agent
      tunerd sweep run --space speculation.n_max=1,2,3 --space engine=mainline,ik
    """  # noqa: D301
    from tunerd.actions.sweep_run import run_sweep, sweep_plan
    from tunerd.cli.remote import by_daemon

    request = _request(budget, max_arms, workload, space, seed, start_after, strategy, window)
    body = _body(request, mode=mode)
    if dry_run:
        done = by_daemon(mode, "sweep/plan", body, as_json=as_json)
    else:
        done = by_daemon(mode, "sweep/run", body, as_json=as_json, yes=yes)
    if done is not None:
        finish(done, render_plan if dry_run else render_end, as_json=as_json)
        return
    context = _context(mode, as_json=as_json, acts=not dry_run)
    if dry_run:
        finish(sweep_plan(context, request), render_plan, as_json=as_json)
        return
    result = run_sweep(
        context, request, confirm=lambda prepared: _ask(prepared, yes=yes), bound_to=bound_to
    )
    finish(_acted(result), render_end, as_json=as_json)


@command.command(name="resume")
@click.argument("number", metavar="[ID]", type=int, required=False)
@click.option("--bound-to", hidden=True, help="The unit that this process is.")
@yes_option
@json_option
@click.pass_obj
def resume(
    mode: str | None, number: int | None, bound_to: str | None, yes: bool, as_json: bool
) -> None:
    """Go on with a sweep that was stopped, killed or cut, from its samples.

    \b
    Example:
      tunerd sweep resume
      tunerd sweep resume 12 --yes
    """  # noqa: D301
    from tunerd.actions.sweep_run import resume_sweep
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "sweep/resume", {"sweep": number}, as_json=as_json, yes=yes)
    if done is not None:
        finish(done, render_end, as_json=as_json)
        return
    result = resume_sweep(
        _context(mode, as_json=as_json, acts=True),
        number,
        confirm=lambda prepared: _ask(prepared, yes=yes),
        bound_to=bound_to,
    )
    finish(_acted(result), render_end, as_json=as_json)


@command.command(name="night")
@click.option("--bound-to", hidden=True, help="The unit that this process is.")
@yes_option
@json_option
@click.pass_obj
def night(mode: str | None, bound_to: str | None, yes: bool, as_json: bool) -> None:
    """Sweep as [sweep] of the settings says; what tunerd-sweep.service runs.

    Within sweep.window the unit serves again by its end. A sweep that asked for the same and did not come
    to its end goes on. Where the engine was upgraded in place and a copy of the build before was kept,
    the two are compared instead (guards.upgrade).

    \b
    Example:
      systemctl start tunerd-sweep
      tunerd sweep night --yes
    """  # noqa: D301
    from tunerd.actions.sweep_run import run_night
    from tunerd.cli.remote import demand_root

    demand_root(mode, "sweep night", "it is what a unit runs; `tunerd schedule run-now` begins one")
    result = run_night(
        _context(mode, as_json=as_json, acts=True),
        confirm=lambda prepared: _ask(prepared, yes=yes),
        bound_to=bound_to,
    )
    finish(_acted(result), render_night, as_json=as_json)


@command.command(name="start")
@_request_options
@yes_option
@json_option
@click.pass_obj
def start(
    mode: str | None,
    budget: str,
    max_arms: int | None,
    workload: str | None,
    space: tuple[str, ...],
    seed: int | None,
    start_after: bool,
    strategy: str,
    window: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Sweep as a unit of its own, tunerd-sweep.service, which outlives this terminal.

    \b
    Example:
      tunerd sweep start --budget 6h --yes
      tunerd sweep watch
    """  # noqa: D301
    from tunerd.actions.sweep_unit import start_sweep
    from tunerd.cli.remote import by_daemon

    request = _request(budget, max_arms, workload, space, seed, start_after, strategy, window)
    body = _body(request, mode=mode)
    result = by_daemon(mode, "sweep/start", body, as_json=as_json, yes=yes)
    if result is None:
        context = _context(mode, as_json=as_json, acts=True)
        result = start_sweep(context, request, confirm=lambda prepared: _ask(prepared, yes=yes))
    finish(_acted(result), lambda payload: (f"{payload['unit']} runs",), as_json=as_json)


@command.command(name="stop")
@json_option
@click.pass_obj
def stop(mode: str | None, as_json: bool) -> None:
    """End the sweep that `start` began; its samples are kept, and the server comes back."""
    from tunerd.actions.sweep_unit import stop_sweep
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "sweep/stop", {}, as_json=as_json)
    result = done or stop_sweep(_context(mode, as_json=as_json, acts=True))
    finish(_acted(result), lambda payload: (f"{payload['unit']} is stopped",), as_json=as_json)


@command.command(name="status")
@json_option
@click.pass_obj
def status(mode: str | None, as_json: bool) -> None:
    """What runs now, how far it is, how long it may still take."""
    from tunerd.actions.sweep_unit import sweep_status
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "sweep", as_json=as_json)
    result = found or sweep_status(_context(mode, as_json=as_json, acts=False))
    finish(result, render_status, as_json=as_json)


@command.command(name="watch")
@click.pass_obj
def watch(mode: str | None) -> None:
    """Every start and request as it comes, until the sweep ends."""
    from tunerd.actions.sweep_unit import watch_sweep
    from tunerd.cli.remote import watch_by_daemon

    if watch_by_daemon(mode, "sweep/watch"):
        return
    for line in watch_sweep(_context(mode, as_json=False, acts=False)):
        print(line, flush=True)


@command.command(name="list")
@json_option
@click.pass_obj
def list_(mode: str | None, as_json: bool) -> None:
    """Every sweep: when, what it came to, what became of it."""
    from tunerd.actions.sweeps import list_sweeps
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "sweeps", as_json=as_json)
    result = found or list_sweeps(_context(mode, as_json=as_json, acts=False))
    finish(result, render_list, as_json=as_json)


@command.command(name="show")
@click.argument("number", metavar="[ID]", type=int, required=False)
@json_option
@click.pass_obj
def show(mode: str | None, number: int | None, as_json: bool) -> None:
    """One sweep with every configuration that was measured, and why others were not."""
    from tunerd.actions.sweeps import show_sweep

    result = _found(mode, number, as_json=as_json) or show_sweep(
        _context(mode, as_json=as_json, acts=False), number
    )
    finish(result, render_show, as_json=as_json)


@command.command(name="report")
@click.argument("number", metavar="[ID]", type=int, required=False)
@json_option
@click.pass_obj
def report(mode: str | None, number: int | None, as_json: bool) -> None:
    """The verdict and why, on one page; `tunerd report` writes it as HTML too.

    \b
    Example:
      tunerd sweep report
      tunerd sweep report 12
    """  # noqa: D301
    from tunerd.actions.sweeps import show_sweep
    from tunerd.cli.commands.sweep_view import render_report

    result = _found(mode, number, as_json=as_json) or show_sweep(
        _context(mode, as_json=as_json, acts=False), number
    )
    finish(result, render_report, as_json=as_json)


# For people


def render_plan(payload: Mapping[str, Any]) -> Iterator[str]:
    """What would be tried."""
    plan = payload["plan"]
    yield f"profile {plan['profile']}, generation {plan['generation']}, workload {plan['workload']}"
    yield f"starts from: {plan['incumbent_text']}"
    yield f"{plan['points']} configurations, seed {plan['seed']}"
    yield ""
    for family in plan["families"]:
        yield f"{family['engine']}, {family['speculation']}"
        for name, values in family.items():
            is_named = name == "extra" and any(values)
            if name in {"engine", "speculation"} or (len(values) < 2 and not is_named):  # noqa: PLR2004 -- no choice
                continue
            words = map(_option, values) if name == "extra" else map(str, values)
            shown = ", ".join(list(words)[:_MOST_VALUES])
            yield f"  {name:<8} {shown}{' ...' if len(values) > _MOST_VALUES else ''}"
    if plan["left_out"]:
        yield ""
        yield "stays as it is, or is left out:"
        yield from columns([(f"  {one['what']}", one["reason"]) for one in plan["left_out"]])
    yield ""
    yield plan["forecast"]["text"]
    yield plan["outlook"]["text"]


def _option(pairs: Sequence[Sequence[Any]]) -> str:
    """One alternative of other keys."""
    return " ".join(f"{key}={value}" for key, value in pairs) or "as it is"


def render_end(payload: Mapping[str, Any]) -> Iterator[str]:
    """How it ended."""
    yield payload["sentence"]
    away_s = payload["without_service_s"]
    away = "" if away_s is None else f"; the unit was away for {format_duration(away_s)}"
    yield (
        f"sweep {payload['sweep']}: {payload['arms_measured']} configurations, "
        f"{payload['restarts']} starts in {format_duration(payload['elapsed_s'])}{away}"
    )
    yield f"`tunerd sweep report {payload['sweep']}` shows why"


def render_night(payload: Mapping[str, Any]) -> Iterator[str]:
    """How a night ended: a sweep, or a comparison of two builds."""
    if "sweep" in payload:
        yield from render_end(payload)
        return
    from tunerd.cli.commands.compare import render

    yield from render(payload)


def render_status(payload: Mapping[str, Any]) -> Iterator[str]:
    """What runs now."""
    last = payload["last"]
    if payload["sweep"] is None:
        if payload["unit_state"] in {"active", "activating"}:
            yield f"{payload['unit']} runs, but no sweep yet: it gets ready, or compares two builds"
        else:
            yield "no sweep runs"
        if last is not None:
            said = last["sentence"] or "it did not come to its end"
            yield f"the last one was sweep {last['sweep']}: {said}"
        return
    yield f"sweep {payload['sweep']} runs; it ends within {format_duration(payload['left_s'])}"
    if last is not None and last["sweep"] == payload["sweep"]:
        yield (
            f"{last['arms']} configurations, {last['starts']} starts, {last['requests']} requests, "
            f"{last['failures']} failures"
        )
        if last["doing"]:
            yield f"last: {last['doing']}"


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line each."""
    rows = [
        (str(row["sweep"]), row["started"], row["state"], row["verdict"] or "", row["decision"] or "",
         row["sentence"] or row["reason"] or "")
        for row in payload["sweeps"]
    ]  # fmt: skip
    yield from columns(rows, ("ID", "started", "state", "verdict", "then", ""))


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """One sweep."""
    from tunerd.cli.commands.sweep_view import render_arms, render_head

    yield from render_head(payload)
    yield ""
    yield from render_arms(payload)
    yield ""
    yield from columns([(one["what"], one["reason"]) for one in payload["left_out"]])
