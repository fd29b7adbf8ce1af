"""The embedded engine: llama.cpp's server from its Python wheel, behind llama-server's command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

_MISSING = """\
error: the engine library is not installed

hint: `pip install 'tunerd[embedded]'` installs it
"""
_NO_MODEL = """\
error: no model to serve

hint: `-m FILE` names one; this server has no router mode
"""
_NOTES = """\
Environment variables named LLAMA_ARG_* are not read: every setting comes from the command line.
Options of llama-server that are not listed here are refused.
"""
_LOOP_S = 10.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_TEXT_COLUMN = 40
_BYTES_PER_MIB = 1024 * 1024
_N_DEVICES = 16
"""llama.cpp's fit wants one margin for each of the 16 devices that it can have."""


class BadCommandLineError(Exception):
    """A command line that llama-server refuses; the text is what it prints before it exits with 1."""


class BadValueError(Exception):
    """A value that llama-server refuses, in its words."""


@dataclass(frozen=True, slots=True)
class Member:
    """A value of one of the engine library's enumerations."""

    enum: str
    name: str


Reader: TypeAlias = Callable[[str], Any]
Setting: TypeAlias = tuple[str, Any]
"""A field of the engine's parameters and its value; `+field` is a collection, to which it is added."""


def whole(text: str) -> int:
    """A 32-bit number."""
    if not re.fullmatch(r"[+-]?\d+", text) or not -(2**31) <= int(text) < 2**31:
        raise BadValueError("stoi")
    return int(text)


def real(text: str) -> float:
    """A floating-point number."""
    try:
        return float(text)
    except ValueError as error:
        raise BadValueError("stof") from error


