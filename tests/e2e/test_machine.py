"""The machines themselves: what every other end-to-end test takes for granted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Machines
from tests.support import cgroup, run_folder
from tests.support.machine import Machine, MachineError
from tests.support.overlay import Root
from tests.support.roots import SOURCES, cache_folder


def test_nothing_that_the_host_enabled_runs_in_it(host_machine: Machine) -> None:
    assert host_machine.files("/home") == ["alice", "bob"]
    assert host_machine.files("/root") in ([], [".ssh"])  # systemd-tmpfiles makes that one
    running = host_machine.systemctl(
        *("list-units", "--type=service", "--state=running", "--plain", "--no-legend")
    )
    names = {line.split()[0].partition("@")[0] for line in running.splitlines()}
    assert names <= {
        "dbus.service",
        "polkit.service",
        "systemd-journald.service",
        "systemd-logind.service",
        "user",
    }


@pytest.mark.parametrize("strict", [False, True])
def test_a_power_cut_loses_what_was_not_synced(
    machines: Machines, any_root: Root, strict: bool
) -> None:
    machine = machines(any_root, disk_mib=256, strict_disk=strict)
    machine.sh("mkdir /kept; cd /kept; for file in whole torn lost; do printf old > $file; done")
    machine.sh("journalctl --sync; sync --file-system /")

    replace = "cd /kept; printf new > {0}.tmp; {1}; mv {0}.tmp {0}; {2}"
    machine.sh(replace.format("torn", ":", "sync ."))
    machine.sh(replace.format("whole", "sync whole.tmp", "sync ."))
    machine.sh(replace.format("lost", ":", ":"))
    machine.sh("printf new > /kept/extra")
    assert machine.sh("cd /kept; cat whole torn lost extra").stdout == "newnewnewnew"

    machine.power_cut()

    assert machine.read("/kept/whole") == "new"
    assert machine.read("/kept/lost") == "old"
    assert not machine.exists("/kept/extra")
    if strict:
        assert machine.read("/kept/torn") not in {"new", "old"}, "a synced name, unsynced content"
    machine.boot()
    assert machine.boot_state == "running"
    assert machine.read("/kept/lost") == "old"


@pytest.mark.usefixtures("host_root")
def test_what_a_killed_test_run_left_is_swept_away() -> None:
    script = (
        "from tests.support import roots; from tests.support.machine import Machine\n"
        "machine = Machine(roots.host_root(), disk_mib=64).boot()\n"
        "print(machine.name, flush=True); input()"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", script], cwd=SOURCES, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    name = killed.stdout.readline().decode().strip()
    assert name not in run_folder.sweep(cache_folder()), "its owner lives"

    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    swept = run_folder.sweep(cache_folder())

    assert name in swept
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert not cgroup.group_of(name).exists()
    commands = [
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(path)
    ]
    assert not any(f"--machine\0{name}\0".encode() in command for command in commands)


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK)


def test_tests_run_inside(machine: Machine) -> None:
    done = machine.pytest("tests/e2e/inside/test_inside.py", "-q")
    assert "1 passed" in done.stdout

    with pytest.raises(MachineError, match="1 failed"):
        machine.pytest("tests/e2e/inside/test_inside.py", env={"TUNERD_TEST_FAIL": "1"})
