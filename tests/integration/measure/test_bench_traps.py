"""Every way in which a benchmark lies, set by the stand-in engine, and what the bench makes of it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bench_box import BenchBox, came_to, real_clock
from tests.support.bench_targets import asked_to_draft
from tests.support.fake_gpu import FakeGpuReader, rtx_3090_ti
from tests.support.server_process import Server, serving
from tests.support.stand_in import StandIn, install
from tunerd.errors import BenchError, UsageError
from tunerd.machine.facts import GpuProcess
from tunerd.measure.answer import Mark
from tunerd.measure.life import Life, open_url
from tunerd.measure.request import Prompt, Request, Suite
from tunerd.result import ActionResult
from tunerd.words import MiB

MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-p-min", "0.0")
IK_MTP = ("--spec-type", "mtp:n_max=3,p_min=0.0")
Serve = Callable[..., Server]


@pytest.fixture
def box(tmp_path: Path) -> BenchBox:
    return BenchBox(tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A stand-in that serves, of a dialect, with flags and behaviour; `serve.made` is the last one."""
    running: list[Any] = []

    def begin(*flags: str, dialect: str = "main-0x", slots: int = 1, **behaviour: Any) -> Server:
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF")
        # As fast as the test may be: what the server says of its times is what it took.
        usual = {"pp_tok_s": 1e6, "tg_tok_s": 1e5, "time_scale": 1.0}
        made = install(tmp_path / "engine", dialect=dialect, **{**usual, **behaviour})
        begin.made = made  # type: ignore[attr-defined] # a handle for the test
        command = [str(made.program), "-m", str(model), "-np", str(slots), "-c", "8192", *flags]
        context = serving(command, tmp_path / f"log{len(running)}")
        running.append(context)
        return context.__enter__()

    yield begin
    for context in running:
        context.__exit__(None, None, None)


def the(serve: Serve) -> StandIn:
    made: StandIn = serve.made  # type: ignore[attr-defined] # set by the fixture
    return made


def marks(result: ActionResult) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in result.payload["samples"]:
        for mark in row["marks"]:
            found[mark] = found.get(mark, 0) + 1
    return found


def usable(result: ActionResult) -> list[dict[str, Any]]:
    return [row for row in result.payload["samples"] if row["usable"]]


def test_a_quiet_bench_has_nine_kinds_one_warm_up_and_no_other_mark(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*MTP, "--metrics")
    result = box.bench(server.url)

    assert result.exit_code == 0
    assert marks(result) == {"warm-up": 1}
    assert len(usable(result)) == 9
    table = next(iter(result.payload["tables"].values()))
    assert table["predicted"] == 9 * 192
    assert result.payload["left_out"] == {next(iter(result.payload["tables"])): {}}


def test_no_prompt_is_sent_twice_in_a_server_life_not_even_by_a_later_bench_of_the_same_seed(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*MTP, "--metrics")
    for _ in range(2):
        box.bench(server.url, repeats=3)

    prompts = [event["body"]["prompt"] for event in the(serve).events("completion")]
    assert len(prompts) == 2 * (1 + 27)
    assert len(set(prompts)) == len(prompts)
    assert len({prompt.partition("\n\n")[0] for prompt in prompts}) == len(prompts)


def test_a_prompt_that_was_cached_although_it_was_forbidden_is_never_averaged(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*MTP, "--metrics", finds_all_cached=True)
    result = box.bench(server.url)

    # Their first word is common to all, so one token at least was not read again.
    assert marks(result)["prompt was cached"] >= 9 * 3
    assert result.exit_code == 1
    assert usable(result) == []
    assert all(row["decode"]["tok_s"] is None for row in result.payload["summary"])


@pytest.mark.parametrize("meant", [True, False])
def test_speculation_that_is_not_as_it_was_meant_stops_a_bench_before_anything_counts(
    box: BenchBox, serve: Serve, meant: bool
) -> None:
    server = serve(*MTP, "--metrics", speculation_works=not meant)

    words = "to draft, and drafted nothing" if meant else "not to draft, and drafted"
    with pytest.raises(BenchError, match=f"is meant {words}"):
        asked_to_draft(box, server.url, drafts=meant)
    bodies = [event["body"] for event in the(serve).events("completion")]
    assert {body.get("n_predict", body.get("max_tokens")) for body in bodies} == {64}


def test_settings_with_a_request_are_used_where_they_have_an_effect(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*IK_MTP, "--metrics", dialect="ik-now")
    result = box.bench(server.url, Suite.LENGTHS, depth=200, repeats=2)

    arms = [arm["name"] for arm in result.payload["arms"]]
    assert arms[1] == "speculation off"
    drafted = {row["arm"]: 0 for row in result.payload["samples"]}
    for row in usable(result):
        drafted[row["arm"]] += row["timings"]["draft_n"] or 0
    assert drafted[arms[0]] > 0
    assert drafted["speculation off"] == 0
    assert came_to(result.payload, "crossover")


def test_settings_that_a_build_ignores_are_not_taken_for_an_arm(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*MTP, "--metrics", dialect="main-0x", ignores_overrides=True)
    result = box.bench(server.url, Suite.LENGTHS, depth=200)

    assert len(result.payload["arms"]) == 1
    assert came_to(result.payload, "crossover") == []
    assert "one-arm" in {message.code for message in result.messages}


