"""How a comparison speaks with servers: a simulation, a stand-in engine or the real thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tunerd.core.workload import RequestClass

Side = Literal["A", "B"]
A: Side = "A"
B: Side = "B"
SIDES: tuple[Side, Side] = (A, B)


class BootFailed(Exception):
    """A side does not start; the text says why."""


class LifeEnded(Exception):
    """A server ended while it was measured; the text says why."""


class Unusable(Exception):
    """An answer that must not count, though the server lives: throttling, foreign traffic, a wrong clock."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: both sides of a pair are asked the same text, which no server of theirs has seen.

    Attributes:
        block: Names the texts of a pair's round; the same block and class is the same text.
        class_index: Of the class in the workload.
        request_class: The class.
        attempt: 0, or how often its answer was unusable before; another attempt is another text.
    """

    block: str
    class_index: int
    request_class: RequestClass
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request took [ms], by the client's clock; `prefill_ms` until the first token.

    `decode_ms` is the rest.
    """

    wall_ms: float
    prefill_ms: float

    @property
    def decode_ms(self) -> float:
        """Everything after the first token."""
        return max(self.wall_ms - self.prefill_ms, 0.0)


class Life(Protocol):
    """One process of one side, warm: its first request is behind it."""

    def request(self, asked: Asked, /) -> Turn:
        """Ask once.

        Raises:
            LifeEnded: The server is gone.
            Unusable: The answer must not count.
        """
        ...

    def check(self) -> None:
        """Called when all is asked: whether the process was left alone while it was measured.

        Raises:
            Unusable: It answered somebody else too, or is not what it should be.
        """
        ...

    def close(self) -> None:
        """End the process; one that has ended is no error."""
        ...


class Stand(Protocol):
    """Where both sides can be started, one at a time."""

    def boot(self, side: Side, /) -> Life:
        """A fresh process of this side.

        Raises:
            BootFailed: It does not start.
        """
        ...

    def now_s(self) -> float:
        """Seconds, from an arbitrary start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a comparison ends.

    Attributes:
        budget_s: Time for everything but production's own reload [s].
        max_pairs: Pairs at most.
        alpha: Chance of naming a faster side where both are equal.
        tolerance: A difference that does not matter (ratio): once larger ones are excluded, it ends.
        max_rounds: Blocks of prompts that one process answers at most. Where a start takes long
            against a block, it answers several; all processes answer equally many.
    """

    budget_s: float
    max_pairs: int = 60
    alpha: float = 0.05
    tolerance: float = 0.015
    max_rounds: int = 6
