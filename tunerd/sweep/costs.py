"""What steps and prompts cost: a law for each family, and a level for each arm.

A law says how the time of a step goes with its draft, and that of a prompt with its length. What threads, cache
type, batch, other keys and the memory left free do beside it is a level, a log factor: seen in a process or two each, too
few for laws of their own, but about the same in all families, so one Gaussian process over all processes of the night learns them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tunerd.profile.arm import EXPERTS, Arm, Extra, placement_of
from tunerd.profile.workload import Workload
from tunerd.sweep import laws, observations
from tunerd.sweep.observations import Answer, Process
from tunerd.sweep.space import Variant, variant_of
from tunerd.words import all_known

Array = NDArray[np.float64]
Row = TypeVar("Row", laws.StepRow, laws.PromptRow)
Seen = Sequence[laws.StepRow | laws.PromptRow]

_PROCESS_SD = 0.03
_ROW_SD = 0.04  # of one answer within its process
_FACTOR_WEIGHT = 1.0  # answers' worth of belief that a class is like the others
_CONCURRENT_WEIGHT = 0.02

# By how much settings move steps and prompts, as log ratios: a family as a whole, one variant of it, threads, cache
# type, batch, other keys, placement.
_FAMILY_SD = 0.5
_OWN_SD = 0.01
# Each doubling of the threads, and what goes otherwise: the last core may slow the others down.
_THREADS, _THREADS_SLOPE_SD, _THREADS_SD = -0.1, 0.1, 0.04
_KV_SD = 0.08
_BATCH_SD = 0.01
_EXTRA_SD = 0.03
_PLACEMENT_SD = 0.1
# Per GiB that the weights do not get, for experts are then read over the bus; per 2,048 tokens of a physical batch, whose
# buffers take more or less of it than is thought.
_ROOM, _ROOM_SD = 0.07, 0.05
_WIDTH_SD = 0.04
_USUAL_THREADS = 8
# The parts of an effect that engines, and the families of an engine, do not share.
_OF_ENGINE, _OF_FAMILY = 0.3, 0.3

FamilyKey = tuple[str, str]
# Laws of steps and prompts of a family that is like another one, as far as they are known.
Relative = tuple[laws.Fitted | None, laws.Fitted | None]


@dataclass(frozen=True, slots=True)
class Place:
    """What the level of an arm depends on."""

    family: FamilyKey
    variant: Variant
    room_gib: float
    ubatch: int


def place_of(arm: Arm) -> Place:
    """Of one arm."""
    return Place(arm.family, variant_of(arm), laws.room_gib(arm), max(arm.ubatch, 1))


@dataclass(frozen=True, slots=True)
class Level:
    """What one process took beyond its family's law: logs of step and prompt, None unseen, and answers behind them."""

    place: Place
    logs: tuple[float | None, float | None]
    counts: tuple[int, int]


class Levels:
    """Log factors of step and prompt of any arm, from those of all processes of the night."""

    def __init__(self, seen: Sequence[Level]) -> None:
        self._kept: dict[Place, tuple[float, float]] = {}
        self._names: dict[Hashable, int] = {}
        self._parts = [self._part(seen, which) for which in (0, 1)]

    def _part(self, seen: Sequence[Level], which: int) -> tuple[_Features, Array] | None:
        known = [one for one in seen if one.logs[which] is not None]
        if not known:
            return None
        features = _Features([one.place for one in known], self._names)
        logs = np.array([one.logs[which] for one in known], float) - features.usual
        counts = np.array([max(one.counts[which], 1) for one in known])
        noise = _PROCESS_SD**2 + _ROW_SD**2 / counts
        weights = np.linalg.solve(features.kernel(features) + np.diag(noise), logs)
        return features, np.asarray(weights, float)

    def of(self, places: Sequence[Place]) -> Array:
        """Expected log factors of step and prompt, shape (P, 2)."""
        unknown = [one for one in dict.fromkeys(places) if one not in self._kept]
        if unknown:
            found = self.expected(unknown, with_family=True).tolist()
            self._kept.update(
                (one, (step, prompt)) for one, (step, prompt) in zip(unknown, found, strict=True)
            )
        return np.array([self._kept[one] for one in places]).reshape(-1, 2)

    def expected(self, places: Sequence[Place], *, with_family: bool) -> Array:
        """Log factors of places; without what is a family's own where its law has it."""
        features = _Features(places, self._names)
        columns = []
        for part in self._parts:
            mean = features.usual
            if part is not None:
                seen, weights = part
                mean = mean + features.kernel(seen, with_family=with_family) @ weights
            columns.append(mean)
        return np.stack(columns, axis=1)


