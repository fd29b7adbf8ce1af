"""The machines themselves: what every other end-to-end test takes for granted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Machines
from tests.support.container import MachineError
from tests.support.machine import Machine
from tests.support.overlay import Root


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


def test_tests_run_inside(machine: Machine) -> None:
    done = machine.pytest("tests/e2e/inside/test_inside.py", "-q")
    assert "1 passed" in done.stdout

    with pytest.raises(MachineError, match="1 failed"):
        machine.pytest("tests/e2e/inside/test_inside.py", env={"TUNERD_TEST_FAIL": "1"})


def test_it_goes_down_in_order_though_a_way_into_it_has_stopped(host_machine: Machine) -> None:
    with host_machine.start("sleep", "9999") as way:
        child = host_machine.sh("until pgrep -x sleep; do sleep 0.1; done").stdout.strip()
        host_machine.kill(child, "STOP")
        while Path(f"/proc/{way.pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.05)
        host_machine.poweroff()
    assert not host_machine.is_on
