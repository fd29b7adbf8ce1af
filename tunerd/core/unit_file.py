"""systemd unit text: reading it as systemd does, and writing values that read back unchanged.

Text is `str`; bytes that are not UTF-8 are lone surrogates (`errors="surrogateescape"`), so nothing
is lost between a file, its directives and an argument list. What is done with a command line after
this file has cut it out is in `exec_start.py`.

Source: systemd's conf-parser.c, extract-word.c and env-util.c as they behave on 249 to 26x
(tests/e2e/test_quoting.py asks real ones).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunerd.errors import ConfigError

MAX_LINE_BYTES = 1024 * 1024 - 1
"""Longest logical line that systemd reads: LONG_LINE_MAX less one; above it the file does not load."""
MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""Longest argument that the kernel takes (MAX_ARG_STRLEN less the final NUL)."""
PORTABLE_ARGUMENT_BYTES = 4095
"""Longest argument that systemd 249 (Ubuntu 22.04) passes on; later versions go up to the kernel's."""
_MAX_PATH_BYTES = 4095
_MAX_NAME_BYTES = 255

_WHITESPACE = " \t\n\r"
# A line ends with any of the three marks, or several different ones; NUL always ends it.
_LINE_END = re.compile("\n\r?\0?|\r\n?\0?|\0")
_UNSAFE_IN_NAME = re.compile("[\x01-\x1f\x7f\"'\\\\]")
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_FOREIGN = re.compile(
    "[\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class Directive:
    """One `Name=value`; `line` is where it begins (from 1), `source` the file it came from."""

    section: str
    name: str
    value: str
    line: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """What systemd would say about a line; `is_fatal` when the whole file does not load."""

    line: int
    text: str
    is_fatal: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class UnitFile:
    """The directives of a unit in the order in which systemd applies them."""

    directives: tuple[Directive, ...]
    problems: tuple[Problem, ...] = ()

    def values(self, section: str, name: str) -> tuple[Directive, ...]:
        """What a list directive holds: all assignments after the last empty one."""
        kept: list[Directive] = []
        for directive in self.directives:
            if (directive.section, directive.name) != (section, name):
                continue
            if directive.value:
                kept.append(directive)
            else:
                kept.clear()
        return tuple(kept)

    def value(self, section: str, name: str) -> str | None:
        """What a single-valued directive holds: the last assignment, None if absent or emptied."""
        found = self.values(section, name)
        return found[-1].value if found else None

    def with_drop_in(self, drop_in: UnitFile) -> UnitFile:
        """This unit with a drop-in's directives after its own, as systemd reads them."""
        return UnitFile(
            self.directives + drop_in.directives,
            self.problems + drop_in.problems,
        )


def parse_unit(text: str, *, source: str = "") -> UnitFile:
    """The directives of one unit file or drop-in; never raises, what is odd is in `problems`."""
    directives: list[Directive] = []
    problems: list[Problem] = []
    section: str | None = None
    for number, line in _logical_lines(text):
        if not line:
            continue
        if len(line.encode("utf-8", "surrogateescape")) > MAX_LINE_BYTES:
            problems.append(Problem(number, "line is too long", is_fatal=True, source=source))
            break
        if not _is_clean_utf8(line):
            problems.append(Problem(number, "line is not UTF-8, ignored", source=source))
        elif line.startswith("["):
            if not line.endswith("]") or _UNSAFE_IN_NAME.search(line[1:-1]):
                refused = f"bad section header: {line}"
                problems.append(Problem(number, refused, is_fatal=True, source=source))
                break
            section = line[1:-1]
        elif "=" not in line:
            problems.append(Problem(number, f"no `=` in line, ignored: {line}", source=source))
        elif section is None:
            problems.append(
                Problem(number, f"outside of a section, ignored: {line}", source=source)
            )
        else:
            name, _, value = line.partition("=")
            stripped = value.strip(_WHITESPACE)
            directives.append(Directive(section, name.strip(_WHITESPACE), stripped, number, source))
    return UnitFile(tuple(directives), tuple(problems))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without white space around them, comments left out, continuations joined.

    A comment between continued lines is skipped and the continuation goes on; an empty line ends it.
    """
    joined: str | None = None
    first = 0
    for number, line in enumerate(_LINE_END.split(text.removeprefix("\ufeff")), start=1):
        if line.lstrip(_WHITESPACE).startswith(("#", ";")):
            continue
        if joined is None:
            joined, first = "", number
        joined += line
        if _ends_in_escape(joined):
            joined = joined[:-1] + " "
            continue
        yield first, joined.strip(_WHITESPACE)
        joined = None
    if joined is not None:
        yield first, joined.strip(_WHITESPACE)


def _ends_in_escape(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _is_clean_utf8(text: str) -> bool:
    return _FOREIGN.search(text) is None


def is_foreign(char: str) -> bool:
    """Whether systemd takes this character for broken UTF-8: raw bytes and noncharacters.

    Source: unichar_is_valid() in systemd's utf8.c.
    """
    return _FOREIGN.match(char) is not None


def quote_argument(argument: str, *, expands: bool = True) -> str:
    """`argument` as one word of `ExecStart=` that systemd turns back into exactly `argument`.

    Args:
        argument: May hold anything but NUL and what is not UTF-8.
        expands: Whether `$` is expanded where it will stand: true for a plain `ExecStart=`, false
            behind the prefix `:`, for the program itself and for `Environment=`.

    Raises:
        ConfigError: It cannot be represented, or is longer than the kernel takes.
    """
    if "\0" in argument:
        raise ConfigError(f"an argument cannot hold a NUL: {_shown(argument)}")
    if not _is_clean_utf8(argument):
        # It would run, but from then on `systemctl show` of the unit fails with "Invalid argument":
        # its answer goes over D-Bus, which takes UTF-8 alone. A unit that cannot be watched is not
        # deployed. Seen on systemd 252 and 262 (tests/e2e/test_quoting.py).
        raise ConfigError(
            f"an argument is not UTF-8, or has a Unicode noncharacter: {_shown(argument)}",
            hint="rename the file, or reach it by a symbolic link with a plain name",
        )
    if _n_bytes(argument) > MAX_ARGUMENT_BYTES:
        raise ConfigError(
            f"an argument is longer than {MAX_ARGUMENT_BYTES} bytes: {_shown(argument)}",
            hint="long texts belong in a file that the program reads",
        )
    return '"' + "".join(_escaped(char, expands=expands) for char in argument) + '"'


def _escaped(char: str, *, expands: bool) -> str:
    if char == "$":
        return "$$" if expands else "$"
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char < " " or char == "\x7f":
        return f"\\x{ord(char):02x}"
    return char


def quote_program(path: str) -> str:
    """`path` as the first word of `ExecStart=`.

    Raises:
        ConfigError: systemd would refuse it as an executable: not absolute, or with quotes,
            backslashes or control characters, which no quoting gets through.
    """
    if not path.startswith("/"):
        raise ConfigError(f"the program's path is not absolute: {_shown(path)}")
    if "\0" in path or _UNSAFE_IN_NAME.search(path) or not _is_clean_utf8(path):
        raise ConfigError(
            f"systemd refuses this program's path: {_shown(path)}",
            cause="quotes, backslashes, control characters and bytes that are not UTF-8 are "
            "not allowed in the path of a program",
            hint="reach the program by a symbolic link with a plain name",
        )
    if path.endswith("/"):
        raise ConfigError(f"the program's path is a folder: {_shown(path)}")
    parts = path.split("/")
    if _n_bytes(path) > _MAX_PATH_BYTES or any(_n_bytes(part) > _MAX_NAME_BYTES for part in parts):
        raise ConfigError(f"the program's path is too long: {_shown(path)}")
    return quote_argument(path, expands=False)


def exec_words(argv: Sequence[str]) -> tuple[str, ...]:
    """The quoted words of an `ExecStart=` after which the program sees exactly `argv`.

    Raises:
        ConfigError: One cannot be represented: see `quote_program` and `quote_argument`.
    """
    program = quote_program(argv[0])
    arguments = tuple(quote_argument(argument) for argument in argv[1:])
    if "$" in argv[0]:
        # The path is taken as it is, but its copy in argv[0] is expanded: give that one by itself.
        return ("@" + program, quote_argument(argv[0]), *arguments)
    return (program, *arguments)


def exec_line(argv: Sequence[str]) -> str:
    """`argv` as the whole value of `ExecStart=` on one line.

    Raises:
        ConfigError: As `exec_words`, or the line would be longer than systemd reads.
    """
    line = " ".join(exec_words(argv))
    if _n_bytes("ExecStart=" + line) > MAX_LINE_BYTES:
        raise ConfigError(
            f"the command line is longer than a unit's line may be: {MAX_LINE_BYTES} bytes",
            hint="long texts belong in a file that the program reads",
        )
    return line


def argument_warnings(argv: Sequence[str]) -> tuple[str, ...]:
    """What works on today's systemd but not on the oldest that is supported."""
    return tuple(
        f"argument {index} has {_n_bytes(argument)} bytes; "
        f"systemd 249 takes no more than {PORTABLE_ARGUMENT_BYTES}: {_shown(argument)}"
        for index, argument in enumerate(argv)
        if _n_bytes(argument) > PORTABLE_ARGUMENT_BYTES
    )


def quote_environment(name: str, value: str) -> str:
    """`NAME=value` as one word of `Environment=`.

    Raises:
        ConfigError: The name is none, or the value holds a NUL or what is not UTF-8.
    """
    if not _ENV_NAME.fullmatch(name):
        raise ConfigError(f"not a name for an environment variable: {_shown(name)}")
    return quote_argument(f"{name}={value}", expands=False)


def plain_value(text: str) -> str:
    """`text` as the whole value of a directive that knows no quotes (`Description=`, paths).

    Raises:
        ConfigError: It would read back as something else: control characters, white space at an
            end, a backslash at the end (which continues the line), or not UTF-8.
    """
    if _CONTROL.search(text) or not _is_clean_utf8(text):
        raise ConfigError(f"a unit's directive cannot hold this value: {_shown(text)}")
    if text != text.strip(_WHITESPACE) or text.endswith("\\"):
        raise ConfigError(
            f"a unit's directive would not keep the end of this value: {_shown(text)}"
        )
    return text.replace("%", "%%")


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _shown(text: str, *, limit: int = 60) -> str:
    cut = text if len(text) <= limit else text[:limit] + "..."
    return ascii(cut)
