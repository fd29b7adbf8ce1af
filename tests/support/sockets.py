"""What servers leave in the kernel when they are gone."""

from __future__ import annotations

import socket

from tunerd.words import PortOption


def server_that_closed_first(
    option: PortOption, host: str = "127.0.0.1", asked: str = "127.0.0.1"
) -> int:
    """The port of a server that is gone, of which the kernel remembers a connection."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        listener.bind((host, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        with socket.create_connection((asked, port)) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    return port