def _seed(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise BadValueError("stoul")
    return int(text) & 2**32 - 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _choice(table: Mapping[str, Any], problem: str) -> Reader:
    """One word of a table; `problem` may show the word as `{}`."""

    def read(text: str) -> Any:
        if text not in table:
            raise BadValueError(problem.format(text))
        return table[text]

    return read


def _on_off(flag: str, on: Any, off: Any, auto: Any = None) -> Reader:
    table = dict.fromkeys(("on", "enabled", "true", "1"), on)
    table |= dict.fromkeys(("off", "disabled", "false", "0"), off)
    if auto is not None:
        table |= dict.fromkeys(("auto", "-1"), auto)
    return _choice(table, f"error: unknown value for {flag}: '{{}}'\n")


def _members(enum: str, prefix: str, words: Sequence[str]) -> dict[str, Member]:
    """Words and the members of an enumeration that they name."""
    return {word: Member(enum, prefix + re.sub(r"\W", "_", word.upper())) for word in words}


_KV_WORDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_SPEC_WORDS = (
    "none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark",
    "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip
_LOAD_WORDS = ("auto", "none", "mmap", "mlock", "mmap+mlock")
_THOUGHT_WORDS = ("none", "auto", "deepseek", "deepseek-legacy")

_kv_type = _choice(_members("ggml_type", "GGML_TYPE_", _KV_WORDS), "Unsupported cache type: {}")
_spec_type = _choice(
    _members("common_speculative_type", "COMMON_SPECULATIVE_TYPE_", _SPEC_WORDS),
    "unknown speculative type: {}",
)
_load_mode = _choice(
    _members("llama_load_mode", "LLAMA_LOAD_MODE_", _LOAD_WORDS)
    | {"dio": Member("llama_load_mode", "LLAMA_LOAD_MODE_DIRECT_IO")},
    "invalid value",
)
_thoughts = _choice(
    _members("common_reasoning_format", "COMMON_REASONING_FORMAT_", _THOUGHT_WORDS),
    "Unknown reasoning format: {}",
)
_FLASH = (
    Member("llama_flash_attn_type", f"LLAMA_FLASH_ATTN_TYPE_{word}")
    for word in ("ENABLED", "DISABLED", "AUTO")
)


def _spec_types(text: str) -> tuple[Member, ...]:
    return tuple(_spec_type(word) for word in text.split(","))


def _layers(text: str) -> int:
    return {"auto": -1, "all": -2}.get(text) or whole(text)


def margins(text: str) -> tuple[int, ...]:
    """Bytes to leave free on each device, from MiB; the last figure is for those that follow."""
    given = [whole(part) * _BYTES_PER_MIB for part in re.split(r"[,/]+", text)]
    return tuple((given + given[-1:] * _N_DEVICES)[:_N_DEVICES])


def _template_arguments(text: str) -> Mapping[str, str]:
    """A JSON object, each value as JSON again."""
    try:
        return {str(key): json.dumps(item) for key, item in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise BadValueError(f"parse error: {error}") from error


def _file(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValueError(f"error: failed to open file '{path}'\n") from error


def _keys_of_file(path: str) -> tuple[str, ...]:
    return tuple(line for line in _file(path).splitlines() if line.strip() and line[0] != "#")


def _folder(path: str) -> str:
    if not Path(path).is_dir():
        raise BadValueError(f"not a directory: {path}")
    return path.rstrip("/") + "/"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: `argument` is None for a switch, `negations` are spellings that switch it off."""

    spellings: tuple[str, ...]
    negations: tuple[str, ...]
    argument: str | None
    read: Reader
    fields: tuple[str, ...]
    description: str


_WORDS = {
    "SPEC_WORDS": ",".join(_SPEC_WORDS),
    "LOAD_WORDS": ", ".join(_LOAD_WORDS),
    "KV_NOTE": f"\nallowed values: {', '.join(_KV_WORDS)}\n(default: f16)",
}
_READERS: Mapping[str, Reader] = {
    "whole": whole, "real": real, "text": str, "words": _words, "layers": _layers,
    "seed": _seed, "kv": _kv_type, "spec": _spec_types, "load": _load_mode,
    "thoughts": _thoughts, "margins": margins, "json": _template_arguments, "file": _file,
    "keys": _keys_of_file, "folder": _folder, "flash": _on_off("--flash-attn", *_FLASH),
    "fit": _on_off("--fit", on=True, off=False), "thinking": _on_off("--reasoning", 1, 0, -1),
}  # fmt: skip
_TABLE = Path(__file__).with_name("options.txt")


def _options() -> Iterator[Option]:
    lines = _TABLE.read_text("utf-8").splitlines()
    for line in (one for one in lines if not one.startswith("#")):
        spellings, *argument, fields, text = line.split("  ")
        words = spellings.split()
        for name, told in _WORDS.items():
            text = text.replace(f" {name}" if name == "KV_NOTE" else name, told)
        shown, reader = argument or (None, "text")
        yield Option(
            spellings=tuple(word for word in words if word[0] != "!"),
            negations=tuple(word[1:] for word in words if word[0] == "!"),
            argument=None if shown is None else _WORDS.get(shown, shown),
            read=_READERS[reader],
            fields=() if fields == "-" else tuple(fields.split()),
            description=text,
        )


OPTIONS = tuple(_options())
_BY_SPELLING = {
    spelling: option for option in OPTIONS for spelling in (*option.spellings, *option.negations)
}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command line asks for: help, the version, or a server with these settings."""

    wants_help: bool = False
    wants_version: bool = False
    settings: tuple[Setting, ...] = ()


def parse_command(arguments: Sequence[str]) -> CommandLine:
    """The settings of a command line, in its order.

    Raises:
        BadCommandLineError: At the first argument that llama-server would refuse.
    """
    settings: list[Setting] = []
    wants_help = False
    remaining = iter(arguments)
    for argument in remaining:
        flag = "--" + argument[2:].replace("_", "-") if argument.startswith("--") else argument
        option = _BY_SPELLING.get(flag)
        if option is None:
            raise BadCommandLineError(f"error: invalid argument: {flag}")
        wants_help = wants_help or "--help" in option.spellings
        if "--version" in option.spellings:  # llama-server looks at nothing that follows
            return CommandLine(wants_version=True)
        try:
            settings.extend(_settings(option, flag, remaining))
        except BadValueError as error:
            raise BadCommandLineError(
                f'error while handling argument "{flag}": {error}\n\n'
                f"usage:\n{option_text(option)}\n\nto show complete usage, run with -h"
            ) from error
    return CommandLine(wants_help=wants_help, settings=tuple(settings))


def _settings(option: Option, flag: str, remaining: Iterator[str]) -> Iterator[Setting]:
    value: Any = flag not in option.negations
    if option.argument is not None:
        given = next(remaining, None)
        if given is None:
            raise BadValueError("expected value for argument")
        value = option.read(given)
    for field in option.fields:
        yield field, value
    if "--reasoning" in option.spellings and value != -1:
        # Templates look at `enable_thinking`, the parser of answers at the field.
        yield "+default_template_kwargs", {"enable_thinking": "true" if value else "false"}


def help_text() -> str:
    """What `--help` prints."""
    entries = "".join(option_text(option) for option in OPTIONS)
    return f"----- common params -----\n\n{entries}\n\n{_NOTES}"


def option_text(option: Option) -> str:
    """One entry of the help: spellings, and from column 40 of the lines below what the option does."""
    head = ", ".join((*option.spellings, *option.negations))
    argument = "" if option.argument is None else f" {option.argument}"
    indent = "\n" + " " * _TEXT_COLUMN
    return f"{head}{argument}{indent}{indent.join(option.description.splitlines())}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it; the exit status."""
    if arguments is None and sys.getfilesystemencoding() != "utf-8":
        from tunerd.machine.process import begin_in_utf_8

        begin_in_utf_8()
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
    except BadCommandLineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if command.wants_help:
        sys.stdout.write(help_text())
        return 0
    if "model.path" not in dict(command.settings) and not command.wants_version:
        sys.stderr.write(_NO_MODEL)
        return 1
    try:
        import xllamacpp
    except ImportError:
        sys.stderr.write(_MISSING)
        return 1
    if command.wants_version:
        sys.stderr.write(_version(xllamacpp))
        return 0
    return _serve(command, xllamacpp)


def _version(library: Any) -> str:
    """The version in llama-server's shape; the wheel names the build in the last part of its own."""
    release = str(library.__version__)
    info = library.BUILD_INFO
    build = info["build_number"] or release.rpartition(".")[2]
    return (
        f"version: {release} (build {build}, commit {info['commit']})\n"
        f"built with {info['compiler']} for {info['build_target']}\n"
    )


def _serve(command: CommandLine, library: Any) -> int:
    params = library.CommonParams()
    # Where the library's defaults are not llama-server's.
    n_threads = len(os.sched_getaffinity(0))
    defaults = (("port", 8080), ("n_parallel", -1), ("cpuparams.n_threads", n_threads))
    for field, value in (*defaults, *command.settings):
        apply_setting(params, field, value, library)
    _follow_threads(params)

    # Until the model is loaded a signal ends the process, as it ends llama-server.
    for number in _STOPPING:
        signal.signal(number, signal.SIG_DFL)
    try:
        server = library.Server(params)
    except RuntimeError:
        return 1  # the engine has said why
    _wait_for_signal()
    _wait_for_main_loop(params)
    del server  # waits for requests that run
    return 0


def _wait_for_signal() -> None:
    """Return at the first stopping signal; a second one ends the process at once.

    It has to: the engine's shutdown keeps Python from running, so no handler of ours could. The
    byte in the socket makes sure that a signal just before the wait is not missed.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    for number in _STOPPING:
        signal.signal(number, lambda _number, _frame: None)
    reader.recv(1)
    for number in _STOPPING:
        signal.signal(number, signal.SIG_DFL)


def _wait_for_main_loop(params: Any) -> None:
    """Return when the engine's main loop runs.

    The engine can be ready a moment before that, and told to stop then it would hang for ever
    (seen in 4 of 60 starts on a busy machine, xllamacpp 2026.10.11549). The loop answers this.
    """
    host, keys = params.hostnames[0], params.api_keys
    credentials = f"Authorization: Bearer {keys[0]}\r\n" if keys else ""
    request = f"GET /lora-adapters HTTP/1.0\r\n{credentials}\r\n"
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, params.port), timeout=_LOOP_S) as connection,
    ):
        connection.sendall(request.encode())
        connection.recv(1)


def _follow_threads(params: Any) -> None:
    """Threads that were not given are as many as those that they follow in llama-server."""
    draft = params.speculative.draft
    for follower, leader in (
        (params.cpuparams_batch, params.cpuparams),
        (draft.cpuparams, params.cpuparams),
        (draft.cpuparams_batch, draft.cpuparams),
    ):
        if follower.n_threads < 1:
            follower.n_threads = leader.n_threads


def apply_setting(params: Any, field: str, value: Any, library: Any) -> None:
    """Set a field of the engine's parameters, or add to it."""
    *path, name = field.removeprefix("+").split(".")
    target = reduce(getattr, path, params)
    value = _resolved(value, library)
    if field.startswith("+"):
        value = _added(getattr(target, name), value)
    setattr(target, name, value)
    # The bit keeps the model's own recommendation from replacing a sampling default.
    bits, bit = library.common_params_sampling_config, f"COMMON_PARAMS_SAMPLING_CONFIG_{name}"
    if path == ["sampling"] and hasattr(bits, bit.upper()):
        target.user_sampling_config |= int(getattr(bits, bit.upper()))


def _resolved(value: Any, library: Any) -> Any:
    if isinstance(value, Member):
        return getattr(getattr(library, value.enum), value.name)
    if isinstance(value, tuple):
        return [_resolved(part, library) for part in value]
    return value


def _added(present: Any, value: Any) -> Any:
    if isinstance(present, Mapping):
        return {**present, **value}
    return present | set(value) if isinstance(present, set) else [*present, *value]


if __name__ == "__main__":
    sys.exit(main())
