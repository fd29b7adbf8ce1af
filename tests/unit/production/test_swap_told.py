"""What a swap tells: while it runs, in history, and to `verify` and `status` afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.scenarios import deploy, go_back
from tests.fault.world import UNIT, World
from tunerd.cli.deploy import render_status
from tunerd.errors import DeployError, NoSupervisor, RolledBack
from tunerd.production.status import status
from tunerd.result import Progress
from tunerd.units.generations import Outcome


def _add_drop_in(world: World, name: str) -> Path:
    path = world.paths.unit_dir / f"{UNIT}.d" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("[Service]\nNice=1\n")
    world.manager.reload()
    return path


def test_a_drop_in_that_a_swap_found_is_no_drift_after_it_and_a_later_one_is(world: World) -> None:
    first = _add_drop_in(world, "a.conf")
    deploy(world.context(), world, "old")
    assert world.verify() == 0, "it was there before the first unit"
    deploy(world.context(), world, "new")
    second = _add_drop_in(world, "b.conf")
    assert world.verify() == 6

    go_back(world.context())

    assert world.verify() == 0
    newest = next(world.context().generations.entries())
    assert newest.ending.drop_ins == (str(first), str(second))
    _add_drop_in(world, "c.conf")
    assert world.verify() == 6


def test_going_back_to_nothing_is_not_said_to_serve(world: World) -> None:
    deploy(world.context(), world, "old")

    go_back(world.context())

    assert world.outcomes() == [Outcome.REMOVED, Outcome.SERVING]
    told = status(world.context()).payload
    assert (told["exists"], told["outcome"]) == (False, "removed")
    shown = "\n".join(render_status(told))
    assert "nothing to start" in shown
    assert "serving" not in shown
    go_back(world.context())
    assert world.serving_alias() == "old", "twice returns to where one was"


def test_every_step_of_a_swap_is_told(world: World) -> None:
    told: list[Progress] = []

    deploy(replace(world.context(), progress=told.append), world, "old")

    assert [p.step for p in told if p.step is not None] == sorted(p.step or 0 for p in told)
    assert {p.step for p in told} == set(range(1, 9))
    assert {p.steps for p in told} == {8}


def _no_supervisor() -> NoSupervisor:
    return NoSupervisor("tunerd's supervisor does not start", cause="no folder for its socket")


def test_a_manager_that_is_not_ready_is_told_before_anything_is_touched(world: World) -> None:
    world.manager.errors["check_ready"] = [_no_supervisor()]

    with pytest.raises(DeployError) as caught:
        deploy(world.context(), world, "new")

    assert caught.value.exit_code == 1
    assert caught.value.state == "nothing was touched"
    assert world.standing is None
    assert world.outcomes() == []


def test_going_back_to_nothing_needs_no_supervisor(world: World) -> None:
    world.manager.errors["restart"] = [_no_supervisor()]
    world.manager.errors["reload"] = [_no_supervisor()]
    deployed = world.context()

    with pytest.raises(RolledBack) as caught:
        deploy(deployed, world, "new")

    assert "as before" in (caught.value.state or "")
    assert world.standing is None
    assert world.leftovers() == []
    assert world.recover() is None
