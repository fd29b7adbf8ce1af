"""What a swap rests on, keeps and tells; each safeguard left out once is seen here in seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fault.fuse import Fuse, Kind, Step, full_disk, fused_services
from tests.fault.scenarios import deploy, go_back, locked_swap
from tests.fault.world import BROKEN, ENGINE, UNIT, World
from tests.support.faked import set_to
from tests.support.fakes import Invocation, Life
from tests.support.waiting import until
from tunerd.cli.deploy import render_status
from tunerd.errors import DeployError, HostError, NoSupervisor, RolledBack
from tunerd.machine import net
from tunerd.machine.clock import SystemClock
from tunerd.machine.files import lock
from tunerd.production.gate import drain as drain_of
from tunerd.production.recover import recover
from tunerd.production.rollback import rollback
from tunerd.production.status import status, verify
from tunerd.production.swap import swap
from tunerd.result import Progress
from tunerd.tryout.local_service import Ending
from tunerd.units.generations import Outcome
from tunerd.units.manager import ServiceManager, UnitState
from tunerd.units.text import MARK
from tunerd.words import sha256

OTHER_ENGINE = "/bin/cat"


# On the way there.


class _Odd:
    """A manager that makes something else of the state of a unit, from the first reload on or always."""

    def __init__(
        self, real: ServiceManager, seen: Callable[[UnitState], UnitState], *, is_reloaded: bool
    ) -> None:
        self._real, self._seen, self._is_reloaded = real, seen, is_reloaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def reload(self) -> None:
        self._real.reload()
        self._is_reloaded = True

    def state(self, unit: str) -> UnitState:
        state = self._real.state(unit)
        return self._seen(state) if self._is_reloaded else state


def odd(
    real: ServiceManager, seen: Callable[[UnitState], UnitState], *, is_reloaded: bool = True
) -> ServiceManager:
    return cast("ServiceManager", _Odd(real, seen, is_reloaded=is_reloaded))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fragment_path": Path("/run/systemd/transient/x")}, "uses another unit file"),
        ({"load_state": "bad-setting"}, "does not load the new unit"),
    ],
)
def test_what_the_manager_parsed_is_compared_before_anything_is_restarted(
    world: World, change: dict[str, Any], told: str
) -> None:
    deploy(world.context(), world, "old")
    pid = world.manager.state(UNIT).main_pid
    fuse = Fuse()
    fused = fused_services(world.manager, fuse)
    services = odd(fused, lambda state: replace(state, **change), is_reloaded=False)

    with pytest.raises(RolledBack) as caught:
        deploy(replace(world.context(), services=services), world, "new")

    assert told in (caught.value.cause or "")
    assert "restart" not in [step.text for step in fuse.steps]
    assert world.manager.state(UNIT).main_pid == pid
    assert world.standing == world.text("old")


def test_no_second_server_is_put_beside_a_unit_that_has_another_name(world: World) -> None:
    deploy(world.context(), world, "old")
    before, pid = world.standing, world.manager.state(UNIT).main_pid
    # As systemd 252 shows a link in the folder of units to another unit there.
    services = odd(world.manager, lambda state: replace(state, unit="real.service"))
    ctx = replace(world.context(), services=services)

    with pytest.raises(DeployError, match=f"{UNIT} is another name of real.service"):
        deploy(ctx, world, "new")

    assert (world.standing, world.manager.state(UNIT).main_pid) == (before, pid)


def test_a_plan_that_was_made_for_another_text_is_not_deployed(world: World) -> None:
    deploy(world.context(), world, "old")
    request = world.request(world.text("new"), alias="new")
    edited = world.text("old") + b"# mine\n"
    world.unit_path.write_bytes(edited)

    with pytest.raises(DeployError, match="was changed while this was planned"):
        swap(world.context(), request)

    assert world.standing == edited
    assert world.serving_alias() == "old"


@pytest.mark.parametrize(
    ("words", "is_busy", "drain", "told"),
    [
        ("", True, True, "after the drain time"),
        ("--no-slots --metrics", True, True, "after the drain time"),
        ("", True, False, None),
        # A server without slots was taken for one that rests, and whatever it did was cut without a word.
        ("--no-slots", True, True, "were not waited for"),
        ("--no-slots --metrics", False, True, None),
        ("", False, True, None),
    ],
)
def test_requests_under_way_are_waited_for_where_that_is_asked_and_told_where_nobody_sees_them(
    world: World, words: str, is_busy: bool, drain: bool, told: str | None
) -> None:
    swap(world.context(), world.request(world.text("old", words=words), alias="old"))
    world.servers[-1].behaviour.slots_are_busy = is_busy
    began_s = world.clock.monotonic_s()

    request = replace(world.request(world.text("new"), alias="new"), drain=drain)
    done = swap(world.context(), request)

    waited_s = world.clock.monotonic_s() - began_s
    waits = told == "after the drain time"
    assert (waited_s >= world.context().settings.service.drain_s) is waits
    said = ("after the drain time", "were not waited for")
    shown = [one for one in said if any(one in remark.text for remark in done.told)]
    assert shown == ([] if told is None else [told])


def test_a_server_that_is_too_busy_to_tell_of_its_requests_is_waited_for(world: World) -> None:
    """Amid a batch of a long prompt it was told to have its slots off, and cut at once."""
    swap(world.context(), world.request(world.text("old"), alias="old"))
    ctx = world.context()
    service = ctx.settings.service.model_copy(update={"drain_s": 0.0})
    settings = ctx.settings.model_copy(update={"service": service})
    world.servers[-1].behaviour.counts_after_s = 2.5

    found = drain_of(replace(ctx, settings=settings, clock=SystemClock()), ctx.services.state(UNIT))

    assert found == ("cut after the drain time: 1 running request",)


@pytest.mark.parametrize("at", ["rename to outcome.json", f"remove {UNIT}.json"])
def test_ctrl_c_during_the_commit_comes_too_late(world: World, at: str) -> None:
    deploy(world.context(), world, "old")

    def press(step: Step) -> None:
        if step.text == at:
            signal.raise_signal(signal.SIGINT)

    with contextlib.suppress(KeyboardInterrupt):
        deploy(world.context(Fuse(0, press, until=1000)), world, "new")

    assert world.serving_alias() == "new"
    assert world.outcomes()[0] is Outcome.SERVING
    assert world.leftovers() == []


def test_a_commit_that_fails_leads_back_and_ctrl_c_does_not_end_that(world: World) -> None:
    deploy(world.context(), world, "old")

    def fail(step: Step) -> None:
        if step.text in {"create temporary for outcome.json", f"remove {UNIT}.json"}:
            full_disk(step)
        if step.kind is Kind.UNITS and world.standing == world.text("old"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises((RolledBack, KeyboardInterrupt)) as caught:
        deploy(world.context(Fuse(0, fail, until=1000)), world, "new")

    assert caught.type is RolledBack
    assert world.serving_alias() == "old"


def test_how_a_swap_ended_is_written_before_its_record_goes(world: World) -> None:
    deploy(world.context(), world, "old")
    fuse = Fuse()
    deploy(world.context(fuse), world, "new")
    steps = [step.text for step in fuse.steps]
    assert steps.index("sync folder of outcome.json") < steps.index(f"remove {UNIT}.json")


def test_how_a_swap_ended_is_written_on_a_disk_that_filled_up_meanwhile(world: World) -> None:
    """The unit served, and `status` said that the one before it does: its ending had found no room."""
    deploy(world.context(), world, "old")
    assert world.paths.reserve.exists()

    def fill(step: Step) -> None:
        if step.text == "create temporary for outcome.json" and world.paths.reserve.exists():
            full_disk(step)

    deploy(world.context(Fuse(0, fill, until=1000)), world, "new")

    assert world.outcomes()[0] is Outcome.SERVING
    made = world.context().deployed()
    assert made is not None
    assert made.unit_sha256 == sha256(world.standing)


def test_a_swap_that_could_not_begin_on_a_full_disk_does_not_stay_under_way_in_history(
    world: World,
) -> None:
    """`history` said "running" of it until the next recovery, however long ago it had failed."""
    deploy(world.context(), world, "old")

    def fill(step: Step) -> None:
        if step.text.startswith("create temporary for ") and UNIT in step.text:  # its intent record
            full_disk(step)
        if step.text == "create temporary for outcome.json":
            full_disk(step)

    with pytest.raises(DeployError, match="could not be started"):
        deploy(world.context(Fuse(0, fill, until=1000)), world, "new")

    assert world.outcomes() == [Outcome.SERVING]
    assert world.paths.reserve.exists(), "it is for ways back"
    assert world.serving_alias() == "old"


# On the way back.


def test_a_new_server_with_the_old_ones_name_is_not_taken_for_the_old_one(world: World) -> None:
    world.manager.programs[OTHER_ENGINE] = world.manager.programs[ENGINE]
    deploy(world.context(), world, "same")

    def press(progress: Progress) -> None:
        if progress.text == "commit":
            signal.raise_signal(signal.SIGINT)

    ctx = replace(world.context(), progress=press)
    with pytest.raises(KeyboardInterrupt):
        deploy(ctx, world, "same", program=OTHER_ENGINE)

    argv = world.manager.argv_of(UNIT)
    assert argv is not None
    assert argv[0] == ENGINE
    assert world.serving_alias() == "same"


# What it keeps.


@pytest.mark.parametrize("is_only_copy", [True, False])
def test_a_unit_that_a_person_wrote_is_pruned_only_where_it_is_gone_back_to_by_its_name_all_the_same(
    world: World, *, is_only_copy: bool
) -> None:
    mine = world.text("mine")
    world.put(mine)
    ctx = set_to(world.context(), backups__keep=1)
    deploy(ctx, world, "first")
    (backup,) = world.backups()
    if is_only_copy:  # as of generations of earlier versions
        (world.paths.generations_dir / "000001/replaced").unlink()
    deploy(ctx, world, "second", "third", "fourth")
    assert backup.exists() is is_only_copy
    assert len(world.backups()) == 1 + is_only_copy, "what tunerd had deployed is in generations"

    rollback(world.context(), to=backup.name, drain=False)

    assert world.standing == mine


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_a_backup_that_somebody_removed_or_changed_during_the_trial_is_not_needed(
    world: World, change: str
) -> None:
    mine = world.text("mine")
    world.put(mine, mode=0o640)

    serve = world.manager.programs[BROKEN]

    def touch(invocation: Invocation) -> Life:
        for path in world.backups():
            path.unlink() if change == "gone" else path.write_bytes(world.text("other"))
        return serve(invocation)

    world.manager.programs[BROKEN] = touch
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "new", program=BROKEN)

    assert world.standing == mine
    assert world.serving_alias() == "mine"
    look = world.look()
    assert look is not None
    assert look.mode == 0o640


def test_a_start_that_ends_without_a_word_on_a_port_of_the_past_is_repeated(world: World) -> None:
    """mainline's log thread may be slower than its end: a swap from ik was undone for that, after most of its minute."""
    world.put(world.text("mine"))
    serve, starts = world.manager.programs[ENGINE], itertools.count(1)
    holder = socket.socket()

    def start(invocation: Invocation) -> Life:
        if (number := next(starts)) == 1:
            # What ended just now may keep it for a moment.
            until(lambda: net.can_bind("127.0.0.1", world.port, None), "the port is free")
            holder.bind(("127.0.0.1", world.port))
        if number <= 3:
            words = ("srv          init: using 8 threads for HTTP server",)
            return Life(prints=words, ends_after_s=0.1, ending=Ending(code=1))
        holder.close()
        return serve(invocation)

    world.manager.programs[BROKEN] = start
    deploy(world.context(), world, "new", program=BROKEN)

    assert world.serving_alias() == "new"


