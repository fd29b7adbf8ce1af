"""The real box of a sweep: arms as candidates of the lease, asked under the rules of a bench.

A sample that something speaks against never reaches the search: it is kept with its marks, and measured
again with another text. Where the machine stays disturbed, the sweep yields.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tunerd.app import Context
from tunerd.calendar import Deadline
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.health import WHOLLY_REPEATED, Reason
from tunerd.engine.server import NOT_IN_TIME
from tunerd.errors import (
    BenchError,
    Busy,
    ConfigError,
    DeployError,
    EngineError,
    HostError,
    LeaseEnded,
)
from tunerd.machine.clock import polls
from tunerd.machine.facts import Gpu, GpuProcess
from tunerd.machine.host import free_disk_mib
from tunerd.measure.answer import Mark, Sample, Timings
from tunerd.measure.evidence import ArmRecord
from tunerd.measure.life import (
    KINDS_OF_MIXED,
    SLOT_S,
    Answered,
    Life,
    Texts,
    look_at_processors,
    prompt_book,
    tool_call_is_whole,
)
from tunerd.measure.request import FEW_TOKENS, Prompt
from tunerd.measure.request import Request as BenchRequest
from tunerd.measure.target import NoAnswer, Target, count_tokens, open_candidate, open_live
from tunerd.measure.trust import OTHERS_SLACK_MIB, ProcessorLook, is_processor_taken
from tunerd.production.lease import Candidate, Held
from tunerd.production.measurement import measuring_pids
from tunerd.production.plan import Plan
from tunerd.profile.arm import Arm, Boot, Preempted, Refused, Request, ServerDied
from tunerd.profile.workload import MIXED, RequestClass, Workload
from tunerd.sweep.schedule import ends_text
from tunerd.words import all_known

_REPEATS = 2
_PAUSE_S = 5.0
# A call with its arguments does not fit into fewer.
_TOOL_TOKENS = 256
# A prompt that may not fit is counted before it is sent: ik refuses one as if it had broken.
_NEARLY_FULL = 0.9
_COUNT_S = 60.0
_WATCHED = frozenset({Mark.FOREIGN_TRAFFIC, Mark.THROTTLED, Mark.VRAM_TAKEN, Mark.PROCESSOR_TAKEN})
_HTTP_REFUSAL = "status 4"
_TOO_LONG = "exceeds the available context size"  # of ik with status 500
_CALL_REFUSALS = ("status ", "the answer is empty", "the answer was cut")
# From a model that was not seen to make one.
_NO_CALLS = ("the answer repeats", "the answer is not readable")

# The machine around it: what a sweep waits for, what it gives way to, what it stops at

# A night writes a few MiB of evidence; what is kept for its end is the verdict's.
BEGIN_DISK_MIB = 128
END_DISK_MIB = 32


def neighbours(
    gpus: Sequence[Gpu] | None, own: Collection[int]
) -> Iterator[tuple[Gpu, GpuProcess]]:
    """Processes that compute on a GPU and are not the server's; a desktop's graphics do not count.

    One that cannot be seen from here may be the server itself, as in a container, so it is left out.
    """
    for gpu in gpus or ():
        for process in gpu.processes or ():
            if process.computes and process.name is not None and process.pid not in own:
                yield gpu, process


def heat(gpus: Sequence[Gpu] | None) -> str | None:
    """Why a GPU runs slower than it could, its owner's power limit apart; None where none does."""
    for gpu in gpus or ():
        if gpu.held_back_by:
            at = "" if gpu.temperature_c is None else f" at {gpu.temperature_c} C"
            return f"GPU {gpu.index} is throttled{at}: {', '.join(gpu.held_back_by)}"
    return None


def crowd(gpus: Sequence[Gpu] | None, own: Collection[int], known: Collection[int]) -> str | None:
    """Who has come to compute on a GPU beside the server and those that are known; None for nobody."""
    for gpu, process in neighbours(gpus, [*own, *known]):
        used = process.used_mib
        if used is None or used > OTHERS_SLACK_MIB:
            held = "" if used is None else f", {used} MiB"
            return f"{process.name} ({process.pid}{held}) computes on GPU {gpu.index} too"
    return None


