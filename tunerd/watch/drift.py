"""Whether a server does worse than was measured of it: its speed, by its counters and its own log; and in a probation its life and memory too.

A guard and a probation go by the speed, each with its own floor: of a server that drafts by the time of its passes, for tokens
a second fall as well where people ask for text that is harder to guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import sqrt
from statistics import fmean, linear_regression, stdev

from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.log import LoggedRequest, Tally, read_requests, tally_of, without_newest
from tunerd.errors import TunerdError
from tunerd.measure.answer import Sample
from tunerd.units.manager import LogSpan
from tunerd.watch.figures import Reading, Served
from tunerd.watch.guards import IDLE_CORES, Act, Decision, Policy
from tunerd.words import ratio

DRIFT = "drift"
# Which of the two looks the same from here: its passes are as quick as ever.
_FEWER = "fewer drafted tokens are accepted: it is asked for other text than was measured, or its drafter is broken"
_SLOWER = "slower"
# Less is no sample of the work: one long answer could be of any kind.
_LEAST_TOKENS = 512
_LEAST_DRAFTED = 256
# Three in a row: one long answer can be of any kind, three stretches of them seldom are.
_STRETCHES = 3
# A stretch that was quick enough within this life, before the slow ones, shows a decay.
_LEAST_GOOD = 2
_MOST_STRETCHES = 48
# Requests that may end between the look at the counters and that at the log.
_MOST_LATE = 4
# More than this many MiB beside the server, on top of what was there while it was measured.
_OTHERS_SLACK_MIB = 64
# Up to here depth costs less than what a floor leaves room for, whatever was measured.
_SHALLOW_TOKENS = 1640
# Deeper than what was measured by so much decodes slower for reasons of its own.
_DEPTH_RATIO = 1.25
_LEAST_ANSWER = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """The longest that a verification pass may take: `ms`, and `draft_ms` more for each token that it drafts.

    That was measured between `least_drafted` and `most_drafted`.
    """

    ms: float
    draft_ms: float
    least_drafted: float
    most_drafted: float

    def limit_ms(self, drafted: float) -> float:
        """Of a pass that drafts so many: fewer than were measured may cost as much, and more no more for each."""
        known = min(max(drafted, self.least_drafted), self.most_drafted)
        drafted = max(drafted, known)
        return (self.ms + self.draft_ms * known) * (1 + drafted) / (1 + known)

    def times(self, factor: float) -> Pace:
        """With so much more time."""
        return replace(self, ms=self.ms * factor, draft_ms=self.draft_ms * factor)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What was measured of exactly this server, and under which conditions.

    `floor_tok_s` is the lowest decode speed that would still be what was measured, over all kinds of
    text and with their spread; `floor_acceptance` and `pace` the same of drafts and passes, None where nothing
    was drafted. `others_mib` is the VRAM that others held then, `deepest_tokens` the most context that was in use.
    None is not known.
    """

    floor_tok_s: float | None
    floor_acceptance: float | None
    driver_version: str | None = None
    engine_sha256: str | None = None
    others_mib: int | None = None
    deepest_tokens: int | None = None
    pace: Pace | None = None


