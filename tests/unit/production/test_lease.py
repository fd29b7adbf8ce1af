"""Leases in a world of fakes: what dead measurements leave, and what is said of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, SupportsIndex, cast

import pytest

from tests.fault.fuse import Fuse, Kind, Step, fused_services
from tests.fault.fuse import Life as Victim
from tests.fault.scenarios import deploy
from tests.fault.world import BROKEN, ENGINE, UNIT, LateClock, World, a_world
from tests.support.fake_gpu import a_card
from tests.support.fakes import FakeLease, Invocation, Life, Program
from tests.support.profiles import a_plan_for
from tests.support.unit_lines import FAILS, STARTS
from tests.support.waiting import until
from tunerd.app import Context, data_dir
from tunerd.engine.capabilities import Engine
from tunerd.engine.flags import Argument
from tunerd.engine.health import Failure, FailureKind, Reason
from tunerd.engine.server import Address
from tunerd.engine.serving import missing_to_start, read_live_unit
from tunerd.errors import Busy, DeployError, JobCanceled, LeaseEnded, ServiceError, Stranded
from tunerd.machine.facts import GpuProcess
from tunerd.machine.files import lock
from tunerd.machine.process import words_of
from tunerd.production.gate import PortTurns, edited_under
from tunerd.production.lease import Held, demand_return, hold, least_free_mib, outlook
from tunerd.production.measurement import (
    clear_dead_measurements,
    end_measurement,
    ended_by,
    has_leftovers,
    measuring,
    read_measurement,
    write_measurement,
    written_record,
)
from tunerd.production.plan import Plan
from tunerd.production.recover import recover
from tunerd.profile.layers import Layer, Origin
from tunerd.records import plain
from tunerd.result import Progress, ignore_progress
from tunerd.tryout.local_service import Ending
from tunerd.units.manager import (
    PORT_LIMIT_S,
    LeaseRecord,
    LeaseSpec,
    bound_unit_behind,
    candidate_unit,
    is_candidate,
    lease_of,
    lease_unit,
    run_scope,
)
from tunerd.words import MiB, PortOption

ID = "0123456789ab"
RECORD = LeaseRecord(ID, UNIT, "bench x", 4711, 1_790_000_000.0, 1_790_000_600.0, restores=True)
STAYS = "stays stopped, since somebody stopped it just now or the machine goes down; the next boot starts it"


def test_a_clock_that_was_set_back_makes_no_measurement_longer() -> None:
    """`status` said of a sweep of two minutes that production would serve in fourteen hours."""
    moments = {-50_400.0: 600.0, 0.0: 600.0, 540.0: 60.0, 4000.0: 0.0}
    assert {at_s: RECORD.left_s(RECORD.since_s + at_s) for at_s in moments} == moments


def spec() -> LeaseSpec:
    """A lease that gives its place back."""
    return LeaseSpec(ID, UNIT, restores=True, limit_s=600.0, why="bench x")


def held(world: World, **more: Any) -> AbstractContextManager[Held]:
    """Production's place, for ten minutes."""
    return hold(world.context(), **{"purpose": "bench x", "budget_s": 600.0, **more})


def begun(world: World) -> FakeLease:
    """A measurement by a process that goes no further."""
    lease = world.manager.lease(spec())
    world.manager.reset_failed(UNIT)  # it may be started once in five minutes
    write_measurement(world.context(), RECORD)
    return lease


@pytest.fixture(autouse=True)
def _served(world: World) -> None:
    world.put(world.text("one"))


def put_candidate(world: World, lease_id: str) -> str:
    """A candidate's unit and its drop-in."""
    unit = candidate_unit(lease_id, 1)
    folder = world.manager.runtime_unit_dir
    (folder / f"{unit}.d").mkdir()
    (folder / f"{unit}.d/a.conf").write_text("[Service]\nRestart=no\n")
    (folder / unit).write_text(
        f"[Unit]\nBindsTo={lease_unit(lease_id)}\n"
        f"[Service]\nExecStart={ENGINE} --host 127.0.0.1 --port {world.port} --alias two\n"
    )
    world.manager.reload()
    return unit


