"""Stand-ins for the clock and the service manager; each passes the contract of the real one.

The fake manager keeps real unit files and runs no process: a program is a function that says how it
lives, and time passes only when somebody sleeps on the fake clock.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunerd.errors import ConfigError, ServiceError
from tunerd.machine.clock import SystemClock
from tunerd.machine.net import can_bind
from tunerd.paths import Paths
from tunerd.tryout.local import enabled_mark, unit_names
from tunerd.tryout.local_service import (
    EXIT_EXEC,
    START_LIMIT_HIT,
    SUCCESS,
    Ending,
    ServiceSpec,
    StartLimit,
    complaints_about,
    read_service,
    result_of,
    should_restart,
)
from tunerd.units.manager import (
    MAX_LINE_CHARS,
    PORT_LIMIT_S,
    RESTART_S,
    STOP_S,
    LeaseSpec,
    LogSpan,
    UnitState,
)
from tunerd.units.systemd import STATE_PROPERTIES, to_unit_state
from tunerd.units.text import UnitFile, parse_unit, transient_text
from tunerd.words import Mode

_FIRST_PID = 1000
_END_LIMIT_S = 120.0
_NEVER = float("inf")
_CLEAN = Ending(code=0)
_NO_STARTS = StartLimit()


class AheadClock(SystemClock):
    """The machine's clock, its wall time set ahead by so many seconds, or back."""

    def __init__(self, by_s: float) -> None:
        self.by_s = by_s

    def now_s(self) -> float:
        return super().now_s() + self.by_s


class FakeClock:
    """A clock that only `sleep` and `advance` move."""

    def __init__(self, now_s: float = 1_790_000_000.0, monotonic_s: float = 5000.0) -> None:
        self._wall_ahead_s = now_s - monotonic_s
        self._monotonic_s = monotonic_s
        self._suspended_s = 0.0

    def now_s(self) -> float:
        """Wall-clock seconds."""
        return self._monotonic_s + self._wall_ahead_s

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        return self._monotonic_s

    def suspended_s(self) -> float:
        """Seconds in `suspend`."""
        return self._suspended_s

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self._monotonic_s += max(0.0, seconds)

    def advance(self, seconds: float) -> None:
        """As `sleep`, for tests that wait for nothing."""
        self.sleep(seconds)

    def set_wall(self, now_s: float) -> None:
        """Set the wall clock, as a person or NTP does; the monotonic one goes on."""
        self._wall_ahead_s = now_s - self._monotonic_s

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep, in which the monotonic clock stands still."""
        self._wall_ahead_s += seconds
        self._suspended_s += seconds


@dataclass(frozen=True, slots=True)
class Invocation:
    """One start of a program."""

    unit: str
    pid: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Life:
    """How a program lives: what it prints at once, when and how it ends.

    `ends_after_s` is infinite for a server; `obeys_after_s` is how long it takes to end on SIGTERM,
    infinite if it ignores it. `on_end` is called when it ended, whatever the cause.
    """

    prints: tuple[str, ...] = ()
    ends_after_s: float = _NEVER
    ending: Ending = _CLEAN
    obeys_after_s: float = 0.0
    term_ending: Ending = _CLEAN
    on_end: Callable[[], None] = field(default=lambda: None)


class StartFailed(Exception):
    """A program whose start is over when it has ended (`Type=oneshot`) ends badly, and prints this."""


Program = Callable[[Invocation], Life]
"""What is behind a path in `ExecStart=`."""


class UnitDefinition:
    """What systemd makes of a unit's files: drop-ins and masks count. `spec` is None where it cannot be started.

    A slice is there without a file, too.
    """

    def __init__(self, unit: str, paths: Paths) -> None:
        self.unit = unit
        self._paths = paths
        self.load()

    def load(self) -> None:
        """Read the unit's files."""
        self.spec: ServiceSpec | None = None
        self._signature = self._look()
        self._path, self._drop_ins = self._files()
        self._file = parse_unit("" if self._path is None else _text(self._path))
        for path in self._drop_ins:
            self._file = self._file.with_drop_in(parse_unit(_text(path)))
        if self._path is None or self._is_slice:
            self.load_state = "loaded" if self._is_slice else "not-found"
            return
        self.load_state = _load_state(_text(self._path), self._file)
        if self.load_state == "loaded":
            try:
                self.spec = read_service(self.unit, self._file)
            except ConfigError:
                self.load_state = "bad-setting"

    @property
    def _is_slice(self) -> bool:
        return self.unit.endswith(".slice")

    def demand(self) -> ServiceSpec:
        """What to start."""
        if self.spec is None:
            raise ServiceError(f"unit {self.unit} does not load", cause=self.load_state)
        return self.spec

    def properties(self) -> dict[str, str]:
        """Its part of what `systemctl show` would print."""
        state = "" if self.load_state == "not-found" else "disabled"
        if self.spec is not None and not self.spec.can_be_enabled:
            state = "static"
        if state and enabled_mark(self._paths, self.unit).exists():
            state = "enabled"
        return {
            "Id": self.unit,
            "LoadState": self.load_state,
            "FragmentPath": str(self._path or ""),
            "DropInPaths": " ".join(str(path) for path in self._drop_ins),
            "NeedDaemonReload": "yes" if self._look() != self._signature else "no",
            "UnitFileState": state,
            **self._group(),
        }

    def _group(self) -> dict[str, str]:
        """Where it is in the tree of groups, and its limits, which are written in bytes here."""
        section = "Slice" if self._is_slice else "Service"
        outer = self.unit.removesuffix(".slice").rpartition("-")[0] or "-"
        parent = f"{outer}.slice" if self._is_slice else "system.slice"
        limits = {
            name: self._file.value(section, name) or "infinity"
            for name in ("MemoryMax", "MemoryHigh")
        }
        is_there = self.load_state != "not-found"
        return {
            "Slice": (self._file.value(section, "Slice") or parent) if is_there else "",
            **limits,
        }

    def _files(self) -> tuple[Path | None, list[Path]]:
        """By file name, as systemd orders drop-ins; the same name in the durable folder wins."""
        folders = (self._paths.unit_dir, self._paths.runtime_unit_dir)
        fragments = [folder / self.unit for folder in folders if (folder / self.unit).is_file()]
        named = {
            path.name: path
            for folder in reversed(folders)
            for path in (folder / f"{self.unit}.d").glob("*.conf")
        }
        return next(iter(fragments), None), [named[name] for name in sorted(named)]

    def _look(self) -> list[tuple[str, int, int, int]]:
        fragment, drop_ins = self._files()
        files = [*([fragment] if fragment is not None else []), *drop_ins]
        found = [(path, path.stat()) for path in files]
        return [(str(path), s.st_ino, s.st_mtime_ns, s.st_size) for path, s in found]


