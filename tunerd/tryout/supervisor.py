"""tunerd's own service manager for machines without systemd: one process per state folder.

It starts, watches and stops units, and is talked to over a Unix socket. One thread, one loop: units
go on by `tick`, and who waits for something looks again and again. When it is killed its servers go
on, since they depend on nothing of it, and the next supervisor takes them over: a dead man's switch
on the parent (PDEATHSIG) would take production down with it. When it is asked to end it stops its
units first. Times are monotonic.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tunerd.errors import Busy, HostError, JobCanceled, ServiceError, TunerdError
from tunerd.machine import process
from tunerd.machine.clock import SystemClock
from tunerd.machine.files import lock
from tunerd.machine.net import can_bind
from tunerd.machine.peers import peer_of, unix_socket
from tunerd.paths import Paths
from tunerd.tryout import local as kept
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
from tunerd.units.manager import PORT_LIMIT_S, STARTING, lease_of, lease_unit
from tunerd.units.text import parse_unit

# Deadlines are met, and ends of processes that are no children of ours are seen, within this.
_TICK_S = 0.1
_ROTATE_S = 60.0
_MAX_REQUEST_BYTES = 64 * 1024
_IDLE_S = 10.0
_MAX_LEASE_S = 31 * 86400.0
_TOLD = ("code", "message", "cause", "hint")
_NEVER = float("inf")
_PR_SET_CHILD_SUBREAPER = 36
# A number that no process and no session has; 0 is that of sessions from outside of a container.
_NOBODY = -1
_CLOCK = SystemClock()
# Of a unit that has no text that could be run.
_NOTHING = read_service("", parse_unit("[Service]\nExecStart=/nothing\n"))


class Phase(Enum):
    """Where a unit is, with systemd's names for it: active state and sub state."""

    DEAD = ("inactive", "dead")
    FAILED = ("failed", "failed")
    RUNNING = ("active", "running")
    STOPPING = ("deactivating", "stop-sigterm")
    KILLING = ("deactivating", "stop-sigkill")
    WAITING = ("activating", "auto-restart")


