"""Placement by hand in the search: what it needs, what it says of other placements, and a whole night."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulator.box import SimulatedBox, Truth
from benchmarks.simulator.tasks import Task, task
from tests.support.made_sweep import begun_search
from tunerd.profile.arm import BOOT, Arm, Extra, Policy, Sample, Space
from tunerd.sweep.limits import Limits

N_LAYERS = 48
COUNTS = tuple(range(0, 41, 8))
DEPTHS, FILTERS = (1, 2, 3, 4, 6, 8), (0.0, 0.5, 0.75, 0.9)


def experts(n: int) -> Extra:
    return frozenset({("memory.n_cpu_moe", n)})


class PlacedTruth(Truth):
    """Experts of so many layers are in RAM where a count is given, whatever else needs memory."""

    def share_on_card(self, arm: Arm) -> float:
        if arm.n_cpu_moe is None:
            return super().share_on_card(arm)
        return 1.0 - arm.n_cpu_moe / N_LAYERS


class PlacedBox(SimulatedBox):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.truth = PlacedTruth(self.card)


def of_one_engine(one: Task, options: tuple[Extra, ...]) -> Space:
    families = {
        key: replace(
            family,
            n_max=DEPTHS,
            p_min=FILTERS,
            ubatch=(512,),
            threads=(8,),
            kv=("q8_0",),
            extra=options,
        )
        for key, family in one.space.families.items()
        if key in {("mainline", "mtp"), ("mainline", "off")}
    }
    return Space(families)


def fastest(truth: Truth, one: Task, arms: list[Arm]) -> float:
    return min(truth.turn_ms(arm, one.workload) for arm in arms if truth.headroom_mib(arm) > 100)


def placed_arms(one: Task) -> list[Arm]:
    start = one.incumbent
    return [
        replace(start, spec=spec, n_max=n, p_min=p, fit_mib=0, extra=experts(count))
        for spec in ("mtp", "off")
        for n in (DEPTHS if spec == "mtp" else (0,))
        for p in (FILTERS if spec == "mtp" else (0.0,))
        for count in COUNTS
    ]


def test_a_night_finds_the_count_that_a_depth_needs_and_serves_nothing_that_would_not_run() -> None:
    """What serves keeps far more experts in RAM than it needs to."""
    one = task("12G", "agent", 1)
    truth = PlacedTruth(one.card)
    start = replace(one.incumbent, fit_mib=0, extra=experts(COUNTS[-1]))
    assert truth.headroom_mib(start) > 100
    space = of_one_engine(one, tuple(map(experts, COUNTS)))
    outcome = replace(one, space=space, incumbent=start).night(
        2.0, box=PlacedBox(one.card), policy=Policy(may_change_output=False)
    )
    assert outcome.verdict == "promote", outcome.evidence.reasons
    arm = outcome.arm
    assert truth.headroom_mib(arm) > 0
    found, best = truth.turn_ms(arm, one.workload), fastest(truth, one, placed_arms(one))
    assert best < 0.9 * truth.turn_ms(start, one.workload)
    assert found < 1.05 * best


def limits(*samples: Sample) -> Limits:
    one = task("12G", "agent", 1)
    space = of_one_engine(one, (frozenset(), *map(experts, COUNTS)))
    search = begun_search(replace(one, space=space), one.box(), 32768)
    search.learner.add(samples)
    search.learner.refresh()
    return search.limits


def boot(name: str, arm: Arm, *, failure: str = "", free: float | None = None) -> Sample:
    return Sample(
        event=BOOT, process=name, arm=arm, purpose="probe", at_s=1.0, seconds=1.0, failure=failure,
        vram_free_mib=free,
    )  # fmt: skip


START = task("12G", "agent", 1).incumbent


def test_a_wall_of_one_placement_says_nothing_of_another() -> None:
    known = limits(boot("p1", replace(START, fit_mib=0, extra=experts(8)), failure="oom"))
    for count, fails in ((0, True), (8, True), (16, False)):
        arm = replace(START, fit_mib=0, extra=experts(count))
        assert (known.fails(arm) is not None) is fails, count
    assert known.fails(START) is None
    assert known.fails(replace(START, fit_mib=0)) is None
    other = limits(boot("p1", START, failure="oom"))
    assert other.fails(replace(START, fit_mib=0, extra=experts(0))) is None


def test_a_count_at_which_it_does_not_fit_is_not_tried_once_others_were_seen() -> None:
    def seen(count: int) -> Arm:
        return replace(START, fit_mib=0, extra=experts(count))

    unknown = limits(boot("p1", START, free=900.0))
    assert unknown.margin_for(seen(0), 1.0) == 0
    known = limits(
        *(boot(f"p{count}", seen(count), free=count * 200.0 - 2000.0) for count in (16, 24, 32))
    )
    assert known.margin_for(seen(32), 1.0) == 0
    assert known.margin_for(seen(8), 1.0) is None
