"""Names that people give and that become names of files: what they may look like."""

from __future__ import annotations

import re

from tunerd.errors import UsageError

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile(r"[0-9]{1,12}")


def is_name(text: str) -> bool:
    """Whether a text may name a profile or a workload: it never leads out of its folder."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str, *, of: str) -> None:
    """Refuse what cannot be a name, before anything is read or written by it.

    Args:
        text: As typed.
        of: What it would name, such as `a profile`.

    Raises:
        UsageError: it does not match the pattern of names.
    """
    if not is_name(text):
        raise UsageError(
            f"`{text}` cannot be the name of {of}",
            cause=f"allowed: {NAME_PATTERN}",
            state="nothing was touched",
            hint="a letter or digit, then letters, digits, `.`, `_` and `-`; at most 100",
        )


def generation_number(text: str) -> int | None:
    """The number of a generation as typed; None for any other word, such as a name."""
    return int(text) if _NUMBER.fullmatch(text) else None
