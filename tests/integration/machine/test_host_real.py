"""This machine and real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import psutil

from tests.support.fake_gpu import FakeGpuReader
from tests.support.folders import ROOT
from tests.support.needs import missing
from tunerd.machine.host import process_facts, read_host
from tunerd.machine.process import boot_id, start


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
    code = "import time; print(1, flush=True); time.sleep(60)"
    with start([sys.executable, "-c", code, "an argument"]) as process:
        while not process.log_tail():
            time.sleep(0.01)

        facts = process_facts(process.pid)

    assert facts is not None
    assert facts.cmdline is not None
    assert facts.cmdline[-1] == "an argument"
    assert facts.rss_mib is not None
    assert facts.rss_mib > 2
    assert facts.read_bytes is not None


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
        timeout=180,
    )

    assert done.stdout.split() == ["None", "True"]
