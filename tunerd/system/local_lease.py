"""A lease held by tunerd's own supervisor: a connection. When it drops, production comes back."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.core.lease import LeaseSpec
from tunerd.errors import NoSupervisor, OldSupervisor
from tunerd.system import supervisor_wire as wire

if TYPE_CHECKING:
    from tunerd.system.local import Local


@dataclass(frozen=True, slots=True)
class LocalLease:
    """A Lease; nothing keeps the machine awake."""

    spec: LeaseSpec
    manager: Local
    channel: socket.socket
    inhibits: str | None = None

    def is_held(self) -> bool:
        """Whether the supervisor still holds the other end."""
        try:
            return bool(self.channel.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Tell the supervisor, which does the waiting; where it is gone or older, nobody does."""
        host, port = address or (None, None)
        message = {"op": "restore-when-free", "unit": self.spec.unit, "host": host, "port": port}
        with contextlib.suppress(NoSupervisor, OldSupervisor):
            if self.is_held():
                self.manager.tell(message)

    def end(self, *, timeout_s: float = 120.0) -> None:
        """Ask for the end; where the supervisor is gone, the next one sees to the rest."""
        with contextlib.suppress(NoSupervisor):
            if self.is_held():
                self.manager.stop(self.spec.unit, timeout_s=timeout_s)
        self.channel.close()


def take_lease(manager: Local, folder: Path, spec: LeaseSpec, *, timeout_s: float) -> LocalLease:
    """Ask the supervisor for production's place.

    Raises:
        NoSupervisor: There is none.
        ServiceError: It refused, or production did not stop in time.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    message = {
        "op": "lease",
        "unit": spec.unit,
        "production": spec.production,
        "restores": spec.restores,
        "limit_s": spec.limit_s,
    }
    try:
        wire.request_on(channel, folder, message, timeout_s=timeout_s)
    except BaseException:
        channel.close()
        raise
    channel.setblocking(False)
    return LocalLease(spec, manager, channel)
