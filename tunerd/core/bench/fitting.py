"""Which requests of a plan a context can hold, before anything is sent."""

from __future__ import annotations

from dataclasses import replace

from tunerd.core.bench.prompts import PromptBook
from tunerd.core.bench.request import Plan, Request, Step
from tunerd.errors import BenchError

_SHORT = "code_python"


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


def with_short_question(
    plan: Plan, book: PromptBook, n_ctx: int | None, letters_per_token: float | None = None
) -> Plan:
    """The plan with a short question where a context cannot hold the long one; its depth stays.

    A vocabulary of short tokens can make the long question longer than a whole small context.
    """

    def is_too_long(request: Request) -> bool:
        tokens = prompt_tokens(request, book, letters_per_token) + request.n_predict
        return n_ctx is not None and tokens > n_ctx

    if not any(is_too_long(request) for request in plan.requests):
        return plan
    steps = [Step(tuple(replace(one, kind=_SHORT) for one in step.requests), step.is_parallel)
             for step in plan.steps]  # fmt: skip
    return replace(plan, steps=tuple(steps))


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
