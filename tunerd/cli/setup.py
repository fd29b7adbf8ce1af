"""Commands that show what is here: detect, engines, profiles, doctor, settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from tunerd.cli.deploy import set_option, yes_option
from tunerd.cli.output import as_written, changed, columns, line, names_of, or_unknown
from tunerd.errors import UsageError
from tunerd.operations import PROFILE, SEED, Call, operation
from tunerd.result import ActionResult
from tunerd.words import format_mib, need_mib


@click.command(name="detect")
@operation("render_detect")
def detect_command(call: Call) -> ActionResult:
    """Show what this machine has: GPUs, processor, memory, limits, service manager, engines, units.

    What cannot be found out prints as `unknown`.

    \b
    Example:
      tunerd detect
      tunerd detect --json | jq '.gpus[0].free_mib'
    """  # noqa: D301
    from tunerd.production.profiles import detect

    return detect(call.context(tells=True))


@click.command(name="overview", hidden=True)
@operation("render_overview")
def overview_command(call: Call) -> ActionResult:
    """What is here in a few lines, and the one command that comes next."""
    from tunerd.production.profiles import detect

    return detect(call.context(tells=True))


def render_overview(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    engines = [
        f"{one['name']} (not usable)" if one["problem"] else one["name"]
        for one in payload["engines"]
    ]
    units = [f"{unit['unit']}: {unit['active']}" for unit in payload["units"]]
    cards = [f"{gpu['name']}, {format_mib(gpu['total_mib'])}" for gpu in payload["gpus"] or ()]
    profiles = [
        f"{one['name']}: {'its model is here' if one['model'] else one['problem']}"
        for one in payload["profiles"]
    ]
    rows = [
        ("card", ", ".join(cards) or "none" if payload["gpus"] is not None else "unknown"),
        ("engines", ", ".join(engines) or "none"),
        ("units", ", ".join(units) or "none"),
        *(("profile" if not at else "", text) for at, text in enumerate(profiles)),
        ("next", payload["next"]),
        ("more", "tunerd detect, tunerd --help"),
    ]
    yield from columns(rows)


def profiles_for_here(typed: Any, command: str) -> tuple[str, str | None]:
    """Which profiles are meant for this machine, in words, and how one of them is asked for.

    Args:
        typed: The terminal of the command line.
        command: What lacks a profile.
    """
    from tunerd.app import build_context
    from tunerd.production.profiles import fitting_profiles

    found = fitting_profiles(build_context(mode=typed.mode))
    if not found:
        return "none is meant for this machine", "`tunerd profiles new mine --model FILE.gguf`"
    told = [f"`{one.name}` ({'its model is here' if one.model else one.problem})" for one in found]
    ready = next((one for one in found if one.model is not None), None)
    text = f"for this machine there {'is' if len(told) == 1 else 'are'} {', '.join(told)}"
    return text, f"`{command} {ready.name}`" if ready is not None else found[0].hint


def render_detect(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    cpu, memory = payload["cpu"], payload["memory"]
    physical, logical = _shown(cpu["physical_cores"]), _shown(cpu["logical_cores"])
    locked = "unlimited" if memory["memlock_unlimited"] else format_mib(memory["memlock_mib"])
    lingers = {True: ", lingering on", False: ", lingering off", None: ""}[payload["lingers"]]
    yield from columns([
        *_gpus(payload),
        ("processor", f"{_shown(cpu['model'])}, {physical} physical cores, {logical} logical"),
        ("RAM", f"{format_mib(memory['available_mib'])} free of {format_mib(memory['total_mib'])}"),
        ("swap", f"{format_mib(memory['swap_used_mib'])} used of {format_mib(memory['swap_total_mib'])}"),
        ("memory lock limit", locked),
        ("service manager", f"{_MANAGERS[payload['mode']]}{lingers}"),
        ("kernel", payload["kernel"]),
    ])  # fmt: skip
    yield ""
    yield "engines"
    yield from _engines(payload["engines"])
    yield ""
    yield "units that run a llama-server"
    units = [
        (f"  {unit['unit']}", unit["active"], unit["alias"], unit["port"],
         next((words for key, words in _KINDS.items() if unit[key]), "by hand"))
        for unit in payload["units"]
    ]  # fmt: skip
    yield from columns(units) if units else ["  none"]
    yield ""
    yield "profiles for this machine"
    profiles = [(f"  {one['name']}", one["model"] or one["problem"]) for one in payload["profiles"]]
    yield from columns(profiles) if profiles else ["  none"]


def _gpus(payload: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    if payload["gpus"] is None:
        yield "GPU", f"unknown: {payload['gpu_problem']}"
        return
    if not payload["gpus"]:
        yield "GPU", "none"
    for gpu in payload["gpus"]:
        used = f"{format_mib(gpu['used_mib'])} used of {format_mib(gpu['total_mib'])}"
        limit = or_unknown(gpu["power_limit_w"], "W")
        default = or_unknown(gpu["power_default_w"], "W")
        yield f"GPU {gpu['index']}", gpu["name"]
        yield "  VRAM", f"{format_mib(gpu['free_mib'])} free, {used}"
        yield "  power limit", f"{limit} (default {default})"
        yield (
            "  PCIe link",
            (
                f"generation {_shown(gpu['pcie_generation'])} of {_shown(gpu['pcie_generation_max'])}, "
                f"width {_shown(gpu['pcie_width'])} of {_shown(gpu['pcie_width_max'])}"
            ),
        )
        yield from (("  used by", text) for text in _users(gpu))
    yield "driver", payload["driver_version"]


def _users(gpu: Mapping[str, Any]) -> Iterator[str | None]:
    if gpu["processes"] is None:
        yield None
    for process in gpu["processes"] or ():
        what = " (display server)" if process["is_display_server"] else ""
        unit = f", unit {process['unit']}" if process["unit"] else ""
        name = _shown(process["name"])
        yield f"{name}{what}, pid {process['pid']}{unit}: {format_mib(process['used_mib'])}"
    if gpu["unattributed_mib"]:
        yield f"no visible process: {format_mib(gpu['unattributed_mib'])}"


def _engines(engines: list[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        (f"  {e['name']}", e["dialect"] or "-", e["version"] or "-", e["path"],
         f"not usable: {e['problem'].partition(';')[0]}" if e["problem"] else e["found_by"])
        for e in engines
    ]  # fmt: skip
    yield from columns(rows) if rows else ["  none"]


_KINDS = {"container": "a container", "router": "a router", "written_by_tunerd": "by tunerd"}
_MANAGERS = {"system": "systemd (system)", "user": "systemd (user)", "local": "none (tunerd's own)"}


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)


@click.group(name="engines", invoke_without_command=True)
@click.option("--prove", is_flag=True, help="Test on a tiny model what each build really does.")
@operation("render_engines")
def engines_command(call: Call, prove: bool) -> ActionResult:
    """List each engine: path, version, dialect, what it can do, what was proved, what it lacks.

    \b
    Example:
      tunerd engines --prove
      tunerd engines keep mainline-0.7.0
    """  # noqa: D301
    from tunerd.engine.prove import engines

    return engines(call.context(tells=True), prove=prove)


@engines_command.command(name="keep", short_help="Keep a copy of an engine.")
@click.argument("engine", shell_complete=names_of("engines"))
@operation("render_kept")
def keep_command(call: Call, engine: str) -> ActionResult:
    """Copy an engine's program and libraries, so that you can go back after an upgrade in place.

    The copy is an engine of its own; `engine.prefer` and `tunerd compare` take its name.

    \b
    Example:
      tunerd engines keep mainline-0.7.0
    """  # noqa: D301
    from tunerd.engine.builds import keep

    return keep(call.context(tells=True), engine)


def render_engines(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["engines"]:
        yield "no engine was found"
    for engine in payload["engines"]:
        yield f"{engine['name']}"
        yield from columns(_rows(engine))
        yield ""


def _rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "  path", f"{engine['path']} ({engine['found_by']})"
    if engine["problem"]:
        yield "  not usable", engine["problem"]
        return
    capabilities = engine["capabilities"]
    yield "  version", engine["version"] or None
    yield "  dialect", f"{engine['dialect']} (family {engine['family']})"
    types = [word for word in capabilities["spec_types"] if word != "none"]
    yield "  speculation", ", ".join(types) or "none"
    names = ("n_max", "p_min", "port")
    n_max, p_min, port = (_shown(capabilities[f"default_{one}"]) for one in names)
    yield "  defaults", f"n-max {n_max}, p-min {p_min}, port {port}"
    fit = {"none": "none", "on-off": "--fit on|off", "switch": "--fit"}[capabilities["fit"]]
    default = {True: "on", False: "off", None: "unknown"}[capabilities["fit_default_on"]]
    yield "  fit", f"{fit}, by default {default}"
    yield "  load mode", "--load-mode" if capabilities["load_mode"] else "--mlock, --no-mmap"
    yield "  identity", f"{engine['identity'][:16]} ({len(engine['components'])} files)"
    for proof in engine["proofs"]:
        yield f"  {proof['feature']}", f"{proof['effect']}: {proof['detail']}"
    if not engine["proofs"]:
        yield "  proofs", "none yet"
    yield "  lacks", ", ".join(engine["lacks"]) or "nothing that profiles use"


def render_kept(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    what = "kept" if payload["new"] else "is kept already"
    yield f"{payload['engine']} {what}: {payload['files']} files, {payload['mib']} MiB"
    yield f"  {payload['program']}"
    yield f"it is engine {payload['name']}: tunerd apply PROFILE --set 'engine.prefer=[\"{payload['name']}\"]'"


@click.group(name="profiles")
def profiles_command() -> None:
    """List, show, check and write profiles.

    \b
    Example:
      tunerd profiles list
      tunerd profiles show rtx-3090-ti-24gb
      tunerd profiles new mine --from-unit llama-server.service
      tunerd profiles new mine --from-ollama qwen3:30b
    """  # noqa: D301


@profiles_command.command(name="list", short_help="List every profile.")
@operation("render_list")
def list_command(call: Call) -> ActionResult:
    """List every profile: shipped, and of this site.

    \b
    Example:
      tunerd profiles list
    """  # noqa: D301
    from tunerd.production.profiles import list_profiles

    return list_profiles(call.context())


@profiles_command.command(name="show", short_help="Show resolved values, and who set each.")
@click.argument("profile", type=PROFILE, shell_complete=names_of("profiles"))
@set_option
@operation("render_show")
def show_command(call: Call, profile: str, options: tuple[str, ...]) -> ActionResult:
    """Show the resolved values of a profile, with the layer that set each.

    \b
    Example:
      tunerd profiles show rtx-5060-ti-16gb
    """  # noqa: D301
    from tunerd.production.profiles import show_profile
    from tunerd.profile.files import parse_options

    return show_profile(call.context(), profile, options=parse_options(options))


@profiles_command.command(name="check", short_help="Show every problem of a profile at once.")
@click.argument(
    "profile",
    metavar="PROFILE_OR_FILE",
    type=PROFILE,
    shell_complete=names_of("profiles", or_files=True),
)
@operation("render_check")
def check_command(call: Call, profile: str) -> ActionResult:
    """Show every problem of a profile or file: key, what was found, what is allowed, the nearest name.

    Exit code 1 if there is any.

    \b
    Example:
      tunerd profiles check ./mine.toml
    """  # noqa: D301
    from tunerd.production.profiles import check_profile

    return check_profile(call.context(), profile)


@profiles_command.command(name="new", short_help="Write one for this machine.")
@click.argument("name")
@click.option("--model", metavar="FILE", type=click.Path(), help="GGUF file to serve.")
@click.option("--from-unit", metavar="UNIT", shell_complete=names_of("units"),
              help="Take over what this unit serves today.")  # fmt: skip
@click.option("--from-ollama", metavar="MODEL", help="Serve a model that Ollama has downloaded.")
@click.option("--force", is_flag=True, help="Overwrite a profile of this name.")
@operation(line("wrote {path}"))
def new_profile_command(call: Call, name: str, **options: Any) -> ActionResult:
    """Write a site profile from the hardware and a model file, from what serves today, or from Ollama.

    \b
    Example:
      tunerd profiles new mine --model /srv/models/Qwen3.6-27B-Q4_K_M-mtp.gguf
      tunerd profiles new mine --from-unit llama-server.service
    """  # noqa: D301
    from tunerd.production.profiles import new_profile

    return new_profile(call.context(), name, **options)


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = (
        (row["name"], ", ".join(row["layers"]), row["description"] or "")
        for row in payload["profiles"]
    )
    yield from columns(rows, ("profile", "from", "for"))


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{payload['profile']}: {', '.join(payload['layers'])}"
    rows = []
    for row in payload["values"]:
        if row["key"].partition(".")[0] in {"published", "sweep", "description"}:
            continue
        was = (f"was {as_written(one['value'])} from {one['origin']}" for one in row["replaced"])
        rows.append((f"  {row['key']}", as_written(row["value"]), row["origin"], "; ".join(was)))
    yield from columns(rows, ("  key", "value", "set by", ""))
    if payload["engine_tables"]:
        yield f"  other values on: {', '.join(payload['engine_tables'])}"
    if payload["pins"]:
        yield f"  pinned: {', '.join(payload['pins'])}"


def render_check(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    if not payload["problems"]:
        found = "no problems apart from the warnings" if payload["warnings"] else "no problems"
        yield f"{payload['checked']}: {found}"


@click.command(name="support-bundle")
@click.option("--output", metavar="FILE", type=click.Path(), help="Write it to FILE, after asking.")
@yes_option
@operation(
    "render_bundle",
    preview="render_bundle",
    asks=lambda given: bool(given["output"]),
    needs_settings=False,
)
def support_bundle_command(call: Call, output: str | None) -> ActionResult:
    """Collect versions, hardware, what serves and what is wrong, as one JSON text.

    Names of people and machines, addresses, links and secrets are removed; texts of requests are not in
    it. Read it before you send it: it is shown in full, and written to a file only with --output.

    \b
    Example:
      tunerd support-bundle | less
      tunerd support-bundle --output tunerd-support.json
    """  # noqa: D301
    from tunerd.doctor.doctor import bundle_text, support_bundle
    from tunerd.machine.files import Files, destination

    found = support_bundle(call.context())
    if output is not None:
        path = destination(Path(output))
        call.ask(f"Write this to {output}?", (), found.payload)
        Files().write(path, bundle_text(found.payload).encode(), mode=0o600)
        return replace(found, payload={**found.payload, "path": output})
    return found


def render_bundle(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    from tunerd.doctor.doctor import bundle_text

    if "path" in payload:
        yield f"wrote {payload['path']}"
    else:
        yield from bundle_text(payload).splitlines()


_HEADS = {"error": "errors", "warning": "warnings", "note": "notes"}


@click.command(name="doctor")
@operation("render_doctor", needs_settings=False)
def doctor_command(call: Call) -> ActionResult:
    """Find what may be wrong on this machine, and what to do about it.

    Looks at the machine, the driver, the unit that serves, its build, model and log, and at what was
    measured. Changes nothing, and works without a GPU or a server: a rule that cannot be checked is
    listed with what is missing. `docs/reference/doctor.md` has every rule.

    Exit code 0 if nothing or only notes were found, 6 for warnings, 7 for errors.

    \b
    Example:
      tunerd doctor
      tunerd doctor --json | jq -r '.findings[] | [.severity, .code, .do] | @tsv'
    """  # noqa: D301
    from tunerd.doctor.doctor import examine

    return examine(call.context())


def render_doctor(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people: the worst first."""
    for severity, head in _HEADS.items():
        found = [one for one in payload["findings"] if one["severity"] == severity]
        if found:
            yield f"{head} ({len(found)})"
        for one in found:
            yield from columns([(f"  {one['code']}:", one["seen"])])
            yield from columns((f"    {name}", one[name]) for name in ("why", "do", "source"))
            yield ""
    if not payload["findings"]:
        yield "nothing was found"
    yield from _not_checked(payload["not_checked"])
    yield from columns([("passed:", ", ".join(payload["passed"]) or "none")])


