"""Where a rollback leads, and that nothing is locked while a person reads that."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from tests.fault import fuse
from tests.fault.scenarios import deploy, go_back
from tests.fault.world import BROKEN, UNIT, OwnPids, World, a_generation
from tests.support.fakes import Life
from tunerd.engine.builds import why_no_start
from tunerd.engine.serving import read_live_unit
from tunerd.errors import (
    ConfigError,
    DeployError,
    HostError,
    RolledBack,
    ServiceError,
    TunerdError,
    UsageError,
)
from tunerd.machine.files import MAX_READ_BYTES, is_locked
from tunerd.production.profiles import new_profile
from tunerd.production.rollback import Target, find_target, list_targets, rollback
from tunerd.result import Progress
from tunerd.tryout.local import enabled_mark
from tunerd.units.generations import Ending, Outcome
from tunerd.units.manager import UnitState
from tunerd.units.text import MARK, demand_as_shown, shown_hash
from tunerd.web.view import backups_table
from tunerd.words import sha256


def _target(world: World) -> bytes | None:
    return find_target(world.context(), None).text


def test_the_backup_of_a_failed_swap_is_not_offered_before_that_of_the_last_good_one(
    world: World,
) -> None:
    deploy(world.context(), world, "old", "new")
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "newest", program=BROKEN)

    assert _target(world) == world.text("old")


def test_a_first_swap_that_failed_leads_no_rollback_to_no_unit_file_over_one_by_hand(
    world: World,
) -> None:
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "new", program=BROKEN)
    world.put(world.text("by-hand"))

    with pytest.raises(DeployError, match="nothing to go back to"):
        _target(world)


def test_from_a_unit_that_was_edited_by_hand_one_goes_back_to_what_was_deployed(
    world: World,
) -> None:
    """It led behind that, to an older model perhaps; the next edit led to the first, which never served."""
    deploy(world.context(), world, "old", "new")
    for edit in ("broken", "broken again"):
        world.unit_path.write_bytes(world.text(edit))

        assert _target(world) == world.text("new")

        go_back(world.context())
    world.unit_path.unlink()
    assert _target(world) == world.text("new")


def test_a_newest_generation_that_changed_nothing_in_the_unit_is_passed_over_and_that_is_said(
    world: World,
) -> None:
    deploy(world.context(), world, "old", "new")
    assert find_target(world.context(), None).messages == ()
    deploy(world.context(), world, "new")

    target = find_target(world.context(), None)

    assert target.text == world.text("old")
    (said,) = target.messages
    assert "generation 3 did not change the unit" in said.text


def test_where_history_is_silent_the_newest_backup_is_offered(world: World) -> None:
    world.put(world.text("live"))
    for name in ("b", "a"):
        (world.paths.unit_dir / f"{UNIT}.pre-{name}").write_bytes(world.text(name))
        time.sleep(0.02)  # by when it was made: the clock of the disk ticks every few milliseconds
    os.utime(world.paths.unit_dir / f"{UNIT}.pre-b", (0, 0))

    assert _target(world) == world.text("b")


def test_a_backup_that_cannot_be_read_keeps_nobody_from_going_back(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    (backup,) = (path for path in world.backups() if path.read_bytes() == world.text("old"))
    for path in (backup, world.paths.unit_dir / f"{UNIT}.pre-huge"):
        with path.open("wb") as file:
            file.truncate(MAX_READ_BYTES + 1)

    listed = list_targets(world.context()).payload["backups"]

    assert [one["is_live"] for one in listed] == [False] * len(listed)
    assert _target(world) == world.text("old")
    with pytest.raises(HostError, match="larger than"):  # it is there, as `--list` says
        find_target(world.context(), f"{UNIT}.pre-huge")


def test_what_a_backup_lacks_is_not_said_to_stand_in_the_unit(world: World) -> None:
    world.put(world.text("old", service="User=none-such"))
    deploy(world.context(), world, "new")
    (said,) = (
        one for one in find_target(world.context(), None).messages if one.code == "may-not-start"
    )
    assert "there is no user `none-such`, which `User=` names" in said.text
    assert str(world.unit_path) not in said.text


def test_a_backup_whose_record_is_lost_is_known_as_tunerds_by_its_text(world: World) -> None:
    """Of those without a record all were called "not by tunerd", by which a person finds their own unit again."""
    world.put(world.text("one"))
    for name, mark in (("20260101T000000Z-apply", f"# {MARK}".encode()), ("mine", b"")):
        (world.paths.unit_dir / f"{UNIT}.pre-{name}").write_bytes(mark + world.text(name))

    table = backups_table(list_targets(world.context()).payload["backups"])

    told = {str(row[0]).rpartition("-")[2]: row[2:4] for row in table.rows}
    assert told == {
        "apply": ("not on record", "by tunerd"),
        "mine": ("not on record", "not by tunerd"),
    }


def test_what_another_unit_replaced_is_never_offered(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    ctx, other = world.context(), "other.service"
    name = f"{other}.pre-20260101T000000Z-apply"
    (world.paths.unit_dir / name).write_bytes(world.text("others"))
    theirs = a_generation(sha256(world.text("x")))
    theirs = replace(theirs, number=3, unit=other, replaced_backup=name)
    ctx.generations.create(theirs, world.text("x"), world.text("others"))
    ctx.generations.end(3, Ending(Outcome.SERVING, 1.0, None, None, None))

    assert _target(world) == world.text("old")
    for to in ("3", name):
        with pytest.raises(UsageError):
            find_target(world.context(), to)
    go_back(world.context())
    assert world.serving_alias() == "old"


@pytest.mark.parametrize(
    ("program", "has_model", "hint"),
    [
        ("/bin/true", False, "put the model back to `"),
        ("/no/such/server", True, "`tunerd engines keep` keeps programs"),
        ("no-such-llama-server", True, "`tunerd engines keep` keeps programs"),
    ],
)
def test_where_an_older_unit_cannot_serve_any_more_the_hint_is_about_what_is_gone(
    world: World, program: str, has_model: bool, hint: str
) -> None:
    name, model = f"{UNIT}.pre-mine", world.folder / "x.gguf"
    if has_model:
        model.write_bytes(b"")
    text = f"[Service]\nExecStart={program} -m {model} --port 1\n"
    (world.paths.unit_dir / name).write_text(text)

    with pytest.raises(DeployError, match="can no longer serve") as caught:
        find_target(world.context(), name)

    assert hint in (caught.value.hint or "")
    assert caught.value.cause == f"gone: `{program if has_model else model}`"


def test_what_did_not_start_at_boot_does_not_after_one_went_back_to_it_and_that_is_said(
    world: World,
) -> None:
    """It could not be gone back to where its unit has no [Install], and was enabled where it has one."""
    by_hand, _, _ = world.text("by-hand").partition(b"[Install]")
    for text in (by_hand, world.text("by-hand")):
        world.put(text, enables=False)
        deploy(world.context(), world, "new")
        assert world.snapshot().is_enabled

        (said,) = find_target(world.context(), None).messages
        go_back(world.context())

        assert said.text == f"{UNIT} will be disabled; it is not now"
        assert (world.standing, world.serving_alias()) == (text, "by-hand")
        assert not world.snapshot().is_enabled
    go_back(world.context())
    assert world.serving_alias() == "new"
    assert world.snapshot().is_enabled

    backup = world.paths.unit_dir / f"{UNIT}.pre-mine"  # of which history knows nothing
    backup.write_bytes(by_hand + b"# mine\n")
    assert find_target(world.context(), backup.name).enable is False


def test_where_no_unit_stood_nothing_is_left_enabled(world: World) -> None:
    deploy(world.context(), world, "old")
    go_back(world.context())
    assert not enabled_mark(world.paths, UNIT).exists()


def test_a_unit_file_that_is_gone_is_missed_where_a_rollback_to_none_had_failed(
    world: World,
) -> None:
    """Generation 2 had removed it, and was undone: that counted as what is there."""
    deploy(world.context(), world, "old")
    world.manager.errors["stop"] = [ServiceError("refused")]
    with pytest.raises(TunerdError):
        go_back(world.context())
    assert world.serving_alias() == "old"
    assert world.verify() == 0

    world.unit_path.unlink()
    world.manager.reload()
    assert world.verify() == 6


@pytest.mark.parametrize("asks", [False, True])
def test_a_rollback_that_finds_a_deployment_cut_short_undoes_that_and_no_more(
    world: World, asks: bool
) -> None:
    """It went one more step back, and took away what had been promoted before."""
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")
    killed = fuse.Life(world.paths.lock)
    context = world.context(fuse.Fuse(0, killed.die, of=fuse.Kind.UNITS))
    killed.live(lambda: deploy(context, world, "newest"))

    def ask(_target: Target) -> None:
        pytest.fail("there is nothing to ask")

    done = rollback(world.context(), to=None, drain=False, ask=ask if asks else None)

    assert world.serving_alias() == "new"
    assert [one.code for one in done.messages] == ["undone", "further"]
    assert done.payload["generation"] == 2
    go_back(world.context())
    assert world.serving_alias() == "old"


def test_an_edit_that_comes_before_a_unit_is_disabled_leaves_it_enabled(world: World) -> None:
    world.put(world.text("by-hand"), enables=False)
    deploy(world.context(), world, "new")
    world.servers[-1].behaviour.slots_are_busy = True

    def edit(told: Progress) -> None:
        if told.text.startswith("waiting for"):
            world.unit_path.write_bytes(world.text("new") + b"# mine\n")

    ctx = replace(world.context(), progress=edit)
    with pytest.raises(DeployError, match="not swapped"):
        rollback(ctx, to=None, drain=True)
    assert world.snapshot().is_enabled


def test_one_bad_file_of_history_stands_in_the_way_of_no_rollback(world: World) -> None:
    deploy(world.context(), world, "one", "two", "three")
    bad = world.paths.generations_dir / "000002" / "replaced"
    bad.unlink()
    bad.mkdir()
    world.unit_path.write_bytes(world.text("three") + b"# mine\n")
    world.manager.reload()
    go_back(world.context())
    assert world.standing == world.text("three")


# A person may take an hour to answer: meanwhile rollback, guards and recovery work.


def test_nothing_is_locked_while_a_person_reads_where_a_rollback_leads(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    seen: list[bool] = []

    def ask(target: Target) -> None:
        seen.append(is_locked(world.paths.lock))
        assert "-ExecStart" in target.diff

    done = rollback(world.context(), to=None, drain=False, ask=ask)

    assert seen == [False]
    assert done.messages == (), "nothing was to be recovered before"
    assert world.serving_alias() == "old"


@pytest.mark.parametrize("is_deployed", [True, False])
def test_who_agreed_to_something_else_than_what_there_is_by_now_is_told(
    world: World, *, is_deployed: bool
) -> None:
    deploy(world.context(), world, "old", "new")
    newest = world.text("newest")

    def ask(_target: Target) -> None:
        if is_deployed:  # somebody else was quicker
            deploy(world.context(), world, "newest")
        else:
            world.unit_path.write_bytes(newest)

    with pytest.raises(DeployError, match="no longer what was shown"):
        rollback(world.context(), to=None, drain=False, ask=ask)

    assert world.standing == newest


def test_what_was_shown_is_the_difference_or_what_stands_for_it() -> None:
    demand_as_shown("-a\n+b", "-a\n+b")
    demand_as_shown("-a\n+b", shown_hash("-a\n+b"))
    with pytest.raises(DeployError):
        demand_as_shown("-a\n+b", shown_hash("-a\n+c"))


def test_one_goes_back_to_a_unit_whose_drop_in_names_its_model(world: World) -> None:
    """The name was looked for in the unit's own text: what served there was taken for somebody else's model."""
    world.put_drop_in("Environment=SIZE=7b")
    world.put(world.text("old-${SIZE}"))
    deploy(world.context(), world, "new")

    go_back(world.context())

    assert world.serving_alias() == "old-7b"


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("RootDirectory={folder}", "/models/x.gguf"),
        ("BindReadOnlyPaths={folder}:/models", "/models/x.gguf"),
        ("TemporaryFileSystem=/models", "/models/x.gguf"),
        ("WorkingDirectory={folder}", "x.gguf"),
    ],
)
def test_files_that_a_unit_sees_elsewhere_are_not_looked_for_here(
    world: World, line: str, model: str
) -> None:
    """Nobody went back to such a unit: its model was told as gone."""
    (world.folder / "x.gguf").write_bytes(b"GGUF")
    text = world.text("old", service=line.format(folder=world.folder), words=f"-m {model}")
    world.put(text)
    assert why_no_start(world.context(), read_live_unit(world.context())) is None
    deploy(world.context(), world, "new")

    go_back(world.context())

    assert world.standing == text
    assert world.serving_alias() == "old"


def test_a_container_is_stopped_by_its_own_unit_and_one_goes_back_to_it(world: World) -> None:
    """It ran on beside the new server, with the port and the card's memory, and the way back met its name."""
    docker = "/usr/bin/docker"
    world.manager.programs[docker] = world.manager.programs["/bin/true"]
    world.put(world.text("old", program=docker, words="run x -m /models/x.gguf"))
    before = world.snapshot()
    with pytest.raises(DeployError, match="runs a container") as refused:
        deploy(world.context(), world, "new")
    assert f"systemctl stop {UNIT}" in str(refused.value.hint)
    assert world.snapshot() == before

    world.manager.stop(UNIT)
    deploy(world.context(), world, "new")
    go_back(world.context())

    assert world.serving_alias() == "old"


