"""What an estimate means: whether it fits what is free, and what a load that the server logged makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tunerd.model.memory import COMPUTE, WEIGHTS, Device, Estimate, Part, PartKind
from tunerd.result import Message, error, note, warning
from tunerd.units.manager import MemoryLimit
from tunerd.words import BYTES_PER_MIB, MiB, format_mib, have_mib, need_mib

_MIB = r"(?P<mib>\d{1,9}(?:\.\d{1,9})?) MiB"
_BUFFER = re.compile(
    rf"(?<!\S)(?P<label>\S++)\s++(?:(?:DSV4 \w+ )?"
    r"(?:(?P<kind>model|LoRA|KV|RS|state|compute|output|per-step|shadow) )?"
    rf"buffer(?: size)?|(?P<cache>MoE) cache size) =\s*{_MIB}"
)
_OFFLOADED = re.compile(r"offloaded (?P<on_gpu>\d{1,9})/(?P<all>\d{1,9}) layers to GPU")
_N_CTX = re.compile(r"\bn_ctx\s+= (?P<n_ctx>\d{1,10})\b")
# Labels of buffers in RAM: plain, mapped, repacked for the CPU, or pinned for a GPU.
_HOST_LABEL = re.compile(r"CPU|Host$|.*_Host$")
# The last is a projector's, which plans a compute buffer of its own.
_CONTEXT_BEGINS = re.compile(
    r"constructing llama_context|llama_init_from_model: n_ctx  |clip_ctx: CLIP using"
)
# From here on clients are answered, and builds print what these ask for as it is, with its line ends: a grammar.
_LOADED = re.compile(r"[:\]] model loaded\b")


# What a buffer's line calls it, and what that is of an estimate's parts.
_REPORTED_KINDS = {
    None: PartKind.WEIGHTS,
    "model": PartKind.WEIGHTS,
    "LoRA": PartKind.WEIGHTS,
    "KV": PartKind.KV,
    "RS": PartKind.STATE,
    "state": PartKind.STATE,
    "per-step": PartKind.STATE,
    "shadow": PartKind.STATE,
    "compute": PartKind.COMPUTE,
    "output": PartKind.OUTPUT,
    "MoE": PartKind.EXPERT_CACHE,
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation. `context` is 0 for the model, 1 for the target's context, 2 for the next."""

    kind: PartKind
    label: str
    mib: float
    context: int

    @property
    def device(self) -> Device:
        """Where it is."""
        return device_of(self.label)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the log says; empty tuples and None where it says nothing.

    `buffers` are those of the last load, dry runs left out. `n_layers_on_gpu` of
    `n_layers_to_place` counts the output layer, and is printed even where there is no GPU.
    """

    buffers: tuple[Buffer, ...]
    n_ctx: int | None
    n_layers_on_gpu: int | None
    n_layers_to_place: int | None

    def allocated_mib(self, device: Device, *kinds: PartKind) -> float | None:
        """Sum of the buffers of these kinds (all without any) on a device; None without buffers.

        Weights that are repacked for the CPU count once where the file is mapped: the pages that
        they came from are not needed any more.
        """
        if not self.buffers:
            return None
        is_mapped = any(buffer.label.endswith("_Mapped") for buffer in self.buffers)
        return sum(
            buffer.mib
            for buffer in self.buffers
            if (not kinds or buffer.kind in kinds)
            and buffer.device is device
            and not (is_mapped and buffer.label.endswith("_REPACK"))
        )


def device_of(label: str) -> Device:
    """Where something of that label is."""
    return Device.HOST if _HOST_LABEL.match(label) else Device.GPU


def lines_of_load(newest: Sequence[str], most: int) -> Sequence[str]:
    """What of a log its engine alone has written: all before it answers; nothing where the `most` newest lines are not all."""
    if len(newest) >= most:
        return ()
    end = next((at for at, line in enumerate(newest) if _LOADED.search(line)), None)
    return newest[:end]


def parse_report(lines: Iterable[str]) -> MemoryReport:
    """What a log says about memory; lines that say nothing of it are passed over.

    A new model's first buffer forgets an earlier load that was a dry run. A context that plans its compute
    buffer again replaces the earlier plan.
    """
    buffers: list[Buffer] = []
    numbers: dict[str, int] = {}
    context, in_models = 0, False
    for line in lines:
        context += _CONTEXT_BEGINS.search(line) is not None
        if found := _BUFFER.search(line):
            kind, label = _REPORTED_KINDS[found["kind"] or found["cache"]], found["label"]
            if kind is PartKind.WEIGHTS and not in_models and not _is_loaded(buffers):
                buffers, context = [], 0
            in_models = kind is PartKind.WEIGHTS
            buffer = Buffer(kind, label, float(found["mib"]), 0 if in_models else max(1, context))
            if kind is PartKind.COMPUTE:
                buffers = [one for one in buffers if replace(one, mib=buffer.mib) != buffer]
            buffers.append(buffer)
        elif found := _OFFLOADED.search(line) or _N_CTX.search(line):
            numbers.update({name: int(text) for name, text in found.groupdict().items()})
    return MemoryReport(
        buffers=tuple(buffers) if _is_loaded(buffers) else (),
        n_ctx=numbers.get("n_ctx"),
        n_layers_on_gpu=numbers.get("on_gpu"),
        n_layers_to_place=numbers.get("all"),
    )


def _is_loaded(buffers: Iterable[Buffer]) -> bool:
    """Whether a model was really loaded: a dry run has buffers of nothing."""
    return any(one.mib for one in buffers if one.kind is PartKind.WEIGHTS)


# An engine reports one buffer for each of these purposes, where an estimate has finer parts.
_PURPOSES: Mapping[PartKind, frozenset[PartKind]] = {
    PartKind.WEIGHTS: WEIGHTS,
    PartKind.KV: frozenset({PartKind.KV, PartKind.MTP_KV, PartKind.DRAFT_KV}),
    PartKind.STATE: frozenset({PartKind.STATE, PartKind.DRAFT_STATE}),
    PartKind.EXPERT_CACHE: frozenset({PartKind.EXPERT_CACHE}),
    PartKind.COMPUTE: COMPUTE | {PartKind.OUTPUT},
}


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory of one purpose on one device, as the engine reported it."""

    device: Device
    purpose: PartKind
    mib: float


