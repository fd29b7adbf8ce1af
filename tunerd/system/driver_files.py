"""What the files of NVIDIA's driver say, whether its library answers or not; nothing here raises."""

from __future__ import annotations

import re
from pathlib import Path

from tunerd.core.host import DriverFiles
from tunerd.system.proc import nvidia_gpus_on_pci_bus, other_graphics_on_pci_bus, read_line

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
    line = read_line(root / "proc/driver/nvidia/version")
    found = _MODULE.search(line) if line is not None else None
    return DriverFiles(
        module_version=found[1] if found is not None else None,
        library_version=_library_version(root),
        has_uvm_device=(root / "dev/nvidia-uvm").exists(),
        pci_addresses=nvidia_gpus_on_pci_bus(root),
        has_other_graphics=other_graphics_on_pci_bus(root),
        is_wsl=(root / "dev/dxg").exists(),
    )


def _library_version(root: Path) -> str | None:
    """The version in the name of the file that the library's soname leads to."""
    for folder in _LIBRARY_FOLDERS:
        link = root / folder / _LIBRARY
        try:
            found = _LIBRARY_FILE.fullmatch(link.resolve(strict=True).name)
        except (OSError, RuntimeError):
            continue
        if found is not None:
            return found[1]
    return None
