"""Deaths in the middle of measurements: production serves afterwards, with the card's own power limit, and nothing is left.

The card is NVML's C stub, which keeps what is set in /run as a driver does: until the next boot.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Machines
from tests.fault.campaign import IS_CAMPAIGN, TIMEOUT_S, chance, faults
from tests.fault.lease_victim import Fault, LeaseVictim
from tests.fault.victim import Victim
from tests.support import nvml_stub
from tests.support.fake_gpu import rtx_4070_super
from tests.support.machine import Machine
from tests.support.overlay import Root

SEED = 20261128
OWN_MW = "220000"
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_SET = "/run/nvml-limit-0"
# From the first change of the limit until some were given back.
_SPAN_S = (0.0, 4.0)


def put_card(machine: Machine, folder: Path) -> None:
    """From now on there is a card whose limit can be set, and which counts what the server takes."""
    library = nvml_stub.build(folder)
    servers = f"servers /srv/eng/llama-server {1 << 30} 30000 100"
    nvml_stub.NvmlWorld(folder).show(rtx_4070_super(used_mib=2000), extra=[servers])
    state = (folder / nvml_stub.STATE_NAME).read_text()
    machine.write(f"{_LIBRARIES}/{nvml_stub.STATE_NAME}", f"limits /run\n{state}")
    machine.write(f"{_LIBRARIES}/{nvml_stub.SONAME}", library.read_bytes(), mode=0o755)
    machine.sh("sync")


def limit_mw(machine: Machine) -> str:
    """What the card is allowed now."""
    return machine.sh(f"cat {_SET} 2>/dev/null || echo {OWN_MW}").stdout.strip()


@pytest.mark.whole
@pytest.mark.timeout(TIMEOUT_S)
def test_production_serves_again_whatever_befalls_a_measurement(
    machines: Machines, any_root: Root
) -> None:
    victim = LeaseVictim(Victim(machines(any_root, disk_mib=512 if IS_CAMPAIGN else None)))
    rng = chance(SEED)
    for fault in faults((Fault.LEASE, Fault.START), Fault):
        print(fault, victim.befall(fault, rng))
        victim.check()


@pytest.mark.timeout(TIMEOUT_S)
def test_the_power_limit_is_back_with_production_whatever_befalls_a_measurement(
    machines: Machines, any_root: Root, tmp_path: Path
) -> None:
    machine = machines(any_root, disk_mib=512 if IS_CAMPAIGN else None)
    victim = Victim(machine)
    put_card(machine, tmp_path / "nvml")
    lease = LeaseVictim(victim, ("--power", "150", "180", "150", "100", "240"), _SPAN_S, "limited")
    rng, n_changed = chance(SEED), 0
    for fault in faults((Fault.COMMAND, Fault.LEASE), Fault):
        case = lease.befall(fault, rng)
        n_changed += "limited" in case.said
        print(fault, case.phase, case.awaited_s, case.said.split()[-2:])
        assert limit_mw(machine) == OWN_MW, (fault, case)
        lease.check()
        assert limit_mw(machine) == OWN_MW
    assert n_changed, "no fault met a measurement that had changed the limit"
