"""Designed models: weights of a real architecture, chosen so that the behaviour is known.

Every block adds almost nothing, so the residual stream is the embedding of the last token. The
head holds one logit for each planned pair of tokens, in two halves. The MTP block sees the first
half only: there the plan of a token has a favourite, which is its successor or, for mistaken
tokens, a wrong one, and rivals that lower the confidence. The second half corrects the plan, so
that the trunk, which sees both, always finds the successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tunerd.core.designed_code import codewords
from tunerd.core.designed_quant import BLOCK, Q8_0_LEVELS, Quant, decode, encode, pack_q8_0
from tunerd.core.designed_shape import (
    SHAPES,
    Fill,
    Shape,
    TensorSpec,
    check_shape,
    metadata,
    shape_named,
    tensor_specs,
)
from tunerd.core.designed_truth import (
    Counts,
    StoredWeights,
    Truth,
    compute_truth,
    region_counts,
)
from tunerd.core.designed_vocab import Region, Vocabulary, vocabulary
from tunerd.errors import ConfigError

__all__ = [
    "REGION_MIX",
    "SHAPES",
    "Counts",
    "Design",
    "Fill",
    "Quant",
    "Region",
    "Shape",
    "StoredWeights",
    "TensorSpec",
    "Truth",
    "Vocabulary",
    "compute_truth",
    "design",
    "metadata",
    "region_counts",
    "shape_named",
    "vocabulary",
]

_TRUNK_LOGIT = 20.0
_DRAFT_LOGIT = 14.0
"""Logit of a draft's favourite: high enough that all tokens without a plan together weigh less
than a percent, so that the confidence is the same over ten candidates and over all."""
_LEAST_MARGIN = 4.0
_SILENT_RMS = 1e-3
"""What one block adds to a residual stream of one. Two dozen of them shift no logit by 0.1."""
_BANK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tier:
    """How the MTP block plans a token: with what confidence, against how many rivals, right or not.

    Confidences keep clear of the p-min values that people use, the multiples of 0.05.
    """

    confidence: float
    n_rivals: int
    is_right: bool


CERTAIN = Tier(1.0, 0, is_right=True)
LIKELY = Tier(0.925, 1, is_right=True)
FAIR = Tier(0.675, 1, is_right=True)
FAINT = Tier(0.475, 2, is_right=True)
BOLD_MISTAKE = Tier(0.875, 1, is_right=False)
FAIR_MISTAKE = Tier(0.675, 1, is_right=False)
FAINT_MISTAKE = Tier(0.475, 2, is_right=False)

_MIXED_TIERS = (LIKELY, FAIR, FAINT, BOLD_MISTAKE, FAIR_MISTAKE, FAINT_MISTAKE)

# Of the 128 words of a region, how many have each of the tiers above; the others are certain.
REGION_MIX: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "code": (10, 6, 3, 2, 3, 5),
        "math": (12, 8, 4, 3, 5, 8),
        "translation": (14, 9, 5, 4, 6, 10),
        "factual": (14, 10, 5, 4, 8, 12),
        "summary": (14, 10, 6, 5, 9, 14),
        "explain": (14, 12, 7, 6, 11, 16),
        "chat": (14, 12, 8, 8, 14, 20),
        "creative": (14, 12, 10, 12, 22, 34),
    }
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The logits of one token after another: of the MTP block, and of the trunk."""

    token: int
    draft_logit: float
    trunk_logit: float


