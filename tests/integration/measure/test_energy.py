"""What a request takes of the card, measured on a server that answers: its own, unknown, or several at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bench_box import BenchBox, answering
from tests.support.fake_gpu import FakeGpuReader, a_card
from tunerd.machine.facts import GpuProcess
from tunerd.measure.life import Answered, Life, Texts, open_url, prompt_book
from tunerd.profile.workload import RequestClass
from tunerd.words import MiB

STEP_J = 25.0


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A server on a card that takes so much between two readings."""
    with answering(tmp_path, "-np", "2", "-c", "8192") as (server, _):
        pid = server.process.pid
        gpu = FakeGpuReader(
            a_card(processes=[GpuProcess(pid, MiB(8000), "compute", "llama-server", None)])
        )
        gpu.draws_j = STEP_J
        ctx = BenchBox(tmp_path, gpu=gpu).context()
        yield Life(ctx, replace(open_url(ctx, server.url), pids=(pid,)))


def asked(life: Life, *, at_once: int = 1) -> list[Answered]:
    texts = Texts(prompt_book(life.ctx), 1)
    found = life.ask_all(*texts.of_class(RequestClass(1.0, "code", 0, 200, 30, at_once), "one"))
    assert [one.sample.problem for one in found] == [None] * at_once
    return found


def test_a_request_takes_what_the_cards_counter_gained_if_it_was_alone_on_known_cards(
    life: Life,
) -> None:
    (alone,) = asked(life)
    assert alone.sample.energy_j == STEP_J * (len(alone.looks) - 1) > 0
    together = asked(life, at_once=2)
    assert [one.sample.energy_j for one in together] == [None, None], "nobody's own"

    life.target = replace(life.target, pids=())
    (by_address,) = asked(life)
    assert by_address.sample.energy_j is None
