"""Production comes back after a measurement although its port is not free yet."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import ENGINE, UNIT, World
from tests.support.fakes import Invocation, Life, Program
from tunerd.engine.server import Address
from tunerd.errors import Stranded
from tunerd.production.gate import PortTurns
from tunerd.production.lease import hold, outlook
from tunerd.production.measurement import measuring, read_measurement, write_measurement
from tunerd.result import Progress
from tunerd.tryout.local_service import Ending
from tunerd.units.manager import PORT_LIMIT_S, LeaseRecord, LeaseSpec

TAKEN = "E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1"
ONE, OTHER = Path("/opt/one/llama-server"), Path("/opt/other/llama-server")


@pytest.fixture(autouse=True)
def _served(world: World) -> None:
    world.put(world.text("one"))


def fails_until(world: World, at_s: float, says: str) -> None:
    """Its next starts end at once, until the clock shows this."""
    serves: Program = world.manager.programs[ENGINE]

    def program(invocation: Invocation) -> Life:
        if world.clock.monotonic_s() >= at_s:
            return serves(invocation)
        return Life(prints=(says,), ends_after_s=0.1, ending=Ending(code=1))

    world.manager.programs[ENGINE] = program


def restarting(world: World) -> bytes:
    return world.text("one").replace(
        b"StartLimitBurst=1\n", b"StartLimitBurst=9\n"
    ).replace(b"Type=exec\n", b"Type=exec\nRestart=on-failure\nRestartSec=5\n")  # fmt: skip


def test_a_start_that_fails_for_a_port_of_the_past_is_repeated(world: World) -> None:
    with hold(world.context(), purpose="bench x", budget_s=600):
        fails_until(world, world.clock.monotonic_s() + 60, TAKEN)

    assert world.serving_alias() == "one"


def test_a_port_that_stays_taken_ends_in_words_for_a_person(world: World) -> None:
    with (
        pytest.raises(Stranded, match="does not serve"),
        hold(world.context(), purpose="bench x", budget_s=600),
    ):
        fails_until(world, float("inf"), TAKEN)


def test_a_unit_that_its_manager_starts_again_is_waited_for(world: World) -> None:
    world.put(restarting(world))
    with hold(world.context(), purpose="bench x", budget_s=600):
        fails_until(world, world.clock.monotonic_s() + 12, "error: it fell over")

    assert world.serving_alias() == "one"
    assert world.manager.state(UNIT).n_restarts == 3, "only its manager started it"


def test_a_unit_that_nothing_starts_again_is_not_waited_for(world: World) -> None:
    began_s = world.clock.monotonic_s()
    with (
        pytest.raises(Stranded, match="does not serve"),
        hold(world.context(), purpose="bench x", budget_s=600),
    ):
        fails_until(world, float("inf"), "error: it fell over")
    assert world.clock.monotonic_s() - began_s < 30


def test_a_port_that_is_known_is_waited_for_and_the_outlook_says_how_long(world: World) -> None:
    ctx = world.context()
    ahead = outlook(ctx, measuring_s=60, programs=[Path(ENGINE), OTHER])

    assert ahead.port_wait_s == 75.0
    assert "once it is free again, up to 75 s later" in ahead.text
    same = outlook(ctx, measuring_s=60, programs=[Path(ENGINE)])
    assert same.port_wait_s == 0
    assert "free again" not in same.text
    assert outlook(ctx, measuring_s=60).text == same.text


class Holder:
    """A port that nobody listens on and nobody else can bind; free from the n-th word on."""

    def __init__(self, n_words: int) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self.socket.getsockname()[1])
        self.said: list[Progress] = []
        self._n_words = n_words

    def __call__(self, progress: Progress) -> None:
        self.said.append(progress)
        if len(self.said) == self._n_words:
            self.socket.close()


def test_another_program_waits_until_it_can_bind_but_no_longer_than_the_kernel_remembers(
    world: World,
) -> None:
    for n_words, n_said in ((3, 3), (1000, PORT_LIMIT_S)):
        holder = Holder(n_words)
        ctx = replace(world.context(), progress=holder)
        PortTurns(ctx, lambda: True, ONE).wait_for(OTHER, holder.address)
        holder.socket.close()
        assert [round(one.left_s or 0) for one in holder.said[:3]] == [75, 74, 73]
        assert len(holder.said) == n_said


@pytest.mark.parametrize(
    ("program", "is_held", "listens"),
    [(ONE, True, False), (OTHER, False, False), (OTHER, True, True)],
)
def test_nobody_waits_for_their_own_port_nor_for_one_that_is_listened_on_nor_without_a_lease(
    world: World, program: Path, *, is_held: bool, listens: bool
) -> None:
    holder = Holder(1000)
    if listens:
        holder.socket.listen()
    turns = PortTurns(replace(world.context(), progress=holder), lambda: is_held, ONE)
    turns.wait_for(program, holder.address)
    holder.socket.close()

    assert holder.said == []
    assert turns.last == program, "it is its turn now"


def test_a_measurement_that_waits_for_the_port_at_its_end_still_holds_the_place(
    world: World,
) -> None:
    ctx = world.context()
    lease = world.manager.lease(
        LeaseSpec("0123456789ab", UNIT, restores=True, limit_s=600, why="x")
    )
    world.manager.reset_failed(UNIT)
    now_s = ctx.clock.now_s()
    write_measurement(
        ctx, LeaseRecord(lease.spec.id, UNIT, "bench x", 1, now_s, now_s + 600, restores=True)
    )
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        lease.restore_when_free(holder.getsockname())
        world.manager.drop_lease(lease)

        record = read_measurement(ctx)
        assert record is not None, "production is not merely stopped"
        assert measuring(ctx, record).text.endswith("starts once its port is free, within 75 s")
    world.clock.sleep(1.0)

    assert read_measurement(ctx) is None
    assert world.manager.state(UNIT).is_active
