"""What a server's own log says of the requests that it answered, and the workload that they are: no text.

Shapes of mainline (with and without its time prefix) and of ik: the three lines of timings, the
draft line, the line with which a task begins and the one with which its slot is free again. Lines
that are lost make a request that is not counted, never a wrong one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from tunerd.profile.workload import MIXED, ClassShape, Rates, Tokens, WorkloadShape
from tunerd.words import ratio

_COLOURS = r"(?:\x1b\[[0-9;]*m)*"
# Others can write lines in a log: what is longer than a server prints is no number.
_N, _MS = r"(\d{1,9})", r"(\d{1,9}(?:\.\d{1,9})?)"
_PREFIX = re.compile(rf"{_COLOURS}{_N}\.(\d\d)\.(\d\d\d)\.(\d\d\d){_COLOURS} {_COLOURS}[A-Z] ")
_TIMESTAMP = re.compile(r"\btimestamp=(\d{1,12})\b")
_TASK = re.compile(r"\| task (\d+) \||\bid_task=(\d+)")
_SLOT = re.compile(r"\bid +(\d+) \| task|\bid_slot=(\d+)")
_START = re.compile(r"slot is processing task|processing task, is_child")
_PROMPT = re.compile(rf"prompt eval time =\s*{_MS} ms /\s*{_N} tokens")
_EVAL = re.compile(rf"(?<!prompt )eval time =\s*{_MS} ms /\s*{_N} (?:tokens|runs)")
_TIMING = re.compile(r"print_timing|print_timings")
_DRAFT = re.compile(rf"draft acceptance(?: rate)? = \S+ \(\s*{_N} accepted /\s*{_N} generated\)")
_END = re.compile(rf"stop processing: n_(?:tokens|past) = {_N}, truncated = (\d)")
_END_IK = re.compile(r"slot released \|")
_N_PAST = re.compile(rf"\bn_past={_N}\b")
# A prompt that begins like what the slot holds, without a snapshot to go on from (hybrid and sliding-window models):
# of mainline the share that is alike, of ik its tokens.
_READ_ANEW = "forcing full prompt re-processing"
_ALIKE = re.compile(r"selected slot by LCP similarity, (?:f_)?sim_best = ([01]\.\d{1,9}) ")
_ALIKE_IK = re.compile(rf"\| n_past = {_N}, slot\.prompt\.tokens\.size")
_TRUNCATED_IK = re.compile(r"\btruncated=(true|false)")
_BEGINS_IK = "main] build info |"
# Of a sum: what is logged and counted of a request while one looks. Of a counter: its last digit.
_ERROR, _RESOLUTION = 0.05, 1e-5
_LISTENS = re.compile(r"server is listening|HTTP server listening|listening on http")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request as its server logged it.

    Attributes:
        prompt_n: Prompt tokens that were read [tok].
        prompt_ms: Time for them.
        predicted_n: Tokens generated [tok].
        predicted_ms: Time for them.
        cached_n: Prompt tokens that were there already; None where the log does not tell [tok].
        drafted_n: Drafted tokens; None where the log says nothing of drafts.
        accepted_n: Drafted tokens that were right.
        concurrency: Requests under way when it began, itself among them.
        lost_n: Prompt tokens that were there, and were read again for want of a snapshot [tok].
    """

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cached_n: int | None
    drafted_n: int | None
    accepted_n: int | None
    concurrency: int
    lost_n: int = 0

    @property
    def prompt_total_n(self) -> int | None:
        """The whole prompt; None where it is not known what of it was cached [tok]."""
        return None if self.cached_n is None else self.prompt_n + self.cached_n


