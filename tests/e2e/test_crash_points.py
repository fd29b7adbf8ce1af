"""Death at each effect of a swap, on disks that then lose what was not synced.

`TUNERD_TEST_FAULTS=1` tries all scenarios and layouts where by default a sample is tried.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.campaign import IS_CAMPAIGN
from tests.fault.lossy import LAYOUTS, Layout, Story
from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.world import in_memory
from tests.support.ports import free_port

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
