"""Waiting for a process's end, and making sure that nothing of its session outlives it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

from tunerd.system.clock import SystemClock
from tunerd.system.process_tree import session_members

_POLL_S = 0.02
_N_ROUNDS = 100


def has_ended(pid: int) -> bool:
    """Whether this child ended; it is not reaped, so that its pid still means it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


@contextlib.contextmanager
def end_watch(pid: int) -> Iterator[int | None]:
    """A descriptor that becomes readable when the process ends; None where the kernel has none."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Whether this child ends within `timeout_s`; it is not reaped."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + timeout_s
    with end_watch(pid) as watch:
        while not has_ended(pid):
            left_s = deadline_s - clock.monotonic_s()
            if left_s <= 0:
                return False
            if watch is None:
                clock.sleep(min(_POLL_S, left_s))
            else:
                select.select([watch], [], [], left_s)
    return True


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that this child, not yet reaped, leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_session(pid: int) -> None:
    """SIGKILL to everything in the session that this child, not yet reaped, leads.

    Repeated until nothing is found, because what is killed may have been starting another.
    """
    clock = SystemClock()
    kill_group(pid)
    for _ in range(_N_ROUNDS):
        found = session_members(pid)
        for member in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if not found:
            return
        clock.sleep(_POLL_S)
