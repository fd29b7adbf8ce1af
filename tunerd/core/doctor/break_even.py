"""From which acceptance on speculation pays on this box, from what was measured on it.

With t(D) the time of a verification step that drafts D tokens, t0 the time of a token without
speculation, and x the time that speculation adds to the prompt, spread over the tokens of the answer,
a token costs t(D) / (1 + A) + x with A accepted tokens per step. That is less than t0 from

    A = t(D) / (t0 - x) - 1

on. t(D) and the prompt's times are the laws of `tunerd.core.sweep.step_time`, fitted to the samples.

A deep context slows a token as much as speculation can speed it up, so both sides are compared at one
depth, where both have samples; prompts likewise only where both sides have some of like length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd.core.doctor.server_log import Traffic
from tunerd.core.evidence import number
from tunerd.core.sample import Sample, Timings

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

MIN_SAMPLES = 3
DEFAULT_UBATCH = 512  # of every build that was probed
# Depths count as alike within this: a step slows by about 0.3 % for each thousand tokens
# (the prior of `step_time`), which keeps what is left of it below a few percent.
_ALIKE_TOKENS = 1024
_ALIKE_SHARE = 0.2
NOTHING_MEASURED = "a run with and one without speculation, of what serves"
NOT_ALIKE = "runs with and without speculation at a comparable depth of context"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What speculation costs on this box.

    `step_ms` are the coefficients (base, per drafted token) of a step with speculation, `token_ms` the
    time of a token without, both at about `depth_tokens` of context. `prompt_ms` and `plain_prompt_ms` are coefficients of a prompt with and
    without it (per batch, per token); None where no sample shows one of them.
    """

    step_ms: tuple[float, float]
    token_ms: float
    prompt_ms: tuple[float, float] | None
    plain_prompt_ms: tuple[float, float] | None
    n_ubatch: int
    n_with: int
    n_without: int
    depth_tokens: int

    def tax_ms(self, n_prompt: float) -> float | None:
        """What speculation adds to a prompt of so many tokens [ms]; None where that is unknown."""
        if self.prompt_ms is None or self.plain_prompt_ms is None:
            return None
        batches = math.ceil(n_prompt / self.n_ubatch)
        with_it, without = (
            batch * batches + token * n_prompt
            for batch, token in (self.prompt_ms, self.plain_prompt_ms)
        )
        return with_it - without

    def accepted_per_step(self, traffic: Traffic) -> float | None:
        """The accepted tokens per step from which this traffic gains; infinite where none would do.

        None where the traffic drafted nothing. An unknown tax on prompts counts as none.
        """
        drafted = traffic.drafted_per_step
        if drafted is None or not traffic.n_drafted:
            return None
        tax = self.tax_ms(traffic.n_prompt / traffic.n_requests) or 0.0
        spread = tax * traffic.n_requests / traffic.n_predicted
        if spread >= self.token_ms:
            return math.inf
        base, per_draft = self.step_ms
        return (base + per_draft * drafted) / (self.token_ms - spread) - 1

    def acceptance_ratio(self, traffic: Traffic) -> float | None:
        """The same as accepted over drafted tokens, at what this traffic drafts; may be above 1."""
        accepted, drafted = self.accepted_per_step(traffic), traffic.drafted_per_step
        return None if accepted is None or not drafted else max(0.0, accepted / drafted)


def break_even(
    drafting: Sequence[Sample], plain: Sequence[Sample], n_ubatch: int = DEFAULT_UBATCH
) -> BreakEven | None:
    """What samples of one command line with speculation and without show.

    Args:
        drafting: With it, as it serves.
        plain: The same server without it.
        n_ubatch: Physical batch of both.

    Returns:
        None where there is no depth at which either side has three samples that count.
    """
    from tunerd.core.sweep.step_time import StepRow, fit_steps  # noqa: PLC0415 -- scipy

    all_on, all_off = _sides(drafting, plain)
    depth = _common_depth(all_on, all_off)
    if depth is None:
        return None
    on, off = ([one for one in side if _alike(one.depth, depth)] for side in (all_on, all_off))
    rows = [
        StepRow(one.step_ms, one.steps, one.drafted / one.steps, (0.0, 0.0), 0.0, 0.0) for one in on
    ]
    law = fit_steps(rows)
    if law is None:
        return None
    on_prompts, off_prompts = _like_prompts(all_on, all_off), _like_prompts(all_off, all_on)
    return BreakEven(
        step_ms=(float(law[0]), float(law[1])),
        token_ms=sum(one.step_ms * one.steps for one in off) / sum(one.steps for one in off),
        prompt_ms=_prompt_law(on_prompts, n_ubatch),
        plain_prompt_ms=_prompt_law(off_prompts, n_ubatch),
        n_ubatch=n_ubatch,
        n_with=len(on),
        n_without=len(off),
        depth_tokens=round(depth),
    )


