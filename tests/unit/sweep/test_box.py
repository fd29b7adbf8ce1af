"""A sweep in a machine that is not its own: it waits for a GPU, yields, and stops for want of room or time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from tests.fault.world import BROKEN, UNIT, World
from tests.support.bench_samples import a_request, sample, timings
from tests.support.fake_gpu import FakeGpuReader, LateGpuReader, a_card
from tests.support.fakes import FakeClock
from tests.support.model_headers import facts_of_shape
from tests.support.profiles import a_plan_for
from tests.support.shapes import PlainShape
from tunerd.app import Context, data_dir
from tunerd.calendar import Deadline
from tunerd.errors import Busy, DeployError, UsageError
from tunerd.machine.facts import POWER_CAP, Gpu, GpuProcess
from tunerd.measure.answer import ClientTimes
from tunerd.measure.life import Answered, Texts
from tunerd.measure.request import Prompt
from tunerd.measure.trust import ProcessorLook
from tunerd.production.lease import hold
from tunerd.profile.arm import Arm, Preempted, read
from tunerd.settings import SweepSettings
from tunerd.sweep.box import House, LeaseBox, Quiet, answer_of, crowd, heat
from tunerd.sweep.schedule import deadline_of, demand_open, demand_time, least_time_s
from tunerd.units.manager import PORT_LIMIT_S
from tunerd.words import MiB

ARM = Arm("fake", "off", 0, 0.0, 0, "f16", 512, 2048, 1)
HOT = replace(a_card(), throttle_reasons=("software thermal slowdown",), temperature_c=91)
COOL = a_card()
NINE = 1_790_000_000.0 - 1_790_000_000.0 % 86400 + 9 * 3600
PATIENCE_S = 60.0


def taken() -> Gpu:
    return a_card(processes=[GpuProcess(4242, MiB(6000), "compute", "train.py", None)])


class Later(FakeClock):
    """Shows a cool card once so much time has passed."""

    def __init__(self, gpu: FakeGpuReader, after_s: float) -> None:
        super().__init__()
        self._gpu, self._at_s = gpu, self.monotonic_s() + after_s

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.monotonic_s() >= self._at_s:
            self._gpu.show(COOL)


@pytest.fixture
def world(world: World) -> World:
    world.put(world.text("one"))
    return world


def context(world: World, **sweep: object) -> Context:
    ctx = world.context()
    wanted = SweepSettings(**{"patience_s": PATIENCE_S, "timezone": "UTC", **sweep})
    return replace(ctx, settings=ctx.settings.model_copy(update={"sweep": wanted}))


def never(_arm: Arm) -> NoReturn:
    raise AssertionError("nothing was to be started")


@contextmanager
def sweeping(ctx: Context, house: House | None = None, **changed: Any) -> Iterator[LeaseBox]:
    """The box of a sweep in production's place; by default none that has looked at the cards before."""
    with hold(ctx, purpose="sweep 1 of one", budget_s=600) as held:
        usual = LeaseBox(
            ctx=ctx, held=held, plan_arm=never, texts=cast("Texts", None), per_request=(),
            on_arm=lambda _arm, _record: None, on_samples=lambda _arm, _samples: None,
            tell=ctx.say, patience_s=PATIENCE_S, house=house or House(ctx), incumbent=ARM,
        )  # fmt: skip
        yield replace(usual, **changed)


def with_cards(world: World, gpu: FakeGpuReader, **changed: Any) -> tuple[Context, House]:
    """A sweep that has found nothing to wait for."""
    ctx = replace(context(world), gpu=gpu, **changed)
    house = House(ctx)
    house.settle()
    return ctx, house


def test_a_hot_gpu_is_waited_for_and_then_told_with_nothing_stopped(world: World) -> None:
    ctx = replace(context(world), gpu=FakeGpuReader(HOT))
    before_s = ctx.clock.monotonic_s()
    with pytest.raises(Busy) as refused:
        House(ctx).settle()
    assert refused.value.cause == "GPU 0 is throttled at 91 C: software thermal slowdown"
    assert ctx.clock.monotonic_s() - before_s >= PATIENCE_S
    assert world.serving_alias() == "one"


def test_a_gpu_that_cools_down_in_time_is_no_reason_to_skip(world: World) -> None:
    gpu = FakeGpuReader(HOT)
    clock = Later(gpu, 30.0)
    House(replace(context(world), gpu=gpu, clock=clock)).settle()
    assert clock.monotonic_s() - 5000.0 < PATIENCE_S


