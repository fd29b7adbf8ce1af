"""Whether two models speak the same tokens, so that one can draft for the other.

Source: llama.cpp, `common_speculative_are_compatible`: the same kind of tokenizer, the same first and
last token where they are added, sizes no further apart than 128, and the same text of every token from
the fifth on. Builds translate between other vocabularies through text, or refuse them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tunerd.core.gguf import ArrayValue, Header, read_header
from tunerd.core.gguf_source import ByteSource
from tunerd.core.model_keys import Keys

_TOKENS = "tokenizer.ggml.tokens"
_KIND = "tokenizer.ggml.model"
# (whether the token is added, which one it is)
_ENDS = {
    "first": ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id"),
    "last": ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id"),
}
_MOST_APART = 128
_FIRST_COMPARED = 5
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model: `stored` are their lengths and texts as in the file.

    `ends` are what is put before and behind a text, by name: whether it is, and which token; None
    where the file does not say.
    """

    kind: str | None
    n_tokens: int
    stored: bytes
    ends: tuple[tuple[str, bool | None, int | None], ...]

    def texts(self) -> Iterator[bytes]:
        """Every token in order."""
        at = 0
        while at < len(self.stored):
            (length,) = _LENGTH.unpack_from(self.stored, at)
            at += _LENGTH.size
            yield self.stored[at : at + length]
            at += length


def read_vocabulary(source: ByteSource) -> Vocabulary | None:
    """The vocabulary of a model file; None where it has none.

    Raises:
        ModelFileError: The header is damaged.
    """
    header = read_header(source)
    tokens = header.metadata.get(_TOKENS)
    if not isinstance(tokens, ArrayValue) or tokens.span is None:
        return None
    keys = Keys(header.metadata, source.name)
    return Vocabulary(
        kind=keys.text(_KIND),
        n_tokens=tokens.length,
        stored=source.read_at(*tokens.span),
        ends=tuple(
            (name, _flag(header, added), keys.number(token))
            for name, (added, token) in _ENDS.items()
        ),
    )


def why_apart(target: Vocabulary | None, draft: Vocabulary | None) -> str | None:
    """Why one cannot draft for the other; None where it can."""
    if target is None or draft is None:
        return "one of the two files has no vocabulary"
    if target.kind != draft.kind:
        return f"its tokenizer is {draft.kind}, the model's is {target.kind}"
    for (name, added, token), (_, its_added, its_token) in zip(
        target.ends, draft.ends, strict=True
    ):
        if None not in (added, its_added) and added != its_added:
            return f"only one of the two adds a {name} token"
        if added and None not in (token, its_token) and token != its_token:
            return f"its {name} token is {its_token}, the model's is {token}"
    if abs(target.n_tokens - draft.n_tokens) > _MOST_APART:
        return f"it has {draft.n_tokens} tokens, the model {target.n_tokens}"
    if target.stored == draft.stored:
        return None
    pairs = enumerate(zip(target.texts(), draft.texts(), strict=False))
    for number, (wanted, found) in islice(pairs, _FIRST_COMPARED, None):
        if wanted != found:
            return f"token {number} is another one"
    return None


def _flag(header: Header, key: str) -> bool | None:
    value = header.metadata.get(key)
    return value if isinstance(value, bool) else None
