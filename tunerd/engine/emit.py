"""A server's command line in the languages of others: llama-swap, llama-server's router, compose, quadlet, sh.

The same server gives the same bytes: no clock, and no order of chance. What a language cannot carry is said
in the text and beside it; a word that it cannot hold is refused, since without it another server would run.

Source: the parsers themselves (tests/integration/production/test_emit.py, tests/e2e/test_neighbours.py); llama-swap's
config-schema.json, and its loader of August 2026.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunerd.engine.flags import (
    SECRET_FLAGS,
    is_flag,
    is_secret_variable,
    normal_spelling,
    words_behind,
)
from tunerd.errors import UsageError
from tunerd.units.text import quote_argument


class Target(StrEnum):
    """Whose language."""

    LLAMA_SWAP = "llama-swap"
    MODELS_INI = "models-ini"
    COMPOSE = "compose"
    QUADLET = "quadlet"
    SHELL = "shell"


MANY = frozenset({Target.LLAMA_SWAP, Target.MODELS_INI})
IMAGES = {True: "ghcr.io/ggml-org/llama.cpp:server-cuda", False: "ghcr.io/ggml-org/llama.cpp:server"}  # fmt: skip
_IN_CONTAINERS = frozenset({Target.COMPOSE, Target.QUADLET})
DEFAULT_PORT = 8080
# Folders of the unit itself, which another service has elsewhere.
_OF_UNITS = frozenset({"HOME", "LLAMA_CACHE"})
# Of the router as a whole: it gives each model its own.
_ASKED_OTHERWISE = frozenset({"--ssl-key-file", "--ssl-cert-file", "--api-prefix"})
_OF_ROUTERS = frozenset({"--host", "--port", "--alias", "--api-key-file", *_ASKED_OTHERWISE})
# What lines of YAML and INI cannot hold as it stands.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
_KEY_INSIDE = "/run/secrets/api-key"
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_SWAP_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with its values, and who set it where that is known."""

    words: tuple[str, ...]
    origin: str | None = None

    @property
    def name(self) -> str:
        """As the tables spell it."""
        return normal_spelling(self.words[0])

    @property
    def values(self) -> list[str]:
        """One by one, files without the scale that may stand behind them."""
        return [one for word in self.words[1:] for one in words_behind(self.words[0], word)]

    def led(self, where: Callable[[str], str]) -> Flag:
        """With each of its values as `where` has it; a scale stays behind its file."""

        def led(word: str) -> str:
            names = words_behind(self.words[0], word)
            parts = word.split(",") if names[1:] else [word]
            pairs = zip(names, parts, strict=True)
            return ",".join(where(name) + part.removeprefix(name) for name, part in pairs)

        return replace(self, words=(self.words[0], *map(led, self.words[1:])))


@dataclass(frozen=True, slots=True)
class Server:
    """A server to be written down.

    Attributes:
        title: What it was made from, with the version of tunerd.
        names: By which clients ask for it, the first before all; at least one.
        program: With its subcommand.
        host: Where it is to listen; None where its build decides.
        user: The account that runs it here.
        folders: For each file or folder of the command line that is here: the folder that has to be
            reachable, and where it is below that.
        locks_memory: Whether it may lock its memory.
        load_limit_s: Longest load of its model.
        unsaid: Variables of files that may be closed to whoever reads the text.
    """

    title: str
    names: tuple[str, ...]
    program: tuple[str, ...]
    flags: tuple[Flag, ...]
    environment: Mapping[str, str]
    host: str | None
    port: int
    api_key_file: str | None
    user: str | None
    has_gpu: bool
    folders: Mapping[str, tuple[str, str]]
    locks_memory: bool
    stop_timeout_s: int
    load_limit_s: int
    unsaid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Emitted:
    """The text, and what it does not carry."""

    text: str
    lost: tuple[str, ...]


def flags_of(words: Sequence[str], origins: Sequence[tuple[str, str, str]]) -> tuple[Flag, ...]:
    """A server's arguments as flags with their values.

    Args:
        words: Without the program.
        origins: Of each flag: its words with a blank between them, its key, and who set it.
    """
    said = {text: f"{key}, set by {who}" for text, key, who in origins}
    found: list[Flag] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        pair = f"{word} {rest[0]}" if rest else None
        if pair in said:
            found.append(Flag((word, rest.pop(0)), said[pair]))
        elif is_flag(word) and normal_spelling(word) in SECRET_FLAGS:  # a key may begin like a flag
            found.append(Flag((word, *rest[:1])))
            del rest[:1]
        elif is_flag(word) or not found:
            found.append(Flag((word,), said.get(word)))
        else:
            found[-1] = replace(found[-1], words=(*found[-1].words, word))
    return tuple(found)


