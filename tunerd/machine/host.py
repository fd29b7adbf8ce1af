"""The machine and its processes, from `/proc`, `/sys` and psutil: the only file that uses psutil."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import psutil

from tunerd.machine.facts import Cpu, CpuFrequency, GpuReader, Host, HostMemory
from tunerd.machine.net import listens
from tunerd.machine.process import kib_field, read_fields, read_line, read_text
from tunerd.words import MiB, have_mib, need_mib

_CPU_FOLDER = "sys/devices/system/cpu"
_MAX_CPUINFO_BYTES = 4 * 1024 * 1024  # about 1.5 KiB for each of up to some 2,000 logical CPUs


def read_cpu(root: Path = Path("/"), *, usable: Collection[int] | None = None) -> Cpu:
    """The processor as far as this process may use it (affinity, cpuset).

    Args:
        root: Where `/proc` and `/sys` are looked up.
        usable: The logical CPUs that it may run on; by default those that the kernel says.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    # A core counts once, with however many of its threads; where the topology is hidden nothing is known.
    cores = {read_line(root / _CPU_FOLDER / f"cpu{cpu}/topology/core_cpus_list") for cpu in usable}
    return Cpu(
        model=_model(root),
        physical_cores=None if None in cores else len(cores),
        logical_cores=len(usable),
    )


def _model(root: Path) -> str | None:
    """By the first processor; ARM boards name themselves behind the last."""
    text = read_text(root / "proc/cpuinfo", max_bytes=_MAX_CPUINFO_BYTES) or ""
    for key in ("model name", "Model"):
        found = re.search(rf"^{key}\s*:[ \t]*(\S.*)$", text, re.MULTILINE)
        if found is not None:
            return " ".join(found[1].split())
    board = read_line(root / "proc/device-tree/model")
    return board.rstrip("\0") if board else None


def read_cpu_frequency(root: Path = Path("/")) -> CpuFrequency | None:
    """The frequency settings over all CPUs; None where the kernel sets none (most virtual machines)."""
    governors = _values(root, "scaling_governor")
    if not governors:
        return None
    drivers = _values(root, "scaling_driver")
    return CpuFrequency(
        driver=drivers[0] if drivers else None,
        governors=governors,
        preferences=_values(root, "energy_performance_preference"),
    )


def _values(root: Path, name: str) -> tuple[str, ...]:
    """What the CPUs have in this file, each value once."""
    paths = sorted((root / _CPU_FOLDER).glob(f"cpu[0-9]*/cpufreq/{name}"))
    return tuple(sorted({line for path in paths if (line := read_line(path)) is not None}))


_MOUNT = "sys/fs/cgroup"


def _limits_around(root: Path) -> Iterator[tuple[int, int | None]]:
    """What the groups around this process allow to it and to its siblings: each limit and what is left of it [bytes].

    None is not known. The unit that this process itself is in is left out: what limits tunerd's own service or a
    login session does not limit a server that the service manager starts.
    """
    rows = (read_text(root / "proc/self/cgroup") or "").splitlines()
    path = next((row.removeprefix("0::") for row in rows if row.startswith("0::")), None)
    for level in () if path is None else _levels(path):
        folder = root / _MOUNT / level
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None:
            # Old file pages are given back under pressure, as the kernel's own MemAvailable assumes.
            shown = map(str.split, (read_text(folder / "memory.stat") or "").splitlines())
            old = next((int(row[1]) for row in shown if row[:1] == ["inactive_file"]), 0)
            yield limit, None if used is None else max(0, limit - used + old)


def has_memory_groups(root: Path = Path("/")) -> bool:
    """Whether the kernel counts memory by group here: some are built or started without that."""
    mount = root / _MOUNT
    controllers = read_text(mount / "cgroup.controllers") or ""
    return "memory" in controllers.split() or (mount / "memory").is_dir()


def _levels(path: str) -> list[str]:
    """Groups from the mount point down to the one around our own unit, as relative paths.

    A container without a cgroup namespace shows its path on the host, which is not there below
    its mount point; the mount point itself is then its group, and it is always the first level.
    """
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    for index in reversed(range(len(parts))):
        if parts[index].endswith((".service", ".scope")):
            parts = parts[:index]
            break
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _number(path: Path) -> int | None:
    line = read_line(path)
    return int(line) if line is not None and line.isdecimal() else None


