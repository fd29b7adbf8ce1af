"""What an exact engine does with a designed model: its tokens, and what speculation counts.

The blocks of a designed model add nothing worth counting, so the logits after a token depend on
that token alone: those of the trunk are the head times its embedding, those of the MTP block the
head times the part of the embedding that its input projection lets through. The truth is computed
from the tensors of a file as they are stored, so a test compares an engine with the weights that
it really read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

from tunerd.tryout.designed import SPECIAL, byte_characters, vocabulary

DRAFT_CANDIDATES = 10
"""Over how many tokens llama.cpp normalises the probability of a drafted one; ik takes all.

Source: llama.cpp common/speculative.cpp (top-k 10 sampler of a draft), ik_llama.cpp
common/sampling.cpp (common_sampler_sample_speculative).
"""

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

# How the `llama-bpe` pre-tokenizer cuts text into pieces.
# Source: llama.cpp, unicode regex of LLAMA_VOCAB_PRE_TYPE_LLAMA3; compared with what each engine's
# /tokenize answers in tests/integration/tryout/test_designed.py.
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
_CUT_SPECIAL = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL) + ")")


@cache
def _ids() -> dict[str, int]:
    return {text: token for token, text in enumerate(vocabulary().texts)}


def encode(text: str) -> tuple[int, ...]:
    """The tokens that every engine makes of `text`, special tokens included."""
    tokens: list[int] = []
    for part in _CUT_SPECIAL.split(text):
        if part in SPECIAL:
            tokens.append(_ids()[part])
            continue
        for piece in _PIECE.findall(part):
            tokens.extend(_piece(piece))
    return tuple(tokens)


def _piece(piece: str) -> Iterable[int]:
    characters = byte_characters()
    written = "".join(characters[byte] for byte in piece.encode())
    if written in _ids():
        return (_ids()[written],)
    return (_ids()[character] for character in written)


@dataclass(frozen=True, slots=True)
class Counts:
    """What speculation does during one request; `steps` are the passes of the target after the first token.

    Accepted tokens are counted at the first, second, ... place of a draft.
    """

    steps: int
    drafted: int
    accepted_by_position: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)


@dataclass(frozen=True, slots=True)
class Truth:
    """Successor, draft and confidence of every token.

    `confidence` is the draft's probability over its ten best candidates, `confidence_of_all` the
    one over the whole vocabulary. `margin` is by how much the successor's logit leads in the
    trunk. Without an MTP block the drafts are None.
    """

    successor: Tokens
    margin: Floats
    guess: Tokens | None = None
    confidence: Floats | None = None
    confidence_of_all: Floats | None = None

    def generate(self, last_token: int, n_predict: int) -> tuple[int, ...]:
        """The `n_predict` tokens that follow a prompt that ends in `last_token`."""
        tokens = []
        for _ in range(n_predict):
            last_token = int(self.successor[last_token])
            tokens.append(last_token)
        return tuple(tokens)

    def text(self, last_token: int, n_predict: int) -> str:
        """The same as text."""
        return vocabulary().decode(self.generate(last_token, n_predict))

    def speculate(
        self,
        last_token: int,
        n_predict: int,
        n_max: int,
        p_min: float = 0.0,
        *,
        first_draft_free: bool = False,
        ignores_p_min: bool = False,
        candidates: int | None = DRAFT_CANDIDATES,
    ) -> Counts:
        """What a request drafts and accepts at temperature 0.

        A draft ends before the first token that is less likely than `p_min`. It is never longer
        than what is left to predict less one, since the target adds a token of its own.

        Args:
            last_token: Last token of the prompt.
            n_predict: Tokens that the request asks for.
            n_max: Longest draft.
            p_min: Least confidence that keeps a drafted token.
            first_draft_free: The first token of a draft is proposed whatever its confidence, and
                ends the draft if that is too low (ik_llama.cpp).
            ignores_p_min: The engine takes p_min and does nothing with it (llama.cpp of 16 to 19
                May 2026).
            candidates: Over how many tokens the confidence is normalised: 10, or None for all.
        """
        gate = 0.0 if ignores_p_min else p_min
        drafted, accepted = 0, list[int]()
        last_token = int(self.successor[last_token])
        left = n_predict - 1
        while left > 0:
            limit = min(n_max, left - 1)
            draft = tuple(self._draft(last_token, limit, gate, first_draft_free, candidates))
            accepted.append(self._accepted(last_token, draft))
            drafted += len(draft)
            left -= accepted[-1] + 1
            for _ in range(accepted[-1] + 1):
                last_token = int(self.successor[last_token])
        by_position = tuple(sum(n > place for n in accepted) for place in range(n_max))
        return Counts(len(accepted), drafted, by_position)

    def _draft(
        self, token: int, limit: int, gate: float, first_free: bool, candidates: int | None
    ) -> Iterator[int]:
        guess, confidence = self.guess, self.confidence
        if candidates is None:
            confidence = self.confidence_of_all
        if guess is None or confidence is None:
            return
        for position in range(limit):
            is_sure = float(confidence[token]) >= gate
            if not is_sure and not (first_free and position == 0):
                return
            token = int(guess[token])
            yield token
            if not is_sure:
                return

    def _accepted(self, token: int, draft: tuple[int, ...]) -> int:
        for n_right, guessed in enumerate(draft):
            token = int(self.successor[token])
            if guessed != token:
                return n_right
        return len(draft)


def read_truth(path: Path) -> Truth:
    """The truth of a designed model, computed from the tensors of its file."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

    def values(name: str) -> Floats:
        found: Floats = dequantize(tensors[name].data, tensors[name].tensor_type)
        return found

    embedding, head = _normalised(values("token_embd.weight")), values("output.weight")
    logits = embedding @ head.T
    top = np.partition(logits, -2, axis=1)
    successor, margin = np.argmax(logits, axis=1), top[:, -1] - top[:, -2]
    projections = [name for name in tensors if name.endswith("nextn.eh_proj.weight")]
    if not projections:
        return Truth(successor, margin)
    by_token, by_state = np.hsplit(values(projections[0]), 2)
    assert not np.any(by_state), "the MTP block looks at the hidden state"
    logits = _normalised(embedding @ by_token.T) @ head.T
    return Truth(
        successor=successor,
        margin=margin,
        guess=np.argmax(logits, axis=1),
        confidence=_confidence(np.sort(logits, axis=1)[:, -DRAFT_CANDIDATES:]),
        confidence_of_all=_confidence(logits),
    )


def _normalised(rows: Floats) -> Floats:
    """Rows with a root mean square of one, as RMS norms with unit weights leave them."""
    mean_square = np.mean(rows * rows, axis=1, keepdims=True)
    scaled: Floats = rows / np.sqrt(mean_square + np.float32(1e-6))
    return scaled


def _confidence(logits: Floats) -> Floats:
    """Softmax probability of the best token of each row."""
    confidence: Floats = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    return confidence
