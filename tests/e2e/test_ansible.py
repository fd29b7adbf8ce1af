"""The Ansible role on machines that have never seen tunerd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOTS, Machines
from tests.support.ansible import Ansible
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import Tunerd

SECRET = "https://ntfy.example/only-we-know"  # noqa: S105 -- what must not be shown
TOKEN = "tk-only-we-know"  # noqa: S105 -- same
SETTINGS = {
    "backups": {"keep": 7},
    "notify": {"webhook": SECRET, "token_file": "/etc/tunerd/webhook-token"},
    "engines": {"mine": {"path": "/opt/mine/llama-server"}},
}
PROFILE = 'extends = "cpu-embedded-baseline"\nmodel.path = "/srv/models/tiny.gguf"\n'


def kept(machine: Machine) -> int:
    """A setting in force."""
    rows = json.loads(machine.run("tunerd", "settings", "--json").stdout)["settings"]
    return next(int(row["value"]) for row in rows if row["name"] == "backups.keep")


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_the_role_installs_and_configures(
    machines: Machines, build_root: Callable[..., Root], tmp_path: Path
) -> None:
    root = build_root(ROOTS["host"], tunerd=Tunerd.BARE)
    one, two = machines(root), machines(root)
    ansible = Ansible(tmp_path, {"gpu1": one, "gpu2": two})
    (tmp_path / "night.toml").write_text(PROFILE)
    wanted: dict[str, Any] = {
        "tunerd_settings": SETTINGS,
        "tunerd_credentials": {"webhook-token": TOKEN},
        "tunerd_profiles": [str(tmp_path / "night.toml")],
        "tunerd_members": ["alice"],
        "tunerd_install_options": ["--without-embedded"],
    }

    only_looked = ansible.play("--check", "--diff", "--limit=gpu1", **wanted)
    assert only_looked.status == 0, only_looked.text
    assert not any(one.exists(path) for path in ("/opt/tunerd", "/etc/tunerd"))

    done = ansible.play("-vvv", "--diff", "--limit=gpu1", **wanted)
    assert done.status == 0, done.text
    assert SECRET not in only_looked.text + done.text
    assert TOKEN not in only_looked.text + done.text
    assert one.systemctl("is-active", "tunerd.service") == "active"
    assert one.systemctl("is-enabled", "tunerd.service") == "enabled"
    assert kept(one) == 7
    assert one.run("stat", "-c", "%a %U", "/etc/tunerd/webhook-token").stdout == "600 root\n"
    assert "night" in one.run("tunerd", "profiles", "list").stdout
    assert "tunerd" in one.run("id", "-nG", "alice").stdout

    both = ansible.play(**wanted)
    assert both.status == 0, both.text
    assert both.count("changed")["gpu1"] == 0 < both.count("changed")["gpu2"]
    assert two.systemctl("is-active", "tunerd.service") == "active"

    wrong = {"gpu2": {"tunerd_settings": {"backups": {"keep": -7}}}}
    again = ansible.play(own=wrong, **wanted)
    assert again.count("changed") == {"gpu1": 0, "gpu2": 0}
    assert again.count("failed") == {"gpu1": 0, "gpu2": 1}
    assert "keep = 7" in two.read("/etc/tunerd/tunerd.toml")

    other = SETTINGS | {"backups": {"keep": 8}}
    own = {"gpu1": {"tunerd_settings": other, "tunerd_install_options": []}}
    would = ansible.play("--check", "--limit=gpu1", own=own, **wanted)
    assert {"Remember what was installed", "Write the settings"} <= would.changed("gpu1")
    assert kept(one) == 7
