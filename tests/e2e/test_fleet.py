"""A rollout over two booted machines: real sshd, and the daemon of each under systemd."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOTS, Machines
from tests.support.deployment import Deployment, place_units, profile
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.ssh_boxes import Fleet, Operator, new_key, put_ssh, states
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


def operator(folder: Path, boxes: dict[str, Machine]) -> Operator:
    """Whoever has the key to all of them."""
    public, known = new_key(folder / "key"), ""
    for name, machine in boxes.items():
        machine.sh("ssh-keygen -A; install -d -m 700 /root/.ssh")
        machine.write("/root/.ssh/authorized_keys", f"{public}\n", mode=0o600)
        known += f"{name} {machine.read('/etc/ssh/ssh_host_ed25519_key.pub')}\n"
        open_way(folder, name, machine)
    (folder / "known").write_text(known)
    put_ssh(folder, "".join(CONFIG.format(name=name, folder=folder) for name in boxes))
    return Fleet(folder, ()).operator()


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_canary_that_loses_power_in_its_probation_is_waited_for_and_all_of_it_returns(
    machines: Machines, build_root: Callable[..., Root], tmp_path: Path
) -> None:
    root = build_root(ROOTS["host"])
    boxes = {"gpu1": machines(root), "gpu2": machines(root)}
    for machine in boxes.values():
        served(machine)
    own = operator(tmp_path, boxes)
    named = [f"--box={name}" for name in boxes]

    def size() -> set[str]:
        texts = (one.sh("systemctl cat llama-server").stdout for one in boxes.values())
        return {text.partition("--ctx-size ")[2].split()[0] for text in texts}

    with own.box.until_all_ended():
        change = own.begin("apply", "night", "--set=serving.ctx_size=2048", "--yes", *named)
        until(lambda: "watched" in str(own.fleet("show", code=None)), "the canary is watched")
        boxes["gpu1"].power_cut()
        boxes["gpu1"].boot()
        open_way(tmp_path, "gpu1", boxes["gpu1"])
        said, _ = change.communicate(timeout=300)
        assert change.returncode == 0, said
        assert size() == {"2048"}

        assert states(own.fleet("rollback", "--yes")) == ["returned", "returned"]
    assert size() == {"1024"}
