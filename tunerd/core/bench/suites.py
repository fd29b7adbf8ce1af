"""The suites: which requests each one sends, how often, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tunerd.core.bench.prompts import MTP_KINDS
from tunerd.core.bench.request import (
    Plan,
    Prefix,
    Request,
    Step,
    Suite,
    alone,
    shuffled,
    warm_up,
    with_streams,
)
from tunerd.core.workload import RequestClass, Workload
from tunerd.core.workload_shape import KINDS, MIXED, WorkloadShape
from tunerd.errors import BenchError

MTP_TOKENS = 192
LENGTHS = (100, 500, 1000, 2000)
LENGTHS_DEPTH = 43_000
STREAMS = (1, 2, 4)
COLD = "cold"
IDENTICAL = "warm, identical"
CHANGED_TAIL = "warm, changed tail"
TOOLS = "tool calls"
SHORT = "short answers"
PROSE = "prose"
_CACHE_DEPTH = 4096
_CACHE_TOKENS = 16
_SHARED_RATIO = 0.95
_DEEP_STEPS = 8
_DEEP_TOKENS = 64
_ESTIMATE_ERROR = 0.02
_STREAM_TOKENS = 128
_SHORT_TOKENS = 32
_TOOL_TOKENS = 256
_PROSE_TOKENS = 512
# Room for a chat template, the reference number and tokens that an estimate of letters missed.
_SPARE_TOKENS = 256


def mtp(seed: int, *, repeats: int) -> Plan:
    """Each of the nine kinds `repeats` times, 192 tokens each, as the community's mtp-bench asks."""
    block = [
        alone(Request(suite=Suite.MTP, case=kind, kind=kind, n_predict=MTP_TOKENS))
        for kind in MTP_KINDS
    ]
    return _plan(Suite.MTP, seed, [block] * repeats)


def lengths(
    seed: int,
    *,
    repeats: int,
    n_ctx: int | None,
    depth: int | None = None,
    most_tokens: int | None = None,
) -> Plan:
    """Answers of several lengths after a long cold prompt.

    Args:
        seed: Of the order.
        repeats: How often each length.
        n_ctx: Context of one request; None where unknown.
        depth: Tokens of the prompt; None for 43,000, or what the context leaves.
        most_tokens: The longest answer that the server gives; None for no limit.

    Raises:
        BenchError: the server has no room for the shortest answer.
    """
    fitting = [
        n
        for n in LENGTHS
        if (n_ctx is None or n + _least_depth(depth) <= n_ctx)
        and (most_tokens is None or n <= most_tokens)
    ]
    if not fitting:
        limit = "" if most_tokens is None else f" and answers of at most {most_tokens}"
        raise BenchError(
            f"a context of {n_ctx} tokens{limit} has no room for suite `lengths`",
            cause=f"prompts of {_least_depth(depth)} tokens and answers of {LENGTHS[0]} and more",
            hint="a smaller --depth",
        )
    room = LENGTHS_DEPTH if n_ctx is None else _roomy(n_ctx - fitting[-1] - _SPARE_TOKENS)
    chosen = depth if depth is not None else max(1, min(LENGTHS_DEPTH, room))
    block = [
        alone(
            Request(
                suite=Suite.LENGTHS,
                case=str(n_tokens),
                kind="long_code_review",
                n_predict=n_tokens,
                depth_tokens=chosen,
            )
        )
        for n_tokens in fitting
    ]
    return _plan(Suite.LENGTHS, seed, [block] * repeats)


def _roomy(n_tokens: int) -> int:
    """So many tokens that they fit although their number is an estimate from letters."""
    return int(n_tokens * (1 - _ESTIMATE_ERROR))


def _least_depth(depth: int | None) -> int:
    return (depth or 0) + _SPARE_TOKENS


def cache(seed: int, *, repeats: int, n_ctx: int | None, depth: int | None = None) -> Plan:
    """A cold prompt, the same again, and the same with another end."""
    room = _CACHE_DEPTH if n_ctx is None else n_ctx // 2
    chosen = depth or min(_CACHE_DEPTH, room)
    steps = [
        Step(
            tuple(
                Request(
                    suite=Suite.CACHE,
                    case=case,
                    kind="code_python",
                    n_predict=_CACHE_TOKENS,
                    depth_tokens=chosen,
                    prefix=Prefix.COLD if case == COLD else Prefix.WARM,
                    shares=f"cache {number}",
                    shared_ratio=_SHARED_RATIO if case == CHANGED_TAIL else 1.0,
                )
                for case in (COLD, IDENTICAL, CHANGED_TAIL)
            )
        )
        for number in range(repeats)
    ]
    return _plan(Suite.CACHE, seed, [steps])


