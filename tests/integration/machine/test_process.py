"""Programs are run and started for real."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forked import Forked, running
from tests.support.needs import needs_root
from tests.support.supervised import processes_with, wait_until_gone
from tests.support.waiting import until
from tunerd.errors import HostError
from tunerd.machine.host import process_facts
from tunerd.machine.process import (
    MINIMAL_ENVIRONMENT,
    Completed,
    Interrupts,
    Setting,
    User,
    all_processes,
    family_of,
    members,
    own_command,
    run,
    start,
)

FACTS = """
import os
fds = sorted(int(n) for n in os.listdir("/proc/self/fd"))
import ctypes, json, resource, signal, sys  # Python 3.14's ctypes keeps a file open
print(json.dumps({
    "env": dict(os.environ), "cwd": os.getcwd(), "ids": [*os.getresuid(), *os.getresgid()],
    "groups": os.getgroups(), "umask": os.umask(0), "argv": sys.argv[1:],
    "limits": {n: resource.getrlimit(getattr(resource, "RLIMIT_" + n))
               for n in ("CPU", "DATA", "FSIZE", "NOFILE", "CORE", "MEMLOCK")},
    "no_new_privs": [l.split()[1] for l in open("/proc/self/status") if l.startswith("NoNewPrivs")],
    "session": os.getsid(0), "pid": os.getpid(),
    "fds": fds,
}))
"""
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


def begun(program: Callable[[], Completed], n_lines: int = 1) -> Completed:
    """The end of a program that has printed so much before: on a busy machine its limit may come first."""
    done: list[Completed] = []

    def has_printed() -> bool:
        done.append(program())
        return done[-1].stdout.count("\n") >= n_lines

    until(has_printed, "it begins")
    return done[-1]


@pytest.fixture
def stray() -> Iterator[list[int]]:
    """Pids that a test expects to be gone; whatever happens they are not left behind."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_family_is_what_was_started_by_whoever_and_holds_each_process_once() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        sleep = int(shell.stdout.readline())
        try:
            assert sorted(family_of(shell.pid)) == sorted({shell.pid, sleep})
            both = family_of(os.getpid(), shell.pid)
            assert {os.getpid(), shell.pid, sleep} <= {*both}
            assert len(both) == len({*both}), "what is started from here is counted once"
            assert os.getppid() not in both
            assert family_of(sleep) == (sleep,)
        finally:
            os.kill(sleep, signal.SIGKILL)
    assert family_of(shell.pid, sleep) == ()


def test_a_program_runs_with_a_minimal_environment_and_no_shell() -> None:
    done = run([PYTHON, "-c", FACTS, "a b", "$HOME", "*", "äö\udcff"], timeout_s=20)

    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert done.signal is None
    environment = {k: v for k, v in facts["env"].items() if k != "LC_CTYPE"}
    assert environment == dict(MINIMAL_ENVIRONMENT)
    assert facts["argv"] == ["a b", "$HOME", "*", "äö\udcff"]
    assert facts["session"] == facts["pid"]


def test_how_a_program_ended_is_told_with_all_that_it_printed() -> None:
    for program, said in (("no-such", "no such program: no-such"), ("/no/such", "cannot run /no")):
        with pytest.raises(HostError, match=said):
            run([program], timeout_s=5)
    done = run(["sh", "-c", "printf '%0300000d' 7; echo bad >&2; exit 3"], timeout_s=20)
    assert (len(done.stdout), done.stderr, done.returncode) == (300_000, "bad\n", 3)
    assert not done.is_ok
    killed = run(["sh", "-c", "kill -SEGV $$"], timeout_s=20)
    assert (killed.returncode, killed.signal) == (None, signal.SIGSEGV)


def test_a_program_that_prints_for_ever_is_cut_off_and_eats_no_memory() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    done = begun(lambda: run(["sh", "-c", "yes; true"], timeout_s=1.0, max_output_bytes=10_000))

    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert done.timed_out
    assert done.truncated
    assert len(done.stdout) == 10_000
    assert after_kib - before_kib < 20_000


