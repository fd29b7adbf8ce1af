"""Processes of a test: a fork of this one, which has loaded already what it needs, and programs that have begun."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.waiting import until
from tunerd.machine.process import Child, Setting, start

Act = Callable[[Callable[[object], None]], object]
"""What it does; a call of what it is given tells a line."""


@contextmanager
def running(*argv: str, setting: Setting | None = None) -> Iterator[Child]:
    """A program that has printed something, until the block ends."""
    with start(argv, setting or Setting()) as child:
        until(child.log_tail, f"{argv[0]} prints")
        yield child


class Forked:
    """Begins at once; `told` are the lines that come from it, each as soon as it is told."""

    def __init__(self, act: Act) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be(act, writer)
        os.close(writer)
        self.told = os.fdopen(reader)

    def kill(self) -> str:
        """Kill it; what it told and nobody read yet."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()[1]

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit status, as that of a `Popen`, and what it told and nobody read yet."""
        with self.told:
            rest = self.told.read()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), rest


def _be(act: Act, writer: int) -> None:
    def tell(what: object) -> None:
        os.write(writer, f"{what}\n".encode())

    code = 1
    try:
        act(tell)
        code = 0
    except BaseException:  # noqa: BLE001  told to the test
        tell(traceback.format_exc())
    finally:
        os._exit(code)