_HOUSE_POLL_S = 5.0
_OF_A_LOST_CARD = frozenset({Reason.CRASH, Reason.ERROR})


@dataclass
class House:
    """The machine during one sweep.

    `known` are processes that compute beside the server and may: those of its begin, where the settings
    allow to share. `limits_w` are the cards of its begin, by uuid, with the limit of their power that holds
    until its end; None where it may change, or nobody can set it. `serves` is whether the server ran when it
    began, or was started for it.
    """

    ctx: Context
    known: frozenset[int] = field(default_factory=frozenset)
    limits_w: Mapping[str, float | None] = field(default_factory=dict)
    serves: bool = field(init=False)

    def __post_init__(self) -> None:
        self.serves = self.ctx.services.state(self.ctx.unit).runs

    def settle(self) -> None:
        """Wait until a sweep may begin; production serves meanwhile.

        Raises:
            HostError: the disk has no room.
            Busy: somebody else computes on the GPU, or it is held back, for longer than the settings wait.
        """
        ctx = self.ctx
        if full := self.full(BEGIN_DISK_MIB):
            raise HostError(
                "there is not enough disk space for what a sweep records", cause=full,
                state="nothing was touched", hint="free some space, or `tunerd settings` for the folder",
            )  # fmt: skip
        if ctx.settings.sweep.shares_gpu:
            gpus = ctx.gpu.read().gpus
            self.known = frozenset(one.pid for _, one in neighbours(gpus, self._own()))
        trouble = self.wait()
        if trouble is not None:
            raise Busy(
                "the machine is not free for a sweep", cause=trouble, state="nothing was touched",
                hint="the next start tries again; sweep.shares_gpu lets it measure beside programs that "
                "always run",
            )  # fmt: skip
        self.limits_w = {
            gpu.uuid: gpu.own_limit_w for gpu in ctx.gpu.read().gpus or () if gpu.uuid is not None
        }

    def wait(self, until_s: float = math.inf) -> str | None:
        """Wait as long as the settings say for the GPU, at most until `until_s` (monotonic).

        What still holds then, None if nothing.
        """
        ctx = self.ctx
        trouble: str | None = None
        limit_s = min(ctx.settings.sweep.patience_s, until_s - ctx.clock.monotonic_s())
        for left_s in polls(ctx.clock, limit_s, every_s=_HOUSE_POLL_S):
            before, trouble = trouble, self.trouble()
            if trouble is None:
                return None
            if before is None and left_s:
                ctx.say(f"waiting: {trouble}")
        return trouble

    def trouble(self) -> str | None:
        """What disturbs at this moment, and may pass by itself."""
        gpus = self.ctx.gpu.read().gpus
        if not gpus:
            return None
        return heat(gpus) or crowd(gpus, self._own(), self.known)

    def changed(self) -> str | None:
        """Why nothing can be compared with what was measured until now; looked at twice, since a driver may not answer once."""
        for is_again in (False, True):
            reading = self.ctx.gpu.read()
            now_w = {gpu.uuid: gpu.own_limit_w for gpu in reading.gpus or ()}
            why = reading.awaits_reboot if self.limits_w else None
            for uuid, watts in self.limits_w.items():
                if uuid not in now_w:
                    why = why or f"a card is gone: {reading.gpu_problem or uuid}"
                elif (now := now_w[uuid]) is not None and watts is not None and now != watts:
                    why = f"a card's power limit is {now:g} W, and was {watts:g} W when the sweep began"
            if why is None or is_again:
                return why
            self.ctx.clock.sleep(_HOUSE_POLL_S)
        return None

    def stopped(self) -> str | None:
        """That the server is down which served, where no measurement has its place: somebody wants the machine."""
        state = self.ctx.services.state(self.ctx.unit) if self.serves else None
        if state is None or state.runs:
            return None
        return f"{state.unit} {'failed' if state.has_failed else 'was stopped'}"

    def processors(self) -> ProcessorLook | None:
        """Who has worked until now: the server, or others; None where nobody can tell."""
        return look_at_processors(tuple(self._own() - {os.getpid()}))

    def full(self, least_mib: int = END_DISK_MIB) -> str | None:
        """Why nothing more may be written but the end; None while there is room, or where nobody knows."""
        folder = self.ctx.paths.state_dir
        free_mib = free_disk_mib(folder)
        if free_mib is None or free_mib >= least_mib:
            return None
        return f"only {free_mib} MiB are free on the disk of {folder}, and {least_mib} are needed"

    def _own(self) -> set[int]:
        """The processes of production and of candidates."""
        ctx = self.ctx
        serving = ctx.services.state(ctx.unit).main_pid
        return measuring_pids(ctx) | {os.getpid()} | ({serving} if serving is not None else set())


