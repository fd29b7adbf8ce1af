"""Commands that watch, and those that run in the background: top, guard, notify, jobs, the daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.deploy import as_shown, asks_to_swap, render_plan, shown_option, yes_option
from tunerd.cli.output import (
    changed,
    columns,
    end_line,
    finish,
    harmless_lines,
    line,
    or_unknown,
    progress_sink,
    takes_controls,
)
from tunerd.errors import TunerdError
from tunerd.operations import Call, Decimal, JobRequest, Question, asked, json_option, operation
from tunerd.paths import paths_for
from tunerd.result import ActionResult, Progress, ProgressSink, error_json
from tunerd.web import view
from tunerd.words import UNKNOWN, Mode, format_duration, format_mib, when

if TYPE_CHECKING:
    from tunerd.app import Context
    from tunerd.cli.terminal import Terminal


_EVERY_S = 5.0
# What a terminal obeys: another screen without a cursor and back, and how one is drawn over.
_OTHER_SCREEN, _OWN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _REST_EMPTY = "\x1b[H", "\x1b[K\n", "\x1b[J"


@click.command(name="top")
@click.option("--once", is_flag=True, help="Show one reading and exit.")
@click.option("--every", "every_s", type=Decimal(1, 3600), default=_EVERY_S,
              show_default=True, help="Seconds between two readings.")  # fmt: skip
@operation("render_top", show="show_again")
def top_command(call: Call, once: bool, every_s: float) -> ActionResult:
    """Show health, speed, acceptance, VRAM, power and memory live. Ctrl-C ends it; --json shows one reading.

    \b
    Example:
      tunerd top
      tunerd top --once --json | jq .speeds
    """  # noqa: D301
    from tunerd.watch.watcher import Top

    del once, every_s  # of the terminal
    call.top = call.top or Top(call.context()).look
    return call.top()


def show_again(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """One look where that is asked for or nobody sits there, else again and again, until Ctrl-C."""
    import shutil
    import sys

    from tunerd.machine.clock import SystemClock

    if params["once"] or as_json or not takes_controls(sys.stdout):
        finish(perform(), render_top, as_json=as_json)
        return

    clock = SystemClock()
    sys.stdout.write(_OTHER_SCREEN)
    try:
        while True:
            height = shutil.get_terminal_size().lines
            lines = harmless_lines(perform().payload, render_top)[: height - 1]
            shown = "".join(line + _END_OF_LINE for line in lines)
            sys.stdout.write(f"{_HOME}{shown}{_REST_EMPTY}")
            sys.stdout.flush()
            clock.sleep(params["every_s"])
    except KeyboardInterrupt:
        return
    finally:
        sys.stdout.write(_OWN_SCREEN)
        sys.stdout.flush()


def render_top(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield from columns([*_server(payload), *_cards(payload), *_host(payload["host"])])


def _server(payload: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    engine = payload["engine"]
    up = ""
    if engine["since_s"]:
        up = f", for {format_duration(payload['at_s'] - engine['since_s'])}"
    yield "unit", f"{engine['unit']}: {engine['active_state']} ({engine['sub_state']}){up}"
    if payload["measuring"]:
        yield "measures", payload["measuring"]
    health, active = engine["health"], engine["active_state"]
    yield "health", view.health_words(health, active, is_asleep=engine["is_asleep"])
    busy = UNKNOWN if engine["slots_busy"] is None else engine["slots_busy"]
    slots = f"{busy} of {engine['slots_total']} at work"
    yield "slots", None if engine["slots_total"] is None else slots
    speeds = payload["speeds"]
    if speeds is None:
        why = "no generation was seen in the last 15 min, or the server runs without --metrics"
        yield "speed", f"unknown: {why}"
        return
    speed = or_unknown(speeds["decode_tok_s"], "tok/s", 1)
    prompts = or_unknown(speeds["prompt_tok_s"], "tok/s", 1)
    yield "speed", f"{speed}, prompts {prompts} ({speeds['since']})"
    accepted, reused = (speeds[f"{one}_ratio"] for one in ("acceptance", "reused"))
    yield "drafts", f"{view.percent(accepted, 0) or UNKNOWN} accepted"
    yield "reused", f"{view.percent(reused, 0) or UNKNOWN} of the prompt tokens"


def _cards(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if payload["gpus"] is None:
        yield "GPU", f"unknown: {payload['gpu_problem']}"
        return
    for gpu in payload["gpus"]:
        name = f"GPU {gpu['index']}"
        held = f"server {format_mib(gpu['server_mib'])}, others {format_mib(gpu['others_mib'])}"
        split = ", split by MIG" if gpu["is_mig"] else ""
        yield name, f"{gpu['name']}{split}: {or_unknown(gpu['utilisation_percent'], '%')} busy"
        used = f"{format_mib(gpu['used_mib'])} of {format_mib(gpu['total_mib'])} used"
        yield "  VRAM", f"{used}, {format_mib(gpu['free_mib'])} free; {held}"
        watts = f"{or_unknown(gpu['power_w'], 'W')} of {or_unknown(gpu['power_limit_w'], 'W')}"
        clocks = f"{or_unknown(gpu['sm_clock_mhz'], 'MHz')}, memory {or_unknown(gpu['memory_clock_mhz'], 'MHz')}"
        yield "  power", f"{watts}, {or_unknown(gpu['temperature_c'], '°C')}, {clocks}"
        if gpu["throttle_reasons"]:
            yield "  held", f"clocks are held down by {', '.join(gpu['throttle_reasons'])}"


def _host(host: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    swap = f", swap {format_mib(host['swap_used_mib'])} used" if host["swap_total_mib"] else ""
    ram = f"{format_mib(host['available_mib'])} of {format_mib(host['total_mib'])} available"
    yield "RAM", f"{ram}{swap}"
    if host["cpu_percent"] is not None:
        yield "CPU", f"{host['cpu_percent']:.0f} % of all cores"


@click.group(name="guard")
def guard_command() -> None:
    """Guards check every reading of the daemon; each has its own switch in [guards]."""


@guard_command.command(name="show")
@operation("render_guard")
def show(call: Call) -> ActionResult:
    """Show what each guard may do, goes by, and last said.

    \b
    Example:
      tunerd guard show
    """  # noqa: D301
    from tunerd.watch.guarding import show_guards

    return show_guards(call.context())


@guard_command.command(name="set", short_help="Set what a guard may do.")
@click.argument("guard", type=click.Choice(["oom", "hang", "drift", "upgrade"]))
@click.argument("policy", type=click.Choice(["act", "advise", "off"]))
@operation(changed)
def set_(call: Call, guard: str, policy: str) -> ActionResult:
    """Write a guard's switch into tunerd.toml: act by itself, only advise, or do nothing.

    \b
    Example:
      tunerd guard set hang advise
    """  # noqa: D301
    from tunerd.settings_file import set_keys

    ctx, keys = call.context(), {f"guards.{guard}": policy}
    return set_keys(ctx, "guard set", keys, "tunerd guard show")


@guard_command.command(name="check", short_help="Renew what the guards judge by.")
@operation("render_check")
def check(call: Call) -> ActionResult:
    """Read the evidence again, try the deployed command line on the engine as it is now, and plan it again.

    The daemon does this by itself when the engine, the driver, the unit or the evidence changes.

    \b
    Example:
      tunerd guard check
    """  # noqa: D301
    from tunerd.watch.findings import check

    return check(call.context())


@guard_command.command(name="raise-margin", short_help="Deploy what serves with a larger margin.")
@yes_option
@shown_option
@operation(line("{summary}"), preview=render_plan)
def raise_margin(call: Call, shown: str | None) -> ActionResult:
    """Deploy what serves with memory.fit_mib one step larger, never smaller.

    The guard against out-of-memory does this in tunerd-guard.service. `tunerd rollback` undoes it.

    \b
    Example:
      tunerd guard raise-margin
    """  # noqa: D301
    from tunerd.watch.guarding import raise_margin

    ctx = call.context(acts=True)
    ask = None if call.yes else asks_to_swap(call, ctx.unit)
    return raise_margin(ctx, confirm=as_shown(shown), ask=ask)


def render_guard(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    for guard in payload["guards"]:
        yield f"{guard['name']}: {guard['policy']}"
        yield f"  goes by: {guard['evidence']}"
        yield f"  may:     {guard['may']}"
        if guard["last"] is not None:
            yield f"  last:    {when(guard['last']['at_s'])}: {guard['last']['text']}"
    if payload["problem"]:
        yield f"their history cannot be read: {payload['problem']}"


def render_check(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    confirmed, replanned = payload["confirmed"], payload["replanned"]
    speed = "this server was not measured"
    if confirmed is not None:
        speed = f"at least {confirmed['floor_tok_s']:.1f} tok/s"
        if confirmed["floor_acceptance"] is not None:
            speed += f", and {confirmed['floor_acceptance']:.2f} of the drafts accepted"
        if confirmed["pace"] is not None:
            speed += (
                "; a pass of at most {ms:.1f} ms, and {draft_ms:.1f} for each drafted token".format(
                    **confirmed["pace"]
                )
            )
    changed = {True: "not the build that was deployed", False: "as deployed", None: "unknown"}
    rows = [
        ("confirmed", speed),
        ("engine", changed[replanned["identity_changed"]]),
        ("next start", "; ".join(replanned["refusals"]) or "nothing prevents it"),
    ]
    if replanned["identity_changed"]:
        kept = replanned["kept"]
        by_hand = f"kept as `{kept}`; `tunerd compare {kept} {replanned['engine'] or 'live'}`"
        none = "no copy of it was kept, so it cannot be compared"
        rows.append(("old build", replanned["compared"] or (by_hand if kept else none)))
    yield from columns(rows)


@click.group(name="notify")
def notify_command() -> None:
    """Notices go to the journal, and to notify.webhook if one is set."""


@notify_command.command(name="test", short_help="Send a notice that says it is a test.")
@operation(line("it arrived"))
def test(call: Call) -> ActionResult:
    """Send a test notice to notify.webhook, directly from this command.

    \b
    Example:
      tunerd notify test
    """  # noqa: D301
    from tunerd.watch.notices import try_notice

    return try_notice(call.context())


@notify_command.command(name="send", short_help="Send a notice that the daemon left.")
@click.argument("name")
@operation(line("it arrived"), needs_settings=False)
def send(call: Call, name: str) -> ActionResult:
    """Send a notice that the daemon left. tunerd-notify-NAME.service runs this.

    \b
    Example:
      tunerd notify send 1790000000000
    """  # noqa: D301
    from tunerd.watch.notices import send_notice

    context = call.context(tells=True)
    return send_notice(context, name, as_left=context.settings_problem is not None)


@click.group(name="jobs", invoke_without_command=True)
@operation("render_jobs", needs_settings=False)
def jobs_command(call: Call) -> ActionResult:
    """List the newest jobs since the machine started: of `sweep start`, `schedule run-now`, and members of group tunerd.

    \b
    Example:
      tunerd jobs
      tunerd jobs watch 7
    """  # noqa: D301
    from tunerd.jobs import jobs

    return jobs(call.context())


@jobs_command.command(name="watch", short_help="Follow a job to its end.")
@click.argument("number", type=click.IntRange(1))
@json_option
@click.pass_obj
def watch(terminal: Terminal, number: int, as_json: bool) -> None:
    """Show what a job does until it ends, then its result; the exit code is the job's.

    Ctrl-C leaves it running.

    \b
    Example:
      tunerd jobs watch 7
    """  # noqa: D301
    from tunerd.app import build_context
    from tunerd.jobs import read_job, watch_job

    sink = progress_sink(as_json=as_json)
    remote = terminal.remote(sink)
    try:
        if remote is not None:
            argv = list(remote.job(number)["argv"])
            done = remote.follow(number)
        else:
            context = build_context(mode=terminal.mode, progress=sink, needs_settings=False)
            argv = list(read_job(context, number).request.argv)
            done = watch_job(context, number)
    finally:
        end_line(sink)
    finish(done, lambda payload: _lines(argv, number, payload), as_json=as_json)


@jobs_command.command(name="stop", short_help="Stop a job that measures.")
@click.argument("job", metavar="NUMBER", type=click.IntRange(1))
@operation(line("job {job}, {kind}, is stopped"), needs_settings=False)
def stop(call: Call, job: int) -> ActionResult:
    """Stop a job that measures or only looks. The server comes back, and what was measured is kept.

    A swap is not stopped half-way: `tunerd rollback` undoes it when it is done.

    \b
    Example:
      tunerd jobs stop 7
    """  # noqa: D301
    from tunerd.jobs import stop_job

    return stop_job(call.context(tells=True), job)


def _lines(argv: Sequence[str], number: int, payload: Mapping[str, Any]) -> Iterable[str]:
    """What the command of that job would have said."""
    words = asked(argv, is_member=False)  # root's own jobs say more
    if "question" in payload:
        return (f"job {number}, {words.kind}, is done",)
    lines: Iterable[str] = words.operation.named(words.operation.render)(payload)
    return lines


def render_jobs(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line each, newest first."""
    if not payload["jobs"]:
        yield "no job was started since the machine started"
        return
    rows = (
        (row["job"], when(row["asked_s"]), row["asked_by"], row["kind"], row["state"], _doing(row))
        for row in payload["jobs"]
    )
    yield from columns(rows, ("job", "when", "by", "what", "state", ""))


