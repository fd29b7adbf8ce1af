"""Which blocks, experts and head are on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.core.memory_laws import EngineLaws
from tunerd.core.model import Block, ModelFacts


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


NOTHING = Placement(frozenset(), frozenset(), frozenset(), has_head=False)


def place(
    facts: ModelFacts,
    laws: EngineLaws,
    *,
    n_gpu_layers: int | None,
    n_cpu_moe: int = 0,
    cpu_moe: bool = False,
    n_cpu_ffn: int = 0,
) -> Placement:
    """Where an engine puts blocks for explicit flags; None GPU layers means all of them.

    Layers are taken from the end: the head first, then the last blocks, MTP blocks counted.
    `--n-cpu-moe N` keeps the experts of the first N blocks on the CPU in mainline, of the last N
    trunk blocks that have any in ik_llama.cpp.

    Source:
        llama.cpp and ik_llama.cpp, `load_tensors`; buffer sizes of both for several N.
    """
    n_blocks = len(facts.blocks)
    wanted = n_blocks + 1 if n_gpu_layers is None else min(n_gpu_layers, n_blocks + 1)
    first = max(0, n_blocks + 1 - wanted)
    with_experts = [block for block in facts.blocks if block.expert_bytes]
    trunk = [block.index for block in with_experts if not block.is_mtp]
    if cpu_moe:
        staying = frozenset(
            block.index for block in with_experts if laws.cpu_moe_takes_mtp or not block.is_mtp
        )
    elif laws.cpu_moe_takes_last:
        staying = frozenset(trunk[len(trunk) - min(n_cpu_moe, len(trunk)) :])
    else:
        staying = frozenset(block.index for block in with_experts if block.index < n_cpu_moe)
    return Placement(
        on_gpu=frozenset(range(first, n_blocks)) if wanted > 0 else frozenset(),
        experts_on_cpu=staying,
        forward_on_cpu=frozenset(range(min(n_cpu_ffn, n_blocks))),
        has_head=wanted > 0,
    )
