"""The vocabulary of designed models: words by kind of text, and bytes for everything else.

A token is a word with its leading space (` return`), a byte, or a special token, so that any text
can be a prompt. Every word belongs to one region, and a designed model never leaves the region of
the prompt's last token: a prompt that ends in ` creative`, or in any other creative word, gets
creative text. Where a prompt ends in something else, its last byte decides (`region_of_byte`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from types import MappingProxyType

from tunerd.core.designed_words import REGION_WORDS

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
_N_BYTES = 256

# Closes a turn only after the assistant, so that a prompt ends in the user's own last word, and so
# that the next turn's prompt begins with this turn's prompt and answer (prefix caches can reuse it).
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ ' ' + (message.content | trim) + '<|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message.role + '\\n ' + (message.content | trim) }}"
    "{% endif %}"
    "{% endfor %}"
)

# How the `llama-bpe` pre-tokenizer cuts text into pieces.
# Source: llama.cpp, unicode regex of LLAMA_VOCAB_PRE_TYPE_LLAMA3; compared with what each engine's
# /tokenize answers in tests/integration/test_designed_engines.py.
_LETTER = r"[^\W\d_]"
_PIECE = re.compile(
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
    rf"|(?:[^\r\n\w]|_)?{_LETTER}+"
    r"|\d{1,3}"
    r"| ?(?:[^\s\w]|_)+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
_CUT_SPECIAL = re.compile("(" + "|".join(re.escape(text) for text in _SPECIAL) + ")")

_CODE_ENDINGS = frozenset(b"{}()[]<>;:=/\\`_&|#@$\n\t")
_MATH_ENDINGS = frozenset(b"0123456789+*%^-")
_FALLBACK_REGION = "chat"


class TokenKind(IntEnum):
    """Kinds of token, numbered as GGUF numbers them."""

    NORMAL = 1
    CONTROL = 3
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class Region:
    """The tokens of one kind of text: ids `first` up to, not including, `end`."""

    name: str
    first: int
    end: int

    def __contains__(self, token: int) -> bool:
        return self.first <= token < self.end

    @property
    def tokens(self) -> range:
        """Its token ids."""
        return range(self.first, self.end)


@cache
def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in the tokens of a GPT-2 vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(_N_BYTES, 2 * _N_BYTES))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(_N_BYTES))


def region_of_byte(byte: int) -> str:
    """The region that a prompt selects whose last token is this byte."""
    if byte in _CODE_ENDINGS:
        return "code"
    if byte in _MATH_ENDINGS:
        return "math"
    return {ord("?"): "factual", ord("!"): "creative"}.get(byte, _FALLBACK_REGION)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All tokens, in order of id.

    `texts` is as stored in a GGUF file (bytes written as printable characters). `cues` are the
    names of the regions without a leading space, so that a prompt may be nothing but `code`; the
    words of the regions are the last tokens.
    """

    texts: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    regions: tuple[Region, ...]
    ids: Mapping[str, int]

    @property
    def n_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.texts)

    @property
    def end_of_text(self) -> int:
        """The token that begins a text and ends one."""
        return self.ids[END_OF_TEXT]

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer."""
        return self.ids[TURN_END]

    def region(self, name: str) -> Region:
        """The region of that name; KeyError if there is none."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def region_of(self, token: int) -> Region:
        """The region in which a model goes on that has just read `token`."""
        for region in self.regions:
            if token in region:
                return region
        text = self.texts[token]
        if text in REGION_WORDS:
            return self.region(text)
        if len(text) == 1 and text in byte_characters():
            return self.region(region_of_byte(byte_characters().index(text)))
        return self.region(_FALLBACK_REGION)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens that every engine makes of `text`, special tokens included."""
        tokens: list[int] = []
        for part in _CUT_SPECIAL.split(text):
            if part in _SPECIAL:
                tokens.append(self.ids[part])
                continue
            for piece in _PIECE.findall(part):
                tokens.extend(self._piece(piece))
        return tuple(tokens)

    def _piece(self, piece: str) -> Iterable[int]:
        characters = byte_characters()
        written = "".join(characters[byte] for byte in piece.encode())
        if written in self.ids:
            return (self.ids[written],)
        return (self.ids[character] for character in written)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens left out as servers do."""
        values = {character: byte for byte, character in enumerate(byte_characters())}
        written = "".join(
            self.texts[token] for token in tokens if self.kinds[token] is TokenKind.NORMAL
        )
        return bytes(values[character] for character in written).decode(errors="replace")


@cache
def vocabulary() -> Vocabulary:
    """The one vocabulary that all designed models share."""
    space = byte_characters()[ord(" ")]
    texts = [*_SPECIAL, *byte_characters(), *REGION_WORDS]
    n_control = len(_SPECIAL)
    regions = []
    for name, words in REGION_WORDS.items():
        first = len(texts)
        texts.extend(space + word for word in words.split())
        regions.append(Region(name, first, len(texts)))
    kinds = [TokenKind.CONTROL] * n_control + [TokenKind.NORMAL] * (len(texts) - n_control)
    return Vocabulary(
        texts=tuple(texts),
        kinds=tuple(kinds),
        regions=tuple(regions),
        ids=MappingProxyType({text: token for token, text in enumerate(texts)}),
    )
