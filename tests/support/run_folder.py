"""Folders of running test machines: who made each, and how all of it goes away again.

A folder holds the mounts of one machine and the process that made it. What a killed test run left
behind is removed when the next one starts.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
from pathlib import Path

from tests.support.container import group_of, remove_group
from tests.support.programs import program

_OWNER = "owner"
_numbers = itertools.count(1)
_mine: set[Path] = set()


def create(cache: Path) -> Path:
    """A new folder for one machine; its name is unique on this host."""
    runs = cache / "run"
    runs.mkdir(parents=True, exist_ok=True)
    name = f"e2e-{os.getpid()}-{next(_numbers)}"
    unnamed, folder = runs / f".{name}", runs / name
    for left in (unnamed, folder):
        if left.exists():  # of a dead run, in which another process had this number
            destroy(left)
    unnamed.mkdir(mode=0o755)
    (unnamed / _OWNER).write_text(_identity(os.getpid()) or "")
    unnamed.rename(folder)  # from here on a sweep sees it, and sees whose it is
    _mine.add(folder)
    return folder


def destroy(folder: Path) -> None:
    """Remove a machine's folder with its processes and mounts."""
    remove_group(group_of(folder.name))
    unmount(folder)
    for nspawn in ("propagate", "unix-export"):
        shutil.rmtree(Path("/run/systemd/nspawn") / nspawn / folder.name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    _mine.discard(folder)


def unmount(folder: Path) -> None:
    """Unmount everything that is mounted in the folder."""
    for point in _mounts_below(folder):
        program("umount", "--lazy", point, check=False)
    left = _mounts_below(folder)
    if left:
        raise RuntimeError(f"still mounted: {', '.join(map(str, left))}")


def sweep(cache: Path) -> list[str]:
    """Remove what dead test runs left; the names of their machines."""
    removed = []
    for folder in sorted((cache / "run").glob("e2e-*")):
        pid = int(folder.name.split("-")[1])
        try:
            in_use = (folder / _OWNER).read_text() == _identity(pid)
        except FileNotFoundError:
            in_use = _identity(pid) is not None  # its owner is removing it at this moment
        if in_use:
            continue
        destroy(folder)
        removed.append(folder.name)
    return removed


def _identity(pid: int) -> str | None:
    """What tells this process from a later one with the same number; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    started = stat.rpartition(")")[2].split()[19]
    return f"{pid} {started} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _mounts_below(folder: Path) -> list[Path]:
    """Mount points in the folder, newest first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))
        if point.is_relative_to(folder):
            points.append(point)
    return points[::-1]


@atexit.register
def _destroy_mine() -> None:
    for folder in sorted(_mine):
        if folder.exists():
            destroy(folder)