def test_nobody_else_reads_the_units_in_generations(world: World) -> None:
    world.put(world.text("mine"), mode=0o600)
    world.paths.generations_dir.mkdir(parents=True, mode=0o755)
    deploy(world.context(), world, "new")
    assert world.paths.generations_dir.stat().st_mode & 0o777 == 0o700
    for name in ("unit", "replaced"):
        path = world.paths.generations_dir / "000001" / name
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_unit_file_that_is_a_link_is_a_link_again_unless_its_file_was_changed(
    world: World, tmp_path: Path, *, is_changed: bool
) -> None:
    real = tmp_path / "mine.service"
    real.write_bytes(world.text("mine"))
    world.unit_path.symlink_to(real)
    world.manager.reload()
    world.manager.enable(UNIT)
    world.manager.start(UNIT)
    serve = world.manager.programs[BROKEN]

    def change(invocation: Invocation) -> Life:
        if is_changed:
            real.write_bytes(world.text("another"))
        return serve(invocation)

    world.manager.programs[BROKEN] = change
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "new", program=BROKEN)

    assert world.unit_path.is_symlink() is not is_changed
    assert world.standing == world.text("mine")
    assert world.serving_alias() == "mine"
    assert world.leftovers() == []


# Drift.


def test_a_unit_of_another_generation_is_told_as_that(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    world.unit_path.write_bytes(world.text("old"))
    world.manager.reload()
    told = verify(world.context())
    assert told.exit_code == 6
    assert "the unit of generation 1 back by hand" in told.messages[0].text
    world.unit_path.write_bytes(world.text("mine"))
    world.manager.reload()
    assert "edited by hand" in verify(world.context()).messages[0].text


def test_records_that_are_older_than_the_unit_are_told_as_that(world: World) -> None:
    """With a STATE from a backup the unit was "edited by hand"; without one tunerd had deployed nothing."""
    ctx, copy = world.context(), world.folder / "copy"
    deploy(ctx, world, "old")
    shutil.copytree(world.paths.state_dir, copy)
    world.clock.advance(86400.0)
    text = f"# {MARK}\n".encode() + world.text("new")
    for alias, new in (("newer", world.text("newer")), ("new", text)):
        locked_swap(ctx, world.request(new, alias=alias))
        world.clock.advance(60.0)

    shutil.rmtree(world.paths.state_dir)
    assert (
        "no record of llama-server.service, though tunerd wrote it" in verify(ctx).messages[0].text
    )
    copy.rename(world.paths.state_dir)

    (told,) = verify(ctx).messages
    assert told.text.startswith("the unit is newer than the records, which do not know `llama")
    assert "rollback --to 1` goes back to the older" in str(told.hint)


def test_a_server_that_its_manager_starts_again_is_no_failure_to_roll_back_from(
    world: World,
) -> None:
    text = world.text("old", service="Restart=on-failure\nRestartSec=5")
    swap(world.context(), world.request(text, alias="old"))
    world.manager.end_main(UNIT, Ending(signal=signal.SIGKILL))

    messages = status(world.context()).messages
    drift = verify(world.context()).payload["drift"]
    assert "failed" not in {one.code for one in messages}
    assert {one["code"] for one in drift} == {"restarts"}


def test_one_goes_back_from_a_failure_only_where_something_was_deployed(world: World) -> None:
    world.unit_path.write_bytes(world.text("by hand"))
    world.manager.reload()

    def hint() -> str | None:
        world.manager.end_main(UNIT, Ending(code=1))
        messages = status(world.context()).messages
        return next(one.hint for one in messages if one.code == "failed")

    world.manager.start(UNIT)
    assert "rollback" not in str(hint())
    deploy(world.context(), world, "old")
    assert hint() == "tunerd rollback"


def test_a_change_that_ends_while_one_looks_counts_as_under_way_so_nobody_takes_a_part_for_all(
    world: World,
) -> None:
    deploy(world.context(), world, "old")
    change = contextlib.ExitStack()
    change.enter_context(lock(world.paths.lock, purpose="apply", since="now"))

    def seen(state: UnitState) -> UnitState:
        change.close()
        return state

    services = odd(world.manager, seen)
    assert status(replace(world.context(), services=services)).payload["change_under_way"]

    assert not status(world.context()).payload["change_under_way"]


def test_each_thing_that_changed_since_is_named(world: World, tmp_path: Path) -> None:
    model, engine = tmp_path / "x.gguf", tmp_path / "llama-server"
    for path in (model, engine):
        path.write_text("as deployed")
    look = model.stat()
    file = {"path": str(model), "size_bytes": look.st_size, "mtime_ns": look.st_mtime_ns}
    request = world.request(world.text("old"), alias="old")
    generation = replace(
        request.generation,
        engine_components=((str(engine), sha256(engine.read_bytes()) or ""),),
        model_identity={"files": [file]},
    )
    swap(world.context(), replace(request, generation=generation))

    def found() -> set[str]:
        return {one["code"] for one in verify(world.context()).payload["drift"]}

    assert found() == set()
    os.utime(model, ns=(0, 0))
    engine.write_text("newer")
    assert found() == {"model-changed", "engine-changed"}
    assert world.drift() == {"model-changed"}, "status reads no engine"
    model.unlink()
    world.manager.stop(UNIT)
    world.manager.disable(UNIT)
    assert found() == {"model-gone", "engine-changed", "not-running", "not-enabled"}
    world.unit_path.unlink()
    world.manager.reload()
    assert "unit-edited" in found()


def test_an_edit_by_hand_is_told_without_the_secrets_in_it(world: World) -> None:
    deploy(world.context(), world, "old")
    more = b'\n[Service]\nNice=5\nEnvironment="LLAMA_API_KEY=sk-one"\nEnvironment=HF_TOKEN=sk-two\n'
    world.put((world.standing or b"") + more)

    (told,) = [one for one in status(world.context()).payload["drift"] if "Nice" in one["text"]]

    assert "sk-" not in told["text"]


def test_a_swap_whose_ending_could_not_be_written_is_no_edit_by_hand(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    (world.paths.generations_dir / "000002/outcome.json").unlink()
    assert world.drift() == set()


# A record that cannot be read.


@pytest.mark.parametrize("record", ["{", "[]", json.dumps({"schema": 2}), ""])
def test_a_record_that_cannot_be_read_is_set_aside_where_what_stands_had_served(
    world: World, record: str
) -> None:
    deploy(world.context(), world, "old")
    world.manager.stop(UNIT)
    path = world.paths.journal_dir / f"{UNIT}.json"
    path.write_text(record)

    found = world.recover()

    assert found is not None
    assert world.serving_alias() == "old"
    assert not path.exists()
    assert path.with_name(f"{path.name}.damaged").read_text() == record
    deploy(world.context(), world, "new")


def test_a_record_that_cannot_be_read_stays_where_what_stands_is_on_trial(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    (world.paths.generations_dir / "000002/outcome.json").unlink()
    path = world.paths.journal_dir / f"{UNIT}.json"
    path.write_text("{")

    with pytest.raises(HostError):
        world.recover()

    assert path.exists()
    assert world.outcomes()[0] is Outcome.RUNNING


# What it tells.


def test_a_drop_in_that_a_swap_found_is_no_drift_after_it_and_a_later_one_is(world: World) -> None:
    first = world.put_drop_in("Nice=1", "a.conf")
    deploy(world.context(), world, "old")
    assert world.verify() == 0, "it was there before the first unit"
    deploy(world.context(), world, "new")
    second = world.put_drop_in("Nice=1", "b.conf")
    assert world.verify() == 6

    go_back(world.context())

    assert world.verify() == 0
    newest = next(world.context().generations.entries())
    assert newest.ending.drop_ins == (str(first), str(second))
    world.clock.advance(10)
    world.put_drop_in("Nice=1", "b.conf")
    assert world.verify() == 6, "it was edited since"
    go_back(world.context())
    assert world.verify() == 0
    world.put_drop_in("Nice=1", "c.conf")
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


def test_what_a_kill_left_of_any_write_is_cleared_and_what_others_keep_beside_it_stays(
    world: World,
) -> None:
    """Only folders of swaps and of the cache were cleared: a rollout, an import, a profile, and the settings kept theirs."""
    paths = world.paths
    deploy(world.context(), world, "old")
    names = ("journal/x.json", "tuned/x.toml", "workloads/x.toml", "imported/x.json", "jobs.json",
             "fleet/rollouts/1.json", "cache/x.json", "probation/2.json", "notices/x.json")  # fmt: skip
    written = [
        *(paths.state_dir / name for name in names),
        *(paths.settings_file, paths.site_profiles / "mine.toml", paths.measurement),
    ]
    cut = [path.with_name(f".{path.name}.1a2b3c4d.tmp") for path in written]
    others = [paths.config_dir / ".notes.tmp", paths.unit_dir / ".other.service.1a2b3c4d.tmp",
              paths.site_profiles / ".mine.toml.tmp", paths.site_profiles / ".notes.tmp"]  # fmt: skip
    for path in (*cut, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    recover(world.context())

    assert [path for path in cut if path.exists()] == []
    assert all(path.exists() for path in others)
