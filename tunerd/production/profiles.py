"""`tunerd detect` and `profiles`: what is here, which profiles fit it, and new ones from a model, a unit, or Ollama's store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine.builds import engine_json, engine_of, find_engines, found_in_unit
from tunerd.engine.capabilities import Capabilities, Engine
from tunerd.engine.choice import locate, named_by_files
from tunerd.engine.importer import Imported, import_command_line, unlisted_flags
from tunerd.engine.serving import as_it_runs, hides_words, read_live_unit, work_dir_of
from tunerd.errors import ConfigError, EngineError, ModelFileError, TunerdError, UsageError
from tunerd.machine.facts import Gpu, Host
from tunerd.machine.files import at_home, is_gone
from tunerd.machine.host import read_host
from tunerd.machine.process import account, may_read
from tunerd.model.files import ModelFiles, cached_siblings, hub_cache, ollama_layers
from tunerd.operations import ONLY_ROOT
from tunerd.production.checks import check_machine, lost_lines, masked
from tunerd.profile.files import config_error, load_profile, load_sources, read_profile, to_toml
from tunerd.profile.layers import Layer, Resolved, chain_of, layers_of, resolve
from tunerd.profile.schema import check_file
from tunerd.result import ActionResult, Message, error, note, warning
from tunerd.units.live import LiveUnit
from tunerd.units.text import parse_unit
from tunerd.words import Family, Mode, Problem, check_name, is_profile_file, nearest_name

_MINE = "mine"  # the name that is proposed for what somebody serves by hand


def detect(ctx: Context) -> ActionResult:
    """`tunerd detect`."""
    host = read_host(ctx.gpu)
    units = list(_serving_units(ctx))  # first: where no manager answers, that is waited for once
    engines = find_engines(ctx)
    fitting = fitting_profiles(ctx, host)
    payload = {
        **asdict(host),
        "gpus": None if host.gpus is None else [_gpu_json(gpu) for gpu in host.gpus],
        "mode": str(ctx.mode),
        "lingers": ctx.lingers,
        "engines": [engine_json(engine) for engine in engines],
        "units": units,
        "profiles": [asdict(one) for one in fitting],
        "next": _as_typed(ctx, _next_step(ctx, engines, units, fitting)),
    }
    return ActionResult("detect", payload, tuple(_detect_messages(ctx, host, engines)))


@dataclass(frozen=True, slots=True)
class Fitting:
    """A profile for this machine with its model, or why the model cannot be served yet and what to do."""

    name: str
    description: str | None
    model: str | None
    problem: str | None = None
    hint: str | None = None


def fitting_profiles(ctx: Context, host: Host | None = None) -> tuple[Fitting, ...]:
    """Profiles that are meant for this machine, those whose model is here first.

    Left out are shipped ones that are made of another shipped one (baselines, other drafts), and what
    cannot be read, of which `tunerd profiles list` and `check` tell.
    """
    host = replace(host or read_host(ctx.gpu), awaits_reboot=None)  # which passes
    sources = load_sources(ctx)
    found: list[Fitting] = []
    for name in sources.names:
        shipped, own = sources.of(name, Layer.SHIPPED), sources.of(name, Layer.SITE)
        if not own and any("extends" in file.data for file in shipped):
            continue
        try:
            resolved = load_profile(ctx, name, options={}, sources=sources)
        except TunerdError:
            continue
        if any(check_machine(resolved, host, ())):
            continue
        wanted, described = resolved.profile.model, resolved.profile.description
        try:
            path = locate(ctx, wanted.path or wanted.hf_file, resolved, wanted.hf_repo)
            found.append(Fitting(name, described, str(path)))
        except TunerdError as error:
            found.append(Fitting(name, described, None, error.message, error.hint))
    return tuple(sorted(found, key=lambda one: (one.model is None, one.name)))


def _as_typed(ctx: Context, step: str) -> str:
    """A command as whoever asks may type it."""
    is_left_to_root = any(step.startswith(f"tunerd {one}") for one in ONLY_ROOT)
    return f"sudo {step}" if ctx.is_unattended and is_left_to_root else step


def _next_step(
    ctx: Context,
    engines: tuple[Engine, ...],
    units: list[Mapping[str, Any]],
    fitting: tuple[Fitting, ...],
) -> str:
    """The one command that leads on from here."""
    names = [unit["unit"] for unit in units]
    adoptable = [unit["unit"] for unit in units if not (unit["router"] or unit["container"])]
    ours = [unit["unit"] for unit in units if unit["written_by_tunerd"]]
    if ours and ctx.unit not in names:  # somebody renamed it
        return f"tunerd settings set service.unit {ours[0]}"
    if ours:
        return "tunerd status"
    by_hand = ctx.unit if ctx.unit in adoptable else next(iter(adoptable), None)
    if by_hand is not None and (ctx.paths.site_profiles / f"{_MINE}.toml").exists():
        return f"tunerd plan {_MINE}"
    if by_hand is not None:
        return f"tunerd profiles new {_MINE} --from-unit {by_hand}"
    if not any(engine.capabilities is not None for engine in engines):
        return "tunerd engines"
    if fitting and fitting[0].model is not None:
        return f"tunerd plan {fitting[0].name}"
    if fitting and not ctx.settings.models.dirs:  # in none a file that is fetched would be found
        return "tunerd settings set models.dirs FOLDER"
    if fitting and fitting[0].hint is not None:
        return fitting[0].hint.partition(";")[0]
    return f"tunerd profiles new {_MINE} --model FILE.gguf"


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    """A GPU as scripts read it."""
    data = asdict(gpu)
    data["unattributed_mib"] = gpu.unattributed_mib
    for process, source in zip(data["processes"] or (), gpu.processes or (), strict=True):
        process["is_display_server"] = source.is_display_server
    return data


def _serving_units(ctx: Context) -> Iterator[Mapping[str, Any]]:
    """Units that run a llama-server, whatever their name."""
    for unit in ctx.services.service_units():
        try:
            live = read_live_unit(ctx, unit)
        except TunerdError:
            continue
        if live.text is None or not (unit == ctx.unit or live.is_known):
            continue
        state = ctx.services.state(unit)
        yield {
            "unit": unit,
            "path": None if live.path is None else str(live.path),
            "active": state.active_state,
            "program": live.program,
            "alias": live.serving.alias,
            "port": live.serving.port,
            "container": live.is_container or live.has_own_root,
            "router": live.argv is not None and not (live.names_a_model or hides_words(live)),
            "written_by_tunerd": live.is_ours,
            "drop_ins": [str(path) for path in live.drop_ins],
        }


def _detect_messages(ctx: Context, host: Host, engines: tuple[Engine, ...]) -> Iterator[Message]:
    if host.gpus is None:
        yield warning("gpu-unknown", f"GPUs could not be read: {host.gpu_problem}")
    if not any(engine.capabilities is not None for engine in engines):
        yield warning("no-engine", "no llama-server was found", "pip install 'tunerd[embedded]', or "
                      "name one in the settings: [engines.NAME] path = ...")  # fmt: skip
    for gpu in host.gpus or ():
        taken = sum(p.used_mib or 0 for p in gpu.processes or () if p.is_display_server)
        if taken:
            yield note("display-server", f"GPU {gpu.index}: a display server holds {taken} MiB of VRAM",
                       "plug the monitor into the processor's own graphics")  # fmt: skip
    yield from ctx.until_logout()


_OF_PROBLEM = ("key", "found", "allowed", "nearest")
_HEADER = "Written by `tunerd profiles new`"


def list_profiles(ctx: Context) -> ActionResult:
    """Every profile by name, with where it comes from and what it is for."""
    sources = load_sources(ctx)
    rows = []
    for name in sources.names:
        files = sources.of(name, Layer.SHIPPED, Layer.SITE, Layer.TUNED)
        own = (file.data for file in files if file.layer is not Layer.TUNED)
        data = {key: value for one in own for key, value in one.items()}
        match = data.get("match")
        rows.append(
            {
                "name": name,
                "layers": [str(file.layer) for file in files],
                "description": data.get("description"),
                "gpu": match.get("gpu") if isinstance(match, Mapping) else None,
            }
        )
    messages = [warning("unreadable-profile", str(one)) for one in sources.unread.values()]
    for name in sources.names:
        try:
            load_profile(ctx, name, options={}, sources=sources)
        except ConfigError as wrong:
            hint = f"`tunerd profiles check {name}` says where"
            messages.append(warning("wrong-profile", f"{name}: {wrong.message}", hint))
    return ActionResult("profiles list", {"profiles": rows}, tuple(messages))


def show_profile(ctx: Context, name: str, *, options: Mapping[str, Any]) -> ActionResult:
    """The resolved values of a profile, each with the layer that set it and what it replaced."""
    sources = load_sources(ctx)
    resolved = load_profile(ctx, name, options=options, sources=sources)
    values = [
        {
            "key": setting.key,
            "value": setting.value,
            "layer": str(setting.origin.layer),
            "origin": str(setting.origin),
            "replaced": [{"value": value, "origin": str(origin)} for origin, value in
                         setting.replaced],
        }
        for setting in sorted(resolved.settings.values(), key=lambda setting: setting.key)
    ]  # fmt: skip
    layers = layers_of(name, sources)
    engines = sorted(
        {
            engine
            for layer in (() if isinstance(layers, Problem) else layers)
            for engine in layer.data.get("engines", {})
        }
    )
    payload = {
        "profile": name,
        "layers": list(resolved.layers),
        "values": values,
        "engine_tables": engines,
        "pins": sorted(resolved.pins),
        "left_to_engine": {k: str(origin) for k, origin in resolved.left_to_engine.items()},
    }
    return ActionResult("profiles show", payload)


def check_profile(ctx: Context, what: str) -> ActionResult:
    """Every problem of a file or of a profile's layers; exit code 1 if there is one."""
    files: list[tuple[str, Mapping[str, Any]]] = []
    if is_profile_file(what):
        data = read_profile(Path(what), ctx.files)
        problems = [data] if isinstance(data, Problem) else list(check_file(what, data))
        files = [] if isinstance(data, Problem) else [(what, data)]
        parent = None if isinstance(data, Problem) else data.get("extends")
        chain = chain_of(parent, load_sources(ctx)) if isinstance(parent, str) else None
        if isinstance(chain, Problem):
            is_own = chain.key == "name"
            problems.append(replace(chain, source=what, key="extends") if is_own else chain)
    else:
        sources = load_sources(ctx)
        layers = layers_of(what, sources)
        if isinstance(layers, Problem):
            unread = (problem for (_, name), problem in sources.unread.items() if name == what)
            problems = [*unread] or [layers]
        else:
            found = resolve(what, layers)
            problems = [] if isinstance(found, Resolved) else list(found)
            files = [(layer.source, layer.data) for layer in layers]
    warnings = named_by_files(ctx, files)
    payload = {
        "checked": what,
        "problems": [
            {"file": one.source, **{name: getattr(one, name) for name in _OF_PROBLEM}}
            for one in problems
        ],
        "warnings": [message.text for message in warnings],
    }
    messages = (*(error("profile-problem", str(problem)) for problem in problems), *warnings)
    return ActionResult("profiles check", payload, messages, 1 if problems else 0)


