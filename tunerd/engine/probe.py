"""Probes what engines accept, and tells whether they are still the same program.

A probe runs the program in a sandbox, never as root, with an empty environment and limits of time and
memory. Its result is kept by the identity of the program and its libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tunerd.engine.capabilities import (
    MAX_HELP_CHARS,
    SHORT,
    Capabilities,
    Component,
    EngineIdentity,
    Found,
    OffloadDevice,
    Proof,
    Version,
    parse_devices,
    parse_help,
    parse_version,
    read_capabilities,
)
from tunerd.engine.health import last_words
from tunerd.errors import EngineError, HostError, ServiceError
from tunerd.machine.files import Files, is_gone, looked_at, real_path
from tunerd.machine.net import free_port
from tunerd.machine.process import Completed, User, is_alone_in, may_read_open
from tunerd.units.live import is_shell
from tunerd.units.sandbox import Sandbox

KEPT_RECORD = "identity.json"
EMBEDDED_PROGRAM = "tunerd-llama-server"
# The server, and the one program for everything that llama.cpp's installer brings (since June 2026).
_PROGRAM_NAMES = ("llama-server", "llama")
_FIT_PROGRAM = "llama-fit-params"
OF_A_UNIT = "unit "
_MOST_SCRIPT_BYTES = 64 * 1024
# A device, and what of it goes to the model, the context and what is computed [MiB].
_ESTIMATED = re.compile(r"^(\S+)((?: \d{1,8}){3}) ?$", re.MULTILINE)
_SERVES = re.compile(r"^[ \t]+serve[ \t]", re.MULTILINE)
_BUILD_FOLDERS = (
    ".local/bin",
    "llama.cpp/build*/bin",
    "ik_llama.cpp/build*/bin",
    "beellama.cpp/build*/bin",
    "BeeLlama.cpp/build*/bin",
)
# Source: elf(5).
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29
_DT_PATHS = (_DT_NEEDED, _DT_RPATH, _DT_RUNPATH)
# Of a list of what a library needs, and of a path in it.
_MOST_BYTES = 16 * 1024


def programs_in(folders: Iterable[Path], found_by: str) -> tuple[Found, ...]:
    """Programs with the name of an engine in these folders."""
    programs = (folder / name for folder in folders for name in _PROGRAM_NAMES)
    return tuple(Found(program, found_by) for program in programs if _is_program(program))


def own_server() -> Path | None:
    """The embedded server that is installed with this tunerd; None if there is none."""
    program = Path(sys.executable).parent / EMBEDDED_PROGRAM
    return program if _is_program(program) else None


def is_own_server(program: Path) -> bool:
    """Whether a program is this tunerd's embedded server, which runs with our rights.

    By its place: a program that only has its name is as foreign as any other, and so is a link to it, which
    may lead elsewhere by the time that it is run.
    """
    return program == own_server()


def loads_its_own(environment: Iterable[str]) -> bool:
    """Whether no variable says what else a program loads, for that may be anybody's."""
    return not any(name.startswith(("LD_", "PYTHON", "GGML_BACKEND")) for name in environment)


def by_own_path(found: Found) -> Found:
    """The embedded server by its own path, where a link leads to it; any other program as it was found."""
    own = own_server()
    is_own = own is not None and real_path(found.program) == real_path(own)
    return replace(found, program=own) if own is not None and is_own else found


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.X_OK)
    except OSError:  # a folder that may not be entered
        return False


def path_folders(path: str) -> tuple[Path, ...]:
    """The folders of a PATH variable; relative ones are left out."""
    return tuple(Path(part) for part in path.split(":") if part.startswith("/"))


def build_folders(homes: Iterable[Path]) -> tuple[Path, ...]:
    """Where people build engines: below their homes, /opt and /usr/local/src."""
    folders: list[Path] = []
    for base in (*homes, Path("/opt"), Path("/usr/local/src"), Path("/srv")):
        for pattern in _BUILD_FOLDERS:
            try:
                folders.extend(sorted(base.glob(pattern)))
            except OSError:  # a home that may not be read
                continue
    return tuple(dict.fromkeys(folders))


