"""Swaps that end are told once to whoever is not the one who made them."""

from __future__ import annotations

import shutil

import pytest

from tests.fault.fuse import Fuse, Kind, Life
from tests.fault.scenarios import deploy, go_back
from tests.fault.world import BROKEN, World
from tunerd.errors import RolledBack
from tunerd.production.probation import ProbationRecord, keep_probation
from tunerd.production.rollback import rollback
from tunerd.watch.daemon import Swaps
from tunerd.watch.figures import Event
from tunerd.watch.history import HistoryKeeper, history


def watching(world: World) -> tuple[Swaps, list[Event]]:
    told: list[Event] = []
    return Swaps(world.context(), told.append), told


def test_a_swap_that_ended_while_no_daemon_looked_is_told_by_the_next_one(world: World) -> None:
    ctx, told = world.context(), list[Event]()
    keeper = HistoryKeeper(ctx, told.append)
    deploy(ctx, world, "old")
    for name in ("new", "newer"):
        world.clock.advance(10.0)
        seen_s = ctx.clock.now_s()
        deploy(ctx, world, name)
        Swaps(ctx, keeper.add_event).tell_missed(seen_s)
        Swaps(ctx, keeper.add_event).tell_missed(
            seen_s
        )  # one that was killed had not said how long it saw
    seen_s = ctx.clock.now_s()
    swaps = Swaps(ctx, keeper.add_event)
    deploy(ctx, world, "newest")  # as a recovery ends one at its start
    swaps.tell_missed(seen_s)
    swaps.look()
    world.clock.advance(10.0)
    Swaps(ctx, keeper.add_event).tell_missed(ctx.clock.now_s())
    Swaps(ctx, keeper.add_event).tell_missed(None)
    texts = [one.text for one in history(ctx, 0.0, 0.0).events]
    assert texts == [f"generation {number} (apply) serves" for number in (4, 3, 2)]


def test_each_swap_is_told_once(world: World) -> None:
    swaps, told = watching(world)
    deploy(world.context(), world, "old", "new")
    for _ in range(3):
        swaps.look()
    assert [(one.kind, one.level) for one in told] == [("swap", "note")] * 2
    assert "generation 2 (apply) serves" in told[1].text


def test_of_a_state_that_is_mounted_late_or_restored_what_is_new_is_told_and_nothing_again(
    world: World,
) -> None:
    """Its numbers had been seen: no swap was told until there were as many as before."""
    deploy(world.context(), world, "old")
    kept = world.paths.generations_dir
    shutil.copytree(kept, world.folder / "copy")
    deploy(world.context(), world, "new", "newer")
    swaps, told = watching(world)
    kept.rename(world.folder / "away")
    late, told_late = watching(world)  # a daemon that began before it was mounted

    def looked() -> list[str]:
        swaps.look()
        late.look()
        texts = [one.text for one in told]
        assert texts == [one.text for one in told_late]
        return texts

    assert looked() == []
    (world.folder / "away").rename(kept)
    assert looked() == []
    deploy(world.context(), world, "newest")
    seen = ["generation 4 (apply) serves"]
    assert looked() == seen

    shutil.rmtree(kept)
    (world.folder / "copy").rename(kept)
    assert looked() == seen
    deploy(world.context(), world, "other")
    assert looked() == [*seen, "generation 2 (apply) serves"]


def test_a_swap_that_led_back_is_told_with_its_cause(world: World) -> None:
    deploy(world.context(), world, "old")
    swaps, told = watching(world)
    with pytest.raises(RolledBack):
        deploy(world.context(), world, "new", program=BROKEN)
    swaps.look()
    assert [(one.kind, one.level) for one in told] == [("swap-undone", "warning")]
    assert "what was there before serves again: " in told[0].text


def test_a_probation_that_takes_back_is_told_with_what_it_found(world: World) -> None:
    deploy(world.context(), world, "old", "new")
    with pytest.raises(RolledBack):  # which ends no probation
        deploy(world.context(), world, "bad", program=BROKEN)
    swaps, told = watching(world)
    why = "20 tok/s in service, 40 were measured"
    keep_probation(
        world.context(),
        ProbationRecord(2, None, "running", why, 0.0, 0.0, left_s=900.0, restarts=0, boot_id=None),
    )
    rollback(world.context(), to=None, drain=False, confirm=lambda _: None, reason="guard")
    swaps.look()
    assert [(one.kind, one.level) for one in told] == [("taken-back", "warning")]
    assert told[0].text.endswith("serves: 20 tok/s in service, 40 were measured")


def test_going_back_to_nothing_is_told_as_that(world: World) -> None:
    deploy(world.context(), world, "old")
    swaps, told = watching(world)
    go_back(world.context())
    swaps.look()
    assert [one.text for one in told] == [
        "generation 2 (rollback) removed the unit; nothing serves"
    ]


def test_a_record_that_is_about_to_be_written_is_waited_for(world: World) -> None:
    swaps, told = watching(world)
    (world.paths.generations_dir / "000001").mkdir(parents=True)
    swaps.look()
    (world.paths.generations_dir / "000001").rmdir()
    deploy(world.context(), world, "old")
    swaps.look()
    assert [one.kind for one in told] == ["swap"]


def test_a_swap_that_was_cut_short_is_told_when_it_is_over(world: World) -> None:
    whole = Fuse()
    deploy(world.context(), world, "older")
    deploy(world.context(whole), world, "old")
    swaps, told = watching(world)
    life = Life(world.paths.lock)
    restart = max(at for at, step in enumerate(whole.steps) if step.kind is Kind.UNITS)
    context = world.context(Fuse(restart, life.die))
    life.live(lambda: deploy(context, world, "new"))
    assert list(world.paths.journal_dir.glob("*.json")), "killed in the middle"
    swaps.look()
    assert told == []
    anew, told_anew = watching(world)
    world.recover()
    swaps.look()
    anew.look()
    assert len(told) == 1
    assert told[0].text.startswith("generation 3 (apply)")
    assert [one.text for one in told_anew] == [told[0].text]
