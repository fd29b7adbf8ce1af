"""What a unit on this machine would run: its own text with its drop-ins, as systemd reads them."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunerd.errors import ConfigError
from tunerd.units.text import (
    ExecCommand,
    UnitFile,
    environment_files_of,
    environment_of,
    expand_specifiers,
    is_ours,
    parse_exec,
    parse_unit,
)

# What names a model, or where one is fetched from. Source: help of mainline 0.7.0; without any of them it is
# a router that starts a server for each model.
_NAMES_A_MODEL = re.compile(
    r"-m|--model|-mu|--model-url|-hf|-hfr|--hf-repo|-dr|--docker-repo|--(?!spec-).+-default"
)
MODEL_VARIABLES = {"LLAMA_ARG_" + name for name in ("MODEL", "MODEL_URL", "HF_REPO", "DOCKER_REPO")}
# What sets something up for itself and then becomes the program that is named behind its options.
_BECOMES = {"chrt", "env", "ionice", "nice", "nohup", "numactl", "prlimit", "setpriv", "stdbuf", "taskset"}  # fmt: skip
# Source: the parser of mainline.
UNIX_SOCKET = ".sock"
_ENGINE_WORDS = ("llama-server", "llama_server")
# A server by its bare name, as starters find it on PATH.
_SERVERS = {"llama-server", "llama"}
# What runs its command line where other files stand at the same paths, and others may hold its port.
_CONTAINERS = {"distrobox", "docker", "nerdctl", "podman", "systemd-nspawn"}
# Of these the server is a process of the unit itself, which ends with it.
_OTHER_ROOTS = {"apptainer", "bwrap", "chroot", "singularity"}
_PUBLISHED = re.compile(r"(?:^| )(?:-p|--publish)[ =](\S+)")
_OTHER_ROOT = ("RootDirectory", "RootImage")
OTHER_FILES = (*_OTHER_ROOT, "BindPaths", "BindReadOnlyPaths", "ExtensionDirectories", "ExtensionImages",
                "MountImages", "TemporaryFileSystem")  # fmt: skip
_SHELLS = re.compile(r"(ba|da|z|k|mk|c|tc|fi)?sh|busybox")
# Where `%d` leads while a unit runs; its text does not say.
_OF_CREDENTIALS = re.compile(r"^/run/(user/\d+/)?credentials/[^/]+/")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Of the one program for everything, `llama`; llama-server itself takes nothing but flags.
_SUBCOMMANDS = {("serve",), ("server",)}


@dataclass(frozen=True, slots=True)
class Serving:
    """How a server is reached and named, from its arguments and environment.

    A value is None where neither names it: then the build's own default holds. `api_key` is the first
    of the keys given in plain text, as hand-written units do. `sleeps`: it unloads its model when nobody
    asked it anything for a while. `asked_otherwise` is how it is reached where tunerd cannot ask it. `is_router`: it was
    seen to be one, which starts a server for each model.
    """

    host: str | None
    port: int | None
    alias: str | None
    model: str | None
    api_key_file: str | None
    api_key: str | None = field(default=None, repr=False)
    sleeps: bool = False
    asked_otherwise: str | None = None
    is_router: bool = False


@dataclass(frozen=True, slots=True)
class LiveUnit:
    """A unit as it stands on disk.

    `text` is None where there is no unit file; `argv` where it cannot be read as one command
    (`problem` says why). `environment` is what its server gets, with drop-ins and files;
    `own_environment` and `own_environment_files` are what the unit file alone names, and
    `file_environment` what the files set. `drop_in_exec` are drop-ins that replace the command line.
    `credentials` are the files behind its credentials, by name. `prefix` is what starts the server for the unit, such as `taskset -c 0`,
    without the variables that `env` sets, which are in `environment`. `search_path` are the folders, with colons, in which
    a bare name of a program is looked for, None for systemd's own; `work_dir` is where the server starts, as the unit says
    it. A masked unit has no text. `script` is what the unit starts, where all of these are of the server that it has started. `link_to` is where the file leads if
    it is a link. `mounts` are directives with which other files stand at some paths than on this machine. `shadowed_by` is where tunerd would write its own file, if this one, of a package,
    stands in another folder and is left there.
    """

    unit: str
    path: Path | None
    text: str | None
    drop_ins: tuple[Path, ...]
    is_ours: bool
    program: str | None
    argv: tuple[str, ...] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    group: str | None = None
    credentials: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    search_path: str | None = None
    work_dir: str | None = None
    own_environment: Mapping[str, str] = field(default_factory=dict)
    own_environment_files: tuple[str, ...] = ()
    file_environment: Mapping[str, str] = field(default_factory=dict)
    drop_in_exec: tuple[Path, ...] = ()
    problem: str | None = None
    mounts: tuple[str, ...] = ()
    link_to: Path | None = None
    shadowed_by: Path | None = None
    script: str | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the server is told: without the program, and without the `serve` of `llama serve`."""
        return (self.argv or ())[2 if self.has_subcommand else 1 :]

    @property
    def has_subcommand(self) -> bool:
        """Whether it runs `llama serve`."""
        return (self.argv or ())[1:2] in _SUBCOMMANDS

    @property
    def is_container(self) -> bool:
        """Whether its program has others start the server, in a container."""
        return _name(self.program or "") in _CONTAINERS

    @property
    def has_own_files(self) -> bool:
        """Whether its command line names files as they stand elsewhere than on this machine."""
        return self.is_container or self.has_own_root or bool(self.mounts)

    @property
    def has_own_root(self) -> bool:
        """Whether its program itself is one of those, or leads to others."""
        is_led = _name(self.program or "") in _OTHER_ROOTS
        return is_led or not set(_OTHER_ROOT).isdisjoint(self.mounts)

    @property
    def is_known(self) -> bool:
        """Whether it runs a server by a name that llama.cpp gives one."""
        words = " ".join((self.program or "", *(self.argv or ())[:1]))
        is_llama = _name(self.program or "") == "llama" and self.has_subcommand
        return is_llama or any(word in words for word in _ENGINE_WORDS)

    @property
    def names_a_model(self) -> bool:
        """Whether anything says what it serves; a server that is told nothing is a router."""
        return any(map(_NAMES_A_MODEL.fullmatch, self.arguments)) or not MODEL_VARIABLES.isdisjoint(
            self.environment
        )

    def source_of(self, path: str) -> str:
        """The file behind a credential's path; any other path is that file itself."""
        folder, _, name = path.rpartition("/")
        is_credential = folder == "%d" or _OF_CREDENTIALS.match(path) is not None
        return self.credentials.get(name, path) if is_credential else path

    @property
    def serving(self) -> Serving:
        """Address and names."""
        found = serving_of(self.arguments, self.environment)
        if found.asked_otherwise is None and self.is_container and not self._has_port(found.port):
            return replace(found, asked_otherwise="on a port that others give its container")
        return found

    def _has_port(self, port: int | None) -> bool:
        """Whether a container is asked here on the port that it has itself."""
        words = " ".join(self.arguments)
        given = [one.split(":") for one in _PUBLISHED.findall(words)]
        return port is not None and (not given or any(str(port) in one[:-1] for one in given))


