"""The laws of a night: drafts accepted, time of steps and prompts, memory, and noise."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from tunerd.profile.arm import Arm
from tunerd.profile.workload import Workload

Array = NDArray[np.float64]

# Where the parameters lie before anything was seen: alpha, beta, ln kappa, gamma, tau, first, and their spread.
_ACCEPTANCE_PRIOR = np.array([1.2, -0.05, np.log(1.5), 0.0, 0.8, 0.3])
_ACCEPTANCE_PRIOR_SD = np.array([1.2, 0.08, 0.8, 0.6, 0.5, 0.4])
# The text that drafts guess at is easier in one step than in the next, as a normal value, here at five points (Gauss-Hermite).
_EASE, _EASE_SHARE = np.polynomial.hermite_e.hermegauss(5)
_EASE_SHARE = _EASE_SHARE / _EASE_SHARE.sum()
_RELATIVE_SPREAD = 0.3  # of the same head on another engine
# Texts of one class differ by about 0.3 in logit h, so a mean over few of them is off by that.
_TEXT_SD = 0.06
_STEP_SD = 1.3
_STEPS_OF_FIT = 12
_MOST_DAMPING = 1e4  # no step helps any more


@dataclass(frozen=True, slots=True)
class Counts:
    """What runs that drafted alike saw of one class of text, pooled."""

    text: int
    n_max: int
    p_min: float
    n_prompts: int
    n_steps: float
    drafted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """Probabilities by (text, position): drafted at all, and accepted."""

    drafted: Array
    accepted: Array


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A fitted drafter.

    `parameters` are one alpha per text, then beta (by position), ln kappa and gamma (confidence), tau (spread of alpha from
    step to step: a draft whose beginning is right goes on to be right) and first (1 where the first token is drafted
    whatever its confidence, as ik does, 0 where it is not). `is_lookup`
    replaces confidence by a chance of a draft at all. `spread` is how far those of a relative may be from its parameters,
    all or each of them.
    """

    parameters: Array
    is_lookup: bool = False
    spread: float | Array = _RELATIVE_SPREAD
    _kept: dict[float, Drafts] = field(default_factory=dict, repr=False, compare=False)

    def drafts(self, n_max: int, p_min: float) -> Drafts:
        """Probabilities for drafts of up to `n_max` tokens at one p-min."""
        if p_min not in self._kept:
            self._kept[p_min] = _chances(
                self.parameters, _MOST_POSITIONS, p_min, is_lookup=self.is_lookup
            )
        kept = self._kept[p_min]
        return Drafts(kept.drafted[:, :n_max], kept.accepted[:, :n_max])


_OF_ALL_TEXTS = len(_ACCEPTANCE_PRIOR) - 1


def n_parameters(n_texts: int) -> int:
    """Of an `Acceptance`."""
    return n_texts + _OF_ALL_TEXTS


def fit_acceptance(
    counts: Sequence[Counts],
    n_texts: int,
    *,
    is_lookup: bool = False,
    relative: Acceptance | None = None,
    start: Acceptance | None = None,
) -> Acceptance:
    """The drafter that explains the counts best, by damped least squares with a weak prior.

    Args:
        counts: Pooled observations; may be empty.
        n_texts: Classes of text.
        is_lookup: An n-gram kind.
        relative: The same head on another engine: a better prior than none.
        start: An earlier fit, to begin from.
    """
    prior, spread = _start(n_texts, relative, is_lookup=is_lookup)
    begin = prior if start is None or start.parameters.shape != prior.shape else start.parameters
    usable = [count for count in counts if count.n_steps > 0]
    if not usable:
        return Acceptance(prior, is_lookup)
    fitted = _least_squares(_Data(usable), begin, prior, spread, is_lookup=is_lookup)
    return Acceptance(fitted, is_lookup)


