"""Programs: run one to its end, or start a server (the only user of `subprocess`).

Never a shell. A program gets a minimal environment unless one is given and a session of its own;
what it prints is bounded, and what it started ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal as signals
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tunerd.errors import HostError
from tunerd.system.clock import SystemClock
from tunerd.system.confine import Limits, User
from tunerd.system.dialogue import Dialogue
from tunerd.system.process_end import has_ended, kill_group, kill_session, wait_for_end

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MINIMAL_ENVIRONMENT: Mapping[str, str] = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8"}

_LAUNCHER = Path(__file__).with_name("launch.py")
_LAUNCH_TIMEOUT_S = 15.0
_UMASK = 0o022
_MAX_OUTPUT_BYTES = 4 * 1024 * 1024
_LOG_TAIL_BYTES = 64 * 1024
_REDACTED = "[redacted]"
_SECRET_OPTION = re.compile(
    r"(--?(?:[\w-]*[-_])?(?:api[-_]?key|token|hft|password|passwd|secret))(=.*)?",
    re.IGNORECASE | re.DOTALL,
)
_SECRET_VARIABLE = re.compile(
    r"(\w*(?:API_?KEY|TOKEN|PASSWORD|SECRET)\w*)=.+", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that ended.

    `returncode` is None if a signal ended it (`signal` says which). `stdout` and `stderr` hold at
    most the first `max_output_bytes` of each, undecodable bytes replaced; `truncated` says that
    there was more.
    """

    argv: tuple[str, ...]
    returncode: int | None
    signal: int | None
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    took_s: float

    @property
    def is_ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.returncode == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with `code`, or by `signal`."""

    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """What surrounds a program: None means the minimal environment, and folder and account as here.

    `no_new_privs` is on for another user where it is not given. `dies_with_parent` kills it when the thread that started it ends. `on_spawn` is called with its
    pid before the program is executed; if that raises, or this process dies in it, the program is
    never executed.
    """

    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    user: User | None = None
    limits: Limits | None = None
    umask: int | None = None
    no_new_privs: bool | None = None
    dies_with_parent: bool = False
    on_spawn: Callable[[int], None] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the program can be started without preparing its process."""
        prepared = (self.user, self.limits, self.umask, self.on_spawn)
        return not (self.dies_with_parent or self.no_new_privs) and all(
            part is None for part in prepared
        )


