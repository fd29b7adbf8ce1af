"""Commands that change, show or write down what serves: plan, apply, probation, promote, rollback, status, history, emit, fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.output import columns, finish, line, names_of, table_lines
from tunerd.errors import UsageError
from tunerd.operations import HASH, IMAGE, LINE, NUMBER, PROFILE, SETTING, TARGET, Call, operation
from tunerd.result import ActionResult
from tunerd.web import view
from tunerd.words import MiB, counted, format_duration, format_mib

if TYPE_CHECKING:
    from tunerd.engine.choice import PlanRequest
    from tunerd.production.plan import Plan
    from tunerd.production.rollback import Target


set_option = click.option(
    "--set",
    "options",
    multiple=True,
    type=SETTING,
    metavar="KEY=VALUE",
    shell_complete=names_of("keys"),
    help="Override a key of the profile, such as speculation.n_max=2; deploying it pins the key.",
)
untuned_option = click.option(
    "--untuned", is_flag=True, help="Ignore what the last promotion found."
)


def request_of(profile: str, options: Sequence[str], *, untuned: bool = False) -> PlanRequest:
    """A profile to be planned, with what these options set."""
    from tunerd.engine.choice import PlanRequest
    from tunerd.profile.files import parse_options

    return PlanRequest(profile, parse_options(options), with_tuned=not untuned)


start_after_option = click.option(
    "--start-after", is_flag=True, help="Start the unit afterwards, even if it is down now."
)


@click.command(name="plan")
@click.argument("profile", type=PROFILE, shell_complete=names_of("profiles"))
@set_option
@untuned_option
@click.option("--explain", is_flag=True, help="Show who set each flag, and why.")
@operation("render_plan")
def plan_command(
    call: Call, profile: str, options: tuple[str, ...], untuned: bool, explain: bool
) -> ActionResult:
    """Show what apply would do: command line, unit, difference, memory, warnings. Nothing is touched.

    Exit code 1 if it would be refused.

    \b
    Example:
      tunerd plan rtx-3090-ti-24gb --explain
      tunerd plan rtx-5060-ti-16gb --set speculation.n_max=3
    """  # noqa: D301
    from tunerd.production.plan import plan

    request = request_of(profile, options, untuned=untuned)
    return plan(call.context(tells=True), request, with_explain=explain)


def render_plan(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield from columns(view.plan_facts(payload))
    yield ""
    yield "command line"
    yield from _command_line(payload)
    yield ""
    yield "memory"
    if payload["memory"] is None:
        yield f"  {view.without_header(payload)}"
    else:
        yield from memory_lines(payload["memory"])
    yield ""
    yield "unit"
    yield from payload["diff"].splitlines() or ["no difference from what is live"]


def _command_line(payload: Mapping[str, Any]) -> Iterator[str]:
    if payload["explain"] is None:
        argv = [shlex.quote(word) for word in payload["argv"]]
        line = f"  {argv[0]}"
        for word in argv[1:]:
            if word.startswith("-") and not word[1:2].isdigit():
                yield line + " \\"
                line = f"    {word}"
            else:
                line += f" {word}"
        yield line
        return
    rows = ((f"  {row['flag']}", row["key"], row["origin"]) for row in payload["explain"])
    yield from columns(rows, ("  flag", "key", "set by"))


def memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    """The memory estimate as a table by device."""
    for device in memory["devices"]:
        free = format_mib(device["free_mib"])
        yield f"  {device['name']}: needs {format_mib(device['total_mib'])}, {free} free"
        if device["calculated_mib"] is not None:
            calculated = format_mib(device["calculated_mib"])
            loads = counted(memory["loads"], "load")
            yield f"    calculated {calculated}; corrected by what {loads} of it took"
        yield from columns(
            (f"    {part['name']}", format_mib(part["mib"]), part["why"])
            for part in device["parts"]
        )
    if memory["verdict"]:
        yield f"  {memory['verdict']}"


now_option = click.option("--now", is_flag=True, help="Do not wait for running requests.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
probation_option = click.option(
    "--probation/--no-probation",
    default=True,
    help="Whether to watch the new server, and to go back if it does worse [default: watch].",
)
shown_option = click.option(
    "--shown",
    type=HASH,
    hidden=True,
    help="sha256 of the `diff` that was shown; if the difference has changed, nothing is done.",
)


@click.command(name="apply")
@click.argument("profile", type=PROFILE, shell_complete=names_of("profiles"))
@set_option
@untuned_option
@click.option("--dry-run", is_flag=True, help="The same as `tunerd plan`.")
@yes_option
@now_option
@probation_option
@shown_option
@operation("render_apply", preview=render_plan)
def apply_command(
    call: Call,
    profile: str,
    options: tuple[str, ...],
    untuned: bool,
    dry_run: bool,
    now: bool,
    probation: bool,
    shown: str | None,
) -> ActionResult:
    """Deploy a profile: back up the unit that serves, swap it, wait for a real generation.

    If the new server does not answer, the old one is put back (exit code 3).

    Members of group tunerd need no root: the daemon does it, and carries on if you leave this
    command. With --set they may give numbers, switches and fixed words only.

    \b
    Example:
      tunerd apply rtx-3090-ti-24gb
      tunerd apply rtx-5060-ti-16gb --set speculation.n_max=3 --yes
    """  # noqa: D301
    from tunerd.production.apply import apply
    from tunerd.production.plan import plan

    request = request_of(profile, options, untuned=untuned)
    ctx = call.context(acts=not dry_run)
    if dry_run:
        return plan(ctx, request)
    return apply(
        ctx,
        request,
        drain=not now,
        confirm=as_shown(shown),
        ask=None if call.yes else asks_to_swap(call, ctx.unit),
        probation=probation,
    )


def asks_to_swap(call: Call, unit: str) -> Callable[[Plan], None]:
    """Shows a plan, and asks whether to go on."""

    def ask(made: Plan) -> None:
        from tunerd.production.plan import plan_json

        call.ask(f"Swap {unit} now?", made.messages, plan_json(made, with_explain=False))

    return ask


def as_shown(shown: str | None) -> Callable[[Any], None]:
    """Refuses to go on where the difference is another one than was shown."""

    def confirm(made: Any) -> None:
        from tunerd.units.text import demand_as_shown

        if shown is not None:
            demand_as_shown(made.diff, shown)

    return confirm


def render_apply(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if "summary" not in payload:  # a dry run
        yield from render_plan(payload)
        return
    yield payload["summary"]
    yield from _kept(payload, "; `tunerd rollback` goes back")
    if payload["backup"] is None:
        yield "there was no unit file of this name before: `tunerd rollback` removes it, and what was in force before applies again"


def _kept(payload: Mapping[str, Any], way_back: str = "") -> Iterator[str]:
    if payload["backup"]:
        yield f"what served before is kept as {payload['backup']}{way_back}"


@click.command(name="rollback")
@click.option("--to", type=TARGET, metavar="NAME|GENERATION", shell_complete=names_of("targets"),
              help="A backup's name or a generation's number.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Show what you can go back to.")
@click.option("--dry-run", is_flag=True, help="Show where it would go back to, and what changes.")
@yes_option
@now_option
@shown_option
@operation("render_rollback", preview="render_rollback", goes_ahead=True, needs_settings=False)
def rollback_command(
    call: Call, to: str | None, only_list: bool, dry_run: bool, now: bool, shown: str | None
) -> ActionResult:
    """Go back to the unit that served before. This is a swap like any other: run it again to return.

    Without a terminal it goes ahead without asking: in trouble one command must be enough.

    Members of group tunerd need no root: the daemon does it.

    \b
    Example:
      tunerd rollback
      tunerd rollback --list
      tunerd rollback --to 12
    """  # noqa: D301
    from tunerd.production.rollback import list_targets, preview, rollback

    ctx = call.context(acts=not (only_list or dry_run))
    if only_list:
        return list_targets(ctx)
    if dry_run:
        return preview(ctx, to)

    def ask(target: Target) -> None:
        what = {"diff": target.diff, "to": target.name}
        call.ask(f"Go back to {target.name} now?", target.messages, what)

    return rollback(
        ctx, to=to, drain=not now, confirm=as_shown(shown), ask=None if call.yes else ask
    )


def render_rollback(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: how it went, where it would lead, or what there is."""
    if "backups" in payload:
        rows = payload["backups"]
        yield from table_lines(view.backups_table(rows)) if rows else ["no backups"]
        return
    if "summary" not in payload:  # a dry run, or its question
        yield from payload["diff"].splitlines()
        return
    yield payload["summary"]
    yield from _kept(payload)


