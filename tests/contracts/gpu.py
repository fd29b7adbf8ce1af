"""What every GpuReader must do, for the fake and for NVML alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from tests.support.fake_gpu import CUDA_VERSION, DRIVER_VERSION, a_card, rtx_3090_ti, rtx_4070_super
from tunerd.machine.facts import Gpu, GpuProcess, GpuReader, GpuReading
from tunerd.words import MiB


class GpuWorld(Protocol):
    """Cards and a driver that a test can change under a running reader."""

    reader: GpuReader

    def show(self, *gpus: Gpu) -> None:
        """These cards are there, with a healthy driver."""
        ...

    def hide(self) -> None:
        """The driver is gone, though a card may be there."""
        ...

    def lose(self, index: int) -> None:
        """This card falls off the bus."""
        ...


def assert_plausible(reading: GpuReading) -> None:
    """What holds for every reading of every machine."""
    assert reading.gpus is not None or reading.gpu_problem
    for gpu in reading.gpus or ():
        assert gpu.name
        assert gpu.name.isprintable()
        numbers = (
            *(gpu.total_mib, gpu.power_limit_w, gpu.power_default_w, gpu.power_max_w),
            *(gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width, gpu.pcie_width_max),
        )
        assert all(number is None or number > 0 for number in numbers), "unknown is never 0"
        if gpu.total_mib is not None:
            assert gpu.used_mib is not None
            assert gpu.free_mib is not None
            parts = gpu.used_mib + gpu.free_mib + (gpu.reserved_mib or 0)
            assert abs(parts - gpu.total_mib) <= 2, "rounding only"
        pids = [process.pid for process in gpu.processes or ()]
        assert len(pids) == len(set(pids)), "each process once"
        assert all(process.used_mib != 0 for process in gpu.processes or ())
    indexes = [gpu.index for gpu in reading.gpus or ()]
    assert indexes == sorted(set(indexes))


class GpuReaderContract:
    """Subclass it with a fixture `world`."""

    def test_a_card_is_read_as_it_is(self, world: GpuWorld) -> None:
        for card in (
            rtx_4070_super(used_mib=1000),
            replace(a_card("NVIDIA A100-PCIE-40GB", total_mib=40960), is_mig=True),
            replace(rtx_3090_ti(), throttle_reasons=("software power cap",)),
            replace(
                rtx_3090_ti(), throttle_reasons=("hardware slowdown", "hardware thermal slowdown")
            ),
            replace(rtx_3090_ti(), throttle_reasons=()),
        ):
            world.show(card)

            reading = world.reader.read()

            assert (reading.gpus, reading.gpu_problem) == ((card,), None)
            assert (reading.driver_version, reading.cuda_version) == (DRIVER_VERSION, CUDA_VERSION)
            assert_plausible(reading)

    def test_no_card_with_a_driver_is_certainly_none(self, world: GpuWorld) -> None:
        world.show()

        reading = world.reader.read()

        assert (reading.gpus, reading.gpu_problem) == ((), None)

    def test_a_missing_driver_is_unknown_and_not_none_until_it_comes_back(
        self, world: GpuWorld
    ) -> None:
        world.show(rtx_4070_super())
        world.reader.read()
        world.hide()

        reading = world.reader.read()

        assert reading.gpus is None
        assert reading.gpu_problem
        assert reading.driver_version is None

        world.show(rtx_4070_super())
        assert world.reader.read().gpus == (rtx_4070_super(),)

    def test_a_lost_card_is_named_and_the_other_still_read_until_it_comes_back(
        self, world: GpuWorld
    ) -> None:
        world.show(rtx_4070_super(index=0), rtx_3090_ti(index=1))
        world.reader.read()
        world.lose(0)

        reading = world.reader.read()

        assert reading.gpus == (rtx_3090_ti(index=1),)
        assert "GPU 0" in (reading.gpu_problem or "")
        assert "lost" in (reading.gpu_problem or "")

        world.show(rtx_4070_super())
        assert world.reader.read().gpus == (rtx_4070_super(),)

    def test_what_the_driver_does_not_know_is_none(self, world: GpuWorld) -> None:
        for unknown in (
            ("power_limit_w", "power_default_w", "power_max_w", "power_min_w"),
            ("pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max"),
            ("compute_capability",),
            ("throttle_reasons",),
            ("energy_j",),
            ("uuid",),
            ("bar1_mib", "performance_state"),
            ("utilisation_percent", "power_w", "temperature_c"),
            ("sm_clock_mhz", "memory_clock_mhz"),
            ("total_mib", "used_mib", "reserved_mib", "free_mib"),
        ):
            card = replace(rtx_4070_super(), **dict.fromkeys(unknown))  # type: ignore[arg-type] # fields by name
            world.show(card)
            assert world.reader.read().gpus == (card,)

    def test_a_display_server_is_seen_with_its_memory(self, world: GpuWorld) -> None:
        desktop = GpuProcess(812, MiB(413), "graphics", "Xorg", "session-2.scope")
        server = GpuProcess(4711, MiB(8000), "compute", "llama-server", "llama-server.service")
        world.show(a_card(processes=[desktop, server]))

        reading = world.reader.read()

        assert reading.gpus
        assert reading.gpus[0].processes == (desktop, server)
        assert [process.is_display_server for process in reading.gpus[0].processes] == [True, False]
        assert reading.gpus[0].unattributed_mib == 0
