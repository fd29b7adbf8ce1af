"""The guards' judgement: deaths, out of memory, hangs, drift, upgrades. Readings in, decisions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

from tunerd.engine.health import FailureKind
from tunerd.engine.log import LoggedRequest, Tally
from tunerd.measure.answer import Sample
from tunerd.measure.evidence import Fingerprint
from tunerd.watch.figures import Event, Reading, Served
from tunerd.watch.judgement import IDLE_CORES, LEAST_ANSWER, Basis, comparable


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


DRIFT = "drift"
# Less is no sample of the work: one long answer could be of any kind.
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
class Stretch:
    """Work of at least `LEAST_TOKENS`, in one life; `before` was counted when it began, at `since_s`."""

    n_predicted: int
    predicted_s: float
    n_drafted: int
    n_accepted: int
    throttled: int = 0
    looks: int = 0
    since_s: float = 0.0
    before: Tally | None = None

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
    what a request came to when it ends. `held_since_s`: since when what was generated is not told yet.
    """

    life: str | None = None
    stretches: tuple[Stretch, ...] = ()
    growing: Stretch = _EMPTY
    has_drifted: bool = False
    is_shared: bool = False
    held_since_s: float | None = None


def look_for_drift(
    state: DriftState,
    seen: Reading,
    confirmed: Confirmed,
    policy: Policy,
    engine_sha256: str | None = None,
) -> tuple[DriftState, Decision | None]:
    """Take a look into account.

    Args:
        state: Of before.
        seen: Now. Of more than one request under way nothing counts, for they share the speed.
        confirmed: What was measured of this server.
        policy: `act` restarts a server that has decayed; anything else is only said.
        engine_sha256: Of its build now; None is not known.
    """
    if policy is Policy.OFF:
        return DriftState(), None
    life, served, n_at_work = seen.engine.life, seen.engine.served, seen.engine.n_at_work
    if life != state.life:
        state = DriftState(life=life, has_drifted=state.has_drifted)
    if state.is_shared or n_at_work > 1:
        counted = None if served is None else served.n_predicted
        return replace(state, is_shared=n_at_work > 0 or counted is None), None
    held_since_s = state.held_since_s
    if served is not None and served.n_predicted is None:
        since_s = seen.at_s - served.seconds if held_since_s is None else held_since_s
        return replace(state, held_since_s=since_s), None
    state = replace(state, held_since_s=None)
    if served is None or not served.n_predicted or not served.predicted_s:
        return state, None
    growing = state.growing if state.growing.looks else _begun(seen, served, held_since_s)
    grown = replace(
        growing,
        n_predicted=growing.n_predicted + served.n_predicted,
        predicted_s=growing.predicted_s + served.predicted_s,
        n_drafted=growing.n_drafted + (served.n_drafted or 0),
        n_accepted=growing.n_accepted + (served.n_accepted or 0),
        throttled=growing.throttled + (seen.is_throttled is True),
        looks=growing.looks + 1,
    )
    if grown.n_predicted < LEAST_TOKENS:
        return replace(state, growing=grown), None
    stretches = (*state.stretches, grown)[-_MOST_STRETCHES:]
    state = replace(state, stretches=stretches, growing=_EMPTY)
    return _judge(state, seen, confirmed, policy, engine_sha256)


def _begun(seen: Reading, served: Served, held_since_s: float | None) -> Stretch:
    """A stretch that begins at the look before this one, or where the counters were told last."""
    counters, n, seconds = seen.engine.counters, served.n_predicted or 0, served.predicted_s or 0.0
    now = None if counters is None else counters.generated
    before = None if now is None else Tally(now.n - n, now.seconds - seconds)
    since_s = seen.at_s - served.seconds if held_since_s is None else held_since_s
    return replace(_EMPTY, since_s=since_s, before=before)


def last_stretches_began(state: DriftState) -> Stretch:
    """The first of those that were judged."""
    return state.stretches[-_STRETCHES:][0]


