"""The API as the daemon runs it: its web part as a process, its sockets, and who may ask the daemon."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_box import STRANGER
from tests.support.faked import set_to
from tests.support.local_box import Box
from tests.support.needs import needs_root
from tests.support.ports import free_port
from tests.support.waiting import until
from tunerd.cli.terminal import Remote
from tunerd.errors import HostError
from tunerd.jobs import jobs
from tunerd.machine.peers import inherited_sockets, peer_of, unix_socket
from tunerd.result import ignore_progress
from tunerd.watch.history import Telemetry
from tunerd.web.app import ask
from tunerd.web.part import Answering, ApiPart, Desk

SOCKET = "tunerd.sock"

LIMIT_S = 180.0


@contextmanager
def running(folder: Path, **page: str) -> Iterator[ApiPart]:
    """The part with these settings of the page, as soon as its web part answers."""
    variables = {f"TUNERD_PAGE__{name.upper()}": value for name, value in page.items()}
    part = ApiPart(Box(folder, variables).context, Telemetry())
    part.start()
    try:
        until_answered(folder)
        yield part
    finally:
        part.stop()


def until_answered(folder: Path) -> None:
    def answers() -> bool:
        try:
            Remote(folder / "run" / SOCKET, ignore_progress).ask("/api/jobs")
        except HostError:
            return False
        return True

    until(answers, "the web part answers")


def status_at(port: int, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    with closing(connection):
        connection.request("GET", "/api/jobs", headers=headers)
        return connection.getresponse().status


def web_part(folder: Path) -> int:
    """The pid of whoever listens."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(folder / "run" / SOCKET))
        pid = peer_of(channel).pid
    assert pid is not None
    return pid


def test_without_a_socket_from_systemd_it_makes_its_own_and_no_port(tmp_path: Path) -> None:
    path = tmp_path / "run" / SOCKET
    with running(tmp_path):
        assert Remote(path, ignore_progress).ask("/api/jobs")[0] == 200
        assert path.stat().st_mode & 0o777 == 0o600
    with running(tmp_path):  # over what the first one left
        assert Remote(path, ignore_progress).ask("/api/jobs")[0] == 200


def test_the_page_listens_where_the_settings_say_and_those_taken_over_hold_for_its_answers_too(
    tmp_path: Path,
) -> None:
    port = free_port()
    with running(tmp_path, listen=f"localhost:{port}") as part:
        assert status_at(port) == (200 if os.geteuid() else 403), "root has the socket"
        assert status_at(port, Host="box.lan") == 421
        client = Remote(tmp_path / "run" / SOCKET, ignore_progress)
        assert client.ask("/api/status")[2]["unit"] == "llama-server.service"
        # As the page's settings stay, so does the web part, which would be away for a moment.
        page = {"page__listen": f"localhost:{port}"}
        part.take_over(set_to(Box(tmp_path).context, service__unit="other.service", **page))
        assert client.ask("/api/status")[2]["unit"] == "other.service"


def test_settings_of_before_end_nothing_and_say_what_took_their_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    page = {"listen": f"0.0.0.0:{port}", "token_file": "/none"}
    with running(tmp_path, **page), pytest.raises(OSError, match="refused"):
        status_at(port)
    out, err = capfd.readouterr()
    assert "page.token_file is no longer used" in out
    assert "does not listen on 0.0.0.0: others can reach it there" in err
    assert "ssh -L" in err


def test_a_web_part_that_dies_is_started_again_and_none_outlives_the_daemon(tmp_path: Path) -> None:
    box = Box(tmp_path)
    daemon = subprocess.Popen([sys.executable, "-m", "tunerd", "daemon"], env=box.environment)
    try:
        until_answered(tmp_path)
        first = web_part(tmp_path)
        os.kill(first, signal.SIGKILL)
        until_answered(tmp_path)
        second = web_part(tmp_path)
        assert second != first
    finally:
        daemon.kill()
        daemon.wait(timeout=LIMIT_S)
    until(lambda: not Path(f"/proc/{second}").exists(), "it ends too, and leaves the socket")


@needs_root
def test_nobody_but_the_web_parts_account_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    heard: list[bytes] = []

    def answer(line: bytes) -> bytes:
        heard.append(line)
        return b"{}"

    for uid in (STRANGER, None):
        answering = Answering(unix_socket(path, group=None), uid, answer)
        answering.start()
        try:
            with pytest.raises(HostError, match="does not answer"):
                ask(path, b"{}")
        finally:
            answering.stop()
    assert heard == [], "root is at the other end, and is not the one either"


def test_questions_that_are_none_cost_nobody_else_theirs(tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    answering = Answering(unix_socket(path, group=None), os.geteuid(), lambda line: line[::-1])
    answering.start()
    try:
        silent = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        for one in silent:
            one.connect(str(path))
        assert ask(path, b"abc") == b"cba"
        for one in silent:
            one.close()
        with pytest.raises(HostError):
            ask(path, b"x" * 1024 * 1024)
        assert ask(path, b"abc") == b"cba"
    finally:
        answering.stop()


def test_it_ends_in_time_though_nobody_who_asks_is_answered(tmp_path: Path) -> None:
    """A daemon that does not is killed, and the next one takes for a power cut what was a reboot."""
    path, answers, asked = tmp_path / "daemon.sock", threading.Event(), list[bytes]()

    def answer(line: bytes) -> bytes:
        asked.append(line)
        answers.wait(LIMIT_S)
        return line

    answering = Answering(unix_socket(path, group=None), os.geteuid(), answer)
    answering.start()
    with contextlib.ExitStack() as open_ones:
        open_ones.callback(answers.set)
        for _ in range(24):
            one = open_ones.enter_context(socket.socket(socket.AF_UNIX))
            one.connect(str(path))
            one.sendall(b"status\n")
        until(lambda: len(asked) == 16, "as many as it answers at once")
        ending = threading.Thread(target=answering.stop, daemon=True)
        ending.start()
        ending.join(10.0)
        assert not ending.is_alive()


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"do": "exec", "argv": ["status"]}, 400),
        ({"argv": ["status"], "uid": -1}, 400),
        ({"argv": ["status"], "sh": "id"}, 400),
        ({"argv": ["job", "1"]}, 400),
        ({"argv": ["history", "show", "--", "-1"]}, 400),
        ({"argv": ["report", "--output", "/etc/cron.d/x"]}, 400),
        ({"argv": ["apply", "cpu-embedded-baseline", "--set=model.path=evil", "--yes"]}, 400),
        ({"look": "/etc/shadow"}, 404),
        ({"look": "news", "given": {"number": -1, "offset": 0}}, 400),
    ],
)
def test_whatever_the_web_part_asks_is_checked_again(
    tmp_path: Path, asked: dict[str, Any], status: int
) -> None:
    ctx = Box(tmp_path).context
    desk = Desk(ctx, Telemetry())

    envelope, _, told = json.loads(desk.answer(json.dumps({"uid": 0, **asked}).encode()))

    assert told == status
    assert "error" in envelope
    assert jobs(ctx).payload["jobs"] == []


def test_sockets_of_another_process_are_not_taken() -> None:
    assert inherited_sockets({"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid() + 1)}) == ()
    assert inherited_sockets({"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())}) == ()
    assert inherited_sockets({}) == ()
