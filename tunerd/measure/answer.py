"""What a server said: figures of every build's spelling, samples, counters, and their summaries."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, zip_longest
from typing import Annotated, Any

from pydantic import Field

from tunerd.engine.log import Tally
from tunerd.words import ratio

# Up to the last second of the year 9999, which is the last that can be shown as a date.
Seconds = Annotated[float, Field(ge=-253_402_300_799, le=253_402_300_799)]


class Mark(StrEnum):
    """Why a sample must not be averaged silently; it is repeated, or counted as missing."""

    WARM_UP = "warm-up"
    THROTTLED = "throttled"
    FOREIGN_TRAFFIC = "foreign traffic"
    VRAM_TAKEN = "VRAM taken by others"
    PROCESSOR_TAKEN = "processor taken by others"
    CLOCKS_DISAGREE = "server and client clocks disagree"
    NOT_COLD = "prompt was cached"
    NOT_DRAFTED = "speculation was off"
    DRAFTED = "speculation was on"
    SHORT = "ended early"
    CUT_PROMPT = "prompt was cut"
    IMPOSSIBLE = "figures that cannot be"


# Fewer tokens say nothing of the rate of more.
_LEAST_RATED = 2
# In less a client sees how fast something was passed on, not how fast it was generated.
_LEAST_SEEN_MS = 50.0


@dataclass(frozen=True, slots=True)
class Timings:
    """What a server reports of one request, under llama-server's own names.

    None is a key that the reply does not have: ik has no `cache_n`, and no build has draft keys
    where nothing was drafted. `accepted_by_position` counts, for each position of a draft, how often
    it was accepted.
    """

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None
    accepted_by_position: tuple[int, ...] | None = None

    @property
    def decode_tok_s(self) -> float | None:
        """Generated tokens a second, by one rule for every build.

        `predicted_ms` begins when the first token has been sampled, so it covers one token less
        than `predicted_n`; builds differ in whether their own rate says so.
        """
        if self.predicted_n is None or not self.predicted_ms or self.predicted_n < _LEAST_RATED:
            return None
        return (self.predicted_n - 1) / self.predicted_ms * 1000

    @property
    def prompt_tok_s(self) -> float | None:
        """Processed prompt tokens a second; cached ones do not count."""
        if not self.prompt_n or not self.prompt_ms:
            return None
        return self.prompt_n / self.prompt_ms * 1000

    @property
    def steps(self) -> int | None:
        """Verification passes: each gives its accepted drafts and one token more.

        None where the answer ended within a draft that is longer than what it has: such a one is counted whole.
        """
        if self.predicted_n is None or self.predicted_n < 1:
            return None
        steps = self.predicted_n - 1 - (self.draft_n_accepted or 0)
        return steps if steps > 0 or self.predicted_n == 1 else None

    @property
    def step_ms(self) -> float | None:
        """Mean time of a verification pass."""
        return ratio(self.predicted_ms, self.steps)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What the client's own clock saw of a request [ms]; `ttft_ms` only where it was streamed.

    `rest_ratio` is the share of the answer that came behind what came first; None where a part of it never came.
    """

    wall_ms: float
    ttft_ms: float | None = None
    rest_ratio: float | None = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    `process` names the server life in which it was measured (its invocation), `position` is how
    many requests that life had answered before. `timings` is None where the server reported none
    (other OpenAI-compatible servers), `problem` says why there is no answer at all. `energy_j` is what
    the server's GPUs took as a whole from its sending to its end, None where that cannot be told. No
    text of prompt or answer is kept.
    """

    suite: str
    case: str
    kind: str
    prompt_id: str
    process: str
    position: int
    at_s: Seconds
    n_predict: int
    concurrency: int
    timings: Timings | None
    client: ClientTimes | None
    vram_free_min_mib: int | None = None
    energy_j: float | None = None
    marks: tuple[Mark, ...] = ()
    problem: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether it may enter an average."""
        return self.problem is None and not self.marks

    @property
    def n_predicted(self) -> int | None:
        """Generated tokens, by the server's timings or by its `usage`; None where it says neither."""
        if self.timings is not None:
            return self.timings.predicted_n
        count = self.details.get("usage_completion_n")
        return count if type(count) is int else None

    @property
    def n_cached(self) -> int | None:
        """Prompt tokens that were there already, by the server's timings or by what else it said; None where it says neither."""
        told = self.timings.cache_n if self.timings is not None else None
        count = self.details.get("cached") if told is None else told
        return count if type(count) is int else None

    @property
    def repeated_ratio(self) -> float | None:
        """The share of the answer, at its end, that only repeats what it said; None where that cannot be told."""
        ratio_ = self.details.get("repeated_ratio")
        return ratio_ if type(ratio_) is float else None

    @property
    def steps(self) -> int | None:
        """Verification passes; None where an answer that drafted ended by itself.

        mainline counts what its last draft had behind the end as accepted and not as generated, ik as both.
        """
        timings = self.timings
        if timings is None:
            return None
        is_held = (timings.predicted_n or 0) >= self.n_predict
        is_exact = is_held or not timings.draft_n or timings.accepted_by_position is not None
        return timings.steps if is_exact else None

    @property
    def client_tok_s(self) -> float | None:
        """Tokens behind what came first, over the time from there to the end of the stream: of every engine alike."""
        client, n = self.client, self.n_predicted or 0
        if client is None or client.ttft_ms is None or n < _LEAST_RATED:
            return None
        passed_ms = client.wall_ms - client.ttft_ms
        n_behind = min(n - 1, n * (client.rest_ratio or 0.0))
        return n_behind / passed_ms * 1000 if n_behind and passed_ms >= _LEAST_SEEN_MS else None

    @property
    def decode_left_ms(self) -> float | None:
        """What generation would have taken longer had the answer not ended before `n_predict` tokens.

        Decoding is linear in tokens over the length of an answer; None where length or pace is not known.
        """
        if self.n_predicted is None:
            return None
        left = max(self.n_predict - self.n_predicted, 0)
        rate = self.client_tok_s if self.timings is None else self.timings.decode_tok_s
        return left / rate * 1000 if rate else None if left else 0.0

    @property
    def turn_ms(self) -> float | None:
        """Wall time of a request whose answer has `n_predict` tokens; None where that cannot be told."""
        left_ms = self.decode_left_ms
        return None if self.client is None or left_ms is None else self.client.wall_ms + left_ms


