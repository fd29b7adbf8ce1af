"""One unit under tunerd's own supervisor: its definition, its process, and what happens next.

Times are monotonic. Nothing here waits: `turn` is called when something happened, or when the time
that `due_s` names has come.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from enum import Enum

from tunerd.core.local_outcome import (
    EXIT_CODE,
    START_LIMIT_HIT,
    SUCCESS,
    Ending,
    StartLimit,
    result_of,
    should_restart,
)
from tunerd.core.local_service import DEFAULT_RESTART_S, DEFAULT_TIMEOUT_STOP_S, ServiceSpec
from tunerd.core.paths import Paths
from tunerd.errors import ServiceError
from tunerd.system.main_process import FoundProcess, MainProcess, OwnProcess
from tunerd.system.process import Child
from tunerd.system.process_tree import members
from tunerd.system.seams import Clock
from tunerd.system.unit_definition import UnitDefinition
from tunerd.system.unit_log_file import UnitLog
from tunerd.system.unit_record import Intent, Memory, UnitRecord
from tunerd.system.unit_start import StartFailure, remove_credentials, start_service

_SWEEP_S = 0.05
_ROTATE_S = 60.0
_PER_SECOND = 1_000_000
_EXIT_CODES = {"exited": "1", "killed": "2", "dumped": "3"}


class Phase(Enum):
    """Where a unit is, with systemd's names for it: active state and sub state."""

    DEAD = ("inactive", "dead")
    FAILED = ("failed", "failed")
    RUNNING = ("active", "running")
    STOPPING = ("deactivating", "stop-sigterm")
    KILLING = ("deactivating", "stop-sigkill")
    SWEEPING = ("deactivating", "final-sigterm")
    WAITING = ("activating", "auto-restart")

    @property
    def is_down(self) -> bool:
        """Whether nothing runs and nothing is planned."""
        return self in {Phase.DEAD, Phase.FAILED}


