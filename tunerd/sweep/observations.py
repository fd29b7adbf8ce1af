"""Samples sorted for the models: step and prompt times, drafts, memory, whole turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from tunerd.profile.arm import BOOT, Arm, Reading, Request, Sample, StepsSeen
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep import laws

WARM_UP = "warm-up"
PREFIX = "prefix"
BLOCK = "block"
FILL = "fill"
TOOL = "tool"
AGAIN = "r"

_LEAST_PREDICTED = 16
_SEARCHED_TOKENS = 512
PLAIN_TOKENS = 128
_LEAST_PROMPT = 64
# Less than this is no free memory: drivers keep some, and a spilled card shows next to none.
_NOTHING_FREE_MIB, _ALL_TAKEN_MIB = 4.0, -50.0
# So much of the context counts as all of it; of a small one all but a sentence, as texts end with one.
_FILLED_SHARE = 0.95
_SENTENCE_TOKENS = 100
_WARM_SHARE = 0.9
_WHOLE_SHARE = 0.98  # of a prefix: a text has the length that it has
_SLACK_TOKENS = 64
_LEAST_MS = 1e-6  # of a prompt, of which logs are taken


@dataclass(frozen=True, slots=True)
class Answer:
    """One usable answer with what it belongs to; `text` is a class of the workload, or None.

    `is_stand_in`: more of its prompt was cached than its class says, to measure its decoding alone.
    """

    arm: Arm  # with the draft in force
    process: str
    purpose: str
    block: str
    text: int | None
    request: Request
    reading: Reading
    is_stand_in: bool = False

    @property
    def depth_start(self) -> int:
        """Context in use before the prompt was read [tok]."""
        if self.reading.cache_n is not None:
            return self.reading.cache_n
        total = self.request.cached_tokens + self.request.new_tokens
        return max(total - (self.reading.prompt_n or 0), 0)

    @property
    def depth_end(self) -> int:
        """Context in use at its end, by the server's count where it gives one [tok]."""
        request, reading = self.request, self.reading
        n_prompt, n_predicted = reading.prompt_n, reading.predicted_n
        if n_prompt is None or n_predicted is None:
            return request.cached_tokens + request.new_tokens + request.n_predict
        return self.depth_start + n_prompt + n_predicted


@dataclass(slots=True)
class Process:
    """One life of a server, from its samples."""

    name: str
    arm: Arm
    is_up: bool = False
    failure: str = ""
    died_of: str = ""
    died_at_tokens: int | None = None
    vram_free_mib: float | None = None
    n_ctx: int | None = None
    answers: list[Answer] = field(default_factory=list)
    has_spilled: bool = False
    has_refused: bool = False  # a class of the workload, asked with its own drafts
    n_untold_calls: int = 0  # tool calls without a verdict: none made, or refused


