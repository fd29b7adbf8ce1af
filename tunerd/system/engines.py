"""Probes what engines accept, and tells whether they are still the same program.

A probe runs the program as the service's user, never as root, with an empty environment and limits
of time and memory. Its result is kept by the identity of the program and its libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunerd.core.engine import (
    Capabilities,
    Component,
    EngineIdentity,
    OffloadDevice,
    Version,
    parse_devices,
    parse_version,
    read_capabilities,
)
from tunerd.core.help_text import parse_help
from tunerd.errors import EngineError, HostError
from tunerd.system.confine import Limits, User
from tunerd.system.engine_programs import Found, is_own_server, real_path
from tunerd.system.files import Files
from tunerd.system.ports import free_port
from tunerd.system.process import Completed, run

SCHEMA = 2
PROBE_TIMEOUT_S = 60.0
# All threads of the account count, so a server that runs as it must fit in beside the probe.
_PROBE_LIMITS = Limits(cpu_s=60, data_mib=8192, file_mib=64, n_files=256, n_procs=4096)
# What a program says that it maps is hashed; of a build with CUDA that is some 3 GiB.
_MAX_HASHED_BYTES = 16 * 1024**3
_MAX_COMPONENTS = 200
_MAX_OUTPUT_BYTES = 2 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_INITIALISED = re.compile(
    r"^[ \t]{1,20}\d{1,10}:[ \t]{1,4}calling init: (/\S.{0,4095})$", re.MULTILINE
)
# The driver is a part of every fingerprint by itself, and its libraries change with each update.
_BACKEND = re.compile(r"libggml-(?!base)[a-z0-9_-]+\.so$")
_DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-")
_NO_VULKAN_DRIVER = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What probing one program found."""

    identity: EngineIdentity
    version: Version | None
    capabilities: Capabilities
    help_text: str


