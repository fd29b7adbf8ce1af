"""What a service manager is to tunerd: its calls, states, logs and leases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from tunerd.result import Message, warning
from tunerd.words import MiB, format_mib

# States of a unit whose command has not ended.
UP = frozenset({"active", "activating", "deactivating"})


@dataclass(frozen=True, slots=True)
class UnitState:
    """One reading of one unit, in systemd's own words (`systemctl show`).

    `unit` is its own name, also where an alias was asked for. `main_pid` is None while nothing runs.
    `exit_status` and `exit_kind` (exited, killed, dumped) are of the last main process that ended.
    `active_since_s` is wall-clock seconds since the epoch. `result` is `success` or the reason of the
    last failure (exit-code, signal, core-dump, oom-kill, timeout, start-limit-hit, ...). `slice` is the one that
    it is in, and of a slice its parent; `memory_max_bytes` and `memory_high_bytes` are its own limits, without
    those of its slices, and None where it has none.
    """

    unit: str
    load_state: str
    active_state: str
    sub_state: str
    result: str
    main_pid: int | None
    exit_kind: str | None
    exit_status: int | None
    n_restarts: int | None
    invocation_id: str | None
    fragment_path: Path | None
    drop_ins: tuple[Path, ...]
    needs_reload: bool
    unit_file_state: str | None
    active_since_s: float | None
    slice: str | None = None
    memory_max_bytes: int | None = None
    memory_high_bytes: int | None = None

    @property
    def exists(self) -> bool:
        """Whether the manager found a definition for this unit."""
        return self.load_state not in {"not-found", ""}

    @property
    def is_active(self) -> bool:
        """Whether its main process runs."""
        return self.active_state == "active"

    @property
    def life(self) -> str | None:
        """What names this run of its process; None while nothing runs."""
        return self.invocation_id or (None if self.main_pid is None else str(self.main_pid))

    @property
    def runs(self) -> bool:
        """Whether its main process runs, or it is being started."""
        return self.active_state in {"active", "activating"}

    @property
    def has_failed(self) -> bool:
        """Whether it is failed, or waits to be restarted after a failure."""
        return self.active_state == "failed" or self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Whether its manager will start it again by itself, after a pause."""
        return self.sub_state.startswith("auto-restart")

    @property
    def is_enabled(self) -> bool | None:
        """Whether it starts at boot; None where the manager does not say.

        A unit that is only linked is pulled in by nothing, and a reboot forgets what is of this run.
        """
        return None if self.unit_file_state is None else self.unit_file_state == "enabled"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What a unit, or a slice around it, may hold of RAM: pages of files that it read count, and can be taken back.

    Beyond `MemoryMax` its processes are killed, beyond `MemoryHigh` they wait while pages are taken from them.
    `where` is the file that says so; None where none does.
    """

    name: str
    unit: str
    mib: MiB
    where: Path | None

    def __str__(self) -> str:
        place = "" if self.where is None else f" in `{self.where}`"
        return f"{self.unit} may use {format_mib(self.mib)} ({self.name}={place})"


def lacks_manager() -> Message:
    """That a user's systemd was looked for in vain, so that tunerd's own supervisor does its work."""
    return warning(
        "no-user-manager",
        "this machine runs systemd, but your own service manager cannot be reached: tunerd's "
        "supervisor takes its place, and nothing starts that at boot",
        "loginctl enable-linger, then set XDG_RUNTIME_DIR=/run/user/$(id -u) if it is not set; "
        "if that is what you want, say --local",
    )


MARK = "\x1e"
STARTING = "Starting"
"""With this the first mark of a start begins."""
_MARK_LINE = re.compile(rf"{MARK}(\S+) ([0-9a-f]{{32}}) (.*)")


MAX_LINE_CHARS = 2000
"""Longest line of any program's log that is looked at: who writes the line chooses what patterns try."""


@dataclass(frozen=True, slots=True)
class LogSpan:
    """What a unit wrote since a moment, oldest first.

    `begins_s` is when the first of these lines was written, or at the latest [seconds since the
    epoch]; None where that is not known, or there is none. `is_cut` says that there are older ones
    since that moment, too many to be read.
    """

    lines: tuple[str, ...]
    begins_s: float | None
    is_cut: bool = False


def cut_lines(text: str) -> list[str]:
    """What a program wrote, as lines that are not too long to look at; what was cut is lost."""
    return [line[:MAX_LINE_CHARS] for line in text.removesuffix("\n").split("\n")] if text else []


# So a manager speaks of a unit.
_OF_MANAGER = re.compile(r"\S+\.service: ")


def said_by_program(lines: Iterable[str]) -> list[str]:
    """Lines of a program, empty those in its manager's name: builds print what a client asks for, line ends and all.

    They are counted all the same, or who asks for so many would take the newest for all.
    """
    return ["" if _OF_MANAGER.match(line) else line for line in lines]


