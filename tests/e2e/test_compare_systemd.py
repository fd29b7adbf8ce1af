"""`tunerd compare` in system mode: candidates under systemd, in the unit's place, and the unit after them."""

from __future__ import annotations

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine

WORKLOAD = """
[[classes]]
kind = "code"
prompt_tokens = 160
answer_tokens = 48
"""


def test_two_settings_are_compared_in_the_units_place(sid_machine: Machine) -> None:
    box = Deployment(
        sid_machine,
        profiles={
            "plain": profile("mainline", serving__metrics=False),
            "mtp": profile(
                "mainline", serving__metrics=False, speculation__type="mtp", speculation__p_min=0.0
            ),
        },
    )
    sid_machine.run("mkdir", "-p", f"{box.config}/profiles/workloads")
    sid_machine.write(f"{box.config}/profiles/workloads/small.toml", WORKLOAD)
    box.apply("plain")
    before = box.unit()

    said = box.json(
        "compare", "live", "mtp", "--workload", "small", "--pairs", "3", "--budget", "2m", "--yes"
    )
    assert said["pairs"] == 3
    assert "on small" in said["sentence"]
    assert said["without_service_s"] > 0
    run = box.json("results", "export", str(said["run"]))["runs"][0]
    drafted = {"A": 0, "B": 0}
    for sample in run["samples"]:
        drafted[sample["arm"]] += (sample["timings"] or {}).get("draft_n") or 0
    assert drafted["A"] == 0
    assert drafted["B"] > 0

    assert box.show("ActiveState") == "active"
    assert box.unit() == before
    assert box.generate()["timings"]["predicted_n"] == 33
    left = sid_machine.systemctl("list-units", "--all", "--plain", "--no-legend", "tunerd-*")
    assert "candidate" not in left
    assert "lease" not in left
    assert UNIT in sid_machine.systemctl("list-units", "--plain", "--no-legend", UNIT)
