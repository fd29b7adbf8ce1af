"""Deaths while a measurement has changed the card's power limit: the limit is back when production serves.

The card is NVML's C stub, which keeps what is set in /run as a driver does: until the next boot.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Machines
from tests.fault.campaign import IS_CAMPAIGN, TIMEOUT_S, chance, faults
from tests.fault.lease_victim import Fault, LeaseVictim
from tests.fault.victim import Victim
from tests.support import needs, nvml_stub
from tests.support.fake_gpu import rtx_4070_super
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import PREFIX, SOURCES_INSIDE

SEED = 20261128
# Without a limit they are in test_crash_lease.py; a campaign has all of them, here and there.
FAULTS = (Fault.COMMAND, Fault.LEASE)
OWN_MW = "220000"
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_SET = "/run/nvml-limit-0"
# From the first change of the limit until some were given back.
_SPAN_S = (0.0, 4.0)


def put_card(machine: Machine, folder: Path) -> None:
    """From now on there is a card whose limit can be set."""
    if nvml_stub.compiler() is None:
        needs.missing("cc", "no C compiler", "apt-get install gcc libc6-dev")
    library = nvml_stub.build(folder)
    nvml_stub.NvmlWorld(folder).show(rtx_4070_super())
    state = (folder / nvml_stub.STATE_NAME).read_text()
    machine.write(f"{_LIBRARIES}/{nvml_stub.STATE_NAME}", f"limits /run\n{state}")
    machine.write(f"{_LIBRARIES}/{nvml_stub.SONAME}", library.read_bytes(), mode=0o755)
    machine.sh("sync")


def limit_mw(machine: Machine) -> str:
    """What the card is allowed now."""
    return machine.sh(f"cat {_SET} 2>/dev/null || echo {OWN_MW}").stdout.strip()


@pytest.mark.timeout(TIMEOUT_S)
def test_the_power_limit_is_back_with_production_whatever_befalls_a_measurement(
    machines: Machines, any_root: Root, tmp_path: Path
) -> None:
    machine = machines(any_root, disk_mib=512 if IS_CAMPAIGN else None)
    victim = Victim(machine)
    put_card(machine, tmp_path / "nvml")
    lease = LeaseVictim(victim, ("--power", "150", "180", "150", "100", "240"), _SPAN_S, "limited")
    rng, n_changed = chance(SEED), 0
    whole = machine.run(
        *(PREFIX / "bin/python", "-m", "tests.fault.measure", "two", "--rounds", "1", "--power", "150"),
        folder=SOURCES_INSIDE, check=False,
    )  # fmt: skip
    assert "limited 150" in whole.stdout, whole.stdout + whole.stderr
    assert limit_mw(machine) == OWN_MW
    for fault in faults(FAULTS, Fault):
        case = lease.befall(fault, rng)
        n_changed += "limited" in case.said
        print(fault, case.phase, case.awaited_s, case.said.split()[-2:])
        assert limit_mw(machine) == OWN_MW, (fault, case)
        lease.check()
        assert limit_mw(machine) == OWN_MW
    assert n_changed, "no fault met a measurement that had changed the limit"
