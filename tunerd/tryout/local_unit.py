"""One unit under tunerd's own supervisor: its process, and what happens when that ends.

Times are monotonic.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from tunerd.errors import HostError, ServiceError
from tunerd.machine.clock import Clock
from tunerd.machine.proc import members, process_stat
from tunerd.machine.process import MINIMAL_ENVIRONMENT, Child, Limits, Setting, User, start
from tunerd.paths import Paths
from tunerd.tryout.local_service import (
    EXIT_CODE,
    EXIT_EXEC,
    START_LIMIT_HIT,
    SUCCESS,
    Ending,
    ServiceSpec,
    StartLimit,
    result_of,
    should_restart,
)
from tunerd.tryout.local_state import (
    UnitLog,
    UnitRecord,
    current_boot,
    forget,
    passed_on,
    read_definition,
    unit_properties,
    write_record,
)

_SWEEP_S = 0.05
# The longest that nobody looks: processes that were taken over may have nothing that rings.
_NAP_S = 0.5
_PER_SECOND = 1_000_000


class Bell:
    """Wakes everybody who waits for something to become true; whoever changes something rings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Something changed."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def until(self, holds: Callable[[], bool], *, by_s: float = float("inf")) -> None:
        """Return when it holds, or at `by_s`."""
        while not holds() and (left_s := by_s - self._clock.monotonic_s()) > 0:
            with contextlib.suppress(TimeoutError):
                # `wait_for` of Python 3.11 loses a cancellation that comes together with the ring.
                async with asyncio.timeout(min(_NAP_S, left_s)):
                    await self._rung.wait()


class Phase(Enum):
    """Where a unit is, with systemd's names for it: active state and sub state."""

    DEAD = ("inactive", "dead")
    FAILED = ("failed", "failed")
    RUNNING = ("active", "running")
    STOPPING = ("deactivating", "stop-sigterm")
    KILLING = ("deactivating", "stop-sigkill")
    WAITING = ("activating", "auto-restart")

    @property
    def is_down(self) -> bool:
        """Whether nothing runs and nothing is planned."""
        return self in {Phase.DEAD, Phase.FAILED}


@dataclass(frozen=True, slots=True)
class _Main:
    """The main process: our child, or one that an earlier supervisor started."""

    pid: int
    record: UnitRecord
    child: Child | None = None

    def has_ended(self) -> bool:
        """Whether it ended; a child's pid stays its own until `ending`."""
        return not self.record.is_alive if self.child is None else self.child.has_ended()

    def ending(self) -> Ending:
        """How it ended, once it has: that of another's child is told to nobody."""
        if self.child is None or not self.child.has_ended():
            return Ending()
        ended = self.child.reap()
        return Ending(ended.code, ended.signal)


