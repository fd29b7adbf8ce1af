"""Suites on a stand-in whose speed and answers are known: what is found is what was put in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs
from tests.support.bench_box import BenchBox, answering, came_to
from tests.support.server_process import serving
from tunerd.cli.measure import render_bench
from tunerd.errors import UsageError
from tunerd.measure.bench import OFF, ON, Session, result_of
from tunerd.measure.evidence import SummaryRecord, TurnTime
from tunerd.measure.learn import find_workload
from tunerd.measure.request import BenchRequest, Suite
from tunerd.measure.store import EvidenceStore
from tunerd.measure.target import open_url
from tunerd.measure.trust import Speculation
from tunerd.records import read
from tunerd.result import ActionResult
from tunerd.tryout.designed import SHAPES, design, write

MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "6", "--spec-draft-p-min", "0.75")


@pytest.fixture
def box(tmp_path: Path) -> BenchBox:
    return BenchBox(tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_real_build_that_takes_settings_with_a_request_plays_both_arms(
    box: BenchBox, tmp_path: Path
) -> None:
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf")
    options = ("-m", str(model), "-c", "1024", "-np", "1", "-t", "1", "--spec-type", "mtp:n_max=3,p_min=0.0")  # fmt: skip
    with serving([str(needs.engine("ik-2026-08")), *options], tmp_path / "log") as server:
        result = box.bench(server.url, Suite.LENGTHS, depth=100)

    drafted = {arm["name"]: 0 for arm in result.payload["arms"]}
    for row in result.payload["samples"]:
        drafted[row["arm"]] += row["timings"]["draft_n"] or 0
    on, off = drafted
    assert off == "speculation off"
    assert drafted[on] > 0
    assert drafted[off] == 0


@pytest.mark.parametrize("depth", [2000, 256])  # of the shorter one the question is a large part
def test_a_changed_tail_reads_only_the_tail_again(
    box: BenchBox, tmp_path: Path, depth: int
) -> None:
    flags = ("-c", "8192", "--metrics", *MTP)
    with answering(tmp_path / "e", *flags, is_recurrent=False) as (server, _):
        result = box.bench(server.url, Suite.CACHE, depth=depth, repeats=2)

    found = came_to(result.payload, "reuse")
    assert [(one["case"], one["works"]) for one in found] == [
        ("warm, identical", True), ("warm, changed tail", True)
    ]  # fmt: skip
    cold = [row for row in result.payload["samples"] if row["case"] == "cold"]
    assert [row["details"]["cached"] for row in cold] == [0, 0]


def test_the_context_is_filled_to_its_end(box: BenchBox, tmp_path: Path) -> None:
    with answering(tmp_path / "e", "-c", "4096", *MTP) as (server, _):
        result = box.bench(server.url, Suite.DEEP)

    (found,) = came_to(result.payload, "depth")
    assert (found["spill_tokens"], found["failed_tokens"]) == (None, None)
    assert 3500 < found["filled_tokens"] < 4096 - 64
    depths = [row["details"]["depth"] for row in result.payload["samples"][1:]]
    assert depths == sorted(depths)
    assert len(depths) == 8


def test_the_depth_at_which_a_server_dies_is_told(box: BenchBox, tmp_path: Path) -> None:
    with answering(tmp_path / "e", "-c", "4096", *MTP, exit_after_requests=5) as (server, _):
        result = box.bench(server.url, Suite.DEEP)

    (found,) = came_to(result.payload, "depth")
    assert found["failed_tokens"] > found["filled_tokens"] > 0
    assert found["why"] not in {"", "no sign of a spill"}


def bench_two(box: BenchBox, on: str, off: str, suite: Suite) -> ActionResult:
    """Bench two servers that run already as the arms of one profile."""
    ctx = box.context()
    session = Session(ctx, BenchRequest(suite=suite, repeats=1, seed=11))
    with EvidenceStore(ctx.paths.evidence) as session.store:
        for name, url, drafts in ((ON, on, True), (OFF, off, False)):
            opened = open_url(ctx, url)
            target = replace(opened, arm=replace(opened.arm, name=name),
                             speculation=Speculation(drafts))  # fmt: skip
            session.on_arm(target, "two stand-ins")
        return result_of(session, "two stand-ins", None)


def test_the_same_answers_and_calls_pass_the_gate(box: BenchBox, tmp_path: Path) -> None:
    usual: dict[str, Any] = {
        "answer_text": "Fe",
        "reasoning": "iron, then",
        "tool_calls": [["convert", '{"value": 84, "unit": "km"}']],
    }
    with (
        answering(tmp_path / "on", *MTP, **usual) as (on, _),
        answering(tmp_path / "off", **usual) as (off, _),
    ):
        result = bench_two(box, on.url, off.url, Suite.QUALITY)

    assert "Quality, cases" in "\n".join(render_bench(result.payload))
    (found,) = came_to(result.payload, "quality")
    assert found["passes"] is True
    tools = next(one for one in found["cases"] if one["case"] == "tool calls")
    assert (tools["n"], tools["n_same"], tools["n_called"], tools["n_valid"]) == (1, 1, 1, 1)
    assert tools["reasoning_letters"] == (10, 10)


def test_thoughts_that_take_all_the_room_get_more_of_it(box: BenchBox, tmp_path: Path) -> None:
    with answering(tmp_path / "e", *MTP, answer_text="", reasoning="hm, hm") as (server, _):
        result = box.bench(server.url, Suite.QUALITY)

    short = [row for row in result.payload["samples"] if row["case"] == "short answers"]
    assert [row["n_predict"] for row in short] == [32, 32 + 2048]
    assert len({row["prompt_id"] for row in short}) == 1


def test_no_text_of_prompts_or_answers_is_kept(box: BenchBox, tmp_path: Path) -> None:
    with answering(tmp_path / "e", *MTP, answer_text="a very secret answer") as (server, _):
        box.bench(server.url, Suite.QUALITY)

    kept = box.paths.evidence.read_bytes()
    assert b"secret" not in kept
    assert b"Answer with one word" not in kept


def test_a_turn_of_each_class_of_a_workload_has_its_parts(box: BenchBox, tmp_path: Path) -> None:
    with answering(tmp_path / "e", "-c", "131072", pp_tok_s=2e5, tg_tok_s=2e4) as (server, _):
        result = box.bench(server.url, Suite.WORKLOAD, workload="coding-agent")

    rows = [read(SummaryRecord, one) for one in result.payload["summaries"]]
    turns = {turn.request_class: turn for row in rows if (turn := TurnTime.from_record(row))}
    shape = find_workload(box.context(), "coding-agent").shape
    assert set(turns) == {None, *(one.name for one in shape.classes)}
    for one in shape.classes:
        plain, turn = one.plain(), turns[one.name]
        # What was cached is not read again, and every token takes its time.
        assert turn.prefill_s == pytest.approx(plain.new_tokens / 2e5, rel=0.15, abs=1e-3)
        decode_s = (turn.decode_s or 0.0) + (turn.reasoning_s or 0.0)
        assert decode_s == pytest.approx((plain.n_predict - 1) / 2e4, rel=0.02)
    whole = sum(share * (turns[one.name].total_s or 0.0)
                for one, share in zip(shape.classes, shape.shares, strict=True))  # fmt: skip
    assert turns[None].total_s == pytest.approx(whole)
    assert "whole workload" in "\n".join(render_bench(result.payload))
    with box.store() as store:
        run = store.runs()[0]
        assert run.record.workload == "coding-agent"
        assert run.record.arms[0].fingerprint.workload_sha256 == shape.sha256


def test_servers_by_their_addresses_stand_side_by_side_by_the_one_clock_that_all_have(
    box: BenchBox, tmp_path: Path
) -> None:
    """One of them is no llama-server, and tells no times: a rung of the ladder all the same."""
    with (
        answering(tmp_path / "one", tg_tok_s=400.0, openai_only=True) as (ollama, _),
        answering(tmp_path / "two", "-c", "2048", *MTP, tg_tok_s=800.0) as (mtp, _),
    ):
        result = box.bench([f"ollama={ollama.url}", f"mtp={mtp.url}"])

    assert [arm["name"] for arm in result.payload["arms"]] == ["ollama", "mtp"]
    asked = [{row["prompt_id"] for row in result.payload["samples"] if row["arm"] == name}
             for name in ("ollama", "mtp")]  # fmt: skip
    assert len(asked[0] & asked[1]) >= 9, "the same texts"
    text = "\n".join(render_bench(result.payload))
    table = text.partition("Side by side")[2].partition("\n\n")[0]
    rows = {cells[0]: cells[1:] for line in table.splitlines() if (cells := line.split())}
    assert float(rows["ollama"][0]) == pytest.approx(400.0, rel=0.2)
    assert "server reports no speed" in text
    by_client, own = (float(rows["mtp"][at].replace(",", "")) for at in (0, 4))
    assert by_client == pytest.approx(own, rel=0.3)
    assert by_client > float(rows["ollama"][0])
    (told,) = (one.text for one in result.messages if one.code == "context-unknown")
    assert f"{ollama.url} does not report its context" in told


def test_two_servers_of_one_name_are_refused_before_anything_is_asked(
    box: BenchBox, tmp_path: Path
) -> None:
    with (
        answering(tmp_path / "one") as (server, _),
        pytest.raises(UsageError, match="name of its own"),
    ):
        box.bench([server.url, f"{server.url}/v1"])