def test_names_are_told_apart() -> None:
    assert lease_of(lease_unit(ID)) == lease_of(candidate_unit(ID, 3)) == ID
    assert lease_of("llama-server.service") is lease_of(run_scope(ID)) is None
    assert lease_of("tunerd-lease-../x.service") is None
    assert is_candidate(candidate_unit(ID, 3))
    assert not is_candidate(lease_unit(ID))
    unit = candidate_unit(ID, 12)
    for name in (unit, f"{unit}.d", f".{unit}.x1y2.tmp"):
        assert bound_unit_behind(name) == unit
    assert bound_unit_behind("llama-server.service") is None


def test_a_record_is_read_as_it_was_written_and_foreign_ones_are_none(world: World) -> None:
    ctx = world.context()
    ctx.paths.runtime_dir.mkdir(exist_ok=True)
    for change, expected in (({}, RECORD), ({"more": 1}, RECORD), ({"id": "../../x"}, None)):
        ctx.files.write_json(ctx.paths.measurement, {**plain(RECORD), **change})
        assert written_record(ctx) == expected
    for damaged in ("{}", "[]", "{"):
        ctx.paths.measurement.write_text(damaged)
        assert written_record(ctx) is None


def test_a_candidate_for_which_memory_was_missing_is_told_from_one_that_hangs() -> None:
    kinds = {
        reason: {kind for kind in FailureKind if Failure(kind, "words", None).reason is reason}
        for reason in (Reason.OOM, Reason.HANG)
    }
    assert kinds[Reason.OOM] == {FailureKind.OUT_OF_VRAM, FailureKind.OUT_OF_MEMORY}
    assert kinds[Reason.HANG] == {FailureKind.HANG}


def test_what_a_killed_measurement_left_is_cleared_by_recover(world: World) -> None:
    ctx, lease = world.context(), begun(world)
    unit = put_candidate(world, lease.spec.id)
    world.manager.start_bound(unit)
    (world.manager.runtime_unit_dir / f".{candidate_unit(ID, 1)}.1a2b3c4d.tmp").write_text("")
    assert world.serving_alias() == "two"
    assert read_measurement(ctx) is not None
    world.manager.drop_lease(lease)
    assert world.serving_alias() == "one"
    assert read_measurement(ctx) is None
    assert has_leftovers(ctx)

    found = recover(ctx)

    assert found.payload["cleared"] == [unit]
    assert list(world.manager.runtime_unit_dir.iterdir()) == []
    assert not has_leftovers(ctx)
    assert world.serving_alias() == "one"
    assert recover(ctx).payload["cleared"] == []


def test_a_lease_that_was_killed_as_it_began_leaves_no_failed_unit(world: World) -> None:
    ctx = world.context()
    unit = lease_unit(ID)
    world.manager.programs[BROKEN] = lambda _: Life(ends_after_s=0.0, ending=Ending(code=1))
    (world.manager.runtime_unit_dir / unit).write_text(f"[Service]\nExecStart={BROKEN}\n")
    world.manager.start(unit)
    assert world.manager.state(unit).has_failed
    assert not has_leftovers(ctx), "nothing was written of it yet"

    assert recover(ctx).payload["cleared"] == [unit]

    assert not world.manager.state(unit).has_failed


def test_what_somebody_measures_now_is_left_alone(world: World) -> None:
    ctx = world.context()
    lease = world.manager.lease(spec())
    unit = put_candidate(world, lease.spec.id)
    world.manager.start_bound(unit)

    with lock(ctx.paths.measure_lock, purpose="bench", since="now"):
        assert clear_dead_measurements(ctx) == ()
    assert clear_dead_measurements(ctx) == ()  # its process may be gone, its lease is not

    assert world.serving_alias() == "two"
    lease.end()


def test_a_change_ends_a_measurement_and_finds_production_up(tmp_path: Path) -> None:
    """Also where its process needs a while until it listens."""
    clock = LateClock()
    world = World(tmp_path, clock=clock)
    world.put(world.text("one"))
    ctx, lease, serve = world.context(), begun(world), world.manager.programs[ENGINE]

    def load(invocation: Invocation) -> Life:
        clock.in_s(3.0, lambda: serve(invocation))
        return Life(on_end=world.close)

    world.manager.programs[ENGINE] = load
    said = end_measurement(ctx, by="`tunerd apply`")

    assert said is not None
    assert "bench x" in said
    assert not lease.is_held()
    assert ended_by(ctx, lease.spec.id) == "`tunerd apply`", "which whoever measures is told"
    assert world.serving_alias() == "one"
    assert end_measurement(ctx, by="`tunerd apply`") is None
    world.close()


