"""A person may take an hour to answer: meanwhile rollback, guards and recovery work."""

from __future__ import annotations

import pytest

from tests.fault.scenarios import deploy
from tests.fault.world import World
from tunerd.errors import DeployError
from tunerd.machine.files import is_locked
from tunerd.production.rollback import Target, rollback
from tunerd.units.text import demand_as_shown, shown_hash


@pytest.fixture(autouse=True)
def _deployed_twice(world: World) -> None:
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")


def test_nothing_is_locked_while_a_person_reads_where_a_rollback_leads(world: World) -> None:
    seen: list[bool] = []

    def ask(target: Target) -> None:
        seen.append(is_locked(world.paths.lock))
        assert "-ExecStart" in target.diff

    rollback(world.context(), to=None, drain=False, ask=ask)

    assert seen == [False]
    assert world.serving_alias() == "old"


@pytest.mark.parametrize("is_deployed", [True, False])
def test_who_agreed_to_something_else_than_what_there_is_by_now_is_told(
    world: World, *, is_deployed: bool
) -> None:
    newest = world.text("newest")

    def ask(_target: Target) -> None:
        if is_deployed:  # somebody else was quicker
            deploy(world.context(), world, "newest")
        else:
            world.unit_path.write_bytes(newest)

    with pytest.raises(DeployError, match="no longer what was shown"):
        rollback(world.context(), to=None, drain=False, ask=ask)

    assert world.standing == newest


def test_what_was_shown_is_the_difference_or_what_stands_for_it() -> None:
    demand_as_shown("-a\n+b", "-a\n+b")
    demand_as_shown("-a\n+b", shown_hash("-a\n+b"))
    with pytest.raises(DeployError):
        demand_as_shown("-a\n+b", shown_hash("-a\n+c"))
