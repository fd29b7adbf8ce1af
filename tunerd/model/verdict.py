"""Whether an estimate fits what is free: yes, after fit has moved something, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunerd.model.memory import COMPUTE, WEIGHTS, Device, Estimate, PartKind
from tunerd.model.report import MemoryCorrection
from tunerd.result import Message, error, note, warning
from tunerd.units.manager import MemoryLimit
from tunerd.words import MiB, format_mib, have_mib, need_mib

_REMARK = "memory"
# What the driver takes of an idle card for one process, before any kernel has run.
# Source: 264 MiB of an RTX 3090 (ollama/ollama#17482), 368 MiB of another (ggml-org/llama.cpp#23281).
_DRIVER_MIB = 300


@dataclass(frozen=True, slots=True)
class Free:
    """What is there for the new server [MiB], with what the present one holds already counted as free.

    None where it could not be told. `limits` are on its unit's RAM; `is_strict` that the kernel holds it to
    them: all of its memory counts, and there is no swap.
    """

    gpu_mib: MiB | None
    ram_mib: MiB | None
    ram_total_mib: MiB | None
    limits: Sequence[MemoryLimit] = ()
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """An estimate against what is free.

    `free_mib` has the devices that count, None where it is unknown what is free there. `calculated` is the estimate before `correction`, what loads of this very server showed, took the
    place of what was calculated; both are None where no load is known.
    """

    estimate: Estimate
    free_mib: Mapping[Device, MiB | None]
    verdict: str
    messages: tuple[Message, ...]
    calculated: Estimate | None = None
    correction: MemoryCorrection | None = None


def judge_memory(
    estimate: Estimate, free: Free, *, has_gpu: bool, fit_mib: int | None
) -> MemoryPlan:
    """What the estimate means on this machine.

    Args:
        estimate: As if everything that may go to the GPU went there.
        free: What is there.
        has_gpu: Whether the engine will use a GPU.
        fit_mib: The margin that the engine's fit keeps free; None where placement is by hand.
    """
    on_gpu = {Device.GPU: free.gpu_mib} if has_gpu else {}
    messages = tuple(_messages(estimate, free, has_gpu=has_gpu, fit_mib=fit_mib))
    verdict = next((message.text for message in messages if message.code != _REMARK), "fits")
    if not estimate.is_complete:
        verdict = "parts of it could not be estimated"
    return MemoryPlan(estimate, {**on_gpu, Device.HOST: free.ram_mib}, verdict, messages)


def _messages(
    estimate: Estimate, free: Free, *, has_gpu: bool, fit_mib: int | None
) -> Iterator[Message]:
    spilled = MiB(0)
    if has_gpu:
        need = estimate.start_mib(Device.GPU)
        if free.gpu_mib is None:
            yield note(
                "vram-unknown", f"needs {format_mib(need)} of VRAM; how much is free is unknown"
            )
        elif fit_mib is None and need > free.gpu_mib:
            yield error(
                "too-big-for-vram",
                f"needs {format_mib(need)} of VRAM, and {format_mib(free.gpu_mib)} are free",
                "let fit place it (memory.fit_mib), or lower serving.ctx_size, serving.n_ubatch or "
                "speculation.n_max",
            )
        elif fit_mib is None and need + _DRIVER_MIB > free.gpu_mib:
            yield warning(
                "tight-vram",
                f"needs {format_mib(need)} of VRAM and some {_DRIVER_MIB} MiB for the driver, and "
                f"{format_mib(free.gpu_mib)} are free: it may not start, or run out at the first long prompt",
                "let fit place it (memory.fit_mib), or lower serving.ctx_size or serving.n_ubatch",
            )
        elif fit_mib is not None:
            spilled = estimate.fit_needed_mib(free.gpu_mib, fit_mib)
            yield from _fit_moves(estimate, free.gpu_mib, spilled, fit_mib)
    yield from _ram(estimate, free, spilled)
    for text in estimate.notes:
        yield note(_REMARK, text)


def _fit_moves(estimate: Estimate, free_mib: MiB, spilled: MiB, fit_mib: int) -> Iterator[Message]:
    """What the engine's fit will do, or cannot."""
    need = format_mib(estimate.start_mib(Device.GPU))
    wanted = (
        f"needs {need} of VRAM and a margin of {fit_mib} MiB, and {format_mib(free_mib)} are free"
    )
    if spilled > estimate.movable_mib:
        yield error(
            "too-big-for-vram",
            f"{wanted}: fit can move no more than {format_mib(estimate.movable_mib)} to RAM",
            "lower memory.fit_mib, serving.ctx_size, serving.n_ubatch or speculation.n_max",
        )
    elif spilled:
        yield note("fit-moves", f"{wanted}: fit will move about {format_mib(spilled)} to RAM")


