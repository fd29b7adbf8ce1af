"""What the suites come to: crossings, reuse, depth, the gate, tables, and turns by the client's wall."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.bench_samples import sample, timings
from tunerd.measure.answer import Answer, ClientTimes, Mark, Sample, ToolCall
from tunerd.measure.evidence import Crossover, TurnTime
from tunerd.measure.findings import (
    ArmData,
    Question,
    beside_published,
    find_crossover,
    judge_depth,
    judge_quality,
    judge_reuse,
    mtp_table,
    pair,
    turn_times,
    turns_at,
)
from tunerd.measure.request import (
    CHANGED_TAIL,
    COLD,
    IDENTICAL,
    LENGTHS,
    MTP_KINDS,
    PROSE,
    SHORT,
    TOOLS,
    Suite,
)
from tunerd.profile.schema import Published
from tunerd.profile.workload import ClassShape, Rates, Tokens, WorkloadShape

# "Three months of speed-up experiments on a 3090 Ti": prefill at 43k tokens [ms], and tok/s by length.
PLAIN_PREFILL_MS, MTP_PREFILL_MS = 37_500.0, 49_000.0
PLAIN_TOK_S = dict.fromkeys(LENGTHS, 29.0)
MTP_TOK_S = dict.fromkeys(LENGTHS, 46.0)
# 11.5 s of tax over 1/29 - 1/46 s of gain.
TRUTH = 1 + 11.5 / (1 / 29 - 1 / 46)


def an_arm(
    prefill_ms: float, rates: dict[int, float], *, noise: float = 0.0, seed: int = 1
) -> list[Sample]:
    rng = random.Random(seed)
    return [
        sample(suite="lengths", case=str(n), n_predict=n, client=None, timings=timings(
            prompt_n=43_241, prompt_ms=prefill_ms * rng.gauss(1, noise), predicted_n=n,
            predicted_ms=(n - 1) / (rate * rng.gauss(1, noise)) * 1000))
        for _ in range(3)
        for n, rate in rates.items()
    ]  # fmt: skip


def crossing(on: list[Sample], off: list[Sample], seed: int = 1) -> Crossover:
    found = find_crossover(ArmData("on", on), ArmData("off", off), seed=seed)
    assert found is not None
    return found


def test_the_crossing_of_the_24_gb_write_up_is_at_about_900_tokens() -> None:
    found = crossing(an_arm(MTP_PREFILL_MS, MTP_TOK_S), an_arm(PLAIN_PREFILL_MS, PLAIN_TOK_S))
    assert found.n_tokens == pytest.approx(TRUTH, rel=1e-6) == pytest.approx(903, abs=1)


def test_the_interval_of_the_crossing_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        on = an_arm(MTP_PREFILL_MS, MTP_TOK_S, noise=0.02, seed=seed)
        off = an_arm(PLAIN_PREFILL_MS, PLAIN_TOK_S, noise=0.02, seed=10_000 + seed)
        found = crossing(on, off, seed)
        held += (found.low or 0) <= TRUTH <= (found.high or float("inf"))

    # 95 % of 200 is 190; fewer than 180 or all would come up once in some ten thousand.
    assert 180 <= held <= 199


def test_what_has_no_gain_crosses_nowhere_and_what_noise_may_hide_has_no_upper_bound() -> None:
    plain = an_arm(37_500.0, PLAIN_TOK_S, noise=0.03)
    none = crossing(an_arm(49_000.0, dict.fromkeys(LENGTHS, 25.0), noise=0.01), plain)
    unsure = crossing(an_arm(40_000.0, dict.fromkeys(LENGTHS, 29.3), noise=0.03), plain)

    assert (none.n_tokens, none.low, none.high, unsure.high) == (None, None, None, None)


def a_cache_sample(case: str, cached: int | None, prompt_n: int, prompt_ms: float) -> Sample:
    details = {"shared_ratio": 0.95} | ({} if cached is None else {"cached": cached})
    return sample(suite="cache", case=case, timings=timings(prompt_n=prompt_n, prompt_ms=prompt_ms, cache_n=cached),
                  details=details)  # fmt: skip


def test_prefix_reuse_is_told_from_what_was_not_read_again() -> None:
    def works(identical: int | None, changed: int | None) -> list[bool | None]:
        """By so many tokens that were found in the cache, of 4096."""
        n_identical, n_changed = (4 if one is None else 4096 - one for one in (identical, changed))
        found = judge_reuse([
            a_cache_sample(COLD, 0, 4096, 1000.0),
            a_cache_sample(IDENTICAL, identical, n_identical, 10.0),
            a_cache_sample(CHANGED_TAIL, changed, n_changed, 80.0),
        ])  # fmt: skip
        assert found[0].prompt_ratio == pytest.approx(0.01)
        return [one.works for one in found]

    assert works(4092, 3800) == [True, True]
    assert works(4092, 0) == [True, False]
    assert works(0, 0) == [False, False]
    assert works(4092, 2048) == [True, None]
    assert works(None, None) == [None, None]


def a_deep_sample(depth: int, token_ms: float, free_mib: int | None) -> Sample:
    return sample(suite="deep", case=f"{depth} tokens", vram_free_min_mib=free_mib,
                  timings=timings(predicted_ms=100 * token_ms),
                  details={"depth": depth, "wanted_depth": depth})  # fmt: skip


FLAT = [(d, 20.0, 4000) for d in (8000, 16_000, 24_000)]
TWO_DEPTHS = [(8000, 20.0, 900), (16_000, 20.0, 700)]
DEPTHS: dict[str, tuple[list[tuple[int, float, int | None]], int | None, int | None]] = {
    "no drop": ([(d, 20 + d / 4000, 2000 - d // 100) for d in range(8000, 64_001, 8000)], None, None),
    "a drop with VRAM pinned": ([*((d, 20 + d / 4000, 900 - d // 50) for d in (8000, 16_000, 24_000, 32_000)),
                                 (40_000, 50.0, 20), (48_000, 70.0, 20)], None, 40_000),
    "a drop with VRAM to spare": ([*FLAT, (32_000, 90.0, 4000)], None, None),
    "a drop, VRAM unknown": ([*FLAT, (32_000, 90.0, None)], None, None),
    "more than planned": ([*TWO_DEPTHS], 800, 16_000),
    "as planned": ([*TWO_DEPTHS], 700, None),
}  # fmt: skip


@pytest.mark.parametrize("name", DEPTHS)
def test_a_spill_is_a_drop_with_vram_pinned_or_more_in_use_than_planned(name: str) -> None:
    rows, planned, spill = DEPTHS[name]
    found = judge_depth([a_deep_sample(*row) for row in rows], planned_free_mib=planned)

    assert (found.spill_tokens, found.failed_tokens) == (spill, None)
    assert found.filled_tokens == rows[-1][0]
    assert spill != 40_000 or "20 MiB" in found.why


def said(text: str = "", *calls: tuple[str, str], reasoning: str = "") -> Answer:
    return Answer(text, reasoning, tuple(ToolCall(*call) for call in calls))


CALL = ("convert", '{"value": 84, "unit": "km"}')


ANOTHER: dict[str, Answer] = {
    "other values": said("", ("convert", '{"unit": "km", "value": 85}')),
    "another function": said("", ("set_timer", '{"value": 84, "unit": "km"}')),
    "another key": said("", ("convert", '{"amount": 84, "unit": "km"}')),
    "no JSON": said("", ("convert", '{"value": 84')),
    "no object": said("", ("convert", "[84]")),
    "no call": said("I cannot do that"),
    "twice": said("", CALL, CALL),
}


@pytest.mark.parametrize("name", ANOTHER)
def test_tool_calls_may_differ_in_values_alone(name: str) -> None:
    found = judge_quality([Question(TOOLS, said("", CALL), ANOTHER[name])])

    assert found.passes is (name == "other values")
    assert (found.cases[0].n_same, found.cases[0].n_called) == (int(name == "other values"), 1)


def test_a_short_answer_must_be_the_same_and_prose_may_drift() -> None:
    assert judge_quality([Question(SHORT, said("Fe\n"), said("Fe"))]).passes is True
    assert judge_quality([Question(SHORT, said("Fe"), said("Iron"))]).passes is False
    prose = judge_quality([Question(PROSE, said("kitten"), said("sitting"))])
    assert prose.passes is True
    assert prose.cases[0].drift_letters == 3
    assert prose.cases[0].drift_ratio == pytest.approx(3 / 7)


EIGHT, NO_CALL, SILENT = said("8"), said("no"), said("", reasoning="hm")


NO_PASS: dict[str, tuple[list[tuple[str, Answer | None, Answer | None]], bool | None, str]] = {
    "no question": ([], None, "nothing could be compared"),
    "no answer at all": ([(SHORT, EIGHT, None)], None, "nothing could be compared"),
    "one without": ([(SHORT, EIGHT, None), (SHORT, EIGHT, EIGHT)], False, "short answers: 1 of 2 were not answered"),
    "the reference had none either": ([(SHORT, EIGHT, EIGHT), (SHORT, None, None)], None,
                                      "short answers: the reference had no answer to 1 of them"),
    "no call": ([(SHORT, EIGHT, EIGHT), (TOOLS, NO_CALL, NO_CALL)], None,
                "tool calls: none was made, so they could not be judged"),
    "no call, but worse": ([(SHORT, EIGHT, said("9")), (TOOLS, NO_CALL, NO_CALL)], False, "short answers: 1 of 1 differ"),
    "all thought": ([(SHORT, SILENT, SILENT)], None, "short answers: no answer has a text, so they could not be judged"),
    "thought against text": ([(SHORT, EIGHT, SILENT)], False, "short answers: 1 of 1 differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_PASS)
def test_what_was_not_answered_or_not_tried_is_no_pass(name: str) -> None:
    asked, passes, reason = NO_PASS[name]
    found = judge_quality([Question(*one) for one in asked])

    assert (found.passes, found.reasons) == (passes, (reason,))


def test_a_question_that_was_repeated_is_compared_by_the_text_that_both_answered() -> None:
    same = pair(SHORT, {"p#1": said("8"), "p#2": said("9")}, {"p#1": said("8")})
    assert judge_quality([same]).passes is True
    later = pair(SHORT, {"p#1": None, "p#2": said("9")}, {"p#1": said("8"), "p#2": said("7")})
    assert judge_quality([later]).passes is False

    apart = pair(SHORT, {"p#1": None, "p#2": said("9")}, {"p#1": said("8")})
    found = judge_quality([same, apart])
    assert found.passes is True
    assert (found.cases[0].n, found.cases[0].n_left_out, found.cases[0].n_missing) == (1, 1, 0)
    assert judge_quality([same, pair(SHORT, {"p#1": said("8")}, {"p#1": None})]).passes is False


def test_the_table_sums_up_all_requests_but_the_warm_up() -> None:
    one = timings(predicted_n=192, draft_n=100, draft_n_accepted=90, predicted_ms=1910.0)
    two = timings(predicted_n=192, draft_n=200, draft_n_accepted=60, predicted_ms=3820.0)
    table = mtp_table([sample(timings=one), sample(timings=two),
                       sample(timings=two, marks=(Mark.WARM_UP,), case="warm-up")])  # fmt: skip

    counts = [table[key] for key in ("n_requests", "predicted", "drafted", "accepted")]
    assert counts == [2, 384, 300, 150]
    assert table["acceptance_ratio"] == pytest.approx(0.5)
    assert table["tok_s"] == table["mean_tok_s"] == pytest.approx(382 / 5.73)
    assert table["wall_s"] is None, "eight kinds are missing in a round"


def test_the_wall_of_a_round_is_the_sum_over_the_kinds_of_their_mean() -> None:
    samples = [sample(case=kind, kind=kind, client=ClientTimes(ms)) for kind in MTP_KINDS
               for ms in (1000.0, 3000.0)]  # fmt: skip

    assert mtp_table(samples)["wall_s"] == pytest.approx(18.0)


def test_this_box_stands_beside_the_published_numbers_of_the_same_family() -> None:
    published = Published(
        by_engine={"ik": {"tok_s": 100.0}, "mainline": {"tok_s": 80.0}},
        by_kind={"ik": {"code_python": {"tok_s": 105.1, "rate": 0.904}}},
    )
    found = beside_published(Suite.MTP, [sample()], published, "ik")

    assert [(one["what"], one["published"]) for one in found] == [
        ("tok/s", 100.0), ("code_python, tok/s", 105.1), ("code_python, rate", 0.904)
    ]  # fmt: skip
    assert found[0]["ratio"] == pytest.approx(0.5)
    assert found[2]["ratio"] is None


def test_a_published_wall_is_no_figure_of_a_prompt_of_another_length() -> None:
    """43,241 published tokens of prompt took 53 s, 4,000 here 1 s: 50 times as fast, it seemed."""
    published = Published(
        prefill_tokens=43_241, by_length={"101": {"tok_s": 44.6, "wall_ms": 53_138}}
    )

    def beside(depth: int) -> list[str]:
        asked = sample(details={"depth": depth})
        return [one["what"] for one in beside_published(Suite.LENGTHS, [asked], published, None)]

    assert beside(4000) == []
    assert beside(42_600) == ["101 tokens, tok/s", "101 tokens, wall"]


def a_class(name: str = "chat", *, reasoning: int | None = None, weight: float = 1.0) -> ClassShape:
    return ClassShape(
        name=name, weight=weight, kind="chat", prompt_tokens=Tokens.fixed(100), cached_share=0.0,
        reasoning_tokens=None if reasoning is None else Tokens.fixed(reasoning),
        answer_tokens=Tokens.fixed(75),
    )  # fmt: skip


def a_turn(wall_ms: float, *, number: int = 0, **values: Any) -> Sample:
    usual: dict[str, Any] = {
        "timings": timings(prompt_ms=100.0, predicted_ms=300.0), "details": {"class": number},
    }  # fmt: skip
    return sample(suite="workload", client=ClientTimes(wall_ms, 150.0), **usual | values)


def turns(*samples: Sample, classes: tuple[ClassShape, ...] = (a_class(),)) -> list[TurnTime]:
    return turn_times("live", samples, WorkloadShape(name="x", classes=classes))


def test_four_clients_of_one_slot_wait_and_the_turn_says_so() -> None:
    one = turns(*(a_turn(400.0 * n) for n in (1, 2, 3, 4)))[0]
    alone = turns(a_turn(390.0))[0]

    shown = [one.total_s, one.prefill_s, one.decode_s, one.waiting_s]
    assert shown == pytest.approx([1.0, 0.1, 0.3, 0.6])
    shown = [alone.total_s, alone.decode_s, alone.waiting_s]
    assert shown == pytest.approx([0.39, 0.29, 0.0]), "parts come to no more than the whole"


def test_a_turn_is_its_parts_at_the_speed_of_the_server() -> None:
    # The write-up's cold turn without speculation: 37.5 s of prefill, about 80 % of the wall clock.
    long, answer = Tokens.fixed(43_241), Tokens.fixed(270)
    cold = a_class("cold", reasoning=0).model_copy(
        update={"prompt_tokens": long, "answer_tokens": answer}
    )
    shape = WorkloadShape(name="x", classes=(a_class(reasoning=25, weight=3.0), cold))

    thinks, cold_turn, mix = turns_at(shape, Rates(1153.0, 29.0))

    assert cold_turn.prefill_s == pytest.approx(37.5, rel=0.01)
    assert cold_turn.total_s == pytest.approx(37.5 / 0.8, rel=0.01)
    assert [thinks.reasoning_s, thinks.decode_s] == pytest.approx([25 / 29, 75 / 29])
    assert mix.total_s == pytest.approx(
        0.75 * (thinks.total_s or 0) + 0.25 * (cold_turn.total_s or 0)
    )
    assert {one.total_s for one in turns_at(shape, Rates(None, 29.0))} == {None}


def test_without_times_of_the_server_the_wall_is_split_at_the_first_token() -> None:
    counted = {"class": 0, "usage_completion_n": 101}
    one = turns(a_turn(400.0, timings=None, details=counted), a_turn(400.0))[0]

    assert [one.prefill_s, one.decode_s, one.total_s] == pytest.approx([0.15, 0.25, 0.4])
    assert one.waiting_s is None


def test_an_answer_that_ended_early_counts_as_a_whole_one_by_the_clients_clock_too() -> None:
    told = {"class": 0, "usage_completion_n": 51}
    by_client, by_server = (
        turns(a_turn(400.0, timings=found, details=told))[0]
        for found in (None, timings(prompt_ms=150.0, predicted_n=51, predicted_ms=250.0))
    )

    assert by_client.decode_s == pytest.approx(0.5)
    assert by_client.total_s == by_server.total_s == pytest.approx(0.65)


def test_thoughts_that_cannot_be_told_apart_stay_unknown_and_the_turn_is_known() -> None:
    hidden, shown = a_class(), a_class("agent", reasoning=25, weight=3.0)
    one, other, mix = turns(a_turn(400.0), a_turn(800.0, number=1), classes=(hidden, shown))

    assert (one.reasoning_s, mix.reasoning_s) == (None, None)
    assert [other.reasoning_s, other.decode_s] == pytest.approx([0.075, 0.225])
    assert [one.decode_s, mix.decode_s, mix.total_s] == pytest.approx([0.3, 0.3, 0.7])


def test_a_class_without_a_usable_turn_leaves_the_mix_unknown() -> None:
    classes = (a_class(), a_class("agent"))
    one, other, mix = turns(a_turn(400.0), classes=classes)

    assert one.total_s == pytest.approx(0.4)
    assert (other.total_s, mix.total_s, mix.prefill_s) == (None, None, None)


def test_a_turn_is_kept_with_its_whole_and_what_was_waited() -> None:
    one = turns(a_turn(800.0))[0]

    assert TurnTime.from_record(one.to_record("workload")) == one
    assert replace(one, whole_s=None).total_s is None, "a part of it is not known"
