"""A service unit as tunerd's own supervisor runs it: what it honours, and what it leaves out.

The same unit text serves here and under systemd; directives that need the kernel features of a real
service manager (sandboxing, cgroups) are named, not obeyed.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.exec_start import parse_exec
from tunerd.core.time_span import parse_time_span
from tunerd.core.unit_directives import is_known, is_known_section
from tunerd.core.unit_environment import parse_environment
from tunerd.core.unit_file import UnitFile, parse_unit
from tunerd.errors import ConfigError

# Source: systemd.service(5) and systemd-system.conf(5), the defaults of an unchanged systemd.
DEFAULT_RESTART_S = 0.1
DEFAULT_TIMEOUT_STOP_S = 90.0
DEFAULT_START_LIMIT_INTERVAL_S = 10.0
DEFAULT_START_LIMIT_BURST = 5
_DEFAULT_UMASK = 0o022
UNLIMITED = -1

_TYPES = frozenset(
    {"simple", "exec", "forking", "oneshot", "dbus", "notify", "notify-reload", "idle"}
)
_KILL_MODES = frozenset({"control-group", "mixed", "process", "none"})
# Nothing more is promised by these than what the supervisor does anyway.
_WITHOUT_EFFECT = {
    ("Unit", "Description"),
    ("Unit", "Documentation"),
    ("Unit", "After"),
    ("Unit", "Wants"),
    ("Install", "WantedBy"),
}
_HONOURED = _WITHOUT_EFFECT | {
    ("Unit", "BindsTo"),
    ("Unit", "StartLimitIntervalSec"),
    ("Unit", "StartLimitBurst"),
    ("Service", "ExecStart"),
    ("Service", "Environment"),
    ("Service", "EnvironmentFile"),
    ("Service", "WorkingDirectory"),
    ("Service", "User"),
    ("Service", "Group"),
    ("Service", "Restart"),
    ("Service", "RestartSec"),
    ("Service", "TimeoutStopSec"),
    ("Service", "TimeoutSec"),
    ("Service", "KillMode"),
    ("Service", "KillSignal"),
    ("Service", "LimitMEMLOCK"),
    ("Service", "LimitNOFILE"),
    ("Service", "LimitCORE"),
    ("Service", "LimitAS"),
    ("Service", "UMask"),
    ("Service", "LoadCredential"),
    ("Service", "NoNewPrivileges"),
}
_TIME_SPANS = (
    ("Unit", "StartLimitIntervalSec"),
    ("Service", "RestartSec"),
    ("Service", "TimeoutStopSec"),
    ("Service", "TimeoutStartSec"),
    ("Service", "TimeoutSec"),
    ("Service", "RuntimeMaxSec"),
    ("Service", "WatchdogSec"),
)
_BOOLEANS = {
    **dict.fromkeys(("1", "yes", "y", "true", "t", "on"), True),
    **dict.fromkeys(("0", "no", "n", "false", "f", "off"), False),
}
_SIZE = re.compile(r"(\d+)([KMGTPE]?)")
_CREDENTIAL_ID = re.compile(r"[^/\x00-\x1f:]+")
_ACCOUNT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")


class Restart(StrEnum):
    """`Restart=`."""

    NO = "no"
    ALWAYS = "always"
    ON_SUCCESS = "on-success"
    ON_FAILURE = "on-failure"
    ON_ABNORMAL = "on-abnormal"
    ON_ABORT = "on-abort"
    ON_WATCHDOG = "on-watchdog"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What the supervisor needs of a unit.

    `exec_start` still holds specifiers and variables. Times are in seconds, possibly infinite;
    limits are None where the unit names none. `left_out` names directives that are not honoured.
    """

    unit: str
    file: UnitFile
    exec_start: str
    waits_for_exec: bool
    working_directory: str | None
    user: str | None
    group: str | None
    restart: Restart
    restart_s: float
    start_limit_interval_s: float
    start_limit_burst: int
    timeout_stop_s: float
    kill_mode: str
    kill_signal: int
    memlock_bytes: int | None
    n_files: int | None
    core_bytes: int | None
    address_space_bytes: int | None
    umask: int
    no_new_privileges: bool
    credentials: tuple[tuple[str, str], ...]
    can_be_enabled: bool
    left_out: tuple[str, ...]


