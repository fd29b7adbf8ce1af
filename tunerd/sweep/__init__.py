"""Better settings: space, laws, search, night, promotion, schedule.

Whoever only shows sweeps does not pay for the search, so `tune` is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunerd.profile.arm import Arm, Boot, Family, Policy, Preempted, Refused, ServerDied, Space
from tunerd.profile.workload import RequestClass, Workload

if TYPE_CHECKING:
    from tunerd.sweep.tuner import tune

__all__ = [
    "Arm", "Boot", "Family", "Policy", "Preempted", "Refused", "RequestClass", "ServerDied", "Space",
    "Workload", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "tune":
        raise AttributeError(f"tunerd.sweep has no {name}")
    from tunerd.sweep.tuner import tune

    return tune
