"""What the guard against out-of-memory deploys: what serves, with a larger margin, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box, deployed
from tunerd.actions.guard_margin import margin_now
from tunerd.system.ports import free_port

pytestmark = pytest.mark.llama
MARGIN = "[memory]\nfit_mib = 1664\n"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with deployed(tmp_path_factory.mktemp("box"), free_port()) as made:
        yield made


@pytest.fixture(autouse=True)
def site(box: Box) -> Iterator[Path]:
    """The profile that serves, with a margin; its unit stands as it was deployed."""
    path = box.context.paths.site_profiles / "cpu-embedded.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MARGIN)
    before = box.unit.read_text()
    yield path
    path.unlink()
    if box.unit.read_text().startswith(before):
        box.unit.write_text(before)


def raised(box: Box) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(box.call("guard", "raise-margin", "--json").stdout)
    return said


def test_a_unit_that_a_person_edited_is_left_alone(box: Box) -> None:
    with box.unit.open("a") as unit:
        unit.write("# mine\n")
    edited = box.unit.read_text()
    assert margin_now(box.context).left_alone == "its unit was edited by hand"
    assert raised(box)["error"]["message"] == "the unit was edited by hand, so no guard replaces it"
    assert box.unit.read_text() == edited


def test_a_profile_that_changed_meanwhile_is_not_deployed_by_the_way(box: Box, site: Path) -> None:
    site.write_text(f"{MARGIN}[serving]\nn_batch = 64\n")
    before = box.unit.read_text()
    assert margin_now(box.context).left_alone is None
    error = raised(box)["error"]
    assert "says something else by now" in error["message"]
    assert "64" in error["cause"]
    assert box.unit.read_text() == before
