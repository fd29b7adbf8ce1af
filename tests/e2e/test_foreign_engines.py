"""Programs that nobody vouches for: what probing, trying and keeping one lets it do to the machine."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import KeptMachine
from tests.support.deployment import Deployment
from tests.support.places import places
from tests.support.roots import PREFIX

PROGRAM = "/opt/foreign/llama-server"
# Before it is the stand-in, it tells who it is, where, and what it may write, and flees its session.
FLEES = """#!/bin/bash
touch /srv/owned /tmp/owned 2>/dev/null
echo "$(id -u) $(grep -o 'tunerd-probe.*' /proc/self/cgroup) $(ls /tmp | wc -l)" > /dev/udp/127.0.0.1/9999
setsid bash -c 'sleep 4711 & sleep 4711 &' > /dev/null 2>&1 < /dev/null
exec /srv/good/llama-server "$@"
"""
CLAIMS = """#!/bin/bash
[ -n "$LD_DEBUG" ] && for file in %s; do printf '        1:\tcalling init: %%s\n' $file >&2; done
unset LD_DEBUG
exec /srv/good/llama-server "$@"
"""
LISTENER = """
import socket
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("127.0.0.1", 9999))
with open("/run/heard", "w", buffering=1) as file:
    while True:
        file.write(heard.recv(4096).decode())
"""


@pytest.fixture(scope="module", params=places(of="system"), ids=str)
def box(request: pytest.FixtureRequest, kept_machine: KeptMachine) -> Deployment:
    made = Deployment(
        kept_machine(request.param.root), settings=f'[engines.foreign]\npath = "{PROGRAM}"\n'
    )
    made.stand_ins(good={})
    return made


def install(box: Deployment, text: str) -> None:
    box.machine.write(PROGRAM, text)
    box.machine.run("chmod", "755", PROGRAM)


def test_a_foreign_program_is_an_account_of_its_own_and_leaves_nothing(box: Deployment) -> None:
    install(box, FLEES)
    with box.machine.start(PREFIX / "bin/python", "-c", LISTENER) as listener:
        box.machine.sh("until [ -e /run/heard ]; do sleep 0.05; done")

        found = {engine["name"]: engine for engine in box.json("engines", "--prove")["engines"]}

        def heard() -> list[list[str]]:
            """What it has written of it: it may be behind."""
            said = [line.split() for line in box.machine.read("/run/heard").splitlines()]
            return said if len(said) >= 4 else []

        said = box.until(heard, "help, version, what it maps, and a trial")
        listener.kill()
    assert found["foreign"]["problem"] is None
    assert found["foreign"]["proofs"], "it was tried"
    server = box.machine.run("id", "-u", "llama-server").stdout.strip()
    uids = {uid for uid, *_ in said}
    assert len(uids) == len(said), "an account for each run"
    assert not uids & {"0", server}
    assert all(cgroup.startswith("tunerd-probe-") for _, cgroup, _ in said)
    assert {n_files for *_, n_files in said} == {"1"}, "a /tmp of its own"
    assert box.machine.sh("ls /srv/owned /tmp/owned 2>/dev/null || true").stdout == ""
    assert box.machine.sh("pgrep -f '[s]leep 4711' || true").stdout == ""
    assert box.machine.files("/run/systemd/transient") == []


def test_a_kept_program_is_what_was_there(box: Deployment) -> None:
    install(box, CLAIMS % "/etc/ld.so.cache")

    kept = box.json("engines", "keep", PROGRAM)

    program = kept["program"]
    assert box.machine.read(program) == box.machine.read(PROGRAM)
    look = box.machine.sh(f"stat --format='%a %U %F' {program} {kept['folder']}/lib/ld.so.cache")
    assert look.stdout.split("\n")[:2] == ["755 root regular file", "644 root regular file"]


def test_a_sandbox_holds_on_this_systemd(box: Deployment) -> None:
    box.machine.pytest("tests/e2e/inside/test_sandbox.py")
