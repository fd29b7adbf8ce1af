"""What an administrator hung on the server's unit, while something is measured in its place."""

from __future__ import annotations

import time

import pytest

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine
from tests.support.night import candidates

DROP_IN = """
[Unit]
OnFailure=alert@%n.service
[Service]
CPUAffinity=0
Nice=5
TimeoutStopSec=90
StandardOutput=append:/var/log/llama.log
StandardError=inherit
ExecStartPre=+/bin/sh -c 'echo %n >> /var/log/prepared'
"""
ALERT = "[Service]\nType=oneshot\nExecStart=touch /var/log/alert-%i\n"
SLEEPS = "After={0}\n[Service]\nExecStart=sleep infinity\n"
BEHIND = {
    "webui": f"[Unit]\nRequires={UNIT}\n{SLEEPS}",
    r"part\x2dof": f"[Unit]\nPartOf={UNIT}\n{SLEEPS}",
    "proxy": f"[Unit]\nBindsTo=webui.service\n{SLEEPS}",
    "rests": f"[Unit]\nRequires={UNIT}\n{SLEEPS}",
}
PLAIN = {"speculative": "off"}
MEASURE = ("bench", "one", "--set", "speculation.type=off", "--yes")


@pytest.mark.timeout(900)
def test_what_hangs_on_the_server_holds_for_what_is_measured_and_is_as_before_afterwards(
    machine: Machine,
) -> None:
    box = Deployment(machine, settings='[engines.fake]\npath = "/srv/fake/llama-server"\n')
    fails = {"rules": [{"when": PLAIN, "set": {"fail": "oom-weights"}}]}
    box.stand_ins(fake=fails)
    box.profile("one", profile("fake", speculation__type="mtp", speculation__n_max=4))
    box.apply("one")
    machine.write(f"/etc/systemd/system/{UNIT}.d/own.conf", DROP_IN)
    machine.write("/etc/systemd/system/alert@.service", ALERT)
    for name, text in BEHIND.items():
        machine.write(f"/etc/systemd/system/{name}.service", text.format(UNIT))
    up = [f"{name}.service" for name in BEHIND if name != "rests"]
    box.systemctl("daemon-reload")
    box.systemctl("restart", UNIT)
    box.systemctl("start", *up)
    seen = box.json("doctor", expect=None)["findings"]
    assert "log-unseen" in [one["code"] for one in seen], seen

    # One that fails: the reason is known, nobody is alarmed, and what depends on the server runs again.
    failed = box(*MEASURE, expect=None)
    assert "cudaMalloc failed: out of memory" in failed.err
    said = machine.journal("--unit=tunerd-candidate-*")
    assert "dlopen" not in "\n".join(said), "how systemd 262 starts it is no word of its own"
    assert "webui.service" in failed.err
    assert not [name for name in machine.files("/var/log") if name.startswith("alert")]
    prepared = machine.read("/var/log/prepared").split()
    assert prepared == [UNIT] * 3, (
        "at its start, for what was measured in its name, and when it came back"
    )
    box.until(lambda: box.systemctl("is-active", *up, check=False).split() == ["active"] * 3, "all")
    assert box.show("ActiveState", "rests.service") == "inactive"

    # One that does not end is not waited for, as production would be.
    box.behave("fake", rules=[{"when": PLAIN, "set": {"ignore_sigterm": True, "time_scale": 1.0}}])
    measuring = box.start(*MEASURE)
    box.until(lambda: "candidate" in candidates(box), "a candidate")
    box.until(lambda: box.alias() is not None, "it answers")
    began_s = time.monotonic()
    box.systemctl("start", UNIT)
    assert time.monotonic() - began_s < 30
    measuring.communicate(timeout=240)
    box.until(lambda: box.systemctl("is-active", *up, check=False).split() == ["active"] * 3, "all")