def lacking(drafting: Sequence[Sample], plain: Sequence[Sample]) -> str:
    """What would have to be measured for a break-even, where there is none."""
    on, off = _sides(drafting, plain)
    is_measured = len(on) >= MIN_SAMPLES and len(off) >= MIN_SAMPLES
    return NOT_ALIKE if is_measured else NOTHING_MEASURED


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer of a single stream; `depth` is its mean context, None where the log cannot tell."""

    step_ms: float
    steps: int
    drafted: int
    depth: float | None
    start: float
    prompt_n: int | None
    prompt_ms: float | None


def _sides(
    drafting: Sequence[Sample], plain: Sequence[Sample]
) -> tuple[list[_Answer], list[_Answer]]:
    on = [one for one in _usable(drafting) if one.drafted]
    return on, [one for one in _usable(plain) if not one.drafted]


def _alike(depth: float | None, other: float | None) -> bool:
    if depth is None or other is None:
        return False
    return abs(depth - other) <= max(_ALIKE_TOKENS, _ALIKE_SHARE * max(depth, other))


def _common_depth(on: Sequence[_Answer], off: Sequence[_Answer]) -> float | None:
    """The depth around which the side that has fewer samples has most; None where one has too few."""
    best: tuple[int, int, float] | None = None
    half = _ALIKE_TOKENS / 2  # finer would find the same answers again
    depths = {half * round(one.depth / half) for one in (*on, *off) if one.depth is not None}
    for depth in sorted(depths):
        counts = [sum(_alike(one.depth, depth) for one in side) for side in (on, off)]
        if min(counts) >= MIN_SAMPLES and (best is None or (min(counts), sum(counts)) > best[:2]):
            best = (min(counts), sum(counts), depth)
    return None if best is None else best[2]


def _like_prompts(own: Sequence[_Answer], others: Sequence[_Answer]) -> list[_Answer]:
    """Answers whose prompt has one of like length, at a like depth, on the other side."""
    return [
        one
        for one in own
        if any(
            _alike(one.prompt_n, other.prompt_n) and _alike(one.start, other.start)
            for other in others
            if other.prompt_ms
        )
    ]


def _usable(samples: Sequence[Sample]) -> list[_Answer]:
    """Answers to a single stream that may enter an average and have a decode time."""
    return [
        _answer(sample, sample.timings)
        for sample in samples
        if sample.is_usable
        and sample.concurrency == 1
        and sample.timings is not None
        and sample.timings.steps
        and sample.timings.predicted_ms
    ]


def _answer(sample: Sample, timings: Timings) -> _Answer:
    start = timings.cache_n
    if start is None:
        # A build that does not report it: the suite that fills the context counts it by itself.
        total = number(sample.details, "depth") or 0.0
        start = round(max(0.0, total - (timings.prompt_n or 0)))
    prompt = timings.prompt_n
    return _Answer(
        step_ms=timings.step_ms or 0.0,
        steps=timings.steps or 0,
        drafted=timings.draft_n or 0,
        depth=None if prompt is None else start + prompt + (timings.predicted_n or 0) / 2,
        start=float(start),
        prompt_n=prompt,
        prompt_ms=timings.prompt_ms,
    )


def _prompt_law(answers: Sequence[_Answer], n_ubatch: int) -> tuple[float, float] | None:
    from tunerd.core.sweep.step_time import PromptRow, fit_prompts  # noqa: PLC0415 -- scipy

    rows = [
        PromptRow(one.prompt_ms, one.prompt_n, n_ubatch, 0.0, 0.0)
        for one in answers
        if one.prompt_n and one.prompt_ms
    ]
    law: NDArray[float64] | None = fit_prompts(rows)
    return None if law is None else (float(law[0]), float(law[2]))
