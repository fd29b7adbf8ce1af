"""Takes the steps of a plan on one server life, and keeps to the rules that make a number honest.

What fresh servers do first is discarded, speculation is proved on or off before anything counts, and a
sample that something speaks against is kept, marked, and measured again with another text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunerd.actions.bench_ask import Asked, Asker
from tunerd.actions.bench_target import Target
from tunerd.actions.bench_watch import TrafficWatch
from tunerd.actions.context import Context
from tunerd.core.bench.composing import Composer, Route
from tunerd.core.bench.prompts import Prompt
from tunerd.core.bench.quality import ended_in_thought
from tunerd.core.bench.reading import Answer
from tunerd.core.bench.request import Plan, Request, Step, Suite, with_room_for_thoughts
from tunerd.core.bench.trust import Quiet, Speculation, quiet_from, with_mark
from tunerd.core.progress import Progress
from tunerd.core.quantity import format_duration
from tunerd.core.sample import Mark, Sample
from tunerd.errors import BenchError

REPEATS_OF_MARKED = 2
_MOST_FAILURES = 3
_MOST_WAITS = 2
# How problems begin that a second try cannot heal.
_REFUSED = "status 4"
# Texts that a drafter finds easy; a gate may keep every draft of one of them back.
_PROOF_KINDS = ("code_python", "stepwise_math", "code_cpp")

Keep = Callable[[str, Sequence[Sample]], None]
Texts = Sequence[tuple[Prompt, ...]]


@dataclass
class Measured:
    """What was measured of one arm.

    `answers` are by number of the step and id of the text, of repeated steps with every text; `walls_ms` how long the requests of a parallel step took
    together, by case; `accepted` counts drafts by position over `n_steps` verification passes, from the
    server's own counters.
    """

    samples: list[Sample] = field(default_factory=list)
    answers: dict[int, dict[str, Answer | None]] = field(default_factory=dict)
    walls_ms: list[tuple[str, float, tuple[Sample, ...]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    n_steps: int = 0
    traffic_seen: bool = True

    @property
    def acceptance_by_position(self) -> tuple[float, ...] | None:
        """The share of verification passes in which each position of a draft was accepted."""
        if not self.n_steps or not self.accepted:
            return None
        return tuple(count / self.n_steps for count in self.accepted)


@dataclass(frozen=True, slots=True)
class _Item:
    """A step that is still to be taken on one arm; `prompts` are its texts."""

    target: Target
    number: int
    step: Step
    prompts: tuple[Prompt, ...]
    n_tries: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was taken, until it is known whether somebody else was served meanwhile."""

    item: _Item | None
    target: Target
    asked: tuple[Asked, ...]
    wall_ms: float | None = None


