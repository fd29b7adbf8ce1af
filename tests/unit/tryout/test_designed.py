"""The plan of a designed model: what it says, what its MTP block guesses, and how surely."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.designed import encode
from tunerd.tryout.designed import REGION_MIX, REGION_WORDS, SHAPES, Design, design, vocabulary

WORDS = vocabulary()


@pytest.fixture(scope="module")
def tiny() -> Design:
    return design(SHAPES["tiny"])


def test_every_region_has_32_words_of_its_own_and_begins_with_its_name() -> None:
    lists = list(REGION_WORDS.values())

    assert [len(words) for words in lists] == [32] * 8
    assert len({word for words in lists for word in words}) == 8 * 32
    assert [words[0] for words in lists] == list(REGION_WORDS)


def test_a_word_with_its_space_is_one_token_of_its_region() -> None:
    for region in WORDS.regions:
        for word, token in zip(REGION_WORDS[region.name], region.tokens, strict=True):
            assert encode(" " + word) == (token,)
            assert WORDS.region_of(token) == region


@pytest.mark.parametrize(
    ("prompt", "region"),
    [
        *((name, name) for name in REGION_WORDS),
        ("def f(x):", "code"),
        ("what is 6 * 7", "math"),
        ("who was that?", "factual"),
        ("sing!", "creative"),
        ("so it goes.", "chat"),
        ("élan", "chat"),
    ],
)
def test_the_name_of_a_region_or_the_last_byte_selects_a_region(prompt: str, region: str) -> None:
    assert WORDS.region_of(encode(prompt)[-1]).name == region


@pytest.mark.parametrize("seed", [0, 1])
def test_text_goes_round_every_word_of_a_region_and_never_leaves_it(seed: int) -> None:
    made = design(SHAPES["tiny"], seed)

    for region in WORDS.regions:
        once = [region.first]
        while (following := made.successor(once[-1])) != region.first:
            once.append(following)
        assert sorted(once) == list(region.tokens)
    for token in range(len(WORDS.texts)):
        assert made.successor(token) in WORDS.region_of(token).tokens


def test_each_region_has_the_mistakes_and_doubts_of_its_mix(tiny: Design) -> None:
    names = [(0.925, True), (0.675, True), (0.475, True), (0.875, False), (0.675, False),
             (0.475, False)]  # fmt: skip
    for region in WORDS.regions:
        found = Counter(
            (round(tiny.confidence(token), 4), tiny.guess(token) == tiny.successor(token))
            for token in region.tokens
        )

        mix = dict(zip(names, REGION_MIX[region.name], strict=True))
        assert +found == +Counter({**mix, (1.0, True): 32 - sum(mix.values())})
