"""`/proc`: its files, and who descends from whom."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

MAX_TEXT_BYTES = 64 * 1024
_MAX_NAME_LENGTH = 64
# include/linux/proc_ns.h, PROC_PID_INIT_INO: the inode of the first PID namespace of a boot.
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_CONTAINER_MARKERS = ("run/systemd/container", "run/.containerenv", ".dockerenv")
_NVIDIA_PCI_VENDOR = "0x10de"
_DISPLAY_PCI_CLASS = "0x03"  # VGA and 3D controllers; NVIDIA's vendor id is also on old chipsets
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,240}\.(?:service|scope)")


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """The first `max_bytes` of a file, undecodable bytes replaced; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes).decode("utf-8", errors="replace")
    except OSError:
        return None


def read_line(path: Path) -> str | None:
    """A file's first line without white space around it; None if unreadable or empty."""
    text = read_text(path, max_bytes=4096)
    if text is None:
        return None
    line = text.split("\n", 1)[0].strip()
    return line or None


def read_fields(path: Path) -> dict[str, str] | None:
    """`Name: value` lines as a mapping, as in `/proc/meminfo` and `/proc/PID/status`."""
    text = read_text(path)
    if text is None:
        return None
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def kib_field(fields: dict[str, str], name: str) -> int | None:
    """Bytes of a field that the kernel prints as `N kB`."""
    number, _, unit = fields.get(name, "").partition(" ")
    if unit != "kB" or not number.isdecimal():
        return None
    return int(number) * 1024


@dataclass(frozen=True, slots=True)
class Mount:
    """Where something is mounted, and whether its whole file system is read-only, not this mount of it alone."""

    point: Path
    is_whole_read_only: bool


def read_mounts(text: str) -> list[Mount]:
    """The mounts of `/proc/PID/mountinfo`, in their order (proc(5))."""
    found = []
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        if not system:  # cut short
            continue
        fields, options = mount.split(" "), system.rpartition(" ")[2]
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        found.append(Mount(Path(point), "ro" in options.split(",")))
    return found


def printable(text: str, *, max_length: int = _MAX_NAME_LENGTH) -> str:
    """`text` cut to `max_length`, with `?` for everything that could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:max_length])


def process_name(pid: int, *, root: Path = Path("/")) -> str | None:
    """What the process calls itself (`comm`): its own choice, so made printable."""
    text = read_text(root / "proc" / str(pid) / "comm", max_bytes=4096)
    if text is None:
        return None
    return printable(text.removesuffix("\n")) or None


def unit_of(pid: int, *, root: Path = Path("/")) -> str | None:
    """The innermost service or scope of systemd that the process belongs to."""
    for path in _systemd_cgroup_paths(root / "proc" / str(pid) / "cgroup"):
        for part in reversed(path.split("/")):
            name = part.removeprefix("_")  # systemd's escape for names the kernel reserves
            if _UNIT_NAME.fullmatch(name):
                return name
    return None


def _systemd_cgroup_paths(path: Path) -> tuple[str, ...]:
    """Where systemd keeps its tree: its own v1 hierarchy if there is one, else the unified one."""
    text = read_text(path) or ""
    rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]  # noqa: PLR2004
    named = tuple(row[2] for row in rows if row[1] == "name=systemd")
    return (*named, *(row[2] for row in rows if row[0] == "0"))


def in_initial_pid_namespace(root: Path = Path("/")) -> bool | None:
    """Whether PIDs seen from here are those that the kernel and its drivers speak of."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    except OSError:
        return None


def is_in_container(root: Path = Path("/")) -> bool | None:
    """Whether this looks like a container; None when no sign could be read.

    Marker files come first: a container may share the host's PID namespace.
    """
    if any((root / marker).exists() for marker in _CONTAINER_MARKERS):
        return True
    is_initial = in_initial_pid_namespace(root)
    return None if is_initial is None else not is_initial


def boot_id(root: Path = Path("/")) -> str | None:
    """The kernel's random name of this boot; it changes with every start of the machine."""
    return read_line(root / "proc/sys/kernel/random/boot_id")


def nvidia_gpus_on_pci_bus(root: Path) -> tuple[str, ...] | None:
    """PCI addresses of NVIDIA GPUs; None where the bus is hidden or the GPU would not be on it."""
    if (root / "dev/dxg").exists():  # WSL reaches the GPU through this device instead
        return None
    vendors = _graphics_on_pci_bus(root)
    if vendors is None:
        return None
    return tuple(name for name, vendor in vendors if vendor == _NVIDIA_PCI_VENDOR)


