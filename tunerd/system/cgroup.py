"""The memory limit that control groups put on programs of this machine or container."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunerd.system.proc import read_line, read_text

# cgroup v1 writes "no limit" as the largest page-aligned signed 64-bit number.
_UNLIMITED_FROM_BYTES = 1 << 62
_V1_CONTROLLER = "memory"
_N_ROW_FIELDS = 3


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest limit there is, and how much of it is left; None where unknown or unlimited."""

    limit_bytes: int | None
    left_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Files:
    """How one cgroup version names things below its mount point."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    reclaimable: str


_V2 = _Files(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", "inactive_file"
)
_V1 = _Files(
    ("sys/fs/cgroup/memory",),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory:
    """What the groups around this process allow to it and to its siblings.

    The unit that this process itself is in is left out: what limits tunerd's own service or a
    login session does not limit a server that the service manager starts.
    """
    tightest = CgroupMemory(limit_bytes=None, left_bytes=None)
    for files, path in _memberships(root):
        for level in _levels(path):
            for mount in files.mounts:
                found = _read_level(root / mount / level, files)
                if found is not None:
                    tightest = _tighter(tightest, found)
    return tightest


def _memberships(root: Path) -> list[tuple[_Files, str]]:
    """Which group this process is in, per hierarchy that can limit memory."""
    text = read_text(root / "proc/self/cgroup") or ""
    rows = [row for line in text.splitlines() if len(row := line.split(":", 2)) == _N_ROW_FIELDS]
    unified = [(_V2, path) for number, _, path in rows if number == "0"]
    classic = [
        (_V1, path) for _, controllers, path in rows if _V1_CONTROLLER in controllers.split(",")
    ]
    return unified + classic


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


def _read_level(folder: Path, files: _Files) -> CgroupMemory | None:
    """The limit of one group; None if it has none."""
    limit_bytes = _number(folder / files.limit)
    if limit_bytes is None or limit_bytes >= _UNLIMITED_FROM_BYTES:
        return None
    used_bytes = _number(folder / files.usage)
    if used_bytes is None:
        return CgroupMemory(limit_bytes, left_bytes=None)
    # Old file pages are given back under pressure, as the kernel's own MemAvailable assumes.
    reclaimable_bytes = _stat(folder / "memory.stat", files.reclaimable) or 0
    return CgroupMemory(limit_bytes, max(0, limit_bytes - used_bytes + reclaimable_bytes))


def _tighter(one: CgroupMemory, other: CgroupMemory) -> CgroupMemory:
    limits = [limit for limit in (one.limit_bytes, other.limit_bytes) if limit is not None]
    limited = [group for group in (one, other) if group.limit_bytes is not None]
    left = [group.left_bytes for group in limited]
    known = [amount for amount in left if amount is not None]
    return CgroupMemory(
        limit_bytes=min(limits) if limits else None,
        left_bytes=min(known) if known and len(known) == len(left) else None,
    )


def _number(path: Path) -> int | None:
    line = read_line(path)
    return int(line) if line is not None and line.isdecimal() else None


def _stat(path: Path, name: str) -> int | None:
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return None