@dataclass(frozen=True, slots=True)
class RequestLog:
    """All requests of a log, oldest first, and the hours of serving that it covers.

    `covered_s` is None where its lines have no times; `lives` counts starts of the server.
    """

    requests: tuple[LoggedRequest, ...]
    covered_s: float | None
    lives: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Tokens that were generated, and the time that took [s]: as a log tells it, or as a server counts."""

    n: int
    seconds: float

    def agrees_with(self, before: Tally | None, after: Tally | None) -> bool:
        """Whether a log of a stretch says what the server counted meanwhile, which nobody else can write.

        Counters have six digits in some builds.
        """
        if before is None or after is None:
            return False
        return all(
            abs(logged - (late - early)) <= _ERROR * (late - early) + _RESOLUTION * late
            for logged, early, late in (
                (self.n, before.n, after.n),
                (self.seconds, before.seconds, after.seconds),
            )
        )


@dataclass(slots=True)
class _Task:
    """What is known so far of one task."""

    concurrency: int = 1
    prompt: tuple[float, int] | None = None
    generated: tuple[float, int] | None = None
    drafts: tuple[int, int] | None = None
    end_tokens: int | None = None
    is_truncated: bool = False
    alike: float = 0.0
    alike_n: int | None = None
    is_read_anew: bool = False
    has_ended: bool = False

    def request(self) -> LoggedRequest | None:
        if self.prompt is None or self.generated is None:
            return None
        (prompt_ms, prompt_n), (predicted_ms, predicted_n) = self.prompt, self.generated
        accepted, drafted = self.drafts if self.drafts is not None else (None, None)
        return LoggedRequest(
            prompt_n=prompt_n,
            prompt_ms=prompt_ms,
            predicted_n=predicted_n,
            predicted_ms=predicted_ms,
            cached_n=self._cached(prompt_n, predicted_n),
            drafted_n=drafted,
            accepted_n=accepted,
            concurrency=self.concurrency,
            lost_n=self._lost(prompt_n) if self.is_read_anew else 0,
        )

    def _lost(self, prompt_n: int) -> int:
        return min(prompt_n, round(self.alike * prompt_n) if self.alike_n is None else self.alike_n)

    def _cached(self, prompt_n: int, predicted_n: int) -> int | None:
        """The slot holds the whole prompt and all that was generated but the last token."""
        if self.end_tokens is None or self.is_truncated:
            return None
        cached = self.end_tokens + 1 - predicted_n - prompt_n
        return cached if cached >= 0 else None


@dataclass(slots=True)
class _Reader:
    """Goes through a log line by line."""

    tasks: dict[int, _Task] = field(default_factory=dict)
    by_slot: dict[str, _Task] = field(default_factory=dict)
    timed: int | None = None
    alike: float = 0.0
    found: list[LoggedRequest] = field(default_factory=list)
    lives: int = 0

    def take(self, line: str) -> None:
        if _LISTENS.search(line):
            self.flush()
            self.lives += 1
            return
        named = _TASK.search(line)
        task = None if named is None else int(named[1] or named[2])
        if task is not None:
            self.timed = task if _TIMING.search(line) else None
            if _START.search(line):
                slot = _SLOT.search(line)
                self._start(task, f"of {task}" if slot is None else slot[1] or slot[2])
            elif task in self.tasks:
                self._take_snapshot(self.tasks[task], line)
        elif found := _ALIKE.search(line):
            self.alike = float(found[1])
        self._take_timing(line)
        self._take_end(line, task)

    def _start(self, task: int, slot: str) -> None:
        """A slot has one task: the one before has ended, also where that line was lost."""
        self.by_slot.pop(slot, None)
        others = list(self.by_slot.values())
        if task in self.tasks:  # which no server begins twice: somebody else wrote one of both
            others.append(self.tasks.pop(task))
        busy = sum(not one.has_ended and one.generated is None for one in others)
        self.tasks[task] = self.by_slot[slot] = _Task(concurrency=busy + 1, alike=self.alike)
        self.alike = 0.0

    def _take_snapshot(self, task: _Task, line: str) -> None:
        """What its prompt shares with what the slot held, and that nothing lay there to go on from."""
        if found := _ALIKE_IK.search(line):
            task.alike_n = int(found[1])
        task.is_read_anew |= _READ_ANEW in line

    def _take_timing(self, line: str) -> None:
        """Times of the task that was named last: ik and old mainline head them with a line.

        Where that heading was lost they would be another task's, which shows as times out of turn.
        """
        task = self.tasks.get(self.timed) if self.timed is not None else None
        if task is None:
            return
        is_prompt = (found := _PROMPT.search(line)) is not None
        if found := found or _EVAL.search(line):
            if task.generated is not None or is_prompt is not (task.prompt is None):
                self.timed = None
            elif is_prompt:
                task.prompt = float(found[1]), int(found[2])
            else:
                task.generated = float(found[1]), int(found[2])
        elif found := _DRAFT.search(line):
            task.drafts = int(found[1]), int(found[2])

    def _take_end(self, line: str, number: int | None) -> None:
        end = _end_of(line)
        if end is None or number is None or number not in self.tasks:
            return
        task = self.tasks[number]
        task.has_ended = True
        task.end_tokens, task.is_truncated = end

    def flush(self) -> None:
        """A server's life is over: its task numbers begin anew."""
        requests = (task.request() for task in self.tasks.values())
        self.found += [request for request in requests if request is not None]
        self.tasks, self.by_slot, self.timed = {}, {}, None