# What decides how much of the machine a server gets, beside its own flags. Source: systemd.exec(5), systemd.resource-control(5).
_LIMITS = (
    "AllowedCPUs", "AllowedMemoryNodes", "CPUAffinity", "CPUQuota", "CPUSchedulingPolicy", "CPUWeight", "LimitMEMLOCK",
    "MemoryHigh", "MemoryMax", "MemorySwapMax", "NUMAMask", "NUMAPolicy", "Nice",
)  # fmt: skip
# Of these all lines count together, and not the last alone.
_MASKS = frozenset({"AllowedCPUs", "AllowedMemoryNodes", "CPUAffinity", "NUMAMask"})


def limits_of(unit: UnitFile) -> tuple[str, ...]:
    """What it leaves its server of processors and memory, as `Name=value`."""
    found = ((name, [one.value for one in unit.values("Service", name)]) for name in _LIMITS)
    return tuple(
        f"{name}={' '.join(values if name in _MASKS else values[-1:])}"
        for name, values in found
        if values
    )


def with_drop_ins(text: str, drop_ins: Iterable[str]) -> UnitFile:
    """A unit's text with those of its drop-ins, in the order in which systemd applies them."""
    unit = parse_unit(text)
    for drop_in in drop_ins:
        unit = unit.with_drop_in(parse_unit(drop_in))
    return unit


