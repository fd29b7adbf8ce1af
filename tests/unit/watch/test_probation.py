"""What a probation does with its time: it counts only while there is something to look at."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fault.campaign import IS_CAMPAIGN
from tests.fault.fuse import Fuse, Step, full_disk
from tests.fault.fuse import Life as Process
from tests.fault.scenarios import deploy
from tests.fault.world import BROKEN, UNIT, World, a_world
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.faked import set_to
from tests.support.fakes import Life
from tests.support.readings import an_engine
from tunerd.app import Context, data_dir
from tunerd.cli.deploy import render_probations
from tunerd.engine.health import HttpState
from tunerd.errors import RolledBack, UsageError
from tunerd.machine.files import lock
from tunerd.machine.process import boot_id
from tunerd.production.measurement import write_measurement
from tunerd.production.probation import begin_probation, daemon_lock, read_probation
from tunerd.production.recover import recover
from tunerd.production.rollback import rollback
from tunerd.production.swap import swap
from tunerd.result import Level
from tunerd.tryout.local_service import Ending as Killed
from tunerd.units.manager import LeaseRecord, LeaseSpec
from tunerd.watch.probation import Probation, show_probation, take_back
from tunerd.watch.watcher import Watcher

WATCH_S = 150.0
EVERY_S = 30.0


@pytest.fixture
def world(world: World) -> World:
    deploy(world.context(), world, "old", "new")
    return world


def shipped(world: World) -> Context:
    """With tunerd's own units, which say how what watches is confined."""
    return replace(world.context(), data_dir=data_dir())


def begun(world: World, number: int = 2, **changed: Any) -> None:
    """A generation is watched since a boot that is over."""
    world.manager.programs[sys.executable] = lambda _start: Life()
    begin_probation(shipped(world), number)
    path = world.paths.state_dir / "probation" / f"{number}.json"
    record = json.loads(path.read_text())
    assert (record["state"], record["boot_id"]) == ("running", None), "before the first look"
    path.write_text(json.dumps(record | {"boot_id": "the boot before"} | changed))
    world.manager.reboot()


class Daemon:
    """A daemon's watch, and its clock."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch = Probation(shipped(world), lambda _: None)
        self.cards = FakeGpuReader()
        self._watcher = Watcher(replace(world.context(), gpu=self.cards))

    def look(self) -> str | None:
        """One look; ten seconds later the next may follow."""
        found = self.watch.after(self._watcher.look())
        self.world.clock.advance(10.0)
        return found

    def looks_like(self, **engine: Any) -> None:
        """A look at a server of which this is seen, and which gives no reason to go back."""
        seen = self._watcher.look()
        assert self.watch.after(replace(seen, engine=replace(seen.engine, **engine))) is None
        self.world.clock.advance(10.0)

    def judged(self) -> dict[str, Any]:
        """The record once it has an end, where need be by what a unit of its own does."""
        while (reason := self.look()) is None:
            if not self.watch.is_watching():
                return self.record()
        ctx = self.world.context()
        serving = ctx.generations.serving(UNIT)
        assert serving is not None
        assert take_back(ctx, serving.generation.number, reason, sweep=None).exit_code == 3
        return self.record()

    @property
    def ended(self) -> tuple[str, str]:
        """How its record says that it stands, and why."""
        found = self.record()
        return found["state"], found["reason"]

    def record(self) -> dict[str, Any]:
        path = max((self.world.paths.state_dir / "probation").iterdir())
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def looking(world: World, number: int = 2, **changed: Any) -> Daemon:
    """One that has looked at a generation of this boot once."""
    begun(world, number, **{"boot_id": boot_id(), **changed})
    daemon = Daemon(world)
    daemon.look()
    return daemon


def measure(world: World, limit_s: float) -> None:
    """Somebody measures in production's place for so long."""
    spec = LeaseSpec("0a1b2c3d", UNIT, restores=True, limit_s=limit_s, why="a sweep")
    world.manager.lease(spec)
    now_s = world.clock.now_s()
    record = LeaseRecord(
        spec.id, UNIT, spec.why, os.getpid(), now_s, now_s + limit_s, restores=True
    )
    write_measurement(world.context(), record)