@pytest.mark.parametrize("at", ["lease", "lease taken"])
def test_a_lease_that_cannot_be_had_or_fails_half_way_leaves_production_serving(
    world: World, at: str
) -> None:
    world.manager.errors[at] = [ServiceError("no D-Bus")]

    with pytest.raises(ServiceError, match="no D-Bus"), held(world):
        pass

    assert world.serving_alias() == "one"
    assert not has_leftovers(world.context())


@pytest.mark.parametrize(("which", "told"), [("lock", "change"), ("measure_lock", "measurement")])
def test_nothing_begins_while_a_change_or_another_measurement_is_under_way(
    world: World, which: str, told: str
) -> None:
    ctx = world.context()
    with (
        lock(getattr(ctx.paths, which), purpose="apply", since="now"),
        pytest.raises(Busy, match=told),
        hold(ctx, purpose="bench x", budget_s=60),
    ):
        pass
    assert world.serving_alias() == "one"


def test_a_lease_lasts_no_longer_than_its_budget(world: World) -> None:
    with held(world, budget_s=60.0) as lease:
        world.clock.sleep(61)
        with pytest.raises(LeaseEnded) as learned:
            lease.check()

    assert "ran out" in (learned.value.cause or "")
    assert world.serving_alias() == "one"


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_an_end_that_is_asked_for_while_production_comes_back_is_told(
    world: World, number: int, words: str
) -> None:
    def ask(progress: Progress) -> None:
        if progress.text.startswith("ending the measurement"):
            os.kill(os.getpid(), number)

    ctx = replace(world.context(), progress=ask)
    with hold(ctx, purpose="sweep x", budget_s=60) as lease:
        pass
    assert world.serving_alias() == "one"
    assert lease.late is not None
    assert words in words_of(lease.late)


def test_what_drop_ins_say_by_the_name_of_production_holds_for_a_candidate_too(
    world: World,
) -> None:
    """`EnvironmentFile=-/etc/llama/%i.env` beside a template was read for production alone: the card it names was not the one measured."""
    folder = world.paths.unit_dir
    (folder / "llama-server.env").write_text("CUDA_VISIBLE_DEVICES=1\n")
    world.put_drop_in(
        f"EnvironmentFile=-{folder}/%p.env\nEnvironment=NAMED=%n,%i,%N,%%n,%%%p\nWorkingDirectory=-/no%f"
    )
    ctx = replace(world.context(), data_dir=data_dir())
    with hold(ctx, purpose="bench x", budget_s=60) as lease, lease.serve(_served_by(ctx)) as one:
        live = read_live_unit(ctx, one.unit)
    found = live.environment
    assert live.work_dir == "/no/llama/server"
    assert found["CUDA_VISIBLE_DEVICES"] == "1"
    assert found["NAMED"] == f"{UNIT},,llama-server,%n,%llama-server"
    assert found.items() <= one.environment.items(), "what is told of it is what it got"


def _served_by(ctx: Context) -> Plan:
    """A plan of which a candidate is started, though nothing listens on its port."""
    plan, facts = a_plan_for(ctx, Path(ENGINE)), cast("Any", SimpleNamespace(file_bytes=0))
    port = Argument("--port", "1", "serving.port", Origin(Layer.SET, "--set"))
    return replace(plan, facts=facts, command=replace(plan.command, arguments=(port,)))


def test_what_was_stopped_stays_stopped_unless_its_start_was_asked_for(world: World) -> None:
    world.manager.stop(UNIT)
    world.manager.reset_failed(UNIT)
    told = outlook(world.context(), measuring_s=60)
    said: list[str] = []
    ctx = replace(world.context(), progress=lambda progress: said.append(progress.text))
    with hold(ctx, purpose="bench x", budget_s=60) as lease:
        assert not lease.restores
    assert world.serving_alias() is None
    assert said == ["ending the measurement"], "nothing is stopped, and nothing comes back"
    assert "--start-after" in told.text
    assert told.without_service_s is None

    with held(world, start_after=True):
        pass

    assert world.serving_alias() == "one"