def read_live(
    *,
    unit: str,
    path: Path | None = None,
    text: str | None,
    drop_ins: Sequence[tuple[Path, str]] = (),
    of_files: Callable[[UnitFile], dict[str, str]] = lambda _: {},
    specifiers: Mapping[str, str],
) -> LiveUnit:
    """The meaning of a unit's text.

    Args:
        unit: Its name.
        path: Where the text was read; None where there is no unit, or only a text.
        text: Content of the unit file.
        drop_ins: Path and content of each, in the order in which systemd applies them.
        of_files: What the environment files set together of the unit with its drop-ins.
        specifiers: Values of `%h`, `%u` and the like, by letter.
    """
    names = tuple(drop_in for drop_in, _ in drop_ins)
    if text is None:
        return LiveUnit(unit, None, None, names, is_ours=False, program=None, argv=None)
    own = parse_unit(text)
    merged = with_drop_ins(text, (drop_in for _, drop_in in drop_ins))
    file_environment = of_files(merged)
    environment = environment_of(merged, specifiers) | file_environment
    search_path = merged.value("Service", "ExecSearchPath")
    command, problem = _command(merged, environment, specifiers)
    program, argv = None, None
    prefix: tuple[str, ...] = ()
    if command is not None:
        before, argv = _split(command.argv)
        program = argv[0] if before else command.path
        sets = [word for word in before if _ASSIGNMENT.fullmatch(word)]
        environment |= dict(word.split("=", 1) for word in sets)
        search_path = environment.get("PATH") if before else search_path
        prefix = tuple(word for word in before if word not in sets)
        prefix = () if len(prefix) == 1 and _name(prefix[0]) == "env" else prefix

    def filled(value: str) -> str:
        with contextlib.suppress(ConfigError):  # which systemd would ignore
            return expand_specifiers(value, specifiers)
        return value

    def said(name: str) -> str | None:
        value = merged.value("Service", name)
        return None if value is None else filled(value)

    work_dir = said("WorkingDirectory")
    loaded = (one.value.partition(":") for one in merged.values("Service", "LoadCredential"))
    return LiveUnit(
        unit=unit,
        path=path,
        text=text,
        drop_ins=names,
        is_ours=is_ours(text),
        program=program,
        argv=argv,
        environment=environment,
        user=said("User"),
        group=said("Group"),
        credentials={filled(name): filled(file) for name, _, file in loaded if file},
        prefix=prefix,
        search_path=search_path,
        work_dir=None if work_dir is None else work_dir.removeprefix("-"),
        own_environment=environment_of(own, specifiers),
        own_environment_files=tuple(
            name.removeprefix("-") for name in environment_files_of(own, specifiers)
        ),
        file_environment=file_environment,
        drop_in_exec=tuple(path for path, drop_in in drop_ins if _sets_command(drop_in)),
        problem=problem,
        mounts=tuple(name for name in OTHER_FILES if merged.values("Service", name)),
    )


def _command(
    merged: UnitFile, environment: dict[str, str], specifiers: Mapping[str, str]
) -> tuple[ExecCommand | None, str | None]:
    """The one command that it starts; else why it has none."""
    commands = merged.values("Service", "ExecStart")
    if len(commands) != 1:
        return None, f"it has {len(commands)} ExecStart= lines"
    try:
        of_start = environment | {"CREDENTIALS_DIRECTORY": "%d"}  # which is its folder for systemd
        return parse_exec(commands[0].value, of_start, specifiers), None
    except ConfigError as error:
        return None, error.message