def _ram(estimate: Estimate, free: Free, spilled: MiB) -> Iterator[Message]:
    """Mapped weights are pages that the kernel can take back; everything else must be there."""
    start = estimate.start_mib(Device.HOST) + spilled
    weights = have_mib(estimate.bytes_of(Device.HOST, WEIGHTS)) + spilled
    is_evictable = estimate.is_mapped and not estimate.is_locked
    firm = start - (weights if is_evictable else 0)
    if free.ram_total_mib is not None and firm > free.ram_total_mib:
        yield error("too-big-for-ram", f"needs {format_mib(firm)} of RAM, and the machine has "
                    f"{format_mib(free.ram_total_mib)}", "a smaller model or context")  # fmt: skip
    elif free.ram_mib is not None and firm > free.ram_mib:
        yield error("not-enough-ram", f"needs {format_mib(firm)} of RAM, and {format_mib(free.ram_mib)} "
                    "are free", "end something else, or take a smaller model or context")  # fmt: skip
    elif free.ram_mib is not None and start > free.ram_mib:
        yield warning("slow-ram", f"needs {format_mib(start)} of RAM with the weights mapped, and "
                      f"{format_mib(free.ram_mib)} are free: it will read from disk again and again")  # fmt: skip
    yield from _limited(estimate, free, firm, start)
    worst = estimate.worst_mib(Device.HOST) + spilled
    if free.ram_total_mib is not None and worst > free.ram_total_mib >= start:
        yield warning("ram-in-time", f"snapshots and the prompt cache may grow to {format_mib(worst)} of "
                      f"RAM, and the machine has {format_mib(free.ram_total_mib)}",
                      "lower serving.ctx_checkpoints or serving.cache_ram_mib")  # fmt: skip


# What is reserved and never written to does not count: 26 to 53 MiB of the 39 to 67 that are calculated for it.
# Source: a group of mainline of August 2026 alone, without a card.
_RESERVED = (*COMPUTE, PartKind.OUTPUT)


def _limited(estimate: Estimate, free: Free, firm: int, start: int) -> Iterator[Message]:
    """What limits on the unit's RAM mean; `firm` is what cannot be taken back, `start` is all of it [MiB]."""
    grown = firm + estimate.worst_mib(Device.HOST) - estimate.start_mib(Device.HOST)
    written = firm - need_mib(estimate.bytes_of(Device.HOST, _RESERVED))
    for limit in free.limits:
        is_max = limit.name == "MemoryMax"
        kills = "the kernel kills it" if free.is_strict else "the kernel may kill it"
        then = kills if is_max else "the kernel slows it down"
        if firm > limit.mib:
            level = error if is_max and free.is_strict and written > limit.mib else warning
            can_map = not estimate.is_mapped or estimate.is_locked
            way = ", map the weights (serving.load_mode = mmap)" if can_map else ""
            yield level("unit-limit", f"needs {format_mib(firm)} of RAM, and {limit}: {then}",
                        f"raise it{way}, or take a smaller model or context")  # fmt: skip
        elif grown > limit.mib:
            yield warning("unit-limit", f"snapshots and the prompt cache may grow until it needs {format_mib(grown)} of "
                          f"RAM, and {limit}: {then} then",
                          "lower serving.ctx_checkpoints or serving.cache_ram_mib, or raise it")  # fmt: skip
        elif start > limit.mib:
            yield warning("unit-limit", f"needs {format_mib(start)} of RAM with the weights mapped, and {limit}: it "
                          "will read from disk again and again", "raise it")  # fmt: skip
        else:
            continue
        return
