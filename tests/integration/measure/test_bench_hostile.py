"""Servers that tell impossible things of themselves: a bench ends soon, and believes none of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_box import BenchBox, answering
from tests.support.local_box import Box
from tunerd.errors import BenchError
from tunerd.measure.request import Suite

HOSTILE = {"prompt_n": math.nan, "prompt_ms": math.inf, "predicted_n": -5, "predicted_ms": 1e300,
           "cache_n": "12", "draft_n": True, "draft_n_accepted": [1]}  # fmt: skip


def strict(text: str) -> dict[str, Any]:
    """One JSON object as the standard has it: NaN and Infinity are none."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def test_figures_that_cannot_be_are_void_samples_and_an_error(tmp_path: Path) -> None:
    with answering(tmp_path / "e", "-c", "4096", told_timings=HOSTILE) as (server, _):
        done = Box(tmp_path).call("bench", "--url", server.url, "--suite", "cache", "--repeats", "1",
                                  "--json")  # fmt: skip

    found = strict(done.stdout)
    assert "Traceback" not in done.stderr
    assert (done.returncode, found["ok"]) == (1, False)
    assert "nothing-usable" in {message["code"] for message in found["messages"]}
    assert all("figures that cannot be" in row["marks"] for row in found["samples"])
    kept = [row["timings"] for row in found["samples"]]
    assert {value for timings in kept for value in timings.values()} == {None}


def test_answers_without_times_have_no_speed_and_that_is_told(tmp_path: Path) -> None:
    told = dict.fromkeys(HOSTILE)
    with answering(tmp_path / "e", "-c", "4096", told_timings=told) as (server, _):
        result = BenchBox(tmp_path).bench(server.url, Suite.CACHE)

    assert result.exit_code == 0
    (warned,) = (one.text for one in result.messages if one.code == "no-times")
    assert "3 of 3 answers came without the server's own times" in warned
    assert {row["decode"]["tok_s"] for row in result.payload["summary"]} == {None}


def test_a_server_that_says_it_is_always_busy_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    with (
        answering(tmp_path / "e", "-c", "4096", slots_are_busy=True) as (server, _),
        pytest.raises(BenchError, match="somebody else is served all the time") as ended,
    ):
        BenchBox(tmp_path).bench(server.url, Suite.CACHE)
    assert "never idle in" in str(ended.value.cause)


def test_a_context_that_no_server_can_have_is_not_filled(tmp_path: Path) -> None:
    props = {"n_ctx": 10**12, "default_generation_settings": {"n_ctx": True}, "total_slots": "x"}
    with (
        answering(tmp_path / "e", "--no-slots", dialect="ik-now", told_props=props) as (server, _),
        pytest.raises(BenchError, match="the size of the context is not known"),
    ):
        BenchBox(tmp_path).bench(server.url, Suite.DEEP)
