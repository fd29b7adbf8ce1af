"""The real pynvml over the C stub of NVIDIA's library, in this process, beside a `/proc` of a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml

from tests.support import nvml_stub
from tunerd.machine.facts import Gpu
from tunerd.machine.gpu import NvmlReader


@contextmanager
def loading() -> Iterator[Callable[[Path], None]]:
    """A function that makes pynvml use a library file; pynvml is as right after import at both ends."""

    def use(library: Path) -> None:
        _forget()
        pynvml.nvmlLib = pynvml.CDLL(str(library))

    _forget()
    try:
        yield use
    finally:
        _forget()


def _forget() -> None:
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0


class StubWorld:
    """The C stub, and a `/proc` and `/sys` in which its processes and one NVIDIA card are."""

    def __init__(self, folder: Path, library: Path, load: Callable[[Path], None]) -> None:
        own_library = folder / nvml_stub.SONAME
        shutil.copy(library, own_library)
        self.root = folder / "root"
        add_pci_device(self.root, "0000:01:00.0", "0x10de")
        self.set_pid_namespace("pid:[4026531836]")
        self.nvml = nvml_stub.NvmlWorld(folder)
        self.reader = NvmlReader(root=self.root)
        load(own_library)

    def set_pid_namespace(self, name: str) -> None:
        link = self.root / "proc/self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    def add_process(self, pid: int, *, comm: bytes, cgroup: str) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comm").write_bytes(comm + b"\n")
        (folder / "cgroup").write_text(cgroup)

    def show(self, *gpus: Gpu, extra: tuple[str, ...] = ()) -> None:
        for process in (process for gpu in gpus for process in gpu.processes or ()):
            path = f"/system.slice/{process.unit}" if process.unit else "/"
            self.add_process(process.pid, comm=(process.name or "").encode(), cgroup=f"0::{path}\n")
        self.nvml.show(*gpus, extra=extra)

    def hide(self) -> None:
        self.nvml.unload_driver()

    def lose(self, index: int) -> None:
        self.nvml.fail("*", nvml_stub.GPU_IS_LOST, index)


def add_pci_device(root: Path, address: str, vendor: str, pci_class: str = "0x030000") -> None:
    """A device on the bus of that `/sys`."""
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(pci_class + "\n")
