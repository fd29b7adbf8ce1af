"""systemd unit text: reading it as systemd does, and writing values that read back unchanged."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunerd.errors import ConfigError, DeployError
from tunerd.words import Mode, sha256

MAX_LINE_BYTES = 1024 * 1024 - 1
"""Longest logical line that systemd reads: LONG_LINE_MAX less one; above it the file does not load."""
MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""Longest argument that the kernel takes (MAX_ARG_STRLEN less the final NUL)."""

_UNIT_WHITESPACE = " \t\n\r"
# A line ends with any of the three marks, or several different ones; NUL always ends it.
_LINE_END = re.compile("\n\r?\0?|\r\n?\0?|\0")
# In names of sections and paths of programs.
_UNSAFE = re.compile("[\x01-\x1f\x7f\"'\\\\]")
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_FOREIGN = re.compile(
    "[\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_OF_UNIT = {
    "Description",
    "CollectMode",
    "StartLimitIntervalSec",
    "StartLimitBurst",
    "BindsTo",
    "After",
}
_MAX_SHOWN = 60
# What is a yes to systemd, in letters of either case.
TRUE = frozenset({"1", "yes", "y", "true", "t", "on"})
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class Directive:
    """One `Name=value`."""

    section: str
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class UnitFile:
    """The directives of a unit in the order in which systemd applies them.

    `problems` is what systemd would say about its lines; with `is_broken` the last of them keeps the
    whole file from being loaded.
    """

    directives: tuple[Directive, ...]
    problems: tuple[str, ...] = ()
    is_broken: bool = False

    def values(self, section: str, name: str) -> tuple[Directive, ...]:
        """What a list directive holds: all assignments after the last empty one.

        A name may be a pattern, where several fill one list.
        """
        kept: list[Directive] = []
        for directive in self.directives:
            if directive.section != section or not re.fullmatch(name, directive.name):
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
            self.is_broken or drop_in.is_broken,
        )


