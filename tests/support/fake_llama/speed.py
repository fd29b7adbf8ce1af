"""How long a generation takes, and what speculation does to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.support.fake_llama.behaviour import Behaviour


@dataclass
class Run:
    """One simulated generation; times in simulated milliseconds."""

    n_prompt: int
    n_cached: int
    n_predicted: int
    prompt_ms: float
    predicted_ms: float
    drafted_at: list[int]
    accepted_at: list[int]
    bursts: list[int]
    steps: list[tuple[float, int]]  # time [ms] and drafted tokens of each burst after the first

    def until(self, n_bursts: int) -> Run:
        """What it was after so many bursts."""
        bursts, steps = self.bursts[:n_bursts], self.steps[: max(n_bursts - 1, 0)]
        taken = [burst - 1 for burst in bursts[1:]]
        positions = range(len(self.drafted_at))
        return replace(
            self, bursts=bursts, steps=steps, n_predicted=sum(bursts),
            predicted_ms=max(sum(ms for ms, _ in steps), 0.001),
            drafted_at=[sum(at < drafted for _, drafted in steps) for at in positions],
            accepted_at=[sum(at < one for one in taken) for at in positions],
        )  # fmt: skip

    @property
    def n_drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def n_accepted(self) -> int:
        return sum(self.accepted_at)


def simulate(
    behaviour: Behaviour,
    *,
    n_prompt: int,
    n_cached: int,
    n_predict: int,
    n_max: int,
    p_min: float,
    slowdown: float,
    seed: int,
) -> Run:
    """Draft, gate and accept token by token; a step yields its accepted tokens and one more.

    A draft token's confidence is r ** 0.25 of a uniform r (mean 0.8); drafting ends at the first
    one below `p_min`. It is accepted with probability `acceptance` at mean confidence, more above
    and less below.
    """
    rng = random.Random(seed)  # a simulation that must repeat itself
    step_ms = 1000.0 / behaviour.tg_tok_s * slowdown
    is_on = n_max > 0
    pp_tok_s = behaviour.pp_tok_s * ((1.0 - behaviour.prefill_tax) if is_on else 1.0)
    drafted_at, accepted_at = [0] * n_max, [0] * n_max
    bursts, produced = ([1] if n_predict else []), min(1, n_predict)
    steps: list[tuple[float, int]] = []
    while produced < n_predict:
        confidences: list[float] = []
        n_tried = 0
        for _ in range(min(n_max, n_predict - produced - 1)):
            confidence = rng.random() ** 0.25
            n_tried += 1
            if confidence < p_min:
                break
            confidences.append(confidence)
        n_taken = 0
        for confidence in confidences:
            if rng.random() >= behaviour.acceptance + 0.8 * (confidence - 0.8):
                break
            n_taken += 1
        for position in range(len(confidences)):
            drafted_at[position] += 1
            accepted_at[position] += position < n_taken
        cost = 1.0 + behaviour.draft_cost * n_tried + 0.05 * len(confidences)
        steps.append((step_ms * cost, len(confidences)))
        bursts.append(n_taken + 1)
        produced += n_taken + 1
    return Run(
        n_prompt=n_prompt,
        n_cached=n_cached,
        n_predicted=produced,
        prompt_ms=1000.0 * (n_prompt - n_cached) / pp_tok_s * slowdown,
        predicted_ms=max(sum(ms for ms, _ in steps), 0.001),
        drafted_at=drafted_at,
        accepted_at=accepted_at,
        bursts=bursts,
        steps=steps,
    )
