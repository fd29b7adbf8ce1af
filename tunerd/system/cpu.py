"""The processor: its name, the cores that may be used, and the instruction sets that matter."""

from __future__ import annotations

from pathlib import Path

from tunerd.core.host import Cpu
from tunerd.system.proc import read_fields, read_line, read_text

_CPU_FOLDER = "sys/devices/system/cpu"
_MAX_CPUINFO_BYTES = 4 * 1024 * 1024  # about 1.5 KiB for each of up to some 2,000 logical CPUs
_MAX_LISTED_CPUS = 8192  # CONFIG_NR_CPUS of the largest distribution kernels

# Kernel flag -> our name, for the instruction sets that ggml has kernels for.
# Source: ggml/src/ggml-cpu/ggml-cpu.c (ggml_cpu_has_*) and arch/x86/cpu-feats.cpp, arm likewise.
_SIMD = {
    "pni": "sse3",
    "ssse3": "ssse3",
    "sse4_2": "sse4_2",
    "avx": "avx",
    "f16c": "f16c",
    "fma": "fma",
    "bmi2": "bmi2",
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512cd": "avx512cd",
    "avx512bw": "avx512bw",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512vbmi": "avx512vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_tile": "amx_tile",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
}


def read_cpu(root: Path = Path("/")) -> Cpu:
    """The processor as far as this process may use it (affinity, cpuset)."""
    rows = _cpuinfo_rows(root)
    allowed = _allowed_cpus(root, rows)
    return Cpu(
        model=_model(root, rows),
        physical_cores=_physical_cores(root, rows, allowed),
        logical_cores=len(allowed) if allowed else None,
        simd=_simd(rows),
    )


def _cpuinfo_rows(root: Path) -> list[dict[str, str]]:
    """One mapping per logical CPU; blocks without a CPU number (ARM boards end with one) too."""
    text = read_text(root / "proc/cpuinfo", max_bytes=_MAX_CPUINFO_BYTES) or ""
    blocks = [
        [line.split(":", 1) for line in block.splitlines() if ":" in line]
        for block in text.split("\n\n")
    ]
    return [{key.strip(): value.strip() for key, value in block} for block in blocks if block]


def _model(root: Path, rows: list[dict[str, str]]) -> str | None:
    for key in ("model name", "Model"):
        for row in rows:
            if row.get(key):
                return " ".join(row[key].split())
    board = read_line(root / "proc/device-tree/model")
    return board.rstrip("\0") if board else None


def _allowed_cpus(root: Path, rows: list[dict[str, str]]) -> frozenset[int] | None:
    """Logical CPUs that are online and that this process may run on."""
    online = parse_cpu_list(read_line(root / _CPU_FOLDER / "online"))
    if online is None:
        numbers = [row["processor"] for row in rows if row.get("processor", "").isdecimal()]
        online = frozenset(int(number) for number in numbers) or None
    status = read_fields(root / "proc/self/status") or {}
    allowed = parse_cpu_list(status.get("Cpus_allowed_list"))
    if online is None or allowed is None:
        return online or allowed
    return online & allowed


def parse_cpu_list(text: str | None) -> frozenset[int] | None:
    """CPU numbers of a kernel list such as `0-3,8`; None if it is none."""
    cpus: set[int] = set()
    for part in (text or "").split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(last) < _MAX_LISTED_CPUS):
            return None
        cpus.update(range(int(first), int(last) + 1))
    return frozenset(cpus)


def _physical_cores(
    root: Path, rows: list[dict[str, str]], allowed: frozenset[int] | None
) -> int | None:
    """Cores that have at least one allowed thread; None if the topology is hidden."""
    if not allowed:
        return None
    siblings = {_siblings(root, cpu) for cpu in allowed}
    if None not in siblings:
        return len(siblings)
    cores = {
        int(row["processor"]): (row.get("physical id"), row.get("core id"))
        for row in rows
        if row.get("processor", "").isdecimal()
    }
    found = {cores.get(cpu, (None, None)) for cpu in allowed}
    return None if any(None in core for core in found) else len(found)


def _siblings(root: Path, cpu: int) -> frozenset[int] | None:
    """The threads of the core that this CPU is one of."""
    topology = root / _CPU_FOLDER / f"cpu{cpu}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second was renamed in Linux 5.3
        threads = parse_cpu_list(read_line(topology / name))
        if threads is not None:
            return threads
    return None


def _simd(rows: list[dict[str, str]]) -> tuple[str, ...] | None:
    """What every CPU of the machine has: threads may run on any of them."""
    flags = [
        frozenset(row.get("flags", row.get("Features", "")).split())
        for row in rows
        if "flags" in row or "Features" in row
    ]
    if not flags:
        return None
    common = frozenset.intersection(*flags)
    return tuple(name for flag, name in _SIMD.items() if flag in common)
