"""What serving takes of each device's memory: weights, context, compute, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import ceil
from types import MappingProxyType

from tunerd.model.facts import Block, ModelFacts, RecurrentState
from tunerd.model.gguf import TYPES_BY_NAME
from tunerd.words import BYTES_PER_MIB, MiB, have_mib, need_mib

F32_BYTES = 4
F16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaws:
    """What one generation of builds allocates; the defaults are what mainline does now.

    Attributes:
        caps_outputs: Logits are reserved for the rows that are sampled; else for a whole ubatch.
        input_mask_bytes: Bytes per value of the attention mask as it is handed in; it is used in
            f16, so that a wider one needs both for a moment.
        keeps_state_copies: A recurrent cache holds one copy per drafted token; else a separate
            buffer holds the states of each step.
        writes_state_copies: The copies are results of the recurrence itself, so that they are part
            of the compute buffer for a moment.
        has_mtp_kv_in_target: The target's own cache has a layer for the MTP block too.
        has_windowed_cache: Sliding-window layers keep only their window.
        has_own_mtp_kv_type: The MTP context's cache has a type of its own, else the target's.
        loads_unused_mtp: The MTP block's weights are loaded although speculation is off.
        cpu_moe_takes_last: `--n-cpu-moe` counts from the last block with experts.
        cpu_moe_takes_mtp: `--cpu-moe` moves the MTP block's experts as well.
        checkpoint_has_mtp_kv: A context checkpoint holds the MTP context's cache of the prefix.
        repacks: Weights of some types are rewritten for the CPU's kernels.
        reserves_converted_kv: The f16 copy of a quantised cache that CUDA's attention makes is
            part of the compute buffer; before, it grew while the server ran.
        fits_every_slot: Fit makes a context that nobody set as long as trained for each slot, where slots
            have caches of their own; else for all of them together.
    """

    caps_outputs: bool = True
    input_mask_bytes: int = 2
    keeps_state_copies: bool = True
    writes_state_copies: bool = True
    has_mtp_kv_in_target: bool = False
    has_windowed_cache: bool = True
    has_own_mtp_kv_type: bool = True
    loads_unused_mtp: bool = False
    cpu_moe_takes_last: bool = False
    cpu_moe_takes_mtp: bool = True
    checkpoint_has_mtp_kv: bool = False
    repacks: bool = True
    reserves_converted_kv: bool = True
    fits_every_slot: bool = True


MAINLINE_NOW = EngineLaws()
MAINLINE_SUMMER_2026 = EngineLaws(
    writes_state_copies=False, checkpoint_has_mtp_kv=True, fits_every_slot=False
)
MAINLINE_JUNE_2026 = replace(MAINLINE_SUMMER_2026, loads_unused_mtp=True)
MAINLINE_SPRING_2026 = EngineLaws(
    caps_outputs=False,
    input_mask_bytes=4,
    writes_state_copies=False,
    has_own_mtp_kv_type=False,
    loads_unused_mtp=True,
    checkpoint_has_mtp_kv=True,
    reserves_converted_kv=False,
    fits_every_slot=False,
)
IK = EngineLaws(
    caps_outputs=False,
    keeps_state_copies=False,
    writes_state_copies=False,
    has_mtp_kv_in_target=True,
    has_windowed_cache=False,
    has_own_mtp_kv_type=False,
    cpu_moe_takes_last=True,
    cpu_moe_takes_mtp=False,
    checkpoint_has_mtp_kv=True,
    repacks=False,
    reserves_converted_kv=False,
    fits_every_slot=False,
)


class Device(StrEnum):
    """Where memory is: the GPU, or the machine's RAM."""

    GPU = "gpu0"
    HOST = "host"


class PartKind(StrEnum):
    """What memory is for."""

    WEIGHTS = "weights"
    MTP_WEIGHTS = "mtp weights"
    KV = "kv cache"
    STATE = "recurrent state"
    MTP_KV = "mtp kv cache"
    COMPUTE = "compute buffer"
    MTP_COMPUTE = "mtp compute buffer"
    DRAFT_WEIGHTS = "draft weights"
    DRAFT_KV = "draft kv cache"
    DRAFT_STATE = "draft recurrent state"
    DRAFT_COMPUTE = "draft compute buffer"
    PROJECTOR = "projector weights"
    OUTPUT = "output buffer"
    CHECKPOINTS = "context checkpoints"
    PROMPT_CACHE = "prompt cache"
    EXPERT_CACHE = "expert cache"


