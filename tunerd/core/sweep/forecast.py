"""How far a budget will go: starts, families, and whether a verdict can be reached at all."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tunerd.core.quantity import format_duration
from tunerd.core.sweep.verdict import challenge_alpha, pairs_needed
from tunerd.core.workload import Workload
from tunerd.core.workload_shape import Rates

_WARM_UP_S = 3.0
_USUAL = Rates(prompt_tok_s=500.0, decode_tok_s=30.0)
_PAIR_SD = 0.045
_GAIN = 0.05
_ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a budget allows, from the last load and the last speeds seen.

    `process_s` is one fresh server with one block of the workload [s], `starts` how many the budget
    has, `verdict_s` the pairs that show a gain of 5 % [s].
    """

    process_s: float
    starts: int
    verdict_s: float
    needed_s: float
    can_decide: bool
    is_measured: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def forecast(
    workload: Workload,
    budget_s: float,
    *,
    load_s: float,
    rates: Rates | None,
    n_families: int,
    min_gain: float,
) -> Forecast:
    """What a sweep can do in its time.

    Args:
        workload: What is asked of each server.
        budget_s: Time for everything [s].
        load_s: Time of one start [s].
        rates: Speeds seen before; None for usual ones.
        n_families: Pairs of a build and a kind of speculation.
        min_gain: Least gain worth a swap.
    """
    known = rates or _USUAL
    prompt = known.prompt_tok_s or _USUAL.prompt_tok_s or 1.0
    decode = known.decode_tok_s or _USUAL.decode_tok_s or 1.0
    prefix = max(one.cached_tokens for one in workload.classes)
    block_s = sum(
        (one.new_tokens / prompt + one.n_predict / decode) * math.sqrt(one.concurrency)
        for one in workload.classes
    )
    process_s = load_s + _WARM_UP_S + prefix / prompt + block_s
    pairs = pairs_needed(_GAIN, _PAIR_SD, margin=min_gain, alpha=challenge_alpha(_ALPHA, 1))
    verdict_s = 2 * pairs * process_s
    needed_s = (1 + 2 * n_families) * process_s + verdict_s
    starts = int(budget_s / process_s)
    can = needed_s <= budget_s
    text = (
        f"a start with one round of the workload takes about {format_duration(process_s)}, so "
        f"{format_duration(budget_s)} have room for about {starts} of them"
    )
    if not can:
        text += f"; to search and to prove a gain of {_GAIN:.0%} takes about {format_duration(needed_s)}"
    return Forecast(process_s, starts, verdict_s, needed_s, can, rates is not None, text)
