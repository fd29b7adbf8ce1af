"""What is known of the measurement under way, and of what dead ones left."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

from tunerd.app import Context
from tunerd.engine.health import HttpState
from tunerd.errors import HostError, ServiceError
from tunerd.machine.clock import polls
from tunerd.machine.files import is_locked
from tunerd.production.power import give_back_power
from tunerd.result import Message, Progress, note
from tunerd.units import manager
from tunerd.words import format_duration

_PATIENCE_S = 30.0
_HOLDS = frozenset({"active", "deactivating"})
# A lease that has ended may wait for production's port before it is over.
_ENDING_S = _PATIENCE_S + manager.PORT_LIMIT_S
_POLL_S = 0.1
_COMES_BACK_S = 5.0


def read_measurement(ctx: Context) -> manager.LeaseRecord | None:
    """The measurement that holds production's place now; None if there is none.

    A record alone is no proof: the lease's unit must stand, or wait at its end for production's port.
    """
    record = written_record(ctx)
    if record is None or record.production != ctx.unit:
        return None
    try:
        return record if ctx.services.state(record.unit).active_state in _HOLDS else None
    except ServiceError:
        return None


def wait_for_dead_measurement(ctx: Context) -> None:
    """Wait until what a killed measurement left has ended, and production is on its way back.

    In between production looks stopped, and whoever began then would leave it so. The caller knows
    that the measurement is dead: it holds the lock of measurements, or saw that nobody does.
    """
    record = written_record(ctx)
    if record is None or record.production != ctx.unit or not record.restores:
        return
    gone_s: float | None = None
    for left_s in polls(ctx.clock, _ENDING_S, every_s=_POLL_S):
        if ctx.services.state(ctx.unit).runs:
            return
        if ctx.services.state(record.unit).active_state in manager.UP:
            gone_s = None
        elif gone_s is None:
            gone_s = left_s
        elif gone_s - left_s > _COMES_BACK_S:
            return  # somebody stopped it since
        ctx.report(Progress(f"waiting until {ctx.unit} is back", left_s=left_s))


def write_measurement(ctx: Context, record: manager.LeaseRecord) -> None:
    """Let others know.

    Raises:
        HostError: it cannot be written.
    """
    ctx.files.keep(ctx.paths.measurement, record)


def ended_by(ctx: Context, lease_id: str) -> str | None:
    """Who asked for the end of this lease, where somebody left word."""
    record = written_record(ctx)
    return record.ended_by if record is not None and record.id == lease_id else None


def forget_measurement(ctx: Context, lease_id: str) -> None:
    """Remove the record, if it is of this lease."""
    record = written_record(ctx)
    if record is not None and record.id == lease_id:
        with contextlib.suppress(HostError):
            ctx.files.remove(ctx.paths.measurement)


def end_measurement(ctx: Context, *, by: str) -> str | None:
    """End a measurement that stands in the way of a change, and wait until production answers again.

    Args:
        ctx: Where; the caller holds the lock of changes.
        by: Who wants that, told to whoever measures.

    Returns:
        What to say of it; None if nothing was measured.

    Raises:
        ServiceError: the service manager refused.
    """
    record = read_measurement(ctx)
    if record is None:
        return None
    ctx.say(f"ending the measurement under way ({record.purpose})")
    with contextlib.suppress(HostError):  # it ends without a word, then
        write_measurement(ctx, replace(record, ended_by=by))
    ctx.services.reset_failed(ctx.unit)
    ctx.services.stop(record.unit)
    if record.restores:
        _wait_until_it_listens(ctx)
    return f"the measurement `{record.purpose}` (process {record.pid}) was ended for this"


def _wait_until_it_listens(ctx: Context) -> None:
    """Until production's process is up and on its port: what is swapped next must know that it ran."""
    from tunerd.engine.serving import server_now

    ctx.services.start(ctx.unit)
    for _ in polls(ctx.clock, _PATIENCE_S, every_s=_POLL_S):
        state = ctx.services.state(ctx.unit)
        server = server_now(ctx, state)
        answers = server is not None and server.health(timeout_s=1.0) is not HttpState.REFUSED
        if answers or not state.is_active:
            return


