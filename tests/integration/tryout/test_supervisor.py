"""tunerd's own supervisor: the contract of a service manager, what its units say, what callers send, and deaths."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.lease import LeaseContract
from tests.contracts.service_manager import UNIT as CONTRACT_UNIT
from tests.contracts.service_manager import RealProcessesContract
from tests.support.fakes import FakeClock
from tests.support.folders import ROOT, SUPPORT
from tests.support.needs import needs_root
from tests.support.supervised import (
    end_supervisor,
    is_alive,
    processes_with,
    supervised,
    supervisor_pid,
    wait_until_gone,
)
from tests.support.waiting import LIMIT_S, until
from tunerd.errors import Busy, NoSupervisor, ServiceError
from tunerd.machine.clock import SystemClock
from tunerd.machine.process import Setting, User, run
from tunerd.paths import Paths
from tunerd.tryout.local import (
    Local,
    UnitLog,
    UnitRecord,
    current_boot,
    read_record,
    write_record,
)
from tunerd.tryout.local_service import EXIT_EXEC
from tunerd.tryout.supervisor import supervise
from tunerd.units.manager import UnitState, lease_unit

UNIT = "server.service"
TOY = SUPPORT / "toy_service.sh"
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    with supervised(tmp_path) as paths:
        yield paths


@pytest.fixture
def manager(paths: Paths) -> Local:
    return Local(paths, may_start=True)


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def toy(tmp_path: Path) -> str:
    """A copy, so that what is left of it after a test can be told by its path."""
    return str(shutil.copy(TOY, tmp_path / "toy"))


class OneSupervisor:
    """One for a whole contract, of which every test leaves no unit."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
        with supervised(tmp_path_factory.mktemp("contract")) as paths:
            yield Local(paths, may_start=True)

    @pytest.fixture
    def manager(self, shared: Local) -> Iterator[Local]:
        yield shared
        for unit in {CONTRACT_UNIT, *shared.service_units()}:
            shared.stop(unit)
            shared.disable(unit)
            for folder in (shared.unit_dir, shared.runtime_unit_dir):
                (folder / unit).unlink(missing_ok=True)
            shared.reset_failed(unit)
        shared.reload()


class TestLeasesOfLocal(OneSupervisor, LeaseContract):
    pass


class TestLocal(OneSupervisor, RealProcessesContract):
    pass


def test_a_stranger_who_locks_the_state_folder_keeps_no_supervisor_from_starting(
    manager: Local, paths: Paths
) -> None:
    paths.state_dir.mkdir(parents=True)
    folder = os.open(paths.state_dir, os.O_RDONLY)  # as everybody may, for it is readable
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        manager.reload()
    finally:
        os.close(folder)
    assert (paths.state_dir / "supervise.lock").stat().st_mode & 0o077 == 0


# What a unit says reaches its program


