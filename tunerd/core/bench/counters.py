"""The server's own counters, from the text of its `/metrics`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_PREFIX = "llamacpp:"
# A draft of a thousand tokens is none: what is said of one is not read.
_LINE = re.compile(r'^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{position="(\d{1,3})"\})? (\S+)$')
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters since the process began; a counter that the build does not have is None.

    `n_prompt` does not count cached tokens, `n_cached` counts nothing else; `prompt_s` and `predicted_s`
    are the time that went into prompts and generation, of all slots together. `accepted_by_position` is
    empty until the first draft was accepted, on builds that count by position.
    """

    n_prompt: int | None
    n_predicted: int | None
    n_processing: int | None
    n_deferred: int | None
    n_drafted: int | None = None
    n_accepted: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    n_cached: int | None = None
    prompt_s: float | None = None
    predicted_s: float | None = None

    @property
    def n_at_work(self) -> int:
        """Requests that it answers or lets wait at this moment, as far as it tells."""
        return (self.n_processing or 0) + (self.n_deferred or 0)


def read_counters(text: str) -> Counters:
    """The counters in a Prometheus text."""
    values: dict[str, float] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        value = _value(found[3]) if found is not None else None
        if found is None or value is None:
            continue
        name = found[1].removeprefix(_PREFIX)
        if found[2] is None:
            values[name] = value
        elif name == _PER_POSITION:
            positions[int(found[2])] = round(value)
    has_positions = "spec_decode_num_draft_tokens_total" in values
    return Counters(
        n_prompt=_count(values, "prompt_tokens_total"),
        n_predicted=_count(values, "tokens_predicted_total"),
        n_processing=_count(values, "requests_processing"),
        n_deferred=_count(values, "requests_deferred"),
        n_drafted=_count(values, "spec_decode_num_draft_tokens_total"),
        n_accepted=_count(values, "spec_decode_num_accepted_tokens_total"),
        accepted_by_position=_listed(positions) if has_positions else None,
        n_cached=_count(values, "prompt_tokens_cached_total"),
        prompt_s=values.get("prompt_seconds_total"),
        predicted_s=values.get("tokens_predicted_seconds_total"),
    )


def gained(before: Counters, after: Counters) -> tuple[int, ...] | None:
    """By position, how many drafted tokens were accepted in between; None where it is not counted."""
    then, now = before.accepted_by_position, after.accepted_by_position
    if then is None or now is None:
        return None
    width = max(len(then), len(now))
    padded = [(*one, *(0,) * (width - len(one))) for one in (then, now)]
    found = tuple(late - early for early, late in zip(*padded, strict=True))
    return None if any(count < 0 for count in found) else found


def _listed(positions: dict[int, int]) -> tuple[int, ...]:
    return tuple(positions.get(place, 0) for place in range(max(positions, default=-1) + 1))


def _count(values: dict[str, float], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else round(value)


def _value(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None  # no counter goes below zero