def mark(time: str, invocation_id: str, text: str) -> str:
    """A mark as it stands in the file, with its line end."""
    return f"{MARK}{time} {invocation_id} {' '.join(text.split())}\n"


def log_lines(text: str, *, unit: str, invocation_id: str | None = None) -> tuple[str, ...]:
    """The lines of a log, oldest first; only those of one start if that is named.

    Marks become lines that begin with the unit's name, as in systemd's journal. Lines before the
    first mark belong to a start whose mark was cut off: to that of the first mark, unless another begins there, or,
    where nothing is marked, to any that is asked for.
    """
    lines: list[str] = []
    written = cut_lines(text)
    first = next(filter(None, map(_MARK_LINE.fullmatch, written)), None)
    current = invocation_id if first is None else first.group(2)
    if first is not None and first.group(3).startswith(STARTING):
        current = None
    for line in written:
        found = _MARK_LINE.fullmatch(line)
        if found is not None:
            current = found.group(2)
        if invocation_id is None or current == invocation_id:
            lines += said_by_program([line]) if found is None else [f"{unit}: {found.group(3)}"]
    return tuple(lines)


def log_span(text: str, *, unit: str, since_s: float, max_lines: int) -> LogSpan:
    """The lines of a log since a moment; only its marks have times.

    So what was written after the last mark before that moment counts as a whole: a server's life is
    not cut in two.
    """
    lines = cut_lines(text)
    times = [
        (at, time_s) for at, line in enumerate(lines) if (time_s := _time_of(line)) is not None
    ]
    before = [(at, time_s) for at, time_s in times if time_s <= since_s]
    first, begins_s = before[-1] if before else (0, times[0][1] if times else None)
    kept = log_lines("\n".join(lines[first:]), unit=unit)
    return LogSpan(kept[max(0, len(kept) - max_lines) :], begins_s, len(kept) > max_lines)


def _time_of(line: str) -> float | None:
    found = _MARK_LINE.fullmatch(line)
    try:
        return None if found is None else datetime.fromisoformat(found.group(1)).timestamp()
    except ValueError:
        return None


# Linux keeps the port of ended connections for 60 s (TCP_TIMEWAIT_LEN); a candidate may need some
# seconds to end its streams first.
PORT_LIMIT_S = 75.0
# The manager itself ends a start by TimeoutStartSec=, to which ExecStartPre= of a drop-in counts; this is for one that hangs.
START_S = 300.0
# And a stop by TimeoutStopSec=, for which `service.stop_timeout_s` may be 600 s: a server waits for a stream under way.
STOP_S = 660.0
RESTART_S = STOP_S + START_S
_PREFIX = "tunerd-"
_NAMES = re.compile(r"tunerd-(?:lease|candidate|power)-([0-9a-f]{8,32})(?:-\d+)?\.service")
_BOUND = re.compile(r"tunerd-(?:candidate-[0-9a-f]{8,32}-\d+|power-[0-9a-f]{8,32})\.service")


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What a service manager needs to know of a lease.

    `id` is never used twice. `restores` is whether production starts when the lease ends, with the
    units that its stop takes `along`; `limit_s` is when it ends at the latest. `bound_to` is the unit
    of the process that measures; None where the manager is to make one for the calling process.
    """

    id: str
    production: str
    restores: bool
    limit_s: float
    why: str
    bound_to: str | None = None
    along: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The lease's own unit."""
        return lease_unit(self.id)


def lease_unit(lease_id: str) -> str:
    """The name of a lease's unit."""
    return f"{_PREFIX}lease-{lease_id}.service"


def candidate_unit(lease_id: str, number: int) -> str:
    """The name of a candidate's unit, the `number`-th of its lease."""
    return f"{_PREFIX}candidate-{lease_id}-{number}.service"


def power_unit(lease_id: str) -> str:
    """The name of the unit that holds another power limit within a lease."""
    return f"{_PREFIX}power-{lease_id}.service"


def run_scope(lease_id: str) -> str:
    """The name of the unit around a command typed by hand."""
    return f"{_PREFIX}run-{lease_id}.scope"


def lease_of(unit: str) -> str | None:
    """The lease's id in the name of its own or a bound unit; None for any other unit."""
    found = _NAMES.fullmatch(unit)
    return found.group(1) if found else None


def bound_unit_behind(file_name: str) -> str | None:
    """The unit within a lease that a file or folder belongs to: itself, drop-ins, or a cut-short write."""
    found = _BOUND.search(file_name)
    return found.group() if found else None


