"""The local API on a real systemd: an operator without root deploys and goes back, a stranger cannot."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from tests.support.machine import Machine

SETTINGS = """
[service]
drain_s = 0.0
settle_s = 0.3
[models]
dirs = ["/srv/models"]
"""
SOCKET = "/run/tunerd/tunerd.sock"
PORT = "http://127.0.0.1:8080"
# Whoever runs this leaves a trace.
EVIL = "#!/bin/sh\ntouch /tmp/evil-ran\n"
PROFILE = 'extends = "cpu-embedded-baseline"\nmodel.path = "/srv/models/tiny.gguf"\n'


@pytest.fixture
def machine(member_machine: Machine) -> Machine:
    member_machine.write("/etc/tunerd/tunerd.toml", SETTINGS)
    member_machine.write("/etc/tunerd/profiles/plain.toml", PROFILE)
    member_machine.systemctl("restart", "tunerd.service")
    return member_machine


def told(machine: Machine, *words: str, user: str | None = None, code: int | None = 0) -> Any:
    """What `tunerd WORDS --json` prints for root or this user; any exit code where `code` is None."""
    done = machine.run("tunerd", *words, "--json", user=user, check=False)
    assert code in {None, done.returncode}, (words, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def status_code(machine: Machine, user: str, url: str = "http://localhost/api/status") -> str:
    """What the API answers this user with, over its socket; 000 where nobody answers."""
    curl = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}")
    way = ("--unix-socket", SOCKET) if url.startswith("http://localhost/") else ()
    return machine.run(*curl, *way, url, user=user, check=False).stdout


def is_serving(machine: Machine) -> bool:
    asked = machine.sh("curl --silent --fail http://127.0.0.1:8080/health", check=False)
    return asked.returncode == 0


def test_an_operator_deploys_and_goes_back_without_root_and_a_stranger_cannot(
    machine: Machine,
) -> None:
    look = machine.run("stat", "--format=%F %a %U:%G", SOCKET).stdout.strip()
    assert look == "socket 660 root:tunerd"

    assert told(machine, "apply", "plain", "--yes", user="alice")["generation"] == 1
    assert is_serving(machine)
    words = ("apply", "plain", "--set", "serving.ctx_size=512", "--yes")
    tuned = machine.run("tunerd", *words, user="alice")
    assert "generation 2 serves" in tuned.stdout
    assert "waiting" in tuned.stderr or "[" in tuned.stderr, "its progress is shown"

    back = machine.run("tunerd", "rollback", "--yes", user="alice")
    assert "as generation 3" in back.stdout
    status = told(machine, "status", user="alice")
    assert (status["mode"], status["healthy"], status["generation"]) == ("system", True, 3)
    alone = machine.run("tunerd", user="alice").stdout
    assert "llama-server.service: active" in alone, "what is here in short is of the same server"
    assert told(machine, "history", "show", "3")["generation"]["requested_by"] == "alice"

    assert (status_code(machine, "alice"), status_code(machine, "bob")) == ("200", "000")
    for more in (("rollback", "--yes"), ("sweep", "stop")):
        refused = machine.run("tunerd", "--system", *more, user="bob", check=False)
        assert refused.returncode == 1
        assert "only root and members of group tunerd" in refused.stderr
    told_bob = {one["code"]: one["text"] for one in told(machine, "status", user="bob")["messages"]}
    assert "members of group tunerd" in told_bob["not-a-member"]
    assert "not-a-member" not in str(status["messages"])
    machine.write("/home/alice/plain.toml", PROFILE, owner="alice")
    for name in ("plain", "/home/alice/plain.toml"):
        assert told(machine, "profiles", "check", name, user="alice")["problems"] == []


def test_a_job_outlives_the_daemon_and_the_socket_starts_it_again(machine: Machine) -> None:
    machine.run("tunerd", "apply", "plain", "--yes")
    ask = f"curl -s --unix-socket {SOCKET} -H 'X-Tunerd: 1' -H 'Content-Type: application/json'"
    body = json.dumps({"profile": "plain", "set": ["serving.ctx_size=512"]})
    began = machine.sh(f"{ask} -d '{body}' http://localhost/api/apply", user="alice")
    number = json.loads(began.stdout)["job"]["job"]
    machine.kill(machine.show("tunerd", "MainPID"))

    until(machine, f'{ask} http://localhost/api/jobs/{number} | grep -q \'"state":"done"\'')

    assert is_serving(machine)
    machine.systemctl("stop", "tunerd.service")
    assert status_code(machine, "alice") == "200"
    assert machine.systemctl("is-active", "tunerd.service") == "active"
    assert [one["asked_by"] for one in told(machine, "jobs", user="alice")["jobs"]] == ["alice"]


# What whoever took the web part over would try.
_ASK = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as channel:
    channel.connect("/run/tunerd/daemon.sock")
    channel.sendall(sys.argv[1].encode() + b"\\n")
    print(channel.makefile().readline())
"""