def distinct(found: Sequence[Found]) -> tuple[Found, ...]:
    """The first of each real program; later ways to find the same file are left out."""
    kept: dict[Path, Found] = {}
    for candidate in found:
        kept.setdefault(real_path(candidate.program), candidate)
    return tuple(kept.values())


def writable_by_others(program: Path, *, trusted: int = 0) -> str | None:
    """Who else than root may change the program or a folder above it; None if nobody.

    A program that others may change would run with the service's rights, so in system mode it is
    refused unless the operator names it. Links count for what they lead to, and for the folders in
    which they stand. In a folder with the sticky bit what stands there is safe from all but its owner, a link's
    too; a folder that is itself asked about is not, for anybody may add to it. `trusted` is an account that may
    change it as well, also by a group that it has for itself.
    """
    asked = {program, real_path(program)}
    for path in way_to(program):
        try:
            status, made_by = path.stat(), path.lstat().st_uid
            is_kept = path.parent.stat().st_mode & stat.S_ISVTX
        except OSError as error:
            return f"`{path}` cannot be read: {error.strerror}"
        sticky = path.is_dir() and status.st_mode & stat.S_ISVTX and path not in asked
        if status.st_uid not in {0, trusted}:
            return f"`{path}` belongs to user {status.st_uid}"
        if is_kept and made_by not in {0, trusted}:
            return f"`{path}` is a link of user {made_by}"
        if status.st_mode & stat.S_IWOTH and not sticky:
            return f"everybody may write to `{path}`"
        by_group = status.st_mode & stat.S_IWGRP and not sticky
        if by_group and _has_list(path):  # these bits are the most that it gives anybody then
            return f"an access control list may let others write to `{path}`"
        if by_group and status.st_gid != 0 and not is_alone_in(trusted, status.st_gid):
            return f"group {status.st_gid} may write to `{path}`"
    return None


def _has_list(path: Path) -> bool:
    """Whether an access control list says more than the permission bits (acl(5))."""
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:  # a file system without such lists
        return False


def way_to(path: Path) -> list[Path]:
    """The file, the folders above it, and the same of every link on the way."""
    seen: list[Path] = []
    todo = [path]
    while todo:
        at = todo.pop(0)
        for part in (at, *at.parents):
            if part in seen:
                continue
            seen.append(part)
            if os.path.islink(part):  # noqa: PTH114 -- pathlib raises where a folder is closed
                todo.append(part.parent / part.readlink())
    return seen


def libraries_of(program: Path) -> list[Path]:
    """Folders that a program's libraries are looked for in before the system's, and what is there."""
    found: list[Path] = []
    todo = [real_path(program)]
    while todo:
        file = todo.pop()
        for folder in (file.parent, *_run_paths(file)):
            if folder not in found:
                found.append(folder)
                todo += [] if folder.is_relative_to("/usr/lib") else sorted(folder.glob("*.so*"))
        found.append(file)
    return list(dict.fromkeys(found))[1:]


def _run_paths(file: Path) -> list[Path]:
    """DT_RPATH, DT_RUNPATH and needed paths of a 64-bit ELF file; empty for what is none.

    It may be anybody's, and another one in a moment: no more of it is read than a real one has.
    """
    words: list[bytes] = []
    with (
        contextlib.suppress(EngineError, OSError, ValueError, OverflowError, struct.error,
                            StopIteration),
        _opened(real_path(file), None) as (descriptor, _),
    ):  # fmt: skip
        words = _dynamic_words(descriptor)
    texts = [os.fsdecode(part) for word in words for part in word.split(b":")]
    own = str(file.parent)
    told = [text.replace("$ORIGIN", own).replace("${ORIGIN}", own) for text in texts]
    return [Path(text) for text in told if text.startswith("/")]


