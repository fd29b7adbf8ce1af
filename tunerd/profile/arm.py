"""An arm: one configuration that a sweep may try, what was asked of it, and what came back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, WrapSerializer

from tunerd import records

OFF = "off"
DRAFT = "draft"
NGRAM = "ngram"
EXPERTS = "memory.n_cpu_moe"
LAYERS = "memory.n_gpu_layers"
DRAFT_MODEL = "speculation.draft_model"
# Where a model lies, in a profile's words. Like who drafts, this changes speed and memory, not the text.
PLACEMENT_KEYS = frozenset(
    {LAYERS, EXPERTS, "memory.cpu_moe", "memory.n_cpu_ffn", "memory.override_tensor"}
)
LEFT_TO_FIT = "default"
CONTEXT_SIZE = "serving.ctx_size"
SAME_TEXT_KEYS = PLACEMENT_KEYS | {
    CONTEXT_SIZE,
    DRAFT_MODEL,
    "memory.moe_cache_mib",
    "speculation.cpu_moe",
    "speculation.n_cpu_moe",
    "speculation.override_tensor",
}


def _hashable(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


# What a record may say, whoever wrote it; arms that are made here are not looked at again.
_Drafted = Annotated[int, Field(ge=0, le=64)]  # laws of far longer drafts are no numbers
_Size = Annotated[int, Field(ge=0, le=2**31 - 1)]
# In JSON in the same order each time: records of arms are compared.
Extra = Annotated[
    frozenset[tuple[str, Annotated[Any, BeforeValidator(_hashable)]]],
    WrapSerializer(lambda pairs, dump: sorted(dump(pairs), key=str)),
]


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration.

    Attributes:
        engine: Name of an installed build.
        spec: Kind of speculation: off, mtp, dflash, eagle3, ngram or draft.
        n_max: Tokens drafted at most; means nothing where spec is off.
        p_min: Confidence below which drafting stops, 0 to 1; means nothing where spec is off.
        fit_mib: Margin of VRAM that the engine's fit leaves free [MiB].
        kv: Type of K and V cache, the draft's too.
        ubatch: Tokens of one physical batch.
        batch: Tokens of one logical batch.
        threads: Threads of generation.
        extra: (key, value) pairs of other profile keys.
    """

    # A record with a key that is not known, as a newer tunerd's may have, is of another arm.
    __pydantic_config__ = ConfigDict(extra="forbid")

    engine: str
    spec: str
    n_max: _Drafted
    p_min: Annotated[float, Field(ge=0, le=1)]
    fit_mib: _Size
    kv: str
    ubatch: _Size
    batch: _Size
    threads: _Size
    extra: Extra = frozenset()

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return self.spec != OFF

    @property
    def family(self) -> tuple[str, str]:
        """Engine and kind of speculation: what a model of speculation holds for."""
        return self.engine, self.spec

    @property
    def placement(self) -> Extra:
        """What of `extra` places the model by hand; empty where the engine's fit does."""
        return placement_of(self.extra)

    @property
    def is_placed(self) -> bool:
        """Whether the model is placed by hand, so that a margin means nothing."""
        return bool(self.extra) and bool(self.placement)

    @property
    def wording(self) -> Extra:
        """What of `extra` may change what the model says."""
        return wording_of(self.extra)

    @property
    def n_cpu_moe(self) -> int | None:
        """Layers whose experts stay in RAM, where `extra` says so."""
        found = dict(self.placement).get(EXPERTS)
        return int(found) if found is not None else None

    @property
    def context_size(self) -> int:
        """The context that `extra` asks for [tok]; 0 where it names none, and all arms have the same."""
        return int(dict(self.extra).get(CONTEXT_SIZE, 0)) if self.extra else 0

    def canonical(self) -> Arm:
        """The same configuration without what means nothing; equal arms do the same."""
        kept = self if self.drafts else replace(self, n_max=0, p_min=0.0)
        return replace(kept, fit_mib=0) if kept.fit_mib and kept.is_placed else kept

    def with_draft(self, n_max: int, p_min: float) -> Arm:
        """This arm with other settings of speculation."""
        return replace(self, n_max=n_max, p_min=p_min)

    def with_margin(self, fit_mib: int) -> Arm:
        """This arm with another margin; one that is placed by hand has none."""
        return self if self.is_placed else replace(self, fit_mib=fit_mib)

    def __str__(self) -> str:
        speculation = (
            f"{self.spec} {self.n_max}/{self.p_min:g}" if self.drafts else "no speculation"
        )
        parts = [
            self.engine,
            speculation,
            *(() if self.is_placed else (f"margin {self.fit_mib}",)),
            f"kv {self.kv}",
            f"ub {self.ubatch}",
            f"b {self.batch}",
            f"t {self.threads}",
            *(f"{key}={value}" for key, value in sorted(self.extra, key=str)),
        ]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Best:
    """What laws predict to be fastest for the requests that are asked now, with its gain over what serves (ratio).

    `before` is what was predicted to be gained when the newest sweep ended.
    """

    serves: str
    arm: str
    gain: float
    before: float
    n_requests: int

    @property
    def has_moved(self) -> bool:
        """Whether more can be gained by now than a sweep left, by enough to look again."""
        return self.gain - max(self.before, 0.0) > _MOVED


