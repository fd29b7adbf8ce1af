"""What watches a server that was deployed by hand and never measured."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.sweep_box import SweepBox, swept, until
from tunerd.actions.context import Context
from tunerd.actions.probation import run_probation
from tunerd.system.ports import free_port

# Each test goes on from what the one before it left, so all run in one process.
pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("probation")]

UNIT = "llama-server.service"


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found


def quick(box: SweepBox) -> Context:
    """Looks more often than a settings file may ask for."""
    ctx = box.box.context
    often = ctx.settings.probation.model_copy(update={"every_s": 0.2})
    return replace(ctx, settings=ctx.settings.model_copy(update={"probation": often}))


def watched(box: SweepBox) -> dict[str, Any]:
    rows: list[dict[str, Any]] = box.json("probation", "show")["probations"]
    return rows[0] if rows else {"generation": 0, "state": ""}


def test_a_first_server_has_nothing_to_go_back_to_and_is_not_watched(box: SweepBox) -> None:
    assert box.json("probation", "show")["probations"] == []


def test_a_server_that_dies_after_apply_is_taken_back_though_nothing_was_measured(
    box: SweepBox,
) -> None:
    done = box.json("apply", "night", "--set", "speculation.n_max=2", "--yes")
    told = {one["code"]: one["text"] for one in done["messages"]}
    assert "its speed is not judged" in told["probation"]
    until(lambda: watched(box)["generation"] == done["generation"], "the first look")
    assert watched(box)["state"] == "running"
    assert watched(box)["basis"]["slowest_tok_s"] is None
    pid = box.box.context.services.state(UNIT).main_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: watched(box)["state"] == "taken back", "it is taken back")
    assert "died" in watched(box)["reason"]
    until(lambda: box.serves, "what served before serves")
    assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])


def test_a_server_that_serves_until_the_end_passes_and_says_what_was_not_judged(
    box: SweepBox,
) -> None:
    done = box.json("apply", "night", "--set", "speculation.n_max=2", "--yes", "--no-probation")
    result = run_probation(quick(box), done["generation"], sweep=None, duration_s=1.0)
    assert result.payload["state"] == "passed"
    assert "none was measured" in result.payload["reason"]


def test_a_server_that_somebody_stopped_stays_stopped(box: SweepBox) -> None:
    ctx = quick(box)
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    ctx.services.stop(UNIT)
    result = run_probation(ctx, serving.generation.number, sweep=None, duration_s=2.0)
    assert (result.payload["state"], result.payload["reason"]) == ("ended", "somebody stopped it")
    assert not ctx.services.state(UNIT).is_active
    ctx.services.start(UNIT)


def test_an_edit_by_hand_ends_the_watch(box: SweepBox) -> None:
    ctx = quick(box)
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    text = box.box.unit.read_text()

    class Editing:
        """A clock on which somebody edits the unit after the second look."""

        def __init__(self) -> None:
            self.n_sleeps = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(ctx.clock, name)

        def sleep(self, seconds: float) -> None:
            ctx.clock.sleep(seconds)
            self.n_sleeps += 1
            if self.n_sleeps == 2:
                box.box.unit.write_text(
                    text.replace("--spec-draft-n-max 2", "--spec-draft-n-max 3")
                )
                ctx.services.reload()

    edited = replace(ctx, clock=Editing())
    result = run_probation(edited, serving.generation.number, sweep=None, duration_s=10.0)
    assert (result.payload["state"], result.payload["reason"]) == (
        "ended", "somebody edited the unit",
    )  # fmt: skip
    assert "--spec-draft-n-max 3" in box.box.unit.read_text()