def read_service(unit: str, file: UnitFile) -> ServiceSpec:
    """The service that this text describes; values that systemd would ignore are ignored.

    Raises:
        ConfigError: systemd would refuse to load it.
    """
    fatal = next((problem for problem in file.problems if problem.is_fatal), None)
    if fatal is not None:
        raise ConfigError(f"{unit} does not load: line {fatal.line}: {fatal.text}")
    commands = file.values("Service", "ExecStart")
    if len(commands) != 1:
        count = "no" if not commands else "more than one"
        raise ConfigError(f"{unit} has {count} ExecStart=")
    exec_start = commands[0].value
    parse_exec(exec_start, {}, {})
    values = _Values(file)
    directory = file.value("Service", "WorkingDirectory")
    if directory is not None and directory.removeprefix("-")[:1] not in {"/", "~", "%"}:
        raise ConfigError(f"{unit}: WorkingDirectory= is not absolute: {directory}")
    return ServiceSpec(
        unit=unit,
        file=file,
        exec_start=exec_start,
        waits_for_exec=file.value("Service", "Type") not in {None, "simple", "idle"},
        working_directory=directory,
        user=file.value("Service", "User"),
        group=file.value("Service", "Group"),
        restart=values.restart(),
        restart_s=values.span("Service", "RestartSec", DEFAULT_RESTART_S),
        start_limit_interval_s=values.span(
            "Unit", "StartLimitIntervalSec", DEFAULT_START_LIMIT_INTERVAL_S
        ),
        start_limit_burst=values.number("Unit", "StartLimitBurst", DEFAULT_START_LIMIT_BURST),
        timeout_stop_s=values.timeout_stop_s(),
        kill_mode=values.choice("KillMode", _KILL_MODES, "control-group"),
        kill_signal=values.kill_signal(),
        memlock_bytes=parse_size(file.value("Service", "LimitMEMLOCK")),
        n_files=parse_size(file.value("Service", "LimitNOFILE")),
        core_bytes=parse_size(file.value("Service", "LimitCORE")),
        address_space_bytes=parse_size(file.value("Service", "LimitAS")),
        umask=values.umask(),
        no_new_privileges=values.flag("NoNewPrivileges"),
        credentials=values.credentials(),
        can_be_enabled=bool(
            file.value("Install", "WantedBy") or file.value("Install", "RequiredBy")
        ),
        left_out=left_out(file),
    )


def left_out(file: UnitFile) -> tuple[str, ...]:
    """Names of the directives in a unit that the supervisor does not honour, each once."""
    names = [
        f"ExecStart={prefix}"
        for directive in file.values("Service", "ExecStart")
        for prefix in parse_exec(directive.value, {}, {}).prefixes
        if prefix in "-+!|"
    ]
    for directive in file.directives:
        key = (directive.section, directive.name)
        if key == ("Service", "Type"):
            if directive.value not in {"", "simple", "exec", "idle"}:
                names.append(f"Type={directive.value}")
        elif key not in _HONOURED and not directive.section.startswith("X-"):
            names.append(f"{directive.name}=")
    return tuple(dict.fromkeys(names))


def complaints_about(unit: str, text: str) -> tuple[str, ...]:
    """What systemd would complain about, as far as it can be told without it; empty if nothing."""
    if not text.strip():
        return (f"{unit} is empty: a unit without content is masked",)
    file = parse_unit(text)
    found = [f"{unit}:{problem.line}: {problem.text}" for problem in file.problems]
    for directive in file.directives:
        where = f"{unit}:{directive.line}"
        if not is_known_section(directive.section):
            found.append(f"{where}: unknown section [{directive.section}]")
        elif not is_known(directive.section, directive.name):
            found.append(f"{where}: unknown key in section [{directive.section}]: {directive.name}")
        elif directive.value and not _is_good_value(
            directive.section, directive.name, directive.value
        ):
            found.append(f"{where}: bad value: {directive.name}={directive.value}")
    try:
        read_service(unit, file)
    except ConfigError as error:
        found.append(error.message)
    return tuple(dict.fromkeys(found))


