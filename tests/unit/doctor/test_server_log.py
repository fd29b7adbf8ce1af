"""What `doctor` reads from a server's own log."""

from __future__ import annotations

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


def test_no_lines_are_no_log() -> None:
    assert read_server_log([]) is None


def test_a_cuda_build_names_its_architectures_and_whether_it_has_all_pairs() -> None:
    log = read_server_log([CUDA_INFO])

    assert log is not None
    assert log.has_cuda is True
    assert log.cuda_architectures == (86, 89)
    assert log.has_all_kv_pairs is True


def test_a_cuda_build_without_all_pairs_does_not_name_them() -> None:
    log = read_server_log(
        [CUDA_INFO.replace("FA_ALL_QUANTS = 1 | ", "").replace("860,890", "1200")]
    )

    assert log is not None
    assert (log.cuda_architectures, log.has_all_kv_pairs) == ((120,), False)


def test_a_build_for_the_processor_has_no_cuda() -> None:
    log = read_server_log(log_of("logs/mainline-2026-04-26/out-of-memory.txt"))

    assert log is not None
    assert log.has_cuda is False
    assert log.cuda_architectures is None
    assert log.has_all_kv_pairs is None


def test_a_log_that_does_not_reach_back_to_the_start_says_nothing_of_the_build() -> None:
    log = read_server_log(MAINLINE_REQUESTS)

    assert log is not None
    assert (log.has_cuda, log.has_all_kv_pairs, log.n_slots) == (None, None, None)


def test_requests_are_summed() -> None:
    log = read_server_log(MAINLINE_REQUESTS)

    assert log is not None
    assert log.traffic == Traffic(
        n_requests=2, n_prompt=300, n_predicted=51, n_drafted=61, n_accepted=17
    )
    assert log.traffic.n_steps == 32
    assert log.traffic.acceptance_ratio == pytest.approx(17 / 61)
    assert log.traffic.drafted_per_step == pytest.approx(61 / 32)


def test_a_server_without_requests_has_no_traffic() -> None:
    log = read_server_log(log_of("memory/mainline-2026-08-18-cpu-mtp.txt"))

    assert log is not None
    assert log.traffic is None


@pytest.mark.parametrize(
    "name",
    ["ik-2026-08/mlock-refused-and-no-mtp-block.txt", "synthetic/mlock-refused-then-illegal-access.txt",
     "mainline-2026-08-18/mlock-refused-and-no-mtp-block.txt"],
)  # fmt: skip
def test_a_refused_lock_is_seen(name: str) -> None:
    log = read_server_log(log_of(f"logs/{name}"))

    assert log is not None
    assert log.mlock_refused


def test_a_missing_kernel_is_seen() -> None:
    log = read_server_log(log_of("logs/synthetic/cuda-no-kernel-image.txt"))

    assert log is not None
    assert log.lacks_kernels
    assert not log.mlock_refused


def test_real_logs_of_a_load_tell_buffers_slots_and_no_trouble() -> None:
    for path in sorted((DATA / "memory").glob("*.txt")):
        log = read_server_log(path.read_text().splitlines())
        assert log is not None
        assert log.report is not None
        trouble = (log.mlock_refused, log.lacks_kernels, log.has_misplaced_layers)
        assert trouble == (False, False, False), path


def test_a_layer_in_two_places_is_seen() -> None:
    line = (
        "0.01.2 W layer 0 is assigned to device CPU but the fused Gated Delta Net tensor is assigned "
        "to device CUDA0 (usually due to missing support)"
    )
    log = read_server_log([line])

    assert log is not None
    assert log.has_misplaced_layers
