"""Which requests of a plan a context can hold, before anything is sent."""

from __future__ import annotations

from dataclasses import replace

from tunerd.core.bench.prompts import PromptBook
from tunerd.core.bench.request import Plan, Request
from tunerd.errors import BenchError


def prompt_tokens(request: Request, book: PromptBook, letters_per_token: float | None) -> int:
    """The least that a prompt has [tok]: its depth, or the question alone where that is longer.

    Args:
        request: What is asked.
        book: The questions.
        letters_per_token: What the server's vocabulary does; None for a common one.
    """
    depth = request.depth_tokens or 0
    if not request.has_question:
        return depth
    form = book.form(request.kind)
    if letters_per_token is None:
        return max(depth, form.least_tokens)
    return max(depth, int(len(form.variant(0)) / letters_per_token))


def fitting(
    plan: Plan, book: PromptBook, n_ctx: int | None, letters_per_token: float | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """The plan without the steps that a context cannot hold, and the cases of those.

    Args:
        plan: The plan.
        book: The questions.
        n_ctx: Context of one request [tok]; None where unknown: then everything stays.
        letters_per_token: What the server's vocabulary does; None for a common one.

    Raises:
        BenchError: nothing fits.
    """
    if n_ctx is None:
        return plan, ()

    def needed(request: Request) -> int:
        return prompt_tokens(request, book, letters_per_token) + request.n_predict

    kept = [step for step in plan.steps if max(needed(one) for one in step.requests) <= n_ctx]
    if not kept:
        least = min(max(needed(one) for one in step.requests) for step in plan.steps)
        raise BenchError(
            f"a context of {n_ctx} tokens has no room for suite `{plan.suite}`",
            cause=f"its shortest request takes about {least}, answer included",
            hint="a larger context, or another suite",
        )
    lost = [one.case for step in plan.steps if step not in kept for one in step.requests[-1:]]
    return replace(plan, steps=tuple(kept)), tuple(dict.fromkeys(lost))
