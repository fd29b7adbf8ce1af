"""tunerd.service as it is shipped and confined: what it mends, and what does not depend on it."""

from __future__ import annotations

import pytest

from tests.support.deployment import UNIT, Deployment, place_units
from tests.support.machine import Machine
from tests.support.places import USER, places

DAEMON = "tunerd.service"
APPLY = ("--set", "model.path=/srv/models/tiny.gguf", "--yes")


@pytest.fixture(params=["system", *(["user"] if places(of="user") else [])])
def box(request: pytest.FixtureRequest, installed_machine: Machine) -> Deployment:
    """tunerd and its daemon as `install.sh` leaves them: of root, or of a user."""
    made = Deployment(installed_machine, user=USER if request.param == "user" else None)
    if made.user is not None:
        place_units(made.machine, "tunerd.service", user=made.user)
        made.systemctl("enable", "--now", "tunerd.service")
    return made


def test_the_server_does_not_notice_what_becomes_of_the_daemon(box: Deployment) -> None:
    machine = box.machine
    box("apply", "cpu-embedded-baseline", *APPLY)
    pid = box.show("MainPID")

    machine.kill(box.show("MainPID", DAEMON))
    box.until(lambda: box.show("ActiveState", DAEMON) == "active", "it is back")
    box.systemctl("stop", DAEMON)
    box.systemctl("disable", DAEMON)
    found = box.json("doctor", expect=None)["findings"]
    assert "no-daemon" in {one["code"] for one in found}, (
        "nobody watches, and doctor alone can say so"
    )

    assert box.show("MainPID") == pid
    machine.power_cut()
    machine.boot()
    box.until(lambda: box.alias() is not None, "it serves")
    assert box.systemctl("is-active", DAEMON, check=False) == "inactive"


def test_wrong_settings_do_not_keep_production_down_after_a_swap_that_was_cut_short(
    box: Deployment,
) -> None:
    machine, user = box.machine, box.user
    box("apply", "cpu-embedded-baseline", *APPLY)
    box.systemctl("stop", "tunerd.socket", DAEMON)
    box.start("apply", "cpu-embedded", *APPLY)
    record = f"{box.state}/journal/{UNIT}.json"
    # In one script: once the swap is over there is nobody to kill.
    machine.sh(f"until [ -e {record} ]; do sleep 0.01; done; pkill -KILL --full '[t]unerd apply'")
    box.systemctl("stop", UNIT)
    settings = f"{box.config}/tunerd.toml"
    machine.sh(f"echo 'drain_s = \"oops' >> {settings}", user=user)

    box.systemctl("start", DAEMON)
    assert not machine.exists(record)
    assert box.alias() is not None
    said = box.json("status")["messages"]
    assert "the previous settings apply" in next(m["text"] for m in said if m["code"] == "settings")
    machine.sh(f"sed -i '$d' {settings}", user=user)
    journal = f"journalctl {'--user ' if user else ''}--unit=tunerd --grep=settings-mended"
    machine.sh(f"until {journal}; do sleep 0.2; done", user=user)
    assert box.show("NRestarts", DAEMON) == "0"


def test_a_daemon_that_began_while_journald_was_down_is_heard_once_it_is_back(
    box: Deployment,
) -> None:
    """It wrote into nothing for as long as it ran."""
    machine = box.machine
    machine.systemctl("stop", "systemd-journald.socket", "systemd-journald-dev-log.socket",
                      "systemd-journald.service")  # fmt: skip
    box.systemctl("restart", DAEMON)
    machine.systemctl("start", "systemd-journald.service")
    pid = box.show("MainPID", DAEMON)

    box.systemctl("stop", DAEMON)

    machine.sh(f"until journalctl _PID={pid} --grep=daemon.stopped; do sleep 0.1; done")
