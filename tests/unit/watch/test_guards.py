"""Guards as they decide: state and look in, state and decision out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.readings import a_reading
from tests.support.transcripts import decisions_lines, transcript
from tunerd.engine.health import FailureKind, HttpState
from tunerd.measure.answer import Counters
from tunerd.watch.figures import Event, Reading
from tunerd.watch.guards import (
    Act,
    Death,
    Deaths,
    Decision,
    EngineSeen,
    Hang,
    Margin,
    Policy,
    Replanned,
    Seen,
    deaths_recalled,
    decide,
    look_at_deaths,
    look_at_engine,
    look_at_oom,
    look_for_deaths,
)

# Out of memory

MARGIN = Margin(1664, 0, is_pinned=False)
NEVER_SERVED = Seen("one")
SERVED = Seen("one", free_mib=4000, has_served=True)


def deaths(
    *times_s: float,
    kind: FailureKind = FailureKind.OUT_OF_VRAM,
    margin: Margin = MARGIN,
    policy: Policy = "act",
    gave_up: bool = False,
    seen: Seen = NEVER_SERVED,
) -> list[Decision]:
    state, words = Deaths(), "cudaMalloc failed: out of memory"
    told = [
        look_at_oom(state, Death(at_s, kind, words, gave_up, seen), margin, policy, 2)
        for at_s in times_s
    ]
    return [one for one in told if one is not None]


def test_one_death_is_an_accident_and_two_are_a_loop() -> None:
    assert deaths(0.0) == []
    bears_the_log_out = replace(SERVED, free_mib=900)
    for found in (
        deaths(0.0, 60.0),
        deaths(0.0, gave_up=True),  # one is enough where systemd has given up
        deaths(0.0, 1.0, seen=bears_the_log_out),
    ):
        assert [one.act for one in found] == [Act.RAISE_MARGIN]


@pytest.mark.parametrize("times_s", [(0.0, 3600.0, 7200.0), (5000.0, 1000.0)])
def test_deaths_that_are_far_apart_are_no_loop_nor_is_one_of_a_clock_that_was_set_back(
    times_s: tuple[float, ...],
) -> None:
    assert deaths(*times_s) == []


def test_deaths_between_two_looks_count_each_and_no_more_than_a_few() -> None:
    death = Death(0.0, FailureKind.OUT_OF_VRAM, "out of memory", False, NEVER_SERVED, n=3)
    raised = look_at_oom(Deaths(), death, MARGIN, "act", 2)
    dies = look_at_deaths(Deaths(), replace(death, n=900))
    assert raised is not None
    assert dies is not None
    assert "it died 3 times" in raised.evidence
    assert "died 5 times within half an hour" in dies.text


def test_another_cause_raises_nothing() -> None:
    for kind in set(FailureKind) - {FailureKind.OUT_OF_VRAM}:
        assert deaths(0.0, 1.0, 2.0, kind=kind, gave_up=True) == []


LEFT_ALONE: dict[str, dict[str, Any]] = {
    "it was raised as often as it may be": {"margin": Margin(2048, 2, is_pinned=False)},
    "a person pinned it": {"margin": replace(MARGIN, is_pinned=True)},
    "it was edited": {"margin": replace(MARGIN, left_alone="it was edited")},
    "there is none": {"margin": Margin(None, 0, is_pinned=False)},
    "its profile was removed": {
        "margin": Margin(None, 0, is_pinned=False, left_alone="there is no profile `mine`")
    },
    "nothing is done by itself": {"policy": "advise"},
    # Whoever may ask it something may write lines of that.
    "no look saw VRAM run short": {"seen": SERVED},
    "no look saw VRAM at all": {"seen": replace(SERVED, free_mib=None)},
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_a_margin_that_must_not_be_raised_is_told_of(why: str) -> None:
    (decision,) = deaths(0.0, 1.0, **LEFT_ALONE[why])
    assert (decision.act, decision.level) == (Act.NOTHING, "error")
    assert deaths(0.0, 1.0, 2.0, **LEFT_ALONE[why] | {"policy": "off"}) == []


@given(st.integers(min_value=0, max_value=200_000))
def test_a_margin_never_becomes_smaller(fit_mib: int) -> None:
    for counts_less in (False, True):
        margin = Margin(fit_mib, 0, is_pinned=False, counts_less=counts_less)
        assert (margin.next_mib or 0) > fit_mib


def test_the_steps_of_ik_are_those_of_the_write_up_and_mainline_goes_by_the_smallest() -> None:
    steps = [(1024, 1664), (1664, 1792), (1792, 2048), (2048, 2304)]
    for fit_mib, next_mib in steps:
        assert Margin(fit_mib, 0, is_pinned=False, counts_less=True).next_mib == next_mib
        assert Margin(fit_mib, 0, is_pinned=False).next_mib == fit_mib + 128


def test_the_least_that_was_free_is_that_of_one_life() -> None:
    seen = Seen()
    for free_mib in (900, None, 4000):
        seen = seen.then("one", free_mib, is_ready=free_mib == 900)
    assert seen == Seen("one", free_mib=900, has_served=True)
    assert seen.then("two", 4000, is_ready=False) == Seen("two", 4000)


# Hang


def a_hang() -> Hang:
    return Hang("act", every_s=900.0, restarts_per_hour=2)


def rests(
    at_s: float, *, is_ready: bool = True, is_busy: bool | None = False, n_predicted: int = 100
) -> Reading:
    """A server that rests, or says of itself what is given."""
    says = is_busy is not None
    return a_reading(
        at_s,
        health=HttpState.READY if is_ready else HttpState.LOADING,
        slots_busy=int(bool(is_busy)) if says else None,
        counters=Counters(None, n_predicted, 0, 0) if says else None,
    )


def rest(until_s: float, cores: float | None = 0.0, **changed: Any) -> tuple[Hang, list[int]]:
    """Look every 10 s; when it wanted to ask."""
    state, asked = a_hang(), []
    for at_s in range(0, int(until_s) + 1, 10):
        if state.look(rests(at_s, **changed), cores):
            asked.append(at_s)
            state.answered(at_s)
    return state, asked


def test_a_server_that_generates_for_others_is_not_asked() -> None:
    state = a_hang()
    assert not any(state.look(rests(10.0 * n, n_predicted=100 + n // 50), 0.0) for n in range(400))


@pytest.mark.parametrize(
    ("seen", "asked_s"),
    [
        ({}, [900, 1800, 2700]),
        ({"is_busy": True}, []),  # however long it works
        ({"is_busy": None, "cores": 0.0}, [900]),  # it does not say, and does nothing at all
        ({"is_busy": None, "cores": 0.9}, []),
        ({"is_busy": None, "cores": None}, []),
        ({"is_ready": False}, []),  # it loads or died, which is another matter
    ],
)
def test_a_server_that_rests_is_asked_seldom_and_one_that_works_or_may_work_is_not(
    seen: dict[str, Any], asked_s: list[int]
) -> None:
    _, asked = rest(3000, **seen)
    assert asked[: len(asked_s) or None] == asked_s


def silence(state: Hang, at_s: float) -> Decision | None:
    """Two questions without an answer."""
    state.failures = 0
    assert state.unanswered(at_s, "no answer within 30 s") is None
    return state.unanswered(at_s + 45, "no answer within 30 s")


def test_the_second_question_comes_soon_but_not_while_somebody_else_may_wait() -> None:
    state, _ = rest(900)
    state.unanswered(930.0, "no answer")
    assert state.look(rests(935.0), 0.0) is False
    for cores, is_busy, due in ((1.0, True, False), (0.0, True, True), (1.0, False, True)):
        assert state.look(rests(946.0, is_busy=is_busy), cores) is due


def test_a_server_that_hangs_again_and_again_is_left_alone_and_that_is_said_once() -> None:
    state = a_hang()
    found = [silence(state, 200.0 * n) for n in range(5)]
    acts = [None if one is None else one.act for one in found]
    assert acts == [Act.RESTART, Act.RESTART, Act.NOTHING, None, None]
    state.answered(1000.0)
    decision = silence(state, 5000.0)
    assert decision is not None
    assert decision.act is Act.RESTART, "an hour later, and after it had answered"


def test_restarts_of_a_time_to_come_are_those_that_a_clock_was_set_back_from() -> None:
    state = a_hang()
    state.recall(
        [Event(6000.0 + n, "hang", "warning", "the server hangs") for n in range(2)], 5500.0
    )
    decision = silence(state, 5500.0)
    assert decision is not None
    assert decision.act is Act.RESTART


# Upgrade

FILES = (("/opt/llama-server", (100, 1)), ("/opt/libllama.so", (200, 1)))
STANDS = EngineSeen(FILES, "580.95")


def upgrades(*seen: EngineSeen) -> list[bool]:
    """Which looks have what the one before had, though another than the first look."""
    before, found = None, []
    for one in seen:
        before, is_settled = look_at_engine(before, one)
        found.append(is_settled and before != seen[0])
    return found


def test_files_that_changed_are_looked_into_when_they_stay_as_they_are() -> None:
    program, library = ("/opt/llama-server", (120, 2)), ("/opt/libllama.so", (210, 3))
    half = replace(STANDS, files=(program, FILES[1]))
    whole = replace(STANDS, files=(program, library))
    gone = replace(STANDS, files=(program, ("/opt/libllama.so", None)))
    assert upgrades(STANDS, half, gone, whole, whole, whole) == [False] * 4 + [True, True]
    assert upgrades(STANDS, gone, gone) == [False, False, True], "its name may be gone for good"


def test_another_driver_counts_and_one_that_is_away_does_not() -> None:
    away, other = replace(STANDS, driver_version=None), replace(STANDS, driver_version="590.1")
    assert upgrades(STANDS, away, STANDS, other, other) == [False] * 4 + [True]


KEPT = Replanned(True, (), "1", "1", identity_before="aaa", identity_now="bbb",
                         kept="kept-aaa", engine="mainline-b9")  # fmt: skip
UPGRADED: dict[str, tuple[Replanned, Policy, bool]] = {
    "a flag was removed": (Replanned(True, ("unknown argument: --mlock",), "1", "1"), "act", True),
    "another build": (Replanned(True, (), "1", "1"), "act", True),
    "another driver": (Replanned(False, (), "1", "2"), "act", True),
    "the next night compares": (KEPT, "act", True),
    "nothing is done by itself": (KEPT, "advise", True),
    "no night begins": (KEPT, "act", False),
    "old and new were compared": (replace(KEPT, compared="B is 12 % slower than A", run=7), "act", True),
    "no copy was kept": (replace(KEPT, kept=None), "act", True),
}  # fmt: skip


def test_files_that_were_only_touched_are_nothing_to_tell() -> None:
    for found in (
        Replanned(False, (), "1", "1"),
        Replanned(False, (), "1", None),
        Replanned(None, (), "1", "1"),  # unknown is no change
    ):
        assert decide(found, "act", has_nights=True) is None


# Deaths

DEATH = Death(0.0, FailureKind.CRASH, "GGML_ASSERT(ok) failed", has_given_up=False)


def told_of(*seen: tuple[str, float], state: Deaths | None = None) -> list[Decision]:
    """What was told of deaths and looks, one after the other."""
    state, found = state or Deaths(), list[Decision | None]()
    for what, at_s in seen:
        if what in {"died", "gave up"}:
            death = replace(DEATH, at_s=at_s, has_given_up=what == "gave up")
            found.append(look_at_deaths(state, death))
        else:
            found.append(look_for_deaths(state, at_s, is_ready=what == "ready"))
    return [one for one in found if one is not None]


LOOP = [step for n in range(6) for step in (("died", 60.0 * n), ("ready", 60.0 * n + 30))]


@pytest.mark.parametrize(
    ("seen", "kinds"),
    [
        ([("died", 0.0), ("ready", 60.0)], []),
        ([("died", 7200.0 * n) for n in range(5)], []),  # far apart
        ([*LOOP, ("ready", 2000.0)], ["server-dies"]),
        ([*LOOP, ("ready", 2000.0), ("ready", 2200.0), ("ready", 2300.0)], ["server-dies", "server-back"]),
        ([("gave up", 0.0), ("gave up", 10.0), ("not ready", 20.0)], ["server-failed"]),
        ([("gave up", 0.0), ("not ready", 20.0), ("ready", 30.0)], ["server-failed", "server-back"]),
        ([("died", 0.0), ("died", 10.0), ("gave up", 20.0)], ["server-dies", "server-failed"]),
    ],
)  # fmt: skip
def test_a_loop_of_deaths_or_giving_up_is_told_once_and_so_is_its_end(
    seen: list[tuple[str, float]], kinds: list[str]
) -> None:
    found = told_of(*seen)
    assert [one.kind for one in found] == kinds
    levels = {"server-dies": "warning", "server-failed": "error", "server-back": "note"}
    assert [one.level for one in found] == [levels[kind] for kind in kinds]
    assert all("GGML_ASSERT" in one.evidence for one in found if one.kind != "server-back")


def test_a_daemon_that_takes_over_repeats_nothing_and_tells_the_end() -> None:
    event = Event(100.0, "server-failed", "error", "it died")
    state = deaths_recalled([Event(200.0, "hang", "warning", "x"), event])
    (back,) = told_of(("gave up", 150.0), ("ready", 160.0), state=state)
    assert back.kind == "server-back"
    over = Event(300.0, "server-back", "note", "it serves again")
    assert deaths_recalled([over, event]) == Deaths()
    assert deaths_recalled([]) == Deaths()


def test_what_guards_tell_is_the_golden_text() -> None:
    hang, cannot_act = a_hang(), replace(a_hang(), policy="advise")
    cases: dict[str, list[Decision | None]] = {
        "A server dies of its margin": [*deaths(0.0, 60.0)],
        "A server dies of its margin and is given up": [*deaths(0.0, gave_up=True)],
        **{f"A margin is left alone: {why}": [*deaths(0.0, 1.0, **changed)]
           for why, changed in LEFT_ALONE.items()},
        "A server hangs again and again": [silence(hang, 200.0 * n) for n in range(3)],
        "A server hangs, and nothing is done by itself": [silence(cannot_act, 0.0)],
        **{f"An upgrade: {what}": [decide(found, policy, has_nights=has_nights)]
           for what, (found, policy, has_nights) in UPGRADED.items()},
        "A server dies of something else again and again": [*told_of(*LOOP, ("ready", 2300.0))],
        "A server is given up and comes back": [*told_of(("gave up", 0.0), ("ready", 30.0))],
    }  # fmt: skip
    transcript("watch/guards", ((told, decisions_lines(found)) for told, found in cases.items()))
