"""What a bench came to: the figures of every case, and what each suite is asked for besides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tunerd.measure.answer import Answer, Mark, Sample, spread, summarise
from tunerd.measure.evidence import (
    USUAL_LEVEL,
    AcceptanceByPosition,
    Crossover,
    SummaryRecord,
    TurnTime,
    number,
)
from tunerd.measure.request import (
    CHANGED_TAIL,
    COLD,
    IDENTICAL,
    MTP_KINDS,
    PROSE,
    SHORT,
    TOOLS,
    Plan,
    Suite,
)
from tunerd.profile.schema import Published
from tunerd.profile.workload import Rates, WorkloadShape
from tunerd.words import all_known

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The table of the community's mtp-bench, and how this box stands beside published ones.


def mtp_table(samples: Sequence[Sample]) -> dict[str, Any]:
    """One arm's samples of all kinds together, as scripts read it; the warm-up is none of them.

    `tok_s` is all tokens over all time, `mean_tok_s` the mean over the kinds, which published tables
    often have instead. `wall_s` is that of one round through all kinds. `missing` are the kinds of
    which no request counts, so that nothing here is over all of them. A figure that no request has is None.
    """
    by_kind = {kind: _of_case(samples, kind) for kind in MTP_KINDS}
    measured = [s for found in by_kind.values() for s in found]
    whole = summarise(measured)
    usable = (one.n_predicted for one in measured if one.is_usable)
    n_predicted = [n for n in usable if n is not None]
    speeds = all_known(summarise(found).decode.tok_s for found in by_kind.values() if found)
    return {
        "n_requests": whole.n,
        "predicted": sum(n_predicted) if n_predicted else None,
        "drafted": whole.n_drafted,
        "accepted": whole.n_accepted,
        "acceptance_ratio": whole.acceptance_ratio,
        "tok_s": whole.decode.tok_s,
        "mean_tok_s": statistics.mean(speeds) if speeds else None,
        "wall_s": _wall_s(by_kind),
        "missing": missing_kinds(measured),
        "joules_per_token": whole.joules_per_token,
    }


def missing_kinds(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The kinds of which no request counts."""
    known = {one.case for one in samples if one.is_usable}
    return tuple(kind for kind in MTP_KINDS if kind not in known)


def _wall_s(by_kind: Mapping[str, Sequence[Sample]]) -> float | None:
    """One round through all kinds; None where one of them has no usable request."""
    walls = [
        [one.client.wall_ms for one in samples if one.is_usable and one.client is not None]
        for samples in by_kind.values()
    ]
    return sum(map(statistics.mean, walls)) / 1000 if all(walls) else None


_Figure = tuple[str, float | None, float | None, str]
# A figure for some depth is held against what was asked this near to it.
_SAME_DEPTH_RATIO = 0.25


def beside_published(
    suite: Suite, samples: Sequence[Sample], published: Published, family: str | None
) -> list[dict[str, Any]]:
    """The figures of an arm that the published table has, for this family of engines, as scripts read them.

    `ratio` is this box over published, None where a figure is missing.
    """
    if suite is Suite.MTP:
        found = _mtp_figures(samples, published, family or "")
    elif suite is Suite.DEEP:
        found = _depth_figures(samples, published)
    else:
        found = _length_figures(samples, published)
    return [
        {"what": what, "here": here, "published": there, "unit": unit,
         "ratio": None if here is None or not there else here / there}
        for what, here, there, unit in found
        if there is not None
    ]  # fmt: skip


def _mtp_figures(samples: Sequence[Sample], published: Published, family: str) -> Iterator[_Figure]:
    table = mtp_table(samples)
    engine = (published.by_engine or {}).get(family, {})
    yield "tok/s", table["tok_s"], engine.get("tok_s", published.tok_s), "tok/s"
    ratio = engine.get("acceptance_ratio", published.acceptance_ratio)
    yield "acceptance", table["acceptance_ratio"], ratio, ""
    yield "wall of one round", table["wall_s"], engine.get("wall_s", published.wall_s), "s"
    kinds = (published.by_kind or {}).get(family, {})
    for kind, there in kinds.items():
        asked = _of_case(samples, kind)
        if asked:
            here = summarise(asked)
            yield f"{kind}, tok/s", here.decode.tok_s, there.get("tok_s"), "tok/s"
            yield f"{kind}, rate", here.acceptance_ratio, there.get("rate"), ""


