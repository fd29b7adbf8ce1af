"""One life of a measured server: what it is asked, and what happened beside it."""

from __future__ import annotations

import os
import random
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine.health import RUN_OF_ONE_TOKEN, WHOLLY_REPEATED, repeated_ratio, why_garbage
from tunerd.engine.server import LlamaServer
from tunerd.errors import BenchError
from tunerd.machine.clock import polls
from tunerd.machine.host import cpu_seconds, process_cpu_s
from tunerd.machine.process import family_of
from tunerd.measure import trust
from tunerd.measure.answer import (
    Answer,
    ClientTimes,
    Counters,
    Mark,
    Sample,
    Timings,
    gained,
    read_answer,
    read_counters,
)
from tunerd.measure.request import (
    THOUGHT_TOKENS,
    TOOL_KINDS,
    USUAL_LETTERS_PER_TOKEN,
    Composer,
    Prompt,
    PromptBook,
    PromptStock,
    Request,
    Route,
    Suite,
    body_of,
    class_request,
    read_prompts,
    warm_up,
)
from tunerd.measure.target import NoAnswer, Target, letters_per_token
from tunerd.profile.workload import MIXED, RequestClass
from tunerd.result import Message, warning
from tunerd.words import all_known

# Looks at the machine while something is measured: GPUs during a request, counters between them.

_GPU_LOOK_S = 0.5
_IDLE_POLL_S = 0.5
# A slot may be told as busy for a moment after its answer has ended.
_LEAST_WAIT_S = 5.0
# How long a server may do nothing before the first byte of its answer, and what it may use meanwhile.
_SILENT_S = 60.0
_TIMES_SLOWEST = 3.0
_IDLE_CPU_S = 0.5
SLOT_S = 0.5  # in which the slot of the last answer is free


@dataclass
class _GpuWatch:
    """Reads the GPUs before, during and after one request, at most twice a second."""

    ctx: Context
    pids: tuple[int, ...]
    looks: list[trust.GpuLook] = field(default_factory=list)

    def look(self) -> None:
        """Read now, if the last reading is old enough."""
        if self.ctx.clock.monotonic_s() - self.looks[-1].at_s >= _GPU_LOOK_S:
            self.look_now()

    def look_now(self) -> None:
        """Read in any case."""
        gpus = self.ctx.gpu.read().gpus
        self.looks.append(trust.look_at(gpus, self.pids, at_s=self.ctx.clock.monotonic_s()))

    @property
    def free_mib(self) -> int | None:
        """The least that was free; None where a reading could not tell."""
        return min(all_known(look.free_mib for look in self.looks), default=None)


@dataclass
class Silence:
    """Whether a server that has not begun to answer does nothing either, and never will.

    As long as its processes use the processor, or its counters move, a long prompt takes its time.
    """

    ctx: Context
    target: Target
    _cpu_s: float = 0.0
    _since_s: float | None = None
    _counted: str | None = None

    def is_over(self) -> bool:
        """Whether it is waited for in vain; never where its processes are not known."""
        if not self.target.pids:
            return False
        cpu_s = sum(process_cpu_s(one) or 0.0 for one in family_of(*self.target.pids))
        now_s = self.ctx.clock.monotonic_s()
        if self._since_s is None or cpu_s - self._cpu_s > _IDLE_CPU_S:
            self._cpu_s, self._since_s, self._counted = cpu_s, now_s, None
            return False
        if now_s - self._since_s < max(_SILENT_S, _TIMES_SLOWEST * self.target.server.slowest_s):
            return False
        before, self._counted = self._counted, self.target.server.metrics_text(timeout_s=2.0) or ""
        return before == self._counted


def look_at_processors(server_pids: Sequence[int]) -> trust.ProcessorLook | None:
    """None where the server's own processes are not known, or nothing can be read of them."""
    machine = cpu_seconds()
    pids = (os.getpid(), *server_pids)
    if machine is None or not server_pids or not all_known(process_cpu_s(pid) for pid in pids):
        return None
    # What they started counts as theirs, such as the servers of a router.
    own_s = sum(process_cpu_s(pid) or 0.0 for pid in family_of(*pids))
    return trust.ProcessorLook(machine.total_s, machine.busy_s, own_s)


