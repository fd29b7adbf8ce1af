"""A terminal that stops its programs (Ctrl-Z, Ctrl-S) does not stop a swap; what else does is told."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

from tests.fault.world import UNIT, World
from tunerd.machine.process import is_stopped
from tunerd.units.systemd import Notifier
from tunerd.watch.daemon import Recovery
from tunerd.watch.figures import Event

_SWAPS = """
import sys
from tunerd.machine.process import Interrupts
with Interrupts():
    print("swaps", flush=True)
    sys.stdin.readline()
    print("is done", flush=True)
"""
_TELLS = """
from tunerd.cli.output import progress_sink
from tunerd.result import Progress
sink = progress_sink()
for n in range(3):
    sink(Progress(f"step {n}", n, 3))
"""
_HOLDS = """
import sys
from pathlib import Path
from tunerd.machine.files import lock
with lock(Path(sys.argv[1]), purpose="apply x", since="now"):
    print("holds", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def a_child(code: str, says: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own group that has said this; it ends with a line to read."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0,
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == f"{says}\n"
            yield child
        finally:
            child.kill()


def test_what_a_terminal_sends_does_not_stop_a_swap() -> None:
    with a_child(_SWAPS, "swaps") as child:
        for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            child.send_signal(number)
        said, _ = child.communicate("\n", timeout=240)
    assert said == "is done\n"


def test_a_terminal_that_takes_nothing_more_does_not_hold_up_what_tells_of_progress() -> None:
    ours, theirs = pty.openpty()
    tells = [sys.executable, "-c", _TELLS]
    try:
        termios.tcflow(theirs, termios.TCOOFF)  # Ctrl-S
        subprocess.run(tells, stderr=theirs, timeout=240, check=True)
        termios.tcflow(theirs, termios.TCOON)
        subprocess.run(tells, stderr=theirs, timeout=240, check=True)
        said = b""
        while b"[2/3] step 2" not in said:  # the kernel hands it over in its own time
            said += os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_swap_that_somebody_stopped_is_told_once_when_it_is_late(world: World) -> None:
    told: list[Event] = []
    recovery = Recovery(world.context(), Notifier({}), told.append)
    record = world.paths.journal_dir / f"{UNIT}.json"
    world.paths.journal_dir.mkdir(parents=True)
    record.write_text("{}")
    now_s = world.clock.now_s()

    def look(age_s: float) -> None:
        os.utime(record, (now_s - age_s, now_s - age_s))
        recovery.look()

    with a_child(_HOLDS, "holds", str(world.paths.lock)) as child:
        look(1000)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_stopped(child.pid)
        look(0)
        assert told == []
        look(1000)
        look(1000)
        child.send_signal(signal.SIGCONT)
        child.communicate("\n", timeout=240)
    assert [one.kind for one in told] == ["swap-stopped"]
    assert f"kill -CONT {child.pid}" in (told[0].hint or "")
