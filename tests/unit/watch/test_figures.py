"""What a reading says, and what it leaves unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fake_gpu import a_card, rtx_4070_super
from tests.support.readings import a_reading, an_engine
from tunerd.cli.watch import render_top
from tunerd.engine.health import HttpState
from tunerd.machine.facts import POWER_CAP, GpuProcess
from tunerd.measure.answer import Counters, read_counters
from tunerd.watch.figures import gpu_now, next_look_s, served_between, summarise
from tunerd.watch.history import Telemetry
from tunerd.words import MiB

BEFORE = Counters(1000, 500, 0, 0, 300, 200, None, 0, 2.0, 10.0)


def test_speeds_are_tokens_over_the_time_spent_on_them() -> None:
    after = Counters(1600, 900, 1, 0, 500, 350, None, 200, 3.0, 18.0)

    served, _ = served_between(BEFORE, after, 60.0)

    assert served is not None
    assert served.decode_tok_s == pytest.approx(50.0)
    assert served.prompt_tok_s == pytest.approx(600.0)
    assert served.acceptance_ratio == pytest.approx(0.75)
    assert served.reused_ratio == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("before", "n_predicted"), [(BEFORE, 500), (Counters(1000, 500, 0, 0), 900)]
)
def test_nothing_done_has_no_speed_nor_has_a_build_that_does_not_count_time(
    before: Counters, n_predicted: int
) -> None:
    served, _ = served_between(before, replace(before, n_predicted=n_predicted), 10.0)
    assert served is not None
    assert served.n_predicted == n_predicted - 500
    assert (served.decode_tok_s, served.acceptance_ratio) == (None, None)


def test_counters_that_went_back_tell_nothing() -> None:
    after = replace(BEFORE, n_predicted=0)
    assert served_between(BEFORE, after, 10.0) == (None, after)


@pytest.mark.parametrize("tokens", [1e3, 1e5, 1e6, 1e7, 1e8])
def test_the_speed_of_a_server_that_prints_six_digits_is_true_or_unknown(tokens: float) -> None:
    def printed(total: float) -> Counters:
        return read_counters(
            f"llamacpp:tokens_predicted_total {total:g}\n"
            f"llamacpp:tokens_predicted_seconds_total {total / 40:g}\n"
            f"llamacpp:spec_decode_num_draft_tokens_total {0.9 * total:g}\n"
            f"llamacpp:spec_decode_num_accepted_tokens_total {0.6 * total:g}\n"
        )

    before, n_seen, speeds, right = printed(tokens), 0, [], []
    n_looks = 3000
    for look in range(1, n_looks + 1):
        served, before = served_between(before, printed(tokens + 397 * look), 10.0)
        assert served is not None
        n_seen += served.n_predicted or 0
        speeds += [] if served.decode_tok_s is None else [served.decode_tok_s]
        if served.n_predicted:  # of the same time, or no time of a pass could be told
            right.append((served.n_accepted or 0) / served.n_predicted)
    assert all(39 <= speed <= 41 for speed in speeds)
    assert all(0.58 <= share <= 0.62 for share in right)
    assert n_seen > 0.9 * 397 * n_looks, "nothing is lost"


def test_drafts_that_are_hardly_ever_accepted_hide_no_speed() -> None:
    """The counter of those that are accepted moves by less than its steps, of ten here, tell."""
    before = Counters(0, 4_000_000, 0, 0, 6_000_000, 2_000_000, n_cached=None, predicted_s=9e4)
    after = replace(before, n_predicted=4_001_000, n_drafted=6_003_000, n_accepted=2_000_010)
    served, _ = served_between(before, replace(after, predicted_s=9.1e4), 30.0)
    assert served is not None
    assert served.decode_tok_s == pytest.approx(1.0)
    assert served.acceptance_ratio == pytest.approx(10 / 3000)


def test_counters_of_the_time_that_was_spent_are_read() -> None:
    found = read_counters(
        "llamacpp:prompt_tokens_total 240\nllamacpp:prompt_tokens_cached_total 7\n"
        "llamacpp:prompt_seconds_total 0.030915\nllamacpp:tokens_predicted_seconds_total 0.021934\n"
    )
    assert (found.n_cached, found.prompt_s, found.predicted_s) == (7, 0.030915, 0.021934)


@pytest.mark.parametrize(("own_mib", "others_mib"), [(8000, 500), (None, None)])
def test_memory_of_others_is_what_the_server_does_not_hold_and_unknown_where_nobody_says_how_much(
    own_mib: int | None, others_mib: int | None
) -> None:
    own = GpuProcess(100, None if own_mib is None else MiB(own_mib), "compute", "server", None)
    processes = (own, GpuProcess(7, MiB(300), "graphics", "Xorg", None))
    gpu = gpu_now(a_card(used_mib=8500, processes=processes), [100])
    assert (gpu.server_mib, gpu.others_mib) == (own_mib, others_mib)


def test_a_card_that_others_have_filled_is_none_on_which_the_server_runs_short_or_hot() -> None:
    """A game on a second card was the likely cause of a server that had slowed down on the first."""
    hot = replace(a_card(index=1), throttle_reasons=("power brake",))
    full = replace(gpu_now(hot, []), free_mib=MiB(100))
    own = replace(gpu_now(a_card(), []), server_mib=8000, free_mib=MiB(4000))
    beside = replace(a_reading(), gpus=(own, full))
    assert (beside.free_mib, beside.is_throttled) == (4000, False)
    unseen = replace(a_reading(), gpus=(replace(own, server_mib=None), full))
    assert (unseen.free_mib, unseen.is_throttled) == (100, True)


def test_what_no_look_of_a_minute_saw_is_unknown_and_never_zero() -> None:
    blank = replace(a_card(), throttle_reasons=None, used_mib=None, processes=None, power_w=None)
    blind = replace(a_reading(), gpus=(gpu_now(blank, []),))
    _, (kept,) = summarise([blind, blind], begin_s=0, seconds=60)
    assert (kept.n_throttled, kept.used_mib, kept.others_mib, kept.power_w) == (None,) * 4


def test_the_owners_power_limit_is_no_throttling() -> None:
    card = rtx_4070_super()
    assert gpu_now(replace(card, throttle_reasons=(POWER_CAP,)), []).is_throttled is False
    assert gpu_now(replace(card, throttle_reasons=("power brake",)), []).is_throttled is True
    assert gpu_now(replace(card, throttle_reasons=None), []).is_throttled is None


def test_a_server_that_does_not_run_is_not_ready_and_one_without_an_address_is_unknown() -> None:
    assert an_engine(active_state="failed", health=None).is_ready is False
    assert an_engine(health=None).is_ready is None
    assert an_engine(health=HttpState.SILENT).is_ready is False


def test_restarts_are_counted_on_where_a_start_by_hand_began_the_count_anew() -> None:
    seen = [a_reading(at_s=float(at), n_restarts=n) for at, n in enumerate((5, 5, 2, 3))]
    point, _ = summarise(seen, begin_s=0, seconds=60)
    assert point.restarts == 3


def test_of_a_server_that_does_not_say_how_many_of_its_slots_work_it_is_unknown() -> None:
    shown = render_top({**a_reading(slots_total=4, slots_busy=None).to_json(), "speeds": None})
    assert "unknown of 4 at work" in "\n".join(shown)


def test_busy_is_told_by_slots_and_else_by_counters() -> None:
    counters = replace(BEFORE, n_processing=1)
    assert an_engine(slots_busy=0, counters=counters).is_busy is False
    assert an_engine(slots_busy=None, counters=counters).is_busy is True
    assert an_engine(slots_busy=None, counters=None).is_busy is None


def test_readings_are_kept_for_an_hour_and_none_of_the_future_once_the_clock_was_set_back() -> None:
    kept = Telemetry()
    for at_s in (0.0, 30.0, 3601.0, 3630.0):
        kept.add(a_reading(at_s=at_s))
    assert [one.at_s for one in kept.readings()] == [30.0, 3601.0, 3630.0]
    kept.add(a_reading(at_s=40.0))
    assert [one.at_s for one in kept.readings()] == [30.0, 40.0]


def test_looks_become_rare_while_the_server_works_and_frequent_again_when_it_rests() -> None:
    waits, wait_s = [], 10.0
    for is_busy in (True, True, True, True, False, None):
        wait_s = next_look_s(wait_s, idle_s=10.0, busy_s=60.0, is_busy=is_busy)
        waits.append(wait_s)
    assert waits == [20.0, 40.0, 60.0, 60.0, 10.0, 10.0]