def parse_unit(text: str) -> UnitFile:
    """The directives of one unit file or drop-in; never raises, what is odd is in `problems`."""
    directives: list[Directive] = []
    problems: list[str] = []
    section: str | None = None
    for number, line in _logical_lines(text):
        name, equals, value = (part.strip(_UNIT_WHITESPACE) for part in line.partition("="))
        if not line:
            continue
        if _FOREIGN.search(line):
            problems.append(f"line {number}: not UTF-8, ignored")
        elif line.startswith("["):
            if not line.endswith("]") or _UNSAFE.search(line[1:-1]):
                problems.append(f"line {number}: bad section header: {line}")
                return UnitFile(tuple(directives), tuple(problems), is_broken=True)
            section = line[1:-1]
        elif not equals:
            problems.append(f"line {number}: no `=`, ignored: {line}")
        elif section is None:
            problems.append(f"line {number}: outside of a section, ignored: {line}")
        else:
            directives.append(Directive(section, name, value))
    return UnitFile(tuple(directives), tuple(problems))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without white space around them, comments left out, continuations joined.

    A comment between continued lines is skipped and the continuation goes on; an empty line ends it.
    """
    joined: list[str] = []
    first = 0
    for number, line in enumerate(_LINE_END.split(text.removeprefix("\ufeff")), start=1):
        if line.lstrip(_UNIT_WHITESPACE).startswith(("#", ";")):
            continue
        if not joined:
            first = number
        if _ends_in_escape(line):
            joined.append(line[:-1] + " ")
            continue
        yield first, "".join((*joined, line)).strip(_UNIT_WHITESPACE)
        joined.clear()
    if joined:
        yield first, "".join(joined).strip(_UNIT_WHITESPACE)


def _ends_in_escape(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


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
    if _FOREIGN.search(argument):
        # It would run, but from then on `systemctl show` of the unit fails with "Invalid argument":
        # its answer goes over D-Bus, which takes UTF-8 alone. A unit that cannot be watched is not
        # deployed. Seen on systemd 252 and 262 (tests/e2e/test_quoting.py).
        raise ConfigError(
            f"an argument is not UTF-8, or has a Unicode noncharacter: {_shown(argument)}",
            hint="rename the file, or reach it by a symbolic link with a plain name",
        )
    if len(argument.encode()) > MAX_ARGUMENT_BYTES:
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
    why = None if path.startswith("/") else "it is not absolute"
    why = why or _why_no_program(path)
    if why is not None:
        raise ConfigError(
            f"systemd refuses this program's path: {_shown(path)}",
            cause=why,
            hint="reach the program by a symbolic link with a plain name",
        )
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


def quote_environment(name: str, value: str) -> str:
    """`NAME=value` as one word of `Environment=`.

    Raises:
        ConfigError: The name is none, or the value holds a NUL or what is not UTF-8.
    """
    if not _ENV_NAME.fullmatch(name):
        raise ConfigError(f"not a name for an environment variable: {_shown(name)}")
    return quote_argument(f"{name}={value}", expands=False)


def transient_text(
    argv: Sequence[str], properties: Sequence[tuple[str, str]], environment: Mapping[str, str]
) -> str:
    """The unit file of a transient unit, for managers that know units by files alone."""
    of_unit = [f"{name}={value}" for name, value in properties if name in _OF_UNIT]
    of_service = [f"{name}={value}" for name, value in properties if name not in _OF_UNIT]
    words = [f"Environment={quote_environment(*one)}" for one in environment.items()]
    command = f"ExecStart={' '.join(exec_words(argv))}"
    return "\n".join(["[Unit]", *of_unit, "[Service]", *of_service, *words, command, ""])


def plain_value(text: str) -> str:
    """`text` as the whole value of a directive that knows no quotes (`Description=`, paths).

    Raises:
        ConfigError: It would read back as something else: control characters, white space at an
            end, a backslash at the end (which continues the line), or not UTF-8.
    """
    if _CONTROL.search(text) or _FOREIGN.search(text):
        raise ConfigError(f"a unit's directive cannot hold this value: {_shown(text)}")
    if text != text.strip(_UNIT_WHITESPACE) or text.endswith("\\"):
        raise ConfigError(f"a unit's directive would lose the end of this value: {_shown(text)}")
    return text.replace("%", "%%")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")


MARK = "Written by tunerd"
_PLACE = re.compile(r"@([A-Z_]+)@")
_PLAIN = re.compile(r"[^ -~]+")
_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d+)?")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,+-]+")
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Everything that goes into one unit.

    `unit_directives` and `service_directives` are (name, value) pairs whose values are already in
    systemd's syntax. `api_key_file` becomes a credential where there is systemd: it need not be
    readable for the account that serves. `work_dir` is where a unit in local mode is started. `mounts` are the units of
    mounts that it waits for. `wanted_by` is None for a unit that is never enabled.
    """

    unit: str
    mode: Mode
    profile: str
    engine: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    group: str | None = None
    api_key_file: str | None = None
    work_dir: str | None = None
    wants_mlock: bool = False
    binds_low: bool = False
    needs_home: bool = False
    restart: str = "on-failure"
    stop_timeout_s: int = 10
    mounts: Sequence[str] = ()
    unit_directives: Sequence[tuple[str, str]] = ()
    service_directives: Sequence[tuple[str, str]] = ()
    wanted_by: str | None = None


CREDENTIAL_PATH = "%d/api-key"


