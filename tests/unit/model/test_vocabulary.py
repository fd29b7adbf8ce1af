"""Which models speak the same tokens, and what keeps others apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.gguf_bytes import MemorySource, gguf, number, pair, text
from tunerd.model.facts import why_apart
from tunerd.model.gguf import ValueType

WORDS = [f"word{n}" for n in range(200)]


def vocabulary(
    words: Sequence[str] = WORDS, *, kind: str = "gpt2", bos: int = 1, adds: bool | None = None
) -> MemorySource:
    keys = [
        text("tokenizer.ggml.model", kind),
        pair("tokenizer.ggml.tokens", ValueType.ARRAY, (ValueType.STRING, list(words))),
        number("tokenizer.ggml.bos_token_id", bos),
    ]
    if adds is not None:
        keys.append(pair("tokenizer.ggml.add_bos_token", ValueType.BOOL, adds))
    return MemorySource(gguf(keys))


def test_equal_vocabularies_go_together() -> None:
    assert why_apart(vocabulary(), vocabulary()) is None


def test_some_more_tokens_and_the_first_five_do_not_matter() -> None:
    padded = [*WORDS, *(f"more{n}" for n in range(128))]
    assert why_apart(vocabulary(), vocabulary(padded)) is None
    assert why_apart(vocabulary(), vocabulary([*"abcde", *WORDS[5:]])) is None


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (vocabulary(kind="llama"), "its tokenizer is llama, the model's is gpt2"),
        (vocabulary([*WORDS, *map(str, range(129))]), "it has 329 tokens, the model 200"),
        (vocabulary([*WORDS[:7], "other", *WORDS[8:]]), "token 7 is another one"),
        (MemorySource(gguf([number("n", 1)])), "one of the two files has no vocabulary"),
    ],
)
def test_what_keeps_two_apart_is_said(draft: MemorySource, reason: str) -> None:
    assert why_apart(vocabulary(), draft) == reason


def test_the_first_token_matters_where_it_is_added() -> None:
    assert why_apart(vocabulary(adds=True), vocabulary(adds=True, bos=2)) == (
        "its first token is 2, the model's is 1"
    )
    assert why_apart(vocabulary(adds=False), vocabulary(adds=False, bos=2)) is None
    assert why_apart(vocabulary(adds=True), vocabulary(adds=False)) == (
        "only one of the two adds a first token"
    )
