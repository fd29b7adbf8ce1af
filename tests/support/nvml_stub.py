"""Builds and steers the stand-in for NVIDIA's libnvidia-ml.so.1 (nvml_stub.c).

The state file holds, before the first card: `driver V`, `cuda 13000`, `session N` (another number
means that the library must be initialised again), `limits FOLDER` (where limits that were set are kept,
else beside the library), `fail FUNCTION CODE [INDEX]` (`*`: every
question about a card). Then for each card a line `gpu` and: `name`, `uuid`,
`memory TOTAL RESERVED USED` [bytes], `used_includes_reserved`, `mig 0|1|-`,
`mig_device`, `power LIMIT ENFORCED DEFAULT MAX` [mW], `pcie GEN GEN_MAX WIDTH WIDTH_MAX`,
`now UTILISATION POWER SM_CLOCK MEMORY_CLOCK TEMPERATURE` [%, mW, MHz, MHz, degrees C],
`energy MILLIJOULES|-`, `servers PATH BYTES IDLE_MW STEP_MS` (processes with PATH in their command line compute on it,
and energy and power follow their processor time in steps of so long; what was taken is kept beside the limits), `least_power MW|-`, `power_step MW`, `capability MAJOR MINOR`, `bar1 BYTES|-`, `pstate N|-`, `process compute|graphics PID BYTES|- [INSTANCE]`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import needs
from tests.support.fake_gpu import CUDA_VERSION, DRIVER_VERSION
from tests.support.programs import program
from tunerd.machine.facts import Gpu, GpuProcess
from tunerd.machine.gpu import THROTTLING
from tunerd.words import BYTES_PER_MIB

SONAME = "libnvidia-ml.so.1"
STATE_NAME = "nvml-state"
_SOURCE = Path(__file__).with_name("nvml_stub.c")

NOT_SUPPORTED = 3
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
NO_PERMISSION = 4
LIBRARY_NOT_FOUND = 12
UNKNOWN = 999


def compiler() -> str:
    """The C compiler; skips where there is none."""
    found = shutil.which("cc")
    if found is None:
        needs.missing("cc", "no C compiler", "apt-get install gcc libc6-dev")
    return found


def build(folder: Path) -> Path:
    """The library in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / SONAME
    # Without a soname: with one, whoever asks this process for NVML later would get the stub.
    options = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    program(compiler(), *options, "-o", library, _SOURCE)
    return library


def _number(value: float | None, scale: int = 1) -> str:
    return "-" if value is None else str(round(value * scale))


def process_line(list_name: str, pid: int, used_bytes: int | None, instance: int = 0) -> str:
    return f"process {list_name} {pid} {'-' if used_bytes is None else used_bytes} {instance}"


def _process_lines(process: GpuProcess) -> list[str]:
    used = None if process.used_mib is None else process.used_mib * BYTES_PER_MIB
    return [process_line(kind, process.pid, used) for kind in process.kind.split("+")]


def _throttle_bits(gpu: Gpu) -> int | None:
    if gpu.throttle_reasons is None:
        return None
    return sum(int(bit) for bit, name in THROTTLING if name in gpu.throttle_reasons)


def _now(gpu: Gpu) -> list[str]:
    power = _number(gpu.power_w, 1000)
    clocks = (gpu.sm_clock_mhz, gpu.memory_clock_mhz)
    rest = [_number(number) for number in (*clocks, gpu.temperature_c)]
    return [_number(gpu.utilisation_percent), power, *rest]


def gpu_lines(gpu: Gpu) -> list[str]:
    """The state lines from which a reader reads `gpu` again."""
    lines = ["gpu", f"name {gpu.name}", f"uuid {gpu.uuid or '-'}"]
    if gpu.total_mib is not None:
        sizes = (gpu.total_mib, gpu.reserved_mib or 0, gpu.used_mib or 0)
        lines.append("memory " + " ".join(str(mib * BYTES_PER_MIB) for mib in sizes))
    power_w = (gpu.power_limit_w, gpu.power_limit_w, gpu.power_default_w, gpu.power_max_w)
    pcie = (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width, gpu.pcie_width_max)
    lines += [
        f"mig {'-' if gpu.is_mig is not True else '1'}",
        "power " + " ".join(_number(watts, 1000) for watts in power_w),
        "now " + " ".join(_now(gpu)),
        "pcie " + " ".join(_number(number) for number in pcie),
        "capability {} {}".format(*(gpu.compute_capability or ("-", "-"))),
        f"bar1 {_number(gpu.bar1_mib, BYTES_PER_MIB)}",
        f"pstate {_number(gpu.performance_state)}",
        f"energy {_number(gpu.energy_j, 1000)}",
        f"least_power {_number(gpu.power_min_w, 1000)}",
        f"throttle {_number(_throttle_bits(gpu))}",
    ]
    for process in gpu.processes or ():
        lines += _process_lines(process)
    return lines


@dataclass
class NvmlWorld:
    """What the stub library in `folder` answers; every change is there at the next call.

    `session` counts driver reloads; `failures` are `FUNCTION CODE [INDEX]`; `extra` are further
    lines for the last card.
    """

    folder: Path
    gpus: list[Gpu] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    session: int = 0

    def show(self, *gpus: Gpu, extra: Sequence[str] = ()) -> None:
        """A loaded driver with these cards, all healthy."""
        self.gpus, self.failures, self.extra = list(gpus), [], list(extra)
        for limit in self.folder.glob("nvml-limit-*"):
            limit.unlink()
        self.write()

    def fail(self, function: str, code: int, index: int | None = None) -> None:
        """From now on this function answers this code, for one card or for all."""
        self.failures.append(f"{function} {code}" + ("" if index is None else f" {index}"))
        self.write()

    def reload_driver(self) -> None:
        """The driver was taken out and put back: open sessions are dead."""
        self.session += 1
        self.write()

    def unload_driver(self) -> None:
        """The driver is not there any more."""
        (self.folder / STATE_NAME).unlink(missing_ok=True)

    def write(self) -> None:
        major, minor = CUDA_VERSION.split(".")
        lines = [
            f"driver {DRIVER_VERSION}",
            f"cuda {int(major) * 1000 + int(minor) * 10}",
            f"session {self.session}",
            *(f"fail {failure}" for failure in self.failures),
        ]
        for gpu in self.gpus:
            lines += gpu_lines(gpu)
        fresh = self.folder / f"{STATE_NAME}.new"
        fresh.write_text("\n".join([*lines, *self.extra]) + "\n")
        fresh.replace(self.folder / STATE_NAME)
