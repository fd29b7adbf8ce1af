"""What goes into a running program and comes out of it, bounded in time and size."""

from __future__ import annotations

import contextlib
import os
import selectors
from typing import IO

from tunerd.system.clock import SystemClock
from tunerd.system.process_end import end_watch, has_ended

_CHUNK_BYTES = 64 * 1024
# How long the output is read on after the program ended while something that it left holds the pipe.
_DRAIN_S = 0.5
_POLL_S = 0.05


class Dialogue:
    """The pipes of one child.

    `is_complete` when it ended and closed its output; `is_truncated` when it printed more than is
    kept.
    """

    def __init__(
        self,
        pid: int,
        *,
        stdin: IO[bytes] | None,
        stdout: IO[bytes],
        stderr: IO[bytes],
        text: str | None,
        max_bytes: int,
    ) -> None:
        self.is_truncated = False
        self.is_complete = False
        self._pid = pid
        self._stdin = stdin
        self._input = b"" if text is None else text.encode("utf-8", "surrogateescape")
        self._max_bytes = max_bytes
        self._output: dict[IO[bytes], bytearray] = {stdout: bytearray(), stderr: bytearray()}
        self._open_output = {stdout, stderr}
        self._selector = selectors.DefaultSelector()
        for pipe in self._output:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ)
        if stdin is not None:
            os.set_blocking(stdin.fileno(), False)
            self._selector.register(stdin, selectors.EVENT_WRITE)

    def hold(self, deadline_s: float) -> bool:
        """Until the program ended; whether the deadline (monotonic) came first."""
        clock = SystemClock()
        drained_s: float | None = None
        with end_watch(self._pid) as watch:
            if watch is not None:
                self._selector.register(watch, selectors.EVENT_READ)
            while True:
                now_s = clock.monotonic_s()
                if drained_s is None and has_ended(self._pid):
                    drained_s = now_s + _DRAIN_S
                    if watch is not None:
                        self._selector.unregister(watch)
                self.is_complete = drained_s is not None and not self._open_output
                if self.is_complete or (drained_s is not None and now_s >= drained_s):
                    return False
                if now_s >= deadline_s:
                    return drained_s is None
                self._turn(min(_POLL_S, deadline_s - now_s))

    def text(self, pipe: IO[bytes]) -> str:
        """What came out of this pipe."""
        return self._output[pipe].decode("utf-8", errors="replace")

    def close(self) -> None:
        """Close every pipe."""
        self._selector.close()
        for pipe in (self._stdin, *self._output):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._stdin and self._stdin is not None:
                self._write(self._stdin)
            for pipe in tuple(self._open_output):
                if key.fileobj is pipe:
                    self._read(pipe)

    def _write(self, pipe: IO[bytes]) -> None:
        try:
            self._input = self._input[os.write(pipe.fileno(), self._input[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not want the rest
            self._input = b""
        if not self._input:
            self._selector.unregister(pipe)
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self, pipe: IO[bytes]) -> None:
        try:
            chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(pipe)
            self._open_output.discard(pipe)
        kept = self._output[pipe]
        room = self._max_bytes - len(kept)
        kept += chunk[:room]
        self.is_truncated = self.is_truncated or len(chunk) > room
