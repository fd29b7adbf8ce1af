"""`tunerd engines` and `tunerd engines keep`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.complete import names_of
from tunerd.cli.output import columns, finish, json_option, progress_sink


@click.group(name="engines", invoke_without_command=True, short_help="Each engine.")
@click.option("--prove", is_flag=True, help="Try on a tiny model what each build really does.")
@json_option
@click.pass_context
def command(ctx: click.Context, prove: bool, as_json: bool) -> None:
    """Each engine: path, version, dialect, what it can do, what was proved, what it lacks.

    \b
    Example:
      tunerd engines --prove
      tunerd engines keep mainline-0.7.0
    """  # noqa: D301
    if ctx.invoked_subcommand is not None:
        return
    from tunerd.actions.context import build_context
    from tunerd.actions.engines import engines
    from tunerd.cli.remote import by_daemon, from_daemon

    if prove:
        found = by_daemon(ctx.obj, "engines/prove", {}, as_json=as_json)
    else:
        found = from_daemon(ctx.obj, "engines", as_json=as_json)
    if found is not None:
        finish(found, render, as_json=as_json)
        return
    context = build_context(mode=ctx.obj, progress=progress_sink(as_json=as_json))
    finish(engines(context, prove=prove), render, as_json=as_json)


@command.command(name="keep", short_help="Keep a copy of an engine.")
@click.argument("engine", shell_complete=names_of("engines"))
@json_option
@click.pass_context
def keep_command(ctx: click.Context, engine: str, as_json: bool) -> None:
    """Copy a program and its libraries, so that an upgrade in place leaves a way back.

    The copy is an engine of its own; name it in `engine.prefer` or with --set.

    \b
    Example:
      tunerd engines keep mainline-0.7.0
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.keep import keep
    from tunerd.cli.remote import demand_root

    demand_root(ctx.obj, "engines keep", "it copies programs to where services start them from")
    context = build_context(mode=ctx.obj, progress=progress_sink(as_json=as_json))
    finish(keep(context, engine), render_kept, as_json=as_json)


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["engines"]:
        yield "no engine was found"
    for engine in payload["engines"]:
        yield f"{engine['name']}"
        yield from columns(list(_rows(engine)))
        yield ""


def _rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "  path", f"{engine['path']} ({engine['found_by']})"
    if engine["problem"]:
        yield "  not usable", engine["problem"]
        return
    capabilities = engine["capabilities"]
    yield "  version", engine["version"] or "unknown"
    yield "  dialect", f"{engine['dialect']} (family {engine['family']})"
    types = [word for word in capabilities["spec_types"] if word != "none"]
    yield "  speculation", ", ".join(types) or "none"
    n_max, p_min = capabilities["default_n_max"], capabilities["default_p_min"]
    yield (
        "  defaults",
        f"n-max {_shown(n_max)}, p-min {_shown(p_min)}, port {_shown(capabilities['default_port'])}",
    )
    yield "  per request", f"n-max and p-min: {engine['per_request_speculation']}"
    fit = {"none": "none", "on-off": "--fit on|off", "switch": "--fit"}[capabilities["fit"]]
    default = {True: "on", False: "off", None: "unknown"}[capabilities["fit_default_on"]]
    yield "  fit", f"{fit}, by default {default}"
    yield "  load mode", "--load-mode" if capabilities["load_mode"] else "--mlock, --no-mmap"
    yield "  KV types", " ".join(capabilities["kv_types"]) or "unknown"
    yield "  identity", f"{engine['identity'][:16]} ({len(engine['components'])} files)"
    for proof in engine["proofs"]:
        yield f"  {proof['feature']}", f"{proof['effect']}: {proof['detail']}"
    if not engine["proofs"]:
        yield "  proofs", "none yet"
    yield "  lacks", ", ".join(engine["lacks"]) or "nothing that profiles use"


def render_kept(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    what = "kept" if payload["new"] else "was kept already"
    yield f"{payload['engine']} {what}: {payload['files']} files, {payload['mib']} MiB"
    yield f"  {payload['program']}"


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)
