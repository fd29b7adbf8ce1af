"""Processes: run one to its end, or start a server (the only user of `subprocess`); what /proc says of others.

Never a shell that reads what others wrote. A program gets a minimal environment unless one is given and a
session of its own; what it prints is bounded, and what it started ends with it.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self, TypeAlias

from tunerd.errors import HostError, TunerdError
from tunerd.machine.clock import SystemClock

MAX_TEXT_BYTES = 64 * 1024
_MAX_NAME_LENGTH = 64
# include/linux/proc_ns.h, PROC_PID_INIT_INO: the inode of the first PID namespace of a boot.
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_NVIDIA_PCI_VENDOR = "0x10de"
_DISPLAY_PCI_CLASS = "0x03"  # VGA and 3D controllers; NVIDIA's vendor id is also on old chipsets
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,240}\.(?:service|scope)")


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """The first `max_bytes` of a file, undecodable bytes replaced; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes).decode("utf-8", errors="replace")
    except OSError:
        return None


def read_line(path: Path) -> str | None:
    """A file's first line without white space around it; None if unreadable or empty."""
    text = read_text(path, max_bytes=4096)
    if text is None:
        return None
    line = text.split("\n", 1)[0].strip()
    return line or None


def read_fields(path: Path) -> dict[str, str] | None:
    """`Name: value` lines as a mapping, as in `/proc/meminfo` and `/proc/PID/status`."""
    text = read_text(path)
    if text is None:
        return None
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def kib_field(fields: dict[str, str], name: str) -> int | None:
    """Bytes of a field that the kernel prints as `N kB`."""
    number, _, unit = fields.get(name, "").partition(" ")
    if unit != "kB" or not number.isdecimal():
        return None
    return int(number) * 1024


def printable(text: str, *, max_length: int = _MAX_NAME_LENGTH) -> str:
    """`text` cut to `max_length`, with `?` for everything that could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:max_length])


def process_name(pid: int, *, root: Path = Path("/")) -> str | None:
    """What the process calls itself (`comm`): its own choice, so made printable."""
    text = read_text(root / "proc" / str(pid) / "comm", max_bytes=4096)
    if text is None:
        return None
    return printable(text.removesuffix("\n")) or None


def unit_of(pid: int, *, root: Path = Path("/")) -> str | None:
    """The innermost service or scope of systemd that the process belongs to."""
    for path in _systemd_cgroup_paths(root / "proc" / str(pid) / "cgroup"):
        for part in reversed(path.split("/")):
            name = part.removeprefix("_")  # systemd's escape for names the kernel reserves
            if _UNIT_NAME.fullmatch(name):
                return name
    return None


def _systemd_cgroup_paths(path: Path) -> tuple[str, ...]:
    """Where systemd keeps its tree: its own v1 hierarchy if there is one, else the unified one."""
    text = read_text(path) or ""
    rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]  # noqa: PLR2004
    named = tuple(row[2] for row in rows if row[1] == "name=systemd")
    return (*named, *(row[2] for row in rows if row[0] == "0"))


def in_initial_pid_namespace(root: Path = Path("/")) -> bool | None:
    """Whether PIDs seen from here are those that the kernel and its drivers speak of."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    except OSError:
        return None


def boot_id(root: Path = Path("/")) -> str | None:
    """The kernel's random name of this boot; it changes with every start of the machine."""
    return read_line(root / "proc/sys/kernel/random/boot_id")


def nvidia_gpus_on_pci_bus(root: Path) -> tuple[str, ...] | None:
    """PCI addresses of NVIDIA GPUs; None where the bus is hidden or the GPU would not be on it."""
    if (root / "dev/dxg").exists():  # WSL reaches the GPU through this device instead
        return None
    vendors = _graphics_on_pci_bus(root)
    if vendors is None:
        return None
    return tuple(name for name, vendor in vendors if vendor == _NVIDIA_PCI_VENDOR)