def test_what_speaks_http_has_an_account_that_may_only_ask(machine: Machine) -> None:
    assert status_code(machine, "alice") == "200"
    pid = machine.show("tunerd-web", "MainPID")
    assert machine.run("stat", "--format=%U", f"/proc/{pid}").stdout.strip() == "tunerd-web"
    look = machine.run("stat", "--format=%F %a %U", "/run/tunerd/daemon.sock").stdout.strip()
    assert look == "socket 600 tunerd-web"
    seen = machine.sh(f"nsenter --target {pid} --mount ls /var/lib/tunerd /etc/tunerd").stdout
    assert seen == "/etc/tunerd:\n\n/var/lib/tunerd:\n", "nothing of tunerd's is there for it"
    asked = {"uid": 0, "argv": ["apply", "plain", "--set=model.path=evil", "--yes"]}
    words = ("/opt/tunerd/bin/python", "-S", "-E", "-c", _ASK, json.dumps(asked))
    for user in ("alice", "bob"):
        assert "PermissionError" in machine.run(*words, user=user, check=False).stderr
    assert not machine.run(*words, check=False).stdout.strip(), "root is not heard there either"
    said = machine.run(*words, user="tunerd-web").stdout
    assert "may not be set without root" in json.loads(said)[0]["error"]["message"]

    machine.kill(pid)
    asking = f"curl --silent --fail --output /dev/null --unix-socket {SOCKET}"
    until(machine, f"{asking} http://localhost/api/status")
    page = "http://127.0.0.1:8765/"
    machine.write("/etc/tunerd/tunerd.toml", f'{SETTINGS}[page]\nlisten = "127.0.0.1:8765"\n')
    until(machine, f"curl --silent --output /dev/null {page}")
    for who, code in (("alice", "200"), ("bob", "403"), ("root", "403")):
        assert status_code(machine, who, page) == code, who


def until(machine: Machine, condition: str) -> None:
    machine.sh(f"until {condition}; do sleep 0.2; done")


def test_a_member_may_switch_what_root_may(machine: Machine) -> None:
    machine.run("tunerd", "apply", "plain", "--yes")
    machine.run("tunerd", "guard", "set", "hang", "advise", user="alice")
    machine.run("tunerd", "schedule", "set", "--window", "01:00-06:30", "--on", user="alice")
    written = tomllib.loads(machine.read("/etc/tunerd/tunerd.toml"))
    assert written == {
        **tomllib.loads(SETTINGS),
        "guards": {"hang": "advise"},
        "sweep": {"window": "01:00-06:30"},
        "schedule": {"enabled": True},
    }
    machine.run("tunerd", "schedule", "skip-tonight", user="alice")
    nights = told(machine, "schedule", "show")["nights"]
    assert [night["skipped"] for night in nights][:2] == [True, False]


