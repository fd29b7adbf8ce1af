"""A workload as people describe it: classes of requests with distributions of their lengths.

What is measured and searched with is its plain form, `core.workload`, made by `WorkloadShape.plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tunerd.core.fingerprint_arguments import digest
from tunerd.core.workload import RequestClass, Workload

# A class whose kind nobody knows is measured with texts of all of these, in turn.
KINDS = ("code", "chat", "tool", "summary", "math", "creative")
MIXED = "mixed"
_LEAST_PROMPT_TOKENS = 16
_LEAST_PREDICTED = 2


@dataclass(frozen=True, slots=True)
class Tokens:
    """How long something is: (share of requests, tokens) points of its quantile function.

    One point is a fixed length. Between points it is linear, beyond the outer ones flat.
    """

    points: tuple[tuple[float, int], ...]

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
    def median(self) -> float:
        """Half of the requests are not longer [tok]."""
        return self.at(0.5)

    @property
    def mean(self) -> float:
        """Expected length [tok]: turn time is about linear in it, so this is what is measured."""
        shares = (0.0, *(share for share, _ in self.points), 1.0)
        return sum(
            (high - low) * (self.at(low) + self.at(high)) / 2 for low, high in pairwise(shares)
        )

    def to_json(self) -> int | dict[str, int]:
        """As it stands in a file: a number, or percentiles."""
        if len(self.points) == 1:
            return self.points[0][1]
        return {f"p{round(share * 100)}": tokens for share, tokens in self.points}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShape:
    """One class of requests.

    Attributes:
        name: Of the class.
        weight: Its share of requests; weights need not add up to 1.
        kind: What the text is (`KINDS`), or `mixed`.
        prompt: Whole prompt, cached part included [tok].
        cached_share: What of the prompt the server still holds from the turn before, 0 to 1.
        reasoning: Thoughts before the answer [tok]; None where nobody can tell them from it.
        answer: The answer [tok], with the thoughts where `reasoning` is None.
        concurrency: How many such requests run at once.
    """

    name: str
    weight: float
    kind: str
    prompt: Tokens
    cached_share: float
    reasoning: Tokens | None
    answer: Tokens
    concurrency: int = 1

    @property
    def reasoning_share(self) -> float | None:
        """What of the generated tokens are thoughts; None where that is not known."""
        if self.reasoning is None:
            return None
        total = self.reasoning.mean + self.answer.mean
        return self.reasoning.mean / total if total else 0.0

    def plain(self) -> RequestClass:
        """With mean lengths."""
        prompt = max(round(self.prompt.mean), _LEAST_PROMPT_TOKENS)
        cached = min(round(prompt * self.cached_share), prompt - 1)
        generated = self.answer.mean + (0.0 if self.reasoning is None else self.reasoning.mean)
        return RequestClass(
            weight=self.weight,
            kind=self.kind,
            cached_tokens=cached,
            new_tokens=prompt - cached,
            n_predict=max(round(generated), _LEAST_PREDICTED),
            concurrency=self.concurrency,
        )

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file."""
        found: dict[str, Any] = {
            "name": self.name,
            "weight": self.weight,
            "kind": self.kind,
            "prompt_tokens": self.prompt.to_json(),
            "cached_share": self.cached_share,
        }
        if self.reasoning is not None:
            found["reasoning_tokens"] = self.reasoning.to_json()
        found["answer_tokens"] = self.answer.to_json()
        found["concurrency"] = self.concurrency
        return found


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
        return digest(
            {"classes": [{**one.to_json(), "name": None} for one in self.classes]},
        )


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


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a server is: prompt and generation [tok/s]; None is not known."""

    prompt_tok_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a turn is made of [s]; `reasoning_s` is None where thoughts cannot be told apart."""

    prefill_s: float
    reasoning_s: float | None
    decode_s: float

    @property
    def total_s(self) -> float:
        """The whole turn."""
        return self.prefill_s + (self.reasoning_s or 0.0) + self.decode_s


def expected_parts(shape: WorkloadShape, rates: Rates) -> tuple[Parts, ...] | None:
    """A turn of each class at these rates; None where a rate is not known."""
    if not rates.prompt_tok_s or not rates.decode_tok_s:
        return None
    found = []
    for one in shape.classes:
        plain, share = one.plain(), one.reasoning_share
        generation_s = plain.n_predict / rates.decode_tok_s
        found.append(
            Parts(
                prefill_s=plain.new_tokens / rates.prompt_tok_s,
                reasoning_s=None if share is None else share * generation_s,
                decode_s=(1.0 - (share or 0.0)) * generation_s,
            )
        )
    return tuple(found)


def mean_parts(shape: WorkloadShape, parts: tuple[Parts, ...]) -> Parts:
    """The expected turn of the whole mix; thoughts count as part of the answer if any class hides them."""
    shares = shape.shares
    pairs = list(zip(shares, parts, strict=True))
    hides = any(one.reasoning_s is None for one in parts)
    reasoning = sum(share * (one.reasoning_s or 0.0) for share, one in pairs)
    decode = sum(share * one.decode_s for share, one in pairs)
    return Parts(
        prefill_s=sum(share * one.prefill_s for share, one in pairs),
        reasoning_s=None if hides else reasoning,
        decode_s=decode + reasoning if hides else decode,
    )


def parts_json(parts: Parts | None) -> Mapping[str, float | None] | None:
    """As scripts read it."""
    if parts is None:
        return None
    return {
        "prefill_s": parts.prefill_s,
        "reasoning_s": parts.reasoning_s,
        "decode_s": parts.decode_s,
        "total_s": parts.total_s,
    }
