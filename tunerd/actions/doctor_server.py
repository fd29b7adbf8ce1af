"""What `doctor` wants to know of the unit that serves: settings, build, model, process, log, port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.dry_run import refusal
from tunerd.actions.find_engines import engine_of, find_programs, prober
from tunerd.actions.live import address_now, read_live_unit
from tunerd.actions.own_requests import own_requests
from tunerd.actions.plan_memory import settings_of
from tunerd.core.defaults import DEFAULT_HOST, DEFAULT_PORT
from tunerd.core.doctor.facts import Locking, PortFacts, ServerFacts
from tunerd.core.doctor.server_log import read_server_log
from tunerd.core.engine import Capabilities, Engine, OffloadDevice
from tunerd.core.help_text import HelpText, parse_help
from tunerd.core.host import Host
from tunerd.core.importer import import_command_line
from tunerd.core.importer_flags import unlisted_flags
from tunerd.core.live import LiveUnit
from tunerd.core.memory import estimate
from tunerd.core.model import ModelFacts
from tunerd.core.resolve import Layer, LayerFile, Resolved, resolve
from tunerd.core.sample import Timings
from tunerd.core.service import UnitState
from tunerd.errors import EngineError, ModelFileError, TunerdError
from tunerd.system.engine_programs import Found
from tunerd.system.host import memlock_limit_of, memory_of, process_facts
from tunerd.system.model_files import ModelFiles
from tunerd.system.ports import free_port
from tunerd.system.proc import process_name
from tunerd.system.sockets import listening_pid, other_listeners

# Enough to reach back to the load on most days; a build that logs each token does not.
_LOG_LINES = 20_000
_HTTP_S = 1.0
_SHELLS = frozenset({"sh", "bash", "dash", "env"})


@dataclass(frozen=True, slots=True)
class ServerReading:
    """The facts of the unit, with what was read on the way and other readers need."""

    facts: ServerFacts
    live: LiveUnit
    resolved: Resolved | None


def read_server(ctx: Context, host: Host) -> ServerReading | None:
    """The unit that serves or would; None where there is none.

    Raises:
        ServiceError: the service manager does not answer.
        HostError: a file of the unit cannot be read.
    """
    live = read_live_unit(ctx)
    if live.text is None:
        return None
    state = ctx.services.state(ctx.unit)
    pid = state.main_pid if state.is_active else None
    memory = memory_of(pid) if pid is not None else None
    was_edited = _was_edited(live, pid)
    facts = ServerFacts(
        unit=ctx.unit,
        is_active=state.is_active,
        pid=pid,
        was_edited=was_edited,
        argv=live.argv or (),
        environment=live.environment,
        n_slots=None if was_edited else _slots(ctx, live, state),
        locking=None if was_edited else _locking(pid),
        swapped_mib=memory.swapped_mib if memory is not None else None,
        log=None if was_edited else read_server_log(_log(ctx, state), _own(ctx)),
        settings_problem=live.problem,
    )
    if live.argv is None or live.program is None:
        return ServerReading(facts, live, None)
    return _with_build(ctx, host, facts, live, live.argv)


def _own(ctx: Context) -> tuple[Timings, ...]:
    """tunerd's own requests; none where the store cannot be read, which its own reader tells of."""
    try:
        return own_requests(ctx).timings
    except TunerdError:
        return ()


def _with_build(
    ctx: Context, host: Host, facts: ServerFacts, live: LiveUnit, argv: Sequence[str]
) -> ServerReading:
    """The same with what only the build's help can say: what its command line means."""
    program = Path(live.program or "")
    known = (found for found in find_programs(ctx) if found.program == program)
    found = next(known, Found(program, f"unit {live.unit}"))
    engine = engine_of(ctx, found)
    facts = replace(facts, engine=engine)
    if engine.capabilities is None:
        return ServerReading(replace(facts, settings_problem=engine.problem), live, None)
    help_text = parse_help(prober(ctx).probe(found).help_text)
    facts = replace(
        facts,
        foreign_flags=_foreign(ctx, found, argv, help_text, engine.capabilities),
        devices=_devices(ctx, found, engine.capabilities, live),
    )
    imported = import_command_line(argv[1:], live.environment, help_text, engine.capabilities)
    resolved = resolve(live.unit, (LayerFile(Layer.SITE, live.unit, imported.data),))
    if not isinstance(resolved, Resolved):
        return ServerReading(replace(facts, settings_problem=str(resolved[0])), live, None)
    facts = replace(facts, settings=resolved.profile)
    return ServerReading(_with_model(ctx, host, facts, engine, resolved), live, resolved)


