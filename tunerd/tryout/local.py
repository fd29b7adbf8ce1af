"""The service manager of machines without systemd: a client of tunerd's own supervisor, and what both keep in files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tunerd
from tunerd.errors import ConfigError, HostError, JobCanceled, NoSupervisor, ServiceError
from tunerd.machine import process
from tunerd.machine.clock import Clock, SystemClock, polls
from tunerd.machine.files import Files, keep_newest
from tunerd.paths import Paths
from tunerd.tryout.local_service import ServiceSpec, complaints_about, read_service
from tunerd.units.manager import (
    RESTART_S,
    STOP_S,
    LeaseSpec,
    LogSpan,
    UnitState,
    log_lines,
    log_span,
    mark,
)
from tunerd.units.systemd import STATE_PROPERTIES, to_unit_state
from tunerd.units.text import parse_unit, transient_text

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
    with contextlib.suppress(
        FileNotFoundError
    ):  # one look: a supervisor that ends takes its socket away
        if not stat.S_ISSOCK(path.lstat().st_mode):  # a link may lead in a circle
            raise HostError(
                problem,
                cause=f"`{path}` is not a socket, and is where its socket belongs",
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
        stat = process.process_stat(self.pid) if self.boot == current_boot() else None
        return stat is not None and stat.is_alive and stat.start_ticks == self.start_ticks


def current_boot() -> str:
    """The name of this boot; empty where the kernel does not tell."""
    return process.boot_id() or ""


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
    found = (path for path in paths.log_dir.glob("*") if is_passing(path.name.partition(".log")[0]))
    keep_newest(found, keep)


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


_QUERY_TIMEOUT_S = 15.0
_START_TIMEOUT_S = 30.0
_RIVAL_TIMEOUT_S = 5.0
_POLL_S = 0.05


class Local:
    """A ServiceManager.

    Without a supervisor everything can still be read; what runs is then known from what the last
    one remembered. What changes something starts one if `may_start`.

    Raises:
        NoSupervisor: From calls that change something: there is none, and none may be started.
        ServiceError: The supervisor refused, or did not answer in time.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        may_start: bool = False,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.unit_dir = paths.unit_dir
        self.runtime_unit_dir = paths.runtime_unit_dir
        self._paths = paths
        self._may_start = may_start
        self._environment = os.environ if environment is None else environment
        self._clock: Clock = clock or SystemClock()

    # Reading

    def state(self, unit: str) -> UnitState:
        """How the unit is now."""
        boot_s = self._clock.now_s() - self._clock.monotonic_s()
        return to_unit_state(unit, self.properties(unit, *STATE_PROPERTIES), boot_s=boot_s)

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        """Raw properties; the supervisor knows those of `UnitState` and a few more."""
        try:
            shown = self.ask({"op": "show", "unit": unit})["properties"]
        except NoSupervisor:
            record = read_record(self._paths, check_name(unit))
            phase = ("active", "running") if record.is_alive else ("inactive", "dead")
            shown = properties_of(self._paths, self._clock, record, *phase)
        return {name: str(shown[name]) for name in names if name in shown}

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """The newest lines of the unit, with what the supervisor said of it."""
        log = UnitLog(self._paths, check_name(unit))
        return log.lines(invocation_id=invocation_id, max_lines=max_lines)

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """What the unit wrote since then, by whole lives of its server."""
        return UnitLog(self._paths, check_name(unit)).span(since_s, max_lines=max_lines)

    def was_stopped(self, unit: str, invocation_id: str) -> bool:
        """Whether the supervisor was asked to stop this invocation."""
        shown = self.properties(unit, "InvocationID", "StopRequested")
        return (shown.get("InvocationID"), shown.get("StopRequested")) == (invocation_id, "yes")

    def ended_well(self, unit: str, invocation_id: str) -> bool:
        """Never known."""
        del unit, invocation_id
        return False

    def service_units(self) -> tuple[str, ...]:
        """Names of all units that have a file or run."""
        try:
            return tuple(self.ask({"op": "list"})["units"])
        except NoSupervisor:
            return unit_names(self._paths)

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """Why the supervisor could not run it."""
        found = complaints_about(check_name(unit), text)
        if not found:
            program = read_service(unit, parse_unit(text)).program
            if shutil.which(program, path=process.SEARCH_PATH) is None:
                found = (f"{unit}: command is not executable: {program}",)
        return found

    # Changing

    def check_ready(self) -> None:
        """A supervisor answers, or one may be started and has a folder for its socket."""
        try:
            self.ask({"op": "ping"})
        except NoSupervisor:
            if not self._may_start:
                raise
            with _told_as_service_error():
                make_place_for_socket(self._paths.runtime_dir)

    def reload(self) -> None:
        """See that there is a supervisor: it reads a unit's file at each start."""
        self._change("ping")

    def run_transient(
        self,
        unit: str,
        argv: Sequence[str],
        properties: Sequence[tuple[str, str]] = (),
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> None:
        """Start `argv` as a unit whose file stands where a reboot forgets it."""
        text = transient_text(argv, properties, environment or {})
        Files().make_folder(self.runtime_unit_dir)
        Files().write(self.runtime_unit_dir / unit, text.encode(), mode=0o600)
        self.start(unit, timeout_s=timeout_s)

    def start(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start and wait until its program is executed."""
        self._change("start", timeout_s, unit=unit)

    def start_bound(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start a unit that is bound to a lease."""
        self.start(unit, timeout_s=timeout_s)

    def stop(self, unit: str, *, timeout_s: float = STOP_S) -> None:
        """Stop and wait until nothing of it runs."""
        self._change("stop", timeout_s, unit=unit)

    def restart(self, unit: str, *, timeout_s: float = RESTART_S) -> None:
        """Stop if needed, and start."""
        self._change("restart", timeout_s, unit=unit)

    def reset_failed(self, unit: str) -> None:
        """Forget failures and start counters."""
        self._change("reset-failed", unit=unit)

    def enable(self, unit: str) -> None:
        """Make the unit start whenever the supervisor does."""
        if not read_definition(self._paths, check_name(unit)).can_be_enabled:
            hint = "its [Install] section needs WantedBy="
            raise ServiceError(f"{unit} cannot be enabled", hint=hint)
        with _told_as_service_error():
            Files().write(enabled_mark(self._paths, unit), b"")

    def disable(self, unit: str) -> None:
        """Make the unit not start with the supervisor."""
        with _told_as_service_error():
            Files().remove(enabled_mark(self._paths, check_name(unit)))

    def lease(self, spec: LeaseSpec, *, timeout_s: float = STOP_S) -> LocalLease:
        """Stop production and hold its place; see ServiceManager."""
        channel = _new_channel()
        wanted: dict[str, Any] = {"unit": spec.unit, "production": spec.production}
        wanted |= {"restores": spec.restores, "limit_s": spec.limit_s}
        try:
            self._change("lease", timeout_s, channel, **wanted)
        except BaseException:
            channel.close()
            raise
        channel.setblocking(False)
        return LocalLease(spec, self, channel)

    def ensure_supervisor(self) -> None:
        """Start a supervisor that outlives this process, unless one answers already.

        Raises:
            NoSupervisor: It does not start.
            ServiceError: It does not answer.
        """
        # The package may not be installed where the interpreter looks.
        found_at = str(Path(tunerd.__file__).parents[1])
        given = passed_on(self._environment)
        setting = process.Setting(
            {**process.MINIMAL_ENVIRONMENT, **given, "PYTHONPATH": found_at}, Path("/")
        )
        folders = json.dumps({name: str(path) for name, path in asdict(self._paths).items()})
        argv = [sys.executable, "-P", "-m", "tunerd.tryout.supervisor", folders]
        log = UnitLog(self._paths, "supervise")
        target = log.open()
        try:
            with _told_as_service_error(), process.start(argv, setting, log=target) as child:
                child.wait(_START_TIMEOUT_S)
        finally:
            os.close(target)
        said = ""
        for _ in polls(self._clock, _RIVAL_TIMEOUT_S, every_s=_POLL_S):
            with contextlib.suppress(NoSupervisor):
                self.ask({"op": "ping"})
                return
            said = "".join(log.lines(invocation_id=None, max_lines=1))
            if "already runs" not in said:
                break  # else another one was faster: it holds the lock, and answers in a moment
        hint = f"its log is {log.path}"
        raise NoSupervisor("tunerd's supervisor does not start", cause=said or None, hint=hint)

    # Below

    def _change(
        self,
        verb: str,
        timeout_s: float = _QUERY_TIMEOUT_S,
        channel: socket.socket | None = None,
        **wanted: Any,
    ) -> None:
        message = {"op": verb, **wanted}
        try:
            self.ask(message, timeout_s, channel)
        except NoSupervisor:
            if not self._may_start:
                raise
            self.ensure_supervisor()
            self.ask(message, timeout_s, channel)

    def ask(
        self,
        message: Mapping[str, Any],
        timeout_s: float = _QUERY_TIMEOUT_S,
        channel: socket.socket | None = None,
    ) -> dict[str, Any]:
        """One request to the supervisor that runs, and its answer; on `channel` if that is to stay."""
        if channel is None:
            with _new_channel() as passing:
                return self.ask(message, timeout_s, passing)
        line = json.dumps({"version": VERSION, **message}).encode() + b"\n"
        try:
            channel.settimeout(timeout_s)
            with reachable(self._paths.runtime_dir) as name:
                channel.connect(name)
            channel.sendall(line)
            with channel.makefile("rb") as lines:
                return _result(lines.readline())
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoSupervisor(
                "tunerd's supervisor does not run",
                hint="`tunerd apply` starts it, and so does `tunerd supervise`",
            ) from error
        except TimeoutError as error:
            raise ServiceError(
                f"{message['op']} did not finish within {timeout_s:.0f} s",
                hint="the supervisor keeps working on it",
            ) from error
        except OSError as error:
            raise ServiceError("tunerd's supervisor cannot be reached", cause=str(error)) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ServiceError("tunerd's supervisor answers garbage", cause=str(error)) from error


@dataclass(frozen=True, slots=True)
class LocalLease:
    """A Lease: a connection. When it drops, production comes back. Nothing keeps the machine awake."""

    spec: LeaseSpec
    manager: Local
    channel: socket.socket
    inhibits: str | None = None

    def is_held(self) -> bool:
        """Whether the supervisor still holds the other end, and has not begun to end it."""
        return self._is_open() and self.manager.state(self.spec.unit).is_active

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Tell the supervisor, which does the waiting; where it is gone, nobody does."""
        host, port = address or (None, None)
        message = {"op": "restore-when-free", "unit": self.spec.unit, "host": host, "port": port}
        with contextlib.suppress(NoSupervisor):
            if self._is_open():
                self.manager.ask(message)

    def end(self, *, timeout_s: float = 120.0) -> None:
        """Ask for the end; where the supervisor is gone, the next one sees to the rest."""
        with contextlib.suppress(NoSupervisor):
            if self._is_open():
                self.manager.stop(self.spec.unit, timeout_s=timeout_s)
        self.channel.close()

    def _is_open(self) -> bool:
        try:
            return bool(self.channel.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False


@contextlib.contextmanager
def _told_as_service_error() -> Iterator[None]:
    try:
        yield
    except HostError as error:
        raise ServiceError(error.message, cause=error.cause, hint=error.hint) from error


def _new_channel() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def _result(answer: bytes) -> dict[str, Any]:
    if not answer.endswith(b"\n"):
        raise ConnectionError("the supervisor ended before it answered")
    data = json.loads(answer)
    if data["ok"]:
        return dict(data["result"])
    error = data["error"]
    kind = JobCanceled if error["code"] == JobCanceled.code else ServiceError
    raise kind(error["message"], cause=error["cause"], hint=error["hint"])
