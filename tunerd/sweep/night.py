"""One sweep's dealings with its box: time, samples, prompts, and what was recommended when."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from tunerd.profile.arm import (
    BOOT,
    NGRAM,
    REQUEST,
    Arm,
    Boot,
    Box,
    Reading,
    Refused,
    Request,
    Sample,
    ServerDied,
    as_kept,
)
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep import observations
from tunerd.sweep.learner import Learner

# Before anything was seen: a load, and a slow server.
_LOAD_S = 120.0
_SLOW_PROMPT_TOK_S = 150.0
_SLOW_DECODE_TOK_S = 12.0
_LEAST_PROMPT = 1024  # shorter ones say little about long ones
_LEAST_PREDICTED = 16
_LOAD_SLACK = 1.2
_REQUEST_SLACK = 1.3
_WARM_UP_S = 5.0
_RECENT = 8  # starts, or blocks, by which the next is judged
# Kept free at the end, whatever is planned; less of a night that is short itself.
_END_S = 20.0
_END_RATIO = 0.05

# Processes that begin with the same block of prompts: enough to tell the prompts from the arm, few
# enough that a night sees many texts.
_SHARE_BLOCKS = 3
# New prompt tokens from which reading them costs more than decoding: they stand behind a shared prefix, which a process
# reads once, and count with the time that it took.
_LONG_PROMPT_TOKENS = 8192
_TAIL_TOKENS = 256
# Drafts may be right more often at an answer's end than at its beginning, and with one drafter more so than with another: nights of at
# least so long ask for whole answers, and shorter ones where prompts take most of a start, but of lookups. Second world, behind the best
# in the mean with halves and whole: 24G deep 2 h 2.0 and 0.7 %, 16G chat 2.3 and 2.1, 12G agent 1.4 and 1.1 (boxes 1 to 12); in 1 h
# 24G deep 2.8 and 1.7, 16G deep 2.8 and 3.5, of lookups halves 3.0 (boxes 1 to 60); 16G chat 3.2 and 5.2.
_LONG_NIGHT_S = 5400.0


class TimeUp(Exception):
    """What comes next would not end before the budget does."""


@dataclass(frozen=True, slots=True)
class PathPoint:
    """What would have been recommended from here on: seconds and starts since the sweep began; it unpacks to the three."""

    seconds: float
    restarts: int
    arm: Arm

    def __iter__(self) -> Iterator[Any]:
        return iter((self.seconds, self.restarts, self.arm))


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts for every class, all of them new; `order` is that of asking."""

    name: str
    order: tuple[int, ...]


