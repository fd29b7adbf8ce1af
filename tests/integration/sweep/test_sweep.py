"""A sweep in local mode with the stand-in engine: what it finds, what befalls it, what it leaves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.support.fakes import AheadClock
from tests.support.made_sweep import put_small_nights
from tests.support.sweep_box import SweepBox, swept
from tests.support.waiting import until
from tunerd.app import build_context
from tunerd.measure.store import EvidenceStore, reading
from tunerd.production.measurement import read_measurement
from tunerd.result import Progress
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.record import KEPT_SWEEPS
from tunerd.sweep.run import run_sweep

# Each test goes on from what the one before it left, so all run in one process.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


@pytest.fixture(scope="module")
def found(box: SweepBox) -> dict[str, Any]:
    """A whole sweep: nothing that is drafted is ever right here, so off is much faster. One before it is old.

    It may deploy by itself, and somebody presses Ctrl-C while the server comes back.
    """
    with EvidenceStore(box.box.context.paths.evidence) as store:
        put_small_nights(store, KEPT_SWEEPS + 1)
    assert [box.ask(120) for _ in range(4)] == [200] * 4

    def interrupt(progress: Progress) -> None:
        if progress.text.startswith("ending the measurement"):
            signal.raise_signal(signal.SIGINT)

    variables = {**box.box.environment, "TUNERD_SWEEP__PROMOTE": "auto"}
    ctx = replace(build_context(environment=variables, start_supervisor=True), progress=interrupt)
    request = SweepRequest(budget_s=80.0, seed=3)
    done = run_sweep(ctx, request, confirm=lambda _prepared: None)
    return {**done.payload, "messages": [asdict(one) for one in done.messages]}


def test_a_true_winner_is_proved_and_proposed_against_what_serves_exactly(
    box: SweepBox, found: dict[str, Any]
) -> None:
    assert found["verdict"] == "promote", found
    assert "not deployed, because the sweep was ended: ended by Ctrl-C" in str(found["messages"])
    assert box.newest()["decision"] is None
    assert box.json("status")["generation"] == 1
    assert found["changes"].startswith("spec mtp -> off")
    shown = box.json("sweep", "show")
    decision = shown["challenges"][-1]["decision"]
    assert decision["e_value"] > decision["needed"]
    assert shown["verdict_record"]["n_pairs"] >= 3
    run = box.json("results", "export", str(found["sweep"]))["runs"][0]
    assert box.json("plan", "night")["argv"] in [row["argv"] for row in run["arms"]]
    assert box.serves
    assert box.leftovers() == []


def test_a_sweep_first_drops_what_was_asked_in_an_old_one(
    box: SweepBox, found: dict[str, Any]
) -> None:
    with reading(box.box.context) as store:
        assert store is not None
        runs = store.runs(kind="sweep", with_arms=False)
        assert runs[0].number == found["sweep"]
        assert [one.number for one in runs if one.record.dropped is not None] == [1]


def test_the_page_has_every_part_and_says_whether_drafts_in_service_are_alike(
    box: SweepBox, found: dict[str, Any]
) -> None:
    page = box.call("sweep", "show", str(found["sweep"])).stdout
    for part in ("promote: on small", "evidence", "by betting", "Paired differences", "Wall time by kind",
                 "Turn time by n-max", "Where the time went", "Not tried, or given up"):  # fmt: skip
        assert part in page
    assert "served" in {one["code"] for one in found["messages"]}
    served = box.json("sweep", "show", str(found["sweep"]))["served"]
    assert served["production"] == pytest.approx(0.0, abs=0.01)
    assert served["agrees"] is True
    told = "were accepted in the sweep, and 0% in service"
    assert told in found["sentence"]
    html = box.call("report", str(found["sweep"]), "-o", "-").stdout
    for part in ("what was tried, and why", "Paired differences", "Where the time went", told):
        assert part in html


def test_a_promoted_winner_serves_is_measured_again_and_stays_the_next_apply(
    box: SweepBox, found: dict[str, Any]
) -> None:
    done = box.json("promote", str(found["sweep"]), "--yes")
    assert done["measured_again"]["live"]["turn_s"] < done["measured_again"]["before_s"]
    assert done["tuned"] == {"speculation.type": "off"}
    assert "--spec" not in " ".join(box.engine.served()[-1])
    assert box.newest()["decision"] == "promoted"
    plan = box.json("plan", "night")
    assert plan["diff"] == ""
    explained = box.json("plan", "night", "--explain")["explain"]
    assert {one["key"] for one in explained if "tuned" in one["origin"]} == {"speculation.type"}
    again = box.call("promote", str(found["sweep"]), "--yes", code=2)
    assert "was already promoted" in again.stderr


def test_a_winner_that_a_person_rolls_back_stays_away_until_it_is_promoted_again(
    box: SweepBox, found: dict[str, Any]
) -> None:
    number = str(found["sweep"])
    assert box.json("sweep", "show", number)["decision"] == "promoted"
    back = box.json("rollback", "--yes")
    assert "tuned-declined" in {one["code"] for one in back["messages"]}
    assert box.json("sweep", "show", number)["decision"] == "rolled back"
    plan = box.json("plan", "night")
    assert "--spec-draft-n-max 4" in " ".join(plan["argv"])
    told = [one["text"] for one in plan["messages"] if one["code"] == "tuned-declined"]
    assert told == [f"what sweep {number} found (speculation.type = off) is left out: it was rolled back by hand"]  # fmt: skip
    rejected = box.json("sweep", "run", "--dry-run")["plan"]["rejected"]
    assert [row["reason"] for row in rejected] == ["it was rolled back by hand"]

    again = box.json("rollback", "--yes")
    assert "in force again" in " ".join(one["text"] for one in again["messages"])
    assert "--spec" not in " ".join(box.json("plan", "night")["argv"])
    assert box.json("sweep", "run", "--dry-run")["plan"]["rejected"] == []

    box.json("rollback", "--yes")
    box.json("promote", number, "--yes")
    assert box.json("plan", "night")["diff"] == ""
    assert "--spec" not in " ".join(box.engine.served()[-1])


@pytest.fixture
def fresh_box() -> Iterator[SweepBox]:
    """One that no earlier sweep has taught how long a load may take."""
    with swept() as found:
        yield found


def test_the_end_of_a_window_in_the_middle_of_a_load_puts_production_back_in_time(
    fresh_box: SweepBox,
) -> None:
    """38 s before noon, and the first candidate never ends to load; what serves afterwards does."""
    box = fresh_box
    noon_s = 1_800_000_000.0 - 1_800_000_000.0 % 86400 + 43200
    before, n_loads = box.engine.settings.read_text(), len(box.engine.served())
    ends: list[float] = []
    ctx = build_context(environment=box.box.environment, start_supervisor=True)

    def note_the_end(_progress: Progress) -> None:
        record = read_measurement(ctx)
        ends.extend([] if record is None else [record.until_s])

    def behave_again() -> None:
        until(lambda: len(box.engine.served()) > n_loads, "a candidate loads")
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