def test_its_clock_stands_still_while_something_is_measured(world: World) -> None:
    begun(world, boot_id=boot_id(), left_s=WATCH_S)
    measure(world, 3 * WATCH_S)
    begun_s = world.clock.monotonic_s()
    found = Daemon(world).judged()
    assert (found["state"], found["looks"]) == ("passed", WATCH_S / EVERY_S)
    assert world.clock.monotonic_s() - begun_s >= 4 * WATCH_S - EVERY_S


def test_it_does_not_pass_on_fewer_looks_than_a_rule_needs(world: World) -> None:
    begun(world, boot_id=boot_id(), left_s=1.0)
    found = Daemon(world).judged()
    assert (found["state"], found["looks"]) == ("passed", 3)


def test_it_ends_where_the_server_was_stopped_for_as_long(world: World) -> None:
    begun(world, boot_id=boot_id())
    world.manager.stop(UNIT)
    daemon = Daemon(world)
    daemon.judged()
    assert daemon.ended == ("ended", "somebody stopped it")


@pytest.mark.parametrize("has_backup", [True, False], ids=["by its backup", "by the history alone"])
def test_a_server_under_which_the_machine_went_down_is_taken_back(
    world: World, *, has_backup: bool
) -> None:
    begun(world)
    if not has_backup:
        (backup,) = (one for one in world.backups() if one.read_bytes() == world.text("old"))
        backup.unlink()
    found = Daemon(world).judged()
    assert found["state"] == "taken back"
    assert "the machine went down" in found["reason"]
    assert world.serving_alias() == "old"


def test_a_daemon_that_is_ended_pauses_it_and_the_next_goes_on(world: World) -> None:
    daemon = looking(world, left_s=90.0)
    assert daemon.record()["state"] == "running"
    daemon.watch.pause()
    assert daemon.record()["state"] == "paused"
    daemon = Daemon(world)
    while daemon.look() is None and daemon.watch.is_watching():
        pass
    assert (daemon.record()["state"], daemon.record()["looks"]) == ("passed", 3)


def test_a_take_back_is_begun_as_a_unit_and_begun_again_where_that_comes_to_nothing(
    world: World,
) -> None:
    begun(world)
    daemon, unit = Daemon(world), "tunerd-probation-2.service"
    for _ in range(3):
        reason = daemon.look()
        assert reason is not None
        daemon.watch.begin_taking_back(reason)
        text = (world.manager.runtime_unit_dir / unit).read_text()
        assert '"probation" "take-back" "2" "--reason" "the machine went down' in text
        assert daemon.look() is None, "it is at work"
        assert daemon.ended == ("running", reason)
        assert Daemon(world).look() is None, "and is left alone by the next daemon"
        world.manager.stop(unit)
    assert daemon.look() is None
    assert daemon.record()["state"] == "worse"
    assert "could not be taken back" in daemon.record()["reason"]


def test_what_a_daemon_had_decided_is_done_by_the_next(world: World) -> None:
    begun(world, boot_id=boot_id(), reason="it grows")
    assert Daemon(world).look() == "it grows"


def test_apply_says_whether_anybody_watches(world: World) -> None:
    (said,) = begin_probation(shipped(world), 2)
    assert (said.level, said.code) == (Level.WARNING, "probation")
    assert "no tunerd daemon runs" in said.text
    assert said.hint == "`tunerd daemon` watches it; it may run in a terminal"
    ctx = shipped(world)
    with lock(daemon_lock(ctx), purpose="daemon", since="now"):
        (said,) = begin_probation(ctx, 2)
        assert "the daemon watches it for 1 h 00 min and goes back by itself if" in said.text


def dies(world: World) -> None:
    """The server, and its manager starts it again."""
    world.manager.end_main(UNIT, Killed(code=1))
    world.clock.advance(5.0)


def is_restarted(world: World) -> None:
    """A third generation serves, whose manager starts it again and again."""
    text = world.text("newer", service="Restart=always\nRestartSec=1", starts=9)
    ctx = world.context()
    with lock(ctx.paths.lock, purpose="apply", since="now"):
        swap(ctx, world.request(text, alias="newer"))


