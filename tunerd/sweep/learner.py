"""Everything a night has learned: laws by family, fitted to all samples so far, and what follows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tunerd.profile.arm import NGRAM, OFF, Arm, Extra, Request, Sample, shape_of
from tunerd.profile.workload import Workload
from tunerd.sweep import laws, observations
from tunerd.sweep.costs import FamilyCosts, FamilyKey, Levels, Place, Relative, Rows, place_of
from tunerd.sweep.known import ARM_SD, LEVEL_SD, Known, Told
from tunerd.sweep.space import variant_of

Array = NDArray[np.float64]

# Relative errors of the parts of a prediction (laws.PARTS), in the same order.
_PART_SD = np.array([0.30, 0.08, 0.05, 0.13, 0.13, 0.02, 0.04, 0.25, 0.04])
_LEVEL_SD = 0.04  # of a family
_SMOOTH_SD = 0.01
_SHAPE_SD = 0.012  # of one shape of batches, which other kernels serve
_QUIRK_SD = 0.008
_THREADS_SD = 0.06
_OWN_THREADS_SD = 0.02  # one core less than all of them may be better than either neighbour
_KV_SD = 0.03
_OWN_KV_SD = 0.05  # of a family: drafts read the cache more often
_BATCH_SD = 0.01
_EXTRA_SD = 0.03
_VARIANT_SD = 0.015  # of a family's own answer to threads, KV type and the like
# Of what others told, the newest: beliefs take time with the cube of it, and a server is waited for meanwhile.
_MOST_TOLD = 1000


@dataclass(frozen=True, slots=True)
class Observed:
    """One block of prompts answered by one configuration in one process.

    `box` is another that told it, empty for this one.
    """

    arm: Arm
    process: str
    block: str
    log_turn: float
    box: str = ""


class Points:
    """Arms as arrays for the kernel, with their predictions."""

    def __init__(
        self, arms: Sequence[Arm], predicted: Array, errors: Array, names: dict[Hashable, int]
    ) -> None:
        """Of arms with errors that their predictions have in common, by part of a turn."""
        self.predicted = predicted
        self.errors = errors
        self.family = laws.numbered((arm.family for arm in arms), names)
        self.kv = laws.numbered((("kv", arm.kv) for arm in arms), names)
        self.extra = laws.numbered((("extra", arm.extra) for arm in arms), names)
        self.variant = laws.numbered((("variant", variant_of(arm)) for arm in arms), names)
        self.plane = laws.numbered(
            (("plane", arm.canonical().with_margin(0)) for arm in arms), names
        )
        self.exact = laws.numbered((("exact", arm.canonical()) for arm in arms), names)
        self.threads = np.array([_log2(arm.threads) for arm in arms])
        self.batch = np.array([_log2(arm.batch) for arm in arms])
        self.n_max = np.array([_log2(arm.n_max) if arm.drafts else -2.0 for arm in arms])
        self.p_min = np.array([arm.p_min if arm.drafts else 0.0 for arm in arms])
        self.ubatch = np.array([_log2(arm.ubatch) for arm in arms])
        self.margin = np.array([arm.fit_mib / 1024 for arm in arms])


class Posterior:
    """Beliefs about configurations after some observations."""

    def __init__(self, points: Points, observed: Sequence[Observed]) -> None:
        from scipy.linalg import cho_factor

        self._points = points
        kernel = _kernel(points, points)
        luck = laws.PROCESS_SD**2 * _same([one.process for one in observed])
        luck += laws.BLOCK_SD**2 * _same([one.block for one in observed])
        residual = np.array([one.log_turn for one in observed]) - points.predicted
        is_told = np.array([bool(one.box) for one in observed], float)
        each = np.eye(len(observed))
        told = LEVEL_SD**2 * _same([one.box for one in observed]) + ARM_SD**2 * each
        luck = luck + laws.ANSWER_SD**2 * each + told * np.outer(is_told, is_told)
        self._factor = cho_factor(kernel + luck, lower=True)
        self._weights = self._solved(residual)

    def _solved(self, wanted: Array) -> Array:
        """What the covariance of what was observed makes these of."""
        from scipy.linalg import cho_solve

        return np.asarray(cho_solve(self._factor, wanted))

    def beliefs(self, points: Points) -> tuple[Array, Array]:
        """Mean and standard deviation of the log turn time of each point."""
        cross = _kernel(points, self._points)
        mean = points.predicted + cross @ self._weights
        explained = np.einsum("ij,ji->i", cross, self._solved(cross.T))
        variance = _prior_variance(points) - explained
        return mean, np.sqrt(np.maximum(variance, 1e-10))

    def differences_sd(self, points: Points, reference: Points) -> Array:
        """Standard deviation of the difference of each point from one other point."""
        cross, other = _kernel(points, self._points), _kernel(reference, self._points)
        explained = np.einsum("ij,ji->i", cross, self._solved(cross.T))
        solved = self._solved(other.T)[:, 0]
        own = _prior_variance(points) - explained
        shared = _kernel(points, reference)[:, 0] - cross @ solved
        variance = own + float(_prior_variance(reference)[0] - other[0] @ solved) - 2 * shared
        return np.asarray(np.sqrt(np.maximum(variance, 1e-10)), float)


def _log2(value: float) -> float:
    return math.log2(max(value, 1))


def _same(names: Sequence[Hashable]) -> Array:
    numbers = laws.numbered(names, {})
    return np.equal(numbers[:, None], numbers).astype(np.float64)


def _kernel(left: Points, right: Points) -> Array:
    def differ(name: str) -> Array:
        return np.asarray(getattr(left, name)[:, None] - getattr(right, name), float)

    def same(name: str) -> Array:
        return np.asarray(getattr(left, name)[:, None] == getattr(right, name), float)

    same_variant = same("variant")
    distance = (
        differ("n_max") ** 2
        + (differ("p_min") / 0.25) ** 2
        + (differ("ubatch") / 1.5) ** 2
        + differ("margin") ** 2
        + (1.0 - same_variant)
    )
    within = (
        _LEVEL_SD**2
        + left.errors @ right.errors.T
        + _SMOOTH_SD**2 * np.exp(-distance / 2)
        + _VARIANT_SD**2 * same_variant
        + _OWN_KV_SD**2 * same("kv")
    )
    quirk = (
        _SHAPE_SD**2 * same_variant * same("n_max") * same("ubatch")
        + _QUIRK_SD**2 * (same("plane") + same("exact")) / 2
    )
    across = (
        _THREADS_SD**2 * np.exp(-(differ("threads") ** 2) / 2)
        + _OWN_THREADS_SD**2 * same("threads")
        + _KV_SD**2 * same("kv")
        + _BATCH_SD**2 * np.exp(-(differ("batch") ** 2) / 2)
        + _EXTRA_SD**2 * same("extra")
    )
    return np.asarray(same("family") * (within + quirk) + across, float)


def _prior_variance(points: Points) -> Array:
    within = (
        _LEVEL_SD**2 + _SMOOTH_SD**2 + _VARIANT_SD**2 + _OWN_KV_SD**2 + _SHAPE_SD**2 + _QUIRK_SD**2
    )
    across = _THREADS_SD**2 + _OWN_THREADS_SD**2 + _KV_SD**2 + _BATCH_SD**2 + _EXTRA_SD**2
    return np.asarray(within + across + (points.errors**2).sum(axis=1), float)


def _observed_in(processes: Iterable[observations.Process], learner: Learner) -> list[Observed]:
    """Every whole block of every process that did not spill."""
    return [
        Observed(arm, process.name, block, math.log(learner.workload.turn_time_s(times)))
        for process in processes
        if not process.has_spilled
        for (arm, block), answers in observations.blocks_of(process).items()
        if (times := _times(process, answers, learner)) is not None
    ]


def _times(
    process: observations.Process, answers: dict[int, observations.Answer], learner: Learner
) -> list[float] | None:
    """Turn time of each class [ms]; None if a class is missing."""
    times = []
    for text, one in enumerate(learner.workload.classes):
        answer = answers.get(text)
        if answer is None or answer.reading.turn_ms is None:
            return None
        reading = observations.as_asked(process, answer, learner.workload)
        if reading is not None and reading.turn_ms is not None:
            left = observations.decode_ms(answer, one) - (reading.predicted_ms or 0.0)
            times.append(reading.turn_ms - reading.decode_left_ms + left)
            continue
        whole_ms = _whole_prompt_ms(process, answer, learner)
        if whole_ms is None or answer.reading.predicted_ms is None:
            return None
        times.append(whole_ms + observations.decode_ms(answer, one))
    return times


def _whole_prompt_ms(
    process: observations.Process, answer: observations.Answer, learner: Learner
) -> float | None:
    """What the prompt of a class would have taken that was cached to measure its decoding alone.

    From the prefixes that this process read, by the law for what differs in length.
    """
    costs = learner.costs_of(answer.arm)
    if costs is None or answer.text is None:
        return None
    rows = [
        observations.prompt_row(other)
        for other in process.answers
        if other.purpose == observations.PREFIX and observations.is_prompt_timed(other)
    ]
    taken = sum(row.ms for row in rows)  # long ones count most
    expected = sum(float(row.terms @ costs.prompt) for row in rows)
    if not expected:
        return None
    one = learner.observations.workload_seen().classes[answer.text]
    depth_k = (one.cached_tokens + one.new_tokens / 2) / 1000
    whole = laws.PromptRow(process.name, 0.0, one.new_tokens, max(answer.arm.ubatch, 1), depth_k)
    return taken / expected * float(whole.terms @ costs.prompt)


_UNKNOWN_SD = 0.1
_ROUNDS = 2  # in which laws and levels are fitted in turns


@dataclass(slots=True)
class FamilyModel:
    """Laws of one family."""

    acceptance: laws.Acceptance | None
    costs: FamilyCosts | None
    memory: laws.MemoryLaw


@dataclass(frozen=True, slots=True)
class Belief:
    """Log turn time [ms] of one arm: posterior mean and standard deviation."""

    arm: Arm
    mean: float
    sd: float
    n_processes: int


@dataclass
class Learner:
    """Samples in, beliefs out. Deterministic: the same samples give the same beliefs."""

    workload: Workload
    context: int
    known: Mapping[FamilyKey, Known] = field(default_factory=dict)
    n_slots: int = 1

    def __post_init__(self) -> None:
        """Nothing was seen."""
        self._told: list[Told] = []
        self.observations = observations.Observations(self.workload, self.n_slots)
        self.models: dict[tuple[str, str], FamilyModel] = {}
        self.version = 0  # of the beliefs; grows with every refit
        self._names: dict[Hashable, int] = {}
        self._posterior: Posterior | None = None
        self.observed: list[Observed] = []  # whole turns seen so far
        self._counts: dict[Arm, set[str]] = {}
        self._levels = Levels(())
        self._jitter = 30.0

    def add(self, samples: Iterable[Sample]) -> None:
        """Files samples; beliefs follow when they are asked for."""
        for sample in samples:
            self.observations.add(sample)

    def hear(self, news: Sequence[Told]) -> None:
        """What other boxes measured; beliefs follow."""
        if news:
            self._told = [*self._told, *news][-_MOST_TOLD:]
            self.version += 1
            self._observe()

    def refresh(self) -> None:
        """Refits the laws of every family that has new samples, and the posterior."""
        if not self.observations.changed:
            return
        self.version += 1
        self._jitter = laws.jitter_of(
            [
                (process.arm, process.vram_free_mib)
                for process in self.observations.processes.values()
                if process.is_up and process.vram_free_mib is not None
            ]
        )
        changed = sorted(self.observations.changed)
        rows = {family: self._fit(family) for family in changed}
        for _ in range(_ROUNDS):
            for family in changed:
                costs = rows[family].fit(self.workload, self._levels, self._relatives(family))
                if costs is not None:
                    self.models[family].costs = costs
            known = [one.costs for one in self.models.values() if one.costs is not None]
            self._levels = Levels([level for one in known for level in one.levels])
        self.observations.changed.clear()
        self._observe()

    @property
    def headroom_mib(self) -> float:
        """VRAM wanted free with the context full: three spreads between loads of this box."""
        return 3.0 * self._jitter

    def is_known(self, family: tuple[str, str]) -> bool:
        """Whether turn times of this family can be predicted."""
        model = self.models.get(family)
        return model is not None and model.costs is not None

    def n_processes(self, arm: Arm) -> int:
        """Processes started as exactly this arm that answered at least one whole block."""
        return len(self._counts.get(arm.canonical(), ()))

    def measured(self) -> list[Arm]:
        """Arms that answered a whole block as they would be deployed."""
        return list(self._counts)

    def memory_of(self, arm: Arm) -> laws.MemoryLaw:
        """Memory law that holds for an arm: its family's, or that of its placement by hand.

        From its relatives where nothing was seen of it.
        """
        shape, model = shape_of(arm), self.models.get(arm.family)
        if shape is None and model is not None:
            return model.memory
        if shape is None:
            return laws.fit_memory((), self._memory_relative(arm.family), self._jitter)
        return self._placed_law(arm.family, shape, self._memory_relative(arm.family, shape))

    def _placed_law(
        self, family: FamilyKey, shape: Extra, relative: laws.MemoryLaw | None = None
    ) -> laws.MemoryLaw:
        rows = self.observations.memory_of(family, self.context)
        own = [row for row in rows if shape_of(row.arm) == shape]
        return replace(laws.fit_memory(own, relative, self._jitter), is_binding=False)

    def predictions(self, arms: Sequence[Arm]) -> tuple[Array, Array]:
        """Log turn times of arms of any families, NaN where nothing is known, and the errors of their parts."""
        log_turn = np.full(len(arms), np.nan)
        errors = np.zeros((len(arms), len(laws.PARTS)))
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for at, arm in enumerate(arms):
            groups[arm.family].append(at)
        for members in groups.values():
            prediction = self.prediction_of([arms[at] for at in members])
            if prediction is not None:
                log_turn[members] = prediction.log_turn
                errors[members] = prediction.parts * _PART_SD
        return log_turn, errors

    def costs_of(self, arm: Arm) -> laws.Costs | None:
        """Laws at an arm's level; None where nothing is known."""
        model = self.models.get(arm.family)
        if model is None or model.costs is None:
            return None
        return model.costs.at(self._levels_of([arm])[0])

    def _levels_of(self, arms: Sequence[Arm]) -> Array:
        return self._levels.of([self._place(arm) for arm in arms])

    def _place(self, arm: Arm) -> Place:
        """Of an arm, with what its cache and batches take from weights where the fit moves them."""
        place = place_of(arm)
        if arm.is_placed or not self.memory_of(arm).is_binding:
            return place
        return replace(place, room_gib=laws.taken_gib(arm, self.n_slots * self.context))

    def without_drafts(self, arm: Arm) -> float | None:
        """Log turn time [ms] of an arm that drafts nothing, by the shortest steps of its engine's families that draft.

        Their drafter's own time is in it, so that it errs to the slow side. None where none of them is known.
        """
        levels = self._levels_of([arm])
        workload = self.observations.workload_seen()
        found = [
            float(laws.predict([arm], workload, None, model.costs.shared, levels).log_turn[0])
            for (engine, spec), model in self.models.items()
            if engine == arm.engine and spec != OFF and model.costs is not None
        ]
        return min(found, default=None)

    def prediction_of(self, arms: Sequence[Arm]) -> laws.Prediction | None:
        """Of arms of one family, by class; None where nothing is known of it."""
        family = arms[0].family
        model = self.models.get(family)
        if model is None or model.costs is None:
            return None
        levels = self._levels_of(arms)
        workload = self.observations.workload_seen()
        return laws.predict(arms, workload, model.acceptance, model.costs.shared, levels)

    def beliefs(self, arms: Sequence[Arm]) -> list[Belief | None]:
        """What is believed of each arm; None where its family was never measured."""
        log_turn, errors = self.predictions(arms)
        known = np.flatnonzero(np.isfinite(log_turn)).tolist()
        result: list[Belief | None] = [None] * len(arms)
        if not known:
            return result
        points = Points([arms[at] for at in known], log_turn[known], errors[known], self._names)
        if self._posterior is None:
            mean, sd = points.predicted, np.full(len(known), _UNKNOWN_SD)
        else:
            mean, sd = self._posterior.beliefs(points)
        for row, at in enumerate(known):
            arm = arms[at]
            result[at] = Belief(arm, float(mean[row]), float(sd[row]), self.n_processes(arm))
        return result

    def request_ms(self, arm: Arm, request: Request) -> float | None:
        """Expected time of a request of any shape; None where the family is not known."""
        costs, model = self.costs_of(arm), self.models.get(arm.family)
        if model is None or costs is None:
            return None
        depth = (request.cached_tokens + request.new_tokens / 2) / 1000
        prompt = laws.PromptRow("", 0.0, request.new_tokens, max(arm.ubatch, 1), depth).terms
        drafted = accepted = 0.0
        if model.acceptance is not None and arm.drafts and arm.n_max > 0:
            drafts = model.acceptance.drafts(arm.n_max, arm.p_min)
            drafted = float(drafts.drafted.sum(axis=1).mean())
            accepted = float(drafts.accepted.sum(axis=1).mean())
        depth += request.new_tokens / 2000
        step = np.array([1.0, *laws.spread_drafted(drafted), 0.0, depth])
        factor = float(costs.step_factors.max()) if request.concurrency > 1 else 1.0
        decode = float(step @ costs.step) * max(request.n_predict - 1, 0) / (1.0 + accepted)
        return factor * (float(prompt @ costs.prompt) + decode) + float(costs.overhead_ms[0])

    def differences_sd(self, arms: Sequence[Arm], reference: Arm) -> Array:
        """Standard deviations of the differences of log turn times from one other arm."""
        log_turn, errors = self.predictions([*arms, reference])
        if self._posterior is None or not np.isfinite(log_turn).all():
            return np.full(len(arms), _UNKNOWN_SD)
        points = Points(arms, log_turn[:-1], errors[:-1], self._names)
        other = Points([reference], log_turn[-1:], errors[-1:], self._names)
        return self._posterior.differences_sd(points, other)

    def to_json(self) -> dict[str, dict[str, object]]:
        """Parameters of every family's laws."""
        return {", ".join(family): _model_json(model) for family, model in self.models.items()}

    def set_context(self, n_tokens: int) -> None:
        """The full context, learned late: what was seen of memory is read again."""
        self.context = n_tokens
        self.observations.changed |= set(self.models)
        self.refresh()

    # Fits

    def _fit(self, family: FamilyKey) -> Rows:
        """Refits drafter and memory of a family; what it shows of steps and prompts."""
        processes = self.observations.of_family(family)
        rows = self.observations.memory_of(family, self.context)
        own = [row for row in rows if not row.arm.is_placed]
        memory = laws.fit_memory(own, self._memory_relative(family), self._jitter)
        before = self.models.get(family) or FamilyModel(None, None, memory)
        acceptance = None
        if family[1] != OFF:
            acceptance = laws.fit_acceptance(
                observations.pool(answer for one in processes for answer in one.answers),
                len(self.workload.classes),
                is_lookup=family[1] == NGRAM,
                relative=self._acceptance_relative(family),
                start=before.acceptance,
            )
        self.models[family] = FamilyModel(acceptance, before.costs, memory)
        kept = [process for process in processes if not process.has_spilled]
        return Rows(kept, acceptance, self._place)

    def _acceptance_relative(self, family: tuple[str, str]) -> laws.Acceptance | None:
        if family in self.known and (known := self.known[family].acceptance) is not None:
            return known
        others = (
            model.acceptance
            for (engine, spec), model in self.models.items()
            if spec == family[1] and engine != family[0] and model.costs
        )
        return next(others, None)

    def _memory_relative(
        self, family: FamilyKey, shape: Extra | None = None
    ) -> laws.MemoryLaw | None:
        """The law of the same engine with another kind of speculation of which most was seen, of a placement by hand too."""
        others = [one for one in self.models if one != family and one[0] == family[0]]
        told = (
            self.models[one].memory if shape is None else self._placed_law(one, shape)
            for one in others
        )
        known = [law for law in told if law.n_processes]
        return max(known, key=lambda law: law.n_processes, default=None)

    def _relatives(self, family: FamilyKey) -> list[Relative]:
        """Steps and prompts of families of the same engine or the same kind, each by its own samples alone."""
        found: list[Relative] = [
            (model.costs.step, model.costs.prompt)
            for other, model in self.models.items()
            if other != family
            and model.costs is not None
            and (other[0] == family[0] or other[1] == family[1])
        ]
        if family in self.known:
            found.append(self.known[family].relative)
        return found

    # Whole turns

    def _observe(self) -> None:
        self.observed = _observed_in(self.observations.processes.values(), self)
        self._counts = {}
        for one in self.observed:
            # p-min costs no memory: given with a request or at the start, it is the same arm.
            started = self.observations.processes[one.process].arm
            if one.arm.n_max == started.n_max or not one.arm.drafts:
                self._counts.setdefault(one.arm.canonical(), set()).add(one.process)
        arms = [one.arm for one in self.observed]
        log_turn, errors = self.predictions(arms)
        known = np.flatnonzero(np.isfinite(log_turn))
        if not len(known):
            self._posterior = None
            return
        points = Points([arms[at] for at in known], log_turn[known], errors[known], self._names)
        observed = [self.observed[at] for at in known]
        self._posterior = Posterior(points, observed)
        if foreign := self._of_others():
            everything = [*observed, *foreign]
            arms = [one.arm for one in everything]
            points = Points(arms, *self.predictions(arms), self._names)
            self._posterior = Posterior(points, everything)

    def _of_others(self) -> list[Observed]:
        """What others told of families that are known here, at the level of this box."""
        arms = list(dict.fromkeys(one.control for one in self._told))
        controls = dict(zip(arms, self.beliefs(arms), strict=True))
        return [
            Observed(one.arm, f"{one.box}/{at}", f"{one.box}/{at}", turn, one.box)
            for at, one in enumerate(self._told)
            if (control := controls[one.control]) is not None and self.is_known(one.arm.family)
            for turn in [control.mean + one.log_ratio]
        ]


def _model_json(model: FamilyModel) -> dict[str, object]:
    found: dict[str, object] = {}
    if model.acceptance is not None:
        parameters = [round(float(value), 4) for value in model.acceptance.parameters]
        found["acceptance"] = {"parameters": parameters}
    if model.costs is not None:
        shared = model.costs.shared
        found["costs"] = {
            "step_ms": [round(float(c), 5) for c in shared.step],
            "prompt_ms": [round(float(c), 6) for c in shared.prompt],
        }
    return found
