"""What local mode keeps in files: units, what runs, and the logs; and where its supervisor is reached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tunerd.errors import ConfigError, HostError, ServiceError
from tunerd.machine.clock import Clock
from tunerd.machine.proc import boot_id, process_stat
from tunerd.paths import Paths
from tunerd.tryout.local_service import ServiceSpec, read_service
from tunerd.units.manager import LogSpan, log_lines, log_span, mark
from tunerd.units.text import parse_unit

VERSION = 1
"""Of the protocol: one JSON object in a line, and one answer.

{"version": 1, "op": "start", "unit": "llama-server.service"}
{"version": 1, "ok": true, "result": {}}
{"version": 1, "ok": false, "error": {"code": "service", "message": "...", "cause": null, "hint": null}}
"""
SOCKET_NAME = "supervise.sock"
PID_NAME = "supervise.pid"
MAX_LOG_BYTES = 32 * 1024 * 1024
KEPT_LOGS = 20
_PASSED_ON = ("HOME", "USER", "LOGNAME", "SHELL", "XDG_RUNTIME_DIR",
              "LD_LIBRARY_PATH", "NVIDIA_", "CUDA_")  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9:_\\@-][A-Za-z0-9:_.\\@-]{0,239}\.service")
_ENABLED_SUFFIX = ".wants"
_READ_BYTES = 8 * 1024 * 1024
_COPY_BYTES = 1024 * 1024
_PER_SECOND = 1_000_000
# Fixed, so that rewriting a record needs no new block on a full disk.
_RECORD_BYTES = 1024


def make_place_for_socket(folder: Path) -> None:
    """A folder of ours that nobody else may enter or change, where nothing keeps the socket from being made.

    Raises:
        HostError: It cannot be made or written, belongs to somebody else, or others may write it; or
            something that is no socket has the socket's name.
    """
    problem = "tunerd's supervisor cannot be started"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise HostError(
            problem,
            cause=f"cannot create {folder}: {error.strerror}",
            hint="XDG_RUNTIME_DIR must be a folder of yours, or TUNERD_RUNTIME_DIR name one",
        ) from error
    is_ours = status.st_uid == os.geteuid() and os.access(folder, os.W_OK | os.X_OK)
    if not is_ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HostError(
            problem,
            cause=f"not a private folder: {folder}",
            hint=f"`chmod go-w {folder}`, or name another with TUNERD_RUNTIME_DIR",
        )
    path = folder / SOCKET_NAME
    if path.exists() and not path.is_socket():
        raise HostError(
            problem,
            cause=f"`{path}` is no socket, and lies where its socket is to be",
            hint="move it away, then try again",
        )


@contextlib.contextmanager
def reachable(folder: Path) -> Iterator[str]:
    """A short name for the socket in `folder`: the kernel takes no more than 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What the supervisor gets of its caller's environment, and a server of the supervisor's.

    Of a container's: where its CUDA is, and which GPUs it was given.
    """
    return {name: value for name, value in environment.items() if name.startswith(_PASSED_ON)}


def time_text(clock: Clock) -> str:
    """Now, as it stands in logs."""
    return datetime.fromtimestamp(clock.now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Units


def check_name(unit: object) -> str:
    """`unit`, if it is the name of a service.

    Raises:
        ServiceError: It is none, or would lead out of the folder.
    """
    if not isinstance(unit, str) or not _NAME.fullmatch(unit):
        raise ServiceError(
            f"not the name of a service unit: {unit!r}",
            state="nothing was touched",
            hint="such as llama-server.service",
        )
    return unit


def enabled_mark(paths: Paths, unit: str) -> Path:
    """The file whose presence makes the unit start with the supervisor."""
    return paths.unit_dir / f"{unit}{_ENABLED_SUFFIX}"


def enabled_units(paths: Paths) -> tuple[str, ...]:
    """Units that start with the supervisor."""
    marks = paths.unit_dir.glob(f"*.service{_ENABLED_SUFFIX}")
    return tuple(sorted(mark.name.removesuffix(_ENABLED_SUFFIX) for mark in marks))


def unit_names(paths: Paths) -> tuple[str, ...]:
    """Names of all units that have a file."""
    folders = (paths.unit_dir, paths.runtime_unit_dir)
    found = {path.name for folder in folders for path in folder.glob("*.service")}
    return tuple(sorted(name for name in found if _NAME.fullmatch(name)))


def unit_file(paths: Paths, unit: str) -> Path | None:
    """The unit's file; the durable folder wins over the one that a reboot forgets."""
    found = (folder / unit for folder in (paths.unit_dir, paths.runtime_unit_dir))
    return next((path for path in found if path.is_file()), None)


def read_definition(paths: Paths, unit: str) -> ServiceSpec:
    """The unit as its file says now.

    Raises:
        ServiceError: There is none, or it cannot be started.
    """
    try:
        path = unit_file(paths, unit)
        if path is None:
            raise ServiceError(f"unit {unit} not found")
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        return read_service(unit, parse_unit(text))
    except (ConfigError, OSError, ValueError) as error:
        raise ServiceError(f"unit {unit} does not load", cause=str(error)) from error


