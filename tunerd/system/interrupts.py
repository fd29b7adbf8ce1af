"""Ctrl-C, SIGTERM and a terminal that is closed, while work is done that must not end half-way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHELL_OFFSET = 128  # a shell's exit status of a program that a signal ended


class Interrupts:
    """While it lasts, the first such signal is raised as an exception, and the others do nothing.

    SIGINT is raised as KeyboardInterrupt, the others as SystemExit with a shell's status for them.
    What ignores a signal already (nohup) goes on ignoring it. Only the main thread gets signals:
    in any other this does nothing.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._is_held = False
        self._was_raised = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is raised within; what arrives is forgotten."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._is_held or self._was_raised:
            return
        self._was_raised = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_SHELL_OFFSET + number)


def words_of(error: BaseException) -> str:
    """What ended the work, for people: a signal by its name, an error by its own words."""
    if isinstance(error, KeyboardInterrupt):
        return "ended by Ctrl-C"
    numbers = {_SHELL_OFFSET + number: number.name for number in _SIGNALS}
    if isinstance(error, SystemExit) and error.code in numbers:
        return f"ended from outside ({numbers[error.code]})"
    return str(error) or type(error).__name__
