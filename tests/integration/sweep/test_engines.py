"""The sweep's requests on real builds with the designed hybrid model: they cost what production's cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.support import needs
from tests.support.bench_box import BenchBox
from tests.support.fake_gpu import a_card
from tests.support.real_box import N_CTX, SERVES, NoLease, RealBox, options
from tests.support.server_process import serving
from tunerd.engine.server import LlamaServer, Streamed
from tunerd.machine.clock import SystemClock
from tunerd.measure.answer import Sample as MeasuredSample
from tunerd.measure.answer import read_answer
from tunerd.measure.compare import CandidateLife, CandidateStand
from tunerd.measure.life import Life, Texts, prompt_book
from tunerd.measure.pairs import Asked, Unusable
from tunerd.measure.target import Target, count_tokens, open_url
from tunerd.measure.trust import speculation_of
from tunerd.production.lease import Held
from tunerd.profile.arm import Arm, Request, Sample, read
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.learner import Learner
from tunerd.sweep.night import Night, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ENGINES = ("ik-2026-08", "mainline-2026-08-18")
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
    server = Server(it, SERVES, "explore")
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


def test_what_somebody_else_disturbed_is_asked_again_behind_its_prefix_and_condemns_no_cache(
    box: RealBox,
) -> None:
    """Another's request between prefix and class, every time: it takes the slot and its checkpoints."""
    it = night(box)
    server = Server(it, SERVES, "explore")
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
    server = Server(it, SERVES, "finalist")
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


def test_a_comparison_finds_the_prefix_of_every_class_and_counts_no_request_that_was_disturbed(
    target: Target, tmp_path: Path
) -> None:
    (target, heard), box = overheard(target), BenchBox(tmp_path)
    ctx, kept = box.context(), list[MeasuredSample]()
    stand = CandidateStand(
        ctx, cast("Held", NoLease()), {}, Texts(prompt_book(ctx), 1), lambda _arm: None,
        lambda _side, found: kept.extend(found),
    )  # fmt: skip
    stand.texts.learn(target.server)
    life = CandidateLife(stand, "A", target)
    heard.clear()
    for number in range(2):
        for at, one in enumerate(WORKLOAD.classes):
            life.request(Asked(f"1-{number}", at, one))
    assert len(heard) == 4 * len(WORKLOAD.classes)
    demand_found(target, heard)
    box.gpu.show(replace(a_card(), throttle_reasons=("software thermal slowdown",)))
    with pytest.raises(Unusable, match="throttled"):
        life.request(Asked("1-2", 0, RequestClass(1.0, "code", 0, 400, 16)))
    life.close()
    assert [sample.is_usable for sample in kept] == [*[True] * 6, False]


N_MAX, P_MIN = 8, 0.5
MTP = Arm("it", "mtp", N_MAX, P_MIN, 0, "f16", 512, 2048, 1)
WORDS = {
    "mainline-2026-08-18": ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(N_MAX), "--spec-draft-p-min", str(P_MIN)),
    "ik-2026-08": ("--spec-type", f"mtp:n_max={N_MAX},p_min={P_MIN}"),
}  # fmt: skip


@pytest.mark.parametrize("engine", WORDS)
def test_the_steps_of_an_answer_sum_up_to_its_timings(engine: str, tmp_path: Path) -> None:
    box = RealBox([str(needs.engine(engine))], tmp_path, *WORDS[engine])
    try:
        assert box.restart(MTP).ok
        asked = [
            box.measure(Request(kind, f"{kind} {n}", 0, 200, 96))
            for n in range(3)
            for kind in ("code", "creative", "chat")
        ]
    finally:
        box.close()
    # Where others take the processor in the middle of an answer its steps are not told.
    answers = [answer for answer in asked if "steps" in answer]
    assert len(answers) >= 3
    for answer in answers:
        steps = answer["steps"]
        assert sum(drafted for _, drafted, _ in steps) == answer["draft_n"]
        assert sum(accepted for _, _, accepted in steps) == answer["draft_n_accepted"]
        assert sum(1 + accepted for _, _, accepted in steps) == answer["predicted_n"] - 1
        assert sum(ms for ms, _, _ in steps) == pytest.approx(answer["predicted_ms"], rel=0.05)
        assert all(accepted <= drafted <= N_MAX for _, drafted, accepted in steps)
        reading = read(answer)
        assert reading.steps is not None
        assert reading.n_steps == len(steps) == sum(one.n_steps for one in reading.steps)
    # A draft that is cut short by its confidence shows what shorter ones take.
    assert len({drafted for one in answers for _, drafted, _ in one["steps"]}) > 1


@pytest.mark.parametrize("kind", ["ngram-mod", "ngram-simple"])
def test_n_grams_that_find_nothing_to_repeat_are_measured(kind: str, tmp_path: Path) -> None:
    """No bench and no comparison of a server with n-grams began: three short answers drafted nothing."""
    words = ("--spec-type", kind)
    box = RealBox([str(needs.engine("mainline-2026-08-18"))], tmp_path, *words)
    try:
        assert box.restart(replace(MTP, spec=kind)).ok
        assert box._process is not None
        target = replace(box._process.life.target, speculation=speculation_of(("x", *words)))
        life = Life(box.ctx, target)
        assert life.warm_up(box.texts.first(life), drafts=target.speculation.drafts) is False
    finally:
        box.close()
