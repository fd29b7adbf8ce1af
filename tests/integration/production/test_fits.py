"""`tunerd fits` and what is emitted of several profiles, on a card as NVML shows it and without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from tests.support.build_box import BuildBox, build_box
from tests.support.fake_gpu import a_card
from tunerd.engine.builds import PlanRequest
from tunerd.production.fits import together
from tunerd.production.plan import Plan, make_plan, memory_of_plan
from tunerd.words import MiB

pytestmark = pytest.mark.llama


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    with build_box(None, shape="tiny") as made:
        for name in ("one", "two"):
            made.profile(name)
        yield made


def test_two_small_models_fit_and_are_written_to_run_together(box: BuildBox) -> None:
    found = box.json("fits", "one", "two")
    needs = [row["mib"] for row in found["needs"]]
    assert found["fits"] is True
    assert found["left_mib"] == found["budget_mib"] - sum(needs) - found["margin_mib"]
    text = box.json("emit", "llama-swap", "one", "two")["text"]
    made = yaml.safe_load(text)
    assert list(made["models"]) == ["one", "two"]
    assert made["groups"]["tunerd"]["swap"] is False
    assert "--models-max 2" in box.json("emit", "models-ini", "one", "two")["text"]


def test_a_budget_that_is_too_small_is_refused_with_what_is_missing(box: BuildBox) -> None:
    needs = sum(row["mib"] for row in box.json("fits", "one", "two")["needs"])
    assert box.json("fits", "one", "two", "--budget-mib", str(needs))["left_mib"] == 0
    done = box.box.call("fits", "one", "two", "--budget-mib", str(needs - 7))
    assert done.returncode == 1
    assert "they do not fit together: 7 MiB are missing" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:5]] == ["one", "two"]
    assert box.box.call("fits", "one", "nobody").returncode == 1


def on_a_card(box: BuildBox, name: str, used_mib: int) -> Plan:
    """A plan as it would be with a card of 12282 MiB."""
    ctx = box.box.context
    made = make_plan(ctx, PlanRequest(name, {}))
    host = replace(made.host, gpus=(a_card(used_mib=used_mib),))
    memory = memory_of_plan(
        ctx, made.resolved, made.engine, made.facts, None, host, (), has_gpu=True
    )
    return replace(made, host=host, memory=memory, has_gpu=True)


def test_a_card_has_a_margin_and_what_others_hold_is_no_room(box: BuildBox) -> None:
    box.profile("wide", memory__fit_mib=2000)
    plans = [on_a_card(box, name, used_mib=900) for name in ("one", "wide")]
    found = together(plans)
    assert (found.device, found.margin_mib) == ("gpu0", 2000)
    assert (found.budget_mib, found.held_mib) == (12282 - 900 - 380, 1280)
    needs = [need for _, need in found.needs if need is not None]
    assert found.left_mib == 11002 - sum(needs) - 2000
    assert min(needs) > 0
    assert together(plans, MiB(500)).fits is False
    assert together(plans, MiB(20000)).budget_mib == 11002, "no more than is there"
    assert together([on_a_card(box, name, used_mib=11000) for name in ("one", "wide")]).fits is False  # fmt: skip
