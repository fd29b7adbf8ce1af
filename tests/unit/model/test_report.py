"""What servers say about their memory, from logs that real builds wrote."""

from __future__ import annotations

import pytest

from tests.support.folders import DATA
from tunerd.model.memory import Device
from tunerd.model.report import BufferKind, MemoryReport, parse_report

LOGS = DATA / "memory"
GPU, HOST = Device.GPU, Device.HOST


def report(name: str) -> MemoryReport:
    return parse_report((LOGS / f"{name}.txt").read_text().splitlines())


def test_the_table_at_exit_adds_nothing_to_the_buffers() -> None:
    found = report("mainline-0.7.0-vulkan-mtp-exit")

    assert found.allocated_mib(GPU) == pytest.approx(427.38 + 32 + 37.69 + 37.07 + 8 + 32.02)
    assert (found.n_layers_on_gpu, found.n_layers_to_place, found.n_ctx) == (18, 18, 4096)


def test_a_compute_buffer_that_is_planned_again_counts_once() -> None:
    ended = report("mainline-0.7.0-vulkan-mtp-exit")

    compute = [one for one in ended.buffers if one.kind is BufferKind.COMPUTE]
    assert [(one.label, one.mib, one.context) for one in compute] == [
        ("Vulkan0", 37.07, 1),
        ("Vulkan_Host", 12.02, 1),
        ("Vulkan0", 32.02, 2),
        ("Vulkan_Host", 8.02, 2),
    ]


def test_buffers_of_a_dry_run_are_not_those_of_the_load() -> None:
    loaded = report("mainline-2026-05-16-cpu-mtp")

    assert loaded.allocated_mib(HOST, BufferKind.MODEL) == pytest.approx(495.38)
    assert loaded.allocated_mib(HOST, BufferKind.KV) == pytest.approx(128 + 32)
    assert loaded.allocated_mib(HOST, BufferKind.STATE) == pytest.approx(37.69)
    assert loaded.allocated_mib(HOST, BufferKind.COMPUTE) == pytest.approx(132 + 132)
    assert loaded.allocated_mib(GPU) == 0


def test_ik_says_all_its_buffers_in_other_words() -> None:
    loaded = report("ik-2026-08-cpu-mtp")

    assert loaded.allocated_mib(HOST, BufferKind.MODEL) == pytest.approx(495.38)
    assert loaded.allocated_mib(HOST, BufferKind.KV) == pytest.approx(172.56 + 32)
    assert loaded.allocated_mib(HOST, BufferKind.STATE) == pytest.approx(25.69 + 0.56)
    assert loaded.n_ctx == 16384


def test_weights_repacked_from_a_mapped_file_count_once() -> None:
    lines = [
        "load_tensors:   CPU_Mapped model buffer size =   300.00 MiB",
        "load_tensors:   CPU_REPACK model buffer size =   200.00 MiB",
    ]
    unmapped = [lines[0].replace("CPU_Mapped", "CPU"), lines[1]]

    assert parse_report(lines).allocated_mib(HOST) == 300
    assert parse_report(unmapped).allocated_mib(HOST) == 500


def test_a_log_without_a_word_on_memory_says_nothing() -> None:
    silent = parse_report(["hello", "", "x" * 1_000_000])

    assert silent == MemoryReport((), None, None, None)
