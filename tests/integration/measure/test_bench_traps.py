"""Every way in which a benchmark lies, set by the stand-in engine, and what the bench makes of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bench_box import BenchBox, HurriedClock, answering, came_to
from tests.support.fake_gpu import FakeGpuReader, a_card, rtx_3090_ti
from tests.support.local_box import Box
from tests.support.needs import engine
from tests.support.receiver import answered_by
from tests.support.server_process import Server, serving, start
from tests.support.stand_in import StandIn
from tests.support.waiting import until
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import BenchError
from tunerd.machine.clock import SystemClock
from tunerd.machine.facts import Gpu, GpuProcess, GpuReading
from tunerd.machine.net import who_listens
from tunerd.measure.answer import Mark
from tunerd.measure.bench import Session
from tunerd.measure.evidence import RunOutcome
from tunerd.measure.life import Answered, Life, Texts, TrafficWatch, prompt_book
from tunerd.measure.request import (
    CHANGED_TAIL,
    COLD,
    IDENTICAL,
    WARM_UP_TOKENS,
    BenchRequest,
    Prompt,
    Request,
    Suite,
)
from tunerd.measure.store import EvidenceStore
from tunerd.measure.target import open_url
from tunerd.measure.trust import FLATTERED, Speculation
from tunerd.profile.workload import RequestClass
from tunerd.result import ActionResult
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.words import MiB

MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-p-min", "0.0")
IK_MTP = ("--spec-type", "mtp:n_max=3,p_min=0.0")
Serve = Callable[..., tuple[Server, StandIn]]


@pytest.fixture
def box(tmp_path: Path) -> BenchBox:
    return BenchBox(tmp_path)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, StandIn]]:
    """A server on which nothing is wrong, for all who only look at what is beside it."""
    with answering(
        tmp_path_factory.mktemp("quiet"), *MTP, "--metrics", "-np", "2", "-c", "8192"
    ) as found:
        yield found


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Begins a server of a test's own, with flags and behaviour."""
    with ExitStack() as running:
        yield lambda *flags, **behaviour: running.enter_context(
            answering(tmp_path / "engine", "-c", "8192", "--metrics", *flags, **behaviour)
        )


def marks(result: ActionResult) -> dict[str, int]:
    return dict(Counter(mark for row in result.payload["samples"] for mark in row["marks"]))


def usable(result: ActionResult) -> list[dict[str, Any]]:
    return [row for row in result.payload["samples"] if row["usable"]]


def test_a_quiet_bench_has_nine_kinds_one_warm_up_and_no_other_mark(
    box: BenchBox, quiet: tuple[Server, StandIn]
) -> None:
    result = box.bench(quiet[0].url)

    assert result.exit_code == 0
    assert marks(result) == {"warm-up": 1}
    assert len(usable(result)) == 9
    table = next(iter(result.payload["tables"].values()))
    assert table["predicted"] == 9 * 192
    assert result.payload["left_out"] == {next(iter(result.payload["tables"])): {}}


