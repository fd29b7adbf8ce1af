"""What steps and prompts of one family cost: one law, and a level for each variant of it.

A variant (threads, cache type, batch, other keys) is seen in a process or two, too few for a law of its
own. So all variants share the coefficients, and each has a factor; that of a variant which was not
measured follows from what changed elsewhere when the same things changed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunerd.profile.arm import EXPERTS, Extra, placement_of
from tunerd.profile.workload import Workload
from tunerd.sweep.laws import Acceptance, Costs, PromptRow, StepRow, fit_prompts, fit_steps
from tunerd.sweep.observations import (
    Answer,
    Process,
    is_prompt_timed,
    is_timed,
    prompt_row,
    step_row,
    terms_of_prompt,
)
from tunerd.sweep.space import Variant

Array = NDArray[np.float64]

_ROUNDS = 2
_LEVEL_SD = 0.15  # of a variant, as a log ratio
_PROCESS_SD = 0.03
_MISFIT_SDS = 2.0
_FACTOR_WEIGHT = 1.0  # answers' worth of belief that a class is like the others
_CONCURRENT_WEIGHT = 0.02

# How far variants may differ from the usual one by what they change, as log ratios.
_FAMILY_SD = 0.01
_THREADS_SD = 0.08
_KV_SD = 0.05
_BATCH_SD = 0.01
_EXTRA_SD = 0.03
_COST_PLACEMENT_SD = 0.1

Level = tuple[float, float]
FamilyKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class FamilyCosts:
    """One law; `levels` are log factors of step and prompt, and processes seen, by variant."""

    shared: Costs
    levels: Mapping[Variant, Level]
    counts: Mapping[Variant, int]

    def costs(self, level: Level) -> Costs:
        """The law at a level."""
        shared = self.shared
        return Costs(
            None if shared.step is None else shared.step * math.exp(level[0]),
            None if shared.prompt is None else shared.prompt * math.exp(level[1]),
            shared.step_factors, shared.prompt_factors, shared.overhead_ms,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Seen:
    """The decoding or the prompt of one answer: time [ms], and the law's terms for it."""

    row: StepRow | PromptRow
    ms: float
    terms: Array
    text: int | None
    variant: Variant
    process: str

    def at_base(self, level: float) -> StepRow | PromptRow:
        """The row as it would be in the variant with level 0."""
        ms = self.ms * math.exp(-level)
        if isinstance(self.row, StepRow):
            scale = math.exp(-level)
            table = tuple((drafted, n, one * scale) for drafted, n, one in self.row.table)
            return replace(self.row, step_ms=ms, table=table)
        return replace(self.row, prompt_ms=ms)


def fit_costs(
    by_variant: Mapping[Variant, Sequence[Process]],
    workload: Workload,
    acceptance: Acceptance | None,
    relative: Costs | None,
) -> FamilyCosts | None:
    """The law of one family; None before both a step and a prompt were seen, or are known elsewhere.

    Args:
        by_variant: Processes, the variant with most of them first; that one has level 0.
        workload: Its classes get factors of their own.
        acceptance: The drafter.
        relative: The law of a family that is like this one.
    """
    if not by_variant:
        return None
    answers = [
        (variant, answer)
        for variant, processes in by_variant.items()
        for process in processes
        for answer in process.answers
    ]
    steps, prompts = _steps(answers, acceptance), _prompts(answers)

    def steps_law(rows: Sequence[Any]) -> Array | None:
        return fit_steps(rows, None if relative is None else relative.step)

    def prompts_law(rows: Sequence[Any]) -> Array | None:
        return fit_prompts(rows, None if relative is None else relative.prompt)

    variants = tuple(by_variant)
    step, step_levels = _with_levels(_single(steps, answers), variants, steps_law)
    prompt, prompt_levels = _with_levels(_single(prompts, answers), variants, prompts_law)
    if step is None or prompt is None:
        return None
    shared = Costs(
        step, prompt, _factors(steps, workload, step, step_levels),
        _factors(prompts, workload, prompt, prompt_levels),
        np.full(len(workload.classes), _overhead_ms([answer for _, answer in answers])),
    )  # fmt: skip
    levels = {one: (step_levels[one], prompt_levels[one]) for one in variants}
    return FamilyCosts(shared, levels, {one: len(found) for one, found in by_variant.items()})