def _dynamic_words(descriptor: int) -> list[bytes]:
    def rows(form: str, offset: int, n_bytes: int) -> list[tuple[int, ...]]:
        return list(struct.iter_unpack(form, os.pread(descriptor, n_bytes, offset)))

    head = os.pread(descriptor, 64, 0)
    if head[:6] != b"\x7fELF\x02\x01":
        return []
    (offset,) = struct.unpack_from("<Q", head, 0x20)
    (count,) = struct.unpack_from("<H", head, 0x38)
    headers = rows("<IIQQQQ16x", offset, count * 56)
    begin, size = next((row[2], row[5]) for row in headers if row[0] == _PT_DYNAMIC)
    entries = rows("<qQ", begin, min(size, _MOST_BYTES))
    table = next(at for tag, at in entries if tag == _DT_STRTAB)
    strings = next(
        start + table - address
        for kind, _, start, address, _, length in headers
        if kind == _PT_LOAD and address <= table < address + length
    )
    begins = [strings + at for tag, at in entries if tag in _DT_PATHS]
    return [os.pread(descriptor, _MOST_BYTES, at).partition(b"\0")[0] for at in begins]


_PROBE_SCHEMA = 2
# All that a foreign program sees beside its own variables.
BARE_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
_PROBE_TIMEOUT_S = 60.0
# All threads of the account count, so a server that runs as it must fit in beside the probe.
_PROBE_LIMITS = {"CPU": 60, "DATA": 8 << 30, "FSIZE": 64 << 20, "NOFILE": 256, "NPROC": 4096}
# What a program says that it maps is hashed; of a build with CUDA that is some 3 GiB.
_MAX_HASHED_BYTES = 16 * 1024**3
_MAX_COMPONENTS = 200
_MAX_OUTPUT_BYTES = 2 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_MAX_SHEBANG = 256
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_INITIALISED = re.compile(
    r"^[ \t]{1,20}\d{1,10}:[ \t]{1,4}calling init: (/\S.{0,4095})$", re.MULTILINE
)
_STARTED = re.compile(
    r"^[ \t]{1,20}\d{1,10}:[ \t]{1,4}initialize program: (/\S.{0,4095})$", re.MULTILINE
)
# The driver is a part of every fingerprint by itself, and its libraries change with each update.
BACKEND = re.compile(r"libggml-(?!base)[a-z0-9_-]+\.so")
_DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-")
_NO_VULKAN_DRIVER = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}


@dataclass(frozen=True)
class ProbeResult:
    """What probing one program found, as it is remembered.

    `subcommand` goes in front of a server's arguments.
    """

    identity: EngineIdentity
    version: Version | None
    help_text: str
    subcommand: tuple[str, ...] = ()

    @cached_property
    def capabilities(self) -> Capabilities:
        """From the text each time, so that a newer tunerd reads more from it."""
        return read_capabilities(parse_help(self.help_text))


