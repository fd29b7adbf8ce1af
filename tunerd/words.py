"""Words that every part shares: names, modes and families, amounts for people, digests."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NewType, TypeVar

from pydantic import AfterValidator, BaseModel

from tunerd.errors import UsageError

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_WORDS = "a letter or digit, then letters, digits, `.`, `_` and `-`; at most 100"
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile(r"[0-9]{1,12}")


T = TypeVar("T")


def all_known(values: Iterable[T | None]) -> list[T]:
    """The values; none of them where one is missing, for then the others say nothing of the whole."""
    found = list(values)
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def ratio(part: float | None, whole: float | None) -> float | None:
    """A share or a rate; None where an end is not known, or there is nothing of the whole."""
    return part / whole if part is not None and whole else None


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
            cause=f"allowed: {NAME_WORDS}",
            state="nothing was touched",
        )


def is_profile_file(what: str) -> bool:
    """Whether a file is meant, and not a profile by its name."""
    return "/" in what or what.endswith(".toml")


def generation_number(text: str) -> int | None:
    """The number of a generation as typed; None for any other word, such as a name."""
    return int(text) if _NUMBER.fullmatch(text) else None


class Mode(StrEnum):
    """Who starts services: the system manager, a user's manager, or tunerd's own supervisor."""

    SYSTEM = "system"
    USER = "user"
    LOCAL = "local"

    @property
    def systemctl(self) -> str:
        """How a person calls the manager that the server runs under."""
        return "systemctl --user" if self is Mode.USER else "systemctl"


class Family(StrEnum):
    """Whose code a build is; UNKNOWN is served by its flags like any other."""

    MAINLINE = "mainline"
    IK = "ik"
    BEE = "bee"
    UNKNOWN = "unknown"


class PortOption(StrEnum):
    """The option of a server's socket: it binds a port whose ended connections had the same one."""

    REUSE_ADDR = "SO_REUSEADDR"
    REUSE_PORT = "SO_REUSEPORT"


def sha256(text: bytes | None) -> str | None:
    """The hash by which a unit's text is recognised; None for a file that is not there."""
    return None if text is None else hashlib.sha256(text).hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in its one spelling."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The most similar of `names`, if any is similar enough to be a misspelling."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)


_LISTS = ("tuple_type", "list_type", "set_type")
_TABLES = ("dict_type", "model_type", "model_attributes_type", "mapping_type")
_PLAIN = {
    "missing": "a value; this key is required",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "path_type": "a path in quotes",
}
_PREFIXES = ("input should be ", "value error, ")
_MAX_EXAMPLE = 100
_MAX_KEYS = 4
_MAX_SHOWN = 80


def of_form(pattern: str, words: str) -> AfterValidator:
    """Refuses a text that is none of a form, and says in words what is one."""
    form = re.compile(pattern)

    def check(text: str) -> str:
        if form.fullmatch(text) is None:
            raise ValueError(words)
        return text

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a profile: where, what stands there, what may, and the nearest valid name."""

    source: str
    key: str
    found: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean `{self.nearest}`?)" if self.nearest else ""
        return f"{self.source}: {self.key}: found {self.found}{hint}; allowed: {self.allowed}"


def problem_of(
    root: type[BaseModel], source: str, entry: Mapping[str, Any], *, every: Sequence[str] = ()
) -> Problem:
    """What one entry of pydantic's `ValidationError.errors()` says.

    Args:
        root: What was validated.
        source: Where the value comes from.
        entry: As pydantic has it.
        every: Whole names among which a key that stands in the wrong table may be.
    """
    key, names, wanted = _place_of(root, entry["loc"])
    message, found = entry["msg"], entry.get("input")
    if entry["type"] == "extra_forbidden":
        last = str(entry["loc"][-1])
        elsewhere = (name for name in every if name.endswith(f".{last}"))
        nearest = nearest_name(last, every if "." in last else names) or next(elsewhere, None)
        return Problem(source, key, "an unknown key", ", ".join(names), nearest)
    keys = [] if wanted is None else [f"{key}.{name}" for name in wanted.model_fields]
    options = re.findall(r"'([^']+)'", message) if entry["type"] == "literal_error" else []
    nearest = nearest_name(found, options) if isinstance(found, str) else None
    text = "nothing" if entry["type"] == "missing" else shown(found)
    return Problem(source, key, text, _allowed_words(entry, keys), nearest)


def innermost(problems: Iterable[Problem]) -> list[Problem]:
    """Without what is said of a whole whose part is wrong: that it is too short, or might be a text instead."""
    found = list(problems)
    return [one for one in found if not any(other.key.startswith(f"{one.key}.") for other in found)]


def _allowed_words(entry: Mapping[str, Any], keys: Sequence[str] = ()) -> str:
    """What the schema's complaint says may stand there.

    Args:
        entry: One entry of pydantic's `ValidationError.errors()`.
        keys: Whole names of the keys that the table has, where a table is wanted.
    """
    kind, context = entry["type"], entry.get("ctx", {})
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _LISTS:
        return f"a list, such as {_example(entry.get('input'))}"
    if kind in _TABLES:
        more = ["..."] if len(keys) > _MAX_KEYS else []
        named = ", ".join([*keys[:_MAX_KEYS], *more])
        return f"a table of keys: {named}" if keys else "a table of keys"
    part = "character" if kind.startswith("string") else "item"
    if kind in {"too_short", "string_too_short"}:
        return f"at least {counted(context['min_length'], part)}"
    if kind in {"too_long", "string_too_long"}:
        return f"at most {counted(context['max_length'], part)}"
    message = str(entry["msg"])
    words = message[:1].lower() + message[1:]
    for prefix in _PREFIXES:
        words = words.removeprefix(prefix)
    return words


def _example(found: object) -> str:
    """A list of what was found, where that is a word; as TOML, JSON and a shell's `'...'` take it."""
    is_word = isinstance(found, str) and 0 < len(found) <= _MAX_EXAMPLE and found.isprintable()
    return json.dumps([found if is_word else "x"], ensure_ascii=False)