def test_requests_of_somebody_else_are_seen_in_the_servers_counters_and_measured_again(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*MTP, "--metrics", slots=2)
    stop = threading.Event()

    def somebody_else() -> None:
        for _ in range(3):
            body = {"prompt": "somebody else", "n_predict": 5}
            httpx.post(f"{server.url}/completion", json=body, timeout=30)
            stop.wait(0.02)

    other = threading.Thread(target=somebody_else)
    other.start()
    try:
        result = box.bench(server.url)
    finally:
        stop.set()
        other.join()

    assert marks(result)["foreign traffic"] >= 9
    assert len(usable(result)) == 9, "each kind was measured again"
    assert result.exit_code == 0
    assert any("somebody else was served" in step.text for step in box.said)


class HeatsUp(FakeGpuReader):
    """A card that some readings after the first ones show throttling."""

    def __init__(self, reasons: tuple[str, ...], readings: range) -> None:
        super().__init__(rtx_3090_ti())
        self._reasons, self._when = reasons, readings

    def read(self) -> Any:
        is_now = self.n_readings in self._when
        self.show(replace(rtx_3090_ti(), throttle_reasons=self._reasons if is_now else ()))
        return super().read()


def test_samples_of_a_card_that_throttles_are_measured_again(tmp_path: Path, serve: Serve) -> None:
    box = BenchBox(tmp_path, gpu=HeatsUp(("software thermal slowdown",), range(4, 10)))
    server = serve(*MTP, "--metrics")
    result = box.bench(server.url)

    assert marks(result)["throttled"] >= 2
    assert len(usable(result)) == 9
    assert result.exit_code == 0


def test_vram_that_another_process_takes_is_noticed(tmp_path: Path, serve: Serve) -> None:
    class Taken(FakeGpuReader):
        def read(self) -> Any:
            mib = 900 if self.n_readings in range(8, 12) else 100
            process = GpuProcess(99, MiB(mib), "c", "game", None)
            self.show(replace(rtx_3090_ti(used_mib=mib), processes=(process,)))
            return super().read()

    box = BenchBox(tmp_path, gpu=Taken())
    server = serve(*MTP, "--metrics")
    result = box.bench(server.url)

    assert marks(result)["VRAM taken by others"] >= 1
    assert len(usable(result)) == 9
    least = min(row["vram_free_min_mib"] for row in result.payload["samples"])
    assert least == 24564 - 900 - 380


def test_counters_are_read_no_oftener_than_every_five_seconds(tmp_path: Path, serve: Serve) -> None:
    box = BenchBox(tmp_path, clock=real_clock())
    server = serve(*MTP, "--metrics")
    box.bench(server.url)

    at_s = [event["at_s"] for event in the(serve).events("metrics")]
    assert len(at_s) >= 2
    assert all(later - before >= 4.99 for before, later in itertools.pairwise(at_s))


def test_a_server_that_dies_ends_the_bench_and_what_was_measured_is_kept(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(*MTP, "--metrics", exit_after_requests=5)

    with pytest.raises(BenchError):
        box.bench(server.url)
    with box.store() as store:
        run = store.runs()[0]
        assert str(run.outcome) == "failed"
        assert run.reason
        assert sum(sample.is_usable for sample in store.samples(run.number)) >= 3


def test_another_kind_of_server_is_measured_by_what_its_api_reports(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(openai_only=True)
    result = box.bench(f"{server.url}/v1")

    assert result.exit_code == 0
    samples = usable(result)
    assert all(row["timings"] is None for row in samples)
    assert all(row["details"]["usage_completion_n"] == 192 for row in samples)
    assert all(row["client"]["ttft_ms"] > 0 for row in samples)
    for row in result.payload["summary"]:
        assert row["decode"]["tok_s"] is None
        assert row["decode"]["n_missing"] == row["n"]
        assert row["client_tok_s"]["median"] > 0
    assert "no-timings" in {message.code for message in result.messages}


def test_an_address_that_is_none_is_refused_and_one_where_nobody_listens_is_told(
    box: BenchBox,
) -> None:
    for url in ("https://example.org", "http://127.0.0.1:1/other", "ftp://x", "http://:80"):
        with pytest.raises(UsageError):
            box.bench(url)
    with pytest.raises(BenchError, match="nobody answers"):
        box.bench("http://127.0.0.1:1")


@contextmanager
def busy_processors() -> Iterator[None]:
    """Somebody else's work on every core."""
    # Begun by a shell that ends: what this process started itself would count as the bench's own work.
    begin = '"$0" -S -E -c "while True: pass" >/dev/null & echo $!'
    count = 2 * (os.cpu_count() or 1)
    others = [
        int(subprocess.check_output(["/bin/sh", "-c", begin, sys.executable])) for _ in range(count)
    ]
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)


def test_a_server_beside_which_others_keep_the_processors_busy_is_not_believed(
    box: BenchBox, serve: Serve
) -> None:
    server = serve(tg_tok_s=20)
    ctx = box.context()
    target = replace(open_url(ctx, server.url), pids=(server.process.pid,))
    request = Request(suite=Suite.MTP, case="code", kind="code", n_predict=64)
    with busy_processors():
        asked = Life(ctx, target).ask(request, Prompt("p", "code", "say so"))
    assert asked.sample.problem is None
    assert Mark.PROCESSOR_TAKEN in asked.sample.marks