def test_ctrl_c_leaves_a_members_measurement_which_its_number_ends(machine: Machine) -> None:
    machine.run("tunerd", "apply", "plain", "--yes")
    words = ("compare", "--set", "serving.n_batch=256", "--budget", "10m", "--yes")
    client = machine.start("tunerd", *words, user="alice")
    until(machine, "systemctl is-active --quiet 'tunerd-candidate-*'")

    machine.run("pkill", "-INT", "--uid", "alice", "--full", "[t]unerd compare")

    _, printed = client.communicate(timeout=240)
    assert client.returncode == 130
    assert b"job 1 keeps running; `tunerd jobs watch 1` follows it" in printed, printed
    (job,) = told(machine, "jobs", user="alice")["jobs"]
    assert (job["kind"], job["state"], job["asked_by"]) == ("compare", "running", "alice")
    lease = machine.sh("systemctl show --value --property=BindsTo 'tunerd-lease-*'").stdout.strip()
    assert lease == "tunerd-job-1.service"
    assert told(machine, "bench", user="alice", code=75)["error"]["code"] == "busy"

    machine.run("tunerd", "jobs", "stop", "1", user="alice")

    assert is_serving(machine)
    assert machine.sh("systemctl is-active 'tunerd-lease-*'", check=False).stdout.strip() == ""
    error = told(machine, "jobs", "watch", "1", user="alice", code=None)["error"]
    assert error["code"] == "interrupted"
    assert "serves again" in error["state"]


def test_no_member_has_a_program_run_a_file_read_or_an_address_asked(machine: Machine) -> None:
    machine.run("tunerd", "apply", "plain", "--yes")
    evil = "/home/alice/llama-server"
    machine.write(evil, EVIL, mode=0o755, owner="alice")
    for words, code in (
        (("apply", "plain", "--set", f'engine.prefer=["{evil}"]', "--yes"), 2),
        (("sweep", "run", "--space", f"engine={evil}", "--yes"), 2),
        (("bench", "plain", "--set", f"model.path={evil}", "--yes"), 2),
        (("compare", evil, "--yes"), 2),
        (("workload", "learn", "--name", "../../../etc/cron.d/x"), 2),
        (("workload", "learn", "--unit", "sshd.service"), 1),
        (("--system", "bench", "--url", PORT), 1),
        (("engines", "keep", "llama-server"), 1),
        (("settings",), 1),
    ):
        said = machine.run("tunerd", *words, user="alice", check=False)
        assert said.returncode == code, (words, said.stdout, said.stderr)
        assert "Traceback" not in said.stderr, said.stderr
    assert not machine.exists("/tmp/evil-ran")  # noqa: S108 -- in a machine of the test
    assert is_serving(machine)
    assert told(machine, "verify")["as_deployed"]


def test_a_member_does_not_become_root_by_going_back_to_a_unit_that_people_wrote(
    machine: Machine,
) -> None:
    program, unit = "/home/alice/llama.cpp/llama-server", "/etc/systemd/system/llama-server.service"
    real = "/opt/tunerd/bin/tunerd-llama-server"
    machine.run("mkdir", "-p", "/home/alice/llama.cpp", user="alice")
    machine.write(program, f'#!/bin/sh\nexec {real} "$@"\n', mode=0o755, owner="alice")
    words = "--model /srv/models/tiny.gguf --host 127.0.0.1 --port 8080 --alias old"
    machine.write(
        unit, f"[Service]\nExecStart={program} {words}\n[Install]\nWantedBy=multi-user.target\n"
    )
    machine.systemctl("daemon-reload")
    machine.systemctl("enable", "--now", "llama-server")
    as_own = SETTINGS.replace("[service]", '[service]\nuser = "llama-server"')
    machine.write("/etc/tunerd/tunerd.toml", as_own)
    machine.run("tunerd", "apply", "plain", "--yes", "--no-probation")
    machine.write(program, f'{EVIL}exec {real} "$@"\n', mode=0o755, owner="alice")
    (backup,) = [name for name in machine.files("/etc/systemd/system") if ".pre-" in name]

    for more in ((), ("--to", backup), ("--to", "llama-server.service.bak")):
        machine.run("cp", f"/etc/systemd/system/{backup}", f"{unit}.bak")
        said = machine.run("tunerd", "rollback", "--yes", *more, user="alice", check=False)
        assert said.returncode in {1, 2}, said.stdout
        assert "only root may make" in said.stderr or "no such backup" in said.stderr

    assert not machine.exists("/tmp/evil-ran")  # noqa: S108 -- in a machine of the test
    assert is_serving(machine)
    assert "as generation 2" in machine.run("tunerd", "rollback", "--yes").stdout
    assert machine.exists("/tmp/evil-ran")  # noqa: S108 -- root did it, and may
