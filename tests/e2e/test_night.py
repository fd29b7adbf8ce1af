"""A whole night, accelerated: begun by `schedule run-now`, and nobody types anything after it."""

from __future__ import annotations

import pytest

from tests.support.deployment import place_units
from tests.support.machine import Machine
from tests.support.night import Night, begin_night, is_night, newest_job, starts
from tests.support.places import PLACES, Place, places

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("place", [PLACES["host"], PLACES["sid"], *places(of="user")], ids=str)
def test_a_night_finds_deploys_watches_and_takes_back_what_does_worse_in_service(
    place: Place, request: pytest.FixtureRequest
) -> None:
    machine: Machine = request.getfixturevalue(f"{place.root}_machine")
    night = Night(machine, user=place.user, sweep='promote = "auto"\nbudget_s = 180.0')
    place_units(machine, "tunerd.service", user=place.user)
    night.box.systemctl("start", "tunerd.service")
    begin_night(night.box)
    night.until(lambda: starts(night.box) >= 2, "two candidates")
    night.until(lambda: not is_night(night.box), "the night is over")
    assert newest_job(night.box)["state"] == "done"
    found = night.newest()
    assert (found["verdict"], found["decision"]) == ("promote", "promoted"), found["sentence"]
    assert night.serves
    assert not night.speculates()
    assert night.box.json("history")["generations"][0]["reason"] == "promote"
    assert night.box.json("plan", "night")["diff"] == "", "the next apply keeps the winner"

    client = night.client()
    try:
        night.until(lambda: night.newest()["decision"] == "taken back", "the winner is taken back")
    finally:
        client.kill()
        client.wait()
    night.until(lambda: night.serves, "production serves")
    assert night.speculates()
    assert night.box.json("history")["generations"][0]["reason"] == "guard"
    watched = night.box.json("probation", "show")["probations"][0]
    assert watched["state"] == "taken back"
    assert "in service" in watched["reason"]
    assert night.box.json("plan", "night")["diff"] == "", "the next apply does not bring it back"
    rejected = night.box.json("sweep", "run", "--dry-run")["plan"]["rejected"]
    assert ["no speculation" in row["arm"] for row in rejected] == [True]
