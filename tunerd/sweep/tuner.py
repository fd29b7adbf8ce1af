"""The sweep: search, make the leader fit to deploy, challenge the incumbent, say what was found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunerd.measure.pairs import (
    LEAST_NAMED,
    SIDES,
    Gain,
    Step,
    challenge_alpha,
    pairs_needed,
)
from tunerd.profile.arm import BOOT, Arm, Box, Policy, Preempted, Sample, Space, as_samples
from tunerd.profile.workload import Rates, Workload
from tunerd.records import plain
from tunerd.sweep.challenge import Carried, Challenge, Result, carried, judged, mean_ms
from tunerd.sweep.context import Floor, Widest
from tunerd.sweep.known import Study, law_of
from tunerd.sweep.learner import Learner
from tunerd.sweep.limits import Limits, without_margin, worse
from tunerd.sweep.night import Night, PathPoint, TimeUp
from tunerd.sweep.observations import TOOL, as_asked, blocks_of, decode_ms
from tunerd.sweep.search import Finalist, Search
from tunerd.sweep.space import Grid, Left, build_grid, changed
from tunerd.words import all_known, format_duration

Array = NDArray[np.float64]

_CONFIDENCE = 0.95
_WIDE = 8.0  # standard deviations within which the bound of any number of values lies
_PAIR_SD = 0.045
_GAIN = 0.05
_ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a budget allows, from the last load and the last speeds seen.

    `process_s` is one fresh server with one block of the workload [s], `starts` how many the budget
    has, `needed_s` a search with the pairs that show a gain of 5 % [s].
    """

    process_s: float
    starts: int
    needed_s: float
    can_decide: bool
    text: str


def forecast(
    workload: Workload,
    budget_s: float,
    *,
    load_s: float,
    rates: Rates,
    n_families: int,
    min_gain: float,
) -> Forecast:
    """What a sweep can do in its time.

    Args:
        workload: What is asked of each server.
        budget_s: Time for everything [s].
        load_s: Time of one start [s].
        rates: Speeds seen before, or usual ones.
        n_families: Pairs of a build and a kind of speculation.
        min_gain: Least gain worth a swap.
    """
    process_s = workload.process_s(load_s, rates)
    pairs = pairs_needed(_GAIN, _PAIR_SD, margin=min_gain, alpha=challenge_alpha(_ALPHA, 1))
    pairs = min(pairs, Policy().max_pairs)
    needed_s = (1 + 2 * n_families + 2 * pairs) * process_s
    starts = int(budget_s / process_s)
    can = needed_s <= budget_s
    text = (
        f"a start with one round of the workload takes about {format_duration(process_s)}, so "
        f"about {starts} of them fit into {format_duration(budget_s)}"
    )
    if not can:
        text += f"; searching, and proving a gain of {_GAIN:.0%}, takes about {format_duration(needed_s)}"
    return Forecast(process_s, starts, needed_s, can, text)


