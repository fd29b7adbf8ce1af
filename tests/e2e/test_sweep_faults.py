"""What may befall a night."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Machines
from tests.fault.campaign import IS_CAMPAIGN, TIMEOUT_S, chance, faults
from tests.fault.sweep_victim import SweepFault, SweepVictim
from tests.support.night import Night
from tests.support.overlay import Root


@pytest.mark.timeout(TIMEOUT_S)
def test_production_serves_whole_again_whatever_befalls_a_night(
    machines: Machines, any_root: Root
) -> None:
    machine = machines(any_root, disk_mib=768 if IS_CAMPAIGN else None)
    victim = SweepVictim(Night(machine, sweep="budget_s = 300.0"))
    machine.sh("sync")
    rng = chance(11)
    for fault in faults([SweepFault.LEASE], SweepFault):
        print(fault, victim.befall(fault, rng))
        victim.check()