def _length_figures(samples: Sequence[Sample], published: Published) -> Iterator[_Figure]:
    """Of answers behind prompts as long as the published ones."""
    wanted = published.prefill_tokens
    near = samples if wanted is None else [s for s in samples if _is_near(s, wanted)]
    for name, there in (published.by_length or {}).items():
        asked = [one for one in near if one.n_predict == int(name)]
        if asked:
            here = summarise(asked)
            yield f"{name} tokens, tok/s", here.decode.tok_s, there.get("tok_s"), "tok/s"
            yield f"{name} tokens, wall", here.wall_ms.median, there.get("wall_ms"), "ms"


def _depth_figures(samples: Sequence[Sample], published: Published) -> Iterator[_Figure]:
    """Of a published range its middle, with the range."""
    for name, there in (published.by_depth or {}).items():
        wanted = int(name)
        near = [one for one in samples if _is_near(one, wanted)]
        if not near:
            continue
        here = summarise(near)
        for key, what, value, unit in (("tok_s", "tok/s", here.decode.tok_s, "tok/s"),
                                       ("acceptance_ratio", "acceptance", here.acceptance_ratio, "")):  # fmt: skip
            ends = [there[one] for one in (f"{key}_min", f"{key}_max") if one in there]
            span = f" ({ends[0]:g} to {ends[-1]:g})" if ends else ""
            middle = there.get(key, sum(ends) / len(ends) if ends else None)
            yield f"{wanted} tokens deep, {what}{span}", value, middle, unit


def _is_near(sample: Sample, wanted: int) -> bool:
    """Whether about so much was in its context."""
    depth = number(sample.details, "depth")
    return depth is not None and abs(depth - wanted) <= _SAME_DEPTH_RATIO * wanted


# How far the context can be filled: where it spills out of VRAM, and where memory runs out.

# A token takes longer the deeper the context is, in a straight line. This much more than that line is
# another cause.
_SLOW_RATIO = 1.4
# VRAM is pinned to its end where less than this is left.
_PINNED_MIB = 256
_ABOVE_PLAN_MIB = 64
_LEAST_POINTS = 2


@dataclass(frozen=True, slots=True)
class Depth:
    """What the deep suite came to.

    `filled_tokens` is the deepest context that was answered, `spill_tokens` the depth from which VRAM
    spills, `failed_tokens` the depth that was not answered; each None where there is none. `why` says
    what showed it.
    """

    filled_tokens: float | None
    spill_tokens: float | None
    failed_tokens: float | None
    least_free_mib: int | None
    why: str

    NAME = "depth"


def judge_depth(samples: Sequence[Sample], *, planned_free_mib: int | None = None) -> Depth:
    """Where filling the context goes wrong, from the samples of one arm in their order.

    Args:
        samples: The samples of the suite, shallow first.
        planned_free_mib: VRAM that the estimate leaves free with a full context; None if unknown.
    """
    rows = ((number(one.details, "depth"), one) for one in samples if one.is_usable)
    good = [(depth, one) for depth, one in rows if depth is not None]
    failed = next((s for s in samples if s.problem is not None), None)
    free = [s.vram_free_min_mib for _, s in good if s.vram_free_min_mib is not None]
    spill, why = _spill(good, planned_free_mib)
    return Depth(
        filled_tokens=max((depth for depth, _ in good), default=None),
        spill_tokens=spill,
        failed_tokens=None if failed is None else number(failed.details, "wanted_depth"),
        least_free_mib=min(free, default=None),
        why=why if failed is None else failed.problem or why,
    )


def _spill(
    good: Sequence[tuple[float, Sample]], planned_free_mib: int | None
) -> tuple[float | None, str]:
    points: list[tuple[float, float]] = []
    for depth, sample in good:
        free, timings = sample.vram_free_min_mib, sample.timings
        # Of a verification pass: it does not move with the luck of the drafts.
        token_ms = None if timings is None else timings.step_ms
        more_mib = 0 if free is None or planned_free_mib is None else planned_free_mib - free
        if more_mib > _ABOVE_PLAN_MIB:
            return depth, f"{more_mib} MiB more VRAM in use than planned"
        if token_ms is None:
            continue
        expected = _line_at(points, depth)
        is_pinned = free is not None and free < _PINNED_MIB
        if expected is not None and is_pinned and token_ms > _SLOW_RATIO * expected:
            drop = 1 - expected / token_ms
            return depth, f"{drop:.0%} slower than the depths before, with {free} MiB of VRAM free"
        points.append((depth, token_ms))
    return None, "no sign of a spill" if good else "nothing was answered"


