"""`tunerd bench` on the real embedded server with designed models, whose acceptance is known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.bench_box import BenchBox, came_to
from tests.support.bench_samples import REGION
from tests.support.designed import encode, read_truth
from tests.support.local_box import Box, deployed, settings
from tests.support.ports import free_port
from tests.support.server_process import serving
from tunerd.cli.main import cli
from tunerd.cli.measure import render_bench
from tunerd.measure.request import Suite
from tunerd.measure.store import EvidenceStore
from tunerd.tryout.designed import SHAPES, design, write

pytestmark = pytest.mark.llama

EMBEDDED = (sys.executable, "-m", "tunerd.tryout.embedded")
N_MAX, P_MIN = 3, 0.75


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(design(SHAPES["tiny"]), tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """The embedded server, with no unit around it."""
    options = ("--model", str(model), "--threads", "1", "--threads-batch", "1", "--ctx-size", "4096",
               "--parallel", "1", "--spec-type", "draft-mtp", "--spec-draft-n-max", str(N_MAX),
               "--spec-draft-p-min", str(P_MIN), "--metrics")  # fmt: skip
    with serving([*EMBEDDED, *options], model.parent / "log") as server:
        yield f"http://127.0.0.1:{server.port}"


def test_acceptance_by_kind_is_the_known_one_but_for_the_last_step(
    tmp_path: Path, model: Path, url: str
) -> None:
    truth = read_truth(model)
    result = BenchBox(tmp_path).bench(url, Suite.MTP)

    assert result.exit_code == 0
    table = next(iter(result.payload["tables"].values()))
    known = {}
    for row in result.payload["summary"]:
        # All prompts of a kind end in a word of its region, and answers go round that once and a half.
        last_word = encode(LAST_WORDS[REGION[row["case"]]])[-1]
        counts = known[row["case"]] = truth.speculate(last_word, 192, N_MAX, P_MIN)
        # The last step may draft up to n-max tokens more or less.
        assert abs(row["n_drafted"] / row["n"] - counts.drafted) <= N_MAX, row
        assert abs(row["n_accepted"] / row["n"] - counts.accepted) <= N_MAX, row
    (kept,) = came_to(result.payload, "acceptance by position")
    steps = sum(one.steps for one in known.values())
    sums = map(sum, zip(*(one.accepted_by_position for one in known.values()), strict=True))
    assert kept["ratios"] == pytest.approx([one / steps for one in sums], abs=0.02)
    (last,) = (line for line in render_bench(result.payload) if line.startswith("Aggregate: "))
    assert json.loads(last.removeprefix("Aggregate: "))["total_draft"] == table["drafted"]
    marks = {mark for row in result.payload["samples"] for mark in row["marks"]}
    assert "foreign traffic" not in marks, "own requests add up to what the server counted"


LAST_WORDS = {
    "code": "nothing but code",
    "explain": "everyday example",
    "summary": "only the summary",
    "factual": "strength?",
    "translation": "besides the translation",
    "creative": "Be creative",
    "math": "that you calculate",
}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with deployed(tmp_path_factory.mktemp("bench"), free_port()) as found:
        yield found


def benched(box: Box, *words: str) -> dict[str, Any]:
    done = box.call("bench", *words, "--repeats", "1", "--seed", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--yes" not in words or "will not serve for about" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def serving_pid(box: Box) -> int:
    found = box.json("status")
    assert found["active"] == "active"
    return int(found["pid"])


def test_the_live_unit_is_measured_with_its_fingerprint_and_left_as_it_is(box: Box) -> None:
    before = serving_pid(box)
    found = benched(box, "--suite", "mtp")

    arm = found["arms"][0]
    assert (arm["name"], arm["generation"]) == ("live", 1)
    assert arm["fingerprint"]["arguments_sha256"]
    assert arm["fingerprint"]["engine_sha256"]
    assert arm["fingerprint"]["model_sha256"]
    # The context of 1024 tokens has no room for the long review: it is not asked, and that is told.
    assert "long_code_review" not in {row["case"] for row in found["summary"]}
    assert any("long_code_review" in message["text"] for message in found["messages"]), found
    assert serving_pid(box) == before
    run = box.json("results", "list")["results"][0]
    assert run["run"] == found["run"]
    assert [(one["holds"], one["differs_from_live"]) for one in run["arms"]] == [(True, [])]


def test_a_profile_is_measured_with_speculation_on_and_off_and_beside_what_serves(box: Box) -> None:
    before = box.json("status")
    port = before["address"].rpartition(":")[2]
    words = settings(box, serving__port=port, serving__alias="measured", serving__ctx_size=4096,
                     serving__chat_template="chatml")  # fmt: skip
    found = benched(box, "cpu-embedded", "--suite", "quality", "--yes", *words)

    assert "lease" in {one["code"] for one in found["messages"]}
    names = ["speculation on", "speculation off", "what serves"]
    assert [arm["name"] for arm in found["arms"]] == names
    drafted = {arm["name"]: 0 for arm in found["arms"]}
    for row in found["samples"]:
        drafted[row["arm"]] += row["timings"]["draft_n"] or 0
    assert drafted["speculation on"] > 0
    assert drafted["speculation off"] == 0
    hashes = [arm["fingerprint"]["arguments_sha256"] for arm in found["arms"]]
    assert hashes[0] != hashes[1]
    tools = [row["problem"] for row in found["samples"] if row["case"] == "tool calls"]
    assert set(tools) == {None}, "however often a busy machine has them asked"
    assert len(tools) >= 3
    # A designed model says the same to the letter, whether it drafts or not; and calls no tools.
    exact, beside = came_to(found, "quality")
    assert (exact["passes"], exact["reference"]) == (None, "speculation off")
    assert all("tool" in reason for reason in exact["reasons"]), exact
    assert all(one["drift_letters"] == 0 for one in exact["cases"])
    # Another template gives the same model other last words, from which it goes on otherwise.
    assert (beside["passes"], beside["reference"]) == (False, "what serves")
    assert "short answers: 1 of 1 differ" in beside["reasons"]
    told = next(one for one in found["messages"] if one["code"] == "changes-answers")
    assert "serving.chat_template (not set) -> chatml" in told["text"]
    with EvidenceStore(box.context.paths.evidence, writable=False) as store:
        run = store.run(found["run"])
        assert run is not None
        assert (str(run.outcome), run.record.profile) == ("done", "cpu-embedded")
        assert "quality" in {summary.name for summary in store.summaries(run.number)}
    after = box.json("status")
    assert (after["active"], after["alias"], after["generation"]) == (
        "active", before["alias"], before["generation"]
    )  # fmt: skip


def test_what_cannot_be_measured_is_refused_before_anything_is_stopped(box: Box) -> None:
    before = serving_pid(box)
    for words, told in (
        (("--suite", "lengths", "--depth", "5000"), "has no room for suite `lengths`"),
        (
            ("--suite", "quality", "--set", "speculation.type=off"),
            "there is nothing to compare the answers of `cpu-embedded` with",
        ),
    ):
        error = box.json("bench", "cpu-embedded", *settings(box), *words, "--yes", code=1)["error"]
        assert told in error["message"]
        assert error["state"] == "nothing was stopped: llama-server.service is as before"
    assert serving_pid(box) == before


@pytest.mark.parametrize("words", [("bench",), ("compare", "live")])
def test_what_would_be_refused_is_not_measured_and_all_that_speaks_against_it_is_told(
    box: Box, words: tuple[str, ...]
) -> None:
    before = serving_pid(box)
    odd = {"serving__host": "203.0.113.7", "serving__n_ubatch": 9999, "serving__n_batch": 512}
    given = (*words, "cpu-embedded", *settings(box, **odd), "--yes")
    error = box.json(*given, code=1)["error"]
    assert error["code"] == "deploy"
    assert error["message"].startswith("`cpu-embedded")
    assert "203.0.113.7" in error["cause"]
    assert "serving.n_ubatch = 9999 is more than" in error["cause"]
    assert (error["state"], serving_pid(box)) == ("nothing was touched", before)


def test_options_that_would_do_nothing_are_refused() -> None:
    for words in ("--depth 100", "--suite deep --repeats 3", "--workload chat", "--set speculation.n_max=2",
                  "--start-after", "cpu-embedded --url http://127.0.0.1:1"):  # fmt: skip
        assert CliRunner().invoke(cli, ["--local", "bench", *words.split()]).exit_code == 2, words


def test_a_unit_that_was_edited_since_its_start_is_not_measured(box: Box) -> None:
    text = box.unit.read_text()
    box.unit.write_text(text.replace("--ctx-size 1024", "--ctx-size 2048"))
    try:
        refused = box.json("bench", code=1)["error"]
    finally:
        box.unit.write_text(text)

    assert "runs with other arguments" in refused["message"]
