"""`tunerd guard`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from tunerd.cli.output import columns, finish, json_option, progress_sink


@click.group(name="guard", short_help="What watches over the server, and what it may do.")
def command() -> None:
    """Guards look at every reading of the daemon; each has its own switch in [guards]."""


@command.command(
    name="show", short_help="Every guard: its switch, its evidence, what it last said."
)
@json_option
@click.pass_obj
def show(mode: str | None, as_json: bool) -> None:
    """Every guard: what it may do, what it goes by, and what it last said.

    \b
    Example:
      tunerd guard show
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.guard_show import show_guards
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "guards", as_json=as_json)
    finish(found or show_guards(build_context(mode=mode)), render, as_json=as_json)


@command.command(name="set", short_help="What a guard may do.")
@click.argument("guard", type=click.Choice(["oom", "hang", "drift", "upgrade"]))
@click.argument("policy", type=click.Choice(["act", "advise", "off"]))
@json_option
@click.pass_obj
def set_(mode: str | None, guard: str, policy: str, as_json: bool) -> None:
    """Write a guard's switch into tunerd.toml: act by itself, only advise, or off.

    \b
    Example:
      tunerd guard set hang advise
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.guard_set import set_guard
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "guard/set", {"guard": guard, "policy": policy}, as_json=as_json)
    finish(
        done or set_guard(build_context(mode=mode), guard, policy),
        lambda payload: [f"{key} = {value}" for key, value in payload["changed"].items()],
        as_json=as_json,
    )


@command.command(name="check", short_help="Find out anew what the guards judge by.")
@json_option
@click.pass_obj
def check(mode: str | None, as_json: bool) -> None:
    """Read the evidence, try the deployed command line on the engine as it is now, plan it again.

    The daemon does this by itself when the engine, the driver, the unit or the evidence changed.

    \b
    Example:
      tunerd guard check
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.guard_check import check
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "guards", "check", as_json=as_json)
    finish(found or check(build_context(mode=mode)), render_check, as_json=as_json)


@command.command(name="raise-margin", short_help="Deploy what serves with the next larger margin.")
@json_option
@click.pass_obj
def raise_margin(mode: str | None, as_json: bool) -> None:
    """Deploy what serves with memory.fit_mib one step larger; never a smaller one.

    What the guard against out-of-memory does in tunerd-guard.service. `tunerd rollback` undoes it.

    \b
    Example:
      tunerd guard raise-margin
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.guard_raise import raise_margin
    from tunerd.cli.remote import by_daemon

    done = by_daemon(mode, "guard/raise-margin", {}, as_json=as_json)
    if done is not None:
        finish(done, lambda payload: [payload["summary"]], as_json=as_json)
        return
    context = build_context(
        mode=mode, progress=progress_sink(as_json=as_json), start_supervisor=True
    )
    finish(raise_margin(context), lambda payload: [payload["summary"]], as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    for guard in payload["guards"]:
        yield f"{guard['name']}: {guard['policy']}"
        yield f"  goes by: {guard['evidence']}"
        yield f"  may:     {guard['may']}"
        last = guard["last"]
        if last is not None:
            at = datetime.fromtimestamp(last["at_s"], UTC).strftime("%Y-%m-%d %H:%M UTC")
            yield f"  last:    {at}: {last['text']}"
    if payload["problem"]:
        yield f"their history cannot be read: {payload['problem']}"


def render_check(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    confirmed, replanned = payload["confirmed"], payload["replanned"]
    speed = "nothing was measured of this server"
    if confirmed is not None:
        speed = f"at least {confirmed['floor_tok_s']:.1f} tok/s"
        if confirmed["floor_acceptance"] is not None:
            speed += f", and {confirmed['floor_acceptance']:.2f} of the drafts accepted"
    changed = {True: "another build than was deployed", False: "as deployed", None: "unknown"}
    rows = [
        ("confirmed", speed),
        ("engine", changed[replanned["identity_changed"]]),
        ("next start", "; ".join(replanned["refusals"]) or "nothing speaks against it"),
    ]
    if replanned["identity_changed"]:
        kept = replanned["kept"]
        by_hand = f"kept as `{kept}`; `tunerd compare {kept} {replanned['engine'] or 'live'}`"
        none = "no copy of it was kept, so it cannot be compared"
        rows.append(("old build", replanned["compared"] or (by_hand if kept else none)))
    yield from columns(rows)
