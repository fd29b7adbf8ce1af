"""Which of several earlier units a rollback without a name goes back to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.scenarios import deploy
from tests.fault.world import BROKEN, World, a_generation, a_world
from tunerd.errors import RolledBack
from tunerd.production.rollback import find_target
from tunerd.units.generations import Ending, Outcome
from tunerd.words import sha256


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


def test_what_a_failed_swap_had_put_aside_is_not_what_served_before(world: World) -> None:
    first = world.text("first")
    world.put(first)
    deploy(world.context(), world, "second")
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "third", program=BROKEN)
    world.put(world.text("by hand"))

    assert find_target(world.context(), None).text == first


def test_where_history_is_silent_the_newest_copy_is_taken(world: World) -> None:
    world.put(world.text("now"))
    folder = world.unit_path.parent
    for alias in ("zold", "middle", "new"):
        (folder / f"{world.unit_path.name}.pre-{alias}").write_bytes(world.text(alias))

    assert find_target(world.context(), None).text == world.text("new")


def test_what_another_unit_replaced_is_none_of_this_ones_business(world: World) -> None:
    mine = world.text("mine")
    world.put(mine)
    deploy(world.context(), world, "second")
    ctx, theirs, text = world.context(), world.text("theirs"), world.text("their new one")
    made = a_generation(reason="apply", unit_sha256=sha256(text))
    ctx.generations.create(
        replace(made, number=ctx.generations.next_number(), unit="other.service",
                replaced_backup="other.service.pre-x", replaced_absent=False),
        text, theirs,
    )  # fmt: skip
    ctx.generations.end(made.number or 2, Ending(Outcome.SERVING, 0.0, None, None, None))

    assert find_target(ctx, None).text == mine
