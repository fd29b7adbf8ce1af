"""`tunerd compare` in local mode: the embedded engine against itself with another setting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.local_box import Box, deployed
from tests.support.ports import free_port
from tests.support.transcripts import answered
from tunerd.cli.measure import render_compare
from tunerd.errors import DeployError, UsageError
from tunerd.measure.compare import CompareRequest, prepare, run_compare
from tunerd.measure.pairs import Limits

pytestmark = pytest.mark.llama

WORKLOAD = """
[[classes]]
name = "ask"
kind = "code"
prompt_tokens = 160
answer_tokens = 40

[[classes]]
name = "follow-up"
kind = "chat"
prompt_tokens = 400
cached_share = 0.5
reasoning_tokens = 10
answer_tokens = 30
"""

PROFILE = """
extends = "cpu-embedded"
[model]
path = "{model}"
[serving]
port = {port}
ctx_size = 1024
[speculation]
p_min = 0.0
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    port = free_port()
    with deployed(tmp_path_factory.mktemp("compare"), port) as found:
        found.configure(WORKLOAD, "profiles/workloads/small.toml")
        found.configure(PROFILE.format(port=port, model=found.model), "profiles/quick.toml")
        yield found


def compared(box: Box, *words: str) -> dict[str, Any]:
    done = box.call("compare", *words, "--workload", "small", "--budget", "300s", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert "will not serve for about" in done.stderr, "said, though nobody was asked"
    return found


@pytest.fixture(scope="module")
def found(box: Box) -> dict[str, Any]:
    options = ("speculation.type=off", "serving.chat_template=chatml")
    words = [word for option in options for word in ("--set", option)]
    return compared(box, "quick", *words, "--pairs", "3", "--seed", "7")


@pytest.fixture(scope="module")
def run(box: Box, found: dict[str, Any]) -> dict[str, Any]:
    """Everything that is kept of it."""
    said = box.call("results", "export", str(found["run"])).stdout
    kept: dict[str, Any] = json.loads(said)["runs"][0]
    return kept


def timed(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of the workload; those of the questions are beside them."""
    return [sample for sample in run["samples"] if sample["suite"] == "workload"]


def test_two_settings_are_compared_and_the_unit_serves_again(
    box: Box, found: dict[str, Any]
) -> None:
    assert found["a"] == "quick"
    assert found["b"] == "quick with speculation.type=off, serving.chat_template=chatml"
    assert found["pairs"] >= 3
    assert found["sentence"]
    assert "on small" in found["sentence"]
    assert found["without_service_s"] > 0
    notes = [one["text"] for one in found["messages"] if one["code"] == "lease"]
    assert notes == ["the machine may go to sleep meanwhile: nothing here can prevent it"]
    assert [row["part"] for row in found["parts"]][:3] == ["turn", "prefill", "decode"]
    assert box.json("status")["health"] == "ready"
    assert not list((box.folder / "run").rglob("tunerd-candidate-*"))


def test_what_was_meant_to_draft_or_to_be_cached_was_and_what_was_not_was_not(
    run: dict[str, Any],
) -> None:
    drafted = dict.fromkeys("AB", 0)
    for sample in run["samples"]:
        drafted[sample["arm"]] += (sample["timings"] or {}).get("draft_n") or 0
    assert drafted["A"] > 0
    assert drafted["B"] == 0
    samples = [one for one in timed(run) if one["usable"]]
    fresh = [one["details"]["cached"] for one in samples if one["case"] == "class 1"]
    warm = [one["details"]["cached"] for one in samples if one["case"] == "class 2"]
    assert set(fresh) == {0}
    assert min(warm) > 100
    assert {one["timings"]["predicted_n"] for one in samples} == {40}
    asked, lives = (
        {arm: {one[key] for one in samples if one["arm"] == arm} for arm in "AB"}
        for key in ("prompt_id", "process")
    )
    assert len(asked["A"] & asked["B"]) >= 6, "both sides were asked the same texts"
    assert not lives["A"] & lives["B"]
    assert len(lives["A"]) >= 3, "each pair in fresh processes"


def test_a_template_that_changes_answers_fails_the_gate_whatever_the_speed(
    box: Box, run: dict[str, Any], found: dict[str, Any]
) -> None:
    assert [change["text"] for change in found["changes"]] == [
        "serving.chat_template (not set) -> chatml"
    ]
    assert "changes-answers" in {message["code"] for message in found["messages"]}
    assert found["quality"]["passes"] is False
    assert found["recommended"] != "B"
    assert found["verdict"] != "B is faster"
    assert "B is not recommended, because its answers differ from A's: short" in found["sentence"]
    assert "Quality, cases" in list(render_compare(found))

    asked_for = {arm: {one["prompt_id"] for one in run["samples"]
                       if one["arm"] == arm and one["suite"] == "quality"} for arm in "AB"}  # fmt: skip
    assert len(asked_for["A"]) == 9
    assert asked_for["A"] == asked_for["B"]
    kept = next(one for one in run["summaries"] if one["suite"] == "quality")
    assert kept["figures"]["passes"] is False
    assert run["verdicts"][0]["outcome"] == found["verdict"]
    shown = box.call("results", "show", str(found["run"])).stdout
    assert "short answers: 3 of 3 differ" in shown


def test_a_side_that_answers_otherwise_and_does_not_start_is_told_with_the_reason(box: Box) -> None:
    words = ("--set", "serving.chat_template={% broken", "--workload", "small", "--yes")
    found = box.json("compare", "quick", *words, "--budget", "300s", code=1)
    assert found["verdict"] == "open"
    assert "`B` does not serve: " in found["sentence"]
    assert "B did not start" in found["quality"]["reasons"][0]
    assert box.json("status")["healthy"] is True


def asked(*words: str, options: tuple[str, ...] = (), workload: str = "small") -> CompareRequest:
    return CompareRequest(words=words, options=options, workload=workload)


def test_a_side_is_what_serves_a_profile_a_generation_an_engine_or_a_setting(box: Box) -> None:
    both = prepare(box.context, asked("1", "speculation.n_max=2"))
    a, b = both.plans["A"], both.plans["B"]
    assert a.command.argv == prepare(box.context, asked("live", "quick")).plans["A"].command.argv
    assert both.sides["A"].generation is not None
    changed = set(b.command.argv) ^ set(a.command.argv)
    assert changed == {"3", "2"}
    same = prepare(box.context, asked("embedded", "live"))
    assert "same" in {message.code for message in same.messages}


def test_what_serves_is_measured_under_that_name_alone_where_it_still_does(box: Box) -> None:
    """Its question may stand open for hours."""

    def edit(_prepared: object) -> None:
        box.unit.write_text(f"{before}\n# mine\n")

    before = box.unit.read_text()
    try:
        with pytest.raises(DeployError, match="since this was planned"):
            run_compare(box.context, asked("live", "quick"), confirm=edit)
    finally:
        box.unit.write_text(before)
    assert box.json("status")["healthy"] is True


def test_what_its_profile_gives_otherwise_by_now_is_named_though_no_measurement_goes_by_it(
    box: Box,
) -> None:
    """Of another port or model it was said that only the order of arguments differs."""
    box.configure('[serving]\nalias = "other"\n', "profiles/cpu-embedded.toml")
    try:
        with pytest.raises(DeployError, match="another command line") as refused:
            prepare(box.context, asked("live", "quick"))
    finally:
        (box.context.paths.site_profiles / "cpu-embedded.toml").unlink()
    assert refused.value.cause is not None
    assert refused.value.cause.endswith("-> other")


def test_what_makes_no_sense_is_refused_as_in_the_golden_text_and_what_serves_serves_on(
    box: Box,
) -> None:
    pid = box.json("status")["pid"]

    def told(line: str) -> list[str]:
        said = box.call(*line.split(), "--yes").stderr.splitlines()
        return [one for one in said if "engines: " not in one]  # others may be on this machine

    answered("errors/compare", told)
    assert box.json("status")["pid"] == pid


def test_a_budget_without_room_for_a_verdict_is_told_before_and_one_without_room_for_a_pair_refused(
    box: Box,
) -> None:
    request = replace(asked("1", "speculation.n_max=2"), limits=Limits(budget_s=20.0))
    found = prepare(box.context, request)
    assert "takes about" in next(one.text for one in found.messages if one.code == "short")
    assert "will not serve for about" in found.question
    assert "after 2 min 20 s the measurement ends in any case" in found.question
    long = prepare(box.context, replace(request, limits=Limits(budget_s=3600.0)))
    assert "short" not in {one.code for one in long.messages}
    changed = box.call("apply", "quick", "--set", "serving.ctx_size=768", "--yes")
    assert changed.returncode == 0, changed.stderr  # from now on it is known how long a load takes
    with pytest.raises(UsageError, match="nothing can be compared in"):
        prepare(box.context, replace(request, limits=Limits(budget_s=0.1)))
