"""Whether a port can be bound by whoever comes next."""

from __future__ import annotations

import socket

from tunerd.system.ports import can_bind, free_port


def test_a_port_that_nobody_used_can_be_bound() -> None:
    assert can_bind("127.0.0.1", free_port())


def test_a_port_that_somebody_listens_on_cannot() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not can_bind("127.0.0.1", listener.getsockname()[1])


def test_a_port_whose_server_closed_a_connection_first_cannot_be_bound_for_a_while() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the server says goodbye first
            assert client.recv(1) == b""
    assert not can_bind("127.0.0.1", port)
    with socket.socket() as again:  # as the same server would, started again
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