@dataclass(frozen=True, slots=True)
class EngineProber:
    """Probes programs and remembers the results.

    Attributes:
        cache_dir: Folder of remembered probes.
        files: Writes them.
        sandbox: Where programs run; one without an account must not be root's unless the program is
            tunerd's own embedded server.
        timeout_s: Longest run of a program.
        tell: What somebody who waits is told.
        patience_s: Of a run that takes longer they are.
    """

    cache_dir: Path
    files: Files
    sandbox: Sandbox
    timeout_s: float = _PROBE_TIMEOUT_S
    tell: Callable[[str], object] = lambda _text: None
    patience_s: float = 5.0

    def known(self, found: Found) -> ProbeResult | None:
        """What was found of the program as it is; None where it would have to be run.

        Raises:
            EngineError: it cannot be read.
        """
        return self._remembered(self._quick_key(by_own_path(found)))

    def probe(self, found: Found) -> ProbeResult:
        """What the program accepts.

        Raises:
            EngineError: it cannot be run, or is no llama-server.
        """
        quick = self._quick_key(found)
        remembered = self._remembered(quick)
        if remembered is not None:
            return remembered
        subcommand, help_run = self._help(found)
        found = replace(found, subcommand=subcommand)
        help_text = help_run.stdout if "--ctx-size" in help_run.stdout else help_run.stderr
        if not {"--ctx-size", "--port"} <= parse_help(help_text).live_spellings:
            raise _no_server(found.program, help_run)
        version_run = self.run(found, ("--version",))
        result = ProbeResult(
            identity=self.identity(found),
            version=parse_version(version_run.stderr + "\n" + version_run.stdout),
            help_text=help_text[:MAX_HELP_CHARS],
            subcommand=subcommand,
        )
        if self._quick_key(found) != quick:
            raise EngineError(
                f"`{found.program}` changed while tunerd read it",
                hint="wait until its installation has finished, and try again",
            )
        self.files.remember(self._kept(quick), result, schema=_PROBE_SCHEMA)
        return result

    def identity(self, found: Found) -> EngineIdentity:
        """The program and every shared object that a run of it maps, hashed.

        The dynamic loader itself says which objects it initialised, so backends that are loaded by
        hand are among them, and so are the programs that a script starts by their whole paths. Of the GPU's
        driver nothing is. A static program has only itself.

        Raises:
            EngineError: the program or one of its libraries cannot be read.
        """
        program = real_path(found.program)
        if is_own_server(found.program):
            return _identity(_embedded_files(), None)
        # Backends are loaded before a model is looked for, but not for --version.
        nowhere = ("--model", "/nonexistent/none.gguf", "--port", str(free_port()))
        traced = self.run(found, nowhere, {"LD_DEBUG": "files", **_NO_VULKAN_DRIVER})
        mapped = {
            real_path(Path(path))
            for path in _INITIALISED.findall(traced.stderr)
            if not Path(path).name.startswith(_DRIVER_LIBRARIES)
        } | _started_by_script(program, traced.stderr)
        folders = {
            program.parent,
            *(path.parent for path in mapped if BACKEND.fullmatch(path.name)),
        }
        siblings = {
            real_path(path)
            for folder in folders
            for path in folder.glob("libggml-*.so")
            if path.exists()  # an upgrade may leave links to nothing
        }
        others = sorted((mapped | siblings) - {program})
        return _identity((program, *others), self.sandbox.reader(program))

    def copy(self, program: Path, component: Component, target: Path) -> None:
        """Copy a part of a program, if it still is what was hashed; nobody else reads an unfinished copy.

        Raises:
            EngineError: it is another file now, or may not be read by the program.
            OSError: the copy cannot be written.
        """
        with (
            _opened(component.path, self.sandbox.reader(program)) as (source, status),
            os.fdopen(os.open(target, _NEW_FILE, 0o600), "wb") as copy,
        ):
            n_bytes = min(status.st_size, component.size)
            if _hashed(source, n_bytes, copy.write) != component.sha256:
                raise EngineError(f"`{component.path}` changed while it was copied")
            os.fchmod(copy.fileno(), 0o755 if status.st_mode & stat.S_IXUSR else 0o644)

    def estimated_mib(
        self, found: Found, environment: Mapping[str, str], arguments: Sequence[str]
    ) -> dict[str, int] | None:
        """What the build itself expects to take of each device [MiB], without speculation.

        `llama-fit-params` beside the server, or the same by `llama fit-params`, makes a model and a context
        that hold nothing. It knows none of a server's own arguments.

        Returns:
            By the device's name, `Host` among them; None where the build has no such program, or it does
            not say.
        """
        program = found.program.with_name(_FIT_PROGRAM)
        beside = replace(found, program=program, subcommand=())
        if found.subcommand:
            beside = replace(found, subcommand=("fit-params",))
        elif not _is_program(program):
            return None
        done = self.run(beside, (*arguments, "--fit", "off", "--fit-print", "on"), environment)
        said = {name: sum(map(int, mib.split())) for name, mib in _ESTIMATED.findall(done.stdout)}
        return said if done.returncode == 0 and said else None

    def devices(
        self, found: Found, environment: Mapping[str, str]
    ) -> tuple[OffloadDevice, ...] | None:
        """The devices that a build can offload to, as it prints them now.

        Args:
            found: The program.
            environment: Of the server, which may hide or choose devices.

        Returns:
            None where the build cannot list them (ik).
        """
        done = self.run(found, ("--list-devices",), environment)
        said = done.stdout + done.stderr
        if done.returncode != 0 or "Available devices" not in said:
            return None
        return parse_devices(said)

    def _help(self, found: Found) -> tuple[tuple[str, ...], Completed]:
        """What the program wants in front of a server's arguments, and a server's help."""
        bare = replace(found, subcommand=())
        done = self.run(bare, ("--help",))
        if "--ctx-size" in done.stdout + done.stderr or not _SERVES.search(done.stdout):
            return (), done
        return ("serve",), self.run(bare, ("serve", "--help"))

    def run(
        self, found: Found, arguments: Sequence[str], extra: Mapping[str, str] | None = None
    ) -> Completed:
        """Run the program with these arguments, and variables beside its own, to its end.

        Raises:
            EngineError: it could not be run, or did not end in time.
        """
        found = by_own_path(found)
        subcommand = found.subcommand
        if subcommand is None:
            remembered = self._remembered(self._quick_key(found))
            subcommand = remembered.subcommand if remembered else self._help(found)[0]
        environment = {**BARE_ENVIRONMENT, **found.environment, **(extra or {})}
        is_own = is_own_server(found.program)
        place = Sandbox(None) if is_own and loads_its_own(environment) else self.sandbox
        if place == Sandbox(None) and os.geteuid() == 0 and not is_own:
            raise EngineError(
                f"will not run `{found.program}` as root",
                cause="tunerd asks a program what it can do from another account only",
                hint="create the account `llama-server`, or set service.user",
            )
        if found.found_by.startswith(OF_A_UNIT) and _takes_no_words(found.program):
            raise EngineError(
                f"will not run `{found.program}` to see its --help",
                cause="it is a script that does not seem to pass its arguments on, so it could start a second server",
                hint="name the server itself in the unit, or end the script with the server and all arguments: "
                '`exec llama-server ... "$@"` in sh and bash, $argv in fish',
            )
        what = f"`{found.program} {' '.join(arguments[:1])}`"
        late = threading.Timer(
            self.patience_s, self.tell, [f"waiting for {what}, up to {self.timeout_s:.0f} s"]
        )
        late.start()
        try:
            done = place.run(
                [str(found.program), *subcommand, *arguments],
                timeout_s=self.timeout_s,
                env=environment,
                limits=_PROBE_LIMITS,
                max_output_bytes=_MAX_OUTPUT_BYTES,
            )
        except (HostError, ServiceError) as error:
            raise EngineError(
                f"cannot run `{found.program}` as {place.who}",
                cause=error.cause or error.message,
                hint=error.hint,
            ) from error
        finally:
            late.cancel()
        if done.timed_out:
            raise EngineError(f"{what} did not end within {self.timeout_s:.0f} s")
        return done

    def _quick_key(self, found: Found) -> str:
        """Changes when the program file, its folder's libraries or its environment change."""
        program = real_path(found.program)
        try:
            parts = [f"{_PROBE_SCHEMA}", str(program)]
            libraries = [path for path in sorted(program.parent.glob("lib*.so*")) if path.exists()]
            own = _embedded_files() if is_own_server(found.program) else ()
            for path in (program, *libraries, *own):
                status = path.stat()
                parts.append(f"{path.name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}")
        except OSError as error:
            raise EngineError(
                f"cannot read `{found.program}`",
                cause=error.strerror,
                hint="`tunerd engines` lists the engines that are here",
            ) from error
        parts.extend(f"{name}={value}" for name, value in found.environment.items())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _remembered(self, quick: str) -> ProbeResult | None:
        known = self.files.recall(ProbeResult, self._kept(quick), schema=_PROBE_SCHEMA)
        return known if known is not None and is_unchanged(known.identity) else None

    def _kept(self, quick: str) -> Path:
        return self.cache_dir / f"probe-{quick[:32]}.json"