def test_a_gpu_that_somebody_else_computes_on_is_skipped_by_name(world: World) -> None:
    ctx = replace(context(world), gpu=FakeGpuReader(taken()))
    with pytest.raises(Busy) as refused:
        House(ctx).settle()
    assert "train.py (4242, 6000 MiB) computes on GPU 0" in str(refused.value.cause)
    assert "sweep.shares_gpu" in str(refused.value.hint)


def test_a_neighbour_may_stay_where_the_settings_say_so_and_another_may_not_come(
    world: World,
) -> None:
    gpu = FakeGpuReader(taken())
    house = House(replace(context(world, shares_gpu=True), gpu=gpu))
    house.settle()
    assert house.trouble() is None
    more = GpuProcess(77, MiB(900), "compute", "ffmpeg", None)
    gpu.show(a_card(processes=[*(taken().processes or ()), more]))
    assert "ffmpeg" in str(house.trouble())


def test_a_gpu_that_is_taken_in_the_middle_makes_the_sweep_yield_before_the_next_start(
    world: World,
) -> None:
    gpu = FakeGpuReader(COOL)
    ctx, house = with_cards(world, gpu)
    with sweeping(ctx, house) as tried:
        gpu.show(taken())
        with pytest.raises(Preempted):
            tried.restart(ARM)
    assert "train.py" in str(tried.yielded)
    assert tried.ended == tried.yielded
    assert world.serving_alias() == "one"


@pytest.mark.parametrize(
    ("befalls", "words"),
    [
        (lambda gpu: gpu.lose(0), "a card is gone: GPU 0: the GPU is lost"),
        (lambda gpu: gpu.hide("the driver did not answer"), "gone: the driver did not answer"),
        (lambda gpu: gpu.show(replace(COOL, power_limit_w=150.0)), "150 W, and was 220 W"),
        (lambda gpu: gpu.update_driver(), "the driver's library 581.1"),
    ],
    ids=["lost", "unreadable", "another power limit", "an updated driver"],
)
def test_what_befalls_the_card_ends_the_sweep_and_is_held_against_no_arm(
    world: World, befalls: Callable[[FakeGpuReader], None], words: str
) -> None:
    """An arm that then did not start counted as one that does not, and a slow one as slow."""
    gpu = FakeGpuReader(COOL)
    ctx, house = with_cards(world, gpu)

    def plan(_arm: Arm) -> NoReturn:
        befalls(gpu)
        raise DeployError("it does not start")

    with sweeping(ctx, house, plan_arm=plan) as tried, pytest.raises(Preempted):
        tried.restart(ARM)
    assert words in str(tried.ended)
    assert tried.yielded is None
    assert world.serving_alias() == "one"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_crash_is_held_against_no_arm_where_its_card_turns_out_to_be_lost(
    world: World, *, is_lost: bool
) -> None:
    gpu = LateGpuReader(world.clock, COOL)
    ctx, house = with_cards(world, gpu, data_dir=data_dir())
    crashes = replace(
        a_plan_for(ctx, Path(BROKEN)), facts=facts_of_shape(PlainShape(architecture="llama"))
    )
    told = []

    def tell(text: str) -> None:
        told.append(text)
        if is_lost:
            gpu.lose(0)

    with sweeping(ctx, house, plan_arm=lambda _arm: crashes, tell=tell) as tried:
        if is_lost:
            with pytest.raises(Preempted, match="a card is gone: GPU 0: the GPU is lost"):
                tried.restart(ARM)
        else:
            assert tried.restart(ARM).failure == "crash"
    assert "does not start: error: it fell over" in told[0]
    assert world.serving_alias() == "one"


def test_a_limit_that_the_driver_of_a_laptop_moves_with_the_load_is_nobodys_change(
    world: World,
) -> None:
    mobile = replace(COOL, name="NVIDIA GeForce RTX 4060 Laptop GPU", power_limit_w=80.0)
    gpu = FakeGpuReader(mobile)
    _, house = with_cards(world, gpu)
    gpu.show(replace(mobile, power_limit_w=95.0))
    assert house.changed() is None


def test_a_driver_that_does_not_answer_once_ends_no_sweep(world: World) -> None:
    gpu = FakeGpuReader(COOL)
    _, house = with_cards(world, gpu, clock=Later(gpu, 1.0))
    gpu.hide("busy")
    assert house.changed() is None


