"""Tells systemd how this process is: sd_notify without a library."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

# For what is said once: a manager that is busy with others for a moment must not miss it.
_WAIT_S = 5.0


class Notifier:
    """Sends states to the service manager; without one every call does nothing.

    Source: sd_notify(3). A send that fails is ignored, as there: readiness is the manager's wish,
    not this program's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        values = os.environ if environment is None else environment
        self._address = _address(values.get("NOTIFY_SOCKET", ""))
        self._watchdog_us = values.get("WATCHDOG_USEC", "")
        self._watchdog_pid = values.get("WATCHDOG_PID", "")

    @property
    def is_connected(self) -> bool:
        """Whether a manager listens."""
        return self._address is not None

    @property
    def watchdog_s(self) -> float | None:
        """How often `alive` must be called at least, halved for safety; None if nobody waits."""
        if not self._watchdog_us.isdecimal() or int(self._watchdog_us) == 0:
            return None
        if self._watchdog_pid and self._watchdog_pid != str(os.getpid()):
            return None
        return int(self._watchdog_us) / 1_000_000 / 2

    def ready(self, status: str | None = None) -> None:
        """Starting is done."""
        self._send("READY=1", *_status(status), wait_s=_WAIT_S)

    def status(self, text: str) -> None:
        """What this process is doing, for people."""
        self._send(*_status(text))

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def patience(self, seconds: float | None) -> None:
        """Let the watchdog wait so long [s] from now on; None for as long as it was set up to.

        For work that cannot feed it; does nothing where there is no watchdog.
        """
        if self.watchdog_s is not None:
            limit_us = self._watchdog_us if seconds is None else int(seconds * 1_000_000)
            self._send("WATCHDOG=1", f"WATCHDOG_USEC={limit_us}", wait_s=_WAIT_S)

    def stopping(self, status: str | None = None) -> None:
        """The end has begun."""
        self._send("STOPPING=1", *_status(status))

    def _send(self, *lines: str, wait_s: float = 0.0) -> None:
        if self._address is None:
            return
        data = "\n".join(lines).encode("utf-8", "replace")
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.settimeout(wait_s)  # a full queue must not hold up the caller for long
            channel.connect(self._address)
            channel.sendall(data)


def _address(name: str) -> str | bytes | None:
    """A path, or an abstract name, which begins with `@`."""
    if name.startswith("/"):
        return name
    if name.startswith("@") and len(name) > 1:
        return b"\0" + os.fsencode(name[1:])
    return None


def _status(text: str | None) -> tuple[str, ...]:
    return () if text is None else ("STATUS=" + " ".join(text.split()),)
