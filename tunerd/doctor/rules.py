"""Every rule of the doctor, in the order asked: cards, memory, host, engine, speculation, what serves, the daemon, the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tunerd.doctor.facts import (
    ALL_PAIRS,
    BreakEven,
    Facts,
    Missing,
    Rule,
    ServerFacts,
    Traffic,
    experts_by_hand,
    need,
)
from tunerd.engine.flags import drafts_with_probability, owner_of
from tunerd.machine.facts import Gpu
from tunerd.measure.trust import MTP, stages_of
from tunerd.model.gguf import TYPES_BY_NAME
from tunerd.model.memory import LOCKING, UNQUANTISED, Device, PartKind
from tunerd.model.verdict import ram_in_time
from tunerd.production import checks
from tunerd.profile.arm import DRAFT, DRAFT_MODEL
from tunerd.profile.schema import ProfileFile
from tunerd.result import Level, Message, error, note, warning
from tunerd.words import Family, format_mib

# Where rules and their thresholds come from, as users read it.
CARD_12_GB = (
    'write-up "Llama.cpp\'s MTP merge tanks throughput on constrained VRAM" (RTX 4070 Super, 12 GB)'
)
CARD_16_GB = 'write-up "LM Cache, KV Checkpointing, and MTP" (RTX 5060 Ti, 16 GB)'
CARD_24_GB = 'write-up "Three months of speed-up experiments on a 3090 Ti" (24 GB)'
NVML = "NVML API reference"


def _issue(*numbers: int) -> str:
    """Threads of llama.cpp's repository."""
    return ", ".join(f"ggml-org/llama.cpp#{number}" for number in numbers)


# Of a card's memory; more is too full. Source: the 12 GB write-up, checklist point 2.
FULL_SHARE = 0.95
NO_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"
DEFAULT_KV_TYPE = "f16"  # of every build that was probed
# The least margin that a write-up serves with, and the step in which they move it.
# Source: the 12 GB write-up.
_USUAL_MARGIN_MIB = 512
_STEP_MIB = 128
# What a desktop holds is worth a word from such a step on.
_DISPLAY_MIB = _STEP_MIB
# Cards below this cannot hold a long f16 cache beside a large model.
_SMALL_CARD_MIB = 16 * 1024 + 256
_Q8_0_OF_F16 = 34 / 64  # bytes of 32 values
# Pairs for which CUDA builds have kernels unless they were built with all of them.
_PAIRS_OF_ALL_BUILDS = frozenset({"f16", "bf16", "f32", "q8_0", "q4_0"})
_PAIRS_OF_SOME_BUILDS = frozenset({"q4_1", "q5_0", "q5_1"})
_PAIRS_OF_NO_BUILD = frozenset({"iq4_nl"})
_MAPPED_MODES = frozenset({None, "auto", "mmap"})
_SERVER_SWAP_MIB = 64
_BY_TEXT = ("ngram", "suffix", "copyspec", "recycle")


# The code of what a rule says is the rule's own.
_notes, _warns, _errs = (partial(level, "") for level in (note, warning, error))
_RULES: list[Rule] = []
_Check = Callable[[Facts], Iterator[Message | Missing]]


def _rule(code: str, looks_for: str, why: str, source: str) -> Callable[[_Check], _Check]:
    """Makes a rule of what checks it; rules are asked in the order in which they stand here."""

    def keep(check: _Check) -> _Check:
        _RULES.append(Rule(code, looks_for, why, source, check))
        return check

    return keep


def _of_each_card(check: Callable[[Facts, Gpu], Iterator[Message | Missing]]) -> _Check:
    """Looks at one card of the server after the other; what it lacks of one ends the look at that one alone."""

    def every(facts: Facts) -> Iterator[Message | Missing]:
        for gpu in facts.used_cards():
            try:
                yield from check(facts, gpu)
            except Missing as unknown:
                yield unknown

    return every


_LOOK = (
    "`journalctl -k` shows the driver's messages (NVRM, Xid); a lost card usually needs a power cycle, "
    "an updated driver a reboot"
)


@_rule(
    "gpu-unreadable",
    "a card or a driver that cannot be read",
    "a card that cannot be read cannot compute either: a server that loses it exits, or runs on the CPU",
    f"{NVML}, nvmlReturn_t",
)
def _unreadable(facts: Facts) -> Iterator[Message | Missing]:
    problem = facts.host.gpu_problem
    awaits_reboot = facts.host.awaits_reboot if facts.host.gpus else None  # `driver-mismatch`
    if problem in {None, awaits_reboot}:
        facts.cards()
        return
    driver = need(facts.driver, f"the driver's files, and the GPUs ({problem})")
    if driver.pci_addresses is None and driver.module_version is None and not driver.is_wsl:
        yield Missing(f"whether there is a GPU at all ({problem})")
        return
    yield _errs(problem, _LOOK)


