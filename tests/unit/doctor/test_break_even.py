"""From which acceptance on speculation pays, recovered from samples whose costs are known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tunerd.doctor.facts import NOT_ALIKE, NOTHING_MEASURED, BreakEven, Traffic, break_even, lacking
from tunerd.measure.answer import Mark, Sample, Timings

UBATCH = 512


def sample(timings: Timings, *marks: Mark, concurrency: int = 1) -> Sample:
    return Sample(
        suite="mtp", case="code", kind="code", prompt_id="p", process="1", position=1, at_s=0.0,
        n_predict=timings.predicted_n or 0, concurrency=concurrency, timings=timings, client=None,
        marks=marks,
    )  # fmt: skip


def drafting(
    n: int = 12, *, step_ms: float = 20.0, draft_ms: float = 4.0, tax: float = 1.3
) -> list[Sample]:
    """Answers of 400 steps; drafts per step differ between texts."""
    rng = random.Random(3)
    found = []
    for _ in range(n):
        per_step = rng.uniform(0.6, 2.6)
        drafted = round(per_step * 400)
        accepted = round(drafted * rng.uniform(0.3, 0.9))
        n_prompt = rng.choice((1024, 2048, 4096))
        found.append(
            sample(
                Timings(
                    prompt_n=n_prompt,
                    prompt_ms=tax * (0.8 * n_prompt + 100 * n_prompt / UBATCH),
                    predicted_n=1 + 400 + accepted,
                    predicted_ms=400 * (step_ms + draft_ms * drafted / 400),
                    draft_n=drafted,
                    draft_n_accepted=accepted,
                )
            )
        )
    return found


def plain(n: int = 12, *, token_ms: float = 18.0) -> list[Sample]:
    return [
        sample(
            Timings(
                prompt_n=1024 * (1 + i % 4),
                prompt_ms=0.8 * 1024 * (1 + i % 4) + 100 * 2 * (1 + i % 4),
                predicted_n=401,
                predicted_ms=400 * token_ms,
            )
        )
        for i in range(n)
    ]


def found_of(on: Iterable[Sample], off: Iterable[Sample]) -> BreakEven:
    found = break_even(list(on), list(off), UBATCH)
    assert found is not None
    return found


def traffic(*, per_step: float, n_prompt: int, n_predicted: int = 10_000) -> Traffic:
    return Traffic(
        n_requests=20,
        n_prompt=n_prompt,
        n_predicted=n_predicted,
        n_drafted=round(per_step * (n_predicted - 20 - 3000)),
        n_accepted=3000,
    )


def test_the_costs_of_step_and_prompt_are_recovered() -> None:
    slow = [one.timings for one in plain(token_ms=90.0) if one.timings is not None]
    marked = [sample(one, Mark.THROTTLED) for one in slow]
    parallel = [sample(one, concurrency=4) for one in slow]
    found = found_of(drafting(), [*plain(), *marked, *parallel])  # of which neither counts

    assert found.token_ms == pytest.approx(18.0)
    asked = traffic(per_step=1.5, n_prompt=20)
    assert found.accepted_per_step(asked) == pytest.approx(26 / 18 - 1, abs=0.06)
    for per_step in (0.7, 1.5, 2.5):
        predicted = found.step_ms[0] + found.step_ms[1] * per_step
        assert predicted == pytest.approx(20 + 4 * per_step, rel=0.03)
    for n_prompt in (1024, 4096):
        tax = found.tax_ms(n_prompt)
        assert tax == pytest.approx(0.3 * (0.8 * n_prompt + 100 * n_prompt / UBATCH), rel=0.1)


def test_long_prompts_and_short_answers_ask_for_more() -> None:
    found = found_of(drafting(), plain())

    ratios = [found.acceptance_ratio(traffic(per_step=1.5, n_prompt=n)) or math.nan
              for n in (20, 60_000, 120_000)]  # fmt: skip
    assert ratios[0] < ratios[1] < ratios[2]


def test_a_prompt_tax_above_the_whole_gain_can_never_be_paid() -> None:
    found = found_of(drafting(tax=30.0), plain())

    assert found.accepted_per_step(traffic(per_step=1.5, n_prompt=200_000)) == math.inf


def test_the_crossover_of_the_24_gb_write_up() -> None:
    """43k prompts in 37.5 s without and 49 s with MTP, 29 and 46 tok/s: it pays from 900 tokens on."""
    on = [
        sample(Timings(prompt_n=43_241, prompt_ms=49_000, predicted_n=1 + n, predicted_ms=n / 46 * 1000,
                       draft_n=round(n * 0.5), draft_n_accepted=round(n * 0.4)))
        for n in (500, 1000, 2000)
    ]  # fmt: skip
    off = [
        sample(Timings(prompt_n=43_241, prompt_ms=37_500, predicted_n=1 + n, predicted_ms=n / 29 * 1000))
        for n in (500, 1000, 2000)
    ]  # fmt: skip
    found = break_even(on, off, 256)
    assert found is not None

    def pays(n: int) -> bool:
        seen = Traffic(10, 432_410, 10 * (n + 1), round(5 * n), round(4 * n))
        wanted = found.acceptance_ratio(seen)
        assert wanted is not None
        return seen.n_accepted / seen.n_drafted >= wanted

    assert [pays(n) for n in (100, 500, 850, 960, 2000)] == [False, False, False, True, True]


def at_depth(samples: Iterable[Sample], n_tokens: int, slower: float = 1.0) -> list[Sample]:
    """The same answers after so many cached tokens, which slow each token."""
    return [
        replace(one, timings=replace(one.timings, cache_n=n_tokens,
                                     predicted_ms=slower * (one.timings.predicted_ms or 0.0)))
        for one in samples
        if one.timings is not None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("on", "off", "why"),
    [
        (drafting(2), plain(), NOTHING_MEASURED),
        (drafting(), plain(2), NOTHING_MEASURED),
        (drafting(), [], NOTHING_MEASURED),
        (drafting(), drafting(), NOTHING_MEASURED),  # what drafted is none of the server without
        (drafting(), at_depth(plain(), 60_000, slower=3.0), NOT_ALIKE),
    ],
)
def test_what_is_not_alike_or_too_little_gives_nothing(
    on: list[Sample], off: list[Sample], why: str
) -> None:
    assert break_even(on, off, UBATCH) is None
    assert lacking(on, off) == why


def test_deep_answers_of_one_side_do_not_move_the_break_even() -> None:
    found = found_of(drafting(), [*plain(), *at_depth(plain(), 60_000, slower=3.0)])

    assert found.token_ms == pytest.approx(18.0)
    assert found.depth_tokens < 6000


def test_where_only_the_deep_is_measured_on_both_sides_it_is_compared_there() -> None:
    on = [*drafting(), *at_depth(drafting(), 60_000, slower=3.0)]
    found = found_of(on, at_depth(plain(), 60_000, slower=2.0))

    assert found.token_ms == pytest.approx(36.0)
    assert found.step_ms[0] + 1.5 * found.step_ms[1] == pytest.approx(3 * 26, rel=0.03)
    assert found.depth_tokens > 60_000


def test_a_prompt_counts_only_where_the_other_side_has_one_of_like_length() -> None:
    long = [
        replace(one, timings=replace(one.timings, prompt_n=60_000, prompt_ms=600_000.0))
        for one in plain()
        if one.timings is not None
    ]

    tax = found_of(drafting(), [*plain(), *long]).tax_ms(4096)
    assert tax == pytest.approx(0.3 * (0.8 * 4096 + 100 * 4096 / UBATCH), rel=0.1)