def _with_model(
    ctx: Context, host: Host, facts: ServerFacts, engine: Engine, resolved: Resolved
) -> ServerFacts:
    """The same with the header of the model and an estimate of its memory."""
    files = ModelFiles(ctx.paths.cache_dir, ctx.files)
    model, problem = _header(files, resolved.profile.model.path)
    if model is None:
        return replace(facts, model_problem=problem)
    draft, _ = _header(files, resolved.profile.speculation.draft_model)
    lists_gpus = engine.capabilities is not None and engine.capabilities.lists_gpu_flags
    has_gpu = bool(facts.devices) if facts.devices is not None else lists_gpus and bool(host.gpus)
    settings = settings_of(resolved, engine, draft, host, has_gpu=has_gpu)
    return replace(facts, model=model, estimate=estimate(model, settings))


def _header(files: ModelFiles, path: str | None) -> tuple[ModelFacts | None, str]:
    """What a model file says of itself, or why nothing."""
    if path is None:
        return None, "the command line names no file"
    if not Path(path).is_absolute():
        return None, f"`{path}` is relative to the unit's folder"
    try:
        return files.read_facts(Path(path)), ""
    except ModelFileError as error:
        return None, error.message


def _foreign(
    ctx: Context,
    found: Found,
    argv: Sequence[str],
    help_text: HelpText,
    capabilities: Capabilities,
) -> tuple[str, ...]:
    """Flags that the build neither lists nor takes: a dry run has the last word."""
    unlisted = unlisted_flags(argv[1:], help_text, capabilities)
    if not unlisted:
        return ()
    try:
        refused = refusal(ctx, found, _without_effect(argv[1:]))
    except EngineError:
        return ()
    return unlisted if refused is not None else ()


def _without_effect(arguments: Sequence[str]) -> list[str]:
    """Arguments for a dry run: a model that is not there, and a port of its own."""
    words = list(arguments)
    for index, word in enumerate(words[:-1]):
        if word in {"-m", "--model"}:
            words[index + 1] = f"/nonexistent/{Path(words[index + 1]).name}"
        elif word == "--port":
            words[index + 1] = str(free_port())
    return words


def _devices(
    ctx: Context, found: Found, capabilities: Capabilities, live: LiveUnit
) -> tuple[OffloadDevice, ...] | None:
    """What the build can offload to, under the unit's environment; None where it does not say."""
    if "--list-devices" not in capabilities.flags:
        return None
    try:
        return prober(ctx).devices(found, {**dict(found.environment), **live.environment})
    except EngineError:
        return None


def _was_edited(live: LiveUnit, pid: int | None) -> bool:
    """Whether the process that runs has other arguments than the unit's text gives now.

    Only where that can be told: a shell in between, or a process that may not be looked into, cannot.
    """
    process = process_facts(pid) if pid is not None else None
    if process is None or process.cmdline is None or live.argv is None or live.program is None:
        return False
    if Path(live.program).name in _SHELLS:
        return False
    arguments = live.argv[1:]
    return process.cmdline[max(0, len(process.cmdline) - len(arguments)) :] != arguments


def _slots(ctx: Context, live: LiveUnit, state: UnitState) -> int | None:
    address = address_now(ctx, live, state)
    if address is None or not state.is_active:
        return None
    slots = ctx.connect(address).slots(timeout_s=_HTTP_S)
    return slots.total if slots is not None else None


def _locking(pid: int | None) -> Locking | None:
    limit = memlock_limit_of(pid) if pid is not None else None
    if pid is None or limit is None:
        return None
    memory = memory_of(pid)
    return Locking(limit.is_unlimited, limit.mib, memory.locked_mib if memory is not None else None)


def _log(ctx: Context, state: UnitState) -> tuple[str, ...]:
    """What the unit wrote in its present life, or in the one that ended last."""
    if state.invocation_id is None:
        return ()
    return ctx.services.log(ctx.unit, invocation_id=state.invocation_id, max_lines=_LOG_LINES)


def read_port(reading: ServerReading | None) -> PortFacts | None:
    """Who else listens where the server does or would; without a unit, at tunerd's own default."""
    if reading is None:
        return PortFacts(DEFAULT_PORT, _names(_listener(DEFAULT_PORT, DEFAULT_HOST)))
    facts, serving = reading.facts, reading.live.serving
    capabilities = facts.capabilities
    port = serving.port or (capabilities.default_port if capabilities is not None else None)
    if port is None:
        return None
    host = (serving.host or DEFAULT_HOST).split(",")[0].strip()
    if facts.pid is None:
        return PortFacts(port, _names(_listener(port, host)))
    return PortFacts(port, _names(other_listeners(port, host, facts.pid)))


def _listener(port: int, host: str) -> tuple[int, ...]:
    pid = listening_pid(port, host)
    return () if pid is None else (pid,)


def _names(pids: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{process_name(pid) or 'a process'} (process {pid})" for pid in pids)