def read_requests(lines: Iterable[str]) -> RequestLog:
    """Every request of a log whose lines are all there."""
    reader = _Reader()
    kept = list(lines)
    for line in kept:
        reader.take(line)
    reader.flush()
    return RequestLog(tuple(reader.found), _covered_s(kept), reader.lives)


def tally_of(lines: Iterable[str]) -> Tally:
    """All that a log says was generated, whatever else is known of its requests."""
    found = [match for line in lines if (match := _EVAL.search(line)) is not None]
    return Tally(sum(int(one[2]) for one in found), sum(float(one[1]) for one in found) / 1000)


def without_newest(lines: Sequence[str], n: int) -> Sequence[str]:
    """A log up to where the first of its newest `n` generations is told; nothing where it has fewer."""
    ends = [at for at, line in enumerate(lines) if _EVAL.search(line)]
    if not n:
        return lines
    return lines[: ends[-n]] if n <= len(ends) else ()


def _end_of(line: str) -> tuple[int, bool] | None:
    """Tokens in the slot that a task leaves, and whether some were dropped."""
    if found := _END.search(line):
        return int(found[1]), found[2] != "0"
    released = _END_IK.search(line)
    if released is None:
        return None
    n_past = _N_PAST.search(line, released.end())
    truncated = _TRUNCATED_IK.search(line, released.end())
    if n_past is None or truncated is None:
        return None
    return int(n_past[1]), truncated[1] == "true"


def _covered_s(lines: Iterable[str]) -> float | None:
    """Seconds between the first and the last line of each life, added up.

    mainline counts from the start of the process, ik by the clock: what is between two lives, of
    either or of both, is not covered.
    """
    total_s: float | None = None
    before: tuple[bool, float] | None = None
    for line in lines:
        now = _time_of(line)
        if now is None:
            continue
        is_same = before is not None and now[0] == before[0] and _BEGINS_IK not in line
        passed_s = now[1] - before[1] if is_same and before is not None else 0.0
        total_s = (total_s or 0.0) + max(0.0, passed_s)
        before = now
    return total_s


def _time_of(line: str) -> tuple[bool, float] | None:
    """When a line was written [s], and whether that is by the clock."""
    if found := _PREFIX.match(line):
        minutes, seconds, ms, us = (int(part) for part in found.groups())
        return False, 60.0 * minutes + seconds + ms / 1000 + us / 1e6
    found = _TIMESTAMP.search(line)
    return None if found is None else (True, float(found[1]))


# Shorter than any work: the generation with which a start is checked, and a client's own probes; and an answer of a token or two,
# with which a measurement only reads a prefix.
_LEAST_TOKENS, _LEAST_ANSWER = 48, 3
LEAST_REQUESTS = 30
# Where classes part: prompts by what is read in one go, in some, and in minutes; answers by whether
# the prompt or the answer decides about the turn.
_PROMPT_EDGES = (2048, 16384)
_ANSWER_EDGES = (256,)
_PROMPT_NAMES = ("short prompt", "middle prompt", "long prompt")
_ANSWER_NAMES = ("short answer", "long answer")
# A class of fewer requests than this joins the nearest: its percentiles would say nothing.
_LEAST_SHARE = 0.03
_LEAST_OF_CLASS = 5
_PERCENTILES = (10, 25, 50, 75, 90)
_MOST_PARALLEL = 64

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Learned:
    """A workload with what it was learned from.

    `n_short` requests were too short to be work, `n_unsure` had no known prompt length.
    """

    shape: WorkloadShape
    rates: Rates
    n_requests: int
    n_short: int
    n_unsure: int
    acceptance_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file under `learned`, and as scripts read it."""
        return {
            "requests": self.n_requests,
            "too_short": self.n_short,
            "unsure": self.n_unsure,
            "prompt_tok_s": _rounded(self.rates.prompt_tok_s, 1),
            "decode_tok_s": _rounded(self.rates.decode_tok_s, 1),
            "acceptance_ratio": _rounded(self.acceptance_ratio, 4),
        }


def learn(
    requests: Sequence[LoggedRequest], *, name: str, description: str, source: str
) -> Learned | None:
    """The workload of these requests; None where there are fewer than `LEAST_REQUESTS` that count.

    The log does not tell thoughts from answers, nor kinds of text: thoughts count as part of the
    answer, and the kind is `mixed`.
    """
    known = [one for one in requests if one.prompt_total_n is not None]
    work = work_of(known)
    if len(work) < LEAST_REQUESTS:
        return None
    cells = _cells(work)
    classes = tuple(
        _class(cell, [one for one in work if cells[_cell(one)] == cell], len(work))
        for cell in sorted(set(cells.values()))
    )
    return Learned(
        shape=WorkloadShape(name=name, classes=classes, description=description, source=source),
        rates=rates_of(work),
        n_requests=len(work),
        n_short=len(known) - len(work),
        n_unsure=len(requests) - len(known),
        acceptance_ratio=_acceptance(work),
    )


def work_of(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Those that a workload is learned from: of known length, and longer than probes."""
    return [
        one
        for one in requests
        if one.prompt_total_n is not None
        and one.predicted_n >= _LEAST_ANSWER
        and _prompt(one) + one.predicted_n >= _LEAST_TOKENS
    ]