@pytest.mark.parametrize("dies_first", [True, False])
def test_a_death_while_nobody_watched_counts_and_one_before_the_watch_does_not(
    world: World, dies_first: bool
) -> None:
    is_restarted(world)
    if dies_first:
        dies(world)
    begin_probation(shipped(world), 3)
    if not dies_first:
        dies(world)
    path = world.paths.state_dir / "probation" / "3.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"left_s": WATCH_S}))
    assert Daemon(world).judged()["state"] == ("passed" if dies_first else "taken back")


def is_killed(world: World) -> None:
    """By a plain `kill`, which it obeys."""
    world.manager.end_main(UNIT, Killed(code=0))
    world.clock.advance(5.0)


# A server that its manager starts again and again: what happens, and how its watch ends.
DEATHS: dict[str, tuple[str, str]] = {
    # It was taken back after a reboot in which it had to be started a second time.
    "it needs a second start at boot": ("boot dies looks", "passed"),
    "it needs a second start at boot and dies again": ("boot dies looks dies", "taken back"),
    # What lay in VRAM may be gone then: the first request ends the server, whatever its settings.
    "it dies after the machine slept": ("looks sleeps looks dies looks", "passed"),
    "it dies twice after the machine slept": ("looks sleeps looks dies looks dies", "taken back"),
    "a sleep that the daemon before has seen": ("looks sleeps looks dies looks daemon", "passed"),
    # A machine that may not sleep while it is measured does so as soon as that has ended, or a night deployed.
    "it slept before the first look": ("sleeps looks dies", "passed"),
    "it slept as soon as nothing was measured": (
        "measures looks waits sleeps looks dies",
        "passed",
    ),
    # Of a unit with `Restart=always` its manager starts it again, and counts that like a death.
    "somebody ended it by a signal, twice": ("looks is-killed looks is-killed looks", "passed"),
    "it ends well again and again": (
        "looks is-killed looks is-killed looks is-killed",
        "taken back",
    ),
    "it dies after somebody ended it": ("looks is-killed looks dies", "taken back"),
    "it dies at once after somebody ended it": ("looks is-killed dies", "taken back"),
    "it ends well before it was seen to serve": ("is-killed", "taken back"),
    # NTP put the clock of a machine right that had just booted, and a server that died then passed.
    "a clock that was set is no sleep": ("looks set looks dies", "taken back"),
}


@pytest.mark.parametrize(("happens", "state"), DEATHS.values(), ids=DEATHS)
def test_what_a_boot_a_sleep_or_a_signal_takes_is_held_against_no_server(
    world: World, happens: str, state: str
) -> None:
    is_restarted(world)
    of_boot = {"state": "paused"} if "boot" in happens else {"boot_id": boot_id()}
    begun(world, 3, left_s=WATCH_S, **of_boot)
    daemon = Daemon(world)
    acts: dict[str, Callable[[], object]] = {
        "dies": lambda: dies(world),
        "is-killed": lambda: is_killed(world),
        "sleeps": lambda: world.clock.suspend(8 * 3600.0),
        "set": lambda: world.clock.set_wall(world.clock.now_s() + 8 * 3600),
        "measures": lambda: measure(world, 60.0),
        "waits": lambda: world.clock.advance(40.0),
    }
    for act in happens.removeprefix("boot ").split():
        if act == "looks":
            assert [daemon.look() for _ in range(4)] == [None] * 4
        elif act == "daemon":
            daemon = Daemon(world)
        else:
            acts[act]()
    assert daemon.judged()["state"] == state


@pytest.mark.parametrize("changed", [{"awaits_reboot": True}, {"measuring": "a sweep"}])
def test_a_start_that_was_held_against_no_server_is_not_after_what_nobody_judges_either(
    world: World, changed: dict[str, Any]
) -> None:
    """A driver that was updated and put back, or a measurement that was called off before it stopped anything."""
    is_restarted(world)
    dies(world)
    begun(world, 3, left_s=WATCH_S, boot_id=boot_id(), restarts=1)
    world.manager.start(UNIT)
    dies(world)
    daemon = Daemon(world)
    daemon.look()
    assert daemon.watch.after(replace(daemon._watcher.look(), **changed)) is None
    assert daemon.judged()["state"] == "passed"


