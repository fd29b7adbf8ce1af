"""The sweep's requests on real builds with the designed hybrid model: they cost what production's cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support import needs
from tests.support.bench_box import BenchBox, HurriedClock
from tests.support.fake_gpu import FakeGpuReader, LateGpuReader, a_card
from tests.support.real_box import N_CTX, NoLease, RealBox, options
from tests.support.server_process import serving
from tunerd.engine.server import LlamaServer, Streamed
from tunerd.machine.clock import SystemClock
from tunerd.measure.answer import Sample as MeasuredSample
from tunerd.measure.answer import read_answer
from tunerd.measure.compare import CandidateLife, CandidateStand
from tunerd.measure.life import Life, Texts, prompt_book
from tunerd.measure.pairs import Asked, Unusable
from tunerd.measure.target import Target, count_tokens, open_url
from tunerd.production.lease import Held
from tunerd.profile.arm import Arm, Preempted, Request, Sample
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.box import House, live_turn
from tunerd.sweep.learner import Learner
from tunerd.sweep.night import Night, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ENGINES = ("ik-2026-08", "mainline-2026-08-18")
OFF = Arm("it", "off", 0, 0.0, 0, "f16", 512, 2048, 1)
# Prefixes shorter and longer than what ik lies between two checkpoints, and than a batch of mainline.
WORKLOAD = Workload(
    (
        RequestClass(0.4, "code", 3000, 900, 16),
        RequestClass(0.3, "chat", 3000, 1200, 16),
        RequestClass(0.3, "summary", 1000, 900, 16),
    )
)


@pytest.fixture(params=ENGINES)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealBox]:
    found = RealBox([str(needs.engine(request.param))], tmp_path)
    try:
        yield found
    finally:
        found.close()


def night(box: RealBox, workload: Workload = WORKLOAD) -> Night:
    learner = Learner(workload, N_CTX)
    return Night(box, workload, learner, 3600.0, np.random.default_rng(1), None)


def length(row: Sample) -> int:
    """Tokens of its prompt, by the server's own count."""
    assert row.reading is not None
    return (row.reading.prompt_n or 0) + (row.reading.cache_n or 0)


def test_every_class_reads_what_is_new_of_its_prompt_and_no_more(box: RealBox) -> None:
    it = night(box)
    server = Server(it, OFF, "explore")
    server.warm_up()
    for _ in range(2):
        assert set(server.block(exact=True)) == {0, 1, 2}
    prefix, n_classes = 0, 0
    for row in it.samples:
        if row.purpose == "prefix":
            prefix = length(row)
        elif row.purpose == "block" and row.reading is not None:
            n_classes += 1
            new = length(row) - prefix
            assert new > 500
            assert (row.reading.prompt_n or 0) <= new + 64, (row.request, row.reading)
    assert n_classes == 6, "nothing had to be repeated"


@pytest.mark.parametrize("box", ENGINES[:1], indirect=True)
def test_an_answer_amid_which_the_power_limit_changed_and_an_end_with_the_card_are_held_against_no_arm(
    box: RealBox,
) -> None:
    """The one was kept as of the limit before; the driver listed the card for some seconds after the other."""
    clock = HurriedClock()
    cards = LateGpuReader(clock, a_card())
    box.ctx = replace(box.ctx, gpu=cards, clock=clock)
    box.house = House(box.ctx)
    box.house.settle()
    assert box.restart(OFF).ok
    box.on_samples = lambda _arm, _samples: cards.show(replace(a_card(), power_limit_w=150.0))
    with pytest.raises(Preempted, match="150 W, and was 220 W"):
        box.measure(Request("code", "one", 0, 60, 4))

    box.house = House(box.ctx)
    box.house.settle()
    box.tell = lambda _text: cards.lose(0)
    box.end_server()
    with pytest.raises(Preempted, match="a card is gone: GPU 0: the GPU is lost"):
        box.measure(Request("code", "two", 0, 60, 4))


def test_what_somebody_else_disturbed_is_asked_again_behind_its_prefix_and_condemns_no_cache(
    box: RealBox,
) -> None:
    """Another's request between prefix and class, every time: it takes the slot and its checkpoints."""
    it = night(box)
    server = Server(it, OFF, "explore")
    server.warm_up()
    keep, n_disturbed = box.on_samples, 0

    def disturb(arm: Arm, samples: Sequence[MeasuredSample]) -> None:
        nonlocal n_disturbed
        keep(arm, samples)
        if samples[0].case == "prefix" and not samples[0].details["attempt"]:
            n_disturbed += 1
            box.somebody_else_asks()

    box.on_samples = disturb
    assert set(server.block(exact=True)) == {0, 1, 2}
    assert not it.broken_caches
    assert n_disturbed == 3
    prefix = 0
    for row in it.samples:
        if row.purpose == "prefix":
            prefix = length(row)
        elif row.purpose == "block" and row.reading is not None:
            assert (row.reading.prompt_n or 0) <= length(row) - prefix + 64, row.reading


