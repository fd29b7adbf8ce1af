"""Rules about the machine: driver, PCIe, power, processor."""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.doctor import sources
from tunerd.core.doctor.diagnosis import Missing, Rule, Seen, need
from tunerd.core.doctor.facts import Facts
from tunerd.core.doctor.questions import cards_of, settings_of
from tunerd.core.host import Gpu
from tunerd.core.quantity import format_mib
from tunerd.core.result import Level

# P0 to P2 are the states of a card at work; CUDA runs many consumer cards in P2.
_LAST_WORKING_STATE = 2
_HALF_A_WATT = 0.5
# With these drivers the processor itself chooses its clock, and `powersave` does not hold it down.
_OWN_CHOICE = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
_SAVING = frozenset({"power", "balance_power"})


def _uvm(facts: Facts) -> Iterator[Seen | Missing]:
    driver = need(facts.driver, "the driver's files")
    if driver.is_wsl or driver.has_uvm_device:
        return
    if not facts.host.gpus and need(driver.pci_addresses, "the PCI bus") == ():
        return
    yield Seen(
        Level.WARNING,
        "there is an NVIDIA GPU and no /dev/nvidia-uvm",
        "nvidia-modprobe -u -c=0; for each boot: echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf",
    )


def _versions(facts: Facts) -> Iterator[Seen | Missing]:
    driver = need(facts.driver, "the driver's files")
    if driver.is_wsl:
        return
    is_silent = not facts.host.gpus and driver.module_version is None
    if is_silent and (facts.host.gpus == () or need(driver.pci_addresses, "the PCI bus") == ()):
        return
    module = need(driver.module_version, "the version of the loaded kernel module")
    library = need(driver.library_version, "the version of the driver's library")
    if module != library:
        yield Seen(
            Level.ERROR,
            f"the loaded kernel module is {module}, the driver's library {library}",
            "reboot, so that the module of the installed driver is loaded",
        )


def _pcie(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        width, most = gpu.pcie_width, gpu.pcie_width_max
        if width is None or most is None:
            yield Missing(f"the PCIe link of GPU {gpu.index}")
            continue
        if width < most:
            yield Seen(
                Level.WARNING,
                f"GPU {gpu.index}: PCIe x{width}, and x{most} is possible",
                "seat the card anew, or in the slot next to the processor; lspci -vv shows LnkSta",
            )
        yield from _generation(gpu)


def _generation(gpu: Gpu) -> Iterator[Seen | Missing]:
    now, most, state = gpu.pcie_generation, gpu.pcie_generation_max, gpu.performance_state
    if now is None or most is None:
        yield Missing(f"the PCIe generation of GPU {gpu.index}")
    elif now < most and (state is None or state > _LAST_WORKING_STATE):
        yield Missing(
            f"the PCIe generation of GPU {gpu.index} at work (it idles at {now} of {most})"
        )
    elif now < most:
        yield Seen(
            Level.WARNING,
            f"GPU {gpu.index}: PCIe generation {now} at work, and {most} is possible",
            "look for a fixed generation in the firmware's settings, and for a riser cable",
        )


def _power(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        limit, default = gpu.power_limit_w, gpu.power_default_w
        if limit is None or default is None:
            yield Missing(f"the power limit of GPU {gpu.index}")
        elif limit < default - _HALF_A_WATT:
            yield Seen(
                Level.NOTE,
                f"GPU {gpu.index}: the power limit is {limit:.0f} W, and {default:.0f} W by default",
                f"if that is not meant: nvidia-smi -i {gpu.index} -pl {default:.0f}",
            )


def _rebar(facts: Facts) -> Iterator[Seen | Missing]:
    for gpu in cards_of(facts):
        if gpu.bar1_mib is None or gpu.total_mib is None:
            yield Missing(f"the BAR1 window of GPU {gpu.index}")
        elif gpu.bar1_mib < gpu.total_mib:
            yield Seen(
                Level.NOTE,
                f"GPU {gpu.index}: the processor reaches {format_mib(gpu.bar1_mib)} of "
                f"{format_mib(gpu.total_mib)} at a time (no Resizable BAR)",
                'switch on "Above 4G Decoding" and "Resizable BAR" in the firmware\'s settings',
            )


def _governor(facts: Facts) -> Iterator[Seen | Missing]:
    frequency = need(facts.frequency, "the processor's frequency governor (the kernel shows none)")
    governors = set(frequency.governors)
    if frequency.driver in _OWN_CHOICE:
        saving = sorted(_SAVING & set(frequency.preferences))
        if saving and "performance" not in governors:
            yield Seen(
                Level.NOTE,
                f"the processor's energy preference is {', '.join(saving)}",
                "cpupower set --epp balance_performance, or powerprofilesctl set performance",
            )
    elif slow := sorted(governors & {"powersave", "conservative"}):
        yield Seen(
            Level.WARNING,
            f"the frequency governor is {', '.join(slow)} ({frequency.driver or 'unknown driver'})",
            "cpupower frequency-set -g performance",
        )


def _threads(facts: Facts) -> Iterator[Seen | Missing]:
    serving = settings_of(facts).serving
    cores = need(facts.host.cpu.physical_cores, "the number of physical cores")
    for name, threads, level in (
        ("threads", serving.threads, Level.WARNING),
        ("threads_batch", serving.threads_batch, Level.NOTE),
    ):
        if isinstance(threads, int) and threads > cores:
            yield Seen(
                level,
                f"serving.{name} is {threads}, and there are {cores} physical cores",
                f"tunerd plan PROFILE --set serving.{name}=physical",
            )


RULES = (
    Rule(
        "uvm-missing",
        "/dev/nvidia-uvm missing after boot",
        "the first CUDA program makes it with a setuid helper, which a unit with NoNewPrivileges= may "
        "not use; then the server finds no GPU",
        "NVIDIA Linux driver README, device files; systemd.exec(5), NoNewPrivileges=",
        _uvm,
    ),
    Rule(
        "driver-mismatch",
        "kernel module and library of the driver differ",
        "after an update without a reboot no new CUDA program can start",
        f"{sources.NVML}, NVML_ERROR_LIB_RM_VERSION_MISMATCH; /proc/driver/nvidia/version",
        _versions,
    ),
    Rule(
        "pcie-link",
        "a PCIe link narrower or slower than it could be",
        "prompts with experts on the CPU, and every load, go through it",
        f"{sources.NVML}, nvmlDeviceGetCurrPcieLinkWidth and nvmlDeviceGetCurrPcieLinkGeneration",
        _pcie,
    ),
    Rule(
        "power-limit",
        "a power limit below the card's default",
        "prompts are processed at lower clocks; often it is meant",
        f"{sources.NVML}, nvmlDeviceGetPowerManagementDefaultLimit",
        _power,
    ),
    Rule(
        "resizable-bar",
        "Resizable BAR switched off",
        "copies between RAM and VRAM go through a small window",
        f"{sources.NVML}, nvmlDeviceGetBAR1MemoryInfo",
        _rebar,
    ),
    Rule(
        "cpu-governor",
        "a frequency governor that holds the processor down",
        "experts on the CPU, sampling and launching kernels wait for a core at low clock",
        "Linux admin-guide/pm/cpufreq and admin-guide/pm/intel_pstate",
        _governor,
    ),
    Rule(
        "threads",
        "more threads than physical cores",
        "two threads of a core share its vector units and memory, and wait for each other at every layer",
        f"{sources.CARD_12_GB} (8 threads on 8 cores); llama.cpp's own default",
        _threads,
    ),
)
