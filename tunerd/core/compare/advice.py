"""Which side is recommended: the faster one, unless its answers are not as good as those of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.core.bench.quality import Quality
from tunerd.core.compare.decision import Standing
from tunerd.core.compare.protocol import A, B, Side
from tunerd.core.output_changes import OutputChange

NOT_RECOMMENDED = "B is not recommended"


@dataclass(frozen=True, slots=True)
class Advice:
    """What comes of speed and answers together.

    `outcome` is the standing in speed, or that B is not recommended. `recommended` is None where nobody
    is. `remark` belongs to the sentence of the verdict, `reasons` beside it.
    """

    outcome: str
    recommended: Side | None
    remark: str | None = None
    reasons: tuple[str, ...] = ()


def advise(standing: Standing, changes: Sequence[OutputChange], quality: Quality | None) -> Advice:
    """The advice.

    Args:
        standing: Who is faster.
        changes: How B differs from A in what may change answers.
        quality: B's answers held against A's; None where they were not asked.
    """
    faster: Side | None = {Standing.B_FASTER: B, Standing.A_FASTER: A}.get(standing)
    if not changes:
        return Advice(str(standing), faster)
    if quality is not None and quality.passes:
        return Advice(str(standing), faster, reasons=("B answers as A does in what counts",))
    told = ("not asked",) if quality is None else quality.reasons
    has_failed = quality is not None and quality.passes is False
    outcome = str(standing) if faster == A else NOT_RECOMMENDED
    if has_failed:
        remark = f"B is not recommended, for it answers otherwise than A: {'; '.join(told)}"
        return Advice(outcome, A if faster == A else None, remark)
    unknown = f"whether B answers as well as A could not be judged: {'; '.join(told)}"
    if faster == B:
        return Advice(outcome, None, f"B is not recommended, for {unknown}")
    return Advice(str(standing), faster, reasons=(unknown,))
