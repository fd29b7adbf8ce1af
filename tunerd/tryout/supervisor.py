"""tunerd's own service manager for machines without systemd: one process per state folder.

It starts, watches and stops units, and is talked to over a Unix socket. One thread, one loop. When it
is killed its servers go on, since they depend on nothing of it, and the next supervisor takes them
over: a dead man's switch on the parent (PDEATHSIG) would take production down with it. When it is
asked to end it stops its units first. Times are monotonic.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from tunerd.errors import Busy, HostError, JobCanceled, ServiceError, TunerdError
from tunerd.machine.clock import Clock, SystemClock
from tunerd.machine.files import lock
from tunerd.machine.net import can_bind
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
    read_service,
    result_of,
    should_restart,
)
from tunerd.tryout.local_state import (
    PID_NAME,
    SOCKET_NAME,
    VERSION,
    UnitLog,
    UnitRecord,
    check_name,
    current_boot,
    enabled_units,
    forget,
    make_private_folder,
    passed_on,
    reachable,
    read_definition,
    read_record,
    recorded_units,
    unit_names,
    unit_properties,
    write_record,
)
from tunerd.units.manager import PORT_LIMIT_S, is_candidate, lease_of
from tunerd.units.text import parse_unit

_SWEEP_S = 0.05
# The longest that nobody looks: processes that were taken over may have nothing that rings.
_NAP_S = 0.5
_PER_SECOND = 1_000_000
_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 64 * 1024
_IDLE_S = 10.0
_REAP_S = 0.5
_ROTATE_S = 60.0
_MAX_LEASE_S = 31 * 86400.0
_CREDENTIALS = struct.Struct("3i")
# Of a unit that has no text that could be run.
_NOTHING = read_service("", parse_unit("[Service]\nExecStart=/nothing\n"))


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
        self._spec = read_definition(paths, name).spec or _NOTHING
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
        return self._spec.bound_to

    @property
    def outlives_failure(self) -> bool:
        """Whether its policy is to come back after a failure."""
        return should_restart(self._spec.restart, EXIT_CODE)

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
            self._kill_at_s = self._clock.monotonic_s() + self._spec.timeout_stop_s
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
            await asyncio.sleep(self._spec.restart_s)
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
        give_up_s = self._clock.monotonic_s() + self._spec.timeout_stop_s
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
        restarts = should_restart(self._spec.restart, result)
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


@dataclass(slots=True, eq=False)
class _Lease:
    """Production's place, held by whoever is at the other end of a connection.

    `stands` from when production is down until something ends it. Production does not start before
    `address` is free.
    """

    unit: str
    production: str
    restores: bool
    ends_at_s: float
    is_granted: bool = False
    is_ending: bool = False
    address: tuple[str, int] | None = None

    @property
    def stands(self) -> bool:
        """Whether something may be bound to it."""
        return self.is_granted and not self.is_ending

    def properties(self) -> dict[str, str]:
        """As `systemctl show` would print it."""
        active = "deactivating" if self.is_ending else "active" if self.stands else "activating"
        return {"Id": self.unit, "LoadState": "loaded", "ActiveState": active, "SubState": active,
                "Result": "success", "MainPID": "0"}  # fmt: skip


class Supervisor:
    """The process.

    Raises:
        Busy: Another supervisor holds this state folder.
    """

    def __init__(self, paths: Paths, environment: Mapping[str, str]) -> None:
        self._paths = paths
        self._environment = environment
        self._clock = SystemClock()
        self._bell = Bell(self._clock)
        self._units: dict[str, LocalUnit] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._leases: dict[str, _Lease] = {}
        # Candidates of a dead supervisor's lease: they end before anything starts.
        self._orphans: list[str] = []
        self._is_ending = False
        self._lock = _lock(paths)
        for folder in (paths.unit_dir, paths.log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        make_private_folder(paths.runtime_dir)
        self._listener = _listen(paths.runtime_dir)
        (paths.runtime_dir / PID_NAME).write_text(f"{os.getpid()}\n")

    async def run(self, ready: Callable[[], None]) -> None:
        """Until SIGTERM or SIGINT, and then until all units are down."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGCHLD, self._bell.ring)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._say(f"supervisor started, pid {os.getpid()}")
        self._take_over()
        await asyncio.start_unix_server(self._serve, sock=self._listener, limit=_MAX_REQUEST_BYTES)
        beside = [asyncio.create_task(work()) for work in (self._reap, self._rotate)]
        ready()
        await self._start_enabled()
        await self._bell.until(lambda: self._is_ending and self._are_all_down())
        for task in beside:
            task.cancel()
        (self._paths.runtime_dir / SOCKET_NAME).unlink(missing_ok=True)
        (self._paths.runtime_dir / PID_NAME).unlink(missing_ok=True)
        self._say("supervisor ended")

    # At start and end

    def _take_over(self) -> None:
        """Find what an earlier supervisor left: running servers are kept, remains are killed."""
        for name in recorded_units(self._paths):
            record = read_record(self._paths, name)
            if record is None:
                forget(self._paths, name)
                continue
            unit = self._unit(name)
            if record.is_alive:
                unit.adopt(record)
                # Whoever measured may have removed its file by now, and with it what it is bound to.
                if unit.bound_to is not None or is_candidate(name):
                    self._say(f"{name}: the lease that it was bound to is gone")
                    self._orphans.append(name)
                    self._put(name, "stop")
                continue
            unit.sweep_remains(record)
            if record.intent != "running" or unit.outlives_failure:
                self._say(f"{name}: ended while no supervisor ran")
                self._put(name, "start")

    async def _start_enabled(self) -> None:
        await self._bell.until(self._is_clear)
        self._orphans.clear()
        for name in enabled_units(self._paths):
            if self._is_down(name) and not self._is_ending:
                self._put(name, "start")

    def _is_clear(self) -> bool:
        return all(self._is_down(name) for name in self._orphans)

    def _end(self) -> None:
        self._is_ending = True
        self._say("supervisor is ending, stopping its units")
        self._bell.ring()

    def _are_all_down(self) -> bool:
        for name, unit in self._units.items():
            if not unit.phase.is_down:
                self._put(name, "stop")
        return all(unit.phase.is_down for unit in self._units.values())

    # Beside

    async def _reap(self) -> None:
        while True:
            self._reap_strangers()
            await asyncio.sleep(_REAP_S)

    def _reap_strangers(self) -> None:
        """Processes that a unit's own left come to us as orphans; nobody else counts them."""
        mains = {unit.main_pid for unit in self._units.values()}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in mains:
                    return
                os.waitpid(ended.si_pid, 0)

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(_ROTATE_S)
            for name, unit in tuple(self._units.items()):
                unit.log.rotate()
                if unit.may_be_forgotten and name not in self._jobs:
                    del self._units[name]

    # Callers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one caller, request by request; one that sends nonsense without end is cut off."""
        with contextlib.suppress(OSError, ValueError, TimeoutError), contextlib.closing(writer):
            if not _is_allowed(writer.get_extra_info("socket")):
                return
            while line := await asyncio.wait_for(reader.readline(), _IDLE_S):
                try:
                    request = _read_request(line)
                    if request["op"] == "lease":
                        await self._hold(self._lease_of(request), reader, writer)
                        return
                    answer = _good(await self._obey(request))
                except ServiceError as error:
                    answer = _bad(error)
                except (KeyError, TypeError, ValueError):
                    answer = _bad(ServiceError("not a request"))
                writer.write(answer)
                await asyncio.wait_for(writer.drain(), _IDLE_S)

    async def _obey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        verb = request["op"]
        if verb == "ping":
            return {}
        if verb == "list":
            known = {name for name, unit in self._units.items() if not unit.may_be_forgotten}
            return {"units": sorted({*known, *unit_names(self._paths), *self._leases})}
        name = check_name(request.get("unit"))
        lease = self._leases.get(name)
        if verb == "show":
            return {"properties": (lease or self._unit(name)).properties()}
        if verb == "restore-when-free" and lease is not None:
            host, port = request["host"], request["port"]
            lease.address = None if host is None else (str(host), int(port))
        elif verb == "reset-failed":
            self._unit(name).reset_failed()
        elif verb == "stop" and lease is not None:
            self._end_lease(lease)
            await self._bell.until(lambda: lease.unit not in self._leases)
        elif verb in {"start", "stop", "restart"} and lease is None:
            await self._do(name, verb)
        else:
            raise ServiceError(
                f"the supervisor does not know this request: {verb}", hint=_way_to_another()
            )
        return {}

    async def _do(self, name: str, verb: str) -> None:
        """Have a job done.

        Raises:
            JobCanceled: Another job took its place.
            ServiceError: It cannot be done.
        """
        if verb != "stop":
            if self._is_ending:
                raise ServiceError("the supervisor is ending")
            bound_to = read_definition(self._paths, name).demand().bound_to
            lease = self._leases.get(bound_to or "")
            if bound_to is not None and (lease is None or not lease.stands):
                raise ServiceError(f"{name} does not start", cause=f"{bound_to} is not active")
            for held in self._leases_of(name):
                self._say(f"{held.unit}: ends, for {name} is started")
                self._end_lease(held, restores=False)
        job = self._put(name, verb)
        try:
            await asyncio.shield(job)
        except asyncio.CancelledError:
            if job.cancelled():
                cause = "another job came instead"
                raise JobCanceled(f"the {verb} of {name} was cancelled", cause=cause) from None
            raise

    # Jobs

    def _put(self, name: str, verb: str) -> asyncio.Task[None]:
        """A job takes the place of another one of its unit; the same one is joined."""
        current = self._jobs.get(name)
        if current is not None and current.get_name() == verb:
            return current
        if current is not None:
            current.cancel()
        job = asyncio.create_task(self._advance(name, verb), name=verb)
        self._jobs[name] = job
        job.add_done_callback(lambda done: self._close(name, done))
        return job

    def _close(self, name: str, job: asyncio.Task[None]) -> None:
        if self._jobs.get(name) is job:
            del self._jobs[name]
        error = None if job.cancelled() else job.exception()
        if error is not None:
            self._say(f"{name}: {error}")
        self._bell.ring()

    async def _advance(self, name: str, verb: str) -> None:
        unit = self._unit(name)
        if verb != "start":
            await unit.stop(comes_back=verb == "restart")
        if verb != "stop":
            await self._bell.until(lambda: self._is_clear() and not self._leases_of(name))
            # As systemd, it waits for a restart that is planned.
            await self._bell.until(lambda: unit.phase is Phase.RUNNING or unit.phase.is_down)
            if unit.phase.is_down:
                unit.start()

    # Leases

    def _lease_of(self, request: Mapping[str, Any]) -> _Lease:
        """The lease that is wished for.

        Raises:
            ServiceError: It cannot be had.
        """
        unit, production = check_name(request["unit"]), check_name(request["production"])
        limit_s = float(request["limit_s"])
        if lease_of(unit) is None or not 0 < limit_s <= _MAX_LEASE_S:
            raise ServiceError("not a request for a lease")
        if self._is_ending or unit in self._leases or self._leases_of(production):
            raise ServiceError(f"the place of {production} is held already")
        ends_at_s = self._clock.monotonic_s() + limit_s
        return _Lease(unit, production, bool(request["restores"]), ends_at_s)

    async def _hold(
        self, lease: _Lease, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From the wish for a lease to production's start after its end.

        The lease is granted when production is down, and ends when its holder is gone, its time is
        over, or somebody ends it.
        """
        self._leases[lease.unit] = lease
        gone = asyncio.create_task(_until_gone(reader))
        gone.add_done_callback(lambda _: self._bell.ring())

        def is_over() -> bool:
            return gone.done() or lease.is_ending

        self._put(lease.production, "stop")
        await self._bell.until(
            lambda: is_over() or self._is_down(lease.production), by_s=lease.ends_at_s
        )
        if not is_over() and self._is_down(lease.production):
            lease.is_granted = True
            writer.write(_good({}))
            await self._bell.until(is_over, by_s=lease.ends_at_s)
        if not lease.is_ending:
            self._say(f"{lease.unit}: {'its holder is gone' if gone.done() else 'time is over'}")
            self._end_lease(lease)
        await self._bell.until(lambda: all(map(self._is_down, self._bound_to(lease.unit))))
        writer.close()  # before anybody is told that it is over
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), _IDLE_S)
        free_by_s = self._clock.monotonic_s() + PORT_LIMIT_S
        await self._bell.until(
            lambda: lease.address is None or can_bind(*lease.address), by_s=free_by_s
        )
        del self._leases[lease.unit]
        if lease.restores and not self._is_ending:
            self._put(lease.production, "start")
        self._bell.ring()

    def _end_lease(self, lease: _Lease, *, restores: bool | None = None) -> None:
        """Stop what is bound to it; `_hold` does the rest."""
        lease.restores = lease.restores if restores is None else restores
        lease.is_ending = True
        for unit in self._bound_to(lease.unit):
            self._put(unit, "stop")
        self._bell.ring()

    def _leases_of(self, production: str) -> list[_Lease]:
        return [lease for lease in self._leases.values() if lease.production == production]

    def _bound_to(self, lease: str) -> list[str]:
        return [name for name, unit in self._units.items() if unit.bound_to == lease]

    # Below

    def _is_down(self, name: str) -> bool:
        return name not in self._jobs and self._unit(name).phase.is_down

    def _unit(self, name: str) -> LocalUnit:
        if name not in self._units:
            self._units[name] = LocalUnit(
                name, self._paths, self._clock, self._environment, self._say, self._bell
            )
        return self._units[name]

    def _say(self, text: str) -> None:
        time = datetime.fromtimestamp(self._clock.now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{time} {text}\n".encode("utf-8", "replace"))


# What is said


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Who holds a lease has nothing more to say."""
    with contextlib.suppress(OSError):
        await reader.read(1)


def _read_request(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ServiceError("not a request") from error
    if not isinstance(data, dict) or not isinstance(data.get("op"), str):
        raise ServiceError("not a request")
    if data.get("version") != VERSION:
        raise ServiceError(
            f"the supervisor speaks version {VERSION} of its protocol, not {data.get('version')}",
            hint=_way_to_another(),
        )
    return data


def _way_to_another() -> str:
    return (
        f"it was started by another version of tunerd: `kill -9 {os.getpid()}` ends it alone, and what "
        "it serves goes on; the next command that changes something starts a new one, which takes it over"
    )


def _good(result: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, "ok": True, "result": result}).encode() + b"\n"


def _bad(error: ServiceError) -> bytes:
    told = {name: getattr(error, name) for name in ("code", "message", "cause", "hint")}
    return json.dumps({"version": VERSION, "ok": False, "error": told}).encode() + b"\n"


# The process


def _listen(folder: Path) -> socket.socket:
    """The supervisor's socket, open to its owner alone; what a dead one left is replaced."""
    (folder / SOCKET_NAME).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    previous = os.umask(0o177)
    try:
        with reachable(folder) as name:
            listener.bind(name)
    finally:
        os.umask(previous)
    return listener


def _is_allowed(connection: socket.socket) -> bool:
    """Whether the other end is this account or root."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return uid in {0, os.geteuid()}


def _lock(paths: Paths) -> AbstractContextManager[None]:
    """Held in the state folder, so that a second runtime folder makes no second supervisor."""
    held = lock(paths.state_dir / "supervise.lock", purpose="supervise", since="its start")
    try:
        held.__enter__()
    except Busy as error:
        raise Busy(f"a supervisor already runs for {paths.state_dir}") from error
    return held


def supervise(
    paths: Paths, environment: Mapping[str, str], *, ready: Callable[[], None] = lambda: None
) -> None:
    """Be the supervisor until told to end.

    Raises:
        Busy: Another one runs for this state folder.
        HostError: A folder cannot be used.
    """

    async def run() -> None:
        await Supervisor(paths, environment).run(ready)

    try:
        asyncio.run(run())
    except OSError as error:
        raise HostError("the supervisor cannot run", cause=str(error)) from error


def main(argv: list[str]) -> int:
    """`python -m tunerd.tryout.supervisor PATHS`: detach, and return when it can be talked to."""
    paths = Paths(**{name: Path(path) for name, path in json.loads(argv[0]).items()})
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        return 0 if os.read(read, 1) else 1
    os.close(read)
    os.setsid()
    try:
        supervise(paths, os.environ, ready=lambda: _tell(write))
    except TunerdError as error:
        sys.stderr.write(f"{error.message}: {error.cause}\n" if error.cause else error.message)
        return 1
    return 0


def _tell(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, b"+")
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
