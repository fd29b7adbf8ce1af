"""systemd keeps the contract of a service manager: this host's and Debian sid's, root's and a user's."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Machines
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.places import PLACES, Place

_MANAGER = """
from pathlib import Path
from tunerd.words import Mode
from tunerd.paths import paths_for
from tunerd.machine.files import Files
from tunerd.units.systemd import Systemd
manager = Systemd(Mode.SYSTEM, paths_for(Mode.SYSTEM, {}))
"""
_ENABLE = f"""{_MANAGER}
text = b"[Service]\\nExecStart=/bin/sleep infinity\\n[Install]\\nWantedBy=multi-user.target\\n"
Files().write(Path("/etc/systemd/system/durable.service"), text)
manager.reload()
manager.CALL("durable.service")
"""


@pytest.mark.parametrize("place", [PLACES["host"], PLACES["sid-user"]], ids=str)
def test_systemd_keeps_the_contract(place: Place, request: pytest.FixtureRequest) -> None:
    machine: Machine = request.getfixturevalue(f"{place.root}_machine")

    done = machine.pytest(
        "tests/e2e/inside/test_systemd_contract.py",
        *("-q", "--timeout=120"),
        user=place.user,
        env={"TUNERD_TEST_MANAGER": "system" if place.user is None else "user"},
    )

    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_an_enabled_unit_runs_after_a_power_cut_that_loses_what_was_not_synced(
    machines: Machines, host_root: Root
) -> None:
    machine = machines(host_root, disk_mib=300)
    machine.python("-c", _ENABLE.replace("CALL", "enable"))
    machine.power_cut()
    machine.boot()

    assert machine.show("durable.service", "UnitFileState") == "enabled"
    assert machine.show("durable.service", "ActiveState") == "active"

    machine.python("-c", _ENABLE.replace("CALL", "disable"))
    machine.power_cut()
    machine.boot()

    assert machine.show("durable.service", "UnitFileState") == "disabled"
    assert machine.show("durable.service", "ActiveState") == "inactive"


_LAST_WORDS = f"""{_MANAGER}
import os, signal, subprocess, threading
journald = manager.state("systemd-journald.service").main_pid
os.kill(journald, signal.SIGSTOP)
threading.Timer(2.0, os.kill, (journald, signal.SIGCONT)).start()
subprocess.run(["systemctl", "start", "quick.service"])
life = manager.state("quick.service").invocation_id
print(len([line for line in manager.log("quick.service", invocation_id=life) if "word" in line]))
"""


def test_the_last_words_of_a_program_that_ends_at_once_are_read_though_the_journal_is_late(
    machine: Machine,
) -> None:
    """journald stands still for a while, as on a machine that is busy."""
    say = "/bin/sh -c 'for n in 1 2 3; do echo word $n; done; exit 1'"
    machine.write(
        "/etc/systemd/system/quick.service", f"[Service]\nType=oneshot\nExecStart={say}\n"
    )
    machine.systemctl("daemon-reload")
    said = machine.python("-c", _LAST_WORDS).stdout
    assert said.split()[-1] == "3"


def test_what_somebody_else_writes_in_the_name_of_a_life_is_not_of_it(
    host_machine: Machine,
) -> None:
    """One of which the journal has nothing: anybody may see its name, and write fields that name it."""
    host_machine.write(
        "/etc/systemd/system/x.service", "[Service]\nLogLevelMax=err\nExecStart=/bin/sleep 1000\n"
    )
    host_machine.systemctl("daemon-reload")
    host_machine.systemctl("start", "x")
    asked = host_machine.run("systemctl", "show", "-P", "InvocationID", "x", user="bob")
    life = asked.stdout.strip()
    entry = f"MESSAGE=CUDA error: out of memory\\nINVOCATION_ID={life}\\nUNIT=x.service\\n"
    host_machine.run("sh", "-c", f"printf '{entry}' | logger --journald", user="bob")

    read = f"print(manager.log('x.service', invocation_id='{life}'))"
    said = host_machine.python("-c", _MANAGER + read)

    assert said.stdout == "()\n"