class _Data:
    """Observations as arrays, grouped by p-min."""

    def __init__(self, counts: Sequence[Counts]) -> None:
        self.n_positions = max(count.n_max for count in counts)
        self.text = np.array([count.text for count in counts])
        self.n_max = np.array([count.n_max for count in counts])
        self.p_mins, self.group = np.unique([count.p_min for count in counts], return_inverse=True)
        steps = np.array([count.n_steps for count in counts])
        prompts = np.array([max(count.n_prompts, 1) for count in counts])
        self.drafted = np.array([count.drafted for count in counts]) / steps
        self.accepted = np.array([count.accepted for count in counts]) / steps
        noise = _STEP_SD / np.sqrt(steps)
        share = _TEXT_SD / np.sqrt(prompts)
        self.drafted_sd = np.hypot(noise, share * (self.drafted + 0.2))
        self.accepted_sd = np.hypot(noise, share * (self.accepted + 0.2))
        self.mask = np.arange(self.n_positions) < self.n_max[:, None]

    def residuals(self, parameters: Array, *, is_lookup: bool) -> Array:
        """Model minus observation in standard deviations: drafted, then accepted."""
        drafted = np.empty((len(self.text), self.n_positions))
        accepted = np.empty_like(drafted)
        for index, p_min in enumerate(self.p_mins):
            rows = self.group == index
            found = _chances(parameters, self.n_positions, float(p_min), is_lookup=is_lookup)
            drafted[rows] = found.drafted[self.text[rows]]
            accepted[rows] = found.accepted[self.text[rows]]
        return np.concatenate(
            [
                ((drafted * self.mask).sum(axis=1) - self.drafted) / self.drafted_sd,
                ((accepted * self.mask).sum(axis=1) - self.accepted) / self.accepted_sd,
            ]
        )


def _start(n_texts: int, relative: Acceptance | None, *, is_lookup: bool) -> tuple[Array, Array]:
    mean = np.concatenate([np.full(n_texts, _ACCEPTANCE_PRIOR[0]), _ACCEPTANCE_PRIOR[1:]])
    spread = np.concatenate([np.full(n_texts, _ACCEPTANCE_PRIOR_SD[0]), _ACCEPTANCE_PRIOR_SD[1:]])
    if is_lookup:
        mean[:n_texts], spread[:n_texts] = -1.0, 1.5
        mean[n_texts + 1], spread[n_texts + 1] = 1.0, 1.2
    if relative is not None and relative.parameters.shape == mean.shape:
        return relative.parameters.copy(), np.minimum(spread, relative.spread)
    return mean, spread


def _least_squares(
    data: _Data, begin: Array, prior: Array, spread: Array, *, is_lookup: bool
) -> Array:
    def residuals(parameters: Array) -> Array:
        own = data.residuals(parameters, is_lookup=is_lookup)
        return np.concatenate([own, (parameters - prior) / spread])

    parameters = begin.copy()
    current = residuals(parameters)
    cost, damping = float(current @ current), 1e-2
    for _ in range(_STEPS_OF_FIT):
        jacobian = np.empty((len(current), len(parameters)))
        for column in range(len(parameters)):
            moved = parameters.copy()
            moved[column] += 1e-4
            jacobian[:, column] = (residuals(moved) - current) / 1e-4
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ current)
        proposed = parameters + np.clip(step, -1.0, 1.0)
        trial = residuals(proposed)
        trial_cost = float(trial @ trial)
        if trial_cost < cost:
            gained = cost - trial_cost
            parameters, current, cost = proposed, trial, trial_cost
            damping = max(damping / 5, 1e-6)
            if gained < 1e-2 + 1e-3 * cost:
                break
        else:
            damping *= 10
            if damping > _MOST_DAMPING:
                break
    return parameters


# Longer drafts than any build takes.
_MOST_POSITIONS = 64


def _chances(parameters: Array, n_positions: int, p_min: float, *, is_lookup: bool) -> Drafts:
    from scipy.special import betainc, expit

    alpha, (beta, shape, gamma, tau, first) = np.split(parameters, [-_OF_ALL_TEXTS])
    positions = beta * np.arange(n_positions)
    if is_lookup:
        found = expit(alpha)[:, None]
        right = expit(shape + gamma * (alpha - alpha.mean())[:, None] + positions)
        drafted = np.broadcast_to(found, right.shape)
        return Drafts(drafted, found * np.cumprod(right, axis=1))
    logit = (tau * _EASE)[:, None, None] + alpha[:, None] + positions
    passes, surely = np.ones_like(logit), np.ones_like(logit)
    if p_min > 0:
        kappa = np.exp(np.clip(shape, -3.0, 4.0))
        sure = np.clip(expit(logit + gamma), 1e-4, 1 - 1e-4)
        threshold = min(p_min, 1 - 1e-6)
        passes = 1.0 - betainc(kappa * sure, kappa * (1 - sure), threshold)
        # That what is right is drafted.
        surely = 1.0 - betainc(kappa * sure + 1.0, kappa * (1 - sure), threshold)
        for one in (passes, surely):
            one[..., 0] += np.clip(first, 0.0, 1.0) * (1.0 - one[..., 0])

    def over_steps(chances: Array) -> Array:
        return np.asarray(np.tensordot(_EASE_SHARE, np.cumprod(chances, axis=2), 1), float)

    return Drafts(over_steps(passes), over_steps(expit(logit) * surely))


