"""Programs on this machine that may be engines, and who may change them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

EMBEDDED_PROGRAM = "tunerd-llama-server"
PROGRAM_NAME = "llama-server"
_BUILD_FOLDERS = (
    "llama.cpp/build/bin",
    "llama.cpp/build-*/bin",
    "llama.cpp/build*/bin",
    "ik_llama.cpp/build/bin",
    "ik_llama.cpp/build*/bin",
    "beellama.cpp/build/bin",
    "BeeLlama.cpp/build*/bin",
)


@dataclass(frozen=True, slots=True)
class Found:
    """A program that may be an engine, and how it was found."""

    program: Path
    found_by: str
    name: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    allow_writable: bool = False


def programs_in(folders: Iterable[Path], found_by: str) -> tuple[Found, ...]:
    """Programs with the name of an engine in these folders."""
    programs = (folder / PROGRAM_NAME for folder in folders)
    return tuple(Found(program, found_by) for program in programs if _is_program(program))


def own_server() -> Path | None:
    """The embedded server that is installed with this tunerd; None if there is none."""
    program = Path(sys.executable).parent / EMBEDDED_PROGRAM
    return program if _is_program(program) else None


def is_own_server(program: Path) -> bool:
    """Whether a program is this tunerd's embedded server, which runs with our rights.

    By its place: a program that only has its name is as foreign as any other.
    """
    own = own_server()
    return own is not None and real_path(program) == real_path(own)


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


def real_path(path: Path) -> Path:
    """Where its links lead; the path itself where that cannot be told."""
    try:
        return path.resolve(strict=True)
    except OSError:
        return path


def writable_by_others(program: Path) -> str | None:
    """Who else than root may change the program or a folder above it; None if nobody.

    A program that others may change would run with the service's rights, so in system mode it is
    refused unless the operator names it.
    """
    real = real_path(program)
    for path in (real, *real.parents):
        try:
            status = path.stat()
        except OSError as error:
            return f"`{path}` cannot be read: {error.strerror}"
        sticky = path.is_dir() and status.st_mode & stat.S_ISVTX
        if status.st_uid != 0:
            return f"`{path}` belongs to user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH and not sticky:
            return f"everybody may write `{path}`"
        if status.st_mode & stat.S_IWGRP and status.st_gid != 0 and not sticky:
            return f"group {status.st_gid} may write `{path}`"
    return None
