"""Two who want to change the same unit at once: two tunerds, or tunerd and a person."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployment import UNIT, Deployment, Said, profile
from tests.support.machine import Machine
from tests.support.overlay import Root
from tests.support.places import places

SLOW_S = 2.5
PROFILES = {
    "good": profile("good", serving__alias="good"),
    "also-good": profile("good", serving__alias="also-good"),
    "slow": profile("slow", serving__alias="slow"),
}
ENGINES = """
[engines.good]
path = "/srv/good/llama-server"
[engines.slow]
path = "/srv/slow/llama-server"
"""


@pytest.fixture(scope="module", params=places(of="system"), ids=str)
def box(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Deployment]:
    """A machine for the whole file: `slow` loads its model for seconds, `good` serves."""
    root: Root = request.getfixturevalue(f"{request.param.root}_root")
    with Machine(root, binds={"/srv/models": model_folder}) as machine:
        box = Deployment(machine, settings=ENGINES, profiles=PROFILES)
        box.stand_ins(good={}, slow={"load_s": SLOW_S})
        yield box


@pytest.fixture
def tunerd(box: Deployment) -> Deployment:
    """`good` serves, and nothing else goes on."""
    box.behave("slow", load_s=SLOW_S)
    if box.alias() != "good" or box.journal_files():
        box("apply", "good", "--yes", "--now")
    return box


def end(process: subprocess.Popen[bytes]) -> Said:
    """How a call ended that was started."""
    out, err = process.communicate(timeout=120)
    said = Said(process.returncode, out.decode(), err.decode())
    assert "Traceback" not in said.err, str(said)
    return said


def until_it_loads(tunerd: Deployment, alias: str = "slow") -> None:
    """Wait until the unit runs the new server, which then loads its model."""
    tunerd.machine.sh(
        f"until pid=$(systemctl show --property=MainPID --value {UNIT}) && [ $pid != 0 ] &&"
        f" tr '\\0' ' ' </proc/$pid/cmdline | grep -q -e '--alias {alias} '; do sleep 0.02; done"
    )


def nothing_is_left(tunerd: Deployment) -> None:
    assert tunerd.journal_files() == []
    left = tunerd.machine.sh(f"find {tunerd.units} {tunerd.state} -name '*.tmp'").stdout
    assert left == ""
    outcomes = [entry["outcome"] for entry in tunerd.json("history")["generations"]]
    assert "running" not in outcomes


def test_the_second_is_told_who_is_at_work(tunerd: Deployment) -> None:
    tunerd.behave("slow", load_s=12.0)
    first = tunerd.start("apply", "slow", "--yes")
    until_it_loads(tunerd)

    for second in (["apply", "slow", "--yes"], ["apply", "also-good", "--yes"], ["rollback"]):
        said = tunerd(*second, expect=75)
        assert "tunerd `apply slow` (process " in said.err
        assert "nothing was changed" in said.err
    told = tunerd.json("recover", expect=75)
    status = tunerd.json("status")

    assert first.poll() is None, "it was not at work any more"
    assert told["error"]["code"] == "busy"
    assert status["change_under_way"]
    assert end(first).code == 0
    assert tunerd.alias() == "slow"
    nothing_is_left(tunerd)


def test_a_stop_by_hand_in_the_middle_is_respected(tunerd: Deployment) -> None:
    before = tunerd.unit()
    process = tunerd.start("apply", "slow", "--yes")
    until_it_loads(tunerd)

    tunerd.systemctl("stop", UNIT)
    said = end(process)

    assert said.code == 3, str(said)
    assert "stopped by somebody else" in said.err
    assert tunerd.unit() == before
    assert tunerd.show("ActiveState") == "inactive"
    nothing_is_left(tunerd)
    tunerd.systemctl("start", UNIT)
    tunerd.until(lambda: tunerd.alias() == "good", "it serves")
