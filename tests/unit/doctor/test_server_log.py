"""What `doctor` reads from a server's own log."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.folders import DATA
from tunerd.doctor.facts import Traffic, read_server_log

# The words of CUDA builds; none runs here.
CUDA_INFO = (
    "system_info: n_threads = 6 (n_threads_batch = 6) / 12 | CUDA : ARCHS = 860,890 | "
    "USE_GRAPHS = 1 | PEER_MAX_BATCH_SIZE = 128 | FA_ALL_QUANTS = 1 | CPU : SSE3 = 1 | AVX = 1 |"
)
MAINLINE_REQUESTS = """\
slot launch_slot_: id  0 | task 0 | processing task, is_child = 0
slot print_timing: id  0 | task 0 | prompt eval time =      31.30 ms /   240 tokens (    0.13 ms per token,  7666.51 tokens per second)
slot print_timing: id  0 | task 0 |        eval time =      21.93 ms /    40 tokens (    0.55 ms per token,  1823.99 tokens per second)
slot print_timing: id  0 | task 0 | draft acceptance = 0.27869 (   17 accepted /    61 generated), mean len =  1.81
slot      release: id  0 | task 0 | stop processing: n_tokens = 279, truncated = 0
slot launch_slot_: id  0 | task 9 | processing task, is_child = 0
slot print_timing: id  0 | task 9 | prompt eval time =      10.00 ms /    60 tokens (    0.16 ms per token,  6000.00 tokens per second)
slot print_timing: id  0 | task 9 |        eval time =      20.00 ms /    11 tokens (    1.81 ms per token,   550.00 tokens per second)
slot      release: id  0 | task 9 | stop processing: n_tokens = 70, truncated = 0
""".splitlines()


def log_of(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8", errors="replace").splitlines()


MISPLACED = (
    "0.01.2 W layer 0 is assigned to device CPU but the fused Gated Delta Net tensor is assigned "
    "to device CUDA0 (usually due to missing support)"
)
CASES: list[tuple[list[str], dict[str, Any]]] = [
    ([CUDA_INFO], {"has_cuda": True, "cuda_architectures": (86, 89), "has_all_kv_pairs": True}),
    ([CUDA_INFO.replace("FA_ALL_QUANTS = 1 | ", "").replace("860,890", "1200")],
     {"cuda_architectures": (120,), "has_all_kv_pairs": False}),
    (log_of("logs/mainline-2026-04-26/out-of-memory.txt"),
     {"has_cuda": False, "cuda_architectures": None, "has_all_kv_pairs": None}),
    # It does not reach back to the start.
    (MAINLINE_REQUESTS, {"has_cuda": None, "has_all_kv_pairs": None, "n_slots": None,
                         "traffic": Traffic(2, 300, 51, 61, 17)}),
    (log_of("memory/mainline-2026-08-18-cpu-mtp.txt"), {"traffic": None}),
    (log_of("logs/ik-2026-08/mlock-refused-and-no-mtp-block.txt"), {"mlock_refused": True}),
    (log_of("logs/synthetic/mlock-refused-then-illegal-access.txt"), {"mlock_refused": True}),
    (log_of("logs/mainline-2026-08-18/mlock-refused-and-no-mtp-block.txt"), {"mlock_refused": True}),
    (log_of("logs/synthetic/cuda-no-kernel-image.txt"),
     {"lacks_kernels": True, "mlock_refused": False}),
    ([MISPLACED], {"has_misplaced_layers": True}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), CASES)
def test_what_the_log_of_a_life_says(lines: list[str], expected: dict[str, Any]) -> None:
    log = read_server_log(lines)
    assert {name: getattr(log, name) for name in expected} == expected


def test_no_lines_are_no_log() -> None:
    assert read_server_log([]) is None


def test_steps_are_what_was_generated_less_the_first_and_the_accepted() -> None:
    seen = Traffic(n_requests=2, n_prompt=300, n_predicted=51, n_drafted=61, n_accepted=17)
    assert seen.n_steps == 32
    assert seen.drafted_per_step == pytest.approx(61 / 32)


def test_real_logs_of_a_load_tell_buffers_slots_and_no_trouble() -> None:
    for path in sorted((DATA / "memory").glob("*.txt")):
        log = read_server_log(path.read_text().splitlines())
        assert log is not None
        assert log.report is not None
        trouble = (log.mlock_refused, log.lacks_kernels, log.has_misplaced_layers)
        assert trouble == (False, False, False), path
