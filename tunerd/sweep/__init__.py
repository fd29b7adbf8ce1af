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
        Box,
        Family,
        Policy,
        Preempted,
        Refused,
        Request,
        Sample,
        ServerDied,
        Space,
        sample_from_json,
    )
    from tunerd.profile.workload import RequestClass, Workload
    from tunerd.sweep.night import PathPoint
    from tunerd.sweep.tuner import Evidence, Outcome, tune

_ARM = ("Arm", "Boot", "Box", "Family", "Policy", "Preempted", "Refused", "Request", "Sample",
        "ServerDied", "Space", "sample_from_json")  # fmt: skip
_FACE = {
    **dict.fromkeys(_ARM, "tunerd.profile.arm"),
    **dict.fromkeys(("RequestClass", "Workload"), "tunerd.profile.workload"),
    **dict.fromkeys(("Evidence", "Outcome", "tune"), "tunerd.sweep.tuner"),
    "PathPoint": "tunerd.sweep.night",
}

__all__ = [
    "Arm",
    "Boot",
    "Box",
    "Evidence",
    "Family",
    "Outcome",
    "PathPoint",
    "Policy",
    "Preempted",
    "Refused",
    "Request",
    "RequestClass",
    "Sample",
    "ServerDied",
    "Space",
    "Workload",
    "sample_from_json",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"tunerd.sweep has no {name}")
    return getattr(import_module(_FACE[name]), name)