class LocalUnit:
    """A unit and its process. `wish` is what was last asked of it; `record` is of its last start."""

    def __init__(self, name: str, paths: Paths, environment: Mapping[str, str]) -> None:
        self.name = name
        self.phase = Phase.DEAD
        self.wish = ""
        self.log = kept.UnitLog(paths, name)
        self.record = kept.UnitRecord(name)
        self.spec = _NOTHING
        self._paths = paths
        self._environment = environment
        self._child: process.Child | None = None
        self._ending = Ending()
        self._result = SUCCESS
        self._limit = StartLimit()
        self._is_stopped = False
        self._timed_out = False
        # When its phase is over at the latest.
        self._due_s = _NEVER

    @property
    def is_down(self) -> bool:
        """Whether nothing runs and nothing is planned."""
        return self.phase in {Phase.DEAD, Phase.FAILED}

    def properties(self) -> dict[str, str]:
        """The unit as `systemctl show` would print it."""
        self.tick()
        return {
            **kept.properties_of(self._paths, _CLOCK, self.record, *self.phase.value),
            **self._ending.to_properties(),
            "Result": self._result,
            "StopRequested": "yes" if self._is_stopped else "no",
        }

    # Wishes

    def begin(self, *, n_restarts: int = 0) -> None:
        """Start it now; nothing of it runs.

        Raises:
            ServiceError: It cannot be started, or did not get as far as its program.
        """
        try:
            spec = kept.read_definition(self._paths, self.name)
        except ServiceError as error:
            if self.phase is Phase.WAITING and isinstance(error.__cause__, OSError):
                self._due_s = _CLOCK.monotonic_s() + max(self.spec.restart_s, _TICK_S)
            elif self.phase is Phase.WAITING:
                self._fail(self._result, error.message)
            raise
        self.record = replace(self.record, n_restarts=n_restarts)
        self._is_stopped, self._timed_out = False, False
        now_s = _CLOCK.monotonic_s()
        self._limit, is_allowed = self._limit.after_start(
            now_s, interval_s=spec.start_limit_interval_s, burst=spec.start_limit_burst
        )
        if not is_allowed:
            self._fail(START_LIMIT_HIT, "Start request repeated too quickly")
            raise ServiceError(
                f"{self.name} was started too often",
                cause=START_LIMIT_HIT,
                hint="`reset-failed` lets it be started again",
            )
        self.spec, self._result, self._ending = spec, SUCCESS, Ending()
        self.record = kept.UnitRecord(
            self.name,
            boot=kept.current_boot(),
            invocation_id=uuid.uuid4().hex,
            n_restarts=n_restarts,
            active_since_s=_CLOCK.now_s(),
        )
        try:
            self._child = self._execute(spec)
        except Exception as error:  # of one unit's text: the others, and the supervisor, go on
            cause = error.words if isinstance(error, HostError) else str(error) or repr(error)
            self._ending = Ending(code=EXIT_EXEC)
            self._note(f"Failed at start: {cause}")
            self._settle(EXIT_CODE)
            raise ServiceError(f"{self.name} did not start", cause=cause) from error
        self.phase, self._due_s = Phase.RUNNING, _NEVER
        self._remember(intent="running")

    def stop(self, *, comes_back: bool = False) -> None:
        """Begin to stop it and all that came of it.

        Args:
            comes_back: Whether it is to be started again then, by a later supervisor if need be.
        """
        is_remembered = self.phase is Phase.WAITING and comes_back
        if self.phase is Phase.WAITING:
            self.phase = Phase.DEAD
        if self.is_down:
            if not is_remembered:
                kept.forget(self._paths, self.name)
            return
        self._is_stopped = True
        self._remember(intent="restarting" if comes_back else "running")
        if self.phase is Phase.RUNNING:
            self._note("Stopping")
            self.phase = Phase.STOPPING
            self._due_s = _CLOCK.monotonic_s() + self.spec.timeout_stop_s
            if not self._has_ended():
                _send(self.record.pid, signal.SIGTERM)

    def reset_failed(self) -> None:
        """Forget failures and counters."""
        self._limit = StartLimit()
        self.record = replace(self.record, n_restarts=0)
        if self.is_down:
            self.phase, self._result, self._ending = Phase.DEAD, SUCCESS, Ending()
            self.record = kept.UnitRecord(self.name)

    def adopt(self, record: kept.UnitRecord) -> None:
        """Take over a process that an earlier supervisor started, or what it left."""
        with contextlib.suppress(ServiceError):
            self.spec = kept.read_definition(self._paths, self.name)
        self.record, self.phase = record, Phase.RUNNING
        if record.is_alive and record.intent == "starting":
            # It was let go: had the supervisor ended before that, the process had ended with it.
            self._remember(intent="running")
        how = f"pid {record.pid}" if record.is_alive else "which ended while none ran"
        self._note(f"Taken over by a new supervisor, {how}")

    # Its life

    def tick(self) -> None:
        """Do what is due."""
        now_s = _CLOCK.monotonic_s()
        if self.phase is Phase.WAITING and now_s >= self._due_s:
            with contextlib.suppress(ServiceError):  # noted, and seen in the unit's state
                self.begin(n_restarts=self.record.n_restarts + 1)
        is_up = self.phase in {Phase.RUNNING, Phase.STOPPING}
        if is_up and (self._has_ended() or now_s >= self._due_s):
            self._timed_out = not self._has_ended()
            if self._timed_out:
                self._note("Did not stop in time, killing")
            self.phase, self._due_s = Phase.KILLING, now_s + self.spec.timeout_stop_s
        if self.phase is Phase.KILLING:
            remains = self._remains()
            for pid in remains:
                _send(pid, signal.SIGKILL)
            if remains and now_s >= self._due_s:  # stuck in a driver: as systemd does
                self._note(f"Still there after SIGKILL, given up: {remains}")
            if not remains or now_s >= self._due_s:
                self._finish()

    def _has_ended(self) -> bool:
        """Whether the main process ended; a child's pid stays its own until it is reaped."""
        return not self.record.is_alive if self._child is None else self._child.has_ended()

    def _remains(self) -> tuple[int, ...]:
        """What runs of it.

        Where its number is another process's by now (in a later boot, or another container on the same
        folders), that one, its session and its children are none of ours.
        """
        stat = process.process_stat(self.record.pid) if self._child is None else None
        is_another = stat is not None and stat.start_ticks != self.record.start_ticks
        is_past = is_another or self.record.boot != kept.current_boot()
        root = _NOBODY if is_past else self.record.pid
        variable = ("INVOCATION_ID", self.record.invocation_id)
        return process.members(session=root, ancestor=root, variable=variable)

    def _finish(self) -> None:
        """Nothing of it runs any more."""
        self._ending = Ending()
        if self._child is not None and self._child.has_ended():
            ended = self._child.reap()
            self._ending = Ending(ended.code, ended.signal)
        self._child = None
        self._note(f"Main process ended: {self._ending.text}")
        # Nobody sees how a process ends that was taken over; when it was asked to, that is success.
        is_unseen = self._ending == Ending() and not self._timed_out
        result = result_of(self._ending, timed_out=self._timed_out)
        self._settle(SUCCESS if self._is_stopped and is_unseen else result)

    def _settle(self, result: str) -> None:
        """What becomes of it with this result."""
        self._result = result
        if not self._is_stopped and should_restart(self.spec.restart, result):
            self.phase, self._due_s = Phase.WAITING, _CLOCK.monotonic_s() + self.spec.restart_s
            self._remember(intent="restarting")
        elif result != SUCCESS:
            self._fail(result, f"Failed with result '{result}'")
        else:
            self.phase = Phase.DEAD
            self._forget()

    def _fail(self, result: str, text: str) -> None:
        self.phase, self._result = Phase.FAILED, result
        self._forget()
        self._note(text)

    def _forget(self) -> None:
        if not (self._is_stopped and self.record.intent == "restarting"):
            kept.forget(self._paths, self.name)

    # Below

    def _execute(self, spec: ServiceSpec) -> process.Child:
        environment = {**process.MINIMAL_ENVIRONMENT, **kept.passed_on(self._environment)}
        user = None if spec.user is None else process.User.named(spec.user)
        if user is not None:
            name = user.name or str(user.uid)
            environment |= {"HOME": user.home or "/", "USER": name, "LOGNAME": name}
        environment |= {**spec.environment, "INVOCATION_ID": self.record.invocation_id}
        folder = Path(spec.work_dir)
        setting = process.Setting(
            env=environment,
            cwd=folder if folder.is_dir() else Path("/"),
            user=user,
            limits=spec.limits,
            umask=spec.umask,
            no_new_privs=spec.no_new_privileges,
            on_spawn=self._spawned,
        )
        log = self.log.open()
        try:
            return process.start(spec.argv, setting, log=log, program=spec.program)
        finally:
            os.close(log)

    def _spawned(self, pid: int) -> None:
        # Before anything is executed, so that all it prints stands behind this line.
        self._note(f"{STARTING}, pid {pid}")
        stat = process.process_stat(pid)
        self._remember(pid=pid, start_ticks=stat.start_ticks if stat is not None else 0)

    def _remember(self, **changes: Any) -> None:
        """What a later supervisor finds.

        A full disk is reported and otherwise without effect: without the record it would not find
        the process, but a server that does not come back is worse.
        """
        self.record = replace(self.record, **changes)
        try:
            kept.write_record(self._paths, self.record)
        except OSError as error:
            _say(f"{self.name}: cannot be remembered: {error}")

    def _note(self, text: str) -> None:
        _say(f"{self.name}: {text}")
        if self.record.invocation_id:
            self.log.note(_CLOCK, self.record.invocation_id, text)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


