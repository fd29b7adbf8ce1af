"""Swaps where the port of a server is not free at once, on the way there and on the way back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.scenarios import deploy
from tests.fault.world import BROKEN, World, a_world
from tests.support.fakes import Invocation, Life
from tunerd.actions.recover import recover
from tunerd.core.local_outcome import Ending
from tunerd.core.progress import Progress
from tunerd.errors import RolledBack, Stranded

OLD = "/bin/cat"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


def _old_that_cannot_bind_for(world: World, seconds: float, *, serves_first: bool = True) -> None:
    """An old server that serves, and once stopped cannot bind its port for so long."""
    serve = world.manager.programs["/bin/true"]
    first_s: list[float] = [] if serves_first else [0.0]

    def run(invocation: Invocation) -> Life:
        now_s = world.clock.monotonic_s()
        first_s.append(now_s)
        if len(first_s) == 1 or now_s - first_s[1] >= seconds:
            return serve(invocation)
        words = "OSError: [Errno 98] Address already in use"
        return Life(prints=(words,), ends_after_s=0.0, ending=Ending(code=1))

    world.manager.programs[OLD] = run
    if serves_first:
        world.put(world.text("old", program=OLD))


def test_a_port_in_the_last_minute_of_its_connections_is_waited_for(world: World) -> None:
    _old_that_cannot_bind_for(world, 58.0)
    told: list[Progress] = []

    with pytest.raises(RolledBack):
        deploy(replace(world.context(), progress=told.append), world, "new", program=BROKEN)

    assert world.serving_alias() == "old"
    assert world.leftovers() == []
    waits = [p for p in told if "port" in p.text]
    assert waits
    assert all(0 < (p.left_s or 0) <= 65 for p in waits)


def test_a_new_server_that_cannot_take_over_the_port_at_once_is_waited_for(world: World) -> None:
    deploy(world.context(), world, "old")
    _old_that_cannot_bind_for(world, 58.0, serves_first=False)
    told: list[Progress] = []

    deploy(replace(world.context(), progress=told.append), world, "new", program=OLD)

    assert world.serving_alias() == "new"
    assert world.leftovers() == []
    assert any("port" in p.text for p in told)


def test_a_port_that_stays_taken_though_nobody_listens_is_given_up(world: World) -> None:
    _old_that_cannot_bind_for(world, 200.0)
    began_s = world.clock.monotonic_s()

    with pytest.raises(Stranded) as caught:
        deploy(world.context(), world, "new", program=BROKEN)

    assert "port taken" in (caught.value.cause or "")
    assert 60 < world.clock.monotonic_s() - began_s < 90
    world.clock.advance(120.0)
    assert recover(world.context()).payload["serving"] is True
    assert world.serving_alias() == "old"


def test_recovery_waits_for_the_port_as_well(world: World) -> None:
    _old_that_cannot_bind_for(world, 120.0)
    with pytest.raises(Stranded):
        deploy(world.context(), world, "new", program=BROKEN)

    assert recover(world.context()).payload["serving"] is True
    assert world.leftovers() == []


def test_a_port_on_which_somebody_listens_is_not_waited_for(world: World) -> None:
    taken: list[socket.socket] = []

    def take_the_port() -> None:
        taken.append(socket.create_server(("127.0.0.1", world.port)))

    broken = Life(ends_after_s=0.5, ending=Ending(code=1), on_end=take_the_port)
    _old_that_cannot_bind_for(world, 200.0)
    world.manager.programs[BROKEN] = lambda _: broken
    began_s = world.clock.monotonic_s()

    with pytest.raises(Stranded) as caught:
        deploy(world.context(), world, "new", program=BROKEN)

    taken[0].close()
    assert "port taken" in (caught.value.cause or "")
    assert world.clock.monotonic_s() - began_s < 30
