"""The main job as its operator does it, on this host's root and on Debian sid with its own engine.

A machine lives for the whole file; every test starts from what it deploys itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import KeptMachine
from tests.support.deployment import MODEL, UNIT, Deployment, profile
from tests.support.designed import read_truth
from tests.support.machine import Machine
from tunerd.tryout.designed import vocabulary

WORDS = vocabulary()
CODE = WORDS.region("code").first
N_PREDICT = 65
ENGINE_OF = {"host": "embedded", "sid": "mainline"}
ON_HOST = pytest.mark.parametrize("box", ["host"], indirect=True)
PLAN_KEYS = {"argv", "unit", "diff", "memory", "warnings"}


@pytest.fixture(scope="module", params=["host", "sid"])
def box(request: pytest.FixtureRequest, kept_machine: KeptMachine) -> Deployment:
    """A machine with profiles `drafting` and `plain`, and its engine's proofs."""
    engine = ENGINE_OF[request.param]
    profiles = {
        "drafting": profile(engine, speculation__type="mtp"),
        "plain": profile(engine, serving__alias="plain", serving__ctx_size=1024),
    }
    return Deployment(kept_machine(request.param), profiles=profiles)


def drafted(box: Deployment) -> tuple[int, int]:
    """Drafted and accepted tokens of one completion by the deployed server."""
    answer = box.generate(WORDS.decode([CODE]), n=N_PREDICT, route="/v1/completions")
    return answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]


def test_detect_and_engines_say_what_is_here(box: Deployment) -> None:
    found = box.json("detect")

    assert found["mode"] == "system"
    assert found["gpus"] in ([], None), "a machine without a card"
    engines = {engine["name"]: engine for engine in found["engines"]}
    assert engines["embedded"]["dialect"] == "main-0x"
    if box.machine.root.name == "sid":
        assert engines["mainline-0.7.0"]["path"] == "/usr/bin/llama-server"
        assert len(engines["mainline-0.7.0"]["components"]) > 10, "its libraries are part of it"

    proved = box.json("engines", "--prove")["engines"]

    for engine in proved:
        effects = {proof["feature"]: proof["effect"] for proof in engine["proofs"]}
        assert effects["mtp"] == effects["p-min"] == effects["text"] == "proved", engine["proofs"]


@ON_HOST
def test_a_plan_explains_every_flag_and_touches_nothing(box: Deployment) -> None:
    box("plan", "drafting")  # what was probed is remembered from here on
    before = box.tree()

    planned = box.json("plan", "drafting", "--explain")
    dry = box.json("apply", "drafting", "--dry-run")

    assert box.tree() == before
    assert set(planned) >= PLAN_KEYS
    assert planned["argv"] == dry["argv"]
    assert planned["memory"]["devices"][0]["total_mib"] > 0
    assert "ExecStart=" in planned["unit"]
    refused = box.json("plan", "drafting", "--set", "speculation.n_min=9", expect=1)
    assert refused["refused"] is True
    assert refused["ok"] is False
    assert box.tree() == before


def test_apply_serves_with_drafts_as_the_model_must_give_them(
    box: Deployment, model_folder: Path
) -> None:
    done = box.apply("drafting")

    truth = read_truth(model_folder / "tiny.gguf")
    expected = truth.speculate(CODE, N_PREDICT, 3, 0.75)
    assert drafted(box) == (expected.drafted, expected.accepted)
    assert expected.accepted > 0
    assert done["first_text"]
    status = box.json("status")
    assert (status["healthy"], status["profile"]) == (True, "drafting"), status
    assert (status["enabled"], status["drift"]) == (True, []), status
    assert status["generation"] == done["generation"]
    assert status["address"] == "http://127.0.0.1:8080"
    verified = box.json("verify")
    assert (verified["as_deployed"], verified["drift"]) == (True, [])
    assert box.show("User") == "llama-server"


@ON_HOST
def test_a_plan_goes_on_where_nothing_can_check_its_unit(box: Deployment) -> None:
    """systemd-analyze 252 needs a /tmp that it can write."""
    full = "mount -t tmpfs -o ro none /tmp && exec tunerd plan plain --json"
    planned = json.loads(
        box.machine.run("unshare", "--mount", "sh", "-c", full, check=False).stdout
    )

    told = {one["code"]: one["text"] for one in planned["messages"]}
    assert not planned["refused"], told
    assert "Read-only file system" in told["unit-unchecked"]


