"""Death at each effect of a swap, on disks that then lose what was not synced.

Each process of the story is a fork of this one, so that its death is a real one.

`TUNERD_TEST_FAULTS=1` tries all scenarios and layouts where by default a sample is tried.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from tests.fault.campaign import IS_CAMPAIGN
from tests.fault.fuse import Fuse, Step
from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.world import UNIT, World, in_memory
from tests.support.forked import Forked
from tests.support.lossy_disk import LossyDisk
from tests.support.ports import free_port
from tests.support.programs import program
from tunerd.units.generations import Outcome

DIED = 137
_DISK_MIB = 16


@dataclass(frozen=True)
class Layout:
    """Which disks there are: one for all or two, forgiving as ext4 is by itself or not."""

    apart: bool
    strict: bool

    def __str__(self) -> str:
        disks = "units and state apart" if self.apart else "one disk"
        return f"{disks}, {'strict' if self.strict else 'as ext4 is'}"


LAYOUTS = tuple(Layout(apart, strict) for apart in (False, True) for strict in (False, True))


class Story:
    """Fresh disks; the swap dies on them, and they forget."""

    def __init__(self, folder: Path, layout: Layout, port: int) -> None:
        folder.mkdir()
        self._port = port
        names = ("units", "state") if layout.apart else ("units",)
        self._disks = [
            LossyDisk(folder / name, size_mib=_DISK_MIB, strict=layout.strict) for name in names
        ]
        for disk in self._disks:
            disk.create()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for disk in self._disks:
            disk.remove()

    @contextlib.contextmanager
    def _world(self) -> Iterator[World]:
        world = World(self._disks[0].mount_point, self._disks[-1].mount_point, port=self._port)
        try:
            yield world
        finally:
            world.close()

    def die(self, scenario: Scenario, number: int) -> str | None:
        """Prepare, sync, and die before this effect; None if the swap has fewer."""

        def act(tell: Callable[[Any], None]) -> None:
            with self._world() as world:
                scenario.prepare(world)
                for disk in self._disks:
                    program("sync", "--file-system", disk.mount_point)

                def burn(step: Step) -> None:
                    tell(step.text)
                    os._exit(DIED)

                scenario.act(world.context(Fuse(number, burn)), world)

        code, told = _in_a_process(act)
        assert code in {0, DIED}, told
        return told if code == DIED else None

    def cut(self) -> None:
        """Everything that was not synced is gone."""
        images = [disk.crash_image() for disk in self._disks]
        for disk, image in zip(self._disks, images, strict=True):
            disk.come_back(image)

    def boot_and_recover(self) -> dict[str, Any]:
        """Boot, recover, and tell how it is then."""

        def act(tell: Callable[[Any], None]) -> None:
            with self._world() as world:
                torn = world.standing
                world.reboot()
                found = world.recover()
                serving = world.context().generations.serving(UNIT)
                tell(
                    {
                        "after_the_cut": _text(torn),
                        "found": found,
                        "unit": _text(world.standing),
                        "alias": world.serving_alias(),
                        "enabled": bool(world.manager.state(UNIT).is_enabled),
                        "backups": [_text(path.read_bytes()) for path in world.backups()],
                        "leftovers": world.leftovers(),
                        "unended": Outcome.RUNNING in world.outcomes(),
                        "verify": world.verify() if serving is not None else None,
                        "again": world.recover(),
                    }
                )

        code, told = _in_a_process(act)
        assert code == 0, told
        found: dict[str, Any] = told
        return found

    def text(self, alias: str) -> str:
        """The unit whose server calls its model so."""
        with self._world() as world:
            return world.text(alias).decode()


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("latin-1")


def _in_a_process(act: Callable[[Callable[[Any], None]], None]) -> tuple[int, Any]:
    """Exit status of a fork that runs this, and the last thing that it told."""
    code, said = Forked(lambda tell: act(lambda told: tell(json.dumps(told)))).end()
    return code, json.loads(said.splitlines()[-1]) if said and code in {0, DIED} else said


MOST = 200
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
# What stands before, and what is to stand after it.
ENDS = {
    "apply over a deployed unit": ("old", "new"),
    "first apply": (None, "new"),
    "apply over a unit made by hand": ("by-hand", "new"),
    "rollback": ("older", "old"),
    "rollback to no unit": ("old", None),
}
SAMPLE = [
    ("apply over a deployed unit", Layout(apart=True, strict=True), 1),
    ("first apply", Layout(apart=False, strict=False), 3),
    ("rollback to no unit", Layout(apart=False, strict=True), 3),
]
ALL = [(name, layout, 1) for name in ENDS for layout in LAYOUTS]


@pytest.mark.timeout(2700)
@pytest.mark.parametrize(("name", "layout", "every"), ALL if IS_CAMPAIGN else SAMPLE, ids=str)
def test_after_death_at_each_effect_and_a_cut_one_whole_unit_serves(
    tmp_path: Path, name: str, layout: Layout, every: int
) -> None:
    before, after = ENDS[name]
    problems: list[str] = []
    ends: list[bool] = []
    with in_memory(tmp_path) as folder:
        for number in range(0, MOST, every):
            told, is_new = _one(folder / f"{number}", BY_NAME[name], layout, number, problems)
            ends.append(is_new)
            if told is None:
                break
    assert not problems, "\n".join(problems)
    assert before != after
    assert len(ends) > 20 / every
    assert ends == sorted(ends), "once the new unit is kept, it is kept from then on"
    assert ends[-1], "a swap that was reported as done is not lost"


def _one(
    folder: Path, scenario: Scenario, layout: Layout, number: int, problems: list[str]
) -> tuple[str | None, bool]:
    """The effect before which it died, and whether the new unit stands in the end."""
    before, after = ENDS[scenario.name]
    with Story(folder, layout, free_port()) as story:
        told = story.die(scenario, number)
        story.cut()
        found = story.boot_and_recover()
        texts = {alias: story.text(alias) for alias in (before, after) if alias is not None}
    old, new = (texts.get(alias) if alias else None for alias in (before, after))
    is_new = found["unit"] == new
    alias = after if is_new else before
    checks = {
        "the unit file is torn": found["after_the_cut"] in {old, new},
        "the unit is neither the old nor the new one": found["unit"] in {old, new},
        "the old unit is lost": not is_new or old is None or old in found["backups"],
        "another server answers, or none": found["alias"] == alias,
        "it does not start at boot": found["enabled"] == (alias is not None),
        f"left over: {found['leftovers']}": not found["leftovers"],
        "a generation has no ending": not found["unended"],
        "verify sees a difference": found["verify"] in {0, None},
        "recovery finds something again": found["again"] is None,
    }
    where = f"{number} ({told})"
    problems += [f"{where}: {text}: {found}" for text, holds in checks.items() if not holds]
    return told, is_new
