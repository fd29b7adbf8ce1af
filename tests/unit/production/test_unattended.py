"""What becomes live without root at the keyboard is nothing by which anybody becomes more than they are."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import pwd
import shutil
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.scenarios import deploy
from tests.fault.world import ENGINE, UNIT, World
from tests.support.profiles import a_plan_for
from tunerd.app import data_dir
from tunerd.engine.probe import changed_files, libraries_of, writable_by_others
from tunerd.engine.serving import address_of, read_live_unit
from tunerd.errors import ConfigError, DeployError, UsageError
from tunerd.machine.files import lock
from tunerd.measure.bench import Session
from tunerd.measure.request import BenchRequest
from tunerd.production.lease import hold
from tunerd.production.plan import check_key
from tunerd.production.probation import begin_probation, daemon_lock
from tunerd.production.rollback import preview, rollback
from tunerd.production.unattended import Named, named_by, why_root_must
from tunerd.result import Level
from tunerd.tryout.local_service import Ending
from tunerd.units.live import is_shell
from tunerd.units.text import parse_unit
from tunerd.watch.daemon import Swaps
from tunerd.watch.figures import Event
from tunerd.watch.probation import take_back

ALICE = 54321
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="the rule is about root's files")


def named(service: str, file_environment: dict[str, str] | None = None) -> Named:
    return named_by(
        parse_unit(f"[Service]\n{service}\n"), file_environment or {}, {"S": "/var/lib"}
    )


# Who runs it.


@pytest.mark.parametrize(
    ("old", "present", "may"),
    [
        ("ExecStart=/x", "ExecStart=/y", False),
        ("ExecStart=/x", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nUser=root", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=0", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=%i", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=alice", "ExecStart=/y", True),
        ("ExecStart=/x\nDynamicUser=yes", "ExecStart=/y", True),
        ("ExecStart=/x\nUser=llama", "ExecStart=/y\nUser=llama", True),
        ("ExecStart=/x\nUser=alice", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=+/x\nUser=llama", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nExecStartPre=!/z\nUser=llama", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nUser=llama\nSupplementaryGroups=docker", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nUser=llama\nAmbientCapabilities=CAP_SYS_ADMIN",
         "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nUser=nobody\nAmbientCapabilities=CAP_SYS_ADMIN", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=nobody\nSupplementaryGroups=docker", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=nobody\nGroup=docker", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=llama\nGroup=llama", "ExecStart=/y", True),
        ("ExecStart=/x\nUser=llama\nOpenFile=/etc/shadow", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nUser=llama\nLoadCredential=key:/etc/key", "ExecStart=/y\nUser=llama", False),
        ("ExecStart=/x\nUser=llama\nStandardError=append:/var/log/x", "ExecStart=/y", False),
        ("ExecStart=/x\nUser=llama\nStandardOutput=journal", "ExecStart=/y\nUser=llama", True),
        ("ExecStart=/x\nUser=llama\nLoadCredential=key:/etc/key",
         "ExecStart=/y\nUser=llama\nLoadCredential=key:/etc/key", True),
    ],
)  # fmt: skip
def test_what_others_may_change_runs_as_no_more_than_what_runs_now(
    old: str, present: str, may: bool
) -> None:
    why = why_root_must(named(old), named(present), ["`/x` belongs to user 1000"])
    assert (why is None) is may
    assert why_root_must(named(old), named(present), []) is None


def test_where_nothing_is_live_nothing_can_be_compared_with() -> None:
    assert why_root_must(named("ExecStart=/x\nUser=llama"), None, ["it is alice's"]) is not None


# What it runs.


def test_every_program_of_every_line_counts_and_what_a_drop_in_replaced_does_not() -> None:
    lines = "ExecStartPre=-/a 1\nExecStart=@/b b -m /data/x\nExecStopPost=/c\nExecReload=/d\n"
    unit = parse_unit(f"[Service]\n{lines}")
    drop_in = parse_unit("[Service]\nExecStart=\nExecStart=/e\nExecStartPre=/f\n")
    assert named_by(unit, {}, {}).programs == ("/a", "/b", "/c", "/d")
    merged = named_by(unit.with_drop_in(drop_in), {}, {})
    assert set(merged.programs) == {"/a", "/c", "/d", "/e", "/f"}


@pytest.mark.parametrize(
    ("service", "path"),
    [
        ("ExecStart=/usr/bin/env /home/alice/run", "/home/alice/run"),
        ("ExecStart=/x --slot-save-path=/home/alice/slots", "/home/alice/slots"),
        ('Environment="LD_LIBRARY_PATH=/opt/cuda:/home/alice/lib"\nExecStart=/x', "/home/alice/lib"),
        ("Environment=LD_PRELOAD=/home/alice/x.so\nExecStart=/x", "/home/alice/x.so"),
        ("EnvironmentFile=-/home/alice/env\nExecStart=/x", "/home/alice/env"),
        ("WorkingDirectory=-/home/alice\nExecStart=/x", "/home/alice"),
        ("Environment=LD_LIBRARY_PATH=/dev/shm/lib\nExecStart=/x", "/dev/shm/lib"),  # noqa: S108
        ("RootDirectory=/home/alice/root\nExecStart=/x", "/home/alice/root"),
        ("BindReadOnlyPaths=/home/alice/bin:/usr/bin\nExecStart=/x", "/home/alice/bin"),
        ("StandardOutput=append:/home/alice/log\nExecStart=/x", "/home/alice/log"),
    ],
)  # fmt: skip
def test_every_path_that_a_unit_names_counts(service: str, path: str) -> None:
    assert path in named(service).paths


def test_what_files_put_into_the_environment_counts() -> None:
    found = named("ExecStart=/x $OPTIONS", {"OPTIONS": "--log-file /home/alice/log"})
    assert "/home/alice/log" in found.paths


def test_a_pattern_for_files_and_the_folder_of_settings_are_read_as_systemd_does(
    world: World,
) -> None:
    folder = world.folder / "env.d"
    folder.mkdir()
    (folder / "1.env").write_text("LLAMA_ARG_PORT=1\nLLAMA_ARG_HOST=::1\n")
    (folder / "2.env").write_text("LLAMA_ARG_PORT=2\n")
    text = f"[Service]\nEnvironmentFile=-{folder}/*.env\nExecStart={ENGINE} -m %E/llama.gguf\n"
    world.unit_path.write_text(text)
    world.manager.reload()

    found = read_live_unit(world.context()).serving

    assert (found.host, found.port, found.model) == ("::1", 2, "/etc/llama.gguf")


@pytest.mark.parametrize(
    "service",
    [
        "ExecStart=/x --model /home/alice/x.gguf -m /home/alice/y --model=/home/alice/z",
        "Environment=LLAMA_ARG_MODEL=/home/alice/x.gguf\nExecStart=/x",
        "ExecStart=/x --webhook http://host/path >/dev/null",
        "LoadCredential=api-key:/home/alice/key\nExecStart=/x",
    ],
)
def test_data_is_not_what_a_unit_runs(service: str) -> None:
    assert named(service).paths == ()


def test_what_a_shell_runs_cannot_be_told() -> None:
    assert is_shell("/bin/sh")
    assert is_shell("/usr/bin/bash")
    assert not is_shell("/usr/bin/ssh-agent")
    assert not is_shell("/opt/llama-server")
    with pytest.raises(ConfigError):
        named("ExecStart=relative/path")


# Files.


@ROOT_ONLY
def test_a_group_in_which_an_account_is_alone_may_write_what_the_account_may(
    tmp_path: Path,
) -> None:
    """Ubuntu's people have such a group, and a umask of 002."""
    entries = pwd.getpwall()
    first = Counter(one.pw_gid for one in entries)
    alone, shared = (
        next(
            one for one in entries
            if one.pw_gid and (first[one.pw_gid] > 1) is is_shared and not grp.getgrgid(one.pw_gid).gr_mem
        )
        for is_shared in (False, True)
    )  # fmt: skip
    build = tmp_path / "build"
    build.mkdir()
    for owner in (alone, shared):
        os.chown(build, owner.pw_uid, owner.pw_gid)
        build.chmod(0o775)
        who = writable_by_others(build, trusted=owner.pw_uid)
        assert (who is None) is (owner is alone)
    os.chown(build, alone.pw_uid, 12345)
    assert "group 12345" in (writable_by_others(build, trusted=alone.pw_uid) or "")
    os.chown(build, 0, alone.pw_gid)
    assert f"group {alone.pw_gid}" in (writable_by_others(build) or "")


