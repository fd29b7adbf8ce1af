"""The search: a few runs of each family, then whatever the model thinks most of, measured.

Order: the incumbent, one process of every family (where the engine takes settings per request, with
several of them), then the points with the largest expected improvement, until none is expected to
save enough; then the leaders race on fresh processes. Prediction proposes, measurement decides.
"""

from __future__ import annotations

from collections.abc import Callable

from tunerd.core.sweep.arm import OFF, Arm, placement_of, simplicity
from tunerd.core.sweep.grid import FamilyGrid, Grid, Left, first_arms
from tunerd.core.sweep.learner import Belief, Learner
from tunerd.core.sweep.limits import Limits
from tunerd.core.sweep.night import Block, Night, TimeUp
from tunerd.core.sweep.plane import Planes, Proposal
from tunerd.core.sweep.protocol import Policy, ServerDied
from tunerd.core.sweep.server import CannotStart, Server, is_truncated

_PROBE_N_MAX = 8
_PROBE_P_MIN = 0.75
# Positions that a family was seen to draft, and filters seen at work, before predictions are trusted.
_SEEN_DRAFT = 6
_SEEN_FILTER = 0.5
# A probe with too much margin teaches as much as any; one with too little teaches nothing but that.
_PROBE_SDS = 2.0
_PROBE_MARGIN_STEPS = 3
_OOM_STEP_MIB = 512
# An expected improvement (log ratio) below which an arm is not worth a process.
_STOP = 0.0002
_RACE = "race"
_RACERS = 5
_RACE_ROUNDS = 6
_RACE_LEAD = 0.02
_INNER_STOP = 0.001
_INNER = 3
_TIE = 0.002
_CONTENDERS = 12
# A fill is worth its time where the memory law is less sure than this of a leader [MiB].
_UNSURE_MIB = 70.0
# Tool calls are asked of an arm that is no further behind the leader than this (log ratio).
_WORTH_SCREENING = 0.01
_NEAR_LEADER = 0.02
_CONTEXTS = (131072, 65536, 40960, 32768, 16384, 8192, 4096)


