"""Each way in which a benchmark of a server lies, and what a server was meant to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.bench_samples import a_request, logged, timings
from tests.support.fake_gpu import a_card, rtx_3090_ti
from tunerd.machine.facts import POWER_CAP, GpuProcess
from tunerd.measure.answer import Answer, ClientTimes, Counters, Mark, Timings, read_counters
from tunerd.measure.request import Request, Suite
from tunerd.measure.trust import (
    FOR_A_WINNER,
    WHILE_SEARCHING,
    GpuLook,
    ProcessorLook,
    Speculation,
    energy_of,
    is_processor_taken,
    judge_traffic,
    look_at,
    marks_of,
    not_as_meant,
    of_others,
    quiet_mib,
    repeats_more,
    speculation_of,
    those_that_repeat_more,
)
from tunerd.words import MiB

NOTHING = GpuLook(None, None, frozenset())


def an_answer(found: Timings | None = None, **values: Any) -> Answer:
    usual: dict[str, Any] = {
        "text": "x", "reasoning": "", "tool_calls": (), "timings": found or timings(), "n_cached": 0,
        "n_prompt": 100, "first_ms": 55.0, "last_ms": 2040.0,
    }  # fmt: skip
    return Answer(**{**usual, **values})


def marks(
    answer: Answer | None = None,
    *,
    request: Request | None = None,
    wall_ms: float = 2060.0,
    **given: Any,
) -> tuple[Mark, ...]:
    usual = {"looks": (), "quiet_mib": None, "speculation": Speculation(None)}
    client = ClientTimes(wall_ms, 55.0)
    return marks_of(request or a_request(), answer or an_answer(), client, **{**usual, **given})


def of_192(predicted_ms: float, took_ms: float) -> Answer:
    """192 tokens that a server says to have made in a time, and that came in another."""
    return an_answer(timings(predicted_n=192, predicted_ms=predicted_ms), last_ms=55.0 + took_ms)


def told(n_completion: int, found: Timings | None = None) -> Answer:
    return replace(an_answer(), timings=found, n_completion=n_completion)


DRAFTED, SHORT = (
    an_answer(timings(draft_n=3, draft_n_accepted=0)),
    an_answer(timings(predicted_n=100)),
)
MUST, MAY = Speculation(drafts=True, always=True), Speculation(drafts=True)


@pytest.mark.parametrize(
    ("answer", "given", "marked"),
    [
        # A cold prompt was found in the cache; of a server that cannot forbid it a template may be.
        (an_answer(n_cached=1), {}, Mark.NOT_COLD),
        (an_answer(n_cached=1), {"request": a_request(is_warm=True)}, None),
        (an_answer(n_cached=None), {}, None),
        (an_answer(n_cached=64), {"is_llama": False}, None),
        (an_answer(n_cached=65), {"is_llama": False}, Mark.NOT_COLD),
        # It ended before its fixed length; where none can be held to one, only what says nothing is void.
        (SHORT, {}, Mark.SHORT),
        (SHORT, {"request": a_request(is_fixed_length=False)}, None),
        (told(100, timings(predicted_n=100)), {"is_llama": False}, None),
        (told(100), {"is_llama": False}, None),
        (told(31), {"is_llama": False, "request": a_request(is_framed=True, is_fixed_length=False)}, Mark.SHORT),
        (SHORT, {"holds": False}, None),
        (SHORT, {"holds": False, "request": a_request(suite=Suite.LENGTHS)}, Mark.SHORT),
        (replace(an_answer(), has_impossible=True), {}, Mark.IMPOSSIBLE),
        # It drafted, or did not, against what was meant; a gate may keep every draft of a request back.
        (DRAFTED, {"speculation": Speculation(drafts=False)}, Mark.DRAFTED),
        (DRAFTED, {"speculation": MAY}, None),
        (None, {"speculation": MUST}, Mark.NOT_DRAFTED),
        (None, {"speculation": MAY}, None),
        (an_answer(timings(predicted_n=4)), {"request": a_request(n_predict=4), "speculation": MUST}, None),
        # The clocks of server and client must agree.
        *((None, {"wall_ms": ms}, mark) for ms, mark in (
            (2000.0, Mark.CLOCKS_DISAGREE), (2031.0, None), (2600.0, None), (2700.0, Mark.CLOCKS_DISAGREE))),
        # A short answer cannot be told half again as fast (157 tok/s) as the client saw it (110).
        (of_192(191 / 157 * 1000, 1736), {"wall_ms": 1800.0}, Mark.CLOCKS_DISAGREE),
        (of_192(191 / 110 * 1000, 1736), {"wall_ms": 1800.0}, None),
        # What a busy machine adds between two tokens is no mark.
        *((an_answer(timings(predicted_n=192), last_ms=55.0 + 2000.0 + over_ms), {"wall_ms": 2200.0}, None)
          for over_ms in (-2000.0, 4.0, 106.0)),
        # Another process took memory.
        *((None, {"looks": (GpuLook(None, mib, frozenset()),), "quiet_mib": 300}, mark)
          for mib, mark in ((364, None), (365, Mark.VRAM_TAKEN), (None, None))),
    ],
)  # fmt: skip
def test_a_sample_that_must_not_count_is_marked(
    answer: Answer | None, given: dict[str, Any], marked: Mark | None
) -> None:
    assert marks(answer, **given) == (() if marked is None else (marked,))


def test_heat_marks_a_sample_from_the_beginning_on_and_a_power_limit_never() -> None:
    """The warm-up is too short to show a limit; what is measured at it is what is served at it."""

    def held(*reasons: str) -> GpuLook:
        return look_at([replace(rtx_3090_ti(), throttle_reasons=reasons)], ())

    hot, both = held("software thermal slowdown"), held(POWER_CAP, "software thermal slowdown")
    quiet = quiet_mib([held()])
    assert marks(looks=(NOTHING, hot)) == (Mark.THROTTLED,)
    assert marks(looks=(hot,), quiet_mib=quiet_mib([hot])) == (Mark.THROTTLED,)
    assert marks(looks=(held(), both), quiet_mib=quiet) == (Mark.THROTTLED,)
    assert marks(looks=(held(), held(POWER_CAP)), quiet_mib=quiet) == ()


def process(pid: int, used_mib: int | None) -> GpuProcess:
    return GpuProcess(pid, None if used_mib is None else MiB(used_mib), "c", "x", None)


def test_the_servers_own_memory_is_not_that_of_others() -> None:
    card = replace(rtx_3090_ti(used_mib=9000), processes=(process(7, 8500), process(8, 400)))

    assert look_at([card], [7]).others_mib == 400
    assert look_at([card], []).others_mib == 8900
    unknown = replace(card, processes=(process(7, 8500), process(8, None)))
    assert look_at([unknown], [7]).others_mib is None
    assert look_at(None, [7]) == GpuLook(None, None, frozenset())


SERVER = GpuProcess(7, MiB(8500), "compute", "llama-server", None)
DESKTOP = GpuProcess(8, MiB(400), "compute+graphics", "Xorg", None)
STRANGER = GpuProcess(9, MiB(400), "compute", "python", None)


def drawn(
    *readings: tuple[float, float | None, float | None],
    processes: tuple[GpuProcess, ...] = (SERVER,),
) -> list[GpuLook]:
    """Looks at a card: when [s], its counter [J], its power [W]."""
    card = replace(rtx_3090_ti(), processes=processes)
    return [
        look_at([replace(card, energy_j=joules, power_w=watts)], [7], at_s=at_s)
        for at_s, joules, watts in readings
    ]


TWO_CARDS = [replace(rtx_3090_ti(index=at), processes=(SERVER,)) for at in (0, 1)]
ENERGY: dict[str, tuple[list[GpuLook], float | None]] = {
    "a counter": (drawn((0.0, 1000.0, 9.0), (0.5, 1100.0, 9.0), (1.0, 1350.5, 9.0)), 350.5),
    "beside a desktop": (drawn((0.0, 1000.0, None), (1.0, 1200.0, None), processes=(SERVER, DESKTOP)), 200.0),
    "power without a counter": (drawn((0.0, None, 100.0), (2.0, None, 300.0), (4.0, None, 300.0)), 1000.0),
    "too little power, which lags": (drawn((0.0, None, 100.0), (2.0, None, 300.0)), None),
    "power with a gap": (drawn((0.0, None, 100.0), (2.0, None, None), (4.0, None, 300.0)), None),
    "nothing": ([], None),
    "one look": (drawn((0.0, 1000.0, None)), None),
    "a counter that stands": (drawn((0.0, 1000.0, None), (9.0, 1000.0, None)), None),
    "one that went back": (drawn((0.0, 1000.0, None), (9.0, 3.0, None)), None),
    "one that began anew and is further already": (drawn((0.0, 50.0, None), (4.0, 1.0, None), (9.0, 300.0, None)), None),
    "less than two of its steps": (drawn((0.0, 1000.0, 300.0), (0.1, 1030.0, 300.0)), None),
    "neither is told": (drawn((0.0, None, None), (9.0, None, None)), None),
    "somebody computes there": (drawn((0.0, 1.0, 1.0), (9.0, 2.0, 1.0), processes=(SERVER, STRANGER)), None),
    "somebody did for a moment": (
        [*drawn((0.0, 1.0, 1.0)), *drawn((4.0, 2.0, 1.0), processes=(SERVER, STRANGER)), *drawn((9.0, 3.0, 1.0))], None),
    "another card's": (drawn((0.0, 1.0, 1.0), (9.0, 2.0, 1.0), processes=(STRANGER,)), None),
    "unknown processes": ([look_at([replace(rtx_3090_ti(), processes=None)], [7], at_s=at_s) for at_s in (0.0, 9.0)], None),
    "no card": ([look_at(None, [7], at_s=at_s) for at_s in (0.0, 9.0)], None),
    "other cards than before": ([*drawn((0.0, 1.0, 1.0)), look_at(TWO_CARDS, [7], at_s=9.0)], None),
}  # fmt: skip


def test_energy_is_what_the_card_took_for_the_server_alone_and_never_zero() -> None:
    found = {name: energy_of(looks) for name, (looks, _) in ENERGY.items()}
    assert found == {name: joules for name, (_, joules) in ENERGY.items()}


def test_a_card_that_the_server_is_not_on_is_not_counted() -> None:
    def both(joules: float, other_joules: float, at_s: float) -> GpuLook:
        mine = replace(rtx_3090_ti(), processes=(SERVER,), energy_j=joules)
        other = replace(rtx_3090_ti(index=1), processes=(STRANGER,), energy_j=other_joules)
        return look_at([mine, other], [7], at_s=at_s)

    assert energy_of([both(10.0, 500.0, 0.0), both(25.0, 900.0, 1.0)]) == 15.0


def test_what_is_seen_beside_a_request_is_of_the_cards_that_the_server_is_on() -> None:
    """A desktop's full and hot card marked every sample, and took the room that a winner must leave free."""
    mine = replace(rtx_3090_ti(), processes=(SERVER,))
    desktop = a_card(index=1, used_mib=11_800, processes=(STRANGER,))
    other = replace(desktop, throttle_reasons=("software thermal slowdown",))

    found, unseen = look_at([mine, other], [7]), look_at([mine, other], [])

    assert (found.free_mib, found.others_mib, found.throttled) == (mine.free_mib, 0, frozenset())
    assert unseen.free_mib == other.free_mib, "where the server cannot be seen it may be on any"
    assert unseen.throttled


