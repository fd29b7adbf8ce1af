"""Cuts an argument vector into flags, each with as many values as the build's help says it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunerd.core.engine import Capabilities
from tunerd.core.flags import ALL_FLAGS, SwitchFlag, normal_spelling, owner_of
from tunerd.core.help_text import HelpText

_SWITCHES = frozenset(
    {
        *(word for row in ALL_FLAGS if isinstance(row, SwitchFlag) for word in (*row.on, *row.off)),
        "--mlock",
        "--no-mmap",
        "--mmap",
        "--direct-io",
        "--no-direct-io",
        "--multi-token-prediction",
        "-mtp",
    }
)
# They take a value, but ik's help shows no placeholder.
_WITH_VALUE = frozenset({"--reasoning", "-rea", "--reasoning-budget-message"})


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values, as it stood on the command line or in the environment."""

    word: str
    values: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """As typed."""
        return (self.word, *self.values)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A flag that no profile can hold, and why."""

    words: tuple[str, ...]
    reason: str


def split_flags(
    arguments: Sequence[str], help_text: HelpText, unplaced: list[Unplaced]
) -> Iterator[Flag]:
    """The flags of an argument vector; what the build does not list goes to `unplaced`."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        takes = _n_values(word, help_text)
        values = list(arguments[position : position + (takes or 0)])
        position += len(values)
        # There are no positional arguments, and ik's help leaves some placeholders out.
        while owner_of(word) is None and position < len(arguments):
            if _is_flag(arguments[position]):
                break
            values.append(arguments[position])
            position += 1
        if takes is None:
            unplaced.append(Unplaced((word, *values), "this build does not list it"))
        elif len(values) < takes:
            unplaced.append(Unplaced((word, *values), "its value is missing"))
        else:
            yield Flag(word, tuple(values))


def unlisted_flags(
    arguments: Sequence[str], help_text: HelpText, capabilities: Capabilities
) -> tuple[str, ...]:
    """The flags among arguments that a build does not list as working, each once, as typed."""
    unplaced: list[Unplaced] = []
    words = [flag.word for flag in split_flags(arguments, help_text, unplaced)]
    words += [one.words[0] for one in unplaced if _is_flag(one.words[0])]
    listed = capabilities.flags
    return tuple(
        dict.fromkeys(
            word for word in words if word not in listed and _with_dashes(word) not in listed
        )
    )


def _with_dashes(word: str) -> str:
    """Long flags take `_` for `-` in every build."""
    return "--" + word[2:].replace("_", "-") if word.startswith("--") else word


def is_switch(word: str) -> bool:
    """Whether a flag that a key renders stands alone."""
    return normal_spelling(word) in _SWITCHES


def _n_values(word: str, help_text: HelpText) -> int | None:
    """How many values a flag takes; None if neither the help nor any key knows it."""
    option = help_text.option(word) or help_text.option(normal_spelling(word))
    if option is None and word.startswith("--"):
        option = help_text.option(_with_dashes(word))
    if option is None:
        return None if owner_of(word) is None else int(not is_switch(word))
    if not option.argument:
        return int(word in _WITH_VALUE)
    return 2 if re.fullmatch(r"[A-Z]+ [A-Z]+", option.argument) else 1


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None
