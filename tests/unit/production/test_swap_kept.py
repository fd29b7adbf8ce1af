"""What stood before is kept, whoever removes its backup, and put back as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.scenarios import deploy
from tests.fault.world import BROKEN, UNIT, World
from tests.support.fakes import Invocation, Life
from tunerd.app import Context
from tunerd.errors import HostError, RolledBack
from tunerd.production.rollback import rollback
from tunerd.production.status import verify
from tunerd.settings import BackupSettings
from tunerd.units.generations import Outcome


def keeping(world: World, keep: int) -> Context:
    ctx = world.context()
    return replace(
        ctx, settings=ctx.settings.model_copy(update={"backups": BackupSettings(keep=keep)})
    )


def test_the_only_copy_of_a_unit_that_a_person_wrote_is_never_pruned(world: World) -> None:
    mine = world.text("mine")
    world.put(mine)
    deploy(keeping(world, 1), world, "first")
    number = 1
    kept = world.paths.generations_dir / f"{number:06}" / "replaced"
    kept.unlink()  # as generations of earlier versions are
    for alias in ("second", "third", "fourth"):
        deploy(keeping(world, 1), world, alias)
    assert mine in [path.read_bytes() for path in world.backups()]
    assert len(world.backups()) == 2, "what tunerd had deployed is in its generations"


def test_a_pruned_unit_is_gone_back_to_by_the_name_that_history_has(world: World) -> None:
    mine = world.text("mine")
    world.put(mine)
    deploy(keeping(world, 1), world, "first")
    (backup,) = world.backups()
    for alias in ("second", "third"):
        deploy(keeping(world, 1), world, alias)
    assert not backup.exists()

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
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")
    world.unit_path.write_bytes(world.text("old"))
    world.manager.reload()
    told = verify(world.context())
    assert told.exit_code == 6
    assert "generation 1 again" in told.messages[0].text
    world.unit_path.write_bytes(world.text("mine"))
    world.manager.reload()
    assert "edited by hand" in verify(world.context()).messages[0].text


def test_a_swap_whose_ending_could_not_be_written_is_no_edit_by_hand(world: World) -> None:
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")
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
    deploy(world.context(), world, "old")
    deploy(world.context(), world, "new")
    (world.paths.generations_dir / "000002/outcome.json").unlink()
    path = world.paths.journal_dir / f"{UNIT}.json"
    path.write_text("{")

    with pytest.raises(HostError):
        world.recover()

    assert path.exists()
    assert world.outcomes()[0] is Outcome.RUNNING
