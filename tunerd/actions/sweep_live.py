"""Measures a promoted winner once more, through the very unit that serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tunerd.actions.bench_ask import Asker
from tunerd.actions.bench_plan import prompt_book
from tunerd.actions.bench_target import letters_per_token, open_live
from tunerd.actions.bench_watch import TrafficWatch
from tunerd.actions.context import Context
from tunerd.actions.sweep_texts import SweepTexts
from tunerd.core.bench.composing import Route
from tunerd.core.bench.trust import quiet_from
from tunerd.core.sample import Mark, Timings
from tunerd.core.sweep import Request
from tunerd.core.workload import Workload
from tunerd.errors import BenchError

_ROUNDS = 3
_TRIES = 3
_LETTERS = 2000
_WARM_UP_TOKENS = 8
_PREFIX_TAIL = 32


@dataclass(frozen=True, slots=True)
class LiveTurn:
    """What the unit that serves takes for one request of the workload [s], round by round."""

    rounds_s: tuple[float, ...]
    n_void: int

    @property
    def turn_s(self) -> float:
        """The mean."""
        return fmean(self.rounds_s)

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {"turn_s": self.turn_s, "rounds_s": list(self.rounds_s), "void": self.n_void}


class NoAnswer(BenchError):
    """The unit that serves gave no answer to a request of the workload."""


def measure_live(ctx: Context, workload: Workload, seed: int) -> LiveTurn:
    """Ask the serving unit as a pair of the verdict would be asked; what others disturb is void.

    Raises:
        NoAnswer: it gave none.
        BenchError: it cannot be asked, or no round was undisturbed.
    """
    target = open_live(ctx).target
    target = replace(target, route=Route.NATIVE)
    texts = SweepTexts(prompt_book(ctx), seed)
    texts.learn(lambda text: letters_per_token(target.server, text), _LETTERS)
    asker = Asker(ctx, target, target.life() or "live", quiet_from(()))
    asked = _Asked(texts, asker)
    traffic = TrafficWatch(ctx, target)
    prefix = max(one.cached_tokens for one in workload.classes)
    kind = workload.classes[workload.deepest].kind
    for attempt in range(_TRIES):
        traffic.wait_until_idle()
        traffic.open()
        asked.begin(attempt)
        asked.one(Request(kind, "live warm-up", prefix, _PREFIX_TAIL, _WARM_UP_TOKENS))
        turns = [asked.turn_s(workload, number) for number in range(_ROUNDS)]
        rounds = tuple(turn for turn in turns if turn is not None)
        seen, _ = traffic.close(asked.timings)
        if rounds and seen.is_foreign is not True:
            return LiveTurn(rounds, asked.n_void)
        asked.n_void += len(rounds)
    raise BenchError("the unit that serves could not be measured undisturbed")


@dataclass
class _Asked:
    texts: SweepTexts
    asker: Asker
    position: int = 0
    n_void: int = 0
    timings: list[Timings | None] = field(default_factory=list)
    name: str = "live"

    def begin(self, attempt: int) -> None:
        """New texts, of which nobody has counted anything yet."""
        self.timings = []
        self.name = f"live {attempt}"

    def turn_s(self, workload: Workload, number: int) -> float | None:
        """One round of the workload; None where a class was disturbed each time."""
        walls = [
            self.wall_s(
                Request(one.kind, f"{self.name} {number} {at}", one.cached_tokens, one.new_tokens,
                        one.n_predict, one.concurrency)
            )
            for at, one in enumerate(workload.classes)
        ]  # fmt: skip
        known = [wall for wall in walls if wall is not None]
        return workload.turn_time_s(known) if len(known) == len(walls) else None

    def one(self, request: Request, attempt: int = 0) -> tuple[float, Sequence[Mark]]:
        """Wall time of one request, of several at once their mean [s], and what speaks against it.

        Raises:
            NoAnswer: there is none.
        """
        composed, prompts = self.texts.compose(request, attempt)
        if len(composed) > 1:
            found, _ = self.asker.ask_at_once(composed, prompts, self.position)
        else:
            found = [self.asker.ask(composed[0], prompts[0], self.position)]
        self.position += len(found)
        samples = [one.sample for one in found]
        self.timings += [one.timings for one in samples]
        for sample in samples:
            if sample.problem is not None or sample.client is None:
                raise NoAnswer("the unit that serves gave no answer", cause=sample.problem)
        wall_ms = fmean(one.client.wall_ms for one in samples if one.client is not None)
        return wall_ms / 1000, tuple(mark for one in samples for mark in one.marks)

    def wall_s(self, request: Request) -> float | None:
        """The same, asked again where something disturbed it; None if it always did."""
        for attempt in range(_TRIES):
            wall_s, marks = self.one(request, attempt)
            if not marks:
                return wall_s
            self.n_void += 1
        return None


def expected_turns(evidence: Mapping[str, Any], workload: Workload) -> tuple[float, float] | None:
    """Mean turn of the incumbent and of the winner over the pairs that proved it [s]."""
    won = [one for one in evidence.get("challenges", []) if one["outcome"] == "promote"]
    pairs = won[-1]["pairs"] if won else []
    if not pairs:
        return None
    before, after = (
        fmean(workload.turn_time_s([ms / 1000 for ms in pair[name]]) for pair in pairs)
        for name in ("incumbent_ms", "candidate_ms")
    )
    return before, after
