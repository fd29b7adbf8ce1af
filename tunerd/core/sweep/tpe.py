"""Another proposer: Optuna's TPE, asked and told anew from the samples each time.

It knows nothing of speculation or memory: a start that ran out is told as the worst turn seen with a
broken constraint, by as much as memory was short; a hang or a crash says nothing about the arm, which
is tried again. The samples are the truth, and the study is thrown away after each question. Optuna is
imported when it is first asked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunerd.core.sweep.arm import OFF, Arm
from tunerd.core.sweep.grid import FamilyGrid, Variant
from tunerd.core.sweep.night import TimeUp
from tunerd.core.sweep.observations import Process
from tunerd.core.sweep.search import Search

TPE = "tpe"
REQUIREMENT = "tunerd[tpe]"
# Processes without a new leader after which more of them are not expected to find one.
_PATIENCE = 40
# Every so many processes one goes to the leaders: TPE never measures a point twice on purpose.
_RACE_EVERY = 4
_ASKS = 8
_FAILED_SHORT_MIB = 150.0
_WORST = 2.0  # times the best turn, where nothing but failures was seen

Parameters = dict[str, Any]


class TpeSearch(Search):
    """Spends the night on what TPE proposes; measuring, memory and verdict are the sweep's own."""

    def run(self, reserve_s: Callable[[], float]) -> None:
        """As `Search.run`: until time is needed elsewhere, or nothing new was found for long."""
        self.is_exhausted = False
        proposer = Proposer(self)
        best, idle, count = None, 0, 0
        try:
            self._measure_incumbent()
            self._measure_seeds(reserve_s)
            while self._has_time(reserve_s):
                count += 1
                if count % _RACE_EVERY or not self._race(reserve_s):
                    arm = proposer.ask()
                    if arm is None or self._has_all_arms():
                        self.is_exhausted = True
                        return
                    self.measure(arm, "explore")
                leader = self.leader()
                arm_now = None if leader is None else leader.arm
                idle = idle + 1 if arm_now == best else 0
                best = arm_now
                if idle >= _PATIENCE:
                    self.is_exhausted = True
                    return
        except TimeUp:
            return