def _line_at(points: Sequence[tuple[float, float]], depth: float) -> float | None:
    """What the depths before let expect: their straight line, never falling."""
    if len(points) < _LEAST_POINTS:
        return None
    depths, times = zip(*points, strict=True)
    is_one = len(set(depths)) == 1
    slope = 0.0 if is_one else statistics.linear_regression(depths, times).slope
    return statistics.fmean(times) + max(slope, 0.0) * (depth - statistics.fmean(depths))


# Whether a server finds again what it has read before.

# Builds read the last few tokens again, and recurrent models go back to a checkpoint before them.
_REUSED_RATIO = 0.9
_SOME_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Reuse:
    """What one case of the cache suite came to.

    `reused_ratio` is the share of the prompt that was not read again, `prompt_ratio` the time for the
    prompt over that of a cold one. `works` is True, False (nothing was found), or None where the server
    does not say or only a part was found; `text` is for people.
    """

    case: str
    works: bool | None
    reused_ratio: float | None
    prompt_ratio: float | None
    text: str

    NAME = "reuse"


def judge_reuse(samples: Sequence[Sample]) -> tuple[Reuse, ...]:
    """For each warm case whether the prefix was found, from the samples of one arm."""
    cold_ms = _median([_prompt_ms(s) for s in _of(samples, COLD)])
    return tuple(_judge(case, _of(samples, case), cold_ms) for case in (IDENTICAL, CHANGED_TAIL))


def _judge(case: str, samples: Sequence[Sample], cold_ms: float | None) -> Reuse:
    ratio = _median([_reused(sample) for sample in samples])
    warm_ms = _median([_prompt_ms(sample) for sample in samples])
    time_ratio = warm_ms / cold_ms if warm_ms is not None and cold_ms else None
    if ratio is None:
        return Reuse(case, None, None, time_ratio, "the server does not say what it reused")
    # A changed tail can be found but for that tail.
    shared = [number(one.details, "shared_ratio") or 1.0 for one in samples]
    wanted = _REUSED_RATIO * (1.0 if case == IDENTICAL else min(shared))
    if ratio >= wanted:
        return Reuse(case, True, ratio, time_ratio, f"works: {ratio:.0%} of the prompt is reused")
    if ratio <= _SOME_RATIO:
        text = "does not work: the whole prompt is read again"
        return Reuse(case, False, ratio, time_ratio, text)
    return Reuse(case, None, ratio, time_ratio, f"works in part: {ratio:.0%} is reused")


def _reused(sample: Sample) -> float | None:
    cached, timings = sample.n_cached, sample.timings
    if cached is None:
        return None
    if timings is not None and timings.prompt_n is not None:
        whole: object = cached + timings.prompt_n
    else:
        # The `usage` of other servers counts the cached part with the prompt.
        whole = sample.details.get("usage_prompt_n")
    return cached / whole if isinstance(whole, int) and whole >= max(cached, 1) else None


def _prompt_ms(sample: Sample) -> float | None:
    """Time for the prompt; up to the first token where the server says nothing of it."""
    if sample.timings is not None:
        return sample.timings.prompt_ms
    return sample.client.ttft_ms if sample.client is not None else None


def _of(samples: Sequence[Sample], case: str) -> list[Sample]:
    return [sample for sample in _of_case(samples, case) if sample.is_usable]