_MOVED = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Builds:
    """The build that was deployed and the one that its program is now, by short hashes; None is not known.

    `kept` and `engine` are their names as engines, None where there is no copy, or no such engine;
    `compared` is what a comparison of the two came to, in that `run`.
    """

    identity_before: str | None = None
    identity_now: str | None = None
    kept: str | None = None
    engine: str | None = None
    compared: str | None = None
    run: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether they can be compared, and were not."""
        return self.kept is not None and self.engine is not None and self.compared is None


def placement_of(extra: Extra) -> Extra:
    """The pairs that place a model by hand."""
    return frozenset(
        (key, value) for key, value in extra if key in PLACEMENT_KEYS and value != LEFT_TO_FIT
    )


def wording_of(extra: Extra) -> Extra:
    """The pairs that may change what the model says."""
    return frozenset(pair for pair in extra if pair[0] not in SAME_TEXT_KEYS)


def shape_of(arm: Arm) -> Extra | None:
    """A placement but for how many layers' experts stay in RAM; None where the engine's fit places."""
    if not arm.is_placed:
        return None
    pairs = {(key, value) for key, value in arm.placement if key != EXPERTS}
    return frozenset({*pairs, (EXPERTS, arm.n_cpu_moe is not None)})


def simplicity(arm: Arm) -> tuple[int, int, int, int]:
    """Order of preference between equals, least first.

    Speculation off before on, fewer drafted tokens, a larger margin, a smaller batch.
    """
    canonical = arm.canonical()
    return int(canonical.drafts), canonical.n_max, -canonical.fit_mib, canonical.ubatch


_PREFIX_PREDICT = 2


class Refused(Exception):
    """The server does not take this request, or an override beyond what it was started with.

    `n_prompt_tokens` is how long its prompt is, where it is longer than the context.
    """

    def __init__(self, why: str = "", n_prompt_tokens: int | None = None) -> None:
        super().__init__(why)
        self.n_prompt_tokens = n_prompt_tokens


class ServerDied(Exception):
    """The server ended, or was given up, while it was measured; `kind` is oom, hang, crash, killed or error."""

    def __init__(self, kind: str = "crash") -> None:
        super().__init__(kind)
        self.kind = kind


class Preempted(Exception):
    """The user wants the machine: the sweep ends with what it has."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to measure.

    Attributes:
        kind: What the text is: code, chat, tool, summary, math or creative.
        prompt_id: Names the text: the same id is the same text.
        cached_tokens: Length of a prefix that all requests of a process share; sure to be found only
            where it was served bare just before [tok].
        new_tokens: Prompt tokens behind it, of this text alone; 0 serves the prefix bare [tok].
        n_predict: Tokens to generate [tok].
        concurrency: How many such requests run at once; timings are those of one.
        ignore_eos: Whether generation goes on to `n_predict` whatever the model says.
    """

    kind: str
    prompt_id: str
    cached_tokens: int
    new_tokens: int
    n_predict: int
    concurrency: int = 1
    ignore_eos: bool = True

    @property
    def is_warm(self) -> bool:
        """Whether it finds its prefix; what one slot holds is of no use to several requests at once."""
        return self.cached_tokens > 0 and self.concurrency == 1

    @property
    def bare(self) -> Request:
        """Its prefix alone, as it is served before it."""
        return replace(self, new_tokens=0, n_predict=_PREFIX_PREDICT)


@dataclass(frozen=True, slots=True)
class Boot:
    """How a start went: `failure` is oom, hang, crash, killed, error, refused or empty; `n_ctx` what one request may fill."""

    ok: bool
    seconds: float
    failure: str = ""
    vram_free_mib: int | None = None
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Values allowed for one engine with one kind of speculation.

    `extra` lists alternatives for the other profile keys, each a whole set of (key, value) pairs.
    """

    n_max: tuple[int, ...]
    p_min: tuple[float, ...]
    fit_mib: tuple[int, ...]
    kv: tuple[str, ...]
    ubatch: tuple[int, ...]
    batch: tuple[int, ...]
    threads: tuple[int, ...]
    extra: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried: families by (engine, spec); what is pinned is a range of one value.

    Raises:
        ValueError: something stands in `pinned`, which drivers of other searches may have.
    """

    families: Mapping[tuple[str, str], Family]
    pinned: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pinned:
            raise ValueError(f"{', '.join(self.pinned)}: what is pinned is a range of one value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What counts as a gain, and what must not be given for it.

    Attributes:
        min_gain: Least gain in turn time that is worth a swap (ratio).
        alpha: Chance of promoting an arm without that gain, over all nights of a generation.
        max_pairs: Pairs of one challenge at most.
        headroom_mib: Least VRAM that must stay free with the context full [MiB].
        max_prefill_loss: How much slower the prompt of the deepest class may get (ratio), where that is
            more than a tenth of the class's turn.
        max_class_loss: How much slower the turn of any class may get (ratio).
        may_change_output: Whether settings that can change what the model says (KV type, `extra`)
            may differ from the incumbent's at all; which of them, the space says by what it lists.
        tool_calls: Short tool calls that a winner must have got through.
        context_tokens: The context to fill, where neither space nor box tells [tok].
        seeds: Arms known from elsewhere, such as published settings; they are tried first.
        rejected: Arms that must not be recommended, with the reason, such as a failure in service.
        at_least_tok_s: The largest context that holds this speed is wanted, not the fastest arm; None for
            the latter [tok/s].
        n_slots: Requests among which a context is shared out.
    """

    min_gain: float = 0.01
    alpha: float = 0.05
    max_pairs: int = 40
    headroom_mib: int = 64
    max_prefill_loss: float = 0.5
    max_class_loss: float = 0.25
    may_change_output: bool = True
    tool_calls: int = 80
    context_tokens: int | None = None
    seeds: tuple[Arm, ...] = ()
    rejected: tuple[tuple[Arm, str], ...] = ()
    at_least_tok_s: float | None = None
    n_slots: int = 1


