"""The service manager of machines without systemd: a client of tunerd's own supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tunerd
from tunerd.errors import HostError, JobCanceled, NoSupervisor, ServiceError
from tunerd.machine.clock import Clock, SystemClock, polls
from tunerd.machine.files import Files
from tunerd.machine.process import MINIMAL_ENVIRONMENT, SEARCH_PATH, Setting, start
from tunerd.paths import Paths
from tunerd.tryout import local_state as kept
from tunerd.tryout.local_service import complaints_about, read_service
from tunerd.units.manager import LeaseSpec, LogSpan, UnitState
from tunerd.units.systemd import STATE_PROPERTIES, to_unit_state
from tunerd.units.text import parse_unit, transient_text
from tunerd.words import Mode

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

    mode = Mode.LOCAL

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
            record = kept.read_record(self._paths, kept.check_name(unit))
            phase = ("active", "running") if record.is_alive else ("inactive", "dead")
            shown = kept.properties_of(self._paths, self._clock, record, *phase)
        return {name: str(shown[name]) for name in names if name in shown}

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """The newest lines of the unit, with what the supervisor said of it."""
        log = kept.UnitLog(self._paths, kept.check_name(unit))
        return log.lines(invocation_id=invocation_id, max_lines=max_lines)

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """What the unit wrote since then, by whole lives of its server."""
        log = kept.UnitLog(self._paths, kept.check_name(unit))
        return log.span(since_s, max_lines=max_lines)

    def was_stopped(self, unit: str, invocation_id: str) -> bool:
        """Whether the supervisor was asked to stop this invocation."""
        shown = self.properties(unit, "InvocationID", "StopRequested")
        return (shown.get("InvocationID"), shown.get("StopRequested")) == (invocation_id, "yes")

    def service_units(self) -> tuple[str, ...]:
        """Names of all units that have a file or run."""
        try:
            return tuple(self.ask({"op": "list"})["units"])
        except NoSupervisor:
            return kept.unit_names(self._paths)

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """Why the supervisor could not run it."""
        found = complaints_about(kept.check_name(unit), text)
        if not found:
            program = read_service(unit, parse_unit(text)).program
            if shutil.which(program, path=SEARCH_PATH) is None:
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
                kept.make_place_for_socket(self._paths.runtime_dir)

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

    def stop(self, unit: str, *, timeout_s: float = 120.0) -> None:
        """Stop and wait until nothing of it runs."""
        self._change("stop", timeout_s, unit=unit)

    def restart(self, unit: str, *, timeout_s: float = 180.0) -> None:
        """Stop if needed, and start."""
        self._change("restart", timeout_s, unit=unit)

    def reset_failed(self, unit: str) -> None:
        """Forget failures and start counters."""
        self._change("reset-failed", unit=unit)

    def enable(self, unit: str) -> None:
        """Make the unit start whenever the supervisor does."""
        if not kept.read_definition(self._paths, kept.check_name(unit)).can_be_enabled:
            raise ServiceError(
                f"{unit} cannot be enabled", hint="its [Install] section needs WantedBy="
            )
        with _told_as_service_error():
            Files().write(kept.enabled_mark(self._paths, unit), b"")

    def disable(self, unit: str) -> None:
        """Make the unit not start with the supervisor."""
        with _told_as_service_error():
            Files().remove(kept.enabled_mark(self._paths, kept.check_name(unit)))

    def lease(self, spec: LeaseSpec, *, timeout_s: float = 120.0) -> LocalLease:
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
        passed_on = kept.passed_on(self._environment)
        setting = Setting({**MINIMAL_ENVIRONMENT, **passed_on, "PYTHONPATH": found_at}, Path("/"))
        argv = [sys.executable, "-P", "-m", "tunerd.tryout.supervisor", paths_to_json(self._paths)]
        log = kept.UnitLog(self._paths, "supervise")
        target = log.open()
        try:
            with _told_as_service_error(), start(argv, setting, log=target) as child:
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
        line = json.dumps({"version": kept.VERSION, **message}).encode() + b"\n"
        try:
            channel.settimeout(timeout_s)
            with kept.reachable(self._paths.runtime_dir) as name:
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
                hint="the supervisor goes on with it",
            ) from error
        except OSError as error:
            raise ServiceError("tunerd's supervisor cannot be reached", cause=str(error)) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ServiceError("tunerd's supervisor answered nonsense", cause=str(error)) from error


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


def paths_to_json(paths: Paths) -> str:
    """For a supervisor in a process of its own."""
    return json.dumps({name: str(path) for name, path in asdict(paths).items()})


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
