"""What a unit says reaches its program; what callers send does not disturb the supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import SUPPORT
from tests.support.supervised import is_alive, supervised, supervisor_pid, wait_until_gone
from tunerd.errors import ServiceError
from tunerd.machine.clock import SystemClock
from tunerd.machine.process import User, run
from tunerd.paths import Paths
from tunerd.tryout.local import Local
from tunerd.tryout.local_state import UnitLog

UNIT = "server.service"
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user: run as root"
)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    with supervised(tmp_path) as paths:
        yield paths


@pytest.fixture
def manager(paths: Paths) -> Local:
    return Local(paths, may_start=True)


@pytest.fixture
def probe(tmp_path: Path) -> str:
    """A copy that other accounts can reach too."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)
    return str(shutil.copy(SUPPORT / "probe_service.py", tmp_path / "probe.py"))


def start_probe(
    manager: Local, probe: str, out: Path, *, options: str = "", service: str = ""
) -> dict[str, Any]:
    manager.unit_dir.mkdir(parents=True, exist_ok=True)
    (manager.unit_dir / UNIT).write_text(
        f"[Service]\nType=exec\nExecStart={PYTHON} -IS {probe} {out} {options}\n{service}\n"
    )
    manager.restart(UNIT)
    deadline = time.monotonic() + 20
    while not out.exists():
        assert time.monotonic() < deadline, manager.log(UNIT)
        time.sleep(0.01)
    facts: dict[str, Any] = json.loads(out.read_text())
    return facts


