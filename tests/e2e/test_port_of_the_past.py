"""ik_llama.cpp is measured in mainline's place on one port, which it leaves taken for a minute."""

from __future__ import annotations

import itertools

import pytest

from tests.fault.campaign import TIMEOUT_S, faults
from tests.fault.port_victim import IK, MAINLINE, End, PortVictim, Production
from tests.support import needs
from tests.support.deployment import UNIT
from tests.support.machine import Machine

pytestmark = pytest.mark.engine
BARE = Production.BARE


@pytest.mark.timeout(TIMEOUT_S)
def test_a_unit_is_back_once_its_port_is_free_however_the_measurement_ends(
    machine: Machine,
) -> None:
    for name in (MAINLINE, IK):
        needs.engine(name)
    victim = PortVictim(machine)
    for production, end in faults([(BARE, End.COMMAND)], itertools.product(Production, End)):
        victim.serve(production)

        case = victim.befall(end)

        print(production, end, case)
        assert case.time_waits > 0, "nothing was left on the port"
        if (production, end) == (BARE, End.COMMAND):
            assert case.restarts == 0, "its first start found the port free"
        assert machine.show(UNIT, "Result") == "success"
        left = machine.sh("ls -d /run/tunerd-lease-*", check=False).stdout
        assert left == "", "the lease's folder is gone with it"