def other_graphics_on_pci_bus(root: Path) -> bool | None:
    """Whether a display controller of another maker than NVIDIA is there; None where that is hidden.

    The emulated ones of virtual machines count: a monitor could be theirs too.
    """
    vendors = _graphics_on_pci_bus(root)
    return None if vendors is None else any(v != _NVIDIA_PCI_VENDOR for _, v in vendors)


def _graphics_on_pci_bus(root: Path) -> list[tuple[str, str | None]] | None:
    """Address and vendor of display controllers; None where the bus is hidden."""
    try:
        devices = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return None
    if not devices:
        return None
    return [
        (device.name, read_line(device / "vendor"))
        for device in devices
        if (read_line(device / "class") or "").startswith(_DISPLAY_PCI_CLASS)
    ]


_PROC = Path("/proc")
_OF_NVIDIA = (b"/dev/nvidia", b"/libnvidia-", b"/libcuda.so")
_ENVIRONMENT_BYTES = 1024 * 1024
_N_FIELDS_NEEDED = 20


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process; `start_ticks` counts clock ticks since boot and tells a reused pid apart."""

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie only waits to be counted by its parent."""
        return self.state not in {"Z", "X"}


def process_stat(pid: int) -> ProcessStat | None:
    """The process as the kernel sees it now; None if there is none."""
    # By the shortest way: all processes are looked at before and after each request of a measurement.
    try:
        with FileIO(f"/proc/{pid}/stat") as file:
            text = file.read(4096)
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(b")")[2].split()
    if len(fields) < _N_FIELDS_NEEDED:
        return None
    parent, _group, session = (int(field) for field in fields[1:4])
    return ProcessStat(pid, fields[0].decode(), parent, session, int(fields[19]))


def is_stopped(pid: int) -> bool:
    """Whether the process stands still until somebody lets it go on (SIGSTOP, a debugger)."""
    stat = process_stat(pid)
    return stat is not None and stat.state in {"T", "t"}


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is this process, or started it directly or through others that still run."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        stat = process_stat(pid)
        pid = stat.parent if stat is not None else 0
    return False


def family_of(*pids: int) -> tuple[int, ...]:
    """These processes, as far as they run, and those that they started, directly or through others that still run."""
    processes = tuple(all_processes())
    return tuple({stat.pid for stat in processes} & _with_descendants({*pids}, processes))


def may_use_nvidia(pid: int) -> bool:
    """Whether the process, or one that it started, has NVIDIA's driver loaded; also where that cannot be seen."""
    for one in family_of(pid):
        try:
            maps = (_PROC / str(one) / "maps").read_bytes()
        except PermissionError:
            return True
        except OSError:  # it has ended
            continue
        if any(part in maps for part in _OF_NVIDIA):
            return True
    return False


def _with_descendants(pids: set[int], processes: Sequence[ProcessStat]) -> set[int]:
    children = {stat.pid for stat in processes if stat.parent in pids} - pids
    return _with_descendants(pids | children, processes) if children else pids


def all_processes() -> Iterator[ProcessStat]:
    """Every process that can be seen from here."""
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and (stat := process_stat(int(folder.name))) is not None:
            yield stat


def members(*, session: int, ancestor: int, variable: tuple[str, str]) -> tuple[int, ...]:
    """Living processes that belong to one service, as far as can be told without a cgroup.

    Those of its session, those descended from its main process `ancestor`, and those that carry the
    environment variable that it was started with, wherever they went since.
    """
    processes = [process for process in all_processes() if process.is_alive]
    found = {process.pid for process in processes if process.session == session}
    found |= {ancestor} & {process.pid for process in processes}
    found |= {process.pid for process in processes if _carries(process.pid, variable)}
    return tuple(sorted(_with_descendants(found, processes) - {os.getpid()}))


