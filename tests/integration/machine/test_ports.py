"""Whether a port can be bound by whoever comes next."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tunerd.machine.net import can_bind, free_port, is_in_use, n_connections


def test_a_port_that_nobody_used_can_be_bound() -> None:
    port = free_port()
    assert can_bind("127.0.0.1", port)
    assert not is_in_use("127.0.0.1", port)


def test_a_port_that_somebody_listens_on_cannot() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not can_bind("127.0.0.1", listener.getsockname()[1])
        assert is_in_use("127.0.0.1", listener.getsockname()[1])


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
    assert not is_in_use("127.0.0.1", port)
    with socket.socket() as again:  # as the same server would, started again
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_port_that_is_bound_is_in_use_though_nobody_listens() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        assert is_in_use("127.0.0.1", holder.getsockname()[1])


def test_a_host_by_name_may_have_any_connection_of_its_port() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.2", port)):
            assert n_connections(port, "a-host-by-name") > 0
            assert n_connections(port, "127.0.0.1") == 0


def test_an_address_of_another_machine_is_not_in_use() -> None:
    assert not is_in_use("192.0.2.1", free_port())


def test_a_free_port_is_not_one_that_outgoing_connections_get() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 2048:
        pytest.skip("all ports are for outgoing connections here")
    assert all(1024 <= free_port() < lowest for _ in range(20))