# These grow while the server runs, up to the size given; all others are there after the start.
GROWING = frozenset({PartKind.CHECKPOINTS, PartKind.PROMPT_CACHE})
WEIGHTS = frozenset({PartKind.WEIGHTS, PartKind.MTP_WEIGHTS, PartKind.DRAFT_WEIGHTS})
COMPUTE = frozenset({PartKind.COMPUTE, PartKind.MTP_COMPUTE, PartKind.DRAFT_COMPUTE})


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose on one device.

    `n_bytes` is None where a size that it needs is unknown. `formula` says in one line how the
    number came about.
    """

    kind: PartKind
    device: Device
    n_bytes: int | None
    formula: str

    @property
    def mib(self) -> MiB | None:
        """MiB, rounded up."""
        return None if self.n_bytes is None else need_mib(self.n_bytes)

    @property
    def grows(self) -> bool:
        """Whether it is a worst case that the server reaches only with time."""
        return self.kind in GROWING


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much memory a server will need, part by part.

    `n_ctx` is the context over all slots as the engine rounds it, `n_ctx_slot` that of one slot.
    `notes` are what a person should know beside the numbers. `is_locked` says that host weights are
    locked in RAM, `is_mapped` that they are pages of the file, which the kernel can take back.
    """

    parts: tuple[Part, ...]
    n_ctx: int | None
    n_ctx_slot: int | None
    is_locked: bool
    is_mapped: bool
    notes: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every part has a number."""
        return all(part.n_bytes is not None for part in self.parts)

    def on(self, device: Device) -> tuple[Part, ...]:
        """The parts on a device."""
        return tuple(part for part in self.parts if part.device is device)

    def bytes_of(
        self, device: Device, kinds: Iterable[PartKind] = tuple(PartKind), *, at_start: bool = True
    ) -> int:
        """Bytes of all known parts of these kinds on a device.

        Args:
            device: Where.
            kinds: Which.
            at_start: Without what only grows with time.
        """
        wanted = frozenset(kinds)
        parts = (part for part in self.on(device) if part.kind in wanted)
        return sum(part.n_bytes or 0 for part in parts if not (at_start and part.grows))

    def start_mib(self, device: Device) -> MiB:
        """What a device has to hold once the server listens."""
        return need_mib(self.bytes_of(device))

    def worst_mib(self, device: Device) -> MiB:
        """What a device has to hold after a long time."""
        return need_mib(self.bytes_of(device, at_start=False))

    @property
    def movable_mib(self) -> MiB:
        """What an engine that places layers itself could at most keep in RAM instead.

        Compute buffers and what a draft model needs stay on the GPU.
        """
        kinds = (*WEIGHTS - {PartKind.DRAFT_WEIGHTS}, PartKind.KV, PartKind.STATE, PartKind.MTP_KV)
        return have_mib(self.bytes_of(Device.GPU, kinds))

    def fit_needed_mib(self, free_mib: MiB, margin_mib: int) -> MiB:
        """What has to leave the GPU so that the margin stays free; 0 where everything fits."""
        return MiB(max(0, self.start_mib(Device.GPU) + margin_mib - free_mib))

    @property
    def locked_mib(self) -> MiB:
        """RAM that may not be swapped out, 0 without locking."""
        return need_mib(self.bytes_of(Device.HOST, WEIGHTS) if self.is_locked else 0)


CELL_STEP = 256
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


def padded(n: int) -> int:
    """So many cells as engines round them up."""
    return -(-n // CELL_STEP) * CELL_STEP


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

    @property
    def per_stream(self) -> int:
        """Cells of one stream."""
        return padded(padded(self.n_ctx) // self.n_streams)

    @property
    def total(self) -> int:
        """Cells of all streams."""
        return self.per_stream * self.n_streams


def row_bytes(type_name: str, n_values: int) -> int | None:
    """Bytes of so many values of a cache type, None for a type that is not known here."""
    kind = TYPES_BY_NAME.get(type_name.lower())
    if kind is not None:
        exact = kind.row_size(n_values)
        return exact if exact is not None else ceil(n_values * kind.bytes_per_value)
    per_value = _FORK_TYPES.get(type_name.lower())
    return None if per_value is None else ceil(n_values * per_value)


def _kv_token_bytes(block: Block, type_k: str, type_v: str) -> int | None:
    """Bytes that one token takes in the KV cache of one block.

    bytes = k_values * b(K) + v_values * b(V), with k_values = KV heads * key length.
    """
    if block.k_values is None or block.v_values is None:
        return None
    k_bytes, v_bytes = row_bytes(type_k, block.k_values), row_bytes(type_v, block.v_values)
    return None if k_bytes is None or v_bytes is None else k_bytes + v_bytes


def _kv_bytes(
    blocks: Iterable[Block], type_k: str, type_v: str, cells: int, window_cells: int
) -> int | None:
    """KV cache of these blocks, None if the size of one is unknown."""
    total = 0
    for block in blocks:
        per_token = _kv_token_bytes(block, type_k, type_v)
        if per_token is None:
            return None
        total += per_token * (window_cells if block.is_windowed else cells)
    return total


def _state_bytes(facts: ModelFacts) -> int:
    """One copy of one recurrent layer's state: 4 * (convolution tail + state) bytes."""
    state = facts.recurrent
    return 0 if state is None else F32_BYTES * (state.n_conv + state.n_state)


