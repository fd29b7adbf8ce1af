"""tunerd's own service manager for machines without systemd: one process per state folder.

It starts, watches and stops units, and is talked to over a Unix socket. One thread, one loop. When it
is killed its servers go on, since they depend on nothing of it, and the next supervisor takes them
over: a dead man's switch on the parent (PDEATHSIG) would take production down with it. When it is
asked to end it stops its units first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tunerd.core.lease import is_candidate
from tunerd.core.paths import Paths
from tunerd.errors import Busy, HostError, JobCanceled, ServiceError
from tunerd.system import supervisor_wire as wire
from tunerd.system.clock import SystemClock
from tunerd.system.supervised import Phase, SupervisedUnit
from tunerd.system.supervisor_calls import Connection, Job
from tunerd.system.supervisor_lease import HeldLease, Leases, read_address, read_lease
from tunerd.system.unit_record import Intent, forget, read_record, recorded_units
from tunerd.system.unit_source import check_name, enabled_units, unit_names

_PR_SET_CHILD_SUBREAPER = 36
_MAX_CONNECTIONS = 64
# The longest the loop sleeps: processes that were taken over may have nothing that wakes it.
_NAP_S = 0.5


class Supervisor:
    """The loop.

    Raises:
        Busy: Another supervisor holds this state folder.
    """

    def __init__(self, paths: Paths, environment: Mapping[str, str]) -> None:
        self._paths = paths
        self._environment = environment
        self._clock = SystemClock()
        self._units: dict[str, SupervisedUnit] = {}
        self._jobs: dict[str, Job] = {}
        self._connections: dict[int, Connection] = {}
        self._leases = Leases(
            is_down=self._is_unit_down,
            bound_to=self._bound_to,
            stop=self._begin_stop,
            restore=self._restore,
            granted=self._grant,
            lost=self._drop_holder,
            over=self._give_up,
        )
        # Candidates of a dead supervisor's lease: they end before anything starts.
        self._orphans: list[str] = []
        self._must_start_enabled = True
        self._is_ending = False
        self._lock = _lock(paths)
        for folder in (paths.unit_dir, paths.log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        wire.make_private_folder(paths.runtime_dir)
        self._listener = wire.listen(paths.runtime_dir)
        pid_file = paths.runtime_dir / wire.PID_NAME
        pid_file.write_text(f"{os.getpid()}\n")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self, ready: Callable[[], None]) -> None:
        """Until SIGTERM or SIGINT, and then until all units are down."""
        _become_subreaper()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._say(f"supervisor started, pid {os.getpid()}")
        self._take_over()
        ready()
        while not (self._is_ending and self._is_down()):
            self._turn()
        (self._paths.runtime_dir / wire.SOCKET_NAME).unlink(missing_ok=True)
        (self._paths.runtime_dir / wire.PID_NAME).unlink(missing_ok=True)
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
                    self._begin_stop(name)
                continue
            unit.sweep_remains(record)
            if record.intent is not Intent.RUNNING or unit.should_outlive_failure:
                self._say(f"{name}: ended while no supervisor ran")
                self._try_start(name)

    def _start_enabled(self) -> None:
        self._orphans = [name for name in self._orphans if not self._is_unit_down(name)]
        if self._orphans or not self._must_start_enabled:
            return
        self._must_start_enabled = False
        for name in enabled_units(self._paths):
            if self._unit(name).phase.is_down and not self._is_ending:
                self._try_start(name)

    def _try_start(self, name: str) -> None:
        try:
            self._unit(name).check_startable()
            self._unit(name).start()
        except ServiceError as error:
            self._say(f"{name}: {error.message}")

    def _end(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._say("supervisor is ending, stopping its units")

    def _is_down(self) -> bool:
        for name, unit in self._units.items():
            if unit.phase in {Phase.RUNNING, Phase.WAITING}:
                self._put(name, Job("stop"))
                unit.stop()
        return all(unit.phase.is_down for unit in self._units.values())

    # The loop

    def _turn(self) -> None:
        now_s = self._clock.monotonic_s()
        watched = [self._listener.fileno(), self._wake_read, *self._connections]
        readable, _, _ = select.select(watched, [], [], self._nap_s(now_s))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        for unit in tuple(self._units.values()):
            unit.turn()
        self._reap_strangers()
        self._start_enabled()
        if self._listener.fileno() in readable:
            self._accept()
        for number in readable:
            if number in self._connections:
                self._hear(self._connections[number])
        for name in tuple(self._jobs):
            self._advance(name)
        self._leases.turn(now_s)
        self._close_idle()
        self._forget_units()

    def _nap_s(self, now_s: float) -> float:
        due = [self._leases.due_s(), *(unit.due_s() for unit in self._units.values())]
        due += [connection.expires_s for connection in self._connections.values()]
        times = [time for time in due if time is not None]
        return max(0.0, min([_NAP_S, *(time - now_s for time in times)]))

    def _reap_strangers(self) -> None:
        """Processes that a unit's own left come to us as orphans; nobody else counts them."""
        mains = {unit.main_pid for unit in self._units.values()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in mains:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)

    def _forget_units(self) -> None:
        for name, unit in tuple(self._units.items()):
            if unit.may_be_forgotten and name not in self._jobs:
                del self._units[name]

    # Callers

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError:
            return
        if not wire.is_allowed(channel) or len(self._connections) >= _MAX_CONNECTIONS:
            channel.close()
            return
        self._connections[channel.fileno()] = Connection(channel, self._clock.monotonic_s())

    def _hear(self, connection: Connection) -> None:
        lines = connection.lines()
        if lines is None:
            self._drop(connection)
            return
        for line in lines:
            try:
                answer = self._obey(wire.accept_request(line), connection)
            except ServiceError as error:
                connection.answer(wire.bad_answer(error), self._clock.monotonic_s())
            else:
                if answer is not None:
                    connection.answer(wire.good_answer(answer), self._clock.monotonic_s())

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.channel.fileno()]
        connection.channel.close()
        for job in self._jobs.values():
            if connection in job.waiting:
                job.waiting.remove(connection)
        lease = self._leases.held_by(connection)
        if lease is not None:
            self._say(f"{lease.unit}: its holder is gone")
            lease.connection = None
            self._leases.begin_end(lease)

    def _close_idle(self) -> None:
        now_s = self._clock.monotonic_s()
        for connection in tuple(self._connections.values()):
            if connection.expires_s is not None and now_s >= connection.expires_s:
                self._drop(connection)

    def _obey(self, request: Mapping[str, Any], connection: Connection) -> dict[str, Any] | None:
        """The answer, or None if it comes when a job is done."""
        verb = request["op"]
        if verb == "reload":
            for unit in self._units.values():
                unit.load()
            return {}
        if verb == "list":
            return {"units": sorted({*self._units, *unit_names(self._paths), *self._leases.names})}
        if verb == "ping":
            return {"pid": os.getpid()}
        if verb == "lease":
            self._lease(request, connection)
            return None
        name = check_name(str(request.get("unit", "")))
        lease = self._leases.find(name)
        if lease is not None:
            return self._obey_for_lease(lease, request, connection)
        unit = self._unit(name)
        if verb == "show":
            return {"properties": unit.properties()}
        if verb == "reset-failed":
            unit.reset_failed()
            return {}
        if verb == "kill":
            unit.kill(_signal(request.get("signal")), only_main=request.get("only_main") is True)
            return {}
        if verb not in {"start", "stop", "restart"}:
            raise ServiceError(f"{wire.UNKNOWN_REQUEST}: {verb}")
        self._ask_for(verb, unit, connection)
        return None

    def _ask_for(self, verb: str, unit: SupervisedUnit, connection: Connection) -> None:
        """Put a job; its answer comes when it is done."""
        if self._is_ending and verb != "stop":
            raise ServiceError("the supervisor is ending")
        if verb != "stop":
            unit.check_startable()
            self._check_bound(unit)
            for held in self._leases.of(unit.unit):
                self._say(f"{held.unit}: ends, for {unit.unit} is started")
                self._leases.begin_end(held, restores=False)
        connection.expires_s = None
        self._put(unit.unit, Job(verb, [connection]))

    # Jobs

    def _put(self, name: str, job: Job) -> None:
        """A job takes the place of another one of its unit; the same one is joined."""
        current = self._jobs.get(name)
        if current is not None and current.verb == job.verb:
            current.waiting += job.waiting
            return
        self._jobs[name] = job
        if current is not None:
            canceled = JobCanceled(
                f"the {current.verb} of {name} was cancelled", cause=f"a {job.verb} came instead"
            )
            self._tell(current, wire.bad_answer(canceled))

    def _advance(self, name: str) -> None:
        """Go on with the unit's job as far as it is."""
        job, unit = self._jobs[name], self._unit(name)
        if job.verb in {"stop", "restart"} and not job.is_stopped:
            comes_back = job.verb == "restart"
            unit.intend(comes_back=comes_back)
            if unit.phase in {Phase.RUNNING, Phase.WAITING, Phase.SWEEPING}:
                unit.stop(comes_back=comes_back)
            if not unit.phase.is_down:
                return
            job.is_stopped = True
        if job.verb != "stop" and (self._orphans or self._leases.of(name)):
            return  # the place is not free yet
        if job.verb == "start" and unit.phase in {
            Phase.STOPPING,
            Phase.KILLING,
            Phase.SWEEPING,
            Phase.WAITING,  # as systemd: it waits for the restart that is planned
        }:
            return
        del self._jobs[name]
        answer = wire.good_answer({})
        if job.verb != "stop" and unit.phase.is_down:
            try:
                unit.start()
            except ServiceError as error:
                answer = wire.bad_answer(error)
        self._tell(job, answer)

    def _tell(self, job: Job, answer: bytes) -> None:
        for connection in job.waiting:
            connection.answer(answer, self._clock.monotonic_s())

    # Leases

    def _lease(self, request: Mapping[str, Any], connection: Connection) -> None:
        """Taken when the unit is down; the answer comes then."""
        if self._is_ending:
            raise ServiceError("the supervisor is ending")
        lease = read_lease(request, connection, self._clock.monotonic_s())
        self._leases.take(lease)
        connection.expires_s = None
        self._begin_stop(lease.production)

    def _obey_for_lease(
        self, lease: HeldLease, request: Mapping[str, Any], connection: Connection
    ) -> dict[str, Any] | None:
        verb = request["op"]
        if verb == "show":
            return {"properties": lease.properties()}
        if verb == "reset-failed":
            return {}
        if verb == "restore-when-free":
            lease.address = read_address(request)
            return {}
        if verb != "stop":
            raise ServiceError(f"{lease.unit} is a lease: it can only be stopped")
        lease.waiting.append(connection)
        connection.expires_s = None
        self._leases.begin_end(lease)
        return None

    def _grant(self, lease: HeldLease) -> None:
        if lease.connection is not None:
            lease.connection.answer(wire.good_answer({}), self._clock.monotonic_s())
            lease.connection.expires_s = None  # it stays open: that is the lease

    def _drop_holder(self, lease: HeldLease) -> None:
        if lease.connection is not None:
            holder, lease.connection = lease.connection, None
            self._drop(holder)

    def _give_up(self, lease: HeldLease) -> None:
        for connection in lease.waiting:
            connection.answer(wire.good_answer({}), self._clock.monotonic_s())

    def _restore(self, production: str) -> None:
        if not self._is_ending:
            self._put(production, Job("start"))

    def _check_bound(self, unit: SupervisedUnit) -> None:
        lease = self._leases.find(unit.bound_to or "")
        if unit.bound_to is not None and (lease is None or not lease.stands):
            raise ServiceError(
                f"{unit.unit} does not start", cause=f"{unit.bound_to} is not active"
            )

    def _bound_to(self, lease: str) -> list[str]:
        return [name for name, unit in self._units.items() if unit.bound_to == lease]

    def _begin_stop(self, name: str) -> None:
        self._put(name, Job("stop"))

    def _is_unit_down(self, name: str) -> bool:
        return name not in self._jobs and self._unit(name).phase.is_down

    # Below

    def _unit(self, name: str) -> SupervisedUnit:
        if name not in self._units:
            self._units[name] = SupervisedUnit(
                name, self._paths, self._clock, self._environment, self._say
            )
        return self._units[name]

    def _say(self, text: str) -> None:
        time = datetime.fromtimestamp(self._clock.now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{time} {text}\n".encode("utf-8", "replace"))


def supervise(
    paths: Paths, environment: Mapping[str, str], *, ready: Callable[[], None] = lambda: None
) -> None:
    """Be the supervisor until told to end.

    Raises:
        Busy: Another one runs for this state folder.
        HostError: A folder cannot be used.
    """
    try:
        Supervisor(paths, environment).run(ready)
    except OSError as error:
        raise HostError("the supervisor cannot run", cause=str(error)) from error


def _signal(value: object) -> int:
    if not isinstance(value, int) or value not in signal.valid_signals():
        raise ServiceError(f"not a signal: {value}")
    return value


def _lock(paths: Paths) -> int:
    """Held on the state folder itself, so that a second runtime folder makes no second supervisor."""
    try:
        paths.state_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(paths.state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"cannot use {paths.state_dir}", cause=error.strerror) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise Busy(f"a supervisor already runs for {paths.state_dir}") from error
    return descriptor


def _become_subreaper() -> None:
    """What units leave behind comes to us instead of to PID 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
