"""The daemon's guards fed with readings, on a machine of fakes: what is told, begun and left alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fault.world import a_generation
from tests.support.fakes import FakeClock, FakeServiceManager, Life, Program
from tests.support.local_box import Box
from tests.support.readings import a_reading
from tunerd.actions.context import Context
from tunerd.actions.guard_margin import KEY
from tunerd.actions.telemetry import HistoryKeeper
from tunerd.core.generation import Ending as Ended
from tunerd.core.generation import Outcome
from tunerd.core.local_outcome import Ending
from tunerd.core.telemetry.history import Event
from tunerd.daemon.guarding import CHECK_UNIT, Guarding
from tunerd.system.files import lock
from tunerd.system.llama import Address, LlamaServer
from tunerd.system.notify import Notifier
from tunerd.system.ports import free_port

UNIT = "llama-server.service"
SERVER = "[Service]\nExecStart=/bin/server\nRestart=on-failure\nRestartSec=5\n"
OOM = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8053.00 MiB on device 0: cudaMalloc failed: out of memory"


class World:
    """A box with a server that can die, and guards that look at it."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        programs: dict[str, Program] = {
            "/bin/server": lambda _start: Life(),
            sys.executable: lambda _start: Life(ends_after_s=1.0),
        }
        self.manager = FakeServiceManager(tmp_path, self.clock, programs)
        (self.manager.unit_dir / UNIT).write_text(SERVER)
        self.ctx: Context = replace(Box(tmp_path).context, clock=self.clock, services=self.manager)
        self.ctx.paths.state_dir.mkdir(parents=True, exist_ok=True)
        self.told: list[Event] = []
        self.guards = Guarding(self.ctx, Notifier({}), self.told.append, lambda: None)
        self.manager.start(UNIT)

    def look(self, **changed: Any) -> None:
        """One look at how the unit is now; ten seconds later the next may follow."""
        state = self.manager.state(UNIT)
        reading = a_reading(
            at_s=self.clock.now_s(),
            active_state=state.active_state,
            sub_state=state.sub_state,
            n_restarts=state.n_restarts,
            life=state.invocation_id,
        )
        self.guards.after(replace(reading, **changed))
        self.clock.advance(10.0)

    def die(self, *words: str) -> None:
        """The server ends with these words; its manager starts it again."""
        assert self.manager.state(UNIT).is_active
        for line in words:
            self.manager.print_line(UNIT, line)
        self.manager.end_main(UNIT, Ending(code=1))
        self.clock.advance(6.0)

    def begin_anew(self, server: LlamaServer | None = None) -> None:
        """Another daemon, which finds what the ones before it told in the history."""
        self.guards = Guarding(self.ctx, Notifier({}), self.tell, lambda: server)

    def tell(self, event: Event) -> None:
        """As the daemon does, to the history too."""
        self.told.append(event)
        keeper = HistoryKeeper(self.ctx)
        keeper.add_event(event)
        keeper.close()

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.told]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_server_without_vram_is_told_of_once_where_no_margin_can_be_raised(world: World) -> None:
    world.look()
    for _ in range(5):
        world.die(OOM)
        world.look()
    assert world.kinds == ["oom"]
    assert "no fit margin is set" in world.told[0].text
    assert "cudaMalloc failed" in world.told[0].text


def test_a_server_that_dies_of_something_else_is_no_business_of_the_margin(world: World) -> None:
    world.look()
    for _ in range(5):
        world.die("GGML_ASSERT(ok) failed")
        world.look()
    assert world.kinds == ["server-dies"]


def test_words_of_an_earlier_life_are_not_held_against_a_later_one(world: World) -> None:
    world.look()
    world.die(OOM)
    world.look()
    for _ in range(4):
        world.die("GGML_ASSERT(ok) failed")
        world.look()
    assert world.kinds == ["server-dies"]


def test_while_somebody_changes_the_unit_nothing_is_counted(world: World) -> None:
    world.look()
    with lock(world.ctx.paths.lock, purpose="apply", since="now"):
        for _ in range(3):
            world.die(OOM)
            world.look()
    world.look()
    assert world.kinds == []


def test_while_something_is_measured_nothing_is_counted(world: World) -> None:
    world.look()
    for _ in range(3):
        world.die(OOM)
        world.look(measuring="sweep 3")
    world.look()
    assert world.kinds == []


def test_a_card_that_is_lost_is_told_once_and_so_is_its_return(world: World) -> None:
    world.look()
    for _ in range(3):
        world.look(gpu_problem="GPU 0: the GPU is lost: it has fallen off the bus")
    for _ in range(3):
        world.look()
    assert world.kinds == ["gpu", "gpu-back"]


def test_what_the_guards_judge_by_is_found_out_once_for_each_life(world: World) -> None:
    began: list[str | None] = []
    for n in range(20):
        if n == 10:
            world.manager.restart(UNIT)
        world.look()
        began.append(world.manager.state(CHECK_UNIT).invocation_id)
    assert len(set(began)) == 2
    assert began[0] is not None


def test_what_the_next_start_will_refuse_is_told_once_whatever_becomes_of_the_daemon(
    world: World,
) -> None:
    replanned = {"identity_changed": True, "refusals": ["invalid argument: --mlock"],
                 "driver_before": None, "driver_now": None}  # fmt: skip
    found = {"confirmed": None, "engine_sha256": None, "replanned": replanned}
    (world.ctx.paths.state_dir / "guards.json").write_text(json.dumps(found))
    for _ in range(3):
        world.begin_anew()
        for _ in range(3):
            world.look()
    assert world.kinds == ["upgrade-refused"]
    assert "--mlock" in world.told[0].text


def test_a_server_that_hangs_is_restarted_no_oftener_though_the_daemon_dies_each_time(
    world: World,
) -> None:
    deaf = LlamaServer(Address("127.0.0.1", free_port()), world.clock)
    lives = []
    for _ in range(4):
        world.begin_anew(deaf)
        for _ in range(94):
            world.look()
        lives.append(world.manager.state(UNIT).invocation_id)
    assert len(set(lives)) == 2, "two restarts, the first before anybody looked"
    assert [(event.kind, event.level) for event in world.told] == [
        ("hang", "warning"),
        ("hang", "warning"),
        ("hang", "error"),
    ]


def test_the_end_of_a_raise_is_told_by_the_daemon_after_the_one_that_began_it(
    world: World,
) -> None:
    world.begin_anew()
    world.tell(Event(world.clock.now_s(), "oom", "warning", "raised to 1792 MiB"))
    raised = a_generation(reason="guard", unit_sha256=None)
    raised = replace(raised, number=3, created_s=world.clock.now_s() + 1, pins={KEY: 1792})
    world.ctx.generations.create(raised, None)
    world.ctx.generations.end(3, Ended(Outcome.SERVING, world.clock.now_s(), 1.0, None, None))
    for _ in range(3):
        world.begin_anew()
        for _ in range(3):
            world.look()
    assert world.kinds == ["oom", "guard-acted"]
    assert "generation 3 serves" in world.told[1].text
