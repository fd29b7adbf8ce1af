"""A workload as people describe it: classes of requests with distributions of their lengths.

What is measured and searched with is its plain form, `profile.workload`, made by `WorkloadShape.plain`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Final, Literal

import tomlkit
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
)

from tunerd.words import digest, of_form


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One kind of request in the mix.

    Attributes:
        weight: Its share; weights need not add up to 1.
        kind: What the text is: code, chat, tool, summary, math or creative.
        cached_tokens: Prompt tokens that the server still holds from the turn before [tok].
        new_tokens: Prompt tokens that it has to read [tok].
        n_predict: Tokens it generates, reasoning and answer together [tok].
        concurrency: How many such requests run at once.
    """

    weight: float
    kind: str
    cached_tokens: int
    new_tokens: int
    n_predict: int
    concurrency: int = 1

    @property
    def depth_tokens(self) -> int:
        """Context in use when the last token is generated [tok]."""
        return self.cached_tokens + self.new_tokens + self.n_predict


@dataclass(frozen=True, slots=True)
class Workload:
    """The mix of requests; what is minimised is the turn time expected of it."""

    classes: tuple[RequestClass, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Weights that add up to 1."""
        total = sum(request_class.weight for request_class in self.classes)
        return tuple(request_class.weight / total for request_class in self.classes)

    @property
    def deepest(self) -> int:
        """Index of the class that uses most context."""
        return max(range(len(self.classes)), key=lambda at: self.classes[at].depth_tokens)

    def turn_time_s(self, times_s: Sequence[float]) -> float:
        """Expected wall seconds of one request, from the time of each class."""
        return sum(share * time for share, time in zip(self.shares, times_s, strict=True))

    def process_s(self, load_s: float, rates: Rates) -> float:
        """What a fresh server with one round of it takes [s]; at a usual speed where one is not known."""
        prompt = rates.prompt_tok_s or USUAL_RATES.prompt_tok_s or 1.0
        decode = rates.decode_tok_s or USUAL_RATES.decode_tok_s or 1.0
        prefix = max(one.cached_tokens for one in self.classes)
        block_s = sum(
            (one.new_tokens / prompt + one.n_predict / decode) * math.sqrt(one.concurrency)
            for one in self.classes
        )
        return load_s + _WARM_UP_S + prefix / prompt + block_s


# A class whose kind nobody knows is measured with texts of all of these, in turn.
KINDS = ("code", "chat", "tool", "summary", "math", "creative")
MIXED: Final = "mixed"
_LEAST_PROMPT_TOKENS = 16
_LEAST_PREDICTED = 2
# Beyond the last percentile lengths widen no faster than this (p90 of 13 medians): contexts end.
_WIDEST = 2.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """How long something is: (share of requests, tokens) points of its quantile function.

    One point is a fixed length. Between points it is linear, beyond the outer ones flat; the mean is
    another matter, see there. `observed_mean` is what was seen, None where only points are known.
    """

    points: tuple[tuple[float, int], ...]
    observed_mean: float | None = None

    @classmethod
    def fixed(cls, n_tokens: int) -> Tokens:
        """Always the same length."""
        return cls(((0.5, n_tokens),))

    def at(self, share: float) -> float:
        """The length that this share of requests (0 to 1) does not exceed [tok]."""
        if share <= self.points[0][0]:
            return float(self.points[0][1])
        for (low, before), (high, after) in pairwise(self.points):
            if share <= high:
                return before + (after - before) * (share - low) / (high - low)
        return float(self.points[-1][1])

    @property
    def mean(self) -> float:
        """Expected length [tok]: turn time is about linear in it, so this is what is measured.

        The one that was observed; from percentiles alone that of lognormal pieces through them, whose
        outer ones go on beyond the outer points. It is exact for lognormal lengths, which those of
        prompts and answers resemble. Source: partial moments of the lognormal distribution (Johnson,
        Kotz and Balakrishnan, Continuous Univariate Distributions, volume 1, chapter 14).
        """
        if self.observed_mean is not None:
            return self.observed_mean
        if self.is_estimated:
            return _lognormal_mean(self.points)
        shares = (0.0, *(share for share, _ in self.points), 1.0)
        return sum(
            (high - low) * (self.at(low) + self.at(high)) / 2 for low, high in pairwise(shares)
        )

    @property
    def is_estimated(self) -> bool:
        """Whether the mean is an estimate from percentiles; of a span it is that of even lengths."""
        is_span = self.points[0][0] <= 0.0
        return self.observed_mean is None and len(self.points) > 1 and not is_span

    def to_json(self) -> int | dict[str, float]:
        """As it stands in a file: a number, or percentiles, with the mean that was observed."""
        if len(self.points) == 1 and self.observed_mean is None:
            return self.points[0][1]
        found: dict[str, float] = {
            f"p{round(share * 100)}": tokens for share, tokens in self.points
        }
        return found if self.observed_mean is None else {**found, "mean": self.observed_mean}


def _lognormal_mean(points: Sequence[tuple[float, int]]) -> float:
    """Mean of lengths whose logarithm is linear in the normal quantile between the points."""
    normal = NormalDist()
    quantiles = [normal.inv_cdf(share) for share, _ in points]
    ends = [-math.inf, *quantiles[1:-1], math.inf]
    total = 0.0
    for index, ((_, before), (_, after)) in enumerate(pairwise(points)):
        low, high = quantiles[index], quantiles[index + 1]
        first, last = ends[index], ends[index + 1]
        if before == 0:  # no lognormal: even lengths between, the longer one beyond
            inner = normal.cdf(high) - normal.cdf(low)
            total += inner * after / 2 + (normal.cdf(last) - normal.cdf(high)) * after
            continue
        slope = math.log(after / before) / (high - low)
        total += _piece(high, after, slope, first, high)
        if last > high:
            total += _piece(high, after, min(slope, _WIDEST), high, last)
    return total


def _piece(at: float, length: float, slope: float, low: float, high: float) -> float:
    """The integral of lengths over normal quantiles from `low` to `high`; `length` is that at `at`."""
    normal = NormalDist()
    scale = length * math.exp(slope * slope / 2 - slope * at)
    return scale * (normal.cdf(high - slope) - normal.cdf(low - slope))


def fitted(
    workload: Workload, n_ctx: int, *, margin_tokens: int
) -> tuple[Workload, tuple[int, ...]]:
    """The workload with the prompts of classes that do not fit cut, and the indices of those.

    What is cut keeps its share of cached tokens; where prompt and answer cannot both fit, the answer
    gets half of the context.

    Args:
        workload: What was asked for.
        n_ctx: Context of one slot [tok].
        margin_tokens: What the server and the prompt's own frame need beside it [tok].
    """
    room = max(n_ctx - margin_tokens, 2 * _LEAST_PROMPT_TOKENS)
    classes, cut = [], []
    for index, one in enumerate(workload.classes):
        if one.depth_tokens <= room:
            classes.append(one)
            continue
        n_predict = min(one.n_predict, room // 2)
        prompt = one.cached_tokens + one.new_tokens
        kept = room - n_predict
        cached = min(round(kept * one.cached_tokens / prompt), kept - 1)
        classes.append(
            replace(one, cached_tokens=cached, new_tokens=kept - cached, n_predict=n_predict)
        )
        cut.append(index)
    return Workload(tuple(classes)), tuple(cut)


_ALLOWED = (
    "a number of tokens, percentiles such as { p10 = 20, p50 = 80, p90 = 400 }, with `mean` where it "
    "is known, "
    "or { min = 10, max = 90 }"
)
_PERCENTILE = re.compile(r"p([1-9]\d?)")
_MOST_TOKENS = 10_000_000
_MEAN = "mean"
UNKNOWN = "unknown"


def parse_tokens(value: Any) -> Tokens:
    """A length as a file gives it.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, Tokens) or _is_count(value):
        return value if isinstance(value, Tokens) else Tokens.fixed(value)
    given = dict(value) if isinstance(value, Mapping) else {}
    mean = given.pop(_MEAN, None)
    shares = {"min": 0.0, "max": 1.0}
    if given.keys() != shares.keys():
        found = ((name, _PERCENTILE.fullmatch(str(name))) for name in given)
        shares = {name: int(match[1]) / 100 for name, match in found if match}
    elif mean is not None:
        shares = {}
    is_right = given.keys() == shares.keys() and all(map(_is_count, given.values()))
    points = sorted((shares[name], given[name]) for name in given) if is_right else []
    is_rising = all(before <= after for (_, before), (_, after) in pairwise(points))
    if not points or not is_rising or not (mean is None or _is_mean(mean)):
        raise ValueError(_ALLOWED)
    return Tokens(tuple(points), mean)


