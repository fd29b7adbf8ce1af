"""Deaths in the middle of measurements: production serves afterwards, and nothing is left."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Machines
from tests.fault.campaign import IS_CAMPAIGN, TIMEOUT_S, chance, faults
from tests.fault.lease_victim import Fault, LeaseVictim
from tests.fault.victim import Victim
from tests.support.overlay import Root

SEED = 20261127
FAULTS = (Fault.LEASE, Fault.START)


@pytest.mark.whole
@pytest.mark.timeout(TIMEOUT_S)
def test_production_serves_again_whatever_befalls_a_measurement(
    machines: Machines, any_root: Root
) -> None:
    victim = LeaseVictim(Victim(machines(any_root, disk_mib=512 if IS_CAMPAIGN else None)))
    rng = chance(SEED)
    for fault in faults(FAULTS, Fault):
        print(fault, victim.befall(fault, rng))
        victim.check()
