"""SIGKILL at random moments of real swaps: a whole unit serves afterwards, each time."""

from __future__ import annotations

import pytest

from tests.fault.campaign import TIMEOUT_S, chance, faults
from tests.fault.victim import Victim
from tests.support.machine import Machine

KILLS = ("SIGKILL",) * 2
SEED = 20261121


@pytest.mark.timeout(TIMEOUT_S)
def test_after_a_kill_of_a_swap_recover_leaves_a_whole_unit_that_serves(machine: Machine) -> None:
    victim = Victim(machine)
    rng = chance(SEED)
    for _ in faults(KILLS):
        words, blow = victim.some_swap(rng), victim.some_blow(rng)
        victim.strike(words, blow)
        victim.tunerd("recover")
        print(words, blow, victim.check())


@pytest.mark.whole
@pytest.mark.timeout(TIMEOUT_S)
def test_after_a_kill_of_a_swap_the_daemon_leaves_a_whole_unit_that_serves(
    installed_machine: Machine,
) -> None:
    victim = Victim(installed_machine)
    rng = chance(SEED + 1)
    for _ in faults(KILLS):
        words, blow = victim.some_swap(rng), victim.some_blow(rng)
        victim.strike(words, blow)
        victim.wait_for_the_daemon()
        print(words, blow, victim.check())
    assert installed_machine.show("tunerd.service", "NRestarts") == "0"
