"""The system's or a user's systemd, driven by `systemctl` and its sisters as subprocesses.

They work with the D-Bus broker dead, speak one language from systemd 252 on, and cost 4 to 35 ms a
call. Only `KEY=VALUE` output and exit codes are relied on; the one exception is named where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunerd.errors import HostError, JobCanceled, ServiceError
from tunerd.machine.clock import SystemClock, polls, process_began_s
from tunerd.machine.files import Files, sync_folder
from tunerd.machine.net import TABLES, table_pattern
from tunerd.machine.process import (
    MINIMAL_ENVIRONMENT,
    Completed,
    Setting,
    process_name,
    process_stat,
    run,
)
from tunerd.paths import Paths, paths_for
from tunerd.units.manager import (
    PORT_LIMIT_S,
    RESTART_S,
    START_S,
    STOP_S,
    Lease,
    LeaseSpec,
    LogSpan,
    UnitState,
    cut_lines,
    run_scope,
    said_by_program,
)
from tunerd.units.text import relaxed_words
from tunerd.words import Mode

# waitid(2): si_code of a child, as systemd prints it.
_EXIT_KINDS = {"1": "exited", "2": "killed", "3": "dumped"}
_PER_SECOND = 1_000_000


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _text(text: str) -> str | None:
    return text or None


# What `systemctl show` prints, the part of a state that it is, and how that is read.
_SHOWN: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "Id": ("unit", str),
    "LoadState": ("load_state", str),
    "ActiveState": ("active_state", str),
    "SubState": ("sub_state", str),
    "Result": ("result", str),
    "MainPID": ("main_pid", lambda text: _number(text) or None),
    "ExecMainCode": ("exit_kind", _EXIT_KINDS.get),
    "ExecMainStatus": ("exit_status", _number),
    "NRestarts": ("n_restarts", _number),
    "InvocationID": ("invocation_id", _text),
    "FragmentPath": ("fragment_path", lambda text: Path(text) if text else None),
    "DropInPaths": ("drop_ins", lambda text: tuple(map(Path, relaxed_words(text)))),
    "NeedDaemonReload": ("needs_reload", lambda text: text == "yes"),
    "UnitFileState": ("unit_file_state", _text),
    "ActiveEnterTimestampMonotonic": ("active_since_s", _number),
    "Slice": ("slice", _text),
    "MemoryMax": ("memory_max_bytes", _number),
    "MemoryHigh": ("memory_high_bytes", _number),
}
STATE_PROPERTIES = tuple(_SHOWN)


def to_unit_state(unit: str, shown: Mapping[str, str], *, boot_s: float) -> UnitState:
    """The state that these properties describe.

    Args:
        unit: The name that was asked for.
        shown: `STATE_PROPERTIES` as `systemctl show` prints them.
        boot_s: Wall-clock time at which CLOCK_MONOTONIC was 0.
    """
    found = {part: read(shown.get(name, "")) for name, (part, read) in _SHOWN.items()}
    found["unit"] = found["unit"] or unit
    if found["exit_kind"] is None:
        found["exit_status"] = None
    entered_us = found["active_since_s"]
    found["active_since_s"] = boot_s + entered_us / _PER_SECOND if entered_us else None
    return UnitState(**found)


# What a process wrote; what the system's and a user's manager say of a unit.
INVOCATION_FIELDS = ("_SYSTEMD_INVOCATION_ID", "INVOCATION_ID", "USER_INVOCATION_ID")


def journal_entries(text: str) -> list[dict[str, Any]]:
    """The entries of `journalctl --reverse --output=json`, oldest first.

    What is cut off at the end (an incomplete last entry) is left out.
    """
    found = []
    for line in reversed(text.split("\n")):
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict)]


def journal_lines(
    entries: Sequence[Mapping[str, Any]],
    max_lines: int,
    *,
    invocation_id: str | None = None,
    is_cut: bool = False,
) -> tuple[str, ...]:
    """The newest lines of entries, oldest first; of one invocation if that is named.

    Where older entries were too long to be read (`is_cut`) empty lines stand in their place.

    The journal does not always know the invocation of a process that ended at once (2 of 45 on a
    busy machine); such a line belongs to the invocation that was last named before it.
    """
    current = None
    kept: list[str] = []
    for entry in entries:
        named = next((entry[name] for name in INVOCATION_FIELDS if entry.get(name)), None)
        current = named or current
        if invocation_id in {None, current}:
            lines = _message_lines(entry.get("MESSAGE"))
            is_of_manager = any(map(entry.get, INVOCATION_FIELDS[1:]))
            kept.extend(lines if is_of_manager or named is None else said_by_program(lines))
    missing = max_lines - len(kept) if is_cut and kept else 0
    return ("",) * missing + tuple(kept[max(0, len(kept) - max_lines) :])


def _message_lines(message: Any) -> list[str]:
    """Text, or a list of bytes where it is not printable UTF-8, or several; null is one too long to print."""
    if isinstance(message, str):
        return cut_lines(message)
    if isinstance(message, list) and message and all(isinstance(part, int) for part in message):
        data = bytes(part & 0xFF for part in message)
        return cut_lines(data.decode("utf-8", errors="replace"))
    if isinstance(message, list):
        return [line for part in message for line in _message_lines(part)]
    return []


def unreached(stderr: str, *, is_user: bool) -> str | None:
    """What to do where `systemctl` reached no manager at all; None if that is not what it says."""
    if "not been booted with systemd" in stderr:
        return "this machine has no systemd: leave the option out, or use --local"
    if "Failed to connect to bus" in stderr or "Failed to connect to user scope bus" in stderr:
        if is_user:
            return (
                "this user's service manager does not run, or XDG_RUNTIME_DIR does not lead to it: log in "
                "as the user (not with su or sudo), or run `loginctl enable-linger USER` once; or use --local"
            )
        return "systemd does not answer: `systemctl status` must work first; or use --local"
    return None


def reads(unit_path: str, folder: Path) -> bool:
    """Whether a folder is among those in which a manager looks for units; also where its answer has none."""
    try:
        folders = shlex.split(unit_path)
    except ValueError:
        folders = []
    return not folders or folder.resolve() in {Path(one).resolve() for one in folders}


def gave_way(stderr: str) -> bool:
    """Whether a job was given up for one of somebody else, or of the machine that goes down.

    The job's result has no exit status of its own; in the C locale these words are stable.
    """
    return "canceled" in stderr or "is destructive" in stderr


def why_it_failed(done: Completed) -> str:
    """What one of systemd's tools said, or else how it ended."""
    if said := _first_line(done.stderr):
        return said
    if done.returncode is not None:
        return f"exit {done.returncode}"
    return f"a signal ended `{done.argv[0]}`"