def render_unit(template: str, spec: UnitSpec) -> str:
    """The unit's text; the same spec always gives the same text.

    Raises:
        ConfigError: a value cannot be written in a unit file (NUL, or a program path that systemd
            refuses).
    """
    conditions = {
        **{str(mode): spec.mode is mode for mode in Mode},
        "mlock": spec.wants_mlock,
        "low-port": spec.binds_low and spec.mode is Mode.SYSTEM,
        "mounts": bool(spec.mounts),
        "install": spec.wanted_by is not None,
    }
    values = {
        "HEADER": f" {MARK}: {_text(f'profile {spec.profile}, engine {spec.engine}')}",
        "UNIT": spec.unit,
        "SYSTEMCTL": spec.mode.systemctl,
        "DESCRIPTION": _text(f"llama-server, profile {spec.profile}").replace("%", "%%"),
        "MOUNTS": " ".join(spec.mounts),
        "UNIT_DIRECTIVES": _lines(spec.unit_directives),
        "WORK_DIR": plain_value(spec.work_dir or "/"),
        "EXEC_START": _exec_start(spec),
        "SERVICE_DIRECTIVES": _lines(_service(spec)),
        "RESTART": spec.restart,
        "STOP_TIMEOUT_S": str(spec.stop_timeout_s),
        "PROTECT_HOME": "read-only" if spec.needs_home else "yes",
        "WANTED_BY": spec.wanted_by or "",
    }
    kept = _choose(template, conditions)
    for name, value in values.items():
        if not value:  # a place that stands alone on its line leaves no empty line behind
            kept = kept.replace(f"@{name}@\n", "")
    # One pass over the template: a value that looks like a place is not filled again.
    return _PLACE.sub(lambda place: values.get(place.group(1), place.group()), kept)


def is_ours(text: str) -> bool:
    """Whether a unit's text was rendered here."""
    return text.startswith(f"# {MARK}")


def _service(spec: UnitSpec) -> list[tuple[str, str]]:
    directives = [
        ("Environment", quote_environment(name, value))
        for name, value in sorted(spec.environment.items())
    ]
    if spec.user is not None and spec.mode is not Mode.USER:
        directives.append(("User", plain_value(spec.user)))
    if spec.group is not None and spec.mode is not Mode.USER:
        directives.append(("Group", plain_value(spec.group)))
    if spec.api_key_file is not None:
        source = _credential_source(spec.api_key_file)
        if spec.mode is not Mode.LOCAL:
            directives.append(("LoadCredential", f"api-key:{source}"))
    return [*directives, *spec.service_directives]


def _exec_start(spec: UnitSpec) -> str:
    """The command with one flag a line: people read the file, and compare it by diff."""
    words = exec_words(spec.argv)
    head = len(words) - len(spec.argv) + 1  # a program path with `$` takes two words
    is_plain = head == 1 and _PLAIN_WORD.fullmatch(spec.argv[0])
    lines = [spec.argv[0] if is_plain else " ".join(words[:head])]
    for raw, quoted in zip(spec.argv[1:], words[head:], strict=True):
        is_credential = raw == CREDENTIAL_PATH and spec.api_key_file is not None
        # systemd puts the credential's folder for %d; a plain word is easier to read unquoted
        word = raw if is_credential or _PLAIN_WORD.fullmatch(raw) else quoted
        if raw.startswith("-") and not _NEGATIVE_NUMBER.fullmatch(raw):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    text = " \\\n    ".join(lines)
    if len(text.encode("utf-8", "surrogateescape")) > MAX_LINE_BYTES:
        raise ConfigError(
            f"the command line is longer than a line of a unit may be ({MAX_LINE_BYTES} bytes)",
            hint="long texts belong in a file that the program reads",
        )
    return text


def _choose(template: str, conditions: Mapping[str, bool]) -> str:
    """The template without the blocks whose condition does not hold."""
    kept: list[str] = []
    holds = True
    for line in template.splitlines():
        if line.startswith("#@if "):
            holds = conditions[line.removeprefix("#@if ").strip()]
        elif line == "#@end":
            holds = True
        elif holds:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _lines(directives: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name}={value}" for name, value in directives)


def _credential_source(path: str) -> str:
    """A path for `LoadCredential=`, whose value is split at colons and knows no quotes."""
    if ":" in path:
        raise ConfigError(f"systemd cannot take a path with a colon as a credential: `{path}`")
    if not path.startswith("/"):
        raise ConfigError(f"serving.api_key_file is not an absolute path: `{path}`")
    return plain_value(path)


def _text(text: str) -> str:
    """Words for a comment or description: printable ASCII, one line, bounded."""
    return _PLAIN.sub("?", text)[:_MAX_TEXT].rstrip("\\")


