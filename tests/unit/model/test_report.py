"""What servers say about their memory, from logs that real builds wrote."""

from __future__ import annotations

import pytest

from tests.support.folders import DATA
from tunerd.model.memory import Device, Part, PartKind
from tunerd.model.verdict import (
    MemoryCorrection,
    MemoryReport,
    Taken,
    corrected,
    parse_report,
    taken,
)

MIB = 1024 * 1024
LOGS = DATA / "memory"
GPU, HOST = Device.GPU, Device.HOST


def report(name: str) -> MemoryReport:
    return parse_report((LOGS / f"{name}.txt").read_text().splitlines())


def test_what_is_told_again_at_exit_or_planned_again_counts_once() -> None:
    found = report("mainline-0.7.0-vulkan-mtp-exit")

    assert found.allocated_mib(GPU) == pytest.approx(427.38 + 32 + 37.69 + 37.07 + 8 + 32.02)
    assert (found.n_layers_on_gpu, found.n_layers_to_place, found.n_ctx) == (18, 18, 4096)
    compute = [one for one in found.buffers if one.kind is PartKind.COMPUTE]
    assert [(one.label, one.mib, one.context) for one in compute] == [
        ("Vulkan0", 37.07, 1), ("Vulkan_Host", 12.02, 1), ("Vulkan0", 32.02, 2), ("Vulkan_Host", 8.02, 2),
    ]  # fmt: skip


KINDS = (PartKind.WEIGHTS, PartKind.KV, PartKind.STATE, PartKind.COMPUTE)


def test_buffers_of_the_load_are_told_in_the_words_of_either_family() -> None:
    mainline, ik = report("mainline-2026-05-16-cpu-mtp"), report("ik-2026-08-cpu-mtp")

    loaded = [mainline.allocated_mib(HOST, kind) for kind in KINDS]
    assert loaded == pytest.approx([495.38, 128 + 32, 37.69, 132 + 132])
    assert mainline.allocated_mib(GPU) == 0
    loaded = [ik.allocated_mib(HOST, kind) for kind in KINDS[:3]]
    assert loaded == pytest.approx([495.38, 172.56 + 32, 25.69 + 0.56])
    assert ik.n_ctx == 16384


def test_buffers_with_a_word_more_lie_where_their_line_says() -> None:
    """DeepSeek V4's and an adapter's: the word before `state` or `buffer` was taken for a card.

    Seen in ggml-org/llama.cpp#27872 (the first) and in the sources of b11434 and of ik_llama.cpp
    8337e4cd3; no such model was loaded here.
    """
    lines = """
        load_tensors:        CUDA0 model buffer size =  9000.00 MiB
        llama_adapter_lora_init_impl:        CPU LoRA buffer size =    12.00 MiB
        llama_context: constructing llama_context
        llama_dsv4_comp_state:      CUDA0 DSV4 lid state buffer size =     0.33 MiB
        llama_dsv4_comp_state:        CPU DSV4 csa state buffer size =   122.00 MiB
        llama_dsv4_spec_init:        CPU DSV4 speculative shadow buffer =     8.00 MiB
    """.splitlines()

    found = parse_report(lines)

    assert (
        found.allocated_mib(GPU, PartKind.WEIGHTS),
        found.allocated_mib(GPU, PartKind.STATE),
        found.allocated_mib(HOST, PartKind.WEIGHTS),
        found.allocated_mib(HOST, PartKind.STATE),
    ) == (9000, 0.33, 12, 130)


def test_a_draft_model_takes_no_buffer_from_the_model_before_it() -> None:
    lines = """
        load_tensors:   CPU_Mapped model buffer size =   314.63 MiB
        llama_context: constructing llama_context
        llama_kv_cache:        CPU KV buffer size =   128.00 MiB
        sched_reserve:        CPU compute buffer size =    40.01 MiB
        load_tensors:   CPU_Mapped model buffer size =    49.96 MiB
        llama_context: constructing llama_context
        llama_kv_cache:        CPU KV buffer size =    32.00 MiB
        sched_reserve:        CPU compute buffer size =    24.01 MiB
    """.splitlines()

    found = parse_report(lines)

    assert [one.context for one in found.buffers] == [0, 1, 1, 0, 2, 2]
    assert found.allocated_mib(HOST, PartKind.COMPUTE) == pytest.approx(40.01 + 24.01)


