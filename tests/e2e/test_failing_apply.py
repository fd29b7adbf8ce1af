"""Every way in which a new server can fail: the old unit and the old server are back each time.

The machine and its old server live for the whole file, so each test also shows that the one before
it left nothing behind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import KeptMachine, Machines
from tests.support.deployment import UNIT, Deployment, UnitFile, profile
from tests.support.overlay import Root

OLD_ALIAS = "old-and-well"
ENGINES = """
[engines.good]
path = "/srv/good/llama-server"
[engines.bad]
path = "/srv/bad/llama-server"
"""
PROFILES = {
    "good": profile("good", serving__alias=OLD_ALIAS),
    "bad": profile("bad", serving__alias="new"),
    "real": profile("embedded"),
}


# How the new server fails, what kind that is said to be, and the cause.
# Source of the engines' own words: tests/support/fake_llama/failures.py.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "crash-loop": ({"fail": "assert"}, "crash", "signal 6"),
    "oom-first-request": ({"fail": "oom-first-request"}, "out of VRAM", "out of memory"),
    "killed-in-its-load": ({"fail": "killed"}, "killed", "signal 9"),
    "drips": ({"drips": True}, "hang", "no sign of progress"),
    "hang-at-first-generation": ({"reply": "hang"}, "hang", "no answer within"),
    "other-model-answers": ({"alias": "stranger"}, "another server answers", "stranger"),
    "ends-after-its-first-answer": ({"exit_after_requests": 1, "exit_status": 3}, "unknown", ""),
    "hangs-and-ignores-sigterm": (
        {"load_never_ends": True, "ignore_sigterm": True}, "hang", "no sign of progress"
    ),
    "leaves-a-child": (
        {"leave_child": True, "exit_after_requests": 1, "exit_signal": 11}, "crash", "signal 11"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Before:
    """What must be so again afterwards."""

    unit: UnitFile
    generation: int


@pytest.fixture(scope="module")
def tunerd(kept_machine: KeptMachine) -> Deployment:
    """An old server that serves, and an engine `bad` that does as it is told."""
    made = Deployment(
        kept_machine("host"), settings=ENGINES, profiles=PROFILES, stall_s=1.5,
        generation_limit_s=1.5, stop_timeout_s=2,
    )  # fmt: skip
    made.stand_ins(good={"time_scale": 0.2}, bad={})
    made.apply("good")
    made.machine.sh(f"chmod 0640 {made.units}/{UNIT}; chgrp tunerd {made.units}/{UNIT}")
    return made


@pytest.fixture
def before(tunerd: Deployment) -> Before:
    unit = tunerd.unit()
    assert unit is not None
    assert "640 root:tunerd" in unit.look
    assert tunerd.alias() == OLD_ALIAS, tunerd.logs()
    numbers = tunerd.machine.files(f"{tunerd.state}/generations")
    return Before(unit, int(numbers[-1]))


def assert_as_before(tunerd: Deployment, before: Before) -> None:
    """The old unit to the byte, its server generating, nothing left over, history says so."""
    assert tunerd.unit() == before.unit
    assert tunerd.alias() == OLD_ALIAS, tunerd.logs()
    tunerd.generate()
    assert tunerd.journal_files() == []
    status = tunerd.json("status")
    assert (status["active"], status["healthy"], status["drift"]) == ("active", True, []), status
    last = status["last_swap"]
    assert (last["number"], last["outcome"]) == (before.generation + 1, "rolled back"), last
    processes = tunerd.processes()
    assert "/srv/bad/" not in processes, f"the failed server still runs:\n{processes}"
    group = tunerd.machine.read(f"/sys/fs/cgroup{tunerd.show('ControlGroup')}/cgroup.procs")
    assert group.split() == [str(status["pid"])], processes


@pytest.mark.parametrize("case", CASES)
def test_after_any_failure_the_old_server_is_back(
    tunerd: Deployment, before: Before, case: str
) -> None:
    behaviour, kind, words = CASES[case]
    tunerd.behave("bad", **behaviour)

    error = tunerd.apply("bad", expect=3)["error"]

    assert kind in error["message"], error
    assert words in error["cause"], error
    assert error["code"] == "rolled_back", error
    assert "previous unit serves again" in error["state"], error
    assert_as_before(tunerd, before)


def kill_a_swap(tunerd: Deployment) -> None:
    """In its middle: its server drips for ever."""
    tunerd.behave("bad", drips=True)
    tunerd.start("apply", "bad", "--yes")
    tunerd.machine.sh(f"until grep -q /srv/bad {tunerd.units}/{UNIT}; do sleep 0.02; done")
    tunerd.machine.run("pkill", "-KILL", "--full", "[t]unerd apply")
    assert tunerd.journal_files() != [], "killed in the middle of the swap"


def test_recovery_of_a_swap_that_was_killed_ends_though_its_server_drips(
    tunerd: Deployment, before: Before
) -> None:
    kill_a_swap(tunerd)

    tunerd("recover")

    assert_as_before(tunerd, before)


def test_what_a_person_has_put_back_with_a_key_is_not_started_anew_by_recovery(
    tunerd: Deployment,
) -> None:
    """Its key's path is `%d/api-key` in the unit, and another word on the process's command line."""
    machine, unit = tunerd.machine, f"{tunerd.units}/{UNIT}"
    machine.write("/etc/tunerd/key", "s3cret\n", mode=0o600)
    tunerd.apply("real", "--set", "serving.api_key_file=/etc/tunerd/key")
    kill_a_swap(tunerd)
    machine.run("cp", f"{tunerd.units}/{tunerd.backups()[-1]}", unit)
    tunerd.systemctl("daemon-reload")
    tunerd.systemctl("restart", UNIT)
    tunerd.until(lambda: tunerd.ask("/health")[0] == 200, "it serves again")
    life = tunerd.show("InvocationID")

    assert tunerd.json("recover")["found"] == "untouched"

    assert tunerd.show("InvocationID") == life
    tunerd.apply("good")


def test_where_even_the_old_server_cannot_come_back_it_is_said_and_mended_later(
    tunerd: Deployment, before: Before
) -> None:
    tunerd.behave("bad", fail="oom-weights")
    machine = tunerd.machine

    # It has planned, and waits for a request to end before it swaps.
    body = {"prompt": "a long story", "n_predict": 1900, "stream": True, "ignore_eos": True}
    words = ("--silent", "--no-buffer", "--data-binary", json.dumps(body))
    client = machine.start("curl", *words, "http://127.0.0.1:8080/completion")
    assert client.stdout is not None
    assert client.stdout.readline().startswith(b"data: ")
    call = tunerd.start("apply", "bad", "--yes", env={"TUNERD_SERVICE__DRAIN_S": "20"})
    assert call.stderr is not None
    said = ""
    while "waiting for 1 running" not in said:
        line = call.stderr.readline().decode()
        assert line, f"tunerd ended before it drained: {said}"
        said += line
    machine.run("mv", "/srv/good", "/srv/elsewhere")
    client.stdout.close()
    said += call.stderr.read().decode()
    call.communicate()

    assert call.returncode == 4, said
    assert "out of VRAM" in said, said
    assert "way back: program cannot be started" in said, said
    assert "the previous unit is on disk" in said, said
    assert tunerd.unit() == before.unit, "the old unit's text must be back even so"
    assert tunerd.journal_files() == [f"{UNIT}.json"]
    still = tunerd("recover", expect=4)
    assert "program cannot be started" in still.err, still
    drift = {row["code"] for row in tunerd.json("verify", expect=6)["drift"]}
    assert drift >= {"interrupted", "engine-changed"}, drift
    assert drift & {"not-running", "restarts"}, drift

    machine.run("mv", "/srv/elsewhere", "/srv/good")
    recovered = tunerd.json("recover")

    assert recovered["serving"] is True, recovered
    assert_as_before(tunerd, before)


def test_a_full_disk_with_all_folders_for_temporary_files_on_it_has_a_way_back(
    machines: Machines, host_root: Root
) -> None:
    """A unit is checked in such a folder; rollback ended with "the result cannot be shown: standard output"."""
    profiles = {name: profile("embedded", serving__alias=name) for name in ("one", "two")}
    tunerd = Deployment(machines(host_root, disk_mib=200), profiles=profiles)
    tunerd.apply("one")
    tunerd.apply("two")
    tunerd.machine.sh(
        "umount -l /tmp; dd if=/dev/zero of=/fill bs=64k; dd if=/dev/zero of=/filled bs=1; true"
    )

    tunerd("rollback", "--yes")

    assert tunerd.alias() == "one"