def _step_bytes(facts: ModelFacts, n_max: int) -> int:
    """What one recurrent layer keeps so that drafted tokens can be taken back, in ik_llama.cpp.

    bytes = 4 * (n_max * state + (n_max + 1) * convolution tail), and one tail more as a shadow.

    Source:
        `per-step buffer` and `shadow buffer` that ik's builds of June and August 2026 print:
        38.25 + 0.56 MiB for 12 layers of 1 MiB + 48 KiB at n_max 3, 75.94 + 0.56 at 6.
    """
    if facts.recurrent is None:
        return 0
    tail = facts.recurrent.n_conv
    return F32_BYTES * (n_max * facts.recurrent.n_state + (n_max + 2) * tail)


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices of blocks on the GPU, of blocks whose experts or feed-forward network stay behind.

    `has_head` says whether the output layer is on the GPU.
    """

    on_gpu: frozenset[int]
    experts_on_cpu: frozenset[int]
    forward_on_cpu: frozenset[int]
    has_head: bool

    def gpu_bytes(self, block: Block) -> int:
        """Bytes of a block's weights on the GPU."""
        if block.index not in self.on_gpu:
            return 0
        staying = block.expert_bytes if block.index in self.experts_on_cpu else 0
        if block.index in self.forward_on_cpu:
            staying += block.feed_forward_bytes
        return block.n_bytes - staying

    def cpu_bytes(self, block: Block) -> int:
        """Bytes of a block's weights in RAM."""
        return block.n_bytes - self.gpu_bytes(block)


_DRAFTING = frozenset({"mtp", "draft", "eagle3", "dflash", "dspark"})


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
        draft_ctx_size: Tokens of the draft model's context, 0 as the target's.
        draft_n_gpu_layers: None for all.
        draft_n_ubatch: None as the target's.
        n_gpu_layers: None for all.
        has_gpu: False leaves everything in RAM whatever the flags say.
        is_cuda: Whether CUDA runs the GPU, where that changes sizes; else Vulkan.
        load_mode: As `--load-mode`; `auto` maps the file.
        ctx_checkpoints: Most context checkpoints per slot.
        cache_ram_mib: Prompt cache; -1 has no limit.
        moe_cache_mib: GPU cache of experts that are kept in RAM; 0 for none.
        projector_bytes: Size of the multimodal projector's file; 0 without one, None where it is not known.
        projector_offload: False keeps the projector in RAM.
        adapter_bytes: Size of the files of adapters, and of a drafter that no key names, None where it is not known.
        has_rules: Rules place single tensors, so that where weights go is not known.
    """

    ctx_size: int = 0
    n_parallel: int = 1
    kv_unified: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: bool = True
    speculation: str = "off"
    n_max: int = 0
    draft: ModelFacts | None = None
    draft_cache_type_k: str = "f16"
    draft_cache_type_v: str = "f16"
    draft_ctx_size: int = 0
    draft_n_gpu_layers: int | None = None
    draft_n_ubatch: int | None = None
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    cpu_moe: bool = False
    n_cpu_ffn: int = 0
    kv_offload: bool = True
    has_gpu: bool = True
    is_cuda: bool = True
    load_mode: str = "auto"
    ctx_checkpoints: int = 32
    cache_ram_mib: int = 8192
    moe_cache_mib: int = 0
    projector_bytes: int | None = 0
    projector_offload: bool = True
    adapter_bytes: int | None = 0
    has_rules: bool = False
    laws: EngineLaws = MAINLINE_NOW

    @property
    def drafts(self) -> bool:
        """Whether a drafting context exists, which needs state copies in the target."""
        return self.speculation in _DRAFTING and self.n_max > 0

    @property
    def mtp_cache_types(self) -> tuple[str, str]:
        """Types of K and V in the MTP context."""
        if self.laws.has_own_mtp_kv_type:
            return self.draft_cache_type_k, self.draft_cache_type_v
        return self.cache_type_k, self.cache_type_v


def place(facts: ModelFacts, settings: MemorySettings) -> Placement:
    """Where an engine puts blocks for explicit flags; None GPU layers means all of them.

    Layers are taken from the end: the head first, then the last blocks, MTP blocks counted.
    `--n-cpu-moe N` keeps the experts of the first N blocks on the CPU in mainline, of the last N
    trunk blocks that have any in ik_llama.cpp.

    Source:
        llama.cpp and ik_llama.cpp, `load_tensors`; buffer sizes of both for several N.
    """
    n_blocks, laws, n_cpu_moe = len(facts.blocks), settings.laws, settings.n_cpu_moe
    n_gpu_layers = settings.n_gpu_layers if settings.has_gpu else 0
    wanted = n_blocks + 1 if n_gpu_layers is None else min(n_gpu_layers, n_blocks + 1)
    first = max(0, n_blocks + 1 - wanted)
    with_experts = [block for block in facts.blocks if block.expert_bytes]
    trunk = [block.index for block in with_experts if not block.is_mtp]
    everywhere = [block.index for block in with_experts]
    if settings.cpu_moe:
        staying = everywhere if laws.cpu_moe_takes_mtp else trunk
    elif laws.cpu_moe_takes_last:
        staying = trunk[len(trunk) - min(n_cpu_moe, len(trunk)) :]
    else:
        staying = [index for index in everywhere if index < n_cpu_moe]
    return Placement(
        on_gpu=frozenset(range(first, n_blocks)) if wanted > 0 else frozenset(),
        experts_on_cpu=frozenset(staying),
        forward_on_cpu=frozenset(range(min(settings.n_cpu_ffn, n_blocks))),
        has_head=wanted > 0,
    )


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
        return None if n_ctx is None else Cells(n_ctx, self.n_streams)

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
        if window is None or not self.laws.has_windowed_cache:
            return self.cells.total
        n_sequences = self.settings.n_parallel // self.n_streams
        in_stream = min(self.cells.per_stream, padded(window * n_sequences + self.n_ubatch))
        return in_stream * self.n_streams

    @cached_property
    def placement(self) -> Placement:
        """Where blocks are."""
        return place(self.facts, self.settings)

    @property
    def worker(self) -> Device:
        """Which device computes."""
        return Device.GPU if self.settings.has_gpu else Device.HOST

    def kv_device(self, block: Block) -> Device:
        """Where a block's caches are: beside its attention, unless that was switched off."""
        is_gpu = self.settings.kv_offload and block.index in self.placement.on_gpu
        return Device.GPU if is_gpu else Device.HOST

    @property
    def graph(self) -> Graph | None:
        """What is computed at once, None where the context or the width of the model is unknown."""
        if self.cells is None or self.facts.n_embd is None:
            return None
        n_outputs = self.settings.n_parallel * self.n_copies
        return Graph(self, self.cells, self.facts.n_embd, self.n_ubatch, n_outputs)