@dataclass
class Quiet:
    """For how long nobody has used the machine, by one look at it after the other."""

    since_s: float
    processors: ProcessorLook | None

    def for_s(self, now_s: float, processors: ProcessorLook | None, *, is_used: bool) -> float:
        """The time until this look [s]; others who take the processors use it as well."""
        if is_used or is_processor_taken(self.processors, processors):
            self.since_s, self.processors = now_s, processors
        return now_s - self.since_s


# The box


def composed(
    texts: Texts, wanted: Request, attempt: int, *, is_held: bool = False
) -> tuple[tuple[BenchRequest, ...], tuple[Prompt, ...]]:
    """A request of the search as it is sent, as many as run at once, each with a text of its own.

    It is held to its length, or free.
    """
    name = wanted.prompt_id if not attempt else f"{wanted.prompt_id} again {attempt}"
    is_call = wanted.kind == "tool" and not wanted.ignore_eos
    n_predict = max(wanted.n_predict, _TOOL_TOKENS) if is_call else wanted.n_predict
    one = RequestClass(1.0, wanted.kind, wanted.cached_tokens, wanted.new_tokens, n_predict,
                       wanted.concurrency)  # fmt: skip
    return texts.of_class(
        one,
        name,
        case="tool call" if is_call else wanted.kind if wanted.new_tokens else "prefix",
        is_held=is_held,
        is_framed=not is_call,
        has_own_sampling=not is_call,
        is_chat=is_call,
        has_tools=is_call,
        tells_steps=wanted.concurrency == 1 and wanted.new_tokens > 0 and not is_call,
        details={"prompt": wanted.prompt_id, "attempt": attempt},
    )


@dataclass
class _Process:
    """The process under measurement."""

    arm: Arm
    candidate: Candidate
    life: Life
    stack: contextlib.ExitStack


