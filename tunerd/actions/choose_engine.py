"""Chooses the first engine in a profile's order of preference that can serve it on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.find_engines import candidates, engine_of, find_engines, prober
from tunerd.actions.find_model import find_weights, locate
from tunerd.actions.profile_layers import load_profile
from tunerd.core.cmdline import CommandLine, render
from tunerd.core.cmdline_parts import RenderContext
from tunerd.core.cmdline_speculation import KINDS_WITH_DRAFT_FILE
from tunerd.core.engine import Engine, Family, OffloadDevice
from tunerd.core.engine_names import ALWAYS
from tunerd.core.host import Host
from tunerd.core.model import ModelFacts
from tunerd.core.nearest import nearest_name
from tunerd.core.resolve import Resolved
from tunerd.core.unit import CREDENTIAL_PATH
from tunerd.errors import EngineError
from tunerd.system.engine_programs import Found
from tunerd.system.model_files import ModelFiles

# What a profile without a preference takes; the embedded engine knows no GPU, so it comes last.
_ANY = (*Family, "embedded")


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine that can serve the profile, what it would be started with, and who was passed over.

    `devices` is what it can offload to now; empty where it uses no GPU or cannot list them.
    """

    engine: Engine
    resolved: Resolved
    command: CommandLine
    model_path: Path
    facts: ModelFacts
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


def choose(ctx: Context, request: PlanRequest, host: Host) -> Choice:
    """The first engine in the profile's order of preference that can serve it.

    Raises:
        ConfigError: the profile is wrong, or names no model.
        ModelFileError: the model file is missing, damaged, or not unique.
        EngineError: none can; what stands against each is in the cause.
    """
    engines = find_engines(ctx)
    general = _load(ctx, request, ())
    find_weights(ctx, general)  # a missing model is the same on every engine: say so first
    passed_over: list[tuple[str, str]] = []
    for word in general.profile.engine.prefer or _ANY:
        found = candidates(engines, word) or _named_by_path(ctx, word)
        if not found and word != Family.UNKNOWN:
            passed_over.append((word, _why_not_here(ctx, engines, word)))
        for engine in found:
            choice = _try(ctx, request, host, engine)
            if isinstance(choice, Choice):
                return replace(choice, passed_over=tuple(passed_over))
            passed_over.append((engine.name, choice))
    raise EngineError(
        f"no engine here can serve profile `{request.profile}`",
        cause="\n".join(f"{name}: {why}" for name, why in passed_over),
        state="nothing was touched",
        hint="`tunerd engines` lists what is here; engine.prefer and [engines.NAME] choose",
    )


def _named_by_path(ctx: Context, word: str) -> tuple[Engine, ...]:
    """An engine that nobody but the profile names; who may write it is asked as of any other."""
    path = Path(word).expanduser()
    if "/" not in word or not path.is_file():
        return ()
    return (engine_of(ctx, Found(path, "engine.prefer")),)


def _why_not_here(ctx: Context, engines: Sequence[Engine], word: str) -> str:
    """Why a word of `engine.prefer` means nothing here: a family may be missing, a name misspelt."""
    if "/" in word:
        return "there is no such program"
    known = (*ALWAYS, *ctx.settings.engines, *(engine.name for engine in engines))
    if word in known:
        return "not installed here"
    nearest = nearest_name(word, known)
    return f"no such engine (did you mean `{nearest}`?)" if nearest else "no such engine here"


def _load(ctx: Context, request: PlanRequest, engine_names: Sequence[str]) -> Resolved:
    return load_profile(
        ctx,
        request.profile,
        options=request.options,
        engine_names=engine_names,
        with_tuned=request.with_tuned,
        tuned=request.tuned,
    )


def _try(ctx: Context, request: PlanRequest, host: Host, engine: Engine) -> Choice | str:
    """The profile on one engine, or why that engine cannot serve it."""
    if engine.capabilities is None:
        return engine.problem or "cannot be probed"
    names = tuple(dict.fromkeys((str(engine.capabilities.family), engine.name)))
    resolved = _load(ctx, request, names)
    model_path, facts = find_weights(ctx, resolved)
    devices, has_gpu = _devices(ctx, engine, resolved, host)
    context = _render_context(ctx, engine, resolved, host, model_path, has_gpu=has_gpu)
    command = render(resolved, engine.capabilities, context)
    if not isinstance(command, CommandLine):
        return "; ".join(str(refusal) for refusal in command)
    return Choice(engine, resolved, command, model_path, facts, devices, has_gpu, ())


def found_of(engine: Engine) -> Found:
    """An engine as the prober knows it."""
    return Found(engine.program, engine.found_by, engine.name, tuple(engine.environment.items()))


def _devices(
    ctx: Context, engine: Engine, resolved: Resolved, host: Host
) -> tuple[tuple[OffloadDevice, ...], bool]:
    """What this build can offload to on this machine now, and whether it can offload at all."""
    capabilities = engine.capabilities
    if resolved.profile.match.gpu == "none" or capabilities is None:
        return (), False
    if "--list-devices" in capabilities.flags:
        environment = {**engine.environment, **resolved.profile.environment}
        devices = prober(ctx).devices(found_of(engine), environment) or ()
        return devices, bool(devices)
    return (), capabilities.lists_gpu_flags and bool(host.gpus)


def _render_context(
    ctx: Context,
    engine: Engine,
    resolved: Resolved,
    host: Host,
    model_path: Path,
    *,
    has_gpu: bool,
) -> RenderContext:
    paths: dict[str, str] = {}
    models = ModelFiles(ctx.paths.cache_dir, ctx.files)
    speculation = resolved.profile.speculation
    if speculation.draft_model is not None and speculation.type in KINDS_WITH_DRAFT_FILE:
        draft = locate(ctx, models, speculation.draft_model, resolved)
        paths["speculation.draft_model"] = str(draft)
    for key, value in (
        ("model.mmproj", resolved.profile.model.mmproj),
        ("model.chat_template_file", resolved.profile.model.chat_template_file),
    ):
        if value is not None:
            paths[key] = str(Path(value).expanduser())
    if resolved.profile.serving.api_key_file is not None:
        paths["serving.api_key_file"] = CREDENTIAL_PATH
    return RenderContext(
        program=str(engine.program),
        model_path=str(model_path),
        has_gpu=has_gpu,
        physical_cores=host.cpu.physical_cores,
        paths=paths,
    )


def draft_facts(ctx: Context, resolved: Resolved, command: CommandLine) -> ModelFacts | None:
    """What the header of the drafter says, where the command line names a file of its own for it."""
    path = next((a.value for a in command.arguments if a.key == "speculation.draft_model"), None)
    if path is None or resolved.profile.speculation.type not in KINDS_WITH_DRAFT_FILE:
        return None
    return ModelFiles(ctx.paths.cache_dir, ctx.files).read_facts(Path(path))
