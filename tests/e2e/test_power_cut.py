"""The power is cut in the middle of swaps; what was not synced is lost. Production serves after boot."""

from __future__ import annotations

import time

import pytest

from tests.e2e.conftest import Machines
from tests.fault.campaign import IS_CAMPAIGN, TIMEOUT_S, chance, faults
from tests.fault.victim import Victim
from tests.support.deployment import Deployment, profile
from tests.support.overlay import Root

WATCHED = """
[engines.eng]
path = "/srv/eng/llama-server"
allow_writable = true
[probation]
enabled = true
"""
CUTS = ("in a swap",) * 2
CUT_AGAIN = "in a swap, and in the recovery from that"
SEED = 20261122


@pytest.mark.timeout(TIMEOUT_S)
def test_after_a_power_cut_in_a_swap_production_serves_and_the_daemon_mends_the_rest(
    machines: Machines, installed_root: Root
) -> None:
    machine = machines(installed_root, disk_mib=512, strict_disk=IS_CAMPAIGN)
    victim = Victim(machine)
    rng = chance(SEED)
    for where in faults(CUTS, [CUTS[0], CUT_AGAIN]):
        words, blow = victim.some_swap(rng), victim.some_blow(rng)
        victim.cut(words, blow)
        if where == CUT_AGAIN:
            machine.boot()
            time.sleep(rng.uniform(0, 1.5))
            machine.power_cut()
        victim.boot()
        victim.wait_for_the_daemon()
        print(where, words, blow, victim.check())


@pytest.mark.timeout(TIMEOUT_S)
def test_a_probation_goes_on_after_a_reboot_and_takes_back_after_a_power_cut(
    machines: Machines, installed_root: Root, request: pytest.FixtureRequest
) -> None:
    machine = machines(installed_root, disk_mib=512)
    profiles = {name: profile("eng", serving__alias=name) for name in ("good", "suspect")}
    tunerd = Deployment(machine, settings=WATCHED, profiles=profiles)
    tunerd.stand_ins(eng={})
    machine.sh("sync")
    tunerd.apply("good")
    generation = tunerd.apply("suspect")["generation"]
    record = f"{tunerd.state}/probation/{generation}.json"
    watched = (
        f'until grep -q \'"boot_id": "\' {record} && grep -q running {record}; do sleep 0.2; done'
    )
    machine.sh(watched)

    machine.reboot()
    machine.sh(watched)
    assert tunerd.alias() == "suspect"

    if request.node.callspec.params["installed_root"] == "host":
        return  # in a container systemd 252 shows what it confines the host's boot
    boot = machine.read("/proc/sys/kernel/random/boot_id").strip()
    machine.sh(f"until grep -q {boot} {record}; do sleep 0.2; done")
    machine.power_cut()
    machine.boot()
    machine.sh(f"until grep -q 'taken back' {record}; do sleep 0.2; done")
    assert "the machine went down" in machine.read(record)
    assert tunerd.alias() == "good"
