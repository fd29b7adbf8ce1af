"""One completion from its slot to its last byte."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fake_llama.answers import ClientGoneError, HttpError, Reply, json_answer
from tests.support.fake_llama.engine import POLL_S, Engine, Slot


@dataclass(frozen=True)
class Task:
    """What a client asked for, and the slot that works on it."""

    number: int
    slot: Slot
    body: dict[str, Any]
    tokens: list[int]
    is_gone: Callable[[], bool]
    is_chat: bool
    is_text: bool


class Work:
    """Plays one task; the slot is free again when the reply is whole or the stream has ended."""

    def __init__(self, engine: Engine, task: Task) -> None:
        self._engine = engine
        self._task = task
        self._is_ik = engine.behaviour.is_ik
        self._kind = engine.next_reply_kind()
        self._run = engine.plan(task.body, task.tokens, task.slot)
        self._pieces = self._words()
        self._due_s: float | None = None

    def _words(self) -> list[str]:
        n_tokens = self._run.n_predicted
        told = self._engine.behaviour.answer_text
        if told is not None and self._task.is_chat:
            return [told, *[""] * (n_tokens - 1)] if not self._calls else [""] * n_tokens
        return self._engine.words(n_tokens, zlib.crc32(repr(self._task.tokens).encode()))

    def reply(self) -> Reply:
        """The answer, or the stream of events; the time of the prompt passes here."""
        while self._kind == "hang":
            self._pause_until(time.monotonic() + 3600.0)
        if self._kind == "error":
            raise HttpError(500, "server_error", "Compute error.")
        self._spend(self._run.prompt_ms)
        if self._task.body.get("stream"):
            return self._events()
        self._spend(self._run.predicted_ms)
        self._finish()
        text = "".join(self._pieces)
        return json_answer(self._openai(text) if self._is_openai else self._result(text))

    @property
    def _is_openai(self) -> bool:
        return self._task.is_chat or self._task.is_text

    def _spend(self, simulated_ms: float) -> None:
        """Let what was planned pass; a sleep that took longer is made up for by the next ones."""
        start_s = time.monotonic() if self._due_s is None else self._due_s
        self._due_s = start_s + simulated_ms / 1000 * self._engine.behaviour.time_scale
        self._pause_until(self._due_s)

    def _pause_until(self, until_s: float) -> None:
        """Let wall-clock time pass, unless the client goes away."""
        while (left_s := until_s - time.monotonic()) > 0 or self._is_frozen:
            time.sleep(min(max(left_s, 0.0) or POLL_S, POLL_S))
            if self._task.is_gone():
                raise ClientGoneError

    @property
    def _is_frozen(self) -> bool:
        """Once told to stop, mainline works no more but waits for its clients; ik works on."""
        return self._engine.is_stopping and not self._is_ik

    def _finish(self) -> None:
        task, run = self._task, self._run
        self._engine.note_checkpoints(task.slot, run)
        task.slot.tokens = task.tokens + [0] * max(run.n_predicted - 1, 0)
        self._engine.totals.add(run)
        self._engine.log_run(task.slot, task.number, run)
        self._engine.free_slot(task.slot)
        self._engine.record.add("completion", body=task.body)

    def _events(self) -> Iterator[bytes]:
        is_finished = False
        try:
            yield from self._first_events()
            yield from self._thoughts_and_calls()
            n_sent = 0
            for index, burst in enumerate(self._run.bursts):
                if index:
                    self._spend(self._run.steps[index - 1][0])
                seen = self._timings_so_far(index + 1)
                for piece in self._pieces[n_sent : n_sent + burst]:
                    n_sent += 1
                    if not piece:
                        continue
                    found = (
                        self._chunk({"content": piece})
                        if self._is_openai
                        else self._piece(piece, n_sent)
                    )
                    yield _event(found | seen)
            self._finish()
            is_finished = True
            yield from self._last_events()
        finally:
            if not is_finished:
                self._engine.log(f"W srv          stop: cancel task, id_task = {self._task.number}")
                self._engine.free_slot(self._task.slot)

    def _timings_so_far(self, n_bursts: int) -> dict[str, Any]:
        """With every piece, where it was asked for; ik's own route does not know the key."""
        asked = self._task.body.get("timings_per_token")
        if not asked or (self._is_ik and not self._is_openai):
            return {}
        return {"timings": self._engine.told_timings(self._run.until(n_bursts))}

    def _first_events(self) -> Iterator[bytes]:
        if self._task.is_chat:
            yield _event(self._chunk({"role": "assistant", "content": None}))

    def _thoughts_and_calls(self) -> Iterator[bytes]:
        """What a model thinks first, and the functions that it wants called, in pieces."""
        if not self._task.is_chat:
            return
        told = self._engine.behaviour
        if told.reasoning:
            yield _event(self._chunk({"reasoning_content": told.reasoning}))
        for index, (name, arguments) in enumerate(self._calls):
            half = len(arguments) // 2
            first = {"name": name, "arguments": arguments[:half]}
            yield _event(self._chunk({"tool_calls": [{"index": index, "function": first}]}))
            rest = {"arguments": arguments[half:]}
            yield _event(self._chunk({"tool_calls": [{"index": index, "function": rest}]}))

    @property
    def _calls(self) -> list[list[str]]:
        return (self._engine.behaviour.tool_calls or []) if self._task.body.get("tools") else []

    def _last_events(self) -> Iterator[bytes]:
        """Timings come with the last data; `/completion` has no `[DONE]`."""
        if not self._is_openai:
            yield _event(self._result(""))
            return
        last = self._chunk({}, self._finish_reason())
        timings = {"timings": self._engine.told_timings(self._run)}
        if self._engine.behaviour.openai_only:
            timings = {}
        options = self._task.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") and self._task.is_text:
            timings |= {"usage": self._usage()}
        elif isinstance(options, dict) and options.get("include_usage"):
            yield _event(last)
            last = self._chunk({}) | {"choices": [], "usage": self._usage()}
        yield _event(last | timings)
        yield b"data: [DONE]\n\n"

    def _piece(self, piece: str, n_sent: int) -> dict[str, Any]:
        found: dict[str, Any] = {"content": piece, "stop": False}
        if self._is_ik:
            return found
        tokens = self._engine.tokenize(piece)
        return found | {"tokens": tokens, "tokens_predicted": n_sent}

    def _result(self, text: str) -> dict[str, Any]:
        run = self._run
        found: dict[str, Any] = {
            "content": text,
            "stop": True,
            "model": self._engine.alias,
            "tokens_predicted": run.n_predicted,
            "tokens_evaluated": run.n_prompt,
            "truncated": False,
            "timings": self._engine.told_timings(run),
        }
        if self._is_ik:
            return found | {"stopped_eos": False, "stopped_limit": True, "stopped_word": False}
        return found | {"stop_type": "limit"}

    def _openai(self, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        if self._task.is_text:
            said = {"text": text}
        return {
            **self._envelope("chat.completion"),
            "choices": [{"finish_reason": self._finish_reason(), "index": 0, **said}],
            "usage": self._usage(),
            "timings": self._engine.told_timings(self._run),
        }

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": delta}
        if self._task.is_text:
            said = {"text": delta.get("content", "")}
        return {
            **self._envelope("chat.completion.chunk"),
            "choices": [{"finish_reason": reason, "index": 0, **said}],
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        model = self._engine.arguments.facts.get("model", "")
        return {
            "id": f"chatcmpl-{self._task.number:032d}",
            "object": "text_completion" if self._task.is_text else kind,
            "created": int(time.time()),
            "model": Path(model).name if self._is_ik else self._engine.alias,
        }

    def _finish_reason(self) -> str:
        """ik says `stop` at the token limit too."""
        return "stop" if self._is_ik else "length"

    def _usage(self) -> dict[str, Any]:
        run = self._run
        return {
            "completion_tokens": run.n_predicted,
            "prompt_tokens": run.n_prompt,
            "total_tokens": run.n_prompt + run.n_predicted,
            "prompt_tokens_details": {"cached_tokens": run.n_cached},
        }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
