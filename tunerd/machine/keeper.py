"""A program of its own: runs another, and ends whatever came of that one when it ends.

It is run as a script (`python -I -S keeper.py PARENT PROGRAM...`), not imported: the kernel gives it what the
program left. It ends as the program did. SIGHUP ends them all, and so does the end of PARENT, a pid; SIGTERM is
the program's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)


def main() -> None:
    """Run the program, see to its end."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    for number in _WATCHED:
        signal.signal(number, signal.SIG_DFL)  # what is ignored cannot be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        return
    program = os.posix_spawn(
        argv[0], argv, os.environ, setsigmask=[], setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    status = None
    while status is None and (told := signal.sigwait(_WATCHED)) != signal.SIGHUP:
        status = _reaped().get(program)
        if status is None and told == signal.SIGTERM:
            os.kill(program, told)
    while children := _children():  # what is killed leaves its own children here
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        signal.sigwait([signal.SIGCHLD])
        _reaped()
    _end_as(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status))


def _reaped() -> dict[int, int]:
    """The children that ended, with their statuses."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def _children() -> list[int]:
    own, found = os.getpid(), []
    for name in (entry.name for entry in os.scandir("/proc") if entry.name.isdecimal()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            if int(file.read().rpartition(b")")[2].split()[1]) == own:
                found.append(int(name))
    return found


def _end_as(ended: int) -> None:
    if ended >= 0:
        os._exit(ended)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has nothing to reset
        signal.signal(-ended, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.kill(os.getpid(), -ended)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