# What runs


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """The main process of a unit: `start_ticks` and `boot` tell it from a later one of its pid.

    `intent` is what the supervisor had in mind: `starting`, `running`, or `restarting` for a unit
    that is down, or on its way there, only to be started again.
    """

    unit: str
    pid: int = 0
    start_ticks: int = 0
    boot: str = ""
    invocation_id: str = ""
    n_restarts: int = 0
    active_since_s: float = 0.0
    intent: str = "starting"

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        stat = process_stat(self.pid) if self.boot == current_boot() else None
        return stat is not None and stat.is_alive and stat.start_ticks == self.start_ticks


def current_boot() -> str:
    """The name of this boot; empty where the kernel does not tell."""
    return boot_id() or ""


def properties_of(
    paths: Paths, clock: Clock, record: UnitRecord, active: str, sub: str
) -> dict[str, str]:
    """What its files and its record make of the answer of `systemctl show`."""
    file, load_state = unit_file(paths, record.unit), "loaded"
    try:
        read_definition(paths, record.unit)
    except ServiceError:
        load_state = "bad-setting" if file is not None else "not-found"
    is_enabled = enabled_mark(paths, record.unit).exists()
    active_s = record.active_since_s - (clock.now_s() - clock.monotonic_s())
    return {
        "Id": record.unit,
        "LoadState": load_state,
        "FragmentPath": str(file or ""),
        "NeedDaemonReload": "no",  # it is read at every start
        "UnitFileState": "" if file is None else "enabled" if is_enabled else "disabled",
        "ActiveState": active,
        "SubState": sub,
        "Result": "success",
        "MainPID": str(record.pid if record.is_alive else 0),
        "NRestarts": str(record.n_restarts),
        "InvocationID": record.invocation_id,
        "ActiveEnterTimestampMonotonic": str(int(active_s * _PER_SECOND)),
    }


def _record_path(paths: Paths, unit: str) -> Path:
    return paths.state_dir / "supervise" / f"{unit}.json"


def write_record(paths: Paths, record: UnitRecord) -> None:
    """Remember a process. It is not synced: the process does not outlive the machine either.

    Raises:
        OSError: There is no room for it.
    """
    path = _record_path(paths, record.unit)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(asdict(record)).encode().ljust(_RECORD_BYTES))


def read_record(paths: Paths, unit: str) -> UnitRecord:
    """What is remembered of a unit; one without a process if nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return UnitRecord(**json.loads(_record_path(paths, unit).read_bytes()[:_RECORD_BYTES]))
    return UnitRecord(unit)


def forget(paths: Paths, unit: str) -> None:
    """Remember nothing of a unit."""
    with contextlib.suppress(OSError):
        _record_path(paths, unit).unlink()


def recorded_units(paths: Paths) -> tuple[str, ...]:
    """Units of which something is remembered."""
    found = _record_path(paths, "").parent.glob("*.service.json")
    return tuple(sorted(path.name.removesuffix(".json") for path in found))


# Logs


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
    """The log of one unit, `LOG/UNIT.log`, and one older.

    The server writes into it directly, so it goes on without a supervisor. Nothing here raises but
    for `open`: a server must start on a full disk too.
    """

    def __init__(self, paths: Paths, unit: str, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = paths.log_dir / f"{unit}.log"
        self.older = paths.log_dir / f"{unit}.log.1"
        self._unit = unit
        self._max_bytes = max_bytes

    def open(self) -> int:
        """A descriptor that appends to the log; to nowhere if it cannot be opened.

        Raises:
            OSError: There are no descriptors left.
        """
        self.rotate()
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(self.path, flags, 0o640)
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def note(self, clock: Clock, invocation_id: str, text: str) -> None:
        """Write a mark."""
        line = mark(time_text(clock), invocation_id, text)
        if _tail(self.path, 1) not in {b"", b"\n"}:
            line = "\n" + line
        with contextlib.suppress(OSError), os.fdopen(self.open(), "wb", buffering=0) as file:
            file.write(line.encode("utf-8", "replace"))

    def rotate(self) -> None:
        """Put a log that grew too long aside, even while its server goes on writing.

        The server keeps its descriptor, so the file is copied and emptied. What it writes between
        the last byte copied and the emptying, some microseconds, is lost.
        """
        with contextlib.suppress(OSError), self.path.open("r+b") as source:
            if os.fstat(source.fileno()).st_size > self._max_bytes:
                with self.older.open("wb") as target:
                    shutil.copyfileobj(source, target, _COPY_BYTES)
                source.truncate(0)

    def lines(self, *, invocation_id: str | None, max_lines: int) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        found = log_lines(self._text(), unit=self._unit, invocation_id=invocation_id)
        return found[max(0, len(found) - max_lines) :]

    def span(self, since_s: float, *, max_lines: int) -> LogSpan:
        """What was written since then."""
        return log_span(self._text(), unit=self._unit, since_s=since_s, max_lines=max_lines)

    def _text(self) -> str:
        return (_tail(self.older) + _tail(self.path)).decode("utf-8", "replace")


def _tail(path: Path, max_bytes: int = _READ_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read(max_bytes)
    except OSError:
        return b""
