"""What a server said, read from the events of its stream: every build spells its figures otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.core.bench.figures import FigureReader
from tunerd.core.sample import Timings


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called; `arguments` is the text as it was written."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, put together from its events.

    `timings` is None where the server reports none. `n_cached` are prompt tokens that were not read
    again, as reported or as the difference of what the build does report; `n_completion` is the
    length by the OpenAI `usage`. `is_cut` says that the last event did not come, `has_impossible` that
    a figure cannot be and was taken for missing.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    timings: Timings | None
    n_cached: int | None
    n_prompt: int | None
    n_completion: int | None
    first_ms: float | None
    last_ms: float | None
    finish: str | None
    is_cut: bool
    has_impossible: bool = False


Event = tuple[float, Mapping[str, Any]]


def read_answer(events: Sequence[Event], *, is_whole: bool) -> Answer:
    """The answer that a stream gave.

    Args:
        events: Milliseconds since the request was sent, and what came.
        is_whole: Whether the stream came to its own end.
    """
    found = _Collected()
    for at_ms, event in events:
        found.add(at_ms, event)
    read = found.read
    timings = read.timings(found.timings) if found.timings else None
    n_cached = _n_cached(found, timings)
    n_prompt = read.count(found.usage, "prompt_tokens") or found.n_evaluated
    n_completion = read.count(found.usage, "completion_tokens")
    return Answer(
        text="".join(found.text),
        reasoning="".join(found.reasoning),
        tool_calls=found.calls(),
        timings=timings,
        n_cached=n_cached,
        n_prompt=n_prompt,
        n_completion=n_completion,
        first_ms=found.first_ms,
        last_ms=found.last_ms,
        finish=found.finish,
        is_cut=not is_whole or not found.has_ended,
        has_impossible=read.has_impossible,
    )


class _Collected:
    """What was seen so far."""

    def __init__(self) -> None:
        self.read = FigureReader()
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.timings: Mapping[str, Any] = {}
        self.usage: Mapping[str, Any] = {}
        self.n_evaluated: int | None = None
        self.first_ms: float | None = None
        self.last_ms: float | None = None
        self.finish: str | None = None
        self.has_ended = False
        self._calls: dict[int, list[str]] = {}

    def add(self, at_ms: float, event: Mapping[str, Any]) -> None:
        """One event."""
        if self._content(event):
            self.first_ms = at_ms if self.first_ms is None else self.first_ms
            self.last_ms = at_ms
        for key, into in (("timings", "timings"), ("usage", "usage")):
            value = event.get(key)
            if isinstance(value, Mapping) and value:
                setattr(self, into, value)
        if event.get("stop") is True:
            self.has_ended = True
            self.finish = _finish(event)
            self.n_evaluated = self.read.count(event, "tokens_evaluated")

    def _content(self, event: Mapping[str, Any]) -> bool:
        """Take what was generated; whether there was anything."""
        if "choices" not in event:
            piece = event.get("content")
            if isinstance(piece, str) and piece:
                self.text.append(piece)
                return True
            return False
        has_content = False
        for choice in _listed(event["choices"]):
            if isinstance(choice, Mapping):
                has_content |= self._choice(choice)
        return has_content

    def _choice(self, choice: Mapping[str, Any]) -> bool:
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish, self.has_ended = reason, True
        inner = (choice.get(key) for key in ("delta", "message"))
        parts = next((one for one in inner if isinstance(one, Mapping)), choice)
        has_content = False
        kept = (("content", self.text), ("text", self.text), ("reasoning_content", self.reasoning))
        for key, into in kept:
            piece = parts.get(key)
            if isinstance(piece, str) and piece:
                into.append(piece)
                has_content = True
        for call in _listed(parts.get("tool_calls")):
            if isinstance(call, Mapping):
                self._call(call)
                has_content = True
        return has_content

    def _call(self, call: Mapping[str, Any]) -> None:
        """A piece of a call: its name comes first, its arguments in pieces."""
        function = call.get("function")
        if not isinstance(function, Mapping):
            return
        index = _whole(call.get("index")) or 0
        known = self._calls.setdefault(index, ["", ""])
        for place, key in enumerate(("name", "arguments")):
            piece = function.get(key)
            known[place] += piece if isinstance(piece, str) else ""

    def calls(self) -> tuple[ToolCall, ...]:
        """The calls in their order."""
        return tuple(ToolCall(*self._calls[index]) for index in sorted(self._calls))


def _n_cached(found: _Collected, timings: Timings | None) -> int | None:
    """Prompt tokens that were not read again.

    ik reports no `cache_n`, but how many tokens its context holds after the answer (`n_past`: prompt
    and answer, but for the token that was sampled last).
    """
    if timings is None or timings.prompt_n is None:
        return found.read.n_cached(found.usage)
    if timings.cache_n is not None:
        return timings.cache_n
    if found.n_evaluated is not None:
        return max(0, found.n_evaluated - timings.prompt_n)
    prompt = found.read.count(found.usage, "prompt_tokens")
    if prompt is not None:
        return max(0, prompt - timings.prompt_n)
    n_past = found.read.count(found.timings, "n_past")
    if n_past is None or timings.predicted_n is None:
        return None
    return max(0, n_past - max(timings.predicted_n - 1, 0) - timings.prompt_n)


def _finish(event: Mapping[str, Any]) -> str | None:
    kind = event.get("stop_type")
    if isinstance(kind, str):
        return kind
    flags = (("stopped_limit", "limit"), ("stopped_eos", "eos"), ("stopped_word", "word"))
    return next((name for key, name in flags if event.get(key) is True), None)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