def is_candidate(unit: str) -> bool:
    """Whether this is the name of a candidate's unit."""
    return lease_of(unit) is not None and unit.startswith(f"{_PREFIX}candidate-")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What other processes may know of a measurement under way; gone after a reboot.

    Times are wall-clock seconds. `ended_by` is who asked for its end before its time. `is_owed` says
    that it is over and production could not be started, its unit being masked or gone.
    """

    id: str
    production: str
    purpose: str
    pid: int
    since_s: float
    until_s: float
    restores: bool
    inhibits: str | None = None
    ended_by: str | None = None
    is_owed: bool = False

    @property
    def unit(self) -> str:
        """The lease's own unit."""
        return lease_unit(self.id)

    def left_s(self, now_s: float) -> float:
        """How much longer it lasts at most: never longer than all of it, though a clock was set back."""
        return min(max(0.0, self.until_s - now_s), self.until_s - self.since_s)


class Lease(Protocol):
    """Production's place, held by this process.

    `inhibits` is what the machine is kept from while it lasts (`sleep`, `idle`), None for nothing.
    """

    @property
    def spec(self) -> LeaseSpec:
        """What was asked for."""

    @property
    def inhibits(self) -> str | None:
        """What the machine is kept from."""

    def is_held(self) -> bool:
        """Whether it still stands; once it does not, it never will again."""

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Production is not to start before its host and port are free; None: it starts at once.

        However the lease ends, and whether this process lives or not. A port that stays taken is
        waited for no longer than `units.manager.PORT_LIMIT_S`.
        """

    def end(self, *, timeout_s: float = 120.0) -> None:
        """End it: what is bound to it stops, then production starts if it restores.

        One that has ended is no error. Returns when what was bound is down.
        """


class ServiceManager(Protocol):
    """Starts and stops units, and says how they are.

    Every call ends within a stated time or raises ServiceError. A job that the manager reports as
    failed, cancelled or timed out raises ServiceError; a job that is `done` says nothing about the
    health of the program it started.
    """

    unit_dir: Path
    """Where a unit file must stand to be the live definition."""
    runtime_unit_dir: Path
    """Where a unit file stands that a reboot forgets."""

    def state(self, unit: str) -> UnitState:
        """How the unit is now; an unknown unit has load_state `not-found`."""

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        """Raw properties as `systemctl show` prints them; unknown ones are absent."""

    def check_ready(self) -> None:
        """Whether what a change needs of the manager is there; raises ServiceError if it is not.

        It changes no unit and starts nothing.
        """

    def reload(self) -> None:
        """Make the manager read the unit files again."""

    def start(self, unit: str, *, timeout_s: float = START_S) -> None:
        """Start and wait for the job."""

    def stop(self, unit: str, *, timeout_s: float = STOP_S) -> None:
        """Stop and wait for the job; a stopped unit is no error."""

    def restart(self, unit: str, *, timeout_s: float = RESTART_S) -> None:
        """Stop if needed, start, and wait for the job."""

    def reset_failed(self, unit: str) -> None:
        """Forget failures and start counters; a unit without any is no error."""

    def enable(self, unit: str) -> None:
        """Make the unit start at boot (without starting it) and make that durable."""

    def disable(self, unit: str) -> None:
        """Make the unit not start at boot; a unit without a link is no error."""

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """What the manager would complain about if `text` were this unit; empty if nothing."""

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """The newest lines that the unit wrote, oldest first, of one invocation if given; fewer than asked for are all."""

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """What the unit wrote since then [seconds since the epoch], the newest if it is too much.

        Where lines have no times of their own, a server's life that had begun before counts whole.
        """

    def was_stopped(self, unit: str, invocation_id: str) -> bool:
        """Whether somebody asked the manager to stop this invocation; what it printed does not count."""

    def ended_well(self, unit: str, invocation_id: str) -> bool:
        """Whether the manager wrote that this invocation ended, and with no failure; a user's or local mode's writes of none."""

    def service_units(self) -> tuple[str, ...]:
        """Names of all service units that the manager has loaded."""

    def run_transient(
        self,
        unit: str,
        argv: Sequence[str],
        properties: Sequence[tuple[str, str]] = (),
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> None:
        """Start `argv` as a unit that a reboot forgets, and wait for the job.

        `properties` are directives as in unit files, but that nothing in them is expanded. The name
        must be free: of a unit that ended and is not kept as failed it is, after a moment.
        """

    def lease(self, spec: LeaseSpec, *, timeout_s: float = STOP_S) -> Lease:
        """Stop production and hold its place, until the lease ends in one of these ways.

        `end` is called, this process dies, somebody starts production or stops the lease's unit,
        or `limit_s` is over. In each the units with `BindsTo=` the lease's unit stop, and then
        production starts if the lease `restores`, whether this process lives or not.
        """

    def start_bound(self, unit: str, *, timeout_s: float = START_S) -> None:
        """Start a unit that is bound to a lease, and wait for the job.

        Where the lease is gone this fails; it never takes the lease anew.
        """