@pytest.mark.parametrize("words", ["run -p 9000:{port} x", "run --publish=127.0.0.1:9000:{port} x"])
def test_a_container_that_is_asked_by_another_port_is_seen_to_run(world: World, words: str) -> None:
    """It was asked on the port that it has inside, where nothing listens here, and nobody went back to it."""
    docker = "/usr/bin/docker"
    world.manager.programs[docker] = lambda _invocation: Life()
    text = world.text("old", program=docker, words=words.format(port=world.port))
    world.put(text, starts=False)
    deploy(world.context(), world, "new")

    back = rollback(world.context(), to=None, drain=False)

    assert world.standing == text
    assert "not-asked" in {one.code for one in back.messages}


class _Starting(OwnPids):
    """A manager whose unit has not told yet that it is ready."""

    def state(self, unit: str) -> UnitState:
        return replace(super().state(unit), active_state="activating", sub_state="start")


@pytest.mark.parametrize(
    ("words", "manager"),
    [
        ("/usr/bin/env docker", OwnPids),
        ("/usr/bin/nice -n 5 podman", OwnPids),
        ("/usr/bin/docker", _Starting),
    ],
)
def test_a_container_is_seen_behind_what_only_starts_it_and_while_it_starts(
    world: World, words: str, manager: type[OwnPids]
) -> None:
    """One whose manager hears of it when its model is loaded was replaced, and the container ran on."""
    programs = world.manager.programs
    programs[words.partition(" ")[0]] = programs["/bin/true"]
    world.manager = manager(world.folder, world.clock, programs)
    world.put(world.text("old", program=words, words="run x"))

    with pytest.raises(DeployError, match="runs a container"):
        deploy(world.context(), world, "new")


