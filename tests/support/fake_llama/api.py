"""The HTTP routes, with the differences between mainline and ik, and a completion from its slot to its last byte."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.fake_llama.answers import (
    Answer,
    ClientGoneError,
    HttpError,
    Reply,
    json_answer,
    not_found,
)
from tests.support.fake_llama.engine import POLL_S, Engine, Slot
from tests.support.fake_llama.failures import Failure


class Api:
    """The HTTP routes, with the differences between mainline and ik."""

    def __init__(self, engine: Engine, die: Callable[[Failure], NoReturn]) -> None:
        self.engine = engine
        self.behaviour = engine.behaviour
        self.is_loaded = False
        self.failure_at_request: Failure | None = None
        self.n_at_work = 0
        self._work_lock = threading.Lock()
        self._die = die
        self._api_keys = self._read_api_keys()

    def _read_api_keys(self) -> set[str]:
        facts = self.engine.arguments.facts
        keys = set(facts["api_key"].split(",")) if "api_key" in facts else set()
        if "api_key_file" in facts:
            keys |= set(Path(facts["api_key_file"]).read_text(encoding="utf-8").split())
        return keys

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While it lasts, the program does not end orderly."""
        with self._work_lock:
            self.n_at_work += 1
        try:
            yield
        finally:
            with self._work_lock:
                self.n_at_work -= 1

    def after_reply(self) -> None:
        """Die after so many completions, if that is to be played."""
        told = self.behaviour
        if (
            told.exit_after_requests is not None
            and self.engine.n_completions >= told.exit_after_requests
        ):
            ends = told.exit_status if told.exit_signal is None else -told.exit_signal
            self._die(Failure("request", ends, ()))

    def answer(
        self, method: str, target: str, key: str, body: bytes, gone: Callable[[], bool]
    ) -> Reply:
        path = target.partition("?")[0]
        if self.behaviour.openai_only and not path.startswith(("/v1/", "/health")):
            raise not_found()
        if not self.is_loaded:
            raise HttpError(503, "unavailable_error", "Loading model")
        if path == "/health":
            return json_answer({"status": "ok"})
        if self._api_keys and key not in self._api_keys:
            raise HttpError(401, "authentication_error", "Invalid API Key")
        if not self._leaves_asleep(path):
            self.engine.touch()
        if method == "GET":
            return self._get(path)
        return self._post(path, self._parsed(body), gone)

    def _leaves_asleep(self, path: str) -> bool:
        """Seen on builds of April to August and 0.7.0: which of them neither wake it nor keep it awake."""
        if path == "/metrics":
            return (
                self.behaviour.dialect == "main-0x" or "metrics" not in self.engine.arguments.facts
            )
        return path in {"/props", "/v1/models"}

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(body or b"{}")
        except ValueError as error:
            text = f"[json.exception.parse_error.101] parse error: {error}"
            if self.behaviour.dialect == "main-0x":
                raise HttpError(400, "invalid_request_error", text) from error
            raise HttpError(500, "server_error", text) from error
        if not isinstance(parsed, dict):
            raise HttpError(400, "invalid_request_error", "the body must be an object")
        return parsed

    def _get(self, path: str) -> Answer:
        facts = self.engine.arguments.facts
        if path == "/v1/models":
            return json_answer({"data": [{"id": self.engine.alias}]})
        if path == "/props":
            return json_answer(self._props() | self.behaviour.told_props)
        if path in {"/slots", "/metrics"}:
            time.sleep(self.behaviour.counts_after_s)
        if path == "/slots":
            if "no_slots" in facts:
                raise HttpError(501, "not_supported_error", "This server does not support slots")
            return json_answer([self._slot(slot) for slot in self.engine.slots])
        if path == "/metrics":
            if "metrics" not in facts:
                text = "This server does not support metrics endpoint. Start it with `--metrics`"
                raise HttpError(501, "not_supported_error", text)
            return Answer(200, self._metrics().encode(), "text/plain; version=0.0.4")
        raise not_found()

    def _props(self) -> dict[str, Any]:
        props: dict[str, Any] = {
            "total_slots": len(self.engine.slots),
            "model_alias": self.engine.alias,
            "model_path": self.engine.arguments.facts.get("model", ""),
            "default_generation_settings": {"n_ctx": self.engine.n_ctx},
        }
        return props if self.behaviour.is_ik else props | {"is_sleeping": self.engine.is_asleep}

    def _slot(self, slot: Slot) -> dict[str, Any]:
        is_done = not slot.is_busy and not self.behaviour.slots_are_busy
        found: dict[str, Any] = {"id": slot.number, "n_ctx": self.engine.n_ctx}
        if self.behaviour.is_ik:
            return found | {"state": int(not is_done)}
        return found | {"speculative": self.engine.is_speculative, "is_processing": not is_done}

    def _metrics(self) -> str:
        totals, dialect = self.engine.totals, self.behaviour.dialect
        n_busy = len(self.engine.slots) if self.behaviour.slots_are_busy else self.engine.n_busy
        rows: dict[str, float] = {
            "prompt_tokens_total": totals.n_prompt,
            "prompt_seconds_total": totals.prompt_s,
            "tokens_predicted_total": totals.n_predicted,
            "tokens_predicted_seconds_total": totals.predicted_s,
            "requests_processing": n_busy,
            "requests_deferred": self.engine.n_waiting,
        }
        if dialect == "main-0x":
            rows["prompt_tokens_cached_total"] = totals.n_cached
        if not self.behaviour.is_ik:
            kind = "spec_decode_num"
            rows[f"{kind}_draft_tokens_total"] = totals.drafted
            rows[f"{kind}_accepted_tokens_total"] = sum(totals.accepted_at)
            for at, count in enumerate(totals.accepted_at):
                if count:
                    rows[f'{kind}_accepted_tokens_per_pos_total{{position="{at}"}}'] = count
        told = "".join(f"llamacpp:{name} {value:g}\n" for name, value in rows.items())
        return f"# TYPE llamacpp:prompt_tokens_total counter\n{told}"

    def _post(self, path: str, body: dict[str, Any], gone: Callable[[], bool]) -> Reply:
        if path in {"/completion", "/v1/completions"}:
            if "prompt" not in body:
                text = "[json.exception.out_of_range.403] key 'prompt' not found"
                raise HttpError(400, "invalid_request_error", text)
            told, is_text = body["prompt"], path.startswith("/v1/")
            tokens = self.engine.tokenize(told) if isinstance(told, str) else list(told)
            return self._complete(body, tokens, gone, is_chat=False, is_text=is_text)
        if path == "/v1/chat/completions":
            tokens = self.engine.tokenize(self._chat_prompt(body))
            return self._complete(body, tokens, gone, is_chat=True)
        if path == "/tokenize":
            return json_answer({"tokens": self.engine.tokenize(str(body.get("content", "")))})
        if path == "/apply-template":
            return json_answer({"prompt": self._chat_prompt(body)})
        raise not_found()

    def _chat_prompt(self, body: dict[str, Any]) -> str:
        lines = [f"{one.get('role')}: {one.get('content')}\n" for one in body["messages"]]
        return "".join(lines) + "assistant:"

    def _complete(
        self,
        body: dict[str, Any],
        tokens: list[int],
        gone: Callable[[], bool],
        *,
        is_chat: bool,
        is_text: bool = False,
    ) -> Reply:
        engine = self.engine
        self._check_length(len(tokens))
        slot, number = engine.take_slot(gone)
        try:
            self._log_launch(slot, number)
            if self.failure_at_request is not None:
                self._die(self.failure_at_request)
            return Work(engine, Task(number, slot, body, tokens, gone, is_chat, is_text)).reply()
        except BaseException:
            engine.free_slot(slot)
            raise

    def _check_length(self, n_tokens: int) -> None:
        n_ctx = self.engine.n_ctx
        if n_tokens < n_ctx:
            return
        if self.behaviour.is_ik:
            text = "the request exceeds the available context size, try increasing it"
            raise HttpError(500, "server_error", text)
        text = f"request ({n_tokens} tokens) exceeds the available context size ({n_ctx} tokens)"
        raise HttpError(400, "exceed_context_size_error", f"{text}, try increasing it")

    def _log_launch(self, slot: Slot, task: int) -> None:
        if self.behaviour.is_ik:
            keys = {"id_slot": slot.number, "id_task": task}
            self.engine.log.keyed("launch_slot_with_task", "slot is processing task", **keys)
            return
        place = f"id {slot.number:2d} | task {task} | "
        self.engine.log(f"I slot launch_slot_: {place}processing task, is_child = 0")


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
        n_tokens, most = self._run.n_predicted, self._engine.behaviour.breaks_beyond
        if most is not None and len(self._task.tokens) > most:
            return [self._engine.behaviour.breaks_into] * n_tokens
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
        self._engine.passes(simulated_ms / 1000)
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
                    said = (
                        self._chunk({"content": piece})
                        if self._is_openai
                        else self._piece(piece, n_sent)
                    )
                    yield _event(said | seen)
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
        return found if self._is_ik else found | {"tokens_predicted": n_sent}

    def _result(self, text: str) -> dict[str, Any]:
        run = self._run
        return {
            "content": text,
            "stop": True,
            "tokens_predicted": run.n_predicted,
            "tokens_evaluated": run.n_prompt,
            "timings": self._engine.told_timings(run),
        }

    def _openai(self, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        if self._task.is_text:
            said = {"text": text}
        return {
            "choices": [{"finish_reason": self._finish_reason(), "index": 0, **said}],
            "usage": self._usage(),
            "timings": self._engine.told_timings(self._run),
        }

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": delta}
        if self._task.is_text:
            said = {"text": delta.get("content", "")}
        return {"choices": [{"finish_reason": reason, "index": 0, **said}]}

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
