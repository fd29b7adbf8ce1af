"""A supervisor of its own for a test, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import until
from tunerd.errors import ServiceError
from tunerd.machine.process import all_processes, process_stat
from tunerd.paths import Paths, paths_for
from tunerd.tryout.local import PID_NAME, Local
from tunerd.words import Mode


def supervisor_pid(paths: Paths) -> int | None:
    """The supervisor that answers now."""
    try:
        Local(paths).check_ready()
    except ServiceError:
        return None
    return int((paths.runtime_dir / PID_NAME).read_text())


def is_alive(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    stat = process_stat(pid)
    return stat is not None and stat.is_alive


def wait_until_gone(*pids: int) -> None:
    """Wait until none of them runs."""
    until(lambda: not any(map(is_alive, pids)), f"{pids} have ended")


def end_supervisor(paths: Paths, number: int = signal.SIGTERM) -> None:
    """End the supervisor and wait for that."""
    pid = supervisor_pid(paths)
    if pid is not None:
        os.kill(pid, number)
        wait_until_gone(pid)


def processes_with(text: str) -> set[int]:
    """Living processes whose command line holds `text`."""
    found = set()
    for process in all_processes():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            if process.is_alive and text.encode() in command and process.pid != os.getpid():
                found.add(process.pid)
    return found


@contextlib.contextmanager
def supervised(folder: Path) -> Iterator[Paths]:
    """Folders for a supervisor; whatever runs below them is gone afterwards."""
    places = {"CONFIG": "config", "STATE": "state", "RUNTIME": "run"}
    folders = {f"TUNERD_{name}_DIR": str(folder / where) for name, where in places.items()}
    paths = paths_for(Mode.LOCAL, folders)
    try:
        yield paths
    finally:
        end_supervisor(paths)
        for pid in processes_with(str(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
