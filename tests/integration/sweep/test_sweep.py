"""A sweep in local mode with the stand-in engine: what it finds, what befalls it, what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.made_sweep import put_small_nights
from tests.support.sweep_box import SweepBox, swept
from tunerd.measure.store import EvidenceStore, reading
from tunerd.sweep.record import KEPT_SWEEPS

# Each test goes on from what the one before it left, so all run in one process.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


@pytest.fixture(scope="module")
def found(box: SweepBox) -> dict[str, Any]:
    """A whole sweep: nothing that is drafted is ever right here, so off is much faster. One before it is old."""
    with EvidenceStore(box.box.context.paths.evidence) as store:
        put_small_nights(store, KEPT_SWEEPS + 1)
    assert [box.ask(120) for _ in range(4)] == [200] * 4
    return box.sweep(budget="80s")


def test_a_plan_shows_what_would_be_tried_and_stops_nothing(box: SweepBox) -> None:
    before = len(box.engine.served())
    plan = box.json("sweep", "run", "--dry-run", "--space", "serving.threads=1,2")["plan"]
    assert plan["points"] == 6
    assert plan["incumbent"]["n_max"] == 4
    families = {(one["engine"], one["speculation"]): one for one in plan["families"]}
    assert set(families) == {("fake", "mtp"), ("fake", "off")}
    assert families["fake", "mtp"]["n_max"] == [2, 4]
    reasons = {one["what"]: one["reason"] for one in plan["left_out"]}
    assert "there is no GPU" in reasons["memory.fit_mib"]
    assert plan["outlook"]["unit"] == "llama-server.service"
    assert len(box.engine.served()) == before


def test_a_budget_in_which_nothing_can_be_found_stops_nothing(box: SweepBox) -> None:
    before = len(box.engine.served())
    done = box.call("sweep", "run", "--yes", "--budget", "10s", code=2)
    assert "nothing can be found in 10 s" in done.stderr
    assert "--budget" in done.stderr
    assert len(box.engine.served()) == before
    assert (
        box.json("sweep", "run", "--dry-run", "--budget", "10s")["plan"]["forecast"]["starts"] < 2
    )


def test_what_makes_no_sense_is_refused_before_anything_stops(box: SweepBox) -> None:
    before = len(box.engine.served())
    assert "no profile key" in box.call("sweep", "run", "--yes", "--space", "x.y=1", code=2).stderr
    assert "downtime_s" in box.call("sweep", "run", "--yes", "--budget", "20h", code=2).stderr
    assert len(box.engine.served()) == before


def test_a_true_winner_is_proved_and_proposed(box: SweepBox, found: dict[str, Any]) -> None:
    assert found["verdict"] == "promote", found
    assert found["changes"].startswith("spec mtp -> off")
    shown = box.json("sweep", "show")
    decision = shown["challenges"][-1]["decision"]
    assert decision["e_value"] > decision["needed"]
    assert shown["verdict_record"]["n_pairs"] >= 3
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


def test_the_incumbent_was_started_exactly_as_it_serves(
    box: SweepBox, found: dict[str, Any]
) -> None:
    run = box.json("results", "export", str(found["sweep"]))["runs"][0]
    assert box.json("plan", "night")["argv"] in [row["argv"] for row in run["arms"]]


def test_the_page_has_every_part(box: SweepBox, found: dict[str, Any]) -> None:
    page = box.call("sweep", "show", str(found["sweep"])).stdout
    for part in ("promote: on small", "evidence", "by betting", "Paired differences", "Wall time by kind",
                 "Turn time by n-max", "Where the time went", "Not tried, or given up"):  # fmt: skip
        assert part in page
    html = box.call("report", str(found["sweep"]), "-o", "-").stdout
    for part in ("what was tried, and why", "Paired differences", "Where the time went"):
        assert part in html
    rows = box.json("sweep", "list")["sweeps"]
    assert rows[0]["verdict"] == "promote"


def test_what_was_served_is_where_laws_begin_and_the_verdict_says_whether_drafts_are_alike(
    box: SweepBox, found: dict[str, Any]
) -> None:
    assert "served" in {one["code"] for one in found["messages"]}
    served = box.json("sweep", "show", str(found["sweep"]))["served"]
    assert served["production"] == pytest.approx(0.0, abs=0.01)
    assert served["agrees"] is True
    told = "were accepted in the sweep, and 0% in service"
    assert told in found["sentence"]
    assert told in box.call("report", str(found["sweep"]), "-o", "-").stdout


def test_a_declined_winner_is_not_deployed(box: SweepBox, found: dict[str, Any]) -> None:
    box.call("decline", str(found["sweep"]), "--why", "not tonight")
    assert box.newest()["decided"]["text"] == "not tonight"
    assert "--spec-draft-n-max 4" in " ".join(box.json("plan", "night")["argv"])


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
