"""`tunerd status` and `history`: what serves, since when, and what served before."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tunerd.app import Context
from tunerd.engine.health import HttpState
from tunerd.engine.server import LlamaServer
from tunerd.engine.serving import address_now, read_live_unit
from tunerd.errors import HostError, UsageError
from tunerd.machine.facts import GpuReading
from tunerd.machine.files import is_locked
from tunerd.production.journal import read_record
from tunerd.production.measurement import measuring, read_measurement
from tunerd.production.verify import find_drift
from tunerd.records import plain
from tunerd.result import ActionResult, Message, warning
from tunerd.units.generations import HistoryEntry
from tunerd.units.manager import lacks_manager
from tunerd.units.text import unified_diff

DEFAULT_LIMIT = 20


def history(ctx: Context, *, limit: int | None = DEFAULT_LIMIT) -> ActionResult:
    """Generations, newest first; `limit` None for all of them."""
    rows: list[dict[str, Any]] = []
    messages = []
    numbers = ctx.generations.numbers()
    for number in numbers:
        if len(rows) == limit:
            break
        try:
            entry = ctx.generations.read(number)
        except HostError:
            text = f"the record of generation {number} cannot be read"
            messages.append(warning("damaged", text, f"`tunerd history show {number}` says why"))
            continue
        if entry is not None:
            rows.append(summary_json(entry))
    return ActionResult("history", {"generations": rows, "total": len(numbers)}, tuple(messages))


def show(ctx: Context, number: int) -> ActionResult:
    """Everything that is kept of one generation.

    Raises:
        UsageError: there is no such generation.
    """
    entry = _entry(ctx, number)
    text = ctx.generations.unit_text(number)
    payload = {
        "generation": asdict(entry.generation),
        "ending": {**asdict(entry.ending), "outcome": str(entry.ending.outcome)},
        "unit": None if text is None else text.decode("utf-8", "replace"),
    }
    return ActionResult("history show", payload)


def diff(ctx: Context, one: int, other: int) -> ActionResult:
    """How the units of two generations differ.

    Raises:
        UsageError: one of them does not exist.
    """
    texts = []
    for number in (one, other):
        _entry(ctx, number)
        content = ctx.generations.unit_text(number)
        texts.append(None if content is None else content.decode("utf-8", "replace"))
    text = unified_diff(texts[0], texts[1], ctx.unit)
    text = text.replace("(live)", f"generation {one}", 1).replace(
        "(planned)", f"generation {other}", 1
    )
    return ActionResult("history diff", {"from": one, "to": other, "diff": text})


def summary_json(entry: HistoryEntry) -> dict[str, Any]:
    """One line of history as scripts read it."""
    generation, ending = entry.generation, entry.ending
    return {
        "number": generation.number,
        "created_s": generation.created_s,
        "reason": generation.reason,
        "profile": generation.profile,
        "engine": generation.engine,
        "outcome": str(ending.outcome),
        "cause": ending.cause,
        "detail": ending.detail,
        "without_service_s": ending.without_service_s,
        "replaced": generation.replaced_backup
        or ("no unit file" if generation.replaced_absent else None),
        "from_generation": generation.from_generation,
    }


def _entry(ctx: Context, number: int) -> HistoryEntry:
    entry = ctx.generations.read(number)
    if entry is None:
        raise UsageError(
            f"there is no generation {number}", hint="`tunerd history` lists what there is"
        )
    return entry


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
        http = LlamaServer(address, ctx.clock).health(timeout_s=1.0)
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
        "measurement": None if measurement is None else plain(measurement),
        "vram": _vram(gpus),
        "gpu_problem": gpus.problem,
        "drift": [{"code": d.code, "text": d.text, "hint": d.hint} for d in drifts],
    }
    messages = _status_messages(ctx, record is not None, under_way)
    if ctx.settings_problem is not None:
        hint = f"correct `{ctx.paths.settings_file}` or the environment"
        messages.append(warning("settings", ctx.settings_problem, hint))
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


def _status_messages(ctx: Context, is_interrupted: bool, under_way: bool) -> list[Message]:
    if under_way:
        return [warning("busy", "a change is under way right now")]
    if is_interrupted:
        return [warning("interrupted", "a swap was cut short", "tunerd recover")]
    state = ctx.services.state(ctx.unit)
    if state.has_failed:
        return [warning("failed", f"the unit has failed ({state.result})", "tunerd rollback")]
    return []