@dataclass(frozen=True, slots=True)
class Graph:
    """What a context computes at once, and the memory that this takes."""

    server: Server
    cells: Cells
    n_embd: int
    n_ubatch: int
    n_outputs: int

    @property
    def n_kv(self) -> int:
        """Cells of one stream in layers that attend to everything, 0 where there are none."""
        has_full = any(one.has_attention and not one.is_windowed for one in self.server.facts.trunk)
        return self.cells.per_stream if has_full else 0

    @property
    def n_masked(self) -> int:
        """Cells that a token's masks are over: windows have one of their own."""
        server = self.server
        has_windows = any(one.has_attention and one.is_windowed for one in server.facts.trunk)
        return self.n_kv + (server.window_cells // server.n_streams if has_windows else 0)

    @property
    def masks(self) -> int:
        """Bytes of masks where the work is done: f16, beside a wide input that they are made from.

        Without flash attention they are f32.
        """
        wide = self.server.laws.input_mask_bytes
        value_bytes = F16_BYTES + (wide if wide > F16_BYTES else 0)
        if not self.server.settings.flash_attn:
            value_bytes = F32_BYTES
        return self.n_masked * self.n_ubatch * value_bytes

    def input_bytes(self, width: int) -> int:
        """Host side of a context that runs on the GPU: the mask and rows of embeddings, handed over.

        bytes = mask + width * n_embd * n_ubatch * 4, width 4 for a trunk and 2 for an MTP block.
        """
        settings, laws = self.server.settings, self.server.laws
        value_bytes = laws.input_mask_bytes if settings.flash_attn else F32_BYTES
        return self.n_ubatch * (self.n_masked * value_bytes + width * self.n_embd * F32_BYTES)

    def stages(self) -> dict[str, float]:
        """The most values per token that are alive together in each step of a layer, without masks."""
        facts, base = self.server.facts, 5 * self.n_embd
        found: dict[str, float] = {"attention": self._attention()}
        if facts.is_moe:
            used, hidden = facts.n_expert_used or 0, facts.n_ff_expert or facts.n_ff or 0
            found["experts"] = base + used * max(3 * hidden, 2 * hidden + self.n_embd)
        if not facts.is_moe or any(block.feed_forward_bytes for block in facts.trunk):
            found["feed-forward"] = base + 3 * (facts.n_ff or 0)
        if facts.recurrent is not None:
            found["recurrence"] = self._recurrence(facts.recurrent)
        return found

    def _attention(self) -> int:
        """Queries, keys, values and the result: 5 e + q + max(q, 3 kv), with a gate 2 q more.

        Without flash attention the scores of every head over every cell come on top.
        """
        facts = self.server.facts
        queries = (facts.n_head or 0) * (facts.key_length or 0)
        cached = max((block.k_values or 0 for block in facts.blocks), default=0)
        values = 5 * self.n_embd + queries + max(queries, 3 * cached)
        if facts.is_gated_attention:
            values += 2 * queries
        if not self.server.settings.flash_attn:
            values += (facts.n_head or 0) * self.n_kv
        return values

    def _recurrence(self, state: RecurrentState) -> float:
        """Input and output of the convolution, queries, keys and values, and the states it writes."""
        server = self.server
        n_copies = server.n_copies if server.laws.writes_state_copies else 1
        written = n_copies * server.settings.n_parallel * state.n_state / self.n_ubatch
        return written + 5 * self.n_embd + 2.5 * state.mixed_width + state.inner_width

    def buffer(self, *, n_layers: int | None = None) -> tuple[int, str]:
        """A context's compute buffer, with how it comes about.

        bytes = max(masks + widest stage * n_ubatch * 4, logits), the logits with the rows that they come from:
        (vocabulary + 4 e) * rows * 4. A context of one layer uses the masks' room again behind its attention.

        Source: docs/memory.md; the widths err high, by up to 38 MiB of 841 at a ubatch of 2048.
        """
        reused = self.masks / (self.n_ubatch * F32_BYTES) if n_layers == 1 else 0
        stages = {
            name: values if name == "attention" else values - reused
            for name, values in self.stages().items()
        }
        name, widest = max(stages.items(), key=lambda stage: stage[1])
        layers = self.masks + round(widest) * self.n_ubatch * F32_BYTES
        rows = self.n_outputs if self.server.laws.caps_outputs else self.n_ubatch
        n_vocab = self.server.facts.n_vocab or 0
        logits = (n_vocab + 4 * self.n_embd) * rows * F32_BYTES
        if logits > layers:
            text = f"logits of {n_vocab} tokens for all {self.n_ubatch} rows of a ubatch"
            return logits, text
        text = f"masks over {self.n_masked} cells + {round(widest)} values ({name})"
        return layers, f"{text} x {self.n_ubatch} tokens x 4 B"


# mainline repacks these types for the CPU, so that a head that is the embedding table exists twice.
# Source: tables of builds of August and November 2026 on AVX2, 14 types tried.
_REPACKED = frozenset({"q4_0", "q4_K", "iq4_nl"})


def weights(server: Server) -> Iterator[Part]:
    """The model's tensors, by where the placement puts them."""
    facts, placement = server.facts, server.placement
    yield Part(
        PartKind.WEIGHTS, server.worker, server.settings.adapter_bytes, "files that extra_args name"
    )
    if server.settings.has_rules and server.worker is Device.GPU:
        for device in Device:
            yield Part(PartKind.WEIGHTS, device, None, "memory.override_tensor says what is where")
        return
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
    text = f"embeddings, and what is not on the GPU of {len(trunk)} blocks"
    if not placement.has_head:
        n_bytes += facts.output_bytes
        text += " and the head"
        if facts.is_tied and server.laws.repacks and facts.head_type in _REPACKED:
            n_bytes += facts.head_bytes
            text += ", which is the embedding table once more, repacked"
    yield Part(PartKind.WEIGHTS, Device.HOST, n_bytes, text)
    yield from _mtp_weights(server)
    yield from _expert_cache(server)


def _expert_cache(server: Server) -> Iterator[Part]:
    """Room for whole experts of the layers that `--n-cpu-moe` leaves in RAM, and for one more than those.

    Source:
        The server's own line for it in 0.7.0, with less room and with more than the experts need.
    """
    facts, placement = server.facts, server.placement
    behind = [
        block.expert_bytes
        for block in facts.blocks
        if block.index in placement.experts_on_cpu & placement.on_gpu
    ]
    one = max(behind, default=0) // (facts.n_expert or 1)
    if not server.settings.moe_cache_mib or not one or not facts.n_expert:
        return
    n_experts = min(server.settings.moe_cache_mib * BYTES_PER_MIB, sum(behind) + one) // one
    text = f"{n_experts} experts of {one} B, of {len(behind)} layers"
    yield Part(PartKind.EXPERT_CACHE, Device.GPU, n_experts * one, text)


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
            own = settings.mtp_cache_types
            yield from _kv(server, PartKind.MTP_KV, device, facts.mtp_blocks, own)


def _kv(
    server: Server, kind: PartKind, device: Device, blocks: Sequence[Block], types: tuple[str, str]
) -> Iterator[Part]:
    here = [block for block in blocks if server.kv_device(block) is device]
    if not here:
        return
    if server.cells is None:
        yield Part(kind, device, None, "the context length is unknown")
        return
    cells, window_cells = server.cells.total, server.window_cells
    n_bytes = _kv_bytes(here, *types, cells, window_cells)
    if n_bytes is None:
        text = f"KV heads or one of the types {', '.join(types)} is unknown"
        yield Part(kind, device, None, text)
        return
    full = [block for block in here if not block.is_windowed]
    terms = []
    if full:
        one = full[0]
        terms.append(
            f"{len(full)} layers x {cells} cells x {_kv_token_bytes(one, *types)} B"
            f" ({one.k_values} K {types[0]}, {one.v_values} V {types[1]})"
        )
    if len(full) < len(here):
        terms.append(f"{len(here) - len(full)} windowed layers x {window_cells} cells")
    yield Part(kind, device, n_bytes, " + ".join(terms))


def _state(server: Server, device: Device) -> Part:
    """Recurrent state: a copy per sequence, and as many more as tokens are drafted.

    Where the copies are no part of it, a buffer of their own holds the states of each step.
    """
    recurrent = [block for block in server.facts.blocks if block.is_recurrent]
    layers = sum(server.kv_device(block) is device for block in recurrent)
    one, n_slots = _state_bytes(server.facts), server.settings.n_parallel
    if server.laws.keeps_state_copies:
        n_bytes = layers * one * n_slots * server.n_copies
        text = f"{layers} layers x {one} B x {n_slots} slots x {server.n_copies} copies"
        return Part(PartKind.STATE, device, n_bytes, text)
    n_bytes, text = layers * one * n_slots, f"{layers} layers x {one} B x {n_slots} slots"
    if server.n_copies > 1:
        steps = _step_bytes(server.facts, server.settings.n_max)
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
    n_bytes = sum(block.is_recurrent for block in facts.blocks) * _state_bytes(facts)
    if server.cells is None:
        return n_bytes
    if facts.sliding_window is not None:
        windowed = [block for block in facts.trunk if block.is_windowed]
        cells = min(padded(facts.sliding_window), server.cells.per_stream)
        types = (settings.cache_type_k, settings.cache_type_v)
        n_bytes += _kv_bytes(windowed, *types, cells, cells) or 0
    if n_bytes and server.has_mtp and server.laws.checkpoint_has_mtp_kv:
        cells = server.cells.per_stream
        n_bytes += _kv_bytes(facts.mtp_blocks, *settings.mtp_cache_types, cells, cells) or 0
    return n_bytes


# Batches of fewer tokens are computed where the weights are, others on the GPU.
# Source: llama.cpp, GGML_OP_OFFLOAD_MIN_BATCH.
_OFFLOAD_TOKENS = 32
UNQUANTISED = frozenset({"f16", "bf16", "f32"})
_AS_F16 = "for one layer's cache in f16"
_UNKNOWN_SIZE = "the context or embedding length is unknown"


def _target_work(server: Server) -> Iterator[Part]:
    """Compute buffers of the target's context, and where its logits go."""
    graph = server.graph
    if graph is None:
        yield Part(PartKind.COMPUTE, server.worker, None, _UNKNOWN_SIZE)
        return
    settings = server.settings
    n_bytes, text = graph.buffer()
    if server.worker is Device.GPU:
        types = (settings.cache_type_k, settings.cache_type_v)
        borrowed = _borrowed(server, server.facts.trunk, types, n_bytes)
        for more, what in ((borrowed, "borrowed from RAM"), (_converted(server), _AS_F16)):
            n_bytes += more
            text += f", and {more} B {what}" if more else ""
        yield _beside_gpu(server, graph)
    yield Part(PartKind.COMPUTE, server.worker, n_bytes, text)
    if server.facts.has_index:
        text = "the index by which it chooses what it attends to, and the scores of that"
        yield Part(PartKind.COMPUTE, server.worker, None, text)
    n_bytes = (server.facts.n_vocab or 0) * graph.n_outputs * F32_BYTES
    yield Part(PartKind.OUTPUT, Device.HOST, n_bytes, f"logits of {graph.n_outputs} rows")


def _mtp_work(server: Server) -> Iterator[Part]:
    """Compute buffers of the MTP context, which shares nothing with the target's."""
    if not server.has_mtp:
        return
    facts, settings, graph = server.facts, server.settings, server.graph
    if graph is None:
        yield Part(PartKind.MTP_COMPUTE, server.worker, None, _UNKNOWN_SIZE)
        return
    n_ubatch = min(settings.draft_n_ubatch or graph.n_ubatch, graph.n_ubatch)
    graph = replace(graph, n_ubatch=n_ubatch, n_outputs=settings.n_parallel)
    n_bytes, text = graph.buffer(n_layers=1)
    if borrowed := _borrowed(server, facts.mtp_blocks, settings.mtp_cache_types, n_bytes):
        n_bytes += borrowed
        text += f", and {borrowed} B borrowed from RAM"
    yield Part(PartKind.MTP_COMPUTE, server.worker, n_bytes, text)
    if server.worker is Device.GPU:
        text = "inputs: attention mask, embeddings and hidden states of a ubatch"
        yield Part(PartKind.MTP_COMPUTE, Device.HOST, graph.input_bytes(width=2), text)


def _borrowed(server: Server, blocks: Sequence[Block], types: tuple[str, str], own: int) -> int:
    """The most of what is in RAM that the GPU holds a copy of at once.

    Weights are copied one tensor at a time, experts two where none are on the GPU, once a fifth of
    what is its own is free again; attention over a cache in RAM copies that of one layer, but with
    `--no-kv-offload`.

    Source: 0.7.0 on Vulkan, some 60 placements of dense, hybrid and MoE models.
    """
    placement = server.placement
    if server.worker is Device.HOST or server.n_ubatch < _OFFLOAD_TOKENS or server.cells is None:
        return 0
    away = [block for block in blocks if block.index not in placement.on_gpu]
    with_experts = [block for block in blocks if block.expert_bytes]
    behind = [one for one in with_experts if one in away or one.index in placement.experts_on_cpu]
    n_tensors = 2 if len(behind) == len(with_experts) > 1 else 1
    in_ram = [one for one in blocks if server.kv_device(one) is Device.HOST]
    caches_in_ram = in_ram if server.settings.kv_offload else []
    sizes = [
        0,
        *(block.largest_dense_bytes for block in away),
        *(n_tensors * block.largest_expert_bytes - own // 5 for block in behind),
        *(server.cells.total * (_kv_token_bytes(one, *types) or 0) for one in caches_in_ram),
    ]
    return max(sizes)


def _converted(server: Server) -> int:
    """The f16 copy of a quantised cache that CUDA's attention makes of one layer.

    bytes = n_kv * (k_values + v_values) * 2

    Source: ggml-org/llama.cpp#23907, read and not seen: it takes a CUDA device.
    """
    settings = server.settings
    is_quantised = not {settings.cache_type_k, settings.cache_type_v} <= UNQUANTISED
    is_reserved = settings.is_cuda and server.laws.reserves_converted_kv
    if server.cells is None or not (is_quantised and is_reserved and settings.flash_attn):
        return 0
    on_gpu = [block for block in server.facts.trunk if server.kv_device(block) is Device.GPU]
    values = max(((one.k_values or 0) + (one.v_values or 0) for one in on_gpu), default=0)
    return server.cells.total * values * F16_BYTES


def _beside_gpu(server: Server, graph: Graph) -> Part:
    """The host's buffer: inputs, and what is computed there of blocks whose weights are in RAM.

    Without borrowing that is all of a block; with it only a recurrence that writes copies of its state.
    """
    n_bytes = graph.input_bytes(width=4)
    text = "inputs: attention mask and embeddings of a ubatch"
    blocks = [block for block in server.facts.trunk if server.placement.cpu_bytes(block)]
    stages = graph.stages() if blocks else {}
    if server.n_ubatch >= _OFFLOAD_TOKENS:
        away = [block for block in blocks if block.index not in server.placement.on_gpu]
        writes = (
            server.laws.writes_state_copies
            and server.n_copies > 1
            and any(block.is_recurrent for block in away)
        )
        stages = {"recurrence": stages["recurrence"]} if writes else {}
    if stages:
        name, widest = max(stages.items(), key=lambda stage: stage[1])
        n_bytes += round(widest) * graph.n_ubatch * F32_BYTES
        text += f", and {name} of {len(blocks)} blocks in RAM"
    return Part(PartKind.COMPUTE, Device.HOST, n_bytes, text)


LOCKING = frozenset({"mlock", "mmap+mlock"})
_MAPPING = frozenset({"auto", "mmap", "mmap+mlock"})
_DRAFT_KINDS = {
    PartKind.WEIGHTS: PartKind.DRAFT_WEIGHTS,
    PartKind.MTP_WEIGHTS: PartKind.DRAFT_WEIGHTS,
    PartKind.KV: PartKind.DRAFT_KV,
    PartKind.MTP_KV: PartKind.DRAFT_KV,
    PartKind.STATE: PartKind.DRAFT_STATE,
    PartKind.COMPUTE: PartKind.DRAFT_COMPUTE,
    PartKind.MTP_COMPUTE: PartKind.DRAFT_COMPUTE,
    PartKind.OUTPUT: PartKind.DRAFT_COMPUTE,
}


def estimate(facts: ModelFacts, settings: MemorySettings) -> Estimate:
    """What a server with this model and these settings will need, part by part."""
    server = Server(facts, settings)
    parts = [
        *weights(server),
        *caches(server),
        *_target_work(server),
        *_mtp_work(server),
        *_draft(server),
        *_projector(server),
        *growing(server),
    ]
    cells = server.cells
    n_ctx, n_ctx_slot = (cells.total, cells.per_stream) if cells else (None, None)
    return Estimate(
        parts=tuple(part for part in parts if part.n_bytes != 0),
        n_ctx=n_ctx,
        n_ctx_slot=n_ctx if settings.kv_unified else n_ctx_slot,
        is_locked=settings.load_mode in LOCKING,
        is_mapped=settings.load_mode in _MAPPING,
        notes=tuple(_notes(server)),
    )


# Source: llama.cpp, the default of `--fit-ctx`, and common/fit.cpp.
LEAST_CONTEXT = 4096
_CONTEXT_STEP = 256


def context_that_fits(
    facts: ModelFacts, settings: MemorySettings, room_mib: int, least: int = LEAST_CONTEXT
) -> tuple[int, int] | None:
    """The context that mainline's fit makes where none is set, and what it would make with all the room it wants.

    It is taken from what the largest needs and what the least needs, as if that grew evenly. None where
    nobody can tell. `settings` are without a context, `room_mib` is on the device that computes, without
    what is to be left free, and `least` is where fit stops.
    """
    if facts.context_length is None:
        return None
    n_streams = 1
    if settings.laws.fits_every_slot and not settings.kv_unified:
        n_streams = settings.n_parallel
    most, least = facts.context_length * n_streams, least * n_streams
    device = Device.GPU if settings.has_gpu else Device.HOST
    whole, little = (estimate(facts, replace(settings, ctx_size=one)) for one in (most, least))
    need, floor = whole.start_mib(device), little.start_mib(device)
    if not whole.is_complete:
        return None
    if need <= room_mib or most <= least:
        return most, most
    n_ctx = least + (most - least) * max(0, room_mib - floor) // max(1, need - floor)
    return max(least, n_ctx - n_ctx % _CONTEXT_STEP), most


# What the vision tower of Qwen3.5 and Qwen3.6 computes with; a build reserves it for the largest image.
# Source: public logs of builds of July to September 2026 on CUDA: 248.10 MiB beside 887.99 of weights.
_PROJECTOR_WORK_BYTES = 249 * BYTES_PER_MIB


def _projector(server: Server) -> Iterator[Part]:
    """A multimodal projector: its file as a whole, and what it computes with."""
    settings = server.settings
    device = server.worker if settings.projector_offload else Device.HOST
    yield Part(PartKind.PROJECTOR, device, settings.projector_bytes, "its file, as a whole")
    if settings.projector_bytes != 0:
        text = "projector, for the largest image of Qwen3.6"
        yield Part(PartKind.COMPUTE, device, _PROJECTOR_WORK_BYTES, text)


def _draft(server: Server) -> Iterator[Part]:
    """A draft model: a second model with a context as long as the target's, or of its own length."""
    settings, draft = server.settings, server.settings.draft
    if draft is None or not settings.drafts:
        return
    own = replace(
        settings,
        ctx_size=settings.draft_ctx_size or (server.cells.total if server.cells else 0),
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
        projector_bytes=0,
        adapter_bytes=0,
        has_rules=False,
        ctx_checkpoints=0,
        cache_ram_mib=0,
    )
    without: tuple[PartKind, ...] = ()
    if settings.speculation == "mtp" and draft.has_mtp:
        # Whatever else is in its file drafts nothing.
        own = replace(own, speculation="mtp", n_max=1)
        without = (PartKind.KV, PartKind.STATE, PartKind.COMPUTE, PartKind.OUTPUT)
    for part in estimate(draft, own).parts:
        if part.kind not in without:
            yield replace(part, kind=_DRAFT_KINDS[part.kind])


def _notes(server: Server) -> Iterator[str]:
    facts, settings = server.facts, server.settings
    if settings.cache_ram_mib < 0:
        yield "the prompt cache has no limit (`--cache-ram -1`): host memory can fill up"
    if server.laws.has_mtp_kv_in_target and any(
        one.k_values and not one.v_values for one in facts.blocks
    ):
        yield "ik_llama.cpp's compute buffer for latent attention is some 350 MiB larger than this"
    if settings.projector_bytes != 0:
        yield "the projector's compute buffer is that of Qwen3.6's; others may take more"
    if facts.architecture == "unknown":
        yield "the file names no architecture: these numbers are a guess"
    if settings.has_gpu and settings.is_cuda:
        yield "the CUDA driver takes a few hundred MiB of the GPU for itself, beside these numbers"