class LocalUnit:
    """A unit and its process."""

    def __init__(
        self,
        name: str,
        paths: Paths,
        clock: Clock,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        bell: Bell,
    ) -> None:
        self.name = name
        self.phase = Phase.DEAD
        self.log = UnitLog(paths, name)
        self._paths = paths
        self._clock = clock
        self._environment = environment
        self._say = say
        self._bell = bell
        self._spec = read_definition(paths, name).spec
        self._main: _Main | None = None
        self._life: asyncio.Task[None] | None = None
        self._record: UnitRecord | None = None
        self._ending = Ending()
        self._result = SUCCESS
        self._limit = StartLimit()
        self._n_restarts = 0
        self._invocation_id = ""
        self._entered_s = 0.0
        self._stop_requested = False
        self._timed_out = False
        self._kill_at_s = float("inf")
        # A supervisor that was killed in the middle of a restart leaves the second half to us.
        self._restarts_regardless = False

    @property
    def may_be_forgotten(self) -> bool:
        """Whether nothing is known of it that its files do not say."""
        return self.phase is Phase.DEAD and self._result == SUCCESS and self._limit == StartLimit()

    @property
    def bound_to(self) -> str | None:
        """The unit without which it must not run."""
        return self._spec.bound_to if self._spec is not None else None

    @property
    def outlives_failure(self) -> bool:
        """Whether its policy is to come back after a failure."""
        return self._spec is not None and should_restart(self._spec.restart, EXIT_CODE)

    @property
    def main_pid(self) -> int | None:
        """The main process, until its end was counted."""
        return self._main.pid if self._main is not None else None

    # Wishes

    def start(self) -> None:
        """Start it now; it must be down.

        Raises:
            ServiceError: It cannot be started, or did not get as far as its program.
        """
        self._n_restarts = 0
        try:
            self._begin()
        finally:
            if not self.phase.is_down:
                self._life = asyncio.create_task(self._live())

    async def stop(self, *, comes_back: bool = False) -> None:
        """Stop it and all that came of it.

        Args:
            comes_back: Whether it is to be started again then, by a later supervisor if need be.
        """
        self._restarts_regardless = False
        if self.phase is Phase.WAITING and self._life is not None:
            self._life.cancel()
            self._enter(Phase.DEAD)
        elif not self.phase.is_down:
            self._stop_requested = True
            self._intend("restarting" if comes_back else "running")
        if self.phase is Phase.RUNNING and self._main is not None:
            self._note("Stopping")
            self._kill_at_s = self._clock.monotonic_s() + self._timeout_stop_s
            self._enter(Phase.STOPPING)
            _send(self._main.pid, signal.SIGTERM)
        await self._bell.until(lambda: self.phase.is_down)
        if not comes_back:
            self._forget()

    def reset_failed(self) -> None:
        """Forget failures and counters."""
        self._limit = StartLimit()
        self._n_restarts = 0
        if self.phase.is_down:
            self._enter(Phase.DEAD)
            self._result, self._ending, self._invocation_id = SUCCESS, Ending(), ""

    def adopt(self, record: UnitRecord) -> None:
        """Take over a process that an earlier supervisor started."""
        self._record = record
        self._main = _Main(record.pid, record)
        self._restarts_regardless = record.intent == "restarting"
        self._invocation_id = record.invocation_id
        self._n_restarts = record.n_restarts
        boot_s = self._clock.now_s() - self._clock.monotonic_s()
        self._entered_s = record.active_since_s - boot_s
        self._enter(Phase.RUNNING)
        self._note(f"Taken over by a new supervisor, pid {record.pid}")
        self._life = asyncio.create_task(self._live())

    def sweep_remains(self, record: UnitRecord) -> None:
        """Kill what is left of a unit whose main process ended while nobody watched."""
        self._invocation_id = record.invocation_id
        for pid in self._members(record.pid):
            _send(pid, signal.SIGKILL)
        self._forget()

    def properties(self) -> dict[str, str]:
        """The unit as `systemctl show` would print it."""
        active_state, sub_state = self.phase.value
        return {
            **unit_properties(self._paths, self.name),
            "ActiveState": active_state,
            "SubState": sub_state,
            "Result": self._result,
            "MainPID": str(self.main_pid or 0),
            **self._ending.to_properties(),
            "NRestarts": str(self._n_restarts),
            "InvocationID": self._invocation_id,
            "StopRequested": "yes" if self._stop_requested else "no",
            "ActiveEnterTimestampMonotonic": str(int(self._entered_s * _PER_SECOND)),
        }

    # Its life

    async def _live(self) -> None:
        """From a start to the end of all that came of it, as often as it is started again."""
        while not self.phase.is_down:
            if self.phase is not Phase.WAITING:
                await self._end_of_main()
                self._finish()
                continue
            await asyncio.sleep(self._spec.restart_s if self._spec is not None else 0.0)
            self._n_restarts += 1
            with contextlib.suppress(ServiceError):  # noted, and seen in the unit's state
                self._begin()

    def _begin(self) -> None:
        try:
            spec = read_definition(self._paths, self.name).demand()
        except ServiceError as error:
            if self.phase is Phase.WAITING:
                self._fail(self._result, error.message)
            raise
        self._limit, is_allowed = self._limit.after_start(
            self._clock.monotonic_s(),
            interval_s=spec.start_limit_interval_s,
            burst=spec.start_limit_burst,
        )
        if not is_allowed:
            self._fail(START_LIMIT_HIT, "Start request repeated too quickly")
            raise ServiceError(
                f"{self.name} was started too often",
                cause=START_LIMIT_HIT,
                hint="`reset-failed` lets it be started again",
            )
        self._spec, self._invocation_id = spec, uuid.uuid4().hex
        self._result, self._ending = SUCCESS, Ending()
        self._stop_requested = self._restarts_regardless = False
        self._kill_at_s = float("inf")
        log = self.log.open()
        try:
            child = self._execute(spec, log)
        except HostError as error:
            self._ending = Ending(code=EXIT_EXEC)
            cause = f"{error.message}: {error.cause}" if error.cause else error.message
            self._note(f"Failed at start: {cause}")
            self._settle(EXIT_CODE)
            raise ServiceError(f"{self.name} did not start", cause=cause) from error
        finally:
            os.close(log)
        if self._record is None:
            raise AssertionError("its start is remembered")
        self._main = _Main(child.pid, self._record, child)
        self._entered_s = self._clock.monotonic_s()
        self._enter(Phase.RUNNING)
        self._intend("running")

    def _execute(self, spec: ServiceSpec, log: int) -> Child:
        user = None
        if spec.user is not None or spec.group is not None:
            user = User.named(spec.user or str(os.getuid()), group=spec.group)
            if (user.uid, user.gid) == (os.getuid(), os.getgid()):
                user = None
        if user is not None and os.geteuid() != 0:
            raise HostError(f"only root can run it as {spec.user or spec.group}")
        environment = {**MINIMAL_ENVIRONMENT, **passed_on(self._environment)}
        if user is not None and user.name is not None:
            environment |= {"HOME": user.home or "/", "USER": user.name, "LOGNAME": user.name}
        environment |= {**spec.environment, "INVOCATION_ID": self._invocation_id}
        folder = Path(spec.work_dir)
        setting = Setting(
            env=environment,
            cwd=folder if folder.is_dir() else Path("/"),
            user=user,
            limits=Limits(n_files=spec.n_files, memlock_bytes=spec.memlock_bytes),
            umask=spec.umask,
            no_new_privs=spec.no_new_privileges,
            on_spawn=self._remember,
        )
        program = shutil.which(spec.program, path=MINIMAL_ENVIRONMENT["PATH"]) or spec.program
        return start(spec.argv, setting, log=log, program=program)

    async def _end_of_main(self) -> None:
        """Wait for the end of the main process, and see that nothing is left of it."""
        main = self._main
        if main is None:
            return
        await self._bell.until(
            lambda: main.has_ended() or self._clock.monotonic_s() >= self._kill_at_s
        )
        self._timed_out = not main.has_ended()
        if self._timed_out:
            self._note("Did not stop in time, killing")
        self._enter(Phase.KILLING)
        give_up_s = self._clock.monotonic_s() + self._timeout_stop_s
        while remains := self._members(main.pid):
            if self._clock.monotonic_s() >= give_up_s:  # stuck in a driver: as systemd does
                self._note(f"Still there after SIGKILL, given up: {remains}")
                return
            for pid in remains:
                _send(pid, signal.SIGKILL)
            await asyncio.sleep(_SWEEP_S)

    def _finish(self) -> None:
        """Nothing of it runs any more."""
        main, self._main = self._main, None
        self._ending = main.ending() if main is not None else Ending()
        self._note(f"Main process ended: {self._ending.text}")
        # Nobody sees how a process ends that was taken over; when it was asked to, that is success.
        is_unseen = self._ending == Ending() and not self._timed_out
        result = result_of(self._ending, timed_out=self._timed_out)
        self._settle(SUCCESS if self._stop_requested and is_unseen else result)

    def _settle(self, result: str) -> None:
        """What becomes of it with this result."""
        self._result = result
        spec = self._spec
        restarts = spec is not None and should_restart(spec.restart, result)
        if not self._stop_requested and (restarts or self._restarts_regardless):
            self._intend("restarting")
            self._enter(Phase.WAITING)
        elif result != SUCCESS:
            self._fail(result, f"Failed with result '{result}'")
        else:
            self._forget_if_over()
            self._enter(Phase.DEAD)

    def _fail(self, result: str, text: str) -> None:
        self._result = result
        self._forget_if_over()
        self._note(text)
        self._enter(Phase.FAILED)

    # Below

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._bell.ring()

    @property
    def _timeout_stop_s(self) -> float:
        return self._spec.timeout_stop_s if self._spec is not None else 90.0

    def _members(self, session: int) -> tuple[int, ...]:
        variable = ("INVOCATION_ID", self._invocation_id)
        return members(session=session, ancestor=session, variable=variable)

    def _note(self, text: str) -> None:
        self._say(f"{self.name}: {text}")
        if self._invocation_id:
            self.log.note(self._clock, self._invocation_id, text)

    # What a later supervisor finds. A full disk is reported and otherwise without effect: without the
    # record it would not find the process, but a server that does not come back is worse.

    def _remember(self, pid: int) -> None:
        # Before anything is executed, so that all it prints stands behind this line.
        self._note(f"Starting, pid {pid}")
        stat = process_stat(pid)
        self._write(
            UnitRecord(
                unit=self.name,
                pid=pid,
                start_ticks=stat.start_ticks if stat is not None else 0,
                boot=current_boot(),
                invocation_id=self._invocation_id,
                n_restarts=self._n_restarts,
                active_since_s=self._clock.now_s(),
            )
        )

    def _intend(self, intent: str) -> None:
        if self._record is not None and self._record.intent != intent:
            self._write(replace(self._record, intent=intent))

    def _forget_if_over(self) -> None:
        if self._record is None or not (
            self._stop_requested and self._record.intent == "restarting"
        ):
            self._forget()

    def _forget(self) -> None:
        self._record = None
        forget(self._paths, self.name)

    def _write(self, record: UnitRecord) -> None:
        self._record = record
        try:
            write_record(self._paths, record)
        except OSError as error:
            self._say(f"{self.name}: cannot be remembered: {error}")


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
