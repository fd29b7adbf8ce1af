"""The main process of a supervised unit: one that we started, or one that we found running."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Protocol

from tunerd.core.local_outcome import Ending
from tunerd.system.process import Child
from tunerd.system.unit_record import UnitRecord


class MainProcess(Protocol):
    """What the supervisor needs of it."""

    pid: int

    def has_ended(self) -> bool:
        """Whether it ended."""
        ...

    def ending(self) -> Ending:
        """How it ended; asked once, when `has_ended`. Its pid may belong to another from now on."""
        ...

    def send(self, number: int) -> None:
        """Send it a signal; nothing happens if it ended."""
        ...


class OwnProcess:
    """A child of this supervisor."""

    def __init__(self, child: Child) -> None:
        self.pid = child.pid
        self._child = child

    def has_ended(self) -> bool:
        """Whether it ended; it stays a zombie, and its pid its own, until `ending`."""
        return self._child.has_ended()

    def ending(self) -> Ending:
        """How it ended."""
        ended = self._child.reap()
        return Ending(ended.code, ended.signal, dumped=False)

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send(number)


class FoundProcess:
    """A process that an earlier supervisor started; how it ends is told to nobody.

    A pidfd holds on to the process itself, so that no signal reaches a later one of its pid.
    """

    def __init__(self, record: UnitRecord) -> None:
        self.pid = record.pid
        self._record = record
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):  # kernels and sandboxes without pidfd
            self._descriptor = os.pidfd_open(record.pid)
        if not record.is_alive:
            self._close()

    def has_ended(self) -> bool:
        """Whether it ended."""
        if self._descriptor is None:
            return not self._record.is_alive
        readable, _, _ = select.select([self._descriptor], [], [], 0)
        return bool(readable)

    def ending(self) -> Ending:
        """Unknown."""
        self._close()
        return Ending()

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self._record.is_alive:
                os.kill(self.pid, number)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
