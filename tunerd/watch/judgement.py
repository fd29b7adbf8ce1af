"""Whether a server that was just deployed does worse than was measured of it: looks in, a judgement out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunerd.engine.log import LoggedRequest
from tunerd.watch.figures import Reading

WENT_DOWN = "the machine went down while it was watched"
# Three times the spread between restarts, 3 %; where nothing is known of what served before, going back
# may not help, and speeds of kinds of text that nobody measured differ by a quarter.
_TOLERANCE = 0.10
_TOLERANCE_ALONE = 0.25
# Deeper than what was measured by so much decodes slower for reasons of its own.
_DEPTH_RATIO = 1.25
LEAST_ANSWER = 16
_SICK_LOOKS = 3
# A process that works on something uses more, one that waits for a lock that never comes does not; ik says
# nothing of its health while it reads a long prompt.
IDLE_CORES = 0.05
# What grows on beyond the prompt cache's limit and what checkpoints may take (dozens of up to 150 MiB) is
# a leak. llama-server keeps 8192 MiB of prompts where it is told nothing else.
_GROWTH_RATIO = 1.5
_GROWTH_MIB = 8192
_CACHE_RAM_MIB = 8192
_MIN_LOOKS_OF_GROWTH = 6
# Buffers of a server that works come and go by less.
_OWN_GROWTH_MIB = 64


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment; None is not known.

    `life` names the process, `n_restarts` counts how often the manager started it by itself, and
    `is_stopped` says that it is down because somebody stopped it.
    `cpu_s` is the processor time it has used, `anonymous_mib` its memory without mapped files,
    `vram_free_mib` the least that is free on a card it uses, `vram_own_mib` what it holds itself.
    """

    at_s: float
    life: str | None
    is_active: bool
    is_ready: bool
    is_stopped: bool = False
    n_restarts: int | None = None
    cpu_s: float | None = None
    anonymous_mib: int | None = None
    vram_free_mib: int | None = None
    vram_own_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Basis:
    """What it is judged by.

    `slowest_tok_s` is the lowest decode speed over the kinds of text that were measured of it [tok/s],
    `previous_tok_s` that of what it replaced, `deepest_tokens` the most context that was in use then,
    `headroom_mib` the VRAM that must stay free, `cache_ram_mib` the limit of its prompt cache. None: not
    known, or no limit, and not judged.
    """

    slowest_tok_s: float | None = None
    deepest_tokens: int = 0
    n_samples: int = 0
    previous_tok_s: float | None = None
    headroom_mib: int | None = None
    cache_ram_mib: int | None = _CACHE_RAM_MIB

    @property
    def floor_tok_s(self) -> float | None:
        """Decode speed below which it does worse: than measured, and than what served before."""
        if self.slowest_tok_s is None:
            return None
        if self.previous_tok_s is None:
            return self.slowest_tok_s * (1 - _TOLERANCE_ALONE)
        return min(self.slowest_tok_s, self.previous_tok_s) * (1 - _TOLERANCE)


def comparable(requests: Iterable[LoggedRequest], basis: Basis) -> tuple[int, float]:
    """Tokens and seconds of generation of requests like those measured: alone, and not deeper."""
    tokens, ms = 0, 0.0
    for one in requests:
        depth = one.prompt_total_n
        if depth is None or one.concurrency > 1 or one.predicted_n < LEAST_ANSWER:
            continue
        if depth + one.predicted_n <= basis.deepest_tokens * _DEPTH_RATIO:
            tokens += one.predicted_n - 1
            ms += one.predicted_ms
    return tokens, ms / 1000


def cache_ram_mib(argv: Sequence[str]) -> int | None:
    """The limit of the prompt cache in RAM that a command line sets; None for no limit.

    -1 is none; nothing readable is the default of llama-server.
    """
    for name, value in pairwise(argv):
        if name in {"--cache-ram", "-cram"} and value.removeprefix("-").isdecimal():
            return int(value) if int(value) >= 0 else None
    return _CACHE_RAM_MIB


