"""What befalls a sweep: arms that fail, and a window that ends while a candidate loads. Production serves after each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.fakes import AheadClock
from tests.support.sweep_box import SweepBox, swept
from tests.support.waiting import until
from tunerd.app import build_context
from tunerd.production.measurement import read_measurement
from tunerd.result import Progress
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.run import run_sweep

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


def starts(box: SweepBox) -> int:
    return len(box.engine.served())


def test_why_a_candidate_was_given_up_is_told_by_what_was_seen_of_it() -> None:
    """Status 500 is no hang, and a signal that anybody may send is no want of memory; the words are told as it happens."""
    rules = [
        {"when": {"speculative": "off"}, "set": {"reply": ["normal", "normal", "error"]}},
        {"when": {"n_max": "2"}, "set": {"exit_after_requests": 2, "exit_signal": 9}},
    ]
    with swept(rules=rules) as box:
        words = ("--space", "speculation.n_max=2,4", "--budget", "30s", "--seed", "3")
        done = box.call("sweep", "run", "--yes", *words)
        rows = box.newest()["page"]["failures"]
        assert {row["failure"] for row in rows if "no speculation" in row["arm"]} == {"error"}
        assert {row["failure"] for row in rows if "mtp 2/0" in row["arm"]} == {"killed"}
        assert "gave up on " in done.stderr
        assert ": status 500: " in done.stderr
        assert "ended: signal 9; " in done.stderr


@pytest.fixture
def fresh_box() -> Iterator[SweepBox]:
    """One that no earlier sweep has taught how long a load may take."""
    with swept() as found:
        yield found


def test_an_end_that_is_asked_for_while_the_server_comes_back_leaves_the_winner_a_proposal(
    fresh_box: SweepBox,
) -> None:
    box = fresh_box
    by_itself = replace(box.box, variables={"TUNERD_SWEEP__PROMOTE": "auto"})
    words = ("sweep", "run", "--yes", "--budget", "40s", "--seed", "3")
    process = by_itself.begin(*words)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("ending the measurement"):
            break
    os.kill(process.pid, signal.SIGINT)
    out, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert out.startswith("promote:")
    assert "not deployed, because the sweep was ended: ended by Ctrl-C" in told
    assert box.newest()["decision"] is None
    assert box.json("status")["generation"] == 1
    assert box.serves


def test_the_end_of_a_window_in_the_middle_of_a_load_puts_production_back_in_time(
    fresh_box: SweepBox,
) -> None:
    """38 s before noon, and the first candidate never ends to load; what serves afterwards does."""
    box = fresh_box
    noon_s = 1_800_000_000.0 - 1_800_000_000.0 % 86400 + 43200
    before, n_loads = box.engine.settings.read_text(), starts(box)
    ends: list[float] = []
    variables = {**box.box.environment, "TUNERD_SWEEP__TIMEZONE": "UTC"}
    ctx = build_context(environment=variables, start_supervisor=True)

    def note_the_end(_progress: Progress) -> None:
        record = read_measurement(ctx)
        ends.extend([] if record is None else [record.until_s])

    def behave_again() -> None:
        until(lambda: starts(box) > n_loads, "a candidate loads")
        box.engine.settings.write_text(before)

    box.engine.configure(load_never_ends=True)
    behaving = threading.Thread(target=behave_again)
    behaving.start()
    ctx = replace(ctx, clock=AheadClock(noon_s - 38 - time.time()), progress=note_the_end)
    request = SweepRequest(budget_s=20.0, window="01:00-12:00", seed=9,
                           space=("speculation.n_max=4",))  # fmt: skip
    done = run_sweep(ctx, request, confirm=lambda _prepared: None)
    behaving.join()
    assert done.payload["verdict"] == "inconclusive"
    assert "the window 01:00-12:00 ends" in done.payload["sentence"]
    assert max(ends) <= noon_s - 5, "what the service manager was told keeps time for the load"
    assert box.newest()["state"] == "stopped"
    assert box.serves
    assert box.leftovers() == []