def counted(n: int, one: str, many: str | None = None) -> str:
    """`1 sample`, `5 samples`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _place_of(
    root: type[BaseModel], location: Sequence[int | str]
) -> tuple[str, tuple[str, ...], type[BaseModel] | None]:
    """The dotted key of an error, the names that its table has, and the table wanted there if one is.

    Names of union branches and constraints are not part of the key.
    """
    kept: list[str] = []
    names: tuple[str, ...] = ()
    here: object = root
    for part in location:
        table, container = table_in(here), _container_in(here)
        if table is not None and _is_branch(str(part), table):
            continue
        names = ()
        if typing.get_origin(container) is dict:
            here = typing.get_args(container)[1]
        elif table is not None:
            names = tuple(table.model_fields)
            field = table.model_fields.get(str(part))
            here = field.annotation if field is not None else None
        elif container is not None and isinstance(part, int):
            here = typing.get_args(container)[0]
        else:
            break
        kept.append(str(part))
    return ".".join(kept), names, table_in(here)


def _is_branch(part: str, table: type[BaseModel]) -> bool:
    """Whether a part of a place only says which branch of a union complains."""
    return part == table.__name__ or part.startswith(("constrained-", "function-"))


def _container_in(annotation: object) -> object:
    """The dict, tuple or list inside an annotation, None if it takes no such thing or others too."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        branches = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _container_in(branches[0]) if len(branches) == 1 else None
    return annotation if typing.get_origin(annotation) in {dict, tuple, list} else None


def table_in(annotation: object) -> type[BaseModel] | None:
    """The model inside `Model`, `Model | None` or `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in {typing.Annotated, typing.Union, types.UnionType, dict}:
        found = (table_in(part) for part in typing.get_args(annotation))
        return next((model for model in found if model is not None), None)
    return None


# Who is let in by an address: all before its `@`, and what its query says of a password.
_IN_ADDRESSES = re.compile(r"(?<=://)\S*(?=@)|(?i:(?<=password=))[^&\s'\"]*")


def shown(value: object) -> str:
    """A value for people, not longer than a line, without what addresses say of names and passwords."""
    text = _IN_ADDRESSES.sub("...", repr(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


# Control characters, marks that turn the direction of writing or end a line, bytes that are no UTF-8.
OBEYED = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""A class of characters beyond ASCII that a terminal or a browser obeys."""
_UNSAFE = re.compile(f"[\x00-\x08\n-\x1f{OBEYED}]")


def harmless(text: str, *, keep: str = "") -> str:
    """The text with everything that a terminal or a browser would obey shown as Python writes it.

    Args:
        text: From anywhere.
        keep: Characters to leave as they are.
    """
    return _UNSAFE.sub(lambda c: c[0] if c[0] in keep else ascii(c[0])[1:-1], text)


UNKNOWN = "unknown"
"""Stands wherever people look for a figure that there is not."""
MiB = NewType("MiB", int)

BYTES_PER_MIB = 1024 * 1024
_TENTHS_BELOW_S = 10
_SECONDS_PER_MINUTE = 60
_SECONDS_PER_HOUR = 3600
_MIB_PER_GIB = 1024


def have_mib(n_bytes: int) -> MiB:
    """MiB of something that is there, rounded down."""
    return MiB(n_bytes // BYTES_PER_MIB)


def need_mib(n_bytes: float) -> MiB:
    """MiB of something that will be needed, rounded up."""
    return MiB(int(-(-n_bytes // BYTES_PER_MIB)))


def format_mib(mib: int | None) -> str:
    """`11902 MiB`, or `unknown`; from 10 GiB on with the GiB beside it."""
    if mib is None:
        return UNKNOWN
    if abs(mib) >= 10 * _MIB_PER_GIB:
        return f"{mib} MiB ({mib / _MIB_PER_GIB:.1f} GiB)"
    return f"{mib} MiB"


def format_duration(seconds: float | None) -> str:
    """`0.4 s`, `42 s`, `3 min 05 s`, `2 h 10 min`, or `unknown`."""
    if seconds is None:
        return UNKNOWN
    if seconds < _TENTHS_BELOW_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _SECONDS_PER_MINUTE:
        return f"{whole} s"
    minutes, left_s = divmod(whole, _SECONDS_PER_MINUTE)
    if whole < _SECONDS_PER_HOUR:
        return f"{minutes} min {left_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def when(at_s: float) -> str:
    """`2026-11-22 22:59:07 CET`, of seconds since the epoch: the machine's own time, with its zone."""
    return local_time(at_s, "%Y-%m-%d %H:%M:%S %Z")


def local_time(at_s: float, form: str) -> str:
    """The machine's own time in the form of `strftime`."""
    return datetime.fromtimestamp(at_s).astimezone().strftime(form)
