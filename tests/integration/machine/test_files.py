"""Durable files and the lock: whole or untouched, whatever happens on the way."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked import Forked
from tests.support.lossy_disk import tiny_disk
from tests.support.needs import needs_root
from tests.support.programs import ProgramFailed, program
from tests.support.waiting import LIMIT_S
from tunerd.errors import Busy, HostError, UsageError
from tunerd.machine.files import (
    MAX_READ_BYTES,
    Files,
    demand_free,
    destination,
    is_full,
    is_locked,
    lock,
    make_private,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Writing.


def test_files_and_folders_have_their_mode_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "c" / "d"
    before = os.umask(0o077)
    try:
        Files().write(tmp_path / "a", b"x")
        Files().write(tmp_path / "b", b"x", mode=0o600)
        Files().make_folder(folder, mode=0o711)
        with lock(tmp_path / "state" / "lock", purpose="apply", since="now"):
            pass
    finally:
        os.umask(before)
    Files().make_folder(folder)
    made = (tmp_path / "a", tmp_path / "b", folder, tmp_path / "state")
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o644, 0o600, 0o711, 0o755]
    assert names(tmp_path) == ["a", "b", "c", "state"]


@needs_root
def test_a_copy_keeps_mode_owner_and_content(tmp_path: Path) -> None:
    source, target = tmp_path / "u.service", tmp_path / "u.service.pre-x"
    source.write_bytes(b"[Unit]\n\xff\x00")
    source.chmod(0o640)
    os.chown(source, 1234, 5678)
    Files().copy(source, target)
    status = target.stat()
    assert target.read_bytes() == b"[Unit]\n\xff\x00"
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, 1234, 5678)
    assert source.stat().st_ino != status.st_ino  # a link would follow an edit by hand


@needs_root
def test_a_file_is_written_though_its_owner_may_not_be_restored(tmp_path: Path) -> None:
    path = tmp_path / "x.service"
    path.write_text("before")
    os.chown(path, 0, 4321)
    path.chmod(0o640)
    script = (
        "import sys; from pathlib import Path; from tunerd.machine.files import Files; "
        "p = Path(sys.argv[1]); Files().write(p, b'after', like=Files().look(p))"
    )
    confined = ["setpriv", "--inh-caps=-chown", "--bounding-set=-chown", "--no-new-privs"]
    subprocess.run([*confined, sys.executable, "-c", script, str(path)], check=True)

    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.stat().st_gid == 0


@pytest.mark.parametrize("at", range(1, 5))
def test_a_process_that_dies_in_a_write_leaves_old_or_new(at: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    steps: list[str] = []

    def before(step: str) -> None:
        steps.append(step)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    killed = Forked(lambda _: Files(before).write(path, b"new"))
    assert killed.end()[0] == -signal.SIGKILL
    assert path.read_bytes() == (b"old" if at < 4 else b"new")
    left = [name for name in names(tmp_path) if name != "a"]
    assert len(left) == (1 if at in {2, 3} else 0)
    assert all(name.startswith(".a.") and name.endswith(".tmp") for name in left)
    Files().remove_temporaries(tmp_path, "a")
    assert names(tmp_path) == ["a"]


def test_what_is_being_written_is_not_taken_for_what_a_dead_process_left(tmp_path: Path) -> None:
    """A recovery removed it, also between its making and its lock, however long that took: of forty writes about one."""
    ends = threading.Event()

    def tidy(_step: str = "") -> None:
        Files().remove_temporaries(tmp_path)

    def tidy_on() -> None:
        while not ends.is_set():
            tidy()

    other, usual_s = threading.Thread(target=tidy_on), sys.getswitchinterval()
    other.start()
    sys.setswitchinterval(1e-6)  # so that it comes in between
    try:
        for n in range(300):
            Files(tidy).write(tmp_path / "a", b"%d" % n)
    finally:
        sys.setswitchinterval(usual_s)
        ends.set()
        other.join()
    assert (tmp_path / "a").read_bytes() == b"299"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "act",
    [
        lambda files, folder: files.write(folder / "missing" / "a", b"x"),
        lambda files, folder: files.write(folder / "folder", b"x"),
        lambda files, folder: files.write(folder / "file" / "a", b"x"),
        lambda files, folder: files.write(folder / ("n" * 300), b"x"),
        lambda files, folder: files.remove(folder / "folder"),
        lambda files, folder: files.make_folder(folder / "file" / "a"),
        lambda files, folder: files.copy(folder / "missing", folder / "a"),
        lambda files, folder: files.copy(folder / "folder", folder / "a"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_ours_and_leaves_nothing(
    act: Callable[[Files, Path], None], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(HostError):
        act(Files(), tmp_path)
    assert names(tmp_path) == ["file", "folder"]


# Reading.


def test_a_file_that_a_person_names_goes_behind_links_and_in_place_of_no_device(
    tmp_path: Path,
) -> None:
    kept, link, pipe = (tmp_path / name for name in ("kept", "link", "pipe"))
    kept.write_text("old")
    link.symlink_to(kept)
    os.mkfifo(pipe)
    assert destination(link) == kept
    assert destination(tmp_path / "new") == tmp_path / "new"
    for other in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(HostError, match="not a plain file"):
            destination(other)
    with pytest.raises(HostError, match="no such folder"):
        destination(kept / "below")


@needs_root
def test_a_link_of_somebody_else_where_all_may_make_some_says_not_what_is_replaced(
    tmp_path: Path,
) -> None:
    """`tunerd report --output /tmp/report.html` as root replaced whatever file an account had put a link to there."""
    precious, everybodys = tmp_path / "precious", tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    link = everybodys / "report.html"
    link.symlink_to(precious)
    assert destination(link) == precious, "root's own"
    folder = everybodys / "folder"
    folder.symlink_to(tmp_path)
    for one in (link, folder):
        os.lchown(one, 54321, 54321)
    for _ in range(2):
        for named in (link, folder / "precious"):
            with pytest.raises(HostError, match="not your link"):
                destination(named)
        precious.touch()
    everybodys.chmod(0o755)
    assert destination(link) == precious, "root's folder, so root has left it there"


@needs_root
def test_what_takes_the_place_of_a_link_is_not_given_to_the_owner_of_what_it_led_to(
    tmp_path: Path,
) -> None:
    files, theirs, unit, backup = Files(), *(tmp_path / name for name in ("theirs", "unit", "pre"))
    theirs.write_text("old")
    theirs.chmod(0o640)
    os.chown(theirs, 1234, 1234)
    unit.symlink_to(theirs)

    files.copy(unit, backup)
    files.write(unit, b"new", like=files.look(unit))

    for path in (unit, backup):
        status = path.lstat()
        assert (status.st_mode, status.st_uid, status.st_gid) == (0o100640, 0, 0)
    assert theirs.stat().st_uid == 1234


def test_only_regular_files_of_some_size_are_read(tmp_path: Path) -> None:
    files = Files()
    assert files.read(tmp_path / "missing") is None
    assert files.look(tmp_path / "missing") is None
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(MAX_READ_BYTES + 1)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("folder", "fifo", "large"):
        with pytest.raises(HostError):
            files.read(tmp_path / name)
    for special in ("/dev/zero", "/dev/null", "/"):
        with pytest.raises(HostError, match="not a regular file"):
            files.read(Path(special))
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open
    with (tmp_path / "large").open("wb") as large:
        large.truncate(MAX_READ_BYTES)
    assert len(files.read(tmp_path / "large") or b"") == MAX_READ_BYTES


@pytest.mark.parametrize("text", ["", "{", "nul", "[" * 100_000, "\xff", "9" * 5000])
def test_json_that_is_none_is_an_error_of_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text.encode("latin-1"))
    with pytest.raises(HostError, match="not valid JSON"):
        Files().read_json(tmp_path / "a")


# A disk that is full, or may not be written.


def fill(folder: Path) -> None:
    descriptor = os.open(folder / "filling", os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, b"x" * 4096)
    finally:
        os.close(descriptor)


ACTS: dict[str, Callable[[Files, Path], None]] = {
    "write": lambda files, folder: files.write(folder / "a", b"new" * 5000),
    "write_json": lambda files, folder: files.write_json(folder / "a", ["new"] * 5000),
    "copy": lambda files, folder: files.copy(folder / "old", folder / "a"),
    "set_aside": lambda files, folder: files.set_aside(folder / "aside", 1024 * 1024),
}


@needs_root
@pytest.mark.parametrize("name", ACTS)
def test_a_full_disk_is_said_and_what_stood_stands(name: str, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "tiny", "256k") as folder:
        (folder / "a").write_bytes(b"old")
        (folder / "old").write_bytes(b"y" * 20_000)
        fill(folder)
        with pytest.raises(HostError) as caught:
            ACTS[name](Files(), folder)
        assert is_full(caught.value)
        assert "No space left" in (caught.value.cause or "")
        assert "free some space" in (caught.value.hint or "")
        assert (folder / "a").read_bytes() == b"old"
        assert names(folder) == ["a", "filling", "old"]


@needs_root
def test_space_that_was_set_aside_is_there_when_the_disk_is_full(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "tiny", "256k") as folder:
        Files().set_aside(folder / "aside", 65536)
        fill(folder)
        with pytest.raises(HostError):
            Files().write(folder / "a", b"x" * 20_000)
        Files().remove(folder / "aside")
        Files().write(folder / "a", b"x" * 20_000)


@needs_root
def test_root_is_told_of_a_file_that_is_immutable(tmp_path: Path) -> None:
    """Some people keep their unit so; root was told to be root."""
    path = tmp_path / "llama-server.service"
    path.write_bytes(b"old")
    try:
        program("chattr", "+i", path)
    except ProgramFailed:
        pytest.skip("the file system of the tests has no such attribute")
    try:
        with pytest.raises(HostError) as caught:
            Files().write(path, b"new")
    finally:
        program("chattr", "-i", path)
    assert f"`lsattr -d {path} {tmp_path}`" in (caught.value.hint or "")
    assert names(tmp_path) == [path.name]


# The lock.


def held(path: Path) -> Forked:
    """Another process that holds the lock until it is killed."""

    def hold(tell: Callable[[object], None]) -> None:
        with lock(path, purpose="apply rtx", since="2026-05-16 12:00:00 UTC"):
            tell("held")
            time.sleep(LIMIT_S)

    other = Forked(hold)
    assert other.told.readline() == "held\n"
    return other


def test_a_second_caller_is_not_told_to_wait_for_a_holder_that_was_stopped(tmp_path: Path) -> None:
    other = held(tmp_path / "lock")
    os.kill(other.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    with pytest.raises(Busy) as caught, lock(tmp_path / "lock", purpose="second", since="now"):
        raise AssertionError
    other.kill()
    assert f"`kill -CONT {other.pid}` resumes it" in (caught.value.hint or "")


def test_a_second_caller_is_told_who_holds_the_lock_which_ends_with_its_process_whatever_happens_to_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state" / "lock"
    assert not is_locked(path)
    other = held(path)
    assert is_locked(path)
    began = time.monotonic()
    with pytest.raises(Busy) as caught, lock(path, purpose="second", since="now"):
        raise AssertionError
    assert time.monotonic() - began < 2
    cause = caught.value.cause or ""
    assert f"tunerd `apply rtx` (process {other.pid}) since 2026-05-16 12:00:00 UTC" in cause
    assert caught.value.exit_code == 75
    other.kill()
    assert not is_locked(path)
    with lock(path, purpose="third", since="now"):
        assert json.loads(path.read_text())["purpose"] == "third"


def lose_locks() -> None:
    """The kernel has no locks for this process from now on, as on a mount of another machine's disk."""
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]  # of flock
    load, jump, give = 0x20, 0x15, 0x06
    refused, allowed = 0x00050000 | errno.ENOLCK, 0x7FFF0000
    lines = [(load, 0, 0, 0), (jump, 0, 1, number), (give, 0, 0, refused), (give, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    whole = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
    libc, wanted = ctypes.CDLL(None), ctypes.create_string_buffer(whole)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.addressof(wanted), 0, 0) == 0  # PR_SET_SECCOMP, a filter


def test_where_nothing_can_be_locked_nobody_is_said_to_hold_it(tmp_path: Path) -> None:
    """`status` told of a change under way for ever, and for that the daemon recovered and guarded nothing."""
    path = tmp_path / "lock"
    path.touch()

    def try_it(tell: Callable[[object], None]) -> None:
        lose_locks()
        tell(is_locked(path))
        with pytest.raises(HostError) as refused, lock(path, purpose="apply", since="now"):
            pass
        tell(f"{refused.value.cause}; {refused.value.hint}")

    code, told = Forked(try_it).end()
    assert code == 0, told
    locked, refused = told.splitlines()
    assert locked == "False"
    assert "No locks available; files cannot be locked on its file system" in refused


def test_a_program_that_was_started_under_the_lock_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock(path, purpose="x", since="now"):
        child = subprocess.Popen(["/bin/sleep", "30"])
    try:
        assert not is_locked(path)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("note", ["", "{", "[]", "5", "[" * 4000, '{"pid": 1}', "\x00" * 100])
def test_a_lock_whose_note_is_odd_is_held_all_the_same(note: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock(path, purpose="one", since="now"):
        path.write_text(note)
        with pytest.raises(Busy) as caught, lock(path, purpose="two", since="now"):
            pass
        assert "another tunerd holds the lock" in (caught.value.cause or "")


def test_a_lock_that_is_a_link_or_whose_folder_cannot_be_made_says_that_nothing_was_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "lock").symlink_to(tmp_path / "file")
    for path in (tmp_path / "lock", tmp_path / "file/state/lock"):
        with pytest.raises(HostError) as caught, lock(path, purpose="apply", since="now"):
            pytest.fail("there is no place for it")
        assert caught.value.state == "nothing was changed by this call"


def test_nobody_else_can_hold_what_this_tunerd_locks(tmp_path: Path) -> None:
    store, log = tmp_path / "store.db", tmp_path / "store.db-wal"
    (tmp_path / "lock").touch()
    (tmp_path / "lock").chmod(0o644)
    for path in (tmp_path / "lock", tmp_path / "new"):
        with lock(path, purpose="a test", since="now"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    make_private(store, log)
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert not log.exists()
    store.write_text("kept")
    for path in (store, log):
        path.touch()
        path.chmod(0o644)
    make_private(store, log)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (store, log)] == [0o600] * 2
    assert store.read_text() == "kept"


def test_only_a_file_is_said_to_be_replaced_by_force(tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    for name, hint in (("made", "--force replaces it"), (".", "give another path")):
        with pytest.raises(UsageError) as refused:
            demand_free(tmp_path / name)
        assert refused.value.hint == hint


@needs_root
def test_what_is_in_a_folder_is_listed_and_who_may_not_is_told_who_may(tmp_path: Path) -> None:
    """Of the records of swaps it was said that they cannot be read, and not what to do."""
    assert Files().listed(tmp_path / "nowhere") == []
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    def try_it(tell: Callable[[object], None]) -> None:
        os.setuid(65534)
        with pytest.raises(HostError) as refused:
            Files().listed(closed)
        tell(refused.value.hint)

    assert Forked(try_it).end() == (0, "run the command as the owner, or as root\n")
