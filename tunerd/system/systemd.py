"""The system's or a user's systemd, driven by `systemctl` and its sisters as subprocesses.

They work with the D-Bus broker dead, speak one language from systemd 249 on, and cost 4 to 35 ms a
call. Only `KEY=VALUE` output and exit codes are relied on; the one exception is named where it is.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunerd.core.host import Mode
from tunerd.core.lease import LeaseSpec
from tunerd.core.paths import Paths
from tunerd.core.service import UnitState
from tunerd.core.systemctl_text import (
    INVOCATION_FIELDS,
    STATE_PROPERTIES,
    complaints,
    messages_of_invocation,
    newest_first_messages,
    oldest_entry_s,
    parse_show,
    to_unit_state,
    unreached,
)
from tunerd.core.unit_log import LogSpan
from tunerd.errors import HostError, JobCanceled, ServiceError
from tunerd.system.clock import SystemClock
from tunerd.system.files import sync_folder
from tunerd.system.proc import process_name
from tunerd.system.process import MINIMAL_ENVIRONMENT, Completed, run
from tunerd.system.seams import Clock, Lease

_QUERY_TIMEOUT_S = 30.0
_RELOAD_TIMEOUT_S = 90.0
_MAX_LOG_BYTES = 8 * 1024 * 1024
# Days of a log: an entry of a request's line takes some 350 bytes as JSON.
_MAX_SPAN_BYTES = 64 * 1024 * 1024
_SPAN_TIMEOUT_S = 120.0
_LINES_BEFORE = 200
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
_FIRST_WITH_RECURSIVE_ERRORS = 250
_FIRST_WITH_EXPAND_ENVIRONMENT = 254
# systemctl's exit status for a unit that is not there (LSB: program is not installed).
_NOT_INSTALLED = 5


def has_system_manager() -> bool:
    """Whether this machine was booted with systemd and it is reachable from here.

    Source: sd_booted(3), and PID 1 itself, because the folder may be bound into a container.
    """
    return _SYSTEM_MARK.is_dir() and process_name(1) == "systemd"


def has_user_manager(environment: Mapping[str, str]) -> bool:
    """Whether a service manager of this user answers."""
    runtime = _runtime_dir(environment)
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


def _runtime_dir(environment: Mapping[str, str]) -> Path | None:
    """XDG_RUNTIME_DIR, or where logind puts it: `su` and cron leave the variable out."""
    named = environment.get("XDG_RUNTIME_DIR", "")
    folder = Path(named) if named.startswith("/") else Path(f"/run/user/{os.getuid()}")
    return folder if folder.is_dir() else None


class Systemd:
    """A ServiceManager.

    Raises:
        ServiceError: From every call: the manager refused, could not be reached, or did not answer
            in time.
    """

    def __init__(
        self,
        mode: Mode,
        paths: Paths,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.mode = mode
        self.unit_dir = paths.unit_dir
        self.runtime_unit_dir = paths.runtime_unit_dir
        self.clock: Clock = clock or SystemClock()
        self._scope = ["--user"] if mode is Mode.USER else []
        self._environment = {**MINIMAL_ENVIRONMENT, "LC_ALL": "C"}
        if mode is Mode.USER:
            own = os.environ if environment is None else environment
            self._environment |= {name: own[name] for name in _USER_VARIABLES if name in own}
            runtime = _runtime_dir(own)
            if runtime is not None:
                self._environment["XDG_RUNTIME_DIR"] = str(runtime)
                self.runtime_unit_dir = runtime / "systemd/user"
        self._version: int | None = None

    # Reading

    def state(self, unit: str) -> UnitState:
        """How the unit is now."""
        boot_s = self.clock.now_s() - self.clock.monotonic_s()
        return to_unit_state(unit, self.properties(unit, *STATE_PROPERTIES), boot_s=boot_s)

    def properties(self, unit: str, *names: str) -> Mapping[str, str]:
        """Raw properties; unknown ones are absent."""
        done = self._systemctl("show", f"--property={','.join(names)}", "--", unit)
        self._demand(done, f"the state of {unit} cannot be read")
        return parse_show(done.stdout, names)

    def log(
        self, unit: str, *, invocation_id: str | None = None, max_lines: int = 200
    ) -> tuple[str, ...]:
        """The newest lines of the unit, with what the manager itself said of it."""
        if invocation_id is None:
            return newest_first_messages(self._journal(max_lines, f"--unit={unit}"), max_lines)
        # Which invocation a line belongs to may be told only by lines before it.
        text = self._journal(max_lines + _LINES_BEFORE, f"--unit={unit}")
        lines = messages_of_invocation(text, invocation_id, max_lines)
        if lines:
            return lines
        own = "USER_INVOCATION_ID" if self.mode is Mode.USER else "INVOCATION_ID"
        ids = (f"_SYSTEMD_INVOCATION_ID={invocation_id}", "+", f"{own}={invocation_id}")
        return newest_first_messages(self._journal(max_lines, *ids), max_lines)

    def log_since(self, unit: str, since_s: float, *, max_lines: int) -> LogSpan:
        """What the unit wrote since then, as far as the journal goes back."""
        done = self._journal_of(
            max_lines,
            *(f"--unit={unit}", f"--since=@{since_s:.0f}"),
            max_bytes=_MAX_SPAN_BYTES,
            timeout_s=_SPAN_TIMEOUT_S,
        )
        lines = newest_first_messages(done.stdout, max_lines)
        is_cut = done.truncated or len(lines) >= max_lines
        return LogSpan(lines, oldest_entry_s(done.stdout), is_cut)

    def _journal(self, max_lines: int, *wanted: str) -> str:
        return self._journal_of(max_lines, *wanted).stdout

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
        with tempfile.TemporaryDirectory(prefix="tunerd-verify-") as folder:
            path = Path(folder) / unit
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
            options = ["--man=no"]
            if self.version() >= _FIRST_WITH_RECURSIVE_ERRORS:
                options.append("--recursive-errors=no")
            done = self._run("systemd-analyze", "verify", *options, str(path))
            found = complaints(done.stderr, unit, folder)
        if done.timed_out:
            raise ServiceError(f"{unit} cannot be checked", cause="systemd-analyze hangs")
        if not found and not done.is_ok:
            return tuple(line for line in done.stderr.split("\n") if line.strip())
        return found

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
        """The manager answers."""
        self._demand(self._systemctl("show", "--property=Version"), "systemd does not answer")

    def reload(self) -> None:
        """Make the manager read the unit files again."""
        done = self._systemctl("daemon-reload", timeout_s=_RELOAD_TIMEOUT_S)
        self._demand(done, "systemd cannot read its unit files again")

    def start(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start and wait for the job."""
        self._job("start", unit, timeout_s)

    def stop(self, unit: str, *, timeout_s: float = 120.0) -> None:
        """Stop and wait for the job."""
        self._job("stop", unit, timeout_s)

    def restart(self, unit: str, *, timeout_s: float = 180.0) -> None:
        """Stop if needed, start, and wait for the job."""
        self._job("restart", unit, timeout_s)

    def kill(self, unit: str, signal: str, *, whom: str = "all") -> None:
        """Send a signal, by name without SIG, to `all` processes of the unit or to its `main` one."""
        # The option's name of before 252; later ones know it too.
        done = self._systemctl("kill", f"--signal={signal}", f"--kill-who={whom}", "--", unit)
        self._demand(done, f"{unit} cannot be sent a signal")

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
        timeout_s: float = 90.0,
    ) -> None:
        """Start `argv` as a unit that has no file, and wait for the job.

        A name must not be used twice: systemd may still hold the ended one.
        """
        done = self._systemd_run(unit, argv, properties, timeout_s=timeout_s)
        self._demand(done, f"{unit} cannot be started")

    def run_and_wait(
        self, unit: str, argv: Sequence[str], *, timeout_s: float = _QUERY_TIMEOUT_S
    ) -> bool:
        """Run `argv` as a unit that has no file until it ends; whether it ended well."""
        done = self._systemd_run(unit, argv, (), "--wait", "--collect", timeout_s=timeout_s)
        return done.is_ok

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

    def start_bound(self, unit: str, *, timeout_s: float = 90.0) -> None:
        """Start a unit that is bound to a lease.

        A plain start would pull in the lease too: a transient unit that has ended may still be
        loaded, and would take production's place a second time.
        """
        self._job("start", unit, timeout_s, "--job-mode=ignore-requirements")

    def lease(self, spec: LeaseSpec, *, timeout_s: float = 120.0) -> Lease:
        """Stop production and hold its place; see ServiceManager."""
        from tunerd.system.systemd_lease import take_lease  # most calls need none

        return take_lease(self, spec, timeout_s=timeout_s)

    # Below

    def _systemd_run(
        self,
        unit: str,
        argv: Sequence[str],
        properties: Sequence[tuple[str, str]],
        *more: str,
        timeout_s: float,
    ) -> Completed:
        words = list(argv)
        options = ["--quiet", "--no-ask-password", f"--unit={unit}", *more]
        options += [f"--property={name}={value}" for name, value in properties]
        if self.version() >= _FIRST_WITH_EXPAND_ENVIRONMENT:
            options.append("--expand-environment=no")
        else:
            words[1:] = [word.replace("$", "$$") for word in words[1:]]
        return self._run("systemd-run", *options, "--", *words, timeout_s=timeout_s)

    def _job(self, verb: str, unit: str, timeout_s: float, *options: str) -> None:
        done = self._systemctl(verb, *options, "--", unit, timeout_s=timeout_s)
        if verb == "stop" and done.returncode == _NOT_INSTALLED:
            return
        # The job's result has no exit status of its own; in the C locale this word is stable.
        if not done.is_ok and not done.timed_out and "canceled" in done.stderr:
            raise JobCanceled(
                f"the {verb} of {unit} was cancelled",
                cause=_first_line(done.stderr),
                hint="somebody else started or stopped it; `systemctl list-jobs` shows what waits",
            )
        self._demand(done, f"{verb} of {unit} failed")

    def _demand(self, done: Completed, message: str) -> None:
        if done.is_ok:
            return
        if done.timed_out:
            raise ServiceError(
                message,
                cause=f"`{done.argv[0]}` did not end within {done.took_s:.0f} s",
                hint="`systemctl list-jobs` shows what systemd is waiting for",
            )
        hint = unreached(done.stderr, is_user=self.mode is Mode.USER)
        raise ServiceError(
            message,
            cause=_first_line(done.stderr) or f"exit {done.returncode}",
            state=None if hint is None else "nothing was changed: systemd was not reached",
            hint=hint,
        )

    def _systemctl(self, *words: str, timeout_s: float = _QUERY_TIMEOUT_S) -> Completed:
        options = ["--no-ask-password", "--no-pager"]
        return self._run("systemctl", *options, *words, timeout_s=timeout_s)

    def _run(
        self,
        program: str,
        *words: str,
        timeout_s: float = _QUERY_TIMEOUT_S,
        max_output_bytes: int = 4 * 1024 * 1024,
    ) -> Completed:
        argv = [program, *self._scope, *words]
        try:
            return run(
                argv,
                timeout_s=timeout_s,
                env=self._environment,
                max_output_bytes=max_output_bytes,
            )
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