def emit(
    target: Target,
    servers: Sequence[Server],
    *,
    image: str | None = None,
    together: bool | None = None,
) -> Emitted:
    """The text for a target.

    Args:
        target: Whose language.
        servers: More than one for those of `MANY` alone.
        image: Of the container; None for llama.cpp's own.
        together: Whether all of them may run at once; None where that is not known.

    Raises:
        UsageError: the target cannot hold a word of the command line.
    """
    if len(servers) > 1 and target not in MANY:
        raise UsageError(
            f"{target} takes one server, not {len(servers)}",
            state="nothing was written",
            hint=f"name one profile, or emit {' or '.join(sorted(MANY))}",
        )
    for flag in chain.from_iterable(one.flags for one in servers):
        if re.search("[\ud800-\udfff]", " ".join(flag.words)):
            raise _refuse(target, flag, "it is not UTF-8")
    named = [replace(one, names=_own_names(one, servers)) for one in servers]
    carried, lost = zip(*(_carried(target, one) for one in named), strict=True)
    told = tuple(dict.fromkeys(chain(*lost, _lost_to_the_first(target, named))))
    head = [*(one.title for one in named), *(f"not carried over: {line}" for line in told)]
    values = {"head": list(map(_remark, head)), "servers": carried, "together": together}
    if target in MANY:
        values |= _for_many(target, carried, together=together)
    else:
        values |= _for_one(target, carried[0], image or IMAGES[carried[0].has_gpu])
    return Emitted(_templates().get_template(f"{target}.j2").render(values), told)


def _lost_to_the_first(target: Target, servers: Sequence[Server]) -> Iterator[str]:
    """What a router has of its first server, and cannot have of the others.

    Raises:
        UsageError: another program belongs to one of them; seen of a router: a flag that its own build does not
            know in any section keeps it from starting.
    """
    if target is not Target.MODELS_INI:
        return
    first = servers[0]
    for one in servers[1:]:
        if one.program != first.program:
            raise UsageError(
                f"{target} cannot hold {first.names[0]} and {one.names[0]} at once",
                cause=f"a router starts all models with one program: {shlex.join(first.program)} or "
                f"{shlex.join(one.program)}",
                state="nothing was written",
                hint="choose one engine for both (engine.prefer), or emit llama-swap",
            )
        if (one.host, one.port) != (first.host, first.port):
            yield f"host and port of {one.names[0]}: the router uses those of {first.names[0]}"
        for what, of_one, of_first in (
            ("an API key", one.api_key_file, first.api_key_file),
            ("TLS or a prefix", _otherwise(one), _otherwise(first)),
        ):
            if of_one != of_first:
                yield f"whether {one.names[0]} has {what}, and which: the router does as {first.names[0]}"


def _otherwise(server: Server) -> list[str]:
    """What lets it answer by TLS or below a prefix."""
    flags = (flag for flag in server.flags if flag.name in _ASKED_OTHERWISE)
    return [word for flag in flags for word in flag.words]


