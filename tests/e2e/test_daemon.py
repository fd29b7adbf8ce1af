"""tunerd.service as it is shipped and confined: what it mends, and what does not depend on it."""

from __future__ import annotations

from tests.support.machine import Machine

APPLY = ("--set", "model.path=/srv/models/tiny.gguf", "--yes")
RECORD = "/var/lib/tunerd/journal/llama-server.service.json"


def is_serving(machine: Machine) -> bool:
    asked = machine.sh("curl --silent --fail http://127.0.0.1:8080/health", check=False)
    return asked.returncode == 0


def test_an_apply_that_was_killed_is_mended_by_the_daemon(installed_machine: Machine) -> None:
    machine = installed_machine
    machine.run("tunerd", "apply", "cpu-embedded-baseline", *APPLY)
    before = machine.read("/etc/systemd/system/llama-server.service")

    machine.start("tunerd", "apply", "cpu-embedded", *APPLY)
    machine.sh(f"until [ -e {RECORD} ]; do sleep 0.01; done", limit_s=60)
    machine.run("pkill", "-KILL", "--full", "[t]unerd apply")
    assert machine.exists(RECORD), "killed in the middle of the swap"
    machine.sh(f"while [ -e {RECORD} ]; do sleep 0.1; done", limit_s=60)

    assert is_serving(machine)
    stands = machine.read("/etc/systemd/system/llama-server.service")
    assert stands == before or "cpu-embedded," in stands
    assert machine.run("tunerd", "verify", check=False).returncode == 0
    assert machine.systemctl("is-active", "tunerd.service") == "active"
    assert machine.show("tunerd.service", "NRestarts") == "0"


def test_the_server_does_not_notice_what_becomes_of_the_daemon(installed_machine: Machine) -> None:
    machine = installed_machine
    machine.run("tunerd", "apply", "cpu-embedded-baseline", *APPLY)
    pid = machine.show("llama-server", "MainPID")

    machine.kill(machine.show("tunerd", "MainPID"))
    machine.sh("until systemctl is-active --quiet tunerd; do sleep 0.1; done", limit_s=30)
    machine.systemctl("stop", "tunerd")
    machine.systemctl("disable", "tunerd")

    assert machine.show("llama-server", "MainPID") == pid
    machine.power_cut()
    machine.boot()
    machine.sh("until curl -sf http://127.0.0.1:8080/health; do sleep 0.1; done", limit_s=30)
    assert machine.systemctl("is-active", "tunerd", check=False) == "inactive"
