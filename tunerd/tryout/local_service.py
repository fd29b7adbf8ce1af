"""A unit as tunerd's own supervisor runs it: what counts of its text, and what an end means.

The text is what tunerd writes (`units.text`, `units.text.transient_text`); it serves under systemd
as well. What is not read here does nothing without systemd: sandboxing, cgroups, drop-ins.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tunerd.calendar import parse_time_span
from tunerd.errors import ConfigError
from tunerd.units.text import UnitFile, environment_of, parse_exec, parse_unit

SUCCESS = "success"
EXIT_CODE = "exit-code"
START_LIMIT_HIT = "start-limit-hit"
EXIT_EXEC = 203
"""What systemd exits with in the place of a program that cannot be executed (systemd.exec(5))."""

# Source: systemd.service(5), `Restart=`: ends by these count as clean.
_CLEAN_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE})
# As many digits as the kernel takes in any case.
_NUMBER = re.compile("[0-9]{1,18}")
_CREDENTIALS = "\x00credentials"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What the supervisor needs of a unit.

    Times are in seconds, possibly infinite; `limits` are those that the unit names. `bound_to` is
    the unit without which it must not run.
    """

    program: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    work_dir: str
    user: str | None
    restart: str
    restart_s: float
    start_limit_interval_s: float
    start_limit_burst: int
    timeout_stop_s: float
    limits: Mapping[str, int]
    umask: int
    no_new_privileges: bool
    bound_to: str | None
    can_be_enabled: bool


def read_service(unit: str, file: UnitFile) -> ServiceSpec:
    """The service that this text describes; a value that cannot be read is systemd's default.

    Raises:
        ConfigError: It describes none.
    """
    if file.is_broken:
        raise ConfigError(f"{unit} does not load: {file.problems[-1]}")
    commands = file.values("Service", "ExecStart")
    if len(commands) != 1:
        count = "no" if not commands else "more than one"
        raise ConfigError(f"{unit} has {count} ExecStart=")
    environment = environment_of(file, {})
    command = parse_exec(commands[0].value, environment, {"d": _CREDENTIALS})

    def of(name: str, default: str = "", section: str = "Service") -> str:
        return file.value(section, name) or default

    def seconds(name: str, default_s: float, section: str = "Service") -> float:
        value = parse_time_span(of(name, section=section))
        return default_s if value is None else value

    def number(name: str, section: str = "Service") -> int | None:
        text = of(name, section=section)
        return int(text) if _NUMBER.fullmatch(text) else None

    memlock = -1 if of("LimitMEMLOCK") == "infinity" else None
    limits = {"NOFILE": number("LimitNOFILE"), "MEMLOCK": memlock}
    burst, umask = number("StartLimitBurst", "Unit"), of("UMask")
    return ServiceSpec(
        program=command.path,
        argv=tuple(_credential(file, word) for word in command.argv),
        environment=environment,
        work_dir=of("WorkingDirectory", "/").removeprefix("-").replace("%%", "%"),
        user=of("User") or None,
        restart=of("Restart", "no"),
        restart_s=seconds("RestartSec", 0.1),
        start_limit_interval_s=seconds("StartLimitIntervalSec", 10.0, "Unit"),
        start_limit_burst=5 if burst is None else burst,
        timeout_stop_s=seconds("TimeoutStopSec", 90.0),
        limits={name: one for name, one in limits.items() if one is not None},
        umask=int(umask, 8) if re.fullmatch("[0-7]{1,4}", umask) else 0o022,
        no_new_privileges=of("NoNewPrivileges") == "yes",
        bound_to=of("BindsTo", section="Unit") or None,
        can_be_enabled=bool(of("WantedBy", section="Install")),
    )


def _credential(file: UnitFile, word: str) -> str:
    """The file behind a credential: it is read where it is, by the account that the unit runs as."""
    for directive in file.values("Service", "LoadCredential"):
        name, _, path = directive.value.partition(":")
        if word == f"{_CREDENTIALS}/{name}":
            return path.replace("%%", "%")
    return word


def complaints_about(unit: str, text: str) -> tuple[str, ...]:
    """Why the supervisor could not run this text; empty if it can."""
    file = parse_unit(text)
    found = [f"{unit}: {problem}" for problem in file.problems]
    try:
        read_service(unit, file)
    except ConfigError as error:
        found.append(error.message)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a main process ended: `code`, or `signal`; neither where nobody could see it."""

    code: int | None = None
    signal: int | None = None

    @property
    def text(self) -> str:
        """For the log."""
        if self.code is not None:
            return f"exited {self.code}"
        return f"killed {self.signal}" if self.signal is not None else "unknown how"

    def to_properties(self) -> dict[str, str]:
        """As `systemctl show` prints it."""
        kind = "1" if self.code is not None else "2" if self.signal is not None else "0"
        return {"ExecMainCode": kind, "ExecMainStatus": str(self.code or self.signal or 0)}


def result_of(ending: Ending, *, timed_out: bool) -> str:
    """The unit's result; an end that nobody saw counts as a failure.

    Args:
        ending: How the main process ended.
        timed_out: Whether it was killed because it did not stop in time.
    """
    if timed_out:
        return "timeout"
    if ending.signal is not None:
        return SUCCESS if ending.signal in _CLEAN_SIGNALS else "signal"
    return SUCCESS if ending.code == 0 else EXIT_CODE


def should_restart(restart: str, result: str) -> bool:
    """Whether a unit that ended by itself with `result` is started again."""
    return restart == "always" or (restart == "on-failure" and result != SUCCESS)


@dataclass(frozen=True, slots=True)
class StartLimit:
    """How often a unit was started since `begun_s` (monotonic)."""

    begun_s: float | None = None
    n_starts: int = 0

    def after_start(
        self, now_s: float, *, interval_s: float, burst: int
    ) -> tuple[StartLimit, bool]:
        """The count after one more attempt, and whether that attempt is allowed.

        The window begins with a start and the next one after its end begins a new one; refused
        attempts count too. An interval or burst of zero switches the limit off.
        """
        if interval_s <= 0 or burst <= 0:
            return self, True
        if self.begun_s is None or now_s - self.begun_s > interval_s:
            return StartLimit(now_s, 1), True
        return StartLimit(self.begun_s, self.n_starts + 1), self.n_starts + 1 <= burst