def test_what_disturbs_is_not_waited_for_past_the_end_of_the_budget(world: World) -> None:
    gpu = FakeGpuReader(COOL)
    ctx = replace(context(world), gpu=gpu)
    until_s = ctx.clock.monotonic_s() + PATIENCE_S / 4
    with sweeping(ctx, until_s=until_s) as tried:
        gpu.show(taken())
        with pytest.raises(Preempted):
            tried.restart(ARM)
        assert ctx.clock.monotonic_s() - until_s < 1.0


def test_a_window_that_ends_ends_the_sweep_and_production_serves(world: World) -> None:
    world.clock.set_wall(NINE - 7)
    ctx = context(world)
    with sweeping(ctx, deadline=Deadline(NINE, 5.0, "01:00-09:00")) as tried:
        tried.check()
        world.clock.sleep(2.0)
        with pytest.raises(Preempted):
            tried.check()
    assert tried.ended == (
        "the window 01:00-09:00 ends (09:00 UTC), and production must serve again by then"
    )
    assert world.serving_alias() == "one"


def test_a_server_that_is_stopped_before_its_place_is_taken_ends_the_sweep(world: World) -> None:
    """Somebody wants the card: it was measured on all the same, since nothing had to be given back."""
    ctx = context(world)
    house = House(ctx)
    assert house.stopped() is None
    world.manager.stop(UNIT)
    with sweeping(ctx, house) as tried, pytest.raises(Preempted):
        tried.restart(ARM)
    assert tried.ended == f"{UNIT} was stopped"
    assert world.serving_alias() is None

    with sweeping(ctx) as tried:
        tried.check()  # it was down when this one began


def test_a_clock_that_is_set_back_to_before_the_window_ends_the_sweep(world: World) -> None:
    """It began on a wrong clock, as of a machine whose RTC keeps local time, and went on in the evening."""
    world.clock.set_wall(NINE - 7200)
    ctx = context(world)
    deadline = deadline_of(ctx, "01:00-09:00", load_s=1.0, changes_program=False)
    with sweeping(ctx, deadline=deadline) as tried:
        world.clock.set_wall(NINE - 8 * 3600 - 60.0)  # what NTP corrects around the opening
        tried.check()
        world.clock.set_wall(NINE - 11 * 3600)
        with pytest.raises(Preempted):
            tried.check()
    assert tried.ended == "the clock was set back, to before the window 01:00-09:00"
    assert world.serving_alias() == "one"


def beside(name: str | None = "train.py", mib: int | None = 4000, kind: str = "compute") -> Gpu:
    return a_card(processes=[GpuProcess(200, None if mib is None else MiB(mib), kind, name, None)])


@pytest.mark.parametrize(
    ("gpu", "is_trouble"),
    [
        (beside(), True),
        (beside(mib=None), True),
        (beside(mib=40), False),
        (beside(name=None), False),
        (beside(name="gnome-shell", kind="compute+graphics"), False),
        (beside(name="firefox", kind="graphics"), False),
        (replace(a_card(), processes=None), False),
        (replace(a_card(), throttle_reasons=("power brake",)), True),
        (replace(a_card(), throttle_reasons=(POWER_CAP,)), False),
        (replace(a_card(), throttle_reasons=None), False),
    ],
    ids=["another program", "one whose memory is not told", "one with a little memory", "one that may be the server",
         "a desktop", "a browser", "processes cannot be read", "held back", "at its owner's limit", "clocks cannot be read"],
)  # fmt: skip
def test_what_disturbs_is_heat_and_what_computes_beside_the_server(
    gpu: Gpu, is_trouble: bool
) -> None:
    assert (heat([gpu]) is not None or crowd([gpu], (), ()) is not None) is is_trouble


def test_the_server_itself_and_a_machine_without_cards_are_no_trouble() -> None:
    assert crowd([beside("llama-server")], {200}, ()) is None
    assert (heat(None), crowd(None, (), ())) == (None, None)


def test_a_disk_with_little_room_is_told(world: World) -> None:
    house = House(context(world))
    assert f"MiB are free on the disk of {house.ctx.paths.state_dir}, and 999999999 are needed" in str(house.full(999_999_999))  # fmt: skip
    assert house.full() is None


# Before it begins


def test_a_closed_window_is_told_with_its_next_opening(world: World) -> None:
    ctx = context(world)
    world.clock.set_wall(NINE)
    demand_open(ctx, "01:00-09:01")
    with pytest.raises(UsageError) as refused:
        demand_open(ctx, "01:00-09:00")
    assert "is closed; it opens" in refused.value.message
    assert "01:00 (UTC)" in refused.value.message
    demand_open(ctx, None)


