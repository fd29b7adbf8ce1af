"""This machine and real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.support.fake_gpu import FakeGpuReader
from tests.support.folders import ROOT
from tests.support.needs import missing
from tunerd.machine.host import memory_of, process_facts, read_host
from tunerd.machine.proc import boot_id

LOCKER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(b"x" * (3 << 20), 3 << 20)
failed = libc.mlock(buffer, ctypes.c_size_t(3 << 20))
print("failed" if failed else "locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def python(script: str, *arguments: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", before + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate(timeout=20)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_this_machine_agrees_with_other_ways_to_ask() -> None:
    host = read_host(FakeGpuReader())

    assert host.cpu.logical_cores == len(os.sched_getaffinity(0))
    assert host.memory.total_mib is not None
    assert host.memory.total_mib <= psutil.virtual_memory().total >> 20
    assert host.memory.available_mib is not None
    assert 0 < host.memory.available_mib <= host.memory.total_mib
    assert host.kernel == os.uname().release
    assert host.hostname == os.uname().nodename
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert host.memory.memlock_unlimited is (soft == resource.RLIM_INFINITY)
    assert boot_id()


def test_a_running_process_is_described() -> None:
    with python("import sys; print(1, flush=True); sys.stdin.read()", "an argument") as process:
        first_line(process)

        facts = process_facts(process.pid)

        assert facts is not None
        assert facts.cmdline is not None
        assert facts.cmdline[-1] == "an argument"
        assert facts.rss_mib is not None
        assert facts.rss_mib > 2
        assert facts.read_bytes is not None


def test_locked_memory_shows() -> None:
    with python(LOCKER) as process:
        if first_line(process) != "locked":
            missing("mlock", "3 MiB cannot be locked here", "raise RLIMIT_MEMLOCK (ulimit -l)")

        memory = memory_of(process.pid)

        assert memory is not None
        assert memory.locked_mib == 3


def test_what_another_user_may_not_see_is_unknown() -> None:
    if os.geteuid() != 0:
        missing("root", "needs root to become somebody else", "run as root")
    script = (
        "import os, sys; target = os.getppid(); sys.path.insert(0, sys.argv[1]);"
        "from tunerd.machine.host import process_facts; process_facts(target); os.setuid(65534);"
        "facts = process_facts(target);"
        "print(facts.read_bytes, facts.rss_mib is not None)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)],
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )

    assert done.stdout.split() == ["None", "True"]
