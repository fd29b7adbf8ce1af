"""What a profile comes to here: its model file, and the first build that can serve it with the command line for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine import builds
from tunerd.engine.capabilities import Engine, Found, OffloadDevice
from tunerd.engine.flags import (
    ENGINE_VARIABLES,
    KINDS_WITH_DRAFT_FILE,
    CommandLine,
    RenderContext,
    drafts_with_probability,
    render,
)
from tunerd.engine.serving import environment_with, read_live_unit
from tunerd.errors import (
    ConfigError,
    EngineError,
    HostError,
    ModelFileError,
    ServiceError,
    TunerdError,
)
from tunerd.machine.facts import Host
from tunerd.machine.files import at_home, is_gone
from tunerd.machine.process import SERVICE_ACCOUNT, account
from tunerd.model.facts import ModelFacts
from tunerd.model.files import FoundModel, ModelFiles, cached_models, find_models, hub_cache
from tunerd.profile.files import load_profile, load_sources, workload_files
from tunerd.profile.layers import Resolved, layers_of, set_layer
from tunerd.profile.schema import flatten
from tunerd.result import Message, warning
from tunerd.units.generations import Generation
from tunerd.units.text import CREDENTIAL_PATH
from tunerd.words import Family, Mode, Problem, nearest_name

_ALWAYS = (*(str(family) for family in Family), "embedded")
"""Names that a profile may use whether or not such an engine is here, and takes without a preference.

The embedded engine knows no GPU, so it comes last.
"""


def _engine_words(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a profile file names engines otherwise than by path, and how; it need not be checked before."""
    engines, pins = data.get("engines", {}), data.get("pin", {})
    for name in engines if isinstance(engines, Mapping) else ():
        yield f"engines.{name}", name
    pinned = flatten(pins) if isinstance(pins, Mapping) else {}
    for prefix, keys in (("", flatten(data)), ("pin.", pinned)):
        wanted = keys.get("engine.prefer")
        for word in wanted if isinstance(wanted, list | tuple) else ():
            if isinstance(word, str) and "/" not in word:
                yield f"{prefix}engine.prefer", word


_HINT = "the table or name has no effect; `tunerd engines` lists what is here"


def named_by_plan(ctx: Context, request: PlanRequest) -> list[Message]:
    """Warnings about the layers of a profile and about what was given with `--set`."""
    layers = layers_of(request.profile, load_sources(ctx), with_tuned=request.with_tuned)
    files = () if isinstance(layers, Problem) else (*layers, set_layer(request.options))
    return named_by_files(ctx, ((file.source, file.data) for file in files))


def named_by_files(ctx: Context, files: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Message]:
    """Warnings about names in files that are no engine's and no workload's, each file with where it stands."""
    files = tuple(files)
    named = [(source, key, word) for source, data in files for key, word in _engine_words(data)]
    known = (*_ALWAYS, *ctx.settings.engines)
    if any(word not in known for _, _, word in named):
        known = (*known, *(engine.name for engine in builds.find_engines(ctx)))
    found = (
        Problem(source, key, f"`{word}`, which is not an engine here", ", ".join(dict.fromkeys(known)),
                nearest_name(word, known))
        for source, key, word in named
        if word not in known
    )  # fmt: skip
    messages = [warning("unknown-engine", str(problem), _HINT) for problem in found]
    workloads = tuple(workload_files(ctx))
    for source, data in files:
        name = data.get("workload")
        if isinstance(name, str) and name not in workloads:
            problem = Problem(source, "workload", f"`{name}`, which is not a workload here",
                              ", ".join(workloads), nearest_name(name, workloads))  # fmt: skip
            hint = "measuring with this profile would be refused; `tunerd workload list` lists what is here"
            messages.append(warning("unknown-workload", str(problem), hint))
    return messages


def find_weights(ctx: Context, resolved: Resolved) -> Path:
    """The model file of a profile.

    Raises:
        ConfigError: the profile names no file.
        ModelFileError: it is missing, or not unique.
    """
    model = resolved.profile.model
    wanted = model.path or model.hf_file
    if wanted is None and model.name is None and model.hf_repo is None:
        raise ConfigError(
            f"profile `{resolved.name}` names no model",
            hint="--set model.path=FILE",
            state="nothing was touched",
        )
    return locate(ctx, wanted, resolved, model.hf_repo)


