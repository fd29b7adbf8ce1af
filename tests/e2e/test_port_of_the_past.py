"""ik_llama.cpp is measured in mainline's place on one port, which it leaves taken for a minute.

`python -m tests.fault.campaign ports` does every way in which a measurement ends, for every kind of unit.
"""

from __future__ import annotations

import pytest

from tests.fault.port_victim import IK, MAINLINE, End, PortVictim, Production
from tests.support import needs
from tests.support.deployment import UNIT
from tests.support.machine import Machine

pytestmark = pytest.mark.engine


@pytest.mark.timeout(400)
def test_a_hand_written_unit_is_back_once_its_port_is_free_though_the_command_was_killed(
    host_machine: Machine,
) -> None:
    for name in (MAINLINE, IK):
        needs.engine(name)
    victim = PortVictim(host_machine)
    victim.serve(Production.BARE)

    case = victim.befall(End.COMMAND)

    assert case.time_waits > 0, "nothing was left on the port"
    assert case.restarts == 0, "its first start found the port free"
    assert host_machine.show(UNIT, "Result") == "success"
    left = host_machine.sh("ls -d /run/tunerd-lease-*", check=False).stdout
    assert left == "", "the lease's folder is gone with it"
