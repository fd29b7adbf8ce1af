"""What only this machine can say of a plan: the engine's own argument check, the port, the manager."""

from __future__ import annotations

from pathlib import Path

from tunerd.actions.choose_engine import found_of
from tunerd.actions.context import Context
from tunerd.actions.dry_run import dry_arguments, refusal
from tunerd.actions.find_engines import engine_of, find_programs
from tunerd.actions.lease_record import measuring_pids
from tunerd.actions.tuned_layer import read_declined, read_tuned
from tunerd.core.cmdline import CommandLine
from tunerd.core.engine import Engine, Family
from tunerd.core.host import Host
from tunerd.core.live import LiveUnit, Serving
from tunerd.core.model import ModelFacts
from tunerd.core.resolve import Resolved
from tunerd.core.restart_window import LEAST_WINDOW_S
from tunerd.core.result import Message, error, note, warning
from tunerd.core.tuned import TunedRecord, why_stale
from tunerd.errors import EngineError
from tunerd.system.engine_programs import real_path
from tunerd.system.proc import process_name
from tunerd.system.sockets import listening_pid, other_listeners


def check_arguments(
    ctx: Context, engine: Engine, command: CommandLine, model_path: Path
) -> list[Message]:
    """The engine's own opinion of the command line: a dry run whose model file does not exist."""
    arguments = dry_arguments(command.argv[1:], str(model_path))
    try:
        said = refusal(ctx, found_of(engine), arguments)
    except EngineError as problem:
        return [error("argument-check", problem.message, problem.hint)]
    if said is None:
        return []
    return [
        error(
            "argument-refused",
            f"{engine.name} refuses the command line: {said}",
            "`--explain` shows who set each flag",
        )
    ]


def check_port(ctx: Context, after: Serving) -> list[Message]:
    """Whether somebody else listens where the server is to listen."""
    if after.port is None:
        return []
    own = ctx.services.state(ctx.unit).main_pid
    where = after.host or "127.0.0.1"
    listener = listening_pid(after.port, where, likely=own)
    if own is not None and listener == own:
        listener = next(iter(other_listeners(after.port, where, own)), None)
    if listener is None or listener in measuring_pids(ctx):
        return []
    name = process_name(listener) or "a process"
    return [
        error("port-taken", f"{name} (process {listener}) listens on port {after.port} already",
              "end it, or set serving.port")
    ]  # fmt: skip


def check_ended_connections(
    ctx: Context, live: LiveUnit, before: Serving, after: Serving, engine: Engine
) -> list[Message]:
    """Whether the server that runs leaves its port to another family only after a while.

    ik closes streams from its side, so the kernel keeps the port for a minute after the last one
    (TCP_TIMEWAIT_LEN of Linux), and ik's sockets do not share it with those of other families.
    """
    if after.port is None or before.port != after.port or _family(engine) in {None, Family.IK}:
        return []
    if not ctx.services.state(ctx.unit).is_active or _family_of(ctx, live) is not Family.IK:
        return []
    return [
        warning(
            "port-kept",
            f"{ctx.unit} may be without service for a minute longer than it loads: what serves now is "
            f"ik_llama.cpp, after whose streams the kernel keeps port {after.port}, and {engine.name} "
            "cannot have it before",
            f"its start is repeated for {LEAST_WINDOW_S:.0f} s; a minute without requests before, or "
            "another serving.port, spares the wait",
        )
    ]


def _family(engine: Engine) -> Family | None:
    return engine.capabilities.family if engine.capabilities is not None else None


def _family_of(ctx: Context, live: LiveUnit) -> Family | None:
    """Whose code the live unit runs; None where it cannot be probed."""
    if live.program is None:
        return None
    program = real_path(Path(live.program))
    found = next((one for one in find_programs(ctx) if real_path(one.program) == program), None)
    return None if found is None else _family(engine_of(ctx, found))


def check_unit(ctx: Context, text: str) -> list[Message]:
    """What the service manager would complain about if it read this unit."""
    return [
        error("unit-refused", f"the service manager would complain: {line}")
        for line in ctx.services.verify(ctx.unit, text)
    ]


def tuned_layer(
    ctx: Context, resolved: Resolved, engine: Engine, facts: ModelFacts, host: Host
) -> list[Message]:
    """Whether the tuned layer took part, and whether what it rests on is still here."""
    tuned = [s.key for s in resolved.settings.values() if s.origin.layer == "tuned"]
    declined = read_declined(ctx, resolved.name)
    if not tuned and declined is not None:
        return [note("tuned-declined", f"what sweep {declined.sweep} found ({_set_by(declined)}) is left "
                     "out: it was rolled back by hand", f"`tunerd promote {declined.sweep}`")]  # fmt: skip
    if not tuned:
        return []
    found = [note("tuned", f"the tuned layer sets {', '.join(sorted(tuned))}",
                  "`--untuned` leaves it out")]  # fmt: skip
    record = read_tuned(ctx, resolved.name)
    if record is None:
        return found
    identity = engine.identity
    changed = why_stale(
        record,
        engine=engine.name,
        engine_sha256=identity.sha256 if identity is not None else None,
        model_sha256=facts.identity.sha256,
        driver_version=host.driver_version,
        gpu_names=tuple(gpu.name for gpu in host.gpus or ()),
    )
    if changed:
        found.append(
            warning("tuned-stale", f"the tuned layer was found with another {', '.join(changed)}: "
                    "what it sets may no longer be best", "`tunerd sweep run`, or `--untuned`")
        )  # fmt: skip
    return found


def _set_by(record: TunedRecord) -> str:
    return ", ".join(f"{key} = {value}" for key, value in sorted(record.values.items()))