def describe(argv: Sequence[str]) -> str:
    """A command line that can be pasted into a shell, with the values of secrets left out."""
    shown: list[str] = []
    is_value = False
    for word in argv:
        option = None if is_value else _SECRET_OPTION.fullmatch(word)
        if is_value:
            shown.append(_REDACTED)
        elif option is not None and option.group(2) is not None:
            shown.append(f"{option.group(1)}={_REDACTED}")
        else:
            shown.append(_SECRET_VARIABLE.sub(rf"\1={_REDACTED}", word))
        is_value = option is not None and option.group(2) is None
    return shlex.join(shown)


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: User | None = None,
    limits: Limits | None = None,
    max_output_bytes: int = _MAX_OUTPUT_BYTES,
    input: str | None = None,  # noqa: A002  the name that subprocess.run gave it
) -> Completed:
    """Run a program to its end.

    When it ended, or `timeout_s` have passed, everything that is left in its session is killed.

    Raises:
        HostError: It could not be started.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    is_confined = user is not None or limits is not None
    setting = Setting(env, cwd, user, limits, dies_with_parent=is_confined)
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    process = _spawn(argv, setting, stdin, subprocess.PIPE, subprocess.PIPE, argv[0])
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise AssertionError("pipes were asked for")
    dialogue = Dialogue(
        process.pid,
        stdin=process.stdin,
        stdout=stdout,
        stderr=stderr,
        text=input,
        max_bytes=max_output_bytes,
    )
    try:
        timed_out = dialogue.hold(began_s + timeout_s)
    finally:
        # The scan for stragglers is for a program that left some: they hold its output open.
        (kill_group if dialogue.is_complete else kill_session)(process.pid)
        process.wait()
        dialogue.close()
    ended = _exit_of(process)
    return Completed(
        argv=tuple(argv),
        returncode=ended.code,
        signal=ended.signal,
        stdout=dialogue.text(stdout),
        stderr=dialogue.text(stderr),
        timed_out=timed_out,
        truncated=dialogue.is_truncated,
        took_s=clock.monotonic_s() - began_s,
    )


def start(
    argv: Sequence[str],
    setting: Setting | None = None,
    *,
    log: int | None = None,
    program: str | None = None,
) -> Child:
    """Start a program that stays.

    Args:
        argv: The program by path, or by a name in the environment's PATH, and its arguments.
        setting: What surrounds it.
        log: Where its stdout and stderr go, an open file; None keeps them in a temporary file.
        program: What is executed, where that is not the first of `argv`.

    Raises:
        HostError: It could not be executed.
    """
    kept = None if log is not None else tempfile.TemporaryFile()  # noqa: SIM115  lives in Child
    target = log if kept is None else kept.fileno()
    try:
        process = _spawn(
            argv, setting or Setting(), subprocess.DEVNULL, target, target, program or argv[0]
        )
    except BaseException:
        if kept is not None:
            kept.close()
        raise
    return Child(tuple(argv), process, kept)


class Child:
    """A program that was started and stays until it ends or is told to.

    As a context manager it kills what is left of it.
    """

    def __init__(
        self, argv: tuple[str, ...], process: subprocess.Popen[bytes], log: IO[bytes] | None
    ) -> None:
        self.argv = argv
        self.pid = process.pid
        self._process = process
        self._log = log
        self._exit: Exit | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminate(0.0)
        if self._log is not None:
            self._log.close()

    def has_ended(self) -> bool:
        """Whether it ended; until `reap` its pid still belongs to it."""
        return self._exit is not None or has_ended(self.pid)

    def reap(self) -> Exit:
        """Wait for its end, however long that takes, and give its pid back."""
        if self._exit is None:
            self._process.wait()
            self._exit = _exit_of(self._process)
        return self._exit

    def poll(self) -> Exit | None:
        """How it ended, None while it runs; once it ended the rest of its session is killed."""
        if self._exit is None and self.has_ended():
            kill_session(self.pid)
            self.reap()
        return self._exit

    def wait(self, timeout_s: float) -> Exit | None:
        """As `poll`, but wait for it up to `timeout_s`."""
        if self._exit is None:
            wait_for_end(self.pid, timeout_s)
        return self.poll()

    def send(self, number: int) -> None:
        """Send a signal to the program alone; nothing happens if it ended."""
        if self._exit is None:
            os.kill(self.pid, number)

    def terminate(self, grace_s: float) -> Exit:
        """Ask its group to end, kill what is left of its session after `grace_s`."""
        if self._exit is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signals.SIGTERM)
            self.wait(grace_s)
        if self._exit is None:
            kill_session(self.pid)
        return self.reap()

    def log_tail(self, max_bytes: int = _LOG_TAIL_BYTES) -> str:
        """The end of what it printed, undecodable bytes replaced; empty if it has a log of its own."""
        if self._log is None:
            return ""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, max_bytes, max(0, size - max_bytes))
        return data.decode("utf-8", errors="replace")


def _spawn(
    argv: Sequence[str],
    setting: Setting,
    stdin: int,
    stdout: int | None,
    stderr: int | None,
    name: str,
) -> subprocess.Popen[bytes]:
    environment = dict(MINIMAL_ENVIRONMENT if setting.env is None else setting.env)
    search = environment.get("PATH", SEARCH_PATH)
    program = name if "/" in name else shutil.which(name, path=search)
    if program is None:
        raise HostError(f"no such program: {name}", hint=f"looked in {search}")
    try:
        if setting.is_plain:
            return subprocess.Popen(
                list(argv),
                executable=program,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=setting.cwd,
                start_new_session=True,
            )
        here, there = socket.socketpair()
        with here:
            with there:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_LAUNCHER), str(there.fileno())],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=dict(MINIMAL_ENVIRONMENT),
                    pass_fds=[there.fileno()],
                    start_new_session=True,
                )
            _instruct(process, here, program, argv, environment, setting)
            return process
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        raise _cannot_run(name, str(error)) from error


def _instruct(
    process: subprocess.Popen[bytes],
    channel: socket.socket,
    program: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    setting: Setting,
) -> None:
    """Tell the launcher what to do, and wait until it has become the program."""
    user = setting.user
    spec = {
        "program": program,
        "argv": list(argv),
        "env": dict(environment),
        "cwd": None if setting.cwd is None else str(setting.cwd),
        "umask": _UMASK if setting.umask is None else setting.umask,
        "limits": (setting.limits or Limits()).to_rlimits(),
        "user": None
        if user is None
        else {"uid": user.uid, "gid": user.gid, "groups": list(user.groups)},
        "no_new_privs": user is not None if setting.no_new_privs is None else setting.no_new_privs,
        "dies_with_parent": setting.dies_with_parent,
        "waits": setting.on_spawn is not None,
    }
    channel.settimeout(_LAUNCH_TIMEOUT_S)
    try:
        channel.sendall(json.dumps(spec).encode() + b"\n")
        if setting.on_spawn is not None:
            setting.on_spawn(process.pid)
            channel.sendall(b"go\n")
        with channel.makefile("rb") as lines:
            answer = lines.readline()
    except BaseException:
        kill_group(process.pid)
        _discard(process)
        raise
    if answer:
        _discard(process)
        failed = json.loads(answer)
        raise _cannot_run(program, f"{failed['step']}: {failed['text']}")


def _discard(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _cannot_run(program: str, cause: str) -> HostError:
    return HostError(f"cannot run {program}", cause=cause)


def _exit_of(process: subprocess.Popen[bytes]) -> Exit:
    status = process.returncode
    return Exit(None, -status) if status < 0 else Exit(status, None)
