"""What watches a server that was deployed by hand and never measured."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.stand_in import install
from tests.support.sweep_box import SPEED, SweepBox, for_everybody, swept, until
from tunerd.machine.net import free_port
from tunerd.production.probation import keep_probation, read_probation
from tunerd.watch.findings import basis_of
from tunerd.watch.probation import Probation
from tunerd.watch.readings import Watcher

pytestmark = pytest.mark.timeout(180)

UNIT = "llama-server.service"
CHANGED = ("night", "--set", "speculation.n_max=2")


@pytest.fixture
def box() -> Iterator[SweepBox]:
    with swept(free_port()) as found:
        yield found


def watched(box: SweepBox, happens: Callable[[], object], left_s: float) -> dict[str, Any]:
    """The record in the end, with looks more often than a settings file may ask for."""
    ctx = box.box.context
    often = ctx.settings.probation.model_copy(update={"every_s": 0.2})
    quick = replace(ctx, settings=ctx.settings.model_copy(update={"probation": often}))
    record = read_probation(ctx, box.probation()["generation"])
    assert record is not None
    keep_probation(ctx, record | {"left_s": left_s})
    watch, watcher = Probation(quick, lambda one: basis_of(ctx, one)), Watcher(quick)
    for number in itertools.count():
        assert watch.after(watcher.look()) is None
        if number == 2:
            happens()
        if not watch.is_watching():
            break
        time.sleep(0.2)
    return box.probation()


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
    box.json("apply", *CHANGED, "--yes")
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
    found = watched(box, beside.start, left_s=8.0)
    beside.join()
    assert found["state"] == "passed"


def test_what_is_measured_meanwhile_is_judged_by(box: SweepBox) -> None:
    box.json("apply", *CHANGED, "--yes")

    def measure() -> None:
        box.call("bench", "--suite", "workload", "--workload", "small", "--yes")

    found = watched(box, measure, left_s=5.0)
    assert found["basis"]["slowest_tok_s"] is not None
