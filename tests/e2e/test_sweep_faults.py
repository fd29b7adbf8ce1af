"""A sample of what may befall a night; `python -m tests.fault.campaign sweeps` has the many."""

from __future__ import annotations

import random

import pytest

from tests.fault.sweep_victim import SweepFault, SweepVictim
from tests.support.machine import Machine
from tests.support.night import Night


@pytest.mark.timeout(600)
def test_production_serves_whole_again_where_the_lease_is_killed_in_a_night(
    host_machine: Machine,
) -> None:
    victim = SweepVictim(Night(host_machine, sweep="budget_s = 300.0"))
    victim.befall(SweepFault.LEASE, random.Random(11))
    victim.check()