def unified_diff(
    old: str | None, new: str | None, unit: str, *, names: tuple[str, str] = ("(live)", "(planned)")
) -> str:
    """The difference between two texts of a unit as people read it; empty if there is none."""
    lines = difflib.unified_diff(
        (old or "").splitlines(),
        (new or "").splitlines(),
        fromfile=f"{unit} {names[0]}" if old is not None else "(no unit)",
        tofile=f"{unit} {names[1]}" if new is not None else "(no unit)",
        lineterm="",
    )
    return "\n".join(lines)


def shown_hash(diff: str) -> str:
    """What stands for the difference that somebody was shown before they said yes."""
    return sha256(diff.encode("utf-8", "surrogateescape")) or ""


def demand_as_shown(diff: str, shown: str) -> None:
    """What would change is what a person agreed to: the difference, or what stands for it.

    Raises:
        DeployError: it is another one by now.
    """
    if shown not in {diff, shown_hash(diff)}:
        raise DeployError(
            "what would change is no longer what was shown",
            cause="a profile, the machine or the unit changed in the meantime",
            state="nothing was changed",
            hint="run the command again, to see what would change now",
        )


# Pieces of a word: in either quotes, which may be left open, or plain.
_PIECE = re.compile(
    r'"(?P<double>(?:\\.|[^"\\])*+)(?P<closed>")?|\'(?P<single>(?:\\.|[^\'\\])*+)(?P<shut>\')?'
    r"|(?P<plain>(?:\\(?:.|\Z)|[^ \t\n\r\"'\\])++)",
    re.DOTALL,
)
_SIMPLE_ESCAPES = dict(zip("abfnrtvs\\\"'", "\a\b\f\n\r\t\v \\\"'", strict=True))
_ESCAPE = re.compile(
    r"\\(?:x(?P<byte>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})"
    r"|(?P<octal>[0-3][0-7]{2})|(?P<simple>.))",
    re.DOTALL,
)
# A brace that is never closed, or holds a colon, is no variable and hides what stands in it.
_BRACED = re.compile(r"\$\$|\$\{([^}:]*)\}|\$\{[^}:]*(?::|$)")
_PREFIXES = "-@:|+!"
# All that systemd knows in a unit; other letters and digits are errors, other signs stay.
_SPECIFIERS = frozenset("aAbBCdDEfgGhHiIjJlLmMnNopPqsStTuUvVwWyY")
_MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class ExecCommand:
    """What would be executed.

    `prefixes` are the special characters in front of the path (`-@:+!|`), `argv` begins with what
    the program sees as its own name.
    """

    prefixes: str
    path: str
    argv: tuple[str, ...]


def parse_exec(
    value: str, environment: Mapping[str, str], specifiers: Mapping[str, str]
) -> ExecCommand:
    """The command of one `ExecStart=` value.

    Args:
        value: What stands behind `ExecStart=`.
        environment: What the process will be started with, for `$NAME` and `${NAME}`.
        specifiers: By letter (`{"h": "/root"}`); `%%` needs no entry, a letter without one is
            left as it stands.

    Raises:
        ConfigError: systemd would refuse it: no program, a relative path, unbalanced quotes, a
            specifier that does not exist.
    """
    words, *others = commands_of(value)
    if others:
        raise ConfigError("several commands in one line; a server has one")
    if not words:
        raise ConfigError("the command line is empty")
    path = words[0].lstrip(_PREFIXES)
    prefixes = words[0].removesuffix(path)
    path = expand_specifiers(path, specifiers)
    why = _why_no_program(path)
    if why is not None:
        raise ConfigError(f"the command line has no program: {why}: {value}")
    argv = [expand_specifiers(word, specifiers) for word in words[1:]]
    if "@" not in prefixes:
        argv.insert(0, path)
    elif not argv:
        raise ConfigError(f"the command line has no word for argv[0] after `@`: {value}")
    expanded = argv if ":" in prefixes else _with_variables(argv, environment)
    if not expanded:  # behind `@`, where `$NAME` is all there is
        raise ConfigError(f"the command line is empty without its variables: {value}")
    return ExecCommand(prefixes, path, tuple(expanded))


