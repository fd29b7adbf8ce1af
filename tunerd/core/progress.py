"""Progress of long actions, as values that a terminal, a log or a stream may show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One step under way.

    `done_ratio` is 0 to 1, None where nothing can be told; `left_s` is the time left [s], None
    where unknown.
    """

    text: str
    step: int | None = None
    steps: int | None = None
    done_ratio: float | None = None
    left_s: float | None = None


ProgressSink = Callable[[Progress], None]


def ignore_progress(_progress: Progress) -> None:
    """Nobody is looking."""
