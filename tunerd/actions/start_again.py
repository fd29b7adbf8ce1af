"""Starts a unit again and again for as long as only its port keeps it from serving."""

from __future__ import annotations

from collections.abc import Callable

from tunerd.actions.context import Context
from tunerd.actions.serve_check import NotServing, Serving, restart_unit
from tunerd.core.failure import FailureKind
from tunerd.core.progress import Progress
from tunerd.system.llama import Address
from tunerd.system.sockets import is_listened_on

# Connections that have ended keep their port for a minute (TCP_TIMEWAIT_LEN of Linux). A server whose
# socket options are not those of the one before it cannot bind it before: mainline after ik_llama.cpp.
PORT_PATIENCE_S = 65.0
PORT_POLL_S = 3.0


def start_again(
    ctx: Context,
    watch: Callable[[str | None], Serving | NotServing],
    address: Callable[[], Address | None],
) -> Serving | NotServing:
    """Restart what stands on disk and watch it; again where its port is only not free yet.

    Args:
        ctx: Where.
        watch: Says how the start went; gets the invocation that ran before it.
        address: Where the server is to listen; None where nobody knows.
    """
    end_s = None
    while True:
        old_invocation = ctx.services.state(ctx.unit).invocation_id
        ctx.services.reset_failed(ctx.unit)
        found = restart_unit(ctx, ctx.unit) or watch(old_invocation)
        if isinstance(found, Serving) or not port_will_be_free(found, address()):
            return found
        now_s = ctx.clock.monotonic_s()
        end_s = now_s + PORT_PATIENCE_S if end_s is None else end_s
        if now_s >= end_s:
            return found
        ctx.report(Progress("waiting until the port is free again", left_s=end_s - now_s))
        ctx.clock.sleep(min(PORT_POLL_S, end_s - now_s))


def port_will_be_free(found: NotServing, address: Address | None) -> bool:
    """Whether a start failed for a port on which nobody listens, so that only time is missing."""
    if found.failure.kind is not FailureKind.PORT_TAKEN:
        return False
    return address is None or not is_listened_on(address.port, address.host)
