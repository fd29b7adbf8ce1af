"""The real stand of a comparison: candidates in a lease, asked the same texts on both sides."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunerd.actions.bench_ask import Asked as Answered
from tunerd.actions.bench_ask import Asker
from tunerd.actions.bench_target import Target, letters_per_token, open_candidate
from tunerd.actions.bench_watch import TrafficWatch
from tunerd.actions.candidate import Candidate
from tunerd.actions.context import Context
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.lease import Held
from tunerd.actions.plan import Plan
from tunerd.core.bench.composing import USUAL_LETTERS_PER_TOKEN, Composer, Route
from tunerd.core.bench.prompts import Prompt, PromptBook, PromptStock
from tunerd.core.bench.quality import ended_in_thought
from tunerd.core.bench.reading import Answer
from tunerd.core.bench.request import Prefix, Request, Suite, with_room_for_thoughts
from tunerd.core.bench.trust import GpuLook, quiet_from
from tunerd.core.compare import Asked, BootFailed, LifeEnded, Side, Turn, Unusable
from tunerd.core.compare.drafting import not_as_meant
from tunerd.core.evidence import ArmRecord
from tunerd.core.result import Message, warning
from tunerd.core.sample import Mark, Sample
from tunerd.core.workload import RequestClass
from tunerd.core.workload_shape import MIXED
from tunerd.errors import BenchError

_WARM_UP_TOKENS = 32
_PREFIX_ANSWER_TOKENS = 2
_SHARED = "prefix"
_LETTERS = 2000  # of text by which the length of a token is told
_MIXED = ("code", "chat", "summary", "math", "creative")
# Texts that a drafter finds easy; a gate may keep every draft of one of them back.
_PROOF_KINDS = ("code", "math", "chat")
_WARM_SHARE = 0.5

OnArm = Callable[[Side, ArmRecord], None]
OnSamples = Callable[[Side, Sequence[Sample]], None]


@dataclass
class SideFacts:
    """What was seen of a side over all of its processes."""

    arm: ArmRecord | None = None
    wanted_cached: int = 0
    found_cached: int = 0
    route: Route | None = None
    messages: dict[str, Message] = field(default_factory=dict)


@dataclass
class CandidateStand:
    """Boots either plan as a candidate of the lease that is held.

    `on_arm` is called once for each side when it first serves, `on_samples` with what each of its
    processes was asked.
    """

    ctx: Context
    held: Held
    plans: Mapping[Side, Plan]
    book: PromptBook
    seed: int
    on_arm: OnArm
    on_samples: OnSamples
    facts: dict[Side, SideFacts] = field(
        default_factory=lambda: {"A": SideFacts(), "B": SideFacts()}
    )
    letters_per_token: float | None = None
    _reader: FingerprintReader | None = None

    def now_s(self) -> float:
        """Seconds."""
        return self.ctx.clock.monotonic_s()

    def boot(self, side: Side) -> CandidateLife:
        """A fresh process of this side, its first request answered and discarded.

        Raises:
            BootFailed: it does not serve.
            Preempted: the lease is gone.
        """
        stack = contextlib.ExitStack()
        try:
            life = self._boot(side, stack)
        except BenchError as error:
            stack.close()
            self.held.check()
            raise BootFailed(_words(error)) from error
        except BaseException:
            stack.close()
            raise
        return life

    def _boot(self, side: Side, stack: contextlib.ExitStack) -> CandidateLife:
        candidate = self._start(side, stack)
        self._reader = self._reader or FingerprintReader(self.ctx)
        opened = open_candidate(self.ctx, candidate, side, reader=self._reader)
        facts, target = self.facts[side], opened.target
        facts.messages |= {one.text: one for one in opened.messages}
        if facts.arm is None:
            facts.arm = target.arm
            self.on_arm(side, target.arm)
        # Both sides must be asked the very same text, so one of them says how long a token is.
        if self.letters_per_token is None:
            text = PromptStock(self.book, random.Random(self.seed)).filler(_LETTERS)  # noqa: S311
            self.letters_per_token = letters_per_token(target.server, text)
        return CandidateLife(self, side, target, stack)

    def _start(self, side: Side, stack: contextlib.ExitStack) -> Candidate:
        return stack.enter_context(self.held.serve(self.plans[side]))

    def told(self) -> tuple[Message, ...]:
        """What should be said of the sides, beside the verdict."""
        found: list[Message] = []
        for side, facts in self.facts.items():
            found += [replace(one, text=f"{side}: {one.text}") for one in facts.messages.values()]
            if facts.wanted_cached and facts.found_cached < _WARM_SHARE * facts.wanted_cached:
                text = (
                    f"{side} found {facts.found_cached} of {facts.wanted_cached} tokens cached that "
                    "it had just read: prefix reuse does not work there"
                )
                found.append(warning("no-reuse", text))
        return tuple(found)


class CandidateLife:
    """One process of a side."""

    def __init__(
        self, stand: CandidateStand, side: Side, target: Target, stack: contextlib.ExitStack
    ) -> None:
        self._stand = stand
        self._side = side
        self._target = target
        self._stack = stack
        self._samples: list[Sample] = []
        self._position = 0
        self._held_tokens = 0
        self._composer: Composer | None = None
        self._pair = ""
        self._life = target.life() or side
        self._asker = self._warm(stand.facts[side].route)
        self._n_before = len(self._samples)
        self._traffic = TrafficWatch(stand.ctx, target)
        self._traffic.open()

    def _warm(self, known: Route | None) -> Asker:
        """The first requests, discarded, which prove that speculation is on, or off, as meant.

        The first process of a side finds the route by which its build counts drafts; some do so on
        OpenAI routes only. Later ones take that route; `check` judges all that they answered.
        """
        drafts = self._target.speculation.drafts
        routes = [self._target.route, Route.TEXT] if drafts else [self._target.route]
        looks: list[GpuLook] = []
        for route in routes if known is None else [known]:
            target = replace(self._target, route=route)
            asker = Asker(self._stand.ctx, target, self._life, quiet_from(()))
            is_optional = known is None and route is not self._target.route
            for kind in _PROOF_KINDS if drafts and known is None else _PROOF_KINDS[:1]:
                answered = self._first(asker, kind)
                if answered.sample.problem is not None and is_optional:
                    break  # a server without this route has not failed
                self._demand(answered)
                looks += answered.looks
                has_drafted = bool(answered.sample.timings and answered.sample.timings.draft_n)
                if drafts is False and has_drafted:
                    raise BenchError("it is meant not to draft, and drafted")
                if known is not None or not drafts or has_drafted:
                    self._stand.facts[self._side].route = route
                    return replace(asker, quiet=quiet_from(looks))
        told = sorted({str(mark) for one in self._samples for mark in one.marks} - {Mark.WARM_UP})
        raise BenchError(
            "it is meant to draft, and drafted nothing",
            cause=", ".join([f"{len(self._samples)} requests without a drafted token", *told]),
        )

    def _first(self, asker: Asker, kind: str) -> Answered:
        request = Request(
            suite=Suite.WORKLOAD, case="warm-up", kind=kind, n_predict=_WARM_UP_TOKENS,
            is_measured=False,
        )  # fmt: skip
        stock = self._stock(f"warm-up {self._life} {len(self._samples)}")
        return self._send(asker, request, stock.take(kind), discard=True)

    @staticmethod
    def _demand(answered: Answered) -> None:
        if answered.sample.problem is not None:
            raise BenchError("the first request failed", cause=answered.sample.problem)

    def request(self, asked: Asked) -> Turn:
        """One request of a class, behind the prefix that it expects to be cached.

        Raises:
            LifeEnded: the server is gone, or does not answer.
            Unusable: something speaks against the sample.
            Preempted: the lease is gone.
        """
        one = asked.request_class
        if not self._traffic.counts and not self._traffic.wait_until_idle():
            raise LifeEnded("somebody else was served, or it says so, and it did not become idle")
        composer = self._composer_of(asked.block)
        if _is_warm(one) and one.cached_tokens > self._held_tokens:
            self._serve_prefix(composer, one)
        requests, prompts = self._compose(composer, asked)
        if len(requests) > 1:
            found, _ = self._asker.ask_at_once(requests, prompts, self._position)
            self._position += len(found)
            self._samples += [answered.sample for answered in found]
        else:
            found = [self._send(self._asker, requests[0], prompts[0])]
        self._held_tokens = one.cached_tokens if _is_warm(one) else 0
        return self._turn(found, one)

    def answer(self, request: Request, prompt: Prompt) -> Answer | None:
        """The answer to a question; None where there was none.

        Raises:
            LifeEnded: the server is gone.
            Preempted: the lease is gone.
        """
        found = self._send(self._asker, request, prompt)
        if ended_in_thought(found.answer):
            found = self._send(self._asker, with_room_for_thoughts(request), prompt)
        if found.sample.problem is not None:
            self._stand.held.check()
            if (why := self._target.why_ended()) is not None:
                raise LifeEnded(why)
        return found.answer

    def check(self) -> None:
        """Whether this process did what its side is meant to do, and for nobody else.

        Raises:
            LifeEnded: it drafted although it is meant not to, or never drafted.
            Unusable: the server's own counters show that it answered somebody else too.
        """
        drafted = [one.timings.draft_n if one.timings else None for one in self._samples]
        problem = not_as_meant(self._target.speculation.drafts, drafted)
        if problem is not None:
            raise LifeEnded(problem)
        traffic, _ = self._traffic.close(
            [sample.timings for sample in self._samples[self._n_before :]]
        )
        if traffic.is_foreign:
            for at, sample in enumerate(self._samples):
                marks = dict.fromkeys([*sample.marks, Mark.FOREIGN_TRAFFIC])
                self._samples[at] = replace(sample, marks=tuple(marks))
            raise Unusable(traffic.text)

    def close(self) -> None:
        """End the process, and hand over what was measured of it; what only prepared it is not kept."""
        try:
            self._stack.close()
        finally:
            measured = [one for one in self._samples if Mark.WARM_UP not in one.marks]
            self._stand.on_samples(self._side, measured)

    # Texts

    def _composer_of(self, block: str) -> Composer:
        """One for the whole process: what is shared is shared by all of its requests."""
        if self._composer is None:
            self._pair = block.rpartition("-")[0]
            stock = self._stock(f"pair {self._pair}")
            letters = self._stand.letters_per_token
            self._composer = Composer(stock, letters or USUAL_LETTERS_PER_TOKEN)
        return self._composer

    def _stock(self, name: str) -> PromptStock:
        """Texts that depend on their name alone: the same on both sides."""
        return PromptStock(self._stand.book, random.Random(f"{self._stand.seed} {name}"))  # noqa: S311

    def _compose(
        self, composer: Composer, asked: Asked
    ) -> tuple[tuple[Request, ...], tuple[Prompt, ...]]:
        one = asked.request_class
        name = f"{asked.block} {asked.class_index} {asked.attempt}"
        composer.stock = self._stock(name)
        depth = one.cached_tokens + one.new_tokens
        kind = _any_kind(name) if one.kind == MIXED else one.kind
        request = Request(
            suite=Suite.WORKLOAD,
            case=f"class {asked.class_index + 1}",
            kind=kind,
            n_predict=one.n_predict,
            depth_tokens=depth,
            prefix=Prefix.WARM if _is_warm(one) else Prefix.COLD,
            shares=_SHARED if _is_warm(one) else None,
            shared_ratio=one.cached_tokens / depth,
            streams=one.concurrency,
            details={"block": asked.block, "attempt": asked.attempt},
        )
        requests = (request,) * one.concurrency
        return requests, tuple(composer.compose(each) for each in requests)

    def _serve_prefix(self, composer: Composer, one: RequestClass) -> None:
        """Let the server read the shared text, which is not measured."""
        composer.stock = self._stock(f"pair {self._pair} prefix {one.cached_tokens}")
        request = Request(
            suite=Suite.WORKLOAD, case="prefix", kind="code", n_predict=_PREFIX_ANSWER_TOKENS,
            depth_tokens=one.cached_tokens, prefix=Prefix.WARM, shares=_SHARED, has_question=False,
            is_measured=False,
        )  # fmt: skip
        answered = self._send(self._asker, request, composer.compose(request), discard=True)
        if answered.sample.problem is not None:
            raise self._ended(answered.sample.problem)

    # Answers

    def _send(
        self, asker: Asker, request: Request, prompt: Prompt, *, discard: bool = False
    ) -> Answered:
        answered = asker.ask(request, prompt, self._position)
        self._position += 1
        sample = answered.sample
        if discard:
            sample = replace(sample, marks=(*sample.marks, Mark.WARM_UP))
        self._samples.append(sample)
        return answered

    def _turn(self, found: Sequence[Answered], one: RequestClass) -> Turn:
        samples = [answered.sample for answered in found]
        problem = next((sample.problem for sample in samples if sample.problem), None)
        if problem is not None:
            raise self._ended(problem)
        self._note(samples, one)
        marks = [str(mark) for sample in samples for mark in sample.marks]
        if marks:
            raise Unusable(", ".join(sorted(set(marks))))
        clients = [sample.client for sample in samples if sample.client is not None]
        firsts = [client.ttft_ms for client in clients]
        if not clients or None in firsts:
            raise Unusable("the first token was not seen")
        n = len(clients)
        return Turn(
            wall_ms=sum(client.wall_ms for client in clients) / n,
            prefill_ms=sum(first for first in firsts if first is not None) / n,
        )

    def _note(self, samples: Sequence[Sample], one: RequestClass) -> None:
        facts = self._stand.facts[self._side]
        for sample in samples:
            cached = sample.details.get("cached")
            if _is_warm(one) and isinstance(cached, int):
                facts.wanted_cached += one.cached_tokens
                facts.found_cached += min(cached, one.cached_tokens)

    def _ended(self, problem: str) -> LifeEnded:
        """Why no more is to be had of this process; raises Preempted where the lease is gone."""
        self._stand.held.check()
        return LifeEnded(self._target.why_ended() or problem)


def _is_warm(one: RequestClass) -> bool:
    """Whether it finds its prefix; what one slot holds is of no use to requests beside it."""
    return one.cached_tokens > 0 and one.concurrency == 1


def _any_kind(name: str) -> str:
    return random.Random(name).choice(_MIXED)  # noqa: S311 -- no secret


def _words(error: BenchError) -> str:
    return f"{error.message}: {error.cause}" if error.cause else error.message