def complaints(stderr: str, unit: str, folder: str) -> tuple[str, ...]:
    """Lines of `systemd-analyze verify` that are about `unit`, without the folder it stood in.

    Other lines are about other units: a broken link anywhere prints one too.
    """
    found = [line.strip() for line in stderr.split("\n") if unit in line]
    return tuple(line.replace(f"{folder}/", "") for line in found)


_QUERY_TIMEOUT_S = 30.0
_RELOAD_TIMEOUT_S = 90.0
_MAX_LOG_BYTES = 8 * 1024 * 1024
# Days of a log: an entry of a request's line takes some 350 bytes as JSON.
_MAX_SPAN_BYTES = 64 * 1024 * 1024
_SPAN_TIMEOUT_S = 120.0
_LINES_BEFORE = 200
# SD_MESSAGE_UNIT_STOPPING: a job begins to stop a unit. Source: sd-messages.h.
_STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
# SD_MESSAGE_UNIT_SUCCESS, which a user's manager (252, 262) writes for those alone who debug it.
_ENDED_WELL = "7ad2d189f7e94e70a38c781354912448"
_LINGER_DIR = Path("/var/lib/systemd/linger")
_SYSTEM_MARK = Path("/run/systemd/system")
# What a user's manager and the tools that talk to it are found by.
_USER_VARIABLES = (
    "HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
)
_VERSION = re.compile(r"systemd (\d+)")
_FIRST_WITH_EXPAND_ENVIRONMENT = 254
_CATCH_UP_S = 5.0
# Source: systemctl of systemd 252 and 262 beside `systemctl daemon-reexec`, as the upgrade of systemd or of the C
# library calls it; some 0.5 s.
_LEFT_WORDS = (
    "Connection reset by peer", "Connection refused", "Transport endpoint is not connected",
    "disconnected from message bus without replying", "D-Bus connection terminated",
)  # fmt: skip
_ANEW_S = 10.0
# What systemd 252, a user's too, wants to be free there before it reads its unit files; 262 does not. Source:
# RELOAD_DISK_SPACE_MIN of src/core/dbus-manager.c.
_RELOADS_BY, _RELOAD_BYTES = Path("/run/systemd"), 16 * 1024 * 1024
# systemctl's exit status for a unit that is not there (LSB: program is not installed).
_NOT_INSTALLED = 5


