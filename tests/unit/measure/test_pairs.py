"""The comparing loop on simulated servers: pairs, order, texts, failures, and what it concludes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.simulator.box import QUIET
from benchmarks.simulator.stand import CHAT, SCENES, USUAL, Scene, SimulatedLife, SimulatedStand
from tunerd.measure.pairs import (
    Asked,
    Comparison,
    End,
    Limits,
    Side,
    Standing,
    Turn,
    Unusable,
    compare,
    part_sentence,
    reasons,
    sentence,
)

LIMITS = Limits(budget_s=1e9, max_pairs=40)


def run(
    scene: Scene, seed: int = 1, *, limits: Limits = LIMITS, stand: SimulatedStand | None = None
) -> Comparison:
    return compare(stand or SimulatedStand(scene, seed), CHAT, limits, random.Random(seed))


@dataclass
class Recording(SimulatedStand):
    """Remembers every start and every request."""

    boots: list[Side] = field(default_factory=list)
    asked: dict[Side, list[Asked]] = field(default_factory=lambda: {"A": [], "B": []})
    open_lives: int = 0
    most_open: int = 0
    spoiled: set[tuple[str, Side]] = field(default_factory=set)

    def boot(self, side: Side) -> SimulatedLife:
        self.boots.append(side)
        life = super().boot(side)
        self.open_lives += 1
        self.most_open = max(self.most_open, self.open_lives)
        return Recorded(self, side, life.factor)


@dataclass
class Recorded(SimulatedLife):
    def request(self, asked: Asked) -> Turn:
        stand = self.stand
        assert isinstance(stand, Recording)
        stand.asked[self.side].append(asked)
        if asked.attempt == 0 and (asked.block, self.side) in stand.spoiled:
            raise Unusable("throttled")
        return super().request(asked)

    def close(self) -> None:
        stand = self.stand
        assert isinstance(stand, Recording)
        stand.open_lives -= 1
        super().close()


def test_sides_alternate_so_that_drift_cancels_and_every_process_is_fresh() -> None:
    stand = Recording(SCENES[0], 1)
    run(SCENES[0], limits=replace(LIMITS, max_pairs=4), stand=stand)
    assert "".join(stand.boots) == "AB" + "BA" + "BA" + "AB"
    assert (stand.most_open, stand.open_lives) == (1, 0)


def test_both_sides_are_asked_the_same_and_no_text_comes_twice() -> None:
    stand = Recording(SCENES[0], 1)
    run(SCENES[0], limits=replace(LIMITS, max_pairs=6), stand=stand)
    texts = {
        side: [(one.block, one.class_index, one.attempt) for one in asked]
        for side, asked in stand.asked.items()
    }
    assert sorted(texts["A"]) == sorted(texts["B"])
    assert len(set(texts["A"])) == len(texts["A"])
    assert len({one.class_index for one in stand.asked["A"]}) == len(CHAT.classes)


def test_a_long_start_is_used_for_several_rounds_and_all_processes_answer_equally_many() -> None:
    stand = Recording(SCENES[0], 1, load_s=(200.0, 210.0))
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=3), stand=stand)
    sizes = {len(block) for pair in found.pairs for block in (pair.a, pair.b)}
    assert len(sizes) == 1
    assert sizes.pop() > 3


def test_an_answer_that_must_not_count_is_asked_anew_with_another_text_on_both_sides() -> None:
    stand = Recording(SCENES[0], 1, spoiled={("1-0", "A")})
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=1), stand=stand)
    kept = [one for one in stand.asked["B"] if one.block == "1-0"]
    assert {one.attempt for one in kept} == {1}
    assert found.n_unusable == len(CHAT.classes)
    assert any("did not count" in text for text in reasons(found))


def test_a_pair_whose_second_side_has_no_answer_to_the_same_text_does_not_count() -> None:
    stand = Recording(SCENES[0], 1, spoiled={("1-0", "B")})
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=1), stand=stand)
    assert "".join(stand.boots) == "AB" + "AB"
    last = {
        side: {(one.block, one.class_index, one.attempt) for one in asked if one.block == "1.1-0"}
        for side, asked in stand.asked.items()
    }
    assert last["A"] == last["B"] != set()
    assert [one.attempt for one in stand.asked["B"] if one.block == "1-0"] == [0]
    assert (len(found.pairs), found.n_unusable) == (1, 1)


@pytest.mark.parametrize(
    ("gain", "standing"), [(0.08, Standing.B_FASTER), (-0.08, Standing.A_FASTER)]
)
def test_the_faster_side_is_named_with_an_interval_that_holds(
    gain: float, standing: Standing
) -> None:
    found = run(Scene("x", USUAL, gain=gain))
    shown = found.gain
    assert shown is not None
    assert found.standing is standing
    assert found.end is End.DECIDED
    assert shown.lower is not None
    assert shown.upper is not None
    assert shown.lower < gain < shown.upper
    text = sentence(found, "n_max 2", "n_max 3", "chat")
    assert text.startswith("n_max 3 is" if gain > 0 else "n_max 2 is")
    assert "95 % interval" in text
    assert "on chat" in text


def test_servers_without_noise_are_found_equal_and_it_ends() -> None:
    found = run(Scene("quiet", QUIET))
    assert found.standing is Standing.NO_DIFFERENCE
    assert len(found.pairs) < 20
    assert "equally fast" in sentence(found, "A", "B", "chat")


@pytest.mark.parametrize("scene", SCENES[:1] + SCENES[3:6], ids=lambda scene: scene.name)
def test_equal_servers_are_hardly_ever_told_apart(scene: Scene) -> None:
    nights = 20
    named = sum(
        run(scene, seed, limits=replace(LIMITS, max_pairs=20)).standing
        in {Standing.A_FASTER, Standing.B_FASTER}
        for seed in range(nights)
    )
    assert named <= 2  # 5 % of 20 is 1; 3 would come in 1 of 13 such tests at the very limit


def test_a_true_five_percent_is_found_in_most_nights() -> None:
    scene = Scene("x", USUAL, gain=0.05)
    found = [run(scene, seed).standing for seed in range(12)]
    assert found.count(Standing.B_FASTER) >= 10


def test_three_pairs_are_too_few_for_any_verdict_however_far_apart() -> None:
    found = run(Scene("x", USUAL, gain=3.0), limits=replace(LIMITS, max_pairs=3))
    assert found.standing is Standing.OPEN
    assert "nothing can be said" in sentence(found, "A", "B", "chat")
    assert run(Scene("x", USUAL, gain=3.0)).standing is Standing.B_FASTER


def test_it_ends_in_time() -> None:
    stand = SimulatedStand(SCENES[0], 1)
    found = run(SCENES[0], limits=replace(LIMITS, budget_s=900.0), stand=stand)
    assert found.end is End.TIME
    assert 0 < stand.clock_s <= 900.0
    assert found.pairs


def test_a_pair_with_a_failed_start_is_measured_again() -> None:
    stand = SimulatedStand(SCENES[0], 1, fails={"B": 2})
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=3), stand=stand)
    assert len(found.pairs) == 3
    assert found.problem is None


def test_a_pair_in_which_somebody_else_was_served_is_measured_again() -> None:
    stand = Recording(SCENES[0], 1, disturbed=1)
    found = run(SCENES[0], limits=replace(LIMITS, max_pairs=2), stand=stand)
    assert "".join(stand.boots) == "A" + "AB" + "BA"
    assert len(found.pairs) == 2
    assert {one.block.partition("-")[0] for one in stand.asked["B"]} == {"1.1", "2"}
    assert found.n_unusable == 1


def test_a_side_that_does_not_start_is_named_with_its_reason() -> None:
    stand = SimulatedStand(SCENES[0], 1, fails={"B": 99})
    found = run(SCENES[0], stand=stand)
    assert found.end is End.FAILED
    assert found.pairs == ()
    assert found.gain is None
    assert found.problem == "B: out of memory"
    assert "out of memory" in sentence(found, "A", "B", "chat")


def test_each_part_and_each_class_has_its_own_effect() -> None:
    found = run(Scene("x", USUAL, gain=0.10), limits=replace(LIMITS, max_pairs=6))
    parts = found.parts()
    assert [(part.name, part.class_index) for part in parts] == [
        ("turn", None), ("prefill", None), ("decode", None), ("turn", 0), ("turn", 1), ("turn", 2),
    ]  # fmt: skip
    whole = parts[0]
    assert whole.a_s == pytest.approx(parts[1].a_s + parts[2].a_s)
    assert 1 + whole.gain.estimate == pytest.approx(1.1, rel=0.06)
    assert "B +" in part_sentence(parts[2], "")
