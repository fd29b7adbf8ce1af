"""What a person, or another command, does with the server while tunerd waits for something."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.fault.fuse import Fuse, Step, full_disk
from tests.fault.fuse import Life as Process
from tests.fault.scenarios import deploy, locked_swap
from tests.fault.world import BROKEN, ENGINE, UNIT, World
from tests.support.fake_gpu import FakeGpuReader, SlowGpuReader
from tests.support.fakes import Invocation, Life
from tunerd.errors import JobCanceled, LeaseEnded, RolledBack, ServiceError, Stranded, TunerdError
from tunerd.machine.files import lock
from tunerd.production.gate import is_given_up
from tunerd.production.lease import hold
from tunerd.production.recover import recover
from tunerd.production.rollback import rollback
from tunerd.production.swap import swap
from tunerd.result import Progress, ignore_progress
from tunerd.tryout.local_service import Ending

OLD, OTHER = "/bin/cat", "/bin/ls"
WAITS = "until the port is free again"
TAKEN = Life(
    prints=("OSError: [Errno 98] Address already in use",), ends_after_s=0.0, ending=Ending(code=1)
)


def a_text(
    world: World, program: str = OLD, *, restart: str = "no", after_s: int = 5, starts: int = 9
) -> bytes:
    service = f"Restart={restart}\nRestartSec={after_s}"
    return world.text(Path(program).name, program=program, service=service, starts=starts)


class Once:
    """Serves at its first start, and then finds its port taken; from one on, if any, it serves again."""

    def __init__(self, world: World, *, code: int = 1, again_at: float = float("inf")) -> None:
        self.serve = world.manager.programs[ENGINE]
        self.starts, self.again_at = 0, again_at
        self.taken = replace(TAKEN, ending=Ending(code=code))
        world.manager.programs[OLD] = self.start

    def start(self, invocation: Invocation) -> Life:
        self.starts += 1
        serves = self.starts == 1 or self.starts >= self.again_at
        return self.serve(invocation) if serves else self.taken


def once(text: str, act: Callable[[], object]) -> Callable[[Progress], None]:
    """Acts when this is told for the first time."""
    acts = iter([act])

    def on(told: Progress) -> None:
        if text in told.text:
            next(acts, lambda: None)()

    return on


def measured(world: World, on: Callable[[Progress], None], *, ran: bool = False) -> str:
    """What became of the server after a measurement."""
    ctx = replace(world.context(), progress=on)
    with hold(ctx, purpose="bench x", budget_s=60.0, ran=ran) as held:
        on(Progress("measuring"))
    return held.afterwards


@pytest.mark.parametrize("what", ["a swap's way back", "the end of a measurement"])
def test_a_server_that_is_stopped_while_its_port_is_waited_for_stays_stopped(
    world: World, what: str
) -> None:
    """Its manager was between two starts, and would have tried again as well."""
    server = Once(world)
    world.put(a_text(world, restart="on-failure", after_s=60))
    on = once(WAITS, lambda: world.manager.stop(UNIT))
    if what == "the end of a measurement":
        assert "somebody stopped it just now" in measured(world, on)
    else:
        with pytest.raises(RolledBack, match="not swapped"):
            deploy(replace(world.context(), progress=on), world, "new", program=BROKEN)
    assert not world.manager.state(UNIT).runs
    starts = server.starts
    world.clock.advance(120)
    assert server.starts == starts


@pytest.mark.parametrize("what", ["a swap's way back", "the end of a measurement"])
def test_a_server_whose_failed_start_counts_as_a_good_end_was_stopped_by_nobody(
    world: World, what: str
) -> None:
    """As behind a pipe, or with `SuccessExitStatus=`."""
    Once(world, code=0, again_at=4)
    world.put(a_text(world, restart="on-failure"))
    if what == "the end of a measurement":
        assert measured(world, lambda _: None) == "serves again"
    else:
        with pytest.raises(RolledBack):
            deploy(world.context(), world, "new", program=BROKEN)
    assert world.serving_alias() == "cat"


def test_what_is_deployed_while_the_port_is_waited_for_is_not_started_again(world: World) -> None:
    Once(world)
    other: list[Invocation] = []
    serve = world.manager.programs[ENGINE]

    def start(invocation: Invocation) -> Life:
        other.append(invocation)
        return serve(invocation)

    world.manager.programs[OTHER] = start
    world.put(a_text(world))

    def change() -> None:
        ctx = world.context()
        with lock(ctx.paths.lock, purpose="apply", since="now"):
            swap(ctx, world.request(a_text(world, OTHER), alias="ls"))

    assert measured(world, once(WAITS, change)) == "serves again"
    assert (world.serving_alias(), len(other)) == ("ls", 1)


def test_a_server_is_not_started_again_while_somebody_holds_what_changes_it(world: World) -> None:
    """Who had just taken the lock had not noted so, and the note was still of the measurement itself."""
    server = Once(world)
    world.put(a_text(world))
    path, starts = world.context().paths.lock, [0]
    with contextlib.ExitStack() as theirs:

        def take() -> None:
            starts[0] = server.starts
            theirs.enter_context(lock(path, purpose="apply", since="now"))

        with pytest.raises(Stranded):
            measured(world, once(WAITS, take))
    assert server.starts == starts[0]


def test_a_stop_that_meets_the_start_of_a_server_that_comes_back_is_respected(world: World) -> None:
    Once(world)
    world.put(a_text(world))

    def cancel() -> None:
        world.manager.errors["restart"] = [JobCanceled("somebody stopped it")]

    assert "somebody stopped it just now" in measured(world, once(WAITS, cancel))


@pytest.mark.parametrize("ran", [True, False])
def test_nothing_is_measured_where_the_server_was_stopped_since_its_cost_was_told(
    world: World, ran: bool
) -> None:
    """It was started at the end, since it had run when the wait for its requests began."""
    world.put(a_text(world, ENGINE))
    world.servers[-1].behaviour.slots_are_busy = True
    on = once("waiting for ", lambda: world.manager.stop(UNIT))
    if ran:
        with pytest.raises(LeaseEnded, match="ended before it began"):
            measured(world, on, ran=True)
    else:
        assert measured(world, on) == "does not run, as before"
    assert not world.manager.state(UNIT).runs


def test_a_server_that_was_stopped_while_the_cards_were_looked_at_stays_stopped(
    world: World,
) -> None:
    """NVML takes seconds where nothing has the card open: the measurement's end started what somebody had stopped."""
    world.put(a_text(world, ENGINE))
    looks = list[float]()

    def meanwhile() -> None:
        looks.append(world.clock.now_s())
        if len(looks) == 2:
            world.manager.stop(UNIT)

    cards = SlowGpuReader(FakeGpuReader(), meanwhile)
    with hold(replace(world.context(), gpu=cards), purpose="bench x", budget_s=60.0) as held:
        assert not held.restores
    assert not world.manager.state(UNIT).runs


