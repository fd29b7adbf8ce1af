"""When a server that was just deployed is taken back, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
# Looks, by what it is judged, and why it is taken back: not at all where there are no words.
CASES: dict[str, tuple[list[Look], Basis, str]] = {
    "it does as measured": ([look(n) for n in range(20)], BASIS, ""),
    "it died and was started again": ([look(0), look(1, life="two", n_restarts=1)], BASIS, "died and was started again 1 time"),
    "it died before the first look": ([look(n, n_restarts=2) for n in range(3)], BASIS, "2 times"),
    "a person restarted it": ([look(0), look(1, life="two", n_restarts=0)], BASIS, ""),
    "it may come up yet": ([look(0), *(look(n, **DOWN) for n in range(2))], BASIS, ""),
    "it stays down": ([look(0), *(look(n, **DOWN) for n in range(3))], BASIS, "did not come back"),
    "a person stopped it": ([look(0), *(look(n, **DOWN, is_stopped=True) for n in range(1, 9))], BASIS, ""),
    "its memory only grows": (LEAK, BASIS, "grows"),
    "its cache has no limit": (LEAK, replace(BASIS, cache_ram_mib=None), ""),
    "its cache fills": ([look(n, anonymous_mib=min(4000 + 1500 * n, 12_192)) for n in range(12)], BASIS, ""),
    "it grows without a cache": ([look(n, anonymous_mib=4000 + 1500 * n) for n in range(8)],
                                 replace(BASIS, cache_ram_mib=0), "grows"),
    "it took VRAM just now": (TIGHT[:3], BASIS, ""),
    "it took VRAM": (TIGHT, BASIS, "60 MiB stay free"),
    "none need stay free": (TIGHT, replace(BASIS, headroom_mib=None), ""),
    "others took VRAM": ([look(0), *(taken(n, 9000, 20) for n in range(1, 6))], BASIS, ""),
    "there was none from the first": ([taken(n, 9000, 20) for n in range(6)], BASIS, ""),
    "nobody knows who took it": ([look(n, vram_free_mib=20, vram_own_mib=None) for n in range(6)], BASIS, ""),
    "it loads anew": ([look(0), *(look(n, life="two", is_ready=False) for n in range(1, 20))], BASIS, ""),
    "it loads": ([look(n, is_ready=False) for n in range(1, 20)], BASIS, ""),
    # ik does not answer for its health while it reads a long prompt.
    "it works and says nothing": ([look(0), *(look(n, is_ready=False, cpu_s=5.0 + 30.0 * n) for n in range(1, 9))],
                                  BASIS, ""),
    "it says nothing": ([look(0), *(look(n, is_ready=False, cpu_s=None) for n in range(1, 4))], BASIS,
                        "did not answer 3 times"),
}  # fmt: skip


@pytest.mark.parametrize(("looks", "basis", "words"), CASES.values(), ids=CASES)
def test_it_is_taken_back_for_what_is_its_own_fault_and_for_nothing_else(
    looks: list[Look], basis: Basis, words: str
) -> None:
    found = judge(looks, basis)
    assert words in (found or "")
    assert (found is None) is (words == "")


def test_the_floor_goes_by_what_served_before_where_that_is_known_and_else_lets_more_pass() -> None:
    assert BASIS.floor_tok_s == 50.0 * 0.9
    assert replace(BASIS, previous_tok_s=30.0).floor_tok_s == 30.0 * 0.9
    assert replace(BASIS, previous_tok_s=None).floor_tok_s == 50.0 * 0.75
    assert Basis().floor_tok_s is None, "nothing was measured"


def test_starts_that_the_swap_itself_needed_are_no_deaths() -> None:
    after = [look(n, n_restarts=2) for n in range(3)]
    assert judge(after, BASIS, restarts=2) is None
    died = judge([*after, look(3, life="two", n_restarts=3)], BASIS, restarts=2)
    assert died == "it died and was started again 1 time"
