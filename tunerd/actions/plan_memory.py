"""The memory estimate of a plan, against what is free once the present server has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.engine import Engine, OffloadDevice
from tunerd.core.host import Host
from tunerd.core.memory import Backend, MemorySettings, estimate
from tunerd.core.memory_correction import MemoryCorrection, corrected
from tunerd.core.memory_laws import laws_of
from tunerd.core.memory_parts import Device
from tunerd.core.memory_verdict import Free, MemoryPlan, judge_memory
from tunerd.core.model import ModelFacts
from tunerd.core.quantity import MiB
from tunerd.core.resolve import Resolved
from tunerd.system.host import process_facts

_BY_HAND = ("n_gpu_layers", "n_cpu_moe", "cpu_moe", "n_cpu_ffn", "override_tensor")


def memory_of_plan(
    ctx: Context,
    resolved: Resolved,
    engine: Engine,
    facts: ModelFacts,
    draft: ModelFacts | None,
    host: Host,
    devices: Sequence[OffloadDevice],
    *,
    has_gpu: bool,
    correction: MemoryCorrection | None = None,
) -> MemoryPlan:
    """The estimate, with what earlier loads showed of it, and what it means here."""
    settings = settings_of(resolved, engine, draft, host, has_gpu=has_gpu)
    memory = resolved.profile.memory
    by_hand = memory.fit is False or any(getattr(memory, key) is not None for key in _BY_HAND)
    calculated = estimate(facts, settings)
    judged = judge_memory(
        replace(calculated, parts=corrected(calculated.parts, correction)),
        _free(ctx, host, devices),
        has_gpu=has_gpu,
        fit_mib=None if by_hand else memory.fit_mib,
    )
    if correction is None:
        return judged
    return replace(judged, calculated=calculated, correction=correction)


def settings_of(
    resolved: Resolved,
    engine: Engine,
    draft: ModelFacts | None,
    host: Host,
    *,
    has_gpu: bool,
) -> MemorySettings:
    """The profile's values as the estimate takes them; what it leaves open is the engine's default."""
    serving, memory = resolved.profile.serving, resolved.profile.memory
    speculation = resolved.profile.speculation
    values: dict[str, Any] = {
        "ctx_size": serving.ctx_size,
        "n_parallel": serving.n_parallel,
        "kv_unified": serving.kv_unified,
        "cache_type_k": serving.cache_type_k,
        "cache_type_v": serving.cache_type_v,
        "draft_cache_type_k": speculation.cache_type_k,
        "draft_cache_type_v": speculation.cache_type_v,
        "n_batch": serving.n_batch,
        "n_ubatch": serving.n_ubatch,
        "flash_attn": None if serving.flash_attn is None else serving.flash_attn != "off",
        "speculation": speculation.type,
        "n_max": speculation.n_max if speculation.type != "off" else 0,
        "draft_n_gpu_layers": _layers(speculation.n_gpu_layers),
        "draft_n_ubatch": speculation.n_ubatch,
        "n_gpu_layers": _layers(memory.n_gpu_layers),
        "n_cpu_moe": memory.n_cpu_moe,
        "cpu_moe": memory.cpu_moe,
        "n_cpu_ffn": memory.n_cpu_ffn,
        "kv_offload": memory.kv_offload,
        "load_mode": serving.load_mode,
        "ctx_checkpoints": serving.ctx_checkpoints,
        "cache_ram_mib": serving.cache_ram_mib,
    }
    given = {key: value for key, value in values.items() if value is not None}
    capabilities = engine.capabilities
    if capabilities is not None:
        given["laws"] = laws_of(capabilities.family, capabilities.dialect)
    return MemorySettings(
        **given,
        draft=draft,
        has_gpu=has_gpu,
        backend=Backend.CUDA if host.gpus else Backend.VULKAN,
    )


def _layers(value: int | str | None) -> int | None:
    """A number of layers; `all` and `auto` mean all of them."""
    return value if isinstance(value, int) else None


def _free(ctx: Context, host: Host, devices: Sequence[OffloadDevice]) -> Free:
    """What is free, and beside it what the present server will give back."""
    pid = ctx.services.state(ctx.unit).main_pid
    facts = process_facts(pid) if pid is not None else None
    ram = host.memory.available_mib
    if ram is not None and facts is not None and facts.rss_mib is not None:
        total = host.memory.total_mib
        ram = MiB(ram + facts.rss_mib if total is None else min(total, ram + facts.rss_mib))
    return Free(_free_vram(host, devices, pid), ram, host.memory.total_mib)


def _free_vram(host: Host, devices: Sequence[OffloadDevice], pid: int | None) -> MiB | None:
    """Free memory of the largest GPU, from NVML, else as the engine itself sees it."""
    gpus = [gpu for gpu in host.gpus or () if gpu.free_mib is not None]
    if not gpus:
        return max((d.free_mib for d in devices if d.free_mib is not None), default=None)
    gpu = max(gpus, key=lambda one: one.total_mib or 0)
    own = sum(p.used_mib or 0 for p in gpu.processes or () if p.pid == pid)
    return MiB((gpu.free_mib or 0) + own)


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """A memory plan as scripts read it."""
    return {
        "verdict": plan.verdict,
        "n_ctx": plan.estimate.n_ctx,
        "is_complete": plan.estimate.is_complete,
        "locked_mib": plan.estimate.locked_mib,
        "loads": None if plan.correction is None else plan.correction.n_loads,
        "devices": [
            {
                "name": device.name,
                "total_mib": device.start_mib,
                "calculated_mib": None
                if plan.calculated is None
                else plan.calculated.start_mib(Device(device.name)),
                "worst_mib": device.worst_mib,
                "free_mib": device.free_mib,
                "parts": [
                    {"name": str(part.kind), "mib": part.mib, "why": part.formula,
                     "grows": part.grows}
                    for part in device.parts
                ],
            }
            for device in plan.devices
        ],
    }  # fmt: skip
