"""Compute buffers: what the largest graph of a context needs while it runs.

An engine plans the buffer once, for a full ubatch over a full cache, and reuses room within it.
What counts is the largest set of values that live at the same time: the attention mask through all
layers, and the widest stage of a layer (attention, recurrence, feed-forward, experts). Each stage
below is an upper bound fitted to the sizes that real builds print.

Source: builds of May, June, August and November 2026 on CPU and Vulkan, some 120 random shapes of
`llama`, `qwen3`, `qwen35`, `qwen3moe`, `qwen35moe` with one dimension varied at a time; the cases
of tests/support/memory_cases.py hold them to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.core.memory_laws import EngineLaws
from tunerd.core.model import ModelFacts

_F32_BYTES = 4
_F16_BYTES = 2


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What decides how large a graph gets.

    `n_kv` is the cells of one stream in layers that attend to everything, `n_window` those in
    windowed layers; 0 where there are none. `n_copies` is how many states per sequence a recurrent
    layer writes.
    """

    n_ubatch: int
    n_kv: int
    n_window: int
    n_sequences: int
    n_copies: int
    n_outputs: int
    has_flash_attention: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """The widest set of values that are alive together in one step of a layer, per token."""

    name: str
    n_values: float


@dataclass(frozen=True, slots=True)
class ComputeSize:
    """A compute buffer: its bytes, of which the inputs, and why."""

    n_bytes: int
    mask_bytes: int
    formula: str


def mask_bytes(size: GraphSize, value_bytes: int) -> int:
    """Attention masks: a value per token and cell of its stream, a second mask for windows."""
    return (size.n_kv + size.n_window) * size.n_ubatch * value_bytes


def _masks(size: GraphSize, laws: EngineLaws) -> int:
    """Masks where the work is done: f16, beside a wide input that they are made from.

    Without flash attention they are f32.
    """
    if not size.has_flash_attention:
        return mask_bytes(size, _F32_BYTES)
    is_wide = laws.input_mask_bytes > _F16_BYTES
    return mask_bytes(size, _F16_BYTES + (laws.input_mask_bytes if is_wide else 0))


def input_bytes(facts: ModelFacts, size: GraphSize, laws: EngineLaws, width: int) -> int:
    """Host side of a context that runs on the GPU: the mask and rows of embeddings, handed over.

    bytes = mask + width * n_embd * n_ubatch * 4, width 4 for a trunk and 2 for an MTP block.
    """
    rows = width * (facts.n_embd or 0) * size.n_ubatch * _F32_BYTES
    value_bytes = laws.input_mask_bytes if size.has_flash_attention else _F32_BYTES
    return mask_bytes(size, value_bytes) + rows


def stages(facts: ModelFacts, size: GraphSize, laws: EngineLaws) -> tuple[Stage, ...]:
    """The stages of a layer of the trunk, without masks."""
    found = [attention(facts, size), *_feed_forward(facts, laws)]
    if facts.recurrent is not None:
        found.append(recurrence(facts, size, laws))
    return tuple(found)


def trunk_compute(facts: ModelFacts, size: GraphSize, laws: EngineLaws) -> ComputeSize | None:
    """The compute buffer of a target, None where the width of the model is unknown.

    bytes = max(masks + widest stage * n_ubatch * 4, logits)
    """
    if facts.n_embd is None:
        return None
    widest = max(stages(facts, size, laws), key=lambda stage: stage.n_values)
    masks = _masks(size, laws)
    layers = masks + round(widest.n_values) * size.n_ubatch * _F32_BYTES
    logits = _logits(facts, size, laws)
    text = (
        f"masks over {size.n_kv + size.n_window} cells + {round(widest.n_values)} values"
        f" ({widest.name}) x {size.n_ubatch} tokens x 4 B"
    )
    if logits > layers:
        text = f"logits of {facts.n_vocab} tokens for all {size.n_ubatch} rows of a ubatch"
    return ComputeSize(max(layers, logits), masks, text)