@dataclass
class LeaseBox:
    """A `sweep.Box` over the lease that is held.

    `plan_arm` gives what would be deployed for an arm, `on_arm` hears of each that serves, `on_samples`
    of every request, void ones included, `tell` of why one ended. `patience_s` is how long a disturbance is waited out, but not past
    `until_s` on the clock of `now`;
    `yielded` says why the sweep gave way after that, `ended` why it ended before its time.
    """

    ctx: Context
    held: Held
    plan_arm: Callable[[Arm], Plan]
    texts: Texts
    per_request: Collection[str]
    on_arm: Callable[[Arm, ArmRecord], None]
    on_samples: Callable[[Arm, Sequence[Sample]], None]
    tell: Callable[[str], None]
    patience_s: float
    house: House
    incumbent: Arm
    deadline: Deadline | None = None
    expected_load_s: float | None = None
    until_s: float = math.inf
    yielded: str | None = None
    ended: str | None = None
    _process: _Process | None = None
    _proved: set[tuple[str, str]] = field(default_factory=set)
    _reader: FingerprintReader | None = None
    _calls_tools: bool = False
    # Kinds of text that this model answers too briefly to tell its pace: they are held to their length.
    _ends_early: set[str] = field(default_factory=set)
    may_repeat: set[str] = field(default_factory=set)

    # The protocol

    def now(self) -> float:
        """Seconds."""
        return self.ctx.clock.monotonic_s()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        self.ctx.clock.sleep(seconds)

    def check(self) -> None:
        """Whether the lease still stands in the server's place, with time left, room for what is measured, and the same cards.

        Raises:
            Preempted: it does not, or there is none.
        """
        now_s = self.ctx.clock.now_s()
        if self.deadline is not None and self.deadline.is_over(now_s):
            raise self._preempted(ends_text(self.deadline, now_s))
        try:
            self.held.check()
        except LeaseEnded as ended:
            raise self._preempted(ended.cause or ended.message) from ended
        stopped = None if self.held.restores else self.house.stopped()
        if over := stopped or self.house.full() or self.house.changed():
            raise self._preempted(over)

    def restart(self, arm: Arm) -> Boot:
        """A fresh process of an arm, as it would be deployed."""
        boot = self._restart(arm)
        if not boot.ok:
            self._blame(boot.failure)
        return boot

    def _restart(self, arm: Arm) -> Boot:
        self.close()
        self._wait_for_the_house()
        began_s = self.now()
        try:
            plan = self.plan_arm(arm)
        except LeaseEnded as ended:
            raise self._preempted(ended.cause or ended.message) from ended
        except (ConfigError, DeployError, EngineError) as error:
            self.tell(f"{arm}: {error.cause or error.message}")
            return Boot(False, self.now() - began_s, "refused")
        while True:
            boot = self._try_to_boot(arm, plan, began_s)
            if boot.ok or self.house.trouble() is None:
                return boot
            self._wait_for_the_house()  # a start beside somebody else says nothing of the arm

    def _try_to_boot(self, arm: Arm, plan: Plan, began_s: float) -> Boot:
        try:
            with contextlib.ExitStack() as stack:
                return self._boot(arm, plan, stack, began_s)
        except LeaseEnded as ended:
            raise self._preempted(self._why_over() or ended.cause or ended.message) from ended
        except BenchError as error:
            self.tell(f"{arm}: {error.cause or error.message}")
            return Boot(False, self.now() - began_s, "refused")

    def measure(self, request: Request, arm: Arm | None = None) -> Mapping[str, Any]:
        """One request, asked until nothing speaks against the answer.

        Raises:
            Refused: the server does not take it, or it goes beyond what was proved of the engine.
            ServerDied: the process is gone.
            Preempted: the lease is gone, or the machine stays disturbed.
        """
        process = self._process
        if process is None:
            raise ServerDied("crash")
        overrides = self._overrides(process, arm)
        target = replace(process.life.target, overrides=overrides)
        bare = request.bare if request.is_warm and request.new_tokens else None
        end_s = min(self.now() + self.patience_s, self.until_s)
        attempt = 0
        while True:
            marks: frozenset[Mark] = frozenset()
            if attempt and bare is not None:  # what disturbed it may have taken the prefix with it
                _, marks = self._ask(process, target, bare, attempt)
            if not marks:
                found, marks = self._ask(process, target, request, attempt)
                if not marks:
                    if why := self.house.changed():
                        raise self._preempted(why)
                    return self._answer(process, request, found, attempt)
            if Mark.SHORT in marks:
                self._ends_early.add(request.kind)
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
        process, self._process = self._process, None
        if process is not None:
            process.stack.close()

    def _preempted(self, why: str) -> Preempted:
        """The end of the sweep, and its reason kept."""
        self.ended = why
        return Preempted(why)

    def _why_over(self) -> str | None:
        """The window, where it is the reason that the lease's time ran out."""
        if self.deadline is None or self.held.left_s > 0:
            return None
        return ends_text(self.deadline, self.ctx.clock.now_s())

    def _wait_for_the_house(self) -> None:
        """Wait for a GPU that is cool and free; the sweep yields where it stays otherwise.

        Raises:
            Preempted: it does.
        """
        trouble = self.house.wait(self.until_s)
        self.check()
        if trouble is not None:
            self.yielded = f"the machine is not free: {trouble}"
            raise self._preempted(self.yielded)

    # Starting

    def _boot(self, arm: Arm, plan: Plan, stack: contextlib.ExitStack, began_s: float) -> Boot:
        candidate = stack.enter_context(self.held.serve(plan))
        if candidate.fault is not None:
            fault = candidate.fault
            self.tell(f"{arm} does not start: {fault.words}")
            return Boot(False, self.now() - began_s, str(fault.reason))
        self._reader = self._reader or FingerprintReader(self.ctx)
        target = open_candidate(self.ctx, candidate, str(arm), reader=self._reader)
        self.on_arm(arm, target.arm)
        self.texts.learn(target.server)
        try:
            self._warm(arm, candidate, target, stack)
        except NoAnswer as error:
            gone = self._gone(arm, candidate, str(error.cause))
            if isinstance(gone, ServerDied):
                return Boot(False, self.now() - began_s, gone.kind)
            if isinstance(gone, Preempted):
                raise gone from error
            raise
        return Boot(True, self.now() - began_s, "", candidate.vram_free_mib, target.n_ctx)

    def _warm(
        self, arm: Arm, candidate: Candidate, target: Target, stack: contextlib.ExitStack
    ) -> None:
        """The first requests, discarded.

        Raises:
            BenchError: it is meant to draft everything and drafts nothing, or the reverse.
        """
        life = Life(self.ctx, target)
        life.may_repeat = self.may_repeat
        life.is_reference = arm.canonical() == self.incumbent.canonical()
        try:
            has_drafted = life.warm_up(
                self.texts.first(life),
                drafts=arm.drafts,
                is_proved=arm.family in self._proved,
                must_draft=target.speculation.always,  # a gate may keep every draft back
            )
        finally:
            self.on_samples(arm, [one.sample for one in life.asked])
        if has_drafted:
            self._proved.add(arm.family)
        life.open()
        self._process = _Process(arm, candidate, life, stack.pop_all())  # nothing can fail any more

    # Asking

    def _overrides(self, process: _Process, arm: Arm | None) -> Mapping[str, Any]:
        """What is sent with a request in the place of the process's own settings of drafts."""
        own = process.arm
        if arm is None or (arm.n_max, arm.p_min) == (own.n_max, own.p_min):
            return {}
        if own.engine not in self.per_request or arm.n_max > own.n_max:
            raise Refused(f"{own.engine} was not shown to take this with a request")
        return {"speculative.n_max": arm.n_max, "speculative.p_min": arm.p_min}

    def _ask(
        self, process: _Process, target: Target, request: Request, attempt: int
    ) -> tuple[list[Answered], frozenset[Mark]]:
        """One attempt: the answers, and what speaks against them."""
        is_held = request.kind in self._ends_early
        sent, prompts = composed(self.texts, request, attempt, is_held=is_held)
        _demand_room(target, sent[0], prompts[0])
        # Others are waited for between attempts, as long as there is patience.
        found = process.life.ask_watched(sent, prompts, target=target, limit_s=SLOT_S)
        self.on_samples(process.arm, [one.sample for one in found])
        problem = next((one.sample.problem for one in found if one.sample.problem), None)
        if problem is not None:
            gone = self._gone(process.arm, process.candidate, problem, is_call=sent[0].has_tools)
            if isinstance(gone, ServerDied):
                self._blame(gone.kind)
            raise gone
        return found, frozenset(mark for one in found for mark in one.sample.marks)

    def _gone(
        self, arm: Arm, candidate: Candidate, problem: str, *, is_call: bool = False
    ) -> Exception:
        """What a request without an answer means, Preempted where the lease is gone.

        A model or a template that knows no tools answers a call of one with an error, with nothing, or with nonsense.
        """
        self.check()
        try:
            fault = self.held.look(candidate)
        except LeaseEnded as ended:
            return self._preempted(ended.cause or ended.message)
        refusals = (*_CALL_REFUSALS, *(() if self._calls_tools else _NO_CALLS))
        told = problem.startswith(refusals if is_call else _HTTP_REFUSAL)
        if fault is None and (told or _TOO_LONG in problem):
            return Refused(problem)
        self.close()
        if fault is not None:
            self.tell(f"{arm} ended: {fault.words}")
            return ServerDied(str(fault.reason))
        self.tell(f"gave up on {arm}: {problem}")
        return ServerDied(str(Reason.HANG if problem == NOT_IN_TIME else Reason.ERROR))

    def _blame(self, failure: str) -> None:
        """Whether an arm's end is its own: a driver may list a card for some seconds after it was lost.

        Raises:
            Preempted: it befell the card, or the lease.
        """
        if self.house.limits_w and failure in _OF_A_LOST_CARD:
            self.sleep(_HOUSE_POLL_S)
        self.check()

    # Reading

    def _answer(
        self, process: _Process, request: Request, found: Sequence[Answered], n_void: int
    ) -> dict[str, Any]:
        answer = answer_of(found) | ({"n_void": n_void} if n_void else {})
        if len(found) == 1 and found[0].answer is not None and process.arm.drafts:
            answer["steps"] = found[0].answer.steps
        if request.kind == "tool" and not request.ignore_eos:
            answer["tool_ok"] = self._tool_ok(found[0])
        if found[0].request.is_fixed_length:
            answer["is_held"] = True
        return {key: value for key, value in answer.items() if value is not None}

    def _tool_ok(self, asked: Answered) -> bool | None:
        """Whether a tool call came whole; None as long as this model was not seen to make one."""
        is_whole = tool_call_is_whole(asked.answer)
        self._calls_tools |= is_whole is True
        return False if is_whole is None and self._calls_tools else is_whole