@click.command(name="recover")
@operation("render_recover", needs_settings=False)
def recover_command(call: Call) -> ActionResult:
    """Finish or undo an interrupted swap. The daemon does this by itself.

    \b
    Example:
      tunerd recover
    """  # noqa: D301
    from tunerd.production.recover import recover

    return recover(call.context(acts=True))


def render_recover(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if payload["found"] is None:
        yield payload["text"]


@click.command(name="verify")
@operation("render_verify", needs_settings=False)
def verify_command(call: Call) -> ActionResult:
    """Check that the machine is as deployed, and name each difference.

    Exit code 0 as deployed, 6 drift, 1 could not tell.

    \b
    Example:
      tunerd verify; [ $? != 6 ] || echo "somebody changed something"
    """  # noqa: D301
    from tunerd.production.status import verify

    return verify(call.context())


def render_verify(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if payload["as_deployed"]:
        profile = f"profile {payload['profile']}" if payload["profile"] else "not by a profile"
        yield f"as deployed by generation {payload['generation']} ({profile})"
    elif payload["drift"]:
        count = counted(len(payload["drift"]), "difference")
        yield f"{count} from generation {payload['generation']}"


@click.command(name="status")
@operation("render_status", needs_settings=False)
def status_command(call: Call) -> ActionResult:
    """Show what serves now, since when, from which generation, and whether it is healthy.

    Members of group tunerd see the system's server, through the daemon.

    \b
    Example:
      tunerd status
      tunerd status --json | jq .healthy
    """  # noqa: D301
    from tunerd.production.status import status

    return status(call.context())


def render_status(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    facts = list(view.status_facts(payload))
    for gpu in payload["vram"] or ():
        used = f"{format_mib(gpu['used_mib'])} used of {format_mib(gpu['total_mib'])}"
        facts.append((f"GPU {gpu['index']}", f"{gpu['name']}: {used}"))
    unread = "none; `tunerd verify` reads the engine's files as well"
    none = "none" if payload["generation"] is None else unread
    facts.append(("drift", "; ".join(row["text"] for row in payload["drift"]) or none))
    yield from columns(tuple(facts))


@click.group(name="history", invoke_without_command=True)
@click.option("--all", "show_all", is_flag=True, help="Every generation, not only the newest 20.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, hidden=True,
              help="So many of the newest.")  # fmt: skip
@operation("render_history", needs_settings=False)
def history_command(call: Call, show_all: bool, limit: int) -> ActionResult:
    """List every swap: when, what, why, and how it ended.

    \b
    Example:
      tunerd history
      tunerd history show 14
      tunerd history diff 13 14
    """  # noqa: D301
    from tunerd.production.status import history

    return history(call.context(), limit=None if show_all else limit)


@history_command.command(name="show", short_help="Show all that is kept of one generation.")
@click.argument("number", type=NUMBER, shell_complete=names_of("generations"))
@operation("render_show", needs_settings=False)
def show_command(call: Call, number: int) -> ActionResult:
    """Show all that is kept of one generation: its facts, the origin of each flag, the unit.

    \b
    Example:
      tunerd history show 14
    """  # noqa: D301
    from tunerd.production.status import show

    return show(call.context(), number)


@history_command.command(name="diff", short_help="Show how two generations differ.")
@click.argument("one", type=NUMBER, shell_complete=names_of("generations"))
@click.argument("other", type=NUMBER, shell_complete=names_of("generations"))
@operation(lambda payload: payload["diff"].splitlines() or ["no difference"], needs_settings=False)
def diff_command(call: Call, one: int, other: int) -> ActionResult:
    """Show how the units of two generations differ.

    \b
    Example:
      tunerd history diff 13 14
    """  # noqa: D301
    from tunerd.production.status import diff

    return diff(call.context(), one, other)


def render_history(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["generations"]:
        yield "nothing was deployed yet"
        return
    yield from table_lines(view.generations_table(payload["generations"]))
    hidden = payload["total"] - len(payload["generations"])
    if hidden > 0:
        yield f"{hidden} older ones: --all"


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield from columns(view.generation_facts(payload))
    yield ""
    yield from table_lines(view.flags_table(payload["generation"]["origins"]))
    yield ""
    yield from (payload["unit"] or "the unit file was removed").splitlines()


@click.group(name="probation")
def probation_command() -> None:
    """After a swap the new server is watched, and taken back if it does worse."""


@probation_command.command(name="show", short_help="List every probation, newest first.")
@operation("render_probations", needs_settings=False)
def show(call: Call) -> ActionResult:
    """List every probation: its generation, its state, and why it ended.

    \b
    Example:
      tunerd probation show
    """  # noqa: D301
    from tunerd.watch.probation import show_probation

    return show_probation(call.context())


@probation_command.command(name="take-back")
@click.argument("generation", type=int)
@click.option("--reason", required=True, help="What was wrong with it; kept with the record.")
@click.option("--sweep", type=int, help="The sweep that proved it.")
@operation(line("generation {generation}: {state}: {reason}"), needs_settings=False)
def take_back_(call: Call, generation: int, reason: str, sweep: int | None) -> ActionResult:
    """Go back from a generation, if it still serves. The daemon runs this in a unit.

    \b
    Example:
      tunerd probation take-back 14 --reason "it answers nonsense"
    """  # noqa: D301
    from tunerd.watch.probation import take_back

    return take_back(call.context(acts=True), generation, reason, sweep=sweep)


def render_probations(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (row["generation"], row["state"],
         format_duration(row["left_s"]) if row["state"] == "running" else "",
         view.figure(row["tok_s"]) or "", view.figure(row["basis"].get("slowest_tok_s")) or "", row["reason"])
        for row in payload["probations"]
    ]  # fmt: skip
    if rows:
        yield from columns(rows, ("generation", "state", "left", "tok/s", "slowest measured", ""))


@click.command(name="promote")
@click.argument("sweep", metavar="[ID]", type=NUMBER, required=False)
@click.option("--dry-run", is_flag=True, help="Show what would be deployed; nothing is touched.")
@yes_option
@now_option
@probation_option
@shown_option
@operation("render_promote", preview=render_plan)
def promote_command(
    call: Call, sweep: int | None, dry_run: bool, now: bool, probation: bool, shown: str | None
) -> ActionResult:
    """Deploy the winner of a sweep (the newest without ID) by an ordinary swap.

    It is measured once more in service, and taken back if it is not faster there than what it
    replaced (exit code 3). It becomes the tuned layer, which later applies keep.

    \b
    Example:
      tunerd promote
      tunerd promote 12 --yes
    """  # noqa: D301
    from tunerd.sweep.promote import preview, promote

    ctx = call.context(acts=not dry_run)
    if dry_run:
        return preview(ctx, sweep)
    return promote(
        ctx,
        sweep,
        drain=not now,
        confirm=as_shown(shown),
        ask=None if call.yes else asks_to_swap(call, ctx.unit),
        with_probation=probation,
    )


def render_promote(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if "summary" not in payload:  # a dry run
        yield from () if "nothing" in payload else render_plan(payload)
        return
    yield payload["summary"]
    yield f"what changed: {payload['changes']}"
    yield payload["measured_again"]["text"]
    yield from _kept(payload, "; `tunerd rollback` goes back")


@click.command(name="decline")
@click.argument("sweep", metavar="[ID]", type=NUMBER, required=False)
@click.option("--why", type=LINE, help="Your reason; kept with the sweep.")
@operation(line("sweep {sweep}: {text}"))
def decline_command(call: Call, sweep: int | None, why: str | None) -> ActionResult:
    """Turn down the winner of a sweep (the newest without ID); its samples are kept.

    \b
    Example:
      tunerd decline 12 --why "KV types stay as they are"
    """  # noqa: D301
    from tunerd.sweep.promote import decline

    return decline(call.context(), sweep, why=why)


# For programs beside tunerd, and for several models on one card

TARGETS = ("llama-swap", "models-ini", "compose", "quadlet", "shell")


@click.command(name="emit")
@click.argument("target", type=click.Choice(TARGETS))
@click.argument("profile", type=PROFILE, nargs=-1, shell_complete=names_of("profiles"))
@set_option
@untuned_option
@click.option("--image", type=IMAGE, metavar="IMAGE",
              help="Container image [default: llama.cpp's own].")  # fmt: skip
@click.option(
    "--output", "-o", metavar="FILE", help="Where to write it [default: standard output]."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@operation("render_emitted", show="show_emitted")
def emit_command(
    call: Call,
    target: str,
    profile: tuple[str, ...],
    options: tuple[str, ...],
    untuned: bool,
    image: str | None,
    output: str | None,
    force: bool,
) -> ActionResult:
    """Write the command line of a plan for another program; without PROFILE, of what serves now.

    It is the command line that `tunerd plan` shows. llama-swap and models-ini take several profiles.
    What a target cannot express is named on standard error and in the text. API keys are never written.
    Nothing is started.

    \b
    Example:
      tunerd emit llama-swap rtx-3090-ti-24gb
      tunerd emit compose -o compose.yaml
      tunerd emit shell rtx-5060-ti-16gb --set speculation.n_max=3
    """  # noqa: D301
    from tunerd.engine.emit import Target
    from tunerd.production.emit import write_down

    del output, force  # where it is typed
    if not profile and (options or untuned):
        raise UsageError("--set and --untuned need a PROFILE: they cannot change what serves now")
    if image is not None and target not in {"compose", "quadlet"}:
        raise UsageError("--image is for compose and quadlet")
    requests = [request_of(one, options, untuned=untuned) for one in dict.fromkeys(profile)]
    return write_down(call.context(), Target(target), requests, image=image)


def show_emitted(
    perform: Callable[[], ActionResult], params: Mapping[str, Any], as_json: bool
) -> None:
    """On standard output, or into the file that was named."""
    from tunerd.machine.files import demand_free
    from tunerd.production.emit import write_text

    path = Path(params["output"]) if params["output"] not in {None, "-"} else None
    if path is not None and not params["force"]:
        demand_free(path)
    made = perform()
    if path is not None:
        made = write_text(path, made, replace_it=params["force"])
    finish(made, render_emitted, as_json=as_json, is_data=True)


def render_emitted(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people and programs: the text itself, or where it is."""
    if payload["path"] is None:
        yield payload["text"].removesuffix("\n")
    else:
        yield f"wrote {payload['path']}"


@click.command(name="fits")
@click.argument(
    "profile", type=PROFILE, nargs=-1, required=True, shell_complete=names_of("profiles")
)
@click.option("--budget-mib", type=NUMBER, metavar="MIB",
              help="Memory for all of them [default: what is free, and what the server that serves now takes].")  # fmt: skip
@operation("render_fits")
def fits_command(call: Call, profile: tuple[str, ...], budget_mib: int | None) -> ActionResult:
    """Check whether the servers of these profiles fit in memory at once, by their estimates and margin.

    Exit code 1 if they do not, or if that is unknown. Nothing is touched.

    \b
    Example:
      tunerd fits coder chat embeddings
      tunerd fits coder chat --budget-mib 20000
    """  # noqa: D301
    from tunerd.production.emit import fits

    requests = [request_of(one, ()) for one in profile]
    budget = None if budget_mib is None else MiB(budget_mib)
    return fits(call.context(), requests, budget_mib=budget)


def render_fits(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: what each needs, and what is left."""
    for one in payload["devices"]:
        rows = [
            ("held by others", one["held_mib"]),
            ("may be taken", one["budget_mib"]),
            *((need["profile"], need["mib"]) for need in one["needs"]),
            ("margin", one["margin_mib"]),
            ("left", one["left_mib"]),
        ]
        shown = ((name, format_mib(mib)) for name, mib in rows)
        yield from columns(shown, (one["device"], "memory"))
