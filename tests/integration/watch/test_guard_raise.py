"""What the guard against out-of-memory deploys: what serves, with a larger margin, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.build_box import build_box
from tests.support.deployment import profile
from tests.support.local_box import Box
from tests.support.ports import free_port
from tests.support.stand_in import RTX_4070_SUPER, install
from tunerd.measure.compare import plan_side, side_of
from tunerd.sweep.plan import SweepRequest, prepare
from tunerd.units.generations import Generation
from tunerd.watch.guarding import margin_now

UNIT = "llama-server.service"


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    """A stand-in with a card serves by profile `card`, with a margin of 1664 MiB."""
    with build_box(None, shape="tiny") as made:
        box = made.box
        engine = install(box.folder / "eng", device=RTX_4070_SUPER, record=None)
        box.configure(f'[engines.eng]\npath = "{engine.program}"\n')
        card = profile("eng", match__gpu="RTX 4070", model__path=str(box.model),
                       memory__fit_mib=1664, serving__port=free_port())  # fmt: skip
        box.configure(card, "profiles/card.toml")
        box.json("apply", "card", "--yes")
        yield box


@pytest.fixture(autouse=True)
def site(box: Box) -> Iterator[Path]:
    """The profile that serves; it and the unit stand as they were deployed."""
    path = box.folder / "config/profiles/card.toml"
    text, before = path.read_text(), box.unit.read_text()
    yield path
    path.write_text(text)
    if box.unit.read_text().startswith(before):
        box.unit.write_text(before)


def raised(box: Box) -> Any:
    return box.json("guard", "raise-margin", "--yes", code=None)


def serving(box: Box) -> Generation:
    entry = box.context.generations.serving(UNIT)
    assert entry is not None
    return entry.generation


def margin_of(box: Box) -> str:
    argv = serving(box).argv
    return argv[argv.index("--fit-target") + 1]


def test_who_raises_the_margin_by_hand_is_asked_first(box: Box) -> None:
    before = serving(box).number
    done = box.call("guard", "raise-margin")
    assert done.returncode == 2
    assert "--fit-target 1792" in done.stderr, "what would change is shown"
    assert "--yes" in done.stderr
    assert serving(box).number == before


def test_a_raise_says_what_it_did_and_nothing_of_what_it_did_not_see_and_rollback_undoes_it(
    box: Box,
) -> None:
    said = raised(box)
    assert "error" not in said
    texts = [one["text"] for one in said["messages"]]
    assert "the fit margin is now 1792 MiB; it was 1664 MiB" in texts
    assert "ran out" not in str(said)
    assert margin_of(box) == "1792"
    box.json("rollback", "--yes")
    assert (margin_of(box), dict(serving(box).pins)) == ("1664", {})


def test_a_margin_that_the_server_does_not_keep_is_not_raised(box: Box, site: Path) -> None:
    site.write_text(f"{site.read_text()}memory.n_cpu_moe = 1\n")
    box.json("apply", "card", "--yes")
    before = serving(box).number
    said = box.json("guard", "raise-margin", "--yes", code=2)
    assert "has no fit margin" in said["error"]["message"]
    assert serving(box).number == before
    box.json("rollback", "--yes")


def test_a_unit_that_a_person_edited_is_left_alone(box: Box) -> None:
    with box.unit.open("a") as unit:
        unit.write("# mine\n")
    edited = box.unit.read_text()
    assert margin_now(box.context).left_alone == "its unit was edited by hand"
    assert raised(box)["error"]["message"] == "the unit was edited by hand, so no guard replaces it"
    assert box.unit.read_text() == edited


def test_a_profile_that_changed_meanwhile_is_not_deployed_by_the_way(box: Box, site: Path) -> None:
    site.write_text(f"{site.read_text()}serving.n_batch = 64\n")
    before = box.unit.read_text()
    assert margin_now(box.context).left_alone is None
    error = raised(box)["error"]
    assert "no longer says what serves" in error["message"]
    assert "64" in error["cause"]
    assert box.unit.read_text() == before


def test_a_tuned_layer_that_was_left_out_is_left_out_again(box: Box) -> None:
    tuned = box.context.paths.tuned_dir / "card.toml"
    tuned.parent.mkdir(parents=True, exist_ok=True)
    tuned.write_text("[serving]\nn_batch = 64\n")
    try:
        box.json("apply", "card", "--untuned", "--yes")
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


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_server_that_somebody_stopped_is_started_by_no_raise(box: Box, is_edited: bool) -> None:
    """It was, where the raise was refused as well, and where another change was under way."""
    if is_edited:
        with box.unit.open("a") as unit:
            unit.write("# mine\n")
    services = box.context.services
    services.stop(UNIT)
    told = raised(box)["error"]
    assert is_edited or told["message"] == f"{UNIT} was stopped meanwhile"
    assert not services.state(UNIT).runs