def _demand_room(target: Target, request: BenchRequest, prompt: Prompt) -> None:
    """Count a prompt that nearly fills the context.

    Raises:
        Refused: it does not fit with its answer.
    """
    n_ctx, about = target.n_ctx, (request.depth_tokens or 0) + request.n_predict
    if n_ctx is None or about < _NEARLY_FULL * n_ctx:
        return
    n_tokens = count_tokens(target.server, prompt.text, timeout_s=_COUNT_S)
    if n_tokens is not None and n_tokens + request.n_predict > n_ctx:
        raise Refused(f"{n_tokens} tokens and {request.n_predict} more exceed {n_ctx}", n_tokens)


_TIMINGS = ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")
_DRAFTS = ("draft_n", "draft_n_accepted")  # left out where nothing was drafted


def answer_of(found: Sequence[Answered]) -> dict[str, Any]:
    """The timings of one request, as the search reads them; of several at once the mean, and the least VRAM.

    What one of several does not tell is unknown.
    """
    rows = [_row(one) for one in found]
    answer = {}
    for key in rows[0]:
        if known := all_known(row[key] for row in rows):
            answer[key] = min(known) if key == "vram_free_min_mib" else fmean(known)
    return {key: value for key, value in answer.items() if value or key not in _OF_NONE}


