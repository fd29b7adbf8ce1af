"""A sweep of a server that sleeps: nothing wakes it before the lease stops it."""

from __future__ import annotations

import json

import pytest

from tests.support.sweep_box import swept
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)


def test_a_sweep_stops_a_sleeping_server_without_waking_it_and_starts_it_again() -> None:
    with swept() as box:
        profile = box.box.folder / "config/profiles/night.toml"
        text = profile.read_text().replace("[serving]", "[serving]\nsleep_idle_s = 3")
        profile.write_text(text)
        box.call("apply", "night", "--yes")
        until(lambda: box.json("status")["asleep"] is True, "it sleeps")
        n_before = len(box.engine.record.read_text().splitlines())

        box.sweep(budget="30s")

        rows = [json.loads(row) for row in box.engine.record.read_text().splitlines()[n_before:]]
        happened = [row["event"] for row in rows if row["event"] in {"wake", "exit", "load"}]
        assert happened[:2] == ["exit", "load"]
        assert box.serves