def _split(argv: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What only starts another program, and that program's own command line, if its path or known name stands there."""
    begin = 0
    while _name(argv[begin]) in _BECOMES:
        programs = (n for n in range(begin + 1, len(argv)) if _is_program(*argv[n - 1 : n + 1]))
        found = next(programs, None)
        if found is None:
            return (), argv
        begin = found
    return argv[:begin], argv[begin:]


def _is_program(before: str, word: str) -> bool:
    """Whether a word behind a starter begins a command line; a file that a server is told does not."""
    if word.startswith("/"):
        return _NAMES_A_MODEL.fullmatch(before) is None
    return word in _SERVERS | _BECOMES | _CONTAINERS | _OTHER_ROOTS


def is_shell(program: str) -> bool:
    """Whether what a program of this name runs cannot be told from its command line."""
    return _SHELLS.fullmatch(_name(program)) is not None


def is_same_command(argv: Sequence[str], cmdline: Sequence[str] | None) -> bool | None:
    """Whether a process runs with exactly these arguments; None where its own are not known.

    The program itself may be a script, and stand behind its interpreter. What `env` and its like become where
    that was not understood has fewer.
    """
    if not cmdline or _name((*argv, "")[0]) in _BECOMES:
        return None
    arguments = tuple(argv[1:])
    if not arguments:
        return None
    pairs = zip(arguments, cmdline[-len(arguments) :], strict=False)
    same = (
        _OF_CREDENTIALS.sub("%d/", one) == _OF_CREDENTIALS.sub("%d/", other) for one, other in pairs
    )
    return len(cmdline) >= len(arguments) and all(same)


def _name(program: str) -> str:
    return program.rpartition("/")[2]


def serving_of(arguments: Sequence[str], environment: Mapping[str, str]) -> Serving:
    """Address and names, whichever build's spelling they have.

    On ik the environment wins over arguments; its unit would rarely set both, so the arguments are
    taken first here.
    """

    def all_of(variable: str, *spellings: str) -> list[str]:
        found = [environment[variable]] if variable in environment else []
        pairs = itertools.pairwise(arguments)
        return found + [value for word, value in pairs if word.replace("_", "-") in spellings]

    def of(variable: str, *spellings: str) -> str | None:
        return next(reversed(all_of(variable, *spellings)), None)

    port = of("LLAMA_ARG_PORT", "--port") or ""
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else None
    host = of("LLAMA_ARG_HOST", "--host")
    keys = of("LLAMA_API_KEY", "--api-key")
    ways = {
        "on a Unix socket": any(
            one.strip().endswith(UNIX_SOCKET) for one in (host or "").split(",")
        ),
        "by TLS": of("LLAMA_ARG_SSL_CERT_FILE", "--ssl-cert-file"),
        "below a prefix": of("LLAMA_ARG_API_PREFIX", "--api-prefix"),
    }
    sleep_s = of("LLAMA_ARG_SLEEP_IDLE_SECONDS", "--sleep-idle-seconds") or ""
    return Serving(
        host=host,
        port=number or None,  # of port 0 the kernel says which it is
        # Mainline answers to all of them; ik, which takes the last, is rarely given more than one.
        alias=",".join(all_of("LLAMA_ARG_ALIAS", "-a", "--alias"))
        or environment.get("LLAMA_ARG_MODEL_ALIAS"),
        model=of("LLAMA_ARG_MODEL", "-m", "--model"),
        api_key_file=of("LLAMA_ARG_API_KEY_FILE", "--api-key-file"),
        api_key=keys.partition(",")[0] if keys else None,
        sleeps=re.fullmatch(r"0*[1-9][0-9]*", sleep_s) is not None,
        asked_otherwise=next((way for way, is_given in ways.items() if is_given), None),
    )


def _sets_command(drop_in: str) -> bool:
    directives = parse_unit(drop_in).directives
    return any((one.section, one.name) == ("Service", "ExecStart") for one in directives)