@pytest.fixture
def probe(tmp_path: Path) -> str:
    """A copy that other accounts can reach too."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)
    return str(shutil.copy(SUPPORT / "probe_service.py", tmp_path / "probe.py"))


def wait_for_json(path: Path) -> dict[str, Any]:
    until(path.exists, f"{path} is written")
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def start_probe(
    manager: Local, probe: str, out: Path, *, options: str = "", service: str = ""
) -> dict[str, Any]:
    put(manager, f"{PYTHON} -IS {probe} {out}", options, service)
    manager.restart(UNIT)
    return wait_for_json(out)


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


def test_a_log_that_grew_too_long_is_put_aside_while_its_server_writes(paths: Paths) -> None:
    log = UnitLog(paths, UNIT, max_bytes=1000)
    log.note(SystemClock(), "a" * 32, "Started")
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


def test_a_lease_ends_with_its_holder_though_that_said_more_than_was_asked(
    manager: Local, paths: Paths, toy: str
) -> None:
    started(manager, toy)
    unit = lease_unit("a" * 12)
    wanted: dict[str, Any] = {"version": 1, "op": "lease", "unit": unit, "production": UNIT}
    wanted |= {"restores": True, "limit_s": 600}
    with connect(paths) as channel:
        assert ask(channel, json.dumps(wanted).encode() + b"\n")["ok"]
        channel.sendall(b"x")

    eventually(manager, lambda state: state.is_active)


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

    stranger = run(argv, Setting(user=User.named("nobody")), timeout_s=20)
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


# Whatever dies, there is one server, and it is found again


def put(manager: Local, toy: str, options: str = "", service: str = "") -> None:
    manager.unit_dir.mkdir(parents=True, exist_ok=True)
    (manager.unit_dir / UNIT).write_text(
        f"[Service]\nType=exec\nExecStart={toy} {options}\n{service}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    manager.reload()


def started(manager: Local, toy: str, options: str = "", service: str = "") -> UnitState:
    put(manager, toy, options, service)
    manager.start(UNIT)
    return manager.state(UNIT)


def eventually(manager: Local, holds: Callable[[UnitState], bool]) -> UnitState:
    def look() -> UnitState | None:
        state = manager.state(UNIT)
        return state if holds(state) else None

    found = until(look, lambda: str(manager.state(UNIT)))
    assert found is not None
    return found


def pid_of(manager: Local) -> int:
    pid = manager.state(UNIT).main_pid
    assert pid is not None
    return pid


def kill_supervisor(paths: Paths) -> None:
    end_supervisor(paths, signal.SIGKILL)


def supervised_again(manager: Local) -> Local:
    manager.ensure_supervisor()
    return manager


def test_a_server_outlives_a_killed_supervisor_is_taken_over_and_started_again_where_it_dies(
    manager: Local, paths: Paths, toy: str
) -> None:
    before = started(manager, toy, "--print up", "Restart=on-failure\nRestartSec=0.1")
    eventually(manager, lambda _: "up" in manager.log(UNIT))

    kill_supervisor(paths)

    for after in (manager.state(UNIT), supervised_again(manager).state(UNIT)):
        assert after.is_active
        assert (after.main_pid, after.invocation_id) == (before.main_pid, before.invocation_id)
        assert after.active_since_s == pytest.approx(before.active_since_s, abs=2)
    assert "up" in manager.log(UNIT, invocation_id=before.invocation_id)
    manager.start(UNIT)
    # What it forks for its `sleep` has its name for a moment.
    eventually(manager, lambda _: processes_with(toy) == {before.main_pid})

    os.kill(pid_of(manager), signal.SIGKILL)
    again = eventually(manager, lambda it: it.is_active and it.main_pid != before.main_pid)
    assert again.n_restarts == 1

    manager.stop(UNIT)

    state = manager.state(UNIT)
    assert (state.active_state, state.result) == ("inactive", "success")
    assert processes_with(toy) == set()


def test_a_server_whose_record_still_says_that_it_starts_is_not_started_again(
    manager: Local, paths: Paths, toy: str
) -> None:
    before = started(manager, toy, service="Restart=no")
    kill_supervisor(paths)
    write_record(paths, replace(read_record(paths, UNIT), intent="starting"))

    manager.ensure_supervisor()

    after = eventually(manager, lambda state: state.is_active)
    assert (after.main_pid, after.invocation_id) == (before.main_pid, before.invocation_id)
    assert read_record(paths, UNIT).intent == "running"


def test_a_server_that_was_taken_over_and_ignores_signals_is_killed(
    manager: Local, paths: Paths, toy: str
) -> None:
    started(manager, toy, "--print up --ignore-term", "TimeoutStopSec=0.5")
    pid = pid_of(manager)
    eventually(manager, lambda _: "up" in manager.log(UNIT))
    kill_supervisor(paths)

    manager.stop(UNIT)

    assert manager.state(UNIT).result == "timeout"
    wait_until_gone(pid)


@pytest.mark.parametrize(("restart", "comes_back"), [("on-failure", True), ("no", False)])
def test_a_server_that_died_while_nobody_watched_is_treated_as_failed(
    manager: Local, paths: Paths, toy: str, restart: str, comes_back: bool
) -> None:
    started(manager, toy, service=f"Restart={restart}")
    pid = pid_of(manager)
    kill_supervisor(paths)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    assert not manager.state(UNIT).is_active

    manager.ensure_supervisor()

    state = eventually(manager, lambda state: state.is_active is comes_back)
    assert state.main_pid != pid


def test_what_a_dead_server_left_is_swept_before_it_is_started_again(
    manager: Local, paths: Paths, probe: str, tmp_path: Path
) -> None:
    out, again = tmp_path / "out.json", "Restart=always\nTimeoutStopSec=0.5"
    first = start_probe(manager, probe, out, options="--flee", service=again)
    kill_supervisor(paths)
    os.kill(first["pid"], signal.SIGKILL)
    assert is_alive(first["fled"])
    out.unlink()

    manager.ensure_supervisor()

    assert wait_for_json(out)["pid"] != first["pid"]
    wait_until_gone(first["pid"], first["fled"])


@pytest.mark.parametrize("boot", ["of a day before", current_boot()])
def test_a_stranger_that_has_the_number_of_a_dead_server_by_now_is_left_alone(
    manager: Local, paths: Paths, toy: str, boot: str
) -> None:
    put(manager, toy, service="Restart=always")
    end_supervisor(paths)
    with subprocess.Popen([toy], start_new_session=True) as stranger:
        write_record(paths, UnitRecord(UNIT, stranger.pid, 1, boot, "a" * 32, intent="running"))

        manager.ensure_supervisor()

        state = eventually(manager, lambda state: state.is_active)
        assert state.main_pid != stranger.pid
        assert stranger.poll() is None
        stranger.kill()


def test_an_enabled_unit_starts_though_remains_of_it_must_be_ended_first(
    manager: Local, paths: Paths, toy: str, tmp_path: Path
) -> None:
    fled = tmp_path / "fled"
    shutil.copy(toy, fled)
    put(manager, "/bin/sh", f"-c 'setsid {fled} & exec {toy}'", "Restart=no")
    manager.enable(UNIT)
    manager.start(UNIT)
    eventually(manager, lambda _: bool(processes_with(str(fled))))
    kill_supervisor(paths)
    os.kill(pid_of(manager), signal.SIGKILL)

    eventually(supervised_again(manager), lambda state: state.is_active)


def test_a_unit_whose_restart_got_no_process_is_started_by_the_next_supervisor(
    manager: Local, paths: Paths, toy: str
) -> None:
    service = "Restart=always\nRestartSec=1\n[Unit]\nStartLimitIntervalSec=0"
    started(manager, toy, "--print up", service)
    # its interpreter has begun before it has opened what is to be gone
    eventually(manager, lambda _: "up" in manager.log(UNIT))
    away = Path(toy).rename(f"{toy}.away")
    os.kill(pid_of(manager), signal.SIGKILL)
    eventually(manager, lambda state: state.exit_status == EXIT_EXEC)
    kill_supervisor(paths)
    away.rename(toy)

    manager.ensure_supervisor()

    eventually(manager, lambda state: state.is_active)


def test_many_callers_start_one_supervisor_and_a_second_is_refused_even_with_another_runtime_folder(
    manager: Local, paths: Paths, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: manager.ensure_supervisor(), range(4)))  # raises what one raised
    pid = supervisor_pid(paths)
    assert pid is not None
    assert (paths.runtime_dir / "supervise.pid").read_text() == f"{pid}\n"
    ours = processes_with("tunerd.tryout.supervisor") & processes_with(str(paths.state_dir))
    assert ours == {pid}
    other = replace(paths, runtime_dir=tmp_path / "other")

    with pytest.raises(Busy):
        supervise(other, {})
    with pytest.raises(ServiceError) as caught:
        Local(other, may_start=True, clock=FakeClock()).reload()

    assert "already runs" in (caught.value.cause or "")


def test_without_a_supervisor_nothing_is_changed_and_the_way_out_is_said(paths: Paths) -> None:
    manager = Local(paths, may_start=False)

    assert manager.state(UNIT).load_state == "not-found"
    assert manager.service_units() == ()
    changes = (manager.reload, lambda: manager.start(UNIT), lambda: manager.stop(UNIT))
    for change in (manager.check_ready, *changes):
        with pytest.raises(NoSupervisor) as caught:
            change()
        assert "tunerd supervise" in (caught.value.hint or "")
    assert supervisor_pid(paths) is None


def test_supervisors_killed_at_any_moment_never_leave_two_servers_or_none(
    manager: Local, paths: Paths, toy: str
) -> None:
    """Each round kills the supervisor while a restart is under way, at a moment of its own."""
    chance = random.Random(7)
    for n in range(8):
        policy = f"Restart={('always', 'no')[n % 2]}\nRestartSec=0.1"
        started(manager, toy, service=f"{policy}\n[Unit]\nStartLimitIntervalSec=0")
        pid = supervisor_pid(paths)
        assert pid is not None
        caller = threading.Thread(target=lambda: restart(manager))
        caller.start()
        time.sleep(chance.uniform(0, 0.15))
        os.kill(pid, signal.SIGKILL)
        caller.join()
        wait_until_gone(pid)

        manager.ensure_supervisor()
        eventually(manager, lambda state: state.is_active)
        # The toy waits in `sleep`, whose command line does not name it.
        eventually(manager, lambda state: processes_with(toy) == {state.main_pid})


def restart(manager: Local) -> None:
    with contextlib.suppress(ServiceError):  # the supervisor was killed under it
        manager.restart(UNIT)


def test_no_supervisor_starts_in_a_folder_that_others_may_write(paths: Paths) -> None:
    paths.runtime_dir.mkdir()
    paths.runtime_dir.chmod(0o777)

    with pytest.raises(ServiceError) as caught:
        Local(paths, may_start=True).reload()

    assert "not a private folder" in (caught.value.cause or "")


def test_a_supervisor_in_the_foreground_that_is_asked_to_end_stops_its_units_first(
    paths: Paths, toy: str, tmp_path: Path
) -> None:
    names = {"CONFIG": "config", "STATE": "state", "RUNTIME": "runtime", "UNIT": "unit"}
    folders = {
        f"TUNERD_{name}_DIR": str(getattr(paths, f"{folder}_dir")) for name, folder in names.items()
    }
    manager = Local(paths)
    manager.unit_dir.mkdir(parents=True)
    (manager.unit_dir / UNIT).write_text(
        f"[Service]\nExecStart={toy} --slow-term 0.5\nRestart=always\n"
        "[Install]\nWantedBy=a.target\n"
    )
    manager.enable(UNIT)
    assert manager.state(UNIT).is_enabled, "told without a supervisor"
    with (tmp_path / "err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunerd", "supervise"],
            cwd=ROOT, env={**os.environ, **folders}, stderr=errors,
        )  # fmt: skip
    try:
        eventually(manager, lambda state: state.is_active)
        server = pid_of(manager)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert not is_alive(server)
    assert not (paths.runtime_dir / "supervise.sock").exists()
    assert not (paths.runtime_dir / "supervise.pid").exists()
    state = manager.state(UNIT)
    assert (state.active_state, state.main_pid) == ("inactive", None)
    assert "supervisor ended" in (tmp_path / "err").read_text()
