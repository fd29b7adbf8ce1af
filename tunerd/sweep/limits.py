"""What may be recommended: memory with the context full, failures, prompts and classes not worse."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tunerd.measure.trust import FOR_A_WINNER, WHILE_SEARCHING, repeats_more
from tunerd.profile.arm import Arm, Extra, Policy, shape_of
from tunerd.profile.workload import Workload
from tunerd.sweep import observations
from tunerd.sweep.learner import Learner
from tunerd.sweep.observations import Process
from tunerd.sweep.space import Grid, Left, Variant, variant_of

_SAFE_SDS = 1.64
_EXTRA_HEADROOM_MIB = 48.0
# CUDA takes memory in pieces of 2 MiB and more: so little is none, and nobody says how much more there was no room for.
NEARLY_NONE_MIB = 16.0
_TRIES = 2
_FAMILY_TRIES = 3
_ROOM_SDS = 2.0
_READING_SD = 12.0
# Nine of ten builds that break a seventh of their calls break one of so many.
_SCREENING_CALLS = 16
_SURELY_REPEATED = 0.6
# Where so many of what serves were none the model, or its route, makes none.
TELLING_CALLS = 3
_BREAKS_MORE_SDS = 2.0
# All of a kind are looked at after each of their starts: at the chance of a single arm, what serves and repeats itself in
# six of ten answers too had 13 to 39 of 100 kinds given up.
_SHARE_OF_ALL = 0.1
# A slower prompt is worth a veto where it costs more than this share of the turn.
_PREFILL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Headroom:
    """VRAM left free with the context full, and its standard error [MiB]."""

    free_mib: float
    sd_mib: float
    was_filled: bool

    @property
    def is_safe(self) -> bool:
        """Whether a start of this arm will hardly ever run out."""
        return self.free_mib >= _SAFE_SDS * self.sd_mib


Output = tuple[tuple[str, str], str, Extra]
Before = Sequence[Sequence[float]]  # and after
# What was asked (class, whether it was held to its length, which), and the share that repeats what it said. Then the same of
# its beginning, which is as long as the answers of what does not draft.
_Text = tuple[tuple[object, float], tuple[object, float]]


class _Seen:
    """What processes showed, by what it says something about."""

    def __init__(self, processes: Iterable[Process], context: int, workload: Workload) -> None:
        self.knows_memory = False
        self.prompts_ms: dict[Arm, list[float]] = defaultdict(list)
        self.loads: dict[Arm, list[float]] = defaultdict(list)
        # By how much less was free with the context full than after the same load; it does not go with the margin.
        self.growths: dict[Arm, list[float]] = defaultdict(list)
        self.filled: dict[Arm, list[float]] = defaultdict(list)
        self.spilled: set[Arm] = set()
        self.failures: dict[Arm, list[str]] = defaultdict(list)
        self.n_ctx: dict[Arm, int] = {}
        self.walls: list[Arm] = []
        self.answered_families: set[tuple[str, str]] = set()
        self.family_failures: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.started_variants: set[tuple[tuple[str, str], Variant]] = set()
        self.refused_variants: set[tuple[tuple[str, str], Variant]] = set()
        # What takes the whole workload, and how often a start of what has not was seen to refuse a class of it.
        self.takes_all: set[Arm] = set()
        self.refusals: dict[Arm, int] = defaultdict(int)
        self.tools: dict[Output, list[int]] = defaultdict(lambda: [0, 0])
        self.own_tools: dict[Arm, list[int]] = defaultdict(lambda: [0, 0])
        # Of an arm, and of all whose output may differ in the same way, by prompt: arms share prompts, and what answers one
        # alike is no further evidence.
        self.repeated: dict[Arm | Output, dict[str, _Text]] = defaultdict(dict)
        self._texts_of: dict[Arm, tuple[dict[str, _Text], ...]] = {}
        self.repeating: dict[tuple[Arm | Output, bool], str | None] = {}  # once judged
        # Tool calls without a verdict, whatever the margin.
        self.untold_calls: dict[Arm, int] = defaultdict(int)
        for process in processes:
            self._add(process, context, workload)

    def _add(self, process: Process, context: int, workload: Workload) -> None:
        arm = process.arm.canonical()
        variant = arm.family, variant_of(arm)
        if process.n_ctx:
            context = process.n_ctx
            self.n_ctx[arm] = min(context, self.n_ctx.get(arm, context))
        self.knows_memory |= process.vram_free_mib is not None
        if process.answers:
            self.answered_families.add(arm.family)
        if process.is_up:
            self.started_variants.add(variant)
        self.untold_calls[without_margin(arm)] += process.n_untold_calls
        if process.has_spilled:
            self.spilled.add(memory_of(arm))
        if process.has_refused:
            self.refusals[_prompt_of(arm)] += 1
        elif {answer.text for answer in process.answers} >= set(range(len(workload.classes))):
            self.takes_all.add(_prompt_of(arm))
        deep = self._add_answers(process, arm, context, workload)
        self._add_memory(process, memory_of(arm), deep)
        if process.failure or process.died_of:
            self._add_failure(process, arm)

    def _add_answers(
        self, process: Process, arm: Arm, context: int, workload: Workload
    ) -> list[float]:
        """Times and tool calls; what was free with the context full [MiB]."""
        deep, prompts_ms, tool_calls = [], [], []
        deepest = workload.deepest
        for answer in process.answers:
            whole = observations.as_asked(process, answer, workload)
            if answer.text == deepest and whole is not None and whole.prompt_ms is not None:
                prompts_ms.append(whole.prompt_ms)
            free = observations.free_mib(answer.reading)
            self.knows_memory |= free is not None
            self._add_text(answer)
            if answer.reading.tool_ok is not None:
                tool_calls.append(answer.reading.tool_ok)
            if free is not None and observations.is_full(answer.depth_end, context):
                deep.append(free)
        if prompts_ms:
            self.prompts_ms[_prompt_of(arm)] += prompts_ms
        if tool_calls:
            for judged in (self.tools[_output_of(arm)], self.own_tools[without_margin(arm)]):
                judged[0] += len(tool_calls)
                judged[1] += tool_calls.count(False)
        return deep

    def _add_text(self, answer: observations.Answer) -> None:
        reading, ratio = answer.reading, answer.reading.repeated_ratio
        if answer.text is None or ratio is None:
            return
        n_plain = (reading.predicted_n or 1) / observations.PLAIN_TOKENS
        begin = ratio if n_plain <= 1 else 1 - (1 - ratio) * n_plain
        if n_plain > 1 and begin < _SURELY_REPEATED:  # where it began is told by letters
            begin = 0.0
        begun = answer.text, reading.is_held
        found = ((*begun, answer.request.n_predict), ratio), (begun, begin)
        if answer.arm not in self._texts_of:
            names: tuple[Arm | Output, ...] = without_margin(answer.arm), _output_of(answer.arm)
            self._texts_of[answer.arm] = tuple(self.repeated[who] for who in names)
        for texts in self._texts_of[answer.arm]:
            texts[answer.request.prompt_id] = found

    def _add_memory(self, process: Process, need: Arm, deep: Sequence[float]) -> None:
        """What was free after the load, and with the context full."""
        loaded = process.vram_free_mib if process.is_up else None
        if loaded is not None:
            self.loads[need].append(loaded)
        if deep:
            self.filled[need].append(min(deep))
        if deep and loaded is not None and not 0.0 <= min(deep) < NEARLY_NONE_MIB:
            self.growths[without_margin(need)].append(loaded - min(deep))

    def _add_failure(self, process: Process, arm: Arm) -> None:
        failure = process.failure or process.died_of
        self.failures[arm].append(failure)
        if len(self.failures[arm]) <= _TRIES:  # one arm alone says little of its family
            self.family_failures[arm.family].append(failure)
        if "oom" in (process.failure, process.died_of):
            self.walls.append(arm)
        if process.failure == "refused":
            self.refused_variants.add((arm.family, variant_of(arm)))


class Limits:
    """Judges arms by what has been seen so far."""

    def __init__(self, learner: Learner, grid: Grid, policy: Policy, incumbent: Arm) -> None:
        self._learner = learner
        self._grid = grid
        self._policy = policy
        self._incumbent = incumbent
        self.rejected: dict[Arm, str] = {}
        self._kept: tuple[tuple[int, int], _Seen] | None = None
        self._worsening: tuple[int, dict[Arm, str | None]] = (-1, {})

    @property
    def _seen(self) -> _Seen:
        state = self._learner.observations.n_samples, self._learner.context
        if self._kept is None or self._kept[0] != state:
            processes = self._learner.observations.processes.values()
            self._kept = state, _Seen(processes, self._learner.context, self._learner.workload)
        return self._kept[1]

    # Memory

    @property
    def knows_memory(self) -> bool:
        """Whether this box says anything about VRAM."""
        return self._seen.knows_memory

    @property
    def headroom_mib(self) -> float:
        """VRAM that must stay free with the context full."""
        return max(float(self._policy.headroom_mib), self._learner.headroom_mib)

    @property
    def target_mib(self) -> float:
        """What margins are chosen for: a little more, so that the next start passes as well."""
        return self.headroom_mib + _EXTRA_HEADROOM_MIB

    @property
    def _jitter_mib(self) -> float:
        """By how much loads of one arm differ."""
        return self._learner.headroom_mib / 3.0

    def headroom(self, arm: Arm) -> Headroom | None:
        """Of an arm, by its loads and what contexts took at any margin, else from the law; None if nobody knows."""
        if not self.knows_memory:
            return None
        key = memory_of(arm.canonical())
        filled, loads = self._seen.filled.get(key), self._seen.loads.get(key)
        growths = self._seen.growths.get(without_margin(key))
        jitter = self._jitter_mib
        if growths and loads:  # every load of it says how lucky those were that were filled
            of_readings = _READING_SD / math.sqrt(len(growths))
            error = math.hypot(jitter / math.sqrt(len(loads)), of_readings)
            return Headroom(fmean(loads) - fmean(growths), error, was_filled=True)
        if filled:
            error = math.hypot(jitter / math.sqrt(len(filled)), _READING_SD)
            return Headroom(fmean(filled), error, was_filled=True)
        free, error = self._learner.memory_of(arm).free_mib(arm)
        return Headroom(free, error, was_filled=False)

    def is_safe(self, arm: Arm) -> bool:
        """Whether it will run with the context full, as far as one can tell."""
        if memory_of(arm.canonical()) in self._seen.spilled:
            return False
        headroom = self.headroom(arm)
        return headroom is None or headroom.is_safe

    def has_room(self, arm: Arm) -> bool:
        """Whether enough stays free with the context full, by every load of the arm that was seen.

        With one standard error, a simulated winner of 72 left less than it should (docs/benchmarks.md).
        """
        room = self.headroom(arm)
        return room is None or room.free_mib - _ROOM_SDS * room.sd_mib >= self.headroom_mib

    def short_mib(self, arm: Arm) -> float:
        """By how much more margin one load of it will hardly fail to have room.

        A step to what one load has on average fell short again in every other one, and a fill takes minutes.
        """
        headroom, jitter = self.headroom(arm), self._jitter_mib
        if headroom is None:
            return 0.0
        wanted = self.headroom_mib + _ROOM_SDS * math.hypot(jitter, _READING_SD)
        return wanted + _SAFE_SDS * math.hypot(jitter, headroom.sd_mib) - headroom.free_mib

    def margin_for(self, arm: Arm, sds: float) -> int | None:
        """Smallest allowed margin at which the context fits; None where no margin is enough.

        What is placed by hand has no margin: 0 where it fits, or nobody knows whether it does.
        """
        family = self._grid.of(arm)
        if family is None:
            return None
        law = self._learner.memory_of(arm)
        needed_mib = law.needed_margin_mib(arm, self.target_mib, sds)
        if arm.is_placed:
            is_unknown = not self.knows_memory or not law.n_processes
            return 0 if is_unknown or needed_mib == 0.0 else None
        usual = self._incumbent.fit_mib
        is_usual = usual in family.fit_mib and not self._incumbent.is_placed
        kept = usual if is_usual else family.fit_mib[-1]
        if not self.knows_memory or len(family.fit_mib) == 1:
            return kept
        if law.is_binding:
            return family.margin_at_least(needed_mib)
        return kept if needed_mib == 0.0 else None

    def n_ctx(self, arm: Arm) -> int | None:
        """What one request of an arm may fill, by its own starts; None where none has told."""
        return self._seen.n_ctx.get(arm.canonical())

    def shrinks(self, arm: Arm) -> str | None:
        """Whether an engine that fits the context to the card gives an arm less of it than what serves, or than it asks for."""
        own, usual = self.n_ctx(arm), self.n_ctx(self._incumbent)
        if self._policy.at_least_tok_s is not None:
            wanted = arm.context_size // self._policy.n_slots
            is_less = own is not None and own < wanted
            return f"the engine gives only {own} of {wanted} tokens of context" if is_less else None
        is_less = own is not None and usual is not None and own < usual
        return f"its context would be {own} instead of {usual}" if is_less else None

    # Failures

    def fails(self, arm: Arm) -> str | None:
        """Why an arm is not worth another start, if so."""
        if arm.canonical() in self.rejected:
            return self.rejected[arm.canonical()]
        broken = self.shrinks(arm) or self.breaks_tools(arm) or self.repeats(arm)
        if broken is not None:
            return broken
        failures = self.failures(arm)
        if "oom" in failures:
            return "ran out of memory"
        if "refused" in failures:
            return "the engine refused it"
        if len(failures) >= _TRIES:
            return f"failed {len(failures)} times: {', '.join(failures)}"
        return (
            self.walled(arm)
            or self.family_fails(arm.family)
            or self._variant_refused(arm)
            or self._refuses(arm)
        )

    def failures(self, arm: Arm) -> list[str]:
        """Every failure of an arm, in order."""
        return self._seen.failures.get(arm.canonical(), [])

    def has_overflowed(self, arm: Arm) -> bool:
        """Whether it ran out of the card's memory, or into the host's."""
        return "oom" in self.failures(arm) or memory_of(arm.canonical()) in self._seen.spilled

    def family_fails(self, family: tuple[str, str]) -> str | None:
        """Why a family is given up, if so: it never came up."""
        if family in self._seen.answered_families:
            return None
        failures = self._seen.family_failures.get(family, [])
        hard = [failure for failure in failures if failure != "oom"]
        if len(hard) >= _FAMILY_TRIES or len(failures) >= 2 * _FAMILY_TRIES:
            return f"never came up: {', '.join(failures)}"
        return None

    def _variant_refused(self, arm: Arm) -> str | None:
        variant = arm.family, variant_of(arm)
        if variant in self._seen.started_variants or variant not in self._seen.refused_variants:
            return None
        return "the engine refused its settings"

    def _refuses(self, arm: Arm) -> str | None:
        """Whether a class of the workload was refused whatever the draft, start for start: no turn is whole without it."""
        key = _prompt_of(arm)
        if key in self._seen.takes_all or self._seen.refusals.get(key, 0) < _FAMILY_TRIES:
            return None
        return "the server refuses a class of the workload"

    def walled(self, arm: Arm) -> str | None:
        """A smaller need ran out of memory already."""
        for wall in self._seen.walls:
            if (
                wall.family == arm.family
                and wall.kv == arm.kv
                and arm.ubatch >= wall.ubatch
                and (not arm.drafts or arm.n_max >= wall.n_max)
                and arm.context_size >= wall.context_size
                and _needs_no_less(arm, wall)
            ):
                return f"one that needs less ran out of memory: {wall}"
        return None

    # What else must not get worse

    def worsens(self, arm: Arm) -> str | None:
        """Which limit an arm is expected to break, if any."""
        if self._worsening[0] != self._learner.version:
            self._worsening = self._learner.version, {}
        known = self._worsening[1]
        if arm not in known:
            known[arm] = self._worsens(arm)
        return known[arm]

    def _worsens(self, arm: Arm) -> str | None:
        """By the laws, but for prompts that were measured: the gate goes by those."""
        before = self._learner.prediction_of([self._incumbent])
        after = self._learner.prediction_of([arm])
        if before is None or after is None:
            return None
        deepest = self._learner.workload.deepest
        turns, prefills = (
            [told[:, 0].tolist() for told in both]
            for both in ((before.class_ms, after.class_ms), (before.prefill_ms, after.prefill_ms))
        )
        for prefill, one in zip(prefills, (self._incumbent, arm), strict=True):
            seen = self._seen.prompts_ms.get(_prompt_of(one))
            prefill[deepest] = sum(seen) / len(seen) if seen else prefill[deepest]
        return worse(turns, prefills, deepest=deepest, policy=self._policy)

    def reject(self, arm: Arm, reason: str) -> None:
        """Keeps an arm out from now on."""
        self.rejected[arm.canonical()] = reason

    # What the model says

    def changes_output(self, arm: Arm) -> bool:
        """Whether the model may say something else than with the incumbent."""
        return arm.kv != self._incumbent.kv or arm.wording != self._incumbent.wording

    def tool_calls(self, arm: Arm) -> tuple[int, int]:
        """Tool calls judged, and broken, of arms whose output may differ in the same way."""
        judged, broken = self._seen.tools.get(_output_of(arm), (0, 0))
        return judged, broken

    def own_tool_calls(self, arm: Arm) -> tuple[int, int]:
        """Tool calls judged, and broken, of this very arm, whatever its margin."""
        judged, broken = self._seen.own_tools.get(without_margin(arm), (0, 0))
        return judged, broken

    def is_output_proven(self, arm: Arm) -> bool:
        """Whether an arm that may change the output got through all its tool calls."""
        return self._got_through(arm, self._policy.tool_calls)

    def is_output_screened(self, arm: Arm) -> bool:
        """Whether one that may change it got through a few, which is enough to lead until it is to be deployed."""
        return self._got_through(arm, self.screening_calls)

    @property
    def screening_calls(self) -> int:
        """How many calls tell a build that often breaks them."""
        return min(self._policy.tool_calls, _SCREENING_CALLS)

    def _got_through(self, arm: Arm, n_calls: int) -> bool:
        if not self.changes_output(arm):
            return True
        judged, _ = self.tool_calls(arm)
        return judged >= n_calls and self.breaks_tools(arm) is None

    @property
    def judges_no_calls(self) -> bool:
        """Whether no tool call was judged, with what serves neither: a model that makes none, or a route that takes none."""
        untold = self._seen.untold_calls.get(without_margin(self._incumbent), 0)
        return not self._seen.tools and untold >= TELLING_CALLS

    def missing_calls(self, arm: Arm) -> int:
        """How many tool calls an arm has to be asked before it is deployed; where none is judged one shows that it is so."""
        wanted = 1 if self.judges_no_calls else self._policy.tool_calls
        return max(wanted - self.own_tool_calls(arm)[0], 0)

    @property
    def needs_usual_tools(self) -> bool:
        """Whether tool calls broke, or nobody could judge any, and nobody knows whether that is so with the incumbent as well."""
        is_broken = any(broken for _, broken in self._seen.tools.values())
        is_untold = any(self._seen.untold_calls.values()) and not self._seen.tools
        n_asked = self.own_tool_calls(self._incumbent)[0]
        is_unknown = is_broken or (is_untold and not self.judges_no_calls)
        return is_unknown and n_asked < self._policy.tool_calls

    def makes_no_calls(self, arm: Arm) -> bool:
        """Whether no tool call of an arm could be judged, where those of the incumbent could."""
        return self.own_tool_calls(self._incumbent)[0] > 0 and not self.own_tool_calls(arm)[0]

    def breaks_tools(self, arm: Arm) -> str | None:
        """Whether tool calls break more often than with the incumbent, in words."""
        usual = self.own_tool_calls(self._incumbent)
        rows = [self.own_tool_calls(arm)]
        output = _output_of(arm)
        if output != _output_of(self._incumbent):
            rows.append(self.tool_calls(arm))
        for judged, broken in rows:
            if _breaks_more(judged, broken, *usual):
                return f"{broken} of {judged} tool calls broke"
        return None

    def repeats(self, arm: Arm, *, has_won: bool = False) -> str | None:
        """Whether more of its answers repeat themselves than of what serves, in words; of a winner less is enough."""
        serves, judged = without_margin(self._incumbent), self._seen.repeating
        rows: list[Arm | Output] = [without_margin(arm), _output_of(arm)]
        for who in rows:
            if (who, has_won) not in judged:
                is_own = who in {serves, _output_of(serves)}
                judged[who, has_won] = None if is_own else self._repeats(who, serves, has_won)
        return judged[rows[0], has_won] or judged[rows[1], has_won]

    def _repeats(self, who: Arm | Output, serves: Arm, has_won: bool) -> str | None:
        known, why = self._seen.repeated, None
        chance = FOR_A_WINNER if has_won else WHILE_SEARCHING
        chance *= 1.0 if isinstance(who, Arm) else _SHARE_OF_ALL
        for part in (0,) if has_won else (0, 1):
            sides = [[one[part] for one in known.get(side, {}).values()] for side in (who, serves)]
            alike = set.intersection(*({asked for asked, _ in side} for side in sides))
            mine, usual = ([one for asked, one in side if asked in alike] for side in sides)
            why = why or repeats_more(mine, usual, chance=chance, whose="those of what serves")
        return why

    def spoils(self, arm: Arm) -> str | None:
        """What keeps an arm from winning whatever its speed: less context, broken calls, answers that repeat themselves."""
        return self.shrinks(arm) or self.breaks_tools(arm) or self.repeats(arm, has_won=True)

    def reasons(self) -> list[Left]:
        """Every arm and family that was given up, and why."""
        found = [Left(str(arm), reason) for arm, reason in self.rejected.items()]
        found += [Left(str(arm), ", ".join(kinds)) for arm, kinds in self._seen.failures.items()]
        found += [
            Left(str(arm), broken)
            for arm in self._learner.measured()
            if arm not in self.rejected
            and (broken := self.breaks_tools(arm) or self.repeats(arm)) is not None
        ]
        found += [Left(str(arm), "VRAM spilled into RAM") for arm in self._seen.spilled]
        found += [
            Left(", ".join(arm.family) + f", ubatch {arm.ubatch}", why)
            for arm in self._seen.refusals
            if (why := self._refuses(arm)) is not None
        ]
        for family in self._grid.families:
            reason = self.family_fails(family)
            if reason is not None:
                found.append(Left(", ".join(family), reason))
        return found


def worse(turns: Before, prefills: Before, *, deepest: int, policy: Policy) -> str | None:
    """Which limit is broken, in words: the deepest class's prompt, or the worst class's turn.

    Both as they were before and as they would be, by class [ms].
    """
    before_ms, after_ms = turns
    prefill_ms, more_ms = prefills[0][deepest], prefills[1][deepest] - prefills[0][deepest]
    prefill = more_ms / max(prefill_ms, 1e-9)
    if prefill > policy.max_prefill_loss and more_ms > _PREFILL_SHARE * before_ms[deepest]:
        return (
            f"the prompt of the deepest class gets {prefill:.0%} slower, "
            f"and only {policy.max_prefill_loss:.0%} is allowed"
        )
    both = zip(before_ms, after_ms, strict=True)
    worst = max(after / max(before, 1e-9) - 1 for before, after in both)
    if worst > policy.max_class_loss:
        return f"one class gets {worst:.0%} slower, and only {policy.max_class_loss:.0%} is allowed"
    return None


def _breaks_more(judged: int, broken: int, usual_judged: int, usual_broken: int) -> bool:
    """Whether one share of broken calls is above another; above none at all every one is."""
    if not broken or not usual_broken:
        return broken > 0
    pooled = (broken + usual_broken) / (judged + usual_judged)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / judged + 1 / usual_judged))
    return broken / judged - usual_broken / usual_judged > _BREAKS_MORE_SDS * spread


def _needs_no_less(arm: Arm, wall: Arm) -> bool:
    """Whether an arm has no more in RAM than one that ran out of VRAM, as far as that can be compared."""
    if not arm.is_placed and not wall.is_placed:
        return arm.fit_mib <= wall.fit_mib
    if shape_of(arm) != shape_of(wall):
        return False
    return (arm.n_cpu_moe or 0) <= (wall.n_cpu_moe or 0)


def _output_of(arm: Arm) -> Output:
    """Names what decides about the text: engine and kind of speculation, cache type, other keys."""
    return arm.family, arm.kv, arm.wording


def memory_of(arm: Arm) -> Arm:
    """Names what an arm needs memory for: everything but p-min."""
    return replace(arm, p_min=0.0)


def _prompt_of(arm: Arm) -> Arm:
    """Names what decides how fast a prompt is read, and whether it is taken: all but the draft's settings and the margin."""
    return replace(arm.canonical(), n_max=0, p_min=0.0, fit_mib=0)


def without_margin(arm: Arm) -> Arm:
    """Names a point of the plane whatever its margin."""
    return replace(arm.canonical(), fit_mib=0)