def new_profile(
    ctx: Context,
    name: str,
    *,
    model: str | None = None,
    from_unit: str | None = None,
    from_ollama: str | None = None,
    force: bool = False,
) -> ActionResult:
    """Write a site profile from the detected hardware and a model file, from a unit, or from Ollama's store.

    Raises:
        UsageError: the name is none, not one source was given, or the profile exists.
        ConfigError: the unit cannot be read as one command.
        ModelFileError: the model cannot be read.
        HostError: the file cannot be written.
    """
    check_name(name, of="a profile")
    if sum(one is not None for one in (model, from_unit, from_ollama)) != 1:
        raise UsageError("give one of --model FILE, --from-unit UNIT or --from-ollama MODEL")
    path = ctx.paths.site_profiles / f"{name}.toml"
    if path.exists() and not force:
        raise UsageError(f"profile already exists: `{path}`", hint="--force overwrites it")
    unplaced: list[dict[str, Any]] = []
    if from_unit is not None:
        data, messages, unplaced = _from_unit(ctx, from_unit)
    elif from_ollama is not None:
        data, messages = _from_ollama(ctx, from_ollama)
    else:
        data, messages = _from_model(ctx, at_home(model or ""))
    problems = check_file(str(path), data)
    if problems:
        raise config_error(name, problems)
    if from_unit is None:
        told, hint = (
            "a careful start; its plan shows what it costs in memory",
            f"`tunerd plan {name}`, then `tunerd apply {name}`",
        )
        messages = (note("new-profile", told, hint), *messages)
    head = _HEADER if from_unit is None else f"{_HEADER} from unit {from_unit}"
    text = to_toml(data, [head])
    ctx.files.make_folder(path.parent)
    ctx.files.write(path, text.encode())
    payload = {"profile": name, "path": str(path), "text": text, "unplaced": unplaced}
    return ActionResult("profiles new", payload, messages)


