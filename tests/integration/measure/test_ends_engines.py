"""That a model may end its answers, on real builds: ik keeps `ignore_eos` for the requests that come after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from tests.support import needs
from tests.support.bench_box import BenchBox
from tests.support.real_box import options
from tests.support.server_process import Server, serving
from tunerd.machine.clock import SystemClock
from tunerd.measure.answer import Sample
from tunerd.measure.life import Life, Texts, prompt_book
from tunerd.measure.request import Suite, warm_up
from tunerd.measure.target import Target, open_url
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.box import live_turn

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
ENDS_AT_ONCE = ("--logit-bias", "2+100")
ENDS_SOON = ("--logit-bias", "2+17.5", "--spec-type", "mtp:n_max=4,p_min=0")
N_ASKED = 40


@pytest.fixture(params=["ik-2026-06-02", "ik-2026-08", "mainline-2026-08-18"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """One whose model ends every answer with its first token, for its own command line says so."""
    words = [str(needs.engine(request.param)), *options(tmp_path), *ENDS_AT_ONCE]
    with serving(words, tmp_path / "log") as found:
        assert chatted(found) == 1
        yield found


def chatted(server: Server) -> int:
    """How many tokens of answer somebody else gets."""
    body = {"messages": [{"role": "user", "content": "tell me of code"}], "max_tokens": N_ASKED}
    tokens: int = server.post("/v1/chat/completions", body)["usage"]["completion_tokens"]
    return tokens


def a_life(server: Server, folder: Path, *, is_ours: bool) -> tuple[Life, Texts]:
    ctx = BenchBox(folder, clock=SystemClock()).context()
    target: Target = open_url(ctx, server.url)
    life = Life(ctx, replace(target, scrape_s=0.0) if is_ours else target)
    return life, Texts(prompt_book(ctx), seed=1)


def test_what_measures_a_server_leaves_the_end_of_other_answers_alone(
    server: Server, tmp_path: Path
) -> None:
    life, texts = a_life(server, tmp_path, is_ours=False)
    life.ask(warm_up(Suite.MTP, "code"), texts.stock("it").take("code"))
    assert chatted(server) == 1


def test_answers_of_a_candidate_end_by_themselves_behind_one_that_was_held(
    server: Server, tmp_path: Path
) -> None:
    life, texts = a_life(server, tmp_path, is_ours=True)
    one = RequestClass(1.0, "code", 0, 60, N_ASKED)
    lengths = []
    for number, is_held in enumerate((False, True, False)):
        asked = life.ask_all(*texts.of_class(one, f"text {number}", is_held=is_held))
        lengths.append(asked[0].sample.n_predicted)
    assert lengths == [1, N_ASKED, 1]


def test_answers_of_a_class_that_all_end_early_tell_its_turn_together_where_none_can_be_held(
    tmp_path: Path,
) -> None:
    workload = Workload((RequestClass(1.0, "code", 0, 60, N_ASKED),))
    words = [str(needs.engine("ik-2026-08")), *options(tmp_path), *ENDS_SOON]
    with serving(words, tmp_path / "log") as server:
        life, texts = a_life(server, tmp_path, is_ours=False)
        short: dict[int, list[Sample]] = {}
        turns = [live_turn(life, texts, workload, f"live {n}", short)[0] for n in range(3)]
    walls = [one.client.wall_ms / 1000 for one in short[0] if one.client]
    assert len(walls) > len(turns), "each ended early"
    assert turns[-1] is not None
    assert turns[-1] > fmean(walls)