class Box(Protocol):
    """A machine on which arms can be started and measured, one at a time.

    `per_request` names the engines whose n_max and p_min can be given with a request. Where a box
    knows its full context, it may say so in an attribute `context_tokens`; where it knows how long a
    start takes before any was seen, in `expected_load_s`.
    """

    @property
    def per_request(self) -> Collection[str]:
        """Engines that take n_max and p_min with a request."""

    def restart(self, arm: Arm, /) -> Boot:
        """Starts a fresh process with exactly this arm; what comes back may be another object that reads like a Boot."""

    def measure(self, request: Request, /, arm: Arm | None = None) -> Mapping[str, Any]:
        """Asks once and returns llama-server's `timings` keys and what else was seen.

        `wall_ms`, `vram_free_min_mib`, for kind tool `tool_ok`, of an answer that ended by itself
        `decode_left_ms` that its length would have taken more, of one whose text was looked at `repeated_ratio`
        (`is_held` if it was not free to end), and where the build has them `steps`, `spill_mib`; `n_void` where it had to ask again, behind the
        bare prefix of a warm request.

        Raises:
            Refused: The override is beyond what the process was started with.
            ServerDied: The process is gone.
        """

    def now(self) -> float:
        """Seconds on the box's own clock."""

    def sleep(self, seconds: float, /) -> None:
        """Waits."""

    def check(self) -> None:
        """Called before every restart and request.

        Raises:
            Preempted: The user wants the machine.
        """


