"""Who listens, and whether a port can be bound by whoever comes next: with real sockets and processes."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import needs, ports
from tests.support.forked import Forked, running
from tests.support.sockets import server_that_closed_first
from tunerd.machine.net import (
    TABLES,
    _asked_for,
    can_bind,
    ended,
    forget,
    free_port,
    is_in_use,
    listening_ports,
    n_connections,
    table_pattern,
    tcp_sockets,
    who_listens,
    who_shares,
    why_no_listener,
)
from tunerd.machine.process import Child, run, start
from tunerd.words import PortOption

LISTEN = (
    "import socket, sys, time; s = socket.socket();"
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1);"
    "s.bind((sys.argv[1], int(*sys.argv[2:]))); s.listen();"
    "print(s.getsockname()[1], flush=True); time.sleep(60)"
)


@pytest.fixture
def other() -> Iterator[tuple[Child, int]]:
    """A process that listens on a port of 127.0.0.1."""
    with running(sys.executable, "-c", LISTEN, "127.0.0.1") as child:
        yield child, int(child.log_tail())


def test_the_listener_is_found(other: tuple[Child, int]) -> None:
    child, port = other

    assert who_listens(port) == child.pid
    assert who_listens(port, own=child.pid) == child.pid
    assert who_listens(port, own=os.getpid()) == os.getpid(), "it has started the listener"
    with start([sys.executable, "-c", LISTEN, "127.0.0.1"]) as stranger:
        assert who_listens(port, own=stranger.pid) == child.pid
    assert listening_ports(child.pid) == frozenset({port})


def test_a_stranger_who_shares_the_port_of_a_server_is_told_before_it(
    other: tuple[Child, int],
) -> None:
    child, port = other
    with running(sys.executable, "-c", LISTEN, "127.0.0.1", str(port)) as stranger:
        assert who_listens(port, own=child.pid) == stranger.pid
        assert who_listens(port, own=stranger.pid) == child.pid
    assert who_listens(port, own=child.pid) == child.pid


@pytest.mark.parametrize(
    ("own", "stranger", "is_asked"),
    [("127.0.0.1", "0.0.0.0", False), ("0.0.0.0", "::", False), ("0.0.0.0", "127.0.0.1", True)],  # noqa: S104
)  # fmt: skip
def test_another_listener_shares_a_port_where_the_kernel_would_ask_it(
    own: str, stranger: str, *, is_asked: bool
) -> None:
    """A proxy on `[::]` for a server on `0.0.0.0` is never asked in its place, and nothing of a bench counted."""
    with running(sys.executable, "-c", LISTEN, own) as server:
        port, family = (
            int(server.log_tail()),
            socket.AF_INET6 if ":" in stranger else socket.AF_INET,
        )
        with socket.create_server((stranger, port), family=family, reuse_port=True) as other:
            other.setblocking(False)
            with socket.create_connection(("127.0.0.1", port)):
                assert (other in select.select([other], [], [], 0.2)[0]) is is_asked
            shares = who_shares(port, "127.0.0.1", server.pid)
            assert shares == (os.getpid() if is_asked else None)


def test_a_process_that_listens_on_nothing_has_the_ports_of_what_it_started() -> None:
    script = '"$0" -c "$1" 127.0.0.1; exit'  # the shell stays, and waits
    with running("sh", "-c", script, sys.executable, LISTEN) as shell:
        assert listening_ports(shell.pid) == frozenset({int(shell.log_tail())})


def test_a_socket_for_one_address_wins_over_one_for_all(other: tuple[Child, int]) -> None:
    child, port = other
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("0.0.0.0", port))  # noqa: S104
        listener.listen()

        assert who_listens(port) == child.pid


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
        # Of another address even a port that the kernel has chosen may be somebody else's.
        listener.bind((bound, port := ports.free_port()))
        listener.listen()

        assert who_listens(port, asked) == (os.getpid() if is_found else None)
        assert bool(lines_of(asked, port)) is is_found
    assert lines_of(asked, port) == []


def test_a_port_can_be_bound_while_nobody_listens_on_it() -> None:
    port = free_port()
    assert can_bind("127.0.0.1", port)
    for option in PortOption:
        assert not is_in_use("127.0.0.1", port, option)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            assert is_in_use("127.0.0.1", port, option), "it is bound, though nobody listens"
            listener.listen()
            assert not can_bind("127.0.0.1", port, option)
        assert not is_in_use("192.0.2.1", port, option), "an address of another machine"


@pytest.mark.parametrize("left", PortOption)
def test_a_port_whose_server_closed_a_connection_first_is_free_for_its_like_alone(
    left: PortOption,
) -> None:
    port = server_that_closed_first(left)

    assert not can_bind("127.0.0.1", port)
    for option in PortOption:
        assert can_bind("127.0.0.1", port, option) is (option is left)
        assert is_in_use("127.0.0.1", port, option) is (option is not left)
    assert len(lines_of("127.0.0.1", port)) == 1, "the end of a lease waits for it"


def test_connections_by_another_address_keep_the_port_of_all_addresses() -> None:
    port = server_that_closed_first(PortOption.REUSE_ADDR, "0.0.0.0", "127.0.0.2")  # noqa: S104

    assert can_bind("127.0.0.1", port, PortOption.REUSE_PORT)
    assert not can_bind("0.0.0.0", port, PortOption.REUSE_PORT)  # noqa: S104


@needs.needs_root
@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.2"), ("::", "127.0.0.3"), ("::1", "::1")],  # noqa: S104
)
def test_root_may_have_connections_of_the_past_forgotten_and_those_alone(
    bound: str, asked: str
) -> None:
    port = server_that_closed_first(PortOption.REUSE_PORT, bound, asked)
    other = server_that_closed_first(PortOption.REUSE_PORT, bound, asked)
    assert not can_bind(bound, port)

    forget(ended(bound, port))

    assert can_bind(bound, port)
    assert not can_bind(bound, other), "which is another port's"


@needs.needs_root
def test_a_server_that_listens_by_now_stays_where_a_connection_was_forgotten_meanwhile() -> None:
    port = server_that_closed_first(PortOption.REUSE_ADDR)
    known = ended("127.0.0.1", port)
    forget(known)
    with socket.create_server(("127.0.0.1", port)):
        forget(known)

        assert known
        assert who_listens(port) == os.getpid()


@needs.needs_root
def test_whoever_may_not_have_connections_forgotten_waits() -> None:
    port = server_that_closed_first(PortOption.REUSE_PORT)

    def as_somebody(_tell: object) -> None:
        os.setuid(65534)
        with pytest.raises(PermissionError):
            forget(ended("127.0.0.1", port))

    assert Forked(as_somebody).end() == (0, "")
    assert not can_bind("127.0.0.1", port)


def test_a_host_by_name_may_have_any_connection_of_its_port() -> None:
    address = ("127.0.0.2", port := ports.free_port())
    with socket.create_server(address), socket.create_connection(address):
        assert n_connections(port, "a-host-by-name") > 0
        assert n_connections(port, "127.0.0.1") == 0


def test_a_free_port_is_not_one_that_outgoing_connections_get() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 2048:
        pytest.skip("all ports are for outgoing connections here")
    assert all(1024 <= free_port() < lowest for _ in range(20))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "::"])
def test_what_the_kernel_tells_of_listeners_alone_is_what_its_table_of_all_shows(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        inode = str(os.fstat(listener.fileno()).st_ino)
        told, shown = (  # the table, which is read in pieces, may show one twice
            {one for one in found if one.inode == inode}
            for found in (_asked_for("LISTEN"), tcp_sockets())
        )

        assert told == shown
        assert len(told) == 1


def test_why_nothing_can_listen_on_a_host_is_told_without_a_port() -> None:
    assert [why_no_listener(host) for host in ("127.0.0.1", "0.0.0.0", "localhost")] == [None] * 3  # noqa: S104
    assert why_no_listener("192.0.2.1") == "Cannot assign requested address"
    assert why_no_listener("no-such-box.invalid")
    assert why_no_listener("a..b")
    assert why_no_listener("a b")
