"""What measuring commands say when somebody ends them, and when their result cannot be written."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.sweep_box import SweepBox, swept
from tests.support.waiting import until

LIMIT_S = 240
LONG = ("--repeats", "100", "--yes", "--json")


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    """With one drafted token the engine does not start, with three it tells figures that cannot be."""
    told = {"prompt_ms": math.nan, "predicted_ms": -1, "cache_n": "12", "draft_n": 10**30}
    rules = [{"when": {"n_max": "1"}, "set": {"fail": "assert"}},
             {"when": {"n_max": "3"}, "set": {"told_timings": told}}]  # fmt: skip
    with swept(rules=rules) as found:
        yield found


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (("bench", "night", "--set", "serving.metrics=false", *LONG), signal.SIGINT, 130),
        (("bench", "night", "--set", "serving.metrics=false", *LONG), None, 1),
        (("sweep", "run", "--budget", "1h", "--yes", "--json"), signal.SIGTERM, 143),
        (("bench", *LONG), signal.SIGHUP, 129),  # of what serves
    ],
    ids=[
        "bench by Ctrl-C",
        "bench by whoever starts the unit",
        "sweep by SIGTERM",
        "bench of what serves as its terminal goes",
    ],
)
def test_a_measurement_that_is_ended_by_hand_is_one_object_and_the_unit_serves(
    box: SweepBox, words: tuple[str, ...], number: signal.Signals | None, code: int
) -> None:
    process = box.box.begin(*words)
    try:
        until(lambda: box.box.has_samples() or process.poll() is not None, "samples are stored")
        if number is None:
            box.box.context.services.start("llama-server.service")
        else:
            process.send_signal(number)
        out, told = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()

    assert process.returncode == code, out + told
    found = json.loads(out)
    kind = "preempted" if number is None else "interrupted"
    assert (found["ok"], found["error"]["code"]) == (False, kind)
    assert found["command"] == ("sweep run" if words[0] == "sweep" else words[0])
    run = box.json("results", "list")["results"][0]
    assert (run["outcome"], run["samples"] > 0) == ("stopped", True)
    if number is not None:
        assert words[1:] == LONG or "llama-server.service serves again" in found["error"]["state"]
        next_step = "sweep resume" if words[0] == "sweep" else "results show"
        assert f"`tunerd {next_step} {run['run']}`" in found["error"]["state"]
    until(lambda: box.serves, "the unit serves")


def test_a_second_measurement_is_refused_before_it_asks_or_stores_anything(box: SweepBox) -> None:
    process = box.box.begin("bench", "night", "--set", "serving.metrics=false", *LONG)
    try:
        until(lambda: box.box.has_samples() or process.poll() is not None, "samples are stored")
        kept = box.json("results", "list")["total"]
        for words in (("bench", "night"), ("bench",), ("compare", "live", "speculation.n_max=2"),
                      ("sweep", "run", "--budget", "1h")):  # fmt: skip
            found = box.json(*words, code=75)["error"]
            assert "process" in found["cause"], words
        assert box.json("results", "list")["total"] == kept
        told = box.json("doctor", code=None)["findings"]
        assert "port-clash" not in {one["code"] for one in told}, "it is what tunerd measures"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        process.kill()
    until(lambda: box.serves, "the unit serves")


def test_a_profile_that_does_not_serve_is_an_error_after_which_the_unit_does(box: SweepBox) -> None:
    found = box.json("bench", "night", "--set", "speculation.n_max=1", "--yes", code=1)

    assert "does not serve" in found["error"]["message"]
    assert found["error"]["state"].endswith("llama-server.service is as before again")
    assert box.serves


def answered(box: SweepBox, answer: bytes, *words: str) -> tuple[int, str, str]:
    """Exit code, output and messages of a command that is asked on a terminal."""
    ours, theirs = pty.openpty()
    process = box.box.begin(*words, stdin=theirs)
    try:
        os.write(ours, answer)
        out, told = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    return process.returncode, out, told


def test_the_answer_no_is_one_object_and_nothing_was_touched_or_made(box: SweepBox) -> None:
    pid, evidence = box.json("status")["pid"], box.box.context.paths.evidence
    if evidence.exists():
        evidence.rename(evidence.with_suffix(".of-other-tests"))
    for words in (("compare", "live", "speculation.n_max=2"), ("sweep", "run", "--budget", "60s")):
        code, out, _ = answered(box, b"n\n", *words, "--json")
        error = json.loads(out)["error"]
        assert code == 130
        assert (error["code"], error["message"]) == ("interrupted", "the answer was no")
        assert error["state"] == "nothing was touched"
        assert not evidence.exists(), words
    assert box.json("status")["pid"] == pid


def test_what_a_sweep_costs_is_told_with_its_question(box: SweepBox) -> None:
    """How far it gets, and the time without service: of the budget, or of what is left of the window."""
    code, out, told = answered(box, b"n\n", "sweep", "run", "--budget", "5h")
    assert (code, out) == (130, "")
    question = told[: told.index("Go on?")]
    assert re.search(r"A sweep of small for 5 h 00 min at most over \d+ configurations", question)
    assert "a start with one round of the workload takes about" in question
    assert "llama-server.service will not serve for about 5 h 00 min" in question
    assert "of measuring" in question

    before, around, later = (
        time.strftime("%H:%M", time.gmtime(time.time() + s)) for s in (-3600, 3000, 7200)
    )
    _, _, told = answered(
        box, b"n\n", "sweep", "run", "--budget", "5h", "--window", f"{before}-{around}"
    )
    found = re.search(r"will not serve for about (\d+) min", told)
    assert found is not None, told
    assert 40 <= int(found[1]) <= 50

    pid = box.json("status")["pid"]
    closed = box.json("sweep", "run", "--yes", "--window", f"{around}-{later}", code=2)["error"]
    assert "is closed; it opens" in closed["message"]
    assert box.json("status")["pid"] == pid
