"""`tunerd sweep start`, `stop`, `status` and `watch`: a sweep as a unit of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunerd.actions.context import Context
from tunerd.actions.lease_record import read_measurement
from tunerd.actions.own_unit import SWEEP_UNIT, OwnUnit, start_own_unit
from tunerd.actions.sweep_hours import demand_open
from tunerd.actions.sweep_night import drop_request, leave_request
from tunerd.actions.sweep_plan import PreparedSweep, SweepRequest, demand_room, prepare
from tunerd.actions.sweep_record import StoredSweep, reading, sweeps
from tunerd.actions.sweeps import running_sweep
from tunerd.actions.upgrade_compare import due_comparison, prepare_builds
from tunerd.core.quantity import format_duration
from tunerd.core.result import ActionResult, note
from tunerd.core.sweep.page import arm_text
from tunerd.errors import Busy, UsageError
from tunerd.system.files import is_locked

if TYPE_CHECKING:
    from tunerd.actions.compare import Prepared

_STOP_S = 1800.0
_POLL_S = 1.0
_START_S = 120.0
_LOG_LINES = 20


def start_sweep(
    ctx: Context, request: SweepRequest, *, confirm: Any, is_night: bool = False
) -> ActionResult:
    """Begin a sweep that outlives this terminal, once everything that can be checked was.

    Args:
        ctx: Where.
        request: What is asked for.
        confirm: Shows what will happen and asks; raises to stop.
        is_night: It may be what else a night does: two builds that are compared after an upgrade.

    Raises:
        Busy: one is under way.
        UsageError, ConfigError, DeployError: as `prepare`.
        ServiceError: the unit does not start.
    """
    _demand_none(ctx)
    demand_open(ctx, request.window)
    prepared = _comparison(ctx, request) if is_night else None
    if prepared is None:
        prepared = prepare(ctx, request, proves=False)
        demand_room(prepared)
    confirm(prepared)
    leave_request(ctx, request, is_night=is_night)
    try:
        _start(ctx)
    except BaseException:
        drop_request(ctx)
        raise
    payload = {"unit": SWEEP_UNIT, "budget_s": request.budget_s}
    hint = "`tunerd sweep watch`; `tunerd sweep stop` ends it"
    return ActionResult(
        "sweep start", payload, (*prepared.messages, note("started", f"{SWEEP_UNIT} runs", hint))
    )


def _comparison(ctx: Context, request: SweepRequest) -> PreparedSweep | Prepared | None:
    builds = due_comparison(ctx)
    return None if builds is None else prepare_builds(ctx, builds, budget_s=request.budget_s)


def stop_sweep(ctx: Context) -> ActionResult:
    """End the sweep under way; its samples are kept, and production serves again.

    Raises:
        UsageError: none is under way as a unit.
        ServiceError: it does not stop.
    """
    if not _is_up(ctx):
        from tunerd.actions.jobs import job_unit, measuring_job, stop_job

        running, job = running_sweep(ctx), measuring_job(ctx)
        if job is not None:
            stop_job(ctx, job)
            return _stopped(job_unit(job), running)
        raise UsageError(
            f"{SWEEP_UNIT} does not run"
            if running is None
            else f"sweep {running} runs in a terminal",
            hint="`tunerd sweep list`" if running is None else "end it there with Ctrl-C",
        )
    number = running_sweep(ctx)
    ctx.say("ending the sweep; production comes back")
    ctx.services.stop(SWEEP_UNIT, timeout_s=_STOP_S)
    return _stopped(SWEEP_UNIT, number)


def _stopped(unit: str, number: int | None) -> ActionResult:
    payload = {"unit": unit, "sweep": number}
    hint = "`tunerd sweep resume` goes on"
    return ActionResult("sweep stop", payload, (note("kept", "its samples are kept", hint),))


def sweep_status(ctx: Context) -> ActionResult:
    """What runs now, how far it is, and what it would recommend."""
    record = read_measurement(ctx)
    number = running_sweep(ctx)
    payload: dict[str, Any] = {
        "unit": SWEEP_UNIT,
        "unit_state": ctx.services.state(SWEEP_UNIT).active_state,
        "sweep": number,
        "since_s": record.since_s if record is not None and number is not None else None,
        "until_s": record.until_s if record is not None and number is not None else None,
        "left_s": max(0.0, record.until_s - ctx.clock.now_s())
        if record is not None and number is not None
        else None,
    }
    with reading(ctx) as store:
        newest = sweeps(store, limit=1) if store is not None else ()
        events = store.sweep_events(newest[0].number) if store is not None and newest else ()
    payload["last"] = _last(newest, events)
    return ActionResult("sweep status", payload)


def watch_sweep(ctx: Context) -> Iterator[str]:
    """Lines as the sweep goes, until it ends.

    Raises:
        UsageError: none is under way.
    """
    end_s = ctx.clock.monotonic_s() + _START_S
    seen, number = 0, running_sweep(ctx)
    while number is None and _is_up(ctx) and ctx.clock.monotonic_s() < end_s:
        ctx.clock.sleep(_POLL_S)
        number = running_sweep(ctx)
    if number is None:
        raise UsageError("no sweep is under way", hint="`tunerd sweep start`")
    while True:
        is_running = running_sweep(ctx) == number or _is_up(ctx)
        with reading(ctx) as store:
            events = () if store is None else store.sweep_events(number)
        for event in events[seen:]:
            yield event_text(event)
        seen = len(events)
        if not is_running:
            return
        ctx.clock.sleep(_POLL_S)


def event_text(event: Mapping[str, Any]) -> str:
    """One start or request in a line."""
    arm = arm_text({**event["arm"], "n_max": event["n_max"] or event["arm"]["n_max"],
                    "p_min": event["p_min"] or event["arm"]["p_min"]})  # fmt: skip
    what = "start" if event["event"] == "boot" else event["purpose"]
    end = event["failure"] or format_duration(event["seconds"])
    return f"{what:<8} {end:>8}  {arm}"


def _last(newest: Sequence[StoredSweep], events: Sequence[Mapping[str, Any]]) -> Any:
    if not newest:
        return None
    sweep = newest[0]
    return {
        "sweep": sweep.number,
        "verdict": None if sweep.verdict is None else sweep.verdict.outcome,
        "sentence": None if sweep.verdict is None else sweep.verdict.sentence,
        "starts": sum(event["event"] == "boot" for event in events),
        "requests": sum(event["event"] == "request" for event in events),
        "arms": len({arm_text(event["arm"]) for event in events}),
        "failures": sum(bool(event["failure"]) for event in events),
        "doing": event_text(events[-1]) if events else None,
    }


def _is_up(ctx: Context) -> bool:
    return ctx.services.state(SWEEP_UNIT).active_state in {"active", "activating", "deactivating"}


def _demand_none(ctx: Context) -> None:
    if _is_up(ctx) or is_locked(ctx.paths.measure_lock):
        record = read_measurement(ctx)
        raise Busy(
            "another measurement is under way",
            cause=SWEEP_UNIT if record is None else record.purpose,
            state="nothing was changed",
            hint="`tunerd sweep status`; `tunerd sweep stop` ends a sweep",
        )


def _start(ctx: Context) -> None:
    """The installed unit; where tunerd was not installed by install.sh, one that a reboot forgets."""
    is_ours = (ctx.services.runtime_unit_dir / SWEEP_UNIT).exists()
    if ctx.services.state(SWEEP_UNIT).exists and not is_ours:
        ctx.services.reset_failed(SWEEP_UNIT)
        ctx.services.start(SWEEP_UNIT)
        return
    words = ["sweep", "night", "--yes", "--bound-to", SWEEP_UNIT]
    start_own_unit(ctx, OwnUnit(SWEEP_UNIT, "a sweep", words))
