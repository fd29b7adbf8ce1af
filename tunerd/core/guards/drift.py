"""The server does not do any more what was measured of it: slower, or its drafts are right less often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tunerd.core.guards.decision import Act, Decision, Policy
from tunerd.core.probation import Basis, comparable
from tunerd.core.request_log import LoggedRequest
from tunerd.core.telemetry.reading import Served

DRIFT = "drift"
# Less is no sample of the work; the same as in a probation.
LEAST_TOKENS = 512
_LEAST_DRAFTED = 256
# Three in a row: one long answer can be of any kind, three stretches of them seldom are.
_STRETCHES = 3
# A stretch that was quick enough within this life, before the slow ones, shows a decay.
_LEAST_GOOD = 2
_MOST_STRETCHES = 48
# More than this many MiB beside the server, on top of what was there while it was measured.
_OTHERS_SLACK_MIB = 64
# Up to here depth costs less than what a floor leaves room for, whatever was measured.
_SHALLOW_TOKENS = 1640


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What was measured of exactly this server, and under which conditions.

    `floor_tok_s` is the lowest decode speed that would still be what was measured, over all kinds of
    text and with their spread; `floor_acceptance` the same of drafts, None where nothing was drafted.
    `others_mib` is the VRAM that others held then, `deepest_tokens` the most context that was in use.
    None is not known.
    """

    floor_tok_s: float | None
    floor_acceptance: float | None
    driver_version: str | None = None
    engine_sha256: str | None = None
    others_mib: int | None = None
    deepest_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DriftLook:
    """What happened since the look before, and the conditions now; None is not known.

    `is_alone`: at most one request was under way, for more of them share the speed; `is_idle`: none is.
    """

    at_s: float
    life: str | None
    served: Served | None
    is_alone: bool
    driver_version: str | None = None
    engine_sha256: str | None = None
    others_mib: int | None = None
    is_throttled: bool | None = None
    is_idle: bool = True


