"""A drift as the daemon deals with it: counters find it, the server's own log decides, restarts are few."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_guarding import UNIT, World
from tests.support.readings import an_engine, served
from tunerd.daemon.guarding import Guarding
from tunerd.system.notify import Notifier

DECAYS = (60.0, 58.0, 55.0, 39.0, 34.0, 30.0)
CONFIRMED = {"floor_tok_s": 40.0, "floor_acceptance": None, "deepest_tokens": 2000}


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    guards = made.ctx.settings.guards.model_copy(update={"drift": "act"})
    made.ctx = replace(made.ctx, settings=made.ctx.settings.model_copy(update={"guards": guards}))
    findings = {"confirmed": CONFIRMED, "replanned": None, "engine_sha256": None}
    (made.ctx.paths.state_dir / "guards.json").write_text(json.dumps(findings))
    made.guards = Guarding(made.ctx, Notifier({}), made.told.append, lambda: None)
    return made


def work(world: World, depth: int, *speeds: float) -> None:
    """Requests one after the other, each logged and counted at the look after it."""
    for task, tok_s in enumerate(speeds):
        head = f"slot print_timing: id  0 | task {task} | "
        for line in (
            f"slot launch_slot_: id  0 | task {task} | processing task, is_child = 0",
            f"{head}prompt eval time = 30.00 ms / {depth} tokens (0.1 ms per token, 8000.00 tokens per second)",
            f"{head}       eval time = {600_000 / tok_s:.2f} ms / 600 tokens (1 ms per token, 1 tokens per second)",
            f"slot release: id  0 | task {task} | stop processing: n_tokens = {depth + 599}, truncated = 0",
        ):
            world.manager.print_line(UNIT, line)
        life = world.manager.state(UNIT).invocation_id
        world.look(engine=an_engine(life=life, served=served(600, tok_s)))


def life(world: World) -> str | None:
    return world.manager.state(UNIT).invocation_id


def test_a_server_that_decays_is_restarted(world: World) -> None:
    before = life(world)
    work(world, 200, *DECAYS)
    assert world.kinds == ["drift"]
    assert "no deeper than those: 33.9 tok/s" in world.told[0].text
    assert life(world) != before


def test_a_conversation_that_grows_deep_is_left_alone(world: World) -> None:
    before = life(world)
    work(world, 20_000, *DECAYS)
    assert (world.kinds, life(world)) == ([], before)


def test_one_that_decays_again_and_again_is_restarted_no_oftener_than_one_that_hangs(
    world: World,
) -> None:
    lives = {life(world)}
    for _ in range(5):
        work(world, 200, *DECAYS)
        lives.add(life(world))
    assert len(lives) == 1 + world.ctx.settings.guards.hang_restarts_per_hour
    world.clock.advance(3600.0)
    work(world, 200, 30.0)
    assert life(world) not in lives, "an hour later"