@dataclass(frozen=True, slots=True)
class StepsSeen:
    """Verification steps of one answer that drafted the same number of tokens.

    `ms` is their time in all.
    """

    n_drafted: int
    n_steps: int
    ms: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer; None is what the box did not say.

    `n_drafted` and `n_accepted` are 0 where nothing was drafted: llama-server then leaves the keys
    out. `n_void` is how often it was asked before in vain. `repeated_ratio` is the share of its text, at its end, that only
    repeats what it said, `is_held` whether it was made to go on to its length. `steps` are its verification steps, where the build
    tells each of them.
    """

    prompt_n: int | None
    prompt_ms: float | None
    cache_n: int | None
    predicted_n: int | None
    predicted_ms: float | None
    n_drafted: int
    n_accepted: int
    n_steps: int | None
    wall_ms: float | None
    decode_left_ms: float
    vram_free_min_mib: float | None
    spill_mib: float | None
    tool_ok: bool | None
    n_void: int
    steps: tuple[StepsSeen, ...] | None = None
    repeated_ratio: float | None = None
    is_held: bool = False

    @property
    def turn_ms(self) -> float | None:
        """Time of the request with an answer of the length that was asked for.

        By the client's clock, else the server's two phases.
        """
        if self.wall_ms is not None:
            return self.wall_ms + self.decode_left_ms
        if self.prompt_ms is None or self.predicted_ms is None:
            return None
        return self.prompt_ms + self.predicted_ms + self.decode_left_ms

    @property
    def step_ms(self) -> float | None:
        """Mean time of one verification pass."""
        if not self.n_steps or self.predicted_ms is None:
            return None
        return self.predicted_ms / self.n_steps

    @property
    def has_spilled(self) -> bool:
        """Whether the box says that memory lies outside the card."""
        return self.spill_mib is not None and self.spill_mib > 0


def read(answer: Mapping[str, Any]) -> Reading:
    """The reading of a box's answer; nonsense (NaN, negative) counts as not said."""
    predicted_n = _count(answer, "predicted_n")
    n_drafted = _count(answer, "draft_n") or 0
    n_accepted = min(_count(answer, "draft_n_accepted") or 0, n_drafted)
    seen = _steps_seen(answer.get(_BY_DRAFTED)) or _steps_seen(_by_drafted(answer.get(_STEPS)))
    steps = None
    if seen:
        steps = sum(one.n_steps for one in seen)
    elif predicted_n is not None and predicted_n - 1 > n_accepted:
        # Each step gives a token beside those accepted, the prompt the first. A last draft may be counted whole
        # although the answer ended within it.
        steps = predicted_n - 1 - n_accepted
    tool_ok = answer.get("tool_ok")
    return Reading(
        prompt_n=_count(answer, "prompt_n"),
        prompt_ms=_number(answer, "prompt_ms"),
        cache_n=_count(answer, "cache_n"),
        predicted_n=predicted_n,
        predicted_ms=_positive(answer, "predicted_ms"),
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        n_steps=steps,
        steps=seen,
        wall_ms=_positive(answer, "wall_ms"),
        decode_left_ms=_positive(answer, "decode_left_ms") or 0.0,
        vram_free_min_mib=_number(answer, "vram_free_min_mib", least=-math.inf),
        spill_mib=_number(answer, "spill_mib"),
        tool_ok=None if tool_ok is None else bool(tool_ok),
        n_void=_count(answer, "n_void") or 0,
        repeated_ratio=_number(answer, "repeated_ratio"),
        is_held=bool(answer.get("is_held")),
    )


