"""The difference between two units as people read it."""

from __future__ import annotations

import difflib


def unified_diff(old: str | None, new: str | None, unit: str) -> str:
    """The difference between two units as people read it; empty if there is none."""
    lines = difflib.unified_diff(
        (old or "").splitlines(),
        (new or "").splitlines(),
        fromfile=f"{unit} (live)" if old is not None else "(no unit)",
        tofile=f"{unit} (planned)" if new is not None else "(no unit)",
        lineterm="",
    )
    return "\n".join(lines)