def test_libraries_are_looked_for_where_the_program_says(tmp_path: Path) -> None:
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "m.c"
    source.write_text("int main(void) { return 0; }\n")
    paths = f"/home/alice/build:$ORIGIN/../lib:{tmp_path}/more"
    (tmp_path / "more").mkdir()
    (tmp_path / "more/libx.so.1").write_bytes(b"")
    words = [cc, str(source), f"-Wl,-rpath,{paths}", "-o", str(tmp_path / "m")]
    subprocess.run(words, check=True)
    found = libraries_of(tmp_path / "m")
    assert Path("/home/alice/build") in found
    assert Path(f"{tmp_path}/../lib") in found
    assert tmp_path / "more/libx.so.1" in found
    assert libraries_of(source) == [source]


def test_a_library_whose_list_has_no_end_is_read_no_further_than_a_real_one(tmp_path: Path) -> None:
    head = bytearray(64)
    head[:6], head[0x20:0x28] = b"\x7fELF\x02\x01", struct.pack("<Q", 64)
    head[0x36:0x3A] = struct.pack("<HH", 56, 1)
    dynamic, a_terabyte = 2, 1 << 40
    library = tmp_path / "libx.so"
    library.write_bytes(
        head + struct.pack("<IIQQQQQQ", dynamic, 0, 4096, 4096, 4096, a_terabyte, a_terabyte, 8)
    )
    os.truncate(library, a_terabyte)
    began_s = time.process_time()
    assert libraries_of(library) == [library]
    assert time.process_time() - began_s < 1


