"""A sweep as a unit under systemd: begun by systemctl, killed, resumed; production serves after each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine

SWEEP = "tunerd-sweep.service"
WORKLOAD = """
[[classes]]
name = "ask"
kind = "code"
prompt_tokens = 100
answer_tokens = 32
"""
SETTINGS = "[sweep]\nquiet_s = 1.0\n"
LIMIT_S = 60.0


def until(machine: Machine, holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        told = machine.journal(f"--unit={SWEEP}", "--lines=20") if time.monotonic() > end_s else []
        assert time.monotonic() < end_s, f"never came true: {what}\n" + "\n".join(told)
        time.sleep(0.2)


def deployed(machine: Machine) -> Deployment:
    text = profile("embedded", speculation__type="mtp", speculation__n_max=3, speculation__p_min=0.0,
                   serving__ctx_size=1024, serving__metrics=True, workload="small")  # fmt: skip
    ranges = '[sweep]\n"engine.prefer" = ["embedded"]\n"speculation.n_max" = [1, 2, 3]\n'
    ranges += '"speculation.p_min" = [0.0]\n"serving.threads" = [1]\n"serving.n_ubatch" = [512]\n'
    box = Deployment(machine, settings=SETTINGS, profiles={"night": text + ranges})
    box.profile("workloads/small", WORKLOAD)
    box.apply("night")
    return box


def starts(box: Deployment) -> int:
    shown: dict[str, Any] = box.json("sweep", "status")
    return int((shown["last"] or {}).get("starts", 0))


def candidates(machine: Machine) -> str:
    return machine.run("systemctl", "list-units", "--plain", "--no-legend",
                       "--state=active,activating,deactivating",
                       "tunerd-candidate-*", "tunerd-lease-*").stdout.strip()  # fmt: skip


@pytest.mark.timeout(600)
def test_a_sweep_is_a_unit_and_production_serves_whatever_becomes_of_it(
    host_machine: Machine,
) -> None:
    box = deployed(host_machine)
    box("sweep", "start", "--yes", "--budget", "300s", "--seed", "5")
    until(host_machine, lambda: starts(box) >= 2, "two starts")
    assert host_machine.systemctl("is-active", SWEEP) == "active"
    assert "sweep 1" in box("status").out

    # Its main process dies: systemd ends lease and candidate, and starts production.
    box.systemctl("kill", "--signal=KILL", "--kill-whom=main", SWEEP)
    until(
        host_machine,
        lambda: not candidates(host_machine) and box.alias() is not None,
        "production serves",
    )
    until(host_machine, lambda: box.show("ActiveState") == "active", "the unit is active")
    cut = box.json("sweep", "show")
    assert cut["state"] == "cut"

    # Begun again by systemctl alone; a person who wants the server back just starts it.
    box.systemctl("reset-failed", SWEEP)
    box.systemctl("start", SWEEP)
    until(host_machine, lambda: bool(candidates(host_machine)), "a candidate")
    box.systemctl("start", UNIT)
    until(
        host_machine,
        lambda: not candidates(host_machine) and box.alias() is not None,
        "production serves",
    )
    until(
        host_machine,
        lambda: box.show("ActiveState", SWEEP) in {"inactive", "failed"},
        "the sweep ended",
    )
    assert box.json("sweep", "list")["sweeps"][0]["state"] == "stopped"

    done = box.json("sweep", "resume", "1", "--yes", expect=None)
    assert done["sweep"] == 1
    assert done["known_before"] >= cut["page"]["n_starts"]
    box.generate()
    assert not candidates(host_machine)