def look_of(reading: Reading) -> Look:
    """What a reading says of the server's health."""
    engine = reading.engine
    held = [(gpu.free_mib, gpu.server_mib) for gpu in reading.gpus or () if gpu.server_mib]
    known = [(free, own) for free, own in held if free is not None and own is not None]
    return Look(
        at_s=reading.at_s,
        life=engine.life,
        is_active=engine.is_active,
        is_ready=engine.is_ready is True,
        is_stopped=engine.is_stopped_by_hand,
        n_restarts=engine.n_restarts,
        cpu_s=engine.cpu_s,
        anonymous_mib=engine.anonymous_mib,
        vram_free_mib=min((free for free, _ in known), default=None),
        vram_own_mib=sum(own for _, own in known) if known else None,
    )


def judge(looks: Sequence[Look], basis: Basis, *, restarts: int = 0) -> str | None:
    """Why to take the server back, but for its speed, which is judged as a drift is; None: it stays.

    Args:
        looks: From the beginning, oldest first.
        basis: What was measured of it.
        restarts: How often the manager had started it by itself when the swap was done.
    """
    return _ended(looks, restarts) or _sick(looks) or _leaks(looks, basis) or _tight(looks, basis)


def is_long_enough(looks: Sequence[Look], left_s: float) -> bool:
    """Whether it was watched for its time, and the last looks found it well."""
    return left_s <= 0 and _count_back(looks, lambda one: one.is_ready) >= _SICK_LOOKS


def _ended(looks: Sequence[Look], restarts: int) -> str | None:
    """Whether the process died: one that a person restarted has the manager's counter at zero."""
    last = looks[-1]
    died = (last.n_restarts or 0) - restarts
    if died > 0:
        return f"it died and was started again {died} time{'s' if died > 1 else ''}"
    if last.is_active or last.is_stopped:
        return None
    if _count_back(looks, lambda one: not one.is_active) >= _SICK_LOOKS:
        return "it ended and did not come back"
    return None


def _sick(looks: Sequence[Look]) -> str | None:
    """Whether a server that was ready says nothing any more, and does nothing either."""
    n = _count_back(looks, lambda one: one.is_active and not one.is_ready)
    silent = looks[len(looks) - n :]
    if n < _SICK_LOOKS or not any(
        one.is_ready and one.life == silent[0].life for one in looks[: len(looks) - n]
    ):
        return None  # one that loads was not ready yet, and may take its time
    first, last = silent[0], silent[-1]
    if first.cpu_s is None or last.cpu_s is None:
        works = False
    else:
        works = last.cpu_s - first.cpu_s > IDLE_CORES * (last.at_s - first.at_s)
    return None if works else f"it did not answer {n} times in a row"


def _count_back(looks: Sequence[Look], holds: Callable[[Look], bool]) -> int:
    n = 0
    for one in reversed(looks):
        if not holds(one):
            break
        n += 1
    return n


def _leaks(looks: Sequence[Look], basis: Basis) -> str | None:
    known = [one.anonymous_mib for one in looks if one.anonymous_mib is not None and one.is_ready]
    if len(known) < _MIN_LOOKS_OF_GROWTH or basis.cache_ram_mib is None:
        return None
    first, last = known[0], known[-1]
    is_growing = all(later >= earlier for earlier, later in pairwise(known))
    allowed = basis.cache_ram_mib + _GROWTH_MIB
    if is_growing and last > first * _GROWTH_RATIO and last - first > allowed:
        return f"its memory grows and grows: {first} MiB, now {last} MiB"
    return None


def _tight(looks: Sequence[Look], basis: Basis) -> str | None:
    """Whether it took so much VRAM itself that too little is left; what others take is not its fault."""
    if basis.headroom_mib is None:
        return None
    known = [one for one in looks if one.vram_free_mib is not None and one.vram_own_mib is not None]
    last = known[-_SICK_LOOKS:]
    if len(last) < _SICK_LOOKS:
        return None
    free_mib = max(one.vram_free_mib or 0 for one in last)
    own_mib = min(one.vram_own_mib or 0 for one in last)
    has_grown = own_mib - (known[0].vram_own_mib or 0) >= _OWN_GROWTH_MIB
    if free_mib >= basis.headroom_mib // 2 or not has_grown:
        return None
    return (
        f"it holds {own_mib} MiB of VRAM, {known[0].vram_own_mib} at first, and {free_mib} MiB stay "
        f"free, wanted are {basis.headroom_mib}"
    )
