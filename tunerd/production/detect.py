"""What is here: GPUs, processor, memory, limits, service manager, engines, units that serve already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine.builds import engine_json, find_engines, locate
from tunerd.engine.help import Engine
from tunerd.engine.serving import read_live_unit
from tunerd.errors import TunerdError
from tunerd.machine.facts import Gpu, Host
from tunerd.machine.host import read_host
from tunerd.production.checks import check_machine
from tunerd.profile.files import load_profile, load_sources
from tunerd.profile.layers import Layer
from tunerd.result import ActionResult, Message, note, warning
from tunerd.units.systemd import lingers
from tunerd.words import Mode

_ENGINE_WORDS = ("llama-server", "llama_server")


def detect(ctx: Context) -> ActionResult:
    """`tunerd detect`."""
    host = read_host(ctx.gpu)
    engines = find_engines(ctx)
    units = serving_units(ctx)
    fitting = fitting_profiles(ctx, host)
    linger = lingers(ctx.environment) if ctx.mode is Mode.USER else None
    payload = {
        "gpus": None if host.gpus is None else [_gpu_json(gpu) for gpu in host.gpus],
        "gpu_problem": host.gpu_problem,
        "driver_version": host.driver_version,
        "cuda_version": host.cuda_version,
        "cpu": asdict(host.cpu),
        "memory": asdict(host.memory),
        "kernel": host.kernel,
        "hostname": host.hostname,
        "in_container": host.in_container,
        "mode": str(ctx.mode),
        "lingers": linger,
        "engines": [engine_json(engine) for engine in engines],
        "units": units,
        "profiles": [asdict(one) for one in fitting],
        "next": _next_step(engines, units, fitting),
    }
    return ActionResult("detect", payload, tuple(_detect_messages(host, engines, linger)))


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
    host = host or read_host(ctx.gpu)
    sources, _ = load_sources(ctx)
    found: list[Fitting] = []
    for name in sources.names:
        shipped, own = sources.of(name, Layer.SHIPPED), sources.of(name, Layer.SITE)
        if not own and any("extends" in file.data for file in shipped):
            continue
        try:
            resolved = load_profile(ctx, name, options={})
        except TunerdError:
            continue
        if any(check_machine(resolved, host, (), has_gpu=bool(host.gpus))):
            continue
        wanted, described = resolved.profile.model, resolved.profile.description
        try:
            path = locate(ctx, wanted.path or wanted.hf_file, resolved, wanted.hf_repo)
            found.append(Fitting(name, described, str(path)))
        except TunerdError as error:
            found.append(Fitting(name, described, None, error.message, error.hint))
    return tuple(sorted(found, key=lambda one: (one.model is None, one.name)))


def _next_step(
    engines: tuple[Engine, ...], units: list[Mapping[str, Any]], fitting: tuple[Fitting, ...]
) -> str:
    """The one command that leads on from here."""
    if any(unit["written_by_tunerd"] for unit in units):
        return "tunerd status"
    by_hand = next((unit["unit"] for unit in units), None)
    if by_hand is not None:
        return f"tunerd profiles new mine --from-unit {by_hand}"
    if not any(engine.capabilities is not None for engine in engines):
        return "tunerd engines"
    if fitting and fitting[0].model is not None:
        return f"tunerd plan {fitting[0].name}"
    if fitting and fitting[0].hint is not None:
        return fitting[0].hint.partition(";")[0]
    return "tunerd profiles new mine --model FILE.gguf"


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    """A GPU as scripts read it."""
    data = asdict(gpu)
    data["unattributed_mib"] = gpu.unattributed_mib
    for process, source in zip(data["processes"] or (), gpu.processes or (), strict=True):
        process["is_display_server"] = source.is_display_server
    return data


def serving_units(ctx: Context) -> list[Mapping[str, Any]]:
    """Units that run a llama-server, whatever their name."""
    found: list[Mapping[str, Any]] = []
    for unit in ctx.services.service_units():
        try:
            live = read_live_unit(ctx, unit)
        except TunerdError:
            continue
        words = " ".join((live.program or "", *(live.argv or ())[:1]))
        is_llama = Path(live.program or "").name == "llama" and live.has_subcommand
        serves = is_llama or any(word in words for word in _ENGINE_WORDS)
        if unit != ctx.unit and not serves:
            continue
        if live.text is None:
            continue
        state = ctx.services.state(unit)
        found.append(
            {
                "unit": unit,
                "path": None if live.path is None else str(live.path),
                "active": state.active_state,
                "program": live.program,
                "alias": live.serving.alias,
                "port": live.serving.port,
                "router": live.argv is not None and not live.names_a_model,
                "written_by_tunerd": live.is_ours,
                "drop_ins": [str(path) for path in live.drop_ins],
            }
        )
    return found


def _detect_messages(
    host: Host, engines: tuple[Engine, ...], linger: bool | None
) -> Iterator[Message]:
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
    if linger is False:
        yield warning("no-linger", "without lingering your units end when you log out",
                      "loginctl enable-linger")  # fmt: skip
