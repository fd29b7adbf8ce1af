"""What an exact engine does with a designed model, computed from the weights as they are stored.

The blocks of a designed model add nothing worth counting, so the logits after a token depend on
that token alone: those of the trunk are the head times its embedding, those of the MTP block the
head times the part of the embedding that its input projection lets through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.core.designed_vocab import Region, vocabulary
from tunerd.errors import ModelFileError

DRAFT_CANDIDATES = 10
"""Over how many tokens llama.cpp normalises the probability of a drafted one; ik takes all.

Source: llama.cpp common/speculative.cpp (top-k 10 sampler of a draft), ik_llama.cpp
common/sampling.cpp (common_sampler_sample_speculative).
"""

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights that decide, as an engine reads them: dequantised, padding tokens cut off.

    `embedding` and `head` have the shape (tokens, width), `projection` (width, 2 * width): token
    half first, hidden state second. It is None where there is no MTP block.
    """

    embedding: Floats
    head: Floats
    projection: Floats | None
    n_padding: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What speculation does during one request.

    `steps` are the passes of the target after the first token. `drafted_by_position` and
    `accepted_by_position` count tokens at the first, second, ... place of a draft.
    """

    predicted: int
    drafted: int
    accepted: int
    drafts: int
    steps: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]

    @property
    def acceptance_ratio(self) -> float | None:
        """Accepted over drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens that one pass of the target yields; None without any pass."""
        return (self.predicted - 1) / self.steps if self.steps else None


@dataclass(frozen=True, slots=True)
class Truth:
    """Successor, draft and confidence of every token.

    `confidence` is the draft's probability over its ten best candidates, `confidence_of_all` the
    one over the whole vocabulary. `margin` is by how much the successor's logit leads in the
    trunk, `draft_margin` the same for the guess. Without an MTP block the drafts are None.
    """

    successor: Tokens
    margin: Floats
    guess: Tokens | None
    confidence: Floats | None
    confidence_of_all: Floats | None
    draft_margin: Floats | None

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
        n_min: int = 0,
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
            n_min: Shortest draft that is kept.
            first_draft_free: The first token of a draft is proposed whatever its confidence, and
                ends the draft if that is too low (ik_llama.cpp).
            ignores_p_min: The engine takes p_min and does nothing with it (llama.cpp of 16 to 19
                May 2026).
            candidates: Over how many tokens the confidence is normalised: 10, or None for all.
        """
        gate = 0.0 if ignores_p_min else p_min
        tally = _Tally(n_max)
        last_token = int(self.successor[last_token])
        left = n_predict - 1
        while left > 0:
            limit = min(n_max, left - 1)
            draft = tuple(self._draft(last_token, limit, gate, first_draft_free, candidates))
            if len(draft) < n_min:
                draft = ()
            accepted = self._accepted(last_token, draft)
            tally.add(len(draft), accepted)
            left -= accepted + 1
            for _ in range(accepted + 1):
                last_token = int(self.successor[last_token])
        return tally.counts(n_predict)

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


class _Tally:
    """Counts that grow step by step."""

    def __init__(self, n_max: int) -> None:
        self._drafted = [0] * n_max
        self._accepted = [0] * n_max
        self._drafts = 0
        self._steps = 0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """One pass of the target."""
        self._steps += 1
        self._drafts += 1 if n_drafted else 0
        for position in range(n_drafted):
            self._drafted[position] += 1
        for position in range(n_accepted):
            self._accepted[position] += 1

    def counts(self, n_predict: int) -> Counts:
        """All of it."""
        return Counts(
            predicted=n_predict,
            drafted=sum(self._drafted),
            accepted=sum(self._accepted),
            drafts=self._drafts,
            steps=self._steps,
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
        )


def compute_truth(weights: StoredWeights) -> Truth:
    """The truth of a model with these weights.

    Raises:
        ModelFileError: The MTP block looks at the hidden state, so that its guesses do not follow
            from the token alone.
    """
    embedding = _normalised(weights.embedding)
    logits = embedding @ weights.head.T
    successor, margin = _best(logits, weights.n_padding)
    if weights.projection is None:
        return Truth(successor, margin, None, None, None, None)

    width = embedding.shape[1]
    if np.any(weights.projection[:, width:]):
        raise ModelFileError("this MTP block uses the hidden state, so it is no designed model")
    passed = _normalised(embedding @ weights.projection[:, :width].T)
    logits = passed @ weights.head.T
    guess, draft_margin = _best(logits, weights.n_padding)
    return Truth(
        successor=successor,
        margin=margin,
        guess=guess,
        confidence=_confidence(logits, weights.n_padding, DRAFT_CANDIDATES),
        confidence_of_all=_confidence(logits, weights.n_padding, None),
        draft_margin=draft_margin,
    )


def _normalised(rows: Floats) -> Floats:
    """Rows with a root mean square of one, as RMS norms with unit weights leave them."""
    mean_square = np.mean(rows * rows, axis=1, keepdims=True)
    scaled: Floats = rows / np.sqrt(mean_square + np.float32(1e-6))
    return scaled


def _best(logits: Floats, n_padding: int) -> tuple[Tokens, Floats]:
    """The best token of each row, and its lead over the second best."""
    top = np.partition(logits, -2, axis=1)[:, -2:]
    second = np.maximum(top[:, 0], 0) if n_padding else top[:, 0]
    return np.argmax(logits, axis=1), (top[:, 1] - second).astype(np.float32)


def _confidence(logits: Floats, n_padding: int, candidates: int | None) -> Floats:
    """Softmax probability of the best token of each row; padding tokens have a logit of zero."""
    shown = logits
    if n_padding:
        n_zeros = n_padding if candidates is None else min(n_padding, candidates)
        shown = np.pad(logits, ((0, 0), (0, min(n_zeros, DRAFT_CANDIDATES))))
    if candidates is not None:
        shown = np.partition(shown, -candidates, axis=1)[:, -candidates:]
    best = shown.max(axis=1, keepdims=True)
    total = np.exp(shown - best).sum(axis=1)
    if candidates is None and n_padding > DRAFT_CANDIDATES:
        total = total + (n_padding - DRAFT_CANDIDATES) * np.exp(-best[:, 0])
    confidence: Floats = (1 / total).astype(np.float32)
    return confidence


def region_counts(
    truth: Truth, region: Region, n_max: int, p_min: float, *, n_predict: int | None = None
) -> Counts:
    """What a request drafts that goes once round a region (or for `n_predict` tokens)."""
    n_tokens = len(region.tokens) + 1 if n_predict is None else n_predict
    return truth.speculate(region.first, n_tokens, n_max, p_min)
