"""One measurement at a time on a card, and another power limit within its lease, over the C stub of NVML: given back whatever ends it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.fault.fuse import Fuse, Life
from tests.fault.world import UNIT, World, a_world
from tests.support import fakes, nvml_stub
from tests.support.fake_gpu import FakeGpuReader, a_card, rtx_4070_super
from tests.support.forked import Forked
from tests.support.nvml_world import StubWorld, loading
from tests.support.waiting import LIMIT_S
from tunerd.app import Context
from tunerd.errors import Busy, HostError, ServiceError
from tunerd.machine.gpu import set_power_limit
from tunerd.production import power
from tunerd.production.lease import hold
from tunerd.production.measurement import clear_dead_measurements, has_leftovers
from tunerd.production.power import power_limit
from tunerd.production.recover import recover
from tunerd.units.manager import LeaseSpec

ID = "0123456789ab"
OWN_W, OTHER_W, THIRD_W = 220.0, 150.0, 180.0
_MOST_STEPS = 60
_SET = "nvmlDeviceSetPowerManagementLimit"


@dataclass
class Card:
    """A world of fakes in which units' programs set the limit of the stub's card."""

    world: World
    stub: StubWorld
    lease: fakes.FakeLease = field(init=False)

    def __post_init__(self) -> None:
        self.stub.show(rtx_4070_super())
        self.world.manager.programs[sys.executable] = self._program
        self.world.put(self.world.text("one"))
        self.world.manager.reset_failed(UNIT)
        self.lease = self.world.manager.lease(LeaseSpec(ID, UNIT, True, 600.0, "a sweep"))

    def _program(self, invocation: fakes.Invocation) -> fakes.Life:
        """As systemd runs it: a start that fails runs ExecStopPost= too, and so does every stop."""
        *_, verb, path = invocation.argv
        if verb == "restore":
            self._restore(path)
            return fakes.Life(ends_after_s=0.0)
        try:
            power.main(verb, Path(path))
        except HostError as error:
            self._restore(path)
            raise fakes.StartFailed(error.words) from error
        return fakes.Life(on_end=lambda: self._restore(path))

    @staticmethod
    def _restore(path: str) -> None:
        try:
            power.main("restore", Path(path))
        except HostError:
            return  # systemd goes on

    def context(self, fuse: Fuse | None = None) -> Context:
        return replace(self.world.context(fuse), gpu=self.stub.reader)

    @property
    def limit_w(self) -> float | None:
        gpus = self.stub.reader.read().gpus
        assert gpus
        return gpus[0].power_limit_w

    def left(self) -> list[str]:
        """What a measurement that is over may not leave; a transient unit has a file with the fake alone."""
        folders = (self.world.paths.runtime_dir, self.world.manager.runtime_unit_dir)
        names = [path.name for one in folders if one.is_dir() for path in one.iterdir()]
        return [name for name in names if name != "tunerd-power-restore.service"]

    def measure(self, ctx: Context) -> None:
        """Two limits, one after the other."""
        for watts in (OTHER_W, THIRD_W):
            with power_limit(ctx, ID, UNIT, watts):
                assert self.limit_w == watts
            assert self.limit_w == OWN_W


@pytest.fixture
def make(tmp_path: Path, nvml_library: Path) -> Iterator[Callable[[str], Card]]:
    """Makes cards, each in a world of its own; the newest is the one that pynvml sees."""
    worlds: list[World] = []
    with loading() as load:

        def made(name: str) -> Card:
            folder = tmp_path / f"{name}-card"
            folder.mkdir()
            stub = StubWorld(folder, nvml_library, load)
            with a_world(tmp_path / name) as world:
                worlds.append(world)
            return Card(world, stub)

        yield made
    for world in worlds:
        world.close()


@pytest.fixture
def card(make: Callable[[str], Card]) -> Card:
    return make("one")


@pytest.mark.parametrize(
    ("watts", "ends"), [(OTHER_W, None), (OTHER_W, KeyboardInterrupt()), (OWN_W, None)]
)
def test_a_limit_holds_for_the_body_alone_and_what_it_was_is_on_record_meanwhile(
    card: Card, watts: float, ends: BaseException | None
) -> None:
    ctx = card.context()

    with contextlib.suppress(KeyboardInterrupt), power_limit(ctx, ID, UNIT, watts):
        assert card.limit_w == watts
        record = ctx.files.read_json(ctx.paths.power)
        assert (record["before_w"], record["given_w"], record["lease"]) == (OWN_W, watts, ID)
        if ends is not None:
            raise ends

    assert (card.limit_w, card.left()) == (OWN_W, [])


@pytest.mark.parametrize(
    ("watts", "driver", "fails", "told"),
    [
        (99.0, [], (), "cannot be set to 99 W"),
        (240.5, [], (), "cannot be set to 240.5 W"),
        (OTHER_W, [], (nvml_stub.NO_PERMISSION,), "no permission"),
        (OTHER_W, [], (nvml_stub.NOT_SUPPORTED,), "does not support it"),
        (OTHER_W, [], (nvml_stub.GPU_IS_LOST,), "fallen off the bus"),
        (OTHER_W, ["power_step 20000"], (), "it is 140 W"),
    ],
)
def test_a_limit_that_the_driver_does_not_set_as_asked_leaves_the_one_that_was(
    card: Card, watts: float, driver: list[str], fails: tuple[int, ...], told: str
) -> None:
    card.stub.nvml.show(rtx_4070_super(), extra=driver)
    for code in fails:
        card.stub.nvml.fail(_SET, code)

    with pytest.raises(ServiceError) as refused, power_limit(card.context(), ID, UNIT, watts):
        raise AssertionError("it was never set")

    assert told in str(refused.value.words)
    assert (card.limit_w, card.left()) == (OWN_W, [])


def test_a_card_that_tells_no_limit_is_not_given_one(card: Card) -> None:
    card.stub.show(replace(rtx_4070_super(), power_limit_w=None))

    with pytest.raises(HostError, match="power limit cannot be read"):
        card.measure(card.context())

    assert card.left() == []


def test_a_limit_that_cannot_be_given_back_is_told_and_given_back_by_recover(card: Card) -> None:
    ctx = card.context()
    with pytest.raises(ServiceError) as told, power_limit(ctx, ID, UNIT, OTHER_W):
        card.stub.nvml.fail(_SET, nvml_stub.UNKNOWN)
    assert "nvidia-smi" in (told.value.hint or "")
    assert "-pl 220" in (told.value.hint or "")
    with pytest.raises(HostError, match="not restored"):
        card.measure(ctx)
    card.world.manager.drop_lease(card.lease)
    with pytest.raises(ServiceError, match="not restored"):
        recover(ctx)
    assert card.limit_w == OTHER_W
    assert has_leftovers(ctx)

    card.stub.nvml.failures.clear()
    card.stub.nvml.write()

    assert recover(ctx).payload["cleared"] == ["another power limit"]
    assert card.limit_w == OWN_W
    assert not has_leftovers(ctx)
    assert recover(ctx).payload["cleared"] == []


def test_a_unit_that_was_never_started_leaves_nothing(card: Card) -> None:
    card.world.manager.drop_lease(card.lease)

    with pytest.raises(ServiceError, match="not active"):
        card.measure(card.context())

    assert (card.limit_w, card.left()) == (OWN_W, [])
    assert card.world.serving_alias() == "one"


def test_a_limit_that_somebody_set_since_is_left_alone_and_what_was_measured_is_not_told_of_it(
    card: Card,
) -> None:
    ctx = card.context()
    uuid = rtx_4070_super().uuid or ""
    for watts, since_w in ((OTHER_W, THIRD_W), (THIRD_W, OTHER_W)):
        told = f"power limit to {since_w:g} W while {watts:g} W was measured"
        with pytest.raises(HostError, match=told), power_limit(ctx, ID, UNIT, watts):
            set_power_limit(uuid, since_w)

        assert (card.limit_w, card.left()) == (since_w, [])


def test_what_somebody_measures_now_keeps_its_limit(card: Card) -> None:
    ctx = card.context()
    with power_limit(ctx, ID, UNIT, OTHER_W):
        assert clear_dead_measurements(ctx, is_mine=True) == ()
        assert card.limit_w == OTHER_W


def test_killed_before_any_of_its_effects_the_limit_is_back_with_production(
    make: Callable[[str], Card],
) -> None:
    texts = []
    for number in range(_MOST_STEPS):
        card = make(f"{number}")
        life = Life(card.world.paths.lock)
        ctx = card.context(Fuse(number, life.die))
        life.live(lambda ctx=ctx, card=card: card.measure(ctx))  # type: ignore[misc]
        if life.died_before is None:
            assert life.error is None
            break
        where = f"killed before {number} ({life.died_before.text})"
        texts.append(life.died_before.text)
        card.world.manager.drop_lease(card.lease)
        assert card.limit_w == OWN_W, where
        assert card.world.serving_alias() == "one", where
        recover(card.context())
        # A cut-short write in /run is gone with the next boot.
        assert [name for name in card.left() if not name.startswith(".power")] == [], where
    else:
        raise AssertionError("it has no end")
    assert {"start_bound", "stop", "reload"} <= set(texts)


def test_killed_and_its_recovery_killed_before_any_effect_the_limit_is_back(
    make: Callable[[str], Card],
) -> None:
    for number in range(_MOST_STEPS):
        card = make(f"{number}")
        with pytest.raises(ServiceError), power_limit(card.context(), ID, UNIT, OTHER_W):
            card.stub.nvml.fail(_SET, nvml_stub.UNKNOWN)
        card.world.manager.drop_lease(card.lease)
        card.stub.nvml.failures.clear()
        card.stub.nvml.write()
        life = Life(card.world.paths.lock)
        ctx = card.context(Fuse(number, life.die))
        life.live(lambda ctx=ctx: recover(ctx))  # type: ignore[misc]
        recover(card.context())
        assert (card.limit_w, card.left()) == (OWN_W, []), life.died_before
        if life.died_before is None:
            return
    raise AssertionError("it has no end")


def test_a_second_state_waits_for_the_card_and_has_it_once_it_is_free(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    card = a_card()

    def measure(tell: Callable[[object], None]) -> None:
        with a_world(tmp_path / "one") as world:
            world.put(world.text("one"))
            ctx = replace(world.context(), gpu=FakeGpuReader(card))
            with hold(ctx, purpose="sweep", budget_s=60):
                tell("held")
                time.sleep(LIMIT_S)

    other = Forked(measure)
    assert other.told.readline() == "held\n"
    with a_world(tmp_path / "two") as world:
        world.put(world.text("one"))
        ctx = replace(world.context(), gpu=FakeGpuReader(card))
        with pytest.raises(Busy, match=card.name) as raised, hold(ctx, purpose="x", budget_s=60):
            pass
        assert raised.value.cause is not None
        assert f"process {other.pid} " in raised.value.cause
        assert world.serving_alias() == "one"
        elsewhere = replace(ctx, gpu=FakeGpuReader(replace(card, uuid=f"{card.uuid}-x")))
        with hold(elsewhere, purpose="another card", budget_s=60):
            pass
        other.kill()
        with hold(ctx, purpose="x", budget_s=60):
            pass
