"""Who listens, and whether a port can be bound by whoever comes next: with real sockets and processes."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunerd.machine.net import (
    TABLES,
    can_bind,
    free_port,
    is_in_use,
    listening_pid,
    listening_ports,
    n_connections,
    table_pattern,
    who_listens,
    why_no_listener,
)
from tunerd.machine.process import Child, run, start

LISTEN = (
    "import socket, sys, time; s = socket.socket();"
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1);"
    "s.bind((sys.argv[1], int(*sys.argv[2:]))); s.listen();"
    "print(s.getsockname()[1], flush=True); time.sleep(60)"
)


@pytest.fixture
def other() -> Iterator[tuple[Child, int]]:
    """A process that listens on a port of 127.0.0.1."""
    with start([sys.executable, "-c", LISTEN, "127.0.0.1"]) as child:
        while not child.log_tail():
            time.sleep(0.01)
        yield child, int(child.log_tail())


def test_the_listener_is_found(other: tuple[Child, int]) -> None:
    child, port = other

    assert listening_pid(port) == child.pid
    assert listening_pid(port, likely=child.pid) == child.pid
    assert listening_pid(port, likely=os.getpid()) == os.getpid(), "it has started the listener"
    with start([sys.executable, "-c", LISTEN, "127.0.0.1"]) as stranger:
        assert listening_pid(port, likely=stranger.pid) == child.pid
    assert listening_ports(child.pid) == frozenset({port})


def test_a_stranger_who_shares_the_port_of_a_server_is_told_before_it(
    other: tuple[Child, int],
) -> None:
    child, port = other
    with start([sys.executable, "-c", LISTEN, "127.0.0.1", str(port)]) as stranger:
        while not stranger.log_tail():
            time.sleep(0.01)
        assert who_listens(port, "127.0.0.1", child.pid) == stranger.pid
        assert who_listens(port, "127.0.0.1", stranger.pid) == child.pid
    assert who_listens(port, "127.0.0.1", child.pid) == child.pid


def test_a_process_that_listens_on_nothing_has_the_ports_of_what_it_started() -> None:
    script = '"$0" -c "$1" 127.0.0.1; exit'  # the shell stays, and waits
    with start(["sh", "-c", script, sys.executable, LISTEN]) as shell:
        while not shell.log_tail():
            time.sleep(0.01)
        assert listening_ports(shell.pid) == frozenset({int(shell.log_tail())})


def test_a_socket_for_one_address_wins_over_one_for_all(other: tuple[Child, int]) -> None:
    child, port = other
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("0.0.0.0", port))  # noqa: S104
        listener.listen()

        assert listening_pid(port) == child.pid


def lines_of(host: str, port: int) -> list[str]:
    """What `grep` finds with the pattern, as the end of a lease does."""
    done = run(["/usr/bin/grep", "-hE", table_pattern(host, port), *TABLES], timeout_s=30)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("bound", "asked", "is_found"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),  # noqa: S104
        ("::", "127.0.0.1", True),
        ("::", "::1", True),
        ("::1", "::1", True),
        ("::1", "127.0.0.1", False),
        ("127.0.0.2", "127.0.0.1", False),
        ("127.0.0.1", "0.0.0.0", True),  # noqa: S104
        ("127.0.0.1", "localhost", True),
    ],
)
def test_whoever_takes_an_address_is_found_and_so_is_its_line_in_the_kernels_tables(
    bound: str, asked: str, is_found: bool
) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((bound, 0))
        listener.listen()
        port = listener.getsockname()[1]

        assert listening_pid(port, asked) == (os.getpid() if is_found else None)
        assert bool(lines_of(asked, port)) is is_found
    assert lines_of(asked, port) == []


def test_a_port_can_be_bound_while_nobody_listens_on_it() -> None:
    port = free_port()
    assert can_bind("127.0.0.1", port)
    assert not is_in_use("127.0.0.1", port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        assert is_in_use("127.0.0.1", port), "it is bound, though nobody listens"
        listener.listen()
        assert not can_bind("127.0.0.1", port)
    assert not is_in_use("192.0.2.1", port), "an address of another machine"


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
    assert len(lines_of("127.0.0.1", port)) == 1, "the end of a lease waits for it"
    with socket.socket() as again:  # as the same server would, started again
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_host_by_name_may_have_any_connection_of_its_port() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.2", port)):
            assert n_connections(port, "a-host-by-name") > 0
            assert n_connections(port, "127.0.0.1") == 0


def test_a_free_port_is_not_one_that_outgoing_connections_get() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 2048:
        pytest.skip("all ports are for outgoing connections here")
    assert all(1024 <= free_port() < lowest for _ in range(20))


def test_why_nothing_can_listen_on_a_host_is_told_without_a_port() -> None:
    assert [why_no_listener(host) for host in ("127.0.0.1", "0.0.0.0", "localhost")] == [None] * 3  # noqa: S104
    assert why_no_listener("192.0.2.1") == "Cannot assign requested address"
    assert why_no_listener("no-such-box.invalid")
    assert why_no_listener("a..b")
    assert why_no_listener("a b")