@dataclass(slots=True)
class Stretch:
    """Work of at least `_LEAST_TOKENS`, in one life; `before` was counted when it began, at `since_s`.

    `n_drafted` is None where the server does not count its drafts; `is_logged`: its log alone tells of them.
    """

    n_predicted: int = 0
    predicted_s: float = 0.0
    n_drafted: int | None = 0
    n_accepted: int = 0
    throttled: int = 0
    looks: int = 0
    is_logged: bool = False
    since_s: float = 0.0
    before: Tally | None = None

    @property
    def tok_s(self) -> float:
        """Its decode speed [tok/s]."""
        return self.n_predicted / self.predicted_s if self.predicted_s else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of its drafts that were right."""
        drafted = self.n_drafted or 0
        return self.n_accepted / drafted if drafted >= _LEAST_DRAFTED else None

    @property
    def drafted(self) -> float | None:
        """Tokens that a pass drafted; None where that is not known."""
        passes = self.n_predicted - self.n_accepted
        return None if self.n_drafted is None or passes <= 0 else self.n_drafted / passes

    def of_pace(self, confirmed: Confirmed) -> float | None:
        """How long its passes took, of the longest that was confirmed; None where that is not known."""
        drafted, pace = self.drafted, confirmed.pace
        if pace is None or drafted is None:
            return None
        pass_s = self.predicted_s / (self.n_predicted - self.n_accepted)
        return 1000 * pass_s / pace.limit_ms(drafted)

    def slowness(self, confirmed: Confirmed) -> float:
        """More than 1 is slower than was confirmed: by its passes where they are known, else by tokens a second."""
        of_pace = self.of_pace(confirmed)
        return (confirmed.floor_tok_s or 0.0) / self.tok_s if of_pace is None else of_pace

    def add(self, seen: Reading, served: Served) -> None:
        """What one look saw of it."""
        self.n_predicted += served.n_predicted or 0
        self.predicted_s += served.predicted_s or 0.0
        known = self.n_drafted, served.n_drafted
        self.n_drafted = None if None in known else sum(n or 0 for n in known)
        self.n_accepted += served.n_accepted or 0
        self.throttled += seen.is_throttled is True
        self.looks += 1


class Drift:
    """Judges one server after the other, look by look.

    Args:
        log: What the server wrote since a time [s since the epoch].
    """

    def __init__(self, log: Callable[[float], LogSpan]) -> None:
        self._log = log
        self._life: str | None = None
        self._others_mib: int | None = None
        self._confirmed: Confirmed | None = None
        self._found = ""  # what was told of it last: `_SLOWER`, `_FEWER`
        # False where it was told before its log could bear it out, which the next look at that may do.
        self._is_sure = True
        self.not_judged: str | None = "it had too few requests to judge its speed"
        """Why nobody can say that the speed is what was confirmed; None where it was seen to be."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.stretches: list[Stretch] = []  # of this life, oldest first
        self._growing: Stretch | None = None
        # Several requests were under way, and not all of them have been counted: a server counts what a
        # request came to when it ends.
        self._is_shared = False
        # Since when what was generated is not told yet.
        self._held_since_s: float | None = None

    @property
    def tok_s(self) -> float | None:
        """Of the last stretch [tok/s]; None before the first."""
        return self.stretches[-1].tok_s if self.stretches else None

    def after(
        self,
        reading: Reading,
        confirmed: Confirmed,
        policy: Policy,
        *,
        engine_sha256: str | None = None,
        demands_log: bool = False,
    ) -> Decision | None:
        """Take a look into account.

        Args:
            reading: Now. Of more than one request under way nothing counts, for they share the speed.
            confirmed: What was measured of this server.
            policy: `act` restarts a server that has decayed; anything else is only said.
            engine_sha256: Of its build now; None is not known.
            demands_log: What cannot be borne out by the log is no decision at all.
        """
        engine = reading.engine
        if self._life != engine.life:
            self._life, self._others_mib = engine.life, None
            self._begin_anew()
        if self._others_mib is None:
            self._others_mib = reading.others_mib
        if self._confirmed != confirmed:  # what was told was of other figures
            self._confirmed, self._found = confirmed, ""
        if policy == "off":
            self._found = ""
            self._begin_anew()
            return None
        known = replace(confirmed, others_mib=self._others_mib)
        if not self._has_grown(reading):
            return None
        told, counted = self._found, None if engine.counters is None else engine.counters.generated
        last = self.stretches[-_STRETCHES:]
        if known.pace is not None and len(last) == _STRETCHES:
            self._count_drafts(last, counted)
        decision = self._judged(reading, known, policy, engine_sha256)
        # Speed falls with the depth of a conversation as well.
        if decision is None or decision.kind != DRIFT or self._found != _SLOWER:
            return decision
        closer = look_closer(decision, self._requests(counted), known, demands_log=demands_log)
        text = f"by its counters it made {self.tok_s:.1f} tok/s, which its log does not confirm"
        floor = known.floor_tok_s or 0.0
        if closer is not None and any(one.is_logged and one.tok_s >= floor for one in last):
            # Whoever may ask may write lines of drafts as well: that is said, and nothing is done.
            text = "its log alone says that its passes are slow"
            closer = None if demands_log else replace(closer, act=Act.NOTHING)
        if closer is None:
            self.not_judged, self._found = text, told
            self._begin_anew()
            return None
        self._is_sure = closer.act is decision.act
        return None if told == _SLOWER and closer.act is Act.NOTHING else closer

    def _has_grown(self, seen: Reading) -> bool:
        """Take what was served since the look before into account; whether a stretch became whole."""
        served, n_at_work = seen.engine.served, seen.engine.n_at_work
        if self._is_shared or n_at_work > 1:
            counted = None if served is None else served.n_predicted
            self._is_shared = n_at_work > 0 or counted is None
            return False
        if served is not None and served.n_predicted is None:
            if self._held_since_s is None:
                self._held_since_s = seen.at_s - served.seconds
            return False
        held_since_s, self._held_since_s = self._held_since_s, None
        if served is None or not served.n_predicted or not served.predicted_s:
            return False
        growing = self._growing or _begun(seen, served, held_since_s)
        growing.add(seen, served)
        self._growing = growing
        if growing.n_predicted < _LEAST_TOKENS:
            return False
        self.stretches = [*self.stretches, growing][-_MOST_STRETCHES:]
        self._growing = None
        return True

    def _judged(
        self, seen: Reading, confirmed: Confirmed, policy: Policy, engine_sha256: str | None
    ) -> Decision | None:
        last = self.stretches[-_STRETCHES:]
        n_unknown = sum(one.n_drafted is None for one in last)
        # Of drafts that are not counted the log is asked for three stretches at a time.
        is_split = confirmed.pace is not None and 0 < n_unknown < _STRETCHES
        if len(last) < _STRETCHES or is_split:
            return None
        self.not_judged = None
        found = _found_in(last, confirmed)
        if not found:
            if self._found and not any(_found_in([one], confirmed) for one in last):
                self._found = ""
                text = "the server performs as measured again"
                return Decision("drift-over", Act.NOTHING, "note", text, _told(last))
            return None
        if self._is_sure and self._found in {_SLOWER, found}:
            return None
        self._found, self._is_sure = found, True
        cause, decays = _likely_cause(self.stretches, seen, confirmed, engine_sha256)
        act = Act.RESTART if decays and policy == "act" else Act.NOTHING
        text = f"the server no longer performs as measured: {cause}"
        hint = "`tunerd doctor`; `tunerd bench` measures it again"
        if cause == _FEWER:
            hint = "`tunerd bench` asks known text and so tells the two apart"
        if decays:
            hint = "a restart brings its speed back"
        return Decision(DRIFT, act, "warning", text, _evidence(found, last, confirmed), hint)

    def _count_drafts(self, last: Sequence[Stretch], counted: Tally | None) -> None:
        """Give stretches of which no drafts were counted those of their requests, as far as the log tells."""
        is_counted = any(one.n_drafted is not None for one in last)
        requests = () if is_counted else self._requests(counted)
        n = sum(one.predicted_n for one in requests)
        for one in last if n else ():
            one.is_logged = True
            one.n_drafted = one.n_predicted * sum(each.drafted_n or 0 for each in requests) // n
            one.n_accepted = one.n_predicted * sum(each.accepted_n or 0 for each in requests) // n

    def _requests(self, counted: Tally | None) -> Sequence[LoggedRequest]:
        """Those of the stretches that were judged, by the server's own log.

        That counts where it says what the counters counted in the same time: others may write in it, and
        requests may have ended since the counters were read.
        """
        first = self.stretches[-_STRETCHES:][0]
        try:
            span = self._log(first.since_s)
        except TunerdError:
            return ()
        # Local mode has whole lives, of which the counters begin at nothing.
        is_whole = span.begins_s is not None and span.begins_s < first.since_s - 1.0
        before = first.before
        if before is None or counted is None:
            return ()
        for n_late in range(_MOST_LATE + 1):
            lines = without_newest(span.lines, n_late)
            if tally_of(lines).agrees_with(Tally(0, 0.0) if is_whole else before, counted):
                return _newest(read_requests(lines).requests, counted.n - before.n)
        return ()


