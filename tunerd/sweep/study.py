"""What boxes of one class tell each other: laws, arms with their gain over a control, and who tries what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tunerd.profile.arm import Arm
from tunerd.sweep.laws import (
    N_PROMPT_TERMS,
    N_STEP_TERMS,
    Acceptance,
    Array,
    Costs,
    Fitted,
    n_parameters,
)

# By how much boxes of one class differ in what an arm gains over another (log ratio): by one amount for all arms, as
# speculation pays more on one of them, and for each arm. Simulated boxes: 0.05 to 0.13 and 0.01 to 0.03
# (docs/benchmarks.md, "A shared study").
LEVEL_SD = 0.1
ARM_SD = 0.03


@dataclass(frozen=True, slots=True)
class Known:
    """The laws of one family as they are known from elsewhere; None where nobody told."""

    acceptance: Acceptance | None = None
    step: Array | None = None
    prompt: Array | None = None

    @property
    def relative(self) -> tuple[Fitted | None, Fitted | None]:
        """Steps and prompts as a prior: how sure others were of them did not travel."""
        step, prompt = (
            None if one is None else Fitted(one, _TOLD_SHARE * one)
            for one in (self.step, self.prompt)
        )
        return step, prompt


@dataclass(frozen=True, slots=True)
class Law:
    """The laws of one family on one box, as they travel: coefficients of steps and prompts [ms], and the drafter's."""

    step: tuple[float, ...]
    prompt: tuple[float, ...]
    acceptance: tuple[float, ...] = ()
    first_is_free: bool = False
    is_lookup: bool = False

    def is_sound(self, n_texts: int) -> bool:
        """Whether these can be laws for so many classes of text."""
        lengths = (len(self.step), len(self.prompt)) == (N_STEP_TERMS, N_PROMPT_TERMS)
        values = np.array([*self.step, *self.prompt, *self.acceptance])
        return (
            lengths
            and len(self.acceptance) in {0, n_parameters(n_texts)}
            and bool(np.isfinite(values).all() and (np.abs(values) < _LARGEST).all())
            and min(*self.step, *self.prompt) >= 0.0
        )


_TOLD_SHARE = 0.1
_LARGEST = 1e9  # of a coefficient that is one
# How far the drafter of one box may be from that of others: seen between them, but never less or more.
_LEAST_SPREAD, _MOST_SPREAD = 0.1, 0.3


def known_of(
    laws: Iterable[tuple[tuple[str, str], Law]], n_texts: int
) -> dict[tuple[str, str], Known]:
    """What the laws of several boxes say together: their mean, and their spread."""
    of_family: dict[tuple[str, str], list[Law]] = defaultdict(list)
    for family, law in laws:
        if law.is_sound(n_texts):
            of_family[family].append(law)
    return {family: _together(found, n_texts) for family, found in of_family.items()}


def _together(laws: Sequence[Law], n_texts: int) -> Known:
    step, prompt = (
        np.mean(one, axis=0) for one in ([law.step for law in laws], [law.prompt for law in laws])
    )
    drafters = [law for law in laws if law.acceptance]
    if not drafters:
        return Known(None, step, prompt)
    parameters = np.array([law.acceptance for law in drafters])
    spread = float(np.clip(parameters.std(axis=0).max(), _LEAST_SPREAD, _MOST_SPREAD))
    mean, first = parameters.mean(axis=0), drafters[0]
    drafter = Acceptance(mean, n_texts, first.first_is_free, first.is_lookup, spread)
    return Known(drafter, step, prompt)


def law_of(acceptance: Acceptance | None, costs: Costs) -> Law | None:
    """What a box tells of a family; None before it knows what steps and prompts cost."""
    step, prompt = tuple(map(float, costs.step)), tuple(map(float, costs.prompt))
    if acceptance is None:
        return Law(step, prompt)
    parameters = tuple(map(float, acceptance.parameters))
    return Law(step, prompt, parameters, acceptance.first_is_free, acceptance.is_lookup)


@dataclass(frozen=True, slots=True)
class Told:
    """One process of another box: log of its turn time over that of the arm which served there."""

    arm: Arm
    control: Arm
    log_ratio: float
    box: str = ""


class Study:
    """Where boxes of a class meet; as it is, a box that has nobody to ask.

    Whatever fails there is no reason to end a night: it says nothing then.
    """

    seeds: Sequence[Arm] = ()
    """What won on other boxes."""

    def __init__(self, known: Mapping[tuple[str, str], Known] = MappingProxyType({})) -> None:
        self.known = known
        """Laws by family, from before this night."""

    def news(self) -> Sequence[Told]:
        """What others told since it was asked last."""
        return ()

    def claim(self, arm: Arm) -> bool:
        """Whether this box may try an arm; not while another does."""
        del arm
        return True

    def tell(self, told: Told) -> None:
        """One process of this box."""

    def end(self, laws: Mapping[tuple[str, str], Law], winner: Arm | None) -> None:
        """What this box has learned when its night ends, and what it proved."""


Alone = Study