def _judge(
    state: DriftState,
    seen: Reading,
    confirmed: Confirmed,
    policy: Policy,
    engine_sha256: str | None,
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
    cause, decays = _cause(state, last, seen, confirmed, engine_sha256)
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
    state: DriftState,
    decision: Decision,
    found: Alike,
    confirmed: Confirmed,
    *,
    demands_log: bool = False,
) -> tuple[DriftState, Decision | None]:
    """A decision on speed held against requests that are alike; without any it is none.

    Args:
        state: With which it was decided.
        decision: On the speed by the counters, which know no depth.
        found: The speed of requests that are alike.
        confirmed: What was measured.
        demands_log: What cannot be borne out by the log is no decision at all.
    """
    if not found.is_known and demands_log:
        return DriftState(life=state.life), None
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
    state: DriftState,
    last: Sequence[Stretch],
    seen: Reading,
    confirmed: Confirmed,
    engine_sha256: str | None,
) -> tuple[str, bool]:
    """The likely cause, the surest first, and whether it is a decay that a restart ends."""
    if _differ(confirmed.driver_version, seen.driver_version):
        return f"the driver was {confirmed.driver_version} and is {seen.driver_version}", False
    if _differ(confirmed.engine_sha256, engine_sha256):
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


_HOUR_S = 3600.0
# One answer that is late may be the machine's fault.
_LEAST_FAILURES = 2
_ASK_AGAIN_S = 15.0
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


def hang_recalled(told: Iterable[Event], now_s: float) -> HangState:
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


def look_for_hang(
    state: HangState, seen: Reading, cores: float | None, rules: HangRules
) -> tuple[HangState, bool]:
    """The state after a look, and whether to ask for a tiny generation now.

    Args:
        state: Of before.
        seen: Now; its counter of tokens shows that it generates.
        cores: How many processors it kept busy since the look before.
        rules: How often it may be asked.
    """
    engine = seen.engine
    if rules.policy is Policy.OFF or engine.is_ready is not True or engine.is_asleep is not None:
        return HangState(restarts_s=state.restarts_s, has_given_up=state.has_given_up), False
    n_predicted = None if engine.counters is None else engine.counters.n_predicted
    before = state.n_predicted
    has_generated = n_predicted is not None and before is not None and n_predicted > before
    if engine.life != state.life:
        state = HangState(engine.life, n_predicted, seen.at_s, restarts_s=state.restarts_s,
                          has_given_up=state.has_given_up)  # fmt: skip
    elif has_generated or state.good_s is None:
        state = replace(state, good_s=seen.at_s, failures=0, has_given_up=False)
    state = _before_now(replace(state, n_predicted=n_predicted), seen.at_s)
    is_silent = engine.is_busy is None and cores is not None and cores <= IDLE_CORES
    since_s = seen.at_s if state.silent_since_s is None else state.silent_since_s
    state = replace(state, silent_since_s=since_s if is_silent else None)
    return state, _is_due(state, seen, cores, rules)


def _before_now(state: HangState, at_s: float) -> HangState:
    """Times that a clock was set back from would keep it from asking until they come again."""
    if max(state.good_s or 0.0, state.asked_s or 0.0, state.silent_since_s or 0.0) <= at_s:
        return state
    return replace(state, good_s=at_s, asked_s=None, silent_since_s=None)


def _is_due(state: HangState, seen: Reading, cores: float | None, rules: HangRules) -> bool:
    is_busy = seen.engine.is_busy
    if state.failures:
        # What was told of already is asked seldom: each question waits in a server that hangs.
        again_s = rules.every_s if state.has_given_up else min(_ASK_AGAIN_S, rules.every_s)
        # It rests, or is only busy with the question that it did not answer. Where it computes, somebody
        # else may have begun to wait for an answer: a restart would cut that.
        does_nothing = is_busy is False or (cores is not None and cores <= IDLE_CORES)
        return seen.at_s - (state.asked_s or 0.0) >= again_s and does_nothing
    is_stuck = state.silent_since_s is not None and seen.at_s - state.silent_since_s >= _SILENT_S
    if is_busy is not False and not is_stuck:
        return False
    newest_s = max(state.good_s or 0.0, state.asked_s or 0.0)
    return seen.at_s - newest_s >= rules.every_s


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


_LEAST_SAMPLES = 3
# Between restarts the same server differs by some 3 %; a figure may differ by three times that.
_BETWEEN_LIVES = 0.10
# Of single answers: half the width of a 99 % interval for their mean, few as they are.
_WIDTH = 3.0


def confirmed_by(samples: Iterable[Sample], then: Fingerprint) -> Confirmed | None:
    """The floors of speed and acceptance; None where too little was measured.

    The floor is of the slowest kind of text: nobody knows what kinds live requests are of.

    Args:
        samples: Of one command line on one build and driver.
        then: Their fingerprint.
    """
    known = usable(samples)
    floor = _floor(known, _speed, relative=True)
    if floor is None:
        return None
    return Confirmed(
        floor_tok_s=floor,
        floor_acceptance=_floor(known, _acceptance, relative=False),
        driver_version=then.driver_version,
        engine_sha256=then.engine_sha256,
        deepest_tokens=max(depth_of(one) for one in known),
    )


