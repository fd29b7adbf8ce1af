"""Programs are probed as somebody else, bounded, and refused where they are no llama-server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.builders import HELP, HELP_OF, capabilities_of
from tests.support.local_box import Box
from tests.support.nvml_stub import compiler
from tunerd.engine.builds import (
    engine_of,
    find_engines,
    found_in_unit,
    keep,
    keep_program,
    refusal,
)
from tunerd.engine.capabilities import Found
from tunerd.engine.probe import (
    EMBEDDED_PROGRAM,
    EngineProber,
    build_folders,
    is_own_server,
    own_server,
    path_folders,
    programs_in,
    read_proofs,
    writable_by_others,
)
from tunerd.engine.prove import prove_engine
from tunerd.engine.serving import read_live_unit
from tunerd.errors import EngineError
from tunerd.machine.files import Files
from tunerd.machine.process import User
from tunerd.production.gate import PortTurns
from tunerd.settings import EngineSettings, Settings
from tunerd.units.sandbox import Sandbox
from tunerd.words import Family, Mode, PortOption

IS_ROOT = os.geteuid() == 0
NOBODY = User.named("nobody") if IS_ROOT else None
HASTY_S = 2.0
PATIENT_S = 60.0
IN_OPEN = 0x20
# As `setfacl -m u:54321:rwx` of what root may write and all others read (acl(5), acl_to_xattr).
ALSO_FOR_54321 = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *one)
    for one in (
        (1, 7, 2**32 - 1),
        (2, 7, 54321),
        (4, 5, 2**32 - 1),
        (16, 7, 2**32 - 1),
        (32, 5, 2**32 - 1),
    )
)
HELP_TEXT = HELP / f"{HELP_OF['main-0x']}.txt"


@pytest.fixture
def prober(tmp_path: Path) -> EngineProber:
    return EngineProber(tmp_path / "cache", Files(), Sandbox(NOBODY), timeout_s=PATIENT_S)


def script(folder: Path, body: str, name: str = "llama-server") -> Found:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Found(path, "test")


def good(folder: Path, *, note: Path | None = None) -> Found:
    """A program with the help text of a real build; each run is a line in `note`."""
    text = folder / "help.txt"
    shutil.copy(HELP_TEXT, text)
    record = f'echo "$(id -u) $* $(env | sort | tr "\\n" " ")" >> {note}\n' if note else ""
    if note is not None:
        note.touch()
        note.chmod(0o666)
    return script(
        folder,
        f'{record}case "$1" in --help) cat {text};; '
        '--version) echo "version: 7 (abc)" >&2;; '
        '*) echo "gguf_init_from_file: failed to open GGUF file" >&2; exit 1;; esac',
    )


def test_one_program_for_everything_is_a_server_behind_its_subcommand(
    folder: Path, prober: EngineProber, tmp_path: Path
) -> None:
    good(folder)
    commands = 'printf "Available commands:\\n  serve           HTTP API server\\n"'
    serve = f'shift; exec {folder}/llama-server "$@"'
    app = script(folder, f'case "$1" in serve) {serve};; *) {commands}; exit 1;; esac', "llama")

    result = prober.probe(app)

    assert result.subcommand == ("serve",)
    assert result.version is not None
    assert "--ctx-size" in result.capabilities.flags
    again = EngineProber(tmp_path / "cache", Files(), Sandbox(NOBODY), timeout_s=PATIENT_S)
    assert again.probe(app).subcommand == ("serve",)
    assert "failed to open" in again.run(app, ("--model", "/none")).stderr
    (found,) = [one for one in programs_in([folder], "here") if one.program.name == "llama"]
    assert prober.probe(found).subcommand == ("serve",)
    with pytest.raises(EngineError, match="not a llama-server"):
        prober.probe(script(folder, "echo another program of that name", "llama"))


# Whom a program runs as, and with what.


def test_a_program_runs_as_somebody_else_and_sees_nothing_of_our_environment(
    folder: Path, prober: EngineProber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "5")
    monkeypatch.setenv("SECRET", "hunter2")
    note = folder / "note"
    found = replace(good(folder, note=note), environment={"LD_LIBRARY_PATH": "/opt/lib"})
    prober.probe(found)
    lines = note.read_text().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.split()[0] == str(NOBODY.uid if NOBODY else os.getuid())
        assert "LLAMA_ARG" not in line
        assert "hunter2" not in line
        assert "HOME=/nonexistent" in line
        assert "LD_LIBRARY_PATH=/opt/lib" in line
    if IS_ROOT:
        without = EngineProber(tmp_path / "other", Files(), Sandbox(None), timeout_s=PATIENT_S)
        with pytest.raises(EngineError, match="as root"):
            without.probe(good(folder))


def test_a_program_that_has_only_the_name_of_ours_is_no_more_trusted(
    folder: Path, prober: EngineProber
) -> None:
    found = script(folder, "id -u; exit 1", name=EMBEDDED_PROGRAM)
    assert not is_own_server(found.program)
    assert programs_in((folder,), "test") == ()
    if IS_ROOT:
        done = prober.run(found, ())
        assert done.stdout.strip() == str(NOBODY.uid if NOBODY else "")


# What a probe finds, and how long it is believed.


@pytest.mark.llama
def test_a_link_to_our_own_server_is_not_what_is_run_with_our_rights(
    folder: Path, tmp_path: Path
) -> None:
    own, link = own_server(), folder / "llama-server"
    assert own is not None
    link.symlink_to(own)  # of somebody who lets it lead elsewhere a moment later
    engine = engine_of(Box(tmp_path).context, Found(link, "build folder"))
    assert engine.is_embedded
    assert engine.program == own
    assert not is_own_server(link)
    prober = EngineProber(tmp_path, Files(), Sandbox(None), timeout_s=PATIENT_S)
    done = prober.run(Found(link, "unit", subcommand=()), ("--version",))
    assert done.argv[0] == str(own)


@pytest.mark.llama
@pytest.mark.skipif(not IS_ROOT, reason="whoever is no root runs it as they are")
def test_our_own_server_has_not_our_rights_where_a_variable_says_what_it_loads(
    folder: Path, prober: EngineProber
) -> None:
    own, note, library = own_server(), folder / "note", folder / "libx.so"
    assert own is not None
    note.touch()
    note.chmod(0o666)
    source = folder / "x.c"
    source.write_text(
        "#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) static void f(void) {"
        f'FILE *o = fopen("{note}", "a"); if (o) {{ fprintf(o, "%d\\n", geteuid()); fclose(o); }} }}\n'
    )
    subprocess.run([compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    unit = Found(own, "unit", environment={"LD_PRELOAD": str(library)}, subcommand=())
    with contextlib.suppress(EngineError):
        prober.run(unit, ("--version",))
    assert set(note.read_text().split()) <= {str(NOBODY.uid if NOBODY else "")}


def test_a_program_is_probed_again_only_when_it_changed(folder: Path, prober: EngineProber) -> None:
    note = folder / "note"
    found = good(folder, note=note)
    first = prober.probe(found)
    assert first.capabilities == capabilities_of("main-0x")
    assert first.version is not None
    assert first.version.label == "b7"
    assert first.identity.components[0].path == folder / "llama-server"
    runs = len(note.read_text().splitlines())
    assert prober.probe(found) == first
    assert len(note.read_text().splitlines()) == runs
    with found.program.open("a") as program:
        program.write("# one byte more\n")
    changed = prober.probe(found).identity.sha256
    assert changed != first.identity.sha256
    assert len(note.read_text().splitlines()) == 2 * runs
    (folder / "copy").mkdir()
    copy = Path(shutil.copy2(found.program, folder / "copy"))
    assert prober.identity(Found(copy, "test")).sha256 == changed


def test_a_library_beside_it_is_part_of_it(folder: Path, prober: EngineProber) -> None:
    found = good(folder)
    library = folder / "libggml-cpu-haswell.so"
    library.write_bytes(b"one")
    first = prober.probe(found)
    names = [part.path.name for part in first.identity.components]
    assert names[0] == "llama-server"
    assert "libggml-cpu-haswell.so" in names
    assert "libc.so.6" in names  # the interpreter's, as the loader says
    library.write_bytes(b"two")
    second = prober.probe(found)
    library.unlink()
    hashes = {one.identity.sha256 for one in (first, second, prober.probe(found))}
    assert len(hashes) == 3


# Programs that are none, or mean no good.

HOSTILE = {
    "nonsense": "echo hello",
    "endless output": "yes --ctx-size",
    "a huge help": "head -c 50000000 /dev/zero | tr '\\0' '-'",
    "children that stay": "for n in 1 2 3 4 5; do sleep 600 & done; setsid sleep 600 & exit 0",
    "a closed door": "exec >&- 2>&-; sleep 600",
    "memory": "a=$(head -c 500000000 /dev/zero | tr '\\0' x); echo ${#a}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_that_is_no_server_is_refused_in_bounded_time(
    name: str, folder: Path, tmp_path: Path
) -> None:
    hasty = EngineProber(tmp_path / "cache", Files(), Sandbox(NOBODY), timeout_s=HASTY_S)
    mark = f"tunerd-test-{os.getpid()}-{abs(hash(name))}"
    found = script(folder, f": {mark}\n{HOSTILE[name]}")
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        hasty.probe(found)
    assert time.monotonic() - began < 3 * HASTY_S + 15
    assert str(found.program) in caught.value.message


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (b"#!/bin/sh\necho x: error while loading shared libraries: libllama.so >&2; exit 127\n",
         "exit status 127: x: error while loading shared libraries: libllama.so"),
        (b"#!/bin/sh\nkill -ILL $$\n", "ended by signal 4: it said nothing"),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\xff\x7f" + bytes(100), "kind of processor"),
    ],
    ids=["library", "signal", "processor"],
)  # fmt: skip
def test_a_build_that_cannot_run_here_says_why(
    program: bytes, said: str, folder: Path, prober: EngineProber
) -> None:
    path = folder / "llama-server"
    path.write_bytes(program)
    path.chmod(0o755)

    with pytest.raises(EngineError) as caught:
        prober.probe(Found(path, "test"))

    assert said in (caught.value.cause or "")
    assert "not a llama-server" not in caught.value.message


def claiming(folder: Path, *paths: object) -> Found:
    """A program that says by itself what it is made of: the loader's messages come through it."""
    found = good(folder)
    lines = "".join(f"      1:\tcalling init: {path}\n" for path in paths)
    (folder / "claims").write_text(lines)
    text = found.program.read_text()
    found.program.write_text(text.replace("exit 1;;", f"cat {folder}/claims >&2; exit 1;;"))
    return found


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        *(([path], path) for path in ("/dev/zero", "/proc/kcore", "/usr", "/nonexistent/lib.so")),
        ([f"/f{number}" for number in range(300)], "more than"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_program_that_claims_to_be_made_of_something_else_is_refused(
    claims: list[str], said: str, folder: Path, prober: EngineProber
) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        prober.probe(claiming(folder, *claims))
    assert said in caught.value.message
    assert time.monotonic() - began < 60


@pytest.mark.skipif(not IS_ROOT, reason="without root a probe may read what we may")
@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o755, 0o640), (0o700, 0o644)])
def test_what_its_account_could_not_read_is_no_part_of_a_program(
    folder: Path, prober: EngineProber, folder_mode: int, file_mode: int
) -> None:
    closed = folder / "closed"
    closed.mkdir()
    secret = closed / "secret.so"
    secret.write_text("secret")
    secret.chmod(file_mode)
    closed.chmod(folder_mode)

    with pytest.raises(EngineError, match="not a part of an engine"):
        prober.probe(claiming(folder, secret))