def test_a_timeout_kills_children_and_grandchildren_in_other_groups(stray: list[int]) -> None:
    # By `set -m` each job has a group of its own.
    script = "trap '' TERM; set -m; echo $$; sleep 60 & echo $!; (sleep 60 & echo $!; wait) & wait"

    done = begun(lambda: run(["bash", "-c", script], timeout_s=1.5), 3)

    stray += [int(pid) for pid in done.stdout.split()]
    assert done.timed_out
    assert done.took_s < 30
    wait_until_gone(*stray)


def test_a_signal_amid_the_start_of_a_program_leaves_none_to_itself() -> None:
    """Ctrl-C left a `systemctl restart` of the swap beside its way back, in half of the starts that it met."""
    wait = f"30.{os.getpid()}"

    def run_until_told(after_s: float) -> None:
        with Interrupts():
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
            run(["sleep", wait], timeout_s=20.0)

    for n_steps in range(30):
        with pytest.raises(SystemExit):
            run_until_told(n_steps * 0.0002)

    assert processes_with(wait) == set()


def test_what_was_printed_just_before_the_end_is_not_lost() -> None:
    for _ in range(30):
        done = run(["sh", "-c", "printf '%060000d' 7; exit 1"], timeout_s=20)
        assert len(done.stdout) == 60_000


def test_a_child_left_behind_with_the_output_open_delays_nothing(stray: list[int]) -> None:
    done = run(["sh", "-c", "echo hello; sleep 60 & echo $!"], timeout_s=30)

    word, pid = done.stdout.split()
    stray.append(int(pid))
    assert word == "hello"
    assert not done.timed_out
    assert done.took_s < 20
    wait_until_gone(*stray)


def test_limits_hold_and_signals_are_as_by_default() -> None:
    limits = {"CPU": 7, "DATA": 512 << 20, "FSIZE": 1 << 20, "NOFILE": 50, "MEMLOCK": 65536}

    facts = json.loads(run([PYTHON, "-c", FACTS], Setting(limits=limits), timeout_s=20).stdout)

    assert facts["limits"] == {
        "CPU": [7, 7],
        "DATA": [512 * 2**20, 512 * 2**20],
        "FSIZE": [2**20, 2**20],
        "NOFILE": [50, 50],
        "CORE": [0, 0],
        "MEMLOCK": [65536, 65536],
    }
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup begins a program
    try:
        signals = run(
            ["grep", "Sig[BI]", "/proc/self/status"], Setting(limits=limits), timeout_s=20
        ).stdout
    finally:
        signal.signal(signal.SIGHUP, before)
    assert {int(line.split()[1], 16) for line in signals.splitlines()} == {0}
    assert facts["fds"] == [0, 1, 2, 3]  # 3 is the listing itself


@needs_root
def test_another_user_has_its_groups_and_no_way_back() -> None:
    nobody = User.named("nobody")
    user = User(nobody.uid, nobody.gid, (nobody.gid, 12345))

    done = run([PYTHON, "-c", FACTS], Setting(user=user), timeout_s=20)

    facts = json.loads(done.stdout)
    assert facts["ids"] == [user.uid] * 3 + [user.gid] * 3
    assert set(facts["groups"]) == {user.gid, 12345}
    assert facts["no_new_privs"] == ["1"]


@needs_root
def test_a_folder_that_the_other_user_may_not_enter_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    with pytest.raises(HostError) as caught:
        run(["true"], Setting(user=User.named("nobody"), cwd=tmp_path), timeout_s=20)

    assert "cannot change directory" in str(caught.value.cause)


def test_leaving_the_block_kills_a_server_and_what_it_started(stray: list[int]) -> None:
    with running("sh", "-c", "trap '' TERM; sleep 60 & echo $!; wait") as child:
        stray += [child.pid, int(child.log_tail())]

    wait_until_gone(*stray)
    assert not any(one.session == child.pid and one.is_alive for one in all_processes())


FLED = (
    "setsid sh -c 'sleep 60 & echo $!; : >there; wait' & until [ -e there ]; do sleep 0.01; done; "
)


