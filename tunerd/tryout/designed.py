"""Designed models: tiny GGUF files whose every answer is known beforehand."""

from __future__ import annotations

import json
import math
import random
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tunerd import __version__
from tunerd.errors import UsageError
from tunerd.machine.files import Files, demand_free, destination, told
from tunerd.result import ActionResult

if TYPE_CHECKING:
    from gguf import GGUFWriter


_WORDS = Path(__file__).with_name("words.txt").read_text("utf-8").partition("\n")[2]
REGION_WORDS: Mapping[str, tuple[str, ...]] = {
    words[0]: words for words in (tuple(one.split()) for one in _WORDS.split("\n\n"))
}
"""The words by kind of text; the first of each kind is its name."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ends a text, begins a turn, ends a turn: the first three tokens."""
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

_CODE_ENDINGS = frozenset(b"{}()[]<>;:=/\\`_&|#@$\n\t")
_MATH_ENDINGS = frozenset(b"0123456789+*%^-")
_FALLBACK_REGION = "chat"


@dataclass(frozen=True, slots=True)
class Region:
    """The tokens of one kind of text: ids `first` up to, not including, `end`."""

    name: str
    first: int
    end: int

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


def _region_of_byte(byte: int) -> str:
    if byte in _CODE_ENDINGS:
        return "code"
    if byte in _MATH_ENDINGS:
        return "math"
    return {ord("?"): "factual", ord("!"): "creative"}.get(byte, _FALLBACK_REGION)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All tokens, in order of id.

    `texts` is as stored in a GGUF file (bytes written as printable characters): special tokens,
    bytes, the names of the regions without a leading space, so that a prompt may be nothing but
    `code`, and then the words of the regions.
    """

    texts: tuple[str, ...]
    regions: tuple[Region, ...]

    def region(self, name: str) -> Region:
        """The region of that name."""
        return next(region for region in self.regions if region.name == name)

    def region_of(self, token: int) -> Region:
        """The region in which a model goes on that has just read `token`."""
        for region in self.regions:
            if token in region.tokens:
                return region
        text = self.texts[token]
        if text in REGION_WORDS:
            return self.region(text)
        if text in SPECIAL:
            return self.region(_FALLBACK_REGION)
        return self.region(_region_of_byte(token - len(SPECIAL)))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens left out as servers do."""
        values = {character: byte for byte, character in enumerate(byte_characters())}
        written = "".join(self.texts[token] for token in tokens if token >= len(SPECIAL))
        return bytes(values[character] for character in written).decode(errors="replace")


@cache
def vocabulary() -> Vocabulary:
    """The one vocabulary that all designed models share."""
    space = byte_characters()[ord(" ")]
    texts = [*SPECIAL, *byte_characters(), *REGION_WORDS]
    regions = []
    for name, words in REGION_WORDS.items():
        first = len(texts)
        texts.extend(space + word for word in words)
        regions.append(Region(name, first, len(texts)))
    return Vocabulary(tuple(texts), tuple(regions))