# Positions of a draft that a step's law tells apart; whatever lies beyond costs as the last of them.
POSITIONS = 16

# Prior of a step's time, as shares of a step without a draft: that step, the first drafted token (speculation alone
# takes up to as much as a step without; docs/benchmarks.md, Steps), by how much more or less a position takes than the one before it (kernels change with
# the batch, experts are shared), for a draft that was cut short, and per 1,000 tokens of depth.
_BASE_SPREAD = 0.4
_TOKEN, _TOKEN_SPREAD = 0.2, 0.3
_STEP_PRIOR = np.array([0.1, 0.003])
_STEP_SPREAD = np.array([0.1, 0.004])
N_STEP_TERMS = 1 + POSITIONS + len(_STEP_PRIOR)
# Prior of a prompt's terms, as shares of the mean time per token: a batch (times the size of those seen: weights that are
# read once a batch take as large a share of large ones), a token, and a token per 1,000 tokens of depth.
_PROMPT_PRIOR = np.array([0.25, 0.70, 0.004])
_PROMPT_SPREAD = np.array([0.35, 0.40, 0.008])
N_PROMPT_TERMS = len(_PROMPT_PRIOR)
# How far a coefficient may be from that of a family which is like this one: of itself, and of a step or prompt.
_RELATIVE_SHARE, _RELATIVE_PART = 0.25, 0.04
_NOISE = 0.035
# Relative errors of a mean step: of all of them, and of each. Steps that drafted as much differ little, and share
# the luck of their answer with those of other lengths.
_OF_ANSWER, _OF_LENGTH = (_NOISE, 0.2), (0.015, 0.05)
_LEAST_MS = 1e-3  # of a step
_PROMPT_NOISE_MS = 15.0
# By how much all times of one life are off together: the luck of a start, and what is not known of the arm's level.
_LIFE_SD = 0.05
# VRAM that a drafted token takes from the experts where the fit sees it.
_MIB_PER_DRAFT = 30.0
_MIB_PER_GIB = 1024.0
WIDTH = 2048.0


def room_gib(arm: Arm) -> float:
    """VRAM that an arm leaves unused by weights [GiB].

    Nothing moves for a draft where the model is placed by hand: that is a level of its own.
    """
    if arm.is_placed:
        return 0.0
    drafts = arm.n_max if arm.drafts else 0
    return (arm.fit_mib + _MIB_PER_DRAFT * drafts) / _MIB_PER_GIB


def taken_gib(arm: Arm, context: int) -> float:
    """The same with what its batches and cache take beyond 512 tokens and q8_0, as far as is known before anything ran [GiB]."""
    if arm.is_placed:
        return 0.0
    cache_mib = _FREE_CACHE_MIB * context / _PUBLISHED_CONTEXT * _cache(arm)
    return room_gib(arm) + (_FREE_BUFFER_MIB * _width(arm) + cache_mib) / _MIB_PER_GIB


def by_length(share: Array) -> Array:
    """Shares of steps that draft each position, (..., n) to (..., POSITIONS): the last holds all beyond."""
    found = np.zeros((*share.shape[:-1], POSITIONS))
    n = min(share.shape[-1], POSITIONS)
    found[..., :n] = share[..., :n]
    found[..., -1] += share[..., POSITIONS:].sum(axis=-1)
    return found


@lru_cache(maxsize=4096)
def spread_drafted(mean: float) -> Array:
    """The same for drafts that are all about as long as their mean."""
    return by_length(np.clip(mean - np.arange(max(math.ceil(mean), 1)), 0.0, 1.0))


@dataclass(frozen=True)
class StepRow:
    """One answer's decoding: mean step time, shares of steps that drafted each position.

    `refused` is the share of steps whose draft ended before n-max. `table` has (drafted, steps, ms) by
    length of the draft, where the build tells single steps. `process` names the life that it was in, `text` the
    class that it stands for; whether it `is_alone` in the server.
    """

    process: str
    ms: float
    n_steps: float
    drafted: Array
    refused: float
    depth_k: float
    n_max: int = 0
    table: tuple[tuple[int, int, float], ...] = ()
    text: int | None = None
    is_alone: bool = True

    @cached_property
    def terms(self) -> Array:
        """What the coefficients of `fit_steps` are multiplied with."""
        return np.array([1.0, *self.drafted, self.refused, self.depth_k])