def _newest(requests: Sequence[LoggedRequest], n: int) -> Sequence[LoggedRequest]:
    """Those that generated the last `n` tokens, oldest first."""
    newer = accumulate((one.predicted_n for one in reversed(requests)), initial=0)
    return [one for one, told in zip(reversed(requests), newer, strict=False) if told < n][::-1]


def _begun(seen: Reading, served: Served, held_since_s: float | None) -> Stretch:
    """A stretch that begins at the look before this one, or where the counters were told last."""
    counters, n, seconds = seen.engine.counters, served.n_predicted or 0, served.predicted_s or 0.0
    now = None if counters is None else counters.generated
    before = None if now is None else Tally(now.n - n, now.seconds - seconds)
    since_s = seen.at_s - served.seconds if held_since_s is None else held_since_s
    return Stretch(since_s=since_s, before=before)


def look_closer(
    decision: Decision,
    requests: Sequence[LoggedRequest],
    confirmed: Confirmed,
    *,
    demands_log: bool = False,
) -> Decision | None:
    """A decision on speed held against requests that are alike; without any it is none.

    Args:
        decision: On the speed by the counters, which know no depth.
        requests: Of this life, oldest first.
        confirmed: What was measured.
        demands_log: What cannot be borne out by the log is no decision at all.
    """
    known = [one for one in requests if one.prompt_total_n is not None]
    if confirmed.deepest_tokens is None or not known:
        if demands_log:
            return None
        evidence = f"{decision.evidence}; how deep those requests were is not known"
        return replace(decision, act=Act.NOTHING, evidence=evidence)
    alike = alike_of(known, confirmed.deepest_tokens)
    if alike is None or alike.slowness(confirmed) <= 1:
        return None
    evidence = f"{decision.evidence}; requests no deeper than measured: {alike.tok_s:.1f} tok/s"
    return replace(decision, evidence=f"{evidence}{_of_pace([alike], confirmed)}")