class BenchRun:
    """Measures the arms that one server life can play, usually one."""

    def __init__(
        self, ctx: Context, targets: Sequence[Target], composer: Composer, keep: Keep
    ) -> None:
        self._ctx = ctx
        self._targets = list(targets)
        self._composer = composer
        self._keep = keep
        self._watch = TrafficWatch(ctx, targets[0])
        self._quiet = Quiet()
        self._position = 0
        self._n_failed = 0
        self._pending: list[_Pending] = []
        self._was_busy = False
        self._n_busy = 0
        self.measured: dict[str, Measured] = {}
        life = targets[0].life()
        if life is None:
            raise BenchError("the server does not run")
        self._life = life

    def run(self, plan: Plan, texts: Mapping[str, Texts]) -> Mapping[str, Measured]:
        """Every step of a plan on every arm, in the plan's order.

        Args:
            plan: The steps.
            texts: By arm, the texts of each step.

        Raises:
            BenchError: the server ended, does not answer, or does not do what its arm is for.
        """
        self._was_busy = self._is_busy()
        self._watch.open()
        try:
            self._warm_up(plan)
            queue = deque(
                _Item(target, number, step, texts[target.name][number])
                for number, step in enumerate(plan.steps)
                for target in self._targets
            )
            self._take_all(plan, queue)
        finally:
            self._put_aside()
        return self.measured

    def _is_busy(self) -> bool:
        """Whether somebody else is served, however long it was waited for.

        Raises:
            BenchError: that was so for several times in a row: all of it would be measured in vain.
        """
        self._n_busy = 0 if self._watch.wait_until_idle() else self._n_busy + 1
        if self._n_busy < _MOST_WAITS:
            return self._n_busy > 0
        waited = format_duration(_MOST_WAITS * self._watch.limit_s)
        raise BenchError(
            "somebody else is served all the time, so nothing can be measured",
            cause=f"by its own word the server was never idle in {waited} of waiting",
            hint="bench when nobody else asks it; its `/slots` and `/metrics` show what it works on",
        )

    def _take_all(self, plan: Plan, queue: deque[_Item]) -> None:
        began_s = self._ctx.clock.monotonic_s()
        done, todo = 0.0, sum(plan.weight(item.step) for item in queue)
        n_done = 0
        while queue:
            item = queue.popleft()
            self._report(item, n_done, len(queue), done, todo, began_s)
            goes_on = self._take(item)
            done, n_done = done + plan.weight(item.step), n_done + 1
            if not goes_on:
                queue.clear()
            if not queue or not self._watch.counts or self._watch.is_due:
                again = self._settle()
                queue.extend(again if goes_on else ())
                todo += sum(plan.weight(one.step) for one in again)

    def _report(
        self, item: _Item, n_done: int, n_left: int, done: float, todo: float, began_s: float
    ) -> None:
        took_s = self._ctx.clock.monotonic_s() - began_s
        left_s = took_s / done * (todo - done) if done else None
        case = item.step.requests[0].case
        name = f", {item.target.name}" if len(self._targets) > 1 else ""
        self._ctx.report(
            Progress(
                f"{item.step.requests[0].suite}: {case}{name}",
                step=n_done + 1,
                steps=n_done + n_left + 1,
                left_s=left_s,
            )
        )

    # The first requests of a life

    def _warm_up(self, plan: Plan) -> None:
        self._ctx.say("warming up")
        looks = []
        for number, target in enumerate(self._targets):
            self.measured[target.name] = Measured(traffic_seen=self._watch.counts)
            self._targets[number], asked = self._proved(plan, target)
            looks += [look for one in asked for look in one.looks]
        self._quiet = quiet_from(looks)

    def _proved(self, plan: Plan, target: Target) -> tuple[Target, list[Asked]]:
        """Requests that are discarded, until they show that speculation is on, or off."""
        found: list[Asked] = []
        for route in dict.fromkeys([target.route, *self._other_routes(target)]):
            one = replace(target, route=route)
            for kind in _PROOF_KINDS:
                request = replace(plan.warm_up.requests[0], kind=kind)
                asked = self._discarded(one, request, is_optional=route is not target.route)
                if asked is None:
                    break
                found.append(asked)
                if _drafted(found[-1]):
                    return self._judged(one, found), found
                if target.speculation.drafts is not True:
                    break
        return self._judged(target, found), found

    def _other_routes(self, target: Target) -> tuple[Route, ...]:
        """Some builds count their drafts on OpenAI routes only."""
        is_native = target.is_llama and target.route is Route.NATIVE
        return (Route.TEXT,) if is_native and target.speculation.drafts is not False else ()

    def _discarded(self, target: Target, request: Request, *, is_optional: bool) -> Asked | None:
        """A request that counts for nothing; None where an optional route gave no answer."""
        asked = self._ask(target, request, self._composer.compose(request))
        if asked.sample.problem is not None:
            self._demand_life(target)
            if is_optional:
                return None
            raise BenchError("the server gave no answer", cause=asked.sample.problem)
        sample = replace(asked.sample, marks=with_mark(asked.sample.marks, Mark.WARM_UP))
        self._pending.append(_Pending(None, target, (replace(asked, sample=sample),)))
        return asked

    def _judged(self, target: Target, asked: Sequence[Asked]) -> Target:
        """The target with what was proved of it."""
        drafts = any(_drafted(one) for one in asked)
        if target.speculation.drafts is None:
            # Nobody said what it is meant to do: what it does now is what it must go on doing.
            if not target.is_llama:
                return target
            return replace(target, speculation=Speculation(drafts))
        if target.speculation.drafts and not drafts:
            raise BenchError(
                f"`{target.name}` is meant to draft, and drafted nothing",
                cause=f"{len(asked)} requests without a drafted token",
                hint="`tunerd engines prove` shows what this build does",
            )
        if target.speculation.drafts is False and drafts:
            raise BenchError(f"`{target.name}` is meant not to draft, and drafted")
        return target

    # Steps

    def _take(self, item: _Item) -> bool:
        """Measure one step; False where nothing can follow it."""
        target, requests = item.target, item.step.requests
        target = next(one for one in self._targets if one.name == target.name)
        if not self._watch.counts or self._was_busy:
            self._was_busy = self._is_busy()
        wall_ms = None
        if item.step.is_parallel:
            asker = self._asker(target)
            asked, wall_ms = asker.ask_at_once(requests, item.prompts, self._position)
            self._position += len(requests)
        else:
            asked = []
            for request, prompt in zip(requests, item.prompts, strict=True):
                asked += self._ask_with_room(target, request, prompt)
                if asked[-1].sample.problem is not None:
                    break
        if self._was_busy:
            asked = [_marked(one, Mark.FOREIGN_TRAFFIC) for one in asked]
        failed = next((one for one in asked if one.sample.problem is not None), None)
        self._pending.append(_Pending(item, target, tuple(asked), wall_ms))
        return self._goes_on(target, failed)

    def _goes_on(self, target: Target, failed: Asked | None) -> bool:
        if failed is None:
            self._n_failed = 0
            return True
        why = target.why_ended()
        if failed.request.suite is Suite.DEEP:
            if why is not None:
                self._pending[-1] = _with_problem(self._pending[-1], why)
            return False
        self._demand_life(target)
        if _is_refused(failed):
            return True
        self._n_failed += 1
        if self._n_failed > _MOST_FAILURES:
            raise BenchError(
                f"{self._n_failed} requests in a row had no answer", cause=failed.sample.problem
            )
        return True

    def _demand_life(self, target: Target) -> None:
        if target.life() == self._life:
            return
        raise BenchError(
            "the server ended while it was measured",
            cause=target.why_ended(),
            hint="what was measured until then is kept: `tunerd results list`",
        )

    def _ask(self, target: Target, request: Request, prompt: Prompt) -> Asked:
        asked = self._asker(target).ask(request, prompt, self._position)
        self._position += 1
        return asked

    def _ask_with_room(self, target: Target, request: Request, prompt: Prompt) -> list[Asked]:
        """A conversation is asked again where thoughts took all the room of its answer."""
        found = [self._ask(target, request, prompt)]
        if request.is_chat and ended_in_thought(found[0].answer):
            found.append(self._ask(target, with_room_for_thoughts(request), prompt))
        return found

    def _asker(self, target: Target) -> Asker:
        return Asker(self._ctx, target, self._life, self._quiet)

    # What is known only over several requests

    def _settle(self) -> list[_Item]:
        """Judge what is pending, keep it, and say which steps are to be taken again."""
        if not self._pending:
            return []
        own = [one.sample.timings for pending in self._pending for one in pending.asked]
        traffic, accepted = self._watch.close(own)
        if traffic.is_foreign:
            self._ctx.say(f"somebody else was served: {traffic.text}")
            self._pending = [_all_marked(one, Mark.FOREIGN_TRAFFIC) for one in self._pending]
            self._was_busy = True
        elif traffic.is_foreign is False and accepted is not None:
            self._count(accepted)
        again = [self._again(pending.item) for pending in self._pending
                 if pending.item is not None and _is_to_be_repeated(pending)]  # fmt: skip
        self._put_aside()
        return again

    def _count(self, accepted: tuple[int, ...]) -> None:
        """Drafts by position, where one arm alone was asked since the last look."""
        names = {pending.target.name for pending in self._pending}
        steps = [one.sample.timings.steps for pending in self._pending for one in pending.asked
                 if one.sample.timings is not None]  # fmt: skip
        if len(names) != 1 or None in steps:
            return
        measured = self.measured[names.pop()]
        if all(pending.item is None for pending in self._pending):
            return
        width = max(len(measured.accepted), len(accepted))
        padded = [[*one, *[0] * (width - len(one))] for one in (measured.accepted, accepted)]
        measured.accepted = [one + other for one, other in zip(*padded, strict=True)]
        measured.n_steps += sum(step for step in steps if step is not None)

    def _again(self, item: _Item) -> _Item:
        prompts = tuple(self._composer.compose_again(request, f"{item.number} {item.n_tries}")
                        for request in item.step.requests)  # fmt: skip
        return replace(item, prompts=prompts, n_tries=item.n_tries + 1)

    def _put_aside(self) -> None:
        """Keep what is pending."""
        pending, self._pending = self._pending, []
        for one in pending:
            measured = self.measured[one.target.name]
            samples = [asked.sample for asked in one.asked if asked.request.is_measured]
            measured.samples += samples
            self._keep(one.target.name, samples)
            if one.item is None:
                continue
            answers = measured.answers.setdefault(one.item.number, {})
            answers |= {asked.prompt.prompt_id: asked.answer for asked in one.asked}
            if one.wall_ms is not None:
                case = one.item.step.requests[0].case
                measured.walls_ms.append((case, one.wall_ms, tuple(samples)))


def _is_to_be_repeated(pending: _Pending) -> bool:
    item = pending.item
    if item is None or item.n_tries >= REPEATS_OF_MARKED:
        return False
    if any(_is_refused(asked) for asked in pending.asked):
        return False
    return any(not asked.sample.is_usable for asked in pending.asked)


def _is_refused(asked: Asked) -> bool:
    """Whether the server says that it will not, such as for a prompt that its context cannot hold."""
    return (asked.sample.problem or "").startswith(_REFUSED)


def _drafted(asked: Asked) -> bool:
    return bool(asked.sample.timings is not None and asked.sample.timings.draft_n)


def _marked(asked: Asked, mark: Mark) -> Asked:
    if asked.sample.problem is not None:
        return asked
    return replace(asked, sample=replace(asked.sample, marks=with_mark(asked.sample.marks, mark)))


def _all_marked(pending: _Pending, mark: Mark) -> _Pending:
    return replace(pending, asked=tuple(_marked(one, mark) for one in pending.asked))


def _with_problem(pending: _Pending, why: str) -> _Pending:
    *before, last = pending.asked
    return replace(
        pending, asked=(*before, replace(last, sample=replace(last.sample, problem=why)))
    )