class StepTable:
    """The steps of rows, by the length of their drafts where those are told.

    What of a fit does not change with the level of the rows, so that it is made once for all fits of them.
    """

    def __init__(self, rows: Sequence[StepRow]) -> None:
        self.n_rows = len(rows)
        counts = np.array([len(row.table) or 1 for row in rows], int)
        self.rows = np.repeat(np.arange(len(rows)), counts)
        """The row that each entry is of."""
        self.lives = numbered((row.process for row in rows), {})[self.rows]
        self.is_of_length = np.repeat(np.array([bool(row.table) for row in rows], bool), counts)
        told = [row.table or ((0, row.n_steps, row.ms),) for row in rows]
        self.ms = np.array([ms for table in told for *_, ms in table], float)
        self.n_steps = np.array([n for table in told for _, n, _ in table], float)
        # What tells no lengths tells the time of one step.
        self.n_together = np.where(self.is_of_length, self.n_steps, 1.0)
        self.spreads = np.where(self.is_of_length[:, None], [_OF_LENGTH], [_OF_ANSWER])
        terms = [
            _terms_of_lengths(tuple(n for n, *_ in row.table), row.n_max)
            if row.table
            else row.terms[None]
            for row in rows
        ]
        self.terms = np.concatenate([*terms, np.zeros((0, N_STEP_TERMS))])
        self.terms[:, -1] = np.repeat(np.array([row.depth_k for row in rows], float), counts)


def numbered(names: Iterable[Hashable], known: dict[Hashable, int]) -> NDArray[np.int64]:
    """Numbers for names, the same wherever `known` is."""
    return np.array([known.setdefault(one, len(known)) for one in names], np.int64)


@lru_cache(maxsize=4096)
def _terms_of_lengths(lengths: tuple[int, ...], n_max: int) -> Array:
    """Terms of steps with drafts of these lengths, at no depth."""
    return np.array([[1.0, *spread_drafted(n), float(n < n_max), 0.0] for n in lengths])


