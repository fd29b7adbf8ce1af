"""How many tokens are drafted and accepted: a model of one drafter on several classes of text.

Position j (1-based) of a draft is right with probability h_j, logit h_j = alpha + beta (j - 1), one
alpha for each class of text. The drafter's confidence in it is Beta(kappa q_j, kappa (1 - q_j)),
logit q_j = logit h_j + gamma. Drafting stops at the first confidence below p-min, accepting at the
first miss, so that

    P(j drafted)  = prod_{i <= j} P(conf_i >= p)
    P(j accepted) = prod_{i <= j} h_i P(Beta(kappa q_i + 1, kappa (1 - q_i)) >= p),

which are incomplete beta functions; their sums up to n-max are the drafted and accepted tokens of
one verification step. n-gram kinds have no confidence but a chance of being found at all: there
alpha is the logit of that chance, ln kappa's place holds the logit of h_1 and gamma says how much
better the drafts are where more is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, expit

Array = NDArray[np.float64]

# Where the parameters lie before anything was seen: alpha, beta, ln kappa, gamma, and their spread.
_PRIOR = np.array([1.2, -0.05, np.log(1.5), 0.0])
_PRIOR_SD = np.array([1.2, 0.08, 0.8, 0.6])
# Texts of one class differ by about 0.3 in logit h, so a mean over few of them is off by that.
_TEXT_SD = 0.06
_STEP_SD = 1.3
_STEPS_OF_FIT = 12
_MOST_DAMPING = 1e4  # no step helps any more
# After so many kinds of runs it is clear whether an engine drafts its first token in any case.
_SETTLED = 4


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
    accepted_by_position: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Probabilities by (text, position): drafted at all, and accepted."""

    drafted: Array
    accepted: Array

    def per_step(self, n_max: int) -> tuple[Array, Array]:
        """Mean tokens drafted and accepted in one verification step, by text."""
        return self.drafted[:, :n_max].sum(axis=1), self.accepted[:, :n_max].sum(axis=1)

    def beyond(self, n_max: int, kink: int) -> Array:
        """Mean drafted tokens beyond a batch size, by text."""
        return np.asarray(self.drafted[:, kink:n_max].sum(axis=1), float)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A fitted drafter.

    `parameters` are one alpha per text, then beta, ln kappa, gamma. `first_is_free`: the first token
    is drafted whatever its confidence (ik does so). `is_lookup` replaces confidence by a chance of a
    draft at all.
    """

    parameters: Array
    n_texts: int
    first_is_free: bool = False
    is_lookup: bool = False
    _kept: dict[tuple[int, float], Drafts] = field(default_factory=dict, repr=False, compare=False)

    def drafts(self, n_positions: int, p_min: float) -> Drafts:
        """Probabilities for drafts of up to `n_positions` at one p-min."""
        key = n_positions, p_min
        if key not in self._kept:
            self._kept[key] = _drafts(
                self.parameters, self.n_texts, n_positions, p_min,
                first_is_free=self.first_is_free, is_lookup=self.is_lookup,
            )  # fmt: skip
        return self._kept[key]


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
        return Acceptance(prior, n_texts, False, is_lookup)
    data = _Data(usable)
    options = (False, True) if data.has_filter and not is_lookup else (False,)
    if start is not None and len(usable) > _SETTLED * n_texts:
        options = (start.first_is_free,)
    fits = [
        (_least_squares(data, begin, prior, spread, n_texts, free, is_lookup), free)
        for free in options
    ]
    (parameters, _), first_is_free = min(fits, key=lambda fit: fit[0][1])
    return Acceptance(parameters, n_texts, first_is_free, is_lookup)


class _Data:
    """Observations as arrays, grouped by p-min."""

    def __init__(self, counts: Sequence[Counts]) -> None:
        self.n_positions = max(count.n_max for count in counts)
        self.text = np.array([count.text for count in counts])
        self.n_max = np.array([count.n_max for count in counts])
        self.p_mins, self.group = np.unique([count.p_min for count in counts], return_inverse=True)
        self.has_filter = bool((self.p_mins > 0).any())
        steps = np.array([count.n_steps for count in counts])
        prompts = np.array([max(count.n_prompts, 1) for count in counts])
        self.drafted = np.array([count.drafted for count in counts]) / steps
        self.accepted = np.array([count.accepted for count in counts]) / steps
        noise = _STEP_SD / np.sqrt(steps)
        share = _TEXT_SD / np.sqrt(prompts)
        self.drafted_sd = np.hypot(noise, share * (self.drafted + 0.2))
        self.accepted_sd = np.hypot(noise, share * (self.accepted + 0.2))
        rows, columns, values, spreads = [], [], [], []
        for row, count in enumerate(counts):
            for column, accepted in enumerate((count.accepted_by_position or ())[: count.n_max]):
                rows.append(row)
                columns.append(column)
                values.append(accepted / count.n_steps)
                spreads.append(float(np.hypot(0.7 / np.sqrt(count.n_steps), 1.2 * share[row])))
        self.rows, self.columns = np.array(rows, int), np.array(columns, int)
        self.values, self.value_sd = np.array(values), np.array(spreads)
        self.mask = np.arange(self.n_positions) < self.n_max[:, None]

    def residuals(
        self, parameters: Array, n_texts: int, *, first_is_free: bool, is_lookup: bool
    ) -> Array:
        """Model minus observation in standard deviations: drafted, accepted, by position."""
        drafted = np.empty((len(self.text), self.n_positions))
        accepted = np.empty_like(drafted)
        for index, p_min in enumerate(self.p_mins):
            drafts = _drafts(parameters, n_texts, self.n_positions, float(p_min),
                             first_is_free=first_is_free, is_lookup=is_lookup)  # fmt: skip
            rows = self.group == index
            drafted[rows] = drafts.drafted[self.text[rows]]
            accepted[rows] = drafts.accepted[self.text[rows]]
        parts = [
            ((drafted * self.mask).sum(axis=1) - self.drafted) / self.drafted_sd,
            ((accepted * self.mask).sum(axis=1) - self.accepted) / self.accepted_sd,
        ]
        if len(self.rows):
            parts.append((accepted[self.rows, self.columns] - self.values) / self.value_sd)
        return np.concatenate(parts)


def _start(n_texts: int, relative: Acceptance | None, *, is_lookup: bool) -> tuple[Array, Array]:
    mean = np.concatenate([np.full(n_texts, _PRIOR[0]), _PRIOR[1:]])
    spread = np.concatenate([np.full(n_texts, _PRIOR_SD[0]), _PRIOR_SD[1:]])
    if is_lookup:
        mean[:n_texts], spread[:n_texts] = -1.0, 1.5
        mean[-2], spread[-2] = 1.0, 1.2
    if relative is not None and relative.parameters.shape == mean.shape:
        return relative.parameters.copy(), np.minimum(spread, 0.3 * np.ones_like(spread))
    return mean, spread


def _least_squares(
    data: _Data, begin: Array, prior: Array, spread: Array, n_texts: int, free: bool, lookup: bool
) -> tuple[Array, float]:
    def residuals(parameters: Array) -> Array:
        own = data.residuals(parameters, n_texts, first_is_free=free, is_lookup=lookup)
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
    return parameters, cost


def _drafts(
    parameters: Array,
    n_texts: int,
    n_positions: int,
    p_min: float,
    *,
    first_is_free: bool,
    is_lookup: bool,
) -> Drafts:
    alpha, (beta, shape, gamma) = parameters[:n_texts], parameters[n_texts:]
    positions = beta * np.arange(n_positions)
    if is_lookup:
        found = expit(alpha)[:, None]
        right = expit(shape + gamma * (alpha - alpha.mean())[:, None] + positions)
        return Drafts(np.broadcast_to(found, right.shape), found * np.cumprod(right, axis=1))
    logit = alpha[:, None] + positions
    right = expit(logit)
    if p_min <= 0:
        return Drafts(np.ones_like(right), np.cumprod(right, axis=1))
    kappa = np.exp(np.clip(shape, -3.0, 4.0))
    sure = np.clip(expit(logit + gamma), 1e-4, 1 - 1e-4)
    first, second = kappa * sure, kappa * (1 - sure)
    threshold = min(p_min, 1 - 1e-6)
    passes = 1.0 - betainc(first, second, threshold)
    passes_right = right * (1.0 - betainc(first + 1.0, second, threshold))
    if first_is_free:
        passes[:, 0] = 1.0
        passes_right[:, 0] = right[:, 0]
    return Drafts(np.cumprod(passes, axis=1), np.cumprod(passes_right, axis=1))
