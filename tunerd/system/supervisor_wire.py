"""How the supervisor is talked to: a Unix socket, one JSON line a request, one an answer.

{"version": 1, "op": "start", "unit": "llama-server.service"}
{"version": 1, "ok": true, "result": {}}
{"version": 1, "ok": false, "error": {"code": "service", "message": "...", "cause": null, "hint": null}}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunerd.errors import HostError, JobCanceled, NoSupervisor, OldSupervisor, ServiceError

VERSION = 1
SOCKET_NAME = "supervise.sock"
PID_NAME = "supervise.pid"
MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")
# How supervisors of every version begin these answers: what an older one says cannot be changed.
UNKNOWN_REQUEST = "the supervisor does not know this request"
_OTHER_VERSION = "the supervisor speaks version"


def make_private_folder(folder: Path) -> None:
    """A folder of ours that nobody else may enter or change.

    Raises:
        HostError: It belongs to somebody else, or others may write it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise HostError(f"cannot create {folder}", cause=error.strerror) from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HostError(
            f"not a private folder: {folder}",
            hint=f"`chmod go-w {folder}`, or name another with TUNERD_RUNTIME_DIR",
        )


@contextlib.contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """A short name for the socket in `folder`: the kernel takes no more than 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def listen(folder: Path) -> socket.socket:
    """The supervisor's socket, open to its owner alone; what a dead one left is replaced."""
    with contextlib.suppress(FileNotFoundError):
        (folder / SOCKET_NAME).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    previous = os.umask(0o177)
    try:
        with _reachable(folder) as name:
            listener.bind(name)
    finally:
        os.umask(previous)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def is_allowed(connection: socket.socket) -> bool:
    """Whether the other end is this account or root."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return uid in {0, os.geteuid()}


def request(folder: Path, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The result of one request.

    Raises:
        NoSupervisor: Nobody listens.
        ServiceError: The supervisor refused, ended, or did not answer within `timeout_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
        return request_on(channel, folder, message, timeout_s=timeout_s)


def request_on(
    channel: socket.socket, folder: Path, message: Mapping[str, Any], *, timeout_s: float
) -> dict[str, Any]:
    """As `request`, on a new socket that stays open.

    Raises:
        NoSupervisor: Nobody listens.
        ServiceError: The supervisor refused, ended, or did not answer within `timeout_s`.
    """
    line = json.dumps({"version": VERSION, **message}).encode() + b"\n"
    try:
        channel.settimeout(timeout_s)
        with _reachable(folder) as name:
            channel.connect(name)
        channel.sendall(line)
        answer, pid = _read_line(channel), _process_of(channel)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NoSupervisor(
            "tunerd's supervisor does not run",
            hint="`tunerd apply` starts it, and so does `tunerd supervise`",
        ) from error
    except TimeoutError as error:
        raise ServiceError(
            f"{message['op']} did not finish within {timeout_s:.0f} s",
            hint="the supervisor goes on with it",
        ) from error
    except OSError as error:
        raise ServiceError("tunerd's supervisor cannot be reached", cause=str(error)) from error
    return _result(answer, str(message["op"]), pid)


def _process_of(channel: socket.socket) -> int:
    """The process that listens at the other end."""
    data = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def _read_line(channel: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = channel.recv(_CHUNK_BYTES)
        received += chunk
        if not chunk or len(received) > MAX_ANSWER_BYTES:
            raise ConnectionError("the supervisor ended before it answered")
    return bytes(received)


def _result(answer: bytes, op: str, pid: int) -> dict[str, Any]:
    try:
        data = json.loads(answer)
        if data["ok"]:
            return dict(data["result"])
        error = data["error"]
        if str(error["message"]).startswith((UNKNOWN_REQUEST, _OTHER_VERSION)):
            raise _old(op, error["message"], pid)
        kind = JobCanceled if error["code"] == JobCanceled.code else ServiceError
        raised = kind(error["message"], cause=error["cause"], hint=error["hint"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise ServiceError("tunerd's supervisor answered nonsense", cause=str(wrong)) from wrong
    raise raised


def _old(op: str, message: str, pid: int) -> OldSupervisor:
    """What to do about a supervisor that was there before an upgrade."""
    return OldSupervisor(
        "tunerd's supervisor was started by another version of tunerd",
        cause=f"asked for `{op}`: {message}",
        state="nothing was touched",
        hint=f"`kill -9 {pid}` ends the supervisor alone, and what it serves goes on; the next command "
        "that changes something (this one) starts a new supervisor, which takes it over. "
        f"(`kill {pid}` would stop what it serves first.)",
    )


def accept_request(line: bytes) -> dict[str, Any]:
    """The request on this line.

    Raises:
        ServiceError: It is none, or of another version.
    """
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ServiceError("not a request") from error
    if not isinstance(data, dict) or not isinstance(data.get("op"), str):
        raise ServiceError("not a request")
    if data.get("version") != VERSION:
        raise ServiceError(
            f"{_OTHER_VERSION} {VERSION} of its protocol, not {data.get('version')}",
            hint="it was started by another version of tunerd: end it with SIGTERM and start it anew",
        )
    return data


def good_answer(result: Mapping[str, Any]) -> bytes:
    """A line that says that it was done."""
    return json.dumps({"version": VERSION, "ok": True, "result": dict(result)}).encode() + b"\n"


def bad_answer(error: ServiceError) -> bytes:
    """A line that says why it was not done."""
    told = {
        "code": error.code,
        "message": error.message,
        "cause": error.cause,
        "hint": error.hint,
    }
    return json.dumps({"version": VERSION, "ok": False, "error": told}).encode() + b"\n"
