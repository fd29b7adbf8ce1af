"""The GPU fake: a GpuReader that answers what a test laid down, and cards to lay down."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from tunerd.machine.clock import Clock
from tunerd.machine.facts import Gpu, GpuProcess, GpuReader, GpuReading
from tunerd.words import MiB

DRIVER_VERSION = "580.95.05"
CUDA_VERSION = "13.0"
_RESERVED_MIB = 380


def a_card(
    name: str = "NVIDIA GeForce RTX 4070 SUPER",
    *,
    index: int = 0,
    total_mib: int = 12282,
    used_mib: int = 0,
    processes: Sequence[GpuProcess] = (),
) -> Gpu:
    """A healthy card on a full-width link; `used_mib` is at least what the processes hold."""
    used = max(used_mib, sum(process.used_mib or 0 for process in processes))
    return Gpu(
        index=index,
        name=name,
        uuid=f"GPU-{os.getpid():08x}-0000-0000-0000-{index:012d}",  # tests beside this one have another
        total_mib=MiB(total_mib),
        used_mib=MiB(used),
        reserved_mib=MiB(_RESERVED_MIB),
        free_mib=MiB(total_mib - used - _RESERVED_MIB),
        processes=tuple(processes),
        power_limit_w=220.0,
        power_default_w=220.0,
        power_max_w=240.0,
        pcie_generation=4,
        pcie_generation_max=4,
        pcie_width=16,
        pcie_width_max=16,
        compute_capability=(8, 9),
        is_mig=False,
        bar1_mib=MiB(1 << (total_mib - 1).bit_length()),
        performance_state=0,
        throttle_reasons=(),
        utilisation_percent=0,
        power_w=14.5,
        energy_j=81_234.5,
        power_min_w=100.0,
        sm_clock_mhz=210,
        memory_clock_mhz=405,
        temperature_c=38,
    )


def rtx_4070_super(*, index: int = 0, used_mib: int = 0) -> Gpu:
    return a_card(index=index, used_mib=used_mib)


def rtx_3090_ti(*, index: int = 0, used_mib: int = 0) -> Gpu:
    return replace(
        a_card("NVIDIA GeForce RTX 3090 Ti", index=index, total_mib=24564, used_mib=used_mib),
        power_limit_w=450.0,
        power_default_w=450.0,
        power_max_w=480.0,
        compute_capability=(8, 6),
    )


class FakeGpuReader:
    """Answers with what was last shown; each reading is counted.

    It starts with the given cards; `show`, `hide` and `lose` change the world from then on. Between two
    readings each card takes `draws_j`.
    """

    def __init__(self, *gpus: Gpu) -> None:
        self.n_readings = 0
        self.draws_j = 0.0
        self._reading = _found(gpus)

    def read(self) -> GpuReading:
        self.n_readings += 1
        if self.draws_j and self._reading.gpus:
            gpus = [
                replace(gpu, energy_j=None if gpu.energy_j is None else gpu.energy_j + self.draws_j)
                for gpu in self._reading.gpus
            ]
            self._reading = replace(self._reading, gpus=tuple(gpus))
        return self._reading

    def show(self, *gpus: Gpu) -> None:
        """From now on these cards are there; none means that there are certainly none."""
        self._reading = _found(gpus)

    def hide(self, problem: str) -> None:
        """From now on nothing can be told, for this reason."""
        self._reading = GpuReading(
            gpus=None, gpu_problem=problem, driver_version=None, cuda_version=None
        )

    def update_driver(self) -> None:
        """The driver is updated; who has loaded the library before still reads the cards."""
        why = f"the loaded kernel module is {DRIVER_VERSION}, the driver's library 581.1"
        self._reading = replace(self._reading, gpu_problem=why, awaits_reboot=why)

    def lose(self, index: int) -> None:
        """From now on this card is lost; the others stay readable."""
        left = tuple(gpu for gpu in self._reading.gpus or () if gpu.index != index)
        problem = f"GPU {index}: the GPU is lost: it has fallen off the bus"
        self._reading = replace(_found(left, problem), gpus=left or None)


class LateGpuReader(FakeGpuReader):
    """Lists its first card for three seconds more after it was lost, as a driver may."""

    def __init__(self, clock: Clock, *gpus: Gpu) -> None:
        super().__init__(*gpus)
        self._clock, self._gone_s = clock, math.inf

    def read(self) -> GpuReading:
        if self._clock.monotonic_s() >= self._gone_s:
            super().lose(0)
        return super().read()

    def lose(self, index: int) -> None:
        assert index == 0
        self._gone_s = self._clock.monotonic_s() + 3.0


class SlowGpuReader:
    """Answers as another reader does; it takes a while, in which something happens."""

    def __init__(self, reader: GpuReader, meanwhile: Callable[[], object]) -> None:
        self._reader = reader
        self._meanwhile = meanwhile

    def read(self) -> GpuReading:
        self._meanwhile()
        return self._reader.read()


def _found(gpus: Sequence[Gpu], problem: str | None = None) -> GpuReading:
    return GpuReading(
        gpus=tuple(gpus),
        gpu_problem=problem,
        driver_version=DRIVER_VERSION,
        cuda_version=CUDA_VERSION,
    )