def test_a_server_that_works_silently_is_left_alone_though_the_clock_is_set_ahead_meanwhile(
    world: World,
) -> None:
    """One that read a long prompt had worked for a minute, in an hour by that clock, and was taken back as one that hangs."""
    daemon = looking(world)
    for _ in range(4):
        daemon.look()
    for n in range(15):
        daemon.looks_like(health=HttpState.SILENT, cpu_s=10.0 * n)
        if n == 7:
            world.clock.set_wall(world.clock.now_s() + 3600.0)
    assert daemon.record()["state"] == "running"


def test_who_watches_says_of_which_boot_it_is_before_its_first_look(world: World) -> None:
    daemon = looking(world, boot_id=None)
    record = daemon.record()
    assert (record["state"], record["looks"], record["boot_id"]) == ("running", 0, boot_id())


@pytest.mark.parametrize(
    "text", ["{}", "[1]", "{bad", '{"generation": 1, "state": "passed", "reason": "x"}']
)
def test_a_record_that_cannot_be_read_keeps_none_of_the_others_from_being_shown(
    world: World, text: str
) -> None:
    begin_probation(shipped(world), 2)
    (world.paths.state_dir / "probation" / "1.json").write_text(text)
    found = show_probation(world.context())
    assert [row["generation"] for row in found.payload["probations"]] == [2]
    assert [one.code for one in found.messages] == ["damaged"]
    assert len(list(render_probations(found.payload))) == 2


def test_one_that_nobody_closed_is_over_where_something_else_serves_and_else_says_who_lacks(
    world: World,
) -> None:
    begin_probation(shipped(world), 2)
    world.clock.advance(3600.0)
    (row,) = show_probation(world.context()).payload["probations"]
    assert (row["state"], row["reason"].split(";")[0]) == ("cut", "no tunerd daemon runs")
    deploy(world.context(), world, "newer")
    (row,) = show_probation(world.context()).payload["probations"]
    assert (row["state"], row["reason"]) == ("ended", "something else was deployed")


def test_what_was_taken_back_is_told_as_that_by_what_took_its_place(world: World) -> None:
    """A rollout that asked just after the swap took it for a server that somebody had deployed over."""
    daemon = looking(world)
    daemon.watch.begin_taking_back("it died")
    rollback(world.context(), to=None, drain=False, reason="guard")
    (row,) = show_probation(world.context()).payload["probations"]
    assert (row["state"], row["reason"]) == ("taken back", "it died")
    world.manager.stop("tunerd-probation-2.service")  # killed before it said so
    daemon.look()
    assert daemon.ended == ("taken back", "it died")
    again = take_back(world.context(), 2, "it died", sweep=None)
    assert (again.exit_code, again.payload["state"]) == (0, "taken back")
    assert world.serving_alias() == "old"


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_daemon_that_watched_what_others_took_back_says_nothing_else(
    world: World, by_hand: bool
) -> None:
    """It wrote over their word that something else was deployed."""
    daemon = looking(world)
    if by_hand:
        take_back(world.context(), 2, "it answers nonsense", sweep=None)
    else:  # by its promotion
        rollback(world.context(), to=None, drain=False, reason="guard")
    daemon.look()
    assert not daemon.watch.is_watching()
    said = "it answers nonsense" if by_hand else "it was taken back"
    assert daemon.ended == ("taken back", said)


def test_a_larger_margin_takes_nothing_back_and_what_is_paused_is_over_as_well(
    world: World,
) -> None:
    looking(world).watch.pause()
    ctx = world.context()
    with lock(ctx.paths.lock, purpose="guard", since="now"):
        request = world.request(world.text("larger"), alias="larger")
        pins = {"memory.fit_mib": 1792}
        raised = replace(request.generation, reason="guard", pins=pins)
        swap(ctx, replace(request, generation=raised))
    (row,) = show_probation(ctx).payload["probations"]
    assert (row["state"], row["reason"]) == ("ended", "something else was deployed")


def test_it_is_closed_though_nobody_can_tell_the_sweep_that_proved_it(world: World) -> None:
    begun(world, boot_id=boot_id())
    with pytest.raises(UsageError, match="there is no sweep 7"):
        take_back(world.context(), 2, "it died", sweep=7)
    record = read_probation(world.context(), 2)
    assert record is not None
    assert (record.state, record.reason) == ("taken back", "it died")