@dataclass
class Night:
    """The state that a sweep carries from one step to the next."""

    box: Box
    workload: Workload
    learner: Learner
    budget_s: float
    rng: np.random.Generator
    on_sample: Callable[[Sample], object] | None

    def __post_init__(self) -> None:
        """It begins now, and nothing was seen."""
        self.samples: list[Sample] = []
        self.restarts = 0
        self.path: list[PathPoint] = []
        self.spent_s: dict[str, float] = defaultdict(float)
        self._taken_s: dict[tuple[str, str], list[float]] = defaultdict(list)
        # Engines that read a shared prefix anew each time, and whether of several requests at once.
        self.broken_caches: set[tuple[str, bool]] = set()
        # Whether an engine was seen to find such a prefix without reading it: then all are asked for whole prompts, so
        # that both sides of a pair are.
        self.reads_whole = False
        # Whether engines tell their verification steps, of those that drafted.
        self._tell_steps: dict[str, bool] = {}
        self._clock = self.box.now
        self._begin = self.now_s
        self.tag = self._new_tag()
        self._blocks: dict[str, Block] = {}
        self._prompts, self.processes = itertools.count(1), itertools.count()
        self._loads: dict[str, list[float]] = defaultdict(list)
        self._longest_failure_s = 0.0
        self._unseen_load_s: float = getattr(self.box, "expected_load_s", None) or _LOAD_S
        self._booted: set[Arm] = set()
        self._prompt_tok_s: list[float] = []
        self._decode_tok_s: list[float] = []

    # Time

    @property
    def elapsed_s(self) -> float:
        """Since the sweep began."""
        return self.now_s - self._begin

    @property
    def remaining_s(self) -> float:
        """Until nothing may run any more."""
        return self.budget_s - self.elapsed_s - min(_END_S, _END_RATIO * self.budget_s)

    def load_s(self, arm: Arm) -> float:
        """Time that a start of this arm may take."""
        others = (1.5 * seconds for known in self._loads.values() for seconds in known)
        loads = self._loads.get(arm.engine) or list(others)
        expected = _LOAD_SLACK * max(loads[-_RECENT:]) if loads else self._unseen_load_s
        if arm.canonical() not in self._booted:
            expected = max(expected, self._longest_failure_s)
        return expected

    def request_s(self, arm: Arm, request: Request) -> float:
        """Time that a request may take: what the laws say, else the slowest rates seen."""
        if request.is_warm and (arm.engine, False) in self.broken_caches:  # it reads all of it
            new_tokens = request.cached_tokens + request.new_tokens
            request = replace(request, cached_tokens=0, new_tokens=new_tokens)
        expected = self.learner.request_ms(arm, request)
        if expected is not None:
            return _REQUEST_SLACK * expected / 1000 + 0.5
        prompt_s = request.new_tokens / min(self._prompt_tok_s or [_SLOW_PROMPT_TOK_S])
        decode_s = request.n_predict / min(self._decode_tok_s or [_SLOW_DECODE_TOK_S])
        return _REQUEST_SLACK * (prompt_s + decode_s) * math.sqrt(max(request.concurrency, 1))

    def usual_request_s(self, arm: Arm, request: Request) -> float:
        """What a request will take, as far as one can tell."""
        return self.request_s(arm, request) / _REQUEST_SLACK

    def _requests(self, arm: Arm, *, exact: bool) -> list[Request]:
        """One of each class."""
        return [self.request(arm, one, "", exact=exact) for one in self.workload.classes]

    def block_s(self, arm: Arm, *, exact: bool) -> float:
        """Time of one block of every class."""
        return sum(self.request_s(arm, one) for one in self._requests(arm, exact=exact))

    def prefix_s(self, arm: Arm, *, exact: bool) -> float:
        """Time in which a process first reads the prefixes of its classes."""
        if (arm.engine, False) in self.broken_caches:
            return 0.0
        asked = self._requests(arm, exact=exact)
        lengths = {one.cached_tokens for one in asked if one.is_warm}
        return sum(self.request_s(arm, Request("", "", 0, n_tokens, 1)) for n_tokens in lengths)

    @cached_property
    def reads_much(self) -> bool:
        """Whether prompts take most of what a start is asked, at slow speeds: by the workload alone, before anything was measured."""
        classes = self.workload.classes
        prefixes = {one.cached_tokens for one in classes} | {0}
        totals = [(one.new_tokens, one.cached_tokens + one.new_tokens) for one in classes]
        n_read = sum(prefixes) + sum(
            min(new, total - max(one for one in prefixes if one <= total)) for new, total in totals
        )
        n_asked = sum(
            observations.searched_tokens(one, drafts=True, whole=False) for one in classes
        )
        return n_read / _SLOW_PROMPT_TOK_S > n_asked / _SLOW_DECODE_TOK_S

    def process_s(self, arm: Arm, *, exact: bool = False) -> float:
        """Time that a fresh process with its warm-up and a block may take."""
        before_s = self.start_s(arm) + self.prefix_s(arm, exact=exact)
        return before_s + self.block_s(arm, exact=exact)

    def usual_process_s(self, arm: Arm) -> float:
        """What one of a verdict will take, as far as one can tell: for several, whose delays do not all come together."""
        asked_s = self.prefix_s(arm, exact=True) + self.block_s(arm, exact=True)
        return self.usual_start_s(arm) + asked_s / _REQUEST_SLACK

    def start_s(self, arm: Arm) -> float:
        """Time that a start and its warm-up may take."""
        warm_up_s = self.usual_s(arm, observations.WARM_UP, _WARM_UP_S)
        return self.load_s(arm) + max(_WARM_UP_S, warm_up_s)

    def usual_start_s(self, arm: Arm) -> float:
        """What a start and its warm-up take, as far as one can tell."""
        loads = self._loads.get(arm.engine)
        load_s = fmean(loads[-_RECENT:]) if loads else self.load_s(arm)
        return load_s + self.usual_s(arm, observations.WARM_UP, _WARM_UP_S)

    def usual_s(self, arm: Arm, purpose: str, otherwise: float) -> float:
        """What a request of a purpose takes this engine [s], by the last that were answered; `otherwise` before."""
        taken = self._taken_s[arm.engine, purpose]
        return median(taken[-_RECENT:]) if taken else otherwise

    def fill_s(self, arm: Arm) -> float:
        """Time that filling the context may take."""
        n_slots = self.learner.observations.n_slots
        return n_slots * self.request_s(arm, Request("", "", 0, self.learner.context, 1, n_slots))

    def require(self, seconds: float) -> None:
        """Goes on only if so much time is left.

        Raises:
            TimeUp: It is not.
        """
        if seconds > self.remaining_s:
            raise TimeUp

    def tells_steps(self, engine: str) -> bool:
        """Whether answers of an engine say what each step took: as others do, before it drafted anything.

        Once is enough: tool calls, and answers whose steps cannot be told apart, come without them.
        """
        return self._tell_steps.get(engine, any(self._tell_steps.values()))

    # Prompts

    def _stand_in(self, arm: Arm, one: RequestClass, *, exact: bool) -> tuple[int, int] | None:
        """How a long prompt is split into a cached prefix and new tokens; None where it is read whole.

        Behind the longest prefix that is read anyway; while searching, behind one that other long prompts share.
        """
        if one.new_tokens < _LONG_PROMPT_TOKENS or one.concurrency > 1:
            return None
        if (arm.engine, False) in self.broken_caches:
            return None
        total, classes = one.cached_tokens + one.new_tokens, self.workload.classes
        shared = max((c.cached_tokens for c in classes if c.cached_tokens < total), default=0)
        if total - shared < _LONG_PROMPT_TOKENS and not one.cached_tokens:
            # Which engine it is does not matter in a proof: both sides of a pair are asked alike. And its time counts there
            # with that of its beginning, which nobody knows of one that was read with a longer prefix.
            is_broken = any(not of_several for _, of_several in self.broken_caches)
            is_longest = all(c.cached_tokens <= shared for c in classes)
            is_whole = self.reads_whole or (exact and (is_broken or not is_longest))
            return None if is_whole else (shared, total - shared)
        is_alone = sum(c.new_tokens >= _LONG_PROMPT_TOKENS for c in classes) == 1
        return None if is_alone or exact else (total - _TAIL_TOKENS, _TAIL_TOKENS)

    def request(self, arm: Arm, one: RequestClass, prompt_id: str, *, exact: bool) -> Request:
        """A request of a class; if not exact, one that decodes at the same depth for less."""
        whole = self.budget_s >= _LONG_NIGHT_S or (self.reads_much and arm.spec != NGRAM)
        shorter = observations.searched_tokens(one, drafts=arm.drafts, whole=whole)
        n_predict = one.n_predict if exact else shorter
        cached, new = self._stand_in(arm, one, exact=exact) or (one.cached_tokens, one.new_tokens)
        return Request(one.kind, prompt_id, cached, new, n_predict, one.concurrency)

    def new_prompt(self) -> str:
        """Name of a prompt that nothing has seen."""
        return f"{self.tag}-{next(self._prompts)}"

    def block(self, name: str) -> Block:
        """The block of that name; made when first asked for."""
        if name not in self._blocks:
            order = tuple(int(at) for at in self.rng.permutation(len(self.workload.classes)))
            self._blocks[name] = Block(f"{self.tag}-{name}", order)
        return self._blocks[name]

    def _new_tag(self) -> str:
        return f"{int(self.rng.integers(2**40)):010x}"

    # Samples

    def recall(self, known: Sequence[Sample]) -> None:
        """Learns from samples of earlier nights, or of this one before it was cut."""
        taken = {sample.process.partition("/")[0] for sample in known}
        while self.tag in taken:  # the same seed as before: its texts and processes have names
            self.tag = self._new_tag()
        self.learner.add(known)
        for sample in known:
            if sample.event == BOOT and not sample.failure:
                self._loads[sample.arm.engine].append(sample.seconds)
            self._note(sample)

    def booted(self, arm: Arm, boot: Boot, process: str, purpose: str, seconds: float) -> Sample:
        """Files a start."""
        free, failure = boot.vram_free_mib, "" if boot.ok else boot.failure or "crash"
        sample = Sample(
            event=BOOT, process=process, arm=arm, purpose=purpose, at_s=self.now_s,
            seconds=seconds, failure=failure, n_ctx=getattr(boot, "n_ctx", None),  # foreign boxes tell less
            vram_free_mib=None if free is None else float(free),
        )  # fmt: skip
        self.restarts += 1
        self.spent_s["load" if boot.ok else "failed starts"] += seconds
        if boot.ok:
            self._loads[arm.engine].append(seconds)
            self._booted.add(arm.canonical())
        else:
            self._longest_failure_s = max(self._longest_failure_s, seconds)
        self._file(sample)
        return sample

    def answered(self, sample: Sample) -> None:
        """Files a request, answered or not."""
        self.spent_s[sample.purpose] += sample.seconds
        self._note(sample)
        self._file(sample)

    def _note(self, sample: Sample) -> None:
        """What tells how long others will take, of this night or of one before."""
        self._note_taken(sample)
        self._note_rates(sample.reading)
        self._note_steps(sample)

    def _note_taken(self, sample: Sample) -> None:
        if sample.event != BOOT and not sample.failure:
            self._taken_s[sample.arm.engine, sample.purpose].append(sample.seconds)

    def _note_steps(self, sample: Sample) -> None:
        reading = sample.reading
        if reading is not None and reading.n_drafted:
            known = self._tell_steps.get(sample.arm.engine, False)
            self._tell_steps[sample.arm.engine] = known or reading.steps is not None

    def _note_rates(self, reading: Reading | None) -> None:
        if reading is None:
            return
        if reading.prompt_ms and (reading.prompt_n or 0) >= _LEAST_PROMPT:
            self._prompt_tok_s.append((reading.prompt_n or 0) / reading.prompt_ms * 1000)
        if reading.predicted_ms and (reading.predicted_n or 0) >= _LEAST_PREDICTED:
            self._decode_tok_s.append((reading.predicted_n or 0) / reading.predicted_ms * 1000)

    def _file(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.learner.add([sample])
        if self.on_sample is not None:
            self.on_sample(sample)

    # What would be recommended

    def recommend(self, arm: Arm) -> None:
        """Notes what a night that ended now would recommend."""
        if not self.path or self.path[-1].arm != arm:
            self.path.append(PathPoint(self.elapsed_s, self.restarts, arm))

    @property
    def now_s(self) -> float:
        """The box's clock."""
        return self._clock()


_WARM_UP_TOKENS = 64
_WARM_UP_PREDICT = 8
_FILL_PREDICT = 16
_FILL_SLACK = 128
_FILL_TRIES = 5
# Taken off a prompt of which the server does not say by how much it is too long.
_TOO_LONG = 0.02
_TOOL_PROMPT = 200
_TOOL_PREDICT = 32
_BROKEN = 2


class CannotStart(Exception):
    """A process did not come up; `failure` is oom, hang, crash, killed, error or refused."""

    def __init__(self, failure: str) -> None:
        super().__init__(failure)
        self.failure = failure


class Server:
    """One life of the server. Requests raise `ServerDied` when it ends before its time."""

    def __init__(self, night: Night, arm: Arm, purpose: str) -> None:
        """Starts it.

        Raises:
            CannotStart: It did not come up.
        """
        self.arm = arm
        self.number = next(night.processes)
        self.name = f"{night.tag}/{self.number}"
        self._night = night
        self._n_blocks = 0
        night.box.check()
        begin = night.now_s
        boot = night.box.restart(arm)
        # Classes whose last prompt was read in two parts, its prefix before.
        self.in_parts: set[int] = set()
        self._refused = Refused()
        sample = night.booted(arm, boot, self.name, purpose, night.now_s - begin)
        self.n_ctx = sample.n_ctx
        if sample.failure:
            raise CannotStart(sample.failure)

    def ask(
        self,
        request: Request,
        purpose: str,
        *,
        block: str = "",
        draft: tuple[int, float] | None = None,
        pair: tuple[int, int] | None = None,
    ) -> Reading | None:
        """One answer, or None if the server refused.

        Raises:
            ServerDied: The process is gone.
        """
        night, arm = self._night, self.arm
        own = (arm.n_max, arm.p_min)
        n_max, p_min = draft or own
        # An override only where there is one: not every box takes any.
        override = () if (n_max, p_min) == own else (arm.with_draft(n_max, p_min),)
        begin = night.now_s

        def file(answer: Any = None, failure: str = "") -> Reading | None:
            sample = Sample(
                event=REQUEST, process=self.name, arm=arm, purpose=purpose, at_s=night.now_s,
                seconds=night.now_s - begin, failure=failure, request=request, n_max=n_max,
                p_min=p_min, block=block, answer=None if answer is None else as_kept(answer), pair=pair,
            )  # fmt: skip
            night.answered(sample)
            return sample.reading

        try:
            night.box.check()
            answer = night.box.measure(request, *override)
        except Refused as refused:
            self._refused = refused
            return file(failure="refused")
        except ServerDied as died:
            file(failure=died.kind or "crash")
            raise
        return file(answer)

    def warm_up(self) -> None:
        """First request after the load, discarded."""
        night = self._night
        kind = night.workload.classes[night.workload.deepest].kind
        self.ask(
            Request(kind, night.new_prompt(), 0, _WARM_UP_TOKENS, _WARM_UP_PREDICT),
            observations.WARM_UP,
        )

    def _ask_warm(self, request: Request, **told: Any) -> Reading | None:
        """One answer of a class, behind its prefix.

        A recurrent model goes back to where a prompt ended, or begins anew, and may forget that as soon as a
        longer prompt is read: so the prefix is served bare, before every class.
        """
        if request.is_warm and self._cache_of(request) not in self._night.broken_caches:
            name = self._night.new_prompt()
            self.ask(replace(request.bare, prompt_id=name), observations.PREFIX)
        return self.ask(request, observations.BLOCK, **told)

    def block(
        self,
        block: Block | None = None,
        *,
        exact: bool = False,
        draft: tuple[int, float] | None = None,
        pair: tuple[int, int] | None = None,
    ) -> dict[int, Reading]:
        """Answers of every class to new prompts; a class that was refused is missing.

        Raises:
            ServerDied: The process is gone.
            TimeUp: The block would not end in time.
        """
        night = self._night
        if block is None:  # neighbours share most of theirs, none repeats one
            block = night.block(f"s{self.number // _SHARE_BLOCKS + self._n_blocks}")
        before_s = 0.0 if self._n_blocks else night.prefix_s(self.arm, exact=exact)
        self._n_blocks += 1
        # A verdict was planned by what its sides usually take; of other starts nobody knows so well.
        slack = 1.0 if pair is None else 1.0 / _REQUEST_SLACK
        night.require(slack * (before_s + night.block_s(self.arm, exact=exact)))
        found = dict[int, Reading]()
        for text in block.order:
            one = night.workload.classes[text]
            name = observations.prompt_name(block.name, text)
            request = night.request(self.arm, one, name, exact=exact)
            # Those before may have taken longer.
            night.require(night.usual_request_s(self.arm, request))
            asked_s = night.now_s
            reading = self._ask_warm(request, block=block.name, draft=draft, pair=pair)
            is_known = self._cache_of(request) in night.broken_caches
            # A prefix that was not found is served once more before anything is said of the engine.
            if reading is not None and not is_known and observations.is_cold(request, reading):
                night.require(night.now_s - asked_s)
                again = replace(request, prompt_id=request.prompt_id + observations.AGAIN)
                was_disturbed = reading.n_void > 0
                reading = self._ask_warm(again, block=block.name, draft=draft, pair=pair)
                was_disturbed |= reading is not None and reading.n_void > 0
                is_cold = reading is not None and observations.is_cold(again, reading)
                if is_cold and not was_disturbed:
                    night.broken_caches.add(self._cache_of(request))
            if reading is not None and exact and request.cached_tokens != one.cached_tokens:
                process = night.learner.observations.processes[self.name]
                reading = observations.as_asked(process, process.answers[-1], night.workload)
                if reading is None:
                    night.reads_whole = True
                    request = night.request(self.arm, one, name, exact=exact)
                    night.require(night.usual_request_s(self.arm, request))
                    reading = self._ask_warm(request, block=block.name, draft=draft, pair=pair)
            if reading is not None:
                found[text] = reading
            self.in_parts.discard(text)
            if request.cached_tokens != one.cached_tokens:
                self.in_parts.add(text)
        return found

    def _cache_of(self, request: Request) -> tuple[str, bool]:
        return self.arm.engine, request.concurrency > 1

    def fill(self, context: int) -> Reading | None:
        """One prompt that fills the context, or as many as share it; None where the server took none that does.

        How many tokens a text has is an estimate: it is cut, or made longer, by the server's own count.

        Raises:
            ServerDied: It ran out of memory, or died of something else.
            TimeUp: It would not end in time.
        """
        night = self._night
        kind = night.workload.classes[night.workload.deepest].kind
        slack = min(_FILL_SLACK, context // 64) + _FILL_PREDICT
        name, wanted = night.new_prompt(), max(context - slack, 1)
        new, n_slots = wanted, night.learner.observations.n_slots
        for _ in range(_FILL_TRIES):
            request = Request(kind, name, 0, new, _FILL_PREDICT, n_slots)
            night.require(n_slots * night.request_s(self.arm, request))
            reading = self.ask(request, observations.FILL)
            n_tokens = self._refused.n_prompt_tokens if reading is None else reading.prompt_n
            is_full = n_tokens is None or observations.is_full(n_tokens, context)
            if reading is not None and is_full:
                return reading
            new = round(new * (wanted / n_tokens if n_tokens else 1 - _TOO_LONG))
        return None

    def tool_calls(self, n_calls: int, *, most_broken: int | None = _BROKEN) -> None:
        """Short tool calls, until so many were asked or broke, or nobody judges them."""
        night = self._night
        broken = 0
        for _ in range(n_calls):
            request = Request(
                "tool", night.new_prompt(), 0, _TOOL_PROMPT, _TOOL_PREDICT, ignore_eos=False
            )
            night.require(night.request_s(self.arm, request))
            reading = self.ask(request, observations.TOOL)
            if reading is None or reading.tool_ok is None:
                return
            broken += not reading.tool_ok
            if most_broken is not None and broken >= most_broken:
                return