@pytest.mark.parametrize("is_before", [True, False])
def test_a_swap_does_not_start_what_was_stopped_since_it_was_agreed_to(
    world: World, is_before: bool
) -> None:
    """While engines were kept, or requests waited for."""
    world.put(world.text("one"))
    if is_before:
        world.manager.stop(UNIT)
    world.servers[-1].behaviour.slots_are_busy = True
    ctx = replace(world.context(), progress=once("requests", lambda: world.manager.stop(UNIT)))
    text = a_text(world, ENGINE)
    with (
        lock(ctx.paths.lock, purpose="promote", since="now"),
        pytest.raises(TunerdError, match="was stopped meanwhile"),
    ):
        swap(ctx, replace(world.request(text, alias="new"), drain=True, ran=is_before))
    assert not world.manager.state(UNIT).runs
    assert world.standing == world.text("one")


def test_a_server_that_was_started_again_while_a_removal_waited_comes_back_after_a_kill(
    world: World,
) -> None:
    """The stop of the removal was taken for one by somebody: it was not of the start that served when it began to wait."""
    deploy(world.context(), world, "old")
    world.servers[-1].behaviour.slots_are_busy = True
    process = Process(world.paths.lock)

    def again() -> None:
        world.manager.reset_failed(UNIT)
        world.manager.restart(UNIT)

    def units(step: Step) -> None:
        if step.text == "disable":
            process.die(step)

    fuse = Fuse(0, units, until=10**6)
    ctx = replace(world.context(fuse), progress=once("requests", again))
    process.live(lambda: rollback(ctx, to=None, drain=True, confirm=lambda _: None))
    assert process.died_before is not None, process.error
    assert not world.manager.state(UNIT).runs

    recover(world.context())

    assert world.serving_alias() == "old"


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_stop_that_takes_a_while_is_a_stop_also_where_it_ends_with_a_kill(
    world: World, is_waited_for: bool
) -> None:
    """As of every server with a request under way: the swap started it, and cut `systemctl stop` short."""
    serve, obeys_s = world.manager.programs[ENGINE], iter([float("inf")])
    world.manager.programs[ENGINE] = lambda one: replace(
        serve(one), obeys_after_s=next(obeys_s, 0.0)
    )
    world.put(world.text("one"))
    world.servers[-1].behaviour.slots_are_busy = True

    def stop() -> None:
        with contextlib.suppress(ServiceError):
            world.manager.stop(UNIT, timeout_s=100.0 if is_waited_for else 0.1)
        world.servers[-1].close()  # it takes no more requests from then on

    ctx = replace(world.context(), progress=once("requests", stop))
    with (
        lock(ctx.paths.lock, purpose="promote", since="now"),
        pytest.raises(TunerdError, match="was stopped meanwhile"),
    ):
        swap(ctx, replace(world.request(a_text(world, ENGINE), alias="new"), drain=True))
    assert world.manager.state(UNIT).active_state == "failed"


