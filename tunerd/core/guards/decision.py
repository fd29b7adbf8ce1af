"""What a guard decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """What a guard may do: act, only say, or nothing at all."""

    ACT = "act"
    ADVISE = "advise"
    OFF = "off"


class Act(StrEnum):
    """What is to be done about it."""

    NOTHING = "nothing"
    RAISE_MARGIN = "raise the fit margin"
    RESTART = "restart"
    ASK = "ask for a tiny generation"


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of state that a person should hear of, with its evidence, and what is done.

    `kind` is stable for scripts. `evidence` is what was seen, in numbers.
    """

    kind: str
    act: Act
    level: str
    text: str
    evidence: str
    hint: str | None = None