def _not_checked(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rules that could not tell, by what they lack."""
    if not rows:
        return
    by_missing: dict[str, list[str]] = {}
    for row in rows:
        for missing in row["missing"]:
            by_missing.setdefault(missing, []).append(row["code"])
    yield f"not checked ({len(rows)}); what is missing:"
    for missing, codes in by_missing.items():
        yield f"  {missing}:"
        yield from columns([("   ", ", ".join(codes))])
    yield ""


class _Shows(click.Group):
    """A group that shows what there is where nothing else is asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with `show` before options that are its own."""
        is_own = bool(args) and (args[0][:1] != "-" or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_own else ["show", *args])


@click.group(cls=_Shows, name="settings")
def settings_command() -> None:
    """Show every setting, its value and where it comes from; set one, or unset it.

    \b
    Example:
      tunerd settings
      sudo tunerd settings set models.dirs /srv/models
      TUNERD_SERVICE__DRAIN_S=5 tunerd settings
    """  # noqa: D301


@settings_command.command(name="show", short_help="Show every setting, and where it comes from.")
@operation("render_settings")
def show_settings(call: Call) -> ActionResult:
    """Show every setting, its value and where it comes from; `tunerd settings` alone does the same.

    \b
    Example:
      tunerd settings
    """  # noqa: D301
    from tunerd.settings_file import show_settings as show

    return show(call.context())


def _alone(call: click.Context, _parameter: click.Parameter, key: str) -> str:
    """The key, refused where it has its value behind a `=`, as `--set` takes it."""
    name, equals, value = (key or "").partition("=")
    if equals and not call.resilient_parsing:
        raise UsageError(
            f"`{key}` is not the name of a setting", state="nothing was changed",
            hint=f"`tunerd settings set {name} {shlex.quote(value) if value else 'VALUE'}`",
        )  # fmt: skip
    return key


@settings_command.command(
    name="set",
    short_help="Write one into tunerd.toml.",
    context_settings={"ignore_unknown_options": True},  # `-3` is a value, if a wrong one
)
@click.argument("key", shell_complete=names_of("settings"), callback=_alone)
@click.argument("words", metavar="VALUE...", nargs=-1, required=True)
@operation(changed)
def set_settings(call: Call, key: str, words: tuple[str, ...]) -> ActionResult:
    """Write a setting into tunerd.toml. It is checked first; comments and all else in the file are kept.

    \b
    Example:
      sudo tunerd settings set models.dirs /srv/models /srv/more
      sudo tunerd settings set sweep.promote auto
    """  # noqa: D301
    from tunerd.settings_file import set_setting
    from tunerd.sweep.plan import check_setting

    return set_setting(call.context(), key, words, check=check_setting)


@settings_command.command(name="unset", short_help="Remove one from tunerd.toml.")
@click.argument("key", shell_complete=names_of("settings"))
@operation(changed, needs_settings=False)
def unset_settings(call: Call, key: str) -> ActionResult:
    """Remove a setting from tunerd.toml, so that its default applies again.

    \b
    Example:
      sudo tunerd settings unset sweep.promote
    """  # noqa: D301
    from tunerd.settings_file import set_setting

    return set_setting(call.context(), key, (), check=None)


def render_settings(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = (
        (name, as_written(value), row["source"])
        for row in payload["settings"]
        for name, value in _by_key(row["name"], row["value"])
    )
    yield from columns(rows, ("setting", "value", "from"))
    yield ""
    yield from columns(payload["paths"].items())


def _by_key(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A setting by the names that `settings set` takes: of engines each key that was set."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        if inner:
            yield from _by_key(f"{name}.{key}", inner)


@click.group(name="model")
def model_command() -> None:
    """Small designed models, whose answers are known to the token.

    \b
    Example:
      tunerd model new ./designed-tiny.gguf
    """  # noqa: D301


@model_command.command(name="new", short_help="Write one.")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--shape", default="tiny", show_default=True, shell_complete=names_of("shapes"),
              help="tiny, tiny-moe, medium, ...")  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=SEED, help="Each seed gives another text."
)
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
@operation("render_model")
def new_model_command(call: Call, path: Path, shape: str, seed: int, force: bool) -> ActionResult:
    """Write a designed model and, beside it, a file that says what it will answer.

    \b
    Example:
      tunerd model new ./designed-tiny.gguf
      tunerd model new ./medium.gguf --shape medium
    """  # noqa: D301
    from tunerd.tryout.designed import model_new

    return model_new(path, shape=shape, seed=seed, force=force, say=call.context(tells=True).say)


def render_model(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"wrote {payload['path']} ({format_mib(need_mib(payload['bytes']))})"
    yield f"its truth: {payload['truth']}"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Example:
      tunerd completion bash > /etc/bash_completion.d/tunerd
    """  # noqa: D301
    root = ctx.find_root()
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    script = found(root.command, {}, "tunerd", "_TUNERD_COMPLETE").source()
    # No space is put behind `KEY=`, where a value follows; bash alone needs to be told.
    stay = "    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2> /dev/null\n"
    print(script.replace("    return 0\n", f"{stay}    return 0\n"))
