"""Shapes of designed models: their sizes, their metadata, and which tensors they have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from tunerd.core.designed_quant import Quant
from tunerd.core.designed_vocab import vocabulary
from tunerd.errors import ConfigError, UsageError

_ROPE_THETA = 10_000_000.0
_RMS_EPSILON = 1e-6
_MAX_ROTATED = 64


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
    """One tensor: `dims` as numpy has them (rows first), so the last is the length of a row."""

    name: str
    dims: tuple[int, ...]
    quant: Quant
    fill: Fill

    @property
    def n_values(self) -> int:
        """How many weights it has."""
        product = 1
        for size in self.dims:
            product *= size
        return product

    @property
    def n_bytes(self) -> int:
        """Bytes of its data in the file."""
        return self.quant.n_bytes(self.n_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a designed model, named as GGUF names them.

    `n_layer` counts the trunk's blocks; an MTP block comes on top. Every
    `full_attention_interval`-th block has full attention, the others are recurrent. `n_vocab` of
    None means as many tokens as the words need; a larger one is padded with unused tokens. The
    blocks of a hollow model are zeros and holes in its file: quickly written at any size, and it
    behaves the same.
    """

    n_layer: int = 4
    n_embd: int = 512
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
    quant: Quant = Quant.Q8_0
    n_vocab: int | None = None
    context_length: int = 32768
    is_hollow: bool = False

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
        return self.n_vocab if self.n_vocab is not None else vocabulary().n_tokens

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
        "medium": Shape(
            n_layer=12,
            n_embd=1024,
            n_head=8,
            n_head_kv=2,
            head_dim=256,
            ssm_state_size=128,
            ssm_group_count=8,
            ssm_time_step_rank=16,
            n_ff=3328,
        ),
    }
)


def shape_named(name: str) -> Shape:
    """The ready-made shape of that name.

    Raises:
        UsageError: There is none; the hint names the nearest.
    """
    if name not in SHAPES:
        nearest = get_close_matches(name, SHAPES, n=1, cutoff=0.0)
        raise UsageError(
            f"no shape is called `{name}`; there are: {', '.join(SHAPES)}",
            hint=f"the nearest is `{nearest[0]}`",
        )
    return SHAPES[name]


def check_shape(shape: Shape) -> None:
    """Refuse a shape that no engine could load or in which no plan fits.

    Raises:
        ConfigError: With every problem of the shape.
    """
    problems = list(_problems(shape))
    if problems:
        raise ConfigError(
            f"this is no shape for a designed model: {'; '.join(problems)}",
            hint=f"ready-made shapes: {', '.join(SHAPES)}",
        )


def _problems(shape: Shape) -> Iterator[str]:
    for name, value in _sizes(shape).items():
        if value < 1:
            yield f"{name} is {value}, at least 1 is needed"
    for name in ("n_embd", "n_ff", "n_ff_expert", "n_ff_shared", "head_dim", "ssm_state_size"):
        if getattr(shape, name) % 32:
            yield f"{name} is {getattr(shape, name)}, not a multiple of 32"
    if shape.n_head_kv > 0 and shape.n_head % shape.n_head_kv:
        yield f"n_head {shape.n_head} is no multiple of n_head_kv {shape.n_head_kv}"
    if shape.ssm_group_count > 0 and shape.ssm_time_step_rank % shape.ssm_group_count:
        yield (
            f"ssm_time_step_rank {shape.ssm_time_step_rank} is no multiple of"
            f" ssm_group_count {shape.ssm_group_count}"
        )
    if shape.n_expert_used > shape.n_expert:
        yield f"n_expert_used {shape.n_expert_used} is more than n_expert {shape.n_expert}"
    if shape.n_tokens < vocabulary().n_tokens:
        yield f"n_vocab is {shape.n_tokens}, at least {vocabulary().n_tokens} is needed"


def _sizes(shape: Shape) -> dict[str, int]:
    names = (
        "n_layer n_embd n_head n_head_kv head_dim full_attention_interval ssm_conv_kernel"
        " ssm_state_size ssm_group_count ssm_time_step_rank n_ff n_expert n_expert_used"
        " n_ff_expert n_ff_shared context_length"
    )
    return {name: getattr(shape, name) for name in names.split()}


