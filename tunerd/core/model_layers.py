"""The layers of a model: which attend, which keep a window or a recurrent state, which draft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from tunerd.core.model_keys import Keys
from tunerd.errors import ModelFileError

MAX_BLOCKS = 4096
_BLOCK_INDEX = re.compile(r"blk\.(\d{1,6})\.")

# Every n-th layer attends to everything, the others to a window.
# Source: llama.cpp, `set_swa_pattern` in the loaders of these architectures. Others say it in
# `attention.sliding_window_pattern`, or ignore the window that their metadata names.
_WINDOW_PATTERN: Mapping[str, int] = MappingProxyType(
    {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "exaone4": 4, "llama4": 4}
)
# Layers alternate by `full_attention_interval` even where the key is left out.
_INTERVAL_BY_DEFAULT = frozenset({"qwen3next", "qwen35", "qwen35moe"})
_DEFAULT_INTERVAL = 4
_ALL_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2"})
_ATTENTION_AND_STATE = frozenset({"falcon-h1"})


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What one recurrent layer keeps for one sequence, in f32 values.

    `n_conv` is the tail of the convolution, `n_state` the state itself. `mixed_width` is the width
    of what goes through the convolution, `inner_width` that of its values.
    """

    n_conv: int
    n_state: int
    mixed_width: int
    inner_width: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One block, by what it keeps; see `tunerd.core.model.Block`."""

    index: int
    k_values: int | None
    v_values: int | None
    is_recurrent: bool
    is_windowed: bool
    is_mtp: bool


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All blocks of a model and what they share."""

    layers: tuple[Layer, ...]
    n_layer_all: int | None
    n_nextn: int
    key_length: int | None
    value_length: int | None
    sliding_window: int | None
    recurrent: RecurrentState | None


def read_layers(keys: Keys, tensor_names: AbstractSet[str]) -> LayerPlan:
    """The blocks that the metadata describes.

    Raises:
        ModelFileError: There are more blocks than any real model has, or more MTP blocks than
            blocks.
    """
    declared = keys.own("block_count")
    n_blocks = declared if declared is not None else _highest_block(tensor_names)
    n_nextn = keys.own("nextn_predict_layers") or 0
    if n_blocks > MAX_BLOCKS:
        raise ModelFileError(
            f"model claims {n_blocks} blocks: `{keys.name}`",
            cause=f"expected at most {MAX_BLOCKS}",
        )
    if n_nextn and n_nextn >= n_blocks:
        raise ModelFileError(
            f"model claims {n_nextn} MTP blocks of {n_blocks} in all: `{keys.name}`",
            cause="expected at least one block that is none",
        )
    n_layer = n_blocks - n_nextn
    state = _recurrent_state(keys)
    recurrent = _recurrent_layers(keys, n_layer) if state is not None else frozenset()
    window = keys.own("attention.sliding_window") or keys.own("attention.chunk_size") or None
    windowed = _windowed_layers(keys, n_layer) if window is not None else frozenset()
    key_length, value_length = _head_sizes(keys)
    sizes = _kv_sizes(keys, n_blocks, windowed, key_length, value_length)
    both = keys.architecture in _ATTENTION_AND_STATE
    without = recurrent if not both else frozenset()
    layers = tuple(
        Layer(
            index=index,
            k_values=0 if index in without else sizes[index][0],
            v_values=0 if index in without else sizes[index][1],
            is_recurrent=index in recurrent,
            is_windowed=index in windowed,
            is_mtp=index >= n_layer,
        )
        for index in range(n_blocks)
    )
    return LayerPlan(
        layers,
        n_layer_all=declared,
        n_nextn=n_nextn,
        key_length=key_length,
        value_length=value_length,
        sliding_window=window if windowed else None,
        recurrent=state if recurrent else None,
    )


def _highest_block(tensor_names: AbstractSet[str]) -> int:
    found = (_BLOCK_INDEX.match(name) for name in tensor_names)
    return max((int(one[1]) + 1 for one in found if one is not None), default=0)