def test_what_is_no_file_is_not_even_opened(folder: Path, prober: EngineProber) -> None:
    """Opening a device may do something: a watchdog begins to count."""
    device = folder / "device"
    os.mkfifo(device, 0o666)
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(device), IN_OPEN) > 0
    try:
        with pytest.raises(EngineError, match="not a regular file"):
            prober.probe(claiming(folder, device))
        with pytest.raises(BlockingIOError):
            os.read(watch, 4096)
    finally:
        os.close(watch)


@pytest.mark.parametrize("becomes", ["another file", "a link"])
def test_a_part_that_is_another_file_by_now_is_not_copied(
    folder: Path, prober: EngineProber, tmp_path: Path, becomes: str
) -> None:
    library = folder / "libggml-x.so"
    library.write_bytes(b"good")
    found = good(folder)
    (component,) = (c for c in prober.identity(found).components if c.path == library)
    other = folder / "other"
    other.write_bytes(b"evil")
    library.unlink()
    if becomes == "a link":
        library.symlink_to(other)
    else:
        other.rename(library)

    with pytest.raises(EngineError):
        prober.copy(found.program, component, tmp_path / "copy")

    assert not (tmp_path / "copy").exists() or (tmp_path / "copy").stat().st_mode & 0o077 == 0


def lacks_its_interpreter(path: Path) -> None:
    path.write_text("#!/nonexistent/sh\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "put_there",
    [lambda _path: None, Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lacks_its_interpreter],
    ids=["missing", "folder", "fifo", "loop", "no interpreter"],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(
    put_there: Callable[[Path], None], folder: Path, prober: EngineProber
) -> None:
    path = folder / "llama-server"
    put_there(path)
    with pytest.raises(EngineError) as caught:
        prober.probe(Found(path, "test"))
    assert str(path) in caught.value.message


@pytest.mark.skipif(not IS_ROOT, reason="only root can make a program of another user")
def test_a_program_of_root_that_takes_its_owners_rights_gets_none(
    folder: Path, prober: EngineProber
) -> None:
    program = folder / "llama-server"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    done = prober.run(Found(program, "test"), ("-u",))
    assert done.stdout.strip() == str(NOBODY.uid if NOBODY else "")


# Who may change a program.


@pytest.mark.skipif(not IS_ROOT, reason="the rule is about root's files")
def test_only_what_root_alone_may_change_is_safe_with_the_folders_above_and_behind_links(
    folder: Path,
) -> None:
    inner = folder / "inner"
    inner.mkdir(mode=0o755)
    program = good(inner).program
    link = folder / "link"
    link.symlink_to(program)

    def said(path: Path = link) -> str | None:
        return writable_by_others(path)

    assert said() is None
    program.chmod(0o757)
    assert "everybody may write" in str(said())
    program.chmod(0o775)
    assert said() is None  # group root
    os.chown(program, 0, 12345)
    assert "group 12345" in str(said())
    os.chown(program, 54321, 0)
    assert "user 54321" in str(said())
    os.chown(program, 0, 0)
    inner.chmod(0o777)
    assert str(inner) in str(said())
    inner.chmod(0o1777)  # nobody else may replace a file of root's there
    assert said() is None
    assert "everybody may write" in str(said(inner)), "a library or folder that is not there yet"
    there = inner / "link"
    there.symlink_to(program)
    assert said(there) is None
    os.lchown(there, 54321, 0)  # who may have it lead elsewhere
    assert "link of user 54321" in str(said(there))
    os.setxattr(program, "system.posix_acl_access", ALSO_FOR_54321)
    assert "access control list" in str(said())
    program.chmod(0o755)  # by which its mask is that of nobody who writes
    assert said() is None
    link.unlink()
    link.symlink_to("/bin/true")
    os.chown(folder, 54321, 0)
    assert "user 54321" in str(said(program))
    assert str(folder) in str(said()), "where the link stands"
    assert writable_by_others(link, trusted=54321) is None


@pytest.mark.skipif(not IS_ROOT, reason="the rule is about root's files")
def test_who_may_not_be_run_is_told_with_what_allows_it_by_its_path_whoever_names_it(
    folder: Path,
) -> None:
    """Named by a unit it was refused although the settings allowed it, and no measurement began."""
    ctx = replace(Box(folder).context, mode=Mode.SYSTEM)
    program = good(folder).program
    program.chmod(0o757)

    def said(path: Path = program, *, is_allowed: bool | None = None) -> str | None:
        mine = EngineSettings(path=program, allow_writable=bool(is_allowed))
        settings = Settings(engines={} if is_allowed is None else {"mine": mine})
        return engine_of(replace(ctx, settings=settings), Found(path, "unit")).problem

    assert f"`tunerd settings set engines.NAME.path {program}`" in str(said())
    assert "engines.mine.allow_writable true` allows" in str(said(is_allowed=False))
    assert said(is_allowed=True) is None
    link = folder / "link"
    link.symlink_to(program)
    assert "NAME" in str(said(link, is_allowed=True)), "which may lead elsewhere by then"
    missing = str(said(program / "llama-server"))
    assert "Not a directory" in missing
    assert "allow" not in missing


# Where programs are looked for.


def test_programs_are_found_by_name_in_folders_of_the_path_and_below_homes(folder: Path) -> None:
    good(folder)
    for build in ("llama.cpp/build/bin", "llama.cpp/build-mtp/bin", "ik_llama.cpp/build/bin"):
        (folder / build).mkdir(parents=True)
    (folder / "llama.cpp/build/bin/llama-server").write_text("no program")
    homes = build_folders((folder, folder / "nobody"))

    found = programs_in((folder, *homes, folder / "missing"), "test")

    assert [one.program for one in found if one.program.is_relative_to(folder)] == [
        folder / "llama-server"
    ]
    assert {path.relative_to(folder).as_posix() for path in homes if path.is_relative_to(folder)} == {
        "llama.cpp/build/bin", "llama.cpp/build-mtp/bin", "ik_llama.cpp/build/bin",
    }  # fmt: skip
    assert path_folders("/usr/bin:.:bin::/bin") == (Path("/usr/bin"), Path("/bin"))


# Real engines.


@pytest.mark.engine
def test_every_real_engine_is_probed_as_an_unprivileged_account(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    prober = EngineProber(tmp_path / "cache", Files(), Sandbox(NOBODY))
    for name, program in engines.items():
        result = prober.probe(Found(program, "test"))
        family = Family(name.partition("-")[0])
        assert result.capabilities.family is family, name
        assert result.version is not None, name
        assert result.identity.components[0].path == program.resolve(), name
        assert prober.identity(Found(program, "test")) == result.identity, name


# Dry runs.


def known(found: Found) -> Found:
    """A server of which that is known: it is not asked for its help first."""
    return replace(found, subcommand=())


def test_a_dry_run_that_a_signal_ended_is_tried_once_more(folder: Path, tmp_path: Path) -> None:
    seen = folder / "seen"
    seen.touch()
    seen.chmod(0o666)
    once = f'grep -q x {seen} && exit 1; echo x >> {seen}; echo "free(): invalid"; kill -ABRT $$'
    always = f'echo x >> {seen}; echo "free(): invalid"; kill -ABRT $$'
    ctx = Box(tmp_path).context

    assert refusal(ctx, known(script(folder, once)), ("--port", "1")) is None
    seen.write_text("")
    assert refusal(ctx, known(script(folder, always)), ("--port", "1")) == "free(): invalid"
    assert seen.read_text() == "x\n" * 2


# What it takes to be the same build: the libraries of its variables, and what a script starts.

LINKED = """
#include <stdio.h>
#include <string.h>
int of_library(void);
int main(int argc, char **argv) {
    int letter = of_library();
    if (argc > 1 && !strcmp(argv[1], "--help")) {
        FILE *help = fopen(HELP, "r");
        while ((letter = getc(help)) != EOF) putchar(letter);
        return 0;
    }
    return 1;
}
"""


def linked(folder: Path) -> Path:
    """A program that finds its library only by LD_LIBRARY_PATH."""
    (folder / "lib").mkdir()
    library, text = folder / "lib/libllama.so", folder / "help.txt"
    shutil.copy(HELP_TEXT, text)
    (folder / "lib.c").write_text("int of_library(void) { return 0; }")
    (folder / "main.c").write_text(LINKED)
    cc, made = compiler(), folder / "llama-server"
    programs.program(cc, "-shared", "-fPIC", folder / "lib.c", "-o", library)
    programs.program(
        cc, f'-DHELP="{text}"', folder / "main.c", f"-L{folder}/lib", "-lllama", "-o", made
    )
    return made


def test_a_unit_tells_by_what_its_build_finds_its_libraries(folder: Path, tmp_path: Path) -> None:
    ctx, made = Box(tmp_path).context, linked(folder)
    ctx.files.make_folder(ctx.unit_path.parent)
    ctx.unit_path.write_text(
        f"[Service]\nEnvironment=LD_LIBRARY_PATH={folder}/lib LLAMA_ARG_THREADS=1\n"
        f"ExecStart={made} -m /m.gguf\n"
    )

    (engine,) = [one for one in find_engines(ctx) if one.program == made]
    before = os.umask(0o077)
    try:
        kept = keep(ctx, engine.name).payload
    finally:
        os.umask(before)

    program = Path(kept["program"])  # which a server's account starts
    assert {path.stat().st_mode & 0o777 for path in (program, *program.parents[:2])} == {0o755}
    assert (engine.problem, engine.environment) == (None, {"LD_LIBRARY_PATH": f"{folder}/lib"})
    assert (Path(kept["folder"]) / "lib/libllama.so").is_file()


def test_what_a_script_starts_is_a_part_of_it_and_no_copy_is_made_of_that(
    folder: Path, prober: EngineProber, tmp_path: Path
) -> None:
    (folder / "real").mkdir()
    real = linked(folder / "real")
    variables = {"LD_LIBRARY_PATH": str(real.parent / "lib")}
    found = replace(script(folder, f'exec {real} "$@"'), environment=variables)

    before = prober.probe(found).identity
    real.write_bytes(real.read_bytes() + b"upgraded")
    after = prober.probe(found).identity

    assert real in [part.path for part in before.components]
    assert before.sha256 != after.sha256
    with pytest.raises(EngineError, match=f"a script that starts `{real}`"):
        keep_program(Box(tmp_path).context, found)


def test_a_build_that_is_replaced_while_it_is_looked_at_is_looked_at_again(
    folder: Path, prober: EngineProber
) -> None:
    found = good(folder)
    text = found.program.read_text()
    found.program.write_text(text.replace("--version) ", f"--version) echo >> {found.program}; "))
    found.program.chmod(0o777)

    with pytest.raises(EngineError, match="changed while tunerd read it"):
        prober.probe(found)

    found.program.write_text(text)
    assert prober.probe(found).version is not None


def test_what_was_tried_of_a_build_that_was_replaced_meanwhile_is_not_kept(
    folder: Path, tmp_path: Path
) -> None:
    ctx, found = Box(tmp_path).context, good(folder)
    engine = engine_of(ctx, found)
    assert engine.identity is not None
    found.program.write_text(found.program.read_text() + "# another")

    assert prove_engine(ctx, engine).proofs == ()
    assert read_proofs(ctx.paths.cache_dir, ctx.files, engine.identity) == ()
    assert prove_engine(ctx, engine_of(ctx, found)).proofs != ()


def test_how_productions_program_binds_its_port_is_not_asked_of_it_while_nothing_serves(
    folder: Path, tmp_path: Path
) -> None:
    """One that hangs kept the server away for a minute more, at each try to bring it back."""
    box, note = Box(tmp_path), folder / "note"
    server = good(folder, note=note).program
    found = script(folder, f'exec {server} "$@"', "start")
    box.put_unit(f"[Service]\nExecStart={found.program} --port 1\n")

    def option() -> PortOption | None:
        return PortTurns(box.context, lambda: True, None).option

    assert (option(), note.read_text()) == (None, "")
    engine_of(box.context, found_in_unit(read_live_unit(box.context), found.program))
    asked = note.read_text()
    assert (option(), note.read_text()) == (PortOption.REUSE_ADDR, asked)


def test_whoever_waits_for_a_program_that_hangs_is_told_which(folder: Path, tmp_path: Path) -> None:
    """`detect` and `plan` said nothing for a minute, each time."""
    told: list[str] = []
    prober = EngineProber(
        tmp_path, Files(), Sandbox(NOBODY), timeout_s=2.0, tell=told.append, patience_s=0.2
    )
    found = script(folder, "sleep 600")
    with pytest.raises(EngineError, match="did not end"):
        prober.probe(found)
    assert told == [f"waiting for `{found.program} --help`, up to 2 s"]
