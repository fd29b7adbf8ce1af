"""The GPU fake behaves as the real reader does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.gpu import GpuReaderContract
from tests.support.fake_gpu import FakeGpuReader
from tests.support.folders import plant
from tests.support.nvml_world import add_pci_device
from tunerd.machine.facts import CpuFrequency, Gpu
from tunerd.machine.gpu import read_driver_files
from tunerd.machine.host import read_cpu_frequency


class FakeWorld:
    """The fake steers itself."""

    def __init__(self) -> None:
        self.reader = FakeGpuReader()

    def show(self, *gpus: Gpu) -> None:
        self.reader.show(*gpus)

    def hide(self) -> None:
        self.reader.hide("the NVIDIA kernel driver is not loaded")

    def lose(self, index: int) -> None:
        self.reader.lose(index)


class TestFakeGpuReader(GpuReaderContract):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld()


# NVIDIA's driver as its files tell it, and the processor's frequency settings, of odd machines.

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release Build  "
    "(dvs-builder@U22-I3)  Tue Apr  8 12:43:23 UTC 2025\n"
)
CPU = "sys/devices/system/cpu"


def add_library(root: Path, version: str, folder: str = "usr/lib/x86_64-linux-gnu") -> None:
    plant(root, {f"{folder}/libnvidia-ml.so.{version}": ""})
    (root / folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "580.95.05"), (OPEN, "550.163.01")])
def test_the_loaded_module_names_its_version(tmp_path: Path, text: str, version: str) -> None:
    plant(tmp_path, {"proc/driver/nvidia/version": text + "GCC version:  gcc version 14.2.0\n"})

    assert read_driver_files(tmp_path).module_version == version


@pytest.mark.parametrize("folder", ["usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib"])
def test_the_installed_library_names_its_version(tmp_path: Path, folder: str) -> None:
    add_library(tmp_path, "580.95.05", folder)

    assert read_driver_files(tmp_path).library_version == "580.95.05"


def test_a_library_that_debians_alternatives_lead_to_is_found(tmp_path: Path) -> None:
    add_library(tmp_path, "550.163.01", "usr/lib/x86_64-linux-gnu/nvidia/current")
    link = tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    link.symlink_to("nvidia/current/libnvidia-ml.so.1")

    assert read_driver_files(tmp_path).library_version == "550.163.01"


def test_of_several_libraries_the_one_of_the_loaded_module_is_what_programs_can_use(
    tmp_path: Path,
) -> None:
    """A file that an older installer left in another folder is no reason to reboot."""
    plant(tmp_path, {"proc/driver/nvidia/version": PROPRIETARY})
    add_library(tmp_path, "550.163.01")
    assert read_driver_files(tmp_path).library_version == "550.163.01"

    add_library(tmp_path, "580.95.05", "usr/lib64")
    assert read_driver_files(tmp_path).library_version == "580.95.05"


def test_a_machine_without_a_driver_has_none_of_it(tmp_path: Path) -> None:
    found = read_driver_files(tmp_path)

    assert (found.module_version, found.library_version, found.has_uvm_device) == (
        None,
        None,
        False,
    )
    assert (found.pci_addresses, found.has_other_graphics, found.is_wsl) == (None, None, False)


def test_graphics_of_other_makers_are_told_from_nvidias(tmp_path: Path) -> None:
    add_pci_device(tmp_path, "0000:01:00.0", "0x10de")
    add_pci_device(tmp_path, "0000:02:00.0", "0x8086", pci_class="0x020000")
    assert read_driver_files(tmp_path).has_other_graphics is False

    add_pci_device(tmp_path, "0000:00:02.0", "0x8086")
    found = read_driver_files(tmp_path)
    assert found.has_other_graphics is True
    assert found.pci_addresses == ("0000:01:00.0",)


def test_the_device_for_unified_memory_and_windows_driver_are_seen(tmp_path: Path) -> None:
    plant(tmp_path, {"dev/nvidia-uvm": "", "dev/dxg": ""})

    found = read_driver_files(tmp_path)
    assert found.has_uvm_device
    assert found.is_wsl
    assert found.pci_addresses is None


def test_the_settings_of_all_processors_are_put_together(tmp_path: Path) -> None:
    for cpu, governor in enumerate(("powersave", "performance", "powersave")):
        folder = f"{CPU}/cpu{cpu}/cpufreq"
        plant(
            tmp_path,
            {
                f"{folder}/scaling_governor": governor + "\n",
                f"{folder}/scaling_driver": "intel_pstate\n",
                f"{folder}/energy_performance_preference": "balance_power\n",
            },
        )

    assert read_cpu_frequency(tmp_path) == CpuFrequency(
        "intel_pstate", ("performance", "powersave"), ("balance_power",)
    )


def test_a_machine_whose_clock_the_kernel_does_not_set_is_unknown(tmp_path: Path) -> None:
    plant(tmp_path, {f"{CPU}/cpu0/topology/core_id": "0\n", f"{CPU}/cpufreq/boost": "1\n"})

    assert read_cpu_frequency(tmp_path) is None