class Proposer:
    """TPE over the union of all families' values; what a family lacks is moved to its nearest."""

    def __init__(self, search: Search) -> None:
        """Imports Optuna.

        Raises:
            ValueError: It is not installed.
        """
        self._search = search
        self._optuna = load_optuna()
        self._families = tuple(search.grid.families.values())
        self._values: dict[str, tuple[Any, ...]] = {
            name: _union(getattr(one, name) for one in self._families)
            for name in ("n_max", "p_min", "fit_mib", "ubatch", "batch", "threads")
        }
        self._kv = tuple(dict.fromkeys(kv for one in self._families for kv in one.kv))
        self._extra = tuple(dict.fromkeys(extra for one in self._families for extra in one.extra))
        self._again: list[Arm] = []

    def ask(self) -> Arm | None:
        """An arm to measure; None where TPE proposes nothing that is not ruled out."""
        if not self._families:
            return None
        pending = self._pending()
        if pending is not None:
            return pending
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Optuna calls experimental
            study = self._study()
            for _ in range(_ASKS):
                trial = study.ask()
                arm = self._arm(trial)
                if self._search.limits.fails(arm) is None:
                    return arm
                trial.set_constraint("memory", _FAILED_SHORT_MIB)
                study.tell(trial, self._worst())
        return None

    def _pending(self) -> Arm | None:
        """An arm that a hang or a crash took away before it said anything."""
        search = self._search
        for process in search.learner.observations.processes.values():
            arm = process.arm.canonical()
            failed = process.failure or process.died_of
            is_lost = failed in ("hang", "crash") and not search.learner.n_processes(arm)
            if is_lost and arm not in self._again and search.limits.fails(arm) is None:
                self._again.append(arm)
                return arm
        return None

    def _study(self) -> Any:
        optuna = self._optuna
        seed = int(self._search.night.rng.integers(2**31))
        sampler = optuna.samplers.TPESampler(
            multivariate=True, group=True, constant_liar=True, seed=seed
        )
        study = optuna.create_study(sampler=sampler)
        for arm, value, short_mib in self._history():
            parameters = self._parameters(arm)
            if parameters is not None:
                study.add_trial(
                    optuna.trial.create_trial(
                        params=parameters,
                        distributions={name: self._distribution(name) for name in parameters},
                        value=value,
                        constraints={"memory": short_mib},
                    )
                )
        return study

    # What is told

    def _history(self) -> Iterable[tuple[Arm, float, float]]:
        """Arms with their mean turn [s] and how much memory they lacked (negative: had left) [MiB]."""
        search = self._search
        turns: dict[Arm, list[float]] = {}
        for one in search.learner.observed:
            turns.setdefault(one.arm.canonical(), []).append(math.exp(one.log_measured) / 1000)
        short: dict[Arm, float] = {}
        for process in search.learner.observations.processes.values():
            arm = process.arm.canonical()
            lacking = _short_mib(process, search.limits.headroom_mib)
            if lacking is not None:
                short[arm] = max(short.get(arm, -math.inf), lacking)
        for arm, seen in turns.items():
            lacking = short.get(arm.with_draft(arm.n_max, arm.p_min), -1.0)
            broken = search.limits.breaks_tools(arm) is not None
            yield arm, sum(seen) / len(seen), max(lacking, 1.0) if broken else lacking
        for arm, lacking in short.items():
            if arm not in turns and lacking > 0:
                yield arm, self._worst(), lacking

    def _worst(self) -> float:
        seen = [math.exp(one.log_measured) / 1000 for one in self._search.learner.observed]
        return max(seen, default=_WORST)

    # Arms and parameters

    def _distribution(self, name: str) -> Any:
        distributions = self._optuna.distributions
        if name == "family":
            return distributions.CategoricalDistribution([_name(one) for one in self._families])
        if name == "kv":
            return distributions.CategoricalDistribution(tuple(range(len(self._kv))))
        if name == "extra":
            return distributions.CategoricalDistribution(tuple(range(len(self._extra))))
        return distributions.IntDistribution(0, len(self._values[name]) - 1)

    def _parameters(self, arm: Arm) -> Parameters | None:
        """Places of an arm's values; None where it lies outside of the space."""
        family = self._search.grid.of(arm)
        names = [name for name in self._values if arm.drafts or name not in ("n_max", "p_min")]
        is_inside = (
            family is not None
            and arm.kv in self._kv
            and arm.extra in self._extra
            and all(self._value_of(arm, name) in self._values[name] for name in names)
        )
        if family is None or not is_inside:
            return None
        found: Parameters = {
            name: self._values[name].index(self._value_of(arm, name)) for name in names
        }
        return found | {
            "family": _name(family), "kv": self._kv.index(arm.kv), "extra": self._extra.index(arm.extra)
        }  # fmt: skip

    def _value_of(self, arm: Arm, name: str) -> Any:
        """A value of an arm; what is placed by hand has no margin, so any stands for it."""
        is_idle = name == "fit_mib" and arm.is_placed
        return self._values[name][0] if is_idle else getattr(arm, name)

    def _arm(self, trial: Any) -> Arm:
        def suggest(name: str) -> Any:
            distribution = self._distribution(name)
            if name in self._values:
                return trial.suggest_int(name, distribution.low, distribution.high)
            return trial.suggest_categorical(name, distribution.choices)

        named: Mapping[str, FamilyGrid] = {_name(one): one for one in self._families}
        family = named[suggest("family")]
        drafts = family.spec != OFF

        def value(name: str) -> Any:
            wanted = self._values[name][suggest(name)]
            return min(getattr(family, name), key=lambda one: abs(one - wanted))

        n_max, p_min = (value("n_max"), value("p_min")) if drafts else (0, 0.0)
        kv, extra = self._kv[suggest("kv")], self._extra[suggest("extra")]
        ubatch, batch = value("ubatch"), value("batch")
        if not family.allows_batches(ubatch, batch):
            batch = family.batch[-1]
        variant = Variant(
            kv if kv in family.kv else family.home.kv, batch, value("threads"),
            extra if extra in family.extra else family.home.extra,
        )  # fmt: skip
        return family.arm(n_max, p_min, ubatch, value("fit_mib"), variant).canonical()


def load_optuna() -> Any:
    """Optuna, quiet.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import optuna  # noqa: PLC0415 - 150 ms that only this strategy pays
    except ModuleNotFoundError as missing:
        raise ValueError(f"strategy tpe needs Optuna: pip install '{REQUIREMENT}'") from missing
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _short_mib(process: Process, wanted_mib: float) -> float | None:
    if "oom" in (process.failure, process.died_of):
        return _FAILED_SHORT_MIB
    seen = [
        -(reading.spill_mib or 0.0) if reading.has_spilled else reading.vram_free_min_mib
        for reading in (answer.reading for answer in process.answers)
        if reading.vram_free_min_mib is not None
    ]
    return wanted_mib - min(one for one in seen if one is not None) if seen else None


def _union(values: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(sorted({value for some in values for value in some}))


def _name(family: FamilyGrid) -> str:
    return f"{family.engine}/{family.spec}"