@dataclass(frozen=True, slots=True)
class Spread:
    """How figures of single requests lie: median, extremes, and how many are missing.

    All but the counts are None where no request has the figure.
    """

    n: int
    n_missing: int
    median: float | None
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second over several requests: all their tokens over all their time.

    The mean of rates would weigh a short request like a long one. `n_missing` requests had no such
    figure and are in neither sum.
    """

    tok_s: float | None
    n_tokens: int
    total_ms: float
    n: int
    n_missing: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of samples shows; `n_unusable` were marked or failed and are in no figure.

    `joules_per_token` is all energy over all generated tokens, that for reading prompts included, of the
    `n_energy` requests of which both are known.
    """

    n: int
    n_unusable: int
    decode: Rate
    prompt: Rate
    decode_tok_s: Spread
    ttft_ms: Spread
    wall_ms: Spread
    n_predicted: int | None
    n_drafted: int | None
    n_accepted: int | None
    acceptance_ratio: float | None
    tokens_per_step: float | None
    acceptance_by_position: tuple[float, ...] | None
    joules_per_token: float | None = None
    n_energy: int = 0


def spread(values: Iterable[float | None]) -> Spread:
    """Median and spread of figures, the missing ones counted."""
    given = list(values)
    known = sorted(value for value in given if value is not None)
    return Spread(
        n=len(known),
        n_missing=len(given) - len(known),
        median=statistics.median(known) if known else None,
        least=known[0] if known else None,
        most=known[-1] if known else None,
    )


