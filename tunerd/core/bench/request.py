"""What is asked of a server, in which order, and what is held against the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class Suite(StrEnum):
    """What a bench looks at."""

    MTP = "mtp"
    LENGTHS = "lengths"
    CACHE = "cache"
    DEEP = "deep"
    QUALITY = "quality"
    CONCURRENCY = "concurrency"
    WORKLOAD = "workload"


class Prefix(StrEnum):
    """How a request stands to what the server still holds.

    COLD sends `cache_prompt: false` and must find nothing. WARM sends `true` and counts what it finds.
    """

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request before its text is chosen.

    Attributes:
        suite: The suite.
        case: Under which name its figures are gathered.
        kind: Kind of text.
        n_predict: Tokens to generate; exactly so many where `is_fixed_length`.
        depth_tokens: About how long the prompt is [tok]; None for that of its kind.
        prefix: Cold or warm.
        shares: Name of a text that several requests of a step begin with, so that a later one may find
            it cached; None where the text is its own.
        shared_ratio: Share of the prompt that is that common text; 1 is the identical prompt.
        has_question: False where the prompt is nothing but the text that it shares.
        is_fixed_length: Whether generation goes on whatever the model says.
        streams: How many such requests run at once.
        is_chat: Whether it is asked as a conversation, with the model's template.
        has_tools: Whether tools are offered with it.
        has_own_sampling: Whether the server chooses tokens by its own settings instead of at temperature 0.
        seed: Of the sampler.
        is_measured: False for requests that only prepare others.
        details: What else is to be kept with the sample.
    """

    suite: Suite
    case: str
    kind: str
    n_predict: int
    depth_tokens: int | None = None
    prefix: Prefix = Prefix.COLD
    shares: str | None = None
    shared_ratio: float = 1.0
    has_question: bool = True
    is_fixed_length: bool = True
    streams: int = 1
    is_chat: bool = False
    has_tools: bool = False
    has_own_sampling: bool = False
    seed: int = 42
    is_measured: bool = True
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that belong together: one after another, or all at once."""

    requests: tuple[Request, ...]
    is_parallel: bool = False

    @property
    def n_predict(self) -> int:
        """Tokens that are generated in it."""
        return sum(request.n_predict for request in self.requests)


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of one suite in the order in which they are taken.

    `seed` gives the same order and the same texts again, on a server that has not seen them.
    """

    suite: Suite
    seed: int
    warm_up: Step
    steps: tuple[Step, ...]

    def weight(self, step: Step) -> float:
        """How long a step takes, in arbitrary units: a prompt token counts a twentieth."""
        prompt = sum(request.depth_tokens or 0 for request in step.requests)
        return step.n_predict + prompt / 20

    @property
    def requests(self) -> Iterator[Request]:
        """Every request after the warm-up."""
        return (request for step in self.steps for request in step.requests)


WARM_UP_TOKENS = 64
THOUGHT_TOKENS = 2048


def warm_up(suite: Suite, *, n_predict: int = WARM_UP_TOKENS, is_chat: bool = False) -> Step:
    """What a fresh server answers first: it pays for lazy initialisation, and is discarded."""
    request = Request(
        suite=suite, case="warm-up", kind="code_python", n_predict=n_predict, is_chat=is_chat
    )
    return Step((request,))


def shuffled(blocks: Sequence[Sequence[Step]], rng: random.Random) -> tuple[Step, ...]:
    """Steps block by block, in random order within each: drift hits every case alike."""
    steps: list[Step] = []
    for block in blocks:
        mixed = list(block)
        rng.shuffle(mixed)
        steps += mixed
    return tuple(steps)


def with_room_for_thoughts(request: Request) -> Request:
    """The same for a model whose thoughts took all that was meant for the answer."""
    return replace(request, n_predict=request.n_predict + THOUGHT_TOKENS)


def alone(request: Request) -> Step:
    """A step of one request."""
    return Step((request,))


def with_streams(request: Request, n_streams: int) -> Step:
    """A step in which so many of a request run at once."""
    one = replace(request, streams=n_streams)
    return Step((one,) * n_streams, is_parallel=True)