def metadata(shape: Shape) -> dict[str, int | float | list[int]]:
    """The keys below `general.architecture`, without that prefix.

    Source:
        The keys that llama.cpp's and ik_llama.cpp's loaders of qwen35 and qwen35moe ask for.
    """
    rotated = min(shape.head_dim, _MAX_ROTATED)
    half = rotated // 2
    keys: dict[str, int | float | list[int]] = {
        "block_count": shape.n_block,
        "context_length": shape.context_length,
        "embedding_length": shape.n_embd,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": _RMS_EPSILON,
        "full_attention_interval": shape.full_attention_interval,
        "rope.dimension_count": rotated,
        # Time, height and width, as M-RoPE has them; together they cover the rotated pairs.
        "rope.dimension_sections": [half - 2 * (half // 3), half // 3, half // 3, 0],
        "rope.freq_base": _ROPE_THETA,
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


def tensor_specs(shape: Shape) -> tuple[TensorSpec, ...]:
    """Every tensor of a model of this shape, in the order in which a file holds them.

    Source:
        Names and sizes as llama.cpp's loaders of qwen35 and qwen35moe ask for them.
    """
    quant, width, n_tokens = shape.quant, shape.n_embd, shape.n_tokens
    specs = [
        TensorSpec("token_embd.weight", (n_tokens, width), quant, Fill.EMBEDDING),
        TensorSpec("output_norm.weight", (width,), Quant.F32, Fill.ONES),
        TensorSpec("output.weight", (n_tokens, width), quant, Fill.HEAD),
    ]
    for block in range(shape.n_block):
        prefix = f"blk.{block}."
        names = ["attn_norm", "post_attention_norm"]
        if block >= shape.n_layer:
            names += ["nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"]
            specs.append(
                TensorSpec(prefix + "nextn.eh_proj.weight", (width, 2 * width), quant, Fill.HALF)
            )
        specs.extend(
            TensorSpec(f"{prefix}{name}.weight", (width,), Quant.F32, Fill.ONES) for name in names
        )
        mixer = _recurrent(shape) if shape.is_recurrent(block) else _attention(shape)
        for name, dims, how, fill in (*mixer, *_feed_forward(shape)):
            specs.append(TensorSpec(prefix + name, dims, how, fill))
    return tuple(specs)


_Part: TypeAlias = tuple[str, tuple[int, ...], Quant, Fill]


def _attention(shape: Shape) -> tuple[_Part, ...]:
    queries, keys = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    return (
        # Twice the queries: the other half gates the attention's output.
        ("attn_q.weight", (2 * queries, shape.n_embd), shape.quant, Fill.INPUT),
        ("attn_k.weight", (keys, shape.n_embd), shape.quant, Fill.INPUT),
        ("attn_v.weight", (keys, shape.n_embd), shape.quant, Fill.INPUT),
        ("attn_output.weight", (shape.n_embd, queries), shape.quant, Fill.SILENT),
        ("attn_q_norm.weight", (shape.head_dim,), Quant.F32, Fill.ONES),
        ("attn_k_norm.weight", (shape.head_dim,), Quant.F32, Fill.ONES),
    )


def _recurrent(shape: Shape) -> tuple[_Part, ...]:
    inner, heads = shape.ssm_inner_size, shape.ssm_time_step_rank
    mixed = inner + 2 * shape.ssm_group_count * shape.ssm_state_size
    return (
        ("attn_qkv.weight", (mixed, shape.n_embd), shape.quant, Fill.INPUT),
        ("attn_gate.weight", (inner, shape.n_embd), shape.quant, Fill.INPUT),
        ("ssm_conv1d.weight", (mixed, shape.ssm_conv_kernel), Quant.F32, Fill.INPUT),
        ("ssm_dt.bias", (heads,), Quant.F32, Fill.ONES),
        ("ssm_a", (heads,), Quant.F32, Fill.DECAY),
        ("ssm_alpha.weight", (heads, shape.n_embd), shape.quant, Fill.INPUT),
        ("ssm_beta.weight", (heads, shape.n_embd), shape.quant, Fill.INPUT),
        ("ssm_norm.weight", (shape.ssm_state_size,), Quant.F32, Fill.ONES),
        ("ssm_out.weight", (shape.n_embd, inner), shape.quant, Fill.SILENT),
    )


def _feed_forward(shape: Shape) -> tuple[_Part, ...]:
    width, quant = shape.n_embd, shape.quant
    if not shape.is_moe:
        return (
            ("ffn_gate.weight", (shape.n_ff, width), quant, Fill.INPUT),
            ("ffn_up.weight", (shape.n_ff, width), quant, Fill.INPUT),
            ("ffn_down.weight", (width, shape.n_ff), quant, Fill.SILENT),
        )
    experts, hidden, shared = shape.n_expert, shape.n_ff_expert, shape.n_ff_shared
    return (
        ("ffn_gate_inp.weight", (experts, width), Quant.F32, Fill.INPUT),
        ("ffn_gate_exps.weight", (experts, hidden, width), quant, Fill.INPUT),
        ("ffn_up_exps.weight", (experts, hidden, width), quant, Fill.INPUT),
        ("ffn_down_exps.weight", (experts, width, hidden), quant, Fill.SILENT),
        ("ffn_gate_inp_shexp.weight", (width,), Quant.F32, Fill.INPUT),
        ("ffn_gate_shexp.weight", (shared, width), quant, Fill.INPUT),
        ("ffn_up_shexp.weight", (shared, width), quant, Fill.INPUT),
        ("ffn_down_shexp.weight", (width, shared), quant, Fill.SILENT),
    )
