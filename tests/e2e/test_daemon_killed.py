"""The daemon with a webhook under a real systemd: what arrives there, and what becomes of a killed daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import KeptMachine
from tests.fault.campaign import TIMEOUT_S, chance, faults
from tests.fault.daemon_victim import DAEMON, STATE, DaemonFault, DaemonVictim
from tests.support.deployment import UNIT
from tests.support.machine import Machine
from tests.support.places import places
from tests.support.roots import SOURCES_INSIDE
from tests.support.webhook import ADDRESS, PORT

pytestmark = pytest.mark.timeout(TIMEOUT_S)
SEED = 20261122


@pytest.fixture(scope="module", params=places(of="system"), ids=str)
def machine(request: pytest.FixtureRequest, kept_machine: KeptMachine) -> Machine:
    return kept_machine(request.param.root)


@pytest.fixture
def victim(machine: Machine) -> Iterator[DaemonVictim]:
    """The daemon as it is shipped, which has told nothing yet."""
    made = DaemonVictim(machine)
    yield made
    machine.systemctl(
        "disable", "--now", "tunerd.socket", "tunerd-daemon.socket", DAEMON, check=False
    )
    machine.sh(f"rm -rf {STATE}/telemetry.db* {STATE}/notices")


def confined_as_the_daemon(machine: Machine, host: str, port: int) -> bool:
    """Whether a program that runs as tunerd.service does can connect to that address."""
    shipped = f"{SOURCES_INSIDE}/units/tunerd.service"
    program = f"/usr/bin/timeout 5 /bin/bash -c ': <> /dev/tcp/{host}/{port}'"
    machine.sh(
        f"sed -e '/^Restart=/d; /^Watchdog/d; s/^Type=.*/Type=oneshot/'"
        f' -e "s|^ExecStart=.*|ExecStart={program}|" {shipped}'
        " > /etc/systemd/system/confined.service"
    )
    machine.systemctl("daemon-reload")
    machine.systemctl("start", "confined", check=False)
    return machine.show("confined", "Result") == "success"


def can_firewall(machine: Machine) -> bool:
    """Whether systemd can hold a unit to its addresses here; it needs BPF, which containers may lack."""
    denied = ("systemd-run", "--quiet", "--wait", "--collect", "--property=IPAddressDeny=any")
    connect = ("timeout", "5", "/bin/bash", "-c", f": <> /dev/tcp/{ADDRESS}/{PORT}")
    return machine.run(*denied, *connect, check=False).returncode != 0


def test_what_a_guard_says_reaches_the_webhook_once_from_a_unit_that_may_connect(
    victim: DaemonVictim,
) -> None:
    machine, hook = victim.machine, victim.webhook
    victim.box.until(lambda: victim.is_ready, "the daemon is ready")
    hook.stop()
    pid = victim.box.show("MainPID")
    victim.box.stand_ins(eng={"dialect": "ik-now"})

    def refused() -> bool:
        look = "journalctl --quiet --output=cat --boot --unit='tunerd-notify-*' || true"
        said = machine.sh(look).stdout  # the pattern may match nothing yet
        return "refused" in said and "again in" in said

    victim.box.until(refused, "a connection was refused")
    assert hook.got() == []
    hook.start()
    victim.box.until(lambda: bool(hook.got()), "the notice arrived")

    assert confined_as_the_daemon(machine, "127.0.0.1", 8080), "the server may be asked"
    assert sorted(machine.show(DAEMON, "IPAddressDeny").split()) == ["0.0.0.0/0", "::/0"]
    if can_firewall(machine):
        assert not confined_as_the_daemon(machine, ADDRESS, PORT), "and nobody else"

    guard = victim.box.json("guard", "show")["guards"][3]
    assert guard["last"]["kind"] == "upgrade-refused"

    # However often it has looked since, the next notice is that of another state.
    victim.settings(more="[guards.none]\n")
    victim.box.until(lambda: len(hook.got()) > 1, "the next notice arrived")
    assert hook.kinds() == ["upgrade-refused", "settings-refused"]
    first = hook.got()[0]
    assert (first["source"], first["unit"], first["level"]) == ("tunerd", UNIT, "error")
    assert "next start will fail" in first["text"]
    assert "argument" in first["text"]
    assert victim.box.show("MainPID") == pid, "nothing was restarted"
    victim.box.until(lambda: not machine.files(f"{STATE}/notices"), "nothing is left")
    victim.settings()


def test_a_daemon_that_is_killed_at_its_work_comes_back_and_does_nothing_twice(
    victim: DaemonVictim,
) -> None:
    rng = chance(SEED)
    for fault in faults([DaemonFault.NOTICE], DaemonFault):
        print(fault, victim.befall(fault, rng))
        victim.check()
