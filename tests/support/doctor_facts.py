"""A healthy box for the rules of `doctor`, and ways to make one thing of it wrong or unknown."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.builders import capabilities_of
from tests.support.fake_gpu import DRIVER_VERSION, a_card
from tests.support.model_headers import QWEN36_35B_A3B, facts_of_shape
from tunerd.doctor.facts import (
    BreakEven,
    EvidenceFacts,
    Facts,
    Locking,
    LogFacts,
    ServerFacts,
    Traffic,
)
from tunerd.engine.capabilities import Effect, Engine, OffloadDevice, Proof
from tunerd.machine.facts import Cpu, CpuFrequency, DriverFiles, Gpu, GpuProcess, Host, HostMemory
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import Estimate, MemorySettings, estimate
from tunerd.profile.schema import ProfileFile, nest
from tunerd.words import MiB

PID = 4242
UNIT = "llama-server.service"
_SETTINGS: dict[str, Any] = {
    "model.path": "/models/made.gguf",
    "serving.port": 8080,
    "serving.ctx_size": 32768,
    "serving.n_parallel": 1,
    "serving.threads": 8,
    "serving.cache_type_k": "q8_0",
    "serving.cache_type_v": "q8_0",
    "serving.flash_attn": "on",
    "serving.load_mode": "mlock",
    "speculation.type": "mtp",
    "speculation.n_max": 3,
    "speculation.p_min": 0.75,
    "memory.fit_mib": 1536,
}


def settings(**changes: Any) -> ProfileFile:
    """The healthy settings with some changed, as `serving__threads=9`; None leaves a key out."""
    keys = _SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return ProfileFile.model_validate(nest({k: v for k, v in keys.items() if v is not None}))


@functools.cache
def model() -> ModelFacts:
    """Qwen3.6-35B-A3B with its MTP block, in q8_0."""
    return facts_of_shape(QWEN36_35B_A3B)


@functools.cache
def estimated(ctx_size: int = 32768) -> Estimate:
    return estimate(
        model(),
        MemorySettings(ctx_size=ctx_size, cache_type_k="q8_0", cache_type_v="q8_0",
                       speculation="mtp", n_max=3, load_mode="mlock", cache_ram_mib=1024),
    )  # fmt: skip


def engine(dialect: str = "main-0x", *proofs: Proof) -> Engine:
    return Engine(
        name="mainline-0.7.0",
        program=Path("/opt/llama.cpp/llama-server"),
        found_by="test",
        identity=None,
        version=None,
        capabilities=capabilities_of(dialect),
        proofs=proofs or (Proof("mtp", Effect.PROVED, "21 drafted, 15 accepted"),),
        problem=None,
    )


def card(**changes: Any) -> Gpu:
    """A large card at work on its server; `changes` are fields of it."""
    process = GpuProcess(PID, MiB(40_000), "compute", "llama-server", UNIT)
    return replace(a_card("NVIDIA RTX 6000 Ada", total_mib=49140, processes=[process]), **changes)


HOST = Host(
    gpus=(card(),),
    gpu_problem=None,
    driver_version=DRIVER_VERSION,
    cuda_version="13.0",
    cpu=Cpu("a processor", 8, 16),
    memory=HostMemory(MiB(64_000), MiB(40_000), MiB(8000), MiB(0), None, True),
    kernel="6.12",
    hostname="box",
)
DRIVER = DriverFiles(DRIVER_VERSION, DRIVER_VERSION, True, ("0000:01:00.0",), True, False)
TRAFFIC = Traffic(n_requests=50, n_prompt=50_000, n_predicted=20_000, n_drafted=12_000,
                  n_accepted=9_000)  # fmt: skip
LOG = LogFacts(
    has_cuda=True,
    cuda_architectures=(86, 89, 120),
    kv_pairs=frozenset(),
    n_slots=1,
    traffic=TRAFFIC,
)
# A step with 1.1 drafts takes 24 ms instead of 20, and prompts cost nothing more: pays from 0.2 on.
BREAK_EVEN = BreakEven(
    step_ms=(20.0, 3.6),
    token_ms=20.0,
    prompt_ms=(100.0, 0.5),
    plain_prompt_ms=(100.0, 0.5),
    n_ubatch=512,
    depth_tokens=1500,
)
EVIDENCE = EvidenceFacts(newest_run=3, holds=True, break_even=BREAK_EVEN)


def a_server(**changes: Any) -> ServerFacts:
    """The healthy server with some fields changed."""
    healthy = ServerFacts(
        unit=UNIT,
        is_active=True,
        pid=PID,
        settings=settings(),
        margin_mib=settings().memory.fit_mib,
        engine=engine(),
        devices=(OffloadDevice("CUDA0", "a card", MiB(49140), MiB(9000)),),
        model=model(),
        estimate=estimated(),
        n_slots=1,
        locking=Locking(limit_mib=None, locked_mib=MiB(2000)),
        swapped_mib=MiB(0),
        log=LOG,
        was_deployed=True,
    )
    return replace(healthy, **changes)


def a_box(**changes: Any) -> Facts:
    """A box on which every rule passes, with some facts changed."""
    healthy = Facts(
        host=HOST,
        frequency=CpuFrequency("amd-pstate-epp", ("powersave",), ("balance_performance",)),
        driver=DRIVER,
        server=a_server(),
        port=(),
        evidence=EVIDENCE,
        own={},
    )
    return replace(healthy, **changes)


def with_card(box: Facts | None = None, **changes: Any) -> Facts:
    """The box with another card: fields of it."""
    box = box or a_box()
    return replace(box, host=replace(box.host, gpus=(card(**changes),)))


def with_server(box: Facts | None = None, **changes: Any) -> Facts:
    """The box with another server: fields of it."""
    box = box or a_box()
    server = box.server or a_server()
    return replace(box, server=replace(server, **changes))


def with_settings(box: Facts | None = None, **changes: Any) -> Facts:
    """The box with other settings of its server."""
    changed = settings(**changes)
    return with_server(box, settings=changed, margin_mib=changed.memory.fit_mib)


def with_log(box: Facts | None = None, **changes: Any) -> Facts:
    """The box with another log of its server: fields of it."""
    box = box or a_box()
    log = (box.server.log if box.server is not None else None) or LOG
    return with_server(box, log=replace(log, **changes))


def without_cards(box: Facts | None = None) -> Facts:
    """The box with certainly no card."""
    box = box or a_box()
    driver = replace(DRIVER, module_version=None, library_version=None, has_uvm_device=False,
                     pci_addresses=())  # fmt: skip
    return replace(box, host=replace(box.host, gpus=()), driver=driver)