@pytest.mark.parametrize(
    ("after", "timeout_s", "end"),
    [
        ("kill -SEGV $$", 20.0, (None, signal.SIGSEGV)),
        ("exit 5", 20.0, (5, None)),
        ("sleep 60", 3.0, (None, signal.SIGKILL)),
    ],
)
def test_what_fled_the_session_ends_with_a_program_that_keeps_together(
    tmp_path: Path,
    stray: list[int],
    after: str,
    timeout_s: float,
    end: tuple[int | None, int | None],
) -> None:
    together = Setting(cwd=tmp_path, keeps_together=True)
    done = begun(lambda: run(["sh", "-c", FLED + after], together, timeout_s=timeout_s))

    stray += [int(line) for line in done.stdout.split()]
    assert len(stray) == 1
    wait_until_gone(*stray)
    assert (done.returncode, done.signal) == end


def test_a_program_is_not_executed_if_it_could_not_be_recorded(tmp_path: Path) -> None:
    seen: list[int] = []

    def refuse(pid: int) -> None:
        seen.append(pid)
        raise OSError(28, "No space left on device")

    with pytest.raises(HostError, match="cannot run"):
        start(["touch", str(tmp_path / "ran")], Setting(on_spawn=refuse))

    wait_until_gone(*seen)
    assert not (tmp_path / "ran").exists()


def test_a_program_is_not_executed_if_its_parent_dies_before_recording_it(tmp_path: Path) -> None:
    def begin(tell: Callable[[object], None]) -> None:
        def die(pid: int) -> None:
            tell(pid)
            os.kill(os.getpid(), signal.SIGKILL)

        start(["touch", str(tmp_path / "ran")], Setting(on_spawn=die))

    code, told = Forked(begin).end()

    assert code == -signal.SIGKILL
    wait_until_gone(int(told))
    assert not (tmp_path / "ran").exists()


def test_a_program_may_be_bound_to_the_life_of_its_parent(stray: list[int]) -> None:
    def begin(tell: Callable[[object], None]) -> None:
        tell(start(["sleep", "60"], Setting(keeps_together=True)).pid)
        os.kill(os.getpid(), signal.SIGKILL)

    stray.append(int(Forked(begin).end()[1]))
    wait_until_gone(*stray)


def test_a_process_that_fled_its_session_is_still_found_by_what_it_was_started_with(
    stray: list[int],
) -> None:
    script = "setsid sh -c 'echo $$; exec sleep 60' & sleep 60"
    named = Setting(env={"INVOCATION_ID": "ab" * 16})
    with running("sh", "-c", script, setting=named) as child:
        stray.append(int(child.log_tail()))

        found = members(
            session=child.pid, ancestor=child.pid, variable=("INVOCATION_ID", "ab" * 16)
        )

    assert {child.pid, stray[0]} <= set(found)
    assert os.getpid() not in found


def test_tunerds_own_command_takes_no_module_from_the_folder_that_it_runs_in(
    tmp_path: Path,
) -> None:
    (tmp_path / "tunerd").mkdir()
    (tmp_path / "tunerd/__init__.py").write_text("print('not tunerd')")
    (tmp_path / "tunerd/__main__.py").write_text("")

    done = run(own_command("local", "--version"), Setting(os.environ, tmp_path), timeout_s=60)

    assert done.stdout.startswith("tunerd ")


def test_a_running_process_is_described() -> None:
    code = "import time; print(1, flush=True); time.sleep(60)"
    with running(sys.executable, "-c", code, "an argument") as process:
        facts = process_facts(process.pid)

    assert facts is not None
    assert facts.cmdline is not None
    assert facts.cmdline[-1] == "an argument"
    assert facts.rss_mib is not None
    assert facts.rss_mib > 2
    assert facts.read_bytes is not None


@needs_root
def test_what_another_user_may_not_see_is_unknown() -> None:

    def look(tell: Callable[[object], None]) -> None:
        os.setuid(65534)
        facts = process_facts(os.getppid())
        tell(facts and (facts.read_bytes, facts.rss_mib is not None))

    assert Forked(look).end() == (0, "(None, True)\n")
