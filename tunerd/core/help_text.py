"""Reads the `--help` of a llama-server build into options.

Two layouts are in the field: mainline and its forks print options from the first column and
describe them from column 40; ik_llama.cpp indents options by up to nine columns and describes
them from column 34. Both wrap long descriptions. Source: captured help texts of seven builds in
tests/unit/data/help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# The text comes from a program that is not trusted yet. Real builds print up to 60,000 characters,
# lines of up to 216 and descriptions of up to 993.
MAX_HELP_CHARS = 1_000_000
_MAX_LINE_CHARS = 2_000
_MAX_DESCRIPTION_CHARS = 10_000
_MAX_OPTION_INDENT = 12
_SPELLING = re.compile(r"--?[A-Za-z][A-Za-z0-9_.-]*(?:\(s\))?")
_DEFAULT = re.compile(r"\(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)|, default: ([^\s,;)]+)")
_ENV = re.compile(r"\(env: ([A-Z0-9_]+)\)")
_ALLOWED = re.compile(r"allowed values: ([A-Za-z0-9_, ]+)")
_GAP = re.compile(r",?[ \t]*")
_PLACEHOLDER = re.compile(r"(?:\S| (?! ))+")
# ik prints `-ctx-ckpt N, --ctx-checkpoints N`: a placeholder between two spellings.
_BETWEEN = re.compile(r"([^\s,]+), (?=--?[A-Za-z])")


@dataclass(frozen=True, slots=True)
class Option:
    """One entry of a help text.

    `argument` is the placeholder as printed (`N`, `[on|off|auto]`), empty for a bare switch.
    `default` is None where the text names none. A removed option is listed but refused by the
    program; a deprecated one still works.
    """

    spellings: tuple[str, ...]
    argument: str
    description: str
    default: str | None
    env: str | None
    is_removed: bool
    is_deprecated: bool

    @property
    def allowed_values(self) -> tuple[str, ...]:
        """The values after `allowed values:`; empty where the text lists none."""
        found = _ALLOWED.search(self.description)
        if found is None:
            return ()
        return tuple(value for value in re.split(r"[,\s]+", found.group(1)) if value)


@dataclass(frozen=True, slots=True)
class HelpText:
    """All options of one build, by spelling."""

    options: tuple[Option, ...]
    text: str

    def option(self, spelling: str) -> Option | None:
        """The entry that lists this spelling, live entries before removed ones."""
        found = [option for option in self.options if spelling in option.spellings]
        return min(found, key=lambda option: option.is_removed, default=None)

    @property
    def live_spellings(self) -> frozenset[str]:
        """Every spelling that some entry lists as working."""
        return frozenset(
            spelling
            for option in self.options
            if not option.is_removed
            for spelling in option.spellings
        )


def parse_help(text: str) -> HelpText:
    """The options of a help text; entries that cannot be read are left out.

    Only the first `MAX_HELP_CHARS` characters are looked at, and of each line and description only
    the beginning.
    """
    text = text[:MAX_HELP_CHARS]
    return HelpText(tuple(_options(text)), text)


def _options(text: str) -> Iterator[Option]:
    head: str | None = None
    body: list[str] = []
    for whole_line in text.splitlines():
        line = whole_line[:_MAX_LINE_CHARS]
        stripped = line.strip()
        if not stripped:  # descriptions have blank lines within
            continue
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("-") and indent <= _MAX_OPTION_INDENT and _SPELLING.match(stripped):
            if head is not None:
                yield _option(head, body)
            head, body = stripped, []
        elif head is not None and indent > _MAX_OPTION_INDENT:
            body.append(stripped)
        elif head is not None:
            yield _option(head, body)
            head, body = None, []
    if head is not None:
        yield _option(head, body)


def _option(head: str, body: list[str]) -> Option:
    spellings, argument, rest = _split_head(head)
    description = " ".join(part for part in (rest, *body) if part)[:_MAX_DESCRIPTION_CHARS]
    default = _DEFAULT.search(description)
    env = _ENV.search(description)
    return Option(
        spellings=spellings,
        argument=argument,
        description=description,
        default=None if default is None else (default.group(1) or default.group(2) or "").strip(),
        env=None if env is None else env.group(1),
        is_removed="the argument has been removed" in description,
        is_deprecated=description.startswith("DEPRECATED"),
    )


def _split_head(head: str) -> tuple[tuple[str, ...], str, str]:
    """Spellings, argument placeholder, and what follows on the same line.

    A placeholder stands one blank after the last spelling, a description at least two.
    """
    spellings: list[str] = []
    argument = ""
    position = 0
    while (found := _SPELLING.match(head, position)) is not None:
        spellings.append(found.group().removesuffix("(s)"))
        blanks = _GAP.match(head, found.end())
        gap = blanks.group() if blanks is not None else ""
        position = found.end() + len(gap)
        if _SPELLING.match(head, position) and ("," in gap or len(gap) == 1):
            continue
        if gap not in {" ", ", "}:
            break
        between = _BETWEEN.match(head, position)
        if between is not None:
            argument = between.group(1)
            position = between.end()
            continue
        placeholder = _PLACEHOLDER.match(head, position)
        if placeholder is not None:
            argument = placeholder.group().strip()
            position = placeholder.end()
        break
    return tuple(spellings), argument.rstrip(","), head[position:].strip()
