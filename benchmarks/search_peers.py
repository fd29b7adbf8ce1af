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


@dataclass(frozen=True)
class Run:
    """One process: turn time [s], None if it failed; least VRAM seen free [MiB]."""

    turn_s: float | None
    free_mib: float | None
    decode_tok_s: float = 0.0


@dataclass
class Bench:
    """Runs arms and keeps the score."""

    task: Task
    box: SimulatedBox
    budget_s: float
    path: list[tuple[float, int, Arm]] = field(default_factory=list)
    runs: dict[Arm, list[Run]] = field(default_factory=dict)
    n_prompts: int = 0

    def run(self, arm: Arm) -> Run:
        """One fresh process that answers one block of the workload."""
        done = self._measure(arm)
        if self.box.now() > self.budget_s:
            raise Over
        self.runs.setdefault(arm, []).append(done)
        self.recommend(self.best())
        return done

    def recommend(self, arm: Arm) -> None:
        if not self.path or self.path[-1][2] != arm:
            self.path.append((self.box.now(), self.box.n_restarts, arm))

    def score(self, arm: Arm) -> float:
        """Mean turn time [s]; infinite if any run failed."""
        times = [one.turn_s for one in self.runs.get(arm, ())]
        if not times or None in times:
            return math.inf
        return float(np.mean([time for time in times if time is not None]))

    def best(self) -> Arm:
        best = min(self.runs, key=self.score, default=self.task.incumbent)
        return best if math.isfinite(self.score(best)) else self.task.incumbent

    def worst(self) -> float:
        """The largest turn time of a run that worked."""
        times = [one.turn_s for runs in self.runs.values() for one in runs if one.turn_s]
        return max(times, default=60.0)

    def ask(self, kind: str, cached: int, new: int, n_predict: int) -> Mapping[str, Any]:
        self.n_prompts += 1
        return self.box.measure(Request(kind, f"peer-{self.n_prompts}", cached, new, n_predict))

    def _measure(self, arm: Arm) -> Run:
        if not self.box.restart(arm).ok:
            return Run(None, None)
        free, turns, speeds, intact = math.inf, [], [], True
        try:
            self.ask("chat", 0, 64, 8)
            for one in self.task.workload.classes:
                if one.cached_tokens:
                    self.ask(one.kind, one.cached_tokens, 0, 2)
                answer = self.ask(one.kind, one.cached_tokens, one.new_tokens, one.n_predict)
                turns.append(float(answer["wall_ms"]))
                speeds.append(1000 * one.n_predict / float(answer["predicted_ms"]))
                free = min(free, float(answer["vram_free_min_mib"]) - answer.get("spill_mib", 0.0))
                intact = intact and answer.get("tool_ok", True)
        except ServerDied:
            return Run(None, None)
        if free < GUARD_MIB or not intact:
            return Run(None, free)
        return Run(self.task.workload.turn_time_s(turns), free, float(np.mean(speeds)))


Peer = Callable[[Task, Bench, np.random.Generator], None]


def published(task: Task) -> list[Arm]:
    """What the write-ups' authors run, where this space allows it: the warm start."""
    kept = task.incumbent
    found = [kept]
    for engine, spec in task.space.families:
        for n_max, p_min in ((3, 0.75), (2, 0.0), (6, 0.75)):
            arm = replace(kept, engine=engine, spec=spec, n_max=n_max, p_min=p_min)
            found.append(_allowed(task, arm.with_margin(max(kept.fit_mib, 1664))))
    return list(dict.fromkeys(arm.canonical() for arm in found))


def _allowed(task: Task, arm: Arm) -> Arm:
    family = task.space.families[arm.family]
    p_min = min(family.p_min, key=lambda value: abs(value - arm.p_min))
    margin = min((value for value in family.fit_mib if value >= arm.fit_mib), default=arm.fit_mib)
    return replace(arm, p_min=p_min, fit_mib=margin)


def random_search(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    families = list(task.space.families.items())
    while True:
        (engine, spec), family = families[int(rng.integers(len(families)))]
        bench.run(_drawn(engine, spec, family, rng))


def _drawn(engine: str, spec: str, family: Family, rng: np.random.Generator) -> Arm:
    def pick(values: tuple[Any, ...]) -> Any:
        return values[int(rng.integers(len(values)))]

    return Arm(
        engine, spec, int(pick(family.n_max)), float(pick(family.p_min)), int(pick(family.fit_mib)),
        str(pick(family.kv)), int(pick(family.ubatch)), 2048, int(pick(family.threads)),
    ).canonical()  # fmt: skip


def tpe(task: Task, bench: Bench, rng: np.random.Generator, *, warm: bool, runs: int) -> None:
    """Optuna's TPE; what failed is told with the worst value and a constraint that is broken."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(
            multivariate=True, group=True, constant_liar=True, seed=int(rng.integers(2**31))
        )
        study = optuna.create_study(sampler=sampler)
        for arm in published(task) if warm else ():
            study.enqueue_trial(_named(arm))
        while True:
            trial = study.ask()
            arm = _suggested(task, trial)
            done = [bench.run(arm)]
            while len(done) < runs and done[-1].turn_s is not None:
                done.append(bench.run(arm))
            score = bench.score(arm)
            free = min((one.free_mib for one in done if one.free_mib is not None), default=-200.0)
            failed = not math.isfinite(score)
            trial.set_constraint("memory", max(GUARD_MIB - free, 1.0) if failed else -1.0)
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
        asked = trial.suggest_float("p_min", 0.0, 0.95)
        p_min = min(family.p_min, key=lambda value: abs(value - asked))
    margin = trial.suggest_int("fit_mib", family.fit_mib[0], family.fit_mib[-1], step=128)
    kv = trial.suggest_categorical("kv", list(family.kv))
    ubatch = trial.suggest_categorical("ubatch", list(family.ubatch))
    threads = trial.suggest_categorical("threads", list(family.threads))
    return Arm(engine, spec, n_max, p_min, margin, kv, ubatch, 2048, threads)


def tpe_cold(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    tpe(task, bench, rng, warm=False, runs=3)


def tpe_warm(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    tpe(task, bench, rng, warm=True, runs=1)


def auto_tune_like(task: Task, bench: Bench, rng: np.random.Generator) -> None:  # noqa: ARG001
    """The least margin that boots, then the batch that gives most tokens a second."""
    kept = task.incumbent
    family = task.space.families[kept.family]
    margin = next(
        (value for value in family.fit_mib if bench.box.restart(kept.with_margin(value)).ok),
        kept.fit_mib,
    )
    speeds: dict[Arm, float] = {}
    for ubatch in family.ubatch:
        arm = replace(kept, fit_mib=margin, ubatch=ubatch)
        done = bench._measure(arm)  # noqa: SLF001
        if done.turn_s is not None or done.free_mib is not None:
            speeds[arm] = done.decode_tok_s
        if bench.box.now() > bench.budget_s:
            raise Over
    bench.recommend(max(speeds, key=lambda arm: speeds[arm], default=kept.with_margin(margin)))


PEERS: dict[str, Peer] = {
    "TPE warm": tpe_warm,
    "TPE cold": tpe_cold,
    "random": random_search,
    "vLLM-auto_tune-like": auto_tune_like,
}