@dataclass(frozen=True)
class PromptRow:
    """One answer's prompt, in the life of that name; the rest as of a `StepRow`."""

    process: str
    ms: float
    n_tokens: int
    ubatch: int
    depth_k: float
    text: int | None = None
    is_alone: bool = True

    @cached_property
    def terms(self) -> Array:
        """What the coefficients of `fit_prompts` are multiplied with."""
        batches = math.ceil(self.n_tokens / self.ubatch)
        return np.array([batches, self.n_tokens, self.n_tokens * self.depth_k], float)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Coefficients of a law [ms], and how far each may be off."""

    mean: Array
    sd: Array


def _stacked(*terms: Array | float) -> Array:
    """The terms of many points, as `terms` of a row has them of one, shape (terms, ...)."""
    return np.stack([np.asarray(part, float) for part in np.broadcast_arrays(*terms)])


def fit_steps(
    table: StepTable, scales: Array | float = 1.0, relatives: Sequence[Fitted] = ()
) -> Fitted | None:
    """Coefficients of a step [ms], with families that are like this one as prior; None without rows.

    Args:
        table: Of the rows.
        scales: What each row's times are multiplied with.
        relatives: Laws of those families.
    """
    if not len(table.rows):
        return None
    times = table.ms * np.broadcast_to(scales, table.n_rows)[table.rows] / table.n_together
    times = np.where(table.is_of_length, np.maximum(times, _LEAST_MS), times)
    noise = times * np.hypot(table.spreads[:, 0], table.spreads[:, 1] / np.sqrt(table.n_steps))
    drafted = table.terms[:, 1 : POSITIONS + 1].sum(axis=1)
    bare = float(np.average(times / (1.0 + _TOKEN * drafted), weights=table.n_steps))
    return _solve(table.terms, times, noise, bare, _steps_prior(bare), relatives, table.lives)


def fit_line(step_ms: Array, n_steps: Array, drafted: Array) -> tuple[float, float]:
    """Time of a step without a draft, and of each token drafted in it on average [ms]."""
    bare = float((step_ms / (1.0 + _TOKEN * drafted)).mean())
    prior = np.diag([1 / _BASE_SPREAD, 1 / _TOKEN_SPREAD]) / bare
    terms = np.stack([np.ones_like(drafted), drafted], axis=1)
    noise = step_ms * np.hypot(_OF_ANSWER[0], _OF_ANSWER[1] / np.sqrt(n_steps))
    values = np.array([1 / _BASE_SPREAD, _TOKEN / _TOKEN_SPREAD])
    base, per_token = _solve(terms, step_ms, noise, bare, (prior, values), ()).mean.tolist()
    return base, per_token


def _steps_prior(bare: float) -> tuple[Array, Array]:
    """Rows and values that hold the law where nothing was seen, each in standard deviations."""
    rows, values = np.zeros((N_STEP_TERMS, N_STEP_TERMS)), np.zeros(N_STEP_TERMS)
    rows[0, 0], values[0] = 1 / (_BASE_SPREAD * bare), 1 / _BASE_SPREAD
    rows[1, 1], values[1] = 1 / (_TOKEN_SPREAD * bare), _TOKEN / _TOKEN_SPREAD
    for position in range(2, POSITIONS + 1):  # each about as dear as the one before it
        bend = bare * _TOKEN_SPREAD
        rows[position, position], rows[position, position - 1] = 1 / bend, -1 / bend
    for at, (usual, spread_of) in enumerate(zip(_STEP_PRIOR, _STEP_SPREAD, strict=True)):
        rows[POSITIONS + 1 + at, POSITIONS + 1 + at] = 1 / (spread_of * bare)
        values[POSITIONS + 1 + at] = usual / spread_of
    return rows, values


def fit_prompts(
    rows: Sequence[PromptRow], scales: Array | float = 1.0, relatives: Sequence[Fitted] = ()
) -> Fitted | None:
    """Coefficients of a prompt [ms], with families that are like this one as prior; None without rows.

    `scales` is what each row's time is multiplied with.
    """
    if not rows:
        return None
    times = np.array([row.ms for row in rows]) * scales
    terms = np.array([row.terms for row in rows])
    n_batches, n_tokens, _ = terms.sum(axis=0)
    scale = np.array([n_tokens / n_batches, 1.0, 1.0]) * float(times.sum() / n_tokens)
    rows_of_prior = np.diag(1.0 / (scale * _PROMPT_SPREAD))
    noise = times * _NOISE + _PROMPT_NOISE_MS
    prior = rows_of_prior, _PROMPT_PRIOR / _PROMPT_SPREAD
    lives = numbered((row.process for row in rows), {})
    return _solve(terms, times, noise, scale, prior, relatives, lives)


def _solve(
    terms: Array, times: Array, noise: Array, scale: Array | float, prior: tuple[Array, Array],
    relatives: Sequence[Fitted], lives: NDArray[np.int64] | None = None,
) -> Fitted:  # fmt: skip
    """Coefficients of at least 0; each relative counts at this family's level, as far as it is sure of itself.

    All times of one life, where `lives` tells them, are off by a factor of its own.
    """
    from scipy.optimize import nnls

    seen = np.column_stack([terms, times]) / noise[:, None]
    for life in () if lives is None else np.unique(lives):
        own = lives == life
        seen[own] = _without_luck(seen[own])
    rows, target = [seen[:, :-1], prior[0]], [seen[:, -1], prior[1]]
    for relative in relatives:
        ratio = float(np.median(times / np.maximum(terms @ relative.mean, 1e-9)))
        mean = relative.mean * ratio
        sd = np.hypot(relative.sd * ratio, _RELATIVE_SHARE * mean + _RELATIVE_PART * scale)
        rows.append(np.diag(1.0 / sd))
        target.append(mean / sd)
    matrix, wanted = np.vstack(rows), np.concatenate(target)
    try:
        solution, _ = nnls(matrix, wanted)
    except RuntimeError:  # it gives up after so many rounds
        solution = np.maximum(np.linalg.lstsq(matrix, wanted, rcond=None)[0], 0.0)
    covariance = np.linalg.inv(matrix.T @ matrix)
    return Fitted(np.asarray(solution, float), np.sqrt(np.diag(covariance)))


_LATE = 4  # positions beyond it are told apart from those before
# Parts of a turn by which predictions may be off together; each is a share of the turn time, or how
# the turn time answers to it.
PARTS = (
    "per batch", "per prompt token", "base step", "draft", "late draft", "margin", "accepted",
    "accepted late", "width",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Costs:
    """Laws of one family, for what its processes have in common.

    Coefficients of step and prompt as `terms` of a row orders them. By class: a factor by which the law is
    off, and what the client adds [ms].
    """

    step: Array
    prompt: Array
    step_factors: Array
    prompt_factors: Array
    overhead_ms: Array


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of P arms: log of turn time [ms], its parts (P, parts), turn and prefill by class (K, P) [ms]."""

    log_turn: Array
    parts: Array
    class_ms: Array
    prefill_ms: Array


