"""What an estimate means for a machine: it fits, fit will move something, or it cannot work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tunerd.model.memory import Device, Estimate, Part, PartKind
from tunerd.model.verdict import Free, MemoryPlan, judge_memory
from tunerd.result import Level
from tunerd.units.manager import MemoryLimit
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
    vram, here, all_of_it = (None if mib is None else MiB(mib) for mib in (gpu, ram, total))
    return Free(vram, here, all_of_it)


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


# 2000 MiB of weights and 600 that are there to stay, of which 100 are only reserved; 500 more in time.
SERVER = (
    HOST,
    part(PartKind.KV, Device.HOST, 500),
    part(PartKind.COMPUTE, Device.HOST, 100),
    part(PartKind.PROMPT_CACHE, Device.HOST, 500),
)
MAPPED, READ = estimate(*SERVER), estimate(*SERVER, mapped=False)
FORBIDDEN, TOLD = ("error", "unit-limit"), ("warning", "unit-limit")


def limited(maximum: int | None = None, high: int | None = None, *, strict: bool = True) -> Free:
    places = (("MemoryMax", maximum, "x.service"), ("MemoryHigh", high, "ai.slice"))
    file = Path("/etc/limit.conf")
    limits = [MemoryLimit(name, unit, MiB(mib), file) for name, mib, unit in places if mib]
    return replace(free(), limits=limits, is_strict=strict)


@pytest.mark.parametrize(
    ("what", "there", "expected", "says"),
    [
        # Read weights have to stay; what is only reserved may never be touched.
        (READ, limited(2499), [FORBIDDEN], "needs 2600 MiB of RAM, and x.service may use 2499 MiB"),
        (READ, limited(2499), [FORBIDDEN], "(MemoryMax= in `/etc/limit.conf`): the kernel kills it"),
        (READ, limited(2500), [TOLD], "the kernel kills it"),
        (READ, limited(2499, strict=False), [TOLD], "the kernel may kill it"),
        (READ, limited(high=2499), [TOLD], "ai.slice may use 2499 MiB (MemoryHigh= in"),
        (READ, limited(high=2499), [TOLD], "the kernel slows it down"),
        # With time they need more.
        (READ, limited(3099), [TOLD], "may grow until it needs 3100 MiB of RAM"),
        (READ, limited(3100), [], ""),
        # Mapped ones are pages that can be taken back, and are then read again.
        (MAPPED, limited(499), [FORBIDDEN], "needs 600 MiB of RAM"),
        (MAPPED, limited(1099), [TOLD], "may grow until it needs 1100 MiB of RAM"),
        (MAPPED, limited(2599), [TOLD], "it will read from disk again and again"),
        (MAPPED, limited(2600), [], ""),
        (estimate(*SERVER, locked=True), limited(2499), [FORBIDDEN], "needs 2600 MiB"),
        # One message: of what is killed nobody need know that it would be slow.
        (READ, limited(2499, 2000), [FORBIDDEN], "MemoryMax="),
        (READ, limited(4000, 2000), [TOLD], "MemoryHigh="),
    ],
)  # fmt: skip
def test_what_a_unit_may_have_of_ram_is_held_against_what_cannot_be_taken_back(
    what: Estimate, there: Free, expected: list[tuple[str, str]], says: str
) -> None:
    plan = judged(what, there, has_gpu=False)

    assert codes(plan) == expected
    assert all(says in message.text for message in plan.messages)


def test_only_weights_that_could_be_mapped_are_advised_to_be() -> None:
    advised = [
        "serving.load_mode = mmap"
        in (judged(what, limited(400), has_gpu=False).messages[0].hint or "")
        for what in (READ, estimate(*SERVER, locked=True), MAPPED)
    ]
    assert advised == [True, True, False]
