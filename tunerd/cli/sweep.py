"""Commands of nights: sweep and schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from tunerd.calendar import Missed, zone_named
from tunerd.cli.deploy import start_after_option, yes_option
from tunerd.cli.output import away_text, changed, columns, line, names_of, section_lines
from tunerd.errors import UsageError
from tunerd.operations import (
    DAYS,
    NUMBER,
    SEED,
    SPACE,
    SPAN,
    TIMES,
    WORKLOAD,
    ZONE,
    Call,
    Decimal,
    argv_with,
    operation,
)
from tunerd.result import ActionResult
from tunerd.web.view import sweep_facts, sweep_section
from tunerd.words import UNKNOWN, counted, format_duration

if TYPE_CHECKING:
    from tunerd.app import Context
    from tunerd.sweep.plan import SweepRequest
    from tunerd.sweep.run import Meet


_MOST_VALUES = 12


@click.group(name="sweep")
def sweep_command() -> None:
    """Search for faster settings in production's place, and prove them before anything is changed.

    The unit is stopped while a sweep runs, and serves again afterwards, whatever happens. Only
    `tunerd promote` deploys what a sweep found, unless sweep.promote is "auto".
    """


def _request_options(function: Any) -> Any:
    options = (
        click.option("--budget", type=SPAN, default="2h", show_default=True,
                     help="Time limit, the proof included."),
        click.option("--workload", type=WORKLOAD, shell_complete=names_of("workloads"),
                     help="The mix of requests [default: the profile's own]."),
        click.option("--space", type=SPACE, multiple=True, metavar="KEY=VALUE,...", shell_complete=names_of("keys"),
                     help="Values to try for a key, instead of those in the profile's [sweep] table."),
        click.option("--goal", type=click.Choice(["speed", "context"]), default="speed", show_default=True,
                     help="Find the fastest settings, or the largest context that holds a speed."),
        click.option("--at-least", "at_least_tok_s", type=Decimal(0.1, 100_000), metavar="TOK/S",
                     help="With --goal context: the speed to hold on the workload."),
        click.option("--seed", type=SEED, help="Seed of texts and order."),
        start_after_option,
        click.option("--window", type=TIMES, metavar="HH:MM-HH:MM",
                     help="Sweep only between these times of day; the unit serves again by the end."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def _request(given: Mapping[str, Any]) -> SweepRequest:
    from tunerd.sweep.plan import SweepRequest

    if (given["goal"] == "context") != (given["at_least_tok_s"] is not None):
        raise UsageError(
            "--goal context and --at-least go together",
            hint="for example --goal context --at-least 40",
        )
    rest = {name: value for name, value in given.items() if name not in {"budget", "goal"}}
    return SweepRequest(budget_s=given["budget"], **rest)


@sweep_command.command(name="run")
@_request_options
@click.option(
    "--dry-run", is_flag=True, help="Show what would be tried, what is left out, and what it costs."
)
@yes_option
@operation("render_end")
def run(call: Call, dry_run: bool, **given: Any) -> ActionResult:
    """Sweep now, in this terminal.

    Exit code 0 whatever the verdict, 1 if nothing could be measured.

    \b
    Example:
      tunerd sweep run --dry-run
      tunerd sweep run --budget 6h --workload coding-agent
      tunerd sweep run --space speculation.n_max=1,2,3 --space engine=mainline,ik
      tunerd sweep run --goal context --at-least 40
    """  # noqa: D301
    from tunerd.sweep.run import run_sweep, sweep_plan

    ctx = call.context(acts=not dry_run, tells=True)
    if dry_run:
        return sweep_plan(ctx, _request(given))
    return run_sweep(ctx, _request(given), confirm=call.agree, meet=_meeting(ctx))


def _meeting(ctx: Context) -> Meet:
    """Whoever shares no store pays for none."""
    if ctx.settings.store.url is None:
        from tunerd.sweep.run import alone

        return alone
    from tunerd.fleet.study import meet

    return meet


@sweep_command.command(name="resume")
@click.argument("sweep", metavar="[ID]", type=NUMBER, required=False)
@yes_option
@operation("render_end")
def resume(call: Call, sweep: int | None) -> ActionResult:
    """Continue a sweep (the newest without ID) that was stopped, killed or cut short, from its samples.

    \b
    Example:
      tunerd sweep resume
      tunerd sweep resume 12 --yes
    """  # noqa: D301
    from tunerd.sweep.run import resume_sweep

    ctx = call.context(acts=True)
    return resume_sweep(ctx, sweep, confirm=call.agree, meet=_meeting(ctx))


@sweep_command.command(name="night")
@click.option("--at-once", is_flag=True, hidden=True, help="Whatever the window says.")
@yes_option
@operation("render_night")
def night(call: Call, at_once: bool) -> ActionResult:
    """Sweep as [sweep] in the settings says. The job of a night runs this.

    If there is a sweep.window, the unit serves again by its end. An unfinished sweep that asked for the
    same is continued. If the engine was upgraded in place and a copy of the build before was kept, the two
    builds are compared instead (guards.upgrade).

    \b
    Example:
      tunerd sweep night --yes
    """  # noqa: D301
    from tunerd.sweep.run import run_night

    ctx = call.context(acts=True)
    return run_night(ctx, confirm=call.agree, at_once=at_once, meet=_meeting(ctx))


@sweep_command.command(name="start")
@_request_options
@yes_option
@operation(line("{unit} runs"))
def start(call: Call, **given: Any) -> ActionResult:
    """Start a sweep as a job (`tunerd jobs`), which keeps running when this terminal closes.

    \b
    Example:
      tunerd sweep start --budget 6h --yes
      tunerd sweep watch
    """  # noqa: D301
    from tunerd.sweep.run import start_sweep

    ctx, argv = call.context(acts=True), argv_with("sweep run", {**given, "yes": True})
    return start_sweep(ctx, _request(given), argv, confirm=call.agree)


@sweep_command.command(name="stop")
@operation(line("{unit} is stopped"), needs_settings=False)
def stop(call: Call) -> ActionResult:
    """Stop a night, or what `start` began. Its samples are kept, and the server comes back."""
    from tunerd.sweep.run import stop_sweep

    return stop_sweep(call.context(acts=True))


@sweep_command.command(name="status")
@operation("render_status", needs_settings=False)
def status(call: Call) -> ActionResult:
    """Show what runs now, how far it is, and how long it may still take."""
    from tunerd.sweep.run import sweep_status

    return sweep_status(call.context())


@sweep_command.command(name="watch")
@operation(lambda _payload: (), tells_lines=True)
def watch(call: Call) -> ActionResult:
    """Show every start and request as it comes, until the sweep ends."""
    from tunerd.sweep.run import watch_sweep

    ctx = call.context(tells=True)
    for said in watch_sweep(ctx):
        ctx.say(said)
    return ActionResult("sweep watch", {})


@sweep_command.command(name="list")
@operation("render_list")
def list_(call: Call) -> ActionResult:
    """List every sweep: when, its verdict, and what was done about it."""
    from tunerd.sweep.record import list_sweeps

    return list_sweeps(call.context())


@sweep_command.command(name="show")
@click.argument("sweep", metavar="[ID]", type=NUMBER, required=False)
@operation("render_show")
def show_sweep(call: Call, sweep: int | None) -> ActionResult:
    """Show the verdict of a sweep (the newest without ID), the numbers behind it, and every configuration.

    Exit code 0 whatever the verdict. `tunerd report` writes the same as HTML.

    \b
    Example:
      tunerd sweep show
      tunerd sweep show 12 --json | jq .verdict
    """  # noqa: D301
    from tunerd.sweep.record import show_sweep

    return show_sweep(call.context(), sweep)


# For people


def render_plan(payload: Mapping[str, Any]) -> Iterator[str]:
    """What would be tried."""
    plan = payload["plan"]
    yield f"profile {plan['profile']}, generation {plan['generation']}, workload {plan['workload']}"
    yield f"starts from: {plan['incumbent_text']}"
    if plan.get("at_least_tok_s") is not None:
        yield f"looks for the largest context that holds {plan['at_least_tok_s']:g} tok/s"
    yield f"{counted(plan['points'], 'configuration')}, seed {plan['seed']}"
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
    if plan.get("power_limits_w"):
        shown = ", ".join(f"{watts:g} W" for watts in plan["power_limits_w"])
        yield f"then the winner and what serves are measured at {shown}; afterwards the card has its own limit again"
    left_out = [(one["what"], one["reason"]) for one in plan["left_out"]]
    left_out += [(one["arm"], one["reason"]) for one in plan["rejected"]]
    if left_out:
        yield ""
        yield "stays as it is, or is left out:"
        yield from columns([(f"  {what}", reason) for what, reason in left_out])
    yield ""
    yield plan["forecast"]["text"]
    yield plan["outlook"]["text"]


def _option(pairs: Sequence[Sequence[Any]]) -> str:
    """One alternative of other keys."""
    return " ".join(f"{key}={value}" for key, value in pairs) or "as it is"


def render_end(payload: Mapping[str, Any]) -> Iterator[str]:
    """How it ended."""
    if "plan" in payload:  # a dry run
        yield from render_plan(payload)
        return
    yield payload["sentence"]
    away = away_text(payload["without_service_s"])
    yield (
        f"sweep {payload['sweep']}: {counted(payload['arms_measured'], 'configuration')}, "
        f"{counted(payload['restarts'], 'start')} in {format_duration(payload['elapsed_s'])}{away}"
    )
    yield f"`tunerd sweep show {payload['sweep']}` shows why"


def render_night(payload: Mapping[str, Any]) -> Iterator[str]:
    """How a night ended: a sweep, or a comparison of two builds."""
    if "sweep" in payload:
        yield from render_end(payload)
        return
    from tunerd.cli.measure import render_compare

    yield from render_compare(payload)


def render_status(payload: Mapping[str, Any]) -> Iterator[str]:
    """What runs now."""
    last, number = payload["last"], payload["sweep"] or payload["waits"]
    if number is None:
        if payload["unit"] is not None:
            yield f"{payload['unit']} runs, but no sweep yet: it is getting ready, or compares two builds"
        else:
            yield "no sweep is running"
        if last is not None:
            said = last["sentence"] or "it did not finish"
            yield f"the last one was sweep {last['sweep']}: {said}"
        return
    if payload["sweep"] is None:
        yield f"sweep {number} has given the card back, and continues by itself when nobody uses the server"
    else:
        yield f"sweep {number} runs; it ends within {format_duration(payload['left_s'])}"
    if last is not None and last["sweep"] == number:
        yield (
            f"{counted(last['arms'], 'configuration')}, {counted(last['starts'], 'start')}, "
            f"{counted(last['requests'], 'request')}, {counted(last['failures'], 'failure')}"
        )
        if last["doing"]:
            yield f"last: {last['doing']}"


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line each."""
    rows = (
        (row["sweep"], row["started"], row["state"], row["verdict"] or "", row["decision"] or "",
         row["sentence"] or row["reason"] or "")
        for row in payload["sweeps"]
    )  # fmt: skip
    yield from columns(rows, ("ID", "started", "state", "verdict", "then", ""))


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """What a sweep came to, and why."""
    yield from columns((("sweep", str(payload["sweep"])), *sweep_facts(payload)))
    yield f"starts from: {payload['plan'].get('incumbent_text', UNKNOWN)}"
    yield payload["sentence"] or f"no verdict: {payload['reason'] or 'it has not finished'}"
    for one in payload["challenges"]:
        yield from _challenge(one)
    if payload["decided"]:
        yield f"then: {payload['decided']['text']}"
    yield from section_lines(sweep_section(payload["sweep"], payload["page"], payload))


