"""The largest context that holds a speed: sizes bisected on processes as they would be deployed, the last one proved.

More context leaves less of the card to the weights, so speed falls with it, and a size that is too slow speaks
for all larger ones. What is proved is that a turn takes no longer than with its answers at the wanted speed: a
challenge, whose other side is computed from the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from tunerd.measure.pairs import A, B, PairBlock, Side, Turn
from tunerd.profile.arm import Arm, Reading, ServerDied
from tunerd.profile.workload import RequestClass
from tunerd.sweep.challenge import Challenge, Ended, Result, block_of
from tunerd.sweep.night import CannotStart, TimeUp
from tunerd.sweep.search import Search
from tunerd.sweep.space import FamilyGrid
from tunerd.words import all_known, counted

# One start may be so much slower than the next: the proof decides. Source: docs/benchmarks.md, 2.7 % between starts.
LUCK = 0.03
_MARGINS_TRIED = 3
_UNTOLD = "not every class of the workload reported its speed"
_OOM_STEP_MIB = 256.0


def sizes_between(least: int, most: int) -> tuple[int, ...]:
    """Sizes to look at, ascending, a quarter of a power of two apart, and `most` itself [tok]."""
    found = {(4 + quarter) << power for power in range(6, 24) for quarter in range(4)}
    return tuple(sorted(one for one in found | {most} if least <= one <= most))


def _speed_tok_s(classes: Sequence[RequestClass], token_ms: Sequence[float]) -> float:
    """Tokens decoded in a second over a round of the workload, from the time of one token in each class."""
    tokens = [one.weight * one.n_predict for one in classes]
    decode_ms = sum(n * each_ms for n, each_ms in zip(tokens, token_ms, strict=True))
    return 1000 * sum(tokens) / decode_ms


def _token_ms(reading: Reading) -> float | None:
    """Time of one token of an answer, of which the first comes with its prompt; None where the server did not tell."""
    n_decoded = (reading.predicted_n or 0) - 1
    return reading.predicted_ms / n_decoded if reading.predicted_ms and n_decoded > 0 else None


@dataclass
class Floor(Challenge):
    """An arm against a speed: the other side reads the same prompts as fast, and decodes at just that speed.

    Its incumbent is nobody: whatever fails is the candidate's.
    """

    _speeds: list[float] = field(default_factory=list)  # of its starts

    @property
    def _pair_s(self) -> float:
        return self.night.usual_process_s(self.candidate)

    def _both(self, number: int, order: tuple[Side, Side]) -> dict[Side, PairBlock]:
        del order  # one side alone is measured
        block = self.night.block(f"v{self.number}.{number}")
        readings, _ = self._measure(self.candidate, block, number)
        classes, wanted_tok_s = self.night.workload.classes, self.policy.at_least_tok_s or 1.0
        wanted_ms, token_ms = 1000 / wanted_tok_s, all_known(map(_token_ms, readings))
        if not token_ms:
            raise Ended("failed", _UNTOLD)
        self._speeds.append(_speed_tok_s(classes, token_ms))
        wanted = []
        for one, reading, each_ms in zip(classes, readings, token_ms, strict=True):
            turn_ms = (reading.turn_ms or 0.0) + (one.n_predict - 1) * (wanted_ms - each_ms)
            wanted.append(Turn(turn_ms, reading.prompt_ms or 0.0))
        return {A: (tuple(wanted),), B: block_of(readings)}

    @property
    def _told(self) -> str:
        known = f"{fmean(self._speeds):.1f} tok/s " if self._speeds else ""
        return f"{known}over {counted(len(self._speeds), 'start')}"

    @property
    def _too_little(self) -> str:
        return f"its starts do not show that it holds the speed: {self._told}"

    def _gates(self) -> str | None:
        return self.limits.spoils(self.candidate)

    def run(self) -> Result:
        """Starts until it is sure that it holds the speed, or that it cannot be shown.

        Raises:
            Preempted: The user wants the machine.
        """
        result = super().run()
        return replace(result, reasons=result.reasons or (self._told,))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the starts of an arm showed; `problem` says why it does not do, `short_mib` by how much it is too tight.

    `full_tok_s` is the speed of a short answer behind a full context. What `is_refused` does not take the
    workload, as one that is too small. A problem that `may_pass` says nothing of speed and memory.
    """

    arm: Arm
    speed_tok_s: float | None = None
    problem: str = ""
    full_tok_s: float | None = None
    short_mib: float = 0.0
    is_refused: bool = False
    may_pass: bool = False

    @property
    def text(self) -> str:
        """For people."""
        figures = [] if self.speed_tok_s is None else [f"{self.speed_tok_s:.1f} tok/s"]
        if self.full_tok_s is not None:
            figures.append(f"{self.full_tok_s:.1f} with a full context")
        words = ", ".join([*figures, *([self.problem] if self.problem else [])])
        return f"{self.arm.context_size} in {self.arm.kv}: {words}"