class Observations:
    """All samples so far, by process; `add` is the only way in."""

    def __init__(self, workload: Workload, n_slots: int = 1) -> None:
        """`n_slots`: requests among which a context is shared out, each with as much as `n_ctx` of a process says."""
        self.workload = workload
        self.n_slots = n_slots
        self.processes: dict[str, Process] = {}
        self.changed: set[tuple[str, str]] = set()
        self.n_samples = 0
        self._prompts: list[list[int]] = [[] for _ in workload.classes]

    def add(self, sample: Sample) -> None:
        """Files one sample."""
        process = self.processes.setdefault(sample.process, Process(sample.process, sample.arm))
        self.changed.add(sample.arm.family)
        self.n_samples += 1
        if sample.event == BOOT:
            process.is_up = not sample.failure
            process.failure = sample.failure
            process.vram_free_mib = sample.vram_free_mib
            process.n_ctx = sample.n_ctx
            return
        request = sample.request
        if request is None:
            return
        if sample.failure and sample.failure != "refused":
            process.died_of = sample.failure
            one = request.cached_tokens + request.new_tokens + request.n_predict
            process.died_at_tokens = one * request.concurrency
        if sample.failure == "refused" and sample.block:
            own = sample.arm.n_max, sample.arm.p_min
            process.has_refused |= (sample.n_max, sample.p_min) == own
        reading = sample.reading
        if sample.purpose == TOOL and sample.failure in {"", "refused"}:
            process.n_untold_calls += reading is None or reading.tool_ok is None
        if reading is None or sample.failure:
            return
        process.has_spilled |= reading.has_spilled
        arm = sample.arm.with_draft(sample.n_max, sample.p_min)
        text = text_of(self.workload, request, sample.block) if sample.block else None
        classes = self.workload.classes
        answer = Answer(
            arm=arm if sample.arm.drafts else sample.arm,
            process=sample.process,
            purpose=sample.purpose,
            block=sample.block,
            text=text,
            request=request,
            reading=reading,
            is_stand_in=text is not None and classes[text].cached_tokens != request.cached_tokens,
        )
        process.answers.append(answer)
        self._note_prompt(answer)

    def _note_prompt(self, answer: Answer) -> None:
        count, found = answer.reading.prompt_n, answer.reading.cache_n
        if answer.text is None or not count or is_cold(answer.request, answer.reading):
            return
        if not answer.is_stand_in:
            self._prompts[answer.text].append(count)
        elif found is not None and not self.workload.classes[answer.text].cached_tokens:
            self._prompts[answer.text].append(count + found)

    def workload_seen(self) -> Workload:
        """The workload with prompts as long as servers said they were.

        A text has the length that it has: the shortest task of a kind may be longer than what was
        asked for, and what is predicted must be of the same prompt as what is measured.
        """
        return Workload(
            tuple(
                replace(one, new_tokens=round(median(counts))) if counts else one
                for one, counts in zip(self.workload.classes, self._prompts, strict=True)
            )
        )

    def of_family(self, family: tuple[str, str]) -> list[Process]:
        """Processes of one family."""
        return [one for one in self.processes.values() if one.arm.family == family]

    def memory_of(self, family: tuple[str, str], context: int) -> list[laws.Free]:
        """VRAM seen free: after each load, and at the deepest request of each process."""
        return [
            row
            for process in self.of_family(family)
            for row in _memory_rows(process, self.n_slots * (process.n_ctx or context))
        ]


def text_of(workload: Workload, request: Request, block: str) -> int | None:
    """The class that a request stands for: equal, or of the same depth with more of it cached.

    Where several are, the name of its prompt says which one it was asked for.
    """
    same = [
        at
        for at, one in enumerate(workload.classes)
        if one.kind == request.kind
        and request.n_predict
        in {one.n_predict, *(searched_tokens(one, drafts=d, whole=False) for d in (True, False))}
        and one.concurrency == request.concurrency
        and one.cached_tokens + one.new_tokens == request.cached_tokens + request.new_tokens
    ]
    named = [at for at in same if request.prompt_id.rstrip(AGAIN) == prompt_name(block, at)]
    exact = [at for at in same if workload.classes[at].cached_tokens == request.cached_tokens]
    return next(iter(named or exact or same), None)