class TrafficWatch:
    """Tells foreign requests from the server's own counters, a stretch of time at a time.

    Where the server counts nothing, busy slots before a request are all that can be seen.
    """

    def __init__(self, ctx: Context, target: Target) -> None:
        self._ctx = ctx
        self._target = target
        self._before: Counters | None = None
        self._read_s: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the server has counters."""
        return self._before is not None

    @property
    def is_due(self) -> bool:
        """Whether the counters may be read again."""
        return self._age_s() >= self._target.scrape_s

    @property
    def limit_s(self) -> float:
        """How long others are waited for at a time [s]."""
        return max(self._ctx.settings.service.drain_s, _LEAST_WAIT_S)

    def open(self) -> None:
        """Begin a stretch; waits until the counters may be read."""
        self._before = self._read()

    def close(self, own: list[Timings | None]) -> tuple[trust.Traffic, tuple[int, ...] | None]:
        """End a stretch in which these requests were made, and begin the next.

        Returns:
            What it shows of foreign traffic, and how many drafts were accepted by position.
        """
        before = self._before
        if before is None and not self.is_due:
            return trust.Traffic(None), None  # nothing to wait for where nothing was counted
        after = self._before = self._read()
        if before is None or after is None:
            return trust.Traffic(None), None
        return trust.judge_traffic(before, after, own), gained(before, after)

    def wait_until_idle(self, limit_s: float | None = None) -> bool:
        """Wait until nothing is answered, by default as long as a swap would; whether that came true.

        Told by its slots, or by its counters where it shows none; true where it tells neither.
        """
        limit_s = self.limit_s if limit_s is None else limit_s
        for left_s in polls(self._ctx.clock, limit_s, every_s=_IDLE_POLL_S):
            if not self._n_at_work():
                return True
            if left_s:
                self._ctx.say("waiting for requests of others", left_s=left_s)
        return False

    def _n_at_work(self) -> int | None:
        slots = self._target.server.slots() if self._target.is_llama else None
        if slots is not None:
            return slots.busy
        found = self._read() if self.counts else None
        return None if found is None else found.n_at_work

    def _read(self) -> Counters | None:
        if not self._target.is_llama:
            return None
        left_s = self._target.scrape_s - self._age_s()
        if left_s > 0:
            self._ctx.clock.sleep(left_s)
        self._read_s = self._ctx.clock.monotonic_s()
        text = self._target.server.metrics_text()
        return None if text is None else read_counters(text)

    def _age_s(self) -> float:
        if self._read_s is None:
            return self._target.scrape_s
        return self._ctx.clock.monotonic_s() - self._read_s


# One request of a bench: sent, watched, read, and judged by itself.

_First = Callable[[str], tuple[Request, Prompt]]
"""Makes a first request of a kind of text."""

# How long an answer may take: a hung server must end some day, a slow one must not be cut.
_LIMIT_S = 300.0
_LEAST_PREFILL_TOK_S = 10.0
_LEAST_DECODE_TOK_S = 0.5
_HANG_UP_S = 0.05


@dataclass(frozen=True, slots=True)
class Answered:
    """A request with its sample, and the answer itself, of which nothing is kept.

    `is_mute` where nothing of an answer ever came.
    """

    request: Request
    prompt: Prompt
    sample: Sample
    answer: Answer | None
    looks: tuple[trust.GpuLook, ...]
    is_mute: bool = False

    @property
    def has_drafted(self) -> bool:
        """Whether a token of it was drafted, as far as the server counts."""
        return bool(self.sample.timings is not None and self.sample.timings.draft_n)

    def marked(self, mark: Mark) -> Answered:
        """With one more mark; what has no answer needs none."""
        if self.sample.problem is not None:
            return self
        marks = tuple(dict.fromkeys([*self.sample.marks, mark]))
        return replace(self, sample=replace(self.sample, marks=marks))


class Life:
    """One process under measurement: what it was asked, and what speaks against its answers.

    `route` is how it is asked. `position` counts what it has answered, `asked` is what has not been judged by
    its counters yet; `accepted` are the drafts that were accepted in the last stretch that was, by position.
    `may_repeat` are kinds of text to which one token over and over is an answer: those to which the side that others are
    held against (`is_reference`) gave it, which adds them.
    """

    def __init__(self, ctx: Context, target: Target) -> None:
        """Of the process that runs now."""
        self.ctx = ctx
        self.target = target
        self.name = target.life() or target.name
        self.route = target.route
        self.traffic = TrafficWatch(ctx, target)
        self.position = 0
        self.asked: list[Answered] = []
        self.quiet_mib: int | None = None
        self.accepted: tuple[int, ...] | None = None
        self.may_repeat = set[str]()
        self.is_reference = False
        self._looks: list[trust.GpuLook] = []
        self._processors = look_at_processors(target.pids)

    # The first requests of a life

    def warm_up(
        self,
        first: _First,
        *,
        drafts: bool | None,
        is_proved: bool = False,
        must_draft: bool = True,
        target: Target | None = None,
    ) -> bool:
        """The first requests, discarded, which prove that speculation is on, or off, as meant.

        They show by which route it can be asked, and how the machine is without others.

        Args:
            first: The request of a kind of text.
            drafts: Whether it is meant to draft; None where nobody knows.
            is_proved: Whether another process of the same kind proved it: one request is enough.
            must_draft: Whether one that is meant to draft must do so in these few answers already.
            target: The arm, where this life has several.

        Returns:
            Whether it drafted.

        Raises:
            NoAnswer: it gave none.
            BenchError: it drafts otherwise than it is meant to.
        """
        seen: list[Answered] = []
        for kind in PROOF_KINDS if drafts and not is_proved else PROOF_KINDS[:1]:
            asked = self.ask(*first(kind), target=target)
            if asked.sample.problem is not None and not seen and self.route is Route.TEXT:
                self.asked.pop()  # a server without this route has not failed
                self.route = Route.NATIVE
                asked = self.ask(*first(kind), target=target)
            marked = replace(asked.sample, marks=(*asked.sample.marks, Mark.WARM_UP))
            asked = self.asked[-1] = replace(asked, sample=marked)
            if asked.sample.problem is not None:
                raise NoAnswer("the server gave no answer", cause=asked.sample.problem)
            seen.append(asked)
            self._looks += asked.looks
            self.quiet_mib = trust.quiet_mib(self._looks)
            if asked.has_drafted and drafts is False:
                raise BenchError("it drafted, though it should not")
            if asked.has_drafted:
                return True
        by_model = (target or self.target).speculation.by_model
        if drafts and must_draft and by_model and not is_proved:
            marks = {str(mark) for one in seen for mark in one.sample.marks} - {Mark.WARM_UP}
            text = f"{len(seen)} requests without a drafted token"
            raise BenchError(
                "it drafted nothing, though it should",
                cause=", ".join([text, *sorted(marks)]),
                hint="`tunerd engines --prove` shows what this build does",
            )
        return False

    # Requests

    def ask(self, request: Request, prompt: Prompt, *, target: Target | None = None) -> Answered:
        """One request."""
        return self.ask_all((request,), (prompt,), target=target)[0]

    def ask_with_room(
        self, request: Request, prompt: Prompt, *, target: Target | None = None
    ) -> list[Answered]:
        """One question, asked again where thoughts took all the room of its answer."""
        found = [self.ask(request, prompt, target=target)]
        if request.is_chat and found[0].answer is not None and found[0].answer.ended_in_thought:
            more = replace(request, n_predict=request.n_predict + THOUGHT_TOKENS)
            found.append(self.ask(more, prompt, target=target))
        return found

    def ask_all(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        *,
        target: Target | None = None,
    ) -> list[Answered]:
        """Several requests at the same time."""
        target = target or self.target
        if len(requests) == 1:
            found = [self._send(target, requests[0], prompts[0], self.position)]
        else:
            found = self._send_at_once(target, requests, prompts)
        self.position += len(found)
        self.asked += found
        return found

    def ask_watched(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        *,
        target: Target | None = None,
        limit_s: float | None = None,
    ) -> list[Answered]:
        """The same once nobody else is served, or after so long; marked where somebody was meanwhile."""
        was_busy = not self.traffic.wait_until_idle(limit_s)
        asked = self.ask_all(requests, prompts, target=target)
        if any(one.sample.problem is not None for one in asked):
            self.asked = []
            return asked
        asked, traffic = self.settle(was_busy=was_busy)
        is_told = was_busy or traffic.is_foreign is not None
        if not is_told and not self.traffic.wait_until_idle(SLOT_S):
            asked = [one.marked(Mark.FOREIGN_TRAFFIC) for one in asked]
        return asked

    def _send_at_once(
        self, target: Target, requests: Sequence[Request], prompts: Sequence[Prompt]
    ) -> list[Answered]:
        begun: list[Future[Answered]] = []
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            try:
                for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
                    at = self.position + index
                    begun.append(pool.submit(self._send, target, request, prompt, at))
                return [one.result() for one in begun]
            finally:
                # A signal must not wait for every answer: production is still down.
                while wait(begun, timeout=0.0).not_done:
                    target.server.hang_up()
                    wait(begun, timeout=_HANG_UP_S)

    def _send(self, target: Target, request: Request, prompt: Prompt, position: int) -> Answered:
        watch = _GpuWatch(self.ctx, target.pids)
        watch.look_now()
        processors = look_at_processors(target.pids)
        at_s, is_shared = self.ctx.clock.now_s(), target.server.address.sharer() is not None
        route = Route.CHAT if request.is_chat else self.route
        sent = request if target.holds else replace(request, is_fixed_length=False)
        is_kept = target.kept_bias is not None and not target.scrape_s
        forgets = {"logit_bias": target.kept_bias} if is_kept else {}
        body = body_of(
            sent,
            prompt,
            route,
            model=target.model,
            frame=target.frame,
            overrides={**forgets, **target.overrides},
            is_llama=target.is_llama,
        )
        streamed = target.server.stream(
            route,
            body,
            timeout_s=_limit_s(request),
            meanwhile=watch.look,
            gives_up=Silence(self.ctx, target).is_over,
        )
        is_taken = trust.is_processor_taken(processors, look_at_processors(target.pids))
        watch.look_now()
        answer = read_answer(streamed.events, is_whole=streamed.is_whole)
        details = _details(request, prompt, answer)
        is_repeated = details.get("repeated_ratio") == WHOLLY_REPEATED
        self.may_repeat |= {request.kind} if self.is_reference and is_repeated else set()
        is_answer = is_repeated and request.kind in self.may_repeat
        problem = streamed.problem or _problem(request, answer, may_repeat=is_answer)
        client = ClientTimes(streamed.wall_ms, answer.first_ms, answer.rest_ratio)
        marks = trust.marks_of(request, answer, client, looks=watch.looks, quiet_mib=self.quiet_mib,
                         speculation=target.speculation,
                         is_llama=target.is_llama, holds=target.holds)  # fmt: skip
        marks = (*marks, Mark.PROCESSOR_TAKEN) if is_taken else marks
        marks = (*marks, Mark.FOREIGN_TRAFFIC) if is_shared else marks
        sample = Sample(
            suite=str(request.suite),
            case=request.case,
            kind=request.kind,
            prompt_id=prompt.prompt_id,
            process=self.name,
            position=position,
            at_s=at_s,
            n_predict=request.n_predict,
            concurrency=request.streams,
            timings=answer.timings,
            client=client,
            vram_free_min_mib=watch.free_mib,
            # What several at once take together is nobody's own.
            energy_j=trust.energy_of(watch.looks) if request.streams == 1 else None,
            marks=() if problem is not None else marks,
            problem=problem,
            details=details,
        )
        kept, is_mute = None if problem else answer, streamed.timed_out and not streamed.events
        return Answered(request, prompt, sample, kept, tuple(watch.looks), is_mute)

    # Others

    def open(self) -> list[Answered]:
        """Begin a stretch of the counters; what was asked before it is not judged by them."""
        before, self.asked = self.asked, []
        self.traffic.open()
        return before

    def mark(self, n_last: int, mark: Mark) -> None:
        """Something speaks against the last requests."""
        begin = len(self.asked) - n_last
        self.asked[begin:] = [one.marked(mark) for one in self.asked[begin:]]

    def settle(self, *, was_busy: bool = False) -> tuple[list[Answered], trust.Traffic]:
        """What was asked since the last look at the counters, marked where others were served meanwhile.

        Args:
            was_busy: Somebody else was seen to be served, whatever the counters say.
        """
        traffic, self.accepted = self.traffic.close([one.sample.timings for one in self.asked])
        asked, self.asked = self.asked, []  # after that, which takes seconds and may be cut short
        if traffic.is_foreign or was_busy:
            asked = [one.marked(Mark.FOREIGN_TRAFFIC) for one in asked]
        return asked, traffic

    def crowded(self) -> tuple[Message, ...]:
        """A warning where others kept the processors busy all the while; a short request cannot show that."""
        if not trust.is_processor_taken(self._processors, look_at_processors(self.target.pids)):
            return ()
        text = "other work kept the processors busy meanwhile, so requests took longer than they do alone"
        return (warning("processors-taken", text, "measure again when nothing else runs"),)


def _limit_s(request: Request) -> float:
    """How long a request may take."""
    prompt_s = (request.depth_tokens or 0) / _LEAST_PREFILL_TOK_S
    decode_s = request.n_predict / _LEAST_DECODE_TOK_S
    return (_LIMIT_S + prompt_s + decode_s) * request.streams


def _problem(request: Request, answer: Answer, *, may_repeat: bool) -> str | None:
    """Why an answer that came is none."""
    if answer.is_cut:
        return "the answer was cut short"
    n_predicted = (answer.timings.predicted_n if answer.timings is not None else None) or 0
    is_long = n_predicted >= RUN_OF_ONE_TOKEN  # a shorter one may end within a letter
    if not (answer.text or answer.reasoning or answer.tool_calls):
        # Of a conversation the server may keep back a call that was not whole.
        is_empty = not n_predicted or (is_long and not request.is_chat)
        return "the answer is empty" if is_empty else None
    is_judged = is_long and not may_repeat
    return why_garbage(answer.text or answer.reasoning, n_predicted) if is_judged else None


def _details(request: Request, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """What else is kept of a sample: figures, and no text."""
    found: dict[str, Any] = dict(request.details or {})
    timings = answer.timings
    n_predicted = 0 if timings is None or request.has_tools else timings.predicted_n or 0
    if (ratio := repeated_ratio(answer.text or answer.reasoning, n_predicted)) is not None:
        found["repeated_ratio"] = ratio
    if answer.n_cached is not None:
        found["cached"] = answer.n_cached
    if request.shares is not None and request.has_question:
        found["shared_ratio"] = prompt.shared_ratio
    if request.depth_tokens is not None and timings is not None and timings.prompt_n is not None:
        found["depth"] = timings.prompt_n + (answer.n_cached or 0)
    if timings is None:
        usage = {"usage_prompt_n": answer.n_prompt, "usage_completion_n": answer.n_completion}
        found |= {key: n for key, n in usage.items() if n is not None}
    if request.has_tools:
        found["tools"] = [call.name for call in answer.tool_calls]
    return found


KINDS_OF_MIXED = ("code", "chat", "summary", "math", "creative")
# Texts that a drafter finds easy; a gate may keep every draft of one of them back.
PROOF_KINDS = ("code", "math", "chat")


_PROMPTS = Path(__file__).parents[1] / "data/prompts.toml"


def prompt_book(ctx: Context) -> PromptBook:
    """The shipped prompts.

    Raises:
        BenchError: the file is missing.
    """
    content = ctx.files.read(_PROMPTS)
    if content is None:
        raise BenchError(f"no prompts: `{_PROMPTS}` is missing", hint="install tunerd again")
    return read_prompts(tomllib.loads(content.decode("utf-8-sig")))


@dataclass
class Texts:
    """Makes requests of classes of a workload.

    `shared` names the prefix that requests share: as long as it stays, every process reads the same anew. How
    long a token is, the first server that is asked says for all, so that all are asked the very same texts.
    """

    book: PromptBook
    seed: int
    letters_per_token: float | None = None
    shared: str = "prefix"
    _composer: Composer | None = field(default=None, repr=False)

    def learn(self, server: LlamaServer) -> None:
        """Ask a server how many letters a token has, unless one was asked."""
        if self.letters_per_token is None:
            self.letters_per_token = letters_per_token(server, self.book)

    def first(self, life: Life) -> _First:
        """What a life answers first, each time with another text."""

        def made(kind: str) -> tuple[Request, Prompt]:
            stock = self.stock(f"warm-up {life.name} {life.position}")
            return replace(warm_up(Suite.WORKLOAD, kind), is_measured=False), stock.take(kind)

        return made

    def of_class(
        self, one: RequestClass, name: str, *, is_held: bool = False, **told: Any
    ) -> tuple[tuple[Request, ...], tuple[Prompt, ...]]:
        """Requests of a class as production gets them, as many as run at once, each with a text of its own.

        Args:
            one: The class; without new tokens its prefix alone.
            name: Of the texts.
            is_held: Whether generation goes on to the class's length whatever the model says; a prefix
                always is.
            told: What else the request has.
        """
        kind = random.Random(name).choice(KINDS_OF_MIXED) if one.kind == MIXED else one.kind  # noqa: S311 -- no secret
        told |= {"kind": kind, "is_fixed_length": is_held or not one.new_tokens}
        request = class_request(one, name, shares=self.shared, **told)
        composer = self._prepared(one.cached_tokens if request.is_warm else 0)
        composer.stock = self.stock(name)
        requests = (request,) * one.concurrency
        return requests, tuple(composer.compose(each) for each in requests)

    def _prepared(self, cached_tokens: int) -> Composer:
        """The composer, its shared text long enough to be cut from and grown from its own words."""
        if self._composer is None:
            letters = self.letters_per_token or USUAL_LETTERS_PER_TOKEN
            self._composer = Composer(self.stock(self.shared), letters)
        if cached_tokens:
            self._composer.stock = self.stock(f"{self.shared} {cached_tokens}")
            prefix = RequestClass(1.0, "code", cached_tokens, 0, 1)
            self._composer.compose(class_request(prefix, "", shares=self.shared))
        return self._composer

    def stock(self, name: str) -> PromptStock:
        """Texts that depend on their name alone."""
        return PromptStock(self.book, random.Random(f"{self.seed} {name}"))  # noqa: S311 -- no secret


_TOOLS = [tool["function"] for tool in TOOL_KINDS]
_KNOWN = {tool["name"]: tool["parameters"]["properties"] for tool in _TOOLS}


def tool_call_is_whole(answer: Answer | None) -> bool | None:
    """Whether the calls of an answer name a known tool with arguments it has; None without a call."""
    if answer is None or not answer.tool_calls:
        return None
    for call in answer.tool_calls:
        known, fields = _KNOWN.get(call.name), call.fields if call.arguments else None
        if known is None or fields is None or not set(fields) <= set(known):
            return False
    return True