# Rollback.


def _alices_program(folder: Path) -> Path:
    program = folder / "llama-server"
    shutil.copy("/bin/true", program)
    os.chown(program, ALICE, 0)
    return program


@contextlib.contextmanager
def left_to_root(*why: str) -> Iterator[None]:
    """It is refused, and the cause says so."""
    with pytest.raises(DeployError, match="only root may make") as caught:
        yield
    assert [one for one in why if one not in (caught.value.cause or "")] == []


def _alices_root_unit(world: World, folder: Path) -> str:
    """A unit by hand, without an account, whose program alice may change; then one of root's."""
    program = _alices_program(folder)
    world.manager.programs[str(program)] = world.manager.programs[ENGINE]
    world.put(world.text("old", program=str(program)))
    deploy(world.context(), world, "new")
    (backup,) = world.backups()
    return backup.name


@ROOT_ONLY
def test_a_member_does_not_get_a_program_of_their_own_run_as_root(
    world: World, tmp_path: Path
) -> None:
    backup = _alices_root_unit(world, tmp_path)
    member = replace(world.context(), is_unattended=True)
    for to in (None, backup):
        with left_to_root("it would run as root", f"belongs to user {ALICE}"):
            rollback(member, to=to, drain=False, confirm=lambda _: None)
    with left_to_root():
        preview(world.context(), None)
    assert world.serving_alias() == "new"

    rollback(world.context(), to=None, drain=False, confirm=lambda _: None)

    assert world.serving_alias() == "old"