class _Features:
    """Places as arrays for the kernel."""

    def __init__(self, places: Sequence[Place], names: dict[Hashable, int]) -> None:
        variants = [one.variant for one in places]
        self.family = laws.numbered((one.family for one in places), names)
        self.engine = laws.numbered((("engine", one.family[0]) for one in places), names)
        self.variant = laws.numbered(variants, names)
        self.kv = laws.numbered((("kv", one.kv) for one in variants), names)
        self.extra = laws.numbered(
            (("extra", one.extra - placement_of(one.extra)) for one in variants), names
        )
        self.placement = [placement_of(one.extra) for one in variants]
        self.threads = np.log2([max(one.threads, 1) / _USUAL_THREADS for one in variants])
        self.batch = np.log2([max(one.batch, 1) for one in variants])
        self.room = np.array([one.room_gib for one in places])
        self.width = np.array([one.ubatch / laws.WIDTH for one in places])

    @property
    def usual(self) -> Array:
        """Levels before anything was seen."""
        return np.asarray(_ROOM * self.room + _THREADS * self.threads, float)

    def kernel(self, other: _Features, *, with_family: bool = True) -> Array:
        """Covariance of levels, shape (own, other)."""

        def same(name: str) -> Array:
            return np.asarray(getattr(self, name)[:, None] == getattr(other, name), float)

        def near(name: str) -> Array:
            return np.asarray(
                np.exp(-((getattr(self, name)[:, None] - getattr(other, name)) ** 2) / 2), float
            )

        family = same("family")
        own = (1.0 - _OF_ENGINE - _OF_FAMILY) + _OF_ENGINE * same("engine") + _OF_FAMILY * family
        found = own * (
            _THREADS_SD**2 * near("threads")
            + _THREADS_SLOPE_SD**2 * np.outer(self.threads, other.threads)
            + _KV_SD**2 * same("kv")
            + _EXTRA_SD**2 * same("extra")
            + _ROOM_SD**2 * np.outer(self.room, other.room)
            + _WIDTH_SD**2 * np.outer(self.width, other.width)
        )
        found += _BATCH_SD**2 * near("batch")
        if any(self.placement) and any(other.placement):
            alike = [[_placed_alike(one, two) for two in other.placement] for one in self.placement]
            found += _PLACEMENT_SD**2 * np.array(alike)
        if with_family:
            found += family * (_FAMILY_SD**2 + _OWN_SD**2 * same("variant"))
        return found


@lru_cache(maxsize=4096)
def _placed_alike(first: Extra, second: Extra) -> float:
    """How much one placement says of another: those that differ in the number of experts alone.

    That of fit says nothing of any.
    """
    one, other = dict(first), dict(second)
    if not one or not other:
        return 0.0
    counts = one.pop(EXPERTS, None), other.pop(EXPERTS, None)
    if one != other or (counts[0] is None) != (counts[1] is None):
        return 0.0
    if counts[0] is None or counts[1] is None:
        return 1.0
    apart = math.log2(max(int(counts[0]), 1)) - math.log2(max(int(counts[1]), 1))
    return math.exp(-apart * apart / 2)


@dataclass(frozen=True, slots=True)
class FamilyCosts:
    """The law of one family, what it says by itself (for others that are like it), and the levels of its processes."""

    shared: laws.Costs
    step: laws.Fitted
    prompt: laws.Fitted
    levels: tuple[Level, ...]

    def at(self, level: Sequence[float]) -> laws.Costs:
        """The law at a level."""
        step, prompt = level
        return replace(
            self.shared,
            step=self.shared.step * math.exp(step),
            prompt=self.shared.prompt * math.exp(prompt),
        )


