"""Which night comes next: openings of the window, less the one that was had and those to be skipped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.window import Span, Window, spans

# An opening that is older when it is first seen was missed: the machine slept, or was off.
_ON_TIME_S = 600.0


class Missed(StrEnum):
    """What becomes of a night whose beginning was missed."""

    LATE = "late"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered: when the opening of the last night began, and of the one to be skipped."""

    last_begin_s: float | None = None
    skip_begin_s: float | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """An opening of the window, and what is to become of it."""

    span: Span
    is_skipped: bool = False

    def is_due(self, now_s: float) -> bool:
        """Whether a night may begin now."""
        return not self.is_skipped and self.span.begin_s <= now_s < self.span.end_s


def openings(
    window: Window, memory: Memory, now_s: float, *, missed: Missed, least_s: float, most: int = 1
) -> tuple[Opening, ...]:
    """The next openings in which there is or would be a night, skipped ones among them.

    Args:
        window: When.
        memory: Of nights before.
        now_s: Seconds since the epoch.
        missed: What becomes of one whose beginning was missed.
        least_s: What is left of one that is under way must be longer than this [s].
        most: How many.
    """
    found: list[Opening] = []
    for span in spans(window, now_s):
        if len(found) >= most:
            break
        if _is_same(span.begin_s, memory.last_begin_s):
            continue
        if span.end_s - max(span.begin_s, now_s) < least_s:
            continue
        if missed is Missed.SKIP and now_s - span.begin_s > _ON_TIME_S:
            continue
        found.append(Opening(span, is_skipped=_is_same(span.begin_s, memory.skip_begin_s)))
    return tuple(found)


def _is_same(one_s: float, other_s: float | None) -> bool:
    """The same opening, though the clock's zone was told otherwise by some minutes meanwhile."""
    return other_s is not None and abs(one_s - other_s) < _ON_TIME_S