class SupervisedUnit:
    """A unit and its process."""

    def __init__(
        self,
        unit: str,
        paths: Paths,
        clock: Clock,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.unit = unit
        self.phase = Phase.DEAD
        self._paths = paths
        self._clock = clock
        self._environment = environment
        self._say = say
        self._log = UnitLog(paths, unit)
        self._definition = UnitDefinition(unit, paths)
        self._main: MainProcess | None = None
        self._ending: Ending | None = None
        self._result = SUCCESS
        self._limit = StartLimit()
        self._n_restarts = 0
        self._invocation_id: str | None = None
        self._entered_s: float | None = None
        self._stop_requested = False
        self._timed_out = False
        self._restart_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._sweep_at_s: float | None = None
        self._rotate_at_s: float | None = None
        # The session that the last main process led; what it left may still be in it.
        self._session = 0
        self._memory = Memory(paths, unit, say)
        # A supervisor that was killed in the middle of a restart leaves the second half to us.
        self._restarts_regardless = False

    # Definition

    def load(self) -> None:
        """Read the unit's files; what runs is left alone."""
        self._definition.load()
        if self._definition.spec is None and self.phase is Phase.WAITING:
            # As systemd: what has no definition any more is not started again.
            self._restart_at_s, self.phase = None, Phase.FAILED

    @property
    def may_be_forgotten(self) -> bool:
        """Whether nothing is known of it that its files do not say."""
        return self.phase is Phase.DEAD and self._result == SUCCESS and self._limit == StartLimit()

    @property
    def should_outlive_failure(self) -> bool:
        """Whether its policy is to come back after a failure."""
        spec = self._definition.spec
        return spec is not None and should_restart(spec.restart, EXIT_CODE)

    @property
    def bound_to(self) -> str | None:
        """The unit without which it must not run."""
        spec = self._definition.spec
        return spec.file.value("Unit", "BindsTo") if spec is not None else None

    # Wishes

    def start(self) -> None:
        """Start it now, by the definition that `check_startable` found; it must be down.

        Raises:
            ServiceError: It cannot be started, or did not get as far as its program.
        """
        self._n_restarts = 0
        self._begin()

    def stop(self, *, comes_back: bool = False) -> None:
        """Begin to stop it; `phase` says when it is down.

        Args:
            comes_back: Whether it is to be started again then, by a later supervisor if need be.
        """
        self.intend(comes_back=comes_back)
        if self.phase is Phase.WAITING:
            self._restart_at_s, self.phase = None, Phase.DEAD
        elif self.phase is Phase.SWEEPING:
            self._stop_requested = True
        elif self.phase is Phase.RUNNING:
            self._stop_requested = True
            self._note("Stopping")
            self._send(self._kill_signal, only_main=self._kill_mode in {"mixed", "process"})
            self.phase = Phase.STOPPING
            self._kill_at_s = self._clock.monotonic_s() + self._timeout_stop_s
        self.turn()

    def intend(self, *, comes_back: bool) -> None:
        """Remember whether a unit that is stopping is to be started again."""
        self._restarts_regardless = False
        self._memory.intend(Intent.RESTARTING if comes_back else Intent.RUNNING)
        if self.phase is Phase.WAITING and not comes_back:
            self._memory.forget()

    def check_startable(self) -> None:
        """Whether a start would find a definition; that of a unit which is down is read anew.

        Raises:
            ServiceError: There is none.
        """
        if self.phase is Phase.DEAD:
            self.load()
        self._definition.demand()

    def reset_failed(self) -> None:
        """Forget failures and counters."""
        self._limit = StartLimit()
        self._n_restarts = 0
        if self.phase is Phase.FAILED:
            self.phase = Phase.DEAD
        if self.phase is Phase.DEAD:
            self._result, self._ending, self._invocation_id = SUCCESS, None, None

    def kill(self, number: int, *, only_main: bool) -> None:
        """Send a signal to its processes."""
        self._send(number, only_main=only_main)

    def adopt(self, record: UnitRecord) -> None:
        """Take over a process that an earlier supervisor started."""
        self._memory.take_over(record)
        self._restarts_regardless = record.intent is Intent.RESTARTING
        self._main = FoundProcess(record)
        self._invocation_id = record.invocation_id
        self._n_restarts = record.n_restarts
        boot_s = self._clock.now_s() - self._clock.monotonic_s()
        self._entered_s = record.active_since_s - boot_s
        self.phase = Phase.RUNNING
        self._rotate_at_s = self._clock.monotonic_s() + _ROTATE_S
        self._note(f"Taken over by a new supervisor, pid {record.pid}")

    def sweep_remains(self, record: UnitRecord) -> None:
        """Kill what is left of a unit whose main process ended while nobody watched."""
        self._invocation_id = record.invocation_id
        for pid in self._members(record.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._memory.forget()

    # What happens

    @property
    def main_pid(self) -> int | None:
        """The main process, until its end was noticed."""
        return self._main.pid if self._main is not None else None

    def due_s(self) -> float | None:
        """When `turn` is wanted next, even if nothing happens."""
        times = (self._restart_at_s, self._kill_at_s, self._sweep_at_s, self._rotate_at_s)
        return min((time for time in times if time is not None), default=None)

    def turn(self) -> None:
        """Go on as far as things are."""
        now_s = self._clock.monotonic_s()
        if self._rotate_at_s is not None and now_s >= self._rotate_at_s:
            self._log.rotate()
            self._rotate_at_s = now_s + _ROTATE_S
        if self._main is not None and self._main.has_ended():
            self._after_main()
        if self.phase is Phase.STOPPING and _is_past(self._kill_at_s, now_s):
            self._note("Did not stop in time, killing")
            self._begin_killing(now_s)
        if self.phase in {Phase.KILLING, Phase.SWEEPING} and _is_past(self._sweep_at_s, now_s):
            self._sweep(now_s)
        if self.phase is Phase.WAITING and _is_past(self._restart_at_s, now_s):
            self._restart_at_s = None
            self._n_restarts += 1
            with contextlib.suppress(ServiceError):  # noted, and seen in the unit's state
                self._begin()

    def properties(self) -> dict[str, str]:
        """The unit as `systemctl show` would print it."""
        ending = self._ending or Ending()
        active_state, sub_state = self.phase.value
        return {
            **self._definition.properties(),
            "ActiveState": active_state,
            "SubState": sub_state,
            "Result": self._result,
            "MainPID": str(self.main_pid or 0),
            "ExecMainCode": _EXIT_CODES.get(ending.kind or "", "0"),
            "ExecMainStatus": str(ending.status or 0),
            "NRestarts": str(self._n_restarts),
            "InvocationID": self._invocation_id or "",
            "ActiveEnterTimestampMonotonic": str(int((self._entered_s or 0) * _PER_SECOND)),
        }

    # Below

    def _begin(self) -> None:
        """Start the program.

        Raises:
            ServiceError: It cannot be started.
        """
        spec = self._definition.demand()
        now_s = self._clock.monotonic_s()
        self._limit, is_allowed = self._limit.after_start(
            now_s, interval_s=spec.start_limit_interval_s, burst=spec.start_limit_burst
        )
        if not is_allowed:
            self._fail(START_LIMIT_HIT, "Start request repeated too quickly")
            raise ServiceError(
                f"{self.unit} was started too often",
                cause=START_LIMIT_HIT,
                hint="`reset-failed` lets it be started again",
            )
        self._invocation_id = uuid.uuid4().hex
        self._result, self._ending = SUCCESS, None
        self._stop_requested = self._timed_out = self._restarts_regardless = False
        if spec.left_out:
            self._say(f"{self.unit}: only systemd can honour {' '.join(spec.left_out)}")
        log = self._log.open()
        try:
            child = start_service(
                spec,
                self._paths,
                invocation_id=self._invocation_id,
                log=log,
                own_environment=self._environment,
                on_spawn=self._remember,
                say=self._note,
            )
        except StartFailure as error:
            self._after_failed_start(spec, error)
            return
        finally:
            os.close(log)
        self._run(child)

    def _run(self, child: Child) -> None:
        self._main = OwnProcess(child)
        self._entered_s = self._clock.monotonic_s()
        self._rotate_at_s = self._entered_s + _ROTATE_S
        self.phase = Phase.RUNNING
        self._memory.intend(Intent.RUNNING)

    def _after_failed_start(self, spec: ServiceSpec, error: StartFailure) -> None:
        self._note(f"Failed at start, status {error.status}: {error.text}")
        self._ending = Ending(code=error.status)
        self._finish()
        if spec.waits_for_exec:
            raise ServiceError(f"{self.unit} did not start", cause=error.text)

    def _remember(self, pid: int) -> None:
        # Before anything is executed, so that all it prints stands behind this line.
        self._note(f"Starting, pid {pid}")
        self._memory.remember(
            pid,
            invocation_id=self._invocation_id or "",
            n_restarts=self._n_restarts,
            active_since_s=self._clock.now_s(),
        )

    def _after_main(self) -> None:
        main = self._main
        if main is None:
            return
        remains = [pid for pid in self._members(main.pid) if pid != main.pid]
        self._ending = main.ending()
        self._main = None
        how = self._ending.kind or "unknown how"
        self._note(f"Main process ended: {how} {self._ending.status or ''}".rstrip())
        if not remains or self._kill_mode in {"process", "none"}:
            self._finish()
            return
        # As systemd does: what the main process left gets the same warning and the same time.
        now_s = self._clock.monotonic_s()
        if self.phase is not Phase.KILLING:
            self.phase = Phase.SWEEPING
            number = signal.SIGKILL if self._kill_mode == "mixed" else self._kill_signal
            self._send_to(remains, number)
            self._kill_at_s = now_s + self._timeout_stop_s
        self._session = main.pid
        self._sweep_at_s = now_s

    def _sweep(self, now_s: float) -> None:
        remains = self._members(self._main.pid if self._main is not None else self._session)
        if not remains and self._main is None:
            self._finish()
            return
        if _is_past(self._kill_at_s, now_s):
            if self.phase is Phase.KILLING:
                self._give_up(remains)
                return
            self._begin_killing(now_s)
        if self.phase is Phase.KILLING:
            only_main = self._kill_mode == "process" and self._main is not None
            self._send_to([self._main.pid] if only_main and self._main else remains, signal.SIGKILL)
        self._sweep_at_s = now_s + _SWEEP_S

    def _begin_killing(self, now_s: float) -> None:
        self._timed_out = True
        self.phase = Phase.KILLING
        self._kill_at_s = now_s + self._timeout_stop_s
        self._sweep_at_s = now_s

    def _give_up(self, remains: tuple[int, ...]) -> None:
        """As systemd does with what even SIGKILL does not end: a process stuck in a driver."""
        self._note(f"Still there after SIGKILL, given up: {', '.join(map(str, remains))}")
        self._main = None  # if it ends after all, it is reaped with the strangers
        self._finish()

    def _finish(self) -> None:
        """Nothing of it runs any more."""
        self._kill_at_s = self._sweep_at_s = self._rotate_at_s = None
        remove_credentials(self._paths, self.unit)
        ending = self._ending or Ending()
        was_seen = ending.kind is not None or not self._stop_requested
        # Nobody sees how a process ends that was taken over; when it was asked to, that is success.
        self._result = (
            result_of(ending, timed_out=self._timed_out) if was_seen or self._timed_out else SUCCESS
        )
        if self._stop_requested and self._memory.is_restarting:
            self.phase = Phase.DEAD if self._result == SUCCESS else Phase.FAILED
        elif not self._stop_requested and self._is_restarted():
            self._wait_for_restart()
        elif self._result == SUCCESS:
            self._memory.forget()
            self.phase = Phase.DEAD
        else:
            self._fail(self._result, f"Failed with result '{self._result}'")

    def _is_restarted(self) -> bool:
        spec = self._definition.spec
        if spec is None:
            return False
        return self._restarts_regardless or should_restart(spec.restart, self._result)

    def _wait_for_restart(self) -> None:
        spec = self._definition.spec
        wait_s = spec.restart_s if spec is not None else DEFAULT_RESTART_S
        self.phase = Phase.WAITING
        self._restart_at_s = self._clock.monotonic_s() + wait_s
        self._memory.intend(Intent.RESTARTING)

    def _fail(self, result: str, text: str) -> None:
        self._result = result
        self.phase = Phase.FAILED
        self._memory.forget()
        self._note(text)

    @property
    def _kill_mode(self) -> str:
        spec = self._definition.spec
        return spec.kill_mode if spec is not None else "control-group"

    @property
    def _kill_signal(self) -> int:
        spec = self._definition.spec
        return spec.kill_signal if spec is not None else signal.SIGTERM

    @property
    def _timeout_stop_s(self) -> float:
        spec = self._definition.spec
        return spec.timeout_stop_s if spec is not None else DEFAULT_TIMEOUT_STOP_S

    def _members(self, session: int) -> tuple[int, ...]:
        variable = ("INVOCATION_ID", self._invocation_id or "")
        return members(session=session, ancestor=session, variable=variable)

    def _send(self, number: int, *, only_main: bool) -> None:
        if self._main is None:
            return
        if only_main:
            self._main.send(number)
        else:
            self._send_to(self._members(self._main.pid), number)

    def _send_to(self, pids: tuple[int, ...] | list[int], number: int) -> None:
        for pid in pids:
            if self._main is not None and pid == self._main.pid:
                self._main.send(number)
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _note(self, text: str) -> None:
        self._say(f"{self.unit}: {text}")
        if self._invocation_id is not None:
            self._log.note(self._clock, self._invocation_id, text)


def _is_past(time_s: float | None, now_s: float) -> bool:
    return time_s is not None and now_s >= time_s
