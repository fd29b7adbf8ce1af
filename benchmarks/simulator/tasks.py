"""What the simulated boxes are tuned for: spaces, workloads and what serves at the start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.simulator.box import SimulatedBox, Truth
from benchmarks.simulator.cards import CARDS, Card, redraw
from tunerd.profile.arm import Arm, Box, Family, Space
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.tuner import Outcome, tune

AGENT = Workload(
    (
        RequestClass(0.5, "tool", 24000, 700, 120),
        RequestClass(0.3, "code", 24000, 1500, 400),
        RequestClass(0.2, "chat", 24000, 500, 250),
    )
)
CHAT = Workload(
    (
        RequestClass(0.5, "chat", 1500, 300, 700),
        RequestClass(0.3, "math", 800, 250, 1200),
        RequestClass(0.2, "creative", 400, 200, 900),
    )
)
DEEP = Workload(
    (
        RequestClass(0.4, "tool", 0, 43000, 200),
        RequestClass(0.3, "code", 0, 43000, 900),
        RequestClass(0.3, "summary", 0, 43000, 500),
    )
)
WORKLOADS = {"agent": AGENT, "chat": CHAT, "deep": DEEP}

_P_MIN = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_DRAFTS = Family(
    n_max=tuple(range(1, 17)),
    p_min=_P_MIN,
    fit_mib=tuple(range(0, 4097, 128)),
    kv=("f16", "q4_0", "q8_0"),
    ubatch=(256, 512, 1024, 2048),
    batch=(2048,),
    threads=(4, 6, 8, 12, 16),
)
_LOOKUPS = replace(_DRAFTS, p_min=(0.0,))


@dataclass(frozen=True)
class Task:
    """One box to tune."""

    name: str
    card: Card
    workload: Workload
    space: Space
    incumbent: Arm

    def box(self, seed: int = 0, **options: Any) -> SimulatedBox:
        return SimulatedBox(self.card, seed=seed, **options)

    def night(
        self, hours: float, *, seed: int = 1, box: Box | None = None, **options: Any
    ) -> Outcome:
        """What a sweep comes to on its own box, or on another; `options` are those of `tune`."""
        rng = np.random.default_rng(seed)
        return tune(
            box or self.box(),
            self.space,
            self.workload,
            self.incumbent,
            hours * 3600,
            rng,
            **options,
        )


_INCUMBENTS = {
    "12G": Arm("mainline", "mtp", 3, 0.75, 512, "q8_0", 512, 2048, 8),
    "16G": Arm("mainline", "mtp", 2, 0.0, 1536, "q8_0", 512, 2048, 8),
    "24G": Arm("mainline", "mtp", 6, 0.75, 1024, "q4_0", 256, 2048, 8),
}


def task(card_class: str, workload: str, seed: int | None) -> Task:
    """A random box of a class, or with seed None the published one."""
    card = CARDS[card_class]()
    if seed is not None:
        card = redraw(card, seed)
    families = {
        (engine, spec): _LOOKUPS if spec == "ngram" else _DRAFTS
        for engine, one in card.engines.items()
        for spec in one.specs
    }
    return Task(
        f"{card_class}-{workload}-{seed}", card, WORKLOADS[workload], Space(families),
        _runnable(card, _INCUMBENTS[card_class]),
    )  # fmt: skip


def _runnable(card: Card, arm: Arm) -> Arm:
    """The published arm at the smallest margin at which it runs on this box."""
    truth = Truth(card)
    for margin in range(arm.fit_mib, 4097, 128):
        if truth.headroom_mib(arm.with_margin(margin)) > 100:
            return arm.with_margin(margin)
    return arm.with_margin(4096)


def best(one: Task) -> tuple[Arm, float]:
    """The best feasible arm and its turn time [ms]: each point at the least margin it runs with."""
    truth = Truth(one.card)
    found: tuple[Arm, float] | None = None
    for (engine, spec), family in one.space.families.items():
        plane = product(family.n_max, family.p_min) if spec != "off" else [(0, 0.0)]
        for n_max, p_min in plane:
            for kv, ubatch in product(family.kv, family.ubatch):
                arm = Arm(engine, spec, n_max, p_min, 0, kv, ubatch, 2048, one.card.cores)
                fits = _least_margin(truth, arm, family.fit_mib)
                if fits is None:
                    continue
                time = truth.turn_ms(fits, one.workload)
                if found is None or time < found[1]:
                    found = fits, time
    if found is None:
        raise ValueError(f"nothing runs on {one.name}")
    return found


def _least_margin(truth: Truth, arm: Arm, margins: tuple[int, ...]) -> Arm | None:
    if truth.tool_breakage(arm) > 0:
        return None
    for margin in margins:
        candidate = arm.with_margin(margin)
        if truth.headroom_mib(candidate) > 0:
            return candidate
    return None