# The turns of a workload in seconds: the client's wall, and what it is made of.


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a turn; `waiting_s` is None where it cannot be told from the prompt."""

    whole_s: float
    prefill_s: float
    generation_s: float
    waiting_s: float | None = None


def turn_times(arm: str, samples: Sequence[Sample], shape: WorkloadShape) -> list[TurnTime]:
    """A turn of each class by the client's wall, and of the mix where every class was measured.

    The server's times only split the wall: what is left of it was spent waiting, for a slot or for
    the machine. Of a server without times the wall is split at the first token, so that waiting is
    part of the prompt. Thoughts that nobody can tell from the answer are part of it, and are unknown
    themselves.
    """
    found = [
        _parts([s for s in samples if s.details.get("class") == number])
        for number in range(len(shape.classes))
    ]
    return turns_of(arm, shape, found)


def turns_at(shape: WorkloadShape, rates: Rates) -> list[TurnTime]:
    """A turn of each class at these rates, and of the mix; nothing of them is known without both."""
    if not rates.prompt_tok_s or not rates.decode_tok_s:
        return turns_of("", shape, [None] * len(shape.classes))
    found = []
    for one in shape.plain().classes:
        prefill_s = one.new_tokens / rates.prompt_tok_s
        generation_s = one.n_predict / rates.decode_tok_s
        found.append(Parts(prefill_s + generation_s, prefill_s, generation_s))
    return turns_of("", shape, found)


def turns_of(arm: str, shape: WorkloadShape, found: Sequence[Parts | None]) -> list[TurnTime]:
    """A turn of each class, and of the mix; thoughts are told by their share where that is known."""
    turns = [
        _turn(arm, one.name, parts, one.reasoning_share, share)
        for one, parts, share in zip(shape.classes, found, shape.shares, strict=True)
    ]
    return [*turns, _mix(arm, turns)]


def _turn(
    arm: str, name: str, parts: Parts | None, thoughts: float | None, weight: float
) -> TurnTime:
    if parts is None:
        return TurnTime(arm, name, None, None, None, weight)
    return TurnTime(
        arm=arm,
        request_class=name,
        prefill_s=parts.prefill_s,
        reasoning_s=None if thoughts is None else thoughts * parts.generation_s,
        decode_s=(1 - (thoughts or 0.0)) * parts.generation_s,
        weight=weight,
        waiting_s=parts.waiting_s,
        whole_s=parts.whole_s,
    )


def _mix(arm: str, turns: Sequence[TurnTime]) -> TurnTime:
    """The expected turn of all classes; thoughts count as part of the answer where any class hides them."""
    reasoning, generation = _expected(turns, "reasoning_s"), _expected(turns, "decode_s")
    if reasoning is None and generation is not None:
        generation += sum((one.weight or 0.0) * (one.reasoning_s or 0.0) for one in turns)
    others = {name: _expected(turns, name) for name in ("prefill_s", "waiting_s", "whole_s")}
    return TurnTime(arm, None, reasoning_s=reasoning, decode_s=generation, **others)


def _expected(turns: Sequence[TurnTime], name: str) -> float | None:
    known = all_known(getattr(one, name) for one in turns)
    if not known:
        return None
    return sum((one.weight or 0.0) * float(value) for one, value in zip(turns, known, strict=True))


def _parts(samples: Sequence[Sample]) -> Parts | None:
    usable = [one for one in samples if one.is_usable]
    for split in (_by_server, _by_client):
        known = all_known(split(one) for one in usable)
        if known:
            waiting = all_known(one.waiting_s for one in known)
            return Parts(
                statistics.fmean(one.whole_s for one in known),
                statistics.fmean(one.prefill_s for one in known),
                statistics.fmean(one.generation_s for one in known),
                statistics.fmean(waiting) if waiting else None,
            )
    return None


def _by_server(sample: Sample) -> Parts | None:
    client, timings, left_ms = sample.client, sample.timings, sample.decode_left_ms
    if client is None or timings is None or left_ms is None:
        return None
    if timings.prompt_ms is None or timings.predicted_ms is None:
        return None
    # Both clocks have a resolution: the parts must not come to more than the whole.
    prefill_ms = min(timings.prompt_ms, client.wall_ms)
    generation_ms = min(timings.predicted_ms, client.wall_ms - prefill_ms)
    waiting_ms = client.wall_ms - prefill_ms - generation_ms
    generation_ms += left_ms
    whole_ms = prefill_ms + generation_ms + waiting_ms
    return Parts(whole_ms / 1000, prefill_ms / 1000, generation_ms / 1000, waiting_ms / 1000)


def _by_client(sample: Sample) -> Parts | None:
    client, left_ms = sample.client, sample.decode_left_ms
    if client is None or client.ttft_ms is None or left_ms is None:
        return None
    generation_ms = max(client.wall_ms - client.ttft_ms, 0.0) + left_ms
    whole_ms = client.wall_ms + left_ms
    return Parts(whole_ms / 1000, client.ttft_ms / 1000, generation_ms / 1000, None)


# The gate for whatever may change what a server says: the answers of two arms to the same questions.

# Longer texts are compared by their beginning: the distance takes time by the product of the lengths.
_MOST_LETTERS = 20_000


@dataclass(frozen=True, slots=True)
class Question:
    """One question with the answers of both arms; an answer is None where there was none.

    `is_paired` is False where both arms answered, but never the same text: nothing is compared then.
    """

    case: str
    reference: Answer | None
    candidate: Answer | None
    is_paired: bool = True


# By the id of its text, what was answered to a question; one that was repeated has several texts.
Replies = Mapping[str, Answer | None]


def pair(case: str, reference: Replies, candidate: Replies) -> Question:
    """The answers of both arms to the same text of a question, the first one that both answered."""
    for name, one in reference.items():
        other = candidate.get(name)
        if one is not None and other is not None:
            return Question(case, one, other)
    one, other = (next((a for a in texts.values() if a is not None), None)
                  for texts in (reference, candidate))  # fmt: skip
    if one is not None and other is not None:
        return Question(case, None, None, is_paired=False)
    return Question(case, one, other)


@dataclass(frozen=True, slots=True)
class CaseQuality:
    """What a case came to.

    `n_left_out` questions were answered by both, but as different texts. `n_same` of `n` answers were
    the same in what counts for the case. Of `n_missing` questions without a pair of answers, the
    reference answered `n_lost`. Of tool calls, `n_called` answers of the reference have one at all, and
    `n_valid` of the candidate have only JSON objects as arguments; of short answers, `n_silent` have no
    text on either side. `drift_letters` is the median Levenshtein distance of the texts, `drift_ratio`
    the same over their length. Lengths of reasoning are medians in letters.
    """

    case: str
    n: int
    n_missing: int
    n_lost: int
    n_left_out: int
    n_same: int
    n_called: int | None
    n_valid: int | None
    n_silent: int | None
    drift_letters: float | None
    drift_ratio: float | None
    reasoning_letters: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Quality:
    """The gate's answer: `passes` is None where it could not be judged; `reasons` say why not."""

    passes: bool | None
    reasons: tuple[str, ...]
    cases: tuple[CaseQuality, ...]

    NAME = "quality"

    def to_record(self, arm: str, reference: str) -> SummaryRecord:
        """As it is kept; `reference` is the arm whose answers those of `arm` were held against."""
        return SummaryRecord("quality", self.NAME, arm, {"reference": reference, **asdict(self)})


