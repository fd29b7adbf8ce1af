"""Waits until no request is being answered, before a server is stopped."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.actions.live import address_now, read_live_unit
from tunerd.core.service import UnitState

_POLL_S = 0.5


def drain(ctx: Context, before: UnitState) -> tuple[str, ...]:
    """Wait for idle slots as long as the settings say; what to tell of requests that are cut."""
    if not before.is_active:
        return ()
    address = address_now(ctx, read_live_unit(ctx), before)
    if address is None:
        return ()
    server = ctx.connect(address)
    end_s = ctx.clock.monotonic_s() + ctx.settings.service.drain_s
    while True:
        slots = server.slots(timeout_s=2.0)
        left_s = end_s - ctx.clock.monotonic_s()
        if slots is None or slots.busy == 0:
            return ()
        if left_s <= 0:
            return (f"{slots.busy} requests were still running after the drain time and were cut",)
        ctx.say(f"waiting for {slots.busy} running requests", left_s=left_s)
        ctx.clock.sleep(min(_POLL_S, left_s))