def test_a_projector_takes_no_buffer_from_the_model_before_it() -> None:
    lines = """
        load_tensors:   CPU_Mapped model buffer size =   321.20 MiB
        llama_context: constructing llama_context
        sched_reserve:        CPU compute buffer size =    37.52 MiB
        clip_ctx: CLIP using CPU backend
        reserve_compute_meta:        CPU compute buffer size =    28.00 MiB
    """.splitlines()

    assert parse_report(lines).allocated_mib(HOST, PartKind.COMPUTE) == pytest.approx(65.52)


def test_weights_repacked_from_a_mapped_file_count_once() -> None:
    lines = [
        "load_tensors:   CPU_Mapped model buffer size =   300.00 MiB",
        "load_tensors:   CPU_REPACK model buffer size =   200.00 MiB",
    ]
    unmapped = [lines[0].replace("CPU_Mapped", "CPU"), lines[1]]

    assert parse_report(lines).allocated_mib(HOST) == 300
    assert parse_report(unmapped).allocated_mib(HOST) == 500


def test_a_log_says_nothing_by_silence_or_by_numbers_that_cannot_be() -> None:
    """A client may write such lines into the log of its server."""
    many = "9" * 400
    impossible = [
        f"llama_kv_cache:        CPU KV buffer size = {many} MiB",
        f"llama_context: n_ctx         = {many}",
        f"load_tensors: offloaded {many}/{many} layers to GPU",
    ]
    for lines in (["hello", "", "x" * 1_000_000], impossible):
        assert parse_report(lines) == MemoryReport((), None, None, None)


# What a load showed, taken over into the next estimate.

PARTS = (
    Part(PartKind.WEIGHTS, Device.GPU, 9000 * MIB, "tensors"),
    Part(PartKind.WEIGHTS, Device.HOST, 400 * MIB, "embedding"),
    Part(PartKind.KV, Device.GPU, 1200 * MIB, "cells"),
    Part(PartKind.MTP_KV, Device.GPU, 75 * MIB, "cells"),
    Part(PartKind.COMPUTE, Device.GPU, 500 * MIB, "upper bound"),
    Part(PartKind.MTP_COMPUTE, Device.GPU, 100 * MIB, "upper bound"),
    Part(PartKind.CHECKPOINTS, Device.HOST, 4800 * MIB, "64 times 75 MiB"),
)
LOG = [
    "load_tensors:   CPU_Mapped model buffer size =   400.00 MiB",
    "load_tensors:        CUDA0 model buffer size =  9000.25 MiB",
    "llama_kv_cache:      CUDA0 KV buffer size =  1280.00 MiB",
    "llama_context:      CUDA0 compute buffer size =   480.50 MiB",
]


def seen(*found: Taken) -> MemoryCorrection:
    return MemoryCorrection(found, n_loads=1)


def mib(parts: tuple[Part, ...], device: Device, *kinds: PartKind) -> float:
    mine = [p for p in parts if p.device is device and (not kinds or p.kind in kinds)]
    return sum(part.n_bytes or 0 for part in mine) / MIB


def test_after_a_load_the_estimate_is_what_the_engine_reported() -> None:
    parts = corrected(PARTS, seen(*taken(parse_report(LOG))))
    assert mib(parts, Device.GPU) == pytest.approx(9000.25 + 1280 + 480.5, abs=0.01)
    assert mib(parts, Device.HOST, PartKind.WEIGHTS) == 400
    kv = {part.kind: part for part in parts if part.device is Device.GPU}
    assert kv[PartKind.KV].n_bytes == round(1200 * 1280 / 1275 * MIB)
    assert kv[PartKind.MTP_KV].formula == "cells"
    assert kv[PartKind.KV].formula == "cells; +5 MiB as the last load showed"


def test_where_a_part_was_not_known_what_was_reported_is_one_part() -> None:
    unknown = (
        Part(PartKind.COMPUTE, Device.GPU, None, "no such law"),
        Part(PartKind.MTP_COMPUTE, Device.GPU, 100 * MIB, "upper bound"),
    )
    (part,) = corrected(unknown, seen(Taken(Device.GPU, PartKind.COMPUTE, 480.0)))
    assert (part.kind, part.n_bytes) == (PartKind.COMPUTE, 480 * MIB)
    assert part.formula == "reported after a load: 480 MiB"