@_rule(
    "gpu-mig",
    "a card that is split by MIG",
    "a program gets one part of the card, so memory that is free on the card may not be free for a server",
    f"{NVML}, nvmlDeviceGetMigMode; NVIDIA Multi-Instance GPU User Guide",
)
@_of_each_card
def _mig(_facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    if need(gpu.is_mig, f"whether GPU {gpu.index} is split by MIG"):
        yield _warns(
            f"GPU {gpu.index} is split by MIG; its memory figures are for the whole card",
            f"turn MIG off: nvidia-smi -i {gpu.index} -mig 0; or size the profile for one part",
        )


@_rule(
    "gpu-throttled",
    "clocks held down by heat or a power brake",
    "the server is slower than when it was measured, and whatever you measure now is slow too",
    f"{NVML}, nvmlDeviceGetCurrentClocksEventReasons",
)
@_of_each_card
def _throttled(_facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    need(gpu.throttle_reasons, f"what holds the clocks of GPU {gpu.index} down")
    if gpu.held_back_by:
        heat = "" if gpu.temperature_c is None else f", at {gpu.temperature_c} °C"
        yield _warns(
            f"GPU {gpu.index}: its clocks are held down by {', '.join(gpu.held_back_by)}{heat}",
            "check the fans, dust, the airflow in the case and the power cables; "
            f"a lower power limit makes less heat: nvidia-smi -i {gpu.index} -pl WATTS",
        )


# P0 to P2 are the states of a card at work; CUDA runs many consumer cards in P2.
_LAST_WORKING_STATE = 2
_HALF_A_WATT = 0.5
# With these drivers the processor itself chooses its clock, and `powersave` does not hold it down.
_OWN_CHOICE = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
_SAVING = frozenset({"power", "balance_power"})


@_rule(
    "uvm-missing",
    "/dev/nvidia-uvm missing after boot",
    "the first CUDA program creates it through a setuid helper, which a unit with NoNewPrivileges= "
    "may not use; the server then finds no GPU",
    "NVIDIA Linux driver README, device files; systemd.exec(5), NoNewPrivileges=",
)
def _uvm(facts: Facts) -> Iterator[Message | Missing]:
    driver = need(facts.driver, "the driver's files")
    if driver.is_wsl or driver.has_uvm_device:
        return
    if not facts.host.gpus and need(driver.pci_addresses, "the PCI bus") == ():
        return
    yield _warns(
        "there is an NVIDIA GPU but no /dev/nvidia-uvm",
        "now: nvidia-modprobe -u -c=0; once, for every boot: echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf",
    )


@_rule(
    "driver-mismatch",
    "a driver whose kernel module and library have different versions",
    "after a driver update without a reboot, no new CUDA program can start",
    f"{NVML}, NVML_ERROR_LIB_RM_VERSION_MISMATCH; /proc/driver/nvidia/version",
)
def _versions(facts: Facts) -> Iterator[Message | Missing]:
    yield from checks.check_driver(facts.host)
    driver = need(facts.driver, "the driver's files")
    if driver.is_wsl or facts.host.awaits_reboot is not None:
        return
    is_silent = not facts.host.gpus and driver.module_version is None
    if is_silent and (facts.host.gpus == () or need(driver.pci_addresses, "the PCI bus") == ()):
        return
    need(driver.module_version, "the version of the loaded kernel module")
    need(driver.library_version, "the version of the driver's library")


@_rule(
    "pcie-link",
    "a PCIe link narrower or slower than it could be",
    "every model load goes through it, and so does prompt processing when experts are on the CPU",
    f"{NVML}, nvmlDeviceGetCurrPcieLinkWidth and nvmlDeviceGetCurrPcieLinkGeneration",
)
@_of_each_card
def _pcie(_facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    link = f"the PCIe link of GPU {gpu.index}"
    width, most = need(gpu.pcie_width, link), need(gpu.pcie_width_max, link)
    if width < most:
        yield _warns(
            f"GPU {gpu.index}: PCIe x{width}; x{most} is possible",
            "reseat the card, or use the slot next to the processor; `lspci -vv` shows the link as LnkSta",
        )
    generation = f"the PCIe generation of GPU {gpu.index}"
    now, best = need(gpu.pcie_generation, generation), need(gpu.pcie_generation_max, generation)
    state = gpu.performance_state
    if now < best and (state is None or state > _LAST_WORKING_STATE):
        yield Missing(f"{generation} under load (it idles at {now} of {best})")
    elif now < best:
        yield _warns(
            f"GPU {gpu.index}: PCIe generation {now} under load; {best} is possible",
            "check the firmware settings for a fixed PCIe generation, and the riser cable if there is one",
        )


@_rule(
    "power-limit",
    "a power limit below the card's default",
    "prompt processing runs at lower clocks; often that is intended",
    f"{NVML}, nvmlDeviceGetPowerManagementDefaultLimit",
)
@_of_each_card
def _power(_facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    what = f"the power limit of GPU {gpu.index}"
    limit, default = need(gpu.power_limit_w, what), need(gpu.power_default_w, what)
    if limit < default - _HALF_A_WATT:
        yield _notes(
            f"GPU {gpu.index}: the power limit is {limit:.0f} W; the default is {default:.0f} W",
            f"if that is not intended: nvidia-smi -i {gpu.index} -pl {default:.0f}",
        )


@_rule(
    "resizable-bar",
    "Resizable BAR turned off",
    "copies between RAM and VRAM go through a small window",
    f"{NVML}, nvmlDeviceGetBAR1MemoryInfo",
)
@_of_each_card
def _rebar(_facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    what = f"the BAR1 window of GPU {gpu.index}"
    window, total = need(gpu.bar1_mib, what), need(gpu.total_mib, what)
    if window < total:
        yield _notes(
            f"GPU {gpu.index}: the processor reaches {format_mib(window)} of "
            f"{format_mib(total)} at a time (no Resizable BAR)",
            'turn on "Above 4G Decoding" and "Resizable BAR" in the firmware settings',
        )


@_rule(
    "cpu-governor",
    "a frequency governor that keeps the processor slow",
    "experts on the CPU, sampling and kernel launches wait for a core that runs at a low clock",
    "Linux admin-guide/pm/cpufreq and admin-guide/pm/intel_pstate",
)
def _governor(facts: Facts) -> Iterator[Message | Missing]:
    frequency = need(facts.frequency, "the processor's frequency governor (the kernel shows none)")
    governors = set(frequency.governors)
    if frequency.driver in _OWN_CHOICE:
        saving = sorted(_SAVING & set(frequency.preferences))
        if saving and "performance" not in governors:
            yield _notes(
                f"the processor's energy preference is {', '.join(saving)}",
                "cpupower set --epp balance_performance, or powerprofilesctl set performance",
            )
    elif slow := sorted(governors & {"powersave", "conservative"}):
        yield _warns(
            f"the frequency governor is {', '.join(slow)} ({frequency.driver or 'unknown driver'})",
            "cpupower frequency-set -g performance",
        )


@_rule(
    "threads",
    "more threads than physical cores",
    "two threads on one core share its vector units and cache, and wait for each other at every layer",
    f"{CARD_12_GB} (8 threads on 8 cores); llama.cpp's own default",
)
def _threads(facts: Facts) -> Iterator[Message | Missing]:
    settings = facts.settings()
    cores = need(facts.host.cpu.physical_cores, "the number of physical cores")
    return checks.check_threads(settings, cores)


_LOAD_FLAGS = frozenset(
    {"--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io"}
)


_BACK = "`tunerd verify` shows what was edited since it served, `tunerd rollback` goes back"


def _do(server: ServerFacts, *ways: str | None) -> str:
    """What to do, and how to go back from what was deployed here."""
    return "; ".join(filter(None, (*ways, _BACK if server.was_deployed else None)))


@_rule(
    "flags-removed",
    "flags on the unit's command line that its build does not accept",
    "the server fails at its next start; mainline removed the old load-mode flags in September 2026",
    _issue(20834, 28334),
)
def _removed_flags(facts: Facts) -> Iterator[Message | Missing]:
    capabilities = facts.capabilities()
    server = facts.unit()
    load = [flag for flag in server.foreign_flags if flag in _LOAD_FLAGS]
    rest = [flag for flag in server.foreign_flags if flag not in _LOAD_FLAGS]
    anew = f"tunerd profiles new NAME --from-unit {server.unit}"
    way = 'use `--load-mode`; `--no-mmap --mlock` is now "mlock"'
    way = way if capabilities.has_load_mode else "leave it out"
    for flags, do in ((load, f"{way}: {anew}, then apply it"),
                      (rest, f"{anew} shows what replaces it")):  # fmt: skip
        if flags:
            named = ", ".join(flags)
            seen = f"this build does not accept {named}: {server.unit} cannot start with it"
            yield _errs(seen, _do(server, do))


@_rule(
    "engine-architecture",
    "a build without code for the card",
    "the driver then compiles for minutes at the first start, or the first request crashes the server",
    "NVIDIA CUDA Compatibility Guide, binary compatibility; the build's own `system_info` line",
)
def _architecture(facts: Facts) -> Iterator[Message | Missing]:
    card = facts.used_card()
    if card is None:
        return
    server = facts.unit()
    said = server.said
    if said.lacks_kernels:
        yield _errs(
            "the log says that the build has no kernel image for this card",
            _rebuild(card.compute_capability),
        )
        return
    if said.lacks_cuda:
        yield _errs(
            "the log says that CUDA could not be initialised: the server runs without the card",
            f"restart {server.unit} once the card works; {_LOOK}",
        )
        return
    if server.devices == () or (server.devices is None and said.has_cuda is False):
        yield _warns(
            f"there is a {card.name}, but this build sees no device to offload to",
            "serve with a build for this card; `tunerd engines` lists what is here",
        )
        return
    if said.has_cuda is False:
        return  # another backend, which compiles for the card when it starts
    what = "which card architectures the build has code for (ARCHS)"
    built = need(facts.log().cuda_architectures, what)
    capability = need(card.compute_capability, f"the compute capability of GPU {card.index}")
    own = capability[0] * 10 + capability[1]
    # Code for X.y runs on X.z with z >= y.
    if any(one // 10 == own // 10 and one <= own for one in built):
        return
    is_newer = any(one < own for one in built)
    level = _warns if is_newer else _errs
    yield level(
        f"the build has code for {', '.join(_dotted(one) for one in built)}; the card is {_dotted(own)}",
        _rebuild(capability),
    )


def _dotted(architecture: int) -> str:
    return f"{architecture // 10}.{architecture % 10}"


def _rebuild(capability: tuple[int, int] | None) -> str:
    wanted = "native" if capability is None else f"{capability[0]}{capability[1]}"
    return f"build with -DCMAKE_CUDA_ARCHITECTURES={wanted}, or take a package made for this card"


@_rule(
    "cuda-graphs",
    "CUDA graphs that are captured again at every step (only a comparison can tell)",
    "drafts of varying length change the graph; capturing it each time costs more than it saves",
    f"{CARD_12_GB}, checklist point 3; {_issue(28549, 23957)}",
)
def _graphs(facts: Facts) -> Iterator[Message | Missing]:
    if facts.served_card() is None:
        return
    if NO_GRAPHS not in facts.unit().environment:
        yield Missing(f"a comparison: tunerd compare --set 'environment.{NO_GRAPHS}=\"1\"'")


@_rule(
    "port-clash",
    "a port or address that the server cannot have, or a port that is left to the build",
    "the second server cannot start, or (ik_llama.cpp shares its port) answers half of the requests; "
    "default ports differ between builds",
    "help texts: 8080 in ik_llama.cpp and in mainline until August 2026, 9931 since then (ggml-org/llama.cpp#26508)",
)
def _port(facts: Facts) -> Iterator[Message | Missing]:
    lost = need(facts.port, "the port of the server")
    level = Level.ERROR if facts.server is not None else Level.NOTE
    yield from (replace(one, level=level) for one in lost)
    if facts.server is not None and facts.settings().serving.port is None:
        port = facts.capabilities().default_port
        yield _notes(
            f"the command line names no port, so the build's default applies ({port})",
            f"tunerd plan PROFILE --set serving.port={port}",
        )


@_rule(
    "evidence-stale",
    "outdated measurements of what serves",
    "after a change of driver, build or power limit, other settings may be fastest",
    "fingerprints of stored runs",
)
def _stale(facts: Facts) -> Iterator[Message | Missing]:
    evidence = need(facts.evidence, "stored measurements")
    if evidence.newest_run is None:
        yield Missing("a stored measurement of what serves")
    elif evidence.holds is None:
        reasons = "; ".join(evidence.changes) or "parts of its conditions are unknown"
        yield Missing(f"whether run {evidence.newest_run} still holds: {reasons}")
    elif not evidence.holds:
        yield _warns(
            f"run {evidence.newest_run}, the newest of what serves, is outdated: "
            f"{'; '.join(evidence.changes)}",
            "measure again: tunerd bench",
        )


@_rule(
    "vram-full",
    "more than 95 % of a card's memory in use",
    "the next long prompt may crash the server, or push memory into slower places",
    f"{CARD_12_GB}, checklist point 2",
)
@_of_each_card
def _vram_full(facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    share = need(_share_used(gpu), f"memory in use of GPU {gpu.index}")
    if share > FULL_SHARE and not _is_as_meant(facts, gpu):
        yield _warns(
            f"GPU {gpu.index}: {gpu.used_mib} MiB in use of {gpu.total_mib} MiB ({share:.0%})",
            "raise memory.fit_mib by 128 MiB (tunerd plan PROFILE --set memory.fit_mib=MIB), "
            "or lower serving.ctx_size or speculation.n_max",
        )


def _is_as_meant(facts: Facts, gpu: Gpu) -> bool:
    """Whether a usual margin was to be left, and it is still free but for less than a step."""
    margin = facts.server.margin_mib if facts.server is not None else None
    if margin is None or gpu.total_mib is None or gpu.used_mib is None:
        return False
    free = gpu.total_mib - (gpu.reserved_mib or 0) - gpu.used_mib
    return margin >= _USUAL_MARGIN_MIB and free > margin - _STEP_MIB


def _share_used(gpu: Gpu) -> float | None:
    """Share of the memory that programs can have at all which they have."""
    if gpu.total_mib is None or gpu.used_mib is None:
        return None
    return gpu.used_mib / (gpu.total_mib - (gpu.reserved_mib or 0))


@_rule(
    "vram-spill",
    "VRAM that has spilled into RAM",
    "a card with 448 GB/s then waits for 32 GB/s: speed collapses, and there is no error",
    f"{CARD_16_GB} (at 43k tokens); CUDA Programming Guide, unified memory; {_issue(27162, 24712)}",
)
def _spill(facts: Facts) -> Iterator[Message | Missing]:
    card = facts.used_card()
    if card is None:
        return
    server = facts.unit()
    way = f"remove it from the unit: {server.systemctl} edit --full {server.unit}"
    yield from checks.check_spill(server.environment, way)
    if server.said.has_misplaced_layers:
        why, do = "when VRAM runs out", "raise memory.fit_mib by 128 MiB"
        model, settings = server.model, server.settings
        is_bare_fit = (
            settings and settings.memory.n_gpu_layers is None and not settings.speculation.kinds
        )
        if is_bare_fit and model and model.has_mtp:
            # fit counts the trunk's layers, the loader the block too.
            why = "when fit places a model whose MTP block is not used"
            do = 'set memory.n_gpu_layers = "all", and memory.n_cpu_moe for what does not fit; or use a file without that block'
        seen = "the log says that parts of one layer are on different devices"
        yield _warns(f"{seen}; this happens {why}", do)
    share = _share_used(card)
    if need(facts.driver, "the driver's files").is_wsl and share is not None and share > FULL_SHARE:
        yield _warns(
            f"the Windows driver moves VRAM to RAM without an error, and the card is {share:.0%} full",
            'set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback", or raise memory.fit_mib',
        )
    if server.log is None:
        yield Missing("the log of the running server")


@_rule(
    "display-vram",
    "a display server that holds VRAM",
    "on a card short of VRAM, what the desktop takes pushes experts to the CPU; the write-up got 0.9 GB back",
    f"{CARD_12_GB}, VRAM tactics",
)
@_of_each_card
def _display(facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    processes = need(gpu.processes, f"which processes use GPU {gpu.index}")
    shown = [process for process in processes if process.is_display_server]
    held = sum(process.used_mib or 0 for process in shown)
    if not shown or (held < _DISPLAY_MIB and all(p.used_mib is not None for p in shown)):
        return
    names = ", ".join(sorted({process.name or "" for process in shown}))
    has_other = facts.driver.has_other_graphics if facts.driver is not None else None
    amount = f"{held} MiB of VRAM" if held else "VRAM (the driver does not say how much)"
    yield _warns(f"GPU {gpu.index}: {names} holds {amount}", _way_out(has_other))


def _way_out(has_other: bool | None) -> str:
    headless = (
        "run without a desktop: systemctl set-default multi-user.target; or let the processor draw it "
        "(LIBGL_ALWAYS_SOFTWARE=1 GALLIUM_DRIVER=llvmpipe in its session), which held 126 MiB "
        "instead of 1 GiB in the write-up"
    )
    plug = "plug the monitor into the mainboard to use its graphics"
    if has_other:
        return f"{plug}; or {headless}"
    if has_other is None:
        return f"plug the monitor into the processor's own graphics if it has one; or {headless}"
    return headless


# Who keeps models or frames on a card, by the name of the process, and the way to get the memory back.
_GIVES_BACK = {
    "ollama": "ollama stop MODEL, or systemctl stop ollama; OLLAMA_KEEP_ALIVE=0 unloads after each answer",
    "lm-studio": "eject the model in LM Studio, or lms unload --all",
    "lms": "lms unload --all",
    "python": "ComfyUI: POST /free with unload_models; others: end them while you do not use them",
    "python3": "ComfyUI: POST /free with unload_models; others: end them while you do not use them",
}


@_rule(
    "vram-others",
    "other programs that hold VRAM",
    "VRAM that another model server holds cannot take layers, and its next load can use up the margin that you left free",
    _issue(27501),
)
@_of_each_card
def _others(facts: Facts, gpu: Gpu) -> Iterator[Message | Missing]:
    server = facts.server
    for process in need(gpu.processes, f"which processes use GPU {gpu.index}"):
        is_ours = server is not None and (process.pid == server.pid or process.unit == server.unit)
        if is_ours or process.is_display_server or (process.used_mib or 0) < _DISPLAY_MIB:
            continue
        name = process.name or f"process {process.pid}"
        unit = f" ({process.unit})" if process.unit else ""
        back = _GIVES_BACK.get(name, f"end process {process.pid} while you do not use it")
        yield _warns(f"GPU {gpu.index}: {name}{unit} holds {process.used_mib} MiB of VRAM", back)


def _cache_types(settings: ProfileFile) -> tuple[str, str]:
    """Types of K and V in effect."""
    serving = settings.serving
    return serving.cache_type_k or DEFAULT_KV_TYPE, serving.cache_type_v or DEFAULT_KV_TYPE


@_rule(
    "kv-plain",
    "an unquantised KV cache on a small card",
    "f16 takes nearly twice as much VRAM as q8_0, and pushes weights off the card",
    f"{CARD_12_GB}, VRAM tactics",
)
def _plain_cache(facts: Facts) -> Iterator[Message | Missing]:
    card, settings = facts.served_card(), facts.settings()
    if card is None or not UNQUANTISED & set(_cache_types(settings)):
        return
    if settings.memory.kv_offload is False:
        return
    total = need(card.total_mib, f"the size of GPU {card.index}")
    if total > _SMALL_CARD_MIB:
        return
    try:
        level = _warns if facts.is_starved() else _notes
    except Missing:
        level = _notes
    kinds = "/".join(_cache_types(settings))
    size = _cache_mib(facts)
    gain = ""
    if size is not None:
        less = size * (1 - _Q8_0_OF_F16)
        gain = f" and takes {size:.0f} MiB; q8_0 takes about {less:.0f} MiB less"
    yield level(
        f"the KV cache is {kinds} on a card of {format_mib(total)}{gain}",
        "tunerd plan PROFILE --set serving.cache_type_k=q8_0 --set serving.cache_type_v=q8_0",
    )


def _cache_mib(facts: Facts) -> float | None:
    """KV cache on the GPU, as the engine reported it, else as estimated."""
    server = facts.unit()
    report = server.said.report
    reported = report.allocated_mib(Device.GPU, PartKind.KV) if report is not None else None
    if reported:
        return reported
    if server.estimate is None:
        return None
    n_bytes = server.estimate.bytes_of(Device.GPU, (PartKind.KV, PartKind.MTP_KV))
    return n_bytes / 1024**2 if n_bytes else None


@_rule(
    "kv-pair",
    "a pair of KV types that the build has no kernel for",
    "attention then runs on the CPU, very slowly and without an error; builds since September 2026 convert most "
    "pairs to f16 at each step instead",
    f"ggml-cuda of llama.cpp, fattn.cu; {_issue(27109, 28079)}",
)
def _cache_pair(facts: Facts) -> Iterator[Message | Missing]:
    settings = facts.settings()
    k, v = _cache_types(settings)
    if facts.served_card() is None or settings.serving.flash_attn == "off":
        return
    capabilities = facts.unit().capabilities
    is_ik = capabilities is not None and capabilities.family is Family.IK
    has_none = not is_ik and _PAIRS_OF_NO_BUILD & {k, v}
    is_fast = k == v and k in _PAIRS_OF_ALL_BUILDS
    is_known = {k, v} <= _PAIRS_OF_ALL_BUILDS | _PAIRS_OF_SOME_BUILDS
    # ik's kernels have types that mainline's lack.
    if is_fast or not (is_known or has_none) or (is_ik and k == v):
        return
    log = facts.log()
    if log.has_cuda is False:
        return
    pairs = need(log.kv_pairs, "the build's KV type pairs (its log does not go back that far)")
    way = "tunerd plan PROFILE --set serving.cache_type_k=q8_0 --set serving.cache_type_v=q8_0"
    what = f"the KV cache is {k}/{v}"
    if has_none:
        yield _errs(f"{what}, for which llama.cpp has no CUDA kernel", way)
    elif pairs and not {ALL_PAIRS, f"{k}-{v}".replace("f32", "f16")} & pairs:
        yield _warns(
            f"{what}, for which this build has no kernel: it is converted to f16 at each step",
            f'{way}, or build with -DGGML_CUDA_FA_QUANTS="q8_0-q8_0;{k}-{v}"',
        )
    elif not pairs:
        yield _errs(
            f"{what}, for which this build has no CUDA kernel (FA_ALL_QUANTS is off)",
            f"{way}, or build with -DGGML_CUDA_FA_ALL_QUANTS=ON",
        )


@_rule(
    "context-not-fillable",
    "a context that cannot be filled",
    "requests beyond it fail, lose their beginning or run out of memory",
    f"{CARD_16_GB} (131k after an out-of-memory at 65k); the model's own context_length",
)
def _context(facts: Facts) -> Iterator[Message | Missing]:
    server, settings = facts.unit(), facts.settings()
    asked = settings.serving.ctx_size
    report = server.said.report
    if asked and report is not None and report.n_ctx is not None and report.n_ctx < asked:
        yield _warns(
            f"{asked} tokens of context were asked for, but the engine made {report.n_ctx}",
            "lower serving.ctx_size to that, or make room: a smaller memory.fit_mib, a quantised KV cache",
        )
    model = facts.model()
    slot = server.estimate.n_ctx_slot if server.estimate is not None else asked
    yield from checks.check_context(slot, model)
    estimate = need(server.estimate, "an estimate of its memory")
    yield from ram_in_time(estimate, need(facts.host.memory.total_mib, "how much RAM there is"))


# Prompt tokens that are worth a word: some ten seconds of reading, and more than a new conversation now and then.
_LOST_TOKENS, _LOST_SHARE = 10_000, 0.2


@_rule(
    "prompts-read-anew",
    "prompts that are processed from the start although the slot held their beginning",
    "models with a recurrent state or a sliding window can continue only from a snapshot: without one before the point "
    "where two prompts diverge, all is processed again; a prompt found in the cache took a sixtieth of the time",
    f"{CARD_24_GB}, phases 6 and 7; {_issue(22384, 24055)}",
)
def _read_anew(facts: Facts) -> Iterator[Message | Missing]:
    traffic = facts.traffic()
    if traffic.n_lost >= max(_LOST_TOKENS, _LOST_SHARE * traffic.n_prompt):
        yield _warns(
            f"{traffic.n_lost} of {traffic.n_prompt} prompt tokens were processed again although the slot held them",
            "put what changes (dates, memories) at the end of prompts; set serving.ctx_checkpoints above 0; on mainline, "
            "set serving.n_ubatch to more tokens than change there",
        )


@_rule(
    "memlock",
    "mlock without permission to lock",
    "the refusal is only a warning in the log: the server runs unlocked and can be swapped out",
    "llama.cpp's warning `failed to mlock`; systemd.exec(5), LimitMEMLOCK=",
)
def _memlock(facts: Facts) -> Iterator[Message | Missing]:
    server = facts.unit()
    if facts.settings().serving.load_mode not in LOCKING:
        return
    was_refused = server.said.mlock_refused
    locking = server.locking
    if locking is None and not was_refused:
        yield Missing("the memory lock limit of the running server")
        return
    limit_mib = locking.limit_mib if locking is not None else None
    limit = "unlimited" if limit_mib is None else format_mib(limit_mib)
    locked_mib = locking.locked_mib if locking is not None else None
    has_none = locked_mib == 0
    wanted = server.estimate.locked_mib if server.estimate is not None else 0
    is_short = limit_mib is not None and max(limit_mib, locked_mib or 0) < wanted
    if was_refused or has_none or is_short:
        seen = "nothing is locked" if has_none else "not everything could be locked"
        yield _warns(
            f"mlock is asked for, but {seen}; the server's limit is {limit}",
            f"{server.systemctl} edit {server.unit}, and add LimitMEMLOCK=infinity under [Service]; a user unit "
            "needs it in a drop-in of user@.service too",
        )


@_rule(
    "swap",
    "swap in use",
    "weights or caches that were swapped out are read back from disk in the middle of an answer",
    "/proc/PID/status (VmSwap), /proc/meminfo",
)
def _swap(facts: Facts) -> Iterator[Message | Missing]:
    server = facts.server
    swapped = server.swapped_mib if server is not None else None
    if swapped is not None and swapped >= _SERVER_SWAP_MIB:
        yield _warns(
            f"{format_mib(swapped)} of the server itself is in swap",
            "lock it: tunerd plan PROFILE --set serving.load_mode=mlock, or free RAM",
        )
        return
    used = need(facts.host.memory.swap_used_mib, "how much swap is in use")
    if used >= _SERVER_SWAP_MIB:
        yield _notes(
            f"{format_mib(used)} of swap is in use",
            "free RAM, then swapoff --all && swapon --all; `tunerd plan PROFILE` shows what the server needs",
        )


@_rule(
    "mapped-experts",
    "experts on the CPU from a mapped file",
    "mapped pages can be dropped and read from disk again, and are not repacked for the CPU",
    "llama.cpp's warning `tensor overrides to CPU are used with mmap enabled`; all three write-ups "
    "with experts on the CPU load without mmap",
)
def _mapped_experts(facts: Facts) -> Iterator[Message | Missing]:
    if facts.served_card() is None:
        return
    settings, server = facts.settings(), facts.unit()
    if settings.serving.load_mode not in _MAPPED_MODES:
        return
    is_known = server.said.maps_overridden_tensors or experts_by_hand(settings)
    if not is_known and not (facts.model().is_moe and facts.is_starved()):
        return
    yield _warns(
        "experts are on the CPU, and the model file is memory-mapped",
        "tunerd plan PROFILE --set serving.load_mode=mlock, or =none",
    )


# So many drafted tokens tell an acceptance to about three hundredths (one standard deviation).
_ENOUGH_DRAFTS = 300
# Bits per weight below which a type counts as small: four-bit types have 4.25 to 4.5.
_SMALL_BITS = 5.0


@_rule(
    "mtp-does-not-pay",
    "drafts that are accepted too rarely to pay for themselves on this box",
    "a rejected draft costs time and gains nothing; the acceptance from which speculation pays depends "
    "on this box's step time and prompt speed, there is no fixed threshold",
    f"{CARD_12_GB}, checklist point 1 (60 %); crossover of {CARD_24_GB}",
)
def _does_not_pay(facts: Facts) -> Iterator[Message | Missing]:
    seen = facts.unit().said.traffic
    # What the log counted is drafted, whatever the command line was understood to say.
    if not (seen and seen.n_drafted) and not facts.settings().speculation.kinds:
        return
    traffic = facts.traffic()
    if not traffic.n_drafted:
        n_could = traffic.n_predicted - 2 * traffic.n_requests
        if n_could < _ENOUGH_DRAFTS:  # an answer of two tokens, as a guard asks for, has no drafts
            n = max(0, n_could)
            raise Missing(f"more traffic: {n} tokens that could be drafted are too few")
        yield _warns(
            f"speculation is asked for, but {traffic.n_requests} requests drafted nothing",
            "test what the build really does: tunerd engines --prove",
        )
        return
    ratio, wanted, cost = _acceptance(facts, traffic)
    if ratio < wanted:
        needs = f"speculation pays from {wanted:.0%} on"
        if wanted > 1:
            needs = "speculation would not pay even if all of them were"
        basis = f"measured at about {cost.depth_tokens} tokens of context"
        if cost.tax_ms(1) is None:
            basis += "; without its cost to prompts, which no run measured"
        yield _warns(
            f"{ratio:.0%} of {traffic.n_drafted} drafted tokens were accepted; on this box, with this traffic, "
            f"{needs} ({basis})",
            "turn it off (tunerd plan PROFILE --set speculation.type=off), raise speculation.p_min or "
            "lower speculation.n_max",
        )


def _acceptance(facts: Facts, traffic: Traffic) -> tuple[float, float, BreakEven]:
    """The acceptance seen, the one from which speculation pays here, and what that is by."""
    if traffic.n_drafted < _ENOUGH_DRAFTS:
        raise Missing(f"more traffic: {traffic.n_drafted} drafted tokens are too few to judge")
    evidence = need(facts.evidence, "stored measurements")
    cost = evidence.break_even
    if isinstance(cost, str):
        raise Missing(cost)
    wanted = need(cost.acceptance_ratio(traffic), "drafts in the traffic")
    return traffic.n_accepted / traffic.n_drafted, wanted, cost


@_rule(
    "mtp-head-quant",
    "an MTP block in a small quant that drafts badly",
    "some MTP heads lose more by fewer bits than the other weights do",
    f"{CARD_12_GB}, checklist point 5",
)
def _head_quant(facts: Facts) -> Iterator[Message | Missing]:
    speculation = facts.settings().speculation
    if MTP not in speculation.kinds:
        return
    model = facts.drafter()
    if not model.has_mtp:
        return
    bits = need(_bits(model.mtp_types), "the types of the MTP block's weights")
    if bits >= _SMALL_BITS:
        return
    ratio, wanted, _ = _acceptance(facts, facts.traffic())
    key = "model.path" if speculation.draft_model is None else "speculation.draft_model"
    if ratio < wanted:
        yield _warns(
            f"the MTP block has {bits:.1f} bits per weight ({model.mtp_types[0][0]}), and only "
            f"{ratio:.0%} of what it drafts is accepted",
            f"try a file whose MTP block has 6 or 8 bits: `tunerd plan PROFILE --set {key}=FILE`",
        )


def _bits(types: tuple[tuple[str, int], ...]) -> float | None:
    """Mean bits per weight over bytes by type; None if a type is not known, or there is none."""
    n_bytes = n_values = 0.0
    for name, size in types:
        kind = TYPES_BY_NAME.get(name.lower())
        if kind is None:
            return None
        n_bytes += size
        n_values += size / kind.bytes_per_value
    return n_bytes * 8 / n_values if n_values else None


@_rule(
    "p-min-zero",
    "p-min is 0 while weights are on the CPU",
    "every unlikely draft still costs a verification, which is slow when experts are on the CPU; "
    "0.75 raised throughput on two of three cards",
    f"{CARD_12_GB}, checklist point 4; {CARD_24_GB}, phase 9",
)
def _p_min(facts: Facts) -> Iterator[Message | Missing]:
    speculation = facts.settings().speculation
    if not drafts_with_probability(speculation.kinds):
        return
    p_min = speculation.p_min
    if p_min is None:
        p_min = need(facts.capabilities().default_p_min, "the build's default for p-min")
    if p_min > 0 or not facts.is_starved():
        return
    yield _warns(
        "p-min is 0, so every draft is verified, however unlikely, and weights are on the CPU",
        "tunerd plan PROFILE --set speculation.p_min=0.75",
    )


@_rule(
    "thinking-off",
    "thinking that is turned off for every request",
    "in the write-up it gained at most 30 % speed, and within minutes agents reported work that they had not done: the "
    "model's answers depend on its thinking",
    f"{CARD_24_GB}, phase 5",
)
def _thinking(facts: Facts) -> Iterator[Message | Missing]:
    serving = facts.settings().serving
    told = serving.chat_template_kwargs or {}
    is_off = told.get("enable_thinking") is False or serving.reasoning == "off"
    if is_off or serving.reasoning_budget == 0:
        yield _notes(
            "thinking is off server-wide",
            "cap it instead: tunerd plan PROFILE --set serving.reasoning_budget=256; or let the requests that "
            "need no thinking turn it off",
        )


@_rule(
    "drafts-by-text",
    "drafts that are copied from the text alone, on a model with recurrent layers",
    "a recurrent state cannot be cut back to the last right token, so each miss is computed again: in the write-up a "
    "prompt of 150 tokens did not finish in 600 s",
    f"{CARD_24_GB}, phase 10",
)
def _by_text(facts: Facts) -> Iterator[Message | Missing]:
    kinds = facts.settings().speculation.kinds
    copies = sorted(kind for kind in kinds if kind.startswith(_BY_TEXT))
    if copies and not drafts_with_probability(kinds) and facts.model().recurrent is not None:
        yield _warns(
            f"{', '.join(copies)} on a hybrid model, without a drafter",
            "measure what it costs: tunerd compare PROFILE --set speculation.type=off",
        )


@_rule(
    "mtp-slots",
    "more than one slot with speculation",
    "drafts of one slot can leak into another, a hybrid model can abort, and the speed-up is lost",
    _issue(28286, 28019, 27537),
)
def _slots(facts: Facts) -> Iterator[Message | Missing]:
    settings, server = facts.settings(), facts.unit()
    if not settings.speculation.kinds:
        return iter(())
    known = (server.n_slots, server.said.n_slots, settings.serving.n_parallel)
    n_slots = next((n for n in known if n is not None), None)
    if n_slots is None:
        n_slots = need(facts.capabilities().default_slots, "the number of slots")
    return checks.check_slots(settings, n_slots)


@_rule(
    "model-without-mtp",
    "MTP with a file that has no MTP block",
    "an MTP block comes from training; a server that is asked for MTP without one exits at its start",
    f"{CARD_16_GB}; messages of mainline and ik_llama.cpp of 2026",
)
def _model_without(facts: Facts) -> Iterator[Message | Missing]:
    settings = facts.settings()
    if MTP not in settings.speculation.kinds:
        return iter(())
    return checks.check_mtp_block(settings, facts.drafter())


@_rule(
    "engine-without-mtp",
    "a build that cannot draft with MTP",
    "a flag in a help text proves nothing: builds of May 2026 accepted it without effect, and older "
    "ones have no MTP at all",
    _issue(22673, 23549),
)
def _engine_without(facts: Facts) -> Iterator[Message | Missing]:
    engine = facts.unit().engine
    has_word = facts.capabilities().spec_word(MTP) is not None
    name = engine.name if engine is not None else "the build"
    asks = any(kind == MTP for kind, _ in stages_of(facts.unit().argv))
    if not has_word and asks:
        yield _errs(f"MTP is asked for, but {name} has no such kind of speculation",
                   "serve with a newer build; `tunerd engines` lists what is here")  # fmt: skip
        return
    if MTP in facts.settings().speculation.kinds:
        yield from checks.check_mtp(engine) if engine is not None else ()
        return
    if not has_word and facts.model().has_mtp:
        yield _notes(
            f"the model has an MTP block, but {name} has no MTP",
            "serve with a newer build; `tunerd engines` lists what is here",
        )


@_rule(
    "draft-idle",
    "a draft model that nothing drafts with",
    "until June 2026 mainline drafted wherever a draft model was named; since then the kind of speculation must be named too",
    _issue(23988),
)
def _draft_idle(facts: Facts) -> Iterator[Message | Missing]:
    argv, word = facts.unit().argv, facts.capabilities().spec_word(DRAFT)
    is_named = any(owner_of(one) == DRAFT_MODEL for one in argv) and not any(stages_of(argv))
    if is_named and not (facts.settings().speculation.kinds or facts.capabilities().drafts_unasked):
        yield _warns(
            "a draft model is named, but this build drafts with none unless it is told the kind",
            f"add `--spec-type {word}` to the unit; in a profile: speculation.type = draft",
        )


_OWN = "tunerd's own design (docs/architecture.md)"


@_rule(
    "server-down",
    "a server that failed, or whose unit can no longer start one",
    "no request is answered, or none will be from its next start on",
    _OWN,
)
def _down(facts: Facts) -> Iterator[Message | Missing]:
    server = facts.unit()
    flags = ", ".join(server.foreign_flags)
    if server.no_start is not None:
        if not flags or flags not in server.no_start:  # which `flags-removed` tells
            seen = f"{server.unit} cannot start a server: {server.no_start}"
            yield _errs(seen, _do(server, "fix that"))
    elif server.death is not None:
        hint = _do(server, server.death.hint) or f"see {server.systemctl} status {server.unit}"
        yield _errs(f"{server.unit} failed: {server.death.kind}, {server.death.words}", hint)


@_rule(
    "log-unseen",
    "a server whose log does not reach the journal",
    "only the log says why it died, that it ran out of VRAM and what requests it had: guards, drift and "
    "`workload learn` depend on it",
    "systemd.exec(5), StandardOutput=, LogNamespace= and LogLevelMax=; journald.conf(5), Storage=",
)
def _unseen(facts: Facts) -> Iterator[Message | Missing]:
    server = facts.unit()
    if not server.is_silent:
        facts.log()  # which may be lacking
        return
    yield _warns(
        "nothing that the server wrote is in the journal, so running out of VRAM cannot be recognised",
        f"{server.systemctl} edit {server.unit}, set StandardOutput=journal, StandardError=inherit and an empty "
        "LogNamespace= under [Service], and restart it; or leave out --log-disable",
    )


def _of_tunerd(code: str, what: str, level: Level | None) -> _Check:
    """Tells what is the matter with tunerd, at its own level or at this one."""

    def check(facts: Facts) -> Iterator[Message | Missing]:
        found = need(facts.own, what).get(code)
        if found is not None:
            yield found if level is None else replace(found, level=level)

    return check


for _code, _looks_for, _why, _what, _level in (
    ("no-supervisor", "a supervisor of local mode that is not running",
     "without systemd, only the supervisor starts the server and restarts it when it ends",
     "whether tunerd's supervisor answers", None),
    ("no-daemon", "a daemon that is not running",
     "guards, probation and nights do not run, and no notice is sent", "whether tunerd's daemon runs", None),
    ("no-linger", "units of yours that end when you log out",
     "the server is down until you log in again, and guards and nights with it",
     "whether your units end when you log out", None),
    ("read-only", "a STATE that takes no changes",
     "nothing can be deployed, measured or rolled back, and the daemon keeps and sends no word",
     "whether STATE can be written", Level.ERROR),
    ("settings-wrong", "settings that cannot be read, or have values that are not allowed",
     "most commands refuse to work (not those that show what serves, go back or end something), and the daemon uses other values",
     "whether the settings are valid", Level.ERROR),
    ("kept-engines", "kept copies of engines that nothing uses",
     "`swap.keep_engine` keeps each deployed build with its libraries, and no copy is ever removed",
     "which copies of engines are needed", None),
    ("swap-cut-short", "a swap that was interrupted",
     "unit and record may differ until the daemon, the next change or `tunerd recover` repairs that",
     "whether a swap was interrupted", Level.ERROR),
):  # fmt: skip
    _rule(_code, _looks_for, _why, _OWN)(_of_tunerd(_code, _what, _level))

ALL_RULES = tuple(_RULES)
