"""The server says that it is well, and generates nothing: asked for a word when nobody else asks.

Source: ggml-org/llama.cpp#13281, #27102, #27330: health 200 while no request is ever answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tunerd.core.guards.decision import Act, Decision, Policy
from tunerd.core.telemetry.history import Event

_HOUR_S = 3600.0
# One answer that is late may be the machine's fault.
_LEAST_FAILURES = 2
_ASK_AGAIN_S = 15.0
# A process that works on something uses more; one that waits for a lock that never comes does not.
_IDLE_CORES = 0.05
_SILENT_S = 60.0
# What is told of a restart, and of having given up.
_RESTARTED, _GAVE_UP = "warning", "error"


@dataclass(frozen=True, slots=True)
class HangRules:
    """`policy`; how long nothing must have been generated before it is asked; restarts in an hour."""

    policy: Policy
    every_s: float
    restarts_per_hour: int


@dataclass(frozen=True, slots=True)
class HangLook:
    """The server at one moment.

    `is_busy` is None where its slots cannot be told, `cores` how many processors it kept busy since the
    look before. `n_predicted` is its counter, which shows that it generates.
    """

    at_s: float
    life: str | None
    is_ready: bool
    is_busy: bool | None
    n_predicted: int | None
    cores: float | None


@dataclass(frozen=True, slots=True)
class HangState:
    """Since when nothing was generated, how many questions went unanswered, and past restarts."""

    life: str | None = None
    n_predicted: int | None = None
    good_s: float | None = None
    silent_since_s: float | None = None
    failures: int = 0
    asked_s: float | None = None
    restarts_s: tuple[float, ...] = ()
    has_given_up: bool = False


def recalled(told: Iterable[Event], now_s: float) -> HangState:
    """The state of a daemon that takes over: the hour's restarts count, whoever made them.

    Args:
        told: What daemons before it told, in any order.
        now_s: Seconds since the epoch.
    """
    recent = sorted(
        (event for event in told if event.kind == "hang" and 0 <= now_s - event.at_s < _HOUR_S),
        key=lambda event: event.at_s,
    )
    restarts_s = tuple(event.at_s for event in recent if event.level == _RESTARTED)
    return HangState(
        restarts_s=restarts_s, has_given_up=bool(recent) and recent[-1].level == _GAVE_UP
    )


def look(state: HangState, seen: HangLook, rules: HangRules) -> tuple[HangState, bool]:
    """The state after a look, and whether to ask for a tiny generation now."""
    if rules.policy is Policy.OFF or not seen.is_ready:
        return HangState(restarts_s=state.restarts_s, has_given_up=state.has_given_up), False
    has_generated = (
        seen.n_predicted is not None
        and state.n_predicted is not None
        and seen.n_predicted > state.n_predicted
    )
    if seen.life != state.life:
        state = HangState(seen.life, seen.n_predicted, seen.at_s, restarts_s=state.restarts_s,
                          has_given_up=state.has_given_up)  # fmt: skip
    elif has_generated or state.good_s is None:
        state = replace(state, good_s=seen.at_s, failures=0, has_given_up=False)
    state = _before_now(replace(state, n_predicted=seen.n_predicted), seen.at_s)
    state = replace(state, silent_since_s=_silent_since(state, seen))
    return state, _is_due(state, seen, rules)


def _before_now(state: HangState, at_s: float) -> HangState:
    """Times that a clock was set back from would keep it from asking until they come again."""
    if max(state.good_s or 0.0, state.asked_s or 0.0, state.silent_since_s or 0.0) <= at_s:
        return state
    return replace(state, good_s=at_s, asked_s=None, silent_since_s=None)


def _silent_since(state: HangState, seen: HangLook) -> float | None:
    """Since when it has said nothing of its slots while it does nothing either."""
    if seen.is_busy is not None or seen.cores is None or seen.cores > _IDLE_CORES:
        return None
    return seen.at_s if state.silent_since_s is None else state.silent_since_s


def _is_due(state: HangState, seen: HangLook, rules: HangRules) -> bool:
    if state.failures:
        # What was told of already is asked seldom: each question waits in a server that hangs.
        again_s = rules.every_s if state.has_given_up else min(_ASK_AGAIN_S, rules.every_s)
        return seen.at_s - (state.asked_s or 0.0) >= again_s and _does_nothing(seen)
    is_stuck = state.silent_since_s is not None and seen.at_s - state.silent_since_s >= _SILENT_S
    if seen.is_busy is not False and not is_stuck:
        return False
    newest_s = max(state.good_s or 0.0, state.asked_s or 0.0)
    return seen.at_s - newest_s >= rules.every_s


def _does_nothing(seen: HangLook) -> bool:
    """Whether it rests, or is only busy with the question that it did not answer.

    Where it computes, somebody else may have begun to wait for an answer: a restart would cut that.
    """
    if seen.is_busy is False:
        return True
    return seen.cores is not None and seen.cores <= _IDLE_CORES


def answered(state: HangState, at_s: float) -> HangState:
    """It generated."""
    return replace(state, good_s=at_s, asked_s=at_s, failures=0, has_given_up=False)


def refused(state: HangState, at_s: float) -> HangState:
    """It said that it does not do that: no sign of a hang, and none of the contrary."""
    return replace(state, asked_s=at_s, failures=0)


def within_an_hour(restarts_s: Iterable[float], at_s: float) -> tuple[float, ...]:
    """Those of the last hour; a time to come is one that a clock was set back from."""
    return tuple(one for one in restarts_s if 0 <= at_s - one < _HOUR_S)


def unanswered(
    state: HangState, at_s: float, problem: str, rules: HangRules
) -> tuple[HangState, Decision | None]:
    """It did not; a decision when that happened often enough."""
    failures = state.failures + 1
    state = replace(state, failures=failures, asked_s=at_s)
    if failures < _LEAST_FAILURES:
        return state, None
    evidence = f"health is ok, nobody else asks, and {failures} tiny generations failed: {problem}"
    recent = within_an_hour(state.restarts_s, at_s)
    text = "the server hangs"
    if rules.policy is Policy.ADVISE or len(recent) >= rules.restarts_per_hour:
        if state.has_given_up:
            return state, None
        if rules.policy is Policy.ACT:
            text += f" again, though it was restarted {len(recent)} times within the hour; it is left alone now"
        hint = "`systemctl restart` it; `journalctl -k` may tell of the card"
        return replace(state, has_given_up=True), Decision(
            "hang", Act.NOTHING, _GAVE_UP, text, evidence, hint
        )
    after = HangState(restarts_s=(*recent, at_s))
    return after, Decision("hang", Act.RESTART, _RESTARTED, f"{text}, and is restarted", evidence)
