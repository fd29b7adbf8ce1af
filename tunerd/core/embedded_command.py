"""Reads the command line of the embedded server, and writes its help, as llama-server does.

Source: llama.cpp's `common/arg.cpp` as of August to November 2026: errors, their order and the
layout of the help were compared with those of real builds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunerd.core.embedded_options import BY_SPELLING, SECTIONS, Option
from tunerd.core.embedded_values import BadValueError, Setting

_TEXT_COLUMN = 40
_TEXT_WIDTH = 70
_SHORT_WIDTH = 7

NOTES = """\
Environment variables named LLAMA_ARG_* are not read: every setting comes from the command line.
Options of llama-server that are not listed here are refused.
"""


class BadCommandLineError(Exception):
    """A command line that llama-server refuses; the text is what it prints before it exits with 1."""


@dataclass(frozen=True, slots=True)
class Files:
    """How to look at files that options name.

    `read` gives the text of a file and raises OSError or UnicodeDecodeError.
    """

    read: Callable[[str], str]
    is_folder: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line asks for: help, the version, or a server with these settings."""

    wants_help: bool
    wants_version: bool
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]


def parse_command(arguments: Sequence[str], files: Files) -> CommandLine:
    """The settings of a command line, in its order.

    Raises:
        BadCommandLineError: At the first argument that llama-server would refuse.
    """
    settings: list[Setting] = []
    warnings: list[str] = []
    seen: set[tuple[str, ...]] = set()
    wants_help = False
    remaining = iter(arguments)
    for argument in remaining:
        flag = "--" + argument[2:].replace("_", "-") if argument.startswith("--") else argument
        option = BY_SPELLING.get(flag)
        if option is None:
            raise BadCommandLineError(f"error: invalid argument: {flag}")
        if option.warning:
            warnings.append(option.warning)
        if option.spellings in seen and not option.may_repeat:
            warnings.append(
                f"W DEPRECATED: argument '{flag}' specified multiple times, use comma-separated"
                " values instead (only last value will be used)"
            )
        seen.add(option.spellings)
        wants_help = wants_help or "--help" in option.spellings
        if "--version" in option.spellings:  # llama-server looks at nothing that follows
            return CommandLine(wants_help=False, wants_version=True, settings=(), warnings=())
        try:
            settings.extend(_settings(option, flag, remaining, files))
        except BadValueError as error:
            raise BadCommandLineError(
                f'error while handling argument "{flag}": {error}\n\n'
                f"usage:\n{option_text(option)}\n\nto show complete usage, run with -h"
            ) from error
    return CommandLine(
        wants_help, wants_version=False, settings=tuple(settings), warnings=tuple(warnings)
    )


def _settings(
    option: Option, flag: str, remaining: Iterator[str], files: Files
) -> Iterator[Setting]:
    if option.argument is None:
        yield from option.apply(flag not in option.negations)
        return
    value = next(remaining, None)
    if value is None:
        raise BadValueError("expected value for argument")
    if option.is_removed:
        raise BadValueError(option.description)
    if option.is_file:
        try:
            value = files.read(value)
        except (OSError, UnicodeDecodeError) as error:
            raise BadValueError(f"error: failed to open file '{value}'\n") from error
    if option.is_folder and not files.is_folder(value):
        raise BadValueError(f"not a directory: {value}")
    yield from option.apply(option.read(value))


def help_text() -> str:
    """What `--help` prints."""
    parts = []
    for section in SECTIONS:
        entries = "".join(option_text(option) for option in section.options)
        parts.append(f"----- {section.title} -----\n\n{entries}\n\n")
    return "".join(parts) + NOTES


def option_text(option: Option) -> str:
    """One entry of the help: spellings, and from column 40 what the option does."""
    spellings = [*option.spellings, *option.negations]
    head = spellings[0]
    if len(spellings) > 1:
        head += ","
        head = head.ljust(_SHORT_WIDTH) if len(head) < _SHORT_WIDTH else head + " "
        head += ", ".join(spellings[1:])
    if option.argument is not None:
        head += f" {option.argument}"
    lines = [
        part
        for line in option.description.splitlines()
        for part in textwrap.wrap(line, _TEXT_WIDTH, break_on_hyphens=False)
    ]
    indent = " " * _TEXT_COLUMN
    first = head.ljust(_TEXT_COLUMN) if len(head) < _TEXT_COLUMN - 1 else f"{head}\n{indent}"
    return first + f"\n{indent}".join(lines) + "\n"
