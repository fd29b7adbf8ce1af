"""What boxes of one class tell each other: laws, arms with their gain over a control, and who tries what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tunerd.profile.arm import Arm
from tunerd.sweep.laws import Acceptance, Costs, MemoryLaw

# By how much boxes of one class differ in what an arm gains over another (log ratio): by one amount for all arms, as
# speculation pays more on one of them, and for each arm. Simulated boxes: 0.05 to 0.13 and 0.01 to 0.03
# (docs/benchmarks.md, "A shared study").
LEVEL_SD = 0.1
ARM_SD = 0.03


@dataclass(frozen=True, slots=True)
class Known:
    """The laws of one family as other boxes fitted them; None where none told."""

    acceptance: Acceptance | None = None
    costs: Costs | None = None
    memory: MemoryLaw | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """One process of another box: log of its turn time over that of the arm which served there."""

    arm: Arm
    control: Arm
    log_ratio: float
    box: str = ""


class Study(Protocol):
    """Where boxes of a class meet. Whatever fails there is no reason to end a night: it says nothing then."""

    @property
    def known(self) -> Mapping[tuple[str, str], Known]:
        """Laws by family, from nights before."""
        ...

    def news(self) -> Sequence[Told]:
        """What others told since it was asked last."""
        ...

    def claim(self, arm: Arm) -> bool:
        """Whether this box may try an arm; not while another does."""
        ...

    def tell(self, told: Told) -> None:
        """One process of this box."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A box that has nobody to ask."""

    known: Mapping[tuple[str, str], Known] = field(default_factory=dict)

    def news(self) -> Sequence[Told]:
        """Nothing."""
        return ()

    def claim(self, arm: Arm) -> bool:
        """Nobody else tries it."""
        del arm
        return True

    def tell(self, told: Told) -> None:
        """Nobody listens."""