def _is_mean(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, float) and 0 <= value <= _MOST_TOKENS)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


def _thoughts(value: Any) -> Tokens | None:
    return None if value in (None, UNKNOWN) else parse_tokens(value)


Text = Annotated[
    str,
    StringConstraints(min_length=1, max_length=4096),
    of_form(r"[^\x00-\x1f\x7f]*", "one line of text without control characters"),
]
_IN_A_FILE = PlainSerializer(Tokens.to_json)


class Table(BaseModel):
    """A table of a profile or of a workload; an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClassShape(Table):
    """One class of requests; lengths are tokens.

    `reasoning_tokens` is None where nobody can tell thoughts from the answer, and they count as part of it.
    """

    name: Text = Field("", description="name of the class")
    weight: Annotated[float, Field(gt=0, le=1e9)] = Field(
        1.0, description="share of requests; weights need not add up to 1"
    )
    kind: Literal["code", "chat", "tool", "summary", "math", "creative", "mixed"] = Field(
        MIXED, description=f"kind of text: {', '.join(KINDS)}, or {MIXED} for texts of all kinds"
    )
    prompt_tokens: Annotated[Tokens, PlainValidator(parse_tokens), _IN_A_FILE] = Field(
        description="the whole prompt: tokens, percentiles ({ p50 = 400, p90 = 3000 }) or { min, max }"
    )
    cached_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the prompt that the server still holds from the turn before"
    )
    reasoning_tokens: Annotated[Tokens | None, PlainValidator(_thoughts), _IN_A_FILE] = Field(
        0,
        validate_default=True,
        description='tokens of thinking before the answer; "unknown" if they are counted as part of it',
    )
    answer_tokens: Annotated[Tokens, PlainValidator(parse_tokens), _IN_A_FILE] = Field(
        description="tokens of the answer"
    )
    concurrency: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="how many such requests run at once"
    )

    @property
    def reasoning_share(self) -> float | None:
        """What of the generated tokens are thoughts; None where that is not known."""
        if self.reasoning_tokens is None:
            return None
        total = self.reasoning_tokens.mean + self.answer_tokens.mean
        return self.reasoning_tokens.mean / total if total else 0.0

    def plain(self) -> RequestClass:
        """With mean lengths."""
        prompt = max(round(self.prompt_tokens.mean), _LEAST_PROMPT_TOKENS)
        cached = min(round(prompt * self.cached_share), prompt - 1)
        thoughts = 0.0 if self.reasoning_tokens is None else self.reasoning_tokens.mean
        return RequestClass(
            weight=self.weight,
            kind=self.kind,
            cached_tokens=cached,
            new_tokens=prompt - cached,
            n_predict=max(round(self.answer_tokens.mean + thoughts), _LEAST_PREDICTED),
            concurrency=self.concurrency,
        )

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file."""
        return self.model_dump(exclude_none=True)

    @property
    def measured(self) -> dict[str, Any]:
        """What of it decides about what is measured."""
        lengths = (self.prompt_tokens, self.answer_tokens, self.reasoning_tokens)
        is_estimated = any(one is not None and one.is_estimated for one in lengths)
        estimate = {"estimate": "lognormal"} if is_estimated else {}
        return {**self.to_json(), "name": None, **estimate}


