"""The texts that are sent: forms with words to fill in, and filler of any length.

A prompt is never sent twice within one server life. Each begins with a reference number of its own,
so that no cache knows its first tokens, and is filled in otherwise than those before it as long as
the form has words left, so that no drafter can replay an earlier answer. Its last word never changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tunerd.errors import ConfigError

SCHEMA = 1
MTP_KINDS = (
    "code_python",
    "code_cpp",
    "explain_concept",
    "summarize",
    "qa_factual",
    "translation",
    "creative_short",
    "stepwise_math",
    "long_code_review",
)
# The kinds of which workloads speak, by the form that stands for each.
_SAME_KIND = MappingProxyType(
    {
        "code": "code_python",
        "tool": "code_python",  # the arguments of a call are nearest to code
        "chat": "explain_concept",
        "summary": "summarize",
        "math": "stepwise_math",
        "creative": "creative_short",
    }
)
_FILLER_PARTS = ("opening", "subject", "verb", "object", "ending")
_NONCE_LETTERS = 8
_REFERENCE = "Reference {nonce}."


@dataclass(frozen=True, slots=True)
class Form:
    """One text with words to fill in.

    `words` are the lists by name; `least_tokens` and `most_tokens` are what a filled-in text has in a
    common vocabulary, without the reference number.
    """

    kind: str
    text: str
    words: Mapping[str, tuple[str, ...]]
    least_tokens: int
    most_tokens: int

    @property
    def n_variants(self) -> int:
        """How many texts it gives."""
        return math.prod(len(words) for words in self.words.values())

    def variant(self, number: int) -> str:
        """One of them, without a reference number; `number` counts from 0."""
        chosen = {}
        for name, words in self.words.items():
            number, at = divmod(number, len(words))
            chosen[name] = words[at]
        return self.text.format(**chosen)

    def variants(self) -> Iterable[str]:
        """All of them."""
        return (self.variant(number) for number in range(self.n_variants))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text as it is sent; `prompt_id` is unlike that of every other one."""

    prompt_id: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class PromptBook:
    """All forms by kind, and the parts of filler sentences."""

    forms: Mapping[str, Form]
    filler: Mapping[str, tuple[str, ...]]

    def form(self, kind: str) -> Form:
        """The form of a kind, by its own name or by that which workloads use.

        Raises:
            ConfigError: there is none.
        """
        found = self.forms.get(_SAME_KIND.get(kind, kind))
        if found is None:
            known = ", ".join([*self.forms, *_SAME_KIND])
            raise ConfigError(f"no prompts of kind `{kind}`", hint=f"one of {known}")
        return found


def read_prompts(data: Mapping[str, Any]) -> PromptBook:
    """The book that a parsed prompt file holds.

    Raises:
        ConfigError: it is no prompt file, or of a newer tunerd.
    """
    if data.get("schema") != SCHEMA:
        raise ConfigError(f"prompt file of an unknown form: {data.get('schema')!r}")
    try:
        forms = {row["kind"]: _form(row) for row in data["prompt"]}
        filler = {part: tuple(data["filler"][part]) for part in _FILLER_PARTS}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("the prompt file is damaged", cause=repr(error)) from error
    return PromptBook(MappingProxyType(forms), MappingProxyType(filler))


def _form(row: Mapping[str, Any]) -> Form:
    words = {name: tuple(row[name]) for name in row if name not in {"kind", "text", "tokens"}}
    least, most = row["tokens"]
    form = Form(row["kind"], row["text"], MappingProxyType(words), least, most)
    if not next(iter(form.variants()), ""):
        raise ValueError(row["kind"])
    return form


@dataclass
class PromptStock:
    """Hands out prompts that this server life has not seen.

    `used` are the prompt ids that the life has seen before, from earlier runs.
    """

    book: PromptBook
    rng: random.Random
    used: Collection[str] = ()
    repeated_kinds: set[str] = field(default_factory=set)
    _nonces: set[str] = field(default_factory=set)
    _left: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take the reference numbers of earlier runs out of the stock."""
        self._nonces |= {name.rpartition("#")[2] for name in self.used}

    def take(self, kind: str) -> Prompt:
        """A fresh prompt; kinds whose words are used up are noted in `repeated_kinds`."""
        form = self.book.form(kind)
        number = self._variant(form.kind, form.n_variants)
        nonce = self._nonce()
        text = f"{_REFERENCE.format(nonce=nonce)}\n\n{form.variant(number)}"
        return Prompt(f"{form.kind}-{number}#{nonce}", kind, text)

    def take_long(self, kind: str, n_letters: int) -> Prompt:
        """A fresh prompt that is preceded by filler, about `n_letters` long altogether."""
        prompt = self.take(kind)
        head, _, question = prompt.text.partition("\n\n")
        filler = self.filler(max(0, n_letters - len(prompt.text)))
        return Prompt(f"long-{prompt.prompt_id}", kind, f"{head}\n\n{filler}\n\n{question}")

    def filler(self, n_letters: int) -> str:
        """Sentences that no other text has, to fill about `n_letters`."""
        sentences: list[str] = []
        length = 0
        while length < n_letters:
            parts = [self.rng.choice(self.book.filler[part]) for part in _FILLER_PARTS]
            sentence = " ".join(parts).format(n=self.rng.randrange(2, 9000))
            sentence = sentence.replace("  ", " ")
            sentences.append(sentence)
            length += len(sentence) + 1
        return " ".join(sentences)

    def _variant(self, kind: str, n_variants: int) -> int:
        if kind not in self._left:
            seen = self._seen(kind)
            left = [n for n in range(n_variants) if n not in seen]
            self.rng.shuffle(left)
            self._left[kind] = left
        if not self._left[kind]:
            self.repeated_kinds.add(kind)
            self._left[kind] = self.rng.sample(range(n_variants), n_variants)
        return self._left[kind].pop()

    def _seen(self, kind: str) -> set[int]:
        head = f"{kind}-"
        names = (name.removeprefix("long-").rpartition("#")[0] for name in self.used)
        numbers = (name[len(head) :] for name in names if name.startswith(head))
        return {int(number) for number in numbers if number.isdigit()}

    def _nonce(self) -> str:
        while True:
            nonce = f"{self.rng.getrandbits(4 * _NONCE_LETTERS):0{_NONCE_LETTERS}x}"
            if nonce not in self._nonces:
                self._nonces.add(nonce)
                return nonce
