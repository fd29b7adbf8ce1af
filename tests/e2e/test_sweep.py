"""A sweep as a job under systemd: begun as a night, killed, stopped, resumed, on a full disk.

Production serves after each. The machine lives for the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.conftest import KeptMachine
from tests.support.deployment import UNIT, Deployment
from tests.support.night import JOBS, Night, begin_night, candidates, is_night, newest_job, starts

pytestmark = pytest.mark.timeout(1800)
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def box(kept_machine: KeptMachine) -> Deployment:
    """Its server answers so slowly that no sweep comes to its end while a test looks at it."""
    return Night(kept_machine("host"), sweep="budget_s = 300.0", tg_tok_s=20.0).box


def until(box: Deployment, holds: Callable[[], bool], what: str) -> None:
    box.until(holds, what, unit=JOBS, limit_s=LIMIT_S)


def is_back(box: Deployment) -> bool:
    return not candidates(box) and box.alias() is not None


def test_a_sweep_is_a_unit_and_production_serves_whatever_becomes_of_it(box: Deployment) -> None:
    box("sweep", "start", "--yes", "--budget", "10m", "--seed", "5")
    until(box, lambda: bool(candidates(box)) and starts(box) >= 1, "a start")
    job = "tunerd-job-1.service"
    assert box.systemctl("is-active", job) == "active"
    assert "sweep 1" in box("status").out
    kept = box.machine.run("systemd-inhibit", "--list", "--no-pager").stdout
    assert any("tunerd" in line and "sleep" in line for line in kept.splitlines()), kept

    # Its main process dies: systemd ends lease and candidate, and starts production.
    box.systemctl("kill", "--signal=KILL", "--kill-whom=main", job)
    until(box, lambda: is_back(box), "production serves")
    cut = box.json("sweep", "show")
    assert cut["state"] == "cut"

    # It goes on in the terminal of somebody who has seen enough of it.
    resumed = box.start("sweep", "resume", "1", "--yes", "--json")
    until(box, lambda: bool(candidates(box)), "a candidate")
    box.machine.run("pkill", "--signal=INT", "--full", "[t]unerd sweep resume")
    done = json.loads(resumed.communicate(timeout=LIMIT_S)[0])
    assert done["error"]["code"] == "interrupted"
    first = box.json("sweep", "show", "1")
    assert first["state"] == "stopped"
    assert first["page"]["n_starts"] >= cut["page"]["n_starts"]
    box.generate()
    assert not candidates(box)

    # A person who wants the server back starts it; who wants the card stops it, and it stays so.
    begin_night(box)
    until(box, lambda: bool(candidates(box)), "a candidate")
    box.systemctl("start", UNIT)
    box.systemctl("stop", UNIT)
    until(box, lambda: not is_night(box), "the sweep ended")
    person = box.json("sweep", "show")
    assert person["state"] == "stopped"
    assert "somebody started" in person["reason"]
    assert box.show("ActiveState") == "inactive"
    box.systemctl("start", UNIT)

    # `stop` returns when production serves; the next night goes on with what this one has measured.
    begin_night(box)
    until(box, lambda: bool(candidates(box)), "a candidate")
    box("sweep", "stop")
    assert not candidates(box)
    box.generate()
    assert newest_job(box)["result"]["error"]["code"] == "interrupted"
    assert box.systemctl("list-units", "--failed", "--plain", "--no-legend") == ""
    listed = box.json("sweep", "list")["sweeps"]
    assert [row["sweep"] for row in listed] == [2, 1], "the same sweep went on"
    assert listed[0]["state"] == "stopped"


def test_a_night_of_a_timer_of_ones_own_ends_with_its_service(box: Deployment) -> None:
    box.machine.run("systemd-run", "--unit=mine", "tunerd", "sweep", "night", "--yes")
    until(box, lambda: bool(candidates(box)), "a candidate")
    box.systemctl("stop", "mine")
    until(box, lambda: is_back(box), "production serves")
    assert box.json("sweep", "show")["state"] == "stopped"


def test_a_machine_that_is_rebooted_in_a_sweep_serves_and_is_not_said_to_be_stranded(
    box: Deployment,
) -> None:
    """systemd refuses to start the server while it goes down, and the sweep took that for one that does not serve."""
    unit = begin_night(box)
    until(box, lambda: bool(candidates(box)), "a candidate")
    box.machine.reboot()
    until(box, lambda: is_back(box), "production serves")
    last = box.json("sweep", "show")
    assert "does not serve" not in (last["reason"] or "")
    told = "\n".join(box.machine.journal("--boot=-1", f"--unit={unit}"))
    assert "Deactivated successfully" in told, told
    assert "does not serve" not in told, told


def test_a_night_on_a_disk_that_fills_up_keeps_what_it_measured_and_production_serves(
    box: Deployment,
) -> None:
    folder = "/var/lib/tunerd"
    box.machine.sh(f"rm -f {folder}/evidence.db*")  # so that it begins with a start of its own
    box.machine.sh(f"cp -a {folder} /root/kept && mount -t tmpfs -o size=200m,mode=755 none {folder}"
                    f" && cp -a /root/kept/. {folder}/")  # fmt: skip
    # Where there is no logind, that is said, and nothing else changes.
    box.machine.systemctl("mask", "--now", "systemd-logind.service", "dbus-org.freedesktop.login1")
    unit = begin_night(box)
    until(box, lambda: bool(candidates(box)) and starts(box) >= 1, "a start")
    said = "\n".join(box.machine.journal(f"--unit={unit}"))
    assert "the machine may go to sleep meanwhile" in said
    box.machine.sh(f"dd if=/dev/zero of={folder}/filler bs=1M 2>&1 || true")
    until(box, lambda: not is_night(box), "the sweep ended")
    assert not candidates(box)
    box.generate()
    said = json.dumps(newest_job(box)["result"])
    assert "are free on the disk of" in said or "the disk is full" in said

    refused = box("sweep", "run", "--yes", "--budget", "60s", expect=1)
    assert "not enough disk space" in refused.err
    assert box.show("ActiveState") == "active"
    box.machine.sh(f"rm {folder}/filler")
    assert box.json("sweep", "show")["page"]["n_starts"] >= 1