def _templates() -> Environment:
    """What each target looks like, in the folder `emitted`."""
    filters: dict[str, Callable[[Any], str]] = {
        "compose": lambda word: _yaml(word.replace("$", "$$")),
        "ini": _ini_value,
        "origin": lambda flag: _remark(flag.origin or "as it stands in the unit"),
        "remark": _remark,
        "shell": shlex.quote,
        "swap": _swap_word,
        "unit": quote_argument,
        "yaml": _yaml,
    }
    made = Environment(  # noqa: S701 -- none of these is HTML
        loader=FileSystemLoader(Path(__file__).with_name("emitted")), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= filters
    return made


def _for_many(
    target: Target, servers: Sequence[Server], *, together: bool | None
) -> dict[str, Any]:
    """What the templates of these need beside the servers.

    Raises:
        UsageError: the target cannot hold a word, or a name.
    """
    for server in servers:
        if target is Target.LLAMA_SWAP:
            for flag in (Flag(server.program), *server.flags):
                _demand_printable(target, flag)
            continue
        name, counts = server.names[0], Counter(flag.name for flag in server.flags)
        # `[*]` holds what all models have.
        if name == "*" or "]" in name or _UNPRINTABLE.search(name) or name != name.strip():
            raise _refuse(target, Flag((name,)), "a section cannot have this name")
        for flag in server.flags:
            if counts[flag.name] > 1 and flag.name not in _OF_ROUTERS:
                raise _refuse(target, flag, "the flag is given twice, but a key only once")
    first = servers[0]
    router = [*first.program, "--host", first.host or "127.0.0.1", "--port", str(first.port)]
    if first.api_key_file is not None:
        router += ["--api-key-file", first.api_key_file]
    router += _otherwise(first)
    most = len(servers) if together or len(servers) == 1 else 1
    router += ["--models-preset", "THIS-FILE", "--models-max", str(most)]
    aliases = [Flag(("alias", ",".join(one.names[1:]))) for one in servers]
    return {"router": shlex.join(router), "of_routers": _OF_ROUTERS, "aliases": aliases,
            "why_together": _WHY_TOGETHER[together]}  # fmt: skip


def _for_one(target: Target, server: Server, image: str) -> dict[str, Any]:
    """What the templates of containers and scripts need beside the server.

    Raises:
        UsageError: the target cannot hold a word, or a folder.
    """
    if target is Target.SHELL:
        return {"server": server}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", server.names[0]).strip("-._") or "llama-server"
    mounts = _bound(server)
    if target is Target.QUADLET:
        for flag in server.flags:
            if "" in flag.words:  # seen with podman 5.8: what follows is left out without a word
                raise _refuse(target, flag, "podman's generator ends the line at an empty word")
        for source, _, _ in mounts:
            if ":" in source or source != source.strip() or _UNPRINTABLE.search(source):
                raise _refuse(target, Flag((source,)), "Volume= cannot name such a folder")
    return {"server": server, "name": name, "mounts": mounts, "image": image,
            "published": _published(server)}  # fmt: skip


def _own_names(server: Server, servers: Sequence[Server]) -> tuple[str, ...]:
    """Its names without those that another one has as well."""
    counts = Counter(name for one in servers for name in dict.fromkeys(one.names))
    own = tuple(dict.fromkeys(name for name in server.names if counts[name] == 1))
    return own or server.names[-1:]


def _carried(target: Target, server: Server) -> tuple[Server, tuple[str, ...]]:
    """The server as far as the target can carry it, and what is left out."""
    lost: list[str] = []
    flags = [flag for flag in server.flags if flag.name not in SECRET_FLAGS]
    if len(flags) < len(server.flags):
        lost.append("a key or token in plain text: use --api-key-file instead")
    if target is Target.LLAMA_SWAP and (words := _otherwise(server)):
        lost.append(
            f"{' '.join(words)}: llama-swap asks its servers by plain HTTP, below no prefix"
        )
        flags = [flag for flag in flags if flag.name not in _ASKED_OTHERWISE]
    environment = {}
    for name, value in sorted(server.environment.items()):
        why = _why_no_variable(target, name, value)
        if why is None:
            environment[name] = value
        else:
            lost.append(f"environment variable {name}: {why}")
    lost += [f"environment variable {name}: it comes from a file of the unit" for name in server.unsaid]  # fmt: skip
    where = "the container's own account" if target in _IN_CONTAINERS else "whoever starts it"
    who = f" ({server.user})" if server.user is not None else ""
    lost.append(f"account{who} and sandbox of its unit: it runs as {where}")
    if target in _IN_CONTAINERS:
        lost.append(f"the build {server.program[0]}, which these flags fit: the image has its own")
        away = [word for one in flags for word in one.values if word.startswith("/") and word not in server.folders]  # fmt: skip
        lost += [f"`{word}`: there is no such file here to mount" for word in away if word != server.api_key_file]  # fmt: skip
        flags = _inside(server, flags)
    if target is Target.SHELL and server.locks_memory:
        lost.append("LimitMEMLOCK=infinity: see `ulimit -l`")
    return replace(server, flags=tuple(flags), environment=environment), tuple(lost)


def _why_no_variable(target: Target, name: str, value: str) -> str | None:
    if name in _OF_UNITS:
        return "a folder of the unit itself"
    if is_secret_variable(name) or _SECRET_VALUE.search(value):
        return "it may hold a secret"
    if target is Target.MODELS_INI:
        return "set it for the router, for all of its models"
    if target is Target.LLAMA_SWAP and ("${" in value or not _SWAP_VARIABLE.fullmatch(name)):
        return "llama-swap would read it as something else"
    if target is Target.QUADLET and _UNPRINTABLE.search(value):
        return "it has a control character"
    return None


def _inside(server: Server, flags: Sequence[Flag]) -> list[Flag]:
    """Flags as they are within a container, where files stand elsewhere, and all addresses are its own."""
    mounts, paths = _mounts(server), {server.api_key_file: _KEY_INSIDE}
    for word, (folder, below) in server.folders.items():
        paths[word] = posixpath.normpath(posixpath.join(mounts[folder], below))
    kept = (one for one in flags if one.name not in {"--host", "--port"})
    return [
        *(one.led(lambda word: paths.get(word, word)) for one in kept),
        Flag(("--host", "0.0.0.0"), "the container"),  # noqa: S104 -- what is published says host
        Flag(("--port", str(server.port)), "what is published below"),
    ]


def _mounts(server: Server) -> dict[str, str]:
    """Where each folder stands in the container."""
    folders = dict.fromkeys(folder for folder, _ in server.folders.values())
    return {one: f"/mnt/{n}" for n, one in enumerate(folders)}


def _bound(server: Server) -> list[tuple[str, str, bool]]:
    """What is mounted, where, and whether the server writes into it."""
    written = [
        word for flag in server.flags if flag.name == "--slot-save-path" for word in flag.words
    ]
    found = [
        (folder, inside, any(f"{word}/".startswith(f"{inside}/") for word in written))
        for folder, inside in _mounts(server).items()
    ]
    key = server.api_key_file
    return found if key is None else [*found, (key, _KEY_INSIDE, False)]


def _remark(text: str) -> str:
    """One line that no language takes for anything but a comment."""
    return _UNPRINTABLE.sub("?", text).replace("${", "$ {")


def _refuse(target: Target, flag: Flag, why: str) -> UsageError:
    return UsageError(
        f"{target} cannot hold {' '.join(flag.words)[:200]!a}",
        cause=why,
        state="nothing was written",
        hint="reach the file by a link without such characters, or choose another target",
    )


def _demand_printable(target: Target, flag: Flag) -> None:
    if any(_UNPRINTABLE.search(word) for word in flag.words):
        raise _refuse(target, flag, "it has a control character or a line break")


def _yaml(text: str) -> str:
    """A text between double quotes, as YAML 1.1 and 1.2 read it back."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    codes = _UNPRINTABLE.sub(lambda found: rf"\u{ord(found.group()):04x}", escaped)
    return f'"{codes}"'


def _swap_word(word: str) -> str:
    """A word as its splitter reads it; a macro's mark is taken apart, before it is looked for."""
    return shlex.quote(word).replace("${", "$''{")


_WHY_TOGETHER = {
    None: "one at a time, because it is unknown whether they fit together",
    True: "`tunerd fits` says that all of them fit",
    False: "one at a time, because they do not fit together",
}


def _ini_value(flag: Flag) -> str:
    """What stands behind `=`; there is no way to quote anything."""
    _demand_printable(Target.MODELS_INI, flag)
    if len(flag.words) == 1:
        return "true"
    if len(flag.words) > 2:  # noqa: PLR2004 -- the flag and its value
        raise _refuse(Target.MODELS_INI, flag, "it has more than one value")
    value = flag.words[1]
    if re.search("[;#]", value) or value != value.strip():
        raise _refuse(Target.MODELS_INI, flag, "`;` and `#` begin a comment there, and blanks at the ends are lost")  # fmt: skip
    return value


def _published(server: Server) -> str:
    host = {None: "127.0.0.1", "localhost": "127.0.0.1"}.get(server.host, server.host or "")
    try:
        ip_address("%" if "%" in host else host)  # a scope is of this machine
    except ValueError as error:
        cause = "a container publishes its port on an IP address"
        raise UsageError(
            f"a container cannot listen on {host[:200]!a}",
            cause=cause,
            state="nothing was written",
            hint="set serving.host, or choose another target",
        ) from error
    where = f"[{host}]" if ":" in host else host
    return f"{where}:{server.port}:{server.port}"
