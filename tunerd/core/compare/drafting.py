"""Whether one process of a side did what the side is meant to do."""

from __future__ import annotations

from collections.abc import Sequence


def not_as_meant(drafts: bool | None, drafted: Sequence[int | None]) -> str | None:
    """Why a process must not count for its side; None where nothing speaks against it.

    Args:
        drafts: Whether the side is meant to draft; None where nobody knows.
        drafted: Drafted tokens of each of its answers, the discarded ones too, as the process itself
            reported them; None where it reported nothing. A gate may keep single drafts back, so that
            only all answers together show that nothing drafts.
    """
    has_drafted = any(drafted)
    if drafts is True and not has_drafted:
        return f"it is meant to draft, and drafted nothing in {len(drafted)} answers"
    if drafts is False and has_drafted:
        return "it is meant not to draft, and drafted"
    return None
