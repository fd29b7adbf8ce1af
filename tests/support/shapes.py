"""Models of any shape as files of holes: a real header, and zeros that take no room on the disk."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from tests.support.gguf_bytes import gguf, number, pair, tensor, text
from tunerd.model.gguf import TENSOR_TYPES, ValueType
from tunerd.tryout.designed import Shape, metadata, tensor_specs

_ALIGNMENT = 32
_Row: TypeAlias = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainShape:
    """A model without recurrent layers: `llama`, `qwen3moe` or `gemma3`, in q8_0."""

    architecture: str
    n_layer: int = 16
    n_embd: int = 1024
    n_head: int = 16
    n_head_kv: int = 4
    head_dim: int = 64
    n_ff: int = 4096
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    sliding_window: int = 0
    n_vocab: int = 32768
    context_length: int = 131072


def write_hollow(path: Path, shape: Shape | PlainShape) -> Path:
    """A file that engines load; what it generates means nothing."""
    header, n_bytes = hollow_bytes(shape)
    path.write_bytes(header)
    os.truncate(path, len(header) + n_bytes)
    return path


def hollow_bytes(shape: Shape | PlainShape) -> tuple[bytes, int]:
    """Everything in front of the tensor data, and how many bytes of that would follow."""
    if isinstance(shape, Shape):
        architecture, n_vocab = shape.architecture, shape.n_tokens
        keys: Mapping[str, float | list[int]] = metadata(shape)
        rows: Iterable[_Row] = (
            (spec.name, tuple(reversed(spec.dims)), {"f32": 0, "q8_0": 8}[spec.kind])
            for spec in tensor_specs(shape)
        )
    else:
        architecture, n_vocab = shape.architecture, shape.n_vocab
        keys, rows = _metadata(shape), _tensors(shape)
    table, n_bytes = table_of(rows)
    pairs = [
        text("general.architecture", architecture),
        text("general.name", "hollow"),
        *(pair_of(f"{architecture}.{key}", value) for key, value in keys.items()),
        *_vocabulary(n_vocab),
    ]
    return gguf(pairs, table, alignment=_ALIGNMENT), n_bytes


def table_of(rows: Iterable[_Row]) -> tuple[list[bytes], int]:
    """The table of tensors, and how many bytes of data it wants."""
    table, offset = [], 0
    for name, dims, kind in rows:
        table.append(tensor(name, dims, kind, offset))
        size = TENSOR_TYPES[kind].row_size(dims[0])
        assert size is not None, f"{name}: rows of {dims[0]} values"
        offset += -(-size * math.prod(dims[1:]) // _ALIGNMENT) * _ALIGNMENT
    return table, offset


def pair_of(key: str, value: float | Sequence[int]) -> bytes:
    """A key of the type of its value."""
    if isinstance(value, Sequence):
        kind = ValueType.BOOL if isinstance(value[0], bool) else ValueType.INT32
        return pair(key, ValueType.ARRAY, (kind, value))
    if isinstance(value, float):
        return pair(key, ValueType.FLOAT32, value)
    return number(key, value)


@cache
def _vocabulary(n_vocab: int) -> tuple[bytes, ...]:
    """The bytes as a GPT-2 vocabulary writes them, then words that no text contains."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(one) for one in shown]
    letters += [chr(256 + n) for n in range(256 - len(shown))]
    words = ["<|end|>", *letters, *(f"<|{n}|>" for n in range(n_vocab))][:n_vocab]
    kinds = [3] + [1] * (n_vocab - 1)
    packed = struct.pack(f"<{n_vocab}i", *kinds)
    head = pair("tokenizer.ggml.token_type", ValueType.ARRAY, (ValueType.INT32, []))
    return (
        text("tokenizer.ggml.model", "gpt2"),
        text("tokenizer.ggml.pre", "llama-bpe"),
        pair("tokenizer.ggml.tokens", ValueType.ARRAY, (ValueType.STRING, words)),
        head[:-8] + struct.pack("<Q", n_vocab) + packed,
        pair("tokenizer.ggml.merges", ValueType.ARRAY, (ValueType.STRING, ["a b"])),
        number("tokenizer.ggml.eos_token_id", 0),
        text("tokenizer.chat_template", "{{ messages[0]['content'] }}"),
    )


def _metadata(shape: PlainShape) -> Mapping[str, float | list[int]]:
    keys: dict[str, float | list[int]] = {
        "block_count": shape.n_layer,
        "context_length": shape.context_length,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 1e6,
    }
    if shape.n_expert:
        keys["expert_count"] = shape.n_expert
        keys["expert_used_count"] = shape.n_expert_used
        keys["expert_feed_forward_length"] = shape.n_ff_expert
    if shape.sliding_window:
        keys["attention.sliding_window"] = shape.sliding_window
    return keys


def _tensors(shape: PlainShape) -> Iterator[_Row]:
    width, q8_0, f32 = shape.n_embd, 8, 0
    is_gemma = shape.architecture == "gemma3"
    yield "token_embd.weight", (width, shape.n_vocab), q8_0
    yield "output_norm.weight", (width,), f32
    if not is_gemma:
        yield "output.weight", (width, shape.n_vocab), q8_0
    queries, keys = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    norms = ["attn_norm", "ffn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] if is_gemma else []
    for block in range(shape.n_layer):
        prefix = f"blk.{block}."
        for name in norms:
            yield f"{prefix}{name}.weight", (width,), f32
        yield prefix + "attn_q.weight", (width, queries), q8_0
        yield prefix + "attn_k.weight", (width, keys), q8_0
        yield prefix + "attn_v.weight", (width, keys), q8_0
        yield prefix + "attn_output.weight", (queries, width), q8_0
        if shape.architecture != "llama":
            yield prefix + "attn_q_norm.weight", (shape.head_dim,), f32
            yield prefix + "attn_k_norm.weight", (shape.head_dim,), f32
        if shape.n_expert:
            hidden, n = shape.n_ff_expert, shape.n_expert
            yield prefix + "ffn_gate_inp.weight", (width, n), f32
            yield prefix + "ffn_gate_exps.weight", (width, hidden, n), q8_0
            yield prefix + "ffn_up_exps.weight", (width, hidden, n), q8_0
            yield prefix + "ffn_down_exps.weight", (hidden, width, n), q8_0
        else:
            yield prefix + "ffn_gate.weight", (width, shape.n_ff), q8_0
            yield prefix + "ffn_up.weight", (width, shape.n_ff), q8_0
            yield prefix + "ffn_down.weight", (shape.n_ff, width), q8_0
