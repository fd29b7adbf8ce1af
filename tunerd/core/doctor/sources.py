"""Where rules and their thresholds come from, as users read it."""

from __future__ import annotations

CARD_12_GB = (
    'write-up "Llama.cpp\'s MTP merge tanks throughput on constrained VRAM" (RTX 4070 Super, 12 GB)'
)
CARD_16_GB = 'write-up "LM Cache, KV Checkpointing, and MTP" (RTX 5060 Ti, 16 GB)'
CARD_24_GB = 'write-up "Three months of speed-up experiments on a 3090 Ti" (24 GB)'
NVML = "NVML API reference"


def issue(*numbers: int) -> str:
    """Threads of llama.cpp's repository."""
    return ", ".join(f"ggml-org/llama.cpp#{number}" for number in numbers)
