"""Which processes belong together, read from `/proc`; what cannot be read is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunerd.system.proc import read_text

_PROC = Path("/proc")
_ENVIRONMENT_BYTES = 1024 * 1024
_N_FIELDS_NEEDED = 20


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process; `start_ticks` counts clock ticks since boot and tells a reused pid apart."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie only waits to be counted by its parent."""
        return self.state not in {"Z", "X"}


def process_stat(pid: int) -> ProcessStat | None:
    """The process as the kernel sees it now; None if there is none."""
    text = read_text(_PROC / str(pid) / "stat", max_bytes=4096)
    if text is None:
        return None
    # The name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(")")[2].split()
    if len(fields) < _N_FIELDS_NEEDED:
        return None
    state, parent, group, session = fields[0], *(int(field) for field in fields[1:4])
    return ProcessStat(pid, state, parent, group, session, int(fields[19]))


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is this process, or started it directly or through others that still run."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        stat = process_stat(pid)
        pid = stat.parent if stat is not None else 0
    return False


def all_processes() -> Iterator[ProcessStat]:
    """Every process that can be seen from here."""
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            stat = process_stat(int(folder.name))
            if stat is not None:
                yield stat


def session_members(session: int) -> tuple[int, ...]:
    """Living processes of this session."""
    return tuple(
        process.pid
        for process in all_processes()
        if process.session == session and process.is_alive
    )


def members(*, session: int, ancestor: int, variable: tuple[str, str]) -> tuple[int, ...]:
    """Living processes that belong to one service, as far as can be told without a cgroup.

    Those of its session, those descended from its main process `ancestor`, and those that carry the
    environment variable that it was started with, wherever they went since.
    """
    processes = [process for process in all_processes() if process.is_alive]
    found = {process.pid for process in processes if process.session == session}
    found |= {ancestor} & {process.pid for process in processes}
    found |= {process.pid for process in processes if _carries(process.pid, variable)}
    grew = True
    while grew:
        children = {process.pid for process in processes if process.parent in found}
        grew = not children <= found
        found |= children
    return tuple(sorted(found - {os.getpid()}))


def _carries(pid: int, variable: tuple[str, str]) -> bool:
    wanted = f"{variable[0]}={variable[1]}".encode()
    try:
        with (_PROC / str(pid) / "environ").open("rb") as file:
            return wanted in file.read(_ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return False
