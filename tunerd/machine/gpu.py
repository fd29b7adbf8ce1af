"""GPUs as NVIDIA's management library (NVML) tells them: the only file that uses `pynvml`.

No reading raises. A value that the driver does not give is None; a GPU that does not answer at
all is left out and named in the reading's `gpu_problem`.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from tunerd.errors import HostError
from tunerd.machine import process
from tunerd.machine.facts import POWER_CAP, DriverFiles, Gpu, GpuProcess, GpuReading
from tunerd.words import MiB, have_mib, need_mib

_T = TypeVar("_T")

_NOT_AVAILABLE_FROM = 1 << 63  # NVML says "not available" with all bits of a 64-bit value set
_NOT_AVAILABLE_32 = (1 << 32) - 1
_MAX_NAME_LENGTH = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE

_CORE = pynvml.NVML_TEMPERATURE_GPU

# The library as a whole has stopped working for this process.
_SESSION_ERRORS = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
_DRIVER_MISSING = frozenset(
    {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
)
# One GPU has stopped working.
_GPU_ERRORS = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})

# The reasons that are neither a setting of the owner's clocks nor idleness.
THROTTLING = (
    (pynvml.nvmlClocksEventReasonSwPowerCap, POWER_CAP),
    (pynvml.nvmlClocksEventReasonHwSlowdown, "hardware slowdown"),
    (pynvml.nvmlClocksEventReasonSwThermalSlowdown, "software thermal slowdown"),
    (pynvml.nvmlClocksEventReasonHwThermalSlowdown, "hardware thermal slowdown"),
    (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, "power brake"),
)

_WORDS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "the NVIDIA driver's library libnvidia-ml.so.1 was not found"
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA kernel driver and its library have different versions, "
        "as after an update without a reboot"
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost: it has fallen off the bus",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to talk to the NVIDIA driver",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the card or its driver does not support it",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the NVIDIA driver is too old to be read",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the NVIDIA driver has an interrupt problem with the GPU",
    pynvml.NVML_ERROR_TIMEOUT: "the NVIDIA driver did not answer in time",
}


class NvmlReader:
    """Reads GPUs through the installed driver.

    The library is loaded at the first reading and kept; a reading that finds it dead (driver
    reloaded, GPU fallen off the bus) starts it anew once. A library file that an update has
    replaced is only picked up by a new process.

    Attributes:
        root: Where `/proc` and `/sys` are looked up.
    """

    def __init__(self, *, root: Path = Path("/")) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._is_open = False

    def read(self) -> GpuReading:
        """All physical GPUs now; never raises.

        Process names and units are given only where PIDs mean the same here and in the driver,
        that is in the first PID namespace.
        """
        with self._lock:
            was_open = self._is_open
            reading, is_stale = self._read_once()
            if is_stale and was_open:
                self._is_open = False
                with contextlib.suppress(pynvml.NVMLError):  # a dead library need not be shut down
                    pynvml.nvmlShutdown()
                reading, _ = self._read_once()
            module, library = _driver_versions(self.root)
            why = reading.awaits_reboot
            if module is not None and library is not None:  # this process may have an older library
                why = _awaits_reboot(module, library, self.root)
            return replace(reading, gpu_problem=reading.gpu_problem or why, awaits_reboot=why)

    def _read_once(self) -> tuple[GpuReading, bool]:
        """A reading, and whether the library should be started anew before the next one."""
        gpus: list[Gpu] = []
        problems: list[str] = []
        is_stale = False
        try:
            if not self._is_open:
                pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
                self._is_open = True
            driver_version = _text(pynvml.nvmlSystemGetDriverVersion)
            cuda_version = _cuda_version()
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    gpu = self._gpu(index)
                except pynvml.NVMLError as error:
                    if error.value in _SESSION_ERRORS:
                        raise
                    problems.append(f"GPU {index}: {_words(error)}")
                    is_stale = is_stale or error.value in _GPU_ERRORS
                else:
                    gpus.extend([gpu] if gpu else [])
        except pynvml.NVMLError as error:
            return self._nothing(error), True
        reading = GpuReading(
            gpus=None if problems and not gpus else tuple(gpus),
            gpu_problem="; ".join(problems) or None,
            driver_version=driver_version,
            cuda_version=cuda_version,
        )
        return reading, is_stale

    def _nothing(self, error: pynvml.NVMLError) -> GpuReading:
        """What to say when the library gave nothing; the PCI bus may know that there is nothing."""
        problem = _words(error)
        if error.value in _DRIVER_MISSING:
            on_bus = process.nvidia_gpus_on_pci_bus(self.root)
            if on_bus == ():
                return GpuReading(gpus=())
            if on_bus:
                problem += f", but an NVIDIA GPU is on the PCI bus at {', '.join(on_bus)}"
        differs = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        return GpuReading(None, problem, awaits_reboot=problem if differs else None)

    def _gpu(self, index: int) -> Gpu | None:
        """One GPU; None for a MIG device, which is a part of a GPU that has its own index."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if _ask(lambda: pynvml.nvmlDeviceIsMigDeviceHandle(handle).value):
            return None
        total_mib, used_mib, reserved_mib, free_mib = _memory(handle)
        limits = _ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
        return Gpu(
            index=index,
            name=_text(pynvml.nvmlDeviceGetName, handle) or "unknown",
            uuid=_text(pynvml.nvmlDeviceGetUUID, handle),
            total_mib=total_mib,
            used_mib=used_mib,
            reserved_mib=reserved_mib,
            free_mib=free_mib,
            processes=self._processes(handle),
            # On laptops only the enforced limit is known.
            power_limit_w=_watts(_positive(pynvml.nvmlDeviceGetPowerManagementLimit, handle))
            or _watts(_positive(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            power_default_w=_watts(
                _positive(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
            ),
            power_max_w=_watts(_known(limits[1]) if limits else None),
            pcie_generation=_positive(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_generation_max=_positive(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width=_positive(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_width_max=_positive(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            compute_capability=_ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
            is_mig=_is_mig(handle),
            bar1_mib=_bar1_mib(handle),
            performance_state=_performance_state(handle),
            throttle_reasons=_throttle_reasons(handle),
            utilisation_percent=_ask(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            power_w=_watts(_positive(pynvml.nvmlDeviceGetPowerUsage, handle)),
            energy_j=_energy_j(handle),
            power_min_w=_watts(_known(limits[0]) if limits else None),
            sm_clock_mhz=_positive(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=_positive(
                pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM
            ),
            temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, _CORE),
        )

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Who holds memory, each PID once; None if neither list, or only one, could be had."""
        compute = _memory_by_pid(_ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle))
        graphics = _memory_by_pid(_ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle))
        if compute is None or graphics is None:
            return None
        are_pids_ours = process.in_initial_pid_namespace(self.root) is True
        processes = []
        for pid in sorted(compute.keys() | graphics.keys()):
            both = [used for used in (compute.get(pid), graphics.get(pid)) if used is not None]
            kinds = [
                kind for kind, pids in (("compute", compute), ("graphics", graphics)) if pid in pids
            ]
            processes.append(
                GpuProcess(
                    pid=pid,
                    # Each list gives the memory of the whole process, not of its kind of use.
                    used_mib=need_mib(max(both)) if both else None,
                    kind="+".join(kinds),
                    name=process.process_name(pid, root=self.root) if are_pids_ours else None,
                    unit=process.unit_of(pid, root=self.root) if are_pids_ours else None,
                )
            )
        return tuple(processes)


SAME_W = 1.0
LIMIT_OF = "the power limit of "
"""How what is said begins where one is not set."""


def set_power_limit(uuid: str, watts: float, *, in_place_of: float | None = None) -> None:
    """Let a GPU draw so much [W]; root alone may.

    Args:
        uuid: Which.
        watts: The limit, within what the card allows.
        in_place_of: Only where this is the limit now; None for any [W].

    Raises:
        HostError: the driver refuses, or says another limit afterwards; then it has the one before again.
    """
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        before_mw, wanted_mw = pynvml.nvmlDeviceGetPowerManagementLimit(handle), round(watts * 1000)
        if before_mw == wanted_mw:
            return
        if in_place_of is not None and abs(before_mw / 1000 - in_place_of) >= SAME_W:
            return
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, wanted_mw)
        now_w = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        is_set = abs(now_w - watts) < SAME_W
        if not is_set:  # whoever restores would take it for one that somebody set since
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, before_mw)
    except pynvml.NVMLError as error:
        raise HostError(
            f"{LIMIT_OF}{uuid} cannot be set to {watts:g} W", cause=_words(error)
        ) from error
    if not is_set:
        raise HostError(
            f"{LIMIT_OF}{uuid} is not {watts:g} W after it was set",
            cause=f"it is {now_w:g} W",
        )


def _words(error: pynvml.NVMLError) -> str:
    """What an error means to a person."""
    known = _WORDS.get(error.value)
    return known or f"the NVIDIA driver answered with error {error.value} ({error})"


def _ask(call: Callable[..., _T], *arguments: Any) -> _T | None:
    """The answer, or None where the driver or the GPU has none to give but goes on answering."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _SESSION_ERRORS | _GPU_ERRORS:
            raise
        return None


def _text(call: Callable[..., str], *arguments: Any) -> str | None:
    try:
        text = _ask(call, *arguments)
    except UnicodeDecodeError:
        return None
    return None if text is None else process.printable(text, max_length=_MAX_NAME_LENGTH) or None


def _positive(call: Callable[..., int], *arguments: Any) -> int | None:
    return _known(_ask(call, *arguments))


def _known(number: int | None) -> int | None:
    """A number that cannot be 0: drivers say 0, or all bits set, for what they do not know."""
    return number if number and number != _NOT_AVAILABLE_32 else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _energy_j(handle: Any) -> float | None:
    millijoules = _ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    return millijoules / 1000 if millijoules and millijoules < _NOT_AVAILABLE_FROM else None


def _cuda_version() -> str | None:
    """The newest CUDA that the driver can run, as `12.8`; NVML says 12080."""
    number = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _memory(handle: Any) -> tuple[MiB | None, MiB | None, MiB | None, MiB | None]:
    """Total, used by programs, reserved by the driver, and free.

    Whether the driver's `used` contains the reserve changed between drivers, so used is what neither
    reserved nor free accounts for.

    Source:
        NVML API reference, nvmlMemory_v2_t: of R525 ("used ... also includes ... reserved") and
        of R590 (no such note); nvidia-smi shows total = reserved + used + free.
    """
    told = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    if told is None or not _are_sizes(told.total, told.reserved, told.free):
        return None, None, None, None
    used_mib = need_mib(max(0, told.total - told.reserved - told.free))
    return have_mib(told.total), used_mib, need_mib(told.reserved), have_mib(told.free)


def _are_sizes(total: int, *parts: int) -> bool:
    return 0 < total < _NOT_AVAILABLE_FROM and all(part <= total for part in parts)


def _bar1_mib(handle: Any) -> MiB | None:
    """The window through which the processor reaches the card's memory."""
    answer = _ask(pynvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    if answer is None or not 0 < answer.bar1Total < _NOT_AVAILABLE_FROM:
        return None
    return have_mib(answer.bar1Total)


def _performance_state(handle: Any) -> int | None:
    """0 at full clocks to 15; the driver says 32 for what it does not know."""
    state = _ask(pynvml.nvmlDeviceGetPerformanceState, handle)
    return None if state is None or state == pynvml.NVML_PSTATE_UNKNOWN else int(state)


def _throttle_reasons(handle: Any) -> tuple[str, ...] | None:
    """What holds the clocks down, of the reasons that are not a setting and not idleness."""
    bits = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return None if bits is None else tuple(name for bit, name in THROTTLING if bits & bit)


def _is_mig(handle: Any) -> bool | None:
    """Whether the GPU is split into MIG devices, so that its totals are nobody's to use."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    except pynvml.NVMLError:
        return None
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _memory_by_pid(rows: Sequence[Any] | None) -> dict[int, int | None] | None:
    """Bytes per process of one list, summed over rows (MIG gives one for each instance).

    Some drivers say 0 in containers: a process without memory would not be in the list, so 0 is
    unknown too.

    Source:
        NVIDIA/open-gpu-kernel-modules issue 614.
    """
    if rows is None:
        return None
    used_bytes: dict[int, int | None] = {}
    for row in rows:
        before = used_bytes.get(row.pid, 0)
        known = before is not None and row.usedGpuMemory
        used_bytes[row.pid] = before + row.usedGpuMemory if known else None
    return used_bytes


_MODULE = re.compile(r"Kernel Module(?: for \w{1,20})?\s+(\d{1,4}(?:\.\d{1,4}){1,2})\b")
_LIBRARY = "libnvidia-ml.so.1"
_LIBRARY_FILE = re.compile(r"libnvidia-ml\.so\.(\d{1,4}(?:\.\d{1,4}){1,2})")
# Where distributions and NVIDIA's installer put the library. Source: ld.so(8), Debian, Fedora, Arch,
# openSUSE packages of the driver.
_LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib",
)


def read_driver_files(root: Path = Path("/")) -> DriverFiles:
    """One look at the driver's files below `root`."""
    module, library = _driver_versions(root)
    return DriverFiles(
        module_version=module,
        library_version=library,
        has_uvm_device=(root / "dev/nvidia-uvm").exists(),
        pci_addresses=process.nvidia_gpus_on_pci_bus(root),
        has_other_graphics=process.other_graphics_on_pci_bus(root),
        is_wsl=(root / "dev/dxg").exists(),
    )


def _driver_versions(root: Path) -> tuple[str | None, str | None]:
    """The loaded kernel module's, and the installed library's: the module's own where any folder has that."""
    line = process.read_line(root / "proc/driver/nvidia/version")
    found = _MODULE.search(line) if line is not None else None
    module = found[1] if found is not None else None
    libraries = list(_library_versions(root))
    return module, module if module in libraries else next(iter(libraries), None)


def _awaits_reboot(module: str, library: str, root: Path) -> str | None:
    """A process that had loaded the library before an update goes on with that, and hears of no difference."""
    if module == library or (root / "dev/dxg").exists():
        return None
    return f"the loaded kernel module is {module}, the driver's library {library}"


def _library_versions(root: Path) -> Iterator[str]:
    """The versions in the names of the files that the library's soname leads to."""
    for folder in _LIBRARY_FOLDERS:
        link = root / folder / _LIBRARY
        try:
            found = _LIBRARY_FILE.fullmatch(link.resolve(strict=True).name)
        except (OSError, RuntimeError):
            continue
        if found is not None:
            yield found[1]