def deep(seed: int, *, n_ctx: int | None) -> Plan:
    """One conversation that grows until the context is full; the order is that of the depths.

    Raises:
        BenchError: the size of the context is not known.
    """
    if n_ctx is None:
        raise BenchError(
            "the size of the context is not known",
            cause="the server does not say it",
            hint="this suite needs a llama-server",
        )
    most = _roomy(n_ctx - _DEEP_TOKENS - min(_SPARE_TOKENS, n_ctx // 16))
    depths = [most * number // _DEEP_STEPS for number in range(1, _DEEP_STEPS + 1)]
    requests = tuple(
        Request(
            suite=Suite.DEEP,
            case=f"{depth} tokens",
            kind="code_python",
            n_predict=_DEEP_TOKENS,
            depth_tokens=depth,
            prefix=Prefix.WARM,
            shares="deep",
            has_question=False,
            details={"wanted_depth": depth},
        )
        for depth in depths
    )
    return Plan(Suite.DEEP, seed, warm_up(Suite.DEEP), tuple(alone(r) for r in requests))


def quality(seed: int, *, repeats: int, with_own_sampling: bool = False) -> Plan:
    """Tool calls, short answers and prose, of free length, at temperature 0 with one seed.

    Args:
        seed: Of the order.
        repeats: How often each case.
        with_own_sampling: Each case as often again by the server's own sampling, the seed alone fixed.
    """
    cases = ((TOOLS, "tool", _TOOL_TOKENS), (SHORT, "short_answer", _SHORT_TOKENS),
             (PROSE, "prose", _PROSE_TOKENS))  # fmt: skip
    block = [
        alone(
            Request(
                suite=Suite.QUALITY,
                case=case,
                kind=kind,
                n_predict=n_predict,
                is_fixed_length=False,
                is_chat=True,
                has_tools=case == TOOLS,
                has_own_sampling=is_own,
            )
        )
        for is_own in ((False, True) if with_own_sampling else (False,))
        for case, kind, n_predict in cases
    ]
    return _plan(Suite.QUALITY, seed, [block] * repeats)


def concurrency(seed: int, *, repeats: int, streams: Sequence[int] = STREAMS) -> Plan:
    """The same work by one, two and four clients at once."""
    block = [
        with_streams(
            Request(
                suite=Suite.CONCURRENCY,
                case=f"{n} stream{'s' * (n > 1)}",
                kind="explain_concept",
                n_predict=_STREAM_TOKENS,
            ),
            n,
        )
        for n in streams
    ]
    return _plan(Suite.CONCURRENCY, seed, [block] * repeats)


def workload(seed: int, shape: WorkloadShape, mix: Workload, *, repeats: int) -> Plan:
    """Each class of a mix: first what the server would still hold, then the turn itself.

    Args:
        seed: Of the order.
        shape: The classes as people describe them.
        mix: The same with plain lengths, cut to the context where it had to be.
        repeats: How often each class.
    """
    blocks = [
        [_turn(number, name.name, one, turn) for number, (name, one) in enumerate(
            zip(shape.classes, mix.classes, strict=True))]
        for turn in range(repeats)
    ]  # fmt: skip
    return _plan(Suite.WORKLOAD, seed, blocks)


def _turn(number: int, name: str, one: RequestClass, turn: int) -> Step:
    whole = one.cached_tokens + one.new_tokens
    is_warm = one.cached_tokens > 0 and one.concurrency == 1
    measured = Request(
        suite=Suite.WORKLOAD,
        case=name,
        kind=KINDS[(number + turn) % len(KINDS)] if one.kind == MIXED else one.kind,
        n_predict=one.n_predict,
        depth_tokens=whole,
        prefix=Prefix.WARM if is_warm else Prefix.COLD,
        shares=f"turn {number} {turn}" if is_warm else None,
        shared_ratio=one.cached_tokens / whole,
        details={"class": number},
    )
    if one.concurrency > 1:
        # What one slot holds is of no use to the others: nothing is cached here, and is not said to be.
        return with_streams(measured, one.concurrency)
    if not is_warm:
        return alone(measured)
    before = replace(
        measured,
        case=f"{name}, turn before",
        n_predict=1,
        depth_tokens=one.cached_tokens,
        shared_ratio=1.0,
        has_question=False,
        is_measured=False,
        details=None,
    )
    return Step((before, measured))


def _plan(suite: Suite, seed: int, blocks: Sequence[Sequence[Step]]) -> Plan:
    rng = random.Random(f"order {seed}")  # noqa: S311 -- an order that can be had again
    return Plan(suite, seed, warm_up(suite), shuffled(blocks, rng))