def alike_of(requests: Sequence[LoggedRequest], deepest_tokens: int) -> Stretch | None:
    """The newest requests that were alone and no deeper, together; None where those are too few."""
    deepest = max(deepest_tokens, _SHALLOW_TOKENS) * _DEPTH_RATIO
    # A request that drafted nothing has no line of drafts; where none has one, that is not known.
    is_told = any(one.drafted_n is not None for one in requests)
    found = Stretch(n_drafted=0 if is_told else None)
    for one in reversed(requests):
        depth = one.prompt_total_n
        if depth is None or depth + one.predicted_n > deepest:
            continue
        if one.concurrency > 1 or one.predicted_n < _LEAST_ANSWER:
            continue
        found.n_predicted += one.predicted_n - 1
        found.predicted_s += one.predicted_ms / 1000
        if found.n_drafted is not None:
            found.n_drafted += one.drafted_n or 0
        found.n_accepted += one.accepted_n or 0
        if found.n_predicted >= _STRETCHES * _LEAST_TOKENS:
            break
    return found if found.n_predicted >= _LEAST_TOKENS and found.predicted_s else None


def _drafts_badly(one: Stretch, confirmed: Confirmed) -> bool:
    floor = confirmed.floor_acceptance
    if floor is not None and one.acceptance is not None and one.acceptance < floor:
        return True
    return floor is not None and _drafts_little(one, confirmed)


