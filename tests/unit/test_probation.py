"""When a server that was just deployed is taken back, and when it is not."""

from __future__ import annotations

from dataclasses import replace

from tunerd.core.probation import (
    Basis,
    Look,
    Standing,
    cache_ram_mib,
    comparable,
    judge,
    windows,
)
from tunerd.core.request_log import LoggedRequest

BASIS = Basis(
    slowest_tok_s=50.0, deepest_tokens=2000, n_samples=9, previous_tok_s=52.0, headroom_mib=200
)
LIFE = "one"


def look(number: int, **changed: object) -> Look:
    """The n-th look at a healthy server that decodes 60 tok/s and is always at work."""
    healthy = Look(
        at_s=30.0 * number, life=LIFE, is_active=True, is_ready=True, n_restarts=0,
        n_predicted=1800 * number, predicted_s=30.0 * number, cpu_s=5.0, anonymous_mib=4000,
        vram_free_mib=500, vram_own_mib=9000,
    )  # fmt: skip
    return replace(healthy, **changed)  # type: ignore[arg-type]


def slow(number: int, tok_s: float) -> Look:
    return look(number, n_predicted=round(30 * tok_s * number))


def verdict(looks: list[Look], basis: Basis = BASIS) -> str:
    found = judge(looks, basis)
    assert (found.standing is Standing.WORSE) == bool(found.reason)
    return found.reason


def test_a_server_that_does_as_measured_stays() -> None:
    assert verdict([look(n) for n in range(20)]) == ""


def test_a_server_that_decodes_slower_than_its_slowest_text_is_taken_back() -> None:
    assert "30.0" in verdict([slow(n, 30.0) for n in range(3)])


def test_one_slow_stretch_is_not_enough() -> None:
    assert verdict([slow(n, 30.0) for n in range(2)]) == ""
    assert verdict([look(0), look(1, n_predicted=900), look(2, n_predicted=2700)]) == ""


def test_a_little_slower_is_no_reason() -> None:
    assert verdict([slow(n, 46.0) for n in range(6)]) == ""


def test_a_few_tokens_say_nothing_of_the_speed() -> None:
    idle = [look(n, n_predicted=10 * n, predicted_s=5.0 * n) for n in range(20)]
    assert windows(idle) == []
    assert verdict(idle) == ""


def test_a_server_whose_log_says_nothing_is_judged_by_the_rest() -> None:
    looks = [look(n, n_predicted=None, predicted_s=None) for n in range(9)]
    assert verdict(looks) == ""
    assert "did not answer" in verdict([*looks, *(look(n, is_ready=False) for n in range(3))])


def test_a_server_that_died_and_was_started_again_is_taken_back_at_once() -> None:
    assert "died" in verdict([look(0), look(1, life="two", n_restarts=1)])


def test_a_server_that_somebody_restarted_by_hand_is_not() -> None:
    assert verdict([look(0), look(1, life="two", n_restarts=0)]) == ""


def test_a_server_that_stays_down_is_taken_back() -> None:
    down = [look(n, life=None, is_active=False, is_ready=False) for n in range(3)]
    assert verdict([look(0), *down[:2]]) == ""
    assert "did not come back" in verdict([look(0), *down])


def test_memory_that_only_grows_is_a_leak_and_a_cache_that_fills_is_not() -> None:
    leak = [look(n, anonymous_mib=4000 + 4000 * n) for n in range(8)]
    assert "grows" in verdict(leak)
    cache = [look(n, anonymous_mib=min(4000 + 1500 * n, 12_192)) for n in range(12)]
    assert verdict(cache) == ""
    assert verdict(leak, replace(BASIS, cache_ram_mib=None)) == ""
    assert "grows" in verdict(
        [look(n, anonymous_mib=4000 + 1500 * n) for n in range(8)], replace(BASIS, cache_ram_mib=0)
    )


def test_the_limit_of_the_prompt_cache_is_that_of_the_command_line() -> None:
    assert cache_ram_mib(("llama-server", "--cache-ram", "512")) == 512
    assert cache_ram_mib(("llama-server", "-cram", "0")) == 0
    assert cache_ram_mib(("llama-server", "-cram", "-1")) is None
    assert cache_ram_mib(("llama-server", "--cache-ram", "lots")) == 8192
    assert cache_ram_mib(("llama-server",)) == 8192


def taken(number: int, own_mib: int, free_mib: int) -> Look:
    return look(number, vram_own_mib=own_mib, vram_free_mib=free_mib)


