"""`tunerd profiles list / show / check / new`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.commands.plan import set_option
from tunerd.cli.complete import names_of
from tunerd.cli.output import columns, finish, json_option


@click.group(name="profiles", short_help="List, show, check and write profiles.")
def command() -> None:
    """List, show, check and write profiles.

    \b
    Example:
      tunerd profiles list
      tunerd profiles show rtx-3090-ti-24gb
      tunerd profiles new mine --from-unit llama-server.service
    """  # noqa: D301


@command.command(name="list", short_help="Every profile.")
@json_option
@click.pass_obj
def list_command(mode: str | None, as_json: bool) -> None:
    """Every profile, shipped and of this site.

    \b
    Example:
      tunerd profiles list
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.profiles import list_profiles
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "profiles", as_json=as_json)
    finish(found or list_profiles(build_context(mode=mode)), render_list, as_json=as_json)


@command.command(name="show", short_help="Resolved values, and who set each.")
@click.argument("profile", shell_complete=names_of("profiles"))
@set_option
@json_option
@click.pass_obj
def show_command(mode: str | None, profile: str, options: tuple[str, ...], as_json: bool) -> None:
    """The resolved values of a profile, with the layer that set each.

    \b
    Example:
      tunerd profiles show rtx-5060-ti-16gb
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.profile_layers import parse_options
    from tunerd.actions.profiles import show_profile
    from tunerd.cli.remote import remote_for, remote_profile

    remote = remote_for(mode, as_json=as_json)
    if remote is not None:
        finish(remote_profile(remote, profile, options), render_show, as_json=as_json)
        return
    context = build_context(mode=mode)
    result = show_profile(context, profile, options=parse_options(options))
    finish(result, render_show, as_json=as_json)


@command.command(name="check", short_help="Every problem of a profile at once.")
@click.argument("profile_or_file", shell_complete=names_of("profiles", or_files=True))
@json_option
@click.pass_obj
def check_command(mode: str | None, profile_or_file: str, as_json: bool) -> None:
    """Every problem of a profile or file: key, found, allowed, nearest name. Exit code 1 if any.

    \b
    Example:
      tunerd profiles check ./mine.toml
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.profiles import check_profile

    finish(check_profile(build_context(mode=mode), profile_or_file), render_check, as_json=as_json)


@command.command(name="new", short_help="Write one for this machine.")
@click.argument("name")
@click.option("--model", metavar="FILE", type=click.Path(), help="GGUF file to serve.")
@click.option("--from-unit", metavar="UNIT", shell_complete=names_of("units"),
              help="Take over what this unit serves today.")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite a profile of this name.")
@json_option
@click.pass_obj
def new_command(
    mode: str | None,
    name: str,
    model: str | None,
    from_unit: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a site profile from the hardware and a model file, or from what serves today.

    \b
    Example:
      tunerd profiles new mine --model /srv/models/Qwen3.6-27B-Q4_K_M-mtp.gguf
      tunerd profiles new mine --from-unit llama-server.service
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.profiles import new_profile
    from tunerd.cli.remote import demand_root

    demand_root(mode, "profiles new", "a profile chooses programs and files that a service reads")
    context = build_context(mode=mode)
    result = new_profile(context, name, model=model, from_unit=from_unit, force=force)
    finish(result, render_new, as_json=as_json)


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (row["name"], ", ".join(row["layers"]), row["description"] or "")
        for row in payload["profiles"]
    ]
    yield from columns(rows, ("profile", "from", "for"))


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{payload['profile']}: {', '.join(payload['layers'])}"
    rows = []
    for row in payload["values"]:
        if row["key"].partition(".")[0] in {"published", "sweep", "description"}:
            continue
        replaced = "; ".join(f"was {r['value']} from {r['origin']}" for r in row["replaced"])
        rows.append((f"  {row['key']}", str(row["value"]), row["origin"], replaced))
    yield from columns(rows, ("  key", "value", "set by", ""))
    if payload["engine_tables"]:
        yield f"  other values on: {', '.join(payload['engine_tables'])}"
    if payload["pins"]:
        yield f"  pinned: {', '.join(payload['pins'])}"


def render_check(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["problems"]:
        found = "no problems but what is warned about" if payload["warnings"] else "no problems"
        yield f"{payload['checked']}: {found}"


def render_new(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"wrote {payload['path']}"