def _carries(pid: int, variable: tuple[str, str]) -> bool:
    wanted = f"{variable[0]}={variable[1]}".encode()
    try:
        with (_PROC / str(pid) / "environ").open("rb") as file:
            return wanted in file.read(_ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return False


UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class User:
    """An account with the groups that a process of it has."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str | None = None
    home: str | None = None

    @classmethod
    def named(cls, name: str) -> User:
        """The account of this name or number.

        Raises:
            HostError: There is no such account.
        """
        try:
            entry = pwd.getpwuid(int(name)) if _is_number(name) else pwd.getpwnam(name)
        except KeyError as error:
            raise HostError(
                f"no such account: {name}",
                hint=f"`getent passwd {name}` prints nothing if it is missing",
            ) from error
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
        return cls(entry.pw_uid, entry.pw_gid, groups, entry.pw_name, entry.pw_dir)


def has_group(name: str) -> bool:
    """Whether there is a group of this name or number."""
    try:
        return bool(grp.getgrgid(int(name)) if _is_number(name) else grp.getgrnam(name))
    except (KeyError, OverflowError):
        return False


def _is_number(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))  # with more zeros it is none to systemd


Limits: TypeAlias = Mapping[str, int]
"""What a program may use, by the name behind `RLIMIT_`; UNLIMITED lifts one as far as allowed. Of core dumps there are none.

DATA is private writable memory: AS would also count the address space that CUDA reserves (hundreds of GiB)
and never uses. NPROC counts all threads of the account, not only the program's own.
"""


SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MINIMAL_ENVIRONMENT: Mapping[str, str] = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8"}

_KEEPER = Path(__file__).with_name("keeper.py")
_UMASK = 0o022
_MAX_OUTPUT_BYTES = 4 * 1024 * 1024
_LOG_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
# Programs that are started here

# How long the output is read on after the program ended while something that it left holds the pipe.
_DRAIN_S = 0.5
# Waits until its caller has recorded it; one that died before it could closed the pipe.
_WAITS = 'read -r go && exec "$@" </dev/null'
_LEAST_POLL_S = 0.0005
_POLL_S = 0.02
_N_ROUNDS = 100
_END_TOGETHER_S = 5.0
_TOOL_FAILED = re.compile(r"(\S*/)?(prlimit|setpriv|env): ")
# What the C library obeys before a program's own first line, and so in the tools that confine it.
# Source: ld.so(8), the variables that secure-execution mode ignores.
_OF_LOADER = ("LD_", "GLIBC_", "GCONV_", "LOCPATH", "MALLOC_", "NLSPATH")


def own_command(mode: str, *words: str) -> list[str]:
    """What runs tunerd's own command line; nothing is imported from the folder that it runs in."""
    return [sys.executable, "-P", "-m", "tunerd", f"--{mode}", *words]


def begin_in_utf_8() -> None:
    """Begin this program anew where its locale has another encoding, in which Python reads words and names of files.

    Units, profiles and records have them in UTF-8, as Python itself from 3.15 on: `/srv/größe.gguf` would
    become another file. Where `-X utf8` does not help it goes on as it is.
    """
    if "utf8" not in sys._xoptions:  # noqa: SLF001 -- CPython documents it
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execv(sys.executable, words)  # noqa: S606 -- its own program


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that ended.

    `returncode` is None if a signal ended it (`signal` says which, where that is known). `stdout` and `stderr` hold at
    most the first `max_output_bytes` of each, undecodable bytes replaced; `truncated` says that
    there was more.
    """

    argv: tuple[str, ...]
    returncode: int | None
    signal: int | None
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    took_s: float

    @property
    def is_ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.returncode == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with `code`, or by `signal`."""

    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """What surrounds a program: None means the minimal environment, and folder and account as here.

    `no_new_privs` is on for another user where it is not given. With `keeps_together` everything that it
    started, in whatever session, ends with it, and it ends with the thread that started it. `on_spawn` is called
    with its pid before the program is executed; if that raises, or this process dies in it, the program is
    never executed.
    """

    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    user: User | None = None
    limits: Limits | None = None
    umask: int | None = None
    no_new_privs: bool | None = None
    keeps_together: bool = False
    on_spawn: Callable[[int], None] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the program can be started without preparing its process."""
        prepared = (self.user, self.limits, self.umask, self.on_spawn)
        is_confined = self.keeps_together or self.no_new_privs
        return not is_confined and all(part is None for part in prepared)


def run(
    argv: Sequence[str],
    setting: Setting | None = None,
    *,
    timeout_s: float,
    max_output_bytes: int = _MAX_OUTPUT_BYTES,
) -> Completed:
    """Run a program to its end.

    When it ended, or `timeout_s` have passed, everything that is left in its session is killed; where it
    `keeps_together` also what it started and what left its session.

    Raises:
        HostError: It could not be started.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    setting = setting or Setting()
    outputs: list[_Output] = []
    with contextlib.ExitStack() as ends:
        with undisturbed():  # else one that a signal's exception meets here would be left to itself
            process = _spawn(argv, setting, subprocess.PIPE, argv[0])
            ends.callback(_end, process, outputs, keeps_together=setting.keeps_together)
            pipes = (process.stdout, process.stderr)
            outputs += [_Output(pipe, max_output_bytes) for pipe in pipes if pipe]
        timed_out = not _wait_for_end(process.pid, timeout_s)
        drained_s = clock.monotonic_s() + (0.0 if timed_out else _DRAIN_S)
        for one in outputs:
            one.ends_by(drained_s - clock.monotonic_s())
    ended = _exit_of(process)
    stdout, stderr = (one.text for one in outputs)
    if not setting.is_plain and ended.code and _TOOL_FAILED.match(stderr):
        raise _cannot_run(argv[0], stderr.strip())
    return Completed(
        argv=tuple(argv),
        returncode=ended.code,
        signal=ended.signal,
        stdout=stdout,
        stderr=stderr,
        timed_out=timed_out,
        truncated=any(one.is_truncated for one in outputs),
        took_s=clock.monotonic_s() - began_s,
    )


def _end(
    process: subprocess.Popen[bytes], outputs: Sequence[_Output], *, keeps_together: bool
) -> None:
    """Kill what is left of a program, and read what it has printed."""
    if keeps_together:
        _end_together(process.pid)
    # The scan for stragglers is for a program that left some: they hold its output open.
    is_complete = all(one.ends_by(0.0) for one in outputs)
    (_kill_group if is_complete else _kill_session)(process.pid)
    process.wait()
    for one in outputs:
        one.ends_by(_DRAIN_S)


class _Output:
    """What comes out of a pipe, read to its end by a thread; no more than the first bytes are kept."""

    def __init__(self, pipe: IO[bytes], max_bytes: int) -> None:
        self.is_truncated = False
        self._pipe = pipe
        self._kept = bytearray()
        self._max_bytes = max_bytes
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ends_by(self, timeout_s: float) -> bool:
        """Whether all that held the pipe are gone within this time."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    @property
    def text(self) -> str:
        """What came out so far."""
        return bytes(self._kept).decode("utf-8", errors="replace")

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _CHUNK_BYTES):
                room = self._max_bytes - len(self._kept)
                self._kept += chunk[:room]
                self.is_truncated = self.is_truncated or len(chunk) > room


def start(
    argv: Sequence[str],
    setting: Setting | None = None,
    *,
    log: int | None = None,
    program: str | None = None,
) -> Child:
    """Start a program that stays.

    Args:
        argv: The program by path, or by a name in the environment's PATH, and its arguments.
        setting: What surrounds it.
        log: Where its stdout and stderr go, an open file; None keeps them in a temporary file.
        program: What is executed, where that is not the first of `argv`.

    Raises:
        HostError: It could not be executed.
    """
    setting = setting or Setting()
    kept = None if log is not None else tempfile.TemporaryFile()  # noqa: SIM115  lives in Child
    target = log if kept is None else kept.fileno()
    try:
        process = _spawn(argv, setting, target, program or argv[0])
    except BaseException:
        if kept is not None:
            kept.close()
        raise
    return Child(process, kept, setting.keeps_together)


class Child:
    """A program that was started and stays until it ends or is told to.

    As a context manager it kills what is left of it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], log: IO[bytes] | None, keeps_together: bool
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log
        self._keeps_together = keeps_together
        self._exit: Exit | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._exit is None:
            if self._keeps_together:
                _end_together(self.pid)
            _kill_session(self.pid)
            self.reap()
        if self._log is not None:
            self._log.close()

    def has_ended(self) -> bool:
        """Whether it ended; until `reap` its pid still belongs to it."""
        return self._exit is not None or _has_ended(self.pid)

    def reap(self) -> Exit:
        """Wait for its end, however long that takes, and give its pid back."""
        if self._exit is None:
            self._process.wait()
            self._exit = _exit_of(self._process)
        return self._exit

    def poll(self) -> Exit | None:
        """How it ended, None while it runs; once it ended the rest of its session is killed."""
        if self._exit is None and self.has_ended():
            _kill_session(self.pid)
            self.reap()
        return self._exit

    def wait(self, timeout_s: float) -> Exit | None:
        """As `poll`, but wait for it up to `timeout_s`."""
        if self._exit is None:
            _wait_for_end(self.pid, timeout_s)
        return self.poll()

    def send(self, number: int) -> None:
        """Send a signal to the program alone; nothing happens if it ended."""
        if self._exit is None:
            os.kill(self.pid, number)

    def log_tail(self) -> str:
        """The end of what it printed, undecodable bytes replaced; empty if it has a log of its own."""
        if self._log is None:
            return ""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        return data.decode("utf-8", errors="replace")