def locate(ctx: Context, wanted: str | None, resolved: Resolved, repo: str | None = None) -> Path:
    """A file named by a profile: an absolute path, or a name or glob below `models.dirs`.

    Where no file there has that name, the one that was fetched from its repository is taken, else the one
    whose metadata fits `model.name`, if there is exactly one.
    """
    if wanted is not None and wanted.startswith(("/", "~")):
        path = at_home(wanted)
        if is_gone(path):
            raise ModelFileError(
                f"model file is missing: `{path}`",
                state="nothing was touched",
                hint=_fetch_hint(ctx, resolved, wanted),
            )
        return path
    folders, name = ctx.settings.models.dirs, resolved.profile.model.name
    find = partial(find_models, folders, ModelFiles(ctx.paths.cache_dir, ctx.files))
    speculation = resolved.profile.speculation
    needs_mtp = "mtp" in speculation.kinds and speculation.draft_model is None
    named = None if name is None else partial(find, model_name=name, needs_mtp=needs_mtp)
    drafting = " with an MTP block" if needs_mtp else ""
    if wanted is not None:
        found, what = find(file_name=wanted), f"the file `{wanted}`"
    elif named is not None:
        found, what = named(), f"a model file named `{name}`{drafting}"
    else:
        found, what = FoundModel((), ()), f"the file of `{repo}`"
    if len(found.paths) == 1:
        return found.paths[0]
    fetched = _fetched(ctx, resolved, repo, wanted) if repo is not None else None
    if fetched is not None:
        return fetched
    is_model = wanted in {resolved.profile.model.path, resolved.profile.model.hf_file}
    fitting = named().paths if named is not None and wanted is not None and is_model else ()
    if len(fitting) == 1:
        return fitting[0]
    cause = found.why_not_one(folders)
    if fitting:
        several = ", ".join(f"`{path}`" for path in fitting)
        cause = f"the metadata of more than one fits: {several}"
    said = f"found {len(found.paths)} matches for" if found.paths else "cannot find"
    hint = _fetch_hint(ctx, resolved, wanted)
    raise ModelFileError(f"{said} {what}", cause=cause, state="nothing was touched", hint=hint)


def _fetched(ctx: Context, resolved: Resolved, repo: str, wanted: str | None) -> Path | None:
    """The file of a repository in the first cache that has it: the server's own, its account's, ours.

    Other people's caches are not looked into: what root deploys is not theirs to choose.
    """
    environments = (
        resolved.profile.environment,
        *({"HOME": home} for home in _server_homes(ctx)),
        ctx.environment,
    )
    for hub in dict.fromkeys(map(hub_cache, environments)):
        cached = cached_models(hub, repo, wanted) if hub is not None else ()
        if len(cached) > 1:
            names = ", ".join(f"`{path.name}`" for path in cached)
            raise ModelFileError(
                f"`{repo}` may mean any of {len(cached)} files",
                cause=f"{names} in `{hub}`",
                state="nothing was touched",
                hint="choose one with --set model.hf_file=FILE",
            )
        if cached:
            return cached[0]
    return None


def _server_homes(ctx: Context) -> Iterator[str]:
    """The homes of accounts that the unit runs as, or would; where it is our own, nobody else's."""
    if ctx.mode is not Mode.SYSTEM:
        return
    user = None
    with contextlib.suppress(TunerdError):
        user = read_live_unit(ctx).user
    for name in (user, ctx.settings.service.user, SERVICE_ACCOUNT):
        found = account(name) if name is not None else None
        if found is not None and found.home is not None:
            yield found.home


def found_by_metadata(resolved: Resolved, path: Path) -> list[Message]:
    """A warning where another file than the one that the profile names is served."""
    model = resolved.profile.model
    wanted = model.path or model.hf_file
    if wanted is None or fnmatch(path.name.lower(), Path(wanted).name.lower()):
        return []
    return [
        warning(
            "model-by-name",
            f"no file is called `{wanted}`; `{path}` is used instead, because its metadata names "
            f"`{model.name}`; it may be another quantisation",
            hint="choose a file with --set model.path=FILE",
        )
    ]