_T = TypeVar("_T")
# `guest` is a part of `user`.
_CPU_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_MEMLOCK_LABEL = "Max locked memory"


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Processor time of all cores together, spent on work and in all."""

    busy_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class MemlockLimit:
    """How much memory a process may lock (RLIMIT_MEMLOCK, the soft limit).

    `mib` is None when unlimited. A process with CAP_IPC_LOCK is not held by it.
    """

    mib: MiB | None
    is_unlimited: bool


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process holds of RAM: in all, without mapped files, locked, and gone to swap.

    All are None for a process that has ended but was not yet reaped.
    """

    rss_mib: MiB | None
    anonymous_mib: MiB | None
    locked_mib: MiB | None
    swapped_mib: MiB | None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A running process.

    `read_bytes` is what it made the disks read, mapped files included; None without permission.
    """

    cmdline: tuple[str, ...] | None
    rss_mib: MiB | None
    read_bytes: int | None


def read_host(gpu_reader: GpuReader, *, root: Path = Path("/")) -> Host:
    """One reading of the whole machine."""
    reading = gpu_reader.read()
    return Host(
        **{one.name: getattr(reading, one.name) for one in fields(reading)},
        cpu=read_cpu(root),
        memory=read_memory(root),
        kernel=read_line(root / "proc/sys/kernel/osrelease"),
        hostname=read_line(root / "proc/sys/kernel/hostname"),
    )


def read_memory(root: Path = Path("/")) -> HostMemory:
    """RAM as far as control groups leave it to programs here, swap, and this process's memlock."""
    meminfo = read_fields(root / "proc/meminfo") or {}
    total_bytes = kib_field(meminfo, "MemTotal")
    available_bytes = kib_field(meminfo, "MemAvailable")
    for limit_bytes, left_bytes in _limits_around(root):
        total_bytes = _smaller(total_bytes, limit_bytes)
        available_bytes = _smaller(available_bytes, left_bytes)
    swap_total_bytes = kib_field(meminfo, "SwapTotal")
    swap_free_bytes = kib_field(meminfo, "SwapFree")
    swap_used_bytes = (
        None
        if swap_total_bytes is None or swap_free_bytes is None
        else swap_total_bytes - swap_free_bytes
    )
    memlock = memlock_limit_of("self", root=root)
    return HostMemory(
        total_mib=_have(total_bytes),
        available_mib=_have(available_bytes),
        swap_total_mib=_have(swap_total_bytes),
        swap_used_mib=_need(swap_used_bytes),
        memlock_mib=memlock.mib if memlock else None,
        memlock_unlimited=memlock.is_unlimited if memlock else None,
    )


def cpu_seconds() -> CpuSeconds | None:
    """Processor time of the whole machine since it started; None where it is not counted."""
    try:
        times = psutil.cpu_times()
    except OSError:
        return None
    total_s = sum(getattr(times, name, 0.0) for name in _CPU_KINDS)
    return CpuSeconds(busy_s=total_s - times.idle - getattr(times, "iowait", 0.0), total_s=total_s)


def process_cpu_s(pid: int) -> float | None:
    """Processor time that a process has used; None if there is no such process."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None


def memlock_limit_of(pid: int | str, *, root: Path = Path("/")) -> MemlockLimit | None:
    """The limit that a running process really has, whatever its unit says; None if unreadable.

    A user manager clamps what a unit asks for to its own limit and still shows the unit's wish,
    so this is the only way to know.
    """
    for line in (read_text(root / "proc" / str(pid) / "limits") or "").splitlines():
        if line.startswith(_MEMLOCK_LABEL):
            soft = line.removeprefix(_MEMLOCK_LABEL).split()[:1]
            if soft == ["unlimited"]:
                return MemlockLimit(mib=None, is_unlimited=True)
            if soft and soft[0].isdecimal():
                return MemlockLimit(mib=have_mib(int(soft[0])), is_unlimited=False)
    return None


def memory_of(pid: int, *, root: Path = Path("/")) -> ProcessMemory | None:
    """RAM of a process now; None if there is no such process."""
    status = read_fields(root / "proc" / str(pid) / "status")
    if status is None:
        return None
    return ProcessMemory(
        rss_mib=_need(kib_field(status, "VmRSS")),
        anonymous_mib=_need(kib_field(status, "RssAnon")),
        locked_mib=_have(kib_field(status, "VmLck")),
        swapped_mib=_need(kib_field(status, "VmSwap")),
    )


def process_facts(pid: int) -> ProcessFacts | None:
    """What is known about a process of this machine; None if there is no such process."""
    try:
        process = psutil.Process(pid)
        cmdline, disk = _ask(process.cmdline), _ask(process.io_counters)
    except psutil.NoSuchProcess:
        return None
    memory = memory_of(pid)
    return ProcessFacts(
        cmdline=tuple(cmdline) if cmdline else None,
        rss_mib=memory.rss_mib if memory else None,
        read_bytes=None if disk is None else disk.read_bytes,
    )


def listening_programs(
    pid: int, uid: int
) -> Iterator[tuple[str, list[str], str, Mapping[str, str]]]:
    """What of a process and those that it has started listens on a port: its file, words, folder and variables.

    Without any that may not be looked into, or that has another account than the unit's: it writes its own words,
    and who reads them would give it the rights of whoever started it.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if listens(one.pid) and {*one.uids()} == {uid}:
                    yield one.exe(), one.cmdline(), one.cwd(), one.environ()


def _ask(call: Callable[[], _T]) -> _T | None:
    """The answer; None where it is forbidden, or the process has ended but was not reaped."""
    try:
        return call()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return None


def _smaller(one: int | None, other: int | None) -> int | None:
    """The smaller of two bounds that both hold; unknown if either is."""
    return None if one is None or other is None else min(one, other)


def _have(n_bytes: int | None) -> MiB | None:
    return None if n_bytes is None else have_mib(n_bytes)


def _need(n_bytes: int | None) -> MiB | None:
    return None if n_bytes is None else need_mib(n_bytes)


def free_disk_mib(folder: Path) -> int | None:
    """Room for root's files on the file system of a folder, or of what it will lie in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return have_mib(psutil.disk_usage(str(folder)).free)
    except OSError:
        return None


def mounts_on(path: Path) -> set[Path]:
    """Where something is mounted on the way to a path without links, but for the root itself."""
    try:
        points = {Path(one.mountpoint) for one in psutil.disk_partitions(all=True)}
    except OSError:
        return set()
    return {one for one in points if path.is_relative_to(one)} - {Path("/")}
