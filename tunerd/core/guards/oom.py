"""The server dies for want of VRAM again and again: its fit margin is too small.

Source: the write-up of a 12 GB card, which went from 1664 to 1792 to 2048 MiB until it stayed up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.core.failure import FailureKind
from tunerd.core.guards.decision import Act, Decision, Policy

STEPS_MIB = (1664, 1792, 2048)
_STEP_BEYOND_MIB = 256
_LEAST_DEATHS = 2
# Deaths that are further apart are not one loop.
_WINDOW_S = 1800.0
_UNIT_GAVE_UP = 1


@dataclass(frozen=True, slots=True)
class OomRules:
    """`policy`, and how many steps it may take by itself until a person deploys something."""

    policy: Policy
    max_steps: int


@dataclass(frozen=True, slots=True)
class Death:
    """A life of the server that ended by itself, and what its log says of that.

    `has_given_up`: the service manager does not start it any more.
    """

    at_s: float
    kind: FailureKind
    words: str
    has_given_up: bool


@dataclass(frozen=True, slots=True)
class Margin:
    """The deployed margin.

    `fit_mib` is None where the profile leaves it to the engine, or places the model by hand;
    `steps_taken` is how often this guard raised it since a person deployed something; `is_pinned` that
    a person fixed it; `left_alone` says why else it must not be touched.
    """

    fit_mib: int | None
    steps_taken: int
    is_pinned: bool
    left_alone: str | None = None


@dataclass(frozen=True, slots=True)
class OomState:
    """Deaths with the signature in this loop, and what was said of them."""

    deaths_s: tuple[float, ...] = ()
    said: str = ""


def next_margin_mib(fit_mib: int) -> int:
    """The next larger margin; never a smaller one."""
    return next((step for step in STEPS_MIB if step > fit_mib), fit_mib + _STEP_BEYOND_MIB)


def look_at_death(
    state: OomState, death: Death, margin: Margin, rules: OomRules
) -> tuple[OomState, Decision | None]:
    """Take a death into account.

    Args:
        state: Of before.
        death: That happened now.
        margin: As deployed now.
        rules: What may be done.
    """
    if rules.policy is Policy.OFF or death.kind is not FailureKind.OUT_OF_VRAM:
        return state, None
    recent = tuple(at_s for at_s in state.deaths_s if death.at_s - at_s <= _WINDOW_S)
    deaths = (*recent, death.at_s)
    least = _UNIT_GAVE_UP if death.has_given_up else _LEAST_DEATHS
    if len(deaths) < least:
        return OomState(deaths, state.said), None
    decision = _decide(deaths, death, margin, rules)
    if decision.act is Act.RAISE_MARGIN:
        return OomState(), decision  # another generation, and a count of its own
    if decision.text == state.said:
        return OomState(deaths, state.said), None
    return OomState(deaths, decision.text), decision


def _decide(deaths: tuple[float, ...], death: Death, margin: Margin, rules: OomRules) -> Decision:
    times = "once and was given up" if len(deaths) == 1 else f"{len(deaths)} times"
    evidence = f"it died {times} for want of VRAM: {death.words}"
    begin = "the server runs out of VRAM again and again"
    if margin.fit_mib is None:
        text = f"{begin}, and no fit margin is set that could be raised"
        return _advice(text, evidence, "lower serving.ctx_size, or set memory.fit_mib; where the "
                       "model is placed by hand, raise memory.n_cpu_moe")  # fmt: skip
    target_mib = next_margin_mib(margin.fit_mib)
    hint = f"tunerd apply PROFILE --set memory.fit_mib={target_mib}"
    if margin.is_pinned:
        text = f"{begin} with a fit margin of {margin.fit_mib} MiB, which is pinned and so is left alone"
        return _advice(text, evidence, hint)
    if margin.left_alone is not None:
        text = f"{begin} with a fit margin of {margin.fit_mib} MiB, which is left alone: {margin.left_alone}"
        return _advice(text, evidence, hint)
    if margin.steps_taken >= rules.max_steps:
        text = f"{begin} though its fit margin was raised {margin.steps_taken} times, to {margin.fit_mib} MiB"
        return _advice(text, evidence, "`tunerd doctor` says who uses VRAM; lower serving.ctx_size")
    text = f"{begin} with a fit margin of {margin.fit_mib} MiB"
    if rules.policy is Policy.ADVISE:
        return _advice(text, evidence, hint)
    return Decision("oom", Act.RAISE_MARGIN, "warning",
                    f"{text}, which is raised to {target_mib} MiB", evidence,
                    f"`tunerd rollback` undoes it; memory.fit_mib = {target_mib} in the profile keeps it")  # fmt: skip


def _advice(text: str, evidence: str, hint: str) -> Decision:
    return Decision("oom", Act.NOTHING, "error", text, evidence, hint)