def _challenge(one: Mapping[str, Any]) -> Iterator[str]:
    """How far a candidate was proved; `page` has its pairs."""
    decision, gain = one["decision"], one["gain"]
    needed = decision.get("betting_needed")
    of_needed = "" if needed is None else f" of {needed:.0f}"
    yield f"  challenge {one['number']}, {one['outcome']} after {counted(len(one['pairs']), 'pair')}"
    yield (
        f"    evidence {decision['e_value']:.3g} of {decision['needed']:.0f} needed; by betting, "
        f"which assumes less, {decision['betting_e_value']:.3g}{of_needed}"
    )
    if gain is not None and gain["lower"] is not None and gain["upper"] is not None:
        yield f"    95 % interval {gain['lower']:+.1%} to {gain['upper']:+.1%}"
    yield from (f"    {reason}" for reason in one["reasons"])


@click.group(name="schedule")
def schedule_command() -> None:
    """Nights are sweeps that the daemon begins as jobs, once each time the window opens."""


@schedule_command.command(name="show", short_help="Show the window and the next nights.")
@operation("render_schedule")
def show_schedule(call: Call) -> ActionResult:
    """Show the window, whether nights begin by themselves, and when the next ones are.

    \b
    Example:
      tunerd schedule show
    """  # noqa: D301
    from tunerd.sweep.schedule import show_schedule

    return show_schedule(call.context())