def measuring(ctx: Context, record: manager.LeaseRecord) -> Message:
    """That production is away because something is measured, for people."""
    if not ctx.services.state(record.unit).is_active:
        text = f"`{record.purpose}` has ended"
        if record.restores:
            text += (
                f"; {ctx.unit} starts once its port is free, within {manager.PORT_LIMIT_S:.0f} s"
            )
        return note("measuring", text)
    left_s = record.left_s(ctx.clock.now_s())
    then = f"then {ctx.unit} serves again" if record.restores else f"{ctx.unit} stays stopped"
    return note(
        "measuring",
        f"`{record.purpose}` is under way (process {record.pid}), for at most another "
        f"{format_duration(left_s)}; {then}",
        f"starting {ctx.unit} ends it",
    )


def measuring_pids(ctx: Context) -> set[int]:
    """The processes of candidates that run now."""
    units = [unit for unit in ctx.services.service_units() if manager.is_candidate(unit)]
    pids = [ctx.services.state(unit).main_pid for unit in units]
    return {pid for pid in pids if pid is not None}


def clear_dead_measurements(ctx: Context, *, is_mine: bool = False) -> tuple[str, ...]:
    """Stop and remove what measurements left whose lease is gone.

    Args:
        ctx: Where.
        is_mine: Whether the caller is the one who may measure; others look away while somebody is.

    Returns:
        What was cleared away, units by their names; a lease that waits for production's port was waited for.

    Raises:
        HostError: a file cannot be removed.
        ServiceError: the service manager refused, or a power limit cannot be given back.
    """
    if not is_mine and is_locked(ctx.paths.measure_lock):
        return ()
    dead = [
        unit
        for unit in _left(ctx)
        if not ctx.services.state(manager.lease_unit(manager.lease_of(unit) or "")).is_active
    ]
    for unit in dead:
        ctx.services.stop(unit)
        remove_unit_files(ctx, unit)
    if dead:
        ctx.services.reload()
    for unit in dead:
        ctx.services.reset_failed(unit)
    record = written_record(ctx)
    if record is not None and read_measurement(ctx) is None and not owe(ctx, record):
        ctx.files.remove(ctx.paths.measurement)
    return (*dead, *(["another power limit"] if give_back_power(ctx) else []))


def owe(ctx: Context, record: manager.LeaseRecord) -> bool:
    """Whether a measurement that is over still owes production, whose unit is masked or gone.

    The wish is kept until the unit is mended, and then it is started.

    Raises:
        HostError: the wish cannot be written.
        ServiceError: what was mended does not start.
    """
    state = ctx.services.state(record.production)
    if not record.restores or record.ended_by or state.runs:
        return False
    if not state.exists or state.load_state == "masked":
        write_measurement(ctx, replace(record, is_owed=True))
        return True
    if record.is_owed:
        ctx.services.reset_failed(record.production)
        ctx.services.start(record.production)
    return False


def has_leftovers(ctx: Context) -> bool:
    """Whether there may be something to clear, seen without asking the service manager."""
    is_there = ctx.paths.measurement.exists() or ctx.paths.power.exists()
    return is_there or bool(_units_with_files(ctx))


def remove_unit_files(ctx: Context, unit: str) -> None:
    """Remove a candidate's files; the caller reloads."""
    folder = ctx.services.runtime_unit_dir
    shutil.rmtree(folder / f"{unit}.d", ignore_errors=True)
    ctx.files.remove_temporaries(folder, unit)
    ctx.files.remove(folder / unit)


def _left(ctx: Context) -> tuple[str, ...]:
    """Units of measurements that have a file, or that the manager still knows."""
    known = {unit for unit in ctx.services.service_units() if manager.lease_of(unit) is not None}
    return tuple(sorted(known | _units_with_files(ctx)))


def _units_with_files(ctx: Context) -> set[str]:
    try:
        names = [path.name for path in ctx.services.runtime_unit_dir.iterdir()]
    except OSError:
        return set()
    return {unit for unit in map(manager.bound_unit_behind, names) if unit is not None}


def written_record(ctx: Context) -> manager.LeaseRecord | None:
    """The record as it stands, whether its lease does or not; None where there is none to be read."""
    record = ctx.files.recall(manager.LeaseRecord, ctx.paths.measurement)
    return None if record is None or manager.lease_of(record.unit) is None else record
