"""sd_notify over real sockets."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunerd.units.systemd import Notifier


@pytest.fixture(params=["path", "abstract"])
def listening(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, socket.socket]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@tunerd-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        receiver.settimeout(5)
        yield name, receiver


def test_every_state_arrives(listening: tuple[str, socket.socket]) -> None:
    name, receiver = listening
    notifier = Notifier({"NOTIFY_SOCKET": name})

    notifier.ready("serving generation 3")
    notifier.alive()
    notifier.stopping()

    assert [receiver.recv(1000).decode() for _ in range(3)] == [
        "READY=1\nSTATUS=serving generation 3",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


def test_a_manager_that_is_none_gone_or_deaf_disturbs_nobody(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    for environment in ({}, {"NOTIFY_SOCKET": "nonsense"}, {"NOTIFY_SOCKET": name}):
        Notifier(environment).ready("watching")


def test_readiness_is_not_lost_in_a_queue_that_is_full_for_a_moment(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name)
        receiver.settimeout(30)
        notifier = Notifier({"NOTIFY_SOCKET": name})
        for _ in range(10_000):
            notifier.alive()
        ready = threading.Thread(target=notifier.ready, args=["watching"])
        ready.start()
        heard = b""
        while not heard.startswith(b"READY=1"):
            heard = receiver.recv(1000)
        ready.join()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_as_often_as_asked(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert Notifier(environment).watchdog_s == seconds


def test_a_patient_watchdog_is_asked_for_only_where_there_is_one(
    listening: tuple[str, socket.socket],
) -> None:
    name, receiver = listening
    Notifier({"NOTIFY_SOCKET": name}).patience(30)
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "60000000"})

    notifier.patience(1800)
    notifier.patience(None)

    assert [receiver.recv(1000).decode() for _ in range(2)] == [
        "WATCHDOG=1\nWATCHDOG_USEC=1800000000",
        "WATCHDOG=1\nWATCHDOG_USEC=60000000",
    ]