def _is_good_value(section: str, name: str, value: str) -> bool:
    if (section, name) in _TIME_SPANS:
        return parse_time_span(value) is not None
    if section != "Service":
        return True
    match name:
        case "Type":
            return value in _TYPES
        case "Restart":
            return value in set(Restart)
        case "KillMode":
            return value in _KILL_MODES
        case "UMask":
            return _octal(value) is not None
        case "LimitMEMLOCK" | "LimitNOFILE" | "LimitCORE" | "LimitAS":
            return parse_size(value) is not None
        case "Environment":
            return not parse_environment(value, {}).notes or "%" in value
        case "LoadCredential":
            return _credential(value) is not None
        case "User" | "Group":
            return "%" in value or _ACCOUNT.fullmatch(value) is not None
        case _:
            return True


class _Values:
    """Reads single values, with systemd's default where there is none or a bad one."""

    def __init__(self, file: UnitFile) -> None:
        self._file = file

    def span(self, section: str, name: str, default_s: float) -> float:
        value = parse_time_span(self._file.value(section, name) or "")
        return default_s if value is None else value

    def timeout_stop_s(self) -> float:
        both = self.span("Service", "TimeoutSec", DEFAULT_TIMEOUT_STOP_S)
        # Zero switches the time-out off, as `infinity` does.
        return self.span("Service", "TimeoutStopSec", both) or float("inf")

    def number(self, section: str, name: str, default: int) -> int:
        text = self._file.value(section, name) or ""
        return int(text) if text.isdecimal() else default

    def choice(self, name: str, allowed: frozenset[str], default: str) -> str:
        value = self._file.value("Service", name)
        return value if value in allowed else default

    def flag(self, name: str) -> bool:
        return _BOOLEANS.get((self._file.value("Service", name) or "").lower(), False)

    def restart(self) -> Restart:
        value = self._file.value("Service", "Restart")
        return Restart(value) if value in set(Restart) else Restart.NO

    def kill_signal(self) -> int:
        name = (self._file.value("Service", "KillSignal") or "SIGTERM").removeprefix("SIG")
        try:
            return int(signal.Signals[f"SIG{name}"])
        except KeyError:
            return int(signal.SIGTERM)

    def umask(self) -> int:
        value = _octal(self._file.value("Service", "UMask") or "")
        return _DEFAULT_UMASK if value is None else value

    def credentials(self) -> tuple[tuple[str, str], ...]:
        parsed = (
            _credential(directive.value)
            for directive in self._file.values("Service", "LoadCredential")
        )
        return tuple(pair for pair in parsed if pair is not None)


def parse_size(text: str | None) -> int | None:
    """Bytes, or a count, of a `Limit...=` value; UNLIMITED for `infinity`, None for none or a bad one.

    Of a pair `soft:hard` it is the hard one.
    """
    value = (text or "").rpartition(":")[2].strip()
    if value == "infinity":
        return UNLIMITED
    found = _SIZE.fullmatch(value)
    if found is None:
        return None
    exponent = " KMGTPE".index(found.group(2) or " ")
    return int(found.group(1)) << 10 * exponent


def _octal(text: str) -> int | None:
    is_mode = re.fullmatch(r"[0-7]{1,4}", text) is not None
    return int(text, 8) if is_mode and int(text, 8) <= 0o777 else None  # noqa: PLR2004  file modes


def _credential(text: str) -> tuple[str, str] | None:
    name, colon, path = text.partition(":")
    if not colon or not _CREDENTIAL_ID.fullmatch(name) or not path.startswith(("/", "%")):
        return None
    return name, path
