"""What of a server's flags decides over memory, and a model under such settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tunerd.core.memory_compute import GraphSize
from tunerd.core.memory_context import Cells
from tunerd.core.memory_laws import MAINLINE_NOW, DraftKvType, EngineLaws
from tunerd.core.memory_parts import Device
from tunerd.core.memory_placement import NOTHING, Placement, place
from tunerd.core.model import Block, ModelFacts

_DRAFTING = frozenset({"mtp", "draft", "eagle3", "dflash", "dspark"})


class Backend(StrEnum):
    """What runs the GPU, where that changes sizes."""

    CUDA = "cuda"
    VULKAN = "vulkan"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """What of a server's flags decides over memory, with mainline's defaults.

    Attributes:
        ctx_size: Tokens over all slots, 0 as trained.
        n_parallel: Slots.
        kv_unified: One cache for all slots.
        speculation: Kind as in profiles; `off` and the n-gram kinds need no memory.
        n_max: Most tokens drafted per step.
        draft: The draft model, where the kind needs one.
        draft_n_gpu_layers: None for all.
        draft_n_ubatch: None as the target's.
        n_gpu_layers: None for all.
        has_gpu: False leaves everything in RAM whatever the flags say.
        load_mode: As `--load-mode`; `auto` maps the file.
        ctx_checkpoints: Most context checkpoints per slot.
        cache_ram_mib: Prompt cache; -1 has no limit.
    """

    ctx_size: int = 0
    n_parallel: int = 1
    kv_unified: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: bool = True
    swa_full: bool = False
    speculation: str = "off"
    n_max: int = 0
    draft: ModelFacts | None = None
    draft_cache_type_k: str = "f16"
    draft_cache_type_v: str = "f16"
    draft_n_gpu_layers: int | None = None
    draft_n_ubatch: int | None = None
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    cpu_moe: bool = False
    n_cpu_ffn: int = 0
    kv_offload: bool = True
    op_offload: bool = True
    has_gpu: bool = True
    backend: Backend = Backend.CUDA
    load_mode: str = "auto"
    ctx_checkpoints: int = 32
    cache_ram_mib: int = 8192
    laws: EngineLaws = MAINLINE_NOW

    @property
    def drafts(self) -> bool:
        """Whether a drafting context exists, which needs state copies in the target."""
        return self.speculation in _DRAFTING and self.n_max > 0

    @property
    def mtp_cache_types(self) -> tuple[str, str]:
        """Types of K and V in the MTP context."""
        if self.laws.mtp_kv_type is DraftKvType.OWN:
            return self.draft_cache_type_k, self.draft_cache_type_v
        return self.cache_type_k, self.cache_type_v


class Server:
    """A model under settings: what several parts of an estimate need to know of it."""

    def __init__(self, facts: ModelFacts, settings: MemorySettings) -> None:
        self.facts, self.settings, self.laws = facts, settings, settings.laws
        self.has_mtp = (
            settings.speculation == "mtp"
            and settings.n_max > 0
            and settings.draft is None
            and facts.has_mtp
        )
        self.n_copies = 1 + (settings.n_max if settings.drafts else 0)
        self.n_streams = 1 if settings.kv_unified else settings.n_parallel

    @cached_property
    def cells(self) -> Cells | None:
        """Sizes of caches; None where the context length is unknown."""
        n_ctx = self.settings.ctx_size or self.facts.context_length
        return None if n_ctx is None else Cells(n_ctx, self.n_streams, self.settings.n_parallel)

    @cached_property
    def n_ubatch(self) -> int:
        """Tokens computed at once: no more than a batch, nor than the context."""
        settings = self.settings
        n_batch = min(settings.n_batch, self.cells.total) if self.cells else settings.n_batch
        return min(settings.n_ubatch, n_batch)

    @cached_property
    def window_cells(self) -> int:
        """Cells of all streams in windowed layers."""
        if self.cells is None:
            return 0
        window = self.facts.sliding_window
        if window is None or self.settings.swa_full or not self.laws.has_windowed_cache:
            return self.cells.total
        return self.cells.window_per_stream(window, self.n_ubatch) * self.n_streams

    @cached_property
    def placement(self) -> Placement:
        """Where blocks are."""
        settings = self.settings
        if not settings.has_gpu:
            return NOTHING
        return place(
            self.facts,
            settings.laws,
            n_gpu_layers=settings.n_gpu_layers,
            n_cpu_moe=settings.n_cpu_moe,
            cpu_moe=settings.cpu_moe,
            n_cpu_ffn=settings.n_cpu_ffn,
        )

    @property
    def worker(self) -> Device:
        """Which device computes."""
        return Device.GPU if self.settings.has_gpu else Device.HOST

    def kv_device(self, block: Block) -> Device:
        """Where a block's caches are: beside its attention, unless that was switched off."""
        is_gpu = self.settings.kv_offload and block.index in self.placement.on_gpu
        return Device.GPU if is_gpu else Device.HOST

    @cached_property
    def graph(self) -> GraphSize | None:
        """What decides over compute buffers, None where the context is unknown."""
        if self.cells is None:
            return None
        attending = [block for block in self.facts.trunk if block.has_attention]
        has_full = any(not block.is_windowed for block in attending)
        has_windows = any(block.is_windowed for block in attending)
        return GraphSize(
            n_ubatch=self.n_ubatch,
            n_kv=self.cells.per_stream if has_full else 0,
            n_window=self.window_cells // self.n_streams if has_windows else 0,
            n_sequences=self.settings.n_parallel,
            n_copies=self.n_copies if self.laws.writes_state_copies else 1,
            n_outputs=self.settings.n_parallel * self.n_copies,
            has_flash_attention=self.settings.flash_attn,
        )
