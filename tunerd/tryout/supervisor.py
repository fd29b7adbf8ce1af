"""tunerd's own service manager for machines without systemd: one process per state folder.

It starts, watches and stops units, and is talked to over a Unix socket. One thread, one loop. When it
is killed its servers go on, since they depend on nothing of it, and the next supervisor takes them
over: a dead man's switch on the parent (PDEATHSIG) would take production down with it. When it is
asked to end it stops its units first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunerd.errors import Busy, HostError, JobCanceled, ServiceError, TunerdError
from tunerd.machine.clock import SystemClock
from tunerd.machine.files import lock
from tunerd.machine.net import can_bind
from tunerd.paths import Paths
from tunerd.tryout.local_state import (
    PID_NAME,
    SOCKET_NAME,
    VERSION,
    check_name,
    enabled_units,
    forget,
    make_private_folder,
    reachable,
    read_definition,
    read_record,
    recorded_units,
    unit_names,
)
from tunerd.tryout.local_unit import Bell, LocalUnit, Phase
from tunerd.units.manager import PORT_LIMIT_S, is_candidate, lease_of

_PR_SET_CHILD_SUBREAPER = 36
_MAX_CONNECTIONS = 64
_MAX_REQUEST_BYTES = 64 * 1024
_MAX_PORT = 65535
_BACKLOG = 64
_IDLE_S = 10.0
_REAP_S = 0.5
_ROTATE_S = 60.0
_MAX_LEASE_S = 31 * 86400.0
_CREDENTIALS = struct.Struct("3i")


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
        self._callers: set[asyncio.Task[None]] = set()
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
        beside = [asyncio.create_task(work()) for work in (self._accept, self._reap, self._rotate)]
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

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            channel, _ = await loop.sock_accept(self._listener)
            if not _is_allowed(channel) or len(self._callers) >= _MAX_CONNECTIONS:
                channel.close()
                continue
            caller = asyncio.create_task(self._serve(channel))
            self._callers.add(caller)
            caller.add_done_callback(self._callers.discard)

    async def _serve(self, channel: socket.socket) -> None:
        """Answer one caller, request by request; one that sends nonsense without end is cut off."""
        reader, writer = await asyncio.open_unix_connection(sock=channel, limit=_MAX_REQUEST_BYTES)
        with contextlib.suppress(OSError, ValueError, TimeoutError), contextlib.closing(writer):
            while line := await asyncio.wait_for(reader.readline(), _IDLE_S):
                try:
                    request = _read_request(line)
                    if request["op"] == "lease":
                        await self._hold(request, reader, writer)
                        return
                    answer = _good(await self._obey(request))
                except ServiceError as error:
                    answer = _bad(error)
                writer.write(answer)
                await asyncio.wait_for(writer.drain(), _IDLE_S)

    async def _obey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        verb = request["op"]
        if verb == "ping":
            return {"pid": os.getpid()}
        if verb == "list":
            known = {name for name, unit in self._units.items() if not unit.may_be_forgotten}
            return {"units": sorted({*known, *unit_names(self._paths), *self._leases})}
        name = check_name(request.get("unit"))
        lease = self._leases.get(name)
        if verb == "show":
            return {"properties": (lease or self._unit(name)).properties()}
        if verb == "restore-when-free" and lease is not None:
            lease.address = _read_address(request)
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

    async def _hold(
        self, request: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From the wish for a lease to production's start after its end.

        The lease is granted when production is down, and ends when its holder is gone, its time is
        over, or somebody ends it.

        Raises:
            ServiceError: It cannot be had.
        """
        lease = _read_lease(request, self._clock.monotonic_s())
        if self._is_ending or lease.unit in self._leases or self._leases_of(lease.production):
            raise ServiceError(f"the place of {lease.production} is held already")
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


def _read_lease(request: Mapping[str, Any], now_s: float) -> _Lease:
    unit, production = check_name(request.get("unit")), check_name(request.get("production"))
    limit_s, restores = request.get("limit_s"), request.get("restores")
    is_limit = isinstance(limit_s, int | float) and 0 < limit_s <= _MAX_LEASE_S
    if lease_of(unit) is None or not is_limit or not isinstance(restores, bool):
        raise ServiceError("not a request for a lease")
    return _Lease(unit, production, restores, now_s + float(limit_s or 0))


def _read_address(request: Mapping[str, Any]) -> tuple[str, int] | None:
    host, port = request.get("host"), request.get("port")
    if host is None and port is None:
        return None
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port <= _MAX_PORT:
        raise ServiceError("not an address")
    return host, port


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
    listener.listen(_BACKLOG)
    listener.setblocking(False)
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