def searched_tokens(one: RequestClass, *, drafts: bool, whole: bool) -> int:
    """Length of an answer while searching: more texts say more than longer ones, but no beginning is as the whole.

    Without drafts each token takes as long as the one before, and a few tell.
    """
    most = max(one.n_predict if whole else one.n_predict // 2, _SEARCHED_TOKENS)
    most = most if drafts else PLAIN_TOKENS
    return min(one.n_predict, most)


def is_full(n_tokens: float, context: int) -> bool:
    """Whether so many tokens fill a context."""
    return n_tokens >= min(_FILLED_SHARE * context, context - _SENTENCE_TOKENS)


def prompt_name(block: str, text: int) -> str:
    """Names the prompt of one class in a block; `AGAIN` behind it stands for one more of the kind."""
    return f"{block}-{text}"


def is_cold(request: Request, reading: Reading) -> bool:
    """Whether the prefix that should have been cached had to be read."""
    if request.cached_tokens <= 0:
        return False
    if reading.cache_n is not None:
        return reading.cache_n < _WARM_SHARE * request.cached_tokens
    if reading.prompt_n is None:
        return False
    return reading.prompt_n > 1.2 * request.new_tokens + _SLACK_TOKENS


def as_asked(process: Process, answer: Answer, workload: Workload) -> Reading | None:
    """The answer with its prompt read as its class says: with the time of a prefix that stood in for its beginning.

    None where this process did not read that prefix from its first token to its last, or the class has one of its own.
    """
    if not answer.is_stand_in or answer.text is None:
        return answer.reading
    if workload.classes[answer.text].cached_tokens:
        return None
    request, reading = answer.request, answer.reading
    if is_cold(request, reading):
        return reading
    taken_ms = [
        other.reading.prompt_ms
        for other in process.answers
        if other.purpose == PREFIX
        and other.request.cached_tokens == request.cached_tokens
        and other.request.concurrency == request.concurrency
        and other.reading.prompt_ms is not None
        and (other.reading.prompt_n or 0) >= _WHOLE_SHARE * request.cached_tokens
    ]
    if not taken_ms or reading.prompt_ms is None:
        return None
    # Of a prefix that was not found to its end the rest was read with the prompt, and is in its time.
    found = request.cached_tokens if reading.cache_n is None else reading.cache_n
    prefix_ms = fmean(taken_ms) * min(found / request.cached_tokens, 1.0)
    wall_ms = None if reading.wall_ms is None else reading.wall_ms + prefix_ms
    return replace(reading, prompt_ms=reading.prompt_ms + prefix_ms, wall_ms=wall_ms)


def blocks_of(process: Process) -> Mapping[tuple[Arm, str], dict[int, Answer]]:
    """Answers of a process by (configuration, block) and class; a repeated request counts last."""
    found: dict[tuple[Arm, str], dict[int, Answer]] = defaultdict(dict)
    for answer in process.answers:
        if answer.text is not None and answer.reading.turn_ms is not None:
            found[answer.arm, answer.block][answer.text] = answer
    return found


def is_timed(answer: Answer) -> bool:
    """Whether decoding was long enough to speak of its speed."""
    reading = answer.reading
    return (
        answer.purpose != WARM_UP
        and reading.step_ms is not None
        and (reading.predicted_n or 0) >= _LEAST_PREDICTED
    )


def is_prompt_timed(answer: Answer) -> bool:
    """Whether enough prompt was read to speak of its speed."""
    reading = answer.reading
    return (
        answer.purpose not in {WARM_UP, TOOL}
        and reading.prompt_ms is not None
        and (reading.prompt_n or 0) >= _LEAST_PROMPT
    )


def acceptance_of(samples: Iterable[Sample], arm: Arm, workload: Workload) -> float | None:
    """Share of an arm's drafts that were right in one round of the workload; None without any.

    Each class counts by its weight and its length, as it does in a turn.
    """
    per_token: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        reading, request = sample.reading, sample.request
        in_force = replace(sample.arm, n_max=sample.n_max, p_min=sample.p_min).canonical()
        if reading is None or request is None or in_force != arm.canonical():
            continue
        if request.new_tokens and (reading.predicted_n or 0) >= _LEAST_PREDICTED:
            n = float(reading.predicted_n or 1)
            per_token[request.kind].append((reading.n_drafted / n, reading.n_accepted / n))
    drafted = accepted = 0.0
    for one in workload.classes:
        weight, seen = one.weight * one.n_predict, per_token.get(one.kind)
        if seen is None:
            return None
        drafted += weight * fmean(each for each, _ in seen)
        accepted += weight * fmean(each for _, each in seen)
    return accepted / drafted if drafted else None


def decode_ms(answer: Answer, request_class: RequestClass) -> float:
    """Time in which the answer would have been as long as its class says."""
    reading = answer.reading
    taken = (reading.predicted_ms or 0.0) + reading.decode_left_ms
    if answer.request.n_predict == request_class.n_predict:
        return taken
    return taken * (request_class.n_predict - 1) / max(answer.request.n_predict - 1, 1)


def free_mib(reading: Reading) -> float | None:
    """VRAM that was free, less what lay outside of it [MiB]; None where nobody knows."""
    spilled = reading.spill_mib if reading.has_spilled else None
    return reading.vram_free_min_mib if spilled is None else -spilled


def _memory_rows(process: Process, context: int) -> list[laws.Free]:
    rows: list[laws.Free] = []

    def add(share: float, free_mib: float, *, failed: bool = False) -> None:
        rows.append(laws.Free(process.name, process.arm, min(share, 1.0), free_mib, failed))

    if process.failure == "oom":
        add(0.0, laws.OOM_FREE_MIB, failed=True)
        return rows
    if process.is_up and process.vram_free_mib is not None:
        is_none_left = process.vram_free_mib <= _NOTHING_FREE_MIB
        add(0.0, process.vram_free_mib, failed=is_none_left)
    told = [
        (answer.depth_end * answer.request.concurrency / context, free, answer.reading.has_spilled)
        for answer in process.answers
        if (free := free_mib(answer.reading)) is not None
    ]
    if told:
        share, free, has_spilled = max(reversed(told), key=lambda one: one[0])  # of equals the last
        is_none_left = free <= _NOTHING_FREE_MIB and not has_spilled
        add(share, _ALL_TAKEN_MIB if is_none_left else free, failed=is_none_left)
    if process.died_of == "oom":
        share = (process.died_at_tokens or context) / context
        add(share, laws.OOM_FREE_MIB, failed=True)
    return rows


Array = NDArray[np.float64]


def pool(answers: Iterable[Answer]) -> list[laws.Counts]:
    """Counts of answers that drafted alike, by class."""
    groups: dict[tuple[int, int, float], list[Reading]] = defaultdict(list)
    for answer in answers:
        if answer.text is not None and answer.arm.drafts and is_timed(answer):
            groups[answer.text, answer.arm.n_max, answer.arm.p_min].append(answer.reading)
    return [
        laws.Counts(
            text=text,
            n_max=n_max,
            p_min=p_min,
            n_prompts=len(readings),
            n_steps=float(sum(reading.n_steps or 0 for reading in readings)),
            drafted=float(sum(reading.n_drafted for reading in readings)),
            accepted=float(sum(reading.n_accepted for reading in readings)),
        )
        for (text, n_max, p_min), readings in groups.items()
    ]


@lru_cache(maxsize=4096)
def _by_position(steps: tuple[StepsSeen, ...]) -> Array:
    """How many steps drafted at least 1, 2, ... tokens."""
    drafted = np.zeros(max((row.n_drafted for row in steps), default=0))
    for row in steps:
        drafted[: row.n_drafted] += row.n_steps
    return drafted


def step_row(answer: Answer, acceptance: laws.Acceptance | None) -> laws.StepRow:
    """An answer's decoding, as the step law takes it."""
    reading, arm = answer.reading, answer.arm
    depth = answer.depth_start + (reading.prompt_n or 0) + (reading.predicted_n or 0) / 2
    drafted, refused, table = _drafting(answer, acceptance)
    return laws.StepRow(
        process=answer.process,
        ms=reading.step_ms or 0.0,
        n_steps=float(reading.n_steps or 1),
        drafted=drafted,
        refused=refused,
        depth_k=depth / 1000,
        n_max=arm.n_max if arm.drafts else 0,
        table=table,
        text=answer.text,
        is_alone=answer.request.concurrency == 1,
    )


def _drafting(
    answer: Answer, acceptance: laws.Acceptance | None
) -> tuple[Array, float, tuple[tuple[int, int, float], ...]]:
    """Share of steps by position drafted, share whose draft was cut short, and the steps by length."""
    reading, arm = answer.reading, answer.arm
    if not arm.drafts or not arm.n_max:
        return laws.spread_drafted(0.0), 0.0, ()
    if reading.steps:
        n_steps = sum(one.n_steps for one in reading.steps)
        cut = sum(one.n_steps for one in reading.steps if one.n_drafted < arm.n_max)
        table = tuple((one.n_drafted, one.n_steps, one.ms) for one in reading.steps)
        return laws.by_length(_by_position(reading.steps) / n_steps), cut / n_steps, table
    mean = reading.n_drafted / (reading.n_steps or 1)
    if acceptance is None:
        return laws.spread_drafted(mean), 0.0, ()
    drafts = acceptance.drafts(arm.n_max, arm.p_min).drafted
    rows = drafts if answer.text is None else drafts[answer.text : answer.text + 1]
    expected = rows.mean(axis=0)
    share = np.minimum(expected * mean / max(float(expected.sum()), 1e-6), 1.0)
    return laws.by_length(share), 1.0 - float(share[-1]), ()


def prompt_row(answer: Answer) -> laws.PromptRow:
    """An answer's prompt, as the prompt law takes it."""
    reading = answer.reading
    n_tokens = reading.prompt_n or 1
    return laws.PromptRow(
        process=answer.process,
        ms=max(reading.prompt_ms or 0.0, _LEAST_MS),
        n_tokens=n_tokens,
        ubatch=max(answer.arm.ubatch, 1),
        depth_k=(answer.depth_start + n_tokens / 2) / 1000,
        text=None if answer.is_stand_in else answer.text,
        is_alone=answer.request.concurrency == 1,
    )
