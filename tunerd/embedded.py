"""`tunerd-llama-server`: the real llama.cpp server, run from the PyPI package xllamacpp.

It takes llama-server's options, refuses what it cannot honour in llama-server's words, logs to
stderr and exits like it: 1 when it cannot start, 0 after a signal. A second signal kills it, where
llama-server would exit with 1; and so does a first one while the model is loaded, which here lasts
until some milliseconds after the server said that it is ready.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.core.embedded_command import (
    BadCommandLineError,
    CommandLine,
    Files,
    help_text,
    parse_command,
)
from tunerd.core.embedded_options import DEFAULT_PORT
from tunerd.core.embedded_values import Member, Setting

_MISSING = """\
error: the engine library is not installed

hint: `pip install 'tunerd[embedded]'` installs it
"""
_NO_MODEL = """\
error: no model to serve

hint: `-m FILE` names one; this server has no router mode
"""
_LOOP_S = 10.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it; the exit status."""
    files = Files(read=lambda path: Path(path).read_text("utf-8"), is_folder=os.path.isdir)
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments, files)
    except BadCommandLineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if command.wants_help:
        sys.stdout.write(help_text())
        return 0
    if not any(setting.field == "model.path" for setting in command.settings) and (
        not command.wants_version
    ):
        sys.stderr.write(_NO_MODEL)
        return 1
    try:
        import xllamacpp  # noqa: PLC0415 (--help and refusals must not pay for the engine)
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
    for warning in command.warnings:
        sys.stderr.write(f"{warning}\n")
    params = library.CommonParams()
    apply_settings(params, _defaults(), library)
    apply_settings(params, command.settings, library)
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
    with contextlib.suppress(OSError), _connected(host, params.port) as connection:
        connection.sendall(request.encode())
        connection.recv(1)


def _connected(host: str, port: int) -> socket.socket:
    if not host.endswith(".sock"):
        return socket.create_connection((host, port), timeout=_LOOP_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_LOOP_S)
    connection.connect(host)
    return connection


def _defaults() -> tuple[Setting, ...]:
    """Where the library's defaults are not llama-server's."""
    n_threads = len(os.sched_getaffinity(0))
    return (
        Setting("port", DEFAULT_PORT),
        Setting("n_parallel", -1),
        Setting("cpuparams.n_threads", n_threads),
    )


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


def apply_settings(params: Any, settings: Iterable[Setting], library: Any) -> None:
    """Set the fields of the engine's parameters, in order."""
    for setting in settings:
        *path, field = setting.field.split(".")
        target = params
        for name in path:
            target = getattr(target, name)
        value = _resolved(setting.value, library)
        if setting.is_bit:
            value = getattr(target, field) | int(value)
        elif setting.is_added:
            value = _added(getattr(target, field), value)
        setattr(target, field, value)


def _resolved(value: Any, library: Any) -> Any:
    if isinstance(value, Member):
        return getattr(getattr(library, value.enum), value.name)
    if isinstance(value, tuple):
        return [_resolved(part, library) for part in value]
    return value


def _added(present: Any, value: Any) -> Any:
    if isinstance(present, Mapping):
        return {**present, **value}
    if isinstance(present, set):
        return present | {value}
    return [*present, value]


if __name__ == "__main__":
    sys.exit(main())