@pytest.mark.parametrize(
    ("box", "error"), [(ENGINES[0], 0.97), (ENGINES[1], 1.04)], indirect=["box"]
)
def test_a_context_is_filled_whatever_the_length_of_texts_is_taken_for(
    box: RealBox, error: float
) -> None:
    it = night(box)
    server = Server(it, OFF, "finalist")
    assert server.n_ctx == N_CTX
    assert box.texts.letters_per_token is not None
    box.texts.letters_per_token *= error
    reading = server.fill(server.n_ctx)
    assert reading is not None
    assert 0.95 * N_CTX <= (reading.prompt_n or 0) < N_CTX
    server.warm_up()  # the process lives


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """What both builds keep is seen above; who asks them is the same for both."""
    program = [str(needs.engine(ENGINES[0]))]
    with serving([*program, *options(tmp_path)], tmp_path / "log") as server:
        opened = open_url(BenchBox(tmp_path).context(), f"http://127.0.0.1:{server.port}")
        yield replace(opened, scrape_s=0.0)  # as of a candidate


class Overheard(LlamaServer):
    """Keeps each prompt that it is sent, and how many tokens of it the server read."""

    heard: list[tuple[str, int]]

    def stream(self, path: str, body: Mapping[str, Any], **told: Any) -> Streamed:
        found = super().stream(path, body, **told)
        timings = read_answer(found.events, is_whole=found.is_whole).timings
        assert timings is not None
        self.heard.append((body["prompt"], timings.prompt_n or 0))
        return found


def overheard(target: Target) -> tuple[Target, list[tuple[str, int]]]:
    server = Overheard(target.server.address, SystemClock())
    server.heard = []
    return replace(target, server=server), server.heard


def demand_found(target: Target, heard: Sequence[tuple[str, int]]) -> None:
    """Each class behind its bare prefix, of which none of it is read again."""
    for (bare, _), (prompt, n_read) in zip(heard[::2], heard[1::2], strict=True):
        assert prompt.startswith(bare)
        whole, known = (count_tokens(target.server, text) for text in (prompt, bare))
        assert whole is not None
        assert known is not None
        assert whole - known > 500
        assert n_read <= whole - known + 64, (n_read, whole, known)


def a_side(
    target: Target, folder: Path, keep: Callable[[Sequence[MeasuredSample]], None]
) -> CandidateLife:
    """A process of a comparison, warm."""
    ctx = BenchBox(folder).context()
    stand = CandidateStand(
        ctx, cast("Held", NoLease()), {}, Texts(prompt_book(ctx), 1), lambda _side, _arm: None,
        lambda _side, found: keep(found),
    )  # fmt: skip
    stand.texts.learn(target.server)
    return CandidateLife(stand, "A", target)


def test_a_comparison_finds_the_prefix_of_every_class(target: Target, tmp_path: Path) -> None:
    target, heard = overheard(target)
    life = a_side(target, tmp_path, lambda _found: None)
    heard.clear()
    for number in range(2):
        for at, one in enumerate(WORKLOAD.classes):
            life.request(Asked(f"1-{number}", at, one))
    life.close()
    assert len(heard) == 4 * len(WORKLOAD.classes)
    demand_found(target, heard)


class Shared(LlamaServer):
    """Somebody else is answered first, where `is_taken`."""

    is_taken = False

    def stream(self, path: str, body: Mapping[str, Any], **told: Any) -> Streamed:
        if self.is_taken:
            self.complete("somebody else " * 50, n_predict=2, timeout_s=240.0)
        return super().stream(path, body, **told)


def test_a_comparison_asks_the_one_request_again_that_somebody_else_disturbed(
    target: Target, tmp_path: Path
) -> None:
    server = Shared(target.server.address, SystemClock())
    kept: list[MeasuredSample] = []
    life = a_side(replace(target, server=server), tmp_path, kept.extend)
    one = RequestClass(1.0, "code", 0, 400, 16)
    life.request(Asked("1-0", 0, one))
    server.is_taken = True
    with pytest.raises(Unusable, match="foreign traffic"):
        life.request(Asked("1-0", 1, one))
    server.is_taken = False
    assert life.request(Asked("1-0", 1, one, attempt=1)).wall_ms > 0
    life.check()
    life.close()
    assert [sample.is_usable for sample in kept] == [True, False, True]


class Heating(Texts):
    """The card is held back while a class is asked for the first time."""

    gpu: FakeGpuReader

    def of_class(self, one: RequestClass, name: str, **told: Any) -> Any:
        is_hot = one.new_tokens and not told["details"]["attempt"]
        reasons = ("software thermal slowdown",) if is_hot else ()
        self.gpu.show(replace(a_card(), throttle_reasons=reasons))
        return super().of_class(one, name, **told)


def test_a_promoted_winner_that_was_disturbed_finds_the_prefix_when_it_is_asked_again(
    target: Target, tmp_path: Path
) -> None:
    box, (target, heard) = BenchBox(tmp_path), overheard(target)
    ctx = box.context()
    texts = Heating(prompt_book(ctx), 1)
    texts.gpu = box.gpu
    texts.learn(target.server)
    turn_s, n_void = live_turn(Life(ctx, target), texts, WORKLOAD, "live", {})
    assert turn_s
    assert n_void == len(WORKLOAD.classes)
    assert len(heard) == 4 * len(WORKLOAD.classes)
    demand_found(target, heard)
