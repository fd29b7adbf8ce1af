"""A process under measurement: started, warmed up, asked block by block."""

from __future__ import annotations

from dataclasses import replace

from tunerd.core.sweep import observations
from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.night import Block, Night, ask_box
from tunerd.core.sweep.protocol import Refused, Request, ServerDied
from tunerd.core.sweep.reading import Reading

_WARM_UP_TOKENS = 64
_WARM_UP_PREDICT = 8
_PREFIX_TAIL = 32
_FILL_PREDICT = 16
_FILL_SLACK = 64
_TOOL_PROMPT = 200
_TOOL_PREDICT = 32
_BROKEN = 2
_TRUNCATED = 0.9


class CannotStart(Exception):
    """A process did not come up; `failure` is oom, hang, crash or refused."""

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
        self.name, self.number = night.next_process()
        self._night = night
        self._n_blocks = 0
        self._served_tokens = 0
        night.box.check()
        begin = night.now_s
        boot = night.box.restart(arm)
        sample = night.booted(arm, boot, self.name, purpose, night.now_s - begin)
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
        override = None if draft is None or draft == own else arm.with_draft(*draft)
        begin = night.now_s

        def file(answer: object = None, failure: str = "") -> Reading | None:
            sample = night.answered(
                arm, self.name, purpose, request, draft or own, seconds=night.now_s - begin,
                answer=answer, failure=failure, block=block, pair=pair,
            )  # fmt: skip
            return sample.reading

        try:
            answer = ask_box(night.box, request, override)
        except Refused:
            return file(failure="refused")
        except ServerDied as died:
            file(failure=died.kind or "crash")
            raise
        return file(answer)

    def warm_up(self, *, exact: bool) -> None:
        """First request after the load, discarded, and the shared prefix, read once."""
        night = self._night
        kind = night.workload.classes[night.workload.deepest].kind
        self.ask(
            Request(kind, night.new_prompt(), 0, _WARM_UP_TOKENS, _WARM_UP_PREDICT),
            observations.WARM_UP,
        )
        prefix = night.prefix_tokens(self.arm, exact=exact)
        if prefix > 0:
            night.require(night.request_s(self.arm, Request(kind, "", 0, prefix, 0)))
            self._serve_prefix(kind, prefix)

    def _serve_prefix(self, kind: str, n_tokens: int) -> None:
        night = self._night
        self.ask(
            Request(kind, night.new_prompt(), n_tokens, _PREFIX_TAIL, _WARM_UP_PREDICT),
            observations.PREFIX,
        )
        self._served_tokens = n_tokens

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
        if block is None:
            block = night.search_block(self.number, self._n_blocks)
        self._n_blocks += 1
        night.require(night.block_s(self.arm, exact=exact))
        found = {}
        for text in block.order:
            one = night.workload.classes[text]
            name = observations.prompt_name(block.name, text)
            request = night.request(self.arm, one, name, exact=exact)
            reading = self.ask(
                request, observations.BLOCK, block=block.name, draft=draft, pair=pair
            )
            if reading is not None and self._should_repeat(request, reading):
                again = replace(request, prompt_id=request.prompt_id + observations.AGAIN)
                reading = self.ask(
                    again, observations.BLOCK, block=block.name, draft=draft, pair=pair
                )
                if reading is not None and observations.is_cold(again, reading):
                    night.broken_caches.add(self._cache_of(request))
            if reading is not None:
                found[text] = reading
        return found

    def _should_repeat(self, request: Request, reading: Reading) -> bool:
        """A cold prefix is now served, so that the next request finds it warm."""
        is_broken = self._cache_of(request) in self._night.broken_caches
        return not is_broken and observations.is_cold(request, reading)

    def _cache_of(self, request: Request) -> tuple[str, bool]:
        return self.arm.engine, request.concurrency > 1

    def fill(self, context: int) -> Reading | None:
        """One prompt that fills the context; None if the server refused it.

        Raises:
            ServerDied: It ran out of memory, or died of something else.
            TimeUp: It would not end in time.
        """
        night = self._night
        kind = night.workload.classes[night.workload.deepest].kind
        new = max(context - _FILL_PREDICT - _FILL_SLACK, 1)
        request = Request(kind, night.new_prompt(), 0, new, _FILL_PREDICT)
        night.require(night.request_s(self.arm, request))
        return self.ask(request, observations.FILL)

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


def is_truncated(reading: Reading, asked_tokens: int) -> bool:
    """Whether the server read less of the prompt than it was given."""
    if reading.prompt_n is None:
        return False
    return reading.prompt_n + (reading.cache_n or 0) < _TRUNCATED * asked_tokens