class Search:
    """Spends a part of the night on finding the arm to challenge the incumbent with."""

    def __init__(
        self,
        night: Night,
        grid: Grid,
        limits: Limits,
        policy: Policy,
        incumbent: Arm,
        *,
        context_is_known: bool,
    ) -> None:
        self.night = night
        self.grid = grid
        self.limits = limits
        self.policy = policy
        self.incumbent = incumbent
        self.planes = Planes(self.learner, grid, limits)
        self.left_out: list[Left] = []
        self.is_exhausted = False
        self._context_is_known = context_is_known
        self._is_fill_refused = False
        self._has_asked_usual_tools = False
        self._contenders: tuple[tuple[int, int], list[Belief]] | None = None

    @property
    def learner(self) -> Learner:
        """What is known so far."""
        return self.night.learner

    # The whole

    def run(self, reserve_s: Callable[[], float]) -> None:
        """Searches until nothing is expected to be worth a process, or time is needed elsewhere.

        Args:
            reserve_s: How much of the night to leave, as far as one can tell now.
        """
        self.is_exhausted = False
        try:
            self._measure_incumbent()
            self._probe_families(reserve_s)
            self._measure_seeds(reserve_s)
            while self._has_time(reserve_s):
                if not self._improve(reserve_s) and not self._race(reserve_s):
                    self.is_exhausted = True
                    break
        except TimeUp:
            return

    def _has_time(self, reserve_s: Callable[[], float]) -> bool:
        leader = self.leader()
        arm = self.incumbent if leader is None else leader.arm
        return self.night.remaining_s - self.night.process_s(arm) > reserve_s()

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
        measured = [arm for arm in self.learner.measured() if self._is_allowed(arm)]
        known = [belief for belief in self.learner.beliefs(measured) if belief is not None]
        # Only the fast ones are looked at closely; that the list is short is no statement.
        known.sort(key=lambda belief: belief.mean)
        found: list[Belief] = []
        for belief in known:
            is_incumbent = belief.arm == self.incumbent.canonical()
            if is_incumbent or (len(found) < _CONTENDERS and self._may_lead(belief.arm)):
                found.append(belief)
        return found

    def _may_lead(self, arm: Arm) -> bool:
        if arm == self.incumbent.canonical():
            return True
        return self._may_lead_if_proven(arm) and self.limits.is_output_proven(arm)

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

    def _measure_incumbent(self) -> None:
        for _ in range(_PROBE_MARGIN_STEPS):
            if self.learner.n_processes(self.incumbent):
                return
            self.measure(self.incumbent, "incumbent")

    def _probe_families(self, reserve_s: Callable[[], float]) -> None:
        for family in self._by_cost():
            for n_max, p_min in self._unseen_drafts(family):
                self._probe(family, n_max, p_min, reserve_s)

    def _unseen_drafts(self, family: FamilyGrid) -> list[tuple[int, float]]:
        """Settings of the draft without which a family's plane is a guess; one if it drafts nothing."""
        most = max((n for n in family.n_max if n <= _PROBE_N_MAX), default=family.n_max[0])
        measured = [arm for arm in self.learner.measured() if arm.family == family.key]
        if family.spec == OFF:
            return [] if measured else [(most, family.p_min[0])]
        found = []
        if max((arm.n_max for arm in measured), default=0) < min(most, _SEEN_DRAFT):
            found.append((most, family.p_min[0]))
        filtered = min(family.p_min, key=lambda p: abs(p - _PROBE_P_MIN))
        is_filtered = any(arm.p_min >= _SEEN_FILTER for arm in measured)
        if filtered >= _SEEN_FILTER and not is_filtered and not self._takes_drafts(family.engine):
            found.append((most, filtered))
        return found

    def _takes_drafts(self, engine: str) -> bool:
        return engine in self.night.box.per_request

    def _has_all_arms(self) -> bool:
        """Whether as many arms were measured as are allowed."""
        most = self.policy.max_arms
        return most is not None and len(self.learner.measured()) >= most

    def _by_cost(self) -> list[FamilyGrid]:
        """Families, those most like the incumbent first: what is learned there helps the others."""

        def distance(family: FamilyGrid) -> tuple[bool, bool, bool]:
            same_engine = family.engine == self.incumbent.engine
            same_spec = family.spec == self.incumbent.spec
            return not (same_engine and same_spec), family.spec == "ngram", not same_engine

        return sorted(self.grid.families.values(), key=distance)

    def _probe(
        self, family: FamilyGrid, n_max: int, p_min: float, reserve_s: Callable[[], float]
    ) -> None:
        """One process with these drafts; with more margin if it runs out of memory or spills."""
        extra = 0
        for _ in range(2 * _PROBE_MARGIN_STEPS):
            reason = self.limits.family_fails(family.key)
            if reason is not None:
                return
            arm = self._probe_arm(family, n_max, p_min, extra)
            smaller = [n for n in family.n_max if n < n_max]
            if arm is None and smaller:
                n_max = smaller[len(smaller) // 2]
                continue
            if arm is None:
                is_placed = bool(placement_of(family.home.extra))
                why = (
                    "it does not fit as it is placed" if is_placed else "no margin is large enough"
                )
                self.left_out.append(Left(", ".join(family.key), why))
                return
            if not self._has_time(reserve_s):
                self.left_out.append(Left(", ".join(family.key), "no time was left to try it"))
                return
            if self._has_all_arms():
                why = f"{self.policy.max_arms} arms were measured already"
                self.left_out.append(Left(", ".join(family.key), why))
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
        arm = family.arm(n_max, p_min, family.home_ubatch, family.fit_mib[0])
        margin = self.limits.margin_for(arm, _PROBE_SDS)
        if margin is None:
            margin = family.fit_mib[-1]
        wanted = family.margin_at_least(margin + extra_mib)
        if wanted is None:
            wanted = family.fit_mib[-1]
        probe = arm.with_margin(wanted)
        while self.limits.walled(probe) is not None:  # nothing is known of memory but such walls
            larger = family.margin_at_least(probe.fit_mib + _OOM_STEP_MIB)
            if larger is None:
                return None
            probe = probe.with_margin(larger)
        return None if self.limits.fails(probe) is not None else probe

    def _measure_seeds(self, reserve_s: Callable[[], float]) -> None:
        for arm in first_arms(self.policy, self.grid):
            if self.learner.n_processes(arm) == 0 and self.limits.fails(arm) is None:
                if not self._has_time(reserve_s) or self._has_all_arms():
                    return
                self.measure(arm, "seed")

    def _improve(self, reserve_s: Callable[[], float]) -> bool:
        """Another process for what it is expected to pay most for; False when nothing is worth it.

        New points and measured ones stand in one list: a leader that owes its place to luck is found
        out by the same arithmetic that finds a better point.
        """
        leader = self.leader()
        if leader is None:
            return False
        for proposal in self._proposals(leader):
            if proposal.improvement < _STOP:
                return False
            belief = proposal.belief
            if self.limits.worsens(belief.arm) is not None:
                continue
            if belief.n_processes and leader.n_processes < belief.n_processes:
                belief = leader
            if self.night.process_s(belief.arm) + reserve_s() > self.night.remaining_s:
                return False
            self.measure(belief.arm, _RACE if belief.n_processes else "explore")
            return True
        return False

    def _race(self, reserve_s: Callable[[], float]) -> bool:
        """Another process for a leader that was measured least; False when the race is over."""
        beliefs = sorted(self.contenders(), key=lambda belief: belief.mean)[:_RACERS]
        if not beliefs:
            return False
        racers = [
            belief
            for belief in beliefs
            if belief.mean < beliefs[0].mean + _RACE_LEAD / belief.n_processes**0.5
            and belief.n_processes < _RACE_ROUNDS
            and belief.arm != self.incumbent.canonical()
        ]
        for belief in sorted(racers, key=lambda one: one.n_processes):
            if self.night.process_s(belief.arm) + reserve_s() > self.night.remaining_s:
                return False
            self.measure(belief.arm, _RACE)
            return True
        return False

    def _proposals(self, leader: Belief) -> list[Proposal]:
        known = (leader.arm, self.incumbent.canonical())
        rivals = [
            arm
            for arm in self.learner.measured()
            if arm not in known and self._is_allowed(arm) and self._may_lead_if_proven(arm)
        ]
        found = self.planes.improvements(rivals, leader)
        if not self._has_all_arms():
            found += self.planes.proposals(leader)
        return sorted(found, key=lambda one: -one.improvement)

    # One process

    def measure(self, arm: Arm, purpose: str) -> bool:
        """Starts an arm and measures a block, and what else the process allows cheaply.

        Raises:
            TimeUp: There is no time for it.
        """
        self.night.require(self.night.process_s(arm))
        try:
            server = Server(self.night, arm, purpose)
            server.warm_up(exact=False)
            server.block(self._race_block(arm) if purpose == _RACE else None)
            self.learner.refresh()
            if self.learner.observations.processes[server.name].has_spilled:
                return False
            self._inner(server, purpose)
            self._screen_output(server)
            self._fill_if_unsure(server)
        except (CannotStart, ServerDied):
            self.learner.refresh()
            return False
        finally:
            self._note_path()
        self.learn_usual_tools()
        return True

    def learn_usual_tools(self) -> None:
        """Asks what serves as many tool calls as a winner, once an arm has broken one.

        Raises:
            TimeUp: There is no time for it.
        """
        if not self._has_asked_usual_tools and self.limits.needs_usual_tools:
            self._has_asked_usual_tools = True
            self.ask_all_tools(self.incumbent)

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

    def _race_block(self, arm: Arm) -> Block:
        """Prompts that all racers answer in the same round, so that their luck cancels."""
        return self.night.block(f"r{self.learner.n_processes(arm)}")

    def _inner(self, server: Server, purpose: str) -> None:
        """Other settings of the draft in the same process, where the engine takes them."""
        arm = server.arm
        if arm.engine not in self.night.box.per_request or not arm.drafts or purpose == _RACE:
            return
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
            if n_max <= server.arm.n_max
            and n_max >= server.arm.n_max - 2
            and (n_max, p_min) not in seen
        ]
        found = self.planes.improvements(arms, leader)
        if not found or found[0].improvement < _INNER_STOP:
            return None
        arm = found[0].belief.arm
        return arm.n_max, arm.p_min

    def _screen_output(self, server: Server) -> None:
        """Tool calls for an arm that is good enough to lead but may change the output."""
        arm = server.arm
        if not self.limits.changes_output(arm) or self.limits.fails(arm) is not None:
            return
        judged, _ = self.limits.tool_calls(arm)
        leader, belief = self.leader(), self.learner.beliefs([arm])[0]
        if judged >= self.policy.tool_calls or leader is None or belief is None:
            return
        if belief.mean < leader.mean + _WORTH_SCREENING:
            server.tool_calls(self.policy.tool_calls - judged)

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
        if beliefs[0].mean < best + _NEAR_LEADER and arm != self.incumbent.canonical():
            self.fill(server)

    def fill(self, server: Server) -> float | None:
        """VRAM left free with the context full [MiB]; None if unknown.

        Where nobody said how long the context is, the first fill finds out: what is refused or cut
        was too long.

        Raises:
            ServerDied: It did not survive.
        """
        while True:
            asked = self.learner.context
            reading = server.fill(asked)
            cut = None if reading is None else is_truncated(reading, asked)
            if reading is not None and reading.n_ctx and reading.n_ctx < asked:
                self.set_context(reading.n_ctx)
            elif (reading is None or cut) and not self._context_is_known:
                shorter = [one for one in _CONTEXTS if one < asked]
                if not shorter:
                    break
                self.set_context(shorter[0], known=False)
                continue
            break
        if reading is None:
            self._is_fill_refused = True
            return None
        self._context_is_known = True
        self.learner.refresh()
        free = reading.vram_free_min_mib
        return -reading.spill_mib if reading.has_spilled and reading.spill_mib else free

    def set_context(self, n_tokens: int, *, known: bool = True) -> None:
        """From now on the context is this long."""
        self.learner.set_context(n_tokens)
        self._context_is_known = known

    def _note_path(self) -> None:
        self.learner.refresh()
        leader = self.leader()
        if leader is None:
            return
        current = self.learner.beliefs([self.incumbent])[0]
        better = current is None or leader.mean < current.mean - self.policy.min_gain / 2
        self.night.recommend(leader.arm if better else self.incumbent)