def _load_state(text: str, file: UnitFile) -> str:
    if not text.strip():
        return "masked"
    return "error" if file.is_broken else "loaded"


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


@dataclass(slots=True)
class _Unit:
    """A unit; times are monotonic, infinite where nothing is planned."""

    definition: UnitDefinition
    active: str = "inactive"
    sub: str = "dead"
    result: str = SUCCESS
    process: Invocation | None = None
    life: Life = Life()
    ending: Ending | None = None
    ends_at_s: float = _NEVER
    ends_as: Ending = _CLEAN
    kill_at_s: float = _NEVER
    restart_at_s: float = _NEVER
    was_killed: bool = False
    stop_requested: bool = False
    n_restarts: int = 0
    invocation_id: str | None = None
    entered_s: float = 0.0
    limit: StartLimit = _NO_STARTS
    lines: list[tuple[str, str]] = field(default_factory=list)
    ended_well: set[str | None] = field(default_factory=set)
    starts: dict[str, float] = field(default_factory=dict)

    @property
    def due_s(self) -> float:
        return min(self.ends_at_s, self.kill_at_s, self.restart_at_s)

    @property
    def is_down(self) -> bool:
        return self.active in {"inactive", "failed"}


@dataclass
class FakeLease:
    """A Lease; `is_ending` while what is bound to it still stops."""

    spec: LeaseSpec
    ends_at_s: float
    manager: FakeServiceManager
    inhibits: str | None = "sleep"
    is_over: bool = False
    is_ending: bool = False
    restores: bool = False
    address: tuple[str, int] | None = None
    free_by_s: float | None = None

    def is_held(self) -> bool:
        """Whether it stands."""
        self.manager._catch_up()
        return self.stands

    @property
    def stands(self) -> bool:
        """As of the last look."""
        return not (self.is_over or self.is_ending)

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Note the address."""
        self.address = address

    def is_port_taken(self, now_s: float) -> bool:
        """Whether production still waits for its port."""
        if self.address is None or can_bind(*self.address):
            return False
        if self.free_by_s is None:
            self.free_by_s = now_s + PORT_LIMIT_S
        return now_s < self.free_by_s

    def end(self, *, timeout_s: float = 120.0) -> None:
        """End it."""
        del timeout_s
        self.manager.stop(self.spec.unit)


class FakeServiceManager:
    """A ServiceManager over real unit files and imagined processes.

    Args:
        folder: Unit files stand in `folder/units` and `folder/runtime-units`.
        clock: What all time is taken from.
        programs: By path; a path that is not there does not exist.

    `errors` holds by verb (`start`, `restart`, `reload`, ...) what the next calls raise, first to
    last.
    """

    def __init__(
        self, folder: Path, clock: FakeClock, programs: Mapping[str, Program] | None = None
    ) -> None:
        self.mode = Mode.SYSTEM
        self.unit_dir = folder / "units"
        self.runtime_unit_dir = folder / "runtime-units"
        self.programs: dict[str, Program] = dict(programs or {})
        self.errors: dict[str, list[ServiceError]] = {}
        self._paths = Paths(folder, folder, folder, self.unit_dir, self.runtime_unit_dir)
        self._clock = clock
        self._units: dict[str, _Unit] = {}
        self._next_pid = _FIRST_PID
        self._leases: list[FakeLease] = []
        self.unit_dir.mkdir(parents=True, exist_ok=True)
        self.runtime_unit_dir.mkdir(parents=True, exist_ok=True)

    # The seam

    def state(self, unit: str) -> UnitState:
        """How the unit is now."""
        boot_s = self._clock.now_s() - self._clock.monotonic_s()
        return to_unit_state(unit, self.properties(unit, *STATE_PROPERTIES), boot_s=boot_s)

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        """Raw properties."""
        self._catch_up()
        lease = self._lease_named(unit)
        if lease is not None:
            active = "active" if lease.stands else "deactivating"
            shown = {"LoadState": "loaded", "ActiveState": active, "SubState": "running"}
            return {name: shown[name] for name in names if name in shown}
        found = self._find(unit)
        shown = {
            **found.definition.properties(),
            "ActiveState": found.active,
            "SubState": found.sub,
            "Result": found.result,
            "MainPID": str(found.process.pid if found.process is not None else 0),
            **(found.ending or Ending()).to_properties(),
            "NRestarts": str(found.n_restarts),
            "InvocationID": found.invocation_id or "",
            "ActiveEnterTimestampMonotonic": str(int(found.entered_s * 1_000_000)),
        }
        return {name: shown[name] for name in names if name in shown}

    def check_ready(self) -> None:
        """It always is."""
        self._enter("check_ready")

    def reload(self) -> None:
        """Read the unit files again."""
        self._enter("reload")
        for unit in self._units.values():
            unit.definition.load()
            if unit.definition.spec is None and unit.sub == "auto-restart":
                unit.restart_at_s, unit.active, unit.sub = _NEVER, "failed", "failed"

    def start(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start it; one that waits for its restart is waited for, as systemd does."""
        self._enter("start")
        self._end_leases_of(unit, timeout_s)
        found = self._find(unit)
        if found.is_down:
            self._load_if_forgotten(found)
            found.n_restarts = 0
            self._begin(found, self._clock.monotonic_s())
            return
        self._wait(lambda: found.active == "active" or found.is_down, f"start of {unit}", timeout_s)

    def run_transient(
        self,
        unit: str,
        argv: Sequence[str],
        properties: Sequence[tuple[str, str]] = (),
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> None:
        """As local mode: a file where a reboot forgets it; refused where the name is not free."""
        if not self._find(unit).is_down:
            raise ServiceError(f"{unit} cannot be started", cause="it was already loaded")
        text = transient_text(argv, properties, environment or {})
        (self.runtime_unit_dir / unit).write_text(text)
        self.reload()
        self.start(unit, timeout_s=timeout_s)

    def stop(self, unit: str, *, timeout_s: float = STOP_S) -> None:
        """Stop it."""
        self._enter("stop")
        lease = self._lease_named(unit)
        if lease is not None:
            self._end_lease(lease, restores=lease.restores)
            return
        self._bring_down(self._find(unit), "stop", timeout_s)

    def restart(self, unit: str, *, timeout_s: float = RESTART_S) -> None:
        """Stop and start; without a usable definition nothing is stopped."""
        self._enter("restart")
        found = self._find(unit)
        self._load_if_forgotten(found)
        found.definition.demand()
        self._end_leases_of(unit)
        self._bring_down(found, "restart", timeout_s)
        found.n_restarts = 0
        self._begin(found, self._clock.monotonic_s())

    def reset_failed(self, unit: str) -> None:
        """Forget failures and counters."""
        self._enter("reset_failed")
        found = self._find(unit)
        found.limit, found.n_restarts = StartLimit(), 0
        if found.is_down:
            found.active, found.sub, found.result = "inactive", "dead", SUCCESS
            found.ending, found.invocation_id = None, None

    def enable(self, unit: str) -> None:
        """Make it start at boot."""
        self._enter("enable")
        found = self._find(unit)
        found.definition.load()
        if not found.definition.demand().can_be_enabled:
            raise ServiceError(f"{unit} is not enabled")
        enabled_mark(self._paths, unit).touch()

    def disable(self, unit: str) -> None:
        """Make it not start at boot."""
        self._enter("disable")
        enabled_mark(self._paths, unit).unlink(missing_ok=True)

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """Complaints, a missing program among them."""
        found = list(complaints_about(unit, text))
        if not found:
            path = read_service(unit, parse_unit(text)).program
            if path not in self.programs:
                found.append(f"{unit}: command {path} is not executable")
        return tuple(found)

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """Lines that its programs printed."""
        self._catch_up()
        lines = [
            line[:MAX_LINE_CHARS]
            for invocation, line in self._find(unit).lines
            if invocation_id is None or invocation == invocation_id
        ]
        return tuple(lines[max(0, len(lines) - max_lines) :])

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """As local mode: lives whole, from the last that had begun."""
        self._catch_up()
        found = self._find(unit)
        begun = [at_s for at_s in found.starts.values() if at_s <= since_s]
        first_s = max(begun, default=since_s)
        kept = [
            (at_s, line) for name, line in found.lines if (at_s := found.starts[name]) >= first_s
        ]
        lines = tuple(line[:MAX_LINE_CHARS] for _, line in kept)
        begins_s = kept[0][0] if kept else None
        return LogSpan(lines[max(0, len(lines) - max_lines) :], begins_s, len(lines) > max_lines)

    def was_stopped(self, unit: str, invocation_id: str) -> bool:
        """Whether a stop was asked for."""
        found = self._find(unit)
        return found.invocation_id == invocation_id and found.stop_requested

    def ended_well(self, unit: str, invocation_id: str) -> bool:
        """Whether that run of it ended with no failure."""
        self._catch_up()
        return invocation_id in self._find(unit).ended_well

    def service_units(self) -> tuple[str, ...]:
        """All that have a file or run."""
        self._catch_up()
        loaded = {name for name, unit in self._units.items() if unit.invocation_id is not None}
        return tuple(sorted({*loaded, *unit_names(self._paths)}))

    def start_bound(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start a unit that is bound to a lease."""
        self.start(unit, timeout_s=timeout_s)

    def lease(self, spec: LeaseSpec, *, timeout_s: float = STOP_S) -> FakeLease:
        """Take a unit's place."""
        self._enter("lease")
        self._bring_down(self._find(spec.production), "lease", timeout_s)
        self._enter("lease taken")
        ends_at_s = self._clock.monotonic_s() + spec.limit_s
        lease = FakeLease(spec, ends_at_s, self, restores=spec.restores)
        self._leases.append(lease)
        return lease

    # Leases

    def _lease_named(self, unit: str) -> FakeLease | None:
        """The lease with this unit, while it is not over."""
        found = (lease for lease in self._leases if lease.spec.unit == unit and not lease.is_over)
        return next(found, None)

    def _bound_to(self, lease: FakeLease) -> list[_Unit]:
        """Units that must not outlive it."""
        return [
            unit
            for unit in self._units.values()
            if unit.definition.spec and unit.definition.spec.bound_to == lease.spec.unit
        ]

    def _begin_end(self, lease: FakeLease, *, restores: bool) -> None:
        """Stop what is bound to it."""
        lease.is_ending, lease.restores = True, restores
        for unit in self._bound_to(lease):
            self._stop(unit)
        self._settle_leases()

    def _settle_leases(self) -> None:
        """Production starts where all that was bound is down."""
        for lease in self._leases:
            is_free = all(unit.is_down for unit in self._bound_to(lease))
            if lease.is_ending and is_free and not lease.is_port_taken(self._clock.monotonic_s()):
                lease.is_ending, lease.is_over = False, True
                production = self._find(lease.spec.production)
                if lease.restores and production.is_down:
                    self._load_if_forgotten(production)
                    with contextlib.suppress(ServiceError):
                        self._begin(production, self._clock.monotonic_s())

    def _end_leases_of(self, production: str, timeout_s: float = _END_LIMIT_S) -> None:
        held = [x for x in self._leases if x.spec.production == production and not x.is_over]
        for lease in held:
            self._end_lease(lease, restores=False, timeout_s=timeout_s)

    def _end_lease(
        self, lease: FakeLease, *, restores: bool, timeout_s: float = _END_LIMIT_S
    ) -> None:
        if lease.stands:
            self._begin_end(lease, restores=restores)
        try:
            self._wait(lambda: lease.is_over, f"stop of {lease.spec.unit}", timeout_s)
        except ServiceError:
            lease.restores = lease.restores or not restores  # a job to start goes on alone
            raise

    # For tests

    def leases(self) -> list[FakeLease]:
        """Those that are not over."""
        self._catch_up()
        return [lease for lease in self._leases if not lease.is_over]

    def drop_lease(self, lease: FakeLease) -> None:
        """What happens when the process that holds it dies."""
        self._catch_up()
        if lease.stands:
            self._begin_end(lease, restores=lease.spec.restores)

    def argv_of(self, unit: str) -> tuple[str, ...] | None:
        """What runs now."""
        self._catch_up()
        process = self._find(unit).process
        return process.argv if process is not None else None

    def end_main(self, unit: str, ending: Ending) -> None:
        """End the running program from outside, as `kill -9` or an out-of-memory killer does."""
        self._catch_up()
        found = self._find(unit)
        found.ends_at_s, found.ends_as = self._clock.monotonic_s(), ending
        self._catch_up()

    def print_line(self, unit: str, line: str) -> None:
        """Let the running program print a line."""
        found = self._find(unit)
        found.lines.append((found.invocation_id or "", line))

    def reboot(self) -> None:
        """Power off and on: what is enabled starts, what a reboot forgets is gone."""
        for path in self.runtime_unit_dir.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
        for unit in self._units.values():
            if unit.process is not None:
                unit.life.on_end()
        self._units.clear()
        self._leases.clear()
        for name in unit_names(self._paths):
            if enabled_mark(self._paths, name).exists():
                found = self._find(name)
                with contextlib.suppress(ServiceError):
                    self._begin(found, self._clock.monotonic_s())

    # Below

    def _enter(self, verb: str) -> None:
        self._catch_up()
        waiting = self.errors.get(verb)
        if waiting:
            raise waiting.pop(0)

    def _find(self, unit: str) -> _Unit:
        if unit not in self._units:
            self._units[unit] = _Unit(UnitDefinition(unit, self._paths))
        return self._units[unit]

    def _load_if_forgotten(self, unit: _Unit) -> None:
        """systemd does not keep the definition of a unit that is down and did not fail."""
        if unit.active == "inactive":
            unit.definition.load()

    def _wait(self, is_done: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Let time pass from one thing that is due to the next."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while not is_done():
            now_s = self._clock.monotonic_s()
            due_s = [unit.due_s for unit in self._units.values()]
            asks_for_port = any(one.free_by_s and not one.is_over for one in self._leases)
            next_s = min(*due_s, now_s + 1.0 if asks_for_port else _NEVER)
            self._clock.sleep(min(next_s, deadline_s) - now_s)
            self._catch_up()
            if next_s > deadline_s:
                raise ServiceError(f"{what} timed out")

    def _catch_up(self) -> None:
        """Let everything happen that was due by now, in order."""
        self._settle_leases()
        while self._units:
            unit = min(self._units.values(), key=lambda candidate: candidate.due_s)
            standing = [lease for lease in self._leases if lease.stands]
            first = min(standing, key=lambda lease: lease.ends_at_s, default=None)
            if first is not None and first.ends_at_s <= min(unit.due_s, self._clock.monotonic_s()):
                self._begin_end(first, restores=first.restores)
                continue
            if unit.due_s > self._clock.monotonic_s():
                return
            self._happen(unit, unit.due_s)

    def _happen(self, unit: _Unit, at_s: float) -> None:
        if unit.ends_at_s <= at_s:
            self._end(unit, unit.ends_as, at_s)
        elif unit.kill_at_s <= at_s:
            unit.was_killed = True
            self._end(unit, Ending(signal=signal.SIGKILL), at_s)
        else:
            unit.restart_at_s = _NEVER
            unit.n_restarts += 1
            try:
                self._begin(unit, at_s)
            except ServiceError:
                return

    def _begin(self, unit: _Unit, at_s: float) -> None:
        spec = unit.definition.demand()
        name = unit.definition.unit
        if spec.bound_to is not None:
            lease = self._lease_named(spec.bound_to)
            if lease is None or not lease.stands:
                raise ServiceError(f"{name} is bound to {spec.bound_to}, which is not active")
        unit.limit, is_allowed = unit.limit.after_start(
            at_s, interval_s=spec.start_limit_interval_s, burst=spec.start_limit_burst
        )
        if not is_allowed:
            unit.active, unit.sub, unit.result = "failed", "failed", START_LIMIT_HIT
            raise ServiceError(f"{name} was started too often", cause=START_LIMIT_HIT)
        unit.invocation_id, unit.result, unit.ending = uuid.uuid4().hex, SUCCESS, None
        unit.was_killed = unit.stop_requested = False
        unit.starts[unit.invocation_id] = self._clock.now_s() - self._clock.monotonic_s() + at_s
        program = self.programs.get(spec.program)
        if program is None:
            unit.lines.append((unit.invocation_id, f"{name}: {spec.program}: not found"))
            self._end(unit, Ending(code=EXIT_EXEC), at_s)
            raise ServiceError(f"{name} did not start", cause=f"no {spec.program}")
        self._next_pid += 1
        unit.process = Invocation(name, self._next_pid, spec.argv, spec.environment)
        unit.active, unit.sub, unit.entered_s = "active", "running", at_s
        try:
            unit.life = program(unit.process)
        except StartFailed as failed:
            unit.lines.append((unit.invocation_id, str(failed)))
            self._end(unit, Ending(code=1), at_s)
            why = "the control process exited with error code"
            raise ServiceError(f"start of {name} failed", cause=why) from failed
        unit.lines += [(unit.invocation_id, line) for line in unit.life.prints]
        unit.ends_at_s, unit.ends_as = at_s + unit.life.ends_after_s, unit.life.ending

    def _stop(self, unit: _Unit) -> None:
        now_s = self._clock.monotonic_s()
        if unit.sub == "auto-restart":
            unit.restart_at_s, unit.active, unit.sub = _NEVER, "inactive", "dead"
        elif unit.active == "active":
            spec = unit.definition.spec
            unit.stop_requested = True
            unit.active, unit.sub = "deactivating", "stop-sigterm"
            unit.kill_at_s = now_s + (spec.timeout_stop_s if spec is not None else 90.0)
            unit.ends_at_s = now_s + unit.life.obeys_after_s
            unit.ends_as = unit.life.term_ending
            self._catch_up()

    def _bring_down(self, unit: _Unit, verb: str, timeout_s: float) -> None:
        self._stop(unit)
        self._wait(lambda: unit.is_down, f"{verb} of {unit.definition.unit}", timeout_s)

    def _end(self, unit: _Unit, ending: Ending, at_s: float) -> None:
        on_end = unit.life.on_end if unit.process is not None else None
        unit.process, unit.ending, unit.life = None, ending, Life()
        unit.ends_at_s = unit.kill_at_s = _NEVER
        unit.result = result_of(ending, timed_out=unit.was_killed)
        if unit.result == SUCCESS:
            unit.ended_well.add(unit.invocation_id)
        spec = unit.definition.spec
        if (
            spec is not None
            and not unit.stop_requested
            and should_restart(spec.restart, unit.result)
        ):
            unit.active, unit.sub = "activating", "auto-restart"
            unit.restart_at_s = at_s + spec.restart_s
        elif unit.result == SUCCESS:
            unit.active, unit.sub = "inactive", "dead"
        else:
            unit.active, unit.sub = "failed", "failed"
        if on_end is not None:
            on_end()
        self._settle_leases()
