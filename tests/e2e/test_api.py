"""The local API on a real systemd: an operator without root deploys and goes back, a stranger cannot."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Machines
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.roots import Tunerd, host_root

pytestmark = pytest.mark.xdist_group("api")

SETTINGS = """
[service]
drain_s = 0.0
settle_s = 0.3
[models]
dirs = ["/srv/models"]
"""
SOCKET = "/run/tunerd/tunerd.sock"
PROFILE = 'extends = "cpu-embedded-baseline"\nmodel.path = "/srv/models/tiny.gguf"\n'


@pytest.fixture
def machine(machines: Machines, build_root: Callable[..., Root]) -> Machine:
    made = machines(build_root(host_root, tunerd=Tunerd.INSTALLED))
    made.write("/etc/tunerd/tunerd.toml", SETTINGS)
    made.write("/etc/tunerd/profiles/plain.toml", PROFILE)
    made.run("usermod", "--append", "--groups", "tunerd", "alice")
    made.systemctl("restart", "tunerd.service")
    return made


def is_serving(machine: Machine) -> bool:
    asked = machine.sh("curl --silent --fail http://127.0.0.1:8080/health", check=False)
    return asked.returncode == 0


def test_an_operator_deploys_and_goes_back_without_root_and_a_stranger_cannot(
    machine: Machine,
) -> None:
    look = machine.run("stat", "--format=%F %a %U:%G", SOCKET).stdout.strip()
    assert look == "socket 660 root:tunerd"

    applied = machine.run("tunerd", "apply", "plain", "--yes", "--json", user="alice", limit_s=180)
    assert json.loads(applied.stdout)["generation"] == 1
    assert is_serving(machine)
    tuned = machine.run(
        *("tunerd", "apply", "plain", "--set", "serving.ctx_size=512", "--yes"),
        user="alice", limit_s=180,
    )  # fmt: skip
    assert "generation 2 serves" in tuned.stdout
    assert "waiting" in tuned.stderr or "[" in tuned.stderr, "its progress is shown"

    back = machine.run("tunerd", "rollback", "--yes", user="alice", limit_s=180)
    assert "as generation 3" in back.stdout
    status = json.loads(machine.run("tunerd", "status", "--json", user="alice").stdout)
    assert (status["mode"], status["healthy"], status["generation"]) == ("system", True, 3)
    shown = json.loads(machine.run("tunerd", "history", "show", "3", "--json").stdout)
    assert shown["generation"]["requested_by"] == "alice"

    curl = f"curl --silent --unix-socket {SOCKET} --output /dev/null --write-out '%{{http_code}}'"
    assert (
        machine.run("sh", "-c", f"{curl} http://localhost/api/status", user="alice").stdout == "200"
    )
    assert machine.run(
        "sh", "-c", f"{curl} http://localhost/api/status", user="bob", check=False
    ).returncode
    refused = machine.run("tunerd", "--system", "rollback", "--yes", user="bob", check=False)
    assert refused.returncode == 1
    assert "only root and members of group tunerd" in refused.stderr

    evil = machine.run(
        *("tunerd", "apply", "plain", "--set", 'engine.prefer=["/home/alice/evil"]', "--yes"),
        user="alice", check=False,
    )  # fmt: skip
    assert evil.returncode == 2
    assert "may not be set without root" in evil.stderr
    assert is_serving(machine)


def test_a_job_outlives_the_daemon_and_the_socket_starts_it_again(machine: Machine) -> None:
    machine.run("tunerd", "apply", "plain", "--yes", limit_s=180)
    ask = (
        f"curl --silent --unix-socket {SOCKET} -H 'X-Tunerd: 1' -H 'Content-Type: application/json'"
    )
    began = machine.run(
        *("sh", "-c", f"""{ask} -d '{{"profile":"plain","set":{{"serving.ctx_size":512}}}}' http://localhost/api/apply"""),
        user="alice",
    )  # fmt: skip
    number = json.loads(began.stdout)["job"]["job"]
    machine.kill(machine.show("tunerd", "MainPID"))

    machine.sh(
        f'until {ask} http://localhost/api/jobs/{number} | grep -q \'"state":"done"\'; do sleep 0.2; done',
        limit_s=120,
    )

    assert is_serving(machine)
    machine.systemctl("stop", "tunerd.service")
    assert (
        machine.run("sh", "-c", f"{ask} http://localhost/api/status", user="alice").returncode == 0
    )
    assert machine.systemctl("is-active", "tunerd.service") == "active"
    jobs = json.loads(
        machine.run("sh", "-c", f"{ask} http://localhost/api/jobs", user="alice").stdout
    )
    assert [one["asked_by"] for one in jobs["jobs"]] == ["alice"]
