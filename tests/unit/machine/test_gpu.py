"""The GPU fake behaves as the real reader does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.gpu import GpuReaderContract
from tests.support.fake_gpu import FakeGpuReader
from tests.support.folders import plant
from tests.support.nvml_world import add_pci_device
from tunerd.machine.facts import CpuFrequency, DriverFiles
from tunerd.machine.gpu import read_driver_files
from tunerd.machine.host import read_cpu_frequency


class FakeWorld:
    """The fake steers itself."""

    def __init__(self) -> None:
        self.reader = FakeGpuReader()
        self.show, self.lose = self.reader.show, self.reader.lose

    def hide(self) -> None:
        self.reader.hide("the NVIDIA kernel driver is not loaded")


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
DEBIAN = "usr/lib/x86_64-linux-gnu"


def add_library(root: Path, version: str, folder: str = DEBIAN) -> None:
    plant(root, {f"{folder}/libnvidia-ml.so.{version}": ""})
    (root / folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")


def test_the_loaded_module_names_its_version(tmp_path: Path) -> None:
    for text, version in ((PROPRIETARY, "580.95.05"), (OPEN, "550.163.01")):
        plant(tmp_path, {"proc/driver/nvidia/version": text + "GCC version:  gcc version 14.2.0\n"})
        assert read_driver_files(tmp_path).module_version == version


@pytest.mark.parametrize("folder", [DEBIAN, "usr/lib64", "usr/lib", f"{DEBIAN}/nvidia/current"])
def test_the_installed_library_names_its_version(tmp_path: Path, folder: str) -> None:
    """Also where Debian's alternatives lead to it."""
    add_library(tmp_path, "580.95.05", folder)
    if folder.endswith("current"):
        link = tmp_path / DEBIAN / "libnvidia-ml.so.1"
        link.symlink_to("nvidia/current/libnvidia-ml.so.1")

    assert read_driver_files(tmp_path).library_version == "580.95.05"


def test_of_several_libraries_the_one_of_the_loaded_module_is_what_programs_can_use(
    tmp_path: Path,
) -> None:
    """A file that an older installer left in another folder is no reason to reboot."""
    plant(tmp_path, {"proc/driver/nvidia/version": PROPRIETARY})
    add_library(tmp_path, "550.163.01")
    assert read_driver_files(tmp_path).library_version == "550.163.01"

    add_library(tmp_path, "580.95.05", "usr/lib64")
    assert read_driver_files(tmp_path).library_version == "580.95.05"


def test_what_a_machine_has_of_a_driver_and_of_windows_is_seen(tmp_path: Path) -> None:
    nothing = DriverFiles(None, None, has_uvm_device=False, pci_addresses=None,
                          has_other_graphics=None, is_wsl=False)  # fmt: skip
    assert read_driver_files(tmp_path) == nothing

    plant(tmp_path, {"dev/nvidia-uvm": "", "dev/dxg": ""})
    assert read_driver_files(tmp_path) == replace(nothing, has_uvm_device=True, is_wsl=True)


def test_graphics_of_other_makers_are_told_from_nvidias(tmp_path: Path) -> None:
    add_pci_device(tmp_path, "0000:01:00.0", "0x10de")
    add_pci_device(tmp_path, "0000:02:00.0", "0x8086", pci_class="0x020000")
    assert read_driver_files(tmp_path).has_other_graphics is False

    add_pci_device(tmp_path, "0000:00:02.0", "0x8086")
    found = read_driver_files(tmp_path)
    assert found.has_other_graphics is True
    assert found.pci_addresses == ("0000:01:00.0",)


def test_the_settings_of_all_processors_are_put_together(tmp_path: Path) -> None:
    plant(tmp_path, {f"{CPU}/cpu0/topology/core_id": "0\n", f"{CPU}/cpufreq/boost": "1\n"})
    assert read_cpu_frequency(tmp_path) is None, "the kernel does not set its clock"

    for cpu, governor in enumerate(("powersave", "performance", "powersave")):
        said = {"governor": governor, "driver": "intel_pstate"}
        files = {
            f"{CPU}/cpu{cpu}/cpufreq/scaling_{name}": f"{value}\n" for name, value in said.items()
        }
        files[f"{CPU}/cpu{cpu}/cpufreq/energy_performance_preference"] = "balance_power\n"
        plant(tmp_path, files)

    assert read_cpu_frequency(tmp_path) == CpuFrequency(
        "intel_pstate", ("performance", "powersave"), ("balance_power",)
    )
