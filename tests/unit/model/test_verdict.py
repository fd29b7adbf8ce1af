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


def test_an_estimate_with_gaps_says_so() -> None:
    plan = judged(estimate(WEIGHTS, part(PartKind.KV, Device.GPU, None)), free())
    assert "could not be estimated" in plan.verdict
    assert all(message.level is not Level.ERROR for message in plan.messages)


NEED = estimate(WEIGHTS, COMPUTE)
LOCKED = estimate(WEIGHTS, COMPUTE, locked=True, mapped=False)
MOVES, FULL = ("note", "fit-moves"), ("error", "too-big-for-vram")
TIGHT = ("warning", "tight-vram")
SCARCE, SLOW = ("error", "not-enough-ram"), ("warning", "slow-ram")


@pytest.mark.parametrize(
    ("what", "there", "expected"),
    [
        (NEED, free(gpu=9000 + 1024), []),
        (NEED, free(gpu=9000 + 1023), [MOVES]),
        # Weights can be moved, compute buffers cannot.
        (NEED, free(gpu=2024), [MOVES]),
        (NEED, free(gpu=2023), [FULL]),
        (estimate(WEIGHTS), free(gpu=None), [("note", "vram-unknown")]),
        # What is moved needs RAM too; mapped weights may be read from the disk again.
        (LOCKED, free(gpu=6024, ram=3999), [MOVES, SCARCE]),
        (LOCKED, free(gpu=6024, ram=4000), [MOVES]),
        (NEED, free(gpu=6024, ram=100), [MOVES, SLOW]),
        (estimate(WEIGHTS, notes=("a remark",)), free(), [("note", "memory")]),
    ],
)
def test_on_a_card_fit_moves_what_it_can_and_leaves_its_margin(
    what: Estimate, there: Free, expected: list[tuple[str, str]]
) -> None:
    plan = judged(what, there)

    assert codes(plan)[: len(expected)] == expected
    is_silent = all(code == "memory" for _, code in expected)
    assert (plan.verdict == "fits") is is_silent


@pytest.mark.parametrize(
    ("what", "there", "expected"),
    [
        (estimate(HOST), free(ram=None, total=None), []),
        (estimate(HOST), free(ram=1999, total=4000), [SLOW]),
        (estimate(HOST, mapped=False), free(ram=1999, total=4000), [SCARCE]),
        (estimate(HOST, locked=True), free(ram=1999, total=4000), [SCARCE]),
        (estimate(HOST, mapped=False), free(ram=500, total=1999), [("error", "too-big-for-ram")]),
        (estimate(HOST, GROWING), free(ram=6000, total=6999), [("warning", "ram-in-time")]),
        (estimate(HOST, GROWING), free(total=7000), []),
        (estimate(WEIGHTS, HOST), free(gpu=0), []),
    ],
)
def test_without_a_card_only_ram_counts(
    what: Estimate, there: Free, expected: list[tuple[str, str]]
) -> None:
    plan = judged(what, there, has_gpu=False)

    assert codes(plan) == expected
    assert list(plan.free_mib) == [Device.HOST]


@pytest.mark.parametrize(
    ("gpu", "expected"), [(8999, [FULL]), (9000, [TIGHT]), (9299, [TIGHT]), (9300, [])]
)
def test_without_fit_too_big_is_an_error_and_nothing_moves(
    gpu: int, expected: list[tuple[str, str]]
) -> None:
    assert codes(judged(NEED, free(gpu=gpu), fit_mib=None)) == expected