def _drafts_little(one: Stretch, confirmed: Confirmed) -> bool:
    """Whether it drafts less than on any text that was measured, and is slower than on each of them."""
    drafted, pace = one.drafted, confirmed.pace
    is_little = drafted is not None and pace is not None and drafted < pace.least_drafted
    return is_little and one.tok_s < (confirmed.floor_tok_s or 0.0)


def _found_in(last: Sequence[Stretch], confirmed: Confirmed) -> str:
    """What all of them show: `_SLOWER`, `_FEWER`, or nothing."""
    if all(one.slowness(confirmed) > 1 for one in last):
        return _SLOWER
    return _FEWER if all(_drafts_badly(one, confirmed) for one in last) else ""


def _evidence(found: str, last: Sequence[Stretch], confirmed: Confirmed) -> str:
    pace = confirmed.pace
    if found == _FEWER and pace is not None and any(_drafts_little(one, confirmed) for one in last):
        shown = ", ".join(f"{one.drafted:.1f}" for one in last if one.drafted is not None)
        least = f"{pace.least_drafted:.1f}"
        return f"{shown} tokens drafted a pass, where at least {least} was confirmed"
    if found == _FEWER:
        shown = ", ".join(f"{one.acceptance:.2f}" for one in last)
        return f"{shown} of the drafts accepted, where at least {confirmed.floor_acceptance:.2f} was confirmed"
    of_pace = _of_pace(last, confirmed)
    floor = "" if of_pace else f", where at least {confirmed.floor_tok_s:.1f} was confirmed"
    return f"{_told(last)} in a row{of_pace}{floor}"


def _of_pace(last: Sequence[Stretch], confirmed: Confirmed) -> str:
    known = [share for one in last if (share := one.of_pace(confirmed)) is not None]
    shown = ", ".join(f"{share:.2f}" for share in known)
    return f", passes took {shown} times the longest that was confirmed" if known else ""


def _told(last: Sequence[Stretch]) -> str:
    return f"{', '.join(f'{one.tok_s:.1f}' for one in last)} tok/s over {_LEAST_TOKENS} tokens and more each"


def _likely_cause(
    stretches: Sequence[Stretch], seen: Reading, confirmed: Confirmed, engine_sha256: str | None
) -> tuple[str, bool]:
    """The likely cause, the surest first, and whether it is a decay that a restart ends."""
    before, last = stretches[:-_STRETCHES], stretches[-_STRETCHES:]
    if _differ(confirmed.driver_version, seen.driver_version):
        return f"the driver was {confirmed.driver_version} and is {seen.driver_version}", False
    if _differ(confirmed.engine_sha256, engine_sha256):
        return "the engine is not the build that was measured", False
    if _found_in(last, confirmed) == _FEWER:
        return _FEWER, False
    throttled, looks = sum(one.throttled for one in last), sum(one.looks for one in last)
    if throttled * 2 > looks:
        return f"the card was throttled in {throttled} of {looks} looks", False
    if confirmed.others_mib is not None and seen.others_mib is not None:
        more_mib = seen.others_mib - confirmed.others_mib
        if more_mib > _OTHERS_SLACK_MIB:
            return f"others hold {seen.others_mib} MiB of VRAM, {more_mib} more than before", False
    slow = [one.slowness(confirmed) for one in stretches]
    good = [one for one in slow[: len(before)] if one <= 1]
    if len(good) >= _LEAST_GOOD and slow[-1] * 1.02 >= slow[-2]:
        return f"it slowed down after its start, to {min(good) / slow[-1]:.0%} of its speed", True
    return "nothing that is watched explains it", False


