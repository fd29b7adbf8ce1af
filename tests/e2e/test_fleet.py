"""A rollout over two booted machines: real sshd, and the daemon of each under systemd."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOTS, Machines
from tests.support.deployment import Deployment, place_units, profile
from tests.support.local_box import Box
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.waiting import until

SETTINGS = """
[probation]
enabled = true
duration_s = 20
every_s = 5
[daemon]
every_s = 1
[engines.eng]
path = "/srv/eng/llama-server"
allow_writable = true
"""
CONFIG = """
Host {name}
    User root
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known
    ProxyCommand {folder}/way-{name}
"""


def served(machine: Machine) -> None:
    """It serves, and its daemon watches."""
    box = Deployment(machine, settings=SETTINGS)
    box.stand_ins(eng={})
    box.profile("night", profile("eng", serving__ctx_size=1024, serving__metrics=True))
    box.apply("night")
    place_units(machine, "tunerd.service")
    machine.systemctl("enable", "--now", "tunerd")


def open_way(folder: Path, name: str, machine: Machine) -> None:
    """How ssh gets there: no network leads into a machine, and after each boot it is another one."""
    machine.sh("mkdir -p /run/sshd")
    way = folder / f"way-{name}"
    way.write_text(f"#!/bin/sh\nexec {shlex.join(machine.command('/usr/sbin/sshd', '-i'))}\n")
    way.chmod(0o755)


def operator(folder: Path, boxes: dict[str, Machine]) -> Box:
    """Whoever has the key to all of them."""
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    subprocess.run(words, check=True, timeout=300)
    known = ""
    for name, machine in boxes.items():
        machine.sh("ssh-keygen -A; install -d -m 700 /root/.ssh")
        machine.write("/root/.ssh/authorized_keys", (folder / "key.pub").read_text(), mode=0o600)
        known += f"{name} {machine.read('/etc/ssh/ssh_host_ed25519_key.pub')}\n"
        open_way(folder, name, machine)
    (folder / "known").write_text(known)
    (folder / "config").write_text(
        "".join(CONFIG.format(name=name, folder=folder) for name in boxes)
    )
    ssh = folder / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
    ssh.chmod(0o755)
    path = f"{ssh.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (folder / "box").mkdir()
    return Box(folder / "box", {"PATH": path, "TUNERD_FLEET__EVERY_S": "1"})


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_canary_that_loses_power_in_its_probation_is_waited_for_and_all_of_it_returns(
    machines: Machines, build_root: Callable[..., Root], tmp_path: Path
) -> None:
    root = build_root(ROOTS["host"])
    boxes = {"gpu1": machines(root), "gpu2": machines(root)}
    for machine in boxes.values():
        served(machine)
    box = operator(tmp_path, boxes)
    named = [f"--box={name}" for name in boxes]

    def size() -> set[str]:
        texts = (one.sh("systemctl cat llama-server").stdout for one in boxes.values())
        return {text.partition("--ctx-size ")[2].split()[0] for text in texts}

    with box.until_all_ended():
        words = ("apply", "night", "--set=serving.ctx_size=2048", "--yes", *named)
        change = box.begin("fleet", *words)
        until(lambda: "watched" in box.call("fleet", "show").stdout, "the canary is watched")
        boxes["gpu1"].power_cut()
        boxes["gpu1"].boot()
        open_way(tmp_path, "gpu1", boxes["gpu1"])
        said, _ = change.communicate(timeout=300)
        assert change.returncode == 0, said
        assert size() == {"2048"}

        back = box.json("fleet", "rollback", "--yes")
    assert [one["state"] for one in back["boxes"]] == ["returned", "returned"]
    assert size() == {"1024"}
