"""Whether an estimate fits what is free: yes, after fit has moved something, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunerd.model.memory import WEIGHTS, Device, Estimate
from tunerd.model.report import MemoryCorrection
from tunerd.result import Message, error, note, warning
from tunerd.words import MiB, format_mib, have_mib

_REMARK = "memory"
# What the driver takes of an idle card for one process, before any kernel has run.
# Source: 264 MiB of an RTX 3090 (ollama/ollama#17482), 368 MiB of another (ggml-org/llama.cpp#23281).
_DRIVER_MIB = 300


@dataclass(frozen=True, slots=True)
class Free:
    """What is there for the new server [MiB], with what the present one holds already counted as free.

    None where it could not be told.
    """

    gpu_mib: MiB | None
    ram_mib: MiB | None
    ram_total_mib: MiB | None


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
    worst = estimate.worst_mib(Device.HOST) + spilled
    if free.ram_total_mib is not None and worst > free.ram_total_mib >= start:
        yield warning("ram-in-time", f"snapshots and the prompt cache may grow to {format_mib(worst)} of "
                      f"RAM, and the machine has {format_mib(free.ram_total_mib)}",
                      "lower serving.ctx_checkpoints or serving.cache_ram_mib")  # fmt: skip
