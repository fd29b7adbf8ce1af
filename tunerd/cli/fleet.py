"""`tunerd fleet`: several boxes, each asked through its own tunerd, and the store that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunerd.cli.deploy import probation_option, set_option, untuned_option, yes_option
from tunerd.cli.output import columns, names_of
from tunerd.operations import NUMBER, PROFILE, Call, operation
from tunerd.result import ActionResult
from tunerd.words import counted, format_duration, format_mib, when

if TYPE_CHECKING:
    from tunerd.fleet.steps import Rollout


def _boxes(command: Any) -> Any:
    """Which boxes, whether each is watched, and whether to ask."""
    inventory = click.option(
        "--inventory",
        type=click.Path(exists=True, path_type=Path),
        help="Ansible inventory, read by `ansible-inventory`.",
    )
    box = click.option(
        "--box", "boxes", multiple=True, metavar="NAME",
        help="A box as ssh knows it; repeat it, in order [default: fleet.boxes, or the shared store's].",
    )  # fmt: skip
    return box(inventory(probation_option(yes_option(command))))


@click.group(name="fleet")
def fleet_command() -> None:
    """Change several boxes one after the other, each by its own tunerd over ssh; share what they measured.

    The first box is the canary. A box is touched only when the probation of the one before has passed.
    """


@fleet_command.command(name="apply", short_help="Deploy a profile on one box after the other.")
@click.argument("profile", type=PROFILE, shell_complete=names_of("profiles"))
@set_option
@untuned_option
@_boxes
@operation("render_rollout", preview="render_rollout")
def apply_(
    call: Call, profile: str, options: tuple[str, ...], untuned: bool, **where: Any
) -> ActionResult:
    """Deploy a profile on one box after the other, and stop at the first that goes back.

    All boxes are planned before the first is touched. Exit code 3 if a box went back, 4 if one
    serves nothing, or its state is unknown.

    \b
    Example:
      tunerd fleet apply rtx-3090-ti-24gb --box gpu1 --box gpu2
      tunerd fleet apply rtx-3090-ti-24gb --inventory hosts.ini --yes
    """  # noqa: D301
    from tunerd.profile.files import parse_options

    parse_options(options)  # what is none is refused before any box is asked
    words = (*(f"--set={one}" for one in options), *("--untuned",) * untuned, "--", profile)
    return _roll_out(call, "apply", words, **where)


@fleet_command.command(name="promote", short_help="Deploy on each box what its sweep proved.")
@_boxes
@operation("render_rollout", preview="render_rollout")
def promote(call: Call, **where: Any) -> ActionResult:
    """Deploy on each box what its own newest sweep proved, one box after the other.

    A box whose sweep proved nothing, or nothing new, is skipped.

    \b
    Example:
      tunerd fleet promote
    """  # noqa: D301
    return _roll_out(call, "promote", (), **where)


def _roll_out(
    call: Call, what: str, words: tuple[str, ...], *, boxes: tuple[str, ...],
    inventory: Path | None, probation: bool,
) -> ActionResult:  # fmt: skip
    from tunerd.fleet.rollout import boxes_of, roll_out

    ctx, agree = call.context(tells=True), _asks(call, "Deploy on {n}, {first} first?")
    names = boxes_of(ctx, boxes, inventory)
    return roll_out(ctx, what, words, names, agree=agree, probation=probation)


def _asks(call: Call, question: str) -> Callable[[Rollout], None]:
    """Shows a rollout, and asks whether to go on."""

    def agree(rollout: Rollout) -> None:
        from tunerd.fleet.rollout import payload_of

        ones = rollout.to_do() or rollout.to_return()
        n = counted(len(ones), "box", "boxes")
        text = question.format(n=n, first=ones[0].box, number=rollout.number)
        call.ask(text, shown=payload_of(rollout))

    return agree


@fleet_command.command(name="resume", short_help="Continue a rollout that was cut or stopped.")
@click.option(
    "--past", is_flag=True, help="Continue past boxes that went back, or that others changed."
)
@yes_option
@operation("render_rollout", preview="render_rollout")
def resume_(call: Call, past: bool) -> ActionResult:
    """Continue the newest rollout where it was killed, cut or stopped; nothing is done twice.

    \b
    Example:
      tunerd fleet resume
    """  # noqa: D301
    from tunerd.fleet.rollout import resume

    agree = _asks(call, "Continue with {n}, {first} first?")
    return resume(call.context(tells=True), agree=agree, past=past)


@fleet_command.command(name="rollback", short_help="Undo what a rollout changed.")
@click.argument("number", metavar="[ROLLOUT]", type=NUMBER, required=False)
@yes_option
@operation("render_rollout", preview="render_rollout")
def rollback_(call: Call, number: int | None) -> ActionResult:
    """Undo what a rollout (the newest without ROLLOUT) changed, the last box first.

    A box on which something else serves by now is left alone.

    \b
    Example:
      tunerd fleet rollback
    """  # noqa: D301
    from tunerd.fleet.rollout import roll_back

    agree = _asks(call, "Undo what rollout {number} changed on {n}?")
    return roll_back(call.context(tells=True), number, agree=agree)


@fleet_command.command(name="show", short_help="Show how a rollout stands.")
@click.argument("number", metavar="[ROLLOUT]", type=NUMBER, required=False)
@operation("render_rollout")
def show_(call: Call, number: int | None) -> ActionResult:
    """Show how a rollout (the newest without ROLLOUT) stands, by its journal; no box is asked.

    \b
    Example:
      tunerd fleet show
    """  # noqa: D301
    from tunerd.fleet.rollout import payload_of, read_rollout

    return ActionResult("fleet show", payload_of(read_rollout(call.context(), number)))


@fleet_command.command(name="hand-in", short_help="Send the shared store what it lacks.")
@operation("render_hand_in")
def hand_in(call: Call) -> ActionResult:
    """Send the shared store what it does not have yet, and what serves here.

    The daemon does this by itself. What was measured also stays in this box's file; nothing is sent twice.

    \b
    Example:
      tunerd fleet hand-in
      tunerd fleet hand-in --json | jq .entries
    """  # noqa: D301
    from tunerd.fleet.shared import hand_in

    return hand_in(call.context(tells=True))


@fleet_command.command(name="status", short_help="List the boxes that the shared store knows.")
@operation("render_boxes")
def status(call: Call) -> ActionResult:
    """List every box of the shared store: card, engine, what serves since when, evidence, who is silent.

    \b
    Example:
      tunerd fleet status
      tunerd fleet status --json | jq '.boxes[] | select(.is_silent)'
    """  # noqa: D301
    from tunerd.fleet.shared import fleet_status

    return fleet_status(call.context())


def render_rollout(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    back = ", going back" if payload["is_back"] else ""
    yield f"rollout {payload['rollout']}: {payload['what']}{back}"
    rows = [
        (f"  {one['box']}", one["state"],
         "" if one["generation"] is None else f"generation {one['generation']}", one["text"])
        for one in payload["boxes"]
    ]  # fmt: skip
    yield from columns(rows)


def render_hand_in(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    runs = "a run" if payload["runs"] == 1 else f"{payload['runs']} runs"
    told = f"{payload['entries']:,} entries of {runs} handed in"
    yield f"{payload['name']}: {told if payload['runs'] else 'nothing new to hand in'}"


def render_boxes(payload: Mapping[str, Any]) -> Iterator[str]:
    """One line each."""
    heads = ("box", "heard of", "card", "engine", "serves", "since", "drift", "runs", "samples",
             "handed in")  # fmt: skip
    rows = [_row(one) for one in payload["boxes"]]
    yield from columns(rows, heads) if rows else ()


def _row(one: Mapping[str, Any]) -> tuple[object, ...]:
    heard = _ago(one["seen_age_s"]) + ", silent" * one["is_silent"]
    card = None if one["card"] is None else f"{one['card']}, {format_mib(one['vram_mib'])}"
    serves = "nothing" if one["generation"] is None else f"{one['profile']} ({one['generation']})"
    known = serves if one["problem"] is None else None
    since = "not up" if one["serving_since_s"] is None else when(one["serving_since_s"])
    drift = None if one["drift"] is None else ", ".join(one["drift"]) or "none"
    handed_in = "never" if one["evidence_age_s"] is None else _ago(one["evidence_age_s"])
    return (one["name"], heard, card, one["engine"] or None, known, since, drift, one["runs"],
            one["samples"], handed_in)  # fmt: skip


def _ago(seconds: float) -> str:
    return f"{format_duration(seconds)} ago"
