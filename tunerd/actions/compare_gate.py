"""The quality gate of a comparison: both sides answer the same questions before they are timed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunerd.actions.compare_stand import CandidateStand
from tunerd.actions.context import Context
from tunerd.core.bench import suites
from tunerd.core.bench.prompts import Prompt, PromptStock
from tunerd.core.bench.quality import Quality, Texts, judge_quality, pair
from tunerd.core.bench.request import Request
from tunerd.core.compare import SIDES, BootFailed, LifeEnded, Side
from tunerd.core.output_changes import OutputChange, changes_sampling
from tunerd.core.progress import Progress

_REPEATS = 3
# Of the time that a comparison has, so much may go into questions; the rest is for speed.
_SHARE = 0.5

Question = tuple[Request, Prompt]


@dataclass
class Gate:
    """Asks both sides, one process each.

    `asked` counts the questions of each side; those that one of them was never asked say nothing.
    """

    ctx: Context
    stand: CandidateStand
    questions: Sequence[Question]
    budget_s: float
    answers: dict[Side, list[Texts]] = field(default_factory=lambda: {"A": [], "B": []})

    def judge(self) -> Quality:
        """B's answers held against A's.

        Raises:
            Preempted: the lease is gone.
        """
        for side in SIDES:
            try:
                self._ask(side)
            except BootFailed as error:
                return Quality(None, (f"{side} did not start: {error}",), ())
        both = zip(self.questions, self.answers["A"], self.answers["B"], strict=False)
        found = judge_quality(
            [pair(request.case, number, one, other)
             for number, ((request, _), one, other) in enumerate(both)]
        )  # fmt: skip
        n_left = len(self.questions) - min(len(one) for one in self.answers.values())
        if not n_left or found.passes is False:
            return found
        text = f"there was no time for {n_left} of {len(self.questions)} questions"
        return Quality(None, (*found.reasons, text), found.cases)

    def _ask(self, side: Side) -> None:
        clock = self.ctx.clock
        end_s = clock.monotonic_s() + self.budget_s * _SHARE / len(SIDES)
        life = self.stand.boot(side)
        began_s = clock.monotonic_s()
        has_ended = False
        try:
            for number, (request, prompt) in enumerate(self.questions):
                now_s = clock.monotonic_s()
                if now_s >= end_s:
                    return
                left_s = (now_s - began_s) / number * (len(self.questions) - number)\
                    if number else None  # fmt: skip
                self.ctx.report(Progress(f"questions to {side}: {request.case}", number + 1,
                                         len(self.questions), left_s=left_s))  # fmt: skip
                answer = None
                if not has_ended:
                    try:
                        answer = life.answer(request, prompt)
                    except LifeEnded:
                        has_ended = True  # what is left has no answer, and that counts
                self.answers[side].append({prompt.prompt_id: answer})
        finally:
            life.close()


def judge_answers(
    ctx: Context,
    stand: CandidateStand,
    changes: Sequence[OutputChange],
    *,
    seed: int,
    budget_s: float,
) -> Quality:
    """Whether B answers as A does.

    Args:
        ctx: Where.
        stand: Where both sides are started.
        changes: What may change answers; sampling is tried by each server's own settings too.
        seed: Of texts and order.
        budget_s: What the whole comparison may take; half of it is for questions at most.

    Raises:
        Preempted: the lease is gone.
    """
    plan = suites.quality(seed, repeats=_REPEATS, with_own_sampling=changes_sampling(changes))
    stock = PromptStock(stand.book, random.Random(f"{seed} questions"))  # noqa: S311 -- texts
    questions = [(request, stock.take(request.kind)) for request in plan.requests]
    return Gate(ctx, stand, questions, budget_s).judge()
