"""The log files of supervised units: `LOG/UNIT.log`, and one older of each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tunerd.core.paths import Paths
from tunerd.core.unit_log import LogSpan, log_lines, log_span, mark
from tunerd.system.seams import Clock

MAX_LOG_BYTES = 32 * 1024 * 1024
_READ_BYTES = 8 * 1024 * 1024
_COPY_BYTES = 1024 * 1024


KEPT_LOGS = 20


def prune_logs(paths: Paths, is_passing: Callable[[str], bool], *, keep: int = KEPT_LOGS) -> None:
    """Remove logs of units that never run again (`is_passing`, by name), but for the newest.

    What cannot be removed stays; nothing here raises.
    """
    with contextlib.suppress(OSError):
        found = [
            (path.stat().st_mtime, path)
            for path in paths.log_dir.iterdir()
            if is_passing(path.name.partition(".log")[0])
        ]
        for _at_s, path in sorted(found)[: max(0, len(found) - keep)]:
            path.unlink(missing_ok=True)


class UnitLog:
    """The log of one unit. The server writes into it directly, so it goes on without a supervisor.

    Nothing here raises: a server must start on a full disk too.
    """

    def __init__(self, paths: Paths, unit: str, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = paths.log_dir / f"{unit}.log"
        self.older = paths.log_dir / f"{unit}.log.1"
        self._unit = unit
        self._max_bytes = max_bytes

    def open(self) -> int:
        """A descriptor that appends to the log; to nowhere if it cannot be opened."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            if self._size() > self._max_bytes:
                self.path.replace(self.older)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(self.path, flags, 0o640)
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def note(self, clock: Clock, invocation_id: str, text: str) -> None:
        """Write a mark."""
        time = datetime.fromtimestamp(clock.now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = mark(time, invocation_id, text)
        if self._ends_in_the_middle():
            line = "\n" + line
        descriptor = self.open()
        try:
            with contextlib.suppress(OSError):
                os.write(descriptor, line.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)

    def rotate(self) -> None:
        """Put a log that grew too long aside while its server goes on writing.

        The server keeps its descriptor, so the file is copied and emptied. What it writes between
        the last byte copied and the emptying, some microseconds, is lost.
        """
        if self._size() <= self._max_bytes:
            return
        with contextlib.suppress(OSError):
            source = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                with self.older.open("wb") as target:
                    while chunk := os.read(source, _COPY_BYTES):
                        target.write(chunk)
                    target.flush()
                    os.ftruncate(source, 0)
            finally:
                os.close(source)

    def lines(self, *, invocation_id: str | None, max_lines: int) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        text = (_tail(self.older) + _tail(self.path)).decode("utf-8", "replace")
        found = log_lines(text, unit=self._unit, invocation_id=invocation_id)
        return found[max(0, len(found) - max_lines) :]

    def span(self, since_s: float, *, max_lines: int) -> LogSpan:
        """What was written since then."""
        text = (_tail(self.older) + _tail(self.path)).decode("utf-8", "replace")
        return log_span(text, unit=self._unit, since_s=since_s, max_lines=max_lines)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _ends_in_the_middle(self) -> bool:
        return _tail(self.path, 1) not in {b"", b"\n"}


def _tail(path: Path, max_bytes: int = _READ_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes)
    except OSError:
        return b""
