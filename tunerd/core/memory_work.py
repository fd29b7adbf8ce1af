"""What a server works with: the compute buffers of its contexts, by device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tunerd.core.memory_compute import (
    ComputeSize,
    GraphSize,
    Stage,
    attention,
    input_bytes,
    mtp_compute,
    stages,
    trunk_compute,
)
from tunerd.core.memory_context import kv_token_bytes
from tunerd.core.memory_parts import Device, Part, PartKind
from tunerd.core.memory_settings import Backend, Server
from tunerd.core.model import Block

_F32_BYTES = 4
_F16_BYTES = 2
# Batches of fewer tokens are computed where the weights are.
# Source: llama.cpp, GGML_OP_OFFLOAD_MIN_BATCH.
_OFFLOAD_TOKENS = 32
_UNQUANTISED = frozenset({"f16", "bf16", "f32"})


def target_work(server: Server) -> Iterator[Part]:
    """Compute buffers of the target's context, and where its logits go."""
    size = server.graph
    trunk = None if size is None else trunk_compute(server.facts, size, server.laws)
    if size is None or trunk is None:
        text = "the context or embedding length is unknown"
        yield Part(PartKind.COMPUTE, server.worker, None, text)
        return
    if server.worker is Device.HOST:
        yield Part(PartKind.COMPUTE, Device.HOST, trunk.n_bytes, trunk.formula)
    else:
        yield _on_gpu(server, size, trunk)
        yield _beside_gpu(server, size)
    n_bytes = (server.facts.n_vocab or 0) * size.n_outputs * _F32_BYTES
    yield Part(PartKind.OUTPUT, Device.HOST, n_bytes, f"logits of {size.n_outputs} rows")


