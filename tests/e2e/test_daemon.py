"""tunerd.service as it is shipped and confined: what it mends, and what does not depend on it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.support.machine import Machine
from tests.support.places import USER, places
from tests.support.roots import SOURCES_INSIDE

APPLY = ("--set", "model.path=/srv/models/tiny.gguf", "--yes")


@dataclass(frozen=True)
class Box:
    """A machine with tunerd and its daemon: of root, or of a user."""

    machine: Machine
    user: str | None

    @property
    def record(self) -> str:
        state = f"/home/{self.user}/.local/state" if self.user else "/var/lib"
        return f"{state}/tunerd/journal/llama-server.service.json"

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.machine.systemctl(*words, user=self.user, check=check)

    def show(self, unit: str, name: str) -> str:
        return self.machine.show(unit, name, user=self.user)

    def is_serving(self) -> bool:
        asked = self.machine.sh("curl --silent --fail http://127.0.0.1:8080/health", check=False)
        return asked.returncode == 0


@pytest.fixture(params=["system", *(["user"] if places(of="user") else [])])
def box(request: pytest.FixtureRequest, installed_machine: Machine) -> Box:
    made = Box(installed_machine, USER if request.param == "user" else None)
    if made.user is not None:
        text = made.machine.read(SOURCES_INSIDE / "units/tunerd-user.service.in")
        unit = text.replace("@TUNERD@", "/opt/tunerd/bin/tunerd")
        made.machine.write("/etc/systemd/user/tunerd.service", unit)
        made.systemctl("daemon-reload")
        made.systemctl("enable", "--now", "tunerd.service")
    return made


def test_the_server_does_not_notice_what_becomes_of_the_daemon(box: Box) -> None:
    machine = box.machine
    machine.run("tunerd", "apply", "cpu-embedded-baseline", *APPLY, user=box.user)
    pid = box.show("llama-server", "MainPID")

    machine.kill(box.show("tunerd", "MainPID"))
    scope = "--user" if box.user else "--system"
    machine.sh(
        f"until systemctl {scope} is-active --quiet tunerd; do sleep 0.1; done",
        user=box.user, limit_s=30,
    )  # fmt: skip
    box.systemctl("stop", "tunerd")
    box.systemctl("disable", "tunerd")

    assert box.show("llama-server", "MainPID") == pid
    machine.power_cut()
    machine.boot()
    machine.sh("until curl -sf http://127.0.0.1:8080/health; do sleep 0.1; done", limit_s=30)
    assert box.systemctl("is-active", "tunerd", check=False) == "inactive"


def test_wrong_settings_do_not_keep_production_down_after_a_swap_that_was_cut_short(
    box: Box,
) -> None:
    machine, user = box.machine, box.user
    machine.run("tunerd", "apply", "cpu-embedded-baseline", *APPLY, user=user)
    box.systemctl("stop", "tunerd.socket", "tunerd.service")
    machine.start("tunerd", "apply", "cpu-embedded", *APPLY, user=user)
    machine.sh(f"until [ -e {box.record} ]; do sleep 0.01; done", limit_s=60)
    machine.run("pkill", "-KILL", "--full", "[t]unerd apply")
    box.systemctl("stop", "llama-server.service")
    folder = f"/home/{user}/.config" if user else "/etc"
    settings = f"{folder}/tunerd/tunerd.toml"
    machine.sh(f"mkdir -p {folder}/tunerd; echo 'drain_s = \"oops' >> {settings}", user=user)

    box.systemctl("start", "tunerd.service")
    assert not machine.exists(box.record)
    assert box.is_serving()
    said = json.loads(machine.run("tunerd", "status", "--json", user=user).stdout)["messages"]
    assert "those of before hold" in next(m["text"] for m in said if m["code"] == "settings")
    machine.sh(f"sed -i '$d' {settings}", user=user)
    journal = f"journalctl {'--user ' if user else ''}--unit=tunerd --grep=settings-mended"
    machine.sh(f"until {journal}; do sleep 0.2; done", user=user, limit_s=30)
    assert box.show("tunerd.service", "NRestarts") == "0"