def test_too_little_of_a_window_is_refused_before_anything_stops(world: World) -> None:
    ctx = context(world)
    world.clock.set_wall(NINE - 600)
    deadline = deadline_of(ctx, "01:00-09:00", load_s=120.0, changes_program=False)
    assert deadline is not None
    assert deadline.measuring_s(ctx.clock.now_s()) < 600 - 120 - 30
    with pytest.raises(UsageError, match="too little is left"):
        demand_time(ctx, "01:00-09:00", deadline, least_time_s(7200.0, 120.0))
    demand_time(ctx, "01:00-09:00", deadline, least_time_s(7200.0, 10.0))


@pytest.mark.parametrize(
    ("policy", "changes_program", "more_s"),
    [("auto", False, 60.0), ("ask", True, PORT_LIMIT_S), ("auto", True, 60.0 + 2 * PORT_LIMIT_S)],
)
def test_a_night_keeps_time_for_one_more_load_where_it_deploys_and_for_a_port_where_it_tries_builds(
    world: World, policy: str, changes_program: bool, more_s: float
) -> None:
    world.clock.set_wall(NINE - 600)

    def kept_s(policy: str, changes_program: bool) -> float:
        ctx = context(world, promote=policy)
        deadline = deadline_of(ctx, "01:00-09:00", load_s=60.0, changes_program=changes_program)
        assert deadline is not None
        return deadline.reserve_s

    assert kept_s(policy, changes_program) >= kept_s("ask", changes_program=False) + more_s


def test_a_machine_whose_processors_others_take_is_not_quiet() -> None:
    """A sweep that yielded to them would stop production only to yield again."""
    quiet = Quiet(100.0, ProcessorLook(total_s=1000.0, busy_s=400.0, own_s=50.0))
    rests = ProcessorLook(1120.0, 410.0, 51.0)
    assert quiet.for_s(160.0, rests, is_used=False) == 60.0
    assert quiet.for_s(161.0, rests, is_used=True) == 0.0
    taken = ProcessorLook(1140.0, 430.0, 51.0)
    assert quiet.for_s(171.0, taken, is_used=False) == 0.0
    assert quiet.for_s(181.0, ProcessorLook(1160.0, 432.0, 51.0), is_used=False) == 10.0
    assert quiet.for_s(191.0, None, is_used=False) == 20.0


def asked(**values: object) -> Answered:
    return Answered(a_request(), Prompt("p", "x"), sample(**values), None, ())


def test_several_at_once_are_read_as_their_mean_and_the_least_vram_that_one_saw() -> None:
    """One that ended early had all take as long as it would have taken, and one that drafted had all draft."""
    long = {"client": ClientTimes(3000.0, 50.0), "vram_free_min_mib": 900}
    early = timings(predicted_n=51, predicted_ms=1000.0, draft_n=40, draft_n_accepted=10)
    ended = {"timings": early, "client": ClientTimes(2000.0, 50.0), "vram_free_min_mib": 300}
    answer = answer_of([asked(**long), asked(**long), asked(**long), asked(**ended)])

    found = read(answer)

    assert found.turn_ms == (3 * 3000.0 + 2000.0 + 50 * 20.0) / 4
    assert (found.n_drafted, answer["draft_n_accepted"]) == (10, 2.5)
    assert found.vram_free_min_mib == 300.0
    assert "decode_left_ms" not in answer_of([asked(**long)])
    assert "wall_ms" not in answer_of([asked(**long), asked(client=None)])


@pytest.mark.parametrize(
    "told", [{"predicted_ms": None}, {"predicted_ms": 0.0}, {"predicted_n": None}]
)
def test_an_answer_that_may_have_ended_early_at_no_known_pace_has_no_turn(
    told: dict[str, Any],
) -> None:
    """40 of 101 tokens came, and counted as a whole turn: what ended early was what won."""
    early = asked(timings=timings(**{"predicted_n": 40, **told}), n_predict=101)
    assert read(answer_of([early])).turn_ms is None
    assert read(answer_of([asked(n_predict=101), early])).turn_ms is None
    if "predicted_ms" in told:
        whole = asked(timings=timings(**told), n_predict=101)
        assert whole.sample.client is not None
        assert read(answer_of([whole])).turn_ms == whole.sample.client.wall_ms
