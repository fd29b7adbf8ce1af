"""Deaths in the middle of measurements: production serves afterwards, and nothing is left.

`python -m tests.fault.campaign leases` does more of the same.
"""

from __future__ import annotations

import random

import pytest

from tests.fault.lease_victim import Fault, LeaseVictim
from tests.fault.victim import Victim
from tests.support.machine import Machine

SEED = 20261127
FAULTS = (Fault.COMMAND, Fault.LEASE, Fault.START)


@pytest.mark.timeout(600)
def test_production_serves_again_whatever_befalls_a_measurement(machine: Machine) -> None:
    victim = LeaseVictim(Victim(machine))
    rng = random.Random(SEED)
    for fault in FAULTS:
        victim.befall(fault, rng)
        victim.check()
