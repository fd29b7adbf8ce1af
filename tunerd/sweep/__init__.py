"""Better settings: space, laws, search, night, promotion, schedule.

Whoever only shows sweeps does not pay for the search, so this face imports what is asked of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunerd.profile.arm import (
        Arm,
        Boot,
        Family,
        Policy,
        Preempted,
        Refused,
        ServerDied,
        Space,
    )
    from tunerd.profile.workload import RequestClass, Workload
    from tunerd.sweep.tuner import tune

__all__ = [
    "Arm",
    "Boot",
    "Family",
    "Policy",
    "Preempted",
    "Refused",
    "RequestClass",
    "ServerDied",
    "Space",
    "Workload",
    "tune",
]
_ELSEWHERE = {
    **dict.fromkeys(("RequestClass", "Workload"), "tunerd.profile.workload"),
    "tune": "tunerd.sweep.tuner",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"tunerd.sweep has no {name}")
    return getattr(import_module(_ELSEWHERE.get(name, "tunerd.profile.arm")), name)
