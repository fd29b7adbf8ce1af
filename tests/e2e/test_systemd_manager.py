"""systemd keeps the contract of a service manager: this host's and Debian sid's, root's and a user's."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Machines
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import PREFIX

_ENABLE = """
from pathlib import Path
from tunerd.core.host import Mode
from tunerd.core.paths import paths_for
from tunerd.system.files import Files
from tunerd.system.systemd import Systemd
text = b"[Service]\\nExecStart=/bin/sleep infinity\\n[Install]\\nWantedBy=multi-user.target\\n"
Files().write(Path("/etc/systemd/system/durable.service"), text)
manager = Systemd(Mode.SYSTEM, paths_for(Mode.SYSTEM, {}))
manager.reload()
manager.CALL("durable.service")
"""


@pytest.mark.parametrize("user", [None, "alice"], ids=["system", "user"])
def test_systemd_keeps_the_contract(machine: Machine, user: str | None) -> None:
    mode = "system" if user is None else "user"
    # Leases take long: root's on this host, a user's on Debian sid; test_crash_lease has the others.
    has_leases = (user is None) == (machine.root.name == "host")

    done = machine.pytest(
        "tests/e2e/inside/test_systemd_contract.py",
        *("-q", "--timeout=120", "-k", "" if has_leases else "not Leases"),
        *("-p", "no:hypothesispytest"),  # it wants to write where alice may not
        user=user,
        env={"TUNERD_TEST_MANAGER": mode},
    )

    assert " passed" in done.stdout
    assert ("deselected" in done.stdout) is not has_leases
    assert "skipped" not in done.stdout


def test_an_enabled_unit_runs_after_a_power_cut_that_loses_what_was_not_synced(
    machines: Machines, host_root: Root
) -> None:
    machine = machines(host_root, disk_mib=300)
    python = PREFIX / "bin/python"

    machine.run(python, "-c", _ENABLE.replace("CALL", "enable"))
    machine.power_cut()
    machine.boot()

    assert machine.show("durable.service", "UnitFileState") == "enabled"
    assert machine.show("durable.service", "ActiveState") == "active"

    machine.run(python, "-c", _ENABLE.replace("CALL", "disable"))
    machine.power_cut()
    machine.boot()

    assert machine.show("durable.service", "UnitFileState") == "disabled"
    assert machine.show("durable.service", "ActiveState") == "inactive"
