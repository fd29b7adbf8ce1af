"""Servers that tell impossible things of themselves: each call ends soon, with one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_box import BenchBox
from tests.support.local_box import Box
from tests.support.server_process import serving
from tests.support.stand_in import install
from tests.support.sweep_box import SweepBox, swept
from tunerd.errors import BenchError
from tunerd.machine.net import free_port
from tunerd.measure.request import Suite

HOSTILE = {"prompt_n": math.nan, "prompt_ms": math.inf, "predicted_n": -5, "predicted_ms": 1e300,
           "cache_n": "12", "draft_n": True, "draft_n_accepted": [1]}  # fmt: skip
FAST: dict[str, Any] = {"pp_tok_s": 1e6, "tg_tok_s": 1e5, "time_scale": 1.0}


def strict(text: str) -> dict[str, Any]:
    """One JSON object as the standard has it: NaN and Infinity are none."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def bench_url(tmp_path: Path, *words: str, **behaviour: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and object of `tunerd bench --url` of a stand-in."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    made = install(tmp_path / "engine", **FAST | behaviour)
    command = [str(made.program), "-m", str(model), "-np", "1", "-c", "4096"]
    box = Box(tmp_path, {"TUNERD_SERVICE__DRAIN_S": "0"})
    with serving(command, tmp_path / "log") as server:
        done = box.call("bench", "--url", server.url, "--suite", "cache", "--repeats", "1",
                        "--json", *words)  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, strict(done.stdout)


def test_figures_that_cannot_be_are_void_samples_and_an_error(tmp_path: Path) -> None:
    code, found = bench_url(tmp_path, told_timings=HOSTILE)

    assert code == 1
    assert found["ok"] is False
    assert "nothing-usable" in {message["code"] for message in found["messages"]}
    assert all("figures that cannot be" in row["marks"] for row in found["samples"])
    kept = [row["timings"] for row in found["samples"]]
    assert {value for timings in kept for value in timings.values()} == {None}


def test_answers_without_times_have_no_speed_and_that_is_told(tmp_path: Path) -> None:
    code, found = bench_url(tmp_path, told_timings=dict.fromkeys(HOSTILE))

    assert code == 0
    warned = next(one for one in found["messages"] if one["code"] == "no-times")
    assert "3 of 3 answers came without the server's own times" in warned["text"]
    assert {row["decode"]["tok_s"] for row in found["summary"]} == {None}


def test_a_server_that_says_it_is_always_busy_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    code, found = bench_url(tmp_path, slots_are_busy=True)

    assert code == 1
    assert found["error"]["code"] == "bench"
    assert "somebody else is served all the time" in found["error"]["message"]
    assert "never idle in 10 s of waiting" in found["error"]["cause"]


def test_a_context_that_no_server_can_have_is_not_filled(tmp_path: Path) -> None:
    props = {"n_ctx": 10**12, "default_generation_settings": {"n_ctx": True}, "total_slots": "x"}
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    made = install(tmp_path / "engine", dialect="ik-now", **FAST, told_props=props)
    command = [str(made.program), "-m", str(model), "--no-slots"]
    with (
        serving(command, tmp_path / "log") as server,
        pytest.raises(BenchError, match="the size of the context is not known"),
    ):
        BenchBox(tmp_path).bench(server.url, Suite.DEEP)


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    """Production tells the truth; with two drafted tokens the same engine does not."""
    told = {"prompt_ms": math.nan, "predicted_ms": -1, "cache_n": "12", "draft_n": 10**30}
    rules = [{"when": {"n_max": "2"}, "set": {"told_timings": told}}]
    with swept(free_port(), rules=rules) as found:
        yield found


def test_a_side_with_figures_that_cannot_be_cannot_be_compared(box: SweepBox) -> None:
    done = box.call("compare", "live", "--set", "speculation.n_max=2", "--pairs", "3",
                    "--budget", "60s", "--yes", "--json", code=1)  # fmt: skip

    found = strict(done.stdout)
    assert (found["ok"], found["recommended"]) == (False, None)
    assert "B: it is meant to draft, and drafted nothing" in found["problem"]
    assert "figures that cannot be" in found["problem"]
    assert box.serves
