"""The search: a few runs of each family, then whatever the model thinks most of, measured.

Order: the incumbent, one process of every family (with several settings where the engine takes them per request and
tells no steps), then the points, new or measured before, with the largest expected improvement, until none is expected
to save enough. Prediction proposes, measurement decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tunerd.profile.arm import OFF, Arm, Policy, ServerDied, placement_of, simplicity, wording_of
from tunerd.sweep.known import Study, Told
from tunerd.sweep.laws import ANSWER_SD, BLOCK_SD, PROCESS_SD
from tunerd.sweep.learner import Belief, Learner
from tunerd.sweep.limits import NEARLY_NONE_MIB, TELLING_CALLS, Limits, without_margin
from tunerd.sweep.night import CannotStart, Night, Server, TimeUp
from tunerd.sweep.observations import free_mib
from tunerd.sweep.space import FamilyGrid, Grid, Left, Variant, variant_of

Array = NDArray[np.float64]

# Only points predicted this near the best are worth the exact arithmetic.
_PRUNE = 0.15
_PER_FAMILY = 60
_VARIANT_POINTS = 6
_MOST_PROPOSED = 400
# Measured already if its margin was this near what is thought to be needed now [MiB].
_SAME_MARGIN_MIB = 192
# By how much an arm has to be faster to be worth a start (log ratio).
_WORTH = 0.002
# Processes after which an arm would be known: one alone says little, since a start has its luck.
_PROCESSES = 3
_EXPLORING_SDS = 1.0
_TRUST = 4.0  # surprises' worth of belief that beliefs are as good as they say


@dataclass(frozen=True, slots=True)
class Proposal:
    """An arm, what is believed of it, and how much it is expected to save (as a log ratio)."""

    belief: Belief
    improvement: float


class Planes:
    """Candidates of all families, with their predictions kept until a family's laws change."""

    def __init__(self, learner: Learner, grid: Grid, limits: Limits) -> None:
        self._learner = learner
        self._grid = grid
        self._limits = limits
        self._kept: dict[tuple[tuple[str, str], Variant], tuple[object, list[Arm], Array]] = {}
        self._off: list[float] = []
        self.worth = _WORTH

    @property
    def surprise(self) -> float:
        """How many times its own error beliefs were off on this box, 1 or more."""
        squares = _TRUST + sum(z * z for z in self._off)
        return max(1.0, math.sqrt(squares / (_TRUST + len(self._off))))

    def note_surprise(self, expected: Belief | None, process: str) -> None:
        """What a process measured of an arm against what was believed of it before."""
        seen = [one.log_turn for one in self._learner.observed if one.process == process]
        if expected is None or not seen:
            return
        sd = math.sqrt(expected.sd**2 + PROCESS_SD**2 + (BLOCK_SD**2 + ANSWER_SD**2))
        self._off.append((seen[0] - expected.mean) / sd)

    def proposals(self, leader: Belief) -> list[Proposal]:
        """Points that were not measured, the most promising first."""
        return self.improvements(self._candidates(leader.arm), leader)

    def improvements(self, arms: Sequence[Arm], leader: Belief) -> list[Proposal]:
        """What knowing more of each arm is expected to save against the leader, the most first.

        Knowing more means a few more processes of it, with the noise of their starts: an arm that
        was measured often promises little, however near the leader it is.
        """
        beliefs = [one for one in self._learner.beliefs(arms) if one is not None]
        if not beliefs:
            return []
        sds = self._learner.differences_sd([one.arm for one in beliefs], leader.arm)
        noise = (PROCESS_SD**2 + ANSWER_SD**2) / _PROCESSES
        found = []
        for belief, sd in zip(beliefs, (self.surprise * sds).tolist(), strict=True):
            moves = sd * sd / math.hypot(sd, math.sqrt(noise))
            gain = leader.mean - self.worth - belief.mean
            found.append(Proposal(belief, expected_improvement(gain, moves)))
        found.sort(key=lambda one: (-round(one.improvement, 5), simplicity(one.belief.arm)))
        return found

    def _candidates(self, leader: Arm) -> list[Arm]:
        found: list[tuple[float, Arm]] = []
        for family in self._grid.families.values():
            if not self._learner.is_known(family.key):
                continue
            if self._limits.family_fails(family.key) is not None:
                continue
            centre = variant_of(leader) if family.key == leader.family else family.home
            arms, log_turn = self._plane(family, centre)
            kept = list(zip(log_turn[:_PER_FAMILY].tolist(), arms, strict=False))
            found += kept
            found += self._variants(family, centre, kept[:_VARIANT_POINTS])
        most = min((time for time, _ in found), default=0.0) + _PRUNE
        measured: dict[Arm, list[int]] = defaultdict(list)
        for arm in self._learner.measured():
            measured[without_margin(arm)].append(arm.fit_mib)

        def is_measured(arm: Arm) -> bool:
            margins = measured.get(without_margin(arm), ())
            return any(abs(margin - arm.fit_mib) <= _SAME_MARGIN_MIB for margin in margins)

        near = [(time, arm) for time, arm in found if time < most and not is_measured(arm)]
        near.sort(key=lambda one: one[0])
        return [arm for _, arm in near[:_MOST_PROPOSED] if self._limits.fails(arm) is None]

    def _plane(self, family: FamilyGrid, variant: Variant) -> tuple[list[Arm], Array]:
        """Feasible points of one variant at the margins they need, fastest prediction first."""
        model = self._learner.models.get(family.key)
        kept = self._kept.get((family.key, variant))
        if kept is None or kept[0] is not model:
            arms = list(self._points(family, variant))
            log_turn, _ = self._learner.predictions(arms)
            order = np.argsort(np.where(np.isfinite(log_turn), log_turn, np.inf), kind="stable")
            kept = self._kept[family.key, variant] = (
                model,
                [arms[at] for at in order],
                log_turn[order],
            )
        return kept[1], kept[2]

    def _points(self, family: FamilyGrid, variant: Variant) -> Iterable[Arm]:
        for ubatch in family.ubatch:
            if not family.allows_batches(ubatch, variant.batch):
                continue
            margins: dict[int, int | None] = {}
            for n_max, p_min in product(family.n_max, family.p_min):
                if n_max not in margins:
                    first = family.arm(n_max, p_min, ubatch, family.fit_mib[0], variant)
                    margins[n_max] = self._limits.margin_for(first, _EXPLORING_SDS)
                margin = margins[n_max]
                if margin is not None:
                    yield family.arm(n_max, p_min, ubatch, margin, variant)

    def _variants(
        self, family: FamilyGrid, centre: Variant, best: Sequence[tuple[float, Arm]]
    ) -> list[tuple[float, Arm]]:
        """The best points with one other thing changed: threads, KV type, batch, extra keys."""
        changed = [
            moved
            for variant in family.variants_near(centre)
            if variant != centre
            for _, arm in best[: _points_of(variant, centre)]
            if family.allows_batches(arm.ubatch, variant.batch)
            if (moved := self._moved(family, arm, variant)) is not None
        ]
        if not changed:
            return []
        log_turn, _ = self._learner.predictions(changed)
        return list(zip(log_turn.tolist(), changed, strict=True))

    def _moved(self, family: FamilyGrid, arm: Arm, variant: Variant) -> Arm | None:
        """A point in another variant; None where it does not fit as it is placed there."""
        made = family.arm(arm.n_max, arm.p_min, arm.ubatch, arm.fit_mib, variant)
        if not made.is_placed and not arm.is_placed:
            return made
        margin = self._limits.margin_for(made, _EXPLORING_SDS)
        return None if margin is None else made.with_margin(margin)


