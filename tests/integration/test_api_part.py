"""The API as the daemon runs it: its sockets, its token, and what it does when one cannot be had."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.local_box import Box
from tests.support.server_process import free_port
from tunerd.actions.telemetry import Telemetry
from tunerd.core.listen_address import parse_listen
from tunerd.errors import ConfigError
from tunerd.system.api_client import ApiClient
from tunerd.system.listen import inherited_sockets
from tunerd.system.token_file import read_token
from tunerd.web.part import SOCKET, ApiPart

TOKEN = "0123456789abcdef-of-a-test"  # noqa: S105 -- of a test


@contextmanager
def running(folder: Path, **page: str) -> Iterator[Path]:
    """The part with these settings of the page; its socket."""
    variables = {f"TUNERD_PAGE__{name.upper()}": value for name, value in page.items()}
    part = ApiPart(Box(folder, variables).context, Telemetry())
    part.start()
    try:
        yield folder / "run" / SOCKET
    finally:
        part.stop()


def status_at(port: int, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("GET", "/api/jobs", headers=headers)
        return connection.getresponse().status


def test_without_a_socket_from_systemd_it_makes_its_own_and_no_port(tmp_path: Path) -> None:
    with running(tmp_path) as path:
        assert ApiClient(path).get("/api/jobs").status == 200
        assert path.stat().st_mode & 0o777 == 0o600
    with running(tmp_path) as path:  # over what the first one left
        assert ApiClient(path).get("/api/jobs").status == 200


def test_the_page_listens_where_the_settings_say(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path, listen=f"localhost:{port}") as path:
        assert status_at(port) == 200
        assert status_at(port, Host="box.lan") == 421
        assert ApiClient(path).get("/api/jobs").status == 200


def test_settings_that_were_taken_over_hold_for_its_answers_too(tmp_path: Path) -> None:
    ctx = Box(tmp_path).context
    part = ApiPart(ctx, Telemetry())
    part.start()
    try:
        client = ApiClient(tmp_path / "run" / SOCKET)
        assert client.get("/api/status").envelope["unit"] == "llama-server.service"
        service = ctx.settings.service.model_copy(update={"unit": "other.service"})
        part.take_over(replace(ctx, settings=ctx.settings.model_copy(update={"service": service})))
        assert client.get("/api/status").envelope["unit"] == "other.service"
    finally:
        part.stop()


def test_where_others_can_reach_it_a_token_is_demanded_and_the_socket_serves_all_the_same(
    tmp_path: Path,
) -> None:
    port = free_port()
    with running(tmp_path, listen=f"0.0.0.0:{port}") as path:
        with pytest.raises(OSError, match="refused"):
            status_at(port)
        assert ApiClient(path).get("/api/jobs").status == 200

    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with running(tmp_path, listen=f"0.0.0.0:{port}", token_file=str(token)):
        forwarded = {"X-Forwarded-For": "192.0.2.7"}
        assert status_at(port, **forwarded) == 401
        assert status_at(port, **forwarded, Authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_may_read_or_change_is_none(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)

    with pytest.raises(ConfigError, match="others than its owner"):
        read_token(path)


def test_a_token_that_can_be_guessed_or_is_not_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("short\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="shorter than 16"):
        read_token(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="shorter than 16"):
        read_token(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("127.0.0.1:8765", "127.0.0.1", 8765, True),
        ("localhost:1", "127.0.0.1", 1, True),
        ("[::1]:8765", "::1", 8765, True),
        ("[2001:db8::1]:80", "2001:db8::1", 80, False),
        ("192.168.1.5:65535", "192.168.1.5", 65535, False),
    ],
)
def test_an_address_to_listen_on_is_read_as_written(
    text: str, host: str, port: int, is_loopback: bool
) -> None:
    found = parse_listen(text)
    assert (found.host, found.port, found.is_loopback) == (host, port, is_loopback)


@pytest.mark.parametrize("text", ["", "8765", "127.0.0.1", "127.0.0.1:0", "box:80", "127.0.0.1:99999",
                                  "127.0.0.1:8x", "::1:80:"])  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ADDRESS:PORT"):
        parse_listen(text)


def test_sockets_of_another_process_are_not_taken() -> None:
    assert inherited_sockets({"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid() + 1)}) == ()
    assert inherited_sockets({"LISTEN_FDS": "x", "LISTEN_PID": str(os.getpid())}) == ()
    assert inherited_sockets({}) == ()