@pytest.mark.parametrize("change", ["deploy", "remove", "measure"])
def test_a_server_may_take_as_long_to_stop_as_the_settings_allow(world: World, change: str) -> None:
    """A stream that was waited for failed a swap after seven minutes in which nothing served, a removal and a measurement after two."""
    serve = world.manager.programs[ENGINE]
    world.manager.programs[OLD] = lambda one: replace(serve(one), obeys_after_s=500.0)
    text = partial(
        world.text, service="TimeoutStopSec=600", starts=2
    )  # of a swap that of the new one counts
    world.put(text("old", program=OLD))

    if change == "measure":
        assert measured(world, ignore_progress) == "serves again"
    elif change == "remove":
        locked_swap(world.context(), world.request(None, alias=None))
        assert world.standing is None
    else:
        locked_swap(world.context(), world.request(text("new"), alias="new"))
        assert world.serving_alias() == "new"


def test_an_edit_that_does_not_start_is_told_by_the_measurement_that_put_it_into_force(
    world: World,
) -> None:
    """It was taken for a change by somebody who looks after the server."""

    def edit() -> None:
        world.unit_path.write_bytes(a_text(world, BROKEN))
        world.manager.reload()  # as each candidate does

    world.put(a_text(world, ENGINE))
    with pytest.raises(Stranded):
        measured(world, once("measuring", edit))


@pytest.mark.parametrize("what", ["a measurement", "an apply that failed"])
def test_a_server_that_was_given_up_still_is_after(world: World, what: str) -> None:
    """Nobody started it again every quarter of an hour from then on."""
    is_broken = [False]
    serve = world.manager.programs[ENGINE]
    dies = Life(prints=("CUDA error: out of memory",), ends_after_s=1.0, ending=Ending(code=1))
    world.manager.programs[OLD] = lambda one: dies if is_broken[0] else serve(one)
    world.put(a_text(world, restart="on-failure", starts=4))
    is_broken[0] = True
    world.manager.end_main(UNIT, Ending(code=1))
    world.clock.advance(120)
    assert is_given_up(world.context(), world.manager.state(UNIT))

    if what == "a measurement":
        assert measured(world, lambda _: None) == "does not run, as before"
    else:
        with pytest.raises(RolledBack):
            deploy(world.context(), world, "new", program=BROKEN)
        world.clock.advance(120)

    assert is_given_up(world.context(), world.manager.state(UNIT))


def test_a_server_of_which_nobody_can_say_who_ended_it_may_have_been_stopped(world: World) -> None:
    """It would be started every quarter of an hour against the will of whoever stopped it."""
    world.put(a_text(world, ENGINE))
    state = replace(world.manager.state(UNIT), active_state="failed", n_restarts=4)
    assert is_given_up(world.context(), state)
    assert not is_given_up(world.context(), replace(state, invocation_id=None))
    deaf = world.context(Fuse(0, full_disk, until=9), asks=True)
    assert not is_given_up(deaf, state)