def _points_of(variant: Variant, centre: Variant) -> int:
    """How many points are tried with a variant: a placement goes with one depth and not with another."""
    is_wording = wording_of(variant.extra) != wording_of(centre.extra)
    return 1 if is_wording else _VARIANT_POINTS


def expected_improvement(gain: float, sd: float) -> float:
    """Expected value of what is gained beyond 0, of a normal gain."""
    from scipy.special import ndtr

    z = gain / max(sd, 1e-9)
    density = float(np.exp(-z * z / 2) / np.sqrt(2 * np.pi))
    return gain * float(ndtr(z)) + sd * density


_PROBE_N_MAX = 8
_PROBE_P_MIN = 0.75
_TELLING_P_MIN = 0.4
# Of the night for a first look at every family; those that are left come when nothing better is known. Without an end 24G deep
# of the second world promoted 7 instead of 10 of 13 boxes in 1 h.
_PROBING_SHARE = 0.2
_LOOKUPS = ("ngram",)
# A lookup costs next to nothing where it finds nothing, and saves some percent of what writes again what it has read: it is looked at
# where its engine without drafts is no further behind (log ratio), on top of what leads.
_LOOKUP_SAVES = 0.1
# By how much an engine without drafts may be faster (log ratio) than its steps with drafts say, which have a drafter's time in them.
_PLAIN_ERROR = 0.1
# Positions that a family was seen to draft, and filters seen at work, before predictions are trusted.
_SEEN_DRAFT = 6
_SEEN_FILTER = 0.5
# A probe with too much margin teaches as much as any; one with too little teaches nothing but that.
_PROBE_SDS = 2.0
_PROBE_MARGIN_STEPS = 3
# Batches of a first look where prompts take most of a start: with those of what serves an hour of 16G deep of the second world
# ended 74 / 97 % behind (median / p95) instead of 8 / 31; 24G deep the same.
_PROBE_UBATCH = 2048
_OOM_STEP_MIB = 512
# An expected improvement (log ratio) below which an arm is not worth a process. Starts that promised 0.03 to 0.15 % each left the
# leader where it was (2 h of 16G chat of the second world, boxes 1 to 12); an end at 0.2 % costs there. A start that takes long has
# to promise more: 8 h of 24G deep took 43 / 55 instead of 58 / 106 starts. Without steps a start's luck weighs more, and starts that
# promise 0.03 % find something (published tables). Source: docs/benchmarks.md.
_STOP, _STOP_PER_S, _LONG_STOP = 0.0015, 1.3e-5, 0.0025
_NO_TIME = "no time was left to try it"
_RACE = "race"
_RACE_ROUNDS = 6
# Other drafts in one process, where nothing tells what a step takes. Where steps are told, their law says as much without:
# 2 h of 16G chat of the second world, boxes 1 to 7, ended 1.4 % behind (mean) and 3.5 with up to five drafts more a start.
_INNER_STOP = 0.0003
_INNER = 3
_TIE = 0.002
_CONTENDERS = 12
# A fill is worth its time where the memory law is less sure than this of a leader [MiB].
_UNSURE_MIB = 45.0
# Tool calls are asked of an arm that is no further behind the leader than this (log ratio).
_WORTH_SCREENING = 0.01
_NEAR_LEADER = 0.02
_FILL_SHARE = 0.05  # of the time that is left, for a fill that nothing rests on yet


