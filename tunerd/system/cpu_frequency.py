"""How the kernel chooses the processor's clock; what cannot be read is None or left out."""

from __future__ import annotations

from pathlib import Path

from tunerd.core.host import CpuFrequency
from tunerd.system.proc import read_line

_FOLDER = "sys/devices/system/cpu"


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
    paths = sorted((root / _FOLDER).glob(f"cpu[0-9]*/cpufreq/{name}"))
    return tuple(sorted({line for path in paths if (line := read_line(path)) is not None}))
