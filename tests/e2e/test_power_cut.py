"""The power is cut in the middle of swaps; what was not synced is lost. Production serves after boot.

`python -m tests.fault.campaign cuts` does more of the same.
"""

from __future__ import annotations

import random

import pytest

from tests.e2e.conftest import Machines
from tests.fault.victim import Victim
from tests.support.overlay import Root

CUTS = 4
SEED = 20261122


@pytest.mark.timeout(600)
def test_after_a_power_cut_in_a_swap_production_serves_and_the_daemon_mends_the_rest(
    machines: Machines, installed_root: Root
) -> None:
    machine = machines(installed_root, disk_mib=512)
    victim = Victim(machine)
    rng = random.Random(SEED)
    for _ in range(CUTS // 2):
        words, blow = victim.some_swap(rng), victim.some_blow(rng)
        victim.cut(words, blow)
        victim.boot()
        victim.wait_for_the_daemon()
        victim.check()
