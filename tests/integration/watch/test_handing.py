"""When the daemon has evidence handed in, and what it says where that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.faked import FakedBox, set_to
from tests.support.fakes import Life
from tunerd.machine.files import lock
from tunerd.production.status import HandedIn, status
from tunerd.records import plain
from tunerd.watch.daemon import HandIns
from tunerd.watch.figures import Event

URL = "postgresql+psycopg://tunerd@db.lan/tunerd"
AWAY = "it cannot be reached"


class World(FakedBox):
    """A box whose hand-ins come to what is said beforehand."""

    def __init__(self, folder: Path, url: str | None = URL, ends: HandedIn | None = None) -> None:
        super().__init__(folder, self._begin)
        self.ends, self.begun_s, self.told = ends, list[float](), list[Event]()
        self.ctx = set_to(self.ctx, store__url=url)
        self.hand_ins = HandIns(self.ctx, self.told.append)

    def _begin(self, _start: object) -> Life:
        self.begun_s.append(self.clock.now_s())
        if self.ends is not None:
            self.ctx.files.write_json(self.ctx.paths.handed_in, plain(self.ends))
        return Life(ends_after_s=3)

    def look(self, n: int = 1, before: Callable[[int], None] = lambda _at: None) -> None:
        for at in range(n):
            before(at)
            self.clock.sleep(self.hand_ins.look())


def test_it_is_done_when_a_measurement_has_ended_and_not_before(tmp_path: Path) -> None:
    world = World(tmp_path, ends=HandedIn(at_s=1.0))
    evidence = world.ctx.paths.evidence
    world.look(3)
    with lock(world.ctx.paths.measure_lock, purpose="sweep", since="now"):
        evidence.write_text("a start")
        world.look(3)
    assert len(world.begun_s) == 1
    world.look(3)
    assert len(world.begun_s) == 2

    # A bench of what serves holds no lock: it is over when nothing comes any more.
    world.look(3, before=lambda at: void(evidence.write_text("a sample" * (at + 2))))
    assert len(world.begun_s) == 2
    world.look(3)
    assert len(world.begun_s) == 3


def void(_value: object) -> None:
    """For what gives back something that nobody wants."""


def test_whoever_shares_no_store_has_nothing_started(tmp_path: Path) -> None:
    world = World(tmp_path, url=None)
    world.look(5)
    assert (world.begun_s, world.told) == ([], [])


def test_a_failure_is_told_once_and_again_after_it_was_mended(tmp_path: Path) -> None:
    world = World(tmp_path, ends=HandedIn(problem=AWAY))
    world.look(100)
    assert len(world.begun_s) == 3
    assert [event.kind for event in world.told] == ["hand-in-failed"]
    assert AWAY in world.told[0].text
    assert [one.code for one in status(world.ctx).messages if one.code == "not-handed-in"]

    world.ends = HandedIn(at_s=2.0)
    world.look(50)
    world.ends = HandedIn(problem=AWAY)
    world.look(50)
    assert len(world.told) == 2


def test_a_command_that_dies_is_told_of(tmp_path: Path) -> None:
    world = World(tmp_path, ends=None)
    world.look(3)
    assert ["without a message" in event.text for event in world.told] == [True]


def test_one_that_meets_somebody_who_does_it_by_hand_is_no_failure(tmp_path: Path) -> None:
    """It was refused for that, and told of as evidence that nobody gets."""
    world = World(tmp_path, ends=None)
    path = world.ctx.paths.handed_in
    world.look()
    with lock(path.with_suffix(".lock"), purpose="fleet hand-in", since="now"):
        world.look(3)
        world.ctx.files.write_json(path, plain(HandedIn(at_s=1.0)))
    world.look(3)
    assert (len(world.begun_s), world.told) == (1, [])