_OF_NONE = frozenset({*_DRAFTS, "decode_left_ms"})  # not told where there is none


def _row(asked: Answered) -> dict[str, Any]:
    sample = asked.sample
    timings = sample.timings or Timings()
    row = {
        "cache_n": sample.n_cached,
        **{name: getattr(timings, name) for name in _TIMINGS},
        **{name: getattr(timings, name) or 0 for name in _DRAFTS},
        "wall_ms": sample.client.wall_ms if sample.client is not None else None,
        "decode_left_ms": sample.decode_left_ms,
        "vram_free_min_mib": sample.vram_free_min_mib,
        "energy_j": sample.energy_j,
        "repeated_ratio": sample.repeated_ratio,
    }
    # It may have ended early, and nobody knows what the rest would have taken.
    return row | dict.fromkeys(_TIMES if sample.decode_left_ms is None else ())


_TIMES = ("wall_ms", "predicted_ms")


# Once more, through the very unit that serves

_ROUNDS = 3
_TRIES = 3


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


def kinds_of_one_token(events: Iterable[Mapping[str, Any]]) -> set[str]:
    """Kinds of text to which one token over and over was an answer in a sweep: what serves gave it too."""
    kinds = {
        (event.get("request") or {}).get("kind")
        for event in events
        if (event.get("answer") or {}).get("repeated_ratio") == WHOLLY_REPEATED
    }
    return {*filter(None, kinds), *(KINDS_OF_MIXED if MIXED in kinds else ())}


