"""Control groups of test machines: one each, so that nothing of a machine outlives it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_EMPTY_WITHIN_S = 10.0


@cache
def unified_hierarchy() -> Path:
    """Where cgroup v2 is mounted: /sys/fs/cgroup, or a folder of it on hybrid machines."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup2 "):
            return Path(left.split()[4])
    raise RuntimeError("no cgroup v2 hierarchy is mounted")


def group_of(name: str) -> Path:
    """The group of the machine of this name."""
    return unified_hierarchy() / f"tunerd-{name}"


def create(name: str) -> Path:
    """A fresh group; what an earlier life of the machine left in it is killed."""
    remove(name)
    group = group_of(name)
    group.mkdir()
    return group


def remove(name: str) -> None:
    """Kill everything in the machine's group and remove it; a missing group is no error."""
    remove_group(group_of(name))


def remove_group(group: Path) -> None:
    """Kill everything in the group and remove it; a missing group is no error."""
    with suppress(FileNotFoundError):  # an ending container removes its group as well
        kill(group)
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()


def kill(group: Path) -> None:
    """Kill everything in the group and wait until it is empty.

    Raises:
        FileNotFoundError: the group is gone.
    """
    deadline = time.monotonic() + _EMPTY_WITHIN_S
    while "populated 1" in (group / "cgroup.events").read_text():
        for procs in group.rglob("cgroup.procs"):
            with suppress(OSError):
                for pid in procs.read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{group} does not become empty")
        time.sleep(0.005)
