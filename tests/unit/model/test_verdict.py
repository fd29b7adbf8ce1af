"""What an estimate means for a machine: it fits, fit will move something, or it cannot work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.transcripts import messages_lines, transcript
from tunerd.model.memory import Device, Estimate, Part, PartKind
from tunerd.model.verdict import Free, MemoryPlan, judge_memory
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


# 2000 MiB of weights and 600 that are there to stay, of which 100 are only reserved; 500 more in time.
SERVER = (
    HOST,
    part(PartKind.KV, Device.HOST, 500),
    part(PartKind.COMPUTE, Device.HOST, 100),
    part(PartKind.PROMPT_CACHE, Device.HOST, 500),
)
MAPPED, READ = estimate(*SERVER), estimate(*SERVER, mapped=False)
LOCKED = estimate(*SERVER, locked=True)
NEED, GPU_LOCKED = estimate(WEIGHTS, COMPUTE), estimate(WEIGHTS, COMPUTE, locked=True, mapped=False)
GROWS, PINNED = estimate(HOST, GROWING), estimate(HOST, mapped=False)


def on_card(what: Estimate, there: Free, fit_mib: int | None = 1024) -> MemoryPlan:
    return judge_memory(what, there, has_gpu=True, fit_mib=fit_mib)


def in_ram(what: Estimate, there: Free) -> MemoryPlan:
    return judge_memory(what, there, has_gpu=False, fit_mib=1024)


def limited(
    what: Estimate, maximum: int | None = None, high: int | None = None, *, strict: bool = True
) -> MemoryPlan:
    """In a unit that may have so much."""
    places = (("MemoryMax", maximum, "x.service"), ("MemoryHigh", high, "ai.slice"))
    file = Path("/etc/limit.conf")
    limits = [MemoryLimit(name, unit, MiB(mib), file) for name, mib, unit in places if mib]
    return in_ram(what, replace(free(), limits=limits, is_strict=strict))


JUDGED: dict[str, dict[str, MemoryPlan]] = {
    "Fit moves what it can and leaves its margin": {
        "it fits": on_card(NEED, free(gpu=9000 + 1024)),
        "a MiB of the margin is missing": on_card(NEED, free(gpu=9000 + 1023)),
        # Weights can be moved, compute buffers cannot.
        "all weights are moved": on_card(NEED, free(gpu=2024)),
        "nothing is left to be moved": on_card(NEED, free(gpu=2023)),
        "nobody knows what is free": on_card(estimate(WEIGHTS), free(gpu=None)),
        # What is moved needs RAM too; mapped weights may be read from the disk again.
        "RAM lacks a MiB for it": on_card(GPU_LOCKED, free(gpu=6024, ram=3999)),
        "RAM has enough for it": on_card(GPU_LOCKED, free(gpu=6024, ram=4000)),
        "it is read from the disk again": on_card(NEED, free(gpu=6024, ram=100)),
        "there is a remark": on_card(estimate(WEIGHTS, notes=("a remark",)), free()),
        "a part is not known": on_card(estimate(WEIGHTS, part(PartKind.KV, Device.GPU, None)), free()),
    },
    "Without fit nothing moves": {
        f"{gpu} MiB are free": on_card(NEED, free(gpu=gpu), None) for gpu in (8999, 9000, 9299, 9300)
    },
    "Without a card only RAM counts": {
        "nothing is known": in_ram(estimate(HOST), free(ram=None, total=None)),
        "others have it, and weights are mapped": in_ram(estimate(HOST), free(ram=1999, total=4000)),
        "others have it, and weights are read": in_ram(PINNED, free(ram=1999, total=4000)),
        "others have it, and weights are locked": in_ram(estimate(HOST, locked=True), free(ram=1999, total=4000)),
        "there is not so much": in_ram(PINNED, free(ram=500, total=1999)),
        "it grows beyond what there is": in_ram(GROWS, free(ram=6000, total=6999)),
        "it grows up to what there is": in_ram(GROWS, free(total=7000)),
        "a card is full that is not used": in_ram(estimate(WEIGHTS, HOST), free(gpu=0)),
    },
    # Read weights have to stay; what is only reserved may never be touched.
    "What a unit may have is held against what cannot be taken back": {
        "a MiB is missing for what stays": limited(READ, 2499),
        "what stays fits": limited(READ, 2500),
        "a MiB is missing, and the limit may not hold": limited(READ, 2499, strict=False),
        "a MiB is missing, and the limit only slows down": limited(READ, high=2499),
        # With time they need more.
        "a MiB is missing in time": limited(READ, 3099),
        "it fits in time": limited(READ, 3100),
        # Mapped ones are pages that can be taken back, and are then read again.
        "mapped, a MiB is missing for what stays": limited(MAPPED, 499),
        "mapped, a MiB is missing in time": limited(MAPPED, 1099),
        "mapped, a MiB is missing for all pages": limited(MAPPED, 2599),
        "mapped, it fits": limited(MAPPED, 2600),
        "locked, a MiB is missing": limited(LOCKED, 2499),
        # One message: of what is killed nobody need know that it would be slow.
        "two limits, and one kills": limited(READ, 2499, 2000),
        "two limits, and one slows down": limited(READ, 4000, 2000),
        # Only weights that could be mapped are advised to be.
        **{f"{how}, far too little": limited(what, 400) for how, what in (("read", READ), ("locked", LOCKED), ("mapped", MAPPED))},
    },
}  # fmt: skip


def test_what_memory_comes_to_is_told_as_in_the_golden_text() -> None:
    transcript("plan/memory", (
        (f"{told}, {case}", [plan.verdict, *messages_lines(plan.messages)])
        for told, cases in JUDGED.items() for case, plan in cases.items()
    ))  # fmt: skip
    assert list(in_ram(NEED, free()).free_mib) == [Device.HOST]
