"""Whatever a server dies of, a person hears of it once, and once that it is over."""

from __future__ import annotations

from dataclasses import replace

from tunerd.engine.health import FailureKind
from tunerd.watch.figures import Event
from tunerd.watch.guards import (
    Death,
    DeathsState,
    Decision,
    deaths_recalled,
    look_at_deaths,
    look_for_deaths,
)

DEATH = Death(0.0, FailureKind.CRASH, "GGML_ASSERT(ok) failed", has_given_up=False)


class Told:
    """Deaths and looks one after the other, and what was told of them."""

    def __init__(self) -> None:
        self.state = DeathsState()
        self.found: list[Decision] = []

    def died(self, at_s: float, *, gave_up: bool = False) -> None:
        death = replace(DEATH, at_s=at_s, has_given_up=gave_up)
        self.state, decision = look_at_deaths(self.state, death)
        self.found += [] if decision is None else [decision]

    def looked(self, at_s: float, *, is_ready: bool = True) -> None:
        self.state, decision = look_for_deaths(self.state, at_s, is_ready=is_ready)
        self.found += [] if decision is None else [decision]

    @property
    def kinds(self) -> list[str]:
        return [one.kind for one in self.found]


def test_one_death_after_which_it_serves_again_is_no_news() -> None:
    told = Told()
    told.died(0.0)
    told.looked(60.0)
    assert told.kinds == []


def test_a_loop_of_deaths_is_told_once_and_its_end_when_it_has_lasted() -> None:
    told = Told()
    for n in range(6):
        told.died(60.0 * n)
        told.looked(60.0 * n + 30)
    assert told.kinds == ["server-dies"]
    assert "GGML_ASSERT" in told.found[0].evidence
    told.looked(300.0 + 1700)
    assert told.kinds == ["server-dies"]
    told.looked(300.0 + 1900)
    told.looked(300.0 + 2000)
    assert told.kinds == ["server-dies", "server-back"]


def test_a_server_that_is_given_up_is_an_error_at_once_and_its_return_too() -> None:
    told = Told()
    told.died(0.0, gave_up=True)
    told.died(10.0, gave_up=True)
    told.looked(20.0, is_ready=False)
    told.looked(30.0)
    assert [(one.kind, one.level) for one in told.found] == [
        ("server-failed", "error"),
        ("server-back", "note"),
    ]


def test_a_loop_that_ends_with_giving_up_is_told_as_both() -> None:
    told = Told()
    told.died(0.0)
    told.died(10.0)
    told.died(20.0, gave_up=True)
    assert told.kinds == ["server-dies", "server-failed"]


def test_deaths_that_are_far_apart_are_no_loop() -> None:
    told = Told()
    for n in range(5):
        told.died(7200.0 * n)
    assert told.kinds == []


def test_a_daemon_that_takes_over_repeats_nothing_and_tells_the_end() -> None:
    event = Event(100.0, "server-failed", "error", "it died")
    told = Told()
    told.state = deaths_recalled([Event(200.0, "hang", "warning", "x"), event])
    told.died(150.0, gave_up=True)
    told.looked(160.0)
    assert told.kinds == ["server-back"]
    over = Event(300.0, "server-back", "note", "it serves again")
    assert deaths_recalled([over, event]) == DeathsState()
    assert deaths_recalled([]) == DeathsState()