def _steps(answers: Sequence[tuple[Variant, Answer]], acceptance: Acceptance | None) -> list[_Seen]:
    found = []
    for variant, answer in answers:
        if is_timed(answer):
            row = step_row(answer, acceptance)
            terms = row.terms
            found.append(_Seen(row, row.step_ms, terms, answer.text, variant, answer.process))
    return found


def _prompts(answers: Sequence[tuple[Variant, Answer]]) -> list[_Seen]:
    found = []
    for variant, answer in answers:
        if is_prompt_timed(answer):
            row = prompt_row(answer)
            terms = terms_of_prompt(row)
            ms = max(row.prompt_ms, 1e-6)
            found.append(_Seen(row, ms, terms, answer.text, variant, answer.process))
    return found


def _single(seen: list[_Seen], answers: Sequence[tuple[Variant, Answer]]) -> list[_Seen]:
    """Those of requests that were alone in the server, where there are any."""
    crowded = {
        answer.text
        for _, answer in answers
        if answer.request.concurrency > 1 and answer.text is not None
    }
    return [one for one in seen if one.text not in crowded] or seen


def _with_levels(
    seen: Sequence[_Seen],
    variants: Sequence[Variant],
    law: Callable[[Sequence[Any]], Array | None],
) -> tuple[Array | None, dict[Variant, float]]:
    """The law that all variants share, and the log factor of each."""
    levels = dict.fromkeys(variants, 0.0)
    solution = law([one.row for one in seen if one.variant == variants[0]])
    for _ in range(_ROUNDS if len(variants) > 1 and solution is not None else 0):
        found = {one: _level(one, seen, solution) for one in variants}
        # By how much the law is off in the usual variant, it is off in all of them; of what may be
        # chance, the estimate's own noise would go into all the others.
        off = _beyond_chance(found[variants[0]])
        levels = {one: level - off for one, level in found.items()}
        levels[variants[0]] = 0.0
        solution = law([one.at_base(levels[one.variant]) for one in seen])
    return solution, levels


def _beyond_chance(level: float) -> float:
    """The part of a misfit that noise between processes does not explain."""
    return math.copysign(max(0.0, abs(level) - _MISFIT_SDS * _PROCESS_SD), level)


def _level(variant: Variant, seen: Sequence[_Seen], solution: Array | None) -> float:
    by_process: dict[str, list[float]] = defaultdict(list)
    for one in seen:
        if one.variant == variant and solution is not None:
            ratio = one.ms / max(float(one.terms @ solution), 1e-6)
            by_process[one.process].append(math.log(ratio))
    means = [float(np.mean(logs)) for logs in by_process.values()]
    return sum(means) / (len(means) + (_PROCESS_SD / _LEVEL_SD) ** 2)


def _factors(
    seen: Sequence[_Seen], workload: Workload, solution: Array, levels: Mapping[Variant, float]
) -> Array:
    """What each class takes beyond the law."""
    logs: list[list[float]] = [[] for _ in workload.classes]
    for one in seen:
        if one.text is not None:
            expected = max(float(one.terms @ solution), 1e-6) * math.exp(levels[one.variant])
            logs[one.text].append(math.log(one.ms / expected))
    factors = []
    for one_class, values in zip(workload.classes, logs, strict=True):
        weight = _FACTOR_WEIGHT if one_class.concurrency == 1 else _CONCURRENT_WEIGHT
        factors.append(math.exp(sum(values) / (len(values) + weight)))
    return np.array(factors)