@dataclass(slots=True, eq=False)
class _Lease:
    """Production's place, held by whoever is at the other end of a connection.

    It is granted once production is down. Production does not start before `address` is free.
    """

    unit: str
    production: str
    restores: bool
    ends_at_s: float
    holder: asyncio.Task[None]
    is_granted: bool = False
    is_ending: bool = False
    address: tuple[str, int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether somebody ended it, its time is over, or its holder is gone."""
        return self.is_ending or self.holder.done() or _CLOCK.monotonic_s() >= self.ends_at_s

    @property
    def stands(self) -> bool:
        """Whether something may be bound to it."""
        return self.is_granted and not self.is_over

    def properties(self) -> dict[str, str]:
        """As `systemctl show` would print it."""
        active = "deactivating" if self.is_over else "active" if self.stands else "activating"
        return {"Id": self.unit, "LoadState": "loaded", "ActiveState": active, "SubState": active,
                "Result": "success", "MainPID": "0"}  # fmt: skip


class Supervisor:
    """The process."""

    def __init__(self, paths: Paths, environment: Mapping[str, str]) -> None:
        self._paths = paths
        self._environment = environment
        self._units: dict[str, LocalUnit] = {}
        self._leases: dict[str, _Lease] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._is_ending = False
        self._ticked = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Until SIGTERM or SIGINT, and then until all units are down."""
        pid_file = self._paths.runtime_dir / kept.PID_NAME
        pid_file.write_text(f"{os.getpid()}\n")
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGCHLD, self._tick)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _say(f"supervisor started, pid {os.getpid()}")
        self._take_over()
        await asyncio.start_unix_server(self._serve, sock=listener, limit=_MAX_REQUEST_BYTES)
        rotates_at_s = 0.0
        while not (self._is_ending and self._are_all_down()):
            self._tick()
            if _CLOCK.monotonic_s() >= rotates_at_s:
                rotates_at_s = _CLOCK.monotonic_s() + _ROTATE_S
                with contextlib.suppress(OSError):
                    self._tidy()
            await asyncio.sleep(_TICK_S)
        (self._paths.runtime_dir / kept.SOCKET_NAME).unlink(missing_ok=True)
        pid_file.unlink(missing_ok=True)
        _say("supervisor ended")

    # At start and end

    def _take_over(self) -> None:
        """Find what an earlier supervisor left: running servers are kept, remains are killed."""
        for name in kept.recorded_units(self._paths):
            record, unit = kept.read_record(self._paths, name), self._unit(name)
            if not record.pid:
                # Nothing, or a unit whose restart did not get as far as a process the last time.
                if record.intent == "restarting" and lease_of(name) is None:
                    self._start_alone(name)
                else:
                    kept.forget(self._paths, name)
                continue
            unit.adopt(record)
            comes_back = not record.is_alive and should_restart(unit.spec.restart, EXIT_CODE)
            if lease_of(name) is not None:
                _say(f"{name}: the lease that it was bound to is gone")
                self._stop(name)
            elif comes_back or unit.record.intent != "running":
                unit.stop(comes_back=True)
                self._start_alone(name)
        self._tick()
        for name in kept.enabled_units(self._paths):
            # One whose remains are still on their way is started once they are gone.
            if name not in self._starts and self._unit(name).phase is not Phase.RUNNING:
                self._start_alone(name)

    def _end(self) -> None:
        self._is_ending = True
        _say("supervisor is ending, stopping its units")

    def _are_all_down(self) -> bool:
        for name, unit in self._units.items():
            if not unit.is_down:
                self._stop(name)
        return all(unit.is_down for unit in self._units.values())

    # Again and again

    def _tick(self) -> None:
        for unit in tuple(self._units.values()):
            # Out of descriptors, say: the other units go on, and so does this one at a later tick.
            with contextlib.suppress(OSError):
                unit.tick()
        self._ticked.set()
        self._ticked = asyncio.Event()
        # What a unit's processes leave comes to us; a container's first process may reap nothing.
        mains = {unit.record.pid for unit in self._units.values() if not unit.is_down}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in mains:
                    return
                os.waitpid(ended.si_pid, 0)

    def _tidy(self) -> None:
        for name, unit in tuple(self._units.items()):
            unit.log.rotate()
            if unit.is_down and kept.unit_file(self._paths, name) is None:
                del self._units[name]

    async def _until(self, holds: Callable[[], bool], *, by_s: float = _NEVER) -> None:
        """Return when it holds, or at `by_s`."""
        while not holds() and _CLOCK.monotonic_s() < by_s:
            await self._ticked.wait()

    # Callers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one caller; one that sends nonsense without end is cut off."""
        with contextlib.suppress(OSError, ValueError, TimeoutError), contextlib.closing(writer):
            if peer_of(writer.get_extra_info("socket")).uid not in {0, os.geteuid()}:
                return
            line = await asyncio.wait_for(reader.readline(), _IDLE_S)
            try:
                answer = _line(ok=True, result=await self._obey(json.loads(line), reader, writer))
            except (ServiceError, KeyError, TypeError, ValueError, RecursionError) as error:
                told = error if isinstance(error, ServiceError) else ServiceError("not a request")
                answer = _line(ok=False, error={name: getattr(told, name) for name in _TOLD})
            writer.write(answer)
            await asyncio.wait_for(writer.drain(), _IDLE_S)

    async def _obey(
        self, request: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        if request["version"] != kept.VERSION:
            raise ServiceError(
                f"the supervisor speaks version {kept.VERSION} of its protocol, "
                f"not {request['version']}",
                hint=_way_to_another(),
            )
        verb = request["op"]
        if verb == "ping":
            return {}
        if verb == "list":
            known = {name for name, unit in self._units.items() if not unit.is_down}
            return {"units": sorted({*known, *kept.unit_names(self._paths), *self._leases})}
        name = kept.check_name(request["unit"])
        lease = self._leases.get(name)
        if verb == "show":
            return {"properties": (lease or self._unit(name)).properties()}
        if verb == "restore-when-free" and lease is not None:
            host, port = request["host"], request["port"]
            lease.address = None if host is None else (str(host), int(port))
        elif verb == "lease":
            await self._hold(self._lease_of(request, reader), writer)
        elif verb == "reset-failed":
            self._unit(name).reset_failed()
        elif verb == "stop" and lease is not None:
            self._end_lease(lease)
            await self._until(lambda: name not in self._leases)
        elif verb in {"start", "stop", "restart"} and lease is None:
            await self._do(name, verb)
        else:
            text = f"the supervisor does not know this request: {verb}"
            raise ServiceError(text, hint=_way_to_another())
        return {}

    async def _do(self, name: str, verb: str) -> None:
        """Have it started, stopped or both, unless somebody wishes for something else meanwhile.

        Raises:
            JobCanceled: Somebody did.
            ServiceError: It cannot be done.
        """
        unit = self._unit(name)
        if verb != "stop":
            self._clear_the_way(name)
        unit.wish, before = verb, unit.record.invocation_id

        async def until(holds: Callable[[], bool]) -> None:
            await self._until(lambda: unit.wish != verb or holds())
            if unit.wish != verb:
                cause = "another job came instead"
                raise JobCanceled(f"the {verb} of {name} was cancelled", cause=cause)

        if verb != "start":
            unit.stop(comes_back=verb == "restart")
            await until(lambda: unit.is_down or unit.record.invocation_id != before)
        if verb != "stop":
            await until(lambda: self._is_free(name))
            # As systemd, it waits for a restart that is planned.
            await until(lambda: unit.is_down or unit.phase is Phase.RUNNING)
            if unit.is_down:
                unit.begin()

    def _clear_the_way(self, name: str) -> None:
        """See that it may be started; a lease that holds its place ends."""
        if self._is_ending:
            raise ServiceError("the supervisor is ending")
        bound_to = kept.read_definition(self._paths, name).bound_to
        lease = self._leases.get(bound_to or "")
        if bound_to is not None and (lease is None or not lease.stands):
            raise ServiceError(f"{name} does not start", cause=f"{bound_to} is not active")
        for held in self._leases_of(name):
            _say(f"{held.unit}: ends, for {name} is started")
            held.restores = False
            self._end_lease(held)

    def _is_free(self, production: str) -> bool:
        """Whether no lease holds its place, and nothing runs whose lease went with a supervisor."""
        ids = {lease_of(name) for name, unit in self._units.items() if not unit.is_down}
        orphans = {lease_unit(one) for one in ids if one is not None} - self._leases.keys()
        return not orphans and not self._leases_of(production)

    def _start_alone(self, name: str) -> None:
        """Start it, though nobody waits for that."""

        async def begin() -> None:
            try:
                await self._do(name, "start")
            except ServiceError as error:
                _say(f"{name}: {error.words}")

        self._starts[name] = asyncio.create_task(begin())

    def _stop(self, name: str) -> None:
        unit = self._unit(name)
        unit.wish = "stop"
        unit.stop()

    # Leases

    def _lease_of(self, request: Mapping[str, Any], holder: asyncio.StreamReader) -> _Lease:
        """The lease that is wished for.

        Raises:
            ServiceError: It cannot be had.
        """
        lease = _Lease(
            kept.check_name(request["unit"]),
            kept.check_name(request["production"]),
            bool(request["restores"]),
            _CLOCK.monotonic_s() + min(_MAX_LEASE_S, float(request["limit_s"])),
            asyncio.create_task(_until_gone(holder)),
        )
        if lease_of(lease.unit) is None:
            raise ServiceError("not a request for a lease")
        if self._is_ending or lease.unit in self._leases or self._leases_of(lease.production):
            raise ServiceError(f"the place of {lease.production} is held already")
        return lease

    async def _hold(self, lease: _Lease, writer: asyncio.StreamWriter) -> None:
        """From the wish for a lease to production's start after its end.

        The lease is granted when production is down, and ends when its holder is gone, its time is
        over, or somebody ends it.
        """
        self._leases[lease.unit] = lease
        self._stop(lease.production)
        production = self._unit(lease.production)
        await self._until(lambda: lease.is_over or production.is_down)
        if not lease.is_over:
            lease.is_granted = True
            writer.write(_line(ok=True, result={}))
            await self._until(lambda: lease.is_over)
        if not lease.is_ending:
            is_late = _CLOCK.monotonic_s() >= lease.ends_at_s
            _say(f"{lease.unit}: {'time is over' if is_late else 'its holder is gone'}")
            self._end_lease(lease)
        await self._until(lambda: all(self._unit(name).is_down for name in self._bound_to(lease)))
        writer.close()  # before anybody is told that it is over
        free_by_s = _CLOCK.monotonic_s() + PORT_LIMIT_S
        await self._until(lambda: not lease.address or can_bind(*lease.address), by_s=free_by_s)
        del self._leases[lease.unit]
        if lease.restores and not self._is_ending:
            self._start_alone(lease.production)

    def _end_lease(self, lease: _Lease) -> None:
        """Stop what is bound to it; `_hold` does the rest."""
        lease.is_ending = True
        for unit in self._bound_to(lease):
            self._stop(unit)

    def _leases_of(self, production: str) -> list[_Lease]:
        return [lease for lease in self._leases.values() if lease.production == production]

    def _bound_to(self, lease: _Lease) -> list[str]:
        return [name for name in self._units if lease_of(name) == lease_of(lease.unit)]

    # Below

    def _unit(self, name: str) -> LocalUnit:
        if name not in self._units:
            self._units[name] = LocalUnit(name, self._paths, self._environment)
        return self._units[name]


async def _until_gone(holder: asyncio.StreamReader) -> None:
    """Who holds a lease has nothing more to say: anything that comes is the end, as its end is."""
    with contextlib.suppress(OSError):
        await holder.read(1)


def _say(text: str) -> None:
    line = f"{kept.time_text(_CLOCK)} {text}\n"
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line.encode("utf-8", "replace"))


