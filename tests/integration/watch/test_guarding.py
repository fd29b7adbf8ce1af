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
from tests.support.readings import a_reading, an_engine
from tunerd.app import Context
from tunerd.engine.server import Address, LlamaServer
from tunerd.machine.files import lock
from tunerd.machine.net import free_port
from tunerd.production.probation import new_record
from tunerd.tryout.local_service import Ending
from tunerd.units.generations import Ending as Ended
from tunerd.units.generations import Outcome
from tunerd.units.systemd import Notifier
from tunerd.watch.daemon import Daemon
from tunerd.watch.figures import Event
from tunerd.watch.guarding import CHECK_UNIT, Guarding
from tunerd.watch.history import HistoryKeeper, history
from tunerd.watch.readings import Watcher
from tunerd.watch.speed import KEY
from tunerd.words import sha256

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


def test_what_was_said_long_before_the_death_is_no_cause_of_it(world: World) -> None:
    world.look()
    for _ in range(3):
        world.die(OOM, *["srv update_slots: all slots are idle"] * 150)
        world.look()
    assert "oom" not in world.kinds


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


@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_server_that_sleeps_when_nobody_asks_is_not_asked(world: World, is_asleep: bool) -> None:
    world.begin_anew(LlamaServer(Address("127.0.0.1", free_port()), world.clock))
    before = world.manager.state(UNIT).invocation_id
    for _ in range(200):
        life = world.manager.state(UNIT).invocation_id
        world.look(engine=an_engine(life=life, is_asleep=is_asleep))
    assert (world.kinds, world.manager.state(UNIT).invocation_id) == ([], before)


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


def test_settings_that_change_leave_the_guards_what_they_know(world: World) -> None:
    daemon = Daemon(world.ctx)

    def die() -> None:
        world.die(OOM)
        daemon.look()

    def told() -> list[str]:
        return [event.kind for event in history(world.ctx, 0.0, 0.0).events]

    daemon.look()
    die()
    assert told() == []
    file = world.ctx.paths.settings_file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[guards]\ndrift = 'off'\n")
    daemon.alive()
    die()
    assert told() == ["oom"], "one death before, one after"


def watched(world: World, **changed: Any) -> Path:
    """Generation 3 serves, and is watched; its record."""
    text = (world.manager.unit_dir / UNIT).read_bytes()
    world.ctx.paths.unit_dir.mkdir(parents=True, exist_ok=True)
    (world.ctx.paths.unit_dir / UNIT).write_bytes(text)
    generation = replace(a_generation(reason="apply", unit_sha256=sha256(text)), number=3)
    world.ctx.generations.create(generation, None)
    world.ctx.generations.end(3, Ended(Outcome.SERVING, 1.0, 1.0, None, None))
    record = new_record(3, 7, now_s=0.0, left_s=900.0, restarts=0, boot_id=None) | changed
    path = world.ctx.paths.state_dir / "probation" / "3.json"
    path.parent.mkdir()
    path.write_text(json.dumps(record))
    return path


TAKES_BACK = "tunerd-probation-3.service"


def test_a_probation_under_which_the_machine_went_down_is_taken_back_by_a_unit(
    world: World,
) -> None:
    watched(world, boot_id="the boot before")
    world.look()
    text = (world.manager.runtime_unit_dir / TAKES_BACK).read_text()
    assert '"take-back" "3" "--reason" "the machine went down' in text
    assert '"--sweep" "7"' in text


def test_a_death_in_probation_is_told_by_nobody_else(world: World) -> None:
    path = watched(world)
    world.look()
    world.die(OOM)
    for _ in range(4):
        world.look()
    assert world.kinds == []
    assert "died and was started again" in json.loads(path.read_text())["reason"]
    assert (world.manager.runtime_unit_dir / TAKES_BACK).exists()


def test_a_server_is_expected_where_it_was_deployed_or_starts_at_boot(world: World) -> None:
    def is_expected() -> bool:
        return Watcher(world.ctx).look().engine.is_expected

    (world.manager.unit_dir / UNIT).write_text(f"{SERVER}[Install]\nWantedBy=default.target\n")
    world.manager.reload()
    assert not is_expected(), "somebody started it by hand"
    world.manager.enable(UNIT)
    assert is_expected()
    world.manager.disable(UNIT)
    made = replace(a_generation(reason="apply", unit_sha256=None), number=1)
    world.ctx.generations.create(made, None)
    world.ctx.generations.end(1, Ended(Outcome.SERVING, world.clock.now_s(), 1.0, None, None))
    assert is_expected()
    taken = replace(made, number=2, reason="rollback")
    world.ctx.generations.create(taken, None)
    world.ctx.generations.end(2, Ended(Outcome.REMOVED, world.clock.now_s(), 1.0, None, None))
    assert not is_expected()