@dataclass(frozen=True, slots=True)
class Design:
    """A model that can be written: what it has, and the bytes of every tensor.

    `tensors` are in file order; `stored` makes the bytes of one, so that a file can be written
    without holding all of it in memory.
    """

    shape: Shape
    seed: int
    vocabulary: Vocabulary
    tensors: tuple[TensorSpec, ...]
    embedding: npt.NDArray[np.float32]
    head: npt.NDArray[np.float32]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(spec.n_bytes for spec in self.tensors)

    def stored(self, spec: TensorSpec) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, one row of the array for each row of the tensor."""
        match spec.fill:
            case Fill.EMBEDDING:
                return encode(_padded(self.embedding, spec), spec.quant)
            case Fill.HEAD:
                return encode(_padded(self.head, spec), spec.quant)
            case Fill.HALF:
                return encode(_half_projection(self.shape.n_embd), spec.quant)
            case Fill.ONES:
                return encode(np.ones(spec.dims, np.float32), spec.quant)
            case Fill.DECAY:
                return encode(-np.linspace(0.5, 4.0, spec.n_values, dtype=np.float32), spec.quant)
            case Fill.INPUT | Fill.SILENT if self.shape.is_hollow:
                return np.zeros((1, spec.n_bytes), np.uint8)
            case Fill.INPUT:
                return self._random(spec, rms=spec.dims[-1] ** -0.5)
            case Fill.SILENT:
                return self._random(spec, rms=_SILENT_RMS * spec.dims[-1] ** -0.5)

    def _random(self, spec: TensorSpec, rms: float) -> npt.NDArray[np.uint8]:
        """Cut from one stretch of noise: as good as fresh for this use, and fast at any size."""
        start = sum(spec.name.encode()) * BLOCK % _BANK_BYTES
        n_rows = spec.n_values // spec.dims[-1]
        levels = np.resize(np.roll(_noise(self.seed), -start), spec.n_values).reshape(
            n_rows, spec.dims[-1]
        )
        # Seventeen equal steps around zero have a root mean square of sqrt(24) steps.
        step = rms / 24.0**0.5
        if spec.quant is Quant.Q8_0:
            return pack_q8_0(levels, np.float16(step))
        return encode(levels.astype(np.float32) * np.float32(step), spec.quant)

    def weights(self) -> StoredWeights:
        """The weights that decide, rounded as they are stored."""
        quant = self.shape.quant
        projection = None
        if self.shape.has_mtp:
            projection = _half_projection(self.shape.n_embd)
        width = self.shape.n_embd
        return StoredWeights(
            embedding=decode(encode(self.embedding, quant), quant, width),
            head=decode(encode(self.head, quant), quant, width),
            projection=projection,
            n_padding=self.shape.n_tokens - self.vocabulary.n_tokens,
        )

    def truth(self) -> Truth:
        """What an exact engine does with this model."""
        return compute_truth(self.weights())


def design(shape: Shape, seed: int = 0) -> Design:
    """A designed model of this shape; the same seed gives the same bytes.

    Raises:
        ConfigError: No engine could load the shape, or it is too narrow for the plan.
    """
    check_shape(shape)
    words = vocabulary()
    rng = np.random.default_rng(seed)
    n = 1 << ((shape.n_embd // 2).bit_length() - 1)
    first, second = codewords(words.n_tokens, n, rng), codewords(words.n_tokens, n, rng)
    plan = _plan(words, rng)
    embedding = np.zeros((words.n_tokens, shape.n_embd), np.float32)
    half = shape.n_embd // 2
    embedding[:, :n] = first
    embedding[:, half : half + n] = second
    made = Design(
        shape=shape,
        seed=seed,
        vocabulary=words,
        tensors=tensor_specs(shape),
        embedding=embedding,
        head=_head(plan, first, second, shape.n_embd, rng),
    )
    _check(made, plan)
    return made


def _plan(words: Vocabulary, rng: np.random.Generator) -> list[tuple[_Entry, ...]]:
    """For each token, the entries of its plan; the first is its successor."""
    plan: list[tuple[_Entry, ...]] = [()] * words.n_tokens
    for region in words.regions:
        cycle = rng.permutation(np.array(region.tokens))
        tiers = _tiers(region, rng)
        for position, token in enumerate(cycle):
            successor = int(cycle[(position + 1) % len(cycle)])
            free = [word for word in region.tokens if word not in (token, successor)]
            others = rng.choice(free, tiers[position].n_rivals, replace=False).tolist()
            plan[token] = _entries(tiers[position], successor, others)
        entry_points = iter(rng.permutation(cycle).tolist() * words.n_tokens)
        for token in range(words.regions[0].first):
            if words.region_of(token) == region:
                plan[token] = _entries(CERTAIN, next(entry_points), [])
    return plan


def _tiers(region: Region, rng: np.random.Generator) -> list[Tier]:
    counts = REGION_MIX[region.name]
    tiers = [tier for tier, n in zip(_MIXED_TIERS, counts, strict=True) for _ in range(n)]
    tiers += [CERTAIN] * (len(region.tokens) - len(tiers))
    return [tiers[index] for index in rng.permutation(len(tiers))]


def _entries(tier: Tier, successor: int, others: list[int]) -> tuple[_Entry, ...]:
    if not tier.n_rivals:
        return (_Entry(successor, _DRAFT_LOGIT, _TRUNK_LOGIT),)
    # p = 1 / (1 + n exp(-lead)) for n rivals of equal logit.
    lead = np.log(tier.n_rivals * tier.confidence / (1 - tier.confidence))
    behind = _DRAFT_LOGIT - float(lead)
    if tier.is_right:
        rivals = [_Entry(other, behind, 0.0) for other in others[: tier.n_rivals]]
        return (_Entry(successor, _DRAFT_LOGIT, _TRUNK_LOGIT), *rivals)
    favourite = _Entry(others[0], _DRAFT_LOGIT, 0.0)
    rivals = [_Entry(other, behind, 0.0) for other in others[1 : tier.n_rivals]]
    return (_Entry(successor, behind, _TRUNK_LOGIT), favourite, *rivals)


def _head(
    plan: list[tuple[_Entry, ...]],
    first: npt.NDArray[np.float32],
    second: npt.NDArray[np.float32],
    width: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.float32]:
    """The head whose logits are the planned ones, exactly, with the smallest weights.

    A norm leaves the trunk's embedding with entries of sqrt(width / 2n) and the MTP block's, of
    which half is zero, with sqrt(width / n): `n` is the length of a codeword.
    """
    n, half = first.shape[1], width // 2
    in_draft, in_trunk = (width / n) ** 0.5, (width / (2 * n)) ** 0.5
    planned: list[list[tuple[int, _Entry]]] = [[] for _ in plan]
    for token, entries in enumerate(plan):
        for entry in entries:
            planned[entry.token].append((token, entry))
    head = np.zeros((len(plan), width), np.float32)
    for row, wanted in zip(head, planned, strict=True):
        if not wanted:
            continue
        tokens = [token for token, _ in wanted]
        seen = np.array([entry.draft_logit for _, entry in wanted]) / in_draft
        whole = np.array([entry.trunk_logit for _, entry in wanted]) / in_trunk
        row[:n] = _dithered(first[tokens], seen, rng)
        row[half : half + n] = _dithered(second[tokens], whole - seen, rng)
    return head


def _dithered(
    vectors: npt.NDArray[np.float32], products: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """A short vector with the given inner products, and a little noise that changes none of them.

    Sums of a few sign patterns take few values. All entries of one value would be rounded the same
    way, and such errors add up to ten times those of noise.
    """
    exact = vectors.astype(np.float64)
    n = exact.shape[1]
    # The entries of the shortest answer are sums of products / n with signs.
    noise = rng.uniform(-1, 1, n) * np.abs(products).sum() / (n * Q8_0_LEVELS)
    missing = products - exact @ noise
    dithered: npt.NDArray[np.float64] = noise + exact.T @ np.linalg.solve(exact @ exact.T, missing)
    return dithered


def _check(made: Design, plan: list[tuple[_Entry, ...]]) -> None:
    truth = made.truth()
    planned = np.array([entries[0].token for entries in plan])
    if np.any(truth.successor != planned) or float(truth.margin.min()) < _LEAST_MARGIN:
        raise ConfigError(
            f"n_embd {made.shape.n_embd} is too narrow for {made.vocabulary.n_tokens} tokens",
            cause=f"least lead of a successor's logit {float(truth.margin.min()):.1f},"
            f" at least {_LEAST_MARGIN:.0f} is needed",
            hint="give n_embd 512 or more",
        )


@lru_cache(maxsize=1)
def _noise(seed: int) -> npt.NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-8, 9, _BANK_BYTES, dtype=np.int8)


def _half_projection(width: int) -> npt.NDArray[np.float32]:
    projection = np.zeros((width, 2 * width), np.float32)
    kept = np.arange(width // 2)
    projection[kept, kept] = 1.0
    return projection


def _padded(rows: npt.NDArray[np.float32], spec: TensorSpec) -> npt.NDArray[np.float32]:
    return np.pad(rows, ((0, spec.dims[0] - rows.shape[0]), (0, 0)))