def mtp_work(server: Server) -> Iterator[Part]:
    """Compute buffers of the MTP context, which shares nothing with the target's."""
    if not server.has_mtp:
        return
    facts, settings = server.facts, server.settings
    size = None if server.graph is None else _mtp_graph(server, server.graph)
    compute = None if size is None else mtp_compute(facts, size, server.laws)
    if size is None or compute is None:
        text = "the context or embedding length is unknown"
        yield Part(PartKind.MTP_COMPUTE, server.worker, None, text)
        return
    n_bytes, text = compute.n_bytes, compute.formula
    if server.worker is Device.GPU and _borrows(server):
        experts = [block for block in facts.mtp_blocks if server.placement.cpu_bytes(block)]
        one = max((block.largest_expert_bytes for block in experts), default=0)
        cache = _borrowed_cache(server, facts.mtp_blocks, settings.mtp_cache_types)
        n_bytes = max(n_bytes + cache, n_bytes * 4 // 5 + one)
        text += f", or with {one + cache} B borrowed from RAM" if one + cache else ""
    yield Part(PartKind.MTP_COMPUTE, server.worker, n_bytes, text)
    if server.worker is Device.GPU:
        host = input_bytes(facts, size, server.laws, width=2)
        text = "inputs: attention mask, embeddings and hidden states of a ubatch"
        yield Part(PartKind.MTP_COMPUTE, Device.HOST, host, text)


def _mtp_graph(server: Server, size: GraphSize) -> GraphSize:
    n_ubatch = min(server.settings.draft_n_ubatch or size.n_ubatch, size.n_ubatch)
    return replace(size, n_ubatch=n_ubatch, n_outputs=server.settings.n_parallel)


def _borrows(server: Server) -> bool:
    """Whether large batches are computed on the GPU although their weights are in RAM."""
    return server.settings.op_offload and server.n_ubatch >= _OFFLOAD_TOKENS


def _on_gpu(server: Server, size: GraphSize, trunk: ComputeSize) -> Part:
    """The GPU's buffer: the largest graph, or a smaller one with what it borrows from RAM."""
    n_bytes, text = trunk.n_bytes, trunk.formula
    if _borrows(server):
        for candidate in _borrowing(server, size, trunk):
            if candidate.n_bytes > n_bytes:
                n_bytes, text = candidate.n_bytes, candidate.formula
    converted = _converted(server)
    if converted:
        n_bytes += converted
        text += f", and {converted} B for one layer's cache in f16"
    return Part(PartKind.COMPUTE, Device.GPU, n_bytes, text)


def _borrowing(server: Server, size: GraphSize, trunk: ComputeSize) -> Iterator[ComputeSize]:
    """Moments at which the GPU holds a copy of something that is in RAM.

    Weights are copied one tensor at a time, experts two where none are on the GPU; attention over
    a cache in RAM copies that of one layer.

    Source: 0.7.0 on Vulkan, some 60 placements of dense, hybrid and MoE models.
    """
    facts, placement, settings = server.facts, server.placement, server.settings
    with_experts = [block for block in facts.trunk if block.expert_bytes]
    behind = [
        block
        for block in with_experts
        if block.index in placement.experts_on_cpu or block.index not in placement.on_gpu
    ]
    if behind:
        n_tensors = 2 if len(behind) == len(with_experts) else 1
        n_bytes = n_tensors * max(block.largest_expert_bytes for block in behind)
        text = f"{trunk.formula}, less a fifth, and {n_bytes} B of experts borrowed from RAM"
        yield ComputeSize(trunk.n_bytes * 4 // 5 + n_bytes, trunk.mask_bytes, text)
    away = [block for block in facts.trunk if block.index not in placement.on_gpu]
    if away:
        one = max(block.largest_dense_bytes for block in away)
        text = f"{trunk.formula}, and {one} B of weights borrowed from RAM"
        yield ComputeSize(trunk.n_bytes + one, trunk.mask_bytes, text)
    cache = _borrowed_cache(server, facts.trunk, (settings.cache_type_k, settings.cache_type_v))
    if cache:
        values = round(attention(facts, size).n_values)
        n_bytes = trunk.mask_bytes + values * size.n_ubatch * _F32_BYTES + cache
        text = f"attention, and {cache} B of one layer's cache borrowed from RAM"
        yield ComputeSize(n_bytes, trunk.mask_bytes, text)


def _borrowed_cache(server: Server, blocks: Sequence[Block], types: tuple[str, str]) -> int:
    """The largest cache of one layer that is in RAM; with `--no-kv-offload` none is borrowed."""
    if server.cells is None or not server.settings.kv_offload:
        return 0
    in_ram = [block for block in blocks if server.kv_device(block) is Device.HOST]
    per_cell = (kv_token_bytes(block, *types) or 0 for block in in_ram)
    return server.cells.total * max(per_cell, default=0)


def _converted(server: Server) -> int:
    """The f16 copy of a quantised cache that CUDA's attention makes of one layer.

    bytes = n_kv * (k_values + v_values) * 2

    Source: ggml-org/llama.cpp#23907, read and not seen: it takes a CUDA device.
    """
    settings = server.settings
    is_quantised = not {settings.cache_type_k, settings.cache_type_v} <= _UNQUANTISED
    is_reserved = settings.backend is Backend.CUDA and server.laws.reserves_converted_kv
    if server.cells is None or not (is_quantised and is_reserved and settings.flash_attn):
        return 0
    on_gpu = [block for block in server.facts.trunk if server.kv_device(block) is Device.GPU]
    values = max(((one.k_values or 0) + (one.v_values or 0) for one in on_gpu), default=0)
    return server.cells.total * values * _F16_BYTES


def _beside_gpu(server: Server, size: GraphSize) -> Part:
    """The host's buffer: inputs, and the stages that are computed there."""
    facts, placement = server.facts, server.placement
    n_bytes = input_bytes(facts, size, server.laws, width=4)
    text = "inputs: attention mask and embeddings of a ubatch"
    left = _left_stages(server, size)
    if left:
        widest = max(left, key=lambda stage: stage.n_values)
        n_bytes += round(widest.n_values) * size.n_ubatch * _F32_BYTES
        n_left = sum(placement.cpu_bytes(block) > 0 for block in facts.trunk)
        text += f", and {widest.name} of {n_left} blocks in RAM"
    return Part(PartKind.COMPUTE, Device.HOST, n_bytes, text)


def _left_stages(server: Server, size: GraphSize) -> list[Stage]:
    """What the CPU computes for large batches.

    Without borrowing it is everything of a block whose weights are in RAM. With it, it is only the
    recurrence of such a block that writes copies of its state.
    """
    blocks = [block for block in server.facts.trunk if server.placement.cpu_bytes(block)]
    every = stages(server.facts, size, server.laws)
    if not blocks:
        return []
    if not _borrows(server):
        return list(every)
    away = [block for block in blocks if block.index not in server.placement.on_gpu]
    writes = size.n_copies > 1 and any(block.is_recurrent for block in away)
    return [stage for stage in every if writes and stage.name == "recurrence"]