def _fetch_hint(ctx: Context, resolved: Resolved, wanted: str | None) -> str:
    model, speculation = resolved.profile.model, resolved.profile.speculation
    if wanted is not None and wanted == speculation.draft_model:
        repo = f" from {speculation.draft_hf_repo}" if speculation.draft_hf_repo else ""
        return f"download it{repo}; or name another with --set speculation.draft_model=FILE"
    folders = ctx.settings.models.dirs
    folder = folders[0] if folders else "FOLDER"
    if model.hf_repo is not None:
        repo, _, quant = model.hf_repo.partition(":")
        any_of_it = f'--include "*{quant}*"' if quant else ""
        what = model.hf_file or Path(model.path or "").name or any_of_it
        fetch = f"hf download {repo} {what} --local-dir {folder}".replace("  ", " ")
    elif model.source is not None:
        fetch = f"get it: {model.source}"
    elif resolved.profile.match.gpu == "none" and model.path is not None:
        fetch = f"tunerd model new {Path(folder) / model.path}"
    else:
        fetch = "download the file"
    gone = ", ".join(f"`{one}`" for one in folders if is_gone(one))
    names = f"; `models.dirs` in `{ctx.paths.settings_file}` names"
    where = f"{names} {gone}, which does not exist" if gone else ""
    if not folders:
        where = f"{names} the folders to search"
    return f"{fetch}; or give a path with --set model.path=FILE{where}"


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine that can serve the profile, what it would be started with, and who was passed over.

    `devices` is what it can offload to now; empty where it uses no GPU or cannot list them.
    """

    engine: Engine
    resolved: Resolved
    command: CommandLine
    model_path: Path
    devices: tuple[OffloadDevice, ...]
    has_gpu: bool
    passed_over: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for: a profile, `--set` options, and whether the tuned layer counts.

    `tuned` takes the place of the tuned layer on disk, as a parsed file: what a promotion would write.
    """

    profile: str
    options: Mapping[str, Any]
    with_tuned: bool = True
    tuned: Mapping[str, Any] | None = None


def request_again(generation: Generation) -> PlanRequest:
    """What was asked for when this was deployed from a profile."""
    return PlanRequest(
        generation.profile or "", dict(generation.pins), with_tuned=generation.with_tuned
    )


def choose(ctx: Context, request: PlanRequest, host: Host, *, has_weights: bool = True) -> Choice:
    """The first engine in the profile's order of preference that can serve it.

    Without the model file it is as if that stood in the first folder of `models.dirs`, by the name that the
    profile has for it.

    Raises:
        ConfigError: the profile is wrong, or names no model.
        ModelFileError: the model file is missing, damaged, or not unique.
        EngineError: none can; what stands against each is in the cause.
    """
    engines = builds.find_engines(ctx)
    load: Callable[..., Resolved] = partial(
        load_profile,
        ctx,
        request.profile,
        options=request.options,
        with_tuned=request.with_tuned,
        tuned=request.tuned,
        sources=load_sources(ctx),
    )
    general, laid_over = load(), _laid_over(ctx)
    if has_weights:  # a missing model is the same on every engine: say so first
        builds.read_facts(ctx, find_weights(ctx, general))
    passed_over: list[tuple[str, str]] = []
    for word in general.profile.engine.prefer or _ALWAYS:
        found = builds.engines_meant(engines, word) or _named_by_path(ctx, word)
        if not found and word != Family.UNKNOWN:
            passed_over.append((word, _why_not_here(ctx, engines, word)))
        for engine in found:
            choice = _try(ctx, load, host, engine, laid_over, has_weights=has_weights)
            if isinstance(choice, Choice):
                return replace(choice, passed_over=tuple(passed_over))
            passed_over.append((engine.name, choice))
    raise EngineError(
        f"no engine here can serve profile `{request.profile}`",
        cause="\n".join(f"{name}: {why}" for name, why in passed_over),
        state="nothing was touched",
        hint="`tunerd engines` lists what is here; engine.prefer and [engines.NAME] choose one; docs/engines.md "
        "says where to get builds",
    )


def _named_by_path(ctx: Context, word: str) -> tuple[Engine, ...]:
    """An engine that nobody but the profile names; who may write it is asked as of any other."""
    path, is_program = at_home(word), False
    with contextlib.suppress(OSError):  # of a folder that may not be entered
        is_program = "/" in word and path.is_file()
    return (builds.engine_of(ctx, Found(path, "engine.prefer")),) if is_program else ()


def _why_not_here(ctx: Context, engines: Sequence[Engine], word: str) -> str:
    """Why a word of `engine.prefer` means nothing here: a family may be missing, a name misspelt."""
    if "/" in word:
        return "there is no such program"
    known = (*_ALWAYS, *ctx.settings.engines, *(engine.name for engine in engines))
    if word in known:
        return "not installed here"
    nearest = nearest_name(word, known)
    return f"no such engine (did you mean `{nearest}`?)" if nearest else "no such engine here"