def usable(samples: Iterable[Sample]) -> list[Sample]:
    """Those of single requests that were answered at some length."""
    return [
        one
        for one in samples
        if one.is_usable and one.concurrency == 1 and (one.n_predicted or 0) >= LEAST_ANSWER
    ]


def slowest_tok_s(samples: Iterable[Sample]) -> float | None:
    """The lowest mean decode speed over the kinds of text that were asked often enough."""
    kinds = _by_kind(usable(samples), _speed)
    return min((fmean(values) for values in kinds), default=None)


def depth_of(sample: Sample) -> int:
    """Context in use at the end of an answer [tok]; that which is known."""
    timings = sample.timings
    if timings is None:
        return 0
    cached = timings.cache_n or sample.details.get("cached") or 0
    return (timings.prompt_n or 0) + int(cached) + (timings.predicted_n or 0)


def _floor(
    samples: Sequence[Sample], take: Callable[[Sample], float | None], *, relative: bool
) -> float | None:
    """The lowest lower end over the kinds of text that were asked often enough."""
    ends = (_lower_end(values, relative=relative) for values in _by_kind(samples, take))
    return min(ends, default=None)


def _by_kind(
    samples: Sequence[Sample], take: Callable[[Sample], float | None]
) -> list[list[float]]:
    """Figures of each kind of text that was asked often enough."""
    kinds: dict[str, list[float]] = {}
    for one in samples:
        value = take(one)
        if value is not None:
            kinds.setdefault(one.kind, []).append(value)
    return [values for values in kinds.values() if len(values) >= _LEAST_SAMPLES]


def _lower_end(values: Sequence[float], *, relative: bool) -> float:
    mean = fmean(values)
    width = _WIDTH * stdev(values) / sqrt(len(values))
    slack = mean * _BETWEEN_LIVES if relative else _BETWEEN_LIVES
    return max(0.0, mean - width - slack)


def _speed(sample: Sample) -> float | None:
    return None if sample.timings is None else sample.timings.decode_tok_s


def _acceptance(sample: Sample) -> float | None:
    timings = sample.timings
    if timings is None or not timings.draft_n or timings.draft_n_accepted is None:
        return None
    return timings.draft_n_accepted / timings.draft_n


_STEPS_MIB = (1664, 1792, 2048)
_STEP_BEYOND_MIB = 256
_STEP_MIB = 128
_LEAST_DEATHS = 2
# Deaths that are further apart are not one loop.
_WINDOW_S = 1800.0
_UNIT_GAVE_UP = 1
# What a fit leaves free is seldom less than its margin, for it goes by whole layers.
_SHORT_RATIO = 2