@ROOT_ONLY
def test_libraries_that_are_gone_from_where_all_may_put_some_are_left_to_root(
    world: World, tmp_path: Path
) -> None:
    """A build in /tmp that a boot has cleared: whoever asked for the rollback could put their own there."""
    everybodys = tmp_path / "tmp"
    build = everybodys / "build"
    build.mkdir(parents=True)
    everybodys.chmod(0o1777)
    world.put(world.text("old", service=f"Environment=LD_LIBRARY_PATH={build}"))
    deploy(world.context(), world, "new")
    preview(world.context(), None)

    build.rmdir()

    with left_to_root(str(everybodys)):
        preview(world.context(), None)


@ROOT_ONLY
@pytest.mark.parametrize("private", ["PrivateTmp=yes", "DynamicUser=yes"])
def test_nobody_can_put_anything_into_the_temporary_folders_of_a_unit_that_has_its_own(
    world: World, private: str
) -> None:
    """What it names there is not there for anybody else, its log say, and a guard could not go back to it."""
    named = "Environment=TMPDIR=/var/tmp LLAMA_LOG_FILE=/tmp/none-such/log"
    world.put(world.text("old", service=f"{named}\n{private}"))
    deploy(world.context(), world, "new")

    preview(world.context(), None)


@ROOT_ONLY
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["llama-server", "libx.so"])
def test_a_pipe_in_the_place_of_a_program_or_library_keeps_nobody_waiting(
    world: World, tmp_path: Path, name: str
) -> None:
    _alices_root_unit(world, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name, 0o755)
    os.chown(tmp_path / name, ALICE, 0)
    with left_to_root():
        preview(world.context(), None)


@ROOT_ONLY
@pytest.mark.parametrize(
    "line",
    ["StandardOutput=append:{}", "StandardError=truncate:{}", "OpenFile={}:log:append", "LoadCredential=key:{}"],
)  # fmt: skip
def test_what_the_manager_opens_as_root_may_not_lie_where_the_account_says_what_it_is(
    world: World, tmp_path: Path, line: str
) -> None:
    """A link in alice's home would have led root's hand to any file, of her own unit too."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, pwd.getpwnam("nobody").pw_uid, 0)
    world.put(world.text("old", service=f"User=nobody\n{line.format(home / 'log')}"))
    deploy(world.context(), world, "new")
    member = replace(world.context(), is_unattended=True)

    with left_to_root(str(home)):
        rollback(member, to=None, drain=False, confirm=lambda _: None)

    assert world.serving_alias() == "new"


@contextlib.contextmanager
def _as_in_the_daemon() -> Iterator[None]:
    """Root without a capability, as its unit has it; of this thread alone (capset(2), version 3)."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept, without = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, kept) == 0
    without[1], without[4] = kept[1], kept[4]  # permitted ones stay, to be taken up again
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, kept) == 0