@dataclass(frozen=True, slots=True)
class MemoryCorrection:
    """What the newest of `n_loads` loads of one server took."""

    taken: tuple[Taken, ...]
    n_loads: int


def taken(report: MemoryReport) -> tuple[Taken, ...]:
    """What a load took; empty where the report has no buffers.

    A log without buffer lines is no report of zero bytes: mainline prints them from log verbosity 4 on.
    """
    sums = (
        (device, purpose, report.allocated_mib(device, *kinds))
        for device in Device
        for purpose, kinds in _PURPOSES.items()
    )
    return tuple(Taken(device, purpose, mib) for device, purpose, mib in sums if mib is not None)


def corrected(parts: Sequence[Part], correction: MemoryCorrection | None) -> tuple[Part, ...]:
    """The parts of an estimate with what the engine reported in place of what was calculated.

    The correction must be of this very server (equal `Fingerprint.memory_key`): then what was reported
    is what will be needed again, whatever formulas say today. Parts that grow with time stay as they
    were calculated.
    """
    if correction is None:
        return tuple(parts)
    for one in correction.taken:
        kinds = _PURPOSES[one.purpose]
        mine = [part for part in parts if part.device is one.device and part.kind in kinds]
        parts = [*(part for part in parts if part not in mine), *_as_reported(mine, one)]
    order = {kind: index for index, kind in enumerate(PartKind)}
    kept = [part for part in parts if part.n_bytes != 0]
    return tuple(sorted(kept, key=lambda part: (part.device, order[part.kind])))


def _as_reported(parts: Sequence[Part], one: Taken) -> list[Part]:
    """The parts of a purpose so that together they are what was reported, each by its share."""
    n_bytes = round(one.mib * BYTES_PER_MIB)
    known = sum(part.n_bytes or 0 for part in parts)
    if not known or any(part.n_bytes is None for part in parts):
        kind = parts[0].kind if len(parts) == 1 else one.purpose
        return [Part(kind, one.device, n_bytes, f"reported after a load: {one.mib:.0f} MiB")]
    found = []
    for part in parts:
        share = round((part.n_bytes or 0) * n_bytes / known)
        step = (share - (part.n_bytes or 0)) / BYTES_PER_MIB
        told = f"; {step:+.0f} MiB as the last load showed" if round(step) else ""
        found.append(replace(part, n_bytes=share, formula=f"{part.formula}{told}"))
    return found


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
            text = f"needs {format_mib(need)} of VRAM; how much is free is unknown"
            yield note("vram-unknown", text)
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
    need, free = format_mib(estimate.start_mib(Device.GPU)), format_mib(free_mib)
    wanted = f"needs {need} of VRAM and a margin of {fit_mib} MiB, and {free} are free"
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
    yield from ram_in_time(estimate, free.ram_total_mib, spilled)


def ram_in_time(estimate: Estimate, total_mib: MiB | None, spilled: int = 0) -> Iterator[Message]:
    """Whether a server that starts may need more RAM than there is, once its context is full; `spilled` is of the card."""
    worst = estimate.worst_mib(Device.HOST) + spilled
    start = estimate.start_mib(Device.HOST) + spilled
    if total_mib is not None and worst > total_mib >= start:
        yield warning("ram-in-time", f"snapshots and the prompt cache may grow to {format_mib(worst)} of "
                      f"RAM, and the machine has {format_mib(total_mib)}",
                      "lower serving.ctx_checkpoints or serving.cache_ram_mib")  # fmt: skip


# What is reserved and never written to does not count: 26 to 53 MiB of the 39 to 67 that are calculated for it.
# Source: a group of mainline of August 2026 alone, without a card.
_RESERVED = (*COMPUTE, PartKind.OUTPUT)


def _limited(estimate: Estimate, free: Free, firm: int, start: int) -> Iterator[Message]:
    """What limits on the unit's RAM mean; `firm` is what cannot be taken back, `start` is all of it [MiB]."""
    grown = firm + estimate.worst_mib(Device.HOST) - estimate.start_mib(Device.HOST)
    reserved = need_mib(estimate.bytes_of(Device.HOST, _RESERVED))
    for limit in free.limits:
        is_max = limit.name == "MemoryMax"
        is_sure = free.is_strict and (firm if firm > limit.mib else grown) - reserved > limit.mib
        kills = "the kernel kills it" if is_sure else "the kernel may kill it"
        then = kills if is_max else "the kernel slows it down"
        if firm > limit.mib:
            level = error if is_max and is_sure else warning
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
