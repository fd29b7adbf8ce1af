"""What a machine is: GPUs, processor, memory, limits; `None` wherever it could not be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tunerd.words import MiB

# What holds a GPU's clocks down though it has work; the owner's power limit is one of them.
POWER_CAP = "software power cap"

DISPLAY_SERVERS = frozenset(
    {
        "Xorg",
        "X",
        "Xwayland",
        "gnome-shell",
        "kwin_wayland",
        "kwin_x11",
        "sway",
        "Hyprland",
        "cosmic-comp",
        "weston",
        "mutter",
    }
)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of one GPU.

    `used_mib` is None where the driver does not say (containers, some drivers); `name` and `unit`
    are None where the pid cannot be seen from here.
    """

    pid: int
    used_mib: MiB | None
    kind: str
    name: str | None
    unit: str | None

    @property
    def is_display_server(self) -> bool:
        """Whether its name is that of a display server or compositor."""
        return self.name in DISPLAY_SERVERS

    @property
    def computes(self) -> bool:
        """Whether it works on the card; a desktop's graphics, which are always there, are no work."""
        return "compute" in self.kind and not self.is_display_server


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as NVML describes it.

    `bar1_mib` is the window through which the processor reaches its memory; `performance_state` is 0
    at full clocks and grows as the card idles. `throttle_reasons` say, in words, what holds its clocks
    down at this moment; empty where nothing does. `utilisation_percent` is the share of the driver's last
    sampling period (up to a second) in which it worked. `energy_j` is what the whole card has taken since
    the driver was loaded; `power_min_w` and `power_max_w` are the limits that it can be given.
    """

    index: int
    name: str
    uuid: str | None
    total_mib: MiB | None
    used_mib: MiB | None
    reserved_mib: MiB | None
    free_mib: MiB | None
    processes: tuple[GpuProcess, ...] | None
    power_limit_w: float | None
    power_default_w: float | None
    power_max_w: float | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    compute_capability: tuple[int, int] | None
    is_mig: bool | None
    bar1_mib: MiB | None = None
    performance_state: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    utilisation_percent: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    power_min_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None

    @property
    def own_limit_w(self) -> float | None:
        """The limit of its power that holds until its owner sets another; None where that is not known.

        Drivers of laptops move it with the load of the processor (Dynamic Boost).
        """
        moves = self.power_min_w is None or "Laptop" in self.name or "Max-Q" in self.name
        return None if moves else self.power_limit_w

    @property
    def held_back_by(self) -> tuple[str, ...]:
        """What holds its clocks down besides the limit that its owner set."""
        return tuple(one for one in self.throttle_reasons or () if one != POWER_CAP)

    @property
    def unattributed_mib(self) -> MiB | None:
        """Used memory that no listed process accounts for; None if any part is unknown."""
        if self.used_mib is None or self.processes is None:
            return None
        known = [process.used_mib for process in self.processes]
        if any(mib is None for mib in known):
            return None
        return MiB(max(0, self.used_mib - sum(mib for mib in known if mib is not None)))


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, as far as this process may use it."""

    model: str | None
    physical_cores: int | None
    logical_cores: int | None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """RAM, swap, and how much a process started from here may lock.

    `memlock_unlimited` is None when the limit could not be read; `memlock_mib` is None when it is
    unknown or unlimited.
    """

    total_mib: MiB | None
    available_mib: MiB | None
    swap_total_mib: MiB | None
    swap_used_mib: MiB | None
    memlock_mib: MiB | None
    memlock_unlimited: bool | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All GPUs at one moment.

    `gpus` is None when it could not be told whether there are any (`gpu_problem` says why), and
    empty when there are certainly none that NVML knows. `awaits_reboot` says how the loaded driver differs from the installed one: what runs goes on, and what
    starts finds no card.
    """

    gpus: tuple[Gpu, ...] | None
    gpu_problem: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    awaits_reboot: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(GpuReading):
    """One machine at one moment."""

    cpu: Cpu
    memory: HostMemory
    kernel: str | None
    hostname: str | None


@dataclass(frozen=True, slots=True)
class CpuFrequency:
    """How the kernel chooses the processor's clock, over all CPUs.

    `driver` is that of cpufreq, `preferences` are the energy preferences of drivers that have them.
    """

    driver: str | None
    governors: tuple[str, ...]
    preferences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """What files say of NVIDIA's driver, whether NVML answers or not.

    `module_version` is that of the loaded kernel module, `library_version` that of the installed
    `libnvidia-ml.so.1`; None where there is none or it cannot be told. `pci_addresses` are NVIDIA's
    GPUs on the PCI bus, `has_other_graphics` whether a display controller of another maker is there.
    `is_wsl`: the driver is Windows', reached through a device of its own.
    """

    module_version: str | None
    library_version: str | None
    has_uvm_device: bool
    pci_addresses: tuple[str, ...] | None
    has_other_graphics: bool | None
    is_wsl: bool


class GpuReader(Protocol):
    """Reads GPUs."""

    def read(self) -> GpuReading:
        """One reading; never raises."""
