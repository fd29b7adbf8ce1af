"""What the unit tunerd-sweep.service runs: the request that `sweep start` left for it, else the settings'."""

from __future__ import annotations

from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.sweep_plan import SweepRequest, request_from_json
from tunerd.actions.sweep_record import StoredSweep, reading, sweeps
from tunerd.core.evidence import RunOutcome
from tunerd.errors import HostError

# A request that no unit has taken by then belongs to a start that failed.
_FRESH_S = 120.0


def configured_request(ctx: Context) -> SweepRequest:
    """The night that the settings describe."""
    settings = ctx.settings.sweep
    return SweepRequest(
        budget_s=min(settings.budget_s, settings.downtime_s),
        workload=settings.workload,
        window=settings.window,
    )


def leave_request(ctx: Context, request: SweepRequest, *, is_night: bool = False) -> None:
    """Put a request where the unit will find it.

    Args:
        ctx: Where.
        request: What it is to do.
        is_night: Whether it may do what else a night does.

    Raises:
        HostError: it cannot be written.
    """
    ctx.files.make_folder(ctx.paths.runtime_dir)
    data = {"at_s": ctx.clock.now_s(), "request": request.to_json(), "is_night": is_night}
    ctx.files.write_json(_path(ctx), data)


def drop_request(ctx: Context) -> None:
    """Remove a request that nobody took."""
    ctx.files.remove(_path(ctx))


def take_request(ctx: Context) -> tuple[SweepRequest, bool]:
    """The request that was left a moment ago, once, else that of the settings; whether it is a night."""
    configured = (configured_request(ctx), True)
    try:
        data = ctx.files.read_json(_path(ctx))
    except HostError:
        data = None
    if not isinstance(data, dict):
        return configured
    drop_request(ctx)
    if not 0 <= ctx.clock.now_s() - float(data.get("at_s", 0.0)) <= _FRESH_S:
        return configured
    return request_from_json(data["request"]), data.get("is_night") is True


def unfinished(ctx: Context, request: SweepRequest) -> StoredSweep | None:
    """The newest sweep, if it asked for the same and did not come to its end."""
    with reading(ctx) as store:
        found = sweeps(store, limit=1) if store is not None else ()
    if not found or found[0].run.outcome is RunOutcome.DONE:
        return None
    return found[0] if found[0].plan.get("request") == request.to_json() else None


def _path(ctx: Context) -> Path:
    return ctx.paths.runtime_dir / "sweep-request.json"