def _doing(row: Mapping[str, Any]) -> str:
    if row["state"] == "running" and row["progress"] is not None:
        return str(row["progress"]["text"])
    result = row["result"] or {}
    failed = result.get("error")
    return str(failed["message"] if failed else view.came_to(result))


@click.command(name="job", hidden=True)
@click.argument("number", type=int)
@click.pass_obj
def job_command(terminal: Terminal, number: int) -> None:
    """Do what was asked for through the local API, and keep what happens in the job's folder."""
    from tunerd.app import build_context
    from tunerd.jobs import run_job

    said = progress_sink()  # to the journal, which outlives the job's folder

    def make_context(progress: ProgressSink) -> Context:
        def tell(step: Progress) -> None:
            progress(step)
            said(step)

        return build_context(
            mode=terminal.mode, progress=tell, start_supervisor=True, needs_settings=False
        )

    raise click.exceptions.Exit(run_job(make_context, number, _act))


@click.command(name="look", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def look_command(terminal: Terminal, argv: tuple[str, ...]) -> None:
    """Print what an operator is told by these words, as JSON."""
    from tunerd.app import build_context
    from tunerd.cli.main import named

    try:
        words = asked(argv)
        ctx = build_context(mode=terminal.mode, needs_settings=words.operation.needs_settings)
        result = words.act(Call(ctx=ctx))
    except TunerdError as error:
        print(json.dumps(error_json(error, named(argv))))
        raise click.exceptions.Exit(error.exit_code) from error
    print(json.dumps(result.to_json()))
    raise click.exceptions.Exit(result.exit_code)


def _act(ctx: Context, request: JobRequest) -> ActionResult:
    """What the job asks for; without `--yes` only as far as its question."""
    words = asked(request.argv, is_member=request.is_member)
    if words.operation.needs_settings:
        ctx.demand_settings()
    try:
        return words.act(Call(ctx=ctx, yes=bool(words.params.get("yes", True))))
    except Question as question:
        return question.result


def _log() -> None:
    """Set logging up as the environment says: a unit speaks to the journal."""
    from tunerd.log import configure

    # The first is missing where journald was down as the unit began.
    is_unit = any(os.environ.get(name) for name in ("JOURNAL_STREAM", "NOTIFY_SOCKET"))
    configure(level=os.environ.get("TUNERD_LOG_LEVEL", "info"), is_unit=is_unit)


@click.command(name="daemon")
@click.pass_obj
def daemon_command(terminal: Terminal) -> None:
    """Finish or undo an interrupted swap, report ready, keep watch. tunerd.service starts it.

    \b
    Example:
      systemctl start tunerd
    """  # noqa: D301
    from tunerd.app import build_context
    from tunerd.watch.daemon import run_daemon
    from tunerd.web.part import ApiPart

    # Which must not end it: production may wait for what it recovers.
    context = build_context(mode=terminal.mode, needs_settings=False)
    _log()
    raise click.exceptions.Exit(run_daemon(context, [ApiPart]))


@click.command(name="supervise")
def supervise_command() -> None:
    """Run units on a machine without a service manager. The first apply starts it by itself.

    \b
    Example:
      tunerd --local supervise
    """  # noqa: D301
    from tunerd.tryout.supervisor import supervise

    supervise(paths_for(Mode.LOCAL, os.environ), os.environ)


@click.command(name="web", hidden=True)
@click.pass_obj
def web_command(terminal: Terminal) -> None:
    """Serve the local API and the page; whatever is asked for there, the daemon is asked."""
    from tunerd.app import choose_mode
    from tunerd.web.page import serve

    _log()
    serve(choose_mode(terminal.mode, os.environ), os.environ)