class Fill(StrEnum):
    """What a tensor holds."""

    EMBEDDING = "embedding"
    HEAD = "head"
    HALF = "half"
    """The MTP block's input projection: the first half of the token's embedding, nothing else."""
    ONES = "ones"
    INPUT = "input"
    """Random, so that a block computes something."""
    SILENT = "silent"
    """Random and almost zero: what a block adds to the residual stream."""
    DECAY = "decay"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: `dims` as numpy has them (rows first), so the last is the length of a row.

    `kind` is the name of its type in a file, `q8_0` or `f32`.
    """

    name: str
    dims: tuple[int, ...]
    kind: str
    fill: Fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a designed model, named as GGUF names them; widths are multiples of 32.

    `n_embd` is at least twice the number of words. `n_layer` counts the trunk's blocks; an MTP
    block comes on top. Every `full_attention_interval`-th block has full attention, the others are
    recurrent. A file without its trunk only drafts, for a model of the same shape. `n_vocab` of None
    means as many tokens as there are words; a larger one is padded with unused tokens. `kind` is the
    type of the blocks' matrices.
    """

    n_layer: int = 4
    n_embd: int = 1056
    n_head: int = 4
    n_head_kv: int = 1
    head_dim: int = 128
    full_attention_interval: int = 4
    ssm_conv_kernel: int = 4
    ssm_state_size: int = 64
    ssm_group_count: int = 2
    ssm_time_step_rank: int = 4
    n_ff: int = 256
    is_moe: bool = False
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_expert: int = 64
    n_ff_shared: int = 64
    has_mtp: bool = True
    has_trunk: bool = True
    n_vocab: int | None = None
    context_length: int = 32768
    kind: str = "q8_0"

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return "qwen35moe" if self.is_moe else "qwen35"

    @property
    def n_block(self) -> int:
        """All blocks, the MTP block included."""
        return self.n_layer + (1 if self.has_mtp else 0)

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary, padding included."""
        return self.n_vocab if self.n_vocab is not None else len(vocabulary().texts)

    @property
    def ssm_inner_size(self) -> int:
        """Width of the recurrent layers' values."""
        return self.ssm_state_size * self.ssm_time_step_rank

    def is_recurrent(self, block: int) -> bool:
        """Whether a block has linear attention; the MTP block never has."""
        return block < self.n_layer and (block + 1) % self.full_attention_interval != 0


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(),
        "tiny-moe": Shape(is_moe=True),
        "tiny-nomtp": Shape(has_mtp=False),
        "tiny-moe-nomtp": Shape(is_moe=True, has_mtp=False),
        "tiny-mtp": Shape(has_trunk=False),
        "medium": Shape(
            n_layer=12,
            n_head=8,
            n_head_kv=2,
            head_dim=256,
            ssm_state_size=128,
            ssm_group_count=8,
            ssm_time_step_rank=16,
            n_ff=3328,
        ),
        # More bytes a token than arithmetic: a step that checks a draft reads them once.
        "f32": Shape(n_layer=12, n_ff=640, has_mtp=False, kind="f32"),
    }
)


