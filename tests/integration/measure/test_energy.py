"""What a request takes of the card, measured on a server that answers: its own, unknown, or several at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bench_box import BenchBox
from tests.support.fake_gpu import FakeGpuReader, a_card
from tests.support.server_process import serving
from tests.support.stand_in import install
from tunerd.machine.facts import GpuProcess
from tunerd.measure.life import Life, Texts, open_url, prompt_book
from tunerd.profile.workload import RequestClass
from tunerd.words import MiB

STEP_J = 25.0


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A server on a card that takes so much between two readings."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    made = install(tmp_path, dialect="main-0x", pp_tok_s=1e6, tg_tok_s=1e5, time_scale=1.0)
    argv = [str(made.program), "-m", str(model), "-np", "2", "-c", "8192"]
    with serving(argv, tmp_path / "log") as server:
        pid = server.process.pid
        gpu = FakeGpuReader(
            a_card(processes=[GpuProcess(pid, MiB(8000), "compute", "llama-server", None)])
        )
        gpu.draws_j = STEP_J
        ctx = BenchBox(tmp_path, gpu=gpu).context()
        yield Life(ctx, replace(open_url(ctx, server.url), pids=(pid,)))


def asked(life: Life, *, at_once: int = 1) -> list[float | None]:
    texts = Texts(prompt_book(life.ctx), 1)
    found = life.ask_all(*texts.of_class(RequestClass(1.0, "code", 0, 200, 30, at_once), "one"))
    assert [one.sample.problem for one in found] == [None] * at_once
    if at_once == 1:
        assert found[0].sample.energy_j == STEP_J * (len(found[0].looks) - 1)
    return [one.sample.energy_j for one in found]


def test_a_request_takes_what_the_cards_counter_gained_meanwhile(life: Life) -> None:
    (energy_j,) = asked(life)

    assert energy_j


def test_what_several_at_once_take_together_is_nobodys_own(life: Life) -> None:
    assert asked(life, at_once=2) == [None, None]


def test_a_server_that_is_known_by_its_address_alone_tells_no_energy(life: Life) -> None:
    life.target = replace(life.target, pids=())
    texts = Texts(prompt_book(life.ctx), 1)

    (found,) = life.ask_all(*texts.of_class(RequestClass(1.0, "code", 0, 200, 30), "one"))

    assert found.sample.energy_j is None
