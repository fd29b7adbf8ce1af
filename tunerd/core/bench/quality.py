"""The gate for whatever may change what a server says: the answers of two arms to the same questions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rapidfuzz.distance import Levenshtein

from tunerd.core.bench.reading import Answer, ToolCall
from tunerd.core.bench.suites import PROSE, SHORT, TOOLS
from tunerd.core.evidence import SummaryRecord

# Longer texts are compared by their beginning: the distance takes time by the product of the lengths.
_MOST_LETTERS = 20_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with the answers of both arms; an answer is None where there was none.

    `is_paired` is False where both arms answered, but never the same text: nothing is compared then.
    """

    case: str
    prompt_id: str
    reference: Answer | None
    candidate: Answer | None
    is_paired: bool = True


# By the id of its text, what was answered to a question; one that was repeated has several texts.
Texts = Mapping[str, Answer | None]


def pair(case: str, number: int, reference: Texts, candidate: Texts) -> Asked:
    """The answers of both arms to the same text of a question, the first one that both answered."""
    answered = [{name for name, one in texts.items() if one is not None}
                for texts in (reference, candidate)]  # fmt: skip
    for name in reference:
        if all(name in names for names in answered):
            return Asked(case, name, reference[name], candidate[name])
    name = next(iter(reference or candidate), str(number))
    if all(answered):
        return Asked(case, name, None, None, is_paired=False)
    one, other = (next((a for a in texts.values() if a is not None), None)
                  for texts in (reference, candidate))  # fmt: skip
    return Asked(case, name, one, other)


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


def judge_quality(asked: Sequence[Asked]) -> Quality:
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


def _case(name: str, asked: Sequence[Asked]) -> CaseQuality:
    pairs = [(one.reference, one.candidate) for one in asked if one.is_paired]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    drifts = [drift(a.text, b.text) for a, b in both]
    longest = [max(len(a.text), len(b.text), 1) for a, b in both]
    ratios = [letters / most for letters, most in zip(drifts, longest, strict=True)]
    same = same_tool_calls if name == TOOLS else _same_text
    is_tools = name == TOOLS
    return CaseQuality(
        case=name,
        n=len(both),
        n_missing=len(pairs) - len(both),
        n_lost=sum(a is not None and b is None for a, b in pairs),
        n_left_out=len(asked) - len(pairs),
        n_same=sum(same(a, b) for a, b in both),
        n_called=sum(bool(a.tool_calls) for a, _ in both) if is_tools else None,
        n_valid=sum(has_valid_calls(b.tool_calls) for _, b in both) if is_tools else None,
        n_silent=sum(not (a.text + b.text).strip() for a, b in both) if name == SHORT else None,
        drift_letters=_median(drifts),
        drift_ratio=_median(ratios),
        reasoning_letters=(
            _median([len(a.reasoning) for a, _ in both]),
            _median([len(b.reasoning) for _, b in both]),
        ),
    )


def _against(one: CaseQuality) -> list[str]:
    reasons = []
    if one.n_lost:
        reasons.append(f"{one.case}: {one.n_lost} of {one.n + one.n_missing} were not answered")
    if one.case in {TOOLS, SHORT} and one.n_same < one.n:
        reasons.append(f"{one.case}: {one.n - one.n_same} of {one.n} differ")
    if one.n_valid is not None and one.n_valid < one.n:
        reasons.append(
            f"{one.case}: {one.n - one.n_valid} of {one.n} have arguments that are no JSON"
        )
    return reasons


def _unjudged(one: CaseQuality) -> list[str]:
    """What speaks neither for nor against: a gate that saw no call says nothing of calls."""
    if not one.n:
        return [f"{one.case}: no text was answered by both"]
    if one.n_silent == one.n:
        return [f"{one.case}: no answer has a text, so they could not be judged"]
    if one.n_missing:
        return [f"{one.case}: the reference had no answer to {one.n_missing} of them"]
    if one.n_called == 0:
        return [f"{one.case}: not one was made, so they could not be judged"]
    return []


def ended_in_thought(answer: Answer | None) -> bool:
    """Whether its thoughts took all the tokens that it was given: of the answer itself nothing is known."""
    return answer is not None and bool(answer.reasoning) and not (answer.text or answer.tool_calls)


def drift(one: str, other: str) -> int:
    """Letters to change, add or remove to make one text of the other."""
    return int(Levenshtein.distance(one[:_MOST_LETTERS], other[:_MOST_LETTERS]))


def has_valid_calls(calls: Sequence[ToolCall]) -> bool:
    """Whether every call names a function and its arguments are one JSON object."""
    return all(call.name and _arguments(call) is not None for call in calls)


def same_tool_calls(one: Answer, other: Answer) -> bool:
    """Whether the same functions are called in the same order, with the same argument keys."""
    return shape_of(one.tool_calls) == shape_of(other.tool_calls)


def shape_of(calls: Sequence[ToolCall]) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Functions and argument keys; None for arguments that are no JSON object."""
    return tuple((call.name, None if (found := _arguments(call)) is None else tuple(sorted(found)))
                 for call in calls)  # fmt: skip


def _arguments(call: ToolCall) -> Mapping[str, Any] | None:
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _same_text(one: Answer, other: Answer) -> bool:
    return one.text.strip() == other.text.strip()


def _median(values: Sequence[float]) -> float | None:
    return float(statistics.median(values)) if values else None
