"""SIGKILL at random moments of real swaps: a whole unit serves afterwards, each time.

`python -m tests.fault.campaign kills` does more of the same.
"""

from __future__ import annotations

import random

import pytest

from tests.fault.victim import Victim
from tests.support.machine import Machine

KILLS = 3
SEED = 20261121


@pytest.mark.both_roots
@pytest.mark.timeout(600)
def test_after_a_kill_of_a_swap_recover_leaves_a_whole_unit_that_serves(machine: Machine) -> None:
    victim = Victim(machine)
    rng = random.Random(SEED)
    for _ in range(KILLS):
        words, blow = victim.some_swap(rng), victim.some_blow(rng)
        victim.strike(words, blow)
        victim.tunerd("recover")
        victim.check()


@pytest.mark.timeout(600)
def test_after_a_kill_of_a_swap_the_daemon_leaves_a_whole_unit_that_serves(
    installed_machine: Machine,
) -> None:
    victim = Victim(installed_machine)
    rng = random.Random(SEED + 1)
    for _ in range(KILLS):
        words, blow = victim.some_swap(rng), victim.some_blow(rng)
        victim.strike(words, blow)
        victim.wait_for_the_daemon()
        victim.check()
    assert installed_machine.show("tunerd.service", "NRestarts") == "0"
