"""How much memory a server will need, before it is started.

Weights and caches follow from the model's header and are exact; compute buffers are upper bounds
(see `tunerd.core.memory_compute`). What the GPU's driver takes for itself per process is no part
of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tunerd.core.memory_context import padded
from tunerd.core.memory_kept import caches, growing, weights
from tunerd.core.memory_laws import EngineLaws, laws_of
from tunerd.core.memory_parts import Device, Estimate, Part, PartKind
from tunerd.core.memory_settings import Backend, MemorySettings, Server
from tunerd.core.memory_work import mtp_work, target_work
from tunerd.core.model import ModelFacts

__all__ = [
    "Backend",
    "Device",
    "EngineLaws",
    "Estimate",
    "MemorySettings",
    "Part",
    "PartKind",
    "estimate",
    "laws_of",
]

_LOCKING = frozenset({"mlock", "mmap+mlock"})
_MAPPING = frozenset({"auto", "mmap", "mmap+mlock"})
_DRAFT_KINDS = {
    PartKind.WEIGHTS: PartKind.DRAFT_WEIGHTS,
    PartKind.MTP_WEIGHTS: PartKind.DRAFT_WEIGHTS,
    PartKind.KV: PartKind.DRAFT_KV,
    PartKind.STATE: PartKind.DRAFT_STATE,
    PartKind.COMPUTE: PartKind.DRAFT_COMPUTE,
    PartKind.OUTPUT: PartKind.DRAFT_COMPUTE,
}


def estimate(facts: ModelFacts, settings: MemorySettings) -> Estimate:
    """What a server with this model and these settings will need, part by part."""
    server = Server(facts, settings)
    parts = [
        *weights(server),
        *caches(server),
        *target_work(server),
        *mtp_work(server),
        *_draft(server),
        *growing(server),
    ]
    cells = server.cells
    n_ctx = cells.total if cells is not None else None
    n_ctx_slot = cells.per_stream if cells is not None else None
    return Estimate(
        parts=tuple(part for part in parts if part.n_bytes != 0),
        n_ctx=n_ctx,
        n_ctx_slot=n_ctx if settings.kv_unified else n_ctx_slot,
        is_locked=settings.load_mode in _LOCKING,
        is_mapped=settings.load_mode in _MAPPING,
        notes=tuple(_notes(server)),
    )


def _draft(server: Server) -> Iterator[Part]:
    """A draft model: a second model with a context as long as the target's."""
    settings, draft = server.settings, server.settings.draft
    if draft is None or not settings.drafts:
        return
    own = replace(
        settings,
        ctx_size=server.cells.total if server.cells is not None else 0,
        cache_type_k=settings.draft_cache_type_k,
        cache_type_v=settings.draft_cache_type_v,
        n_ubatch=settings.draft_n_ubatch or settings.n_ubatch,
        n_gpu_layers=settings.draft_n_gpu_layers,
        n_cpu_moe=0,
        cpu_moe=False,
        n_cpu_ffn=0,
        speculation="off",
        n_max=0,
        draft=None,
        ctx_checkpoints=0,
        cache_ram_mib=0,
    )
    if draft.is_companion and draft.has_mtp:
        # Its one block with tensors is the MTP block, and that is what it is loaded for.
        own = replace(own, speculation="mtp", n_max=1)
        kinds = _DRAFT_KINDS | {
            PartKind.MTP_KV: PartKind.DRAFT_KV,
            PartKind.MTP_COMPUTE: PartKind.DRAFT_COMPUTE,
        }
        context = (PartKind.KV, PartKind.STATE, PartKind.COMPUTE, PartKind.OUTPUT)
        parts = [part for part in estimate(draft, own).parts if part.kind not in context]
    else:
        kinds, parts = _DRAFT_KINDS, list(estimate(draft, own).parts)
    for part in parts:
        yield replace(part, kind=kinds[part.kind])


def _notes(server: Server) -> Iterator[str]:
    facts, settings, cells = server.facts, server.settings, server.cells
    if settings.speculation == "mtp" and settings.draft is None and not facts.has_mtp:
        yield facts.mtp_problem or "the model has no MTP block, so it cannot draft for itself"
    if settings.cache_ram_mib < 0:
        yield "the prompt cache has no limit (`--cache-ram -1`): host memory can fill up"
    trained = facts.context_length
    if cells is not None and trained is not None and cells.per_stream > padded(trained):
        yield f"the context is longer than the {trained} tokens that the model was trained for"
    if server.laws.has_mtp_kv_in_target and any(
        one.k_values and not one.v_values for one in facts.blocks
    ):
        yield "ik_llama.cpp's compute buffer for latent attention is some 350 MiB larger than this"
    if facts.architecture == "unknown":
        yield "the file names no architecture: these numbers are a guess"
    if settings.has_gpu and settings.backend is Backend.CUDA:
        yield "the CUDA driver takes a few hundred MiB of the GPU for itself, beside these numbers"
