"""The turns of a workload in seconds: the client's wall, and what it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.core.evidence import TurnTime
from tunerd.core.sample import Sample
from tunerd.core.workload_shape import WorkloadShape


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of a turn; `waiting_s` is None where it cannot be told from the prompt."""

    whole_s: float
    prefill_s: float
    generation_s: float
    waiting_s: float | None


def turn_times(arm: str, samples: Sequence[Sample], shape: WorkloadShape) -> list[TurnTime]:
    """A turn of each class by the client's wall, and of the mix where every class was measured.

    The server's times only split the wall: what is left of it was spent waiting, for a slot or for
    the machine. Of a server without times the wall is split at the first token, so that waiting is
    part of the prompt. Thoughts that nobody can tell from the answer are part of it, and are unknown
    themselves.
    """
    found = [
        _parts([s for s in samples if s.details.get("class") == number])
        for number in range(len(shape.classes))
    ]
    turns = [
        _turn(arm, one.name, parts, one.reasoning_share, share)
        for one, parts, share in zip(shape.classes, found, shape.shares, strict=True)
    ]
    return [*turns, _mix(arm, turns)]


def _turn(
    arm: str, name: str, parts: _Parts | None, thoughts: float | None, weight: float
) -> TurnTime:
    if parts is None:
        return TurnTime(arm, name, None, None, None, weight)
    return TurnTime(
        arm=arm,
        request_class=name,
        prefill_s=parts.prefill_s,
        reasoning_s=None if thoughts is None else thoughts * parts.generation_s,
        decode_s=(1 - (thoughts or 0.0)) * parts.generation_s,
        weight=weight,
        waiting_s=parts.waiting_s,
        whole_s=parts.whole_s,
    )


def _mix(arm: str, turns: Sequence[TurnTime]) -> TurnTime:
    """Thoughts count as part of the answer where any class hides them."""
    reasoning, generation = _expected(turns, "reasoning_s"), _expected(turns, "decode_s")
    if reasoning is None and generation is not None:
        generation += sum((one.weight or 0.0) * (one.reasoning_s or 0.0) for one in turns)
    return TurnTime(
        arm=arm,
        request_class=None,
        prefill_s=_expected(turns, "prefill_s"),
        reasoning_s=reasoning,
        decode_s=generation,
        waiting_s=_expected(turns, "waiting_s"),
        whole_s=_expected(turns, "whole_s"),
    )


def _expected(turns: Sequence[TurnTime], name: str) -> float | None:
    total = 0.0
    for one in turns:
        value = getattr(one, name)
        if value is None:
            return None
        total += (one.weight or 0.0) * value
    return total


def _parts(samples: Sequence[Sample]) -> _Parts | None:
    usable = [one for one in samples if one.is_usable]
    for split in (_by_server, _by_client):
        found = [split(one) for one in usable]
        known = [one for one in found if one is not None]
        if known and len(known) == len(found):
            waiting = [one.waiting_s for one in known if one.waiting_s is not None]
            return _Parts(
                statistics.fmean(one.whole_s for one in known),
                statistics.fmean(one.prefill_s for one in known),
                statistics.fmean(one.generation_s for one in known),
                statistics.fmean(waiting) if len(waiting) == len(known) else None,
            )
    return None


def _by_server(sample: Sample) -> _Parts | None:
    client, timings = sample.client, sample.timings
    if client is None or timings is None:
        return None
    if timings.prompt_ms is None or timings.predicted_ms is None:
        return None
    # Both clocks have a resolution: the parts must not come to more than the whole.
    prefill_ms = min(timings.prompt_ms, client.wall_ms)
    generation_ms = min(timings.predicted_ms, client.wall_ms - prefill_ms)
    waiting_ms = client.wall_ms - prefill_ms - generation_ms
    return _Parts(client.wall_ms / 1000, prefill_ms / 1000, generation_ms / 1000, waiting_ms / 1000)


def _by_client(sample: Sample) -> _Parts | None:
    client = sample.client
    if client is None or client.ttft_ms is None:
        return None
    generation_ms = max(client.wall_ms - client.ttft_ms, 0.0)
    return _Parts(client.wall_ms / 1000, client.ttft_ms / 1000, generation_ms / 1000, None)
