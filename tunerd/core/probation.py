"""Whether a server that was just deployed does worse than its evidence said: looks in, a judgement out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from tunerd.core.request_log import LoggedRequest

# Less is no sample of the work: one long answer could be of any kind.
LEAST_TOKENS = 512
# Three times the spread between restarts, 3 %; where nothing is known of what served before, going back
# may not help, and speeds of kinds of text that nobody measured differ by a quarter.
_TOLERANCE = 0.10
_TOLERANCE_ALONE = 0.25
# Deeper than what was measured by so much decodes slower for reasons of its own.
_DEPTH_RATIO = 1.25
_LEAST_ANSWER = 16
_SLOW_WINDOWS = 2
_SICK_LOOKS = 3
# Prompt caches and checkpoints grow to their limits; what grows on beyond that is a leak.
_GROWTH_RATIO = 1.5
_GROWTH_MIB = 2048
_MIN_LOOKS_OF_GROWTH = 6


class Standing(StrEnum):
    """What is to be done."""

    GO_ON = "go on"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment; None is not known.

    `life` names the process, `n_restarts` counts how often the manager started it by itself, and
    `is_stopped` says that it is down because somebody stopped it.
    `n_predicted` and `predicted_s` are of the comparable requests that it answered since it began,
    `rss_mib` is its memory.
    """

    at_s: float
    life: str | None
    is_active: bool
    is_ready: bool
    is_stopped: bool = False
    n_restarts: int | None = None
    n_predicted: int | None = None
    predicted_s: float | None = None
    rss_mib: int | None = None
    vram_free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Basis:
    """What it is judged by.

    `slowest_tok_s` is the lowest decode speed over the kinds of text that were measured of it [tok/s],
    `previous_tok_s` that of what it replaced, `deepest_tokens` the most context that was in use then,
    `headroom_mib` the VRAM that must stay free. None: not known, and not judged.
    """

    slowest_tok_s: float | None
    deepest_tokens: int
    n_samples: int
    previous_tok_s: float | None = None
    headroom_mib: int | None = None

    @property
    def floor_tok_s(self) -> float | None:
        """Decode speed below which it does worse: than measured, and than what served before."""
        if self.slowest_tok_s is None:
            return None
        if self.previous_tok_s is None:
            return self.slowest_tok_s * (1 - _TOLERANCE_ALONE)
        return min(self.slowest_tok_s, self.previous_tok_s) * (1 - _TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Where a probation stands, and why."""

    standing: Standing
    reason: str = ""


def comparable(requests: Iterable[LoggedRequest], basis: Basis) -> tuple[int, float]:
    """Tokens and seconds of generation of requests like those measured: alone, and not deeper."""
    tokens, ms = 0, 0.0
    for one in requests:
        depth = one.prompt_total_n
        if depth is None or one.concurrency > 1 or one.predicted_n < _LEAST_ANSWER:
            continue
        if depth + one.predicted_n <= basis.deepest_tokens * _DEPTH_RATIO:
            tokens += one.predicted_n - 1
            ms += one.predicted_ms
    return tokens, ms / 1000


def judge(looks: Sequence[Look], basis: Basis, *, life: str | None) -> Judgement:
    """Whether to take the server back.

    Args:
        looks: From the beginning, oldest first.
        basis: What was measured of it.
        life: The process that the swap started.
    """
    for reason in (
        _ended(looks, life),
        _sick(looks),
        _slow(looks, basis),
        _leaks(looks),
        _tight(looks, basis),
    ):
        if reason is not None:
            return Judgement(Standing.WORSE, reason)
    return Judgement(Standing.GO_ON)


def _ended(looks: Sequence[Look], life: str | None) -> str | None:
    """Whether the process died: one that a person restarted has the manager's counter at zero."""
    last = looks[-1]
    if last.is_active and last.life == life:
        return None
    if last.n_restarts:
        return f"it died and was started again {last.n_restarts} times"
    if last.is_stopped:
        return None
    if not last.is_active and _count_back(looks, lambda one: not one.is_active) >= _SICK_LOOKS:
        return "it ended and did not come back"
    return None


def _sick(looks: Sequence[Look]) -> str | None:
    n = _count_back(looks, lambda one: one.is_active and not one.is_ready)
    return f"it did not answer {n} times in a row" if n >= _SICK_LOOKS else None


def _count_back(looks: Sequence[Look], holds: Callable[[Look], bool]) -> int:
    n = 0
    for one in reversed(looks):
        if not holds(one):
            break
        n += 1
    return n


def windows(looks: Sequence[Look]) -> list[float]:
    """Decode speeds [tok/s] over stretches of at least `LEAST_TOKENS` generated tokens each."""
    found: list[float] = []
    begin: Look | None = None
    for one in looks:
        if one.n_predicted is None or one.predicted_s is None:
            continue
        if begin is None or one.life != begin.life or one.n_predicted < (begin.n_predicted or 0):
            begin = one
            continue
        tokens = one.n_predicted - (begin.n_predicted or 0)
        seconds = one.predicted_s - (begin.predicted_s or 0.0)
        if tokens >= LEAST_TOKENS and seconds > 0:
            found.append(tokens / seconds)
            begin = one
    return found


def _slow(looks: Sequence[Look], basis: Basis) -> str | None:
    floor, slowest = basis.floor_tok_s, basis.slowest_tok_s
    last = windows(looks)[-_SLOW_WINDOWS:]
    if floor is None or slowest is None or len(last) < _SLOW_WINDOWS:
        return None
    if any(speed >= floor for speed in last):
        return None
    shown = ", ".join(f"{speed:.1f}" for speed in last)
    before = basis.previous_tok_s
    return (
        f"it decodes {shown} tok/s in service, and its slowest kind of text was measured with "
        f"{slowest:.1f}"
        + ("" if before is None else f", that of what served before with {before:.1f}")
    )


def _leaks(looks: Sequence[Look]) -> str | None:
    known = [one.rss_mib for one in looks if one.rss_mib is not None and one.is_ready]
    if len(known) < _MIN_LOOKS_OF_GROWTH:
        return None
    first, last = known[0], known[-1]
    is_growing = all(later >= earlier for earlier, later in pairwise(known))
    if is_growing and last > first * _GROWTH_RATIO and last - first > _GROWTH_MIB:
        return f"its memory grows and grows: {first} MiB, now {last} MiB"
    return None


def _tight(looks: Sequence[Look], basis: Basis) -> str | None:
    if basis.headroom_mib is None:
        return None
    known = [one.vram_free_mib for one in looks if one.vram_free_mib is not None]
    last, least = known[-_SICK_LOOKS:], basis.headroom_mib // 2
    if len(last) < _SICK_LOOKS or max(last) >= least:
        return None
    if basis.slowest_tok_s is None and known[0] < least:
        return None  # nothing was measured: what it replaced may have left as little
    return f"{max(last)} MiB of VRAM stay free, wanted are {basis.headroom_mib}"
