"""What journald gets: a socket in its place takes the datagrams."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunerd.log import Journal, field_name, printable


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "socket")
    yield made
    made._channel.close()


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "socket"))
        server.settimeout(10)
        yield server


def test_an_entry_has_message_priority_and_fields(
    journald: socket.socket, journal: Journal
) -> None:
    assert journal.send("swap.recovered generation=3", 4, {field_name("found"): "undo"})
    assert journald.recv(65536).decode().splitlines() == [
        "MESSAGE=swap.recovered generation=3", "PRIORITY=4", "SYSLOG_IDENTIFIER=tunerd", "TUNERD_FOUND=undo",
    ]  # fmt: skip


def test_a_value_of_several_lines_cannot_forge_a_field(
    journald: socket.socket, journal: Journal
) -> None:
    journal.send("event", 6, {"TUNERD_TEXT": "one\nPRIORITY=0"})
    entry = journald.recv(65536)
    value = b"one\nPRIORITY=0"
    assert entry.endswith(b"TUNERD_TEXT\n" + struct.pack("<Q", len(value)) + value + b"\n")


def test_what_is_too_long_is_cut_and_not_lost(journald: socket.socket, journal: Journal) -> None:
    assert journal.send("x" * 500_000, 3, {})
    entry = journald.recv(1_000_000)
    assert entry.startswith(b"MESSAGE=xxxx")
    assert b"PRIORITY=3" in entry


def test_without_journald_nothing_is_taken_and_a_new_one_is_found(
    journal: Journal, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    assert journal.send("lost", 6, {}) is False
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            server.bind(str(path))
            server.settimeout(10)
            assert journal.send("first", 6, {}) or journal.send("again", 6, {})
            assert server.recv(65536).startswith(b"MESSAGE=")
        path.unlink()


def test_names_become_what_the_journal_allows() -> None:
    assert field_name("last.swap-ms") == "TUNERD_LAST_SWAP_MS"
    assert len(field_name("x" * 200)) <= 64


def test_a_terminal_obeys_nothing_of_what_a_server_said_last() -> None:
    words = "\x1b]0;mine\x07 out of memory\n\u202e"
    shown = printable(None, "warning", {"event": "server.died", "times": 2, "words": words})
    assert shown == {"event": "server.died", "times": 2, "words": repr(words)[1:-1]}
    assert repr(words).isprintable()


@pytest.mark.parametrize("is_unit", [True, False])
def test_what_logs_goes_on_where_the_log_takes_nothing(*, is_unit: bool) -> None:
    """A full disk below the daemon's log ended it at the first line, such as that its server had died."""
    script = (
        f"import structlog, tunerd.log; tunerd.log.configure(level='info', is_unit={is_unit})\n"
        "log = structlog.get_logger()\nlog.info('daemon.ready')\nlog.warning('server.died')"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", script], stderr=full, check=False)
    assert done.returncode == 0
