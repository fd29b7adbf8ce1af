"""When a server that was just deployed is taken back, and when it is not."""

from __future__ import annotations

from dataclasses import replace

from tunerd.engine.log import Tally, tally_of, without_newest
from tunerd.watch.guards import Basis, Look, cache_ram_mib, judge

BASIS = Basis(
    slowest_tok_s=50.0, deepest_tokens=2000, n_samples=9, previous_tok_s=52.0, headroom_mib=200
)
LIFE = "one"


def look(number: int, **changed: object) -> Look:
    """The n-th look at a healthy server."""
    healthy = Look(
        at_s=30.0 * number, life=LIFE, is_active=True, is_ready=True, n_restarts=0,
        cpu_s=5.0, anonymous_mib=4000, vram_free_mib=500, vram_own_mib=9000,
    )  # fmt: skip
    return replace(healthy, **changed)  # type: ignore[arg-type]


def verdict(looks: list[Look], basis: Basis = BASIS) -> str:
    return judge(looks, basis) or ""


def test_a_server_that_does_as_measured_stays() -> None:
    assert verdict([look(n) for n in range(20)]) == ""


def test_a_log_agrees_with_counters_of_six_digits() -> None:
    logged = Tally(1536, 30.0)
    before, after = Tally(10_000_000, 200_000.0), Tally(10_001_500, 200_030.0)
    assert logged.agrees_with(before, after)
    assert not logged.agrees_with(before, Tally(10_003_000, 200_060.0))
    assert not logged.agrees_with(None, after)


def test_what_was_generated_is_told_by_the_log_alone() -> None:
    lines = [
        "slot print_timing: id  0 | task 3 | prompt eval time =  1.00 ms /     5 tokens (0.2 ms per token)",
        "slot print_timing: id  0 | task 3 |        eval time = 60000.00 ms /   600 tokens (100 ms per token)",
        "generation eval time =     500.00 ms /    50 runs   (   10.00 ms per token)",
    ]
    assert tally_of(lines) == Tally(650, 60.5)
    assert tally_of(without_newest(lines, 1)) == Tally(600, 60.0), "what ended since is left out"
    assert tally_of(without_newest(lines, 3)) == Tally(0, 0.0)


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


def test_the_floor_goes_by_what_served_before_where_that_is_known_and_else_lets_more_pass() -> None:
    assert BASIS.floor_tok_s == 50.0 * 0.9
    assert replace(BASIS, previous_tok_s=30.0).floor_tok_s == 30.0 * 0.9
    assert replace(BASIS, previous_tok_s=None).floor_tok_s == 50.0 * 0.75
    assert Basis().floor_tok_s is None, "nothing was measured"


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
    assert judge(after, BASIS, restarts=2) is None
    died = judge([*after, look(3, life="two", n_restarts=3)], BASIS, restarts=2)
    assert died == "it died and was started again 1 time"
    assert "2 times" in verdict(after), "it died before the first look"