def test_what_somebody_stops_while_its_requests_are_waited_for_stays_stopped(world: World) -> None:
    """It was started at the end of the lease, since it had run when the wait began."""

    def stop(progress: Progress) -> None:
        if progress.text.startswith("waiting for "):
            world.manager.stop(UNIT)

    world.servers[-1].behaviour.slots_are_busy = True
    with hold(replace(world.context(), progress=stop), purpose="sweep x", budget_s=60) as lease:
        assert not lease.restores
    assert world.serving_alias() is None


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_somebody_stops_once_a_lease_has_ended_is_not_started_again(
    world: World, comes_back: bool
) -> None:
    world.put(world.text("one", starts=9))

    def stop(progress: Progress) -> None:
        if progress.text == "checking that it stays up":
            world.manager.stop(UNIT)

    ctx = replace(world.context(), progress=stop if comes_back else ignore_progress)
    with hold(ctx, purpose="sweep x", budget_s=60) as lease:
        if not comes_back:  # who wants the card, and finds the unit stopped while the card is busy
            world.manager.start(UNIT)
            world.manager.stop(UNIT)
    assert world.serving_alias() is None
    assert lease.afterwards == STAYS


def test_what_somebody_deploys_while_it_comes_back_is_theirs_to_look_after(world: World) -> None:
    """The new server answered where the old one was waited for, which was told as a server that does not come back."""
    begun: list[Progress] = []

    def change(progress: Progress) -> None:
        if progress.text == "asking for a first generation" and not begun:
            begun.append(progress)
            deploy(world.context(), world, "other")

    ctx = replace(world.context(), progress=change)
    with hold(ctx, purpose="sweep x", budget_s=60) as lease:
        pass
    assert world.serving_alias() == "other"
    assert lease.afterwards == "was left alone, since somebody is changing it just now"


def test_many_measurements_in_a_row_never_meet_the_start_limit(world: World) -> None:
    for _ in range(4):  # the unit may be started once in five minutes
        with held(world) as lease:
            assert world.serving_alias() is None
        assert world.serving_alias() == "one"
        assert lease.without_service_s is not None
        assert written_record(world.context()) is None


def test_the_outlook_is_as_the_last_swap_and_says_what_is_not_known(world: World) -> None:
    told = outlook(world.context(), measuring_s=90)

    assert (told.load_s, told.without_service_s) == (None, None)
    assert "is not known yet" in told.text
    deploy(world.context(), world, "two")
    told = outlook(world.context(), measuring_s=90)
    assert told.load_s == next(world.context().generations.entries()).ending.without_service_s
    assert told.without_service_s == 90 + (told.load_s or 0)


