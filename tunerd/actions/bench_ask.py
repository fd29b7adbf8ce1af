"""One request of a bench: sent, watched, read, and judged by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tunerd.actions.bench_target import Target
from tunerd.actions.bench_watch import GpuWatch
from tunerd.actions.context import Context
from tunerd.core.bench.composing import Route, body_of
from tunerd.core.bench.prompts import Prompt
from tunerd.core.bench.reading import Answer, read_answer
from tunerd.core.bench.request import Request
from tunerd.core.bench.trust import GpuLook, Quiet, marks_of
from tunerd.core.sample import ClientTimes, Sample

# How long an answer may take: a hung server must end some day, a slow one must not be cut.
_LIMIT_S = 300.0
_LEAST_PREFILL_TOK_S = 10.0
_LEAST_DECODE_TOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with its sample, and the answer itself, of which nothing is kept."""

    request: Request
    prompt: Prompt
    sample: Sample
    answer: Answer | None
    looks: tuple[GpuLook, ...]


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one server as one arm; `position` counts what its life has answered."""

    ctx: Context
    target: Target
    life: str
    quiet: Quiet

    def ask(self, request: Request, prompt: Prompt, position: int) -> Asked:
        """One request."""
        watch = GpuWatch(self.ctx, self.target.pids)
        watch.look_now()
        at_s = self.ctx.clock.now_s()
        target = self.target
        route = Route.CHAT if request.is_chat else target.route
        streamed = target.server.stream(
            route,
            body_of(
                request,
                prompt,
                route,
                model=target.model,
                overrides=target.overrides,
                is_llama=target.is_llama,
            ),
            timeout_s=limit_s(request),
            meanwhile=watch.look,
        )
        watch.look_now()
        answer = read_answer(streamed.events, is_whole=streamed.is_whole)
        problem = streamed.problem or _problem(answer)
        client = ClientTimes(streamed.wall_ms, answer.first_ms)
        marks = marks_of(request, answer, client, looks=watch.looks, quiet=self.quiet,
                         speculation=target.speculation,
                         can_forbid_cache=target.is_llama)  # fmt: skip
        sample = Sample(
            suite=str(request.suite),
            case=request.case,
            kind=request.kind,
            prompt_id=prompt.prompt_id,
            process=self.life,
            position=position,
            at_s=at_s,
            n_predict=request.n_predict,
            concurrency=request.streams,
            timings=answer.timings,
            client=client,
            vram_free_min_mib=watch.free_mib,
            marks=() if problem is not None else marks,
            problem=problem,
            details=_details(request, answer),
        )
        return Asked(request, prompt, sample, None if problem else answer, tuple(watch.looks))

    def ask_at_once(
        self, requests: tuple[Request, ...], prompts: tuple[Prompt, ...], position: int
    ) -> tuple[list[Asked], float]:
        """Several requests at the same time, and how long all of them took together [ms]."""
        began_s = self.ctx.clock.monotonic_s()
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            begun = [
                pool.submit(self.ask, request, prompt, position + index)
                for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
            ]
            found = [one.result() for one in begun]
        return found, (self.ctx.clock.monotonic_s() - began_s) * 1000


def limit_s(request: Request) -> float:
    """How long a request may take."""
    prompt_s = (request.depth_tokens or 0) / _LEAST_PREFILL_TOK_S
    decode_s = request.n_predict / _LEAST_DECODE_TOK_S
    return (_LIMIT_S + prompt_s + decode_s) * request.streams


def _problem(answer: Answer) -> str | None:
    """Why an answer that came is none."""
    if answer.is_cut:
        return "the answer was cut short"
    has_content = bool(answer.text or answer.reasoning or answer.tool_calls)
    n_predicted = answer.timings.predicted_n if answer.timings is not None else None
    if not has_content and not n_predicted:
        return "the answer is empty"
    return None


def _details(request: Request, answer: Answer) -> dict[str, Any]:
    """What else is kept of a sample: figures, and no text."""
    found: dict[str, Any] = dict(request.details or {})
    timings = answer.timings
    if answer.n_cached is not None:
        found["cached"] = answer.n_cached
    if request.shares is not None and request.has_question:
        found["shared_ratio"] = request.shared_ratio
    if request.depth_tokens is not None and timings is not None and timings.prompt_n is not None:
        found["depth"] = timings.prompt_n + (answer.n_cached or 0)
    if timings is None:
        found |= _client_figures(answer)
    if request.has_tools:
        found["tools"] = [call.name for call in answer.tool_calls]
    if request.is_chat:
        found |= {"text_letters": len(answer.text), "reasoning_letters": len(answer.reasoning)}
    return found


def _client_figures(answer: Answer) -> dict[str, Any]:
    """Of a server without timings: its own token counts, and the speed by the client's clock."""
    n, first, last = answer.n_completion, answer.first_ms, answer.last_ms
    found: dict[str, Any] = {"usage_prompt_n": answer.n_prompt, "usage_completion_n": n}
    if n is not None and n > 1 and first is not None and last is not None and last > first:
        found["client_tok_s"] = (n - 1) / (last - first) * 1000
    return {key: value for key, value in found.items() if value is not None}