@dataclass
class Search:
    """Spends a part of the night on finding the arm to challenge the incumbent with."""

    night: Night
    grid: Grid
    limits: Limits
    policy: Policy
    incumbent: Arm
    study: Study

    def __post_init__(self) -> None:
        """Nothing was tried."""
        self.learner = self.night.learner
        # What users have now, whatever won meanwhile: output and context are held against it.
        self.serves = self.incumbent
        self.planes = Planes(self.learner, self.grid, self.limits)
        self.left_out: list[Left] = []
        self.is_exhausted = False
        self._is_fill_refused = False
        self._probed: set[tuple[tuple[str, str], int, float]] = set()
        self._has_asked_usual_tools = False
        self._contenders: tuple[tuple[int, int], list[Belief]] | None = None
        # How much of the night to leave, as far as one can tell now.
        self._reserve_s: Callable[[], float] = lambda: 0.0

    # The whole

    def run(self, reserve_s: Callable[[], float]) -> None:
        """Searches until nothing is expected to be worth a process, or time is needed elsewhere.

        Args:
            reserve_s: How much of the night to leave, as far as one can tell now.
        """
        self.is_exhausted, self._reserve_s = False, reserve_s
        try:
            for _ in range(_PROBE_MARGIN_STEPS):
                if not self.learner.n_processes(self.incumbent):
                    self.measure(self.incumbent, "incumbent")
            if self.study.seeds:  # what others found first, and then what they know too
                self._measure_seeds()
            self._probe_families(_PROBING_SHARE * self.night.budget_s)
            self._measure_seeds()
            while self._has_time():
                if self._probe_hopeful() or self._improve():
                    continue
                if not self._probe_families():
                    self.is_exhausted = all(one.reason != _NO_TIME for one in self.left_out)
                    break
        except TimeUp:
            return

    def _has_time(self) -> bool:
        leader = self.leader()
        arm = self.incumbent if leader is None else leader.arm
        return self.night.remaining_s - self.night.process_s(arm) > self._reserve_s()

    def leader(self) -> Belief | None:
        """The measured arm that is believed to be fastest, of those that may be recommended."""
        self.learner.refresh()
        beliefs = self.contenders()
        if not beliefs:
            return None
        best = min(belief.mean for belief in beliefs)
        equal = [belief for belief in beliefs if belief.mean <= best + _TIE]
        return min(equal, key=lambda belief: simplicity(belief.arm))

    def contenders(self) -> list[Belief]:
        """Measured arms that may be recommended, the incumbent among them."""
        state = self.learner.version, len(self.limits.rejected)
        if self._contenders is None or self._contenders[0] != state:
            self._contenders = state, self._find_contenders()
        return self._contenders[1]

    def _find_contenders(self) -> list[Belief]:
        arms = filter(self._is_allowed, self.learner.measured())
        beliefs = self.learner.beliefs(list(dict.fromkeys(map(self._with_room, arms))))
        # Only the fast ones are looked at closely; that the list is short is no statement.
        found: list[Belief] = []
        for belief in sorted(filter(None, beliefs), key=lambda belief: belief.mean):
            arm, has_room = belief.arm, len(found) < _CONTENDERS
            is_good = has_room and self._may_lead_if_proven(arm)
            is_good = is_good and self.limits.is_output_screened(arm)
            if is_good or arm == self.incumbent.canonical():
                found.append(belief)
        return found

    def _with_room(self, arm: Arm) -> Arm:
        """An arm that may run out of memory, at the margin at which it will not."""
        if arm == self.incumbent.canonical() or arm.is_placed or self.limits.is_safe(arm):
            return arm
        margin = self.limits.margin_for(arm, _EXPLORING_SDS)
        return arm if margin is None else arm.with_margin(max(margin, arm.fit_mib))

    def _may_lead_if_proven(self, arm: Arm) -> bool:
        """Whether nothing is against an arm but that its output may have to be proven first."""
        return (
            self.limits.fails(arm) is None
            and self.limits.is_safe(arm)
            and self.limits.worsens(arm) is None
        )

    def _is_allowed(self, arm: Arm) -> bool:
        return self.grid.contains(arm) or arm == self.incumbent.canonical()

    # Steps

    def _probe_hopeful(self) -> bool:
        """A process of a kind that may lead by what its engine's other kinds say of passes without drafts; whether there was any.

        One lookup says what they find, and those of other engines are tried where it leads.
        """
        leader = self.leader()
        if leader is None:
            return False
        is_told = any(
            self.learner.is_known(key) for key in self.grid.families if key[1] in _LOOKUPS
        )
        near = {OFF: _NEAR_LEADER}
        if not is_told or leader.arm.spec in _LOOKUPS:
            near |= dict.fromkeys(_LOOKUPS, _NEAR_LEADER if is_told else _LOOKUP_SAVES)
        behind = {
            family.key: self._plain(family.engine, leader.arm) - leader.mean
            for family in self.grid.families.values()
            if family.spec in near and not self.learner.is_known(family.key)
        }
        hopeful = sorted(key for key, log_ratio in behind.items() if log_ratio < near[key[1]])
        hopeful.sort(key=behind.__getitem__)
        return any(self._probe_families(families=[self.grid.families[key]]) for key in hopeful)

    def _plain(self, engine: str, leader: Arm) -> float:
        """Log turn time [ms] of an engine without drafts, set as the leader is; infinite where nothing tells."""
        arm = replace(leader, engine=engine, spec=OFF, n_max=0, p_min=0.0)
        if not self.learner.is_known(arm.family):
            turn = self.learner.without_drafts(arm)
            return math.inf if turn is None else turn
        (belief,) = self.learner.beliefs([arm])
        return math.inf if belief is None else belief.mean

    def _probe_families(
        self, until_s: float = math.inf, families: Sequence[FamilyGrid] | None = None
    ) -> bool:
        """A process of each family that has had none, the likeliest first; whether there was any."""
        is_any = False
        for family in self._by_cost() if families is None else families:
            for n_max, p_min in self._unseen_drafts(family):
                key = family.key, n_max, p_min
                if self.night.elapsed_s >= until_s or key in self._probed:
                    continue
                if math.isfinite(until_s) and not self._is_first(family):
                    continue
                put_off = Left(", ".join(family.key), _NO_TIME)
                if not self._has_time():  # there may be some after a challenge
                    self.left_out.append(put_off)
                    continue
                self.left_out = [one for one in self.left_out if one != put_off]
                self._probed.add(key)
                self._probe(family, n_max, p_min)
                is_any = True
        return is_any

    def _is_first(self, family: FamilyGrid) -> bool:
        """Whether a first look has it: kinds with a drafter, and what leads without one; the others come where they are hopeful.

        Where looks are dear, one without drafts comes only where a lookup on top may make up for them.
        """
        leader = self.leader()
        if family.spec != OFF or leader is None:
            return family.spec not in _LOOKUPS
        behind = self._plain(family.engine, leader.arm) - leader.mean
        is_near = not self.night.reads_much or behind < _LOOKUP_SAVES + _PLAIN_ERROR
        return family.engine == leader.arm.engine and is_near

    def _unseen_drafts(self, family: FamilyGrid) -> list[tuple[int, float]]:
        """Settings of the draft without which a family's plane is a guess; one if it drafts nothing.

        One start for all kinds, steps told or not, left 2 h of 16G chat of the second world 8.8 and 12.3 instead of 0.4 and
        0.7 % behind on boxes 1 and 3.
        """
        most = max((n for n in family.n_max if n <= _PROBE_N_MAX), default=family.n_max[0])
        # Where looks are dear, another engine's counts for what is known of this one: more is tried of it where that promises something.
        is_told = self.night.reads_much and self.learner.is_known(family.key)
        measured = [
            arm
            for arm in self.learner.measured()
            if arm.family == family.key or (is_told and arm.spec == family.spec)
        ]
        if family.spec == OFF:
            return [] if measured else [(most, family.p_min[0])]
        found = []
        wanted = min(most, _SEEN_DRAFT)
        if self.night.tells_steps(family.engine) and family.spec not in _LOOKUPS:
            # Single steps tell the time of every length and all positions, of what is confident enough.
            seen = max((arm.n_max for arm in measured if arm.p_min <= _SEEN_FILTER), default=0)
            telling = min(family.p_min, key=lambda p: abs(p - _TELLING_P_MIN))
            return [(most, telling)] if seen < wanted else []
        if max((arm.n_max for arm in measured), default=0) < wanted:
            found.append((most, family.p_min[0]))
        filtered = min(family.p_min, key=lambda p: abs(p - _PROBE_P_MIN))
        is_filtered = any(arm.p_min >= _SEEN_FILTER for arm in measured)
        takes_drafts = family.engine in self.night.box.per_request
        if filtered >= _SEEN_FILTER and not is_filtered and not takes_drafts:
            found.append((most, filtered))
        return found

    def _by_cost(self) -> list[FamilyGrid]:
        """Families, those that are not known first, of them those most like the incumbent: what is learned there helps the others."""

        def distance(family: FamilyGrid) -> tuple[bool, bool, bool, bool, bool]:
            same_engine = family.engine == self.incumbent.engine
            is_lookup = family.spec in _LOOKUPS
            same_spec = family.spec == self.incumbent.spec
            is_known = self.learner.is_known(family.key)
            return is_lookup, is_known, family.spec == OFF, not same_spec, not same_engine

        return sorted(self.grid.families.values(), key=distance)

    def _probe(self, family: FamilyGrid, n_max: int, p_min: float) -> None:
        """One process with these drafts; with more margin if it runs out of memory or spills."""
        extra = 0
        for _ in range(2 * _PROBE_MARGIN_STEPS):
            if self.limits.family_fails(family.key) is not None:
                return
            arm = self._probe_arm(family, n_max, p_min, extra)
            smaller = [n for n in family.n_max if n < n_max]
            if arm is None and smaller:
                n_max = smaller[len(smaller) // 2]
                continue
            if arm is None:
                is_placed = bool(placement_of(family.home.extra))
                by_hand = "it does not fit with its placement"
                why = by_hand if is_placed else "no margin is large enough"
                self.left_out.append(Left(", ".join(family.key), why))
                return
            if not self._has_time():
                self.left_out.append(Left(", ".join(family.key), _NO_TIME))
                return
            if self.measure(arm, "probe"):
                return
            if self.limits.has_overflowed(arm):
                extra += _OOM_STEP_MIB
                is_drafts_turn = arm.is_placed or extra > _OOM_STEP_MIB
                n_max = smaller[len(smaller) // 2] if smaller and is_drafts_turn else n_max

    def _probe_arm(
        self, family: FamilyGrid, n_max: int, p_min: float, extra_mib: int
    ) -> Arm | None:
        arm = family.arm(n_max, p_min, self._probe_ubatch(family), family.fit_mib[0])
        margin, most = self.limits.margin_for(arm, _PROBE_SDS), family.fit_mib[-1]
        wanted = family.margin_at_least((most if margin is None else margin) + extra_mib)
        probe = arm.with_margin(most if wanted is None else wanted)
        while self.limits.walled(probe) is not None:  # nothing is known of memory but such walls
            larger = family.margin_at_least(probe.fit_mib + _OOM_STEP_MIB)
            if larger is None:
                return None
            probe = probe.with_margin(larger)
        return None if self.limits.fails(probe) is not None else probe

    def _probe_ubatch(self, family: FamilyGrid) -> int:
        """What reads prompts faster than what serves, where that counts: a probe may be all that a short night proves."""
        larger = (
            one
            for one in family.ubatch
            if family.home_ubatch <= one <= _PROBE_UBATCH
            and family.allows_batches(one, family.home.batch)
        )
        return (
            max(larger, default=family.home_ubatch) if self.night.reads_much else family.home_ubatch
        )

    def _measure_seeds(self) -> None:
        for arm in filter(self.grid.contains, self.policy.seeds):
            if self.learner.n_processes(arm) == 0 and self.limits.fails(arm) is None:
                if not self._has_time():
                    return
                self.measure(arm, "seed")

    def _improve(self) -> bool:
        """Another process for what it is expected to pay most for; False when nothing is worth it.

        New points and measured ones stand in one list: a leader that owes its place to luck is found
        out by the same arithmetic that finds a better point.
        """
        self.learner.hear(self.study.news())
        leader = self._to_beat()
        if leader is None:
            return False
        for proposal in self._proposals(leader):
            belief = proposal.belief
            is_worth_it = proposal.improvement >= self._least_promise(belief.arm)
            if not is_worth_it or self.limits.worsens(belief.arm) is not None:
                continue
            if belief.n_processes and leader.n_processes < belief.n_processes:
                belief = leader
            if self.night.process_s(belief.arm) + self._reserve_s() > self.night.remaining_s:
                return False
            if not belief.n_processes and not self.study.claim(belief.arm):
                continue  # another box tries it just now, and will tell
            self.measure(belief.arm, _RACE if belief.n_processes else "explore")
            return True
        return False

    def _least_promise(self, arm: Arm) -> float:
        """The expected improvement (log ratio) below which a start of an arm is not worth what it takes."""
        if not self.night.tells_steps(arm.engine):
            return _INNER_STOP
        return min(max(_STOP, _STOP_PER_S * self.night.process_s(arm)), _LONG_STOP)

    def _to_beat(self) -> Belief | None:
        """What a start has to find something faster than: what leads; once something was won, that, by what a proof can tell."""
        (proved,) = self.learner.beliefs([self.incumbent])
        return self.leader() if self.incumbent == self.serves else proved

    def _proposals(self, leader: Belief) -> list[Proposal]:
        known = (leader.arm, self.incumbent.canonical())
        rivals = [
            arm
            for arm in self.learner.measured()
            if arm not in known and self._is_allowed(arm) and self._may_lead_if_proven(arm)
            if self.learner.n_processes(arm) < _RACE_ROUNDS
        ]
        found = [*self.planes.improvements(rivals, leader), *self.planes.proposals(leader)]
        return sorted(found, key=lambda one: -one.improvement)

    # One process

    def measure(self, arm: Arm, purpose: str) -> bool:
        """Starts an arm and measures a block, and what else the process allows cheaply.

        Raises:
            TimeUp: There is no time for it.
        """
        self.night.require(self.night.process_s(arm))
        (expected,) = self.learner.beliefs([arm])
        try:
            server = self.start(arm, purpose)
            # Prompts that all racers answer in the same round, so that their luck cancels.
            name = f"r{self.learner.n_processes(arm)}"
            server.block(self.night.block(name) if purpose == _RACE else None)
            self.learner.refresh()
            self.planes.note_surprise(expected, server.name)
            self._tell(server)
            if self.learner.observations.processes[server.name].has_spilled:
                return False
            self._inner(server, purpose)
            self._screen_output(server)
            if purpose in {"explore", _RACE}:
                self._fill_if_unsure(server)
        except (CannotStart, ServerDied):
            self.learner.refresh()
            return False
        finally:
            self._note_path()
        self.learn_usual_tools()
        return True

    def _tell(self, server: Server) -> None:
        """Other boxes of the class what a process took against what serves, where both are known."""
        (control,) = self.learner.beliefs([self.serves])
        seen = [one.log_turn for one in self.learner.observed if one.process == server.name]
        if control is not None and control.n_processes and seen:
            ratio = seen[0] - control.mean
            self.study.tell(Told(server.arm.canonical(), self.serves.canonical(), ratio))

    def learn_usual_tools(self) -> None:
        """Asks what serves as many tool calls as a winner, once an arm that may lead has broken one.

        Raises:
            TimeUp: There is no time for it.
        """
        if (
            self._has_asked_usual_tools
            or not self.limits.needs_usual_tools
            or not self._may_lead_if_excused()
        ):
            return
        self._has_asked_usual_tools = True
        self.ask_all_tools(self.serves)

    def _may_lead_if_excused(self) -> bool:
        """Whether what broke tool calls may lead, should what serves break as many; or nobody could judge any call."""
        leader = self.leader()
        broken = [arm for arm in self.learner.measured() if self.limits.breaks_tools(arm)]
        found = [one.mean for one in self.learner.beliefs(broken) if one is not None]
        return leader is None or not found or min(found) < leader.mean + _NEAR_LEADER

    def ask_all_tools(self, arm: Arm) -> None:
        """The rest of the tool calls that a winner is asked, on a process of its own.

        Raises:
            TimeUp: There is no time for it.
        """
        missing = self.policy.tool_calls - self.limits.own_tool_calls(arm)[0]
        if missing <= 0 or self.limits.fails(arm) is not None:
            return
        self.night.require(self.night.process_s(arm))
        try:
            Server(self.night, arm, "tools").tool_calls(missing, most_broken=None)
        except (CannotStart, ServerDied):
            return
        finally:
            self.learner.refresh()

    def _inner(self, server: Server, purpose: str) -> None:
        """Other settings of the draft in the same process, where the engine takes them."""
        arm = server.arm
        if arm.engine not in self.night.box.per_request or not arm.drafts:
            return
        if self.night.tells_steps(arm.engine):
            return  # its steps say what other drafts would do
        if purpose == "probe":
            for draft in self._probe_drafts(arm):
                server.block(draft=draft)
        for _ in range(_INNER):
            best = self._best_inner(server)
            if best is None:
                return
            server.block(draft=best)

    def _probe_drafts(self, arm: Arm) -> list[tuple[int, float]]:
        family = self.grid.of(arm)
        if family is None:
            return []
        filtered = min(family.p_min, key=lambda p: abs(p - _PROBE_P_MIN))
        few = min(family.n_max, key=lambda n: abs(n - 3))
        drafts = [(arm.n_max, filtered), (min(few, arm.n_max), filtered)]
        return [draft for draft in dict.fromkeys(drafts) if draft != (arm.n_max, arm.p_min)]

    def _best_inner(self, server: Server) -> tuple[int, float] | None:
        """The draft that this process allows and that is expected to save most, if any does."""
        self.learner.refresh()
        leader, family = self.leader(), self.grid.of(server.arm)
        if leader is None or family is None:
            return None
        seen = {
            (answer.arm.n_max, answer.arm.p_min)
            for answer in self.learner.observations.processes[server.name].answers
        }
        arms = [
            server.arm.with_draft(n_max, p_min)
            for n_max in family.n_max
            for p_min in family.p_min
            if n_max <= server.arm.n_max and (n_max, p_min) not in seen
        ]
        found = self.planes.improvements(arms, leader)
        if not found or found[0].improvement < _INNER_STOP:
            return None
        arm = found[0].belief.arm
        return arm.n_max, arm.p_min

    def _screen_output(self, server: Server) -> None:
        """A few tool calls for an arm that is good enough to lead.

        A build may break them with one kind of speculation and not with another.
        """
        arm = server.arm
        if self.limits.fails(arm) is not None:
            return
        if self.limits.judges_no_calls:
            return
        if arm.canonical() == self.serves.canonical():
            # Whether it makes any, before a start is spent on that.
            for _ in range(TELLING_CALLS):
                server.tool_calls(1 - self.limits.own_tool_calls(arm)[0])
                self.learner.refresh()
            return
        judged, _ = self.limits.tool_calls(arm)
        leader, belief = self.leader(), self.learner.beliefs([arm])[0]
        missing = min(self.limits.screening_calls, self.policy.tool_calls - judged)
        if missing <= 0 or leader is None or belief is None or arm == self.incumbent.canonical():
            return
        if belief.mean < leader.mean + _WORTH_SCREENING:
            server.tool_calls(missing)

    # Memory

    def _fill_if_unsure(self, server: Server) -> None:
        """Fills the context of a leader whose need is not known well."""
        arm = server.arm
        if not self.limits.knows_memory or self._is_fill_refused:
            return
        beliefs = self.learner.beliefs([arm])
        if beliefs[0] is None:
            return
        best = min((belief.mean for belief in self.contenders()), default=beliefs[0].mean)
        headroom = self.limits.headroom(arm)
        if headroom is None or headroom.was_filled or headroom.sd_mib < _UNSURE_MIB:
            return
        is_cheap = self.night.fill_s(arm) < _FILL_SHARE * self.night.remaining_s
        is_leader = beliefs[0].mean < best + _NEAR_LEADER and arm != self.incumbent.canonical()
        if is_leader and is_cheap:
            self.fill(server)

    def fill(self, server: Server) -> float | None:
        """VRAM left free with the context full [MiB]; None if it was not filled, or nobody knows.

        Raises:
            ServerDied: It did not survive.
        """
        reading = server.fill(server.n_ctx or self.learner.context)
        if reading is None:
            self._is_fill_refused = True
            return None
        self.learner.refresh()
        return free_mib(reading)

    def start(self, arm: Arm, purpose: str) -> Server:
        """A fresh process, warmed up; what the incumbent says of its context is what counts.

        Raises:
            CannotStart: It did not come up.
            ServerDied: It did not survive its first request.
        """
        server = Server(self.night, arm, purpose)
        n_ctx = self.limits.n_ctx(self.serves) or server.n_ctx
        if n_ctx and n_ctx != self.learner.context:
            self.learner.set_context(n_ctx)
        server.warm_up()
        return server

    def _note_path(self) -> None:
        self.learner.refresh()
        leader = self.leader()
        if leader is None:
            return
        current = self.learner.beliefs([self.incumbent])[0]
        better = current is None or leader.mean < current.mean - self.policy.min_gain / 2
        self.night.recommend(leader.arm if better else self.incumbent)


_STEPS = 4
_STEP_UP_MIB = 256.0
_TRIES = 2


@dataclass(frozen=True, slots=True)
class MarginStep:
    """A margin, and the VRAM that was left with the context full."""

    fit_mib: int
    free_mib: float | None
    failure: str = ""


class Finalist:
    """Finds the margin of one arm on processes started exactly as they would be deployed.

    MiB decide and not noisy times: what is missing of the wanted headroom goes on top of the margin.
    """

    def __init__(self, search: Search) -> None:
        self._search, self._limits, self._night = search, search.limits, search.night
        self.steps: list[MarginStep] = []

    def prepare(self, leader: Arm) -> Arm | None:
        """The leader at the margin to deploy it with, its context filled once; None if it failed.

        Raises:
            TimeUp: The night has no time for it.
        """
        family = self._search.grid.of(leader)
        arm, failures = leader, 0
        for _ in range(_STEPS + _TRIES):
            step = self._try(arm)
            self.steps.append(step)
            if step.failure and step.failure != "oom":
                failures += 1
                if failures >= _TRIES:
                    self._limits.reject(leader, f"failed with its final margin: {step.failure}")
                    return None
                continue
            if self._is_broken(arm):
                return None
            if not step.failure and self._is_enough(arm, step):
                return arm
            larger = None if family is None else self._larger(arm, step, family)
            if larger is None or larger <= arm.fit_mib or len(self.steps) >= _STEPS:
                break
            arm = arm.with_margin(larger)
        self._limits.reject(arm, "its context could not be filled with enough room to spare")
        return None

    def _try(self, arm: Arm) -> MarginStep:
        night = self._night
        fill_s = 0.0 if self._was_full_with_less(arm) else night.fill_s(arm)
        night.require(night.start_s(arm) + fill_s)
        try:
            server = self._search.start(arm, "finalist")
            judged, broken = self._limits.own_tool_calls(arm)
            if not broken:
                server.tool_calls(self._search.policy.tool_calls - judged)
            if self._limits.breaks_tools(arm) and not self._limits.needs_usual_tools:
                return MarginStep(arm.fit_mib, None)  # lost already: a fill takes minutes
            room = self._limits.headroom(arm) if self._was_full_with_less(arm) else None
            is_told = room is not None and room.was_filled
            free = room.free_mib if room and is_told else self._search.fill(server)
        except CannotStart as failed:
            return MarginStep(arm.fit_mib, None, failed.failure)
        except ServerDied as died:
            return MarginStep(arm.fit_mib, None, died.kind or "crash")
        finally:
            self._search.learner.refresh()
        return MarginStep(arm.fit_mib, free)

    def _was_full_with_less(self, arm: Arm) -> bool:
        """Whether its context was full with a smaller margin: then a load tells what this one leaves."""
        return any(step.free_mib is not None and step.fit_mib < arm.fit_mib for step in self.steps)

    def _is_broken(self, arm: Arm) -> bool:
        """Whether it breaks tool calls, or has less context; what may change the output has to prove that it does not."""
        search = self._search
        search.learn_usual_tools()
        are_both_broken = (
            self._limits.own_tool_calls(search.serves)[1] and self._limits.own_tool_calls(arm)[1]
        )
        # A few calls are no rate to compare with another; and whether a model makes any, what serves may just have shown.
        if are_both_broken or self._limits.makes_no_calls(arm):
            search.ask_all_tools(arm)
        reason = self._limits.shrinks(arm) or self._limits.breaks_tools(arm)
        if reason is None and self._limits.makes_no_calls(arm):
            reason = "it makes no tool calls, and what serves does"
        if reason is None and not self._limits.is_output_proven(arm):
            reason = "it was not shown to keep tool calls intact"
        if reason is not None:
            self._limits.reject(arm, reason)
        return reason is not None

    def _is_enough(self, arm: Arm, step: MarginStep) -> bool:
        """Whether room is left with the context full, by every load of the arm that was seen."""
        # Where memory is told, a context that was not seen full proves nothing.
        if step.free_mib is None:
            return not self._limits.knows_memory
        return self._limits.has_room(arm)

    def _larger(self, arm: Arm, step: MarginStep, family: FamilyGrid) -> int | None:
        """Margin to try next; None where no other helps, or nobody knows by how much."""
        if arm.is_placed or (step.free_mib is None and not step.failure):
            return None
        short = _STEP_UP_MIB if step.free_mib is None else self._limits.short_mib(arm)
        if step.free_mib is not None and step.free_mib < NEARLY_NONE_MIB:
            short = max(short, _STEP_UP_MIB)
        larger = family.margin_at_least(arm.fit_mib + max(short, 1.0))
        return family.fit_mib[-1] if larger is None else larger
