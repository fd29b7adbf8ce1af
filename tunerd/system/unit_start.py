"""Starting the main process of a supervised unit as its directives say."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tunerd.core.exec_start import expand_specifiers, parse_exec
from tunerd.core.local_outcome import (
    EXIT_CHDIR,
    EXIT_CREDENTIALS,
    EXIT_EXEC,
    EXIT_LIMITS,
    EXIT_USER,
)
from tunerd.core.local_service import ServiceSpec
from tunerd.core.paths import Paths
from tunerd.core.unit_environment import (
    environment_files_of,
    environment_of,
    parse_environment_file,
)
from tunerd.errors import ConfigError, HostError
from tunerd.system.confine import Limits, User
from tunerd.system.process import MINIMAL_ENVIRONMENT, Child, Setting, start

_MAX_ENVIRONMENT_FILE_BYTES = 1024 * 1024
_MAX_CREDENTIAL_BYTES = 1024 * 1024  # systemd's own limit
# Of a container's environment: where its CUDA is, and which GPUs it was given.
_PASSED_ON = ("LD_LIBRARY_PATH",)
_PASSED_ON_PREFIXES = ("NVIDIA_", "CUDA_")
_STATUS_OF_STEP = {"folder": EXIT_CHDIR, "user": EXIT_USER, "limits": EXIT_LIMITS}


class StartFailure(Exception):
    """The process could not be started; `status` is what systemd exits with in its place."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What a server gets of the supervisor's own environment beside the minimal one."""
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }


def credentials_folder(paths: Paths, unit: str) -> Path:
    """Where a unit finds its credentials while it runs.

    Root's own folders are closed to the account that a unit may run as; /run is not.
    """
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        name = hashlib.sha256(os.fsencode(paths.state_dir)).hexdigest()[:12]
        return Path("/run") / f"tunerd-credentials-{name}" / unit
    return paths.runtime_dir / "credentials" / unit


def remove_credentials(paths: Paths, unit: str) -> None:
    """Leave no secret behind."""
    folder = credentials_folder(paths, unit)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are in it, or it was never there
        folder.parent.rmdir()


def start_service(
    spec: ServiceSpec,
    paths: Paths,
    *,
    invocation_id: str,
    log: int,
    own_environment: Mapping[str, str],
    on_spawn: Callable[[int], None],
    say: Callable[[str], None],
) -> Child:
    """Start the program of a unit.

    Args:
        spec: The unit.
        paths: Folders.
        invocation_id: Of this start.
        log: Where it writes.
        own_environment: Of the supervisor.
        on_spawn: Told the pid before anything is executed.
        say: Told what did not go as the unit says.

    Raises:
        StartFailure: It does not run.
    """
    user = _user(spec)
    specifiers = specifiers_of(spec, paths, own_environment)
    try:
        environment = _environment(spec, user, specifiers, own_environment, say)
        environment["INVOCATION_ID"] = invocation_id
        if spec.credentials:
            secrets = _load_credentials(spec, paths, user, specifiers)
            environment["CREDENTIALS_DIRECTORY"] = str(secrets)
        command = parse_exec(spec.exec_start, environment, specifiers)
        folder = _folder(spec, user, specifiers, own_environment)
    except (ConfigError, HostError) as error:
        raise StartFailure(error.message, EXIT_EXEC) from error
    for note in command.notes:
        say(note)
    setting = Setting(
        env=environment,
        cwd=folder,
        user=user,
        limits=Limits(
            n_files=spec.n_files,
            memlock_bytes=spec.memlock_bytes,
            core_bytes=spec.core_bytes or 0,
            address_space_bytes=spec.address_space_bytes,
        ),
        umask=spec.umask,
        no_new_privs=spec.no_new_privileges,
        on_spawn=on_spawn,
    )
    program = command.path
    if "/" not in program:
        program = shutil.which(program, path=MINIMAL_ENVIRONMENT["PATH"]) or program
    try:
        return start(command.argv, setting, log=log, program=program)
    except HostError as error:
        step = (error.cause or "").partition(":")[0]
        raise StartFailure(
            f"{error.message}: {error.cause}", _STATUS_OF_STEP.get(step, EXIT_EXEC)
        ) from error


