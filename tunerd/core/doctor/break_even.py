"""From which acceptance on speculation pays on this box, from what was measured on it.

With t(D) the time of a verification step that drafts D tokens, t0 the time of a token without
speculation, and x the time that speculation adds to the prompt, spread over the tokens of the answer,
a token costs t(D) / (1 + A) + x with A accepted tokens per step. That is less than t0 from

    A = t(D) / (t0 - x) - 1

on. t(D) and the prompt's times are the laws of `tunerd.core.sweep.step_time`, fitted to the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd.core.doctor.server_log import Traffic
from tunerd.core.sample import Sample, Timings

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

MIN_SAMPLES = 3
DEFAULT_UBATCH = 512  # of every build that was probed


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What speculation costs on this box.

    `step_ms` are the coefficients (base, per drafted token) of a step with speculation, `token_ms` the
    time of a token without. `prompt_ms` and `plain_prompt_ms` are coefficients of a prompt with and
    without it (per batch, per token); None where no sample shows one of them.
    """

    step_ms: tuple[float, float]
    token_ms: float
    prompt_ms: tuple[float, float] | None
    plain_prompt_ms: tuple[float, float] | None
    n_ubatch: int
    n_with: int
    n_without: int

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
        None where either side has fewer than three samples that count.
    """
    from tunerd.core.sweep.step_time import StepRow, fit_steps  # noqa: PLC0415 -- scipy

    on = [timings for timings in _usable(drafting) if timings.draft_n]
    off = [timings for timings in _usable(plain) if not timings.draft_n]
    if len(on) < MIN_SAMPLES or len(off) < MIN_SAMPLES:
        return None
    rows = [
        StepRow(timings.step_ms or 0.0, steps, (timings.draft_n or 0) / steps, (0.0, 0.0), 0.0, 0.0)
        for timings in on
        if (steps := timings.steps)
    ]
    law = fit_steps(rows)
    if law is None:
        return None
    return BreakEven(
        step_ms=(float(law[0]), float(law[1])),
        token_ms=sum(one.predicted_ms or 0.0 for one in off) / sum(one.steps or 0 for one in off),
        prompt_ms=_prompt_law(on, n_ubatch),
        plain_prompt_ms=_prompt_law(off, n_ubatch),
        n_ubatch=n_ubatch,
        n_with=len(on),
        n_without=len(off),
    )


def _usable(samples: Sequence[Sample]) -> list[Timings]:
    """Timings of samples of a single stream that may enter an average and have a decode time."""
    return [
        sample.timings
        for sample in samples
        if sample.is_usable
        and sample.concurrency == 1
        and sample.timings is not None
        and sample.timings.steps
        and sample.timings.predicted_ms
    ]


def _prompt_law(timings: Sequence[Timings], n_ubatch: int) -> tuple[float, float] | None:
    from tunerd.core.sweep.step_time import PromptRow, fit_prompts  # noqa: PLC0415 -- scipy

    rows = [
        PromptRow(one.prompt_ms, one.prompt_n, n_ubatch, 0.0, 0.0)
        for one in timings
        if one.prompt_n and one.prompt_ms
    ]
    law: NDArray[float64] | None = fit_prompts(rows)
    return None if law is None else (float(law[0]), float(law[2]))
