"""What a night knows of the nights before it, out of a real store."""

from __future__ import annotations

from tests.support.stores import open_store
from tunerd.measure.evidence import RunRecord, SummaryRecord
from tunerd.measure.store import EvidenceStore
from tunerd.sweep.record import KIND, history_of

DEPLOYED_S = 1000.0


def put(store: EvidenceStore, started_s: float, basis: str) -> int:
    number = store.add_run(
        RunRecord(kind=KIND, suites=("workload",), started_s=started_s, target="a box")
    )
    store.add_summary(number, SummaryRecord(KIND, "sweep plan", None, {"basis": basis}))
    store.add_sweep_event(number, {"process": f"p{number}", "pair": [1, 1]})
    return number


def test_challenges_of_before_what_serves_was_deployed_spend_nothing_of_its_alpha(
    place: str,
) -> None:
    with open_store(place) as store:
        put(store, DEPLOYED_S - 1, "same")
        put(store, DEPLOYED_S + 1, "other")
        put(store, DEPLOYED_S + 2, "same")
        own = put(store, DEPLOYED_S + 3, "same")
        found = history_of(store, "same", DEPLOYED_S, but=own)
    assert [(one["process"], one["pair"]) for one in found] == [("p1", None), ("p3", [1, 1])]
    assert all(one["is_earlier"] for one in found)
