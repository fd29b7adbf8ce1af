"""Environment of a unit: `Environment=` values and the files that `EnvironmentFile=` names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tunerd.core.exec_start import assignment_words, expand_specifiers
from tunerd.core.unit_file import UnitFile, is_foreign
from tunerd.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHITESPACE = " \t\n\r"
_NEWLINE = "\n\r"
_ESCAPED_IN_DOUBLE_QUOTES = '"\\`$'


@dataclass(frozen=True, slots=True)
class Assignments:
    """Variables in the order given, later ones of the same name last; `notes` says what was dropped."""

    pairs: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvironmentFile:
    """One `EnvironmentFile=`; `is_optional` when a missing file is no error (the prefix `-`)."""

    path: str
    is_optional: bool


def parse_environment(value: str, specifiers: Mapping[str, str]) -> Assignments:
    """The assignments of one `Environment=` value."""
    pairs: list[tuple[str, str]] = []
    notes: list[str] = []
    try:
        for word in assignment_words(value):
            _add_expanded(word, specifiers, pairs, notes)
    except ConfigError as error:
        notes.append(error.message)
    return Assignments(tuple(pairs), tuple(notes))


def _add_expanded(
    word: str, specifiers: Mapping[str, str], pairs: list[tuple[str, str]], notes: list[str]
) -> None:
    try:
        text, unknown = expand_specifiers(word, specifiers)
    except ConfigError as error:
        notes.append(error.message)
        return
    notes.extend(unknown)
    _add(text, pairs, notes)


def environment_of(unit: UnitFile, specifiers: Mapping[str, str]) -> Assignments:
    """What all `Environment=` of a unit set together; files come on top of it."""
    variables: dict[str, str] = {}
    notes: list[str] = []
    for directive in unit.values("Service", "Environment"):
        parsed = parse_environment(directive.value, specifiers)
        variables.update(parsed.pairs)
        notes.extend(parsed.notes)
    return Assignments(tuple(variables.items()), tuple(notes))


def environment_files_of(
    unit: UnitFile, specifiers: Mapping[str, str]
) -> tuple[EnvironmentFile, ...]:
    """The files that a unit reads its environment from, in order; a path may be a glob pattern."""
    files: list[EnvironmentFile] = []
    for directive in unit.values("Service", "EnvironmentFile"):
        try:
            path, _ = expand_specifiers(directive.value, specifiers)
        except ConfigError:
            continue  # systemd ignores it too
        files.append(EnvironmentFile(path.removeprefix("-"), path.startswith("-")))
    return tuple(files)


def parse_environment_file(text: str) -> Assignments:
    """The assignments of an environment file, in systemd's shell-like syntax.

    Comments begin a line with `#` or `;`. Quotes may be mixed in one value, a backslash outside of
    single quotes takes the next character literally (in double quotes only some), and one at the
    end of a line continues it. Nothing is expanded.
    """
    scanner = _FileScanner()
    for char in text.split("\0", 1)[0]:
        scanner.take(char)
    scanner.end()
    return Assignments(tuple(scanner.pairs), tuple(scanner.notes))


class _FileScanner:
    """The state of reading an environment file, one character at a time."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self._take = self._before_key
        self._key = ""
        self._value = ""
        # Where white space at the value's end begins; None while it does not end in any.
        self._blank_from: int | None = None

    def take(self, char: str) -> None:
        self._take(char)

    def end(self) -> None:
        outside = (self._before_key, self._in_key, self._in_comment, self._in_comment_escape)
        if self._take not in outside:
            self._push(is_plain=self._take == self._in_value)

    def _before_key(self, char: str) -> None:
        if char in "#;":
            self._take = self._in_comment
        elif char not in _WHITESPACE:
            self._key, self._take = char, self._in_key

    def _in_key(self, char: str) -> None:
        if char in _NEWLINE:
            self.notes.append(f"no `=` in line, ignored: {self._key}")
            self._take = self._before_key
        elif char == "=":
            self._value, self._blank_from, self._take = "", None, self._before_value
        else:
            self._key += char

    def _before_value(self, char: str) -> None:
        if char in _NEWLINE:
            self._push(is_plain=False)
        elif char == "'":
            self._take = self._in_single_quotes
        elif char == '"':
            self._take = self._in_double_quotes
        elif char == "\\":
            self._take = self._in_escape
        elif char not in _WHITESPACE:
            self._value += char
            self._take = self._in_value

    def _in_value(self, char: str) -> None:
        if char in _NEWLINE:
            self._push(is_plain=True)
        elif char == "\\":
            self._blank_from, self._take = None, self._in_escape
        else:
            if char not in _WHITESPACE:
                self._blank_from = None
            elif self._blank_from is None:
                self._blank_from = len(self._value)
            self._value += char

    def _in_escape(self, char: str) -> None:
        if char not in _NEWLINE:
            self._value += char
        self._take = self._in_value

    def _in_single_quotes(self, char: str) -> None:
        if char == "'":
            self._take = self._before_value
        else:
            self._value += char

    def _in_double_quotes(self, char: str) -> None:
        if char == '"':
            self._take = self._before_value
        elif char == "\\":
            self._take = self._in_double_quotes_escape
        else:
            self._value += char

    def _in_double_quotes_escape(self, char: str) -> None:
        if char in _ESCAPED_IN_DOUBLE_QUOTES:
            self._value += char
        elif char != "\n":
            self._value += "\\" + char
        self._take = self._in_double_quotes

    def _in_comment(self, char: str) -> None:
        if char == "\\":
            self._take = self._in_comment_escape
        elif char in _NEWLINE:
            self._take = self._before_key

    def _in_comment_escape(self, char: str) -> None:
        if char in _NEWLINE:
            self.notes.append(
                "a comment ends in a backslash: systemd before 254 skips the next line too"
            )
            self._take = self._before_key
        else:
            self._take = self._in_comment

    def _push(self, *, is_plain: bool) -> None:
        value = self._value
        if is_plain and self._blank_from is not None:
            value = value[: self._blank_from]
        _add(f"{self._key.rstrip(_WHITESPACE)}={value}", self.pairs, self.notes)
        self._take = self._before_key


def _add(assignment: str, pairs: list[tuple[str, str]], notes: list[str]) -> None:
    """Append an assignment that systemd would accept; note one that it would drop."""
    name, equals, value = assignment.partition("=")
    if not equals or not _NAME.fullmatch(name):
        notes.append(f"no assignment, ignored: {assignment!a}")
    elif any(is_foreign(char) for char in value):
        notes.append(f"value that is not UTF-8, ignored: {name}")
    else:
        pairs.append((name, value))