class EngineProber:
    """Probes programs and remembers the results.

    Args:
        cache_dir: Folder of remembered probes.
        files: Writes them.
        run_as: Account for probes; None to stay who we are, which must not be root unless the
            program is tunerd's own embedded server.
        timeout_s: Longest run of a program.
    """

    def __init__(
        self,
        cache_dir: Path,
        files: Files,
        run_as: User | None,
        *,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._cache_dir = cache_dir
        self._files = files
        self._run_as = run_as
        self._timeout_s = timeout_s

    def probe(self, found: Found) -> ProbeResult:
        """What the program accepts.

        Raises:
            EngineError: it cannot be run, or is no llama-server.
        """
        quick = self._quick_key(found)
        remembered = self._remembered(quick)
        if remembered is not None:
            return remembered
        help_run = self._run(found, ("--help",))
        help_text = help_run.stdout if "--ctx-size" in help_run.stdout else help_run.stderr
        capabilities = read_capabilities(parse_help(help_text))
        if "--ctx-size" not in capabilities.flags or "--port" not in capabilities.flags:
            raise EngineError(
                f"not a llama-server: `{found.program}`",
                cause=f"its --help (exit status {help_run.returncode}) lists no --ctx-size and --port",
                hint="name another program",
            )
        version_run = self._run(found, ("--version",))
        result = ProbeResult(
            identity=self.identity(found),
            version=parse_version(version_run.stderr + "\n" + version_run.stdout),
            capabilities=capabilities,
            help_text=help_text,
        )
        self._remember(quick, result)
        return result

    def identity(self, found: Found) -> EngineIdentity:
        """The program and every shared object that a run of it maps, hashed.

        The dynamic loader itself says which objects it initialised, so backends that are loaded by
        hand are among them. Of the GPU's driver nothing is. A static program has only itself.

        Raises:
            EngineError: the program or one of its libraries cannot be read.
        """
        program = real_path(found.program)
        if is_own_server(program):
            return _identity(embedded_files())
        # Backends are loaded before a model is looked for, but not for --version.
        nowhere = ("--model", "/nonexistent/none.gguf", "--port", str(free_port()))
        traced = self._run(found, nowhere, {"LD_DEBUG": "files", **_NO_VULKAN_DRIVER})
        mapped = {
            real_path(Path(path))
            for path in _INITIALISED.findall(traced.stderr)
            if not Path(path).name.startswith(_DRIVER_LIBRARIES)
        }
        folders = {program.parent, *(path.parent for path in mapped if _BACKEND.match(path.name))}
        siblings = {
            real_path(path)
            for folder in folders
            for path in folder.glob("libggml-*.so")
            if path.exists()  # an upgrade may leave links to nothing
        }
        return _identity((program, *sorted((mapped | siblings) - {program})))

    def check_arguments(self, found: Found, arguments: Sequence[str]) -> Completed:
        """A dry run of arguments whose model file does not exist: arguments are checked first."""
        return self._run(found, arguments)

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
        done = self._run(found, ("--list-devices",), environment)
        said = done.stdout + done.stderr
        if done.returncode != 0 or "Available devices" not in said:
            return None
        return parse_devices(said)

    def _run(
        self, found: Found, arguments: Sequence[str], extra: Mapping[str, str] | None = None
    ) -> Completed:
        is_own = is_own_server(found.program)
        if self._run_as is None and os.geteuid() == 0 and not is_own:
            raise EngineError(
                f"will not run `{found.program}` as root",
                cause="a probe runs as the service's user",
                hint="create the account `llama-server`, or set service.user",
            )
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
        try:
            done = run(
                [str(found.program), *arguments],
                timeout_s=self._timeout_s,
                env={**environment, **dict(found.environment), **(extra or {})},
                cwd=Path("/"),
                user=None if is_own else self._run_as,
                limits=_PROBE_LIMITS,
                max_output_bytes=_MAX_OUTPUT_BYTES,
            )
        except HostError as error:
            raise EngineError(
                f"cannot run `{found.program}`", cause=error.cause or error.message, hint=error.hint
            ) from error
        if done.timed_out:
            raise EngineError(
                f"`{found.program} {' '.join(arguments[:1])}` did not end within "
                f"{self._timeout_s:.0f} s"
            )
        return done

    def _quick_key(self, found: Found) -> str:
        """Changes when the program file, its folder's libraries or its environment change."""
        program = real_path(found.program)
        try:
            parts = [f"{SCHEMA}", str(program)]
            libraries = [path for path in sorted(program.parent.glob("lib*.so*")) if path.exists()]
            own = embedded_files() if is_own_server(program) else ()
            for path in (program, *libraries, *own):
                status = path.stat()
                parts.append(f"{path.name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}")
        except OSError as error:
            raise EngineError(
                f"cannot read `{found.program}`",
                cause=error.strerror,
                hint="`tunerd engines` lists the engines that are there",
            ) from error
        parts.extend(f"{name}={value}" for name, value in found.environment)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _remembered(self, quick: str) -> ProbeResult | None:
        try:
            data = self._files.read_json(self._cache_dir / f"probe-{quick[:32]}.json")
            result = _result_from_json(data) if data is not None else None
        except (HostError, KeyError, TypeError, ValueError):
            return None
        if result is None or not _unchanged(result.identity):
            return None
        return result

    def _remember(self, quick: str, result: ProbeResult) -> None:
        """Where it cannot be written (a full disk) the next caller probes again."""
        with contextlib.suppress(HostError):
            self._files.make_folder(self._cache_dir)
            self._files.write_json(
                self._cache_dir / f"probe-{quick[:32]}.json", _result_to_json(result)
            )


def embedded_files() -> tuple[Path, ...]:
    """The files that the embedded server's code comes from: its launcher and the extension."""
    import importlib.util

    own = Path(__file__).parents[1] / "embedded.py"
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return (own,)
    folder = Path(spec.origin).parent
    libraries = [*folder.glob("*.so"), *folder.parent.glob("xllamacpp.libs/*.so*")]
    return (own, *sorted(libraries))


def _identity(paths: Sequence[Path]) -> EngineIdentity:
    """Of these files.

    Raises:
        EngineError: one cannot be read, or they are more than any engine has: their names come
            from what a program says.
    """
    if len(paths) > _MAX_COMPONENTS:
        raise EngineError(f"`{paths[0]}` maps {len(paths)} files, more than {_MAX_COMPONENTS}")
    left = _MAX_HASHED_BYTES
    hashed: list[Component] = []
    for path in paths:
        hashed.append(_component(path, at_most=left))
        left -= hashed[-1].size
    components = tuple(hashed)
    whole = hashlib.sha256()
    # By name and content, not by place: a kept copy is the same engine.
    for name, digest in sorted({(c.path.name, c.sha256) for c in components}):
        whole.update(f"{name}\0{digest}\n".encode())
    return EngineIdentity(whole.hexdigest(), components)


def changed_components(identity: EngineIdentity) -> tuple[str, ...]:
    """What of an engine is no longer the file that was hashed, in words; empty if all is the same.

    A file whose size and time did not change is taken as the same without reading it.
    """
    changes: list[str] = []
    for component in identity.components:
        try:
            status = component.path.stat()
        except OSError:
            changes.append(f"{component.path} is gone")
            continue
        if (status.st_size, status.st_mtime_ns) == (component.size, component.mtime_ns):
            continue
        if not _is_same(component.path, component.sha256):
            changes.append(f"{component.path} was replaced")
    return tuple(changes)


def _is_same(path: Path, sha256: str) -> bool:
    try:
        return _component(path).sha256 == sha256
    except EngineError:  # a folder stands there now, or something that may not be read
        return False


def _unchanged(identity: EngineIdentity) -> bool:
    for component in identity.components:
        try:
            status = component.path.stat()
        except OSError:
            return False
        if (status.st_size, status.st_mtime_ns) != (component.size, component.mtime_ns):
            return False
    return True


def _component(path: Path, *, at_most: int = _MAX_HASHED_BYTES) -> Component:
    """One file, hashed.

    The name may come from a hostile program's output: only a regular file is read, no more of it
    than it has, and not at all if it is larger than `at_most` (`/proc/kcore` is 128 TiB).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise EngineError(f"not a regular file: `{path}`")
            if status.st_size > at_most:
                raise EngineError(f"too large to be a part of an engine: `{path}`")
            digest = hashlib.sha256()
            left = status.st_size
            while left > 0 and (piece := os.read(descriptor, min(left, _CHUNK_BYTES))):
                digest.update(piece)
                left -= len(piece)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EngineError(f"cannot read `{path}`", cause=error.strerror) from error
    return Component(path, status.st_size, status.st_mtime_ns, digest.hexdigest())


def identity_to_json(identity: EngineIdentity) -> dict[str, Any]:
    """As stored with generations and probes."""
    components = [{**asdict(part), "path": str(part.path)} for part in identity.components]
    return {"sha256": identity.sha256, "components": components}


def identity_from_json(data: Mapping[str, Any]) -> EngineIdentity:
    """The inverse of `identity_to_json`.

    Raises:
        KeyError, TypeError, ValueError: it is no such record.
    """
    components = tuple(
        Component(Path(part["path"]), int(part["size"]), int(part["mtime_ns"]), str(part["sha256"]))
        for part in data["components"]
    )
    return EngineIdentity(str(data["sha256"]), components)


def _result_to_json(result: ProbeResult) -> dict[str, Any]:
    version = result.version
    return {
        "schema": SCHEMA,
        "identity": identity_to_json(result.identity),
        "version": None if version is None else asdict(version),
        "help_text": result.help_text,
    }


def _result_from_json(data: Mapping[str, Any]) -> ProbeResult | None:
    """Capabilities are read from the text again, so that a newer tunerd reads more from it."""
    if data["schema"] != SCHEMA:
        return None
    help_text = str(data["help_text"])
    return ProbeResult(
        identity=identity_from_json(data["identity"]),
        version=None if data["version"] is None else Version(**data["version"]),
        capabilities=read_capabilities(parse_help(help_text)),
        help_text=help_text,
    )


def changed_files(components: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """What of a recorded engine (paths with hashes) is no longer the file that it was, in words."""
    changes: list[str] = []
    for path, digest in components:
        if not Path(path).exists():
            changes.append(f"{path} is gone")
        elif not _is_same(Path(path), digest):
            changes.append(f"{path} was replaced")
    return tuple(changes)


def kept_folder(engines_dir: Path, sha256: str | None, files: Files) -> Path | None:
    """The kept copy of an engine by its identity; None if there is none."""
    if sha256 is None or not engines_dir.is_dir():
        return None
    for folder in sorted(engines_dir.iterdir()):
        try:
            data = files.read_json(folder / "identity.json")
        except HostError:
            continue
        if isinstance(data, dict) and data.get("sha256") == sha256:
            return folder
    return None