def metadata(shape: Shape) -> dict[str, int | float | list[int]]:
    """The keys below `general.architecture`, without that prefix.

    Source:
        The keys that llama.cpp's and ik_llama.cpp's loaders of qwen35 and qwen35moe ask for.
    """
    rotated = min(shape.head_dim, 64)
    half = rotated // 2
    keys: dict[str, int | float | list[int]] = {
        "block_count": shape.n_block,
        "context_length": shape.context_length,
        "embedding_length": shape.n_embd,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": shape.full_attention_interval,
        "rope.dimension_count": rotated,
        # Time, height and width, as M-RoPE has them; together they cover the rotated pairs.
        "rope.dimension_sections": [half - 2 * (half // 3), half // 3, half // 3, 0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": shape.ssm_conv_kernel,
        "ssm.inner_size": shape.ssm_inner_size,
        "ssm.state_size": shape.ssm_state_size,
        "ssm.time_step_rank": shape.ssm_time_step_rank,
        "ssm.group_count": shape.ssm_group_count,
    }
    if shape.has_mtp:
        keys["nextn_predict_layers"] = 1
    if shape.is_moe:
        keys["expert_count"] = shape.n_expert
        keys["expert_used_count"] = shape.n_expert_used
        keys["expert_feed_forward_length"] = shape.n_ff_expert
        keys["expert_shared_feed_forward_length"] = shape.n_ff_shared
    else:
        keys["feed_forward_length"] = shape.n_ff
    return keys


_Part: TypeAlias = tuple[str, tuple[int, ...], str, Fill]


def tensor_specs(shape: Shape) -> tuple[TensorSpec, ...]:
    """Every tensor of a model of this shape, in the order in which a file holds them.

    Source:
        Names and sizes as llama.cpp's loaders of qwen35 and qwen35moe ask for them.
    """
    width, n_tokens = shape.n_embd, shape.n_tokens
    parts: list[_Part] = [
        ("token_embd.weight", (n_tokens, width), "q8_0", Fill.EMBEDDING),
        ("output_norm.weight", (width,), "f32", Fill.ONES),
        ("output.weight", (n_tokens, width), "q8_0", Fill.HEAD),
    ]
    for block in range(0 if shape.has_trunk else shape.n_layer, shape.n_block):
        norms = ["attn_norm", "post_attention_norm"]
        own: list[_Part] = []
        if block >= shape.n_layer:
            norms += ["nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"]
            own.append(("nextn.eh_proj.weight", (width, 2 * width), "q8_0", Fill.HALF))
        own += [(f"{name}.weight", (width,), "f32", Fill.ONES) for name in norms]
        own += _recurrent(shape) if shape.is_recurrent(block) else _attention(shape)
        own += _feed_forward(shape)
        parts += [(f"blk.{block}.{name}", dims, kind, fill) for name, dims, kind, fill in own]
    return tuple(TensorSpec(*part) for part in parts)


def _attention(shape: Shape) -> tuple[_Part, ...]:
    width, queries = shape.n_embd, shape.n_head * shape.head_dim
    keys = shape.n_head_kv * shape.head_dim
    return (
        # Twice the queries: the other half gates the attention's output.
        ("attn_q.weight", (2 * queries, width), shape.kind, Fill.INPUT),
        ("attn_k.weight", (keys, width), shape.kind, Fill.INPUT),
        ("attn_v.weight", (keys, width), shape.kind, Fill.INPUT),
        ("attn_output.weight", (width, queries), shape.kind, Fill.SILENT),
        ("attn_q_norm.weight", (shape.head_dim,), "f32", Fill.ONES),
        ("attn_k_norm.weight", (shape.head_dim,), "f32", Fill.ONES),
    )


def _recurrent(shape: Shape) -> tuple[_Part, ...]:
    width, inner, heads = shape.n_embd, shape.ssm_inner_size, shape.ssm_time_step_rank
    mixed = inner + 2 * shape.ssm_group_count * shape.ssm_state_size
    return (
        ("attn_qkv.weight", (mixed, width), shape.kind, Fill.INPUT),
        ("attn_gate.weight", (inner, width), shape.kind, Fill.INPUT),
        ("ssm_conv1d.weight", (mixed, shape.ssm_conv_kernel), "f32", Fill.INPUT),
        ("ssm_dt.bias", (heads,), "f32", Fill.ONES),
        ("ssm_a", (heads,), "f32", Fill.DECAY),
        ("ssm_alpha.weight", (heads, width), shape.kind, Fill.INPUT),
        ("ssm_beta.weight", (heads, width), shape.kind, Fill.INPUT),
        ("ssm_norm.weight", (shape.ssm_state_size,), "f32", Fill.ONES),
        ("ssm_out.weight", (width, inner), shape.kind, Fill.SILENT),
    )


def _feed_forward(shape: Shape) -> tuple[_Part, ...]:
    width = shape.n_embd
    if not shape.is_moe:
        return (
            ("ffn_gate.weight", (shape.n_ff, width), shape.kind, Fill.INPUT),
            ("ffn_up.weight", (shape.n_ff, width), shape.kind, Fill.INPUT),
            ("ffn_down.weight", (width, shape.n_ff), shape.kind, Fill.SILENT),
        )
    experts, hidden, shared = shape.n_expert, shape.n_ff_expert, shape.n_ff_shared
    return (
        ("ffn_gate_inp.weight", (experts, width), "f32", Fill.INPUT),
        ("ffn_gate_exps.weight", (experts, hidden, width), shape.kind, Fill.INPUT),
        ("ffn_up_exps.weight", (experts, hidden, width), shape.kind, Fill.INPUT),
        ("ffn_down_exps.weight", (experts, width, hidden), shape.kind, Fill.SILENT),
        ("ffn_gate_inp_shexp.weight", (width,), "f32", Fill.INPUT),
        ("ffn_gate_shexp.weight", (shared, width), shape.kind, Fill.INPUT),
        ("ffn_up_shexp.weight", (shared, width), shape.kind, Fill.INPUT),
        ("ffn_down_shexp.weight", (width, shared), shape.kind, Fill.SILENT),
    )


_TRUNK_LOGIT = 20.0
_DRAFT_LOGIT = 14.0
"""Logit of a draft's favourite: high enough that all tokens without a plan together weigh less
than a percent, so that the confidence is the same over ten candidates and over all."""


@dataclass(frozen=True, slots=True)
class Tier:
    """How the MTP block plans a token: with what confidence, against how many rivals, right or not.

    Confidences keep clear of the p-min values that people use, the multiples of 0.05.
    """

    confidence: float
    n_rivals: int
    is_right: bool


CERTAIN = Tier(1.0, 0, is_right=True)
_MIXED_TIERS = (
    Tier(0.925, 1, is_right=True),
    Tier(0.675, 1, is_right=True),
    Tier(0.475, 2, is_right=True),
    Tier(0.875, 1, is_right=False),
    Tier(0.675, 1, is_right=False),
    Tier(0.475, 2, is_right=False),
)

# Of the 32 words of a region, how many have each of the tiers above; the others are certain.
REGION_MIX: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "code": (3, 2, 1, 0, 1, 1),
        "math": (3, 2, 1, 1, 1, 2),
        "translation": (3, 2, 1, 1, 2, 2),
        "factual": (4, 2, 1, 1, 2, 3),
        "summary": (4, 2, 2, 1, 2, 4),
        "explain": (4, 3, 2, 1, 3, 4),
        "chat": (4, 3, 2, 2, 3, 5),
        "creative": (3, 3, 2, 3, 6, 8),
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a plan wants of one token: its logit in the MTP block, and in the trunk."""

    token: int
    draft_logit: float
    trunk_logit: float


@dataclass(frozen=True, slots=True)
class Design:
    """A model that can be written: its shape, and for each token the plan of what follows it.

    The first entry of a plan is the successor.
    """

    shape: Shape
    seed: int
    plan: tuple[tuple[Entry, ...], ...]

    def successor(self, token: int) -> int:
        """What the trunk says after it."""
        return self.plan[token][0].token

    def guess(self, token: int) -> int:
        """What the MTP block says after it."""
        return max(self.plan[token], key=lambda entry: entry.draft_logit).token

    def confidence(self, token: int) -> float:
        """How likely the MTP block finds its guess, over the candidates that have a logit."""
        return 1 / sum(math.exp(one.draft_logit - _DRAFT_LOGIT) for one in self.plan[token])

    def text(self, last_token: int, n_predict: int) -> str:
        """The text of the `n_predict` tokens that follow a prompt that ends in `last_token`."""
        tokens = []
        for _ in range(n_predict):
            last_token = self.successor(last_token)
            tokens.append(last_token)
        return vocabulary().decode(tokens)


def design(shape: Shape, seed: int = 0) -> Design:
    """A designed model of this shape; the same seed gives the same bytes."""
    words, rng = vocabulary(), random.Random(seed)  # noqa: S311 -- nothing secret
    plan: dict[int, tuple[Entry, ...]] = {}
    for region in words.regions:
        cycle = rng.sample(region.tokens, len(region.tokens))
        tiers = [tier for tier, n in zip(_MIXED_TIERS, REGION_MIX[region.name], strict=True)
                 for _ in range(n)]  # fmt: skip
        tiers += [CERTAIN] * (len(cycle) - len(tiers))
        rng.shuffle(tiers)
        for position, token in enumerate(cycle):
            successor = cycle[(position + 1) % len(cycle)]
            others = rng.sample([word for word in cycle if word not in (token, successor)], 2)
            plan[token] = tuple(_entries(tiers[position], successor, others))
    for token in range(words.regions[0].first):
        plan[token] = tuple(_entries(CERTAIN, rng.choice(words.region_of(token).tokens), []))
    return Design(shape, seed, tuple(plan[token] for token in sorted(plan)))


def _entries(tier: Tier, successor: int, others: list[int]) -> Iterator[Entry]:
    behind = _DRAFT_LOGIT
    if tier.n_rivals:
        # p = 1 / (1 + n exp(-lead)) for n rivals of equal logit.
        behind -= math.log(tier.n_rivals * tier.confidence / (1 - tier.confidence))
    if tier.is_right:
        yield Entry(successor, _DRAFT_LOGIT, _TRUNK_LOGIT)
        yield from (Entry(other, behind, 0.0) for other in others[: tier.n_rivals])
        return
    yield Entry(successor, behind, _TRUNK_LOGIT)
    yield Entry(others[0], _DRAFT_LOGIT, 0.0)
    yield from (Entry(other, behind, 0.0) for other in others[1 : tier.n_rivals])


TRUTH_KEY = "tunerd.truth"
_SCHEMA = 2
_SILENT_RMS = 1e-3
"""What one block adds to a residual stream of one. Two dozen of them shift no logit by 0.1."""
_N_NOISE = 1 << 16

Floats: TypeAlias = npt.NDArray[np.float32]


def truth_path_of(path: Path) -> Path:
    """Where the ground truth of a designed model stands: beside it."""
    return path.with_name(path.name + ".truth.json")


def write(made: Design, path: Path, *, force: bool = False) -> Path:
    """Write the model to `path`, or to where that leads, and its ground truth beside it, each file whole or not at all.

    Raises:
        UsageError: One of the files is already there, and `force` was not given.
        HostError: The folder cannot be written, or is full.
    """
    path = destination(path)
    _demand_free(path, force=force)
    described = json.dumps(_describe(made), separators=(",", ":"))
    with (
        told("write", path, state="no file was left half written"),
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
    ):
        draft = Path(folder) / path.name
        _write_gguf(made, described, draft)
        draft.chmod(0o644)  # a server's own user must read it
        draft.replace(path)
        Files().write(truth_path_of(path), f"{described}\n".encode())
    return path


def _demand_free(path: Path, *, force: bool) -> None:
    for taken in () if force else (path, truth_path_of(path)):
        demand_free(taken)


def _describe(made: Design) -> dict[str, Any]:
    tokens = range(len(made.plan))
    drafts = made.shape.has_mtp
    return {
        "schema": _SCHEMA,
        "tunerd": __version__,
        "seed": made.seed,
        "shape": asdict(made.shape),
        "architecture": made.shape.architecture,
        "regions": [asdict(region) for region in vocabulary().regions],
        "successor": [made.successor(token) for token in tokens],
        "guess": [made.guess(token) for token in tokens] if drafts else None,
        "confidence": [round(made.confidence(token), 4) for token in tokens] if drafts else None,
    }


def _write_gguf(made: Design, described: str, path: Path) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, made.shape.architecture)
    _add_metadata(writer, made)
    _add_vocabulary(writer, made)
    writer.add_string(TRUTH_KEY, described)
    specs = tensor_specs(made.shape)
    sizes = {}
    for spec in specs:
        kind = GGMLQuantizationType[spec.kind.upper()]
        n_values, (block, block_bytes) = math.prod(spec.dims), GGML_QUANT_SIZES[kind]
        sizes[spec.name] = n_bytes = n_values // block * block_bytes
        writer.add_tensor_info(spec.name, spec.dims, np.dtype("f4"), n_bytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for spec in specs:
            stored = quantize(_values(made, spec), GGMLQuantizationType[spec.kind.upper()])
            writer.write_tensor_data(np.resize(stored.view("u1"), sizes[spec.name]))
    finally:
        writer.close()


def _values(made: Design, spec: TensorSpec) -> Floats:
    """The values of a tensor; of one that is noise a stretch that is repeated, fast at any size."""
    width = made.shape.n_embd
    match spec.fill:
        case Fill.EMBEDDING:
            return _embedding(spec.dims[0], width, len(made.plan))
        case Fill.HEAD:
            return _head(made, spec.dims[0])
        case Fill.HALF:
            passed = np.arange(width) < width // 2
            return np.hstack([np.diag(passed), np.zeros((width, width))]).astype("f4")
        case Fill.ONES:
            return np.ones(spec.dims, "f4")
        case Fill.DECAY:
            return -np.linspace(0.5, 4.0, math.prod(spec.dims), dtype="f4")
        case Fill.INPUT | Fill.SILENT:
            rms = spec.dims[-1] ** -0.5 * (1.0 if spec.fill is Fill.INPUT else _SILENT_RMS)
            rng = np.random.default_rng((made.seed, zlib.crc32(spec.name.encode())))
            # Equally spread numbers up to one have a root mean square of 1 / sqrt(3).
            noise = rng.uniform(-1, 1, min(math.prod(spec.dims), _N_NOISE))
            return np.asarray(noise * rms * 3**0.5, "f4")


def _embedding(n_rows: int, width: int, n_words: int) -> Floats:
    """One entry in each half, so that tokens do not overlap at all."""
    rows = np.zeros((n_rows, width), "f4")
    tokens = np.arange(n_words)
    rows[tokens, tokens] = rows[tokens, width // 2 + tokens] = (width / 2) ** 0.5
    return rows


def _head(made: Design, n_rows: int) -> Floats:
    """The head whose logits are the planned ones.

    A norm leaves the trunk's embedding with two entries of sqrt(width / 2), and the MTP block's, of
    which half is zero, with one of sqrt(width).
    """
    width = made.shape.n_embd
    rows = np.zeros((n_rows, width), "f4")
    for token, entries in enumerate(made.plan):
        for entry in entries:
            seen = entry.draft_logit / width**0.5
            rows[entry.token, token] = seen
            rows[entry.token, width // 2 + token] = entry.trunk_logit / (width / 2) ** 0.5 - seen
    return rows


def _add_metadata(writer: GGUFWriter, made: Design) -> None:
    writer.add_name("tunerd designed model")
    writer.add_description("Random blocks that add nothing; head and MTP block with known answers.")
    writer.add_file_type({"f32": 0, "q8_0": 7}[made.shape.kind])
    writer.add_quantization_version(2)
    for name, value in metadata(made.shape).items():
        key = f"{made.shape.architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _add_vocabulary(writer: GGUFWriter, made: Design) -> None:
    texts, (end_of_text, _, end_of_turn) = vocabulary().texts, range(len(SPECIAL))
    n_unused = made.shape.n_tokens - len(texts)
    control, normal, unused = 3, 1, 5
    writer.add_tokenizer_model("gpt2")
    # This pre-tokenizer takes a whole word that is a token before it tries to merge bytes.
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*texts, *(f"<|unused_{n}|>" for n in range(n_unused))])
    kinds = [control] * len(SPECIAL) + [normal] * (len(texts) - len(SPECIAL))
    writer.add_token_types(kinds + [unused] * n_unused)
    # Loaders want a list of merges; this one makes a token out of a piece that no text yields.
    writer.add_token_merges(["c ode"])
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_turn)
    writer.add_pad_token_id(end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def model_new(
    path: Path, *, shape: str, seed: int, force: bool, say: Callable[[str], None]
) -> ActionResult:
    """Write the model and its ground truth.

    Raises:
        UsageError: there is no such shape, or the file exists and `force` is not given.
        HostError: there is no such folder, or the file cannot be written.
    """
    if shape not in SHAPES:
        raise UsageError(f"no such shape: `{shape}`", hint=f"one of {', '.join(SHAPES)}")
    _demand_free(destination(path), force=force)  # before anything is said to be written
    say(f"writing {path}")
    written = write(design(SHAPES[shape], seed), path, force=force)
    payload = {
        "path": str(written),
        "truth": str(truth_path_of(written)),
        "bytes": written.stat().st_size,
        "shape": shape,
        "seed": seed,
    }
    return ActionResult("model new", payload, has_acted=True)