def counters(n_prompt: int | None, n_predicted: int | None) -> Counters:
    return Counters(n_prompt, n_predicted, 0, 0)


def test_more_than_was_asked_for_is_somebody_elses() -> None:
    """Also a request that is under way while none of ours is; without counters, or after a restart, nobody knows."""

    def is_foreign(before: Counters, after: Counters, *own: Timings | None) -> bool | None:
        return judge_traffic(before, after, own).is_foreign

    quiet, one, two = counters(10, 5), timings(), (timings(), timings())
    assert is_foreign(quiet, counters(210, 207), *two) is False
    for more in (counters(210, 208), counters(211, 207)):
        assert is_foreign(quiet, more, *two) is True
        assert "1 tokens" in judge_traffic(quiet, more, two).text
    for busy in (Counters(110, 106, 1, 0), Counters(110, 106, 0, 1)):
        assert is_foreign(quiet, busy, one) is True
        assert is_foreign(busy, counters(210, 207), one) is True
    assert is_foreign(quiet, counters(110, 106), one) is False
    assert is_foreign(counters(None, None), counters(9, 9), one) is None
    assert is_foreign(counters(10, 10), counters(1, 1)) is None
    assert is_foreign(counters(1, 1), counters(500, 500), None) is None


def test_a_machine_that_works_for_others_meanwhile_is_told_from_one_that_works_for_the_server() -> (
    None
):
    """A load of 10 on two cores left 1.7 tok/s, and nothing spoke against them."""
    before = ProcessorLook(total_s=1000.0, busy_s=400.0, own_s=50.0)

    def later(busy_s: float, own_s: float, total_s: float = 20.0) -> ProcessorLook:
        return ProcessorLook(1000.0 + total_s, 400.0 + busy_s, 50.0 + own_s)

    assert is_processor_taken(before, later(20.0, 3.3))
    assert is_processor_taken(before, later(18.5, 14.4))
    assert not is_processor_taken(before, later(12.0, 7.9)), (
        "nobody waited: eight seconds were idle"
    )
    assert not is_processor_taken(before, later(20.0, 19.0))
    assert not is_processor_taken(before, later(12.0, 8.1))
    assert not is_processor_taken(before, later(3.0, 0.1, total_s=3.0))  # too short to tell
    assert not is_processor_taken(None, later(20.0, 3.3))


