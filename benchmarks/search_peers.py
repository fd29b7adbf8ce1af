"""Other ways to look for an arm, on the same boxes, with the same clock, one fresh process a run.

Each was written from what is published about it; none is the program itself. A peer asks a `Bench` for
runs until the budget is spent, and the bench notes what would be recommended after each: the arm with
the least mean turn time of those that started, answered, and did not show an empty card.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.simulator.box import SimulatedBox
from benchmarks.simulator.tasks import Task
from tunerd.profile.arm import Arm, Family, Request, ServerDied

# Less free than this while the workload ran counts as a run that failed [MiB].
GUARD_MIB = 64.0


class Over(Exception):
    """The budget is spent."""


@dataclass
class Bench:
    """Runs arms and keeps the score: turn times [s] by arm, infinite where a run failed."""

    task: Task
    box: SimulatedBox
    budget_s: float
    runs: dict[Arm, list[float]] = field(default_factory=dict)
    n_prompts: int = 0

    def __post_init__(self) -> None:
        self.path = [(0.0, 0, self.task.incumbent)]

    def run(self, arm: Arm) -> float | None:
        """One fresh process that answers one block of the workload; least VRAM seen free [MiB]."""
        turn_s, free_mib = self._measure(arm)
        if self.box.now() > self.budget_s:
            raise Over
        self.runs.setdefault(arm, []).append(turn_s)
        best = min(self.runs, key=self.score)
        best = best if math.isfinite(self.score(best)) else self.task.incumbent
        if self.path[-1][2] != best:
            self.path.append((self.box.now(), self.box.n_restarts, best))
        return free_mib

    def score(self, arm: Arm) -> float:
        return float(np.mean(self.runs[arm]))

    def worst(self) -> float:
        """The largest turn time of a run that worked."""
        times = [time for one in self.runs.values() for time in one if math.isfinite(time)]
        return max(times, default=60.0)

    def ask(self, kind: str, cached: int, new: int, n_predict: int) -> Mapping[str, Any]:
        self.n_prompts += 1
        return self.box.measure(Request(kind, f"peer-{self.n_prompts}", cached, new, n_predict))

    def _measure(self, arm: Arm) -> tuple[float, float | None]:
        if not self.box.restart(arm).ok:
            return math.inf, None
        free, turns, intact = math.inf, [], True
        try:
            self.ask("chat", 0, 64, 8)
            for one in self.task.workload.classes:
                if one.cached_tokens:
                    self.ask(one.kind, one.cached_tokens, 0, 2)
                answer = self.ask(one.kind, one.cached_tokens, one.new_tokens, one.n_predict)
                turns.append(float(answer["wall_ms"]))
                free = min(free, float(answer["vram_free_min_mib"]) - answer.get("spill_mib", 0.0))
                intact = intact and answer.get("tool_ok", True)
        except ServerDied:
            return math.inf, None
        if free < GUARD_MIB or not intact:
            return math.inf, free
        return self.task.workload.turn_time_s(turns), free


def published(task: Task) -> list[Arm]:
    """What the write-ups' authors run, where this space allows it: the warm start."""
    kept = task.incumbent
    found = [kept]
    least_mib = max(kept.fit_mib, 1664)
    for (engine, spec), family in task.space.families.items():
        margin = min((value for value in family.fit_mib if value >= least_mib), default=least_mib)
        for n_max, wanted in ((3, 0.75), (2, 0.0), (6, 0.75)):
            found.append(replace(
                kept, engine=engine, spec=spec, n_max=n_max, p_min=_nearest(family, wanted), fit_mib=margin
            ))  # fmt: skip
    return list(dict.fromkeys(arm.canonical() for arm in found))


def _nearest(family: Family, p_min: float) -> float:
    return min(family.p_min, key=lambda value: abs(value - p_min))


def random_search(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    families = list(task.space.families.items())

    def pick(values: tuple[Any, ...]) -> Any:
        return values[int(rng.integers(len(values)))]

    while True:
        (engine, spec), family = families[int(rng.integers(len(families)))]
        bench.run(Arm(
            engine, spec, int(pick(family.n_max)), float(pick(family.p_min)), int(pick(family.fit_mib)),
            str(pick(family.kv)), int(pick(family.ubatch)), 2048, int(pick(family.threads)),
        ).canonical())  # fmt: skip


def tpe(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    """Optuna's TPE; what failed is told with the worst value and a constraint that is broken."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(
            multivariate=True, group=True, constant_liar=True, seed=int(rng.integers(2**31))
        )
        study = optuna.create_study(sampler=sampler)
        for arm in published(task):
            study.enqueue_trial(_named(arm))
        while True:
            trial = study.ask()
            arm = _suggested(task, trial)
            free_mib = bench.run(arm)
            score = bench.score(arm)
            failed = not math.isfinite(score)
            lacks_mib = GUARD_MIB - (-200.0 if free_mib is None else free_mib)
            trial.set_constraint("memory", max(lacks_mib, 1.0) if failed else -1.0)
            study.tell(trial, bench.worst() if failed else score)


def _named(arm: Arm) -> dict[str, Any]:
    named: dict[str, Any] = {
        "family": f"{arm.engine}/{arm.spec}", "fit_mib": arm.fit_mib, "kv": arm.kv,
        "ubatch": arm.ubatch, "threads": arm.threads,
    }  # fmt: skip
    return named | ({"n_max": arm.n_max, "p_min": arm.p_min} if arm.drafts else {})


def _suggested(task: Task, trial: Any) -> Arm:
    name = trial.suggest_categorical("family", ["/".join(key) for key in task.space.families])
    engine, spec = name.split("/")
    family = task.space.families[engine, spec]
    n_max, p_min = 0, 0.0
    if spec != "off":
        n_max = trial.suggest_int("n_max", family.n_max[0], family.n_max[-1])
        p_min = _nearest(family, trial.suggest_float("p_min", 0.0, 0.95))
    margin = trial.suggest_int("fit_mib", family.fit_mib[0], family.fit_mib[-1], step=128)
    kv = trial.suggest_categorical("kv", list(family.kv))
    ubatch = trial.suggest_categorical("ubatch", list(family.ubatch))
    threads = trial.suggest_categorical("threads", list(family.threads))
    return Arm(engine, spec, n_max, p_min, margin, kv, ubatch, 2048, threads)


PEERS: dict[str, Callable[[Task, Bench, np.random.Generator], None]] = {
    "TPE warm": tpe,
    "random": random_search,
}