def test_vram_that_it_takes_itself_counts_when_too_little_stays_free() -> None:
    tight = [look(0), *(taken(n, 9440, 60) for n in range(1, 4))]
    assert verdict(tight[:3]) == ""
    assert "60 MiB stay free" in verdict(tight)
    assert verdict(tight, replace(BASIS, headroom_mib=None)) == ""


def test_vram_that_others_take_is_not_its_fault() -> None:
    assert verdict([look(0), *(taken(n, 9000, 20) for n in range(1, 6))]) == ""
    assert verdict([taken(n, 9000, 20) for n in range(6)]) == ""
    unknown = [look(n, vram_free_mib=20, vram_own_mib=None) for n in range(6)]
    assert verdict(unknown) == ""


def test_answers_of_another_life_make_no_window() -> None:
    assert windows(
        [look(0), look(1, life="two", n_predicted=9000), look(2, life="two", n_predicted=9600)]
    ) == [600 / 30.0]


def request(
    prompt: int, cached: int | None, predicted: int, ms: float, at_once: int = 1
) -> LoggedRequest:
    return LoggedRequest(prompt, 10.0, predicted, ms, cached, None, None, at_once)


def test_only_requests_like_those_measured_are_compared() -> None:
    """Deep ones, short ones and those beside others are slower for reasons of their own."""
    like = request(100, 1000, 101, 2000.0)
    unlike = [
        request(100, 30_000, 101, 9000.0),
        request(100, None, 101, 9000.0),
        request(100, 0, 8, 900.0),
        request(100, 0, 101, 9000.0, at_once=2),
    ]
    assert comparable([like, *unlike], BASIS) == (100, 2.0)


def test_slower_than_measured_is_kept_where_what_served_before_was_slower_still() -> None:
    looks = [slow(n, 40.0) for n in range(4)]
    assert verdict(looks) != ""
    assert verdict(looks, replace(BASIS, previous_tok_s=30.0)) == ""


def test_where_nothing_is_known_of_what_served_before_more_is_let_pass() -> None:
    looks = [slow(n, 40.0) for n in range(4)]
    assert verdict(looks, replace(BASIS, previous_tok_s=None)) == ""
    assert verdict([slow(n, 30.0) for n in range(4)], replace(BASIS, previous_tok_s=None)) != ""


UNMEASURED = Basis(slowest_tok_s=None, deepest_tokens=0, n_samples=0, headroom_mib=200)


def test_a_server_of_which_nothing_was_measured_is_judged_by_all_but_its_speed() -> None:
    assert verdict([slow(n, 1.0) for n in range(9)], UNMEASURED) == ""
    assert "died" in verdict([look(0), look(1, life="two", n_restarts=1)], UNMEASURED)
    leak = [look(n, anonymous_mib=4000 + 4000 * n) for n in range(8)]
    assert "grows" in verdict(leak, UNMEASURED)
    silent = [look(n, is_ready=False) for n in range(1, 4)]
    assert "did not answer" in verdict([look(0), *silent], UNMEASURED)
    assert "MiB stay free" in verdict(
        [look(0), *(taken(n, 9440, 60) for n in range(1, 4))], UNMEASURED
    )


def test_a_server_that_somebody_stopped_is_not_taken_back() -> None:
    stopped = [
        look(n, life=None, is_active=False, is_ready=False, is_stopped=True) for n in range(1, 9)
    ]
    assert verdict([look(0), *stopped]) == ""


def test_a_server_that_loads_may_take_its_time() -> None:
    loading = [look(n, life="two", is_ready=False) for n in range(1, 20)]
    assert verdict([look(0), *loading]) == ""
    assert verdict(loading) == ""


def test_a_server_that_works_and_says_nothing_is_let_work() -> None:
    """ik does not answer for its health while it reads a long prompt."""
    busy = [look(n, is_ready=False, cpu_s=5.0 + 30.0 * n) for n in range(1, 9)]
    assert verdict([look(0), *busy]) == ""
    unknown = [look(n, is_ready=False, cpu_s=None) for n in range(1, 4)]
    assert "did not answer 3 times" in verdict([look(0), *unknown])


def test_starts_that_the_swap_itself_needed_are_no_deaths() -> None:
    after = [look(n, n_restarts=2) for n in range(3)]
    assert judge(after, BASIS, restarts=2).reason == ""
    died = judge([*after, look(3, life="two", n_restarts=3)], BASIS, restarts=2)
    assert died.reason == "it died and was started again 1 time"
    assert "2 times" in judge(after, BASIS).reason, "it died before the first look"
