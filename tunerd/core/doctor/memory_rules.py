"""Rules about where memory is: VRAM, the KV cache, locked and swapped RAM."""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.doctor import sources
from tunerd.core.doctor.diagnosis import CannotTell, Missing, Rule, Seen, need
from tunerd.core.doctor.facts import PLAIN_TYPES, Facts
from tunerd.core.doctor.questions import (
    FULL_SHARE,
    cache_types,
    card_of,
    cards_of,
    experts_by_hand,
    is_starved,
    log_of,
    model_of,
    served_card,
    server_of,
    settings_of,
)
from tunerd.core.engine import Family
from tunerd.core.host import Gpu
from tunerd.core.memory_parts import Device, PartKind
from tunerd.core.memory_report import BufferKind
from tunerd.core.quantity import format_mib
from tunerd.core.result import Level

_UNIFIED = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
# What a desktop holds is worth a word from the step on in which the write-ups move the fit margin.
_DISPLAY_MIB = 128
# Cards below this cannot hold a long f16 cache beside a large model.
_SMALL_CARD_MIB = 16 * 1024 + 256
_Q8_0_OF_F16 = 34 / 64  # bytes of 32 values
# Pairs for which CUDA builds have kernels unless they were built with all of them.
_PAIRS_OF_ALL_BUILDS = frozenset({"f16", "bf16", "f32", "q8_0", "q4_0"})
_PAIRS_OF_SOME_BUILDS = frozenset({"q4_1", "q5_0", "q5_1"})
_LOCKED_MODES = frozenset({"mlock", "mmap+mlock"})
_MAPPED_MODES = frozenset({None, "auto", "mmap"})
_SERVER_SWAP_MIB = 64