def _differ(then: str | None, now: str | None) -> bool:
    return then is not None and now is not None and then != now


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
    pace = pace_of(known, width=_WIDTH)
    return Confirmed(
        floor_tok_s=floor,
        floor_acceptance=_floor(known, _acceptance, relative=False),
        driver_version=then.driver_version,
        engine_sha256=then.engine_sha256,
        deepest_tokens=max(depth_of(one) for one in known),
        pace=None if pace is None else pace.times(1 / (1 - _BETWEEN_LIVES)),
    )


def pace_of(samples: Iterable[Sample], *, width: float = 0.0) -> Pace | None:
    """Of the kind of text with the slowest passes, but for what they drafted; None where nothing was drafted.

    Args:
        samples: Of one server.
        width: Of what their mean may be too low by, in its standard errors.
    """
    asked = [(one, *found) for one in samples if (found := _pass_of(one)) is not None]
    drafted, times_ms = [one for _, one, _ in asked], [ms for _, _, ms in asked]
    if not any(drafted):
        return None
    slope = linear_regression(drafted, times_ms).slope if len(set(drafted)) > 1 else 0.0
    # A token that is drafted and checked beside others costs no more than one alone.
    draft_ms = min(max(slope, 0.0), fmean(times_ms) / (1 + fmean(drafted)))

    def without_drafts(sample: Sample) -> float | None:
        found = _pass_of(sample)
        return None if found is None else found[1] - draft_ms * found[0]

    kinds = _by_kind([one for one, _, _ in asked], without_drafts)
    ends = [fmean(kind) + width * stdev(kind) / sqrt(len(kind)) for kind in kinds]
    return Pace(max(ends), draft_ms, min(drafted), max(drafted)) if ends else None


def _pass_of(sample: Sample) -> tuple[float, float] | None:
    """Tokens that a verification pass drafted, and its time [ms]."""
    timings = sample.timings
    if timings is None or not timings.steps or timings.step_ms is None:
        return None
    return (timings.draft_n or 0) / timings.steps, timings.step_ms


def usable(samples: Iterable[Sample]) -> list[Sample]:
    """Those of single requests that were answered at some length."""
    return [
        one
        for one in samples
        if one.is_usable and one.concurrency == 1 and (one.n_predicted or 0) >= _LEAST_ANSWER
    ]


def slowest_tok_s(samples: Iterable[Sample]) -> float | None:
    """The lowest mean decode speed over the kinds of text that were asked often enough."""
    return min(map(fmean, _by_kind(usable(samples), _speed)), default=None)


def depth_of(sample: Sample) -> int:
    """Context in use at the end of an answer [tok]; that which is known."""
    timings = sample.timings
    if timings is None:
        return 0
    return (timings.prompt_n or 0) + (sample.n_cached or 0) + (timings.predicted_n or 0)


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
    return None if timings is None else ratio(timings.draft_n_accepted, timings.draft_n)


# In a probation: whether a server that was just deployed does worse than was measured of it

