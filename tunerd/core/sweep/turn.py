"""Predicted turn time of many arms of one family at once, and what each part of it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunerd.core.sweep.acceptance import Acceptance
from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.step_time import KINKS, prompt_terms, room_gib, step_terms
from tunerd.core.workload import Workload

Array = NDArray[np.float64]

# Parts of a turn by which predictions may be off together; each is a share of the turn time, or how
# the turn time answers to it.
PARTS = (
    "per batch", "per prompt token", "base step", "draft", "kink", "depth", "margin", "accepted",
    "accepted late", "free step",
)  # fmt: skip
_LATE = 4


@dataclass(frozen=True, slots=True)
class Costs:
    """Laws of one variant.

    Coefficients of step and prompt (`step_time`) are None before any was seen. By class: a factor
    by which the law is off, and what the client adds [ms].
    """

    step: Array | None
    prompt: Array | None
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
) -> Prediction | None:
    """Turn times of arms of one family; None before anything is known of it.

    `levels` are log factors of step and prompt of each arm's variant, shape (P, 2).
    """
    if costs.step is None or costs.prompt is None:
        return None
    points = _Points(arms, workload, acceptance)
    prompt = prompt_terms(points.new, points.ubatch, points.prompt_depth, points.room)
    prompt = prompt * costs.prompt[:, None, None] * costs.prompt_factors[:, None]
    prompt = prompt * np.exp(levels[:, 1])
    step = step_terms(points.drafted, points.beyond, points.depth, points.room)
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
    parts = [
        share(prompt[0] + prompt[1]), share(prompt[2] + prompt[3]), share(step[0]),
        share(step[1]), share(step[3] + 0.1 * points.late_drafted * decode), share(step[4]),
        share(prompt[1] + step[5]) + 0.01 * np.array([room_gib(arm) for arm in arms]),
        share(gained), share(late), share(decode) * np.array([not arm.drafts for arm in arms]),
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
        self.room = np.array([room_gib(arm) for arm in arms])
        self.prompt_depth = (cached + self.new / 2) / 1000
        self.depth = (cached + self.new + predicted / 2) / 1000
        shape = (len(classes), len(arms))
        self.drafted, self.accepted = np.zeros(shape), np.zeros(shape)
        self.accepted_late, self.late_drafted = np.zeros(shape), np.zeros(shape)
        self.beyond = [np.zeros(shape) for _ in KINKS]
        if acceptance is not None:
            self._draft(arms, acceptance)
        self.steps = predicted / (1.0 + self.accepted)

    def _draft(self, arms: Sequence[Arm], acceptance: Acceptance) -> None:
        drafting = [at for at, arm in enumerate(arms) if arm.drafts and arm.n_max > 0]
        n_positions = max((arms[at].n_max for at in drafting), default=0)
        cumulated: dict[float, tuple[Array, Array]] = {}
        for at in drafting:
            arm = arms[at]
            if arm.p_min not in cumulated:
                drafts = acceptance.drafts(n_positions, arm.p_min)
                cumulated[arm.p_min] = (
                    np.cumsum(drafts.drafted, axis=1), np.cumsum(drafts.accepted, axis=1)
                )  # fmt: skip
            drafted, accepted = cumulated[arm.p_min]
            last = arm.n_max - 1
            self.drafted[:, at] = drafted[:, last]
            self.accepted[:, at] = accepted[:, last]
            if arm.n_max > _LATE:
                self.accepted_late[:, at] = accepted[:, last] - accepted[:, _LATE - 1]
                self.late_drafted[:, at] = drafted[:, last] - drafted[:, _LATE - 1]
            for beyond, kink in zip(self.beyond, KINKS, strict=True):
                if arm.n_max > kink:
                    beyond[:, at] = drafted[:, last] - drafted[:, kink - 1]