def _overhead_ms(answers: Sequence[Answer]) -> float:
    """What the client adds to the server's own two phases."""
    found = []
    for answer in answers:
        reading = answer.reading
        if None not in (reading.wall_ms, reading.prompt_ms, reading.predicted_ms):
            own = (reading.prompt_ms or 0.0) + (reading.predicted_ms or 0.0)
            found.append(max((reading.wall_ms or 0.0) - own, 0.0))
    return float(np.median(found)) if found else 0.0


class Elsewhere:
    """Levels of variants that a family was not measured with.

    A Gaussian process over what a variant is made of, shared by all families: what twice the threads
    did to one family, they will about do to another.
    """

    def __init__(self, known: Mapping[FamilyKey, FamilyCosts]) -> None:
        self._bases = {key: next(iter(costs.levels)) for key, costs in known.items()}
        self._seen = [(key, one) for key, costs in known.items() for one in costs.levels]
        self._kept: dict[tuple[FamilyKey, Variant], Level] = {}
        counts = np.array([known[key].counts[one] for key, one in self._seen])
        levels = np.array([known[key].levels[one] for key, one in self._seen])
        noise = _FAMILY_SD**2 + _PROCESS_SD**2 / np.maximum(counts, 1)
        kernel = np.array([self._covariances(*one) for one in self._seen])
        self._weights = np.linalg.solve(kernel + np.diag(noise), levels)

    def level(self, family: FamilyKey, variant: Variant) -> Level:
        """Of a family that was measured with something else."""
        key = family, variant
        if key not in self._kept:
            step, prompt = (self._covariances(*key) @ self._weights).tolist()
            self._kept[key] = (step, prompt)
        return self._kept[key]

    def _covariances(self, family: FamilyKey, variant: Variant) -> Array:
        base = self._bases[family]
        return np.array(
            [_alike(variant, other, base, self._bases[key]) for key, other in self._seen]
        )


def _alike(first: Variant, second: Variant, base: Variant, other_base: Variant) -> float:
    """Covariance of two levels, each a difference from a base."""

    def near(name: str) -> float:
        one, two = getattr(first, name), getattr(base, name)
        three, four = getattr(second, name), getattr(other_base, name)
        if one == two or three == four:
            return 0.0
        return _near(one, three) - _near(one, four) - _near(two, three) + _near(two, four)

    def same(of: Callable[[Variant], object]) -> float:
        # One cache type's effect says nothing of another's, so the base has none of its own.
        changed, usual = of(first), of(base)
        return float(changed == of(second) != usual and usual == of(other_base))

    def placed() -> float:
        if first.extra == base.extra or second.extra == other_base.extra:
            return 0.0
        return (
            _placed_alike(first, second)
            - _placed_alike(first, other_base)
            - _placed_alike(base, second)
            + _placed_alike(base, other_base)
        )

    return (
        _THREADS_SD**2 * near("threads")
        + _KV_SD**2 * same(lambda one: one.kv)
        + _BATCH_SD**2 * near("batch")
        + _EXTRA_SD**2 * same(_beside_placement)
        + _COST_PLACEMENT_SD**2 * placed()
    )


def _beside_placement(variant: Variant) -> Extra:
    return variant.extra - placement_of(variant.extra)


def _placed_alike(first: Variant, second: Variant) -> float:
    """How much one placement says of another: those that differ in the number of experts alone.

    That of fit says nothing of any.
    """
    one, other = dict(placement_of(first.extra)), dict(placement_of(second.extra))
    if not one or not other:
        return 0.0
    counts = one.pop(EXPERTS, None), other.pop(EXPERTS, None)
    if one != other or (counts[0] is None) != (counts[1] is None):
        return 0.0
    return 1.0 if counts[0] is None or counts[1] is None else _near(int(counts[0]), int(counts[1]))


@lru_cache(maxsize=4096)
def _near(one: int, other: int) -> float:
    return math.exp(-((math.log2(max(one, 1)) - math.log2(max(other, 1))) ** 2) / 2)
