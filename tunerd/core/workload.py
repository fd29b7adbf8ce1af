"""The work that a server is tuned for: classes of requests, and the turn time they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One kind of request in the mix.

    Attributes:
        weight: Its share; weights need not add up to 1.
        kind: What the text is: code, chat, tool, summary, math or creative.
        cached_tokens: Prompt tokens that the server still holds from the turn before [tok].
        new_tokens: Prompt tokens that it has to read [tok].
        n_predict: Tokens it generates, reasoning and answer together [tok].
        concurrency: How many such requests run at once.
    """

    weight: float
    kind: str
    cached_tokens: int
    new_tokens: int
    n_predict: int
    concurrency: int = 1

    @property
    def depth_tokens(self) -> int:
        """Context in use when the last token is generated [tok]."""
        return self.cached_tokens + self.new_tokens + self.n_predict


@dataclass(frozen=True, slots=True)
class Workload:
    """The mix of requests; what is minimised is the turn time expected of it."""

    classes: tuple[RequestClass, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Weights that add up to 1."""
        total = sum(request_class.weight for request_class in self.classes)
        return tuple(request_class.weight / total for request_class in self.classes)

    @property
    def deepest(self) -> int:
        """Index of the class that uses most context."""
        return max(range(len(self.classes)), key=lambda at: self.classes[at].depth_tokens)

    def turn_time_s(self, times_s: Sequence[float]) -> float:
        """Expected wall seconds of one request, from the time of each class."""
        return sum(share * time for share, time in zip(self.shares, times_s, strict=True))
