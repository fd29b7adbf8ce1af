"""A sweep that measures power limits, as root types it, on a machine whose card is NVML's C stub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Machines
from tests.e2e.test_crash_power import OWN_MW, limit_mw, put_card
from tests.support.deployment import Deployment, profile
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.sweep_box import SPEED, WORKLOAD

SETTINGS = """
[engines.eng]
path = "/srv/eng/llama-server"
allow_writable = true
[sweep]
patience_s = 1.0
quiet_s = 1.0
"""
RANGES = """
[sweep]
"engine.prefer" = ["eng"]
"serving.threads" = [1]
"speculation.n_max" = [2]
"speculation.p_min" = [0.0]
"serving.n_ubatch" = [512]
"serving.n_batch" = [2048]
"memory.fit_mib" = [1024]
"gpu.power_limit_w" = [150, 180]
"""


def swept_at_limits(machine: Machine, card: Path) -> Deployment:
    """A box whose profile has power limits to sweep, on a card of the C stub."""
    box = Deployment(machine, settings=SETTINGS)
    box.stand_ins(eng=SPEED)
    served = profile("eng", serving__ctx_size=1024, serving__metrics=True, workload="small")
    box.profile("night", served + RANGES)
    # Long enough for the card to count what a request takes.
    box.profile("workloads/small", WORKLOAD.replace("answer_tokens = 40", "answer_tokens = 200"))
    put_card(machine, card)
    box.apply("night")
    return box


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_a_sweep_tells_speed_at_each_limit_and_leaves_the_cards_own(
    machines: Machines, any_root: Root, tmp_path: Path
) -> None:
    machine = machines(any_root)
    box = swept_at_limits(machine, tmp_path / "nvml")

    far = box("sweep", "run", "--dry-run", "--space", "gpu.power_limit_w=150,900", expect=2)
    assert "NVIDIA GeForce RTX 4070 SUPER cannot be limited to 900.0" in far.err
    assert "watts between 100 and 240" in far.err
    assert "150 W, 180 W, 220 W" in box("sweep", "run", "--dry-run", "--budget", "4m").out

    done = box("sweep", "run", "--yes", "--budget", "4m", "--seed", "3", "--json", limit_s=400.0)

    table = done.json["power"]
    first = [one for one in table["rows"] if one["case"] == table["rows"][0]["case"]]
    assert [(one["limit_w"], one["rounds"]) for one in first] == [(150, 3), (180, 3), (220, 3)]
    assert all(one["tok_s"] > 0 for one in first)
    # It draws 30 W at rest, and no more than it may at work.
    assert all(30 < one["joules_per_token"] * one["tok_s"] < 2 * one["limit_w"] for one in first)
    assert limit_mw(machine) == OWN_MW
    assert machine.exists("/run/nvml-limit-0"), "no limit was ever set"
    shown = box("sweep", "show").out
    assert "J/token" in shown
    assert "the card's limit stays 220 W" in shown
    kept = box.json("results", "show", "1")
    assert any(row["name"].endswith(" at 150 W") for row in kept["arms"])
    warm = {one["arm"] for one in kept["samples"] if "warm-up" in one["marks"]}
    assert [name for name in warm if " at " in name if not name.endswith(" at 220 W")] == []
    left = machine.sh("ls -d /run/systemd/system/tunerd-* /run/tunerd/*.json", check=False)
    assert left.stdout == ""


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_what_was_measured_by_a_limit_that_somebody_changed_meanwhile_is_kept_of_none(
    machines: Machines, host_root: Root, tmp_path: Path
) -> None:
    machine = machines(host_root)
    box = swept_at_limits(machine, tmp_path / "nvml")
    change = "until grep -qx 150000 /run/nvml-limit-0; do sleep 0.05; done; echo 180000 >/run/nvml-limit-0"
    machine.start("sh", "-c", change)

    done = box("sweep", "run", "--yes", "--budget", "4m", "--seed", "3", "--json", limit_s=400.0)

    assert "somebody set the power limit to 180 W" in done.json["power"]["reasons"][0]
    names = [row["name"] for row in box.json("results", "show", "1")["arms"]]
    assert not any(name.endswith(" at 150 W") for name in names), names