def summarise(samples: Sequence[Sample]) -> Summary:
    """The figures of a set of samples that were measured alike."""
    usable = [sample for sample in samples if sample.is_usable]
    timings = [sample.timings for sample in usable if sample.timings is not None]
    drafted, accepted = _total(timings, "draft_n"), _total(timings, "draft_n_accepted")
    # The first token of each answer belongs to its prompt, and cached ones to nothing.
    decoded = [
        None if t.predicted_n is None else (t.predicted_n - 1, t.predicted_ms) for t in timings
    ]
    read = [(t.prompt_n, t.prompt_ms) for t in timings]
    energies = [(s.energy_j, s.n_predicted) for s in usable if s.energy_j and s.n_predicted]
    return Summary(
        n=len(usable),
        n_unusable=len(samples) - len(usable),
        decode=_rate(decoded, len(usable)),
        prompt=_rate(read, len(usable)),
        decode_tok_s=spread(s.timings.decode_tok_s if s.timings else None for s in usable),
        ttft_ms=spread(s.client.ttft_ms if s.client else None for s in usable),
        wall_ms=spread(s.client.wall_ms if s.client else None for s in usable),
        n_predicted=_total(timings, "predicted_n"),
        n_drafted=drafted,
        n_accepted=accepted,
        acceptance_ratio=ratio(accepted, drafted),
        tokens_per_step=_tokens_per_step(usable),
        acceptance_by_position=_by_position(timings),
        # Energy for reading prompts included.
        joules_per_token=ratio(sum(joules for joules, _ in energies), sum(n for _, n in energies)),
        n_energy=len(energies),
    )


def _rate(rows: Iterable[tuple[int | None, float | None] | None], n: int) -> Rate:
    """Of `n` requests, the tokens and times [ms] that are known together."""
    known = [(tokens, ms) for tokens, ms in filter(None, rows)
             if tokens is not None and ms is not None and tokens > 0 and ms > 0]  # fmt: skip
    n_tokens, total_ms = sum(tokens for tokens, _ in known), sum(ms for _, ms in known)
    tok_s = n_tokens / total_ms * 1000 if total_ms else None
    return Rate(tok_s, n_tokens, float(total_ms), len(known), n - len(known))


def _total(timings: Sequence[Timings], name: str) -> int | None:
    """The sum of a count over all requests that have it; None if none has."""
    known = [value for one in timings if (value := getattr(one, name)) is not None]
    return sum(known) if known else None


def _tokens_per_step(samples: Sequence[Sample]) -> float | None:
    known = [(one.n_predicted - 1, one.steps) for one in samples if one.n_predicted and one.steps]
    steps = sum(n_steps for _, n_steps in known)
    return sum(tokens for tokens, _ in known) / steps if steps else None


def _by_position(timings: Sequence[Timings]) -> tuple[float, ...] | None:
    """For each position of a draft, the share of verification passes in which it was accepted."""
    known = [t for t in timings if t.accepted_by_position is not None and t.steps]
    steps = sum(t.steps or 0 for t in known)
    if not steps:
        return None
    counts = zip_longest(*(t.accepted_by_position or () for t in known), fillvalue=0)
    return tuple(sum(one) / steps for one in counts)


# The figures of a reply: each is believed only within what a server can have done.

# llama.cpp counts tokens in 32 bits.
MOST_TOKENS = 2**31 - 1
# No request is waited for as long as a month.
MOST_MS = 31 * 24 * 3600 * 1000.0
# llama.cpp counts microseconds; of less a rate has no end.
_LEAST_MS = 0.001
# The last draft may be longer than what was still asked for.
_DRAFT_TOKENS = 256