def test_nothing_is_told_of_a_sweep_whose_winner_could_not_be_taken_back(world: World) -> None:
    """It was said to be taken back, and its layer was gone, though it was still what stood."""
    begun(world, boot_id=boot_id())
    world.manager.stop(UNIT)
    done = take_back(world.context(), 2, "it died", sweep=7)  # of which there is none
    assert (done.exit_code, done.payload["state"]) == (1, "worse")


def test_what_is_the_same_as_before_is_not_watched_nor_where_the_settings_say_so(
    world: World,
) -> None:
    deploy(world.context(), world, "new")
    (said,) = begin_probation(shipped(world), 3)
    assert said.text == "no probation: what served before is the same unit"
    (said,) = begin_probation(unwatched(world), 2)
    assert said.text == "no probation: probation.enabled is false"
    assert show_probation(world.context()).payload["probations"] == []


def unwatched(world: World) -> Context:
    return set_to(shipped(world), probation__enabled=False)


def test_settings_that_take_it_away_end_it(world: World) -> None:
    daemon = looking(world)
    daemon.watch.take_over(unwatched(world))
    daemon.look()
    assert daemon.ended == ("ended", "probation.enabled is false")


def test_what_no_program_could_start_on_is_held_against_no_server(world: World) -> None:
    """The driver was updated: the server died, and was taken back as one that does worse."""
    daemon = looking(world, left_s=90.0)
    daemon.cards.update_driver()
    world.manager.end_main(UNIT, Killed(code=1))
    for _ in range(9):
        assert daemon.look() is None
    assert daemon.record()["state"] == "running"
    daemon.cards.show(rtx_4070_super())
    world.manager.reset_failed(UNIT)
    world.manager.start(UNIT)
    assert daemon.judged()["state"] == "passed"


def test_an_edit_by_hand_ends_it_and_stays(world: World) -> None:
    daemon = looking(world)
    edited = world.text("new").replace(b"[Service]", b"[Service]\nEnvironment=MINE=1")
    world.unit_path.write_bytes(edited)
    world.manager.reload()
    world.manager.end_main(UNIT, Killed(code=1))
    daemon.look()
    assert daemon.ended == ("ended", "somebody edited the unit")
    assert world.standing == edited
    assert take_back(world.context(), 2, "it died", sweep=None).payload["state"] == "ended"
    assert world.standing == edited


def test_a_drop_in_that_is_edited_where_it_lies_ends_it(world: World) -> None:
    """Its file was known, so that a server which it made worse was taken back for it."""
    world.put_drop_in("Nice=1")
    deploy(world.context(), world, "newer")
    daemon = looking(world, 3)
    world.clock.advance(20)
    world.put_drop_in("Nice=19")
    world.manager.end_main(UNIT, Killed(code=1))
    daemon.look()
    assert daemon.ended == ("ended", "somebody edited the unit")


def test_a_generation_that_was_never_there_is_not_said_to_have_ended(world: World) -> None:
    begun(world, boot_id=boot_id())
    with pytest.raises(UsageError, match="there is no generation 3"):
        take_back(world.context(), 3, "it died", sweep=None)
    assert read_probation(world.context(), 3) is None


def test_nothing_is_looked_at_while_somebody_changes_the_server(world: World) -> None:
    begun(world)
    daemon, ctx = Daemon(world), world.context()
    with lock(ctx.paths.lock, purpose="a change", since="now"):
        for _ in range(5):
            assert daemon.look() is None
    assert daemon.look() is not None


def test_an_apply_that_fails_does_not_end_it(world: World) -> None:
    daemon = looking(world, left_s=90.0)
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "bad", program=BROKEN)
    assert daemon.judged()["state"] == "passed"


def test_where_nothing_can_be_written_it_watches_on(world: World) -> None:
    daemon, folder = looking(world), world.paths.state_dir / "probation"
    folder.rename(folder.with_name("kept"))
    folder.write_text("no folder")
    for _ in range(4):
        daemon.look()
    world.manager.end_main(UNIT, Killed(code=1))
    while (reason := daemon.look()) is None:
        assert daemon.watch.is_watching()
    assert "it ended" in reason
    assert take_back(world.context(), 2, reason, sweep=None).exit_code == 3
    assert world.serving_alias() == "old"


