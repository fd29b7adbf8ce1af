"""What a workload file may say, and what `workload = ...` in a profile may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from tunerd.core.workload_shape import KINDS, MIXED, ClassShape, Tokens, WorkloadShape

_ALLOWED = (
    "a number of tokens, percentiles such as { p10 = 20, p50 = 80, p90 = 400 }, with `mean` where it "
    "is known, "
    "or { min = 10, max = 90 }"
)
_PERCENTILE = re.compile(r"p([1-9]\d?)")
_MOST_TOKENS = 10_000_000
_SPAN = {"min", "max"}
_MEAN = "mean"
UNKNOWN = "unknown"


def _tokens(value: Any) -> Any:
    if parse_tokens(value) is None:
        raise ValueError(_ALLOWED)
    return value


def parse_tokens(value: Any) -> Tokens | None:
    """A length as a file gives it; None if it is none."""
    if _is_count(value):
        return Tokens.fixed(value)
    if not isinstance(value, Mapping) or not value:
        return None
    mean = None
    if _MEAN in value:
        mean, value = value[_MEAN], {name: one for name, one in value.items() if name != _MEAN}
        if not _is_mean(mean) or not value or set(value) == _SPAN:
            return None
    if not all(_is_count(count) for count in value.values()):
        return None
    if set(value) == _SPAN:
        points = [(0.0, value["min"]), (1.0, value["max"])]
    else:
        found = {name: _PERCENTILE.fullmatch(str(name)) for name in value}
        if any(match is None for match in found.values()):
            return None
        points = sorted(
            (int(match.group(1)) / 100, value[name])
            for name, match in found.items()
            if match is not None
        )
    if any(before > after for (_, before), (_, after) in pairwise(points)):
        return None
    return Tokens(tuple(points), mean)


def _is_mean(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _MOST_TOKENS


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


def _thoughts(value: Any) -> Any:
    return value if value == UNKNOWN else _tokens(value)


def _kind(value: str) -> str:
    if value not in (*KINDS, MIXED):
        raise ValueError(", ".join((*KINDS, MIXED)))
    return value


Text = Annotated[
    str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Length = Annotated[Any, AfterValidator(_tokens)]


class Table(BaseModel):
    """A table of a workload; an unknown key is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ClassTable(Table):
    """One class of requests."""

    name: Text | None = Field(None, description="name of the class")
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0, description="share of requests; weights need not add up to 1"
    )
    kind: Annotated[str, AfterValidator(_kind)] = Field(
        MIXED, description=f"kind of text: {', '.join(KINDS)}, or {MIXED} for texts of all kinds"
    )
    prompt_tokens: Length = Field(
        description="the whole prompt: tokens, percentiles ({ p50 = 400, p90 = 3000 }) or { min, max }"
    )
    cached_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="what of the prompt the server still holds from the turn before"
    )
    reasoning_tokens: Annotated[Any, AfterValidator(_thoughts)] = Field(
        0, description='thoughts before the answer; "unknown" where they count as part of it'
    )
    answer_tokens: Length = Field(description="the answer")
    concurrency: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="how many such requests run at once"
    )


class WorkloadTable(Table):
    """A mix of requests: the `workload` table of a profile, or a workload file."""

    description: Text | None = Field(None, description="one line for `workload list`")
    source: Text | None = Field(None, description="where the figures come from")
    classes: Annotated[tuple[ClassTable, ...], Field(strict=False, min_length=1, max_length=32)] = (
        Field(description="the classes of requests")
    )
    learned: dict[str, Any] | None = Field(
        None, description="what `workload learn` saw: counts and histograms; nothing reads it back"
    )


def shape_of(name: str, table: WorkloadTable) -> WorkloadShape:
    """The workload of a checked table."""
    return WorkloadShape(
        name=name,
        description=table.description or "",
        source=table.source or "",
        classes=tuple(_class(index, one) for index, one in enumerate(table.classes, start=1)),
    )


def _class(index: int, table: ClassTable) -> ClassShape:
    answer, prompt = parse_tokens(table.answer_tokens), parse_tokens(table.prompt_tokens)
    if answer is None or prompt is None:  # the schema has checked both
        raise ValueError(_ALLOWED)
    return ClassShape(
        name=table.name or f"class {index}",
        weight=table.weight,
        kind=table.kind,
        prompt=prompt,
        cached_share=table.cached_share,
        reasoning=parse_tokens(table.reasoning_tokens),
        answer=answer,
        concurrency=table.concurrency,
    )
