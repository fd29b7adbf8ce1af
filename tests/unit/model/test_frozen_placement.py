"""What fit chose, read from a log or from the estimate, and put into keys of a profile."""

from __future__ import annotations

import pytest

from tests.support.folders import DATA
from tests.support.model_headers import facts_of_shape
from tunerd.model.memory import IK, MAINLINE_NOW, Device, MemorySettings, estimate, place
from tunerd.sweep.space import (
    ESTIMATE,
    LOG,
    FitSaid,
    Frozen,
    frozen_from_estimate,
    frozen_from_log,
    read_fit,
)
from tunerd.tryout.designed import Shape

CAPTURED = DATA / "memory/mainline-0.7.0-vulkan-moe-fit.txt"
MOE = facts_of_shape(Shape(n_layer=16, is_moe=True, n_vocab=2048))
DENSE = facts_of_shape(Shape(n_layer=16, n_vocab=2048))
BEGIN = "0.00.354.117 I cmn  common_init_: fitting params to device memory ..."


def said(*lines: str) -> FitSaid:
    return read_fit([BEGIN, *lines])


def row(layers: int, partly: int, device: str = "Vulkan0") -> str:
    overflowing = f" ({partly:2} overflowing)" if partly else ""
    numbers = f"{layers:2} layers{overflowing},   9625 MiB used,   1024 MiB free"
    return f"0.00.975.846 I common_params_fit_impl:   - {device}: {numbers}"


def offloaded(on_gpu: int) -> str:
    return f"0.01.089.819 I load_tensors: offloaded {on_gpu}/18 layers to GPU"


def test_the_last_word_of_the_last_fit_counts() -> None:
    found = said(row(17, 17), row(18, 3), BEGIN, row(18, 18), row(18, 2), offloaded(18))
    assert found == FitSaid(18, 18, 1, 1)


def test_a_real_log_says_what_its_buffers_show() -> None:
    """Of the seven that overflow one is the output; five layers lie in RAM whole, one in part."""
    lines = CAPTURED.read_text(encoding="utf-8").splitlines()
    assert read_fit(lines) == FitSaid(18, 18, 6, 1)
    in_ram = [line for line in lines if "CPU_Mapped model buffer size" in line]
    assert sum(line.endswith(" 25.50 MiB") for line in in_ram) == 5
    found = frozen_from_log(read_fit(lines), MOE, MAINLINE_NOW, uses_mtp=True)
    assert found == Frozen(18, 6, LOG)


def test_a_fit_that_failed_placed_nothing() -> None:
    failed = (
        "0.01 W common_fit_params: failed to fit params to free device memory: it was set, abort"
    )
    assert said(row(18, 3), failed, offloaded(18)).n_partly == 0
    done = "0.01 I common_fit_params: successfully fit params to free device memory"
    assert said(row(18, 3), done, offloaded(18)).n_partly == 2


def test_as_many_experts_stay_in_ram_but_those_of_the_first_layers() -> None:
    found = frozen_from_log(said(row(18, 4), offloaded(18)), MOE, MAINLINE_NOW, uses_mtp=True)
    assert found == Frozen(18, 3, LOG)
    assert found.values == {"memory.n_gpu_layers": 18, "memory.n_cpu_moe": 3}
    placed = place(MOE, MemorySettings(n_gpu_layers=18, n_cpu_moe=3))
    assert placed.experts_on_cpu == {0, 1, 2}
    mtp = MOE.mtp_blocks[0]
    assert placed.gpu_bytes(mtp) == mtp.n_bytes


def test_layers_that_are_wholly_in_ram_are_counted_before_the_experts() -> None:
    found = frozen_from_log(said(row(14, 3), offloaded(14)), MOE, MAINLINE_NOW, uses_mtp=True)
    assert found == Frozen(14, 6, LOG)
    placed = place(MOE, MemorySettings(n_gpu_layers=14, n_cpu_moe=6))
    assert len(placed.experts_on_cpu & placed.on_gpu) == 2


def test_ik_counts_from_the_other_end() -> None:
    moved = [f"Adding experts CPU overrides for layer {layer}" for layer in (15, 14)]
    lines = [*moved, offloaded(18)]
    found = frozen_from_log(read_fit(lines), MOE, IK, uses_mtp=True)
    assert found == Frozen(18, 2, LOG)


def test_a_layer_that_fit_forgot_is_put_back() -> None:
    """fit counts the trunk, the loader the MTP block too, so layer 0 stays behind without MTP."""
    lines = said(row(17, 0), offloaded(17))
    without = frozen_from_log(lines, DENSE, MAINLINE_NOW, uses_mtp=False)
    assert isinstance(without, Frozen)
    assert (without.n_gpu_layers, without.n_cpu_moe) == (18, 0)
    assert "does not count the MTP block" in str(without.remark)
    with_mtp = frozen_from_log(lines, DENSE, MAINLINE_NOW, uses_mtp=True)
    assert with_mtp == Frozen(17, 0, LOG)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([row(18, 0), offloaded(18)], "moved nothing"),
        ([row(9, 1, "CUDA0"), row(9, 1, "CUDA1"), offloaded(18)], "more than one GPU"),
    ],
)
def test_what_cannot_be_frozen_says_why(lines: list[str], words: str) -> None:
    found = frozen_from_log(said(*lines), MOE, MAINLINE_NOW, uses_mtp=True)
    assert words in str(found)


def test_the_estimate_moves_the_least_that_is_enough() -> None:
    settings = MemorySettings(ctx_size=4096, speculation="mtp", n_max=3)
    whole = estimate(MOE, settings).start_mib(Device.GPU)
    found = frozen_from_estimate(MOE, settings, whole + 99, 100)
    assert isinstance(found, Frozen)
    assert (found.n_gpu_layers, found.n_cpu_moe, found.found_by) == (18, 1, ESTIMATE)
    assert "nothing to move" in str(frozen_from_estimate(MOE, settings, whole + 100, 100))
    assert "unknown" in str(frozen_from_estimate(MOE, settings, None, 100))


def test_where_experts_are_not_enough_whole_layers_go() -> None:
    settings = MemorySettings(ctx_size=4096)
    dense = frozen_from_estimate(
        DENSE, settings, estimate(DENSE, settings).start_mib(Device.GPU) - 1, 0
    )
    assert dense == Frozen(17, 0, ESTIMATE)
    assert "not even one layer" in str(frozen_from_estimate(DENSE, settings, 1, 0))
