"""What is remembered of a running unit, so that a new supervisor finds it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from tunerd.core.paths import Paths
from tunerd.system.proc import boot_id
from tunerd.system.process_tree import process_stat

_FOLDER = "supervise"
_SUFFIX = ".json"
# Fixed, so that rewriting a record needs no new block on a full disk.
_RECORD_BYTES = 1024


class Intent(StrEnum):
    """What the supervisor had in mind for the unit."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    """It is down, or on its way there, only to be started again."""


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """The main process of a unit: `start_ticks` and `boot` tell it from a later one of its pid."""

    unit: str
    pid: int
    start_ticks: int
    boot: str
    invocation_id: str
    n_restarts: int
    active_since_s: float
    intent: Intent = Intent.STARTING

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        stat = process_stat(self.pid) if self.boot == current_boot() else None
        return stat is not None and stat.is_alive and stat.start_ticks == self.start_ticks


def current_boot() -> str:
    """The name of this boot; empty where the kernel does not tell."""
    return boot_id() or ""


def write_record(paths: Paths, record: UnitRecord) -> None:
    """Remember a process. It is not synced: the process does not outlive the machine either.

    Raises:
        OSError: There is no room for it.
    """
    path = _path(paths, record.unit)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = json.dumps(asdict(record)).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.pwrite(descriptor, data.ljust(_RECORD_BYTES), 0)
    finally:
        os.close(descriptor)


def read_record(paths: Paths, unit: str) -> UnitRecord | None:
    """What is remembered of a unit; None if nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        fields = json.loads(_path(paths, unit).read_bytes()[:_RECORD_BYTES])
        return UnitRecord(**{**fields, "intent": Intent(fields["intent"])})
    return None


def forget(paths: Paths, unit: str) -> None:
    """Remember nothing of a unit."""
    with contextlib.suppress(OSError):
        _path(paths, unit).unlink()


class Memory:
    """What is remembered of one unit. A full disk is reported and otherwise without effect.

    Without the record a later supervisor would not find the process, but a server that does not
    come back is worse.
    """

    def __init__(self, paths: Paths, unit: str, say: Callable[[str], None]) -> None:
        self._paths = paths
        self._unit = unit
        self._say = say
        self._record: UnitRecord | None = None

    @property
    def is_restarting(self) -> bool:
        """Whether the unit is down only to be started again."""
        return self._record is not None and self._record.intent is Intent.RESTARTING

    def take_over(self, record: UnitRecord) -> None:
        """Go on with what an earlier supervisor remembered."""
        self._record = record

    def remember(
        self, pid: int, *, invocation_id: str, n_restarts: int, active_since_s: float
    ) -> None:
        """A process that is about to be executed."""
        stat = process_stat(pid)
        self._write(
            UnitRecord(
                unit=self._unit,
                pid=pid,
                start_ticks=stat.start_ticks if stat is not None else 0,
                boot=current_boot(),
                invocation_id=invocation_id,
                n_restarts=n_restarts,
                active_since_s=active_since_s,
            )
        )

    def intend(self, intent: Intent) -> None:
        """What the supervisor has in mind from now on."""
        if self._record is not None and self._record.intent is not intent:
            self._write(replace(self._record, intent=intent))

    def forget(self) -> None:
        """The unit is down, and nothing of it is planned."""
        self._record = None
        forget(self._paths, self._unit)

    def _write(self, record: UnitRecord) -> None:
        self._record = record
        try:
            write_record(self._paths, record)
        except OSError as error:
            self._say(f"{self._unit}: cannot be remembered: {error}")


def recorded_units(paths: Paths) -> tuple[str, ...]:
    """Units of which something is remembered."""
    found = (paths.state_dir / _FOLDER).glob(f"*.service{_SUFFIX}")
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in found))


def _path(paths: Paths, unit: str) -> Path:
    return paths.state_dir / _FOLDER / f"{unit}{_SUFFIX}"