@pytest.mark.parametrize(
    ("active", "result", "is_stopped"),
    [
        ("inactive", "success", True),
        ("deactivating", "success", True),
        ("failed", "timeout", True),
        ("failed", "signal", False),
        ("inactive", "exit-code", False),
        ("activating", "success", False),
    ],
)
def test_a_stop_by_hand_is_told_from_a_death(active: str, result: str, is_stopped: bool) -> None:
    assert an_engine(active_state=active, result=result).is_stopped_by_hand is is_stopped


def killed(world: World, number: int, act: Callable[[Context], object]) -> bool:
    """Whether a process died before so many of its effects; False where it has fewer."""
    life = Process(world.paths.lock)
    ctx = replace(world.context(Fuse(number, life.die)), data_dir=data_dir())
    life.live(partial(act, ctx))
    return life.died_before is not None


def swap_to_new(world: World, ctx: Context, *, is_wanted: bool) -> None:
    request = world.request(world.text("new"), alias="new")
    wanted = replace(request, wants_probation=is_wanted, tuned={"sweep": 7})
    swap(ctx, wanted)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_swap_that_is_killed_at_any_moment_leaves_what_serves_watched_as_it_was_to_be(
    folder: Path, *, is_wanted: bool
) -> None:
    found = set()
    for number in itertools.count(0, 1 if IS_CAMPAIGN else 2):
        with a_world(folder / str(number)) as world:
            deploy(world.context(), world, "old")
            was_killed = killed(world, number, partial(swap_to_new, world, is_wanted=is_wanted))
            record = world.paths.state_dir / "probation/2.json"
            was_begun = record.exists()
            done = recover(shipped(world))
            serves_new = world.serving_alias() == "new"
            assert record.exists() is (is_wanted and serves_new), number
            if record.exists():
                assert json.loads(record.read_bytes())["sweep"] == 7
            told = {message.code for message in done.messages}
            assert ("probation" in told) is (record.exists() and not was_begun), number
            if serves_new:
                found.add(done.payload["found"])
            assert "remarks" not in done.payload
            if not was_killed:
                break
    assert found == {"judge", "committed", None}


def test_a_recovery_that_is_killed_at_any_moment_leaves_what_serves_watched_as_it_was_to_be(
    folder: Path,
) -> None:
    """The swap was killed once the new server served, before it could say so."""
    for number in itertools.count():
        with a_world(folder / str(number)) as world:
            deploy(world.context(), world, "old")
            life = Process(world.paths.lock)

            def die_at_the_commit(step: Step, life: Process = life) -> None:
                if "outcome.json" in step.text:
                    life.die(step)

            ctx = world.context(Fuse(0, die_at_the_commit, until=10_000))
            life.live(partial(swap_to_new, world, ctx, is_wanted=True))
            assert life.died_before is not None
            was_killed = killed(world, number, recover)
            recover(shipped(world))
            assert world.serving_alias() == "new"
            assert (world.paths.state_dir / "probation/2.json").exists(), number
            if not was_killed:
                break
    assert number > 3


@pytest.mark.parametrize("n_failing", [3, 4, 20])
def test_a_swap_that_goes_back_because_the_disk_fails_at_its_commit_leaves_no_probation(
    tmp_path: Path, n_failing: int
) -> None:
    """Which was begun before its intent record could not be dropped. How it ended is tried twice to be written."""
    with a_world(tmp_path) as world:
        deploy(world.context(), world, "old")
        failed: list[str] = []

        def fail(step: Step) -> None:
            of_the_end = {"outcome.json", f"remove {UNIT}.json", "remove 2.json"}
            if len(failed) < n_failing and any(text in step.text for text in of_the_end):
                failed.append(step.text)
                full_disk(step)

        ctx = world.context(Fuse(0, fail, until=10_000))
        with pytest.raises(RolledBack):
            swap_to_new(world, ctx, is_wanted=True)
        recover(shipped(world))
        assert world.serving_alias() == "old"
        assert world.leftovers() == []
        assert show_probation(shipped(world)).payload["probations"] == []