def commands_of(value: str) -> list[list[str]]:
    """The words of each command of one `Exec...=` value, prefixes with the first; there is at least one, which may be empty.

    Raises:
        ConfigError: a quote is open.
    """
    found: list[list[str]] = [[]]
    for word in _raw_words(value):
        if word == ";":
            found.append([])
        else:
            found[-1].append(";" if word == "\\;" else unquoted(word))
    return found[:-1] if found[1:] and not found[-1] else found


def _raw_words(value: str) -> Iterator[str]:
    """The words as they are written, with their quotes and escapes.

    Raises:
        ConfigError: At a word with an open quote; the words before it count.
    """
    word, end = "", -1
    for piece in _PIECE.finditer(value):
        if word and piece.start() != end:
            yield word
            word = ""
        if piece["plain"] is None and not (piece["closed"] or piece["shut"]):
            raise ConfigError(f"unbalanced quotes in a command line: {value}")
        word, end = word + piece[0], piece.end()
    if word:
        yield word


def unquoted(word: str, *, is_strict: bool = False) -> str:
    """A word without its quotes, escapes put in; one that systemd does not know stays as it is.

    Raises:
        ConfigError: `is_strict`, and there is such a one.
    """

    def unescaped(found: re.Match[str]) -> str:
        text = _unescaped(found)
        if is_strict and text == found[0]:
            raise ConfigError(f"escape that systemd does not know: {word}")
        return text

    # One letter a byte: escapes name bytes.
    raw = word.encode("utf-8", "surrogateescape").decode("latin-1")
    pieces = (one["double"] or one["single"] or one["plain"] or "" for one in _PIECE.finditer(raw))
    found = "".join(_ESCAPE.sub(unescaped, piece) for piece in pieces)
    return found.encode("latin-1").decode("utf-8", "surrogateescape")


def _unescaped(found: re.Match[str]) -> str:
    if found["simple"] is not None:
        return _SIMPLE_ESCAPES.get(found["simple"], found[0])
    code = int(found["octal"], 8) if found["octal"] else int(found[found.lastgroup or 0], 16)
    if code == 0:
        return found[0]
    if found["byte"] or found["octal"]:
        return chr(code)
    if code > _MAX_CODE_POINT or is_foreign(chr(code)):
        return found[0]
    return chr(code).encode().decode("latin-1")


def _why_no_program(path: str) -> str | None:
    """Why systemd would refuse it as the path of a program."""
    if not path:
        return "there is no program"
    if "\0" in path or _UNSAFE.search(path) or _FOREIGN.search(path):
        return "it has quotes, backslashes, control characters or bytes that are not UTF-8"
    if path.endswith("/"):
        return "it is a folder"
    if not path.startswith("/") and "/" in path:
        return "it is neither absolute nor a bare name"
    return None


def expand_specifiers(text: str, specifiers: Mapping[str, str]) -> str:
    """`text` with `%` specifiers put in; those that `specifiers` does not know stay.

    Raises:
        ConfigError: There is no such specifier.
    """

    def replace(found: re.Match[str]) -> str:
        letter = found.group(1)
        is_known = letter in _SPECIFIERS or letter in specifiers
        if letter.isascii() and letter.isalnum() and not is_known:
            raise ConfigError(f"no such specifier: %{letter} in {text}")
        return "%" if letter == "%" else specifiers.get(letter, found.group())

    return re.sub(r"%(.)", replace, text, flags=re.DOTALL)


def _with_variables(argv: list[str], environment: Mapping[str, str]) -> list[str]:
    """`argv` with variables put in as systemd does when it starts a process.

    A word that is `$NAME` becomes as many words as its value has, possibly none; `${NAME}` is put
    in as it is; `$$` is a dollar sign; any other `$` stays.
    """

    def replace(found: re.Match[str]) -> str:
        if found.group() == "$$":
            return "$"
        name: str | None = found.group(1)
        return found.group() if name is None else environment.get(name, "")

    expanded: list[str] = []
    for word in argv:
        if word.startswith("$") and word[1:2] not in {"{", "$"}:
            expanded.extend(relaxed_words(environment.get(word[1:], "")))
        else:
            expanded.append(_BRACED.sub(replace, word))
    return expanded