# Where an ELF file says for which processor it is: its width and byte order, and the machine's number.
_FOR_PROCESSOR = (slice(4, 6), slice(18, 20))


def _no_server(program: Path, done: Completed) -> EngineError:
    """Why a program's help is not that of a server, by its own words where it failed."""
    words = last_words(f"{done.stdout}\n{done.stderr}".splitlines())
    if done.returncode == 0:
        cause = "its --help lists no --ctx-size and --port"
        return EngineError(
            f"not a llama-server: `{program}`", cause=cause, hint="name another program"
        )
    if done.returncode is not None:
        cause = f"exit status {done.returncode}: {words}"
    else:
        cause = f"ended by signal {done.signal or '(unknown)'}: {words}"
    head, own = _first_bytes(program, 20), _first_bytes(Path("/proc/self/exe"), 20)
    if head[:4] == own[:4] and any(head[at] != own[at] for at in _FOR_PROCESSOR):
        cause = "it is a program for another kind of processor"
    return EngineError(
        f"`{program} --help` shows no options of a llama-server",
        cause=cause,
        hint="run it by hand to see why; if it does not find its libraries, set `environment` in [engines.NAME]",
    )


def _embedded_files() -> tuple[Path, ...]:
    """The files that the embedded server's code comes from: its launcher and the extension."""
    import importlib.util

    own = Path(__file__).parents[1] / "tryout/embedded.py"
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return (own,)
    folder = Path(spec.origin).parent
    libraries = [*folder.glob("*.so"), *folder.parent.glob("xllamacpp.libs/*.so*")]
    return (own, *sorted(libraries))