def _way_to_another() -> str:
    return (
        f"it was started by another version of tunerd: `kill -9 {os.getpid()}` ends only the "
        "supervisor, and what it serves keeps running; the next command that changes something starts a new one, which takes over"
    )


def _line(**answer: Any) -> bytes:
    return json.dumps({"version": kept.VERSION, **answer}).encode() + b"\n"


def _listen(paths: Paths) -> socket.socket:
    for folder in (paths.unit_dir, paths.log_dir):
        folder.mkdir(parents=True, exist_ok=True)
    kept.make_place_for_socket(paths.runtime_dir)
    with kept.reachable(paths.runtime_dir) as short_name:
        return unix_socket(paths.runtime_dir / kept.SOCKET_NAME, group=None, short_name=short_name)


def _detach() -> bool:
    """Go on in a process of its own; whether this is the other one, which has nothing more to do.

    That one waits until we left its session, for whoever started it ends all that is left in there.
    """
    left, leaves = os.pipe()
    if os.fork():
        os.close(leaves)
        os.read(left, 1)
        return True
    os.setsid()
    os.close(left)
    os.close(leaves)
    return False


def supervise(paths: Paths, environment: Mapping[str, str], *, detaches: bool = False) -> None:
    """Be the supervisor until told to end.

    Args:
        paths: Where.
        environment: Of the caller.
        detaches: Whether to return as soon as it can be talked to, and go on in a process of its own.

    Raises:
        Busy: Another one runs for this state folder, whatever its runtime folder.
        HostError: A folder cannot be used.
    """
    try:
        with lock(paths.state_dir / "supervise.lock", purpose="supervise", since="its start"):
            listener = _listen(paths)
            if detaches and _detach():
                return  # the other process has the lock and the socket too
            asyncio.run(Supervisor(paths, environment).run(listener))
    except Busy as error:
        raise Busy(f"a supervisor already runs for {paths.state_dir}") from error
    except OSError as error:
        raise HostError("the supervisor cannot run", cause=str(error)) from error


def main(argv: list[str]) -> int:
    """`python -m tunerd.tryout.supervisor PATHS`: as another process, which is ready when this ends."""
    paths = Paths(**{name: Path(path) for name, path in json.loads(argv[0]).items()})
    try:
        supervise(paths, os.environ, detaches=True)
    except TunerdError as error:
        sys.stderr.write("; ".join(filter(None, (error.words, error.hint))) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