def specifiers_of(
    spec: ServiceSpec, paths: Paths, own_environment: Mapping[str, str]
) -> dict[str, str]:
    """The specifiers of a unit, by letter, with the meaning they have for a user's manager."""
    home = own_environment.get("HOME", "/")
    name = spec.unit.removesuffix(".service")
    prefix, _, instance = name.partition("@")
    return {
        "n": spec.unit,
        "N": name,
        "p": prefix,
        "i": instance,
        "I": instance,
        "j": prefix.rpartition("-")[2],
        "h": home,
        "u": own_environment.get("USER", ""),
        "U": str(os.getuid()),
        "s": own_environment.get("SHELL", "/bin/sh"),
        "S": f"{home}/.local/state",
        "C": f"{home}/.cache",
        "L": f"{home}/.local/state/log",
        "E": f"{home}/.config",
        "t": own_environment.get("XDG_RUNTIME_DIR", "/run"),
        "T": "/tmp",  # noqa: S108  systemd's own meaning
        "V": "/var/tmp",  # noqa: S108  the same
        "H": os.uname().nodename,
        "v": os.uname().release,
        "d": str(credentials_folder(paths, spec.unit)),
    }


def _user(spec: ServiceSpec) -> User | None:
    if spec.user is None and spec.group is None:
        return None
    try:
        user = User.named(spec.user or str(os.getuid()), group=spec.group)
    except HostError as error:
        raise StartFailure(error.message, EXIT_USER) from error
    if user.uid == os.getuid() and user.gid == os.getgid():
        return None
    if os.geteuid() != 0:
        raise StartFailure(f"only root can run it as {spec.user or spec.group}", EXIT_USER)
    return user


def _environment(
    spec: ServiceSpec,
    user: User | None,
    specifiers: Mapping[str, str],
    own_environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, str]:
    environment = {**MINIMAL_ENVIRONMENT, **passed_on(own_environment)}
    for name in ("HOME", "USER", "LOGNAME", "SHELL"):
        if name in own_environment:
            environment[name] = own_environment[name]
    if user is not None and user.name is not None:
        environment |= {"HOME": user.home or "/", "USER": user.name, "LOGNAME": user.name}
    own = environment_of(spec.file, specifiers)
    environment.update(own.pairs)
    notes = list(own.notes)
    for file in environment_files_of(spec.file, specifiers):
        found = _matching(file.path)
        for path in found:
            parsed = parse_environment_file(_environment_text(path, file.is_optional))
            environment.update(parsed.pairs)
            notes.extend(parsed.notes)
        if not found and not file.is_optional:
            raise HostError(f"no environment file matches {file.path}")
    for note in notes:
        say(note)
    return environment


def _matching(path: str) -> list[Path]:
    if not any(char in path for char in "*?["):
        return [Path(path)]
    return sorted(Path("/").glob(path.lstrip("/")))


def _environment_text(path: Path, is_optional: bool) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_ENVIRONMENT_FILE_BYTES).decode("utf-8", "surrogateescape")
    except OSError as error:
        if is_optional:
            return ""
        raise HostError(f"cannot read the environment file {path}: {error.strerror}") from error


def _load_credentials(
    spec: ServiceSpec, paths: Paths, user: User | None, specifiers: Mapping[str, str]
) -> Path:
    """Copies that the service alone can read: it may not be able to read their sources."""
    folder = credentials_folder(paths, spec.unit)
    remove_credentials(paths, spec.unit)
    try:
        folder.parent.mkdir(parents=True, mode=0o711, exist_ok=True)
        folder.mkdir(mode=0o700)
        for name, source in spec.credentials:
            path, _ = expand_specifiers(source, specifiers)
            with Path(path).open("rb") as file:
                content = file.read(_MAX_CREDENTIAL_BYTES + 1)
            if len(content) > _MAX_CREDENTIAL_BYTES:
                raise StartFailure(f"credential is too large: {path}", EXIT_CREDENTIALS)
            copy = folder / name
            descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            with os.fdopen(descriptor, "wb") as target:
                target.write(content)
                if user is not None:
                    os.fchown(descriptor, user.uid, user.gid)
        if user is not None:
            os.chown(folder, user.uid, user.gid)
    except OSError as error:
        raise StartFailure(
            f"credential cannot be loaded: {error.filename}: {error.strerror}", EXIT_CREDENTIALS
        ) from error
    return folder


def _folder(
    spec: ServiceSpec,
    user: User | None,
    specifiers: Mapping[str, str],
    own_environment: Mapping[str, str],
) -> Path:
    own_home = "/" if os.geteuid() == 0 else own_environment.get("HOME", "/")
    if spec.working_directory is None:
        return Path("/" if user is not None else own_home)
    text, _ = expand_specifiers(spec.working_directory, specifiers)
    path = text.removeprefix("-")
    if path == "~":
        path = (user.home if user is not None else own_environment.get("HOME")) or "/"
    folder = Path(path)
    return Path("/") if text.startswith("-") and not folder.is_dir() else folder