def as_kept(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer without its single steps, which are added up by how many tokens they drafted."""
    kept = {key: value for key, value in answer.items() if key != _STEPS}
    table = _by_drafted(answer.get(_STEPS))
    return kept if table is None else {**kept, _BY_DRAFTED: table}


_STEPS, _BY_DRAFTED = "steps", "by_drafted"
_MOST_DRAFTED = 64
_ENDLESS_MS = 1e12


def _by_drafted(steps: Any) -> list[list[Any]] | None:
    """[drafted, steps, ms, [accepted at least 1, 2, ...]] of steps given as (ms, drafted, accepted)."""
    found: dict[int, list[Any]] = {}
    for step in steps if isinstance(steps, (list, tuple)) else ():
        if not isinstance(step, (list, tuple)) or len(step) != _STEP_PARTS:
            return None
        if not all(isinstance(part, Real) for part in step):
            return None
        ms, drafted, accepted = step
        # Compared as they are: a whole number may be too large for a float.
        if not (0 <= ms < _ENDLESS_MS and 0 <= accepted <= drafted <= _MOST_DRAFTED):
            return None
        row = found.setdefault(int(drafted), [int(drafted), 0, 0.0, [0] * int(drafted)])
        row[1] += 1
        row[2] = round(row[2] + float(ms), 3)
        for position in range(int(accepted)):
            row[3][position] += 1
    return [found[drafted] for drafted in sorted(found)] or None


_STEP_PARTS = 3


def _steps_seen(table: Any) -> tuple[StepsSeen, ...] | None:
    """Of the table that `as_kept` made; None where there is none."""
    if not isinstance(table, (list, tuple)):
        return None
    return tuple(
        StepsSeen(int(drafted), int(n_steps), float(ms)) for drafted, n_steps, ms, _ in table
    )


def _number(answer: Mapping[str, Any], key: str, least: float = 0.0) -> float | None:
    value = answer.get(key)
    if value is None or isinstance(value, str):
        return None
    number = float(value)
    return number if math.isfinite(number) and number >= least else None


def _positive(answer: Mapping[str, Any], key: str) -> float | None:
    return _number(answer, key) or None


def _count(answer: Mapping[str, Any], key: str) -> int | None:
    number = _number(answer, key)
    return None if number is None else round(number)


BOOT = "boot"
REQUEST = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One start or one request.

    Attributes:
        event: "boot" or "request".
        process: Name of the server's life; a boot opens it.
        arm: What the process was started with.
        purpose: What it was for: warm-up, prefix, block, fill, tool, ...
        at_s: End of it on the box's clock [s].
        seconds: How long it took [s].
        failure: oom, hang, crash, killed, error, refused, or empty.
        vram_free_mib: After a boot.
        n_ctx: What one request may fill, after a boot [tok].
        request: What was asked; None of a boot.
        n_max: In force for this request.
        p_min: In force for this request.
        block: Name of the block of prompts that the request belongs to.
        answer: What the box returned.
        pair: Of a verdict: (challenge, pair), both from 1; None elsewhere.
        is_earlier: Of a sweep before this one, whose decisions were acted on.
    """

    event: str
    process: str
    arm: Arm
    purpose: str
    at_s: float
    seconds: float
    failure: str = ""
    vram_free_mib: float | None = None
    n_ctx: int | None = None
    request: Request | None = None
    n_max: int = 0
    p_min: float = 0.0
    block: str = ""
    answer: Mapping[str, Any] | None = None
    pair: tuple[int, int] | None = None
    is_earlier: bool = False

    @property
    def reading(self) -> Reading | None:
        """The answer with names and units."""
        return None if self.answer is None else read(self.answer)

    def to_json(self) -> dict[str, Any]:
        """JSON values only, which `as_samples` takes back; for who sweeps a box of their own (docs/sweep.md)."""
        kept: dict[str, Any] = records.plain(self)
        return kept


def as_samples(history: Iterable[Sample | Mapping[str, Any]]) -> tuple[Sample, ...]:
    """Samples, or the records of them."""
    return tuple(one if isinstance(one, Sample) else records.read(Sample, one) for one in history)
