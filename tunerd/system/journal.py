"""Log lines to journald with their fields, by its own protocol.

Source: systemd's "Native Journal Protocol": one datagram of `KEY=value` lines; a value with line
breaks as the key alone, its length as 64 bits little-endian, and its bytes.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

SOCKET = Path("/run/systemd/journal/socket")
# A datagram on this socket may be larger; what is longer is cut rather than lost.
_MOST_BYTES = 32 * 1024
_NO_KEY = re.compile(r"[^A-Z0-9_]")
_MOST_KEY = 60


class Journal:
    """A connection to journald, kept open.

    Args:
        path: Its socket.
    """

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = str(path)
        self._channel: socket.socket | None = None

    def send(self, message: str, priority: int, fields: Mapping[str, object]) -> bool:
        """One entry; whether journald has taken it.

        Args:
            message: For people.
            priority: As syslog's, 0 (worst) to 7.
            fields: Further ones, by their names in the journal.
        """
        data = b"".join(
            [
                _field("MESSAGE", message),
                _field("PRIORITY", priority),
                _field("SYSLOG_IDENTIFIER", "tunerd"),
                *(_field(name, value) for name, value in fields.items()),
            ]
        )
        if len(data) > _MOST_BYTES:
            data = _field("MESSAGE", message[: _MOST_BYTES // 4]) + _field("PRIORITY", priority)
        try:
            self._opened().sendall(data)
        except OSError:
            self.close()
            return False
        return True

    def _opened(self) -> socket.socket:
        if self._channel is None:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            try:
                channel.settimeout(1.0)
                channel.connect(self._path)
            except OSError:
                channel.close()
                raise
            self._channel = channel
        return self._channel

    def close(self) -> None:
        """Let go of the socket; the next entry connects again."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.close()
            self._channel = None


def field_name(name: str) -> str:
    """A key of ours as the journal allows it: `TUNERD_` and capital letters."""
    return f"TUNERD_{_NO_KEY.sub('_', name.upper())}"[:_MOST_KEY]


def _field(name: str, value: object) -> bytes:
    data = str(value).encode("utf-8", "backslashreplace")
    key = name.encode("ascii")
    if b"\n" not in data:
        return b"%s=%s\n" % (key, data)
    return b"%s\n%s%s\n" % (key, struct.pack("<Q", len(data)), data)
