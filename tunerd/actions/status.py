"""`tunerd status`: what serves now, since when, from which generation, and how well."""

from __future__ import annotations

from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.history import summary_json
from tunerd.actions.lease_record import measuring, read_measurement
from tunerd.actions.live import address_now, read_live_unit
from tunerd.actions.swap_record import read_record
from tunerd.actions.verify import find_drift
from tunerd.core.health import HttpState
from tunerd.core.result import ActionResult, Message, warning
from tunerd.core.service import lacks_manager
from tunerd.system.files import is_locked
from tunerd.system.seams import GpuReading


def status(ctx: Context) -> ActionResult:
    """Reads only, and takes no lock: what it shows may be a moment old."""
    state = ctx.services.state(ctx.unit)
    live = read_live_unit(ctx)
    entry = ctx.generations.serving(ctx.unit)
    mine = (e for e in ctx.generations.entries() if e.generation.unit == ctx.unit)
    last = next(mine, None)
    address = address_now(ctx, live, state)
    http = None
    if state.is_active and address is not None:
        http = ctx.connect(address).health(timeout_s=1.0)
    drifts = find_drift(ctx, entry, deep=False) if entry is not None else []
    record = read_record(ctx)
    under_way = is_locked(ctx.paths.lock)
    measurement = read_measurement(ctx)
    gpus = ctx.gpu.read()
    payload: dict[str, Any] = {
        "unit": ctx.unit,
        "mode": str(ctx.mode),
        "exists": state.exists,
        "active": state.active_state,
        "sub_state": state.sub_state,
        "since_s": state.active_since_s,
        "pid": state.main_pid,
        "restarts": state.n_restarts,
        "enabled": state.is_enabled,
        "health": None if http is None else str(http),
        "healthy": None if http is None else http is HttpState.READY,
        "address": None if address is None else address.url,
        "alias": live.serving.alias,
        "program": live.program,
        "generation": entry.generation.number if entry is not None else None,
        "outcome": str(entry.ending.outcome) if entry is not None else None,
        "profile": entry.generation.profile if entry is not None else None,
        "engine": entry.generation.engine if entry is not None else None,
        "last_swap": summary_json(last) if last is not None else None,
        "change_under_way": under_way,
        "measurement": None if measurement is None else measurement.to_json(),
        "vram": _vram(gpus),
        "gpu_problem": gpus.problem,
        "drift": [{"code": d.code, "text": d.text, "hint": d.hint} for d in drifts],
    }
    messages = _messages(ctx, record is not None, under_way)
    if ctx.lacks_manager:
        messages.append(lacks_manager())
    if measurement is not None:
        messages.append(measuring(ctx, measurement))
    if gpus.problem is not None:
        messages.append(warning("gpu", gpus.problem, "`tunerd doctor`"))
    return ActionResult("status", payload, tuple(messages))


def _vram(reading: GpuReading) -> list[dict[str, Any]] | None:
    if reading.gpus is None:
        return None
    return [
        {
            "index": gpu.index,
            "name": gpu.name,
            "total_mib": gpu.total_mib,
            "used_mib": gpu.used_mib,
            "free_mib": gpu.free_mib,
        }
        for gpu in reading.gpus
    ]


def _messages(ctx: Context, is_interrupted: bool, under_way: bool) -> list[Message]:
    if under_way:
        return [warning("busy", "a change is under way right now")]
    if is_interrupted:
        return [warning("interrupted", "a swap was cut short", "tunerd recover")]
    state = ctx.services.state(ctx.unit)
    if state.has_failed:
        return [warning("failed", f"the unit has failed ({state.result})", "tunerd rollback")]
    return []