WENT_DOWN = "the machine went down while it was watched"
# Three times the spread between restarts, 3 %; where nothing is known of what served before, going back
# may not help, and speeds of kinds of text that nobody measured differ by a quarter.
_TOLERANCE = 0.10
_TOLERANCE_ALONE = 0.25
_SICK_LOOKS = 3
# What grows on beyond the prompt cache's limit and what checkpoints may take (dozens of up to 150 MiB) is
# a leak. llama-server keeps 8192 MiB of prompts where it is told nothing else.
_GROWTH_RATIO = 1.5
_GROWTH_MIB = 8192
_CACHE_RAM_MIB = 8192
_MIN_LOOKS_OF_GROWTH = 6
# Buffers of a server that works come and go by less.
_OWN_GROWTH_MIB = 64


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment; None is not known.

    `life` names the process, `n_restarts` counts how often the manager started it by itself, and
    `is_stopped` says that it is down because somebody stopped it.
    `cpu_s` is the processor time it has used, `anonymous_mib` its memory without mapped files,
    `vram_free_mib` the least that is free on a card it uses, `vram_own_mib` what it holds itself.
    """

    at_s: float
    life: str | None
    is_active: bool
    is_ready: bool
    is_stopped: bool = False
    n_restarts: int | None = None
    cpu_s: float | None = None
    anonymous_mib: int | None = None
    vram_free_mib: int | None = None
    vram_own_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Basis:
    """What it is judged by.

    `slowest_tok_s` is the lowest decode speed over the kinds of text that were measured of it [tok/s], `pace` that
    of its passes, `previous_tok_s` that of what it replaced, `deepest_tokens` the most context that was in use then,
    `headroom_mib` the VRAM that must stay free, `cache_ram_mib` the limit of its prompt cache. None: not
    known, or no limit, and not judged.
    """

    slowest_tok_s: float | None = None
    deepest_tokens: int = 0
    previous_tok_s: float | None = None
    headroom_mib: int | None = None
    cache_ram_mib: int | None = _CACHE_RAM_MIB
    pace: Pace | None = None

    @property
    def floor(self) -> Confirmed:
        """Below it, it does worse: than measured, and on the same text than what served before."""
        if self.slowest_tok_s is None:
            return Confirmed(None, None)
        share = 1 - _TOLERANCE_ALONE
        if self.previous_tok_s is not None:
            share = min(1.0, self.previous_tok_s / self.slowest_tok_s) * (1 - _TOLERANCE)
        pace = None if self.pace is None else self.pace.times(1 / share)
        floor_tok_s = self.slowest_tok_s * share
        return Confirmed(floor_tok_s, None, deepest_tokens=self.deepest_tokens, pace=pace)


def cache_ram_mib(argv: Sequence[str]) -> int | None:
    """The limit of the prompt cache in RAM that a command line sets; None for no limit.

    -1 is none; nothing readable is the default of llama-server.
    """
    for name, value in pairwise(argv):
        if name in {"--cache-ram", "-cram"} and value.removeprefix("-").isdecimal():
            return int(value) if int(value) >= 0 else None
    return _CACHE_RAM_MIB


def look_of(reading: Reading) -> Look:
    """What a reading says of the server's health."""
    engine = reading.engine
    held = [(gpu.free_mib, gpu.server_mib) for gpu in reading.gpus or () if gpu.server_mib]
    known = [(free, own) for free, own in held if free is not None and own is not None]
    return Look(
        at_s=reading.at_s,
        life=engine.life,
        is_active=engine.is_active,
        is_ready=engine.is_ready is True,
        is_stopped=engine.is_stopped_by_hand,
        n_restarts=engine.n_restarts,
        cpu_s=engine.cpu_s,
        anonymous_mib=engine.anonymous_mib,
        vram_free_mib=min((free for free, _ in known), default=None),
        vram_own_mib=sum(own for _, own in known) if known else None,
    )


@dataclass(frozen=True, slots=True)
class Course:
    """What the looks at a server came to since the beginning; of a week they are too many to be held.

    `n` are all of them. `last` and `held` are the newest few, and the newest few in which its VRAM was known;
    `own_mib` is what it held at first, `ready` the newest look at it that found it ready. `memory_mib` is its memory
    at first and now, of `n_memory` looks in which that was known, and `has_shrunk` whether it ever fell.
    """

    n: int = 0
    last: tuple[Look, ...] = ()
    held: tuple[Look, ...] = ()
    own_mib: int = 0
    ready: Look | None = None
    memory_mib: tuple[int, int] = (0, 0)
    n_memory: int = 0
    has_shrunk: bool = False

    def then(self, look: Look) -> Course:
        """After one more look."""
        held, own_mib, memory_mib = self.held, self.own_mib, self.memory_mib
        if look.vram_free_mib is not None and look.vram_own_mib is not None:
            held, own_mib = (*held, look), own_mib if held else look.vram_own_mib
        now_mib = look.anonymous_mib if look.is_ready else None
        if now_mib is not None:
            memory_mib = memory_mib[0] if self.n_memory else now_mib, now_mib
        return Course(
            n=self.n + 1,
            last=(*self.last, look)[-_SICK_LOOKS:],
            held=held[-_SICK_LOOKS:],
            own_mib=own_mib,
            ready=look if look.is_ready else self.ready,
            memory_mib=memory_mib,
            n_memory=self.n_memory + (now_mib is not None),
            has_shrunk=self.has_shrunk or memory_mib[1] < self.memory_mib[1],
        )

    def later(self, by_s: float) -> Course:
        """The same by a clock that was set meanwhile."""
        return replace(self, last=tuple(replace(one, at_s=one.at_s + by_s) for one in self.last))

    def ends_with(self, holds: Callable[[Look], bool]) -> bool:
        """Whether that holds for so many of the last looks that it is no chance."""
        return len(self.last) == _SICK_LOOKS and all(map(holds, self.last))