def relaxed_words(value: str) -> list[str]:
    """Words of a variable's value, or of a list that `systemctl show` prints.

    Quotes count, escapes lose their backslash, nothing is refused.
    """
    words: list[str] = []
    end = -1
    for piece in _PIECE.finditer(value):
        inner = piece["double"] or piece["single"] or piece["plain"] or ""
        text = re.sub(r"\\(.?)", r"\1", inner, flags=re.DOTALL)
        if piece.start() == end:
            words[-1] += text
        else:
            words.append(text)
        end = piece.end()
    return words


_DOUBLE, _SINGLE = r"\"((?:\\.|[^\"\\])*+)(?:\"|\\?\Z)", r"'([^']*+)(?:'|\Z)"
# A line of an environment file: a comment, or a name and a value of quoted parts and a plain rest. A quote that is
# left open goes to the end of the file.
_LINE = re.compile(
    r"[ \t\n\r]*+(?:[#;][^\n\r]*+|(?P<name>[^\n\r][^=\n\r]*+)"
    rf"(?:=(?P<quoted>(?:[ \t]*+(?:{_DOUBLE}|{_SINGLE}))*+)"
    r"[ \t]*+(?P<plain>(?:\\(?:.|\Z)|[^\\\n\r \t]|[ \t]++(?![\n\r]|\Z))*+))?)",
    re.DOTALL,
)
_QUOTED = re.compile(rf"{_DOUBLE}|{_SINGLE}", re.DOTALL)


def parse_environment(value: str, specifiers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What one `Environment=` value assigns; what systemd would drop is left out."""
    with contextlib.suppress(ConfigError):  # behind what was read before
        for raw in _raw_words(value):
            word = unquoted(raw, is_strict=True)
            with contextlib.suppress(ConfigError):  # of this word alone
                yield from _assigned(expand_specifiers(word, specifiers))


def environment_of(unit: UnitFile, specifiers: Mapping[str, str]) -> dict[str, str]:
    """What all `Environment=` of a unit set together; files come on top of it."""
    values = [one.value for one in unit.values("Service", "Environment")]
    return {n: v for value in values for n, v in parse_environment(value, specifiers)}


def environment_files_of(unit: UnitFile, specifiers: Mapping[str, str]) -> tuple[str, ...]:
    """The files that a unit reads its environment from, in order, behind a `-` those that may be missing.

    A path may be a glob pattern.
    """
    files: list[str] = []
    for directive in unit.values("Service", "EnvironmentFile"):
        with contextlib.suppress(ConfigError):  # systemd ignores it too
            files.append(expand_specifiers(directive.value, specifiers))
    # As it does what is no absolute path.
    return tuple(one for one in files if one.removeprefix("-").startswith("/"))


def parse_environment_file(text: str) -> dict[str, str]:
    """The assignments of an environment file, in systemd's shell-like syntax.

    Comments begin a line with `#` or `;`. Quotes may be mixed in one value, a backslash outside of
    single quotes takes the next character literally (in double quotes only some), and one at the
    end of a line continues it. Nothing is expanded.
    """
    found: dict[str, str] = {}
    for line in _LINE.finditer(text.split("\0", 1)[0]):
        if line["plain"] is not None:
            quoted = [
                _in_double(one[1] or "") + (one[2] or "")
                for one in _QUOTED.finditer(line["quoted"])
            ]
            value = "".join(quoted) + _plain(line["plain"])
            found.update(_assigned(f"{line['name'].rstrip()}={value}"))
    return found


def _in_double(text: str) -> str:
    return re.sub(r"\\(?:([\"\\`$])|\n)", lambda found: found[1] or "", text)


def _plain(text: str) -> str:
    return re.sub(r"\\(?:[\n\r]|(.)|\Z)", lambda found: found[1] or "", text, flags=re.DOTALL)


def _assigned(assignment: str) -> Iterator[tuple[str, str]]:
    """Name and value of an assignment, where systemd would accept it."""
    name, equals, value = assignment.partition("=")
    if equals and _ENV_NAME.fullmatch(name) and not _FOREIGN.search(value):
        yield name, value
