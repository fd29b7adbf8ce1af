"""What a command line asks for, as far as a measurement must know it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tunerd.core.bench.trust import Speculation
from tunerd.core.flags import normal_spelling, owner_of

_OFF_WORDS = frozenset({"none", "off"})
_NEGATIONS = ("-no-", "--no-")
OFF_FOR_ONE_REQUEST = {"speculative.n_max": 0}
"""What ik takes with a request to draft nothing for it; mainline ignores it without a word."""


def speculation_of(argv: Sequence[str]) -> Speculation:
    """Whether a server with these arguments is meant to draft.

    None of the known flags leaves it open: a build may draft by itself, or by its environment.
    """
    drafts: bool | None = None
    p_min: float | None = None
    n_max: float | None = None
    for key, flag, value in _speculation_flags(argv):
        if key == "speculation.type":
            drafts = _is_on(flag, value)
            stage = _stage(value)
            p_min = stage.get("p_min", p_min)
            n_max = stage.get("n_max", n_max)
        elif key == "speculation.draft_model" and drafts is None:
            drafts = True
        elif key == "speculation.p_min":
            p_min = _number(value)
        elif key == "speculation.n_max":
            n_max = _number(value)
    if drafts and n_max == 0:
        drafts = False
    return Speculation(drafts, always=bool(drafts) and p_min == 0)


def _speculation_flags(argv: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for word, value in itertools.pairwise([*argv[1:], ""]):
        key = owner_of(word) if word.startswith("-") else None
        if key is not None and key.startswith("speculation."):
            yield key, normal_spelling(word), value


def _is_on(flag: str, value: str) -> bool:
    if flag.startswith(_NEGATIONS):
        return False
    return flag != "--spec-type" or value.partition(":")[0] not in _OFF_WORDS


def _stage(value: str) -> dict[str, float]:
    """The numbers of ik's `mtp:n_max=3,p_min=0.5`."""
    pairs = (part.partition("=") for part in value.partition(":")[2].split(","))
    found = {name: _number(text) for name, _, text in pairs}
    return {name: number for name, number in found.items() if number is not None}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def is_same_command(argv: Sequence[str], cmdline: Sequence[str] | None) -> bool | None:
    """Whether a process runs with exactly these arguments; None where its own are not known.

    The program itself may be a script, and stand behind its interpreter.
    """
    if not cmdline:
        return None
    arguments = tuple(argv[1:])
    if not arguments:
        return None
    return tuple(cmdline[-len(arguments) :]) == arguments