def _spawn(
    argv: Sequence[str], setting: Setting, output: int | None, name: str
) -> subprocess.Popen[bytes]:
    environment = dict(MINIMAL_ENVIRONMENT if setting.env is None else setting.env)
    search = environment.get("PATH", SEARCH_PATH)
    program = name if "/" in name else shutil.which(name, path=search)
    if program is None:
        raise HostError(f"no such program: {name}", hint=f"looked in {search}")
    words, first, umask = list(argv), program, -1
    if not setting.is_plain:
        if not os.access(program, os.X_OK):
            there = Path(program).exists()
            raise _cannot_run(program, "Permission denied" if there else "No such file")
        if setting.cwd is not None and not setting.cwd.is_dir():
            raise _cannot_run(program, f"folder: {setting.cwd} is none")
        words, environment = _confined([program, *argv[1:]], setting, environment)
        first = words[0]
        umask = _UMASK if setting.umask is None else setting.umask
    try:
        process = subprocess.Popen(
            words,
            executable=first,
            stdin=subprocess.DEVNULL if setting.on_spawn is None else subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=setting.cwd if setting.is_plain else None,
            umask=umask,
            start_new_session=True,
        )
        if setting.on_spawn is not None:
            _let_go(process, setting.on_spawn)
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        raise _cannot_run(name, str(error)) from error
    return process


