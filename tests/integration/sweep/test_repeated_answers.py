"""What becomes of an engine whose answers begin well and then go round in a circle, which is cheap to draft."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.support.sweep_box import swept

pytestmark = pytest.mark.timeout(900)

# As a build that does not take back what it drafted wrongly: nearly every draft of what comes then is right.
LOOPS = {"loops_from": 0.3, "acceptance": 0.99, "draft_cost": 0.0}


def compared(a: str, b: str, **behaviour: Any) -> dict[str, Any]:
    with swept(**behaviour) as box:
        return box.json("compare", a, b, "--workload", "small", "--budget", "120s", "--yes", "--seed", "7")  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
def test_a_side_that_goes_round_in_a_circle_is_not_recommended_however_fast_it_is(
    turned: bool,
) -> None:
    """It was 'B is 97.1 % faster', recommended."""
    sides = ("speculation.type=off", "night")
    rules = [{"when": {"speculative": "on"}, "set": LOOPS}]
    found = compared(*(sides[::-1] if turned else sides), rules=rules)

    looping, other = ("A", "B") if turned else ("B", "A")
    assert found["speed"] == f"{looping} is faster", found["sentence"]
    assert found["recommended"] is None
    told = rf"; {looping} is not recommended, because (\d+) of \1 of its answers only repeat themselves, from [234]\d% of "
    assert re.search(rf"{told}their text on at the earliest, and 0 of \1 of {other}'s$", found["sentence"])  # fmt: skip


def test_sides_that_both_do_are_compared_as_ever_and_that_is_said() -> None:
    rules = [{"when": {"speculative": "on"}, "set": LOOPS}]
    found = compared("speculation.type=off", "night", loops_from=0.3, rules=rules)

    assert (found["verdict"], found["recommended"]) == ("B is faster", "B"), found["sentence"]
    told = [one for one in found["reasons"] if "only repeat themselves" in one]
    for side, one in zip("AB", told, strict=True):
        assert re.match(rf"(\d+) of \1 of {side}'s answers only repeat themselves: ", one)


def test_one_token_over_and_over_is_an_answer_where_what_it_is_held_against_gives_it_too() -> None:
    """A comparison of such a class had no pair, since both sides gave no answer."""
    fast = {"acceptance": 0.99, "draft_cost": 0.0}
    rules = [{"when": {"speculative": "on"}, "set": fast}]
    found = compared("speculation.type=off", "night", breaks_beyond=60, breaks_into="ha ", rules=rules)  # fmt: skip

    assert (found["verdict"], found["recommended"]) == ("B is faster", "B"), found["sentence"]


def test_a_side_that_gives_it_alone_gives_no_answer() -> None:
    breaks = {"breaks_beyond": 100, "acceptance": 0.99}
    with swept(rules=[{"when": {"speculative": "on"}, "set": breaks}]) as box:
        words = ("speculation.type=off", "night", "--workload", "small", "--budget", "120s")
        found = box.json("compare", *words, "--yes", code=1)
    assert "B: the answer repeats one token: '<<<" in found["sentence"]


def test_a_sweep_gives_up_drafts_whose_answers_go_round_in_a_circle_after_a_few_requests() -> None:
    """It was 'promote: spec off -> mtp, n_max 0 -> 4 is 166.0% faster'."""
    with swept(rules=[{"when": {"speculative": "on"}, "set": LOOPS}]) as box:
        profile = box.box.folder / "config/profiles/night.toml"
        profile.write_text(profile.read_text().replace('type = "mtp"', 'type = "off"'))
        box.call("apply", "night", "--yes")
        found = box.sweep(budget="80s")
        kept = box.json("results", "export", str(found["sweep"]))["runs"][0]
        shown = box.call("sweep", "show", str(found["sweep"])).stdout

    assert found["verdict"] != "promote", found["sentence"]
    assert re.search(r"(\d+) of \1 of its answers only repeat themselves, from \d\d% of", shown)
    starts = Counter(one["arm"].partition(", margin")[0] for one in kept["samples"] if one["position"] == 0)  # fmt: skip
    drafting = {arm: n for arm, n in starts.items() if "mtp" in arm}
    assert len(drafting) == 1, "what one is dropped for the others of its kind are not tried"
    assert sum(drafting.values()) <= 4


def test_a_class_that_what_serves_answers_with_one_token_is_swept_and_its_winner_stays() -> None:
    """It ended inconclusive, as what serves could not be measured; and what won would have been taken back as silent."""
    with swept(breaks_beyond=60, breaks_into="ha ") as box:  # and drafts cost more than they bring
        found = box.sweep(budget="80s")
        assert found["verdict"] == "promote", found["sentence"]
        assert found["changes"].startswith("spec mtp -> off")
        told = {one["code"]: one["text"] for one in found["messages"]}
        assert re.match(
            r"(\d+) of \1 answers of what serves only repeat themselves: ", told["repeats"]
        )
        done = box.json("promote", str(found["sweep"]), "--yes")
    assert done["measured_again"]["live"]["turn_s"] < done["measured_again"]["before_s"]
