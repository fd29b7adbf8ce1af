"""A sweep's outcome in words."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.core.sweep.arm import Arm, as_arm
from tunerd.core.sweep.evidence import KEEP, PROMOTE, Outcome

_NAMES = ("engine", "spec", "n_max", "p_min", "fit_mib", "kv", "ubatch", "batch", "threads")


def sentence_of(outcome: Outcome, incumbent: Arm, workload: str) -> str:
    """The verdict for people."""
    why = "; ".join(outcome.evidence.reasons)
    if outcome.verdict == PROMOTE:
        what = changed(as_arm(outcome.arm), incumbent)
        return f"promote: on {workload}, {what} is {why}"
    if outcome.verdict == KEEP:
        return f"keep what serves: on {workload} {why}"
    return f"inconclusive: {why}"


def changed(arm: Arm, incumbent: Arm) -> str:
    """In which attributes an arm differs from another."""
    parts: Sequence[str] = [
        f"{name} {getattr(incumbent, name)} -> {getattr(arm, name)}"
        for name in _NAMES
        if getattr(arm, name) != getattr(incumbent, name)
        and not (name == "fit_mib" and arm.is_placed)
    ]
    extra = [f"{key} = {value}" for key, value in sorted(arm.extra - incumbent.extra, key=str)]
    return ", ".join([*parts, *extra]) or "nothing"
