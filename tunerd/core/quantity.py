"""Quantities with their units: memory in MiB, durations in seconds, and how people read them."""

from __future__ import annotations

from typing import NewType

MiB = NewType("MiB", int)

BYTES_PER_MIB = 1024 * 1024
_TENTHS_BELOW_S = 10
_SECONDS_PER_MINUTE = 60
_SECONDS_PER_HOUR = 3600
_MIB_PER_GIB = 1024


def have_mib(n_bytes: int) -> MiB:
    """MiB of something that is there, rounded down."""
    return MiB(n_bytes // BYTES_PER_MIB)


def need_mib(n_bytes: float) -> MiB:
    """MiB of something that will be needed, rounded up."""
    return MiB(int(-(-n_bytes // BYTES_PER_MIB)))


def format_mib(mib: int | None) -> str:
    """`11902 MiB`, or `unknown`; from 10 GiB on with the GiB beside it."""
    if mib is None:
        return "unknown"
    if abs(mib) >= 10 * _MIB_PER_GIB:
        return f"{mib} MiB ({mib / _MIB_PER_GIB:.1f} GiB)"
    return f"{mib} MiB"


def format_duration(seconds: float | None) -> str:
    """`0.4 s`, `42 s`, `3 min 05 s`, `2 h 10 min`, or `unknown`."""
    if seconds is None:
        return "unknown"
    if seconds < _TENTHS_BELOW_S:
        return f"{seconds:.1f} s"
    if seconds < _SECONDS_PER_MINUTE:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < _SECONDS_PER_HOUR:
        return f"{whole // _SECONDS_PER_MINUTE} min {whole % _SECONDS_PER_MINUTE:02d} s"
    return (
        f"{whole // _SECONDS_PER_HOUR} h {whole % _SECONDS_PER_HOUR // _SECONDS_PER_MINUTE:02d} min"
    )