def _confined(
    argv: list[str], setting: Setting, environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The words that take on what is set and then become the program, and their environment.

    The environment is the program's but for what the tools before it would obey themselves.
    """
    user, words = setting.user, []
    if setting.on_spawn is not None:
        words += ["/bin/sh", "-c", _WAITS, "sh"]
    if setting.keeps_together:
        words += [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid())]
    words += [_tool("prlimit"), *_limit_options(setting.limits or {}), "--"]
    taken_on = []
    if setting.no_new_privs or (setting.no_new_privs is None and user is not None):
        taken_on.append("--no-new-privs")
    if setting.keeps_together:
        taken_on.append("--pdeathsig=KILL")
    if user is not None:
        taken_on += [f"--reuid={user.uid}", f"--regid={user.gid}"]
        if os.geteuid() == 0:
            groups = ",".join(map(str, user.groups))
            taken_on.append(f"--groups={groups}" if groups else "--clear-groups")
        else:
            taken_on.append("--keep-groups")
    if taken_on:  # even with nothing to do it sets capabilities, which a confined unit may not
        words += [_tool("setpriv"), *taken_on, "--"]
    taken = {name for name in environment if name.startswith(_OF_LOADER)}
    if taken or setting.cwd is not None or _inherits_deafness():
        if "=" in argv[0]:
            raise _cannot_run(argv[0], "its path has a `=`")
        words.append(_tool("env"))
        words += ["--default-signal"] if _inherits_deafness() else []
        words += [] if setting.cwd is None else [f"--chdir={setting.cwd}"]
        words += [f"{name}={environment[name]}" for name in sorted(taken)]
    kept = {name: value for name, value in environment.items() if name not in taken}
    return [*words, *argv], kept


def _inherits_deafness() -> bool:
    """Whether we were begun with signals ignored, as by nohup, which a program would then ignore too."""
    restored = {signal.SIGPIPE, signal.SIGXFSZ}  # by Popen
    return any(signal.getsignal(one) is signal.SIG_IGN for one in signal.valid_signals() - restored)


def _limit_options(limits: Limits) -> list[str]:
    """For prlimit; what only root may raise stays as it is."""
    options = []
    for name, wanted in {**limits, "CORE": 0}.items():
        number = getattr(resource, f"RLIMIT_{name}")
        soft, hard = resource.getrlimit(number)
        value = wanted
        if hard != UNLIMITED and (wanted == UNLIMITED or wanted > hard):
            try:
                resource.setrlimit(number, (soft, wanted))
            except (OSError, ValueError):
                value = hard
        options.append(f"--{name.lower()}={'unlimited' if value == UNLIMITED else value}")
    return options


def _tool(name: str) -> str:
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        raise HostError(f"no such program: {name}", hint="`apt install util-linux coreutils`")
    return found


def _let_go(process: subprocess.Popen[bytes], on_spawn: Callable[[int], None]) -> None:
    """Have the process recorded, then let it become the program."""
    if process.stdin is None:
        raise AssertionError("a pipe was asked for")
    try:
        with process.stdin as pipe:
            on_spawn(process.pid)
            pipe.write(b"go\n")
    except BaseException:
        _kill_group(process.pid)
        process.wait()
        raise


def _has_ended(pid: int) -> bool:
    """Whether this child ended; it is not reaped, so that its pid still means it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _wait_for_end(pid: int, timeout_s: float) -> bool:
    """Whether this child ends within `timeout_s`; it is not reaped."""
    clock = SystemClock()
    deadline_s, pause_s = clock.monotonic_s() + timeout_s, _LEAST_POLL_S
    while not _has_ended(pid):
        left_s = deadline_s - clock.monotonic_s()
        if left_s <= 0:
            return False
        clock.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _POLL_S)
    return True