def has_system_manager() -> bool:
    """Whether this machine was booted with systemd and it is reachable from here.

    Source: sd_booted(3), and PID 1 itself, because the folder may be bound into a container.
    """
    return _SYSTEM_MARK.is_dir() and process_name(1) == "systemd"


def has_user_manager(environment: Mapping[str, str]) -> bool:
    """Whether a service manager of this user answers."""
    runtime = runtime_dir(environment)
    if runtime is None:
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(2.0)
        channel.connect(str(runtime / "systemd" / "private"))
        return True
    return False


def lingers(environment: Mapping[str, str]) -> bool | None:
    """Whether this user's services outlive the last logout; None where no logind can tell."""
    if not _SYSTEM_MARK.is_dir():
        return None
    name = environment.get("USER")
    with contextlib.suppress(KeyError):
        name = pwd.getpwuid(os.getuid()).pw_name
    return name is not None and (_LINGER_DIR / name).exists()


def runtime_dir(environment: Mapping[str, str]) -> Path | None:
    """XDG_RUNTIME_DIR, or where logind puts it: cron leaves the variable out, and `su` that of who called it."""
    for folder in (environment.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        with contextlib.suppress(OSError):
            if folder.startswith("/") and Path(folder).stat().st_uid == os.getuid():
                return Path(folder)
    return None


class Systemd:
    """A ServiceManager.

    Raises:
        ServiceError: From every call: the manager refused, could not be reached, or did not answer
            in time.
    """

    def __init__(self, mode: Mode, paths: Paths, own: Mapping[str, str] = os.environ) -> None:
        self.mode = mode
        self.unit_dir = paths.unit_dir
        self.runtime_unit_dir = paths.runtime_unit_dir
        self.clock = SystemClock()
        self._scope = ["--user"] if mode is Mode.USER else []
        self._environment = {**MINIMAL_ENVIRONMENT, "LC_ALL": "C"}
        self._state_of_shell: Path | None = None
        if mode is Mode.USER:
            if "XDG_STATE_HOME" in own and "TUNERD_STATE_DIR" not in own:
                self._state_of_shell = paths.state_dir
            self._environment |= {name: own[name] for name in _USER_VARIABLES if name in own}
            runtime = runtime_dir(own)
            if runtime is not None:
                self._environment["XDG_RUNTIME_DIR"] = str(runtime)
                self.runtime_unit_dir = runtime / "systemd/user"
        self._version: int | None = None

    # Reading

    def state(self, unit: str) -> UnitState:
        """How the unit is now."""
        boot_s = self.clock.now_s() - self.clock.monotonic_s()
        state = to_unit_state(unit, self.properties(unit, *STATE_PROPERTIES), boot_s=boot_s)
        stat = None if state.main_pid is None else process_stat(state.main_pid)
        if stat is None or state.active_since_s is None:
            return state
        # systemd counts by CLOCK_MONOTONIC, which stands still while the machine sleeps.
        return replace(state, active_since_s=process_began_s(stat.start_ticks))

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        """Raw properties; unknown ones are absent."""
        done = self._systemctl("show", f"--property={','.join(names)}", "--", unit)
        self._demand(done, f"the state of {unit} cannot be read")
        return dict(line.split("=", 1) for line in done.stdout.split("\n") if "=" in line)

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """The newest lines of the unit, with what the manager itself said of it."""
        self._let_journal_catch_up()
        # Which invocation a line belongs to may be told only by lines before it.
        n_before = 0 if invocation_id is None else _LINES_BEFORE
        done = self._journal_of(max_lines + n_before, f"--unit={unit}")
        lines = journal_lines(journal_entries(done.stdout), max_lines, invocation_id=invocation_id,
                              is_cut=done.truncated)  # fmt: skip
        if lines or invocation_id is None:
            return lines
        prefix, manager = self._said_by_manager()
        of_it = f"INVOCATION_ID={invocation_id}"
        ids = (f"_SYSTEMD_{of_it}", "+", manager, f"{prefix}{of_it}")
        done = self._journal_of(max_lines, *ids)
        return journal_lines(journal_entries(done.stdout), max_lines, is_cut=done.truncated)

    def _said_by_manager(self) -> tuple[str, str]:
        """How the manager's fields about units begin, which anybody may write, and the one that tells that it did."""
        if self.mode is Mode.USER:
            return "USER_", "_SYSTEMD_USER_UNIT=init.scope"
        return "", "_PID=1"

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """What the unit wrote since then, as far as the journal goes back."""
        done = self._journal_of(
            max_lines,
            *(f"--unit={unit}", f"--since=@{since_s:.6f}"),
            max_bytes=_MAX_SPAN_BYTES,
            timeout_s=_SPAN_TIMEOUT_S,
        )
        entries = journal_entries(done.stdout)
        lines = journal_lines(entries, max_lines)
        is_cut = done.truncated or len(lines) >= max_lines
        begins_us = _number(entries[0].get("__REALTIME_TIMESTAMP")) if entries else None
        return LogSpan(lines, None if begins_us is None else begins_us / _PER_SECOND, is_cut)

    def was_stopped(self, unit: str, invocation_id: str) -> bool:
        """Whether the manager itself wrote that it was to stop this invocation."""
        return self._has_written(_STOPPING, unit, invocation_id)

    def ended_well(self, unit: str, invocation_id: str) -> bool:
        """Whether the manager itself wrote that this invocation was deactivated successfully."""
        return self._has_written(_ENDED_WELL, unit, invocation_id)

    def _has_written(self, message_id: str, unit: str, invocation_id: str) -> bool:
        self._let_journal_catch_up()
        prefix, manager = self._said_by_manager()
        said = (f"{prefix}UNIT={unit}", f"{prefix}INVOCATION_ID={invocation_id}")
        done = self._journal_of(1, manager, f"MESSAGE_ID={message_id}", *said)
        return bool(journal_entries(done.stdout))

    def _let_journal_catch_up(self) -> None:
        """Wait until journald has written what programs have said, even ones that ended since.

        Root alone may ask for that; whoever may not, or asks in vain, reads what is there.
        """
        if self.mode is Mode.SYSTEM and os.geteuid() == 0:
            self._run("journalctl", "--sync", timeout_s=_CATCH_UP_S)

    def _journal_of(
        self,
        max_lines: int,
        *wanted: str,
        max_bytes: int = _MAX_LOG_BYTES,
        timeout_s: float = _QUERY_TIMEOUT_S,
    ) -> Completed:
        done = self._run(
            "journalctl",
            # Newest first, so that what does not fit is what is oldest. `--all` because a message
            # over 4096 bytes, or with unprintable ones, would come as null.
            *["--quiet", "--no-pager", "--reverse", "--all", "--output=json"],
            f"--output-fields={','.join(('MESSAGE', *INVOCATION_FIELDS))}",
            *[f"--lines={max_lines}", *wanted],
            max_output_bytes=max_bytes,
            timeout_s=timeout_s,
        )
        if done.timed_out:
            raise ServiceError("the journal cannot be read", cause="journalctl hangs")
        return done

    def service_units(self) -> tuple[str, ...]:
        """Names of all loaded service units."""
        done = self._systemctl(
            *["list-units", "--type=service", "--all", "--plain", "--full", "--no-legend"]
        )
        self._demand(done, "the units cannot be listed")
        return tuple(line.split()[0] for line in done.stdout.split("\n") if line.strip())

    def verify(self, unit: str, text: str) -> tuple[str, ...]:
        """What `systemd-analyze verify` says about this text under this name.

        The text stands alone in a folder under its final name: a path that does not exist would be
        looked up among the installed units and pass. Unknown keys and bad values leave the exit
        status at 0, so any line that names the unit is a complaint.
        """
        with contextlib.ExitStack() as stack:
            path = self._alone(stack, unit, text.encode("utf-8", "surrogateescape"))
            options = ["--man=no", "--recursive-errors=no"]
            done = self._run("systemd-analyze", "verify", *options, str(path))
            found = complaints(done.stderr, unit, str(path.parent))
        if done.timed_out:
            raise ServiceError(f"{unit} cannot be checked", cause="systemd-analyze hangs")
        if not found and not done.is_ok:  # as without a /tmp that can be written
            raise ServiceError(f"{unit} cannot be checked", cause=why_it_failed(done))
        return found

    def _alone(self, stack: contextlib.ExitStack, unit: str, text: bytes) -> Path:
        """This text under its name in a folder of its own.

        In memory where that can be written: the way back must not need space on a full disk.
        """
        above = (self.runtime_unit_dir, *self.runtime_unit_dir.parents[:2])
        for where in (*above, None):
            with contextlib.suppress(OSError):
                made = tempfile.TemporaryDirectory(prefix="tunerd-verify-", dir=where)
                path = Path(stack.enter_context(made)) / unit
                path.write_bytes(text)
                path.chmod(0o644)  # systemd complains of one that all may write, as by umask 000
                return path
        raise ServiceError(f"{unit} cannot be checked", cause="no folder for it can be written")

    def version(self) -> int:
        """systemd's version."""
        if self._version is None:
            found = _VERSION.match(self._run("systemctl", "--version").stdout)
            if found is None:
                raise ServiceError("the version of systemd cannot be read")
            self._version = int(found.group(1))
        return self._version

    # Changing

    def check_ready(self) -> None:
        """The manager answers, reads units where they are written, and would read them again."""
        done = self._systemctl("show", "--value", "--property=UnitPath")
        self._demand(done, "systemd does not answer")
        if not reads(done.stdout, self.unit_dir):
            raise ServiceError(
                f"systemd does not read the units in `{self.unit_dir}`",
                cause="its own environment names other folders: `systemctl "
                f"{' '.join((*self._scope, 'show'))} --property=UnitPath`",
                hint="unset XDG_CONFIG_HOME and TUNERD_UNIT_DIR, which were set for this command alone",
            )
        free_bytes = _RELOAD_BYTES
        with contextlib.suppress(OSError):
            found = os.statvfs(_RELOADS_BY)
            free_bytes = found.f_bfree * found.f_bsize
        if free_bytes < _RELOAD_BYTES:
            self.reload()
        if self._state_of_shell is not None:
            self._check_state(self._state_of_shell)

    def _check_state(self, own: Path) -> None:
        """That what the manager starts, tunerd.service first of all, has no state elsewhere: with a lock of its own."""
        done = self._systemctl("show-environment")
        self._demand(done, "systemd does not answer")
        theirs = dict(line.split("=", 1) for line in done.stdout.split("\n") if "=" in line)
        state = paths_for(self.mode, theirs).state_dir
        if state.is_dir() and state.resolve() != own.resolve():
            raise ServiceError(
                f"tunerd.service has another state folder: `{state}`",
                cause=f"XDG_STATE_HOME sends this command to `{own}`, but the service manager, which runs "
                "tunerd.service, does not have that variable",
                state="nothing was changed",
                hint="unset XDG_STATE_HOME; or move the folder, write the variable into "
                "~/.config/environment.d/xdg.conf, and log in again",
            )

    def reload(self) -> None:
        """Make the manager read the unit files again."""
        done = self._systemctl("daemon-reload", timeout_s=_RELOAD_TIMEOUT_S)
        self._demand(done, "systemd cannot reload its unit files")

    def start(self, unit: str, *, timeout_s: float = START_S) -> None:
        """Start and wait for the job."""
        self._job("start", unit, timeout_s)

    def stop(self, unit: str, *, timeout_s: float = STOP_S) -> None:
        """Stop and wait for the job."""
        self._job("stop", unit, timeout_s)

    def restart(self, unit: str, *, timeout_s: float = RESTART_S) -> None:
        """Stop if needed, start, and wait for the job."""
        self._job("restart", unit, timeout_s)

    def reset_failed(self, unit: str) -> None:
        """Forget failures and start counters."""
        done = self._systemctl("reset-failed", "--", unit)
        if not done.is_ok and self.state(unit).has_failed:
            self._demand(done, f"the failure of {unit} cannot be reset")

    def enable(self, unit: str) -> None:
        """Make the unit start at boot, and make that survive a power cut."""
        done = self._systemctl("enable", "--", unit, timeout_s=_RELOAD_TIMEOUT_S)
        self._demand(done, f"{unit} cannot be enabled")
        if not self.state(unit).is_enabled:
            # Without an [Install] section `enable` prints advice and succeeds.
            raise ServiceError(
                f"{unit} is not enabled",
                cause=done.stderr.strip() or None,
                hint="its [Install] section needs WantedBy=",
            )
        self._sync_links(unit)

    def disable(self, unit: str) -> None:
        """Make the unit not start at boot, and make that survive a power cut."""
        done = self._systemctl("disable", "--", unit, timeout_s=_RELOAD_TIMEOUT_S)
        if not done.is_ok and self.state(unit).is_enabled:
            self._demand(done, f"{unit} cannot be disabled")
        self._sync_links(unit)

    def run_transient(
        self,
        unit: str,
        argv: Sequence[str],
        properties: Sequence[tuple[str, str]] = (),
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 90.0,
    ) -> None:
        """Start `argv` as a unit that has no file, and wait for the job."""
        variables = [f"--setenv={name}={value}" for name, value in (environment or {}).items()]
        words = self.transient(unit, argv, properties, *variables)
        self._demand(self._run(*words, timeout_s=timeout_s), f"{unit} cannot be started")

    def run_and_wait(
        self, unit: str, argv: Sequence[str], properties: Sequence[tuple[str, str]] = ()
    ) -> bool:
        """Run `argv` as a unit that has no file until it ends; whether it ended well."""
        return self._run(*self.transient(unit, argv, properties, "--wait", "--collect")).is_ok

    def transient(
        self, unit: str, argv: Sequence[str], properties: Sequence[tuple[str, str]], *more: str
    ) -> list[str]:
        """The command of the system's manager that runs `argv` as a unit that has no file."""
        words = list(argv)
        options = ["--quiet", "--no-ask-password", f"--unit={unit}", *more]
        options += [f"--property={name}={value}" for name, value in properties]
        if self.version() >= _FIRST_WITH_EXPAND_ENVIRONMENT:
            options.append("--expand-environment=no")
        else:
            words[1:] = [word.replace("$", "$$") for word in words[1:]]
        return ["systemd-run", *options, "--", *words]

    def start_scope(self, unit: str, pid: int, description: str) -> None:
        """Put a process of this account into a unit of its own, which ends when the process does."""
        properties = ["PIDs", "au", "1", str(pid), "Description", "s", description]
        properties += ["CollectMode", "s", "inactive-or-failed"]
        done = self._run(
            *["busctl", "--quiet", "--allow-interactive-authorization=no", "call"],
            *["org.freedesktop.systemd1", "/org/freedesktop/systemd1"],
            *["org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"],
            *[unit, "fail", "3", *properties, "0"],
        )
        if not done.is_ok:
            raise ServiceError(
                f"{unit} cannot be started",
                cause=_first_line(done.stderr),
                hint="D-Bus must run; on Debian it comes with `apt install dbus`",
            )

    def start_bound(self, unit: str, *, timeout_s: float = START_S) -> None:
        """Start a unit that is bound to a lease.

        A plain start would pull in the lease too: a transient unit that has ended may still be
        loaded, and would take production's place a second time.
        """
        self._job("start", unit, timeout_s, "--job-mode=ignore-requirements")

    def lease(self, spec: LeaseSpec, *, timeout_s: float = STOP_S) -> Lease:
        """Stop production and hold its place; see ServiceManager."""
        return _take_lease(self, spec, timeout_s=timeout_s)

    # Below

    def _job(self, verb: str, unit: str, timeout_s: float, *options: str) -> None:
        done = self._systemctl(verb, *options, "--", unit, timeout_s=timeout_s)
        if verb == "stop" and done.returncode == _NOT_INSTALLED:
            return
        if not done.is_ok and not done.timed_out and gave_way(done.stderr):
            raise JobCanceled(
                f"the {verb} of {unit} was cancelled",
                cause=_first_line(done.stderr),
                hint=f"somebody else started or stopped it; `{self.mode.systemctl} list-jobs` shows pending jobs",
            )
        self._demand(done, f"{verb} of {unit} failed")

    def _demand(self, done: Completed, message: str) -> None:
        if done.is_ok:
            return
        if done.timed_out:
            raise ServiceError(
                message,
                cause=f"`{done.argv[0]}` did not end within {done.took_s:.0f} s",
                hint=f"`{self.mode.systemctl} list-jobs` shows what systemd is waiting for",
            )
        hint = unreached(done.stderr, is_user=self.mode is Mode.USER)
        raise ServiceError(
            message,
            cause=why_it_failed(done),
            state=None if hint is None else "nothing was changed: systemd was not reached",
            hint=hint,
        )

    def _systemctl(self, *words: str, timeout_s: float = _QUERY_TIMEOUT_S) -> Completed:
        argv = ("systemctl", "--no-ask-password", "--no-pager", *words)
        done = self._run(*argv, timeout_s=timeout_s)
        for _ in polls(self.clock, _ANEW_S, every_s=_ANEW_S / 100):
            has_left = any(words in done.stderr for words in _LEFT_WORDS)
            if done.is_ok or done.timed_out or not has_left:
                break  # else it begins anew, with its units and jobs, as when it is upgraded
            done = self._run(*argv, timeout_s=timeout_s)
        return done

    def _run(
        self,
        program: str,
        *words: str,
        timeout_s: float = _QUERY_TIMEOUT_S,
        max_output_bytes: int = 4 * 1024 * 1024,
    ) -> Completed:
        argv = [program, *self._scope, *words]
        try:
            setting = Setting(self._environment)
            return run(argv, setting, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        except HostError as error:
            raise ServiceError(error.message, cause=error.cause, hint=error.hint) from error

    def _sync_links(self, unit: str) -> None:
        """`systemctl enable` writes links without syncing their folders."""
        folders = {self.unit_dir, *self.unit_dir.glob("*.wants"), *self.unit_dir.glob("*.requires")}
        try:
            for folder in folders:
                if folder.is_dir():
                    sync_folder(folder)
        except OSError as error:
            raise ServiceError(
                f"whether {unit} starts at boot could not be made durable", cause=str(error)
            ) from error


def _first_line(text: str) -> str | None:
    """The first line that says something; the later ones name commands to type."""
    return next((line.strip() for line in text.split("\n") if line.strip()), None)


# Best first. On a user's manager without a session, polkit denies `sleep` in block mode.
_INHIBITORS = ("sleep", "idle")
# Of whatever runs as a unit that has no file, and needs nothing of the machine.
CONFINED = (
    ("NoNewPrivileges", "yes"),
    ("CapabilityBoundingSet", ""),
    ("ProtectSystem", "strict"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectControlGroups", "yes"),
    ("PrivateTmp", "yes"),
    ("RestrictNamespaces", "uts"),
    ("IPAddressDeny", "any"),
    ("SystemCallArchitectures", "native"),
    ("SystemCallFilter", "@system-service"),
)
# It waits, and at its end reads the kernel's table of ports and asks the manager one question.
_CONFINEMENT = (
    *CONFINED,
    ("ProtectHome", "yes"),
    ("PrivateDevices", "yes"),
    ("RestrictAddressFamilies", "AF_UNIX"),
    ("MemoryMax", "64M"),
)
_LAST = "last"
_STOP_MARGIN_S = 25.0
_SCOPE_LIMIT_S = 15.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class SystemdLease:
    """A Lease."""

    spec: LeaseSpec
    inhibits: str | None
    manager: Systemd

    def is_held(self) -> bool:
        """Whether the lease's unit is active, and no job is to end it.

        What is bound to it is stopped before it: for so long it is active still.
        """
        found = self.manager.properties(self.spec.unit, "ActiveState", "Job")
        return found.get("ActiveState") == "active" and not found.get("Job")

    def restore_when_free(self, address: tuple[str, int] | None) -> None:
        """Write the script that the lease runs at its end."""
        folder = _folder(self.manager, self.spec)
        if folder.is_dir():  # else the lease is over
            Files().write(folder / _LAST, _waiting(self.manager, address).encode())

    def end(self, *, timeout_s: float = 120.0) -> None:
        """Stop the lease's unit; systemd does the rest."""
        self.manager.stop(self.spec.unit, timeout_s=timeout_s)


def _take_lease(manager: Systemd, spec: LeaseSpec, *, timeout_s: float) -> SystemdLease:
    """Make the units; production is down and the lease stands when this returns.

    Raises:
        ServiceError: systemd refused, or did not answer.
    """
    bound_to = spec.bound_to or _enter_scope(manager, spec)
    inhibits = _inhibitor(manager, spec)
    last = _folder(manager, spec) / _LAST
    # systemd-run takes escapes out of a list of units.
    production = spec.production.replace("\\", r"\\")
    argv = ["sleep", "infinity"]
    if inhibits is not None:
        argv = [*_inhibit(inhibits, spec.why), *argv]
    properties = [
        ("Description", f"tunerd measures in the place of {spec.production}: {spec.why}"),
        ("Type", "exec"),
        ("CollectMode", "inactive-or-failed"),
        ("Conflicts", production),
        ("After", f"{production} {bound_to}"),
        ("BindsTo", bound_to),
        ("RuntimeMaxSec", f"{max(1.0, spec.limit_s):.0f}"),
        ("RuntimeDirectory", last.parent.name),
        # A file: what systemd 252 keeps of a transient command that has a `$` is not what was said.
        ("ExecStopPost", f"-/bin/sh {last}"),
        ("TimeoutStopSec", f"{PORT_LIMIT_S + _STOP_MARGIN_S:.0f}"),
        *_confinement(manager),
    ]
    if spec.restores:
        starts = " ".join((spec.production, *spec.along)).replace("\\", r"\\")
        properties += [("OnSuccess", starts), ("OnFailure", starts)]
    manager.run_transient(spec.unit, argv, properties, timeout_s=timeout_s)
    lease = SystemdLease(spec, inhibits, manager)
    lease.restore_when_free(None)
    if not lease.is_held():
        raise ServiceError(
            f"{spec.unit} ended right after it started",
            cause=" ".join(manager.log(spec.unit, max_lines=3)) or None,
        )
    return lease


def _confinement(manager: Systemd) -> tuple[tuple[str, str], ...]:
    """None in a user's own manager, which some systems refuse namespaces."""
    return _CONFINEMENT if manager.mode is Mode.SYSTEM else ()


def _folder(manager: Systemd, spec: LeaseSpec) -> Path:
    """What systemd makes for the lease and removes with it."""
    return manager.runtime_unit_dir.parents[1] / spec.unit.removesuffix(".service")


def _waiting(manager: Systemd, address: tuple[str, int] | None) -> str:
    """A script that ends when the port is free, the time is over, or the machine goes down."""
    if address is None:
        return "# nothing to wait for\n"
    scope = "--user " if manager.mode is Mode.USER else ""
    return f"""\
n=0
while [ $n -lt {PORT_LIMIT_S:.0f} ] && grep -qsE '{table_pattern(*address)}' {" ".join(TABLES)}; do
    [ "$(systemctl {scope}is-system-running 2>&1)" = stopping ] && exit
    sleep 1
    n=$((n+1))
done
"""


def _enter_scope(manager: Systemd, spec: LeaseSpec) -> str:
    """Move this process into a scope of its own, which ends with it."""
    scope = run_scope(spec.id)
    manager.start_scope(scope, os.getpid(), f"tunerd: {spec.why}")
    for _ in polls(manager.clock, _SCOPE_LIMIT_S, every_s=_POLL_S):
        if manager.state(scope).is_active:
            return scope
    raise ServiceError(f"{scope} does not start")


def _inhibitor(manager: Systemd, spec: LeaseSpec) -> str | None:
    """What the lease may keep the machine from; asked as a unit, for who asks decides."""
    for number, what in enumerate(_INHIBITORS):
        probe = f"tunerd-probe-{spec.id}-{number}.service"
        with contextlib.suppress(ServiceError):
            argv = [*_inhibit(what, "probe"), "true"]
            if manager.run_and_wait(probe, argv, _confinement(manager)):
                return what
    return None


def _inhibit(what: str, why: str) -> list[str]:
    return ["systemd-inhibit", f"--what={what}", "--mode=block", "--who=tunerd", f"--why={why}"]


# For what is said once: a manager that is busy with others for a moment must not miss it.
_WAIT_S = 5.0


class Notifier:
    """Sends states to the service manager; without one every call does nothing.

    Source: sd_notify(3). A send that fails is ignored, as there: readiness is the manager's wish,
    not this program's.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_us = environment.get("WATCHDOG_USEC", "")
        self._watchdog_pid = environment.get("WATCHDOG_PID", "")

    @property
    def watchdog_s(self) -> float | None:
        """How often `alive` must be called at least, halved for safety; None if nobody waits."""
        if not self._watchdog_us.isdecimal() or int(self._watchdog_us) == 0:
            return None
        if self._watchdog_pid and self._watchdog_pid != str(os.getpid()):
            return None
        return int(self._watchdog_us) / 1_000_000 / 2

    def ready(self, status: str) -> None:
        """Starting is done; what this process does from now on, for people, in one line."""
        self._send("READY=1", f"STATUS={status}", wait_s=_WAIT_S)

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def patience(self, seconds: float | None) -> None:
        """Let the watchdog wait so long [s] from now on; None for as long as it was set up to.

        For work that cannot feed it; does nothing where there is no watchdog.
        """
        if self.watchdog_s is not None:
            limit_us = self._watchdog_us if seconds is None else int(seconds * 1_000_000)
            self._send("WATCHDOG=1", f"WATCHDOG_USEC={limit_us}", wait_s=_WAIT_S)

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def _send(self, *lines: str, wait_s: float = 0.0) -> None:
        if self._address is None:
            return
        data = "\n".join(lines).encode("utf-8", "replace")
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.settimeout(wait_s)  # a full queue must not hold up the caller for long
            channel.connect(self._address)
            channel.sendall(data)


def _address(name: str) -> str | bytes | None:
    """A path, or an abstract name, which begins with `@`."""
    if name.startswith("/"):
        return name
    if name.startswith("@") and len(name) > 1:
        return b"\0" + os.fsencode(name[1:])
    return None
