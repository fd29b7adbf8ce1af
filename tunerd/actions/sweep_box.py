"""The real box of a sweep: arms as candidates of the lease, asked under the rules of a bench.

A sample that something speaks against never reaches the search: it is kept with its marks, and measured
again with another text. Where the machine stays disturbed, the sweep yields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd.actions.bench_ask import Asked, Asker
from tunerd.actions.bench_target import Target, letters_per_token, open_candidate
from tunerd.actions.candidate import Candidate
from tunerd.actions.context import Context
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.lease import Held
from tunerd.actions.plan import Plan
from tunerd.actions.sweep_hours import ends_text
from tunerd.actions.sweep_house import House
from tunerd.actions.sweep_texts import SweepTexts, tool_call_is_whole
from tunerd.core.bench.composing import Route
from tunerd.core.bench.counters import Counters, read_counters
from tunerd.core.bench.trust import GpuLook, judge_traffic, quiet_from
from tunerd.core.evidence import ArmRecord
from tunerd.core.failure import FailureKind
from tunerd.core.sample import Mark, Sample, Timings
from tunerd.core.sweep import Arm, Boot, Preempted, Refused, Request, ServerDied
from tunerd.core.window import Deadline
from tunerd.errors import BenchError, ConfigError, DeployError, EngineError
from tunerd.errors import Preempted as LeaseEnded

_REPEATS = 2
_PAUSE_S = 5.0
_SLOT_S = 0.5
# ik does not bind a port of which the kernel remembers connections: TIME_WAIT, a minute on Linux.
_PORT_WAIT_S = 75.0
_PORT_POLL_S = 3.0
_PROOF_KINDS = ("code", "math", "chat")
_LETTERS = 2000  # of text by which the length of a token is told
_WATCHED = frozenset({Mark.FOREIGN_TRAFFIC, Mark.THROTTLED, Mark.VRAM_TAKEN})
_HTTP_REFUSAL = "status 4"
_CALL_REFUSALS = ("status ", "the answer is empty", "the answer was cut")

PlanArm = Callable[[Arm], Plan]
OnArm = Callable[[Arm, ArmRecord], None]
OnSamples = Callable[[Arm, Sequence[Sample]], None]


@dataclass
class _Life:
    """The process under measurement."""

    arm: Arm
    candidate: Candidate
    target: Target
    stack: contextlib.ExitStack
    asker: Asker
    position: int = 0
    counters: Counters | None = None


@dataclass
class LeaseBox:
    """A `core.sweep.Box` over the lease that is held.

    `plan_arm` gives what would be deployed for an arm, `on_arm` hears of each that serves, `on_samples`
    of every request, void ones included. `patience_s` is how long a disturbance is waited out;
    `yielded` says why the sweep gave way after that, `ended` why it ended before its time.
    """

    ctx: Context
    held: Held
    plan_arm: PlanArm
    texts: SweepTexts
    per_request: Collection[str]
    on_arm: OnArm
    on_samples: OnSamples
    patience_s: float
    house: House
    deadline: Deadline | None = None
    context_tokens: int | None = None
    expected_load_s: float | None = None
    yielded: str | None = None
    ended: str | None = None
    _life: _Life | None = None
    _routes: dict[tuple[str, str], Route] = field(default_factory=dict)
    _reader: FingerprintReader | None = None
    _calls_tools: bool = False

    # The protocol

    def now(self) -> float:
        """Seconds."""
        return self.ctx.clock.monotonic_s()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        self.ctx.clock.sleep(seconds)

    def check(self) -> None:
        """Whether the lease still stands, there is time left, and room for what is measured.

        Raises:
            core.sweep.Preempted: it does not, or there is none.
        """
        if self.deadline is not None and self.deadline.is_over(self.ctx.clock.now_s()):
            raise self._preempted(ends_text(self.deadline))
        try:
            self.held.check()
        except LeaseEnded as ended:
            raise self._preempted(ended.cause or ended.message) from ended
        if full := self.house.full():
            raise self._preempted(full)

    def restart(self, arm: Arm) -> Boot:
        """A fresh process of an arm, as it would be deployed."""
        self.close()
        self._wait_for_the_house()
        began_s = self.now()
        try:
            plan = self.plan_arm(arm)
        except (ConfigError, DeployError, EngineError) as error:
            self.ctx.say(f"{arm}: {error.cause or error.message}")
            return Boot(False, self.now() - began_s, "refused")
        while True:
            boot = self._try_to_boot(arm, plan, began_s)
            if boot.ok or self.house.trouble() is None:
                return boot
            self._wait_for_the_house()  # a start beside somebody else says nothing of the arm

    def _try_to_boot(self, arm: Arm, plan: Plan, began_s: float) -> Boot:
        stack = contextlib.ExitStack()
        try:
            return self._boot(arm, plan, stack, began_s)
        except LeaseEnded as ended:
            stack.close()
            raise self._preempted(self._why_over() or ended.cause or ended.message) from ended
        except BenchError as error:
            stack.close()
            self.check()
            self.ctx.say(f"{arm}: {error.cause or error.message}")
            return Boot(False, self.now() - began_s, "refused")
        except BaseException:
            stack.close()
            raise

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        """One request, asked until nothing speaks against the answer.

        Raises:
            Refused: the server does not take it, or it goes beyond what was proved of the engine.
            ServerDied: the process is gone.
            core.sweep.Preempted: the lease is gone, or the machine stays disturbed.
        """
        life = self._life
        if life is None:
            raise ServerDied("crash")
        overrides = self._overrides(life, arm)
        asker = replace(life.asker, target=replace(life.target, overrides=overrides))
        end_s = self.now() + self.patience_s
        attempt = 0
        while True:
            found, marks = self._ask(life, asker, request, attempt)
            if not marks:
                return self._answer(request, found)
            attempt += 1
            disturbed = marks & _WATCHED
            words = ", ".join(sorted(marks))
            if not disturbed and attempt > _REPEATS:
                raise Refused(words)
            if disturbed and self.now() >= end_s:
                self.yielded = f"the machine is not quiet: {words}"
                raise self._preempted(self.yielded)
            if disturbed:
                self.ctx.say(f"waiting: {words}")
                self.sleep(_PAUSE_S)
            self.check()

    def close(self) -> None:
        """End the process under measurement, if there is one."""
        life, self._life = self._life, None
        if life is not None:
            life.stack.close()

    def _preempted(self, why: str) -> Preempted:
        """The end of the sweep, and its reason kept."""
        self.ended = why
        return Preempted(why)

    def _why_over(self) -> str | None:
        """The window, where it is the reason that the lease's time ran out."""
        over = self.deadline is not None and self.held.left_s <= 0
        return ends_text(self.deadline) if over and self.deadline is not None else None

    def _wait_for_the_house(self) -> None:
        """Wait for a GPU that is cool and free; the sweep yields where it stays otherwise.

        Raises:
            core.sweep.Preempted: it does.
        """
        trouble = self.house.wait()
        self.check()
        if trouble is not None:
            self.yielded = f"the machine is not free: {trouble}"
            raise self._preempted(self.yielded)

    # Starting

    def _boot(self, arm: Arm, plan: Plan, stack: contextlib.ExitStack, began_s: float) -> Boot:
        candidate = self._start(plan, stack)
        if candidate.fault is not None:
            stack.close()
            fault = candidate.fault
            self.ctx.say(f"{arm} does not start: {fault.words}")
            return Boot(False, self.now() - began_s, str(fault.reason))
        self._reader = self._reader or FingerprintReader(self.ctx)
        opened = open_candidate(self.ctx, candidate, str(arm), reader=self._reader)
        target = opened.target
        self.on_arm(arm, target.arm)
        self.texts.learn(lambda text: letters_per_token(target.server, text), _LETTERS)
        if self.context_tokens is None:
            self.context_tokens = target.n_ctx
        self._life = self._warm(arm, candidate, target, stack)
        return Boot(True, self.now() - began_s, "", candidate.vram_free_mib)

    def _start(self, plan: Plan, stack: contextlib.ExitStack) -> Candidate:
        """A candidate; one whose port is still remembered by the kernel is tried again."""
        end_s = self.now() + _PORT_WAIT_S
        while True:
            attempt = contextlib.ExitStack()
            candidate = attempt.enter_context(self.held.serve(plan))
            is_taken = (
                candidate.fault is not None and candidate.fault.kind is FailureKind.PORT_TAKEN
            )
            if not is_taken or self.now() >= end_s:
                stack.push(attempt)
                return candidate
            attempt.close()
            self.held.check()
            self.sleep(_PORT_POLL_S)

    def _warm(
        self, arm: Arm, candidate: Candidate, target: Target, stack: contextlib.ExitStack
    ) -> _Life:
        """The first requests, discarded; they find the route by which this build counts drafts.

        Raises:
            BenchError: it is meant to draft everything and drafts nothing, or the reverse.
        """
        known = self._routes.get(arm.family)
        routes = [target.route] if known is None else [known]
        if known is None and arm.drafts:
            routes.append(Route.TEXT)
        name = target.life() or candidate.unit
        life = _Life(arm, candidate, target, stack, Asker(self.ctx, target, name, quiet_from(())))
        looks: list[GpuLook] = []
        for route in routes:
            life.target = replace(target, route=route)
            life.asker = replace(life.asker, target=life.target)
            for kind in _PROOF_KINDS if arm.drafts and known is None else _PROOF_KINDS[:1]:
                asked = self._first(life, kind)
                looks += asked.looks
                has_drafted = bool(asked.sample.timings and asked.sample.timings.draft_n)
                if has_drafted and not arm.drafts:
                    raise BenchError("it is meant not to draft, and drafted")
                if known is not None or has_drafted or not arm.drafts:
                    self._routes[arm.family] = route
                    return self._ready(life, looks)
        if target.speculation.always:
            raise BenchError("it is meant to draft, and drafted nothing")
        life.target = replace(target, route=routes[0])  # a gate may keep every draft back
        life.asker = replace(life.asker, target=life.target)
        return self._ready(life, looks)

    def _first(self, life: _Life, kind: str) -> Asked:
        request, prompt = self.texts.warm_up(kind, f"{life.asker.life} {life.position}")
        asked = self._send(life, life.asker, request, prompt, discard=True)
        if asked.sample.problem is not None:
            raise BenchError("the first request failed", cause=asked.sample.problem)
        return asked

    def _ready(self, life: _Life, looks: Sequence[GpuLook]) -> _Life:
        life.asker = replace(life.asker, quiet=quiet_from(looks))
        life.counters = self._counters(life)
        return life

    # Asking

    def _overrides(self, life: _Life, arm: Arm | None) -> Mapping[str, Any]:
        """What is sent with a request in the place of the process's own settings of drafts."""
        own = life.arm
        if arm is None or (arm.n_max, arm.p_min) == (own.n_max, own.p_min):
            return {}
        if own.engine not in self.per_request or arm.n_max > own.n_max:
            raise Refused(f"{own.engine} was not proved to take this with a request")
        return {"speculative.n_max": arm.n_max, "speculative.p_min": arm.p_min}

    def _ask(
        self, life: _Life, asker: Asker, request: Request, attempt: int
    ) -> tuple[list[Asked], frozenset[Mark]]:
        """One attempt: the answers, and what speaks against them."""
        is_busy = self._is_busy(life)
        composed, prompts = self.texts.compose(request, attempt)
        if len(composed) > 1:
            found, _ = asker.ask_at_once(composed, prompts, life.position)
        else:
            found = [asker.ask(composed[0], prompts[0], life.position)]
        life.position += len(found)
        samples = [one.sample for one in found]
        problem = next((one.problem for one in samples if one.problem is not None), None)
        if problem is not None:
            self.on_samples(life.arm, samples)
            raise self._gone(life, problem, is_call=composed[0].has_tools)
        foreign = self._is_foreign(life, [one.timings for one in samples]) or is_busy
        if foreign:
            samples = [
                replace(one, marks=tuple(dict.fromkeys((*one.marks, Mark.FOREIGN_TRAFFIC))))
                for one in samples
            ]
        self.on_samples(life.arm, samples)
        return found, frozenset(mark for one in samples for mark in one.marks)

    def _send(
        self, life: _Life, asker: Asker, request: Any, prompt: Any, *, discard: bool
    ) -> Asked:
        asked = asker.ask(request, prompt, life.position)
        life.position += 1
        sample = asked.sample
        if discard:
            sample = replace(sample, marks=(*sample.marks, Mark.WARM_UP))
        self.on_samples(life.arm, [sample])
        return asked

    def _gone(self, life: _Life, problem: str, *, is_call: bool) -> Exception:
        """What a request without an answer means; raises Preempted where the lease is gone.

        A model or a template that knows no tools answers a call of one with an error, or with nothing.
        """
        self.check()
        try:
            fault = self.held.look(life.candidate)
        except LeaseEnded as ended:
            return self._preempted(ended.cause or ended.message)
        if fault is not None:
            self._life = None
            life.stack.close()
            return ServerDied(str(fault.reason))
        if problem.startswith(_CALL_REFUSALS if is_call else _HTTP_REFUSAL):
            return Refused(problem)
        self._life = None
        life.stack.close()
        return ServerDied("hang")

    # Others

    def _is_busy(self, life: _Life) -> bool:
        """Whether a slot works before anything was asked here."""
        for pause_s in (_SLOT_S, 0.0):  # the last answer's own slot is given back in a moment
            slots = life.target.server.slots()
            if slots is None or not slots.busy:
                return False
            self.sleep(pause_s)
        return True

    def _counters(self, life: _Life) -> Counters | None:
        """A candidate's counters have no other reader, so they are read as often as is useful."""
        text = life.target.server.metrics_text()
        return None if text is None else read_counters(text)

    def _is_foreign(self, life: _Life, own: list[Timings | None]) -> bool:
        before, life.counters = life.counters, self._counters(life)
        if before is None or life.counters is None:
            return self._is_busy(life)
        return judge_traffic(before, life.counters, own).is_foreign is True

    # Reading

    def _answer(self, request: Request, found: Sequence[Asked]) -> dict[str, Any]:
        """The timings of one request, as the search reads them; of several at once their mean."""
        rows = [_row(one) for one in found]
        answer: dict[str, Any] = {
            key: _mean([row[key] for row in rows if row.get(key) is not None])
            for key in {key for row in rows for key in row}
        }
        answer["n_ctx"] = self.context_tokens
        positions = [one.sample.timings.accepted_by_position for one in found if one.sample.timings]
        if len(positions) == 1 and positions[0] is not None:
            answer["accepted_per_pos"] = list(positions[0])
        if request.kind == "tool" and not request.ignore_eos:
            answer["tool_ok"] = self._tool_ok(found[0])
        return {key: value for key, value in answer.items() if value is not None}

    def _tool_ok(self, asked: Asked) -> bool | None:
        """Whether a tool call came whole; None as long as this model was not seen to make one."""
        is_whole = tool_call_is_whole(asked.answer)
        self._calls_tools |= is_whole is True
        return False if is_whole is None and self._calls_tools else is_whole


def _row(asked: Asked) -> dict[str, Any]:
    sample = asked.sample
    timings = sample.timings or Timings()
    cached = timings.cache_n if timings.cache_n is not None else sample.details.get("cached")
    return {
        "cache_n": cached,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "draft_n": timings.draft_n,
        "draft_n_accepted": timings.draft_n_accepted,
        "wall_ms": sample.client.wall_ms if sample.client is not None else None,
        "vram_free_min_mib": sample.vram_free_min_mib,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