@ROOT_ONLY
def test_what_lies_in_a_closed_home_is_not_gone_and_left_to_root(
    world: World, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    _alices_root_unit(world, home)
    os.chown(home, ALICE, 0)
    with _as_in_the_daemon():
        with left_to_root("Permission denied"):
            preview(world.context(), None)
        assert changed_files([(f"{home}/llama-server", "0" * 64)]) == ()
        assert changed_files([("/nowhere/llama-server", "0" * 64)]) != ()


# What is read for it.


@ROOT_ONLY
def test_an_account_is_not_told_by_its_key_file_what_it_may_not_read(
    world: World, tmp_path: Path
) -> None:
    """Its server is asked with the first line of what stands there."""
    nobody = pwd.getpwnam("nobody")
    key, secret, home = tmp_path / "home/key", tmp_path / "secret", tmp_path / "home"
    home.mkdir()
    secret.write_text("root:$y$secret\n")
    secret.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    unit = f"[Service]\nUser=nobody\nExecStart={ENGINE} --port 1 --api-key-file {key}\n"
    world.unit_path.write_text(unit)
    world.manager.reload()

    def told(path: Path = key) -> str | None:
        world.unit_path.write_text(unit.replace(str(key), str(path)))
        address = address_of(world.context(), read_live_unit(world.context()))
        return None if address is None else address.api_key

    assert (
        told(secret) == "root:$y$secret"
    )  # root's own word, by whatever group it may be read there
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    key.write_text("its own\n")
    key.chmod(0o600)
    os.chown(key, nobody.pw_uid, nobody.pw_gid)
    assert told() == "its own"
    key.unlink()
    key.symlink_to(secret)
    assert told() is None
    # A link that is not root's, where all may make some, and a name that counts from where the server starts.
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    (everybodys / "key").symlink_to(secret)
    os.lchown(everybodys / "key", nobody.pw_uid, nobody.pw_gid)
    assert told(everybodys / "key") is None
    unit += f"WorkingDirectory={tmp_path}\n"
    with contextlib.chdir(everybodys):
        assert told(Path("key")) is None
        (tmp_path / "key").write_text("where it starts\n")
        assert told(Path("key")) == "where it starts"


@ROOT_ONLY
def test_whose_a_key_file_is_is_no_warning_for_those_who_may_not_look(
    world: World, tmp_path: Path
) -> None:
    """A member who planned was told that root's own folder cannot be read, and to put the key into one of root's."""
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    tmp_path.chmod(0o700)

    def told() -> list[str]:
        return [one.code for one in check_key(world.context(), str(key))]

    os.seteuid(ALICE)
    try:
        assert told() == []
    finally:
        os.seteuid(0)
    os.chown(tmp_path, ALICE, ALICE)
    assert told() == ["key-file-open"]


# Candidates.


@ROOT_ONLY
def test_a_member_does_not_get_a_program_of_their_own_measured_as_root(
    world: World, tmp_path: Path
) -> None:
    program = _alices_program(tmp_path)
    world.put(world.text("one", service="User=root"))
    member = replace(world.context(), data_dir=data_dir(), is_unattended=True)
    plan = a_plan_for(member, program)

    with left_to_root():
        Session(member, BenchRequest()).ask({"x": plan}, pytest.fail, start_after=False)
    with left_to_root(), hold(member, purpose="bench x", budget_s=60) as held, held.serve(plan):
        pass

    assert list(world.manager.runtime_unit_dir.glob("tunerd-candidate*")) == []
    assert world.serving_alias() == "one"


@ROOT_ONLY
def test_a_watch_that_may_not_go_back_promises_nothing_and_is_told_of_when_it_would(
    world: World, tmp_path: Path
) -> None:
    _alices_root_unit(world, tmp_path)
    ctx = replace(world.context(), data_dir=data_dir())
    with lock(daemon_lock(ctx), purpose="daemon", since="now"):
        (said,) = begin_probation(ctx, 1)
    assert (said.level, said.code) == (Level.WARNING, "probation")
    assert "only root can take it back: it would run as root" in said.text
    assert "by itself" not in said.text

    told: list[Event] = []
    swaps = Swaps(ctx, told.append)
    swaps.look()
    world.manager.end_main(UNIT, Ending(code=1))
    assert take_back(ctx, 1, "it died", sweep=None).payload["state"] == "worse"
    for _ in range(2):
        swaps.look()
    assert [(one.kind, one.level) for one in told] == [("not-taken-back", "error")]
    assert "generation 1 does worse, but was not taken back: " in told[0].text
    assert "only root may make" in told[0].text
    assert told[0].hint == "`tunerd rollback`"


def test_nothing_is_a_backup_but_what_is_listed_as_one(world: World) -> None:
    deploy(world.context(), world, "old")
    names = [f"{UNIT}.rpmsave", f"{UNIT}.bak", "other.service.pre-20260101T000000Z-apply"]
    for name in names:
        (world.paths.unit_dir / name).write_bytes(world.text("stray"))
    (world.paths.unit_dir / f"{UNIT}.pre-link").symlink_to(f"{UNIT}.bak")
    for name in (*names, f"{UNIT}.pre-link", f"{world.paths.unit_dir}/{UNIT}.bak"):
        with pytest.raises(UsageError, match="no such backup"):
            rollback(world.context(), to=name, drain=False, confirm=lambda _: None)