@dataclass(frozen=True, slots=True)
class OomRules:
    """`policy`, and how many steps it may take by itself until a person deploys something."""

    policy: Policy
    max_steps: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What looks saw of one life: the least VRAM that was free, and whether it ever served."""

    life: str | None = None
    free_mib: int | None = None
    has_served: bool = False

    def then(self, life: str | None, free_mib: int | None, *, is_ready: bool) -> Seen:
        """After one more look, at a server that runs."""
        before = self if self.life == life else Seen(life)
        known = [mib for mib in (before.free_mib, free_mib) if mib is not None]
        return Seen(life, min(known, default=None), before.has_served or is_ready)


@dataclass(frozen=True, slots=True)
class Death:
    """A life of the server that ended by itself, and what the end of its log says of that.

    `has_given_up`: the service manager does not start it any more.
    """

    at_s: float
    kind: FailureKind
    words: str
    has_given_up: bool
    seen: Seen = Seen()


@dataclass(frozen=True, slots=True)
class Margin:
    """The deployed margin.

    `fit_mib` is None where the profile leaves it to the engine, or places the model by hand;
    `steps_taken` is how often this guard raised it since a person deployed something; `is_pinned` that
    a person fixed it; `left_alone` says why else it must not be touched. `counts_less`: it is ik's.
    """

    fit_mib: int | None
    steps_taken: int
    is_pinned: bool
    left_alone: str | None = None
    counts_less: bool = False

    @property
    def next_mib(self) -> int | None:
        """The next larger one."""
        fit_mib = self.fit_mib
        if fit_mib is None:
            return None
        if not self.counts_less:
            return fit_mib + _STEP_MIB
        return next((step for step in _STEPS_MIB if step > fit_mib), fit_mib + _STEP_BEYOND_MIB)


@dataclass(frozen=True, slots=True)
class OomState:
    """Deaths with the signature in this loop, and what was said of them."""

    deaths_s: tuple[float, ...] = ()
    said: str = ""


def look_at_oom(
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
    recent = tuple(at_s for at_s in state.deaths_s if 0 <= death.at_s - at_s <= _WINDOW_S)
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
    target_mib = margin.next_mib
    if target_mib is None:
        text = f"{begin}, and no fit margin is set that could be raised"
        return _advice(text, evidence, "lower serving.ctx_size, or set memory.fit_mib; where the "
                       "model is placed by hand, raise memory.n_cpu_moe")  # fmt: skip
    hint = f"tunerd apply PROFILE --set memory.fit_mib={target_mib}"
    if margin.is_pinned:
        text = f"{begin} with a fit margin of {margin.fit_mib} MiB, which is pinned and so is left alone"
        return _advice(text, evidence, hint)
    left_alone = margin.left_alone or _not_seen(death.seen, margin)
    if left_alone is not None:
        text = (
            f"{begin} with a fit margin of {margin.fit_mib} MiB, which is left alone: {left_alone}"
        )
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


def _not_seen(seen: Seen, margin: Margin) -> str | None:
    """Why its log alone is no reason: whoever may ask it something may write lines of that.

    In a life that never served nobody could.
    """
    if not seen.has_served:
        return None
    if seen.free_mib is not None and seen.free_mib < _SHORT_RATIO * (margin.fit_mib or 0):
        return None
    return "its log says so, and no look saw VRAM run short"


def _advice(text: str, evidence: str, hint: str) -> Decision:
    return Decision("oom", Act.NOTHING, "error", text, evidence, hint)


DIES, FAILED, BACK = "server-dies", "server-failed", "server-back"
# Deaths that are further apart are not one loop; as long without one, and it is over.


@dataclass(frozen=True, slots=True)
class DeathsState:
    """When it died lately, and what was told last; empty where all is well."""

    deaths_s: tuple[float, ...] = ()
    said: str = ""


def deaths_recalled(told: Iterable[Event]) -> DeathsState:
    """The state of a daemon that takes over.

    Args:
        told: What daemons before it told, newest first.
    """
    newest = next((event for event in told if event.kind in {DIES, FAILED, BACK}), None)
    if newest is None or newest.kind == BACK:
        return DeathsState()
    return DeathsState((newest.at_s,), newest.kind)


def look_at_deaths(state: DeathsState, death: Death) -> tuple[DeathsState, Decision | None]:
    """Take a death into account."""
    recent = tuple(at_s for at_s in state.deaths_s if 0 <= death.at_s - at_s <= _WINDOW_S)
    state = replace(state, deaths_s=(*recent, death.at_s))
    evidence = f"{death.kind}: {death.words}" if death.words else str(death.kind)
    hint = "`tunerd doctor`; `tunerd rollback` goes back to what served before"
    if death.has_given_up:
        if state.said == FAILED:
            return state, None
        text = "the server died, and nothing starts it any more"
        return replace(state, said=FAILED), Decision(
            FAILED, Act.NOTHING, "error", text, evidence, hint
        )
    if len(state.deaths_s) < _LEAST_DEATHS or state.said:
        return state, None
    text = f"the server died {len(state.deaths_s)} times within half an hour, and is started again"
    return replace(state, said=DIES), Decision(DIES, Act.NOTHING, "warning", text, evidence, hint)


def look_for_deaths(
    state: DeathsState, at_s: float, *, is_ready: bool
) -> tuple[DeathsState, Decision | None]:
    """Take a look into account: that it serves again is told once."""
    if not state.said or not is_ready:
        return state, None
    last_s = max(state.deaths_s, default=at_s)
    if state.said == DIES and 0 <= at_s - last_s <= _WINDOW_S:
        return state, None
    text = "the server serves again" if state.said == FAILED else "the server stays up again"
    return DeathsState(), Decision(BACK, Act.NOTHING, "note", text, "it says that it is ready")


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """What the next start of the server would run: a stamp of its files, and the driver's version.

    `files` is None while they cannot be read, as in the middle of an upgrade.
    """

    files: tuple[tuple[str, int, int], ...] | None
    driver_version: str | None


@dataclass(frozen=True, slots=True)
class UpgradeState:
    """What stood when it was last looked into; None before the first look.

    `settling` is a change that was seen once: files of an upgrade arrive one by one.
    """

    known: EngineSeen | None = None
    settling: EngineSeen | None = None


@dataclass(frozen=True, slots=True)
class Replanned:
    """The deployed profile planned anew on what stands now.

    `refusals` are why it could not be started as it is, such as a flag that was removed;
    `identity_changed` whether the program or a library has other content, None if that is not known.
    `identity_before` and `identity_now` are the builds' short hashes. `kept` is the name of a copy of
    the build before, None where there is none, `engine` that of the build now. `compared` is what a
    comparison of the two came to, in the run of that number.
    """

    identity_changed: bool | None
    refusals: tuple[str, ...]
    driver_before: str | None
    driver_now: str | None
    identity_before: str | None = None
    identity_now: str | None = None
    kept: str | None = None
    engine: str | None = None
    compared: str | None = None
    run: int | None = None


def look_for_upgrade(
    state: UpgradeState, seen: EngineSeen, policy: Policy
) -> tuple[UpgradeState, bool]:
    """The state after a look, and whether to plan the deployed profile anew now.

    A change counts when two looks in a row see the same.
    """
    if policy is Policy.OFF or seen.files is None:
        return state, False
    if state.known is None:
        return UpgradeState(known=seen), False
    if _is_same(state.known, seen):
        return UpgradeState(known=state.known), False
    if state.settling is None or not _is_same(state.settling, seen):
        return UpgradeState(known=state.known, settling=seen), False
    return UpgradeState(known=seen), True


def _is_same(one: EngineSeen, other: EngineSeen) -> bool:
    """An unknown driver is no other driver: it may be away for a moment."""
    drivers = {one.driver_version, other.driver_version} - {None}
    return one.files == other.files and len(drivers) <= 1


def decide(found: Replanned, policy: Policy, *, has_nights: bool) -> Decision | None:
    """What to say of it; None where files were only touched, or nobody knows what stood before.

    Args:
        found: What was found.
        policy: `act` has the next night compare old and new.
        has_nights: Whether nights begin by themselves.
    """
    parts: Sequence[str] = [
        *(["the engine is another build"] if found.identity_changed else []),
        *(
            [f"the driver is {found.driver_now} instead of {found.driver_before}"]
            if found.driver_before and found.driver_now and found.driver_before != found.driver_now
            else []
        ),
    ]
    if not parts and not found.refusals:
        return None
    what = " and ".join(parts) or "what stands was planned anew"
    if found.refusals:
        return Decision(
            "upgrade-refused",
            Act.NOTHING,
            "error",
            f"{what}: the server's next start will fail with it",
            "; ".join(found.refusals),
            "deploy it anew before anything restarts it: `tunerd plan PROFILE` shows what is wrong; "
            "`tunerd engines keep` and `tunerd rollback` keep an older build",
        )
    then, hint = _comparison(found, policy, has_nights=has_nights)
    return Decision(
        "upgrade",
        Act.NOTHING,
        "warning",
        f"{what}: what was measured before is stale, and the deployed profile still plans well{then}",
        _builds(found),
        f"`tunerd results list` tells which; {hint}",
    )


def _builds(found: Replanned) -> str:
    if found.identity_before is None or found.identity_now is None:
        return "the files or the driver changed"
    return f"build {found.identity_before} was deployed, {found.identity_now} is there now"


def _comparison(found: Replanned, policy: Policy, *, has_nights: bool) -> tuple[str, str]:
    """What becomes of old against new, and what a person can do about it."""
    if found.identity_changed is not True:
        return "", "the next sweep measures anew"
    if found.compared is not None:
        return (
            f". Old and new were compared: {found.compared}",
            f"`tunerd results show {found.run}`; the old build is `{found.kept}`",
        )
    if found.kept is None:
        return (
            ". Old and new cannot be compared, for no copy of the old build was kept",
            "swap.keep_engine keeps the build that serves before each swap, `tunerd engines keep` now",
        )
    by_hand = f"`tunerd compare {found.kept} {found.engine or 'live'}`"
    if policy is Policy.ACT and has_nights:
        return ". The next night compares old and new", f"{by_hand} does so at once"
    return "", f"{by_hand} compares old and new"