def _from_model(ctx: Context, model: Path) -> tuple[dict[str, Any], tuple[Message, ...]]:
    facts = ModelFiles(ctx.paths.cache_dir, ctx.files).read_facts(model)
    host = read_host(ctx.gpu)
    card = max(host.gpus or (), key=lambda gpu: gpu.total_mib or 0, default=None)
    machine = "a machine without a GPU" if card is None else card.name
    data: dict[str, Any] = {
        "description": f"{facts.name or model.stem} on {machine}",
        "match": _match(card),
        "model": {"path": str(model.resolve())},
        "serving": {
            "alias": (facts.name or model.stem).replace(" ", "-")[:100],
            "ctx_size": min(facts.context_length or 8192, 32768),
        },
        "speculation": {"type": "mtp", "n_max": 2, "p_min": 0.75}
        if facts.has_mtp
        else {"type": "off"},
    }
    if card is not None:
        data["serving"] |= {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
        data["memory"] = {"fit_mib": 1536 if facts.has_mtp else 1024}
    else:
        data["serving"]["threads"] = "physical"
    if facts.has_mtp:
        return data, ()
    return data, (note("no-mtp-block", "the model has no MTP block, so speculation is off"),)


# Parameters of an Ollama model that a server has too.
_PARAMETERS = {
    "num_ctx": "ctx_size", "num_predict": "n_predict", "temperature": "temp", "top_k": "top_k",
    "top_p": "top_p", "min_p": "min_p", "repeat_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty", "seed": "seed",
}  # fmt: skip


def _from_ollama(ctx: Context, name: str) -> tuple[dict[str, Any], tuple[Message, ...]]:
    """The profile of a model that Ollama fetched: its file stays where it is, its parameters come along."""
    # Not other people's stores: what root deploys is not theirs to choose.
    stores = [
        *(Path(text) for text in (ctx.environment.get("OLLAMA_MODELS"),) if text),
        Path("/usr/share/ollama/.ollama/models"),
        Path("/var/lib/ollama"),
        Path("/var/lib/ollama/models"),
        Path(ctx.environment.get("HOME", "/")) / ".ollama/models",
    ]
    layers = next(filter(None, (ollama_layers(store, name, ctx.files) for store in stores)), {})
    if "model" not in layers:
        raise ModelFileError(
            f"Ollama has no model `{name}`",
            cause=f"searched {', '.join(f'`{store}`' for store in stores)}",
            state="nothing was written",
            hint="`ollama list` has the names; OLLAMA_MODELS names another store",
        )
    data, messages = _from_model(ctx, layers["model"])
    data["serving"]["alias"] = name
    parameters = ctx.files.read_json(layers["params"]) if "params" in layers else {}
    for theirs, ours in _PARAMETERS.items():
        if isinstance(parameters, dict) and theirs in parameters:
            data["serving"][ours] = parameters[theirs]
    if "projector" in layers:
        data["model"]["mmproj"] = str(layers["projector"])
    text = "the file stays in Ollama's store: `ollama rm` would delete it while the server uses it"
    return data, (*messages, note("ollama-store", text))


def _match(card: Gpu | None) -> dict[str, Any]:
    if card is None:
        return {"gpu": "none"}
    match: dict[str, Any] = {"gpu": f"*{card.name.removeprefix('NVIDIA ')}*"}
    if card.total_mib is not None:
        match["vram_min_mib"] = card.total_mib * 19 // 20
    return match


def _from_unit(
    ctx: Context, unit: str
) -> tuple[dict[str, Any], tuple[Message, ...], list[dict[str, Any]]]:
    unit = unit if unit.endswith(".service") else f"{unit}.service"  # as systemctl takes it
    live, engine, capabilities = _adoptable(ctx, unit)
    imported = import_command_line(
        tuple(map(live.source_of, live.arguments)),
        live.environment,
        capabilities,
        work_dir_of(ctx, live),
    )
    if {"path", "hf_repo"}.isdisjoint(imported.data.get("model", ())):
        raise ConfigError(
            f"{unit} names neither a file of its model nor a repository of Hugging Face",
            cause="a profile serves a file that is here, and tunerd fetches none",
            state="nothing was written",
            hint="name the file that it has fetched in the unit (`-m FILE`), or `tunerd profiles new NAME --model FILE`",
        )
    data: dict[str, Any] = {
        "description": f"what {unit} served when this was written",
        "engine": {"prefer": [live.program]},
        **imported.data,
    }
    messages = [
        warning("unplaced", f"not carried over: {' '.join(u.words)}: {u.reason}")
        for u in imported.unplaced
    ]
    messages += [
        note("overridden", f"{name} is set in the environment, but the command line wins")
        for name in imported.overridden
    ]
    messages += _take_siblings(ctx, live, capabilities, data)
    if live.script is not None:
        messages += _not_its_own(ctx, live, data)
        text = f"read from the running server, which `{live.script}` started; anything else that it does is not carried over"
        messages.append(warning("script", text, "compare the profile with it before you apply"))
    if unit != ctx.unit:
        messages.append(
            note(
                "other-unit",
                f"tunerd deploys to {ctx.unit}, and leaves {unit} as it is",
                f"`tunerd settings set service.unit {unit}` makes tunerd deploy to that one",
            )
        )
    if imported.added:
        messages.append(note("added", f"new on the command line: {', '.join(imported.added)}"))
    elif not imported.unplaced:
        messages.append(note("same", "the profile renders to the same flags as the unit has now"))
    messages += _lost(ctx, engine, live, imported)
    messages += _not_read(live)
    unplaced = [{"words": list(u.words), "reason": u.reason} for u in imported.unplaced]
    return data, tuple(messages), unplaced


def _adoptable(ctx: Context, unit: str) -> tuple[LiveUnit, Engine, Capabilities]:
    """What a unit starts, and its build; whose words a profile could say.

    Raises:
        UsageError, ConfigError, EngineError: there is no such unit, or it is none of these.
    """
    live = read_live_unit(ctx, unit)
    if live.text is None:
        nearest = nearest_name(unit, ctx.services.service_units())
        meant = f"did you mean `{nearest}`? " if nearest else ""
        others = {Mode.SYSTEM: "; `tunerd --user detect`, as a user, those of their own",
                  Mode.USER: "; `sudo tunerd detect` those of the machine"}  # fmt: skip
        raise UsageError(
            f"there is no unit `{unit}`",
            state="nothing was written",
            hint=f"{meant}`tunerd detect` lists those that serve{others.get(ctx.mode, '')}",
        )
    live = as_it_runs(ctx, live) or live
    if live.argv is None or live.program is None:
        raise ConfigError(f"{unit} cannot be read as one command: {live.problem}")
    of_here = "`tunerd profiles new NAME --model FILE` makes a profile for a model of this machine"
    if live.has_own_root or live.is_container:
        other = ", and `tunerd emit quadlet NAME` or `compose` writes it for a container"
        raise ConfigError(
            f"{unit} names files by their paths inside its {', '.join(live.mounts) or live.program}",
            state="nothing was written",
            hint=f"{of_here}{other if live.is_container else ''}",
        )
    itself = f"make its ExecStart= run the server itself, with the flags that `{ctx.systemctl} status {unit}` shows"
    if not live.names_a_model and hides_words(live):
        raise ConfigError(
            f"{unit} does not say what it serves: the script that it starts does, `{live.program}`",
            state="nothing was written",
            hint=f"start it, so that its server can be looked at if that runs as the same account, or {itself}",
        )
    engine = engine_of(ctx, found_in_unit(live, Path(live.program)))
    if engine.capabilities is None:
        hint = f"if `{live.program}` only starts a server: {itself}"
        if live.is_known and not hides_words(live):
            hint = ""  # the cause has all there is to say
        elif Path(live.program).name == "llama-swap":
            hint = f"{of_here}, and `tunerd emit llama-swap NAME` writes it for that"
        if is_gone(engine.program):
            hint = "put it back, or make its ExecStart= run one that is here: `tunerd engines` lists them"
        raise EngineError(
            f"the program of {unit} cannot be probed",
            cause=engine.problem,
            state="nothing was written",
            hint=hint or None,
        )
    if not live.names_a_model:
        if foreign := unlisted_flags(live.arguments, engine.capabilities):
            raise ConfigError(
                f"{unit} names no model, and its build does not accept {', '.join(foreign)}",
                state="nothing was written",
                hint=of_here,
            )
        raise ConfigError(
            f"{unit} is a router: it starts a server for each model that it is asked for",
            state="nothing was written",
            hint="a profile describes one server; `tunerd profiles new NAME --model FILE` makes one for a model",
        )
    return live, engine, engine.capabilities


def _not_its_own(ctx: Context, live: LiveUnit, data: dict[str, Any]) -> Iterator[Message]:
    """Take the key file out that a process names and its account may not read: the new unit would have root read it."""
    path = data["serving"].get("api_key_file")
    who = account(live.user or "root") if ctx.mode is Mode.SYSTEM else None
    if (
        path is None
        or path in live.credentials.values()
        or who is None
        or may_read(who, Path(path))
    ):
        return
    del data["serving"]["api_key_file"]
    yield warning("unplaced", f"not carried over: the key file `{path}`, which the server's account may not read",
                  "set serving.api_key_file if you know it")  # fmt: skip


# With these a server that is told a repository takes no projector along from there.
_NO_PROJECTOR = {"--no-mmproj", "--no-mmproj-auto", "--mmproj-url", "-mmu"}


def _take_siblings(
    ctx: Context, live: LiveUnit, capabilities: Capabilities, data: dict[str, Any]
) -> Iterator[Message]:
    """Put the files into `data` that `-hf` takes along: by its path the model alone is served."""
    repo, wanted = data["model"].get("hf_repo"), []
    asked = capabilities.flags.intersection(_NO_PROJECTOR)
    if asked and not asked.intersection(data.get("extra_args", ())):
        wanted.append(("model", "mmproj", "mmproj", "projector"))
    # Source: builds of May and August 2026.
    if "mtp" in data["speculation"]["type"] and capabilities.family is Family.MAINLINE:
        wanted.append(("speculation", "draft_model", "mtp-", "MTP block"))
    own = account(live.user) if live.user is not None and ctx.mode is Mode.SYSTEM else None
    home = own.home if own is not None else ctx.environment.get("HOME")
    hub = hub_cache({"HOME": home or "/", **live.environment})
    if hub is None or repo is None:
        return
    for section, key, word, what in wanted:
        found = () if key in data[section] else cached_siblings(hub, repo, word)
        if len(found) == 1:
            data[section][key] = str(found[0])
            yield note("sibling", f"the {what} of `{repo}` is served too: `{found[0]}`")
        elif found:
            names = ", ".join(f"`{path}`" for path in found)
            yield warning("unplaced", f"not carried over: the {what} of `{repo}`, since there are several: {names}",
                          f"set {section}.{key} to one of them")  # fmt: skip


def _not_read(live: LiveUnit) -> Iterator[Message]:
    """Lines of the unit that systemd takes no notice of, though somebody wrote them."""
    ignored = parse_unit(live.text or "").problems
    if ignored:
        text = f"systemd ignores these lines of {live.unit}: {'; '.join(map(masked, ignored))}"
        hint = "a line that continues needs a `\\` at its end; they had no effect, and the profile leaves them out"
        yield warning("ignored-lines", text, hint)


def _lost(ctx: Context, engine: Engine, live: LiveUnit, imported: Imported) -> list[Message]:
    """What of the unit a unit of the new profile would not hold."""
    from tunerd.production.plan import unit_spec, unit_text_of  # takes long to import

    command = replace(imported.command, program=str(engine.program), subcommand=engine.subcommand)
    try:
        spec = unit_spec(ctx, imported.resolved, engine, command, live)
        planned = unit_text_of(ctx, spec)
    except ConfigError:  # which `plan` says with its reason; then all lines are shown
        planned = ""
    lost = lost_lines(live, planned, command.argv)
    if not lost:
        return []
    text = f"lines of the unit that a profile cannot hold: {'; '.join(lost)}"
    return [warning("foreign-directives", text, "put what you want to keep into a drop-in")]