def _try(
    ctx: Context,
    load: Callable[..., Resolved],
    host: Host,
    engine: Engine,
    laid_over: Mapping[str, str],
    *,
    has_weights: bool,
) -> Choice | str:
    """The profile on one engine, or why that engine cannot serve it."""
    if engine.capabilities is None:
        return engine.problem or "cannot be probed"
    names = dict.fromkeys((str(engine.capabilities.family), engine.name))
    resolved = load(engine_names=tuple(names))
    model = resolved.profile.model
    if has_weights:
        model_path = find_weights(ctx, resolved)
    else:
        folder = next(iter(ctx.settings.models.dirs), Path("FOLDER"))
        model_path = folder / (model.path or model.hf_file or f"{model.name or 'MODEL'}.gguf")
    variables = {**engine.environment, **resolved.profile.environment, **laid_over}
    is_wanted = resolved.profile.match.gpu != "none"
    devices, has_gpu = devices_of(ctx, engine, host, variables) if is_wanted else (None, False)
    unseen = None if has_gpu or host.awaits_reboot else next(iter(host.gpus or ()), None)
    if unseen is not None and resolved.profile.match.gpu not in {None, "none"}:
        return f"it sees no device to offload to, but {unseen.name} is here (`tunerd doctor` may say why)"
    paths = dict(_paths(ctx, resolved))
    context = RenderContext(
        program=str(engine.program),
        model_path=str(model_path),
        has_gpu=has_gpu,
        keeps_off_gpu=not is_wanted and host.gpus != (),
        physical_cores=host.cpu.physical_cores,
        paths=paths,
        drafts_alone=has_weights and _drafts_alone(ctx, resolved, model_path, paths),
        subcommand=engine.subcommand,
    )
    command = render(resolved, engine.capabilities, context)
    if not isinstance(command, CommandLine):
        return "; ".join(str(refusal) for refusal in command)
    return Choice(engine, resolved, command, model_path, devices or (), has_gpu, ())


def _paths(ctx: Context, resolved: Resolved) -> Iterator[tuple[str, str]]:
    """The files that keys name, as the server will find them."""
    model, speculation = resolved.profile.model, resolved.profile.speculation
    named = {"model.mmproj": model.mmproj, "model.chat_template_file": model.chat_template_file}
    yield from ((key, str(at_home(path))) for key, path in named.items() if path is not None)
    draft, repo = speculation.draft_model, speculation.draft_hf_repo
    if draft is not None and drafts_with_probability(speculation.kinds):
        yield "speculation.draft_model", str(locate(ctx, draft, resolved, repo))
    if resolved.profile.serving.api_key_file is not None and ctx.mode is not Mode.LOCAL:
        yield "serving.api_key_file", CREDENTIAL_PATH


def _drafts_alone(ctx: Context, resolved: Resolved, model: Path, paths: Mapping[str, str]) -> bool:
    """Whether MTP drafts with the model's own block, and the draft model that is named is for another kind.

    A promotion of MTP over a draft model leaves its file named, and so does a profile that names one to be tried.
    """
    kinds, draft = resolved.profile.speculation.kinds, paths.get("speculation.draft_model")
    if draft is None or "mtp" not in kinds or kinds & KINDS_WITH_DRAFT_FILE:
        return False
    facts = builds.read_facts(ctx, model)
    return facts.has_mtp and not builds.read_facts(ctx, Path(draft)).drafts_by_mtp(facts)


def _laid_over(ctx: Context) -> dict[str, str]:
    """The variables of engines and drivers that drop-ins of the unit set: they hold for whatever it will serve."""
    with contextlib.suppress(HostError, ServiceError):
        found = environment_with(ctx, "")
        return {name: one for name, one in found.items() if name.startswith(ENGINE_VARIABLES)}
    return {}


def devices_of(
    ctx: Context, engine: Engine, host: Host, variables: Mapping[str, str]
) -> tuple[tuple[OffloadDevice, ...] | None, bool]:
    """What this build, with these variables, can offload to on this machine now, and whether it can at all.

    The first is None where it does not say.

    Raises:
        EngineError: it could not be run.
    """
    capabilities = engine.capabilities
    if capabilities is None:
        return None, False
    if "--list-devices" in capabilities.flags:
        devices = builds.prober(ctx).devices(engine, variables)
        if devices is not None:
            return devices, bool(devices)
    return (
        None,
        capabilities.lists_gpu_flags and host.gpus != (),
    )  # None: a card that cannot be read


def draft_facts(ctx: Context, command: CommandLine) -> ModelFacts | None:
    """What the header of the drafter says, where the command line names a file of its own for it."""
    path = command.value_of("speculation.draft_model")
    return None if path is None else builds.read_facts(ctx, Path(path))