def _head_sizes(keys: Keys) -> tuple[int | None, int | None]:
    n_embd, n_head = keys.own("embedding_length"), keys.own_most("attention.head_count")
    usual = n_embd // n_head if n_embd is not None and n_head else None
    key_length = keys.own("attention.key_length")
    value_length = keys.own("attention.value_length")
    return (
        key_length if key_length is not None else usual,
        value_length if value_length is not None else usual,
    )


def _kv_sizes(
    keys: Keys,
    n_blocks: int,
    windowed: frozenset[int],
    key_length: int | None,
    value_length: int | None,
) -> tuple[tuple[int | None, int | None], ...]:
    """K and V values per token of each block, as if every block attended.

    Multi-head latent attention keeps one compressed row per token, from which V is read too; the
    last `shared_kv_layers` blocks use the cache of an earlier one.
    """
    heads = keys.own_per_block("attention.head_count_kv", n_blocks)
    if heads is None:
        heads = keys.own_per_block("attention.head_count", n_blocks)
    is_latent = keys.own("attention.key_length_mla") is not None
    window_key = keys.own("attention.key_length_swa")
    window_value = keys.own("attention.value_length_swa")
    first_shared = n_blocks - (keys.own("attention.shared_kv_layers") or 0)
    sizes: list[tuple[int | None, int | None]] = []
    for index in range(n_blocks):
        k_size, v_size = key_length, value_length
        if index in windowed:
            k_size = window_key if window_key is not None else k_size
            v_size = window_value if window_value is not None else v_size
        if index >= first_shared:
            sizes.append((0, 0))
        elif heads is None or k_size is None or v_size is None:
            sizes.append((None, None))
        else:
            sizes.append((heads[index] * k_size, 0 if is_latent else heads[index] * v_size))
    return tuple(sizes)


def _recurrent_state(keys: Keys) -> RecurrentState | None:
    """The state of a recurrent layer.

    Source: llama.cpp, `n_embd_r` and `n_embd_s` of its hyperparameters.
    """
    kernel, inner = keys.own("ssm.conv_kernel"), keys.own("ssm.inner_size")
    size, groups = keys.own("ssm.state_size"), keys.own("ssm.group_count") or 0
    tail = max(0, (kernel or 1) - 1)
    if inner is not None and size is not None:
        mixed = inner + 2 * groups * size
        return RecurrentState(tail * mixed, size * inner, mixed, inner)
    head, n_head = keys.own("kda.head_dim"), keys.own_most("attention.head_count")
    if head is not None and n_head is not None:
        width = head * n_head
        return RecurrentState(3 * tail * width, head * width, 3 * width, width)
    cache, n_embd = keys.own("shortconv.l_cache"), keys.own("embedding_length")
    if cache is not None and n_embd is not None:
        return RecurrentState(n_embd * max(0, cache - 1), 0, n_embd, n_embd)
    return None


def _recurrent_layers(keys: Keys, n_layer: int) -> frozenset[int]:
    everything = frozenset(range(n_layer))
    if keys.architecture in _ALL_RECURRENT or keys.architecture in _ATTENTION_AND_STATE:
        return everything
    marked = keys.own_values("attention.recurrent_layers")
    if marked is not None:
        return frozenset(index for index in everything if index < len(marked) and marked[index])
    interval = keys.own("full_attention_interval")
    if interval is None and keys.architecture in _INTERVAL_BY_DEFAULT:
        interval = _DEFAULT_INTERVAL
    if interval:
        return frozenset(index for index in everything if (index + 1) % interval)
    heads = keys.own_values("attention.head_count_kv")
    if heads is not None:
        return frozenset(index for index in everything if index < len(heads) and not heads[index])
    return frozenset()


def _windowed_layers(keys: Keys, n_layer: int) -> frozenset[int]:
    marked = keys.own_values("attention.sliding_window_pattern")
    if marked is not None:
        return frozenset(index for index in range(min(n_layer, len(marked))) if marked[index])
    pattern = keys.own("attention.sliding_window_pattern")
    if pattern is None:
        pattern = _WINDOW_PATTERN.get(keys.architecture or "")
    if pattern is None:
        return frozenset()
    return frozenset(
        index for index in range(n_layer) if pattern == 0 or index % pattern < pattern - 1
    )