def mtp_compute(facts: ModelFacts, size: GraphSize, laws: EngineLaws) -> ComputeSize | None:
    """The compute buffer of an MTP context: one layer, so the mask's room is used again after it.

    The feed-forward network has three tensors of its width (two in experts of the same width and
    one of theirs together), and takes as many of them as fit from the mask.
    """
    if facts.n_embd is None:
        return None
    masks = _masks(size, laws)
    row = size.n_ubatch * _F32_BYTES
    attending = attention(facts, size).n_values - 3 * facts.n_embd
    reused = masks / row
    pieces = _pieces(facts, laws)
    if facts.is_moe:
        forward = max(0.0, sum(pieces) - reused)
    else:
        fitting = int(reused // pieces[0]) if pieces and pieces[0] else 0
        forward = sum(pieces[fitting:])
    widest = max(attending, 3 * facts.n_embd + forward)
    logits = _logits(facts, size, laws)
    layers = masks + round(widest) * row
    text = f"mask over {size.n_kv} cells + {round(widest)} values x {size.n_ubatch} tokens x 4 B"
    if logits > layers:
        text = f"logits of {facts.n_vocab} tokens for all {size.n_ubatch} rows of a ubatch"
    return ComputeSize(max(layers, logits), masks, text)


def attention(facts: ModelFacts, size: GraphSize) -> Stage:
    """Queries, keys, values and the result: 5 e + q + max(q, 3 kv), with a gate 2 q more.

    Without flash attention the scores of every head over every cell come on top.
    """
    embd = facts.n_embd or 0
    queries = (facts.n_head or 0) * (facts.key_length or 0)
    cached = max((block.k_values or 0 for block in facts.blocks), default=0)
    values = 5 * embd + queries + max(queries, 3 * cached)
    if facts.is_gated_attention:
        values += 2 * queries
    if not size.has_flash_attention:
        values += (facts.n_head or 0) * size.n_kv
    return Stage("attention", values)


def _feed_forward(facts: ModelFacts, laws: EngineLaws) -> list[Stage]:
    embd = facts.n_embd or 0
    base = 3 * embd if laws.is_feed_forward_fused else 5 * embd
    found: list[Stage] = []
    if facts.is_moe:
        found.append(Stage("experts", base + sum(_expert_pieces(facts, laws))))
    if not facts.is_moe or any(block.feed_forward_bytes for block in facts.trunk):
        found.append(Stage("feed-forward", base + sum(_dense_pieces(facts, laws))))
    return found


def _pieces(facts: ModelFacts, laws: EngineLaws) -> list[int]:
    return _expert_pieces(facts, laws) if facts.is_moe else _dense_pieces(facts, laws)


def _dense_pieces(facts: ModelFacts, laws: EngineLaws) -> list[int]:
    """Gate, up and their product; where they are one operation, the product alone."""
    return [facts.n_ff or 0] * (1 if laws.is_feed_forward_fused else 3)


def _expert_pieces(facts: ModelFacts, laws: EngineLaws) -> list[int]:
    """The same for every used expert, and their results.

    The results take the room of gate and up if they fit there; a shared expert is in the way.
    """
    used, hidden = facts.n_expert_used or 0, facts.n_ff_expert or facts.n_ff or 0
    results = used * (facts.n_embd or 0)
    if laws.is_feed_forward_fused:
        return [used * hidden, results]
    is_apart = facts.n_ff_shared or (facts.n_embd or 0) > 2 * hidden
    return [used * hidden] * 3 + ([results] if is_apart else [])


def recurrence(facts: ModelFacts, size: GraphSize, laws: EngineLaws) -> Stage:
    """Input and output of the convolution, queries, keys and values, and the states it writes.

    5 e + 2 mixed + inner / 2, one inner more where copies of the state are written, and those
    copies; builds that do not write them this way 3 e + 3 mixed, ik_llama.cpp an inner more.
    """
    state, embd = facts.recurrent, facts.n_embd or 0
    if state is None:
        return Stage("recurrence", 0)
    values = size.n_copies * size.n_sequences * state.n_state / size.n_ubatch
    if laws.writes_state_copies:
        values += 5 * embd + 2 * state.mixed_width + 0.5 * state.inner_width
        values += state.inner_width if size.n_copies > 1 else 0
    else:
        values += 3 * embd + 3 * state.mixed_width
        values += 0 if laws.keeps_state_copies else state.inner_width
    return Stage("recurrence", values)


def _logits(facts: ModelFacts, size: GraphSize, laws: EngineLaws) -> int:
    """Logits and the rows that they come from: (vocabulary + 4 e) * rows * 4 bytes."""
    rows = size.n_outputs if laws.caps_outputs else size.n_ubatch
    return ((facts.n_vocab or 0) + 4 * (facts.n_embd or 0)) * rows * _F32_BYTES
