"""What systemd makes of a command line: words, escapes, specifiers, variables.

The order is systemd's: quotes and escapes go first, then `%` specifiers, and `$` variables last,
when the process starts.

Source: extract-word.c, escape.c, specifier.c, env-util.c and load-fragment.c of systemd;
tests/e2e/test_quoting.py compares with real ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunerd.core.unit_file import is_foreign
from tunerd.errors import ConfigError

_WHITESPACE = b" \t\n\r"
_QUOTES = b"\"'"
_SIMPLE_ESCAPES = {
    ord("a"): b"\a",
    ord("b"): b"\b",
    ord("f"): b"\f",
    ord("n"): b"\n",
    ord("r"): b"\r",
    ord("t"): b"\t",
    ord("v"): b"\v",
    ord("s"): b" ",
    ord("\\"): b"\\",
    ord('"'): b'"',
    ord("'"): b"'",
}
_HEX_ESCAPE = re.compile(rb"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_OCTAL_ESCAPE = re.compile(rb"[0-3][0-7]{2}")
# A brace that is never closed, or holds a colon, is no variable and hides what stands in it.
_BRACED = re.compile(r"\$\$|\$\{([^}:]*)\}|\$\{[^}:]*(?::|$)")
_UNSAFE_IN_PATH = re.compile("[\x01-\x1f\x7f\"'\\\\]")
# All that systemd knows in a unit; other letters and digits are errors, other signs stay.
_SPECIFIERS = frozenset("aAbBCdDEfgGhHiIjJlLmMnNopPqsStTuUvVwWyY")
_MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class ExecCommand:
    """What would be executed.

    `prefixes` are the special characters in front of the path (`-@:+!|`), `argv` begins with what
    the program sees as its own name. `notes` says what did not go without a question: variables
    that are not set, specifiers that are not known here, escapes that systemd does not know.
    """

    prefixes: str
    path: str
    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


def parse_exec(
    value: str, environment: Mapping[str, str], specifiers: Mapping[str, str]
) -> ExecCommand:
    """The command of one `ExecStart=` value.

    Args:
        value: What stands behind `ExecStart=`.
        environment: What the process will be started with, for `$NAME` and `${NAME}`.
        specifiers: By letter (`{"h": "/root"}`); `%%` needs no entry, a letter without one is
            left as it stands and noted.

    Raises:
        ConfigError: systemd would refuse it: no program, a relative path, unbalanced quotes, a
            specifier that does not exist.
    """
    notes: list[str] = []
    words = [_decode(word) for word in _command_words(_encode(value), notes)]
    if not words:
        raise ConfigError("the command line is empty")
    first = words[0]
    rest = _after_prefixes(first)
    prefixes = first[: len(first) - len(rest)]
    path = _specified(rest, specifiers, notes)
    _check_program(path)
    argv = [_specified(word, specifiers, notes) for word in words[1:]]
    if "@" not in prefixes:
        argv.insert(0, path)
    elif not argv:
        raise ConfigError(f"the command line has no word for argv[0] behind `@`: {value}")
    expanded = argv if ":" in prefixes else expand_variables(argv, environment, notes)
    return ExecCommand(prefixes, path, tuple(expanded), tuple(dict.fromkeys(notes)))


def _command_words(value: bytes, notes: list[str]) -> Iterator[bytes]:
    """Words of the only command; a lone `;` would begin a second one."""
    at = 0
    while True:
        while at < len(value) and value[at] in _WHITESPACE:
            at += 1
        if at == len(value):
            return
        following = value[at + 1 : at + 2]
        if value[at : at + 1] == b";" and (not following or following in _WHITESPACE):
            if value[at + 1 :].strip(_WHITESPACE):
                raise ConfigError("several commands in one line; a server has one")
            return  # one that ends the line begins nothing
        if value[at : at + 2] == b"\\;" and value[at + 2 : at + 3].strip(_WHITESPACE) == b"":
            yield b";"
            at += 2
            continue
        try:
            word, at = _next_word(value, at)
        except _UnknownEscapeError:
            word, at = _next_word(value, at, keep_unknown=True)
            notes.append(f"escape that systemd does not know is kept: {_decode(word)}")
        yield word


def assignment_words(value: str) -> Iterator[str]:
    """The words of a list of assignments (`Environment=`), unquoted, one after the other.

    Raises:
        ConfigError: At the first word with unbalanced quotes or an escape that systemd does not
            know; the words before it count.
    """
    data = _encode(value)
    at = 0
    while True:
        while at < len(data) and data[at] in _WHITESPACE:
            at += 1
        if at == len(data):
            return
        try:
            word, at = _next_word(data, at)
        except _UnknownEscapeError as error:
            raise ConfigError(f"escape that systemd does not know: {value}") from error
        yield _decode(word)


class _UnknownEscapeError(Exception):
    """A backslash before something that is no escape."""


def _next_word(value: bytes, at: int, *, keep_unknown: bool = False) -> tuple[bytes, int]:
    """The word that begins at `at`, and where the one after it may begin."""
    word = bytearray()
    quote: int | None = None
    while at < len(value):
        byte = value[at]
        if byte == ord("\\"):
            escaped, length = _unescape(value[at + 1 : at + 10])
            if length == 0 and not keep_unknown:
                raise _UnknownEscapeError
            if length == 0:
                escaped = value[at : at + 2]
                length = len(escaped) - 1
            word += escaped
            at += 1 + length
            continue
        at += 1
        if quote is not None:
            if byte == quote:
                quote = None
            else:
                word.append(byte)
        elif byte in _QUOTES:
            quote = byte
        elif byte in _WHITESPACE:
            break
        else:
            word.append(byte)
    if quote is not None:
        raise ConfigError(f"unbalanced quotes in a command line: {_decode(value)}")
    return bytes(word), at


def _unescape(after: bytes) -> tuple[bytes, int]:
    """What stands for the escape whose text behind the backslash is `after`, and its length.

    The length is 0 where systemd knows no such escape.
    """
    simple = _SIMPLE_ESCAPES.get(after[0]) if after else None
    if simple is not None:
        return simple, 1
    octal = _OCTAL_ESCAPE.match(after)
    if octal is not None:
        code = int(octal.group(), 8)
        return (bytes([code]), 3) if code else (b"", 0)
    found = _HEX_ESCAPE.match(after)
    if found is None:
        return b"", 0
    code = int(found.group(found.lastindex or 0), 16)
    if code == 0:
        return b"", 0
    if found.lastindex == 1:
        return bytes([code]), found.end()
    if code > _MAX_CODE_POINT or is_foreign(chr(code)):
        return b"", 0
    return chr(code).encode(), found.end()


def _after_prefixes(word: str) -> str:
    """The word without its leading special characters, each counted once (`!` twice)."""
    privileged = {"+", "!"}
    seen: set[str] = set()
    at = 0
    while at < len(word):
        char = word[at]
        is_second_bang = char == "!" and "!" in seen and "!!" not in seen and "+" not in seen
        if is_second_bang:
            seen.add("!!")
        elif (char in "-@:|" and char not in seen) or (
            char in privileged and not seen & privileged
        ):
            seen.add(char)
        else:
            break
        at += 1
    return word[at:]


def _check_program(path: str) -> None:
    if not path:
        raise ConfigError("the command line has no program")
    if _UNSAFE_IN_PATH.search(path):
        raise ConfigError(f"the program's path has special characters: {path!r}")
    if path.endswith("/"):
        raise ConfigError(f"the program's path is a folder: {path}")
    if not path.startswith("/") and "/" in path:
        raise ConfigError(f"the program's path is neither absolute nor a bare name: {path}")


def expand_specifiers(text: str, specifiers: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """`text` with `%` specifiers put in, and notes on those that `specifiers` does not know.

    Raises:
        ConfigError: There is no such specifier.
    """
    notes: list[str] = []
    return _specified(text, specifiers, notes), tuple(notes)


def _specified(text: str, specifiers: Mapping[str, str], notes: list[str]) -> str:
    def replace(found: re.Match[str]) -> str:
        letter = found.group(1)
        if letter == "%":
            return "%"
        if letter in specifiers:
            return specifiers[letter]
        if letter in _SPECIFIERS:
            notes.append(f"specifier that is not known here is kept: %{letter}")
        elif letter.isascii() and letter.isalnum():
            raise ConfigError(f"no such specifier: %{letter} in {text}")
        return found.group()

    return re.sub(r"%(.)", replace, text, flags=re.DOTALL)


def expand_variables(
    argv: list[str], environment: Mapping[str, str], notes: list[str]
) -> list[str]:
    """`argv` with variables put in as systemd does when it starts a process.

    A word that is `$NAME` becomes as many words as its value has, possibly none; `${NAME}` is put
    in as it is; `$$` is a dollar sign; any other `$` stays.
    """
    expanded: list[str] = []
    for word in argv:
        if word.startswith("$") and word[1:2] not in {"{", "$"}:
            if word[1:] in environment:
                expanded.extend(_relaxed_words(environment[word[1:]]))
            else:
                notes.append(f"variable is not set: {word}")
            continue
        expanded.append(_put_in(word, environment, notes))
    return expanded


def _put_in(word: str, environment: Mapping[str, str], notes: list[str]) -> str:
    def replace(found: re.Match[str]) -> str:
        if found.group() == "$$":
            return "$"
        name: str | None = found.group(1)
        if name is None:
            return found.group()
        if name not in environment:
            notes.append(f"variable is not set: {found.group()}")
        return environment.get(name, "")

    return _BRACED.sub(replace, word)


def _relaxed_words(value: str) -> list[str]:
    """Words of a variable's value: quotes count, escapes lose their backslash, nothing is refused."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    characters = iter(value)
    for char in characters:
        if char == "\\":
            word = (word or "") + next(characters, "")
        elif quote:
            word = word or ""
            if char == quote:
                quote = ""
            else:
                word += char
        elif char in "\"'":
            quote, word = char, word or ""
        elif char in " \t\n\r":
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + char
    if word is not None:
        words.append(word)
    return words


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
