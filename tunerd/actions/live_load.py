"""Keeps what a load of the unit that stands showed of memory, where no plan was made of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.find_engines import engine_of, find_programs, prober
from tunerd.actions.live import read_live_unit
from tunerd.actions.memory_evidence import LOAD_LINES, remember_load
from tunerd.actions.plan_memory import settings_of
from tunerd.core.engine import Engine
from tunerd.core.help_text import parse_help
from tunerd.core.importer import import_command_line
from tunerd.core.live import LiveUnit
from tunerd.core.memory import estimate
from tunerd.core.memory_parts import Device, Estimate
from tunerd.core.memory_report import parse_report
from tunerd.core.model import ModelFacts
from tunerd.core.resolve import Layer, LayerFile, Resolved, resolve
from tunerd.core.result import Message
from tunerd.errors import ModelFileError, TunerdError
from tunerd.system.engine_programs import Found
from tunerd.system.host import read_host
from tunerd.system.model_files import ModelFiles


def remember_live_load(ctx: Context) -> tuple[Message, ...]:
    """Keep what the running server's load took, beside an estimate of its own command line.

    A rollback or recovery is done when this is called, so nothing here raises: what cannot be told is
    not kept. No engine is run for it but to be probed, and those that tunerd deployed were.
    """
    with contextlib.suppress(TunerdError):
        state = ctx.services.state(ctx.unit)
        live = read_live_unit(ctx)
        if not state.is_active or state.invocation_id is None or live.text is None or not live.argv:
            return ()
        lines = ctx.services.log(ctx.unit, invocation_id=state.invocation_id, max_lines=LOAD_LINES)
        buffers = parse_report(lines).buffers
        if not buffers:
            return ()
        uses_gpu = any(one.device is Device.GPU for one in buffers)
        calculated = _estimate(ctx, live, has_gpu=uses_gpu)
        if calculated is not None:
            return remember_load(ctx, live.argv, live.text, calculated, lines)
    return ()


def _estimate(ctx: Context, live: LiveUnit, *, has_gpu: bool) -> Estimate | None:
    """What the command line would take, as a plan of it says; None where it means nothing to us."""
    if live.program is None or live.argv is None:
        return None
    program = Path(live.program)
    known = (found for found in find_programs(ctx) if found.program == program)
    found = next(known, Found(program, f"unit {live.unit}"))
    engine = engine_of(ctx, found)
    resolved = _resolved(ctx, live, found, engine)
    if resolved is None:
        return None
    files = ModelFiles(ctx.paths.cache_dir, ctx.files)
    model = _header(files, resolved.profile.model.path)
    if model is None:
        return None
    draft = _header(files, resolved.profile.speculation.draft_model)
    settings = settings_of(resolved, engine, draft, read_host(ctx.gpu), has_gpu=has_gpu)
    return estimate(model, settings)


def _resolved(ctx: Context, live: LiveUnit, found: Found, engine: Engine) -> Resolved | None:
    if engine.capabilities is None or live.argv is None:
        return None
    help_text = parse_help(prober(ctx).probe(found).help_text)
    imported = import_command_line(live.argv[1:], live.environment, help_text, engine.capabilities)
    resolved = resolve(live.unit, (LayerFile(Layer.SITE, live.unit, imported.data),))
    return resolved if isinstance(resolved, Resolved) else None


def _header(files: ModelFiles, path: str | None) -> ModelFacts | None:
    if path is None or not Path(path).is_absolute():
        return None
    try:
        return files.read_facts(Path(path))
    except ModelFileError:
        return None