@schedule_command.command(name="set", short_help="Change the window, or turn nights on or off.")
@click.option(
    "--window",
    type=TIMES,
    help="Times of day, such as 01:00-06:30; the server serves again by the end.",
)
@click.option("--days", type=DAYS, help="Days on which it opens, such as mon-fri or sat,sun.")
@click.option("--timezone", type=ZONE, help="Time zone of the window, such as Europe/Berlin.")
@click.option("--missed", type=click.Choice([str(one) for one in Missed]),
              help="If the beginning of a night was missed: begin late, or skip it.")  # fmt: skip
@click.option("--begin", type=click.Choice(["open", "asleep"]),
              help="Begin when the window opens, or as soon as the server sleeps in it.")  # fmt: skip
@click.option("--on/--off", "enabled", default=None, help="Whether nights begin by themselves.")
@operation(changed)
def set_(call: Call, **given: Any) -> ActionResult:
    """Write the schedule into tunerd.toml; everything else in it stays as it is.

    \b
    Example:
      tunerd schedule set --window 01:00-06:30 --days mon-fri --on
      tunerd schedule set --off
    """  # noqa: D301
    from tunerd.sweep.schedule import KEYS, set_schedule

    values = {KEYS[name]: value for name, value in given.items() if value is not None}
    return set_schedule(call.context(), values)