def _started_by_script(program: Path, said: str) -> set[Path]:
    """What a script starts beside its interpreter, as the dynamic loader says; nothing of other programs."""
    words = shebang(program)
    if not words:
        return set()
    interpreter = real_path(Path(words[0]))
    started = [real_path(Path(path)) for path in _STARTED.findall(said)]
    found = itertools.dropwhile(lambda path: path != interpreter, started)
    return {path for path in found if path != interpreter and _is_program(path)}


def shebang(program: Path) -> list[str]:
    """What a script says that runs it; empty for any other program."""
    line = _first_bytes(program, _MAX_SHEBANG).partition(b"\n")[0]
    return [os.fsdecode(word) for word in line[2:].split()] if line[:2] == b"#!" else []


def _takes_no_words(program: Path) -> bool:
    """Whether a shell's script may do the same whatever it is told, beside production and its memory too."""
    if not any(map(is_shell, shebang(program))):
        return False
    return not hands_words_on(_first_bytes(program, _MOST_SCRIPT_BYTES))


# Of a shell's script: what goes on in the next line, comments, what another program reads, such as awk, and `2>&1`.
_ASIDES = re.compile(rb"\\\n|(?:^|(?<=[ \t;]))#[^\n]*|'[^'\n]*'|[12]?>&[12]\b", re.MULTILINE)
_LAST = re.compile(
    rb"(?:\w+=\S*[ \t]+)*(?:exec[ \t]|\S*/|llama-server[ \t])[^;&|()]*\$\{?(?:[@*]|argv\b(?!\[\d))[^;&|()]*"
)
_REPLACED = re.compile(rb"\bshift\b|\bset[ \t]+(?:--|argv\b)|\$\{[@*]:")


def hands_words_on(script: bytes) -> bool:
    """Whether the last thing that a script does is to start a program with all of its words: sh(1), csh(1), fish(1).

    Only one that is seen to do so can be asked for the help of its server: any other would start that once more.
    """
    text = _ASIDES.sub(b" ", script).strip()
    last = re.split(rb"[;\n]", text)[-1].strip()
    return _LAST.fullmatch(last) is not None and _REPLACED.search(text) is None


def _first_bytes(path: Path, n_bytes: int) -> bytes:
    """The beginning of a plain file; empty where it is none, or cannot be read.

    Whoever put something else there can keep nobody waiting (a pipe), and have no device opened.
    """
    with (
        contextlib.suppress(EngineError, OSError),
        _opened(real_path(path), None) as (descriptor, _),
    ):
        return os.pread(descriptor, n_bytes, 0)
    return b""


def _identity(paths: Sequence[Path], reader: User | None) -> EngineIdentity:
    """Of these files, which `reader` must be able to read.

    Raises:
        EngineError: one cannot be read, or they are more than any engine has: their names come
            from what a program says.
    """
    if len(paths) > _MAX_COMPONENTS:
        raise EngineError(f"`{paths[0]}` maps {len(paths)} files, more than {_MAX_COMPONENTS}")
    left = _MAX_HASHED_BYTES
    components: list[Component] = []
    for path in paths:
        components.append(_component(path, reader, at_most=left))
        left -= components[-1].size
    whole = hashlib.sha256()
    # By name and content, not by place: a kept copy is the same engine.
    for name, digest in sorted({(c.path.name, c.sha256) for c in components}):
        whole.update(f"{name}\0{digest}\n".encode())
    return EngineIdentity(whole.hexdigest(), tuple(components))


def _is_same(path: Path, sha256: str) -> bool:
    try:
        return _component(path).sha256 == sha256
    except (
        EngineError
    ) as error:  # a folder stands there now; or nobody can tell, as in a closed home
        return isinstance(error.__cause__, PermissionError)


