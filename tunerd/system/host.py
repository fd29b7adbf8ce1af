"""The machine and its processes, from `/proc`, `/sys` and psutil: the only file that uses psutil.

What cannot be read is None; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tunerd.core.host import Host, HostMemory
from tunerd.core.quantity import MiB, have_mib, need_mib
from tunerd.system.cgroup import cgroup_memory
from tunerd.system.cpu import read_cpu
from tunerd.system.proc import (
    boot_id,
    is_in_container,
    kib_field,
    process_name,
    read_fields,
    read_line,
    read_text,
    unit_of,
)
from tunerd.system.seams import GpuReader

__all__ = [
    "CpuSeconds",
    "MemlockLimit",
    "ProcessFacts",
    "ProcessMemory",
    "boot_id",
    "cpu_seconds",
    "free_disk_mib",
    "is_in_container",
    "memlock_limit_of",
    "memory_of",
    "process_cpu_s",
    "process_facts",
    "process_name",
    "read_cpu",
    "read_host",
    "read_memory",
    "unit_of",
]

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
    """What a process holds of RAM: its own, of mapped files, locked, and gone to swap.

    Locked weights show in `locked_mib`; mapped weights are in `file_mib`, read ones in
    `anonymous_mib`. All are None for a process that has ended but was not yet reaped.
    """

    rss_mib: MiB | None
    anonymous_mib: MiB | None
    file_mib: MiB | None
    locked_mib: MiB | None
    swapped_mib: MiB | None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A running process.

    `start_ticks` (clock ticks since boot) tells a process from a later one with the same pid and
    does not move with the wall clock; `started_s` is wall-clock seconds since the epoch.
    `read_bytes` is what it made the disks read, mapped files included; None without permission.
    """

    pid: int
    start_ticks: int | None
    started_s: float | None
    exe: Path | None
    cmdline: tuple[str, ...] | None
    uid: int | None
    rss_mib: MiB | None
    locked_mib: MiB | None
    read_bytes: int | None


def read_host(gpu_reader: GpuReader, *, root: Path = Path("/")) -> Host:
    """One reading of the whole machine."""
    reading = gpu_reader.read()
    return Host(
        gpus=reading.gpus,
        gpu_problem=reading.problem,
        driver_version=reading.driver_version,
        cuda_version=reading.cuda_version,
        cpu=read_cpu(root),
        memory=read_memory(root),
        kernel=read_line(root / "proc/sys/kernel/osrelease"),
        hostname=read_line(root / "proc/sys/kernel/hostname"),
        in_container=is_in_container(root),
    )


def read_memory(root: Path = Path("/")) -> HostMemory:
    """RAM as far as control groups leave it to programs here, swap, and this process's memlock."""
    meminfo = read_fields(root / "proc/meminfo") or {}
    group = cgroup_memory(root)
    total_bytes = kib_field(meminfo, "MemTotal")
    available_bytes = kib_field(meminfo, "MemAvailable")
    if group.limit_bytes is not None:
        total_bytes = _smaller(total_bytes, group.limit_bytes)
        available_bytes = _smaller(available_bytes, group.left_bytes)
    swap_total_bytes = kib_field(meminfo, "SwapTotal")
    swap_free_bytes = kib_field(meminfo, "SwapFree")
    swap_used_bytes = (
        None
        if swap_total_bytes is None or swap_free_bytes is None
        else swap_total_bytes - swap_free_bytes
    )
    memlock = _memlock_limit(root / "proc/self/limits")
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
    try:
        times = _ask(psutil.Process(pid).cpu_times)
    except psutil.NoSuchProcess:
        return None
    return None if times is None else float(times.user + times.system)


def memlock_limit_of(pid: int, *, root: Path = Path("/")) -> MemlockLimit | None:
    """The limit that a running process really has, whatever its unit says; None if unreadable.

    A user manager clamps what a unit asks for to its own limit and still shows the unit's wish,
    so this is the only way to know.
    """
    return _memlock_limit(root / "proc" / str(pid) / "limits")


def memory_of(pid: int, *, root: Path = Path("/")) -> ProcessMemory | None:
    """RAM of a process now; None if there is no such process."""
    status = read_fields(root / "proc" / str(pid) / "status")
    if status is None:
        return None
    return ProcessMemory(
        rss_mib=_need(kib_field(status, "VmRSS")),
        anonymous_mib=_need(kib_field(status, "RssAnon")),
        file_mib=_need(kib_field(status, "RssFile")),
        locked_mib=_have(kib_field(status, "VmLck")),
        swapped_mib=_need(kib_field(status, "VmSwap")),
    )


def process_facts(pid: int) -> ProcessFacts | None:
    """What is known about a process of this machine; None if there is no such process."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            exe = _ask(process.exe)
            cmdline = _ask(process.cmdline)
            uids = _ask(process.uids)
            disk = _ask(process.io_counters)
            started_s = _ask(process.create_time)
    except psutil.NoSuchProcess:
        return None
    memory = memory_of(pid)
    return ProcessFacts(
        pid=pid,
        start_ticks=_start_ticks(pid),
        started_s=started_s,
        exe=Path(exe) if exe else None,
        cmdline=tuple(cmdline) if cmdline else None,
        uid=None if uids is None else uids.real,
        rss_mib=memory.rss_mib if memory else None,
        locked_mib=memory.locked_mib if memory else None,
        read_bytes=None if disk is None else disk.read_bytes,
    )


def _ask(call: Callable[[], _T]) -> _T | None:
    """The answer; None where it is forbidden, or the process has ended but was not reaped."""
    try:
        return call()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return None


def _start_ticks(pid: int) -> int | None:
    """Field 22 of `/proc/PID/stat`, counted from behind the name, which may hold anything."""
    text = read_text(Path("/proc") / str(pid) / "stat") or ""
    fields = text.rpartition(")")[2].split()
    first_field_number = 3
    index = 22 - first_field_number
    return int(fields[index]) if len(fields) > index and fields[index].isdecimal() else None


def _memlock_limit(path: Path) -> MemlockLimit | None:
    for line in (read_text(path) or "").splitlines():
        if line.startswith(_MEMLOCK_LABEL):
            soft = line.removeprefix(_MEMLOCK_LABEL).split()[:1]
            if soft == ["unlimited"]:
                return MemlockLimit(mib=None, is_unlimited=True)
            if soft and soft[0].isdecimal():
                return MemlockLimit(mib=have_mib(int(soft[0])), is_unlimited=False)
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
