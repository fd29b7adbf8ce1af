"""What an estimate means for a machine: it fits, fit will move something, or it cannot work."""

from __future__ import annotations

import pytest

from tunerd.model.memory import Device, Estimate, Part, PartKind
from tunerd.model.verdict import Free, MemoryPlan, judge_memory
from tunerd.result import Level
from tunerd.words import MiB

_MIB = 1024 * 1024


def part(kind: PartKind, device: Device, mib: int | None) -> Part:
    return Part(kind, device, None if mib is None else mib * _MIB, "")


def estimate(
    *parts: Part, locked: bool = False, mapped: bool = True, notes: tuple[str, ...] = ()
) -> Estimate:
    return Estimate(parts, 4096, 4096, is_locked=locked, is_mapped=mapped, notes=notes)


WEIGHTS = part(PartKind.WEIGHTS, Device.GPU, 8000)
COMPUTE = part(PartKind.COMPUTE, Device.GPU, 1000)
HOST = part(PartKind.WEIGHTS, Device.HOST, 2000)
GROWING = part(PartKind.CHECKPOINTS, Device.HOST, 5000)


def free(gpu: int | None = 12_000, ram: int | None = 16_000, total: int | None = 32_000) -> Free:
    wrapped = [None if mib is None else MiB(mib) for mib in (gpu, ram, total)]
    return Free(*wrapped)


def judged(
    what: Estimate, there: Free, *, has_gpu: bool = True, fit_mib: int | None = 1024
) -> MemoryPlan:
    return judge_memory(what, there, has_gpu=has_gpu, fit_mib=fit_mib)


def codes(plan: MemoryPlan) -> list[tuple[str, str]]:
    return [(str(message.level), message.code) for message in plan.messages]


def test_what_fits_with_its_margin_fits() -> None:
    plan = judged(estimate(WEIGHTS, COMPUTE, HOST), free(gpu=9000 + 1024))
    assert (plan.verdict, plan.messages) == ("fits", ())
    assert [(need.name, need.start_mib, need.free_mib) for need in plan.devices] == [
        ("gpu0", 9000, 10024), ("host", 2000, 16_000),
    ]  # fmt: skip


def test_one_mib_less_and_fit_has_to_move_it() -> None:
    plan = judged(estimate(WEIGHTS, COMPUTE), free(gpu=9000 + 1023))
    assert codes(plan) == [("note", "fit-moves")]
    assert "move about 1 MiB" in plan.verdict


def test_fit_moves_weights_but_not_compute_buffers() -> None:
    assert codes(judged(estimate(WEIGHTS, COMPUTE), free(gpu=2024))) == [("note", "fit-moves")]
    plan = judged(estimate(WEIGHTS, COMPUTE), free(gpu=2023))
    assert codes(plan)[0] == ("error", "too-big-for-vram")
    assert "no more than 8000 MiB" in plan.verdict


def test_without_fit_too_big_is_an_error_and_nothing_moves() -> None:
    plan = judged(estimate(WEIGHTS, COMPUTE), free(gpu=8999, ram=10, total=10), fit_mib=None)
    assert codes(plan) == [("error", "too-big-for-vram")]
    assert judged(estimate(WEIGHTS, COMPUTE), free(gpu=9000), fit_mib=None).messages == ()


def test_unknown_vram_is_said_and_not_taken_for_none() -> None:
    plan = judged(estimate(WEIGHTS), free(gpu=None))
    assert codes(plan) == [("note", "vram-unknown")]


def test_unknown_ram_stops_nothing() -> None:
    assert judged(estimate(HOST), free(ram=None, total=None), has_gpu=False).messages == ()


@pytest.mark.parametrize(
    ("locked", "mapped", "expected"),
    [
        (False, True, [("warning", "slow-ram")]),
        (False, False, [("error", "not-enough-ram")]),
        (True, True, [("error", "not-enough-ram")]),
    ],
)
def test_only_mapped_weights_may_exceed_free_ram(
    locked: bool, mapped: bool, expected: list[tuple[str, str]]
) -> None:
    plan = judged(
        estimate(HOST, locked=locked, mapped=mapped), free(ram=1999, total=4000), has_gpu=False
    )
    assert codes(plan) == expected


def test_what_fit_moves_needs_ram_too() -> None:
    moved = estimate(WEIGHTS, COMPUTE, locked=True, mapped=False)
    plan = judged(moved, free(gpu=6024, ram=3999))
    assert codes(plan) == [("note", "fit-moves"), ("error", "not-enough-ram")]
    assert codes(judged(moved, free(gpu=6024, ram=4000))) == [("note", "fit-moves")]


def test_mapped_weights_that_fit_moves_may_be_read_from_disk_again() -> None:
    plan = judged(estimate(WEIGHTS, COMPUTE), free(gpu=6024, ram=100))
    assert codes(plan) == [("note", "fit-moves"), ("warning", "slow-ram")]


def test_more_than_all_ram_is_an_error_of_its_own() -> None:
    plan = judged(estimate(HOST, mapped=False), free(ram=500, total=1999), has_gpu=False)
    assert codes(plan) == [("error", "too-big-for-ram")]


def test_what_grows_is_a_warning() -> None:
    plan = judged(estimate(HOST, GROWING), free(ram=6000, total=6999), has_gpu=False)
    assert codes(plan) == [("warning", "ram-in-time")]
    assert judged(estimate(HOST, GROWING), free(total=7000), has_gpu=False).messages == ()


def test_remarks_of_the_estimate_are_no_verdict() -> None:
    plan = judged(estimate(WEIGHTS, notes=("a remark",)), free())
    assert plan.verdict == "fits"
    assert codes(plan) == [("note", "memory")]


def test_an_estimate_with_gaps_says_so() -> None:
    plan = judged(estimate(WEIGHTS, part(PartKind.KV, Device.GPU, None)), free())
    assert "could not be estimated" in plan.verdict
    assert all(message.level is not Level.ERROR for message in plan.messages)


def test_without_a_gpu_only_ram_counts() -> None:
    plan = judged(estimate(WEIGHTS, HOST), free(gpu=0), has_gpu=False)
    assert [need.name for need in plan.devices] == ["host"]
    assert plan.messages == ()