def judge(course: Course, basis: Basis, *, restarts: int = 0) -> str | None:
    """Why to take the server back, but for its speed, which is judged as a drift is; None: it stays.

    Args:
        course: Of at least one look.
        basis: What was measured of it.
        restarts: How often the manager had started it by itself when the swap was done.
    """
    return (
        _ended(course, restarts) or _sick(course) or _leaks(course, basis) or _tight(course, basis)
    )


def is_long_enough(course: Course, left_s: float) -> bool:
    """Whether it was watched for its time, and the last looks found it well."""
    return left_s <= 0 and course.ends_with(lambda one: one.is_ready)


def _ended(course: Course, restarts: int) -> str | None:
    """Whether the process died: one that a person restarted has the manager's counter at zero."""
    last = course.last[-1]
    died = (last.n_restarts or 0) - restarts
    if died > 0:
        return f"it died and was started again {died} time{'s' if died > 1 else ''}"
    if last.is_stopped or not course.ends_with(lambda one: not one.is_active):
        return None
    return "it ended and did not come back"


def _sick(course: Course) -> str | None:
    """Whether a server that was ready says nothing any more, and does nothing either."""
    if not course.ends_with(lambda one: one.is_active and not one.is_ready):
        return None
    first, last = course.last[0], course.last[-1]
    if course.ready is None or course.ready.life != first.life:
        return None  # one that loads was not ready yet, and may take its time
    works = False
    if first.cpu_s is not None and last.cpu_s is not None:
        # In the last looks alone: one that has worked silently for minutes may hang now.
        works = last.cpu_s - first.cpu_s > IDLE_CORES * (last.at_s - first.at_s)
    return None if works else f"it did not answer {_SICK_LOOKS} times in a row"


def _leaks(course: Course, basis: Basis) -> str | None:
    if course.n_memory < _MIN_LOOKS_OF_GROWTH or basis.cache_ram_mib is None:
        return None
    first, last = course.memory_mib
    allowed = basis.cache_ram_mib + _GROWTH_MIB
    if not course.has_shrunk and last > first * _GROWTH_RATIO and last - first > allowed:
        return f"its memory keeps growing: {first} MiB, now {last} MiB"
    return None


def _tight(course: Course, basis: Basis) -> str | None:
    """Whether it took so much VRAM itself that too little is left; what others take is not its fault."""
    held, first_mib = course.held, course.own_mib
    if basis.headroom_mib is None or len(held) < _SICK_LOOKS:
        return None
    free_mib = max(one.vram_free_mib or 0 for one in held)
    own_mib = min(one.vram_own_mib or 0 for one in held)
    if free_mib >= basis.headroom_mib // 2 or own_mib - first_mib < _OWN_GROWTH_MIB:
        return None
    return (
        f"it holds {own_mib} MiB of VRAM, {first_mib} at first, and only {free_mib} MiB "
        f"stay free, of the required {basis.headroom_mib}"
    )
