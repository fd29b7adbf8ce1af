"""Other ways to look for an arm, on the same boxes, with the same clock, one fresh process a run.

Each was written from what is published about it; none is the program itself. A peer asks a `Bench` for
runs until the budget is spent, and the bench notes what would be recommended after each: the arm with
the least mean turn time of those that started, answered, and did not show an empty card.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.simulator.box import SimulatedBox
from benchmarks.simulator.tasks import Task
from tunerd.profile.arm import Arm, Family, Request, ServerDied

# Less free than this while the workload ran counts as a run that failed [MiB].
GUARD_MIB = 64.0
_START_TRIALS = 10
_CANDIDATES = 1500


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


def full_grid(task: Task, bench: Bench, rng: np.random.Generator) -> None:  # noqa: ARG001
    """The grid of somebody with patience, row by row; cache type and threads stay."""
    kept = task.incumbent
    for (engine, spec), family in task.space.families.items():
        drafts = list(product((1, 2, 3, 4, 6, 8), family.p_min[::3])) if spec != "off" else [(0, 0)]
        for ubatch, margin, (n_max, p_min) in product((512, 1024), (512, 1024, 1536, 2048), drafts):
            bench.run(
                replace(kept, engine=engine, spec=spec, n_max=n_max, p_min=float(p_min),
                        ubatch=ubatch, fit_mib=margin)
            )  # fmt: skip


def by_hand(task: Task, bench: Bench, rng: np.random.Generator) -> None:  # noqa: ARG001
    """One knob at a time, two runs a value, again and again from the best so far."""
    kept = task.incumbent
    _twice(bench, kept)
    while True:
        before = kept
        for knob in _KNOBS:
            for arm in _turned(task, kept, knob):
                if arm not in bench.runs:
                    _twice(bench, arm)
                if bench.score(arm) < bench.score(kept):
                    kept = arm
        if kept == before:
            _twice(bench, kept)


def _twice(bench: Bench, arm: Arm) -> None:
    for _ in range(2):
        if bench.run(arm).turn_s is None:
            return


_KNOBS = ("family", "n_max", "p_min", "fit_mib", "ubatch", "threads")


def _turned(task: Task, arm: Arm, knob: str) -> Iterator[Arm]:
    """The arm with other values of one knob."""
    if knob == "family":
        for engine, spec in task.space.families:
            other = replace(arm, engine=engine, spec=spec)
            yield _allowed(task, other if arm.drafts else other.with_draft(3, 0.75)).canonical()
        return
    if knob in {"n_max", "p_min"} and not arm.drafts:
        return
    family = task.space.families[arm.family]
    margins = [arm.fit_mib + step for step in (256, -256, -512)]
    values: Mapping[str, Iterable[float]] = {
        "n_max": [n for n in family.n_max if n in {1, 2, 3, 4, 6, 8}],
        "p_min": family.p_min[::2],
        "fit_mib": [margin for margin in margins if margin in family.fit_mib],
        "ubatch": family.ubatch,
        "threads": family.threads,
    }
    yield from (replace(arm, **{knob: value}) for value in values[knob])  # type: ignore[arg-type]


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


def gaussian_process(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    """Expected improvement over log turn time; the same warm start, and walls where memory ended."""
    for arm in published(task):
        bench.run(arm)
    for _ in range(_START_TRIALS):
        bench.run(_free_of_walls(task, bench, rng, 1)[0])
    process: Any = None
    fitted_at = 0
    while True:
        arms = [arm for arm in bench.runs if math.isfinite(bench.score(arm))]
        counts = np.array([len(bench.runs[arm]) for arm in arms])
        seen = np.array([_encoded(task, arm) for arm in arms])
        values = np.log([bench.score(arm) for arm in arms])
        level, spread = float(values.mean()), float(values.std()) or 1.0
        if process is None or len(arms) >= 1.15 * fitted_at:
            process, fitted_at = _fitted(seen, (values - level) / spread), len(arms)
        process.alpha = 1e-10 + 0.03**2 / spread**2 / counts
        _refit(process, seen, (values - level) / spread)
        found = _free_of_walls(task, bench, rng, _CANDIDATES)
        mean, sd = process.predict(
            np.array([_encoded(task, arm) for arm in found]), return_std=True
        )
        gain = float(((values - level) / spread).min()) - mean
        z = gain / np.maximum(sd, 1e-9)
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z])
        bench.run(found[int(np.argmax(gain * below + sd * density))])


def _fitted(seen: Any, values: Any) -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels  # noqa: PLC0415

    scales = np.ones(seen.shape[1])
    kernel = kernels.ConstantKernel(1.0) * kernels.Matern(scales, (0.1, 30.0), nu=2.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GaussianProcessRegressor(kernel, alpha=0.01, n_restarts_optimizer=0).fit(
            seen, values
        )


def _refit(process: Any, seen: Any, values: Any) -> None:
    """Posterior of all that was seen with the hyperparameters that were found."""
    process.kernel, optimizer = process.kernel_, process.optimizer
    process.optimizer = None
    process.fit(seen, values)
    process.optimizer = optimizer


def _encoded(task: Task, arm: Arm) -> list[float]:
    families, kinds = list(task.space.families), ("f16", "q8_0", "q4_0")
    return [
        *(float(arm.family == family) for family in families),
        math.log2(arm.n_max) / 2 if arm.drafts and arm.n_max else -1.0,
        2 * arm.p_min if arm.drafts else 0.0,
        arm.fit_mib / 1024,
        *(float(arm.kv == kv) for kv in kinds),
        math.log2(arm.ubatch / 512),
        math.log2(arm.threads / 8),
    ]


def _free_of_walls(task: Task, bench: Bench, rng: np.random.Generator, count: int) -> list[Arm]:
    """Random arms and neighbours of the best, none that needs more than one that failed."""
    walls = [arm for arm in bench.runs if not math.isfinite(bench.score(arm))]
    families, best, found = list(task.space.families.items()), bench.best(), list[Arm]()
    for _ in range(20 * count):
        (engine, spec), family = families[int(rng.integers(len(families)))]
        arm = _drawn(engine, spec, family, rng)
        if rng.random() < 0.5 and best.family in task.space.families:
            arm = _neighbour(best, _drawn(*best.family, task.space.families[best.family], rng), rng)
        if not any(_needs_as_much(arm, wall) for wall in walls):
            found.append(arm)
        if len(found) == count:
            break
    return found or [best]


def _neighbour(best: Arm, other: Arm, rng: np.random.Generator) -> Arm:
    names = ("n_max", "p_min", "fit_mib", "kv", "ubatch", "threads")
    changed = {name: getattr(other, name) for name in names if rng.random() < 0.35}
    return replace(best, **changed).canonical()


def _needs_as_much(arm: Arm, wall: Arm) -> bool:
    return (
        arm.family == wall.family
        and arm.kv == wall.kv
        and arm.n_max >= wall.n_max
        and arm.ubatch >= wall.ubatch
        and arm.fit_mib <= wall.fit_mib
    )


def llama_optimus_like(task: Task, bench: Bench, rng: np.random.Generator) -> None:
    """Tokens a second of a short prompt in a small context, by TPE; the server is started after."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=int(rng.integers(2**31))),
    )
    kept = replace(task.incumbent, spec="off").canonical()
    family = task.space.families[kept.family]
    for _ in range(45):
        trial = study.ask()
        arm = replace(
            kept, threads=trial.suggest_categorical("threads", list(family.threads)),
            ubatch=trial.suggest_categorical("ubatch", list(family.ubatch)),
            fit_mib=trial.suggest_int("fit_mib", 0, family.fit_mib[-1], step=128),
        )  # fmt: skip
        speeds = [_short_speed(bench, arm) for _ in range(2)]
        study.tell(trial, float(np.mean(speeds)))
        if bench.box.now() > bench.budget_s:
            raise Over
        best = study.best_params
        bench.recommend(
            replace(kept, threads=best["threads"], ubatch=best["ubatch"], fit_mib=best["fit_mib"])
        )


def _short_speed(bench: Bench, arm: Arm) -> float:
    if not bench.box.restart(arm).ok:
        return 0.0
    try:
        return 1000 * 128 / float(bench.ask("chat", 0, 512, 128)["predicted_ms"])
    except ServerDied:
        return 0.0


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
    "Gaussian process": gaussian_process,
    "by hand": by_hand,
    "random": random_search,
    "full grid": full_grid,
    "llama-optimus-like": llama_optimus_like,
    "vLLM-auto_tune-like": auto_tune_like,
}
