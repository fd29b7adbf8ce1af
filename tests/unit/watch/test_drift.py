"""When a server does worse than was measured of it: why one that was just deployed is taken back, and when its speed has drifted."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from tests.support.bench_samples import logged, sample, timings
from tests.support.readings import a_reading, served
from tests.support.transcripts import decisions_lines, transcript
from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.log import LoggedRequest
from tunerd.measure.answer import Sample
from tunerd.units.manager import LogSpan
from tunerd.watch.drift import (
    Basis,
    Confirmed,
    Course,
    Drift,
    Look,
    Pace,
    alike_of,
    cache_ram_mib,
    confirmed_by,
    judge,
    look_closer,
    pace_of,
)
from tunerd.watch.figures import Reading, Served
from tunerd.watch.guards import Act, Decision, Policy

BASIS = Basis(slowest_tok_s=50.0, deepest_tokens=2000, previous_tok_s=52.0, headroom_mib=200)
LIFE = "one"


def look(number: int, **changed: object) -> Look:
    """The n-th look at a healthy server."""
    healthy = Look(
        at_s=30.0 * number, life=LIFE, is_active=True, is_ready=True, n_restarts=0,
        cpu_s=5.0, anonymous_mib=4000, vram_free_mib=500, vram_own_mib=9000,
    )  # fmt: skip
    return replace(healthy, **changed)  # type: ignore[arg-type]


def course(looks: Iterable[Look]) -> Course:
    """What they come to."""
    return reduce(Course.then, looks, Course())


def test_the_limit_of_the_prompt_cache_is_that_of_the_command_line() -> None:
    assert cache_ram_mib(("llama-server", "--cache-ram", "512")) == 512
    assert cache_ram_mib(("llama-server", "-cram", "0")) == 0
    assert cache_ram_mib(("llama-server", "-cram", "-1")) is None
    assert cache_ram_mib(("llama-server", "--cache-ram", "lots")) == 8192
    assert cache_ram_mib(("llama-server",)) == 8192


def taken(number: int, own_mib: int, free_mib: int) -> Look:
    return look(number, vram_own_mib=own_mib, vram_free_mib=free_mib)


DOWN: dict[str, Any] = {"life": None, "is_active": False, "is_ready": False}
LEAK = [look(n, anonymous_mib=4000 + 4000 * n) for n in range(8)]
TIGHT = [look(0), *(taken(n, 9440, 60) for n in range(1, 4))]
# Looks, by what it is judged, and whether it is taken back.
CASES: dict[str, tuple[list[Look], Basis, bool]] = {
    "it does as measured": ([look(n) for n in range(20)], BASIS, False),
    "it died and was started again": ([look(0), look(1, life="two", n_restarts=1)], BASIS, True),
    "it died before the first look": ([look(n, n_restarts=2) for n in range(3)], BASIS, True),
    "a person restarted it": ([look(0), look(1, life="two", n_restarts=0)], BASIS, False),
    "it may come up yet": ([look(0), *(look(n, **DOWN) for n in range(2))], BASIS, False),
    "it stays down": ([look(0), *(look(n, **DOWN) for n in range(3))], BASIS, True),
    "a person stopped it": ([look(0), *(look(n, **DOWN, is_stopped=True) for n in range(1, 9))], BASIS, False),
    "its memory only grows": (LEAK, BASIS, True),
    "its cache has no limit": (LEAK, replace(BASIS, cache_ram_mib=None), False),
    "its cache fills": ([look(n, anonymous_mib=min(4000 + 1500 * n, 12_192)) for n in range(12)], BASIS, False),
    "it grows without a cache": ([look(n, anonymous_mib=4000 + 1500 * n) for n in range(8)],
                                 replace(BASIS, cache_ram_mib=0), True),
    "it took VRAM just now": (TIGHT[:3], BASIS, False),
    "it took VRAM": (TIGHT, BASIS, True),
    "none need stay free": (TIGHT, replace(BASIS, headroom_mib=None), False),
    "others took VRAM": ([look(0), *(taken(n, 9000, 20) for n in range(1, 6))], BASIS, False),
    "there was none from the first": ([taken(n, 9000, 20) for n in range(6)], BASIS, False),
    "nobody knows who took it": ([look(n, vram_free_mib=20, vram_own_mib=None) for n in range(6)], BASIS, False),
    "it loads anew": ([look(0), *(look(n, life="two", is_ready=False) for n in range(1, 20))], BASIS, False),
    "it loads": ([look(n, is_ready=False) for n in range(1, 20)], BASIS, False),
    # ik does not answer for its health while it reads a long prompt.
    "it works and says nothing": ([look(0), *(look(n, is_ready=False, cpu_s=5.0 + 30.0 * n) for n in range(1, 9))],
                                  BASIS, False),
    "it worked silently, and hangs now": ([look(0), *(look(n, is_ready=False, cpu_s=min(30.0 * n, 240.0)) for n in range(1, 12))],
                                          BASIS, True),
    "its memory fell once": ([look(0, anonymous_mib=4001), *LEAK], BASIS, False),
    "it says nothing": ([look(0), *(look(n, is_ready=False, cpu_s=None) for n in range(1, 4))], BASIS, True),
}  # fmt: skip


@pytest.mark.parametrize(("looks", "basis", "is_taken_back"), CASES.values(), ids=CASES)
def test_it_is_taken_back_for_what_is_its_own_fault_and_for_nothing_else(
    looks: list[Look], basis: Basis, *, is_taken_back: bool
) -> None:
    assert (judge(course(looks), basis) is not None) is is_taken_back


def test_a_probation_of_a_week_is_held_in_a_few_looks() -> None:
    """All 120,000 of them took 36 MiB."""
    week = course(look(n, anonymous_mib=4000 + n % 5) for n in range(20_160))
    assert week.n == 20_160
    assert len(pickle.dumps(week)) < 2000
    assert judge(week, BASIS) is None


def test_the_floor_goes_by_what_served_before_where_that_is_known_and_else_lets_more_pass() -> None:
    basis = replace(BASIS, pace=Pace(9.0, 1.8, 0.0, 6.0))
    for previous_tok_s, share in ((52.0, 0.9), (30.0, 0.54), (None, 0.75)):
        floor = replace(basis, previous_tok_s=previous_tok_s).floor
        assert floor.floor_tok_s == pytest.approx(50.0 * share)
        assert floor.pace is not None
        assert floor.pace.limit_ms(1.0) == pytest.approx(10.8 / share)
    assert Basis().floor == Confirmed(None, None), "nothing was measured"


def test_starts_that_the_swap_itself_needed_are_no_deaths() -> None:
    after = [look(n, n_restarts=2) for n in range(3)]
    assert judge(course(after), BASIS, restarts=2) is None
    died = judge(course([*after, look(3, life="two", n_restarts=3)]), BASIS, restarts=2)
    assert died == "it died and was started again 1 time"


# Drift

CONFIRMED = Confirmed(40.0, 0.6, "580.95", "aaa")


def no_log(_since_s: float) -> LogSpan:
    """A server that says nothing of its requests."""
    return LogSpan((), None)


def drift_look(
    work: Served | None,
    *,
    at_s: float = 0.0,
    life: str = "life-1",
    n_at_work: int = 0,
    driver_version: str | None = "580.95",
    others_mib: int | None = 500,
    is_throttled: bool = False,
) -> Reading:
    """What happened since the look before, and the conditions now."""
    found = a_reading(at_s, life=life, served=work, slots_busy=n_at_work)
    (card,) = found.gpus or ()
    heat = ("power brake",) if is_throttled else ()
    card = replace(card, others_mib=others_mib, throttle_reasons=heat)
    return replace(found, gpus=(card,), driver_version=driver_version)


def live(
    *speeds: float,
    state: Drift | None = None,
    policy: Policy = "advise",
    acceptance: float = 0.7,
    engine_sha256: str | None = "aaa",
    confirmed: Confirmed = CONFIRMED,
    **changed: Any,
) -> tuple[Drift, list[Decision]]:
    state, found = state or Drift(no_log), []
    for speed in speeds:
        work = served(600, speed, n_drafted=400, n_accepted=round(400 * acceptance))
        decision = state.after(
            drift_look(work, **changed), confirmed, policy, engine_sha256=engine_sha256
        )
        found += [] if decision is None else [decision]
    return state, found


def test_one_slow_answer_is_no_drift_and_three_in_a_row_are() -> None:
    assert live(50, 30, 50, 30, 30, 50)[1] == []
    _, (decision,) = live(50, 30, 30, 30, 30, 30)
    assert decision.act is Act.NOTHING


def test_short_answers_add_up_before_they_count() -> None:
    state, work = Drift(no_log), drift_look(served(32, 20.0))
    found = [state.after(work, CONFIRMED, "advise") for _ in range(50)]
    assert len(state.stretches) == 50 * 32 // 512
    assert sum(one is not None for one in found) == 1


def test_a_new_life_begins_anew_and_that_it_is_well_again_is_told_once() -> None:
    state, (_,) = live(30, 30, 30)
    state, found = live(50, 50, 50, 50, 50, state=state, life="life-2")
    assert [one.kind for one in found] == ["drift-over"]


def test_what_the_next_deployment_falls_behind_is_told_whatever_was_told_of_the_last() -> None:
    state, (_,) = live(30, 30, 30)
    faster = replace(CONFIRMED, floor_tok_s=60.0)
    _, found = live(50, 50, 50, 50, state=state, life="life-2", confirmed=faster)
    assert [one.kind for one in found] == ["drift"]


# What is held against no server: speeds that requests shared, and those of deep conversations

FLOOR = Confirmed(40.0, None)


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        # What several requests did is counted when they end, and is left out.
        (((50, 0), (None, 3), (20, 0), (50, 0)), 2),
        (((50, 1), (50, 0), (50, 1), (50, 1)), 4),  # one after the other
        # While one of several goes on nothing of it counts.
        (((None, 2), (20, 1), (20, 1), (20, 0), (50, 0), (50, 1)), 2),
    ],
)
def test_what_requests_shared_counts_for_none(
    seen: tuple[tuple[float | None, int], ...], kept: int
) -> None:
    state = Drift(no_log)
    for speed, n_busy in seen:
        look = drift_look(None if speed is None else served(600, speed), n_at_work=n_busy)
        assert state.after(look, FLOOR, "advise") is None
    assert [one.tok_s for one in state.stretches] == [50] * kept


def test_a_new_life_has_shared_nothing() -> None:
    state = Drift(no_log)
    state.after(drift_look(None, n_at_work=3), FLOOR, "advise")
    state.after(drift_look(served(600, 50.0), life="life-2"), FLOOR, "advise")
    assert len(state.stretches) == 1


# Depth

DEEP = replace(FLOOR, deepest_tokens=4000)
DECAY = Decision("drift", Act.RESTART, "warning", "it decays", "30 tok/s")


def request(depth: int, tok_s: float, *, n: int = 400, concurrency: int = 1) -> LoggedRequest:
    return logged(depth, n, tok_s=tok_s, concurrency=concurrency)


def closer(*requests: LoggedRequest) -> Decision | None:
    return look_closer(DECAY, requests, DEEP)


def test_a_conversation_that_grew_deep_is_slower_for_reasons_of_its_own() -> None:
    grown = [request(depth, 60 - depth / 1000) for depth in range(6000, 40_000, 2000)]
    assert closer(*grown) is None
    assert closer(request(3000, 50), request(3000, 50), *grown) is None, "the like ones are fast"
    assert closer(request(3000, 20), request(3000, 20), *grown) is not None


def test_the_newest_requests_that_are_alike_count() -> None:
    slow = [request(3000, 20)] * 4
    fast = [request(3000, 60)] * 20
    decision = closer(*fast, *slow)
    assert decision is not None
    assert decision.act is Act.RESTART
    assert decision.evidence.endswith("no deeper than measured: 20.0 tok/s")
    assert closer(*slow, *fast) is None


def test_what_is_short_anyway_is_like_whatever_was_measured() -> None:
    assert alike_of([request(600, 20)] * 4, 250) is not None
    assert alike_of([request(6000, 20)] * 4, 250) is None


def test_only_requests_like_those_measured_are_compared() -> None:
    """Deep ones, short ones and those beside others are slower for reasons of their own."""
    like = request(1100, 50, n=600)
    unlike = [
        request(30_000, 10),
        replace(request(1100, 10), cached_n=None),
        request(1100, 10, n=8),
        request(1100, 10, concurrency=2),
    ]
    found = alike_of([*unlike, like, *unlike], 2000)
    assert found is not None
    assert found.tok_s == pytest.approx(50)


def test_a_stretch_whose_counters_were_told_late_began_when_they_were_told_last() -> None:
    held = replace(served(1, 1.0), n_predicted=None, predicted_s=None, seconds=10.0)
    state = Drift(no_log)
    for at_s, work in (
        (110.0, held),
        (120.0, held),
        (130.0, replace(served(900, 30.0), seconds=10.0)),
        (140.0, replace(served(900, 30.0), seconds=10.0)),
    ):
        state.after(drift_look(work, at_s=at_s), FLOOR, "advise")
    assert [one.since_s for one in state.stretches] == [100.0, 130.0]


# Other text, and a slower server: passes tell them apart

# Tokens that a pass drafts, and those of them that are right, at n-max 6 and p-min 0.75: llama.cpp of August 2026 on
# a designed model, on which a pass took 7.8 ms of code, and 4.1 of creative text.
TEXTS = {"code": (3.0, 3.0), "math": (3.18, 2.94), "chat": (1.38, 1.12), "creative": (0.94, 0.45)}
ENOUGH = 1200


def pass_ms(text: str) -> float:
    return 2.4 + 1.8 * TEXTS[text][0]


def measured(*texts: str) -> list[Sample]:
    """Three answers of 400 tokens to each."""
    found = []
    for text in texts:
        drafted, accepted = TEXTS[text]
        passes = 400 / (1 + accepted)
        told = timings(
            predicted_n=401, predicted_ms=passes * pass_ms(text),
            draft_n=round(passes * drafted), draft_n_accepted=round(passes * accepted),
        )  # fmt: skip
        found += [sample(kind=text, timings=told)] * 3
    return found


def confirmed(*texts: str) -> Confirmed:
    found = confirmed_by(measured(*texts), Fingerprint())
    assert found is not None
    return found


def asked(text: str, slow: float = 1.0) -> Served:
    """One stretch of it."""
    drafted, accepted = TEXTS[text]
    passes = ENOUGH / (1 + accepted)
    work = served(ENOUGH, n_drafted=round(passes * drafted), n_accepted=round(passes * accepted))
    return replace(work, predicted_s=passes * pass_ms(text) * slow / 1000)


def judged(by: Confirmed, *work: Served, state: Drift | None = None) -> list[Decision]:
    state = state or Drift(no_log)
    found = (state.after(drift_look(one), by, "act") for one in work)
    return [one for one in found if one is not None]


def requests_of(text: str, slow: float = 1.0) -> list[LoggedRequest]:
    """The same by the log."""
    drafted, accepted = TEXTS[text]
    passes = 400 / (1 + accepted)
    told = logged(200, 401, round(passes * drafted), round(passes * accepted))
    return [replace(told, predicted_ms=passes * pass_ms(text) * slow)] * 4


WITHOUT_PROSE = replace(confirmed("code", "math", "chat"), deepest_tokens=2000)


# It drafts nothing any more: its passes are as quick as ever, and too few drafts are left to tell a share of.
ALONE = replace(asked("code"), n_drafted=0, n_accepted=0, predicted_s=ENOUGH * 4.0 / 1000)
HARDER = [*[asked("code")] * 3, *[asked("creative")] * 9]
DRAFTLESS = [*[asked("code")] * 3, *[ALONE] * 5]
DECAYING = [*[asked("code")] * 2, *[asked("creative")] * 4, *[asked("creative", 1.6)] * 4]


@pytest.mark.parametrize("work", [HARDER, DRAFTLESS], ids=["other text", "no drafts"])
def test_what_may_be_other_text_is_told_as_that_and_no_decay(work: list[Served]) -> None:
    """It was taken for one that a restart ends, or a server that decays for other text."""
    assert (work[-1].decode_tok_s or 0.0) < (WITHOUT_PROSE.floor_tok_s or 0.0)
    (decision,) = judged(WITHOUT_PROSE, *work)
    assert decision.act is Act.NOTHING


def test_a_server_that_drafts_nothing_and_is_as_quick_as_ever_is_well() -> None:
    quick = replace(ALONE, predicted_s=ENOUGH / 1000)
    assert judged(WITHOUT_PROSE, *[quick] * 5) == []


def test_a_server_that_decays_while_other_text_is_asked_is_found() -> None:
    assert len(judged(WITHOUT_PROSE, *DECAYING)) == 2, "other text, and that it is slow"


def test_a_server_that_is_slower_than_on_the_same_text_is_found_though_other_text_is_slower_still() -> (
    None
):
    by = confirmed("code", "creative")
    assert (asked("code", 1.3).decode_tok_s or 0.0) > (by.floor_tok_s or 0.0), (
        "tokens a second do not tell"
    )
    assert len(judged(by, *[asked("code", 1.3)] * 5)) == 1


@pytest.mark.parametrize("text", TEXTS)
def test_longer_drafts_take_longer_passes_and_are_no_drift(text: str) -> None:
    """A pass of code takes nearly twice as long as one of creative text."""
    assert judged(replace(confirmed("creative"), floor_acceptance=None), *[asked(text)] * 5) == []
    assert judged(confirmed("code", "creative"), *[asked(text)] * 5) == []
    assert len(judged(confirmed("code", "creative"), *[asked(text, 1.3)] * 5)) == 1


@pytest.mark.parametrize("slow", [1.0, 1.6])
def test_requests_of_other_text_bear_out_no_decay_unless_their_passes_are_slow(slow: float) -> None:
    decision = look_closer(DECAY, requests_of("creative", slow), WITHOUT_PROSE)
    assert (decision is not None) is (slow > 1)


def test_a_log_without_a_word_of_drafts_is_not_one_of_none_drafted() -> None:
    silent = [replace(one, drafted_n=None, accepted_n=None) for one in requests_of("code", 1.6)]
    decision = look_closer(DECAY, silent, WITHOUT_PROSE)
    assert decision is not None
    assert "of the longest" not in decision.evidence


def test_what_passes_may_take_is_read_off_the_texts_that_were_measured() -> None:
    found = pace_of(measured(*TEXTS))
    assert found is not None
    assert [found.ms, found.draft_ms] == pytest.approx([2.4, 1.8], rel=0.05)
    assert found.limit_ms(2 * found.most_drafted) > found.limit_ms(found.most_drafted)
    same = pace_of(measured("code"))
    assert same is not None
    assert same.limit_ms(3.0) == pytest.approx(7.8)
    assert pace_of([sample()] * 3) is None, "nothing was drafted"


CAUSES: dict[str, dict[str, Any]] = {
    "by another driver": {"driver_version": "590.10"},
    "by another build": {"engine_sha256": "bbb"},
    "while its card is throttled": {"is_throttled": True},
    "while others hold its card": {"others_mib": 900},
    "for nothing that is seen": {},
    "where nothing can be seen": {"driver_version": None, "engine_sha256": None, "others_mib": None},
}  # fmt: skip


def test_what_is_told_of_a_server_that_does_worse_is_the_golden_text() -> None:
    back = [
        (f"It is taken back since {why}", [judge(course(looks), basis) or ""])
        for why, (looks, basis, is_taken_back) in CASES.items()
        if is_taken_back
    ]
    told = {
        **{f"It is slower {cause}": live(30, 30, 30, state=live(50)[0], policy="act", **changed)[1]
           for cause, changed in CAUSES.items()},
        "Fewer of its drafts are right": live(50, 50, 50, acceptance=0.5)[1],
        "It is asked for other text": judged(WITHOUT_PROSE, *HARDER),
        "It drafts nothing any more": judged(WITHOUT_PROSE, *DRAFTLESS),
        "It decays while it is asked for other text": judged(WITHOUT_PROSE, *DECAYING),
        "It is well again": live(50, 50, 50, state=live(30, 30, 30)[0], life="life-2")[1],
    }  # fmt: skip
    transcript("watch/drift", [*back, *((how, decisions_lines(found)) for how, found in told.items())])  # fmt: skip
