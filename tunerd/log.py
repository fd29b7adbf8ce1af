"""structlog, configured once by the entry points.

Pretty on a terminal. Under systemd an entry of the journal with its priority and every field
(`journalctl -o json`), or, where journald does not take it, a line with the `<N>` prefix.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import struct
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

SOCKET = Path("/run/systemd/journal/socket")
# A datagram on this socket may be larger; what is longer is cut rather than lost.
_MOST_BYTES = 32 * 1024
_NO_KEY = re.compile(r"[^A-Z0-9_]")
_MOST_KEY = 60


class Journal:
    """What journald takes.

    Args:
        path: Its socket.
    """

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = str(path)
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._channel.settimeout(1.0)

    def send(self, message: str, priority: int, fields: Mapping[str, object]) -> bool:
        """One entry; whether journald has taken it.

        Args:
            message: For people.
            priority: As syslog's, 0 (worst) to 7.
            fields: Further ones, by their names in the journal.
        """
        own = {"MESSAGE": message, "PRIORITY": priority, "SYSLOG_IDENTIFIER": "tunerd"}
        data = b"".join(_field(name, value) for name, value in {**own, **fields}.items())
        if len(data) > _MOST_BYTES:
            data = _field("MESSAGE", message[: _MOST_BYTES // 4]) + _field("PRIORITY", priority)
        try:
            self._channel.sendto(data, self._path)
        except OSError:
            return False
        return True


def field_name(name: str) -> str:
    """A key of ours as the journal allows it: `TUNERD_` and capital letters."""
    return f"TUNERD_{_NO_KEY.sub('_', name.upper())}"[:_MOST_KEY]


def _field(name: str, value: object) -> bytes:
    data = str(value).encode("utf-8", "backslashreplace")
    key = name.encode("ascii")
    if b"\n" not in data:
        return b"%s=%s\n" % (key, data)
    return b"%s\n%s%s\n" % (key, struct.pack("<Q", len(data)), data)


_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


class _JournalRenderer:
    """`<6>swap.applied generation=14 ...`: journald removes the prefix and keeps the priority.

    What the journal has taken itself is not rendered any more.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._render = structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        priority = _PRIORITY.get(method, 6)
        name = event.pop("event", "")
        fields = {field_name(key): value for key, value in event.items() if value is not None}
        rest = self._render(logger, method, event)
        line = f"{name} {rest}".strip().replace("\n", "\\n")
        fields["TUNERD_EVENT"] = name
        if self._journal is not None and self._journal.send(line, priority, fields):
            raise structlog.DropEvent
        return f"<{priority}>{line}"


def printable(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """An event whose texts a terminal does not obey: they may be the last words of a server."""
    return {key: repr(value)[1:-1] if isinstance(value, str) and not value.isprintable() else value
            for key, value in event.items()}  # fmt: skip


class _StandardError:
    """Where lines are lost, and the program goes on, while nothing can be written: a disk is full, or journald is away."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(*, level: str, is_unit: bool) -> None:
    """Set up logging to standard error.

    Args:
        level: debug, info, warning or error; another word is info.
        is_unit: Whether journald is spoken to by its own protocol, with every field.
    """
    processors: list[Any] = []
    renderer: Any = _JournalRenderer(Journal() if is_unit else None)
    if sys.stderr.isatty() and not is_unit:
        processors += [
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso"),
            printable,
        ]
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*processors, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        ),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
        cache_logger_on_first_use=True,
    )