PROMOTE = "promote"
KEEP = "keep"
INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One measured arm.

    Times are of one request of the workload [s]: measured (mean over blocks), predicted, and what is
    believed of it with its relative standard deviation. None is unknown. `reason` says why it could
    not be recommended; empty if it could.
    """

    arm: Arm
    n_processes: int
    measured_s: float | None
    predicted_s: float | None
    believed_s: float | None
    believed_sd: float | None
    headroom_mib: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class KindTurn:
    """Mean time of the turns of a kind with an arm [s], each with its whole prompt and an answer as long as its class says."""

    arm: str
    kind: str
    wall_s: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything behind an outcome.

    Attributes:
        path: What would have been recommended from when on.
        samples: Every start and request of this sweep, in order.
        arms: Measured arms, the fastest first.
        left_out: What was not tried or was given up, with the reason.
        challenges: Verdicts, in order.
        models: Parameters of the fitted laws by "engine, spec".
        best_untried: The most a point that was not measured is believed to gain (ratio).
        time_s: Where the time went.
        wanted_tok_s: The speed that challenges were against, where the largest context was looked for.
        turns: What each kind of request took each arm, in this sweep.
    """

    path: tuple[PathPoint, ...]
    samples: tuple[Sample, ...]
    arms: tuple[ArmReport, ...]
    left_out: tuple[Left, ...]
    challenges: tuple[Result, ...]
    models: Mapping[str, Mapping[str, Any]]
    best_untried: float | None
    time_s: Mapping[str, float]
    elapsed_s: float
    restarts: int
    reasons: tuple[str, ...]
    wanted_tok_s: float | None = None
    turns: tuple[KindTurn, ...] = ()

    @property
    def won(self) -> tuple[Result, ...]:
        """Challenges that were won, each against the winner before it; of contexts the last, which is the largest."""
        won = tuple(one for one in self.challenges if one.outcome == PROMOTE)
        return won if self.wanted_tok_s is None else won[-1:]

    @property
    def gain(self) -> Gain | None:
        """Of the winner over what serves: of all that were won on the way, the product; else of the last tried."""
        if self.wanted_tok_s is not None:
            return None  # nobody was compared with it
        gains = [one.gain for one in self.won or self.challenges[-1:]]
        known = [one for one in gains if one is not None]
        if len(known) < len(gains) or not known:
            return None

        def product(name: str) -> float | None:
            ratios = all_known(getattr(one, name) for one in known)
            return math.prod(1 + one for one in ratios) - 1 if ratios else None

        estimate, lower, upper = map(product, ("estimate", "lower", "upper"))
        return Gain(estimate or 0.0, lower, upper, sum(one.n_pairs for one in known))

    def to_json(self) -> dict[str, Any]:
        """JSON values only, without the samples."""
        found: dict[str, Any] = plain(replace(self, samples=(), challenges=()))
        del found["samples"]
        return {**found, "challenges": [one.to_json() for one in self.challenges]}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a sweep: promote, keep or inconclusive, and the arm that should serve.

    `arm` is the incumbent as it was given unless the verdict is promote.
    """

    verdict: str
    arm: Arm
    evidence: Evidence


# Where nobody says how long the context is: what the published configurations serve.
_USUAL_CONTEXT = 131072
_UNKNOWN_GAIN = 0.15
# Of what was left after the last challenge, unless a leader's least pairs take more.
_MOST_RESERVED, _MOST_PROVING = 0.6, 0.85
# A margin took 1.17 starts in the mean of 394 nights of the second world.
_FINALIST_STARTS = 1.25
# Of a pair, beyond the least: a whole one left 16G deep of the second world 16.1 instead of 7.6 % behind (1 h, mean, boxes 13 to 24).
_LEAST_SPARE = 0.25
# A gain (log ratio) that the least pairs show whatever their luck: of 300 drawn challenges all, and 96 % where pairs spread 7 %.
_BEYOND_LUCK = 0.4
_PAIRS_SLACK = 1.25
_SPARE_PAIRS, _SPARE_SHARE = 3, 0.05
_TOOL_CALL_S = 1.5
_CHALLENGES = 6
_NOT_FASTER = "compared in pairs, and not faster by enough"


def tune(
    box: Box,
    space: Space,
    workload: Workload,
    incumbent: Arm,
    budget_s: float,
    rng: np.random.Generator,
    *,
    history: Iterable[Any] = (),
    policy: Policy | None = None,
    on_sample: Callable[[Sample], object] | None = None,
    study: Study | None = None,
    n_challenges: int = 0,
) -> Outcome:
    """Searches for a better arm within a budget and says whether it should replace the incumbent.

    Args:
        box: Where arms can be started and measured.
        space: What may be tried.
        workload: What the server is tuned for.
        incumbent: What serves now.
        budget_s: Time on the box's clock for everything, the verdict included [s].
        rng: The only source of chance.
        history: Samples of earlier nights, or of this one before it was cut.
        policy: What counts as a gain and what may be given for it.
        on_sample: Called with every sample as it comes.
        study: Where other boxes of the same class tell what they know; None for a box alone.
        n_challenges: How many the generation has had, those of which `history` has nothing included.

    Returns:
        promote, keep or inconclusive, with the evidence; `Preempted` ends it as inconclusive.

    Raises:
        ValueError: The workload has no classes.
    """
    policy, study = policy or Policy(), study or Study()
    sweep = _Sweep(box, space, workload, incumbent, budget_s, rng, policy, on_sample, study)
    sweep.recall(as_samples(history), n_challenges)
    return sweep.run()


class _Sweep:
    """One call of `tune`."""

    def __init__(
        self, box: Box, space: Space, workload: Workload, incumbent: Arm, budget_s: float,
        rng: np.random.Generator, policy: Policy,
        on_sample: Callable[[Sample], object] | None, study: Study,
    ) -> None:  # fmt: skip
        self.given = self.incumbent = incumbent
        self.study = study
        self.policy = replace(policy, seeds=(*policy.seeds, *study.seeds))
        if not workload.classes:
            raise ValueError("the workload has no classes")
        self.workload = workload
        self.grid: Grid = build_grid(space, self.incumbent, self.policy)
        known = (
            self.policy.context_tokens
            or self.incumbent.context_size
            or getattr(box, "context_tokens", None)
        )
        deepest = self.workload.classes[self.workload.deepest]
        context = max(known or _USUAL_CONTEXT, deepest.depth_tokens)
        self.learner = Learner(self.workload, context, self.study.known, self.policy.n_slots)
        self.night = Night(box, self.workload, self.learner, budget_s, rng, on_sample)
        self.limits = Limits(self.learner, self.grid, self.policy, self.incumbent)
        self.search = Search(
            self.night, self.grid, self.limits, self.policy, self.incumbent, self.study
        )
        for arm, reason in self.policy.rejected:
            self.limits.reject(arm, reason)
        self.challenges: list[Result] = []
        self._next_challenge = 1
        self._phase_s = budget_s
        self._won: list[Result] = []
        self._history: tuple[Sample, ...] = ()
        self._cut_short: list[Carried] = []
        self._contexts: Widest | None = None

    def recall(self, history: tuple[Sample, ...], n_challenges: int) -> None:
        """Starts from what is known already."""
        self._history = history
        self.night.recall(history)
        self._next_challenge += max(n_challenges, *(one.pair[0] for one in history if one.pair), 0)
        self._recall_challenges()

    def _recall_challenges(self) -> None:
        """Those of the incumbent of now; what won in this sweep before it was cut is the next incumbent."""
        self._cut_short, won = [], list[Carried]()
        for one in carried(self._history, self.incumbent, self.workload):
            standing = judged(one.pairs, one.number, self.policy).standing
            # What had no decision goes on; what this sweep has decided is not decided again.
            if standing is Step.GO_ON or (standing is Step.PROMOTE and not one.is_earlier):
                self._cut_short.append(one)
                won += [] if standing is Step.GO_ON else [one]
            elif not one.is_earlier:
                self.limits.reject(one.candidate, _NOT_FASTER)
        self.learner.refresh()
        sound = (one for one in won if self._is_sound(one.candidate))
        if (first := next(sound, None)) is not None:
            self._settle(self._challenge(first.candidate))  # its pairs have decided already

    def _is_sound(self, arm: Arm) -> bool:
        return self.grid.contains(arm) and self._unsound(arm) is None

    def _unsound(self, arm: Arm) -> str | None:
        """What that was seen keeps an arm from being deployed; None where nothing does."""
        if (failure := self.limits.fails(arm)) is not None:
            return failure
        if not self.limits.is_safe(arm):
            return "it may run out of memory with the context full"
        return None if self.limits.is_output_proven(arm) else "tool calls were not tried with it"

    def run(self) -> Outcome:
        """The whole night."""
        self.night.recommend(self.incumbent)
        try:
            verdict, reasons = self._search_and_challenge()
        except Preempted:
            verdict, reasons = INCONCLUSIVE, ["the user wanted the machine"]
        if given_up := self._give_up():
            verdict, reasons = INCONCLUSIVE, [*given_up, *reasons]
        if self._won:  # what was proved stays so, whatever became of the search for more
            if self.policy.at_least_tok_s is None:
                first, *then = map(_in_words, self._won)
                reasons = [first, *(f"then {one}" for one in then), *reasons]
            else:
                self.incumbent = self._won[-1].candidate
                speed = f"{self.policy.at_least_tok_s:g} tok/s"
                reasons = [f"the largest context found that holds {speed}", *reasons]
            verdict = PROMOTE
        if verdict != INCONCLUSIVE or given_up:
            self.night.recommend(self.incumbent)
        self._tell_what_was_learned()
        arm = self.incumbent if self._won else self.given
        return Outcome(verdict, arm, self._evidence(reasons))

    def _tell_what_was_learned(self) -> None:
        laws = {
            family: law_of(model.acceptance, model.costs.shared)
            for family, model in self.learner.models.items()
            if model.costs is not None
        }
        self.study.end(laws, self._won[-1].candidate if self._won else None)

    # Search and verdict in turns

    def _search_and_challenge(self) -> tuple[str, list[str]]:
        """Why there is no further winner; those that there were are in `_won`."""
        if self.policy.at_least_tok_s is not None:
            return self._widest(self.policy.at_least_tok_s)
        for _ in range(_CHALLENGES):
            self._phase_s = self.night.remaining_s
            if self._to_go_on() is None:
                self.search.run(self._reserve_s)
            leader = self.search.leader()
            if leader is None or not self.learner.n_processes(self.incumbent):
                return INCONCLUSIVE, [self._nothing_to_compare_with()]
            if leader.arm == self.incumbent.canonical() or self._gain() < self._least_gain():
                return self._nothing_better()
            try:
                finalist = self._to_go_on() or Finalist(self.search).prepare(leader.arm)
            except TimeUp:
                return INCONCLUSIVE, [self._no_time_to_prove(leader.arm)]
            if finalist is None:
                continue
            if finalist.canonical() == self.incumbent.canonical():
                self.limits.reject(leader.arm, "with the margin it needs it is what serves")
                continue
            self.night.recommend(finalist)
            if not self._has_time_for_pairs(finalist):
                return INCONCLUSIVE, [self._no_time_to_prove(finalist)]
            result = self._challenge(finalist)
            if result.outcome == "open":
                return INCONCLUSIVE, list(result.reasons)
            self._settle(result)
        return self._nothing_better(f"all {_CHALLENGES} challenges were used")

    def _widest(self, wanted_tok_s: float) -> tuple[str, list[str]]:
        """The largest context instead of the fastest arm."""
        family, speed = self.grid.of(self.incumbent), f"{wanted_tok_s:g} tok/s"
        if family is None or not self.grid.contains(self.incumbent):
            return INCONCLUSIVE, ["what serves is not among the settings to search"]
        widest = self._contexts = Widest(self.search, family, self._prove_floor)
        try:
            found = widest.find(self.incumbent)
        except TimeUp:
            return INCONCLUSIVE, ["time ran out before every size was proved", widest.text]
        if found is None:
            return KEEP, [f"no context holds {speed}", widest.text]
        if found == self.incumbent:
            return KEEP, [f"no larger context holds {speed}", widest.text]
        return PROMOTE, [widest.text]

    def _prove_floor(self, arm: Arm) -> Result:
        """A challenge of the wanted speed; each that is won is of a larger context than the one before."""
        self.night.recommend(arm)
        policy = replace(self.policy, min_gain=0.0)
        number, self._next_challenge = self._next_challenge, self._next_challenge + 1
        nobody = replace(arm, engine="")
        result = Floor(self.night, self.limits, policy, nobody, arm, number).run()
        serves = result.outcome == PROMOTE and arm == self.incumbent
        self.challenges.append(replace(result, outcome=KEEP) if serves else result)
        if result.outcome == PROMOTE and not serves:
            self._won = self.challenges[-1:]
        return result

    def _has_time_for_pairs(self, finalist: Arm) -> bool:
        """Whether so many pairs fit that they could decide, with those from before it was cut short."""
        known = [one for one in self._cut_short if one.candidate == finalist.canonical()]
        n_pairs = LEAST_NAMED - sum(len(one.pairs) for one in known)
        return n_pairs * self._pair_s(finalist) <= self.night.remaining_s

    def _pair_s(self, candidate: Arm) -> float:
        return sum(self.night.usual_process_s(one) for one in (self.incumbent, candidate))

    def _settle(self, result: Result) -> None:
        """A winner is what the next one has to beat, where limits stay those of what serves; what lost is out."""
        if result.outcome == PROMOTE:
            self._won.append(result)
            self.incumbent = self.search.incumbent = result.candidate
            self.search.planes.worth = math.log1p(self._least_gain())
            self._recall_challenges()
        else:
            failed = result.outcome == "failed"
            self.limits.reject(result.candidate, result.reasons[0] if failed else _NOT_FASTER)

    def _give_up(self) -> list[str]:
        """Winners that failed, or turned out short of memory, after they had won; why, in words."""
        found = []
        while self._won and (why := self._why_not_deployed(self._won[-1].candidate)) is not None:
            result = self._won.pop()
            found.append(f"{result.candidate} won, but is not deployed: {why}")
            self._call_off(result, why)
            self.incumbent = self._won[-1].candidate if self._won else self.given
        return found

    def _why_not_deployed(self, winner: Arm) -> str | None:
        if (unsound := self._unsound(winner)) is not None:
            return unsound
        if self._contexts is None or winner.context_size >= self.given.context_size:
            return None
        problem = self._contexts.not_shown(self.given)
        why = f"what serves has more context, and may hold the speed: {problem}"
        return None if problem is None else why

    def _call_off(self, result: Result, why: str) -> Result:
        """A challenge that was won, as one that was not."""
        lost = replace(result, outcome="failed", reasons=(why,))
        self.challenges[self.challenges.index(result)] = lost
        return lost

    def _worse_than_what_serves(self, result: Result) -> str | None:
        """Which limit a winner breaks with those that were won before it: each may give as much as is allowed."""
        steps = (*self._won, result)

        def ends(part: str) -> tuple[list[float], list[float]]:
            both = ([mean_ms(one.pairs, side, part) for one in steps] for side in SIDES)
            before, after = map(np.array, both)
            ratio = np.prod(after / np.maximum(before, 1e-9), axis=0)
            return before[0].tolist(), (before[0] * ratio).tolist()

        deepest = self.workload.deepest
        return worse(ends("turn"), ends("prefill"), deepest=deepest, policy=self.policy)

    def _to_go_on(self) -> Arm | None:
        """The candidate of a challenge that was cut short, where it is what would be challenged with."""
        leader = self.search.leader()
        if leader is None or self._gain() < self.policy.min_gain:
            return None
        wanted = without_margin(leader.arm)
        same = (one.candidate for one in self._cut_short if without_margin(one.candidate) == wanted)
        return next(filter(self._is_sound, same), None)

    def _challenge(self, candidate: Arm) -> Result:
        known = (one for one in self._cut_short if one.candidate == candidate.canonical())
        before = next(known, None)
        if before is None:
            before = Carried(candidate, self._next_challenge, (), is_earlier=False)
            self._next_challenge += 1
        else:
            self._cut_short.remove(before)
        number, pairs = before.number, list(before.pairs)
        result = Challenge(
            self.night, self.limits, self.policy, self.incumbent, candidate, number, pairs
        ).run()
        self.challenges.append(result)
        broken = self._worse_than_what_serves(result) if result.outcome == PROMOTE else None
        if broken is not None:
            result = self._call_off(result, broken)
        self.learner.refresh()
        return result

    def _nothing_to_compare_with(self) -> str:
        """Why there is no measurement of what serves."""
        failures = self.limits.failures(self.incumbent)
        if failures:
            return f"what serves could not be measured: {', '.join(failures)}"
        starts = [one for one in self.night.samples if one.event == BOOT]
        if any(one.arm == self.incumbent for one in starts):
            return "what serves did not answer every class of the workload in this time"
        return "nothing could be measured in this time"

    def _nothing_better(self, why: str = "time ran out") -> tuple[str, list[str]]:
        most = self._most_missed()
        n_decided = self.challenges.index(self._won[-1]) + 1 if self._won else 0
        if self.search.is_exhausted and (most is not None or self.challenges):
            gains = (one.gain for one in self.challenges[n_decided:])
            uppers = (one.upper for one in gains if one is not None and one.upper is not None)
            bound = max(most or 0.0, 0.0, *uppers)
            return KEEP, [f"at 95 % confidence, nothing else is more than {bound:.1%} faster"]
        reason = f"{why} before everything promising was tried"
        if most is not None:
            reason += f"; up to {max(most, 0.0):.1%} may be missed"
        return INCONCLUSIVE, [reason]

    # Planning

    def _gain(self) -> float:
        """Believed gain of the leader over the incumbent (ratio)."""
        leader, current = self.search.leader(), self.learner.beliefs([self.incumbent])[0]
        if leader is None or current is None:
            return 0.0
        return math.expm1(current.mean - leader.mean)

    def _least_gain(self) -> float:
        """Believed gain (ratio) that is worth a challenge: once something was won, one that its pairs usually prove.

        Of 593 nights of the second world 32 challenged a winner with less, by 4 to 27 pairs, and one won: by 3.5 %, in 18.
        """
        if not self._won:
            return self.policy.min_gain
        alpha = challenge_alpha(self.policy.alpha, self._next_challenge)
        return least_proved(self.policy.min_gain, self.policy.max_pairs, alpha)

    def _pairs_s(self, candidate: Arm) -> float:
        """Time of the pairs that will decide, as far as one can tell."""
        gain, policy = self._gain(), self.policy
        if gain < policy.min_gain:
            gain = _UNKNOWN_GAIN
        if math.log1p(gain) - math.log1p(policy.min_gain) > _BEYOND_LUCK:
            return (LEAST_NAMED + _LEAST_SPARE) * self._pair_s(candidate)
        alpha = challenge_alpha(policy.alpha, self._next_challenge)
        needed = pairs_needed(gain, _PAIR_SD, margin=policy.min_gain, alpha=alpha)
        needed, pair_s = min(max(needed, LEAST_NAMED), policy.max_pairs), self._pair_s(candidate)
        return min(planned_pairs(needed, pair_s, self._phase_s), policy.max_pairs) * pair_s

    def _reserve_s(self) -> float:
        """Time that finalist and verdict will take, with a pair to spare, as far as one can tell.

        Before there is anything to prove, and where no proof fits any more, what a least one takes once something was won:
        the rest could only be searched in. Where nothing was won, none: kept for nobody it would end the search, which may
        yet find what is so much faster that its pairs are short.
        """
        leader = self.search.leader()
        arm = self.incumbent if leader is None else leader.arm
        calls_s = self.limits.missing_calls(arm) * self.night.usual_s(arm, TOOL, _TOOL_CALL_S)
        finalist_s = self.night.usual_start_s(arm) + self.night.fill_s(arm)
        pair_s = self._pair_s(arm)
        proof_s = finalist_s + calls_s + LEAST_NAMED * pair_s
        if self._gain() < self.policy.min_gain or proof_s > self.night.remaining_s:
            return proof_s if self._won else 0.0
        beside_s = _FINALIST_STARTS * finalist_s + calls_s
        most_s = _MOST_RESERVED * self._phase_s
        needed_s = min(self._pairs_s(arm) + beside_s, most_s)
        return reserved_s((LEAST_NAMED + _LEAST_SPARE) * pair_s + beside_s, needed_s, self._phase_s)

    def _most_missed(self) -> float | None:
        """How much faster than the incumbent any allowed arm may still be, at 95 % (ratio)."""
        leader = self.search.leader()
        current = self.learner.beliefs([self.incumbent])[0]
        if leader is None or current is None:
            return None
        arms = [one.belief for one in self.search.planes.proposals(leader)]
        arms += [one for one in self.search.contenders() if one.arm != self.incumbent.canonical()]
        if not arms:
            return 0.0
        spread = self.learner.differences_sd([one.arm for one in arms], self.incumbent)
        gains = np.array([current.mean - one.mean for one in arms])
        return math.expm1(most_of(gains, self.search.planes.surprise * spread))

    def _no_time_to_prove(self, leader: Arm) -> str:
        return (
            f"{leader} seems to be {self._gain():.1%} faster, but it would take about {format_duration(self._pairs_s(leader))} "
            "to prove that"
        )

    # Evidence

    def _evidence(self, reasons: list[str]) -> Evidence:
        self.learner.refresh()
        left_out = [*self.grid.left_out, *self.search.left_out, *self.limits.reasons()]
        return Evidence(
            path=tuple(self.night.path),
            samples=tuple(self.night.samples),
            arms=self._arm_reports(),
            left_out=tuple(dict.fromkeys(left_out)),
            challenges=tuple(self.challenges),
            models=self.learner.to_json(),
            best_untried=self._best_untried(),
            time_s={name: round(seconds, 1) for name, seconds in self.night.spent_s.items()},
            elapsed_s=self.night.elapsed_s,
            restarts=self.night.restarts,
            reasons=tuple(reasons),
            wanted_tok_s=self.policy.at_least_tok_s,
            turns=self._turns(),
        )

    def _turns(self) -> tuple[KindTurn, ...]:
        observed, workload = self.learner.observations, self.night.workload
        known = (*self._history, *self.night.samples)
        own = {one.process for one in known if not one.is_earlier}
        taken_s: dict[tuple[Arm, str], list[float]] = defaultdict(list)
        for process in observed.processes.values():
            for (arm, _), by_text in blocks_of(process).items():
                for text, answer in by_text.items():
                    one = workload.classes[text]
                    reading = as_asked(process, answer, workload)
                    if process.name in own and reading and reading.wall_ms:
                        decoded_ms = decode_ms(answer, one) - (reading.predicted_ms or 0.0)
                        taken_s[arm, one.kind].append((reading.wall_ms + decoded_ms) / 1000)
        return tuple(
            KindTurn(str(arm), kind, fmean(all_s), len(all_s))
            for (arm, kind), all_s in taken_s.items()
        )

    def _arm_reports(self) -> tuple[ArmReport, ...]:
        arms = self.learner.measured()
        log_turn, _ = self.learner.predictions(arms)
        measured: dict[Arm, list[float]] = defaultdict(list)
        for one in self.learner.observed:
            measured[one.arm.canonical()].append(one.log_turn)
        rows = zip(arms, self.learner.beliefs(arms), log_turn.tolist(), strict=True)
        found = [
            ArmReport(
                arm=arm,
                n_processes=self.learner.n_processes(arm),
                measured_s=_seconds(fmean(measured[arm])) if measured[arm] else None,
                predicted_s=_seconds(predicted) if math.isfinite(predicted) else None,
                believed_s=None if belief is None else _seconds(belief.mean),
                believed_sd=None if belief is None else round(belief.sd, 4),
                headroom_mib=None if headroom is None else round(headroom.free_mib, 0),
                reason=self.limits.fails(arm)
                or self.limits.worsens(arm)
                or self._unsound(arm)
                or "",
            )
            for arm, belief, predicted in rows
            for headroom in [self.limits.headroom(arm)]
        ]
        found.sort(key=lambda one: math.inf if one.believed_s is None else one.believed_s)
        return tuple(found)

    def _best_untried(self) -> float | None:
        leader = self.search.leader()
        if leader is None or self.policy.at_least_tok_s is not None:
            return None
        proposals = self.search.planes.proposals(leader)
        if not proposals:
            return None
        best = min(one.belief.mean for one in proposals)
        return round(math.expm1(leader.mean - best), 4)


def least_proved(min_gain: float, max_pairs: int, alpha: float) -> float:
    """The smallest gain (ratio), in steps of 0.1 %, that usually takes no more than so many pairs; infinite if none does."""
    gains = (min_gain + at / 1000 for at in range(1, 1000))
    fits = (
        one
        for one in gains
        if pairs_needed(one, _PAIR_SD, margin=min_gain, alpha=alpha) <= max_pairs
    )
    return next(fits, math.inf)


def reserved_s(least_s: float, needed_s: float, phase_s: float) -> float:
    """Time to keep for the proof of a leader, of a phase of the night [s]: no less than its least pairs take.

    However late it was found: 24G deep of the second world proved 17 of 24 leaders in 1 h, and 15 where one that came late was
    searched on with. Where the least takes nearly all of the phase nothing can be proved, and the search may go on.
    """
    return needed_s if least_s > _MOST_PROVING * phase_s else max(least_s, needed_s)


def planned_pairs(needed: int, pair_s: float, phase_s: float) -> int:
    """Pairs to keep time for, of those that are usually needed, in a phase of the night of so many seconds.

    Luck may ask for more: one at least, and where they cost little of the night a few: a gain of 18 % was lost at
    an evidence of 39.8 of 40, behind seven hours of search.
    """
    likely = math.ceil(_PAIRS_SLACK * needed) if needed > LEAST_NAMED else needed
    return likely + max(1, min(_SPARE_PAIRS, int(_SPARE_SHARE * phase_s / pair_s)))


def most_of(means: Array, sds: Array) -> float:
    """What the largest of many normal values is below with 95 %, as if each were independent of the others.

    Values that are alike have a smaller largest one (Slepian 1962), so that this errs to the safe side.
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def missing(most: float) -> float:
        return float(log_ndtr((most - means) / sds).sum()) - math.log(_CONFIDENCE)

    low, high = float((means - _WIDE * sds).min()), float((means + _WIDE * sds).max())
    return float(brentq(missing, low, high, xtol=1e-5))


def _seconds(log_ms: float) -> float:
    return round(math.exp(log_ms) / 1000, 4)


def _in_words(result: Result) -> str:
    gain = result.gain
    if gain is None:
        return "promoted"
    interval = ""
    if gain.lower is not None and gain.upper is not None:
        interval = f", 95 % interval {gain.lower:.1%} to {gain.upper:.1%}"
    before = f" ({result.n_carried} from before it was cut short)" if result.n_carried else ""
    return f"{gain.estimate:.1%} faster over {gain.n_pairs} pairs{before}{interval}"


def sentence_of(outcome: Outcome, incumbent: Arm, workload: str) -> str:
    """The verdict for people."""
    why = "; ".join(outcome.evidence.reasons)
    if outcome.verdict == PROMOTE:
        what = changed(outcome.arm, incumbent)
        return f"promote: on {workload}, {what} is {why}"
    if outcome.verdict == KEEP:
        return f"keep what serves: on {workload}, {why}"
    return f"inconclusive: {why}"