@dataclass
class FigureReader:
    """Reads figures, and remembers whether one of them cannot be.

    A key that is missing or null is None; so is what is no number, or a number out of its range, which
    set `has_impossible` besides.
    """

    has_impossible: bool = False

    def count(self, found: Mapping[str, Any], key: str) -> int | None:
        """A number of tokens."""
        value = self._number(found, key, MOST_TOKENS)
        if value is not None and value != int(value):
            self.has_impossible, value = True, None
        return None if value is None else int(value)

    def ms(self, found: Mapping[str, Any], key: str) -> float | None:
        """Milliseconds."""
        value = self._number(found, key, MOST_MS)
        if value is not None and 0 < value < _LEAST_MS:
            self.has_impossible, value = True, None
        return value

    def timings(self, found: Mapping[str, Any]) -> Timings:
        """What a server reports of one request."""
        drafted, accepted = self._drafts(found)
        return Timings(
            cache_n=self.count(found, "cache_n"),
            prompt_n=self.count(found, "prompt_n"),
            prompt_ms=self.ms(found, "prompt_ms"),
            predicted_n=self.count(found, "predicted_n"),
            predicted_ms=self.ms(found, "predicted_ms"),
            draft_n=drafted,
            draft_n_accepted=accepted,
            accepted_by_position=self._by_depth(found.get("draft_by_depth")),
        )

    def n_cached(self, usage: Mapping[str, Any]) -> int | None:
        """Cached tokens by the OpenAI `usage`: in its details, or beside them as some servers do."""
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping) and "cached_tokens" in details:
            return self.count(details, "cached_tokens")
        return self.count(usage, "cached_tokens")

    def _number(self, found: Mapping[str, Any], key: str, most: float) -> float | None:
        value: Any = found.get(key)
        # Of NaN every comparison is false.
        if type(value) in {int, float} and 0 <= value <= most:
            return float(value)
        self.has_impossible |= value is not None
        return None

    def _drafts(self, found: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """Drafted and accepted; neither where more was accepted than drafted or than generated."""
        drafted, accepted = self.count(found, "draft_n"), self.count(found, "draft_n_accepted")
        predicted = self.count(found, "predicted_n")
        if accepted is None:
            return drafted, accepted
        is_possible = (drafted is None or accepted <= drafted) and (
            predicted is None or accepted <= predicted + _DRAFT_TOKENS
        )
        self.has_impossible |= not is_possible
        return (drafted, accepted) if is_possible else (None, None)

    def _by_depth(self, rows: object) -> tuple[int, ...] | None:
        """ik's list of `{depth, draft_n, draft_n_accepted}`, depth from 1."""
        if not isinstance(rows, list) or not rows:
            return None
        counts: dict[int, int] = {}
        for row in rows:
            if not isinstance(row, Mapping):
                return None
            depth, accepted = self.count(row, "depth"), self.count(row, "draft_n_accepted")
            if depth is None or accepted is None or not 1 <= depth <= _DRAFT_TOKENS:
                return None
            counts[depth] = accepted
        return tuple(counts.get(depth, 0) for depth in range(1, max(counts) + 1))


# What a server said, read from the events of its stream: every build spells its figures otherwise.


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called; `arguments` is the text as it was written."""

    name: str
    arguments: str

    @property
    def fields(self) -> Mapping[str, Any] | None:
        """The arguments; None where they are no JSON object."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, put together from its events.

    `timings` is None where the server reports none. `n_cached` are prompt tokens that were not read
    again, as reported or as the difference of what the build does report; `n_prompt` is the whole prompt,
    `n_completion` the length by the OpenAI `usage`, `rest_ratio` that of `ClientTimes`. `is_cut` says that the last event did not come, `has_impossible` that
    a figure cannot be and was taken for missing. `steps` are its verification steps as (ms, drafted, accepted)
    where timings came with every token; None where they did not, or do not account for every token.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    timings: Timings | None = None
    n_cached: int | None = None
    n_prompt: int | None = None
    n_completion: int | None = None
    first_ms: float | None = None
    last_ms: float | None = None
    rest_ratio: float | None = None
    is_cut: bool = False
    has_impossible: bool = False
    steps: tuple[tuple[float, int, int], ...] | None = None

    @property
    def ended_in_thought(self) -> bool:
        """Whether its thoughts took all the tokens that it was given: of the rest nothing is known."""
        return bool(self.reasoning) and not (self.text or self.tool_calls)


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
    return Answer(
        text="".join(found.text),
        reasoning="".join(found.reasoning),
        tool_calls=found.calls(),
        timings=timings,
        n_cached=_n_cached(found, timings),
        n_prompt=read.count(found.usage, "prompt_tokens") or found.n_evaluated,
        n_completion=read.count(found.usage, "completion_tokens"),
        first_ms=found.first_ms,
        last_ms=found.last_ms,
        rest_ratio=found.rest_ratio,
        is_cut=not is_whole or not found.has_ended,
        has_impossible=read.has_impossible,  # once all is read
        steps=found.steps(timings),
    )


# Steps that came in one event (a letter in several tokens) look like one that took as long as both.
_MOST_MERGED = 0.02
# Less than this share of a usual step is no step: a clock that was read twice within one.
_LEAST_OF_STEP = 0.02
# What comes so soon after the piece before came with it: read from a buffer, not generated meanwhile.
_AT_ONCE_MS = 1.0
# How an answer ends that is none, in vLLM, SGLang and LiteLLM.
_NO_END = frozenset({"", "abort", "error"})


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
        self.has_ended = False
        self._first_letters = 0
        self._rest_letters = 0
        self._so_far: list[tuple[float, int, int]] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}

    def add(self, at_ms: float, event: Mapping[str, Any]) -> None:
        """One event."""
        if n_letters := self._content(event):
            self.first_ms = at_ms if self.first_ms is None else self.first_ms
            if not self._rest_letters and at_ms - (self.last_ms or at_ms) < _AT_ONCE_MS:
                self._first_letters += n_letters
            else:
                self._rest_letters += n_letters
            self.last_ms = at_ms
        for key in ("timings", "usage"):
            value = event.get(key)
            if isinstance(value, Mapping) and value:
                setattr(self, key, value)
        self._note_progress(event.get("timings"))
        if event.get("stop") is True:
            self.has_ended = True
            self.n_evaluated = self.read.count(event, "tokens_evaluated")

    @property
    def rest_ratio(self) -> float | None:
        """The share of the answer behind what came first; None where thoughts were counted and not shown."""
        details = self.usage.get("completion_tokens_details")
        counted = details.get("reasoning_tokens") if isinstance(details, Mapping) else None
        if not self._first_letters or (counted and not any(self.reasoning)):
            return None
        return self._rest_letters / (self._first_letters + self._rest_letters)

    def _note_progress(self, timings: Any) -> None:
        """The sums so far: time of decoding, tokens drafted, and accepted."""
        if not isinstance(timings, Mapping):
            return
        read = FigureReader()  # of its own: the figures of the answer are those of its end
        ms = read.ms(timings, "predicted_ms")
        counts = read.count(timings, "draft_n") or 0, read.count(timings, "draft_n_accepted") or 0
        if ms is None or read.has_impossible:
            return
        if not self._so_far or self._so_far[-1][0] != ms:
            self._so_far.append((ms, *counts))

    def steps(self, timings: Timings | None) -> tuple[tuple[float, int, int], ...] | None:
        """The verification steps: what the sums gained from one event to the next."""
        found = []
        for before, now in pairwise(self._so_far):
            ms, drafted, accepted = (two - one for one, two in zip(before, now, strict=True))
            if not (math.isfinite(ms) and ms > 0 and 0 <= accepted <= drafted):
                return None
            found.append((ms, int(drafted), int(accepted)))
        n_predicted = timings.predicted_n if timings is not None else None
        if not found or n_predicted is None:
            return None
        times = [ms for ms, _, _ in found]
        if min(times) < _LEAST_OF_STEP * statistics.median(times):
            return None
        missing = n_predicted - 1 - sum(1 + accepted for _, _, accepted in found)
        if missing < 0:  # its end lay within the last draft: what is behind it is no part of it
            missing = min(missing + found[-1][2], 0)
        return tuple(found) if abs(missing) <= _MOST_MERGED * len(found) + 1 else None

    def _content(self, event: Mapping[str, Any]) -> int:
        """Take what was generated; how many letters that is."""
        if "choices" not in event:
            return _taken(event.get("content"), self.text)
        return sum(map(self._choice, _mappings(event["choices"])))

    def _choice(self, choice: Mapping[str, Any]) -> int:
        reason = choice.get("finish_reason")
        self.has_ended |= isinstance(reason, str) and reason not in _NO_END
        inner = (choice.get(key) for key in ("delta", "message"))
        parts = next((one for one in inner if isinstance(one, Mapping)), choice)
        # Thoughts have the second name in Ollama; a proxy may give both, with the same text.
        thought = parts.get("reasoning_content") or parts.get("reasoning")
        n_letters = sum(_taken(parts.get(key), self.text) for key in ("content", "text"))
        n_letters += sum(map(self._call, _mappings(parts.get("tool_calls"))))
        return n_letters + _taken(thought, self.reasoning)

    def _call(self, call: Mapping[str, Any]) -> int:
        """A piece of a call: its name comes first, its arguments in pieces."""
        function, index = call.get("function"), call.get("index")
        if not isinstance(function, Mapping):
            return 0
        known = self._calls.setdefault(index if type(index) is int else 0, ([], []))
        keys = zip(("name", "arguments"), known, strict=True)
        return sum(_taken(function.get(key), into) for key, into in keys)

    def calls(self) -> tuple[ToolCall, ...]:
        """The calls in their order."""
        return tuple(ToolCall(*map("".join, self._calls[index])) for index in sorted(self._calls))


