"""Answers as rows of the fits: pooled drafts, step times, prompt times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tunerd.core.sweep import observations
from tunerd.core.sweep.acceptance import Acceptance, Counts
from tunerd.core.sweep.observations import Answer
from tunerd.core.sweep.step_time import KINKS, PromptRow, StepRow, room_gib

Array = NDArray[np.float64]


def pool(answers: Iterable[Answer]) -> list[Counts]:
    """Counts of answers that drafted alike, by class; positions only where all have them."""
    groups: dict[tuple[int, int, float], list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.text is not None and answer.arm.drafts and observations.is_timed(answer):
            groups[answer.text, answer.arm.n_max, answer.arm.p_min].append(answer)
    pooled = []
    for (text, n_max, p_min), members in groups.items():
        readings = [answer.reading for answer in members]
        positions = [reading.accepted_by_position for reading in readings]
        width = max((len(one) for one in positions if one is not None), default=0)
        total = np.zeros(width)
        for one in positions:
            if one is not None:
                total[: len(one)] += one
        steps = float(sum(reading.n_steps or 0 for reading in readings))
        pooled.append(
            Counts(
                text=text,
                n_max=n_max,
                p_min=p_min,
                n_prompts=len(members),
                n_steps=steps,
                drafted=float(sum(reading.n_drafted for reading in readings)),
                accepted=float(sum(reading.n_accepted for reading in readings)),
                accepted_by_position=(
                    tuple(total) if width and all(one is not None for one in positions) else None
                ),
            )
        )
    return pooled


def step_row(answer: Answer, acceptance: Acceptance | None) -> StepRow:
    """An answer's decoding, as the step law takes it."""
    reading, arm = answer.reading, answer.arm
    steps = float(reading.n_steps or 1)
    drafted = reading.n_drafted / steps
    beyond = (0.0, 0.0)
    if acceptance is not None and arm.drafts and drafted > 0 and arm.n_max > KINKS[0]:
        beyond = _beyond(acceptance, answer, drafted)
    depth = answer.depth_start + (reading.prompt_n or 0) + (reading.predicted_n or 0) / 2
    return StepRow(
        step_ms=reading.step_ms or 0.0,
        n_steps=steps,
        drafted=drafted,
        beyond=beyond,
        depth_k=depth / 1000,
        room_gib=room_gib(answer.started),
    )


def _beyond(acceptance: Acceptance, answer: Answer, drafted: float) -> tuple[float, float]:
    """Tokens drafted beyond each kink: the model's share of what was really drafted."""
    arm = answer.arm
    drafts = acceptance.drafts(arm.n_max, arm.p_min)
    rows = drafts.drafted if answer.text is None else drafts.drafted[answer.text : answer.text + 1]
    total = float(rows.sum()) / len(rows)
    first, second = (
        float(rows[:, kink:].sum()) / len(rows) * drafted / max(total, 1e-6) for kink in KINKS
    )
    return first, second


def prompt_row(answer: Answer) -> PromptRow:
    """An answer's prompt, as the prompt law takes it."""
    reading = answer.reading
    n_tokens = reading.prompt_n or 1
    return PromptRow(
        prompt_ms=reading.prompt_ms or 0.0,
        n_tokens=n_tokens,
        ubatch=max(answer.arm.ubatch, 1),
        depth_k=(answer.depth_start + n_tokens / 2) / 1000,
        room_gib=room_gib(answer.started),
    )


def terms_of_step(row: StepRow) -> Array:
    """What the coefficients of `step_time.fit_steps` are multiplied with."""
    return np.array([1.0, row.drafted, *row.beyond, row.depth_k, row.room_gib])


def terms_of_prompt(row: PromptRow) -> Array:
    """What the coefficients of `step_time.fit_prompts` are multiplied with."""
    batches = math.ceil(row.n_tokens / row.ubatch)
    return np.array([batches, batches * row.room_gib, row.n_tokens, row.n_tokens * row.depth_k])
