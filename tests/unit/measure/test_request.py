"""Texts that never come twice, suites, and what a context cannot hold."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_samples import REGION, a_request, the_book
from tests.support.designed import encode
from tunerd.errors import BenchError
from tunerd.measure.request import (
    MTP_KINDS,
    BenchRequest,
    Composer,
    Plan,
    PromptStock,
    Room,
    Route,
    Suite,
    body_of,
    suite_plan,
)
from tunerd.profile.workload import KINDS
from tunerd.tryout.designed import vocabulary

BOOK = the_book()


def stock(seed: int = 1, used: set[str] | None = None) -> PromptStock:
    return PromptStock(BOOK, random.Random(seed), used or set())


def planned(
    suite: Suite, n_ctx: int | None, most: int | None = None, *, seed: int = 1, **asked: Any
) -> Plan:
    return suite_plan(BenchRequest(suite, **asked), seed, None, Room(BOOK, n_ctx, most))[0]


def test_every_text_of_a_kind_ends_in_a_word_of_that_kind() -> None:
    words = vocabulary()
    for kind in MTP_KINDS:
        form = BOOK.form(kind)
        for text in map(form.variant, range(form.n_variants)):
            assert words.region_of(encode(text)[-1]).name == REGION[kind]


@given(st.integers(0, 2**32), st.sampled_from(MTP_KINDS))
def test_a_stock_never_hands_out_a_text_or_a_number_twice(seed: int, kind: str) -> None:
    taken = stock(seed)
    prompts = [taken.take(kind) for _ in range(60)]

    assert len({prompt.text for prompt in prompts}) == 60
    assert len({prompt.prompt_id for prompt in prompts}) == 60


def test_texts_differ_in_more_than_their_number_as_long_as_words_are_left() -> None:
    taken = stock()
    n = BOOK.form("qa_factual").n_variants
    bodies = [taken.take("qa_factual").text.partition("\n\n")[2] for _ in range(n)]

    assert len(set(bodies)) == n
    assert taken.repeated_kinds == set()
    taken.take("qa_factual")
    assert taken.repeated_kinds == {"qa_factual"}


def test_what_a_server_life_has_seen_before_is_not_sent_again() -> None:
    first = stock(7)
    seen = {first.take("summarize").prompt_id for _ in range(10)}
    later = stock(7, seen)
    prompts = [later.take("summarize") for _ in range(22)]

    numbers = [prompt.prompt_id.partition("#")[0] for prompt in prompts]
    assert not {name.partition("#")[0] for name in seen} & set(numbers)
    assert not {name.partition("#")[2] for name in seen} & {p.prompt_id[-8:] for p in prompts}


def test_a_long_prompt_is_about_as_long_as_wanted_and_ends_in_its_question() -> None:
    taken = stock()
    prompt = taken.take_long("long_code_review", 20_000)

    assert len(prompt.text) == pytest.approx(20_000, rel=0.02)
    assert prompt.text.endswith("give the corrected code")


def test_there_is_a_text_for_every_kind_that_a_workload_may_name() -> None:
    assert {BOOK.form(kind).kind for kind in KINDS} <= set(MTP_KINDS)


def test_the_cache_suite_sends_the_same_twice_and_then_another_end() -> None:
    requests, composer = planned(Suite.CACHE, 4096, repeats=1).requests, Composer(stock())
    cold, same, changed = (composer.compose(one).text for one in requests)

    assert cold == same
    pairs = enumerate(zip(cold, changed, strict=False))
    common = next(at for at, (one, other) in pairs if one != other)
    assert 0.9 < common / len(cold) < 0.99


def test_answers_that_have_no_room_are_left_out() -> None:
    def fitting(
        n_ctx: int | None, most: int | None = None, depth: int | None = None
    ) -> tuple[list[int], int | None]:
        plan = planned(Suite.LENGTHS, n_ctx, most, repeats=1, depth=depth)
        (chosen,) = {request.depth_tokens for request in plan.requests}
        return sorted(request.n_predict for request in plan.requests), chosen

    assert fitting(None) == fitting(131_072) == ([100, 500, 1000, 2000], 43_000)
    assert fitting(4096) == ([100, 500, 1000, 2000], 1803)
    assert fitting(4096, 1024) == ([100, 500, 1000], 2783)
    assert fitting(1024) == ([100, 500], 262)
    assert fitting(4096, None, 3000) == ([100, 500], 3000)


def test_how_long_prompts_are_is_told_as_they_are_asked_and_not_as_they_were_wished() -> None:
    # The question alone is longer than what was left for it.
    room = Room(BOOK, 768, letters_per_token=1.0)
    plan, told = suite_plan(BenchRequest(Suite.LENGTHS, repeats=1), 1, None, room)

    (asked,), (depth,) = plan.requests, [one.text for one in told if one.code == "depth"]
    about = f"about {room.prompt_tokens(asked)} tokens"
    assert f"{about}; no room for answers of 500, 1000, 2000" in depth
    assert "no-room" not in [one.code for one in told], "it is said once"


def test_a_server_without_room_for_the_shortest_answer_is_refused() -> None:
    with pytest.raises(BenchError, match="no room"):
        planned(Suite.LENGTHS, 300)
    with pytest.raises(BenchError, match="at most 50"):
        planned(Suite.LENGTHS, 4096, 50)


def test_each_block_has_every_case_once_in_an_order_of_its_own() -> None:
    steps = [step.requests[0].case for step in planned(Suite.MTP, None, seed=4, repeats=3).steps]
    blocks = [steps[at : at + 9] for at in (0, 9, 18)]

    assert all(sorted(block) == sorted(MTP_KINDS) for block in blocks)
    assert len({tuple(block) for block in blocks}) == 3


def test_each_depth_begins_with_the_whole_text_of_the_depth_before() -> None:
    composer = Composer(stock(), letters_per_token=3.0)
    texts = [composer.compose(request).text for request in planned(Suite.DEEP, 8192).requests]

    for shallow, deeper in itertools.pairwise(texts):
        assert deeper.startswith(shallow[:-20])
        assert len(deeper) > len(shallow)


def test_a_cold_request_forbids_the_cache_and_a_fixed_length_ignores_the_end() -> None:
    prompt = stock().take("code_python")
    body = body_of(a_request(), prompt, Route.NATIVE)

    assert (body["cache_prompt"], body["ignore_eos"], body["n_predict"]) == (False, True, 101)
    assert body["temperature"] == 0
    warm = body_of(a_request(is_warm=True, is_fixed_length=False), prompt, Route.NATIVE)
    assert warm["cache_prompt"] is True
    assert "ignore_eos" not in warm


def test_a_server_of_another_kind_gets_no_keys_that_only_llama_knows() -> None:
    body = body_of(a_request(), stock().take("code_python"), Route.CHAT, model="x", is_llama=False)

    keys = {"stream", "temperature", "seed", "messages", "max_tokens", "stream_options", "model"}
    assert set(body) == keys


def test_a_question_that_the_context_cannot_hold_is_left_out_and_named() -> None:
    plan, told = suite_plan(BenchRequest(repeats=2), 1, None, Room(BOOK, 512))

    assert [one.text for one in told] == ["a context of 512 has no room for long_code_review"]
    assert len(plan.steps) == 2 * 8


def test_a_small_context_is_asked_a_short_question_about_the_same_depth() -> None:
    """A vocabulary of short tokens: the long review alone has more of them than the context."""
    asked = BenchRequest(suite=Suite.LENGTHS)
    plan, told = suite_plan(asked, 1, None, Room(BOOK, 2048, letters_per_token=1.2))
    usual, _ = suite_plan(asked, 1, None, Room(BOOK, 2048))

    assert {(one.kind, one.n_predict, one.depth_tokens) for one in plan.requests} == {
        ("code_python", n, 776) for n in (100, 500, 1000)
    }
    assert {one.kind for one in usual.requests} == {"long_code_review"}
    assert "short-question" in {one.code for one in told}