@ON_HOST
def test_nothing_is_begun_where_systemd_would_not_read_units_again(box: Deployment) -> None:
    """It wants 16 MiB in /run. A swap and its way back failed: exit code 4, though the old server never stopped."""
    box.apply("plain")
    life = box.show("InvocationID")
    left = "$(($(stat --file-system --format='%f * %S' /run) - (8 << 20)))"
    box.machine.sh(f"fallocate --length {left} /run/takes-it")

    told = [
        box(*words, "--yes", expect=1).err
        for words in (("apply", "drafting"), ("rollback",), ("bench", "drafting"))
    ]

    box.machine.run("rm", "/run/takes-it")
    assert all("16.0M" in one and "nothing was touched" in one for one in told), told
    assert (box.show("InvocationID"), box.journal_files()) == (life, [])


@ON_HOST
def test_a_machine_that_slept_tells_since_when_it_serves(box: Deployment) -> None:
    """CLOCK_MONOTONIC stands still meanwhile: after a night asleep it served since this morning."""
    box.apply("plain")
    since_s = box.json("status")["since_s"]

    slept = box.machine.run("unshare", "--time", "--monotonic=-5", "tunerd", "status", "--json")

    assert abs(json.loads(slept.stdout)["since_s"] - since_s) < 1


@ON_HOST
def test_another_profile_and_back_and_back_again(box: Deployment) -> None:
    first = box.apply("drafting")["generation"]
    first_unit = box.unit()
    second = box.apply("plain", "--set", "serving.n_ubatch=256")
    second_unit = box.unit()

    assert "alias-changes" in {message["code"] for message in second["messages"]}
    assert second["without_service_s"] > 0
    assert box.alias() == "plain"
    assert "draft_n" not in box.generate()["timings"]
    rows = box.json("history")["generations"]
    assert [row["number"] for row in rows[:2]] == [second["generation"], first]
    assert {row["outcome"] for row in rows[:2]} == {"serving"}
    shown = box.json("history", "show", str(second["generation"]))
    assert second_unit is not None
    assert shown["unit"] == second_unit.text
    assert shown["generation"]["pins"] == {"serving.n_ubatch": 256}
    difference = box.json("history", "diff", str(first), str(second["generation"]))["diff"]
    assert "+    --alias plain" in difference, difference

    back = box.json("rollback")
    assert box.unit() == first_unit
    assert drafted(box)[1] > 0
    assert back["to"] == second["backup"]

    box.json("rollback")
    assert box.unit() == second_unit, "back twice is where one was"
    assert box.alias() == "plain"

    listed = box.json("rollback", "--list")["backups"]
    assert listed[0]["profile"] == "drafting"
    oldest = next(row for row in reversed(listed) if row["profile"] == "drafting")
    box.json("rollback", "--to", oldest["name"])
    assert box.unit() == first_unit
    box.json("rollback", "--to", str(second["generation"]))
    assert box.unit() == second_unit
    assert box("verify").code == 0
    same = box("rollback", "--to", str(second["generation"]), expect=1)
    assert "already live" in same.err, str(same)
    for nowhere in ("99999", f"{UNIT}.pre-nothing", "../../etc/passwd"):
        box("rollback", "--to", nowhere, expect=2)


MOUNT = """\
[Unit]
Requires=late.service
After=late.service
[Mount]
What=/srv/real-{disk}
Where=/srv/{disk}
Options=bind,nofail
[Install]
WantedBy=multi-user.target
"""
LATE = """\
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/bin/sleep {seconds}
"""


def test_a_server_waits_for_a_mount_that_boot_does_not_wait_for(host_machine: Machine) -> None:
    """It was started without its model again and again, for 80 s, and told as dying."""
    machine, units = host_machine, "/etc/systemd/system"
    machine.write(f"{units}/late.service", LATE.format(seconds=0))
    for disk in ("links", "disk", "store"):
        machine.sh(f"mkdir -p /srv/real-{disk} /srv/{disk}")
        machine.write(f"{units}/srv-{disk}.mount", MOUNT.format(disk=disk))
        machine.systemctl("enable", "--now", f"srv-{disk}.mount")
    machine.run("cp", MODEL, "/srv/store/")
    machine.sh("ln -s /srv/disk /srv/links/models; ln -s /srv/store/tiny.gguf /srv/disk/")
    linked = profile("embedded", model__path="/srv/links/models/tiny.gguf", serving__alias="linked")
    tunerd = Deployment(machine, profiles={"linked": linked})
    tunerd.apply("linked")
    machine.write(f"{units}/late.service", LATE.format(seconds=4))

    machine.reboot()

    tunerd.until(lambda: tunerd.alias() == "linked", "it serves", unit=UNIT)
    assert tunerd.show("NRestarts") == "0", tunerd.logs()
    waits_for = tunerd.show("After").split()
    assert {f"srv-{one}.mount" for one in ("links", "disk", "store")} <= set(waits_for)
    assert "srv-models.mount" not in waits_for, "which no file names"
    assert tunerd.json("plan", "linked")["diff"] == "", "the same as before"