def other_graphics_on_pci_bus(root: Path) -> bool | None:
    """Whether a display controller of another maker than NVIDIA is there; None where that is hidden.

    The emulated ones of virtual machines count: a monitor could be theirs too.
    """
    vendors = _graphics_on_pci_bus(root)
    return None if vendors is None else any(v != _NVIDIA_PCI_VENDOR for _, v in vendors)


def _graphics_on_pci_bus(root: Path) -> list[tuple[str, str | None]] | None:
    """Address and vendor of display controllers; None where the bus is hidden."""
    try:
        devices = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return None
    if not devices:
        return None
    return [
        (device.name, read_line(device / "vendor"))
        for device in devices
        if (read_line(device / "class") or "").startswith(_DISPLAY_PCI_CLASS)
    ]


_PROC = Path("/proc")
_OF_NVIDIA = (b"/dev/nvidia", b"/libnvidia-", b"/libcuda.so")
_ENVIRONMENT_BYTES = 1024 * 1024
_N_FIELDS_NEEDED = 20


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process; `start_ticks` counts clock ticks since boot and tells a reused pid apart."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie only waits to be counted by its parent."""
        return self.state not in {"Z", "X"}


def process_stat(pid: int) -> ProcessStat | None:
    """The process as the kernel sees it now; None if there is none."""
    # By the shortest way: all processes are looked at before and after each request of a measurement.
    try:
        with FileIO(f"/proc/{pid}/stat") as file:
            text = file.read(4096)
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(b")")[2].split()
    if len(fields) < _N_FIELDS_NEEDED:
        return None
    state, parent, group, session = fields[0].decode(), *(int(field) for field in fields[1:4])
    return ProcessStat(pid, state, parent, group, session, int(fields[19]))


def is_stopped(pid: int) -> bool:
    """Whether the process stands still until somebody lets it go on (SIGSTOP, a debugger)."""
    stat = process_stat(pid)
    return stat is not None and stat.state in {"T", "t"}


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is this process, or started it directly or through others that still run."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        stat = process_stat(pid)
        pid = stat.parent if stat is not None else 0
    return False


def family_of(*pids: int) -> tuple[int, ...]:
    """These processes, as far as they run, and those that they started, directly or through others that still run."""
    processes = tuple(all_processes())
    return tuple({stat.pid for stat in processes} & _with_descendants({*pids}, processes))


def may_use_nvidia(pid: int) -> bool:
    """Whether the process, or one that it started, has NVIDIA's driver loaded; also where that cannot be seen."""
    for one in family_of(pid):
        try:
            maps = (_PROC / str(one) / "maps").read_bytes()
        except PermissionError:
            return True
        except OSError:  # it has ended
            continue
        if any(part in maps for part in _OF_NVIDIA):
            return True
    return False


def _with_descendants(pids: set[int], processes: Sequence[ProcessStat]) -> set[int]:
    children = {stat.pid for stat in processes if stat.parent in pids} - pids
    return _with_descendants(pids | children, processes) if children else pids


def all_processes() -> Iterator[ProcessStat]:
    """Every process that can be seen from here."""
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and (stat := process_stat(int(folder.name))) is not None:
            yield stat


def session_members(session: int) -> tuple[int, ...]:
    """Living processes of this session."""
    return tuple(
        process.pid
        for process in all_processes()
        if process.session == session and process.is_alive
    )


def members(*, session: int, ancestor: int, variable: tuple[str, str]) -> tuple[int, ...]:
    """Living processes that belong to one service, as far as can be told without a cgroup.

    Those of its session, those descended from its main process `ancestor`, and those that carry the
    environment variable that it was started with, wherever they went since.
    """
    processes = [process for process in all_processes() if process.is_alive]
    found = {process.pid for process in processes if process.session == session}
    found |= {ancestor} & {process.pid for process in processes}
    found |= {process.pid for process in processes if _carries(process.pid, variable)}
    return tuple(sorted(_with_descendants(found, processes) - {os.getpid()}))


def _carries(pid: int, variable: tuple[str, str]) -> bool:
    wanted = f"{variable[0]}={variable[1]}".encode()
    try:
        with (_PROC / str(pid) / "environ").open("rb") as file:
            return wanted in file.read(_ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return False