class Rows:
    """What the processes of one family show of steps and prompts."""

    def __init__(
        self,
        processes: Sequence[Process],
        acceptance: laws.Acceptance | None,
        place: Callable[[Arm], Place] = place_of,
    ) -> None:
        answers = [answer for one in processes for answer in one.answers]
        timed = filter(observations.is_timed, answers)
        self.steps = [observations.step_row(one, acceptance) for one in timed]
        prompts = filter(observations.is_prompt_timed, answers)
        self.prompts = [observations.prompt_row(one) for one in prompts]
        self.places = {one.name: place(one.arm) for one in processes if one.answers}
        self._alone = _single(self.steps), _single(self.prompts)
        self._step_table = laws.StepTable(self._alone[0])
        self._overhead_ms = _overhead_ms(answers)

    def fit(
        self, workload: Workload, levels: Levels, relatives: Sequence[Relative]
    ) -> FamilyCosts | None:
        """The law; None before both a step and a prompt were seen.

        Args:
            workload: Its classes get factors of their own.
            levels: Of other processes too.
            relatives: Laws of families that are like this one, steps and prompts.
        """
        names = list(self.places)
        beside = dict(
            zip(names, levels.expected(list(self.places.values()), with_family=False), strict=True)
        )
        # What brings each row to level 0.
        step_scales, prompt_scales = (
            np.array([math.exp(-beside[row.process][which]) for row in self._alone[which]])
            for which in (0, 1)
        )

        def fits(kin: Sequence[Relative]) -> Relative:
            steps = [step for step, _ in kin if step is not None]
            prompts = [prompt for _, prompt in kin if prompt is not None]
            return (
                laws.fit_steps(self._step_table, step_scales, steps),
                laws.fit_prompts(self._alone[1], prompt_scales, prompts),
            )

        own_step, own_prompt = fits(())
        if own_step is None or own_prompt is None:
            return None
        like_step, like_prompt = fits(relatives) if relatives else (None, None)
        step, prompt = (like_step or own_step).mean, (like_prompt or own_prompt).mean
        beyond = _beyond(self.steps, step), _beyond(self.prompts, prompt)
        found = self._levels(beyond)
        logs = {name: one.logs for name, one in zip(names, found, strict=True)}
        shared = laws.Costs(
            step, prompt, _factors(self.steps, beyond[0], workload, {name: one[0] for name, one in logs.items()}),
            _factors(self.prompts, beyond[1], workload, {name: one[1] for name, one in logs.items()}),
            np.full(len(workload.classes), self._overhead_ms),
        )  # fmt: skip
        return FamilyCosts(shared, own_step, own_prompt, found)

    def _levels(self, beyond: tuple[Sequence[float], Sequence[float]]) -> tuple[Level, ...]:
        logs: tuple[dict[str, list[float]], ...] = (defaultdict(list), defaultdict(list))
        both: tuple[Seen, ...] = self.steps, self.prompts
        for of_kind, seen, values in zip(logs, both, beyond, strict=True):
            is_any_alone = any(row.is_alone for row in seen)
            for row, value in zip(seen, values, strict=True):
                if row.is_alone or not is_any_alone:
                    of_kind[row.process].append(value)
        found = []
        for name, place in self.places.items():
            own = [of_kind.get(name, []) for of_kind in logs]
            means = [sum(one) / len(one) if one else None for one in own]
            found.append(Level(place, (means[0], means[1]), (len(own[0]), len(own[1]))))
        return tuple(found)


def _single(seen: Sequence[Row]) -> Sequence[Row]:
    """Those of requests that were alone in the server, where there are any."""
    return [one for one in seen if one.is_alone] or seen


def _beyond(seen: Seen, law: Array) -> list[float]:
    """Log ratio of each time to what the law says."""
    return [math.log(one.ms / max(float(one.terms @ law), 1e-6)) for one in seen]


def _factors(
    seen: Seen, beyond: Sequence[float], workload: Workload, levels: dict[str, float | None]
) -> Array:  # fmt: skip
    """What each class takes beyond the law, and beyond the levels of its processes."""
    logs: list[list[float]] = [[] for _ in workload.classes]
    for row, value in zip(seen, beyond, strict=True):
        level = levels.get(row.process)
        if row.text is not None and level is not None:
            logs[row.text].append(value - level)
    factors = []
    for one_class, values in zip(workload.classes, logs, strict=True):
        weight = _FACTOR_WEIGHT if one_class.concurrency == 1 else _CONCURRENT_WEIGHT
        factors.append(math.exp(sum(values) / (len(values) + weight)))
    return np.array(factors)


def _overhead_ms(answers: Sequence[Answer]) -> float:
    """What the client adds to the server's own two phases."""
    readings = (answer.reading for answer in answers)
    told = (all_known((one.wall_ms, one.prompt_ms, one.predicted_ms)) for one in readings)
    found = [
        max(wall - (prompt + predicted), 0.0) for wall, prompt, predicted in filter(None, told)
    ]
    return float(np.median(found)) if found else 0.0
