"""A program of its own: applies limits and privileges to itself, then becomes the wanted program.

It is run as a script (`python -I -S launch.py FD`), not imported, because what it does between
fork and exec is not safe in a process with threads, and because its parent can tell it to wait:
a program whose start could not be recorded is never executed. It imports the standard library alone.

On the socket FD it reads one JSON line (see `Spec` in process.py), does what that says, and either
disappears into the program, which closes the socket, or writes one JSON line saying what failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_EXIT_FAILED = 125


def main() -> None:
    """Read the specification, obey it, execute."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    lines = channel.makefile("rb")
    line = lines.readline()
    if not line.endswith(b"\n"):
        sys.exit(_EXIT_FAILED)  # the parent died before it could say what it wants
    spec = json.loads(line)
    step = "prepare"
    try:
        _reset_signals()
        step = "limits"
        _set_limits(spec["limits"])
        step = "user"
        _become(spec["user"], no_new_privs=spec["no_new_privs"])
        step = "folder"
        os.umask(spec["umask"])
        if spec["cwd"] is not None:
            os.chdir(_raw(spec["cwd"]))
        if spec["dies_with_parent"]:
            # After the change of user, which clears it.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        step = "exec"
        if spec["waits"] and lines.readline() != b"go\n":
            sys.exit(_EXIT_FAILED)
        environment = {_raw(name): _raw(value) for name, value in spec["env"].items()}
        argv = [_raw(word) for word in spec["argv"]]
        os.execve(_raw(spec["program"]), argv, environment)  # noqa: S606  no shell is the point
    except OSError as error:
        answer = {"step": step, "errno": error.errno, "text": error.strerror or str(error)}
    except ValueError as error:
        answer = {"step": step, "errno": 0, "text": str(error)}
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(_EXIT_FAILED)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _reset_signals() -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays so in the program."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _set_limits(limits: dict[str, Any]) -> None:
    """Soft and hard limit to the value; -1 is no limit; what only root may raise stays as it is."""
    for name, wanted in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        try:
            resource.setrlimit(number, (wanted, wanted))
        except (OSError, ValueError):
            resource.setrlimit(number, (hard, hard))


def _become(user: dict[str, Any] | None, *, no_new_privs: bool) -> None:
    if user is not None:
        if os.geteuid() == 0:
            os.setgroups(user["groups"])
        os.setresgid(user["gid"], user["gid"], user["gid"])
        os.setresuid(user["uid"], user["uid"], user["uid"])
    if no_new_privs:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