class WorkloadTable(Table):
    """A mix of requests: the `workload` table of a profile, or a workload file."""

    description: Text | None = Field(None, description="one line for `workload list`")
    source: Text | None = Field(None, description="where the figures come from")
    classes: Annotated[tuple[ClassShape, ...], Field(strict=False, min_length=1, max_length=32)] = (
        Field(description="the classes of requests")
    )
    learned: dict[str, Any] | None = Field(
        None, description="what `workload learn` saw, in numbers; nothing reads it back"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """A named mix of requests; `source` says where its figures come from."""

    name: str
    classes: tuple[ClassShape, ...]
    description: str = ""
    source: str = ""

    def plain(self) -> Workload:
        """What is measured: one request class for each, with mean lengths."""
        return Workload(tuple(one.plain() for one in self.classes))

    @property
    def shares(self) -> tuple[float, ...]:
        """Weights that add up to 1."""
        return self.plain().shares

    @property
    def sha256(self) -> str:
        """Hash of what is measured; names and descriptions are not part of it."""
        return digest({"classes": [one.measured for one in self.classes]})


def shape_of(name: str, table: WorkloadTable) -> WorkloadShape:
    """The workload of a checked table; a class without a name is called by its number."""
    classes = (
        one if one.name else one.model_copy(update={"name": f"class {number}"})
        for number, one in enumerate(table.classes, start=1)
    )
    return WorkloadShape(
        name=name,
        description=table.description or "",
        source=table.source or "",
        classes=tuple(classes),
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a server is: prompt and generation [tok/s]; None is not known."""

    prompt_tok_s: float | None
    decode_tok_s: float | None


USUAL_RATES = Rates(prompt_tok_s=500.0, decode_tok_s=30.0)
_WARM_UP_S = 3.0


def to_toml(shape: WorkloadShape, learned: Mapping[str, Any]) -> str:
    """The text of a workload file; `learned` is what it was learned from."""
    document = tomlkit.document()
    document["description"] = shape.description
    document["source"] = shape.source
    classes = tomlkit.aot()
    for one in shape.classes:
        hidden = {"reasoning_tokens": UNKNOWN} if one.reasoning_tokens is None else {}
        classes.append(_table({**one.to_json(), **hidden}))
    document["classes"] = classes
    document["learned"] = _table(learned)
    return tomlkit.dumps(document)


def _table(values: Mapping[str, Any]) -> Any:
    """What is known of them; what is a table itself stands in one line."""
    table = tomlkit.table()
    for key, value in values.items():
        if isinstance(value, Mapping):
            table[key] = tomlkit.inline_table()
            table[key].update(value)
        elif value is not None:
            table[key] = value
    return table
