"""Sees production come back after a measurement, over its own restarts and a port that is not free yet."""

from __future__ import annotations

from functools import partial

from tunerd.actions.context import Context
from tunerd.actions.live import address_of, read_live_unit
from tunerd.actions.serve_check import NotServing, Serving
from tunerd.actions.start_again import PORT_PATIENCE_S, PORT_POLL_S, port_will_be_free, start_again
from tunerd.actions.swap_back import check_as_it_stands
from tunerd.core.progress import Progress
from tunerd.core.service import UnitState
from tunerd.system.llama import Address

_POLL_S = 0.25


def come_back(ctx: Context) -> Serving | NotServing:
    """Watch production, which was started, until it serves or nothing will start it again.

    A start that its manager repeats is waited for, for as long as a port may take to be free; one that
    failed for such a port is repeated here, also where the manager has given up.

    Raises:
        HostError: its file cannot be read.
        ServiceError: the service manager does not do its part.
    """
    end_s = ctx.clock.monotonic_s() + PORT_PATIENCE_S
    while True:
        n_restarts = ctx.services.state(ctx.unit).n_restarts or 0
        found = check_as_it_stands(ctx, old_invocation=None, n_restarts=n_restarts)
        if isinstance(found, Serving):
            return found
        if port_will_be_free(found, _address(ctx)):
            ctx.say("waiting until the port is free again")
            ctx.clock.sleep(PORT_POLL_S)
            return start_again(ctx, partial(_watch, ctx), partial(_address, ctx))
        if not _is_started_again(ctx.services.state(ctx.unit), n_restarts):
            return found
        if not _wait_for_restart(ctx, end_s):
            return found


def _watch(ctx: Context, old_invocation: str | None) -> Serving | NotServing:
    return check_as_it_stands(ctx, old_invocation=old_invocation)


def _address(ctx: Context) -> Address | None:
    return address_of(ctx, read_live_unit(ctx))


def _waits(state: UnitState) -> bool:
    return state.sub_state.startswith("auto-restart")


def _is_started_again(state: UnitState, n_before: int) -> bool:
    """Whether its manager starts it again, or has done so since there were so many restarts."""
    runs = state.active_state in {"active", "activating"}
    return _waits(state) or (runs and (state.n_restarts or 0) > n_before)


def _wait_for_restart(ctx: Context, end_s: float) -> bool:
    """Whether the manager did it in time."""
    while True:
        left_s = end_s - ctx.clock.monotonic_s()
        if left_s <= 0:
            return False
        if not _waits(ctx.services.state(ctx.unit)):
            return True
        ctx.report(Progress(f"{ctx.unit} ended; its manager starts it again", left_s=left_s))
        ctx.clock.sleep(_POLL_S)
