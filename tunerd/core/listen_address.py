"""The address that the page listens on, as written in the settings."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A numeric address and a port; `is_loopback` where only this machine can reach it."""

    host: str
    port: int
    is_loopback: bool

    @property
    def name(self) -> str:
        """As a Host header has it, without the port."""
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_listen(text: str) -> ListenAddress:
    """`127.0.0.1:8765`, `[::1]:8765` or `localhost:8765` as an address.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    name, colon, port = text.rpartition(":")
    is_number = port.isdecimal() and port.isascii()
    if not colon or not is_number or not 0 < int(port) <= _HIGHEST_PORT:
        raise ValueError("ADDRESS:PORT, such as 127.0.0.1:8765")
    plain = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if plain == "localhost":
        plain = "127.0.0.1"
    try:
        address = ipaddress.ip_address(plain)
    except ValueError as error:
        raise ValueError("ADDRESS:PORT with a numeric address, such as 127.0.0.1:8765") from error
    return ListenAddress(str(address), int(port), address.is_loopback)
