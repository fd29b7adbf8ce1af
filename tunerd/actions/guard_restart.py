"""Restarts the server for a guard, under the one lock."""

from __future__ import annotations

from tunerd.actions.context import Context
from tunerd.actions.lease_record import read_measurement
from tunerd.errors import Busy
from tunerd.system.files import lock

_LIMIT_S = 240.0


def restart_server(ctx: Context) -> None:
    """Restart the unit as it stands.

    Raises:
        Busy: it is being changed or measured.
        ServiceError: it does not start.
    """
    with lock(ctx.paths.lock, purpose="guard restart", since=ctx.now_text()):
        if read_measurement(ctx) is not None:
            raise Busy("a measurement is under way", state="nothing was restarted")
        ctx.services.reset_failed(ctx.unit)
        ctx.services.restart(ctx.unit, timeout_s=_LIMIT_S)
