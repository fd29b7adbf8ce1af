"""Sizes of what a context keeps: KV cache, recurrent state, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from tunerd.core.gguf_types import TYPES_BY_NAME
from tunerd.core.model import Block, ModelFacts

CELL_STEP = 256
_F32_BYTES = 4
# Bytes per value of types that only BeeLlama has. Source: its block layouts.
_FORK_TYPES: Mapping[str, float] = MappingProxyType(
    {
        "turbo4": 0.515625,
        "turbo3": 0.390625,
        "turbo2": 0.265625,
        "turbo3_tcq": 0.40625,
        "turbo2_tcq": 0.28125,
    }
)


def padded(n: int, step: int = CELL_STEP) -> int:
    """The next multiple of `step`."""
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Cells:
    """How many tokens the caches of one context hold.

    Contexts are rounded up to 256 cells per stream; a unified cache is one stream for all slots.
    A windowed layer keeps its window per sequence and room for one ubatch.

    Source:
        llama.cpp, llama-context.cpp and llama-kv-cache-iswa.cpp; sizes printed by 0.7.0: 1000
        tokens on 3 slots become 3 x 512 cells, a window of 1024 with ubatch 512 becomes 1536.
    """

    n_ctx: int
    n_streams: int
    n_sequences: int

    @property
    def per_stream(self) -> int:
        """Cells of one stream."""
        return padded(padded(self.n_ctx) // self.n_streams)

    @property
    def total(self) -> int:
        """Cells of all streams."""
        return self.per_stream * self.n_streams

    def window_per_stream(self, window: int, n_ubatch: int) -> int:
        """Cells of one stream in a windowed layer."""
        per_stream = self.n_sequences // self.n_streams
        return min(self.per_stream, padded(window * per_stream + n_ubatch))


def row_bytes(type_name: str, n_values: int) -> int | None:
    """Bytes of so many values of a cache type, None for a type that is not known here."""
    kind = TYPES_BY_NAME.get(type_name.lower())
    if kind is not None:
        exact = kind.row_size(n_values)
        return exact if exact is not None else ceil(n_values * kind.bytes_per_value)
    per_value = _FORK_TYPES.get(type_name.lower())
    return None if per_value is None else ceil(n_values * per_value)


def kv_token_bytes(block: Block, type_k: str, type_v: str) -> int | None:
    """Bytes that one token takes in the KV cache of one block.

    bytes = k_values * b(K) + v_values * b(V), with k_values = KV heads * key length.
    """
    if block.k_values is None or block.v_values is None:
        return None
    k_bytes, v_bytes = row_bytes(type_k, block.k_values), row_bytes(type_v, block.v_values)
    return None if k_bytes is None or v_bytes is None else k_bytes + v_bytes


def kv_bytes(
    blocks: Iterable[Block], type_k: str, type_v: str, cells: int, window_cells: int
) -> int | None:
    """KV cache of these blocks, None if the size of one is unknown."""
    total = 0
    for block in blocks:
        per_token = kv_token_bytes(block, type_k, type_v)
        if per_token is None:
            return None
        total += per_token * (window_cells if block.is_windowed else cells)
    return total


def state_bytes(facts: ModelFacts) -> int:
    """One copy of one recurrent layer's state: 4 * (convolution tail + state) bytes."""
    return 0 if facts.recurrent is None else _F32_BYTES * (
        facts.recurrent.n_conv + facts.recurrent.n_state
    )  # fmt: skip


def step_bytes(facts: ModelFacts, n_max: int) -> int:
    """What one recurrent layer keeps so that drafted tokens can be taken back, in ik_llama.cpp.

    bytes = 4 * (n_max * state + (n_max + 1) * convolution tail), and one tail more as a shadow.

    Source:
        `per-step buffer` and `shadow buffer` that ik's builds of June and August 2026 print:
        38.25 + 0.56 MiB for 12 layers of 1 MiB + 48 KiB at n_max 3, 75.94 + 0.56 at 6.
    """
    if facts.recurrent is None:
        return 0
    tail = facts.recurrent.n_conv
    return _F32_BYTES * (n_max * facts.recurrent.n_state + (n_max + 2) * tail)
