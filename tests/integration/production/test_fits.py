"""`tunerd fits` and what is emitted of several profiles, on a card as NVML shows it and without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.support.build_box import BuildBox, build_box

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
    assert text == box.json("emit", "llama-swap", "one", "two", "one")["text"], "once each"
    assert "--models-max 2" in box.json("emit", "models-ini", "one", "two")["text"]


def test_a_budget_that_is_too_small_is_refused_with_what_is_missing(box: BuildBox) -> None:
    needs = sum(row["mib"] for row in box.json("fits", "one", "two")["needs"])
    assert box.json("fits", "one", "two", "--budget-mib", str(needs))["left_mib"] == 0
    done = box.box.call("fits", "one", "two", "--budget-mib", str(needs - 7))
    assert done.returncode == 1
    assert "they do not fit together: they need 7 MiB more than may be taken" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:5]] == ["one", "two"]
    assert box.box.call("fits", "one", "nobody").returncode == 1
