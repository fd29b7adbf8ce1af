"""A drift as the daemon deals with it: counters find it, the server's own log decides, restarts are few."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.watch.test_guarding import TAKES_BACK, UNIT, World, watched
from tests.support.readings import an_engine, served
from tunerd.engine.log import Tally
from tunerd.measure.answer import Counters
from tunerd.units.systemd import Notifier
from tunerd.watch.guarding import Guarding

DECAYS = (60.0, 58.0, 55.0, 39.0, 34.0, 30.0)
CONFIRMED = {"floor_tok_s": 40.0, "floor_acceptance": None, "deepest_tokens": 2000}


class Counting(World):
    """Its server counts what it generates in each of its lives."""

    life: str | None = None
    total = Tally(0, 0.0)


@pytest.fixture
def world(tmp_path: Path) -> Counting:
    made = Counting(tmp_path)
    guards = made.ctx.settings.guards.model_copy(update={"drift": "act"})
    made.ctx = replace(made.ctx, settings=made.ctx.settings.model_copy(update={"guards": guards}))
    findings = {"confirmed": CONFIRMED, "replanned": None, "engine_sha256": None}
    (made.ctx.paths.state_dir / "guards.json").write_text(json.dumps(findings))
    made.guards = Guarding(made.ctx, Notifier({}), made.told.append, lambda: None)
    return made


def work(world: Counting, depth: int, *speeds: float, forged: int = 0) -> None:
    """Requests one after the other, each logged and counted at the look after it.

    At each look somebody has written the lines of so many more.
    """
    for task, tok_s in enumerate(speeds):
        head = f"slot print_timing: id  0 | task {task} | "
        for line in (
            f"slot launch_slot_: id  0 | task {task} | processing task, is_child = 0",
            f"{head}prompt eval time = 30.00 ms / {depth} tokens (0.1 ms per token, 8000.00 tokens per second)",
            f"{head}       eval time = {600_000 / tok_s:.2f} ms / 600 tokens (1 ms per token, 1 tokens per second)",
            f"slot release: id  0 | task {task} | stop processing: n_tokens = {depth + 599}, truncated = 0",
        ):
            for _ in range(1 + forged):
                world.manager.print_line(UNIT, line)
        life = world.manager.state(UNIT).invocation_id
        if world.life != life:
            world.life, world.total = life, Tally(0, 0.0)
        world.total = Tally(world.total.n + 600, world.total.seconds + 600 / tok_s)
        counters = Counters(None, world.total.n, 0, 0, predicted_s=world.total.seconds)
        world.look(
            engine=an_engine(life=life, served=served(600, tok_s, seconds=10.0), counters=counters)
        )


def life(world: Counting) -> str | None:
    return world.manager.state(UNIT).invocation_id


def test_a_server_that_decays_is_restarted(world: Counting) -> None:
    before = life(world)
    work(world, 200, *DECAYS)
    assert world.kinds == ["drift"]
    assert "no deeper than those: 33.9 tok/s" in world.told[0].text
    assert life(world) != before


def test_lines_that_somebody_else_wrote_restart_nothing(world: Counting) -> None:
    before = life(world)
    work(world, 200, *DECAYS, forged=1)
    assert (world.kinds, life(world)) == (["drift"], before)
    assert "is not known" in world.told[0].text


def test_a_conversation_that_grows_deep_is_left_alone(world: Counting) -> None:
    before = life(world)
    work(world, 20_000, *DECAYS)
    assert (world.kinds, life(world)) == ([], before)


def test_one_that_decays_again_and_again_is_restarted_no_oftener_than_one_that_hangs(
    world: Counting,
) -> None:
    lives = {life(world)}
    for _ in range(5):
        work(world, 200, *DECAYS)
        lives.add(life(world))
    assert len(lives) == 1 + world.ctx.settings.guards.hang_restarts_per_hour
    world.clock.advance(3600.0)
    work(world, 200, 30.0)
    assert life(world) not in lives, "an hour later"


BASIS = {"slowest_tok_s": 50.0, "deepest_tokens": 2000, "n_samples": 9, "previous_tok_s": None}


@pytest.mark.parametrize(
    ("depth", "speeds", "forged", "is_taken"),
    [
        (200, (30.0,) * 4, 0, True),
        (200, (30.0,) * 2, 0, False),  # two stretches are not enough
        (200, (40.0,) * 6, 0, False),  # a quarter less is let pass
        (20_000, (30.0,) * 6, 0, False),  # deep conversations are slower for reasons of their own
        (200, (30.0,) * 6, 1, False),  # lines that the counters do not bear out
    ],
)
def test_a_new_server_that_is_slower_than_measured_is_taken_back(
    world: Counting, depth: int, speeds: tuple[float, ...], forged: int, is_taken: bool
) -> None:
    path = watched(world)
    findings = {"generation": 3, "basis": BASIS, "confirmed": None, "replanned": None,
                "engine_sha256": None}  # fmt: skip
    (world.ctx.paths.state_dir / "guards.json").write_text(json.dumps(findings))
    world.look()
    work(world, depth, *speeds, forged=forged)
    reason = json.loads(path.read_text())["reason"]
    assert bool(reason) is is_taken
    assert (world.manager.runtime_unit_dir / TAKES_BACK).exists() is is_taken
    if is_taken:
        assert "slower in service than measured: 30.0, 30.0, 30.0 tok/s" in reason
        assert "measured with 50.0" in reason


def test_a_new_server_of_which_nothing_was_measured_is_not_judged_by_its_speed(
    world: Counting,
) -> None:
    path = watched(world)
    world.look()
    work(world, 200, *(1.0,) * 6)
    assert json.loads(path.read_text())["reason"] == ""
