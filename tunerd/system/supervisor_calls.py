"""Who calls the supervisor, and what for."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field

from tunerd.system import supervisor_wire as wire

_IDLE_S = 10.0


@dataclass(slots=True)
class Job:
    """What a unit is asked to do, and who waits for it."""

    verb: str
    waiting: list[Connection] = field(default_factory=list)
    is_stopped: bool = False


class Connection:
    """One caller."""

    def __init__(self, channel: socket.socket, opened_s: float) -> None:
        channel.setblocking(False)
        self.channel = channel
        self.expires_s: float | None = opened_s + _IDLE_S
        self._received = bytearray()

    def lines(self) -> list[bytes] | None:
        """Complete requests that came; None when the caller is gone or sends too much."""
        try:
            chunk = self.channel.recv(wire.MAX_REQUEST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._received += chunk
        if not chunk or len(self._received) > wire.MAX_REQUEST_BYTES:
            return None
        *whole, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return whole

    def answer(self, line: bytes, now_s: float) -> None:
        """Send an answer; a caller that does not read it loses it."""
        self.expires_s = now_s + _IDLE_S
        with contextlib.suppress(OSError):
            self.channel.send(line)
