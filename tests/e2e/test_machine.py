"""The machines themselves: what every other end-to-end test takes for granted."""

from __future__ import annotations

from tests.e2e.conftest import Machines
from tests.support.overlay import Root


def test_a_power_cut_loses_what_was_not_synced(machines: Machines, any_root: Root) -> None:
    machine = machines(any_root, disk_mib=256, strict_disk=True)
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
    assert machine.read("/kept/torn") not in {"new", "old"}, "a synced name, unsynced content"
    machine.boot()
    assert machine.boot_state == "running"
    assert machine.read("/kept/lost") == "old"