def predict(
    arms: Sequence[Arm],
    workload: Workload,
    acceptance: Acceptance | None,
    costs: Costs,
    levels: Array,
) -> Prediction:
    """Turn times of arms of one family.

    `levels` are log factors of step and prompt of each arm, shape (P, 2).
    """
    points = _Points(arms, workload, acceptance)
    batches = np.ceil(points.new / points.ubatch)
    prompt = _stacked(batches, points.new, points.new * points.prompt_depth)
    prompt = prompt * costs.prompt[:, None, None] * costs.prompt_factors[:, None]
    prompt = prompt * np.exp(levels[:, 1])
    step = _stacked(1.0, *np.moveaxis(points.drafted, -1, 0), points.refused, points.depth)
    step = step * costs.step[:, None, None] * costs.step_factors[:, None]
    step = step * points.steps * np.exp(levels[:, 0])
    prefill, decode = prompt.sum(axis=0), step.sum(axis=0)
    class_ms = prefill + decode + costs.overhead_ms[:, None]
    shares = np.array(workload.shares)[:, None]
    turn = (shares * class_ms).sum(axis=0)

    def share(part: Array) -> Array:
        return np.asarray((shares * part).sum(axis=0) / turn, float)

    gained = decode * points.accepted / (1.0 + points.accepted)
    late = decode * points.accepted_late / (1.0 + points.accepted)
    room = np.array([room_gib(arm) for arm in arms])
    parts = [
        share(prompt[0]), share(prompt[1] + prompt[2]), share(step[0]),
        share(step[1 : _LATE + 1].sum(axis=0)), share(step[_LATE + 1 : -1].sum(axis=0)),
        share(prefill + decode) * room, share(gained), share(late),
        share(decode) * points.ubatch / WIDTH,
    ]  # fmt: skip
    return Prediction(np.log(turn), np.stack(parts, axis=1), class_ms, prefill)


class _Points:
    """Arms times classes as arrays of shape (K, P)."""

    def __init__(
        self, arms: Sequence[Arm], workload: Workload, acceptance: Acceptance | None
    ) -> None:
        classes = workload.classes
        cached = np.array([[float(one.cached_tokens)] for one in classes])
        self.new = np.array([[float(one.new_tokens)] for one in classes])
        predicted = np.array([[float(one.n_predict)] for one in classes])
        self.ubatch = np.array([float(max(arm.ubatch, 1)) for arm in arms])
        self.prompt_depth = (cached + self.new / 2) / 1000
        self.depth = (cached + self.new + predicted / 2) / 1000
        shape = (len(classes), len(arms))
        self.drafted, self.refused = np.zeros((*shape, POSITIONS)), np.zeros(shape)
        self.accepted, self.accepted_late = np.zeros(shape), np.zeros(shape)
        if acceptance is not None:
            self._draft(arms, acceptance)
        self.steps = (predicted - 1.0) / (1.0 + self.accepted)

    def _draft(self, arms: Sequence[Arm], acceptance: Acceptance) -> None:
        for at, arm in enumerate(arms):
            if not arm.drafts or arm.n_max <= 0:
                continue
            drafts = acceptance.drafts(arm.n_max, arm.p_min)
            self.drafted[:, at] = by_length(drafts.drafted)
            self.refused[:, at] = 1.0 - drafts.drafted[:, -1]
            self.accepted[:, at] = drafts.accepted.sum(axis=1)
            self.accepted_late[:, at] = drafts.accepted[:, _LATE:].sum(axis=1)


def _without_luck(seen: Array) -> Array:
    """Rows of one life, times last, each over its own error, made independent of one another.

    Their covariance is I + v v', v being the times times the spread of lives: this is its inverse root times the rows.
    """
    luck = _LIFE_SD * seen[:, -1]
    square = float(luck @ luck)
    share = (1.0 - 1.0 / math.sqrt(1.0 + square)) / max(square, 1e-12)
    return np.asarray(seen - share * np.outer(luck, luck @ seen), float)


# Standard deviations of log turn times: of processes, of blocks of prompts, of one answer.
PROCESS_SD, BLOCK_SD, ANSWER_SD = 0.03, 0.025, 0.018