def test_a_program_is_started_as_the_unit_says(manager: Local, probe: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    facts = start_probe(
        manager,
        probe,
        tmp_path / "out",
        options='"a b" $$HOME "q\\"q" ${A} ;x 100%% --key %d/api-key',
        service=f'Environment=A=unit "LIST=one two"\nLoadCredential=api-key:{tmp_path}/a-key\n'
        f"WorkingDirectory={tmp_path}/work\nUMask=0027\nLimitNOFILE=123\nLimitCORE=0\n"
        "LimitMEMLOCK=infinity",
    )

    words = ["a b", "$HOME", 'q"q', "unit", ";x", "100%", "--key", f"{tmp_path}/a-key"]
    assert facts["argv"] == words
    environment = facts["environment"]
    assert (environment["A"], environment["LIST"]) == ("unit", "one two")
    assert environment["INVOCATION_ID"] == manager.state(UNIT).invocation_id
    assert "TUNERD_STATE_DIR" not in environment
    assert "PYTHONPATH" not in environment
    assert (facts["folder"], facts["umask"]) == (f"{tmp_path}/work", 0o027)
    assert (facts["n_files"], facts["core"]) == ([123, 123], [0, 0])
    soft, hard = facts["memlock"]
    assert soft == hard  # as far as the machine allows


@needs_root
def test_a_unit_may_run_as_another_user(manager: Local, probe: str, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    facts = start_probe(manager, probe, tmp_path / "open/out", service="User=nobody")

    assert facts["ids"][0] != 0
    assert facts["environment"]["USER"] == "nobody"
    assert facts["folder"] == "/"


def test_a_start_that_fails_before_the_program_says_why(
    manager: Local, probe: str, tmp_path: Path
) -> None:
    with pytest.raises(ServiceError) as caught:
        start_probe(manager, probe, tmp_path / "out", service="User=no-such-user-here")

    assert "no-such-user-here" in (caught.value.cause or "")
    state = manager.state(UNIT)
    assert (state.active_state, state.result, state.exit_status) == ("failed", "exit-code", 203)
    assert any("no-such-user-here" in line for line in manager.log(UNIT))


def test_what_fled_into_its_own_session_is_stopped_too(
    manager: Local, probe: str, tmp_path: Path
) -> None:
    facts = start_probe(
        manager, probe, tmp_path / "out", options="--flee", service="TimeoutStopSec=0.5"
    )
    assert is_alive(facts["fled"])

    manager.stop(UNIT)

    wait_until_gone(facts["pid"], facts["fled"])


def test_a_log_that_grew_too_long_is_put_aside_while_its_server_writes(
    paths: Paths,
) -> None:
    log = UnitLog(paths, UNIT, max_bytes=1000)
    clock = SystemClock()
    log.note(clock, "a" * 32, "Started")
    descriptor = log.open()
    try:
        for number in range(200):
            os.write(descriptor, f"line {number}\n".encode())
        log.rotate()
        os.write(descriptor, b"after\n")
    finally:
        os.close(descriptor)

    assert log.path.read_text() == "after\n"
    lines = log.lines(invocation_id="a" * 32, max_lines=1000)
    assert lines[0] == f"{UNIT}: Started"
    assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(200)]
    assert lines[-1] == "after"


def test_a_half_line_of_a_dead_server_does_not_swallow_the_next_start(paths: Paths) -> None:
    log = UnitLog(paths, UNIT)
    clock = SystemClock()
    log.note(clock, "a" * 32, "Started")
    descriptor = log.open()
    os.write(descriptor, b"half a li")
    os.close(descriptor)

    log.note(clock, "b" * 32, "Started")

    assert log.lines(invocation_id="a" * 32, max_lines=9) == (f"{UNIT}: Started", "half a li")
    assert log.lines(invocation_id="b" * 32, max_lines=9) == (f"{UNIT}: Started",)


def test_a_server_starts_where_nothing_can_be_logged_or_remembered(
    manager: Local, probe: str, tmp_path: Path, paths: Paths
) -> None:
    (paths.log_dir / f"{UNIT}.log").mkdir(parents=True)
    (paths.state_dir / "supervise").write_text("a file where a folder should be")

    assert start_probe(manager, probe, tmp_path / "out")["pid"] > 0
    assert manager.state(UNIT).is_active


# The socket


def connect(paths: Paths) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(20)
    channel.connect(str(paths.runtime_dir / "supervise.sock"))
    return channel


def ask(channel: socket.socket, line: bytes) -> dict[str, Any]:
    channel.sendall(line)
    answer: dict[str, Any] = json.loads(channel.makefile("rb").readline())
    return answer


NONSENSE = (
    b"\n",
    b"nonsense\n",
    b"[]\n",
    b'{"op": "ping"}\n',
    b'{"version": 2, "op": "ping"}\n',
    b'{"version": 1}\n',
    b'{"version": 1, "op": "explode", "unit": "a.service"}\n',
    b'{"version": 1, "op": "start", "unit": "../../etc/passwd"}\n',
    b'{"version": 1, "op": "start", "unit": "a.mount"}\n',
    b'{"version": 1, "op": "start"}\n',
    b'{"version":1,"op":"ping","x":' + b"[" * 60_000 + b"\n",
)


def test_a_request_that_makes_no_sense_is_refused_and_one_without_end_cut_off(
    manager: Local, paths: Paths
) -> None:
    manager.ensure_supervisor()
    pid = supervisor_pid(paths)

    for line in NONSENSE:
        with connect(paths) as channel:
            answer = ask(channel, line)
        assert answer["ok"] is False, line
        assert answer["error"]["message"]
    with connect(paths) as channel, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendall(b"x" * 1_000_000)
        assert channel.recv(1) == b""

    assert supervisor_pid(paths) == pid


@needs_root
def test_another_account_gets_no_answer_even_if_it_reaches_the_socket(
    manager: Local, paths: Paths, probe: str
) -> None:
    assert probe  # opens the way to the folder
    manager.ensure_supervisor()
    assert (paths.runtime_dir / "supervise.sock").stat().st_mode & 0o777 == 0o600
    assert paths.runtime_dir.stat().st_mode & 0o077 == 0
    paths.runtime_dir.chmod(0o755)
    (paths.runtime_dir / "supervise.sock").chmod(0o777)
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(10);"
        's.connect(sys.argv[1]); s.sendall(b\'{"version": 1, "op": "ping"}\\n\');'
        "print(repr(s.recv(100)))"
    )
    argv = [PYTHON, "-c", code, str(paths.runtime_dir / "supervise.sock")]

    stranger = run(argv, timeout_s=20, user=User.named("nobody"))
    friend = run(argv, timeout_s=20)

    assert '"ok"' not in stranger.stdout
    assert stranger.stdout.strip() == "b''" or "Error: [Errno" in stranger.stderr
    assert '"ok": true' in friend.stdout


def test_a_folder_with_a_long_name_is_no_hindrance(tmp_path: Path) -> None:
    with supervised(tmp_path / ("x" * 120)) as paths:
        manager = Local(paths, may_start=True)
        manager.reload()

        assert len(str(paths.runtime_dir / "supervise.sock")) > 108
        assert supervisor_pid(paths) is not None