def rates_of(requests: Sequence[LoggedRequest]) -> Rates:
    """All tokens over all their time; the first token of an answer belongs to its prompt."""
    prompt_ms = sum(one.prompt_ms for one in requests)
    decode_ms = sum(one.predicted_ms for one in requests)
    return Rates(
        sum(one.prompt_n for one in requests) / prompt_ms * 1000 if prompt_ms else None,
        sum(max(one.predicted_n - 1, 0) for one in requests) / decode_ms * 1000
        if decode_ms
        else None,
    )


def _prompt(request: LoggedRequest) -> int:
    return request.prompt_total_n or 0


def _cell(request: LoggedRequest) -> Cell:
    return (
        bisect_right(_PROMPT_EDGES, _prompt(request)),
        bisect_right(_ANSWER_EDGES, request.predicted_n),
    )


def _cells(work: Sequence[LoggedRequest]) -> dict[Cell, Cell]:
    """For each cell of the grid the one that its requests count for: small ones join the nearest."""
    counts = Counter(_cell(one) for one in work)
    least = max(_LEAST_SHARE * len(work), _LEAST_OF_CLASS)
    large = [cell for cell, count in counts.items() if count >= least]
    large = large or [max(counts, key=lambda cell: counts[cell])]
    return {
        cell: cell
        if cell in large
        else min(large, key=lambda other: (_distance(cell, other), other))
        for cell in counts
    }


def _distance(first: Cell, second: Cell) -> int:
    """An answer's length matters less than a prompt's, which decides what is measured."""
    return 2 * abs(first[0] - second[0]) + abs(first[1] - second[1])


def _class(cell: Cell, members: Sequence[LoggedRequest], n_all: int) -> ClassShape:
    prompts = [_prompt(one) for one in members]
    cached = sum(one.cached_n or 0 for one in members)
    parallel = median_high(one.concurrency for one in members)
    return ClassShape(
        name=f"{_PROMPT_NAMES[cell[0]]}, {_ANSWER_NAMES[cell[1]]}",
        weight=round(len(members) / n_all, 4),
        kind=MIXED,
        prompt_tokens=_percentiles(prompts),
        cached_share=round(cached / sum(prompts), 4),
        reasoning_tokens=None,
        answer_tokens=_percentiles([one.predicted_n for one in members]),
        concurrency=min(max(parallel, 1), _MOST_PARALLEL),
    )


def _percentiles(values: Sequence[int]) -> Tokens:
    ordered = sorted(values)
    if ordered[0] == ordered[-1]:
        return Tokens.fixed(ordered[0])
    last = len(ordered) - 1
    points = tuple((p / 100, ordered[round(p / 100 * last)]) for p in _PERCENTILES)
    return Tokens(points, round(sum(ordered) / len(ordered), 1))


def _acceptance(work: Sequence[LoggedRequest]) -> float | None:
    drafted = sum(one.drafted_n or 0 for one in work)
    return ratio(sum(one.accepted_n or 0 for one in work), drafted)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
