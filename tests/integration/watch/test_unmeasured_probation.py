"""What watches a server that was deployed by hand and never measured."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.stand_in import install
from tests.support.sweep_box import SPEED, SweepBox, for_everybody, swept, until
from tunerd.app import Context
from tunerd.machine.net import free_port
from tunerd.result import ActionResult
from tunerd.watch.probation import run_probation

pytestmark = pytest.mark.timeout(180)

UNIT = "llama-server.service"
CHANGED = ("night", "--set", "speculation.n_max=2")


@pytest.fixture
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found


class Meddling:
    """A clock on which something happens after the second look."""

    def __init__(self, ctx: Context, happens: Callable[[], object]) -> None:
        self._clock = ctx.clock
        self._happens = happens
        self._n_sleeps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        self._n_sleeps += 1
        if self._n_sleeps == 2:
            self._happens()


def run(box: SweepBox, happens: Callable[[], object], duration_s: float) -> ActionResult:
    """In a terminal, with looks more often than a settings file may ask for."""
    ctx = box.box.context
    often = ctx.settings.probation.model_copy(update={"every_s": 0.2})
    clock: Any = Meddling(ctx, happens)
    quick = replace(ctx, settings=ctx.settings.model_copy(update={"probation": often}), clock=clock)
    serving = ctx.generations.serving(ctx.unit)
    assert serving is not None
    return run_probation(quick, serving.generation.number, sweep=None, duration_s=duration_s)


def test_a_server_that_dies_after_apply_is_taken_back_though_nothing_was_measured(
    box: SweepBox,
) -> None:
    assert box.json("probation", "show")["probations"] == [], "a first one is not watched"
    with box.daemon():
        done = box.json("apply", *CHANGED, "--yes")
        told = {one["code"]: one["text"] for one in done["messages"]}
        assert "its speed is not judged" in told["probation"]
        until(lambda: box.probation().get("boot_id") is not None, "the daemon watches it")
        watched = box.probation()
        assert (watched["generation"], watched["state"]) == (done["generation"], "running")
        assert watched["basis"]["slowest_tok_s"] is None
        pid = box.box.context.services.state(UNIT).main_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: box.probation()["state"] == "taken back", "it is taken back")
        assert "died" in box.probation()["reason"]
        until(lambda: box.serves, "what served before serves")
        assert "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])


def test_an_apply_that_fails_does_not_end_the_watch(box: SweepBox) -> None:
    box.json("apply", *CHANGED, "--yes", "--no-probation")
    bad = install(box.box.folder / "bad", **SPEED, fail="oom-weights")
    for_everybody(bad)
    settings = box.box.folder / "config" / "tunerd.toml"
    settings.write_text(
        f'{settings.read_text()}[engines.bad]\npath = "{bad.program}"\nallow_writable = true\n'
    )
    words = ("--set", 'engine.prefer=["bad"]', "--set", "speculation.type=off", "--yes")
    beside = threading.Thread(  # so that looks fall into the middle of the swap
        target=lambda: box.call("apply", "night", *words, code=3)
    )
    result = run(box, beside.start, duration_s=8.0)
    beside.join()
    assert result.payload["state"] == "passed"


def test_what_is_measured_meanwhile_is_judged_by(box: SweepBox) -> None:
    box.json("apply", *CHANGED, "--yes", "--no-probation")

    def measure() -> None:
        box.call("bench", "--suite", "workload", "--workload", "small", "--yes")

    result = run(box, measure, duration_s=5.0)
    assert result.payload["basis"]["slowest_tok_s"] is not None
