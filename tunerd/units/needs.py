"""What a unit's manager must find to start it, as the unit's text names it; whether it is there is not looked at here."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from tunerd.errors import ConfigError
from tunerd.units.live import OTHER_FILES
from tunerd.units.text import (
    TRUE,
    Directive,
    UnitFile,
    commands_of,
    expand_specifiers,
    relaxed_words,
)
from tunerd.words import Mode


class Kind(Enum):
    """What is named; the last part of a FILE's path may be a pattern, and the manager itself reads it."""

    FILE = auto()
    PATH = auto()
    FOLDER = auto()
    INSIDE = auto()
    USER = auto()
    GROUP = auto()
    UNIT = auto()


@dataclass(frozen=True, slots=True)
class Need:
    """What must be there; `said` names it. It `is_needed` unless the start makes it, or may do without."""

    kind: Kind
    name: str
    said: Directive
    is_needed: bool


# What only the manager can fill in, what it reads in another way than it stands there, and a path with `..`, which it may
# ignore, are passed over.
_PATH = r"(/(?:(?!\.\.)[^%\"'\\])*)"
_WORD = r"(/(?:(?!\.\.)[^%\"'\\:\s])*)"
_NAME = r"([^%\s]+)"
_LAST, _OF_A_NAME, _LINES, _WORDS, _PROGRAMS = range(5)  # what of a directive's lines counts
_SYSTEM, _MANAGERS, _ALL = {Mode.SYSTEM}, {Mode.SYSTEM, Mode.USER}, set(Mode)
# Who knows it, directives that fill one list, and what in them is a need; behind a `-` it is none, and `|` and `!` make another
# condition. INSIDE is looked for behind the unit's own mounts, which a user's manager on 252 does without; a FOLDER before any
# is made. Source: each was seen to fail on 252 and 262, and what is passed over to start (tests/e2e/test_needs.py).
_RULES = (
    (Kind.FILE, _MANAGERS, _LINES, "Service", "EnvironmentFile", r"-?(/(?:(?!\.\.)[^%\"'\\\[{])*)"),
    (Kind.FILE, _ALL, _OF_A_NAME, "Service", "LoadCredential(Encrypted)?", rf"[^/:]+:{_PATH}"),
    (Kind.USER, _SYSTEM, _LAST, "Service", "User", _NAME),
    (Kind.GROUP, _SYSTEM, _LAST, "Service", "Group", _NAME),
    (Kind.GROUP, _SYSTEM, _WORDS, "Service", "SupplementaryGroups", _NAME),
    (Kind.PATH, _SYSTEM, _LAST, "Service", "Root(Directory|Image)", _PATH),
    (Kind.PATH, _SYSTEM, _WORDS, "Service", "Bind(ReadOnly)?Paths", rf"{_WORD}(?::/[^:]+(?::(?:no)?rbind)?)?"),
    (Kind.INSIDE, _SYSTEM, _WORDS, "Service", "(ReadWrite|ReadOnly|Inaccessible)(Paths|Directories)|(No)?ExecPaths", rf"\+?{_WORD}"),
    (Kind.INSIDE, _ALL, _LAST, "Service", "WorkingDirectory", _PATH),
    (Kind.INSIDE, _MANAGERS, _PROGRAMS, "Service", "Exec(Condition|StartPre|StartPost)", rf"[@:+!|]*{_PATH}"),
    (Kind.FOLDER, _MANAGERS, _LAST, "Service", "Standard(Input|Output|Error)", rf"(?:append|file|truncate):{_PATH}"),
    (Kind.PATH, _MANAGERS, _LAST, "Service", "NetworkNamespacePath", _PATH),
    (Kind.PATH, _MANAGERS, _LINES, "Unit", "(Condition|Assert).+", _PATH),
    (Kind.UNIT, _MANAGERS, _WORDS, "Unit", "Requires|Requisite|BindsTo", r"([\w:.@-]+\.(?:mount|path|service|socket|swap|target|timer))"),
    (Kind.UNIT, _MANAGERS, _LAST, "Service", "Slice", r"([\w:.@-]+\.slice)"),
)  # fmt: skip
# Whoever asks may have temporary folders of its own, and see no modules of the kernel; a `.v` is a pattern to newer ones.
_SEEN_OTHERWISE = re.compile(r"/(var/)?tmp(/.*)?|/(usr/)?lib/modules/.*|.*\.v(/.*)?", re.DOTALL)
# Conditions all reset each other. Of others the path is a pattern, or a link that may lead nowhere, or older managers ignore it.
_NO_PATH = re.compile("(Condition|Assert)(?!(Path(Exists|Is(Directory|MountPoint|ReadWrite))|DirectoryNotEmpty|File(NotEmpty|IsExecutable))$)")  # fmt: skip
# For these a user's manager may have folders of its own: on 252 `%S` is another, and its environment may name any.
_OF_USERS = re.compile("%[CELSu]")
_MADE = {"Runtime": "t", "State": "S", "Cache": "C", "Logs": "L", "Configuration": "E"}


