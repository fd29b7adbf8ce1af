"""Runs programs that nobody vouches for, so that they reach nothing of ours and leave nothing behind."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunerd.errors import HostError, ServiceError
from tunerd.machine.files import real_path
from tunerd.machine.process import Child, Completed, Limits, Setting, User, may_read, run, start
from tunerd.units.systemd import CONFINED, Systemd

BUS = Path("/run/dbus/system_bus_socket")
"""systemd-run hands over what a program prints by way of D-Bus alone."""
_OVERFLOW_ID = 65534
# What a transient unit is given beyond its program's own time, should nobody be left to stop it.
_SPARE_S = 10
# How systemd-run ends for a program that a signal ended, and for one that systemd could not execute.
# Source: seen on 252 and 262; systemd.exec(5), PROCESS EXIT CODES.
_SIGNALLED = 255
_NOT_EXECUTED = range(200, 246)
# DynamicUser= alone brings a new account for each run, a /tmp of its own and no way to more rights; the
# rest of these is said for the case where an account that exists is taken.
_PROPERTIES = (
    *CONFINED,
    ("Description", "tunerd: asks a program what it is"),
    ("RestrictSUIDSGID", "yes"),
    ("ProtectHome", "read-only"),
    ("ProtectProc", "invisible"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectHostname", "yes"),
    ("LockPersonality", "yes"),
    ("RestrictRealtime", "yes"),
    ("SystemCallErrorNumber", "EPERM"),
    ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6"),
    ("IPAddressAllow", "localhost"),
    ("WorkingDirectory", "/tmp"),  # noqa: S108  its own; ik's server writes a log where it runs
    ("KillSignal", "SIGKILL"),
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where foreign programs run.

    With `manager`, the system's systemd, each is a transient unit of an account that exists for this run
    alone, and whose cgroup ends with it. Without one each is a child of ours that runs as `account` (None: as
    we are), and what it started ends with it as far as the kernel lets us find it.
    """

    account: User | None
    manager: Systemd | None = None

    @property
    def who(self) -> str:
        """As whom programs run, for people."""
        if self.manager is not None:
            return "an account made for this run"
        if self.account is None:
            return "you"
        return f"user {self.account.name or self.account.uid}"

    def reader(self, program: Path) -> User | None:
        """Whose rights decide what a program may read; None where they are our own.

        A run has an account of its own with the groups that somebody gave the server's, unless only the
        server's itself can reach the program.
        """
        if self.manager is None:
            return self.account
        groups = () if self.account is None else self.account.groups
        own = None if self.account is None else self.account.gid
        stranger = User(_OVERFLOW_ID, _OVERFLOW_ID, tuple(gid for gid in groups if gid != own))
        is_open = self.account is None or may_read(stranger, real_path(program))
        return stranger if is_open else self.account

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        limits: Limits,
        timeout_s: float,
        max_output_bytes: int,
    ) -> Completed:
        """Run a program to its end; see `process.run`.

        Raises:
            HostError: It could not be started.
        """
        with self._prepared(argv, env, limits, timeout_s) as (words, setting):
            done = run(words, setting, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        if self.manager is None:
            return done
        if done.returncode in _NOT_EXECUTED or (
            done.returncode == 1 and not done.stdout and done.stderr.startswith("Failed to ")
        ):
            cause = done.stderr.strip() or f"systemd says {done.returncode}, see systemd.exec(5)"
            raise HostError(f"cannot run {argv[0]}", cause=cause)
        code = None if done.returncode == _SIGNALLED else done.returncode
        return replace(done, argv=tuple(argv), returncode=code)

    @contextlib.contextmanager
    def serve(
        self, argv: Sequence[str], *, env: Mapping[str, str], limits: Limits, at_most_s: float
    ) -> Iterator[Child]:
        """A program that stays until the block is left.

        Raises:
            HostError: It could not be started.
        """
        with (
            self._prepared(argv, env, limits, at_most_s) as (words, setting),
            start(words, setting) as child,
        ):
            yield child

    @contextlib.contextmanager
    def lent(self, file: Path) -> Iterator[Path]:
        """A file of ours where the program can read it, though ours may lie in a closed folder."""
        if self.manager is not None:  # everybody may enter its STATE, and /tmp would be another
            yield file
            return
        folder = Path(tempfile.mkdtemp(prefix="tunerd-trial-"))
        try:
            own = Path(shutil.copyfile(file, folder / file.name))
            own.chmod(0o644)
            folder.chmod(0o755)
            yield own
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _prepared(
        self, argv: Sequence[str], env: Mapping[str, str], limits: Limits, at_most_s: float
    ) -> Iterator[tuple[Sequence[str], Setting | None]]:
        """The command that runs a program and ends as that does, and what surrounds it; its unit ends with the block."""
        if self.manager is None:
            yield argv, Setting(env, Path("/"), self.account, limits, keeps_together=True)
            return
        unit = f"tunerd-probe-{secrets.token_hex(4)}.service"
        properties = [
            *_PROPERTIES,
            ("RuntimeMaxSec", f"{at_most_s + _SPARE_S:.0f}"),
            *self._account(Path(argv[0])),
            *((f"Limit{name}", str(value)) for name, value in {**limits, "CORE": 0}.items()),
        ]
        options = ["--pipe", "--wait", "--collect"]
        options += [f"--setenv={name}={value}" for name, value in env.items()]
        try:
            yield self.manager.transient(unit, argv, properties, *options), None
        finally:
            # One that has ended is no more; a failure here is left to RuntimeMaxSec=.
            with contextlib.suppress(ServiceError):
                self.manager.stop(unit)

    def _account(self, program: Path) -> Iterator[tuple[str, str]]:
        reader = self.reader(program)
        if reader is None or reader == self.account:
            yield "User", str(_OVERFLOW_ID if reader is None else reader.uid)
            return
        yield "DynamicUser", "yes"
        yield from (("SupplementaryGroups", str(gid)) for gid in reader.groups)