@pytest.mark.parametrize("program", ["/usr/sbin/chroot", "/usr/bin/bwrap", "/usr/bin/apptainer"])
def test_what_ends_with_its_unit_is_replaced_though_it_sees_other_files(
    world: World, program: str
) -> None:
    """It was refused as a container that would run on; its processes are the unit's own."""
    world.manager.programs[program] = world.manager.programs["/bin/true"]
    world.put(world.text("old", program=program, words="/srv /x"))

    deploy(world.context(), world, "new")
    go_back(world.context())

    assert world.serving_alias() == "old"


def test_a_unit_with_a_root_of_its_own_becomes_no_profile_of_the_files_here(world: World) -> None:
    """The program and the model that stand here at the same paths were taken for its own."""
    world.put(world.text("old", service="RootDirectory=/srv/root"))

    with pytest.raises(ConfigError, match="inside its RootDirectory"):
        new_profile(world.context(), "mine", from_unit=UNIT)


class _WithoutAnalyze(OwnPids):
    """A manager without the program that checks units."""

    def verify(self, unit: str, text: str) -> tuple[str, ...]:  # noqa: ARG002 -- as the manager has it
        raise ServiceError(f"{unit} cannot be checked")


def test_one_goes_back_where_units_cannot_be_checked(world: World) -> None:
    """A systemd-analyze that hung, or was not there, was a reason to stay with what serves badly."""
    world.manager = _WithoutAnalyze(world.folder, world.clock, world.manager.programs)
    deploy(world.context(), world, "old", "new")

    done = rollback(world.context(), to=None, drain=False)

    assert world.standing == world.text("old")
    assert "cannot be checked" in " ".join(one.text for one in done.messages)