@dataclass(frozen=True, slots=True)
class Stretch:
    """Work of at least `LEAST_TOKENS`, in one life."""

    n_predicted: int
    predicted_s: float
    n_drafted: int
    n_accepted: int
    throttled: int = 0
    looks: int = 0

    @property
    def tok_s(self) -> float:
        """Its decode speed [tok/s]."""
        return self.n_predicted / self.predicted_s if self.predicted_s else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of its drafts that were right."""
        return self.n_accepted / self.n_drafted if self.n_drafted >= _LEAST_DRAFTED else None


_EMPTY = Stretch(0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class DriftState:
    """Stretches of this life, oldest first, and the one that grows.

    `is_shared`: several requests were under way, and not all of them have been counted: a server counts
    what a request came to when it ends.
    """

    life: str | None = None
    stretches: tuple[Stretch, ...] = ()
    growing: Stretch = _EMPTY
    has_drifted: bool = False
    is_shared: bool = False


def look(
    state: DriftState, seen: DriftLook, confirmed: Confirmed, policy: Policy
) -> tuple[DriftState, Decision | None]:
    """Take a look into account.

    Args:
        state: Of before.
        seen: Now.
        confirmed: What was measured of this server.
        policy: `act` restarts a server that has decayed; anything else is only said.
    """
    if policy is Policy.OFF:
        return DriftState(), None
    if seen.life != state.life:
        state = DriftState(life=seen.life, has_drifted=state.has_drifted)
    if state.is_shared or not seen.is_alone:
        is_over = seen.is_alone and seen.is_idle and seen.served is not None
        return replace(state, is_shared=not is_over), None
    served = seen.served
    if served is None or not served.n_predicted or not served.predicted_s:
        return state, None
    grown = Stretch(
        state.growing.n_predicted + served.n_predicted,
        state.growing.predicted_s + served.predicted_s,
        state.growing.n_drafted + (served.n_drafted or 0),
        state.growing.n_accepted + (served.n_accepted or 0),
        state.growing.throttled + (seen.is_throttled is True),
        state.growing.looks + 1,
    )
    if grown.n_predicted < LEAST_TOKENS:
        return replace(state, growing=grown), None
    stretches = (*state.stretches, grown)[-_MOST_STRETCHES:]
    state = replace(state, stretches=stretches, growing=_EMPTY)
    return _judge(state, seen, confirmed, policy)


def _judge(
    state: DriftState, seen: DriftLook, confirmed: Confirmed, policy: Policy
) -> tuple[DriftState, Decision | None]:
    last = state.stretches[-_STRETCHES:]
    evidence = _evidence(last, confirmed)
    if len(last) < _STRETCHES:
        return state, None
    if evidence is None:
        if state.has_drifted and not any(_is_off(one, confirmed) for one in last):
            back = Decision("drift-over", Act.NOTHING, "note",
                            "the server does again what was measured of it", _told(last))  # fmt: skip
            return replace(state, has_drifted=False), back
        return state, None
    if state.has_drifted:
        return state, None
    cause, decays = _cause(state, last, seen, confirmed)
    act = Act.RESTART if decays and policy is Policy.ACT else Act.NOTHING
    text = f"the server does not do any more what was measured of it: {cause}"
    hint = (
        "a restart brings its speed back"
        if decays
        else "`tunerd doctor`; `tunerd bench` measures it anew"
    )
    decision = Decision(DRIFT, act, "warning", text, evidence, hint)
    return replace(state, has_drifted=True), decision


def is_of_speed(state: DriftState, confirmed: Confirmed) -> bool:
    """Whether it is the speed that is off, which falls with the depth of a conversation as well."""
    return all(_is_slow(one, confirmed) for one in state.stretches[-_STRETCHES:])


@dataclass(frozen=True, slots=True)
class Alike:
    """Decode speed of requests like those measured; None where there were too few of them.

    `is_known`: it can be told how deep requests were.
    """

    tok_s: float | None
    is_known: bool


def alike(requests: Sequence[LoggedRequest], confirmed: Confirmed) -> Alike:
    """The newest requests that were alone and no deeper than what was measured.

    Args:
        requests: Of this life, oldest first.
        confirmed: What was measured.
    """
    known = [one for one in requests if one.prompt_total_n is not None]
    if confirmed.deepest_tokens is None or not known:
        return Alike(None, is_known=False)
    basis = Basis(0.0, max(confirmed.deepest_tokens, _SHALLOW_TOKENS), 0)
    tokens, seconds = 0, 0.0
    for one in reversed(known):
        more, took_s = comparable([one], basis)
        tokens, seconds = tokens + more, seconds + took_s
        if tokens >= _STRETCHES * LEAST_TOKENS:
            break
    return Alike(tokens / seconds if tokens >= LEAST_TOKENS and seconds else None, is_known=True)


def look_closer(
    state: DriftState, decision: Decision, found: Alike, confirmed: Confirmed
) -> tuple[DriftState, Decision | None]:
    """A decision on speed held against requests that are alike; without any it is none.

    Args:
        state: With which it was decided.
        decision: On the speed by the counters, which know no depth.
        found: The speed of requests that are alike.
        confirmed: What was measured.
    """
    if not found.is_known:
        evidence = f"{decision.evidence}; how deep those requests were is not known"
        return state, replace(decision, act=Act.NOTHING, evidence=evidence)
    floor = confirmed.floor_tok_s
    if found.tok_s is None or floor is None or found.tok_s >= floor:
        return DriftState(life=state.life), None
    evidence = f"{decision.evidence}; requests no deeper than those: {found.tok_s:.1f} tok/s"
    return state, replace(decision, evidence=evidence)


def _is_slow(one: Stretch, confirmed: Confirmed) -> bool:
    return confirmed.floor_tok_s is not None and one.tok_s < confirmed.floor_tok_s


def _drafts_badly(one: Stretch, confirmed: Confirmed) -> bool:
    floor = confirmed.floor_acceptance
    return floor is not None and one.acceptance is not None and one.acceptance < floor


def _is_off(one: Stretch, confirmed: Confirmed) -> bool:
    return _is_slow(one, confirmed) or _drafts_badly(one, confirmed)


def _evidence(last: Sequence[Stretch], confirmed: Confirmed) -> str | None:
    """What shows it; None where the last stretches do not."""
    if all(_is_slow(one, confirmed) for one in last):
        return f"{_told(last)} in a row, at least {confirmed.floor_tok_s:.1f} were confirmed"
    if all(_drafts_badly(one, confirmed) for one in last):
        shown = ", ".join(f"{one.acceptance:.2f}" for one in last)
        return f"{shown} of the drafts accepted, at least {confirmed.floor_acceptance:.2f} were confirmed"
    return None


def _told(last: Sequence[Stretch]) -> str:
    return f"{', '.join(f'{one.tok_s:.1f}' for one in last)} tok/s over {LEAST_TOKENS} tokens and more each"


def _cause(
    state: DriftState, last: Sequence[Stretch], seen: DriftLook, confirmed: Confirmed
) -> tuple[str, bool]:
    """The likely cause, the surest first, and whether it is a decay that a restart ends."""
    if _differ(confirmed.driver_version, seen.driver_version):
        return f"the driver was {confirmed.driver_version} and is {seen.driver_version}", False
    if _differ(confirmed.engine_sha256, seen.engine_sha256):
        return "the engine is another build than the one that was measured", False
    throttled, looks = sum(one.throttled for one in last), sum(one.looks for one in last)
    if throttled * 2 > looks:
        return f"the card was throttled in {throttled} of {looks} looks", False
    if confirmed.others_mib is not None and seen.others_mib is not None:
        more_mib = seen.others_mib - confirmed.others_mib
        if more_mib > _OTHERS_SLACK_MIB:
            return f"others hold {seen.others_mib} MiB of VRAM, {more_mib} more than then", False
    before = state.stretches[:-_STRETCHES]
    good = [one for one in before if not _is_off(one, confirmed)]
    falls = all(late.tok_s <= early.tok_s * 1.02 for early, late in pairwise(state.stretches[-2:]))
    if len(good) >= _LEAST_GOOD and falls:
        best = max(one.tok_s for one in good)
        return f"it decays within its life, from {best:.1f} to {last[-1].tok_s:.1f} tok/s", True
    return "nothing that is watched tells why", False


def _differ(then: str | None, now: str | None) -> bool:
    return then is not None and now is not None and then != now