def judge_quality(asked: Sequence[Question]) -> Quality:
    """Whether the candidate says the same where it must.

    Tool calls must have the same functions with the same argument keys, all of them valid JSON; short
    answers must be identical. Prose may drift: exact decoding at temperature 0 still differs where two
    tokens are equally likely, since batches of another size round otherwise.
    """
    cases = tuple(_case(name, [one for one in asked if one.case == name])
                  for name in (TOOLS, SHORT, PROSE)
                  if any(one.case == name for one in asked))  # fmt: skip
    if not any(one.n for one in cases):
        return Quality(None, ("nothing could be compared",), cases)
    reasons = [reason for one in cases for reason in _against(one)]
    if reasons:
        return Quality(False, tuple(reasons), cases)
    unknown = [reason for one in cases for reason in _unjudged(one)]
    return Quality(None if unknown else True, tuple(unknown), cases)


def _case(name: str, asked: Sequence[Question]) -> CaseQuality:
    pairs = [(one.reference, one.candidate) for one in asked if one.is_paired]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    drifts = [drift(a.text, b.text) for a, b in both]
    longest = [max(len(a.text), len(b.text), 1) for a, b in both]
    ratios = [letters / most for letters, most in zip(drifts, longest, strict=True)]
    is_tools = name == TOOLS
    told = _calls if is_tools else _text
    return CaseQuality(
        case=name,
        n=len(both),
        n_missing=len(pairs) - len(both),
        n_lost=sum(a is not None and b is None for a, b in pairs),
        n_left_out=len(asked) - len(pairs),
        n_same=sum(told(a) == told(b) for a, b in both),
        n_called=sum(bool(a.tool_calls) for a, _ in both) if is_tools else None,
        n_valid=sum(all(name and keys is not None for name, keys in _calls(b)) for _, b in both)
        if is_tools
        else None,
        n_silent=sum(not (a.text + b.text).strip() for a, b in both) if name == SHORT else None,
        drift_letters=_median(drifts),
        drift_ratio=_median(ratios),
        reasoning_letters=(
            _median([len(a.reasoning) for a, _ in both]),
            _median([len(b.reasoning) for _, b in both]),
        ),
    )