@pytest.mark.parametrize("served", [12_345_678, 204_000_007])
def test_counters_in_six_digits_tell_of_nobody_else(served: int) -> None:
    own = [Timings(prompt_n=300, predicted_n=192)] * 3

    def printed(n_prompt: int, n_predicted: int) -> Counters:
        return read_counters(
            f"llamacpp:prompt_tokens_total {float(f'{n_prompt:.6g}'):g}\n"
            f"llamacpp:tokens_predicted_total {float(f'{n_predicted:.6g}'):g}\n"
        )

    for offset in range(0, 1000, 37):
        before = printed(served + offset, served + offset)
        after = printed(served + offset + 900, served + offset + 576)
        assert judge_traffic(before, after, own).is_foreign is not True
    more = printed(served + 900 + served // 10, served + 576)
    assert judge_traffic(printed(served, served), more, own).is_foreign


@pytest.mark.parametrize(
    ("words", "drafts", "always", "must"),
    [
        ("-m x.gguf", None, False, None),
        ("--spec-type none", False, False, False),
        ("--spec-type draft-mtp", True, False, True),
        ("--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0", True, True, True),
        ("--spec-type draft-mtp --spec-draft-n-max 3 --spec-draft-p-min 0.75", True, False, True),
        ("--spec-type draft-mtp --spec-draft-n-max 0", False, False, False),
        ("--spec-type mtp:n_max=3,p_min=0.0", True, True, True),
        ("--spec-type mtp:n_max=3,p_min=0.5", True, False, True),
        ("-mtp --draft-max 3 --draft-p-min 0", True, True, True),
        ("-no-mtp", False, False, False),
        ("-md d.gguf", True, False, True),
        ("--model-draft small.gguf --draft-p-min 0", True, True, True),
        ("-md d.gguf --spec-type draft-simple", True, False, True),
        # N-grams may find nothing to draft from.
        ("--spec-type ngram-mod --spec-draft-p-min 0", True, False, None),
        ("--spec-type ngram-simple --draft-p-min 0.0", True, False, None),
        ("-md d.gguf --spec-type ngram-mod", True, False, None),
        ("--spec-type ngram-mod -md d.gguf", True, False, None),
        ("--spec-type draft-mtp,ngram-mod --spec-draft-p-min 0", True, True, True),
    ],
)
def test_whether_it_drafts_and_must_be_seen_to_is_told_from_every_dialects_flags(
    words: str, drafts: bool | None, always: bool, must: bool | None
) -> None:
    found = speculation_of(["llama-server", *words.split()])
    assert (found.drafts, found.always, found.must_draft) == (drafts, always, must)


def test_a_process_that_drafts_otherwise_than_its_side_does_not_count() -> None:
    as_meant = ((True, [0, None, 7]), (False, [0, None]), (None, [0]), (None, [3]))
    assert [not_as_meant(*case) for case in as_meant] == [None] * 4
    assert all(not_as_meant(*case) for case in ((True, [0, 0, None]), (True, []), (False, [0, 3])))


REQUEST = replace(logged(812, 192), prompt_ms=410.37, predicted_ms=3051.22)
OWN = Timings(prompt_n=812, prompt_ms=410.3659, predicted_n=192, predicted_ms=3051.2241)


def test_a_request_that_was_measured_is_found_by_its_counts_and_times() -> None:
    user = replace(REQUEST, predicted_ms=3050.9)
    assert of_others([REQUEST, user], [OWN]) == (user,)


LOOPS, SANE = 0.7, 0.0


@pytest.mark.parametrize(
    ("mine", "usual", "dropped", "refused"),
    [
        ([LOOPS] * 2, [SANE] * 3, False, True),
        ([LOOPS] * 3, [SANE] * 3, True, True),
        ([LOOPS, LOOPS, SANE, SANE], [SANE] * 4, False, True),
        ([LOOPS] + [SANE] * 5, [SANE] * 6, False, False),
        ([LOOPS] * 30, [LOOPS] * 3, False, False),  # a model that does so with what serves too
        ([LOOPS] * 3 + [SANE] * 3, [LOOPS, SANE, LOOPS, SANE, SANE, SANE], False, False),
        ([LOOPS] * 8, [0.15] * 8, True, True),  # held to a length both end so, one of them at once
        ([SANE] * 9, [LOOPS] * 9, False, False),
        ([LOOPS] * 9, [], False, False),
        ([], [SANE] * 9, False, False),
    ],
)
def test_answers_that_repeat_themselves_are_held_against_those_of_the_other_side(
    mine: list[float], usual: list[float], dropped: bool, refused: bool
) -> None:
    found = [
        repeats_more(mine, usual, chance=chance, whose="B's")
        for chance in (WHILE_SEARCHING, FOR_A_WINNER)
    ]
    assert [one is not None for one in found] == [dropped, refused]


def test_of_many_sides_chance_alone_has_none_repeat_itself_more_than_the_others() -> None:
    """Eight arms of a bench are held against one another 56 times; a fifth of that were warnings that none is sane."""
    few, many = [LOOPS] + [SANE] * 8, [LOOPS] * 4 + [SANE] * 5
    alike = {str(number): many if number == 3 else few for number in range(8)}
    assert those_that_repeat_more(alike) == {}
    assert those_that_repeat_more({"few": few, "many": many}).keys() == {"many"}
    broken = {**alike, "3": [LOOPS] * 9}
    assert those_that_repeat_more(broken).keys() == {"3"}
