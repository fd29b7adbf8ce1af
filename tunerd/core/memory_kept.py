"""What a server keeps: weights, caches and states, and what fills up while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunerd.core.memory_context import kv_bytes, kv_token_bytes, padded, state_bytes, step_bytes
from tunerd.core.memory_parts import Device, Part, PartKind
from tunerd.core.memory_settings import Server
from tunerd.core.model import Block
from tunerd.core.quantity import BYTES_PER_MIB

# mainline repacks these types for the CPU, so that a head that is the embedding table exists twice.
# Source: tables of builds of August and November 2026 on AVX2, 14 types tried.
_REPACKED = frozenset({"q4_0", "q4_K", "iq4_nl"})


def weights(server: Server) -> Iterator[Part]:
    """The model's tensors, by where the placement puts them."""
    facts, placement = server.facts, server.placement
    trunk = facts.trunk
    on_gpu = [block for block in trunk if placement.gpu_bytes(block)]
    split = sum(placement.cpu_bytes(block) > 0 for block in on_gpu)
    head = facts.output_bytes + (facts.head_bytes if facts.is_tied else 0)
    n_bytes = sum(map(placement.gpu_bytes, trunk)) + (head if placement.has_head else 0)
    text = f"{len(on_gpu)} of {len(trunk)} blocks"
    text += f" ({split} of them in part)" if split else ""
    text += " and the head" if placement.has_head else ""
    yield Part(PartKind.WEIGHTS, Device.GPU, n_bytes, text)
    n_bytes = sum(map(placement.cpu_bytes, trunk)) + facts.input_bytes + facts.other_bytes
    text = f"embeddings and what the GPU has not of {len(trunk)} blocks"
    if not placement.has_head:
        n_bytes += facts.output_bytes
        text += " and the head"
        if facts.is_tied and server.laws.repacks and facts.head_type in _REPACKED:
            n_bytes += facts.head_bytes
            text += ", which is the embedding table once more, repacked"
    yield Part(PartKind.WEIGHTS, Device.HOST, n_bytes, text)
    yield from _mtp_weights(server)


def _mtp_weights(server: Server) -> Iterator[Part]:
    asks_mtp = server.settings.speculation == "mtp" and server.settings.drafts
    if not (asks_mtp or server.laws.loads_unused_mtp):
        return
    blocks, placement = server.facts.mtp_blocks, server.placement
    text = f"{len(blocks)} MTP block(s)"
    if not server.has_mtp:
        text += ", loaded although they do not draft"
    yield Part(PartKind.MTP_WEIGHTS, Device.GPU, sum(map(placement.gpu_bytes, blocks)), text)
    yield Part(PartKind.MTP_WEIGHTS, Device.HOST, sum(map(placement.cpu_bytes, blocks)), text)


def caches(server: Server) -> Iterator[Part]:
    """The target's KV cache and recurrent state, and the MTP context's cache."""
    facts, settings = server.facts, server.settings
    attending = [block for block in facts.trunk if block.has_attention]
    if server.has_mtp and server.laws.has_mtp_kv_in_target:
        attending += facts.mtp_blocks
    types = (settings.cache_type_k, settings.cache_type_v)
    for device in Device:
        yield from _kv(server, PartKind.KV, device, attending, types)
        yield _state(server, device)
        if server.has_mtp:
            yield from _kv(
                server, PartKind.MTP_KV, device, facts.mtp_blocks, settings.mtp_cache_types
            )


def _kv(
    server: Server,
    kind: PartKind,
    device: Device,
    blocks: Sequence[Block],
    types: tuple[str, str],
) -> Iterator[Part]:
    here = [block for block in blocks if server.kv_device(block) is device]
    if not here:
        return
    if server.cells is None:
        yield Part(kind, device, None, "the context length is unknown")
        return
    cells, window_cells = server.cells.total, server.window_cells
    n_bytes = kv_bytes(here, *types, cells, window_cells)
    if n_bytes is None:
        yield Part(
            kind, device, None, f"KV heads or one of the types {', '.join(types)} is unknown"
        )
        return
    full = [block for block in here if not block.is_windowed]
    terms = []
    if full:
        one = full[0]
        terms.append(
            f"{len(full)} layers x {cells} cells x {kv_token_bytes(one, *types)} B"
            f" ({one.k_values} K {types[0]}, {one.v_values} V {types[1]})"
        )
    if len(full) < len(here):
        terms.append(f"{len(here) - len(full)} windowed layers x {window_cells} cells")
    yield Part(kind, device, n_bytes, " + ".join(terms))


def _state(server: Server, device: Device) -> Part:
    """Recurrent state: a copy per sequence, and as many more as tokens are drafted.

    Where the copies are no part of it, a buffer of their own holds the states of each step.
    """
    layers = sum(
        block.is_recurrent and server.kv_device(block) is device for block in server.facts.blocks
    )
    one, n_slots = state_bytes(server.facts), server.settings.n_parallel
    if server.laws.keeps_state_copies:
        n_bytes = layers * one * n_slots * server.n_copies
        text = f"{layers} layers x {one} B x {n_slots} slots x {server.n_copies} copies"
        return Part(PartKind.STATE, device, n_bytes, text)
    n_bytes, text = layers * one * n_slots, f"{layers} layers x {one} B x {n_slots} slots"
    if server.n_copies > 1:
        steps = step_bytes(server.facts, server.settings.n_max)
        n_bytes += layers * steps
        text += f", and {steps} B each for the steps of {server.settings.n_max} drafted tokens"
    return Part(PartKind.STATE, device, n_bytes, text)


def growing(server: Server) -> Iterator[Part]:
    """Host memory that fills while the server runs: context checkpoints and the prompt cache."""
    settings = server.settings
    one = checkpoint_bytes(server)
    n = settings.ctx_checkpoints * settings.n_parallel
    text = f"at most {settings.ctx_checkpoints} x {settings.n_parallel} slots x {one} B"
    yield Part(PartKind.CHECKPOINTS, Device.HOST, n * one, text)
    if settings.cache_ram_mib > 0:
        n_bytes = settings.cache_ram_mib * BYTES_PER_MIB
        yield Part(PartKind.PROMPT_CACHE, Device.HOST, n_bytes, "at most what `--cache-ram` allows")


def checkpoint_bytes(server: Server) -> int:
    """The largest context checkpoint: state, windowed cache, and older builds' MTP cache.

    A model without either needs none, since its cache can be cut back.

    Source: sizes that servers log per checkpoint (ggml-org/llama.cpp#24035, #25592, and 0.7.0).
    """
    facts, settings = server.facts, server.settings
    n_bytes = sum(block.is_recurrent for block in facts.blocks) * state_bytes(facts)
    if server.cells is None:
        return n_bytes
    if facts.sliding_window is not None and not settings.swa_full:
        windowed = [block for block in facts.trunk if block.is_windowed]
        cells = min(padded(facts.sliding_window), server.cells.per_stream)
        types = (settings.cache_type_k, settings.cache_type_v)
        n_bytes += kv_bytes(windowed, *types, cells, cells) or 0
    if n_bytes and server.has_mtp and server.laws.checkpoint_has_mtp_kv:
        cells = server.cells.per_stream
        n_bytes += kv_bytes(facts.mtp_blocks, *settings.mtp_cache_types, cells, cells) or 0
    return n_bytes