def _against(one: CaseQuality) -> Iterator[str]:
    if one.n_lost:
        yield f"{one.case}: {one.n_lost} of {one.n + one.n_missing} were not answered"
    if one.case in {TOOLS, SHORT} and one.n_same < one.n:
        yield f"{one.case}: {one.n - one.n_same} of {one.n} differ"
    if one.n_valid is not None and one.n_valid < one.n:
        yield f"{one.case}: {one.n - one.n_valid} of {one.n} have arguments that are not JSON"


def _unjudged(one: CaseQuality) -> Iterator[str]:
    """What speaks neither for nor against: a gate that saw no call says nothing of calls."""
    if not one.n:
        yield f"{one.case}: no question was answered by both"
    elif one.n_silent == one.n:
        yield f"{one.case}: no answer has a text, so they could not be judged"
    elif one.n_missing:
        yield f"{one.case}: the reference had no answer to {one.n_missing} of them"
    elif one.n_called == 0:
        yield f"{one.case}: none was made, so they could not be judged"


def drift(one: str, other: str) -> int:
    """Letters to change, add or remove to make one text of the other."""
    from rapidfuzz.distance import Levenshtein

    return int(Levenshtein.distance(one[:_MOST_LETTERS], other[:_MOST_LETTERS]))


def _calls(answer: Answer) -> list[tuple[str, set[str] | None]]:
    """The functions that it calls, in their order, with the keys of their arguments."""
    return [(call.name, None if call.fields is None else set(call.fields))
            for call in answer.tool_calls]  # fmt: skip


def _text(answer: Answer) -> str:
    return answer.text.strip()