# Spread between loads of the same arm, until the night has its own figure [MiB].
JITTER_MIB = 30.0
_ROW_SD = 15.0  # of readings within one process
_MEMORY_PLACEMENT_SD = 25.0  # weights move in whole tensors
# The experts of one layer take 100 to 500 MiB in models of 30 to 35 billion weights at 4 bits.
_MEMORY_PRIOR = np.array([0.0, 40.0, 100.0, 250.0, 60.0, 0.0, -250.0])
_SPREAD = np.array([900.0, 40.0, 150.0, 250.0, 120.0, 60.0, 200.0])
_MEMORY_SPREAD = np.array([250.0, 25.0, 60.0, 120.0, 60.0, 300.0, 40.0])
# Where the fit makes no room, all that is allocated counts: the whole compute buffer, and the cache, which
# is 2.5 and 8 GiB as f16 for so many tokens of the published models.
_PUBLISHED_CONTEXT = 131072
_FREE_BUFFER_MIB, _FREE_CACHE_MIB = 600.0, 4000.0
_FREE_PRIOR = np.array([0.0, 100.0, _FREE_BUFFER_MIB, 250.0, 60.0, _FREE_CACHE_MIB, -250.0])
_FREE_SPREAD = np.array([900.0, 60.0, 400.0, 250.0, 120.0, 3000.0, 200.0])
_CACHE = 5
# Bytes of a cached value against f16, the scales of its block included.
_KV_SIZE = {
    "f32": 2.0, "f16": 1.0, "bf16": 1.0, "q8_0": 34 / 64, "q5_1": 24 / 64, "q5_0": 22 / 64,
    "q4_1": 20 / 64, "q4_0": 18 / 64, "iq4_nl": 18 / 64,
}  # fmt: skip
# More free than the margin by so much after a load: the fit had nothing to do.
_NOT_BINDING_MIB = 400.0
# Margins so far apart tell whether the fit follows them; natural logarithm of how much likelier it must be that it does not.
_TELLING_MARGINS_MIB, _FAR_WORSE = 512.0, 5.0
# What a start that ran out of memory says: it lacked this much, give or take.
OOM_FREE_MIB = -150.0
OOM_SD_MIB = 150.0


@dataclass(frozen=True, slots=True)
class Free:
    """VRAM seen free in one process, at a share of the full context (0 to 1) [MiB].

    `is_failure`: nothing was seen, since it ran out of memory there.
    """

    process: str
    arm: Arm
    share: float
    free_mib: float
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """The law of one family: coefficients (h0, h1, h2, G, G2, K, -e) and their covariance.

    `is_binding`: whether the fit moves weights to keep its margin.
    """

    mean: Array
    covariance: Array
    is_binding: bool
    n_processes: int

    def free_mib(self, arm: Arm, share: float = 1.0) -> tuple[float, float]:
        """VRAM left free at a share of the context, and its standard error [MiB]."""
        terms = _terms(arm, share)
        level = arm.fit_mib if self.is_binding else 0.0
        error = math.sqrt(max(float(terms @ self.covariance @ terms), 0.0))
        return level - float(terms @ self.mean), error

    def needed_margin_mib(self, arm: Arm, headroom_mib: float, sds: float) -> float:
        """Margin at which `headroom_mib` stays free with the context full, `sds` errors in hand.

        Where the fit is not binding any margin does if it leaves enough, and none if it does not.
        """
        free, error = self.free_mib(arm)
        short = headroom_mib + sds * error - free
        if self.is_binding:
            return arm.fit_mib + short
        return 0.0 if short <= 0 else math.inf


def fit_memory(
    seen: Sequence[Free], relative: MemoryLaw | None = None, jitter_mib: float = JITTER_MIB
) -> MemoryLaw:
    """The law of one family from everything seen of it.

    Args:
        seen: Readings; several of one process share its luck.
        relative: The law of the same engine with another kind of speculation, or of another variant.
        jitter_mib: Spread between loads.
    """
    is_binding = _is_binding(seen, relative) and not _is_deaf(seen, relative, jitter_mib)
    mean, spread = _prior(relative, is_binding=is_binding)
    if not is_binding:
        seen = _where_all_fitted(seen)
    if not seen:
        return MemoryLaw(mean, np.diag(spread**2), is_binding, 0)
    terms, used, noise = _rows(seen, jitter_mib, is_binding=is_binding)
    processes = [row.process for row in seen]
    precision = np.diag(1.0 / spread**2)
    weighted = np.linalg.solve(noise, np.column_stack([terms, used]))
    normal = precision + terms.T @ weighted[:, :-1]
    covariance = np.asarray(np.linalg.inv(normal), float)
    posterior = covariance @ (precision @ mean + terms.T @ weighted[:, -1])
    return MemoryLaw(posterior, covariance, is_binding, len(set(processes)))