class Widest:
    """Looks for the largest context of one night; `prove` challenges the wanted speed with an arm."""

    def __init__(self, search: Search, family: FamilyGrid, prove: Callable[[Arm], Result]) -> None:
        self._search = search
        self._family = family
        self._prove = prove
        self._wanted = search.policy.at_least_tok_s or 0.0
        self._seen: dict[Arm, _Seen] = {}

    @property
    def text(self) -> str:
        """Every size that was looked at, the largest first, with the last word on each."""
        last = {(-one.arm.context_size, one.arm.kv): one for one in self._seen.values()}
        return "; ".join(last[key].text for key in sorted(last))

    def not_shown(self, arm: Arm) -> str | None:
        """Why it is not known whether an arm holds the speed, though it was looked at; None where it is."""
        seen = self._seen.get(arm)
        return seen.problem if seen is not None and seen.may_pass and seen.problem else None

    def find(self, incumbent: Arm) -> Arm | None:
        """The largest that was proved to hold the speed; None where none was.

        Raises:
            TimeUp: The night is too short.
        """
        best: Arm | None = None
        for kv in dict.fromkeys((incumbent.kv, *self._family.kv)):
            made = [replace(incumbent, kv=kv, extra=extra) for extra in self._family.extra]
            wider = [one for one in made if best is None or one.context_size > best.context_size]
            best = self._largest(sorted(wider, key=lambda one: one.context_size), incumbent) or best
        return best

    def _largest(self, arms: Sequence[Arm], incumbent: Arm) -> Arm | None:
        holding: dict[int, Arm] = {}
        low, high = -1, len(arms)
        at = next((n for n, arm in enumerate(arms) if arm == incumbent), len(arms) // 2)
        while True:
            while high - low > 1:
                found = self._try(arms[at])
                if found is not None:
                    low, holding[at] = at, found
                elif self._seen[arms[at]].is_refused and not any(one < at for one in holding):
                    low = at  # a larger one may take what is asked
                else:
                    high = at
                at = (low + high) // 2
            low = max(holding, default=-1)
            if low < 0:
                return None
            arm = holding.pop(low)
            if self._is_proved(arm):
                return arm
            high, low = low, max(holding, default=-1)
            at = (low + high) // 2

    def _is_proved(self, arm: Arm) -> bool:
        result = self._prove(arm)
        if result.outcome == "open":
            raise TimeUp
        is_proved = result.outcome == "promote"
        problem = "" if is_proved else result.reasons[0]
        may_pass = result.outcome == "failed" and self._search.limits.has_room(arm)
        self._note(replace(self._seen[arm], problem=problem, may_pass=may_pass))
        return is_proved

    def _note(self, seen: _Seen) -> _Seen:
        self._seen[seen.arm] = seen
        if seen.problem:
            self._search.limits.reject(seen.arm, seen.problem)
        return seen

    # One size

    def _try(self, arm: Arm) -> Arm | None:
        """The arm, with more margin if it needs that, where it seems to hold; None where it does not."""
        limits = self._search.limits
        for _ in range(_MARGINS_TRIED):
            known = limits.fails(arm)
            if known is not None:
                short_mib = 0.0 if limits.walled(arm) is None else _OOM_STEP_MIB
                seen = self._seen.setdefault(arm, _Seen(arm, problem=known, short_mib=short_mib))
            else:
                seen = self._look(arm)
                seen = self._note(self._look(arm) if seen.may_pass else seen)
            if not seen.problem:
                return arm
            margin = self._family.margin_at_least(arm.fit_mib + seen.short_mib)
            if not seen.short_mib or arm.is_placed or margin is None or margin <= arm.fit_mib:
                break
            arm = arm.with_margin(margin)
        return None

    def _look(self, arm: Arm) -> _Seen:
        """One start: the workload, tool calls where they may break, and the whole context."""
        search, limits = self._search, self._search.limits
        night, speed = search.night, None
        night.require(night.process_s(arm, exact=True))
        try:
            server = search.start(arm, "context")
            found = server.block(exact=True)
            token_ms = all_known(_token_ms(found[at]) for at in sorted(found))
            if len(token_ms) < len(night.workload.classes):
                return _Seen(arm, problem=_UNTOLD, may_pass=True)
            less = limits.shrinks(arm)
            if less is not None:
                return _Seen(arm, problem=less)
            speed = _speed_tok_s(night.workload.classes, token_ms)
            if speed < (1 - LUCK) * self._wanted:
                return _Seen(arm, speed, "too slow")
            if limits.changes_output(arm):
                server.tool_calls(search.policy.tool_calls)
            full = server.fill(server.n_ctx or arm.context_size)
        except CannotStart as failed:
            return _dead(arm, speed, "does not start", failed.failure)
        except ServerDied as died:
            return _dead(arm, speed, "died", died.kind or "crash")
        finally:
            search.learner.refresh()
        search.learn_usual_tools()
        if not limits.is_output_proven(arm):
            why = limits.breaks_tools(arm) or "it was not shown to keep tool calls intact"
            return _Seen(arm, speed, why)
        if full is None and limits.knows_memory:
            return _Seen(arm, speed, "its context could not be filled")
        return self._with_room(arm, speed, None if full is None else _token_ms(full))

    def _with_room(self, arm: Arm, speed: float, full_ms: float | None) -> _Seen:
        limits = self._search.limits
        seen = _Seen(arm, speed, full_tok_s=None if full_ms is None else 1000 / full_ms)
        headroom = limits.headroom(arm)
        if headroom is None or (limits.is_safe(arm) and limits.has_room(arm)):
            return seen
        problem = (
            f"only {headroom.free_mib:.0f} MiB (± "
            f"{headroom.sd_mib:.0f}) stay free with the context full, of the required {limits.headroom_mib:.0f}"
        )
        short_mib = max(limits.target_mib - headroom.free_mib, 1.0)
        return replace(seen, problem=problem, short_mib=short_mib)


def _dead(arm: Arm, speed: float | None, how: str, failure: str) -> _Seen:
    short_mib = _OOM_STEP_MIB if failure == "oom" else 0.0
    return _Seen(
        arm, speed, f"it {how}: {failure}", short_mib=short_mib, is_refused=failure == "refused",
        may_pass=failure not in {"oom", "refused"},
    )  # fmt: skip