def _kill_group(pid: int) -> None:
    """SIGKILL to the process group that this child, not yet reaped, leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_together(pid: int) -> None:
    """Let keeper.py, which watches over a program as this child, end all that came of the program."""
    if not _has_ended(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
        _wait_for_end(pid, _END_TOGETHER_S)


def _kill_session(pid: int) -> None:
    """SIGKILL to everything in the session that this child, not yet reaped, leads.

    Repeated until nothing is found, because what is killed may have been starting another.
    """
    clock = SystemClock()
    _kill_group(pid)
    for _ in range(_N_ROUNDS):
        found = [one.pid for one in all_processes() if one.session == pid and one.is_alive]
        for member in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if not found:
            return
        clock.sleep(_POLL_S)


def _cannot_run(program: str, cause: str) -> HostError:
    return HostError(f"cannot run {program}", cause=cause)


def _exit_of(process: subprocess.Popen[bytes]) -> Exit:
    status = process.returncode
    return Exit(None, -status) if status < 0 else Exit(status, None)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# From a terminal: Ctrl-Z, and use of it from the background.
_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_SHELL_OFFSET = 128  # a shell's exit status of a program that a signal ended


class Interrupts:
    """While it lasts, the first such signal is raised as an exception, and the others do nothing.

    SIGINT is raised as KeyboardInterrupt, the others as SystemExit with a shell's status for them.
    What ignores a signal already (nohup) goes on ignoring it. Ctrl-Z does nothing either: nobody would
    serve for as long as it lasted; `may_pause` is for what keeps nobody waiting. Only the main thread gets
    signals: in any other this does nothing.
    """

    def __init__(self, *, may_pause: bool = False) -> None:
        self._stops = () if may_pause else _STOPS
        self._previous: dict[int, Any] = {}
        self._is_held = False
        self._was_raised = False
        self.late: BaseException | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                    self._previous[number] = signal.signal(number, self._on_signal)
            for number in self._stops:
                self._previous[number] = signal.signal(number, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is raised within; what arrives first is `late`, for whoever would go on."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Within `held`: they are raised again, and at once what has arrived before."""
        before, self._is_held = self._is_held, False
        try:
            if self.late is not None:
                self._was_raised = True
                raise self.late
            yield
        finally:
            self._is_held = before

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._was_raised:
            return
        is_typed = number == signal.SIGINT
        end = KeyboardInterrupt() if is_typed else SystemExit(_SHELL_OFFSET + number)
        if self._is_held:
            self.late = self.late or end
            return
        self._was_raised = True
        raise end


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that arrive within come again at its end, to whatever handled them before.

    For what a library would leave half done where a handler raises in it.
    """
    interrupts = Interrupts(may_pause=True)
    try:
        with (
            interrupts.held(),
            interrupts,
        ):  # held before it has the handlers, and until it has none
            yield
    finally:
        if interrupts.late is not None:
            signal.raise_signal(_number_of(interrupts.late))


def _number_of(end: BaseException) -> int:
    code = end.code if isinstance(end, SystemExit) else None
    return code - _SHELL_OFFSET if isinstance(code, int) else signal.SIGINT


def words_of(error: BaseException) -> str:
    """What ended the work, for people: a signal by its name, an error by its own words."""
    if isinstance(error, KeyboardInterrupt):
        return "ended by Ctrl-C"
    numbers = {_SHELL_OFFSET + number: number.name for number in _SIGNALS}
    if isinstance(error, SystemExit) and error.code in numbers:
        return f"ended from outside ({numbers[error.code]})"
    if isinstance(error, TunerdError):
        return error.words
    return str(error) or type(error).__name__


SERVICE_ACCOUNT = "llama-server"
_FALLBACK = "nobody"
_FIRST_PERSON_UID = 1000
_LAST_PERSON_UID = 60000


def account(name: str) -> User | None:
    """The ids of an account; None if there is no such account."""
    try:
        return User.named(name)
    except HostError:
        return None


def probe_account(service_user: str | None) -> User | None:
    """Who probes: the service's user where we are root, `nobody` before that account exists.

    None where we are not root: then a probe runs as we are.
    """
    if os.geteuid() != 0:
        return None
    for name in (service_user, SERVICE_ACCOUNT, _FALLBACK):
        found = account(name) if name is not None else None
        if found is not None and found.uid != 0:
            return found
    return None


def account_homes() -> tuple[Path, ...]:
    """Homes of people on this machine."""
    return tuple(
        Path(entry.pw_dir)
        for entry in pwd.getpwall()
        if _FIRST_PERSON_UID <= entry.pw_uid < _LAST_PERSON_UID and entry.pw_dir.startswith("/")
    )


def is_alone_in(uid: int, gid: int) -> bool:
    """Whether a group is the first of this account, and nobody else's."""
    try:
        name, members = pwd.getpwuid(uid).pw_name, grp.getgrgid(gid).gr_mem
    except KeyError:
        return False
    first = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == gid}
    return first == {uid} and set(members) <= {name}


def may_read(who: User, path: Path) -> bool:
    """Whether an account may read a file, by the permission bits of it and the folders above.

    Access control lists are not looked at, so a file that only they open counts as unreadable.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
        parts = [real, *real.parents]
        return all(_allows(part, who, 0o4 if part is real else 0o1) for part in parts)
    except OSError:
        return False


def may_read_open(who: User, descriptor: int) -> bool:
    """As `may_read`, of a file that is open, by the name that the kernel has for it."""
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    return may_read(who, path) and path.samefile(f"/proc/self/fd/{descriptor}")


def _allows(path: Path, who: User, wanted: int) -> bool:
    if who.uid == 0:
        return True
    status = path.stat()
    if status.st_uid == who.uid:
        return bool(status.st_mode >> 6 & wanted)
    if status.st_gid in who.groups:
        return bool(status.st_mode >> 3 & wanted)
    return bool(status.st_mode & wanted)
