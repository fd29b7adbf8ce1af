"""What the guard against out-of-memory deploys: what serves, with a larger margin, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box, deployed, settings
from tunerd.machine.net import free_port
from tunerd.measure.compare import plan_side, side_of
from tunerd.sweep.plan import SweepRequest, prepare
from tunerd.units.generations import Generation
from tunerd.watch.guarding import margin_now

pytestmark = pytest.mark.llama
UNIT = "llama-server.service"
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


def serving(box: Box) -> Generation:
    entry = box.context.generations.serving(UNIT)
    assert entry is not None
    return entry.generation


def test_a_unit_that_a_person_edited_is_left_alone(box: Box) -> None:
    with box.unit.open("a") as unit:
        unit.write("# mine\n")
    edited = box.unit.read_text()
    assert margin_now(box.context).left_alone == "its unit was edited by hand"
    assert raised(box)["error"]["message"] == "the unit was edited by hand, so no guard replaces it"
    assert box.unit.read_text() == edited


def test_a_margin_counts_only_where_fit_is_left_to_use_it(box: Box, site: Path) -> None:
    assert margin_now(box.context).fit_mib == 1664
    site.write_text(f"{MARGIN}fit = false\n")
    assert margin_now(box.context).fit_mib is None


def test_a_profile_that_changed_meanwhile_is_not_deployed_by_the_way(box: Box, site: Path) -> None:
    site.write_text(f"{MARGIN}[serving]\nn_batch = 64\n")
    before = box.unit.read_text()
    assert margin_now(box.context).left_alone is None
    error = raised(box)["error"]
    assert "says something else by now" in error["message"]
    assert "64" in error["cause"]
    assert box.unit.read_text() == before


def test_a_tuned_layer_that_was_left_out_is_left_out_again(box: Box) -> None:
    tuned = box.context.paths.tuned_dir / "cpu-embedded.toml"
    tuned.parent.mkdir(parents=True, exist_ok=True)
    tuned.write_text("[serving]\nn_batch = 64\n")
    port = serving(box).pins["serving.port"]
    try:
        done = box.call(
            "apply", "cpu-embedded", "--untuned", "--yes", *settings(box, serving__port=port)
        )
        assert done.returncode == 0, done.stderr
        ctx = box.context
        live = side_of(ctx, "live", base=None)
        assert "64" not in plan_side(ctx, live).command.argv
        prepared = prepare(ctx, SweepRequest(budget_s=7200.0), proves=False)
        assert not prepared.plan_request.with_tuned
        assert "error" not in raised(box)
        assert (serving(box).reason, serving(box).with_tuned) == ("guard", False)
        assert "64" not in serving(box).argv
    finally:
        tuned.unlink()


def test_after_a_raise_that_failed_the_server_runs_again(box: Box) -> None:
    with box.unit.open("a") as unit:
        unit.write("# mine\n")
    services = box.context.services
    services.stop(UNIT)
    assert "error" in raised(box)
    assert services.state(UNIT).is_active
