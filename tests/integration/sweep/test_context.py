"""The largest context that holds a speed, as a user asks for it; the stand-in is as fast with any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.sweep_box import SweepBox, swept
from tunerd.machine.net import free_port

pytestmark = pytest.mark.timeout(300)

ASKED = ("--goal", "context", "--space", "serving.ctx_size=512,1024,1536,2048")


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found


def test_a_plan_names_the_sizes_and_keeps_all_else(box: SweepBox) -> None:
    plan = box.json("sweep", "run", "--dry-run", *ASKED, "--at-least", "40")["plan"]
    (family,) = plan["families"]
    assert family["n_max"] == [4]
    assert [dict(map(tuple, one))["serving.ctx_size"] for one in family["extra"]] == [
        512, 1024, 1536, 2048,
    ]  # fmt: skip
    said = box.call("sweep", "run", "--dry-run", *ASKED, "--at-least", "40").stdout
    assert "looks for the largest context that holds 40 tok/s" in said
    assert "all other settings" in said


def test_a_speed_without_the_goal_and_the_goal_without_a_speed_are_refused(box: SweepBox) -> None:
    for words in (("--goal", "context"), ("--at-least", "40")):
        done = box.call("sweep", "run", "--dry-run", *words, code=2)
        assert "--goal context and --at-least go together" in done.stderr


def test_a_context_that_somebody_pinned_is_not_searched(box: SweepBox) -> None:
    box.call("apply", "night", "--yes", "--set", "serving.ctx_size=1024")
    done = box.call("sweep", "run", "--dry-run", *ASKED, "--at-least", "40", code=2)
    box.call("apply", "night", "--yes")
    assert "serving.ctx_size is pinned" in done.stderr


def test_a_sweep_for_speed_says_why_it_keeps_the_context(box: SweepBox) -> None:
    plan = box.json("sweep", "run", "--dry-run", *ASKED[2:])["plan"]
    reasons = {one["what"]: one["reason"] for one in plan["left_out"]}
    assert "--goal context" in reasons["serving.ctx_size"]


@pytest.mark.alone
def test_the_largest_context_is_proved_promoted_and_served(box: SweepBox) -> None:
    found = box.sweep(*ASKED, "--at-least", "40", budget="80s")
    assert found["verdict"] == "promote", found
    assert found["changes"] == "serving.ctx_size = 2048"
    shown = box.newest()
    assert shown["challenges"][-1]["reasons"][0].endswith("starts")
    assert shown["page"]["against"] == "turns at 40 tok/s"
    assert shown["verdict_record"]["ratio"] is None
    done = box.json("promote", "--yes")
    assert "at 40 tok/s it would take" in done["measured_again"]["text"]
    assert done["tuned"] == {"serving.ctx_size": 2048}
    assert "--ctx-size 2048" in " ".join(box.json("plan", "night")["argv"])
    assert box.serves