def is_unchanged(identity: EngineIdentity) -> bool:
    """Whether all its files still have the size and time that they had."""
    try:
        stands = [component.path.stat() for component in identity.components]
    except OSError:
        return False
    return all(
        (now.st_size, now.st_mtime_ns) == (component.size, component.mtime_ns)
        for component, now in zip(identity.components, stands, strict=True)
    )


def _component(
    path: Path, reader: User | None = None, *, at_most: int = _MAX_HASHED_BYTES
) -> Component:
    """One file, hashed: no more of it than it has, and not at all if it is larger than `at_most`.

    (`/proc/kcore` has 128 TiB.)
    """
    with _opened(path, reader) as (descriptor, status):
        if status.st_size > at_most:
            raise EngineError(f"too large to be a part of an engine: `{path}`")
        try:
            digest = _hashed(descriptor, status.st_size)
        except OSError as error:
            raise EngineError(f"cannot read `{path}`", cause=error.strerror) from error
    return Component(path, status.st_size, status.st_mtime_ns, digest)


@contextlib.contextmanager
def _opened(path: Path, reader: User | None) -> Iterator[tuple[int, os.stat_result]]:
    """A file whose name may come from a hostile program's output.

    It is looked at before it is opened, since opening a device may do something. That `reader` may read it
    is asked of what was found, since the name may lead elsewhere by then.
    """

    def check(found: int) -> None:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise EngineError(f"not a regular file: `{path}`")
        if reader is not None and not may_read_open(reader, found):
            raise EngineError(
                f"not a part of an engine: `{path}`",
                cause="the account that runs it could not read the file",
                hint="only permission bits count, of the file and the folders above it",
            )

    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(looked_at(path, check, os.O_NOFOLLOW))
        except OSError as error:
            raise EngineError(f"cannot read `{path}`", cause=error.strerror) from error
        yield descriptor, os.fstat(descriptor)


def _hashed(
    descriptor: int, n_bytes: int, keep: Callable[[bytes], object] = lambda _piece: None
) -> str:
    digest = hashlib.sha256()
    while n_bytes > 0 and (piece := os.read(descriptor, min(n_bytes, _CHUNK_BYTES))):
        n_bytes -= len(piece)
        digest.update(piece)
        keep(piece)
    return digest.hexdigest()


def changed_files(
    components: Iterable[tuple[str, str]], argv: Sequence[str] = ()
) -> tuple[str, ...]:
    """What of a recorded engine (paths with hashes) is no longer the file that it was, in words.

    `argv` names it, maybe by a link that leads to another build by now.
    """
    known = dict(components)
    found = [
        f"{path} is gone" if is_gone(Path(path)) else f"{path} was replaced"
        for path, digest in known.items()
        if not _is_same(Path(path), digest)
    ]
    for program in map(Path, argv[:1] if known else ()):
        real = real_path(program)
        if real != program and str(real) not in known and not is_own_server(program):
            found.append(f"{program} leads to {real}")
    return tuple(found)


def kept_folder(engines_dir: Path, sha256: str | None) -> Path | None:
    """The kept copy of an engine by its identity; None if there is none."""
    folder = engines_dir / (sha256 or "")[:SHORT]
    return folder if sha256 and (folder / KEPT_RECORD).exists() else None


_PROOF_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class _Remembered:
    proofs: tuple[Proof, ...]


def read_proofs(cache_dir: Path, files: Files, identity: EngineIdentity) -> tuple[Proof, ...]:
    """The remembered proofs of a build; empty if there are none, or they cannot be read."""
    found = files.recall(_Remembered, _path(cache_dir, identity), schema=_PROOF_SCHEMA)
    return () if found is None else found.proofs


def remember_proofs(
    cache_dir: Path, files: Files, identity: EngineIdentity, proofs: tuple[Proof, ...]
) -> None:
    """Keep the proofs of a build."""
    files.remember(_path(cache_dir, identity), _Remembered(proofs), schema=_PROOF_SCHEMA)


def _path(cache_dir: Path, identity: EngineIdentity) -> Path:
    return cache_dir / f"proofs-{identity.sha256[:32]}.json"
