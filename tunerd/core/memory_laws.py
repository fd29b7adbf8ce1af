"""How builds differ in what they allocate.

Every difference here was seen in the buffer sizes that real builds print (tests/support/
memory_cases.py has the cases). A build that was not tried gets the laws of the nearest one that
was, erring towards more memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.engine import Family


class DraftKvType(StrEnum):
    """Which cache type an MTP context gets: its own setting, or the target's."""

    OWN = "own"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaws:
    """What one generation of builds allocates.

    Attributes:
        name: For people.
        caps_outputs: Logits are reserved for the rows that are sampled; else for a whole ubatch.
        input_mask_bytes: Bytes per value of the attention mask as it is handed in; it is used in
            f16, so that a wider one needs both for a moment.
        is_feed_forward_fused: Gate and up projections are one operation with one result.
        keeps_state_copies: A recurrent cache holds one copy per drafted token; else a separate
            buffer holds the states of each step.
        writes_state_copies: The copies are results of the recurrence itself, so that they are part
            of the compute buffer for a moment.
        has_mtp_kv_in_target: The target's own cache has a layer for the MTP block too.
        has_windowed_cache: Sliding-window layers keep only their window.
        mtp_kv_type: Where the MTP context's cache type comes from.
        loads_unused_mtp: The MTP block's weights are loaded although speculation is off.
        cpu_moe_takes_last: `--n-cpu-moe` counts from the last block with experts.
        cpu_moe_takes_mtp: `--cpu-moe` moves the MTP block's experts as well.
        checkpoint_has_mtp_kv: A context checkpoint holds the MTP context's cache of the prefix.
        repacks: Weights of some types are rewritten for the CPU's kernels.
        reserves_converted_kv: The f16 copy of a quantised cache that CUDA's attention makes is
            part of the compute buffer; before, it grew while the server ran.
    """

    name: str
    caps_outputs: bool
    input_mask_bytes: int
    is_feed_forward_fused: bool
    keeps_state_copies: bool
    writes_state_copies: bool
    has_mtp_kv_in_target: bool
    has_windowed_cache: bool
    mtp_kv_type: DraftKvType
    loads_unused_mtp: bool
    cpu_moe_takes_last: bool
    cpu_moe_takes_mtp: bool
    checkpoint_has_mtp_kv: bool
    repacks: bool
    reserves_converted_kv: bool


MAINLINE_NOW = EngineLaws(
    name="mainline 0.x",
    caps_outputs=True,
    input_mask_bytes=2,
    is_feed_forward_fused=False,
    keeps_state_copies=True,
    writes_state_copies=True,
    has_mtp_kv_in_target=False,
    has_windowed_cache=True,
    mtp_kv_type=DraftKvType.OWN,
    loads_unused_mtp=False,
    cpu_moe_takes_last=False,
    cpu_moe_takes_mtp=True,
    checkpoint_has_mtp_kv=False,
    repacks=True,
    reserves_converted_kv=True,
)
MAINLINE_SUMMER_2026 = EngineLaws(
    name="mainline of summer 2026",
    caps_outputs=True,
    input_mask_bytes=2,
    is_feed_forward_fused=False,
    keeps_state_copies=True,
    writes_state_copies=False,
    has_mtp_kv_in_target=False,
    has_windowed_cache=True,
    mtp_kv_type=DraftKvType.OWN,
    loads_unused_mtp=False,
    cpu_moe_takes_last=False,
    cpu_moe_takes_mtp=True,
    checkpoint_has_mtp_kv=True,
    repacks=True,
    reserves_converted_kv=True,
)
MAINLINE_SPRING_2026 = EngineLaws(
    name="mainline until June 2026",
    caps_outputs=False,
    input_mask_bytes=4,
    is_feed_forward_fused=False,
    keeps_state_copies=True,
    writes_state_copies=False,
    has_mtp_kv_in_target=False,
    has_windowed_cache=True,
    mtp_kv_type=DraftKvType.TARGET,
    loads_unused_mtp=True,
    cpu_moe_takes_last=False,
    cpu_moe_takes_mtp=True,
    checkpoint_has_mtp_kv=True,
    repacks=True,
    reserves_converted_kv=False,
)
IK = EngineLaws(
    name="ik_llama.cpp",
    caps_outputs=False,
    input_mask_bytes=2,
    is_feed_forward_fused=True,
    keeps_state_copies=False,
    writes_state_copies=False,
    has_mtp_kv_in_target=True,
    has_windowed_cache=False,
    mtp_kv_type=DraftKvType.TARGET,
    loads_unused_mtp=False,
    cpu_moe_takes_last=True,
    cpu_moe_takes_mtp=False,
    checkpoint_has_mtp_kv=True,
    repacks=False,
    reserves_converted_kv=False,
)

_BY_DIALECT = {
    "main-old": MAINLINE_SPRING_2026,
    "main-pr": MAINLINE_SPRING_2026,
    "main-mid": MAINLINE_SPRING_2026,
    "main-lm": MAINLINE_SUMMER_2026,
    "main-0x": MAINLINE_NOW,
    "bee-01": MAINLINE_SPRING_2026,
    "bee-03": MAINLINE_SPRING_2026,
    "bee-04": MAINLINE_SUMMER_2026,
}


def laws_of(family: Family, dialect: str) -> EngineLaws:
    """The laws of a build, those of today's mainline for one that is not known."""
    if family is Family.IK:
        return IK
    return _BY_DIALECT.get(dialect, MAINLINE_NOW)
