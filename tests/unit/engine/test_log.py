"""What servers log of their requests: the shapes of mainline and ik, and what a damaged log gives."""

from __future__ import annotations

import random
import re
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import DATA
from tunerd.engine.log import RequestLog, Tally, read_requests, tally_of, without_newest

LOGS = DATA / "requests"
MAINLINE = ("mainline-2026-05-16", "mainline-2026-08-18", "mainline-2026-08-18-lv4")
IK = ("ik-2026-06-02", "ik-2026-08")


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


# Of each request: read of its prompt, reused, generated, drafted, accepted.
SAID_BY_MAINLINE = [(120, 0, 24, 26, 13), (34, 116, 16, 19, 8), (60, 0, 8, 6, 4)]
# It never names what was cached.
SAID_BY_IK = [(120, 0, 24, 16, 13), (35, 115, 16, 13, 7), (60, 0, 8, 4, 4)]


NUMBERS = attrgetter("prompt_n", "cached_n", "predicted_n", "drafted_n", "accepted_n")


@pytest.mark.parametrize("name", [*MAINLINE, *IK])
def test_length_reuse_and_drafts_of_every_request_are_told(name: str) -> None:
    found = read_requests(lines_of(name)).requests
    assert [NUMBERS(one) for one in found] == (SAID_BY_IK if name in IK else SAID_BY_MAINLINE)
    assert [one.prompt_total_n for one in found] == [120, 150, 60]


# Of a turn that goes on, of one whose answer was rewritten, of another conversation with 600 tokens in common, and of the
# first one again, as far as 600: mainline and the embedded server without snapshots, ik with those that it makes.
def test_prompt_tokens_that_were_there_and_were_read_again_are_told() -> None:
    without, with_snapshots = [0, 0, 974, 600, 601], [0, 0, 0, 600, 600]
    for name, lost in (("mainline-2026-08-18", without), ("embedded", without), ("ik-2026-08", with_snapshots)):  # fmt: skip
        found = read_requests(lines_of(f"read-anew-{name}")).requests
        assert [one.lost_n for one in found] == lost


def test_a_request_whose_end_is_lost_has_no_known_prompt() -> None:
    lines = [line for line in lines_of("mainline-2026-08-18") if "stop processing" not in line]
    found = read_requests(lines).requests
    assert [one.prompt_n for one in found] == [120, 34, 60]
    assert {one.prompt_total_n for one in found} == {None}


def test_task_numbers_begin_anew_with_every_start_of_the_server() -> None:
    lines = [*lines_of("mainline-2026-08-18"), *lines_of("ik-2026-08")]
    log = read_requests(lines)
    assert len(log.requests) == 6
    assert log.lives == 2


@pytest.mark.parametrize("name", [*MAINLINE, *IK])
def test_a_task_number_that_comes_again_though_no_start_was_logged_is_one_request(
    name: str,
) -> None:
    """One of the second life stood for that of the first as well, so the workload that was learned had it twice."""
    life = [line for line in lines_of(name) if "listening" not in line]
    once = [NUMBERS(one) for one in read_requests(life).requests]
    assert [NUMBERS(one) for one in read_requests(life * 2).requests] == once


def test_requests_under_way_together_are_counted() -> None:
    begun = "slot launch_slot_: id  {0} | task {0} | processing task, is_child = 0"
    lines = [begun.format(task) for task in (1, 2)]
    for task in (1, 2):
        head = f"slot print_timing: id  {task} | task {task} |"
        lines += [
            f"{head} prompt eval time = 9.0 ms / 90 tokens (",
            f"{head}        eval time = 9.0 ms / 9 tokens (",
        ]
        lines += [
            f"slot      release: id  {task} | task {task} | stop processing: n_tokens = 98, truncated = 0"
        ]
    assert [one.concurrency for one in read_requests(lines).requests] == [1, 2]


def test_a_log_in_colours_covers_as_much_time() -> None:
    """With `--log-colors on`, as d32676d77 begins its lines then."""
    lines = lines_of(MAINLINE[1])
    coloured = [
        re.sub(r"^([\d.]+) I ", "\x1b[0m\x1b[34m\\1\x1b[0m \x1b[32mI \x1b[0m", one) for one in lines
    ]
    assert read_requests(coloured) == read_requests(lines)


def test_lives_of_both_families_in_one_log_are_added_up_each_by_its_own_clock() -> None:
    ik = lines_of(IK[1])
    later = [line.replace("timestamp=17", "timestamp=18") for line in ik]
    alone_s = [read_requests(lines).covered_s or 0.0 for lines in (lines_of(MAINLINE[0]), ik)]
    together = [*lines_of(MAINLINE[0]), *ik, *lines_of(MAINLINE[0]), *later]
    assert alone_s[0] + alone_s[1] < 60
    assert read_requests(together).covered_s == pytest.approx(2 * sum(alone_s))


@pytest.mark.parametrize("name", [*MAINLINE, *IK])
@given(seed=st.integers(0, 2**32))
def test_lost_lines_lose_requests_and_invent_none(name: str, seed: int) -> None:
    lines = lines_of(name)
    whole = set(read_requests(lines).requests)
    rng = random.Random(seed)
    kept = [line for line in lines if rng.random() > 0.15]
    for one in read_requests(kept).requests:
        same = [other for other in whole if other.prompt_ms == one.prompt_ms]
        assert any(
            (other.prompt_n, other.predicted_n) == (one.prompt_n, one.predicted_n) for other in same
        )
        assert one.cached_n in {None, *(other.cached_n for other in same)}


@pytest.mark.parametrize("name", [*MAINLINE, *IK])
def test_a_request_whose_end_is_lost_is_not_under_way_beside_all_that_follow(name: str) -> None:
    lines = lines_of(name)
    starts = [at for at, line in enumerate(lines) if "processing task" in line]
    found = read_requests([*lines[: starts[0] + 1], *lines[starts[1] :]]).requests
    assert [one.concurrency for one in found] == [1, 1]


def test_a_line_that_no_server_writes_is_no_request_whoever_wrote_it() -> None:
    """A server may log what a client sent it, line ends included."""
    head = "slot print_timing: id  0 | task 7 | "
    begun = "slot launch_slot_: id  0 | task 7 | processing task, is_child = 0"
    for number in ("1.2.3", "..", "9" * 400, "9" * 1900, "9" * 400 + ".5"):
        lines = [
            f"{number}.00.000.000 I main: server is listening on http://127.0.0.1:8080",
            f"INFO [ main] x | timestamp={'9' * 400}",
            begun,
            f"{head}prompt eval time = {number} ms / {number} tokens",
            f"{head}prompt eval time = 1.0 ms / 9 tokens",
            f"{head}eval time = {number} ms / 9 tokens",
            f"{head}eval time = 1.0 ms / {number} tokens",
        ]
        assert read_requests(lines) == RequestLog((), None, 1)
        assert tally_of(lines) == Tally(0, 0.0)


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
