from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tunerd.core.designed_vocab import (
    END_OF_TEXT,
    TURN_END,
    TURN_START,
    TokenKind,
    vocabulary,
)
from tunerd.core.designed_words import REGION_WORDS

WORDS = vocabulary()


def test_every_region_has_128_words_of_its_own_and_begins_with_its_name() -> None:
    lists = [words.split() for words in REGION_WORDS.values()]

    assert [len(words) for words in lists] == [128] * 8
    assert len({word for words in lists for word in words}) == 8 * 128
    assert [words[0] for words in lists] == list(REGION_WORDS)


def test_a_word_with_its_space_is_one_token_of_its_region() -> None:
    for region in WORDS.regions:
        for word, token in zip(REGION_WORDS[region.name].split(), region.tokens, strict=True):
            assert WORDS.encode(" " + word) == (token,)
            assert WORDS.region_of(token) == region


def test_a_prompt_that_is_nothing_but_the_name_of_a_region_selects_it() -> None:
    for region in WORDS.regions:
        tokens = WORDS.encode(region.name)

        assert len(tokens) == 1
        assert WORDS.region_of(tokens[0]) == region


def test_the_last_byte_selects_the_region_of_any_other_prompt() -> None:
    endings = {
        "def f(x):": "code",
        "what is 6 * 7": "math",
        "who was that?": "factual",
        "sing!": "creative",
        "so it goes.": "chat",
        "élan": "chat",
    }
    for prompt, region in endings.items():
        assert WORDS.region_of(WORDS.encode(prompt)[-1]).name == region, prompt


def test_part_of_a_word_is_written_in_bytes() -> None:
    assert len(WORDS.encode(" retur")) == len(" retur")
    assert len(WORDS.encode(" returned")) == len(" returned")


def test_special_tokens_are_recognised_inside_text() -> None:
    tokens = WORDS.encode(f"{TURN_START}user\n code{TURN_END}{END_OF_TEXT}")

    assert tokens[0] == WORDS.ids[TURN_START]
    assert tokens[-3:] == (
        WORDS.encode(" code")[0],
        WORDS.end_of_turn,
        WORDS.end_of_text,
    )


@given(st.text())
def test_text_comes_back_from_its_tokens(text: str) -> None:
    plain = text.encode(errors="ignore").decode()
    for special in (TURN_START, TURN_END, END_OF_TEXT):
        plain = plain.replace(special, "")

    assert WORDS.decode(WORDS.encode(plain)) == plain


def test_control_tokens_have_no_text() -> None:
    control = [token for token, kind in enumerate(WORDS.kinds) if kind is TokenKind.CONTROL]

    assert len(control) == 3
    assert WORDS.decode(control) == ""