@schedule_command.command(name="skip-tonight", short_help="Skip the next night.")
@click.option("--undo", is_flag=True, help="Do not skip it after all.")
@operation("render_skipped")
def skip(call: Call, undo: bool) -> ActionResult:
    """Skip the next night. The one after it takes place.

    \b
    Example:
      tunerd schedule skip-tonight
    """  # noqa: D301
    from tunerd.sweep.schedule import skip_tonight

    return skip_tonight(call.context(), undo=undo)


@schedule_command.command(name="run-now", short_help="Begin a night at once.")
@yes_option
@operation(line("{unit} runs"))
def run_now(call: Call) -> ActionResult:
    """Begin a night now, as a job, whatever the window says.

    \b
    Example:
      tunerd schedule run-now --yes
    """  # noqa: D301
    from tunerd.sweep.run import start_night

    return start_night(call.context(acts=True), confirm=call.agree)


def render_skipped(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    span, zone = payload["skipped"], payload["timezone"]
    yield "the next night is on" if span is None else f"skipped: {_times(span, zone)}"


def render_schedule(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    begin = {"open": "when the window opens", "asleep": "as soon as the server sleeps in it"}
    rows = [
        ("nights", "begin by themselves" if payload["enabled"] else "begin by hand only"),
        ("window", f"{payload['window'] or 'none'}, {payload['days']} ({payload['timezone']})"),
        ("budget", format_duration(payload["budget_s"])),
        ("begin", begin[payload["begin"]]),
        ("missed", {"late": "begins late", "skip": "is skipped"}[payload["missed"]]),
    ]
    if payload["running"]:
        rows.append(("now", f"{payload['unit']} runs"))
    for number, night in enumerate(payload["nights"]):
        skipped = ", skipped" if night["skipped"] else ""
        times = _times(night, payload["timezone"])
        rows.append(("next" if not number else "", f"{times}{skipped}"))
    yield from columns(rows)


def _times(night: Mapping[str, Any], timezone: str) -> str:
    zone = zone_named(timezone)
    begin = datetime.fromtimestamp(night["begin_s"], zone).strftime("%a %d %b %H:%M")
    end = datetime.fromtimestamp(night["end_s"], zone).strftime("%H:%M %Z")
    return f"{begin} to {end}"