def _rows(
    seen: Sequence[Free], jitter_mib: float, *, is_binding: bool
) -> tuple[Array, Array, Array]:
    """Terms, what was used beside the margin [MiB], and its covariance."""
    terms = np.array([_terms(row.arm, row.share) for row in seen])
    used = np.array([(row.arm.fit_mib if is_binding else 0.0) - row.free_mib for row in seen])
    processes = np.array([row.process for row in seen])
    noise = np.where(processes[:, None] == processes, jitter_mib**2 + _MEMORY_PLACEMENT_SD**2, 0.0)
    own = np.array([OOM_SD_MIB if row.is_failure else _ROW_SD for row in seen])
    return terms, used, noise + np.diag(own**2)


def _is_deaf(seen: Sequence[Free], relative: MemoryLaw | None, jitter_mib: float) -> bool:
    """Whether margins that were tried explain what was free far worse than no margin does: a fit that moves nothing.

    One box of 60 of the second world ran out of memory 34 times in two hours, a step of the margin further each time.
    """
    margins = [row.arm.fit_mib for row in seen]
    if not seen or max(margins) - min(margins) < _TELLING_MARGINS_MIB:
        return False
    likely = {}
    for is_binding in (True, False):
        mean, spread = _prior(relative, is_binding=is_binding)
        terms, used, noise = _rows(seen, jitter_mib, is_binding=is_binding)
        covariance = noise + terms @ np.diag(spread**2) @ terms.T
        off = used - terms @ mean
        _, size = np.linalg.slogdet(covariance)
        likely[is_binding] = -0.5 * (float(off @ np.linalg.solve(covariance, off)) + float(size))
    return likely[False] - likely[True] > _FAR_WORSE


def jitter_of(booted: Sequence[tuple[Arm, float]]) -> float:
    """Spread of free VRAM after loads of equal arms [MiB], shrunk towards the usual one."""
    by_arm: dict[Arm, list[float]] = {}
    for arm, free in booted:
        by_arm.setdefault(arm.canonical(), []).append(free)
    squares, freedom = 8 * JITTER_MIB**2, 8
    for values in by_arm.values():
        centre = sum(values) / len(values)
        squares += sum((value - centre) ** 2 for value in values)
        freedom += len(values) - 1
    return math.sqrt(squares / freedom)


def _is_binding(seen: Sequence[Free], relative: MemoryLaw | None) -> bool:
    if any(row.arm.is_placed for row in seen):
        return False
    loaded = [row for row in seen if row.share == 0.0 and not row.is_failure]
    if not loaded:
        return relative is None or relative.is_binding
    free = sum(row.free_mib > row.arm.fit_mib + _NOT_BINDING_MIB for row in loaded)
    return 2 * free < len(loaded)


def _prior(relative: MemoryLaw | None, *, is_binding: bool) -> tuple[Array, Array]:
    """Mean and spread of the coefficients before anything was seen."""
    mean, spread = (_MEMORY_PRIOR, _SPREAD) if is_binding else (_FREE_PRIOR, _FREE_SPREAD)
    if relative is None:
        return mean, spread
    known, near = relative.mean.copy(), np.minimum(_MEMORY_SPREAD, spread)
    if relative.is_binding != is_binding:  # it says nothing of the cache
        known[_CACHE], near[_CACHE] = mean[_CACHE], spread[_CACHE]
    return known, near


def _where_all_fitted(seen: Sequence[Free]) -> Sequence[Free]:
    """Readings of processes for which no weights had to leave the card; all, if there are none."""
    moved = {
        row.process
        for row in seen
        if row.share == 0.0 and not row.is_failure and not row.arm.is_placed
        if row.free_mib <= row.arm.fit_mib + _NOT_BINDING_MIB
    }
    return [row for row in seen if row.process not in moved] or seen


def _terms(arm: Arm, share: float) -> Array:
    drafted, experts = float(arm.n_max if arm.drafts else 0), float(arm.n_cpu_moe or 0)
    width = _width(arm)
    return np.array([1.0, drafted, width, share, share * width, _cache(arm), experts])


def _width(arm: Arm) -> float:
    """By how much its compute buffer is larger than that of 512 tokens."""
    return math.sqrt(max(arm.ubatch, 1) / 512) - 1.0


def _cache(arm: Arm) -> float:
    """By how much its cache is larger than one of q8_0, as a share of one of f16."""
    return _KV_SIZE.get(arm.kv, 1.0) - _KV_SIZE["q8_0"]