def test_where_no_unit_is_nothing_is_interrupted(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        told = outlook(world.context(), measuring_s=90)
        with held(world) as lease:
            lease.check()
    assert "nothing is interrupted" in told.text
    assert not lease.restores


@pytest.mark.parametrize("said", [None, "linked"])
def test_nothing_is_measured_where_production_is_not_known_to_start_at_boot(
    world: World, said: str | None
) -> None:
    state = world.manager.state(UNIT)
    demand_return(world.context(), state)
    with pytest.raises(DeployError, match="does not start at boot"):
        demand_return(world.context(), replace(state, unit_file_state=said))
    world.manager.disable(UNIT)
    with pytest.raises(DeployError, match="does not start at boot"):
        outlook(world.context(), measuring_s=90)


@pytest.mark.parametrize(
    ("what", "beside", "way"),
    [
        ("text", "", "daemon-reload"),
        ("text, reloaded", "", "systemctl restart"),
        ("drop-in, reloaded", "", "systemctl restart"),
        ("file gone", "", "put it back (`"),
        ("file gone, reloaded", "", "put it back (`"),
        ("my.env", "EnvironmentFile={folder}/my.env", "systemctl restart"),
        # A restart would end what serves, and start nothing.
        ("/no/my.env", "EnvironmentFile=/no/my.env", "put it back, or take it out"),
    ],
)
def test_a_server_whose_unit_was_edited_since_it_started_is_not_stopped_for_a_measurement(
    world: World, what: str, beside: str, way: str
) -> None:
    """It was, and did not come back where what somebody had written does not start, or its file of variables was deleted."""
    (world.folder / "my.env").write_text("MINE=1\n")
    if beside:
        world.put(world.text("one", service=beside.format(folder=world.folder), starts=2))
    elif "drop-in" in what:
        world.put_drop_in("ExecStart=\nExecStart=/bin/false")
    elif "text" in what:
        world.unit_path.write_bytes(world.text("one", program=BROKEN))
    else:
        world.unit_path.unlink()
    if "reloaded" in what:
        world.manager.reload()
    # The real clock's, of which the times of files are.
    world.clock.set_wall(world.folder.stat().st_ctime - 3600.0)
    world.clock.advance(7200.0)

    with pytest.raises(DeployError, match="changed while it ran") as told, held(world):
        pass

    assert not beside or what in (told.value.cause or "")
    assert way in (told.value.hint or "")
    assert world.serving_alias() == "one"


def test_what_would_not_read_a_candidates_unit_keeps_a_measurement_from_beginning(
    world: World,
) -> None:
    """Its server was stopped, no candidate started, and it was started again."""
    world.put(world.text("one", starts=2))
    life = world.manager.state(UNIT).life
    world.manager.errors["check_ready"] = [
        ServiceError("systemd would not read its unit files again")
    ]

    with pytest.raises(DeployError, match="would not read"), held(world):
        pass

    assert world.manager.state(UNIT).life == life


def test_an_edit_that_no_manager_has_read_counts_though_the_server_was_started_since(
    world: World,
) -> None:
    """It was started by the text of before; what a reload by anybody makes of it is what would come back."""
    world.put(world.text("one", starts=9))
    world.unit_path.write_bytes(world.text("one", program=BROKEN))
    world.clock.set_wall(world.unit_path.stat().st_ctime + 60.0)
    world.manager.restart(UNIT)
    with pytest.raises(DeployError, match="changed while it ran"):
        demand_return(world.context(), world.manager.state(UNIT))


@pytest.mark.parametrize("was_edited", [False, True])
def test_a_unit_that_was_written_anew_by_the_way_back_of_a_killed_swap_is_edited_just_where_it_was_before(
    world: World, *, was_edited: bool
) -> None:
    """Nothing was measured, until a person restarted a server that nobody had touched."""
    _was_started_right_after_its_file_was_written(world)
    if was_edited:
        world.unit_path.write_bytes(world.text("one", words="--verbose"))
        world.manager.reload()
    for _ in range(2):
        victim = Victim(world.paths.lock)
        fuse = Fuse(0, victim.die, of=Kind.UNITS)
        victim.live(partial(deploy, world.context(fuse), world, "two"))
        assert victim.died_before == Step(Kind.UNITS, "reload")
        world.recover()
    refuses = pytest.raises(DeployError, match="changed while it ran")

    with refuses if was_edited else contextlib.nullcontext():
        demand_return(world.context(), world.manager.state(UNIT))

    assert world.serving_alias() == "one"


def test_what_may_be_missing_keeps_no_measurement_away(world: World) -> None:
    world.put(world.text("one", service="User=%H\nWorkingDirectory=/no/%H\nEnvironmentFile=/no/%I.env", starts=2))  # fmt: skip
    demand_return(world.context(), world.manager.state(UNIT))
    assert {one: said for one in STARTS if (said := _missing(world, one)) is not None} == {}


def test_what_is_missing_is_said_with_what_names_it(world: World) -> None:
    """A measurement took the server of such a unit away, and it never came back."""
    found = {lines: _missing(world, lines) or "" for lines in FAILS}
    assert {lines: found[lines] for lines, what in FAILS.items() if what not in found[lines]} == {}

    world.put(world.text("one", service="WorkingDirectory=/etc"))
    drop_in = world.put_drop_in("WorkingDirectory=/no")
    said = missing_to_start(world.context(), read_live_unit(world.context()))
    assert said == f"gone: `/no`, which `WorkingDirectory=` names in `{drop_in}`"


def _missing(world: World, lines: str) -> str | None:
    ctx = world.context()
    text = world.text("one", service=lines).decode()
    return missing_to_start(ctx, read_live_unit(ctx, instead=text))


def test_a_credential_is_looked_for_where_its_manager_does(world: World) -> None:
    world.put(world.text("one", service="LoadCredential=%N:/no/%n.key", starts=2))
    live, key = read_live_unit(world.context()), f"/no/{UNIT}.key"
    assert live.credentials == {UNIT.removesuffix(".service"): key}
    assert key in (missing_to_start(world.context(), live) or "")


def test_variables_that_cannot_be_read_here_hide_no_edit_of_the_unit(world: World) -> None:
    """The daemon has none of root's powers: with variables of another account no guard found anything out any more."""
    world.put(world.text("one", service=f"EnvironmentFile=-{world.folder}", starts=2))
    ctx = world.context()
    assert edited_under(ctx, world.manager.state(UNIT)) is None
    world.unit_path.unlink()
    assert edited_under(ctx, world.manager.state(UNIT)) is not None


def test_a_unit_whose_link_was_made_anew_is_edited_just_where_its_text_is_another(
    world: World,
) -> None:
    """Each rebuild of NixOS makes the links anew: nothing was measured from then on, and `plan` warned."""

    def make(text: str) -> None:
        store = Path(tempfile.mkdtemp(dir=world.folder)) / UNIT
        store.write_bytes(world.text(text))
        world.unit_path.unlink()
        world.unit_path.symlink_to(store)
        world.manager.reload()

    make("one")
    _is_edited_just_where_it_is_another(world, make)


def test_a_secret_that_was_made_anew_is_edited_just_where_it_is_another(world: World) -> None:
    """Each rebuild of NixOS makes them anew: nothing was measured from then on, until the server was restarted."""
    secret = world.folder / "secret.env"

    def make(text: str) -> None:
        secret.unlink(missing_ok=True)
        secret.write_text(f"HF_TOKEN={text}\n")

    make("one")
    world.put(world.text("one", service=f"EnvironmentFile={secret}"))
    _is_edited_just_where_it_is_another(world, make)
    (kept,) = world.folder.rglob("started-with.json")
    assert kept.stat().st_mode & 0o077 == 0


def _is_edited_just_where_it_is_another(world: World, make: Callable[[str], None]) -> None:
    _was_started_right_after_its_file_was_written(world)
    demand_return(world.context(), world.manager.state(UNIT))
    make("one")
    demand_return(world.context(), world.manager.state(UNIT))
    make("other")
    with pytest.raises(DeployError, match="changed while it ran"):
        demand_return(world.context(), world.manager.state(UNIT))


def _was_started_right_after_its_file_was_written(world: World) -> None:
    """By the real clock, of which the times of files are; what is written from now on is younger."""
    began_s = world.unit_path.stat().st_ctime + 0.01
    later_s = began_s - (world.manager.state(UNIT).active_since_s or 0.0)
    world.clock.set_wall(world.clock.now_s() + later_s)
    world.clock.advance(3600.0)
    until(lambda: _written_now_s(world.folder / "touched") > began_s, "a file is newer")


def _written_now_s(path: Path) -> float:
    path.write_bytes(b"")
    return path.stat().st_ctime


def test_a_drop_in_for_all_services_that_was_written_anew_is_no_edit(world: World) -> None:
    """LXC's generator writes one at each reload, and a package of systemd brings one: nothing was measured any more."""
    deploy(world.context(), world, "one")
    path = world.paths.runtime_unit_dir / "service.d/zzz-lxc-service.conf"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nPrivateNetwork=no\n")
    world.clock.set_wall(world.folder.stat().st_ctime - 3600.0)
    world.clock.advance(7200.0)
    state = world.manager.state(UNIT)

    demand_return(world.context(), replace(state, drop_ins=(path,)))


@pytest.mark.parametrize("is_up", [True, False])
def test_somebody_who_starts_production_while_its_place_is_taken_is_named(
    world: World, is_up: bool
) -> None:
    serve = world.manager.programs[ENGINE]
    world.put(world.text("one", service="Restart=on-failure\nRestartSec=30"))

    class Person(list[ServiceError]):
        """Starts production when the lease has just stopped it: systemd then drops the lease."""

        def pop(self, at: SupportsIndex = -1) -> ServiceError:
            fails = [] if is_up else [Life(ends_after_s=0.0, ending=Ending(code=1))]
            world.manager.programs[ENGINE] = lambda one: fails.pop() if fails else serve(one)
            world.manager.reset_failed(UNIT)
            world.manager.start(UNIT)
            return super().pop(at)

    world.manager.errors["lease taken"] = Person([ServiceError("tunerd-lease-x: exit 1")])
    with pytest.raises(LeaseEnded) as told, held(world):
        pass

    assert "somebody started" in (told.value.cause or "")
    assert world.serving_alias() == "one"


def test_a_server_that_was_still_on_its_way_up_is_restored(world: World) -> None:
    serve = world.manager.programs[ENGINE]
    fails = [Life(ends_after_s=0.0, ending=Ending(code=1))]
    world.manager.programs[ENGINE] = lambda one: fails.pop() if fails else serve(one)
    world.manager.stop(UNIT)
    world.manager.reset_failed(UNIT)
    world.put(world.text("one", service="Restart=on-failure\nRestartSec=30"))
    assert world.manager.state(UNIT).active_state == "activating"

    with held(world) as lease:
        assert lease.restores

    assert world.serving_alias() == "one"


def going_down(world: World) -> Context:
    """systemd starts nothing any more then; the next boot does."""

    def canceled(step: Step) -> None:
        if step.text == "start":
            raise JobCanceled(f"the start of {UNIT} was cancelled")

    services = fused_services(world.manager, Fuse(0, canceled, until=1000))
    return replace(world.context(), services=services)


def test_a_machine_that_goes_down_as_a_measurement_begins_ends_it_without_a_failure(
    world: World,
) -> None:
    world.manager.errors["lease taken"] = [JobCanceled("the start of tunerd-lease was cancelled")]
    with (
        pytest.raises(LeaseEnded, match="before it began") as told,
        hold(going_down(world), purpose="bench x", budget_s=60),
    ):
        pass
    assert told.value.state == f"{UNIT} {STAYS}"


def test_a_machine_that_goes_down_in_a_measurement_is_not_said_to_serve_again(world: World) -> None:
    ctx = going_down(world)
    with pytest.raises(SystemExit) as ended, hold(ctx, purpose="bench x", budget_s=60):
        raise SystemExit(143)
    assert ended.value.__notes__ == [f"{UNIT} {STAYS}"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_production_that_was_masked_meanwhile_starts_once_its_unit_is_mended(
    world: World, is_killed: bool
) -> None:
    text = world.unit_path.read_bytes()

    def mask() -> None:
        world.unit_path.unlink()
        world.unit_path.symlink_to("/dev/null")
        world.manager.reload()

    if is_killed:
        lease = begun(world)
        mask()
        world.manager.drop_lease(lease)
    else:
        with pytest.raises(Stranded), held(world):
            mask()
    for _ in range(3):
        recover(world.context())
        assert has_leftovers(world.context()), "the wish is kept"
    assert world.serving_alias() is None

    world.unit_path.unlink()
    world.put(text, starts=False)
    recover(world.context())

    assert world.serving_alias() == "one"
    assert not has_leftovers(world.context())


def test_production_that_somebody_stopped_after_a_killed_measurement_stays_stopped(
    world: World,
) -> None:
    world.manager.drop_lease(begun(world))
    assert world.serving_alias() == "one"
    world.manager.stop(UNIT)

    recover(world.context())

    assert world.serving_alias() is None
    assert not has_leftovers(world.context())


# Production comes back after a measurement although its port is not free yet.

TAKEN = "E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1"
ONE, OTHER = Path("/opt/one/llama-server"), Path("/opt/other/llama-server")


def build(program: Path) -> Engine:
    return Engine(program, "settings", "x")


def fails_until(world: World, at_s: float, says: str) -> None:
    """Its next starts end at once, until the clock shows this."""
    serves: Program = world.manager.programs[ENGINE]

    def program(invocation: Invocation) -> Life:
        if world.clock.monotonic_s() >= at_s:
            return serves(invocation)
        return Life(prints=(says,), ends_after_s=0.1, ending=Ending(code=1))

    world.manager.programs[ENGINE] = program


FOR_EVER_S = float("inf")


@pytest.mark.parametrize(
    ("says", "for_s", "least_s", "most_s"),
    [
        (TAKEN, 60.0, 60.0, 75.0),
        ("srv llama_server: initializing ...", 15.0, 15.0, 30.0),
        (TAKEN, FOR_EVER_S, 60.0, 90.0),
        ("error: it fell over", FOR_EVER_S, 21.0, 40.0),
        ("error: unknown argument: --x", FOR_EVER_S, 0.0, 15.0),
    ],
)
def test_a_start_that_fails_is_repeated_for_a_port_of_the_past_or_an_unknown_cause_and_not_for_ever(
    world: World, says: str, for_s: float, least_s: float, most_s: float
) -> None:
    began_s = world.clock.monotonic_s()
    gives_up = for_s == FOR_EVER_S
    end = pytest.raises(Stranded, match="does not serve") if gives_up else contextlib.nullcontext()
    with end, held(world):
        fails_until(world, began_s + for_s, says)

    assert world.serving_alias() == (None if gives_up else "one")
    assert least_s <= world.clock.monotonic_s() - began_s < most_s


def test_a_unit_that_its_manager_starts_again_is_waited_for(world: World) -> None:
    world.put(world.text("one", service="Restart=on-failure\nRestartSec=5", starts=9))
    with held(world):
        fails_until(world, world.clock.monotonic_s() + 12, "error: it fell over")

    assert world.serving_alias() == "one"
    assert world.manager.state(UNIT).n_restarts == 3, "only its manager started it"


def test_a_port_that_is_known_is_waited_for_and_the_outlook_says_how_long(world: World) -> None:
    ctx = world.context()
    ahead = outlook(ctx, measuring_s=60, engines=[build(Path(ENGINE)), build(OTHER)])

    assert ahead.port_wait_s == 75.0
    assert "once it is free again, up to 75 s later" in ahead.text
    same = outlook(ctx, measuring_s=60, engines=[build(Path(ENGINE))])
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
        PortTurns(ctx, lambda: True, ONE).wait_for(OTHER, None, holder.address)
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
    turns.wait_for(program, None, holder.address)
    holder.socket.close()

    assert holder.said == []
    assert turns.last == program, "it is its turn now"


def test_a_build_takes_the_port_at_once_where_its_like_left_it(world: World) -> None:
    said: list[Progress] = []
    turns = PortTurns(replace(world.context(), progress=said.append), lambda: True, ONE)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", server.getsockname()[1])  # as of connections of the past
        turns.wait_for(OTHER, PortOption.REUSE_ADDR, address)
        assert said == []
        turns.wait_for(ONE, PortOption.REUSE_PORT, address)
        assert len(said) == PORT_LIMIT_S


def test_a_port_of_all_addresses_is_waited_for_on_all(world: World) -> None:
    """Connections by the network kept it, and a candidate that was started by then was called broken."""
    said: list[Progress] = []
    turns = PortTurns(replace(world.context(), progress=said.append), lambda: True, ONE)
    with socket.socket() as server:
        server.bind(("127.0.0.2", 0))
        turns.wait_for(OTHER, None, Address("0.0.0.0", server.getsockname()[1]))  # noqa: S104
    assert len(said) == PORT_LIMIT_S


def test_the_end_of_a_lease_waits_for_connections_by_every_address_of_production(
    world: World,
) -> None:
    world.put(world.text("one").replace(b"--host 127.0.0.1", b"--host 0.0.0.0"))
    ctx = replace(world.context(), data_dir=data_dir())
    with hold(ctx, purpose="bench x", budget_s=60) as lease:
        with lease.serve(a_plan_for(ctx, OTHER)) as tried:
            assert tried.fault is not None, "there is no such program"
        found = cast("FakeLease", lease._lease).address
        with lease.serve(_served_by(ctx)):
            pass
        after = cast("FakeLease", lease._lease).address
    assert found == ("0.0.0.0", world.port)  # noqa: S104
    assert after == found, "one that has another port leaves it to them"


def test_a_measurement_that_waits_for_the_port_at_its_end_still_holds_the_place(
    world: World,
) -> None:
    ctx, lease = world.context(), begun(world)
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


def test_vram_is_free_where_the_server_is_and_not_on_a_card_that_others_have() -> None:
    """A second card that a game had filled took every candidate's margin."""
    own = a_card(processes=(GpuProcess(7, MiB(9000), "compute", None, None),))
    other = a_card(index=1, used_mib=11_800)
    assert least_free_mib((own, other), 7) == own.free_mib
    assert least_free_mib((own, other), None) == other.free_mib
    assert least_free_mib((), 7) is None