def _median(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = all_known(values)
    return float(statistics.median(known)) if known else None


# What a bench came to: the figures of every case, and what each suite is asked for besides.

# The arm of what serves now, against which a profile that may answer otherwise is held.
SERVING = "what serves"
_PAIR = 2


@dataclass
class ArmData:
    """What was measured of one arm.

    `answers` are by number of the step and id of the text, of repeated steps with every text. `accepted` counts drafts by
    position over `n_steps` verification passes, from the server's own counters.
    """

    name: str
    samples: list[Sample] = field(default_factory=list)
    answers: dict[int, dict[str, Answer | None]] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    n_steps: int = 0
    traffic_seen: bool = True
    planned_free_mib: int | None = None

    @property
    def by_position(self) -> tuple[float, ...] | None:
        """The share of verification passes in which each position of a draft was accepted."""
        if not self.n_steps or not self.accepted:
            return None
        return tuple(count / self.n_steps for count in self.accepted)


def figures(measured: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """The figures of each arm and case, in the order of first appearance; what only prepared others is no case."""
    rows = []
    for arm, asked in measured.items():
        for suite, case in dict.fromkeys((sample.suite, sample.case) for sample in asked):
            samples = [one for one in _of_case(asked, case) if one.suite == suite]
            if not any(one.problem or Mark.WARM_UP not in one.marks for one in samples):
                continue
            silent = (s for s in samples if s.is_usable and s.timings is None)
            rates = spread(one.client_tok_s for one in silent if one.client_tok_s)
            rows.append({"arm": arm, "suite": suite, "case": case,
                         **asdict(summarise(samples)),
                         "client_tok_s": asdict(rates) if rates.n else None})  # fmt: skip
    return rows


def _of_case(samples: Sequence[Sample], case: str) -> list[Sample]:
    return [sample for sample in samples if sample.case == case]


def findings(
    plan: Plan, arms: Sequence[ArmData], shape: WorkloadShape | None = None
) -> list[SummaryRecord]:
    """What a suite is asked for besides, as it is kept."""
    suite, found = str(plan.suite), list[SummaryRecord]()
    if plan.suite is Suite.LENGTHS and len(arms) == _PAIR:
        first, second = arms
        crossing = find_crossover(first, second, seed=plan.seed)
        found += [] if crossing is None else [crossing.to_record(suite)]
    elif plan.suite is Suite.QUALITY:
        # The first arm against each of the others.
        for other in arms[1:]:
            judged = _judged(plan, arms[0], other, is_exact=other.name != SERVING)
            found.append(judged.to_record(arms[0].name, other.name))
    for arm in arms:
        if plan.suite is Suite.CACHE:
            found += [SummaryRecord(suite, Reuse.NAME, arm.name, asdict(one))
                      for one in judge_reuse(arm.samples)]  # fmt: skip
        elif plan.suite is Suite.DEEP:
            depth = judge_depth(arm.samples, planned_free_mib=arm.planned_free_mib)
            found.append(SummaryRecord(suite, Depth.NAME, arm.name, asdict(depth)))
        elif plan.suite is Suite.WORKLOAD and shape is not None:
            found += [one.to_record(suite) for one in turn_times(arm.name, arm.samples, shape)]
    positions = [AcceptanceByPosition(one.name, one.by_position) for one in arms if one.by_position]
    return [*found, *(one.to_record(suite) for one in positions)]


def _judged(plan: Plan, candidate: ArmData, reference: ArmData, *, is_exact: bool) -> Quality:
    """Speculation must not change what is exact, so it is judged at temperature 0 alone."""
    asked = []
    for at, step in enumerate(plan.steps):
        request = step.requests[0]
        if is_exact and request.has_own_sampling:
            continue
        one, other = (arm.answers.get(at, {}) for arm in (reference, candidate))
        asked.append(pair(request.case, one, other))
    return judge_quality(asked)


_DRAWS = 20_000
_LEAST = 2

Floats: TypeAlias = "npt.NDArray[np.float64]"


def _costs(samples: Sequence[Sample]) -> Floats | None:
    """By usable sample, what prompt and each further token took [ms], and how many of those there were.

    None below two samples that have both figures.
    """
    import numpy as np

    rows = [row for sample in samples if (row := _cost_row(sample)) is not None]
    return np.array(rows, dtype=np.float64) if len(rows) >= _LEAST else None


def _cost_row(sample: Sample) -> tuple[float, float, int] | None:
    timings = sample.timings
    if not sample.is_usable or timings is None or not timings.prompt_ms:
        return None
    if timings.predicted_ms is None or timings.predicted_n is None or timings.predicted_n < _LEAST:
        return None
    n = timings.predicted_n - 1
    return timings.prompt_ms, timings.predicted_ms / n, n


def find_crossover(arm: ArmData, than: ArmData, *, seed: int) -> Crossover | None:
    """From which length on an arm is faster, with its interval; None where a figure is missing.

    The interval is of these two server lives: what another start of the same arms would differ by is
    not in it. It comes from the t distributions of tax and gain (the generalised confidence
    interval of a ratio), so that "never" and "always" have their share of it.

    Args:
        arm: The one that pays a tax to gain on each token.
        than: The other.
        seed: Of the draws.
    """
    import numpy as np

    mine, theirs = _costs(arm.samples), _costs(than.samples)
    if mine is None or theirs is None:
        return None
    rng = np.random.default_rng(seed)
    # Of a token's time a request weighs as many tokens as it has.
    taxes = [_mean_and_draws(rng, one[:, 0], np.ones(len(one))) for one in (mine, theirs)]
    times = [_mean_and_draws(rng, one[:, 1], one[:, 2]) for one in (theirs, mine)]
    lengths = _crossings(taxes[0][1] - taxes[1][1], times[0][1] - times[1][1])
    best = float(_crossings(taxes[0][0] - taxes[1][0], times[0][0] - times[1][0]))
    edge = (1 - USUAL_LEVEL) / 2
    low, high = (float(np.quantile(lengths, at, method="nearest")) for at in (edge, 1 - edge))
    n_tokens, least, most = (one if np.isfinite(one) else None for one in (best, low, high))
    return Crossover(arm.name, than.name, n_tokens, least, most)


def _mean_and_draws(
    rng: np.random.Generator, values: Floats, weights: Floats
) -> tuple[Floats, Floats]:
    """The weighted mean of these, and where it may lie."""
    import numpy as np

    shares = weights / weights.sum()
    mean = np.sum(shares * values)
    # Variance of a weighted mean from its residuals, with the usual correction for small counts.
    n = len(values)
    error = np.sqrt(np.sum(shares**2 * (values - mean) ** 2) * n / (n - 1))
    return mean, mean + error * rng.standard_t(n - 1, _DRAWS)


def _crossings(tax: Floats, gain: Floats) -> Floats:
    import numpy as np

    found: Floats = np.where(gain > 0, 1 + np.maximum(tax, 0) / np.where(gain > 0, gain, 1), np.inf)
    found = np.where((tax <= 0) & (gain > 0), 0.0, found)
    return np.where((tax < 0) & (gain <= 0), 0.0, found)