def _taken(piece: object, into: list[str]) -> int:
    """Add a piece of text, if it is one; how many letters it has."""
    kept = piece if isinstance(piece, str) else ""
    into.append(kept)
    return len(kept)


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


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    """The objects of a list, if it is one."""
    found = value if isinstance(value, list) else ()
    return (one for one in found if isinstance(one, Mapping))


# The server's own counters, from the text of its `/metrics`.

_PREFIX = "llamacpp:"
# A draft of a thousand tokens is none: what is said of one is not read.
_LINE = re.compile(r'^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{position="(\d{1,3})"\})? (\S+)$')
# Source: seen on builds of May to November 2026; std::ostream's default precision.
_DIGITS = 6
_WHOLE_BELOW = 10**_DIGITS
# What no server comes to; and SQLite keeps no whole number beyond 2^63.
_MOST_COUNTED = 2**53
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters since the process began; a counter that the build does not have is None.

    `n_prompt` does not count cached tokens, `n_cached` counts nothing else; `prompt_s` and `predicted_s`
    are the time that went into prompts and generation, of all slots together. `accepted_by_position` is
    empty until the first draft was accepted, on builds that count by position.
    """

    n_prompt: int | None
    n_predicted: int | None
    n_processing: int | None
    n_deferred: int | None
    n_drafted: int | None = None
    n_accepted: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    n_cached: int | None = None
    prompt_s: float | None = None
    predicted_s: float | None = None

    @property
    def generated(self) -> Tally | None:
        """What it generated since it began."""
        if self.n_predicted is None or self.predicted_s is None:
            return None
        return Tally(self.n_predicted, self.predicted_s)

    @property
    def n_at_work(self) -> int:
        """Requests that it answers or lets wait at this moment, as far as it tells."""
        return (self.n_processing or 0) + (self.n_deferred or 0)


def read_counters(text: str) -> Counters:
    """The counters in a Prometheus text."""
    values: dict[str, float] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        value = _value(found[3]) if found is not None else None
        if found is None or value is None:
            continue
        name = found[1].removeprefix(_PREFIX)
        if found[2] is None:
            values[name] = value
        elif name == _PER_POSITION:
            positions[int(found[2])] = round(value)
    places = range(max(positions, default=-1) + 1)
    has_positions = "spec_decode_num_draft_tokens_total" in values
    by_position = tuple(positions.get(place, 0) for place in places) if has_positions else None
    return Counters(
        n_prompt=_count(values, "prompt_tokens_total"),
        n_predicted=_count(values, "tokens_predicted_total"),
        n_processing=_count(values, "requests_processing"),
        n_deferred=_count(values, "requests_deferred"),
        n_drafted=_count(values, "spec_decode_num_draft_tokens_total"),
        n_accepted=_count(values, "spec_decode_num_accepted_tokens_total"),
        accepted_by_position=by_position,
        n_cached=_count(values, "prompt_tokens_cached_total"),
        prompt_s=values.get("prompt_seconds_total"),
        predicted_s=values.get("tokens_predicted_seconds_total"),
    )


def step_of(value: float) -> float:
    """How far apart two values of a counter are that a llama-server prints differently, in six digits."""
    if not value or (isinstance(value, int) and value < _WHOLE_BELOW):
        return 0.0
    return float(10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS))


def gained(before: Counters, after: Counters) -> tuple[int, ...] | None:
    """By position, how many drafted tokens were accepted in between; None where that is not told exactly."""
    then, now = before.accepted_by_position, after.accepted_by_position
    if then is None or now is None or any(step_of(count) for count in now):
        return None
    found = tuple(late - early for early, late in zip_longest(then, now, fillvalue=0))
    return None if any(count < 0 for count in found) else found


def _count(values: dict[str, float], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else round(value)


def _value(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < _MOST_COUNTED else None  # nor is any below zero, or no number


# Why requests had no answer.

# A server's message may quote the whole request.
_MOST_LETTERS = 160


def count_problems(samples: Sequence[Sample]) -> Mapping[str, int]:
    """How many requests had no answer, by the reason in one line."""
    texts = (" ".join(one.problem.split()) for one in samples if one.problem is not None)
    most = _MOST_LETTERS
    return Counter(text if len(text) <= most else f"{text[:most]}..." for text in texts)


NO_ANSWER = "no answer"


def count_marks(samples: Sequence[Sample]) -> Mapping[str, int]:
    """How many samples each reason speaks against."""
    return Counter(
        reason
        for sample in samples
        for reason in (
            *map(str, sample.marks),
            *([NO_ANSWER] if sample.problem is not None else ()),
        )
    )
