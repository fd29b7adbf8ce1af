"""Power limits beside what a sweep found: which may be measured, what is measured at each, and what is said of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_box import BenchBox
from tests.support.fake_gpu import FakeGpuReader, rtx_3090_ti, rtx_4070_super
from tests.support.transcripts import refusal, transcript
from tunerd.app import Context
from tunerd.errors import HostError, ServiceError
from tunerd.machine.facts import Gpu
from tunerd.profile.arm import Arm, Boot, Preempted, Request, ServerDied
from tunerd.profile.schema import POWER_LIMIT, check_file
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.power import PowerTable, Round, limits_of, measure_limits, power_notes, time_for
from tunerd.words import Mode

OWN_W = 220.0
ARM = Arm("fake", "off", 0, 0.0, 1024, "q8_0", 512, 2048, 8)
OTHER = replace(ARM, threads=4)
WORKLOAD = Workload(
    (RequestClass(3.0, "chat", 0, 100, 101), RequestClass(1.0, "code", 500, 100, 201))
)
# By limit: ms and J a token.
SPEEDS: Mapping[float, tuple[float, float]] = {
    150.0: (12.0, 1.8),
    180.0: (10.5, 1.9),
    OWN_W: (10.0, 2.2),
}


def context(tmp_path: Path, *gpus: Gpu, mode: Mode = Mode.SYSTEM) -> Context:
    return replace(BenchBox(tmp_path, gpu=FakeGpuReader(*gpus)).context(), mode=mode)


def test_limits_are_those_that_the_card_allows_and_the_one_in_force(tmp_path: Path) -> None:
    ctx = context(tmp_path, rtx_4070_super())

    assert limits_of(ctx, ()) == ()
    assert limits_of(ctx, (180, 150.0, 100, 240)) == (100.0, 150.0, 180.0, OWN_W, 240.0)


SUPER = rtx_4070_super()
REFUSED: dict[str, tuple[tuple[Gpu, ...], tuple[Any, ...]]] = {
    "Less than the card allows": ((SUPER,), (99.9,)),
    "More than the card allows": ((SUPER,), (150, 241)),
    **{f"What is no number of watts, {watts!r}": ((SUPER,), (watts,)) for watts in ("150", True, float("nan"))},
    "Too many limits": ((SUPER,), tuple(range(100, 108))),
    "No card": ((), (150,)),
    "Two cards": ((SUPER, rtx_3090_ti(index=1)), (150,)),
    **{f"A card that does not tell its {name}": ((replace(SUPER, **{name: None}),), (150,))  # type: ignore[arg-type]
       for name in ("power_min_w", "power_limit_w", "uuid")},
}  # fmt: skip


def test_what_cannot_be_set_is_refused_as_in_the_golden_text(tmp_path: Path) -> None:
    cases = {told: (gpus, wanted, Mode.SYSTEM) for told, (gpus, wanted) in REFUSED.items()}
    for mode in (Mode.USER, Mode.LOCAL):
        cases[f"Without root, {mode}"] = ((SUPER,), (150,), mode)
        assert limits_of(context(tmp_path, mode=mode), ()) == ()
    transcript("errors/power", (
        (told, refusal(limits_of, context(tmp_path, *gpus, mode=mode), wanted))
        for told, (gpus, wanted, mode) in cases.items()
    ))  # fmt: skip


def test_a_profile_may_list_limits_for_sweeps_and_nowhere_else() -> None:
    assert check_file("x", {"sweep": {POWER_LIMIT: [150, 180]}}) == ()
    (no_step,) = check_file("x", {"sweep": {POWER_LIMIT: {"min": 150, "max": 180}}})
    assert "step" in no_step.allowed
    assert [one.key for one in check_file("x", {"pin": {POWER_LIMIT: 150}})]
    assert [one.key for one in check_file("x", {"gpu": {"power_limit_w": 150}})]
    assert [one.key for one in check_file("x", {"sweep": {"gpu.power": [150]}})]


def test_the_search_leaves_time_to_limits_and_never_more_than_a_quarter() -> None:
    assert time_for((), left_s=3600.0, load_s=10.0, block_s=10.0) == 0.0
    assert time_for((150.0, OWN_W), left_s=3600.0, load_s=10.0, block_s=8.0) == 2 * (
        10 + 3 * 2 * 10
    )
    assert time_for((150.0, OWN_W), left_s=100.0, load_s=10.0, block_s=8.0) == 25.0


@dataclass
class Card:
    """A box whose card is as fast, and takes as much, as its limit has it."""

    watts: float = OWN_W
    clock_s: float = 0.0
    tells_energy: bool = True
    refuses: float | None = None
    overtaken: float | None = None
    ends_after: int = 1_000_000
    dies_after: int = 1_000_000
    fails: Sequence[Arm] = ()
    booted: list[Arm] = field(default_factory=list)
    asked: list[tuple[float, Request]] = field(default_factory=list)
    per_request: tuple[str, ...] = ()

    def now(self) -> float:
        return self.clock_s

    def sleep(self, seconds: float) -> None:
        self.clock_s += seconds

    def check(self) -> None:
        if len(self.asked) >= self.ends_after:
            raise Preempted("somebody started production")

    def restart(self, arm: Arm) -> Boot:
        self.booted.append(arm)
        self.clock_s += 20.0
        return Boot(False, 20.0, "oom") if arm in self.fails else Boot(True, 20.0)

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        del arm
        if len(self.asked) >= self.dies_after:
            raise ServerDied("oom")
        self.asked.append((self.watts, request))
        token_ms, joules = SPEEDS[self.watts]
        ms = request.n_predict * token_ms
        self.clock_s += ms / 1000
        energy = {"energy_j": request.n_predict * joules} if self.tells_energy else {}
        return {"wall_ms": ms, "predicted_ms": ms, "predicted_n": request.n_predict, **energy}

    @contextlib.contextmanager
    def limited(self, watts: float) -> Iterator[None]:
        if watts == self.refuses:
            raise ServiceError("tunerd-power-1.service failed", cause="no permission")
        self.watts = watts
        try:
            yield
        finally:
            self.watts = OWN_W
        if watts == self.overtaken:
            raise HostError("somebody set 180 W meanwhile")


def measured(card: Card, *arms: Arm, end_s: float = 1e9) -> PowerTable:
    return measure_limits(
        card,
        WORKLOAD,
        arms or (ARM,),
        tuple(SPEEDS),
        card.limited,
        own_w=OWN_W,
        end_s=end_s,
        seed=3,
    )


def test_every_limit_is_measured_as_often_within_one_process_of_each_arm() -> None:
    card = Card()
    table = measured(card, ARM, OTHER)

    assert card.booted == [ARM, OTHER]
    assert [(one.case, one.limit_w, one.rounds) for one in table.rows] == [
        (str(arm), watts, 3) for arm in (ARM, OTHER) for watts in SPEEDS
    ]
    assert table.reasons == []
    assert card.watts == OWN_W
    # The class with a prefix is asked behind it, each time with a text of its own.
    bare = [request for _, request in card.asked if request.new_tokens == 0]
    assert len(bare) == 2 * 9
    texts = [request.prompt_id for _, request in card.asked[: len(card.asked) // 2]]
    assert all(texts.count(one) <= 2 for one in texts)
    orders = [watts for watts, request in card.asked if request.prompt_id.endswith(" 0")]
    assert len({tuple(orders[at : at + 3]) for at in range(0, len(orders), 3)}) > 1


def test_figures_are_weighted_as_the_workload_is() -> None:
    least = measured(Card()).rows[0]

    assert least.turn_s == pytest.approx((3 * 101 + 201) / 4 * 0.012)
    assert least.joules_per_token == pytest.approx(1.8)
    assert least.tok_s == pytest.approx(125 / 126 * 1000 / 12.0)


# Joules a token of the rounds at the limit in force, and at a lower one.
ROUNDS: dict[str, tuple[list[float | None], list[float | None]]] = {
    "Every round took less": ([2.2, 2.3, 2.4], [1.7, 1.8, 1.9]),
    "Less than rounds at the limit in force differ by": ([2.0, 2.2, 2.4], [1.7, 1.8, 1.9]),
    "Less than rounds at the other limit differ by": ([2.0, 2.05, 2.1], [1.5, 1.7, 1.9]),
    "Too few rounds": ([2.2, 2.3], [1.7, 1.8]),
    "More": ([2.0, 2.2, 2.4], [2.5, 2.6, 2.7]),
    "One round at the limit in force is not known": ([2.0, None, 2.4], [1.7, 1.8, 1.9]),
    "One round at the other limit is not known": ([2.0, 2.2, 2.4], [1.7, None, 1.9]),
    "No round at the limit in force": ([], [1.7, 1.8, 1.9]),
}


def test_nothing_is_recommended_that_every_round_did_not_show_and_that_is_the_golden_text() -> None:
    cases = []
    for told, joules in ROUNDS.items():
        rounds = {
            ("a", watts): [Round(1.0, 50.0, one) for one in found]
            for watts, found in zip((OWN_W, 150.0), joules, strict=True)
            if found
        }
        text = PowerTable(OWN_W, rounds).text
        assert ("instead of" in text) is (told == "Every round took less")
        cases.append((told, [text]))
    table = measured(Card()).to_json()
    assert [one.text for one in power_notes(table)] == [table["text"]]
    transcript("sweep/power", [*cases, ("What the simulated card takes", [table["text"]])])


def test_limits_that_cost_the_same_are_seldom_told_apart() -> None:
    chance, n_told = random.Random(1), 0
    for _ in range(500):
        rounds = {
            ("a", OWN_W - 10 * n): [Round(1.0, 50.0, chance.gauss(2.0, 0.02)) for _ in range(3)]
            for n in range(8)
        }
        n_told += "instead of" in PowerTable(OWN_W, rounds).text
    assert n_told < 0.03 * 500


def test_a_card_that_tells_no_energy_has_a_table_of_speeds() -> None:
    table = measured(Card(tells_energy=False))

    assert {one.joules_per_token for one in table.rows} == {None}
    assert "is not known" in table.text
    assert table.rows[0].tok_s is not None


def test_what_was_measured_is_kept_whatever_ends_it() -> None:
    ended = measured(Card(ends_after=7))
    assert sum(one.rounds for one in ended.rows) == 3
    assert ended.reasons == ["it ended early: somebody started production"]
    refused = measured(Card(refuses=150.0))
    assert "no permission" in refused.reasons[0]
    overtaken = measured(Card(overtaken=150.0))
    assert 150.0 not in {one.limit_w for one in overtaken.rows}, "it was another one meanwhile"
    assert overtaken.reasons == ["somebody set 180 W meanwhile"]
    late = measured(Card(), end_s=40.0)
    assert late.reasons == ["there was not enough time for all of it"]
    assert late.rows
    fell = measured(Card(fails=[ARM]), ARM, OTHER)
    assert fell.reasons == [f"{ARM} does not start: oom"]
    assert {one.case for one in fell.rows} == {str(OTHER)}
    nothing = measured(Card(fails=[ARM]))
    assert [one.level for one in power_notes(nothing.to_json())] == ["warning"]


def test_a_server_that_dies_in_the_first_round_of_a_limit_leaves_the_rounds_before() -> None:
    table = measured(Card(dies_after=4)).to_json()

    assert [one["rounds"] for one in table["rows"]] == [1]
    assert table["reasons"] == ["it ended early: oom"]
