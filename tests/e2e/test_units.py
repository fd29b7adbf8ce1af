"""The shipped units, judged by the systemd of each root."""

from __future__ import annotations

import pytest

from tests.support.deployment import place_units
from tests.support.machine import Machine

NAMES = ("tunerd", "tunerd-job", "tunerd-notify")
MOST_EXPOSED = 32  # tenths, of which systemd gives a hundred


@pytest.mark.both_roots
def test_systemd_has_nothing_to_say_about_the_units_and_finds_them_little_exposed(
    machine: Machine,
) -> None:
    services = [f"{name}.service" for name in NAMES]
    place_units(machine, *services, user="alice")
    place_units(machine, *services, "tunerd.socket", "tunerd-daemon.socket", "tunerd-web.service")
    said = machine.run(
        *("systemd-analyze", "verify", "--man=no", "--recursive-errors=no"),
        "/etc/systemd/system/tunerd.socket", "/etc/systemd/system/tunerd-daemon.socket",
        "/etc/systemd/system/tunerd-web.service",
    )  # fmt: skip
    assert said.stdout + said.stderr == ""
    for scope, folder in (("--system", "system"), ("--user", "user")):
        for name in NAMES:
            said = machine.run(
                *("systemd-analyze", scope, "verify", "--man=no", "--recursive-errors=no"),
                f"/etc/systemd/{folder}/{name}.service",
                user=None if scope == "--system" else "alice",
            )
            assert said.stdout + said.stderr == ""
    for name in (*NAMES, "tunerd-web"):  # of which units begun for an operation have their sandbox
        machine.run(
            *("systemd-analyze", "security", "--no-pager", "--offline=true"),
            *(f"--threshold={MOST_EXPOSED}", f"/etc/systemd/system/{name}.service"),
        )


MAY = {
    "writes units": "touch /etc/systemd/system/x.service; rm /etc/systemd/system/x.service",
    "writes transient units": "touch /run/systemd/system/y.service",
    "writes its state": "touch /var/lib/tunerd/x /run/tunerd/x",
    "reloads and restarts": "systemctl daemon-reload; systemctl restart ok",
    "reads the journal": "journalctl --lines=1 --quiet | grep -q .",
    "asks systemd about a unit": "systemd-analyze verify --man=no /etc/systemd/system/ok.service",
    "starts transient units": "systemd-run --quiet --wait true",
    "imports its libraries": "/opt/tunerd/bin/python -c 'import pynvml, psutil, httpx, numpy'",
    "sees processes of others": "grep -q VmRSS /proc/$(pgrep -u bob sleep)/status",
}
MAY_NOT = {
    "writes elsewhere": "touch /etc/x || touch /usr/x || touch /var/lib/x || touch /home/bob/x",
    "becomes another user": "setpriv --reuid 65534 --clear-groups true",
    "has a capability": "grep -E 'Cap(Prm|Eff|Bnd):.*[1-9a-f]' /proc/self/status",
    "mounts": "mount -t tmpfs none /mnt",
}


def test_tunerds_service_may_do_its_work_and_no_more(machine: Machine) -> None:
    unit = "/etc/systemd/system/tunerd.service"
    place_units(machine, "tunerd.service")
    probe = "[Service]\nType=oneshot\nExecStart=\nExecStart=/bin/sh -eu /etc/probe\nRestart=no\n"
    machine.write(f"{unit}.d/probe.conf", f"{probe}WatchdogSec=0\n[Unit]\nStartLimitBurst=100\n")
    machine.write("/etc/systemd/system/ok.service", "[Service]\nExecStart=/bin/sleep 300\n")
    machine.systemctl("daemon-reload")
    machine.run("systemd-run", "--quiet", "--property=User=bob", "sleep", "300")

    surprises = []
    for what, script in {**MAY, **MAY_NOT}.items():
        machine.write("/etc/probe", script)
        started = machine.run("systemctl", "start", "tunerd", check=False).returncode == 0
        if started != (what in MAY):
            surprises.append((what, machine.journal("--unit=tunerd", "--lines=5")))

    assert surprises == []