def _vram_full(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        share = _share_used(gpu)
        if share is None:
            yield Missing(f"memory in use of GPU {gpu.index}")
        elif share > FULL_SHARE:
            yield Seen(
                Level.WARNING,
                f"GPU {gpu.index}: {gpu.used_mib} MiB in use of {gpu.total_mib} MiB ({share:.0%})",
                "raise memory.fit_mib by a step of 128 MiB, or lower serving.ctx_size or "
                "speculation.n_max: tunerd plan PROFILE --set memory.fit_mib=MIB",
            )


def _share_used(gpu: Gpu) -> float | None:
    """Share of the memory that programs can have at all which they have."""
    if gpu.total_mib is None or gpu.used_mib is None:
        return None
    return gpu.used_mib / (gpu.total_mib - (gpu.reserved_mib or 0))


def _spill(facts: Facts) -> Iterator[Seen | Missing]:
    card = card_of(facts)
    if card is None:
        return
    server = server_of(facts)
    if _UNIFIED in server.environment:
        yield Seen(
            Level.WARNING,
            f"{_UNIFIED} is set in {server.unit}: memory that does not fit the card goes to RAM",
            f"remove it from the unit: systemctl edit --full {server.unit}",
        )
    if server.log is not None and server.log.has_misplaced_layers:
        yield Seen(
            Level.WARNING,
            "the log says that a layer's parts are on different devices, as happens where VRAM ran out",
            "raise memory.fit_mib by a step of 128 MiB",
        )
    share = _share_used(card)
    if need(facts.driver, "the driver's files").is_wsl and share is not None and share > FULL_SHARE:
        yield Seen(
            Level.WARNING,
            f"Windows' driver moves VRAM to RAM without a word, and the card is {share:.0%} full",
            'set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback", or raise memory.fit_mib',
        )
    if server.log is None:
        yield Missing("the log of the running server")


def _display(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        if gpu.processes is None:
            yield Missing(f"which processes use GPU {gpu.index}")
            continue
        shown = [process for process in gpu.processes if process.is_display_server]
        held = sum(process.used_mib or 0 for process in shown)
        if not shown or (held < _DISPLAY_MIB and all(p.used_mib is not None for p in shown)):
            continue
        names = ", ".join(sorted({process.name or "" for process in shown}))
        has_other = facts.driver.has_other_graphics if facts.driver is not None else None
        amount = f"{held} MiB of VRAM" if held else "VRAM, how much the driver does not say"
        yield Seen(Level.WARNING, f"GPU {gpu.index}: {names} holds {amount}", _way_out(has_other))


def _way_out(has_other: bool | None) -> str:
    headless = "do without a desktop: systemctl set-default multi-user.target"
    plug = "plug the monitor into the mainboard, whose graphics is there for it"
    if has_other:
        return f"{plug}; or {headless}"
    if has_other is None:
        return f"plug the monitor into the processor's own graphics if it has one; or {headless}"
    return headless


def _plain_cache(facts: Facts) -> Iterator[Seen | Missing]:
    card, settings = served_card(facts), settings_of(facts)
    if card is None or not PLAIN_TYPES & set(cache_types(settings)):
        return
    if settings.memory.kv_offload is False:
        return
    total = need(card.total_mib, f"the size of GPU {card.index}")
    if total > _SMALL_CARD_MIB:
        return
    try:
        level = Level.WARNING if is_starved(facts) else Level.NOTE
    except CannotTell:
        level = Level.NOTE
    kinds = "/".join(cache_types(settings))
    size = _cache_mib(facts)
    gain = ""
    if size is not None:
        gain = f", {size:.0f} MiB of it; with q8_0 about {size * (1 - _Q8_0_OF_F16):.0f} MiB less"
    yield Seen(
        level,
        f"the KV cache is {kinds} on a card of {format_mib(total)}{gain}",
        "tunerd plan PROFILE --set serving.cache_type_k=q8_0 --set serving.cache_type_v=q8_0",
    )


def _cache_mib(facts: Facts) -> float | None:
    """KV cache on the GPU, as the engine reported it, else as estimated."""
    server = server_of(facts)
    report = server.log.report if server.log is not None else None
    reported = report.allocated_mib(Device.GPU, BufferKind.KV) if report is not None else None
    if reported:
        return reported
    if server.estimate is None:
        return None
    n_bytes = server.estimate.bytes_of(Device.GPU, (PartKind.KV, PartKind.MTP_KV))
    return n_bytes / 1024**2 if n_bytes else None


def _cache_pair(facts: Facts) -> Iterator[Seen | Missing]:
    settings = settings_of(facts)
    k, v = cache_types(settings)
    if served_card(facts) is None or settings.serving.flash_attn == "off":
        return
    is_fast = k == v and k in _PAIRS_OF_ALL_BUILDS
    is_known = {k, v} <= _PAIRS_OF_ALL_BUILDS | _PAIRS_OF_SOME_BUILDS
    if is_fast or not is_known:
        return
    capabilities = server_of(facts).capabilities
    if k == v and capabilities is not None and capabilities.family is Family.IK:
        return  # its kernels have types that mainline's lack
    log = log_of(facts)
    if log.has_cuda is False:
        return
    if not need(log.has_all_kv_pairs, "the build's FA_ALL_QUANTS: its log does not reach that far"):
        yield Seen(
            Level.ERROR,
            f"the KV cache is {k}/{v}, for which this build has no CUDA kernel (FA_ALL_QUANTS is off)",
            "tunerd plan PROFILE --set serving.cache_type_k=q8_0 --set serving.cache_type_v=q8_0, or "
            "build with -DGGML_CUDA_FA_ALL_QUANTS=ON",
        )


def _context(facts: Facts) -> Iterator[Seen | Missing]:
    server, settings = server_of(facts), settings_of(facts)
    asked = settings.serving.ctx_size
    report = server.log.report if server.log is not None else None
    if asked and report is not None and report.n_ctx is not None and report.n_ctx < asked:
        yield Seen(
            Level.WARNING,
            f"{asked} tokens of context were asked for, and the engine made {report.n_ctx}",
            "lower serving.ctx_size to that, or make room: a smaller memory.fit_mib, a quantised cache",
        )
    model = model_of(facts)
    slot = server.estimate.n_ctx_slot if server.estimate is not None else asked
    trained = model.context_length
    # Engines round a context up to whole cells of 256 tokens.
    if slot is not None and trained is not None and slot >= trained + 256:
        yield Seen(
            Level.WARNING,
            f"a slot has {slot} tokens of context, and the model was trained for {trained}",
            f"tunerd plan PROFILE --set serving.ctx_size={trained}",
        )
    estimate = need(server.estimate, "an estimate of its memory")
    ram = need(facts.host.memory.total_mib, "how much RAM there is")
    worst = estimate.worst_mib(Device.HOST)
    if worst > ram >= estimate.start_mib(Device.HOST):
        yield Seen(
            Level.WARNING,
            f"with a full context, snapshots and prompt cache may grow to {format_mib(worst)} of RAM, and "
            f"there are {format_mib(ram)}",
            "lower serving.ctx_checkpoints or serving.cache_ram_mib",
        )


def _memlock(facts: Facts) -> Iterator[Seen | Missing]:
    server = server_of(facts)
    if settings_of(facts).serving.load_mode not in _LOCKED_MODES:
        return
    was_refused = server.log is not None and server.log.mlock_refused
    locking = server.locking
    if locking is None and not was_refused:
        yield Missing("the memory lock limit of the running server")
        return
    limit = (
        "unlimited" if locking is None or locking.is_unlimited else format_mib(locking.limit_mib)
    )
    has_none = locking is not None and locking.locked_mib == 0
    wanted = server.estimate.locked_mib if server.estimate is not None else None
    is_short = (
        locking is not None
        and locking.limit_mib is not None
        and wanted is not None
        and max(locking.limit_mib, locking.locked_mib or 0) < wanted
    )
    if was_refused or has_none or is_short:
        seen = "nothing is locked" if has_none else "not everything could be locked"
        yield Seen(
            Level.WARNING,
            f"mlock is asked for, and {seen}; the server's limit is {limit}",
            f"systemctl edit {server.unit}, with LimitMEMLOCK=infinity below [Service]; a unit of a "
            "user needs it in a drop-in of user@.service too",
        )


def _swap(facts: Facts) -> Iterator[Seen | Missing]:
    server = facts.server
    swapped = server.swapped_mib if server is not None else None
    if swapped is not None and swapped >= _SERVER_SWAP_MIB:
        yield Seen(
            Level.WARNING,
            f"{format_mib(swapped)} of the server itself are in swap",
            "lock it: tunerd plan PROFILE --set serving.load_mode=mlock, or free RAM",
        )
        return
    used = need(facts.host.memory.swap_used_mib, "how much swap is in use")
    if used >= _SERVER_SWAP_MIB:
        yield Seen(
            Level.NOTE,
            f"{format_mib(used)} of swap are in use",
            "free RAM, then swapoff --all && swapon --all; `tunerd plan PROFILE` shows what is needed",
        )


def _mapped_experts(facts: Facts) -> Iterator[Seen | Missing]:
    if served_card(facts) is None:
        return
    settings, server = settings_of(facts), server_of(facts)
    if settings.serving.load_mode not in _MAPPED_MODES:
        return
    said = server.log is not None and server.log.maps_overridden_tensors
    is_known = said or experts_by_hand(settings)
    if not is_known and not (model_of(facts).is_moe and is_starved(facts)):
        return
    yield Seen(
        Level.WARNING,
        "experts are on the CPU, and the file is mapped",
        "tunerd plan PROFILE --set serving.load_mode=mlock, or =none",
    )


RULES = (
    Rule(
        "vram-full",
        "more than 95 % of a card's memory in use",
        "the next long prompt may end the server, or push memory into slower places",
        f"{sources.CARD_12_GB}, checklist point 2",
        _vram_full,
    ),
    Rule(
        "vram-spill",
        "memory of the card that lives in RAM",
        "a card with 448 GB/s then waits for 32 GB/s: speed collapses instead of an error",
        f"{sources.CARD_16_GB} (at 43k tokens); CUDA Programming Guide, unified memory; "
        f"{sources.issue(27162)}",
        _spill,
    ),
    Rule(
        "display-vram",
        "a display server holds VRAM",
        "on a starved card each MiB of a desktop is an expert on the CPU; the write-up got 0.9 GB back",
        f"{sources.CARD_12_GB}, VRAM tactics",
        _display,
    ),
    Rule(
        "kv-plain",
        "an unquantised KV cache on a small card",
        "f16 takes nearly twice what q8_0 takes, and weights leave the card for it",
        f"{sources.CARD_12_GB}, VRAM tactics",
        _plain_cache,
    ),
    Rule(
        "kv-pair",
        "a pair of KV types that the build has no kernel for",
        "attention then runs on the CPU, very slowly and without a word",
        "ggml-cuda of llama.cpp, fattn.cu: pairs without GGML_CUDA_FA_ALL_QUANTS",
        _cache_pair,
    ),
    Rule(
        "context-not-fillable",
        "a context that cannot be filled",
        "requests beyond it fail, lose their beginning or run out of memory",
        f"{sources.CARD_16_GB} (131k after an out-of-memory at 65k); the model's own context_length",
        _context,
    ),
    Rule(
        "memlock",
        "mlock without the right to lock",
        "the refusal is only a warning in the log: the server runs unlocked and can be swapped out",
        "llama.cpp's warning `failed to mlock`; systemd.exec(5), LimitMEMLOCK=",
        _memlock,
    ),
    Rule(
        "swap",
        "swap in use",
        "weights or caches that were swapped out come back from disk in the middle of an answer",
        "/proc/PID/status (VmSwap), /proc/meminfo",
        _swap,
    ),
    Rule(
        "mapped-experts",
        "experts on the CPU from a mapped file",
        "mapped pages can be dropped and read from disk again, and are not repacked for the CPU",
        "llama.cpp's warning `tensor overrides to CPU are used with mmap enabled`; all three write-ups "
        "with experts on the CPU load without mmap",
        _mapped_experts,
    ),
)