def needs_of(unit: UnitFile, specifiers: Mapping[str, str], mode: Mode) -> Iterator[Need]:
    """What a unit with its drop-ins needs; what its text does not tell is left out."""
    left_out = {"User", "Group"} if _is_on(unit, "DynamicUser") else set()  # made at each start
    has_mounts = any(unit.values("Service", name) for name in OTHER_FILES)
    made, closed = tuple(_made_by(unit, specifiers)), tuple(_closed_by(unit))
    given = {one.partition(":")[0] for one, _ in _lines(unit, "Service", "SetCredential(Encrypted)?", specifiers)}  # fmt: skip
    # A program may be put there by one that runs before it.
    told = " ".join(
        word
        for text, _ in _lines(unit, "Service", "Exec.+", specifiers)
        for _, *arguments in _commands(text)
        for word in arguments
    )
    for kind, modes, counts, section, names, pattern in _RULES:
        if mode not in modes or names in left_out or (kind is Kind.INSIDE and has_mounts):
            continue
        for text, said in _counted(_lines(unit, section, names, specifiers), counts):
            found = None if _NO_PATH.match(said.name) else re.fullmatch(pattern, text)
            name = "" if found is None else found[1]
            may_lack = text.startswith("-")
            may_lack |= mode is Mode.USER and _OF_USERS.search(said.value) is not None
            may_lack |= counts == _OF_A_NAME and text.partition(":")[0] in given
            if name.startswith("/"):
                name = _plain(name) if kind is not Kind.FOLDER else posixpath.dirname(_plain(name))
                may_lack |= _SEEN_OTHERWISE.fullmatch(name) is not None
                may_lack |= kind is not Kind.FOLDER and any(_is_in(one, name) for one in made)
                if kind is Kind.INSIDE or names.startswith("Bind"):
                    may_lack |= any(one != name and _is_in(name, one) for one in closed)
                    may_lack |= names.startswith("Exec") and name in told
            if name:
                yield Need(kind, name, said, is_needed=not may_lack)


def _lines(
    unit: UnitFile, section: str, names: str, specifiers: Mapping[str, str]
) -> Iterator[tuple[str, Directive]]:
    for one in unit.values(section, names):
        with contextlib.suppress(ConfigError):  # with which it is not loaded, or ignored
            yield expand_specifiers(one.value, specifiers), one


def _counted(
    lines: Iterable[tuple[str, Directive]], counts: int
) -> Iterable[tuple[str, Directive]]:
    if counts == _LINES:
        return lines
    if counts == _PROGRAMS:
        return ((program, said) for text, said in lines for program, *_ in _commands(text))
    if counts == _WORDS:  # what stands between quotes may be none
        return ((word, said) for text, said in lines if not re.search(r"[\"'\\]", text) for word in text.split())  # fmt: skip
    is_last = counts == _LAST
    return {said.name if is_last else text.partition(":")[0]: (text, said) for text, said in lines}.values()  # fmt: skip


def _commands(text: str) -> Iterator[list[str]]:
    with contextlib.suppress(ConfigError):  # with which it is ignored
        yield from filter(None, commands_of(text))


def _made_by(unit: UnitFile, specifiers: Mapping[str, str]) -> Iterator[str]:
    """The folders that the start makes; that of a dynamic user lies in `private`."""
    for what, letter in _MADE.items():
        for text, _ in _lines(unit, "Service", f"{what}Directory", specifiers):
            for name in (name for word in relaxed_words(text) for name in word.split(":")):
                yield _plain(f"{specifiers[letter]}/{name}")
                yield _plain(f"{specifiers[letter]}/private/{name}")


def _closed_by(unit: UnitFile) -> Iterator[str]:
    """The folders of which its server sees nothing: what is gone in them is not missed."""
    if _is_on(unit, "ProtectHome"):
        yield from ("/home", "/root", "/run/user")
    for one in unit.values("Service", "Inaccessible(Paths|Directories)"):
        yield from (_plain(word.lstrip("-+")) for word in one.value.split())


def _is_on(unit: UnitFile, name: str) -> bool:
    return (unit.value("Service", name) or "").lower() in TRUE


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _plain(path: str) -> str:
    return re.sub("^/var/run/", "/run/", posixpath.normpath(re.sub("^/+", "/", path)))