def measure_live(ctx: Context, workload: Workload, seed: int, *, may_repeat: set[str]) -> LiveTurn:
    """Ask the serving unit as a pair of the verdict would be asked; what others disturb is void.

    Args:
        ctx: Where.
        workload: What it is asked.
        seed: Of the texts.
        may_repeat: Kinds of text to which its sweep had one token over and over as an answer.

    Raises:
        NoAnswer: it gave none.
        BenchError: it cannot be asked, or no round was undisturbed.
    """
    target = open_live(ctx)
    texts = Texts(prompt_book(ctx), seed)
    texts.learn(target.server)
    life = Life(ctx, target)
    life.may_repeat = may_repeat
    # Its speed judges it: a gate may keep every draft back.
    life.warm_up(texts.first(life), drafts=target.speculation.drafts, must_draft=False)
    n_void = 0
    for attempt in range(_TRIES):
        life.traffic.wait_until_idle()
        life.open()
        rounds = []
        short: dict[int, list[Sample]] = {}
        for number in range(_ROUNDS):
            turn_s, n = live_turn(life, texts, workload, f"live {attempt} {number}", short)
            n_void += n
            rounds += [] if turn_s is None else [turn_s]
        _, seen = life.settle()
        if rounds and seen.is_foreign is not True:
            return LiveTurn(tuple(rounds), n_void)
        n_void += len(rounds)
    raise BenchError("the unit that serves could not be measured undisturbed")


def live_turn(
    life: Life, texts: Texts, workload: Workload, name: str, short: dict[int, list[Sample]]
) -> tuple[float | None, int]:
    """One round of the workload by these texts [s], None where a class was disturbed each time; and how often one was.

    `short` are the answers of a class so far that ended before they tell its pace, of a server that cannot be
    held to a length: together they tell it.

    Raises:
        NoAnswer: there is none.
    """
    turns: list[float | None] = []
    n_void = 0
    for at, one in enumerate(workload.classes):
        request = Request(one.kind, f"{name} {at}", one.cached_tokens, one.new_tokens,
                          one.n_predict, one.concurrency)  # fmt: skip
        turn_s = None
        for attempt in range(_TRIES):
            if request.is_warm:  # each time: what disturbed it may have taken the prefix with it
                _live_s(life, texts, request.bare, attempt, [])
            turn_s = _live_s(life, texts, request, attempt, short.setdefault(at, []))
            if turn_s is not None:
                break
            n_void += 1
        turns.append(turn_s)
    known = all_known(turns)
    return (workload.turn_time_s(known) if known else None), n_void


def _live_s(
    life: Life, texts: Texts, request: Request, attempt: int, short: list[Sample]
) -> float | None:
    """Turn time of one request, of several at once their mean [s]; None where something speaks against it."""
    found = life.ask_all(*composed(texts, request, attempt, is_held=attempt > 0))
    samples = [one.sample for one in found]
    for sample in samples:
        if sample.problem is not None or sample.client is None:
            raise NoAnswer("the unit that serves gave no answer", cause=sample.problem)
    turns = all_known(None if one.marks else one.turn_ms for one in samples)
    if len(turns) == len(samples):
        return fmean(turns) / 1000
    if not life.target.holds:
        short += [one for one in samples if one.marks == (Mark.SHORT,)]
    return _turn_of_short_s(short, request.n_predict)


def _turn_of_short_s(samples: Sequence[Sample], n_predict: int) -> float | None:
    """Turn time by the pace of answers that ended early [s]; None where they are too few tokens together.

    What ik generates of a last draft behind the end counts as generated, and took its time: the pace is exact.
    """
    walls = all_known(one.client.wall_ms if one.client else None for one in samples)
    timings = all_known(one.timings for one in samples)
    n = sum((one.predicted_n or 1) - 1 for one in timings)
    if n < min(n_predict, FEW_TOKENS):
        return None
    decode_ms = sum(one.predicted_ms or 0.0 for one in timings)
    left = n_predict - 1 - n / len(samples)
    return (fmean(walls) + left * decode_ms / n) / 1000


def expected_turns(evidence: Mapping[str, Any], workload: Workload) -> tuple[float, float] | None:
    """Mean turn of what served and of the last winner, each over the pairs that it was proved in [s]."""
    won = [one for one in evidence.get("challenges", []) if one["outcome"] == "promote"]
    if evidence.get("wanted_tok_s") is not None:
        won = won[-1:]  # each was against the speed, not against the one before
    if not won or not all(one["pairs"] for one in won):
        return None
    before, after = (
        fmean(workload.turn_time_s([ms / 1000 for ms in pair[name]]) for pair in one["pairs"])
        for one, name in ((won[0], "incumbent_ms"), (won[-1], "candidate_ms"))
    )
    return before, after