def test_no_prompt_is_sent_twice_in_a_server_life_not_even_by_a_later_bench_of_the_same_seed(
    box: BenchBox, quiet: tuple[Server, StandIn]
) -> None:
    server, made = quiet
    n_before = len(made.events("completion"))
    for _ in range(2):
        box.bench(server.url, repeats=2)

    prompts = [event["body"]["prompt"] for event in made.events("completion")[n_before:]]
    assert len(prompts) >= 2 * (1 + 18)  # more where the machine was busy and some were asked again
    assert len({prompt.partition("\n\n")[0] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(
    ("token", "problem"),
    [("<", f"the answer repeats one token: {'<' * 20!r}"), ("", "the answer is empty")],
)
def test_garbage_is_no_answer_however_fast_it_comes(
    box: BenchBox, serve: Serve, token: str, problem: str
) -> None:
    """Some kernels break beyond a length or a batch, drafts of one character are all accepted, and that won."""
    server, _ = serve(*MTP, breaks_beyond=300, breaks_into=token)
    result = box.bench(server.url)

    broken = [row for row in result.payload["samples"] if row["problem"] is not None]
    assert {row["case"] for row in broken} == {"long_code_review"}
    assert {row["problem"] for row in broken} == {problem}
    table = next(iter(result.payload["tables"].values()))
    assert (table["missing"], table["n_requests"]) == (("long_code_review",), 8)


def test_answers_that_go_round_in_a_circle_count_and_are_told(
    box: BenchBox, serve: Serve, quiet: tuple[Server, StandIn]
) -> None:
    server, _ = serve(*MTP, loops_from=0.2)
    result = box.bench(server.url)

    assert len(usable(result)) == 9
    told = [one.text for one in result.messages if one.code == "repeats"]
    assert [text.partition(": ")[2] for text in told] == [f"9 of 9 answers {FLATTERED}"]
    sane = box.bench(quiet[0].url)
    assert [one for one in sane.messages if one.code == "repeats"] == []


def test_a_prompt_that_was_cached_although_it_was_forbidden_is_never_averaged(
    box: BenchBox, serve: Serve
) -> None:
    server, _ = serve(*MTP, finds_all_cached=True)
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
    server, made = serve(*MTP, speculation_works=not meant)

    words = "it drafted nothing, though it should" if meant else "it drafted, though it should not"
    ctx = box.context()
    target = replace(open_url(ctx, server.url), speculation=Speculation(meant))
    session = Session(ctx, BenchRequest(repeats=1, seed=11))
    with (
        EvidenceStore(ctx.paths.evidence) as session.store,
        pytest.raises(BenchError, match=words),
    ):
        session.on_server(target, server.url)
    bodies = [event["body"] for event in made.events("completion")]
    assert {body.get("n_predict", body.get("max_tokens")) for body in bodies} == {WARM_UP_TOKENS}


@pytest.mark.parametrize("takes_them", [True, False])
def test_settings_with_a_request_are_an_arm_where_they_have_an_effect(
    box: BenchBox, serve: Serve, *, takes_them: bool
) -> None:
    server, _ = (
        serve(*IK_MTP, dialect="ik-now") if takes_them else serve(*MTP, ignores_overrides=True)
    )
    result = box.bench(server.url, Suite.LENGTHS, depth=200, repeats=2)

    drafted = {arm["name"]: 0 for arm in result.payload["arms"]}
    for row in usable(result):
        drafted[row["arm"]] += row["timings"]["draft_n"] or 0
    assert next(iter(drafted.values())) > 0
    assert drafted.get("speculation off") == (0 if takes_them else None)
    assert bool(came_to(result.payload, "crossover")) is takes_them
    assert ("one-arm" in {message.code for message in result.messages}) is not takes_them


def test_requests_of_somebody_else_are_seen_in_the_servers_counters_and_measured_again(
    box: BenchBox, quiet: tuple[Server, StandIn]
) -> None:
    server, _ = quiet
    stop, began = threading.Event(), threading.Event()

    def is_seen() -> bool:
        return any("somebody else was served" in step.text for step in box.said)

    def somebody_else() -> None:
        body = {"prompt": "somebody else", "n_predict": 5}
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not (stop.is_set() or is_seen()):
                client.post("/completion", json=body)
                began.set()
                stop.wait(0.02)

    other = threading.Thread(target=somebody_else)
    other.start()
    try:
        assert began.wait(30)
        result = box.bench(server.url)
    finally:
        stop.set()
        other.join()

    assert is_seen()
    marked = ["foreign traffic" in row["marks"] for row in result.payload["samples"]]
    assert marked[0]
    assert marked == sorted(marked, reverse=True), "the whole stretch, and nothing after it"
    assert len(usable(result)) == 9, "each kind was measured again"
    assert result.exit_code == 0


class Meanwhile(FakeGpuReader):
    """A card that is otherwise for some readings."""

    def __init__(self, otherwise: Gpu) -> None:
        super().__init__(rtx_3090_ti())
        self._otherwise = otherwise

    def read(self) -> GpuReading:
        self.show(self._otherwise if self.n_readings in range(8, 12) else rtx_3090_ti())
        return super().read()


GAME = GpuProcess(99, MiB(900), "c", "game", None)


@pytest.mark.parametrize(
    ("otherwise", "mark"),
    [
        (replace(rtx_3090_ti(), throttle_reasons=("software thermal slowdown",)), "throttled"),
        (replace(rtx_3090_ti(used_mib=900), processes=(GAME,)), "VRAM taken by others"),
    ],
    ids=["heat", "a game"],
)
def test_what_happens_to_the_card_meanwhile_is_noticed_and_measured_again(
    tmp_path: Path, quiet: tuple[Server, StandIn], otherwise: Gpu, mark: str
) -> None:
    result = BenchBox(tmp_path, gpu=Meanwhile(otherwise)).bench(quiet[0].url)

    assert marks(result)[mark] >= 1
    assert len(usable(result)) == 9
    assert result.exit_code == 0
    if mark == "VRAM taken by others":
        least = min(row["vram_free_min_mib"] for row in result.payload["samples"])
        assert least == 24564 - 900 - 380


def test_counters_are_read_no_oftener_than_every_five_seconds(
    tmp_path: Path, quiet: tuple[Server, StandIn]
) -> None:
    clock = HurriedClock()
    ctx = BenchBox(tmp_path, clock=clock).context()
    watch = TrafficWatch(ctx, open_url(ctx, quiet[0].url))
    before_s = clock.monotonic_s()
    watch.open()
    assert not watch.is_due
    watch.close([])
    assert clock.monotonic_s() - before_s >= 5.0


def test_a_server_that_dies_ends_the_bench_and_what_was_measured_is_kept(
    box: BenchBox, serve: Serve
) -> None:
    server, _ = serve(*MTP, exit_after_requests=5)

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
    server, _ = serve(openai_only=True, tg_tok_s=800)
    result = box.bench(f"{server.url}/v1")

    assert result.exit_code == 0
    samples = usable(result)
    assert all(row["timings"] is None for row in samples)
    (table,) = result.payload["tables"].values()
    assert table["predicted"] == 9 * 192, "told by their usage"
    assert all(row["client"]["ttft_ms"] > 0 for row in samples)
    assert {row["decode"]["tok_s"] for row in result.payload["summary"]} == {None}
    # An answer has none that came as a whole, for a busy machine looked too late.
    rates = [
        row["client_tok_s"]["median"] for row in result.payload["summary"] if row["client_tok_s"]
    ]
    assert rates
    assert min(rates) > 0
    assert "no-timings" in {message.code for message in result.messages}


def test_an_address_where_nobody_listens_is_told(box: BenchBox) -> None:
    with pytest.raises(BenchError, match="nothing answers"):
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
    server, _ = serve(tg_tok_s=25)
    ctx = box.context()
    target = replace(open_url(ctx, server.url), pids=(server.process.pid,))
    request = Request(suite=Suite.MTP, case="code", kind="code", n_predict=64)
    prompt = Prompt("p", "say so")
    with busy_processors():
        asked = Life(ctx, target).ask(request, prompt)
        brief = Life(ctx, target)  # whose requests are too short to show it one by one
        for _ in range(8):
            brief.ask(replace(request, n_predict=8), prompt)
        told = brief.crowded()
    assert asked.sample.problem is None
    assert Mark.PROCESSOR_TAKEN in asked.sample.marks
    assert [one.code for one in told] == ["processors-taken"]


# Servers that tell impossible things of themselves


HOSTILE = {"prompt_n": math.nan, "prompt_ms": math.inf, "predicted_n": -5, "predicted_ms": 1e300,
           "cache_n": "12", "draft_n": True, "draft_n_accepted": [1]}  # fmt: skip


def no_json(word: str) -> Any:
    """NaN and Infinity are none."""
    raise AssertionError(f"{word} is no JSON")


def test_figures_that_cannot_be_are_void_samples_and_an_error(tmp_path: Path) -> None:
    with answering(tmp_path / "e", "-c", "4096", told_timings=HOSTILE) as (server, _):
        done = Box(tmp_path).call("bench", "--url", server.url, "--suite", "cache", "--repeats", "1",
                                  "--json")  # fmt: skip

    found = json.loads(done.stdout, parse_constant=no_json)
    assert "Traceback" not in done.stderr
    assert (done.returncode, found["ok"]) == (1, False)
    assert "nothing-usable" in {message["code"] for message in found["messages"]}
    assert all("figures that cannot be" in row["marks"] for row in found["samples"])
    kept = [row["timings"] for row in found["samples"]]
    assert {value for timings in kept for value in timings.values()} == {None}


@pytest.mark.engine
def test_a_limit_of_the_server_that_ends_every_answer_is_named(
    box: BenchBox, tmp_path: Path
) -> None:
    """ik ends answers at its `-n`, whatever a request asks for: everything was left out, and nobody knew why."""
    model = tmp_path / "tiny.gguf"
    write(design(SHAPES["tiny"]), model)
    options = ("-m", str(model), "-c", "512", "-np", "1", "-t", "1", "-n", "16")
    with serving([str(engine("ik-2026-08")), *options], tmp_path / "log") as server:
        result = box.bench(server.url)

    (left_out,) = [one for one in result.messages if one.code == "left-out"]
    assert "after 16 tokens" in (left_out.hint or "")
    assert "serving.n_predict" in (left_out.hint or "")


@pytest.mark.engine
def test_what_another_server_on_the_same_port_may_have_answered_does_not_count(
    box: BenchBox, tmp_path: Path
) -> None:
    """ik shares its port, and the kernel spreads requests over both: half the figures were of the other one."""
    model = tmp_path / "tiny.gguf"
    write(design(SHAPES["tiny"]), model)
    ik = (str(engine("ik-2026-08")), "-m", str(model), "-c", "512", "-np", "1", "-t", "1")
    request = Request(suite=Suite.MTP, case="code", kind="code", n_predict=8)

    def asked() -> tuple[Mark, ...]:
        pid, opened = server.process.pid, open_url(ctx, server.url)
        address = replace(opened.server.address, pid=pid)
        target = replace(opened, server=LlamaServer(address, ctx.clock))
        return Life(ctx, target).ask(request, Prompt("p", "say so")).sample.marks

    ctx = box.context()
    with serving(ik, tmp_path / "log") as server:
        assert asked() == ()
        own, port = server.process.pid, server.port
        with start(ik, tmp_path / "other", port=port) as other:
            until(lambda: who_listens(port, own=own) == other.process.pid, "both listen")
            assert asked() == (Mark.FOREIGN_TRAFFIC,)
        assert asked() == ()


def test_answers_without_times_have_no_speed_and_that_is_told(tmp_path: Path) -> None:
    told = dict.fromkeys(HOSTILE)
    with answering(tmp_path / "e", "-c", "4096", told_timings=told) as (server, _):
        result = BenchBox(tmp_path).bench(server.url, Suite.CACHE)

    assert result.exit_code == 0
    (warned,) = (one.text for one in result.messages if one.code == "no-times")
    assert "3 of 3 answers came without the server's own times" in warned
    assert {row["decode"]["tok_s"] for row in result.payload["summary"]} == {None}


def test_a_server_that_says_it_is_always_busy_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with (
        answering(tmp_path / "e", "-c", "4096", slots_are_busy=True) as (server, _),
        pytest.raises(BenchError, match="the server is always busy") as ended,
    ):
        BenchBox(tmp_path).bench(server.url, Suite.CACHE)
    assert "reported work during all" in str(ended.value.cause)


class Impatient(HurriedClock):
    """A person interrupts the first wait of some seconds."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if seconds > 1.0:
            raise KeyboardInterrupt


def test_what_was_asked_is_kept_where_the_wait_for_the_last_counters_is_interrupted(
    tmp_path: Path, serve: Serve
) -> None:
    server, _ = serve()
    box = BenchBox(tmp_path, clock=Impatient())
    with pytest.raises(KeyboardInterrupt):
        box.bench(server.url, Suite.CACHE)
    with box.store() as store:
        (run,) = store.runs()
        cases = [one.case for one in store.samples(run.number)]
    assert run.outcome is RunOutcome.STOPPED
    assert cases[-3:] == [COLD, IDENTICAL, CHANGED_TAIL]


def test_a_context_that_no_server_can_have_is_not_filled(tmp_path: Path) -> None:
    props = {"n_ctx": 10**12, "default_generation_settings": {"n_ctx": True}, "total_slots": "x"}
    with (
        answering(tmp_path / "e", "--no-slots", dialect="ik-now", told_props=props) as (server, _),
        pytest.raises(BenchError, match="the size of the context is not known"),
    ):
        BenchBox(tmp_path).bench(server.url, Suite.DEEP)


STEP_J = 25.0


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A server on a card that takes so much between two readings."""
    with answering(tmp_path, "-np", "2", "-c", "8192", tg_tok_s=100.0) as (server, _):
        pid = server.process.pid
        gpu = FakeGpuReader(
            a_card(processes=[GpuProcess(pid, MiB(8000), "compute", "llama-server", None)])
        )
        gpu.draws_j = STEP_J
        ctx = BenchBox(tmp_path, gpu=gpu).context()
        yield Life(ctx, replace(open_url(ctx, server.url), pids=(pid,)))


def test_how_long_a_token_is_says_the_first_server_that_tells(tmp_path: Path) -> None:
    """One that died when it was asked left all texts at a usual length: requests that should take 320 tokens had 737."""
    texts = Texts(prompt_book(BenchBox(tmp_path).context()), seed=1)
    tokens: list[list[int]] = [[], [7] * 10_000]

    def answer(request: BaseHTTPRequestHandler, _body: bytes) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(json.dumps({"tokens": tokens.pop(0)}).encode())

    with answered_by(answer) as port:
        for _ in range(2):
            texts.learn(LlamaServer(Address("127.0.0.1", port), SystemClock()))

    assert texts.letters_per_token == pytest.approx(2.0, rel=0.01)


def test_a_request_takes_what_the_cards_counter_gained_if_it_was_alone_on_known_cards(
    life: Life,
) -> None:
    def asked(at_once: int = 1) -> list[Answered]:
        wanted = RequestClass(1.0, "code", 0, 200, 30, at_once)
        found = life.ask_all(*Texts(prompt_book(life.ctx), 1).of_class(wanted, "one"))
        assert [one.sample.problem for one in found] == [None] * at_once
        return found

    (alone,) = asked()
    assert alone.sample.energy_j == STEP_J * (len(alone.looks) - 1) > 0
    together = asked(at_once=2)
    assert [one.sample.energy_j for one in together] == [None, None], "nobody's own"

    life.target = replace(life.target, pids=())
    (by_address,) = asked()
    assert by_address.sample.energy_j is None
