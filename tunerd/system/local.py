"""The service manager of machines without systemd: a client of tunerd's own supervisor."""

from __future__ import annotations

import os
import shutil
import signal as signals
from collections.abc import Mapping
from typing import Any

from tunerd.core.exec_start import parse_exec
from tunerd.core.host import Mode
from tunerd.core.lease import LeaseSpec
from tunerd.core.local_service import complaints_about, left_out
from tunerd.core.paths import Paths
from tunerd.core.service import UnitState
from tunerd.core.systemctl_text import STATE_PROPERTIES, to_unit_state
from tunerd.core.unit_file import parse_unit
from tunerd.core.unit_log import LogSpan
from tunerd.errors import HostError, NoSupervisor, ServiceError
from tunerd.system import supervisor_wire as wire
from tunerd.system.clock import SystemClock
from tunerd.system.files import Files
from tunerd.system.process import SEARCH_PATH
from tunerd.system.seams import Clock, Lease
from tunerd.system.supervisor_start import ensure_supervisor
from tunerd.system.unit_definition import UnitDefinition
from tunerd.system.unit_log_file import UnitLog
from tunerd.system.unit_record import read_record
from tunerd.system.unit_source import check_name, enabled_mark, unit_names

_QUERY_TIMEOUT_S = 15.0
_PER_SECOND = 1_000_000


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
            shown = self._ask({"op": "show", "unit": unit})["properties"]
        except NoSupervisor:
            shown = self._remembered(check_name(unit))
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

    def service_units(self) -> tuple[str, ...]:
        """Names of all units that have a file or run."""
        try:
            return tuple(self._ask({"op": "list"})["units"])
        except NoSupervisor:
            return unit_names(self._paths)

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """What systemd would complain about, and a program that is not there."""
        found = complaints_about(check_name(unit), text)
        return found or _missing_program(unit, text)

    def left_out(self, text: str) -> tuple[str, ...]:
        """Directives of a unit that only systemd can honour, by name."""
        return left_out(parse_unit(text))

    # Changing

    def check_ready(self) -> None:
        """A supervisor answers, or one may be started and has a folder for its socket."""
        try:
            self._ask({"op": "ping"})
        except NoSupervisor:
            if not self._may_start:
                raise
            self._check_runtime_dir()

    def _check_runtime_dir(self) -> None:
        folder = self._paths.runtime_dir
        hint = "XDG_RUNTIME_DIR must be a folder of yours, or TUNERD_RUNTIME_DIR name one"
        try:
            wire.make_private_folder(folder)
        except HostError as error:
            raise ServiceError(
                "tunerd's supervisor cannot be started",
                cause=f"{error.message}: {error.cause}" if error.cause else error.message,
                hint=error.hint or hint,
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ServiceError(
                "tunerd's supervisor cannot be started", cause=f"cannot write {folder}", hint=hint
            )

    def reload(self) -> None:
        """Make the supervisor read the unit files again."""
        self._change({"op": "reload"})

    def start(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start and wait until its program is executed."""
        self._change({"op": "start", "unit": unit}, timeout_s)

    def stop(self, unit: str, *, timeout_s: float = 120.0) -> None:
        """Stop and wait until nothing of it runs."""
        self._change({"op": "stop", "unit": unit}, timeout_s)

    def restart(self, unit: str, *, timeout_s: float = 180.0) -> None:
        """Stop if needed, and start."""
        self._change({"op": "restart", "unit": unit}, timeout_s)

    def kill(self, unit: str, signal: str, *, whom: str = "all") -> None:
        """Send a signal, by name without SIG, to `all` processes of the unit or to its `main` one."""
        number = int(signals.Signals[f"SIG{signal}"])
        self._change({"op": "kill", "unit": unit, "signal": number, "only_main": whom == "main"})

    def reset_failed(self, unit: str) -> None:
        """Forget failures and start counters."""
        self._change({"op": "reset-failed", "unit": unit})

    def enable(self, unit: str) -> None:
        """Make the unit start whenever the supervisor does."""
        definition = UnitDefinition(check_name(unit), self._paths)
        if not definition.demand().can_be_enabled:
            raise ServiceError(
                f"{unit} cannot be enabled", hint="its [Install] section needs WantedBy="
            )
        self._write(lambda: Files().write(enabled_mark(self._paths, unit), b""))

    def disable(self, unit: str) -> None:
        """Make the unit not start with the supervisor."""
        self._write(lambda: Files().remove(enabled_mark(self._paths, check_name(unit))))

    def start_bound(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start a unit that is bound to a lease."""
        self.start(unit, timeout_s=timeout_s)

    def lease(self, spec: LeaseSpec, *, timeout_s: float = 120.0) -> Lease:
        """Stop production and hold its place; see ServiceManager."""
        from tunerd.system.local_lease import take_lease  # most calls need none

        try:
            return take_lease(self, self._paths.runtime_dir, spec, timeout_s=timeout_s)
        except NoSupervisor:
            if not self._may_start:
                raise
            self.ensure_supervisor()
            return take_lease(self, self._paths.runtime_dir, spec, timeout_s=timeout_s)

    def ensure_supervisor(self) -> None:
        """Start the supervisor if none runs.

        Raises:
            ServiceError: It does not start.
        """
        ensure_supervisor(self._paths, self._environment)

    def tell(self, message: Mapping[str, Any]) -> None:
        """One request to the supervisor that runs; for its leases."""
        self._ask(message)

    # Below

    def _change(self, message: Mapping[str, Any], timeout_s: float = _QUERY_TIMEOUT_S) -> None:
        try:
            self._ask(message, timeout_s)
        except NoSupervisor:
            if not self._may_start:
                raise
            self.ensure_supervisor()
            self._ask(message, timeout_s)

    def _ask(
        self, message: Mapping[str, Any], timeout_s: float = _QUERY_TIMEOUT_S
    ) -> dict[str, Any]:
        return wire.request(self._paths.runtime_dir, message, timeout_s=timeout_s)

    def _write(self, write: Any) -> None:
        try:
            write()
        except HostError as error:
            raise ServiceError(error.message, cause=error.cause, hint=error.hint) from error

    def _remembered(self, unit: str) -> dict[str, str]:
        """What files tell while no supervisor runs."""
        shown = UnitDefinition(unit, self._paths).properties()
        record = read_record(self._paths, unit)
        if record is None or not record.is_alive:
            return {**shown, "ActiveState": "inactive", "SubState": "dead", "Result": "success"}
        boot_s = self._clock.now_s() - self._clock.monotonic_s()
        return {
            **shown,
            "ActiveState": "active",
            "SubState": "running",
            "Result": "success",
            "MainPID": str(record.pid),
            "NRestarts": str(record.n_restarts),
            "InvocationID": record.invocation_id,
            "ActiveEnterTimestampMonotonic": str(
                int((record.active_since_s - boot_s) * _PER_SECOND)
            ),
        }


def _missing_program(unit: str, text: str) -> tuple[str, ...]:
    command = parse_unit(text).value("Service", "ExecStart") or ""
    program = parse_exec(command, {}, {}).path
    if "%" in program or shutil.which(program, path=SEARCH_PATH) is not None:
        return ()
    return (f"{unit}: command is not executable: {program}",)
