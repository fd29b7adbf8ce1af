"""`tunerd doctor` in system mode: the journal, the unit's own account, and limits that systemd sets."""

from __future__ import annotations

import time
from typing import Any

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine


def until_it_answers(box: Deployment) -> None:
    end_s = time.monotonic() + 60
    while box.alias() is None:
        assert time.monotonic() < end_s, box.logs()
        time.sleep(0.1)


def codes(said: dict[str, Any], kind: str = "findings") -> set[str]:
    return {one["code"] for one in said[kind]}


def missing(said: dict[str, Any], code: str) -> list[str]:
    found: list[str] = next(row for row in said["not_checked"] if row["code"] == code)["missing"]
    return found


def test_what_systemd_keeps_from_a_server_is_found(sid_machine: Machine) -> None:
    box = Deployment(
        sid_machine,
        profiles={
            "locked": profile(
                "mainline",
                speculation__type="mtp",
                speculation__p_min=0.0,
                serving__load_mode="mlock",
            )
        },
    )
    before = box.json("doctor", expect=None)
    assert before["unit"] is None
    assert missing(before, "threads") == ["a unit that serves"]

    box.apply("locked")
    for n in range(8):
        box.generate(f"{n} please go on with code", n=120)
    said = box.json("doctor", expect=None)
    assert said["active"] is True
    # The journal has the answers; what speculation costs here nobody has measured.
    assert missing(said, "mtp-does-not-pay") == [
        "a run with and one without speculation, of what serves"
    ]
    assert {"flags-removed", "mtp-slots", "model-without-mtp", "port-clash"} <= set(said["passed"])

    sid_machine.write(f"/etc/systemd/system/{UNIT}.d/limit.conf", "[Service]\nLimitMEMLOCK=64K\n")
    box.systemctl("daemon-reload")
    box.systemctl("restart", UNIT)
    until_it_answers(box)
    said = box.json("doctor", expect=6)
    assert "memlock" in codes(said)
    (found,) = [one for one in said["findings"] if one["code"] == "memlock"]
    assert "mlock is asked for" in found["seen"]
    assert f"systemctl edit {UNIT}" in found["do"]
    assert "memlock: mlock is asked for" in box("doctor", expect=6).out
